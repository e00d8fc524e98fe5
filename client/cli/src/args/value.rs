//! Values of options: what is allowed, and what is said of others.

use loligo_config::file::PollMode;
use loligo_config::id::ClusterId;
use loligo_config::pool::FailureDomain;
use std::str::FromStr;

/// Bytes, as `4096`, `4K`, `4KiB`, `1G`: powers of 1024 as storage tools count, also for `4KB` and the like.
pub fn size(text: &str) -> Result<u64, String> {
    size_in(text, 1)
}

/// As [`size`]; a number alone counts MiB, as `rbd --size` does.
pub fn size_mib(text: &str) -> Result<u64, String> {
    size_in(text, 1 << 20)
}

fn size_in(text: &str, unit_alone: u64) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size: write a whole number and K, M, G, T or P, such as 4G");
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.trim().to_ascii_uppercase();
    let factor = match unit.strip_suffix("IB").or_else(|| unit.strip_suffix('B')).unwrap_or(&unit) {
        "" if unit == "B" => 1,
        "" if unit.is_empty() => unit_alone,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        "P" => 1 << 50,
        _ => return Err(wrong()),
    };
    number.checked_mul(factor).ok_or_else(|| format!("{text} is too large"))
}

/// What one request may have; the end of the image is checked against it where the image is known.
pub fn io_size(text: &str) -> Result<u64, String> {
    let max = loligo_client::IO_LEN_MAX;
    let len = size(text)?;
    let allowed = format!("a request has 1 byte to {}M", max >> 20);
    if (1..=max).contains(&len) { Ok(len) } else { Err(allowed) }
}

pub fn object_order(text: &str) -> Result<u8, String> {
    let len = size(text)?;
    let order = len.trailing_zeros() as u8; // At most 64.
    let range = loligo_config::limits::OBJECT_ORDER_MIN..=loligo_config::limits::OBJECT_ORDER_MAX;
    if !len.is_power_of_two() || !range.contains(&order) {
        return Err("objects have a power of two of bytes, from 4K to 32M".to_owned());
    }
    Ok(order)
}

pub fn poll_mode(text: &str) -> Result<PollMode, String> {
    let modes = [PollMode::Busy, PollMode::Adaptive, PollMode::Park];
    modes
        .into_iter()
        .find(|mode| mode.as_str() == text)
        .ok_or_else(|| "write busy, adaptive or park".to_owned())
}

pub fn failure_domain(text: &str) -> Result<FailureDomain, String> {
    match text {
        "osd" => Ok(FailureDomain::Osd),
        "host" => Ok(FailureDomain::Host),
        "rack" => Ok(FailureDomain::Rack),
        _ => Err("write osd, host or rack".to_owned()),
    }
}

pub fn cluster_id(text: &str) -> Result<ClusterId, String> {
    let uuid = uuid::Uuid::from_str(text);
    uuid.map(ClusterId).map_err(|_| "a cluster's id is a UUID: `loligo status` shows it".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024_and_refuse_what_they_do_not_know() {
        let cases = [
            ("0", 0),
            ("4096", 4096),
            ("4K", 4096),
            ("4k", 4096),
            ("4KiB", 4096),
            ("3 G", 3 << 30),
            ("7B", 7),
        ];
        for (text, bytes) in cases {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!(size_mib("100"), Ok(100 << 20));
        assert_eq!(size_mib("4G"), Ok(4 << 30));
        for text in ["", "G", "4X", "-1", "1.5G", "99999999999999999999", "16384P"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn requests_of_bench_have_a_length_that_a_client_takes() {
        assert_eq!(io_size("4K"), Ok(4096));
        assert_eq!(io_size("16M"), Ok(16 << 20));
        for text in ["0", "17M", "16777217"] {
            assert_eq!(io_size(text), Err("a request has 1 byte to 16M".to_owned()), "{text}");
        }
    }

    #[test]
    fn object_sizes_are_powers_of_two_from_4k_to_32m() {
        assert_eq!(object_order("4K"), Ok(12));
        assert_eq!(object_order("32M"), Ok(25));
        for text in ["0", "2K", "64M", "3M"] {
            assert!(object_order(text).is_err(), "{text}");
        }
    }
}
