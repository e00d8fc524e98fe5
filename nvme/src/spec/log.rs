//! Log pages (NVMe Base 2.0 §5.16.1).

use super::status::Status;
use super::{u8_at, u16_at, u32_at, u64_at, u128_at};

/// Error Information (§5.16.1.2): 64 bytes for each entry.
pub const LOG_ERRORS: u8 = 0x01;
/// SMART / Health Information (§5.16.1.3): 512 bytes.
pub const LOG_HEALTH: u8 = 0x02;
/// Bytes of the health page.
pub const HEALTH_LEN: u16 = 512;
/// Bytes of one error entry.
pub const ERROR_LEN: u16 = 64;

/// SMART / Health Information (NVMe Base 2.0 figure 207). Counters are since the drive was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Critical Warning, one bit for each reason: spare below threshold, temperature, reliability degraded, read-only,
    /// backup of volatile memory failed, persistent memory read-only.
    pub critical_warning: u8,
    /// Composite temperature in kelvins.
    pub temperature_kelvin: u16,
    /// Spare capacity left, in percent.
    pub available_spare: u8,
    /// Below this share of spare an alarm is due, in percent.
    pub available_spare_threshold: u8,
    /// Wear in percent of the life that the maker expects; may exceed 100.
    pub percentage_used: u8,
    /// Data read by the host, in units of 512,000 bytes.
    pub data_units_read: u128,
    /// Data written by the host, in units of 512,000 bytes.
    pub data_units_written: u128,
    /// Hours with power.
    pub power_on_hours: u128,
    /// Power losses without a shutdown before.
    pub unsafe_shutdowns: u128,
    /// Unrecovered data integrity errors.
    pub media_errors: u128,
    /// Entries ever made in the error log.
    pub error_log_entries: u128,
}

impl Health {
    /// From the page.
    pub fn parse(data: &[u8]) -> Self {
        Self {
            critical_warning: u8_at(data, 0),
            temperature_kelvin: u16_at(data, 1),
            available_spare: u8_at(data, 3),
            available_spare_threshold: u8_at(data, 4),
            percentage_used: u8_at(data, 5),
            data_units_read: u128_at(data, 32),
            data_units_written: u128_at(data, 48),
            power_on_hours: u128_at(data, 128),
            unsafe_shutdowns: u128_at(data, 144),
            media_errors: u128_at(data, 160),
            error_log_entries: u128_at(data, 176),
        }
    }

    /// Composite temperature in degrees Celsius; `None` when it is not reported.
    pub fn temperature_celsius(&self) -> Option<i32> {
        (self.temperature_kelvin != 0).then(|| i32::from(self.temperature_kelvin) - 273)
    }
}

/// One entry of the error log (NVMe Base 2.0 figure 206).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorEntry {
    /// Which error since the drive was made.
    pub error_count: u64,
    /// The command's submission queue.
    pub sq_id: u16,
    /// The command.
    pub cid: u16,
    /// Its status.
    pub status: Status,
    /// The first logical block that failed, where that applies.
    pub lba: u64,
    /// The namespace, where that applies.
    pub nsid: u32,
}

impl ErrorEntry {
    /// From the entry; `None` for an empty one.
    pub fn parse(data: &[u8]) -> Option<Self> {
        let error_count = u64_at(data, 0);
        (error_count != 0).then(|| Self {
            error_count,
            sq_id: u16_at(data, 8),
            cid: u16_at(data, 10),
            status: Status(u16_at(data, 12) >> 1),
            lba: u64_at(data, 16),
            nsid: u32_at(data, 24),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_is_read_from_its_offsets() {
        let mut page = [0; 512];
        page[..6].copy_from_slice(&[4, 0x37, 0x01, 90, 10, 101]);
        page[32] = 7;
        page[63] = 1;
        page[144] = 3;
        page[160] = 2;
        page[176] = 5;
        let health = Health::parse(&page);
        assert_eq!(health.temperature_celsius(), Some(38));
        assert_eq!((health.available_spare, health.percentage_used, health.critical_warning), (90, 101, 4));
        assert_eq!(health.data_units_written, 1 << 120);
        assert_eq!((health.unsafe_shutdowns, health.media_errors, health.error_log_entries), (3, 2, 5));
        assert_eq!(Health::parse(&[]).temperature_celsius(), None);
    }

    #[test]
    fn error_entries_are_read_and_empty_ones_skipped() {
        let mut entry = [0; 64];
        assert_eq!(ErrorEntry::parse(&entry), None);
        entry[0] = 9;
        entry[8] = 2;
        entry[10..12].copy_from_slice(&[0x34, 0x12]);
        entry[12..14].copy_from_slice(&[0x02, 0x05]);
        entry[16] = 77;
        entry[24] = 1;
        let parsed = ErrorEntry::parse(&entry).unwrap();
        assert_eq!((parsed.sq_id, parsed.cid, parsed.lba, parsed.nsid), (2, 0x1234, 77, 1));
        assert_eq!(parsed.status, Status::new(2, 0x81));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_a_page(data: Vec<u8>) {
            let _ = Health::parse(&data).temperature_celsius();
            let _ = ErrorEntry::parse(&data);
        }
    }
}
