//! The NVMe words: registers, commands, completions and data structures, as bytes.
//!
//! Citations name the NVM Express Base Specification 2.0 ("NVMe Base 2.0"), the NVM Command Set Specification 1.0
//! ("NVM 1.0") and the PCIe Transport Specification 1.0 ("PCIe 1.0"). Only what the driver uses is here. Everything that
//! comes from a controller is decoded by total functions: no value makes them panic.

pub mod command;
pub mod completion;
pub mod feature;
pub mod identify;
pub mod log;
pub mod registers;
pub mod status;

// Commands and completions are laid out as the fields of `repr(C)` structs, which is only right on such machines.
const _: () = assert!(cfg!(target_endian = "little"), "NVMe is little endian");

/// Memory page that the driver works with, in bytes: CC.MPS = 0. Every controller that supports 4 KiB pages has
/// CAP.MPSMIN = 0.
pub const PAGE_LEN: usize = 4096;

/// `N` bytes of a data structure from `at` on; zeroes past its end, which read as "not reported" in all of them.
fn bytes<const N: usize>(data: &[u8], at: usize) -> [u8; N] {
    let part = data.get(at..at.saturating_add(N)).and_then(|part| part.try_into().ok());
    part.unwrap_or([0; N])
}

fn u8_at(data: &[u8], at: usize) -> u8 {
    bytes::<1>(data, at)[0]
}

fn u16_at(data: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes(data, at))
}

fn u32_at(data: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes(data, at))
}

fn u64_at(data: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes(data, at))
}

fn u128_at(data: &[u8], at: usize) -> u128 {
    u128::from_le_bytes(bytes(data, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_past_the_end_reads_as_zero() {
        assert_eq!(u16_at(&[1, 2, 3], 1), 0x0302);
        assert_eq!(u16_at(&[1, 2, 3], 2), 0);
        assert_eq!(u64_at(&[], usize::MAX), 0);
    }
}
