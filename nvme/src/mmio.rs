//! A controller's registers, mapped.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// BAR 0 of a device. Access is volatile, aligned and within bounds.
///
/// What lies behind is the device's own: no Rust object is there, so any thread may read and write. A device that was
/// pulled out reads as all ones.
#[derive(Debug)]
pub struct Bar {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is not bound to a thread, and registers are only accessed by single volatile loads and stores,
// which the hardware orders.
unsafe impl Send for Bar {}
// SAFETY: as for `Send`.
unsafe impl Sync for Bar {}

impl Bar {
    /// Maps `len` bytes of a device's file from `offset` on.
    ///
    /// # Errors
    /// As the system refuses it.
    pub fn map(device: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let offset =
            libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, device.as_raw_fd(), offset)
        };
        match NonNull::new(base.cast::<u8>()) {
            Some(start) if base != libc::MAP_FAILED => Ok(Self { base: start, len }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn at<T>(&self, offset: u32) -> *mut T {
        let (offset, size) = (offset as usize, size_of::<T>());
        assert!(offset.is_multiple_of(size), "registers are aligned");
        assert!(offset <= self.len - size, "a register at {offset:#x} lies in the BAR");
        // SAFETY: within the mapping, as just checked.
        unsafe { self.base.as_ptr().add(offset).cast() }
    }

    /// Reads 32 bits.
    pub fn read32(&self, offset: u32) -> u32 {
        // SAFETY: `at` gives an aligned address within the mapping, which lives as long as `self`.
        unsafe { self.at::<u32>(offset).read_volatile() }
    }

    /// Reads 64 bits, in two halves: some controllers cannot do it at once (NVMe Base 2.0 §3.1.3 allows both).
    pub fn read64(&self, offset: u32) -> u64 {
        u64::from(self.read32(offset)) | u64::from(self.read32(offset + 4)) << 32
    }

    /// Writes 32 bits.
    pub fn write32(&self, offset: u32, value: u32) {
        // SAFETY: as for `read32`, and the mapping is writable.
        unsafe { self.at::<u32>(offset).write_volatile(value) }
    }

    /// Writes 64 bits, the lower half first.
    pub fn write64(&self, offset: u32, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset + 4, (value >> 32) as u32);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and no reference to it exists.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn registers_are_read_and_written_in_halves() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let bar = Bar::map(file.as_fd(), 4096, 4096).unwrap();
        bar.write64(8, 0x1122_3344_5566_7788);
        assert_eq!(
            (bar.read32(8), bar.read32(12), bar.read64(8)),
            (0x5566_7788, 0x1122_3344, 0x1122_3344_5566_7788)
        );
        bar.write32(4092, 7);
        assert_eq!(bar.read32(4092), 7);
        assert!(Bar::map(file.as_fd(), 1, 4096).is_err());
    }

    #[test]
    #[should_panic(expected = "lies in the BAR")]
    fn there_is_nothing_beyond_the_bar() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        Bar::map(file.as_fd(), 0, 4096).unwrap().read32(4096);
    }
}
