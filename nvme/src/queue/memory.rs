//! Memory that a device reads and writes by itself. Never behind a reference: bounded volatile copies only.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::ptr::NonNull;

const HUGE_PAGE_LEN: usize = 2 << 20;

/// A range of this process's memory for a device. It owns nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaRange {
    /// The first byte.
    pub base: *const u8,
    /// Bytes; a multiple of 4 KiB.
    pub len: usize,
}

/// Zeroed memory for queues and lists, page aligned, with the address by which the device knows it.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    iova: u64,
}

// SAFETY: a region owns its mapping, which is not bound to a thread; all access is by volatile copies of at most eight
// bytes, and which thread uses which part is the rings' matter: each part has one owner.
unsafe impl Send for Region {}
// SAFETY: as for `Send`; concurrent access from two threads never happens to the same ring (see `controller::Shared`),
// and the device, which does write concurrently, is what the volatile access is for.
unsafe impl Sync for Region {}

impl Region {
    /// `len` bytes of zeroes, rounded up to pages: huge ones if it is large enough and there are any, else locked
    /// normal ones.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(len: usize) -> io::Result<Self> {
        let huge =
            (len >= HUGE_PAGE_LEN / 2).then(|| map(len.next_multiple_of(HUGE_PAGE_LEN), libc::MAP_HUGETLB));
        if let Some(Ok(region)) = huge {
            return Ok(region);
        }
        map(len.max(1).next_multiple_of(4096), libc::MAP_POPULATE)
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none; it always has some.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it is, for [`crate::bus::Bus::map`].
    pub fn range(&self) -> DmaRange {
        DmaRange { base: self.base.as_ptr().cast_const(), len: self.len }
    }

    /// Says by which address the device knows it.
    pub(crate) fn set_iova(&mut self, iova: u64) {
        self.iova = iova;
    }

    /// The device's address of a byte.
    pub fn iova(&self, offset: usize) -> u64 {
        debug_assert!(offset < self.len);
        self.iova + offset as u64
    }

    fn at<T>(&self, offset: usize) -> *mut T {
        let size = size_of::<T>();
        assert!(offset.is_multiple_of(size) && offset <= self.len - size, "{offset} is within the region");
        // SAFETY: just checked to lie within the mapping.
        unsafe { self.base.as_ptr().add(offset).cast() }
    }

    /// Reads eight bytes.
    pub fn read_u64(&self, offset: usize) -> u64 {
        // SAFETY: `at` gives an aligned address within the mapping, which lives as long as `self`; any bits are a u64.
        unsafe { self.at::<u64>(offset).read_volatile() }
    }

    /// Writes eight bytes.
    pub fn write_u64(&self, offset: usize, value: u64) {
        // SAFETY: as for `read_u64`, and the mapping is writable.
        unsafe { self.at::<u64>(offset).write_volatile(value) }
    }

    /// Writes some words of eight bytes, one behind the other.
    pub fn write_words<const N: usize>(&self, offset: usize, words: [u64; N]) {
        assert!(offset.is_multiple_of(8) && offset + 8 * N <= self.len, "{offset} is within the region");
        for (index, word) in words.into_iter().enumerate() {
            // SAFETY: just checked to lie within the mapping and to be aligned.
            unsafe { self.base.as_ptr().add(offset + 8 * index).cast::<u64>().write_volatile(word) };
        }
    }

    /// Reads four bytes.
    pub fn read_u32(&self, offset: usize) -> u32 {
        // SAFETY: as for `read_u64`.
        unsafe { self.at::<u32>(offset).read_volatile() }
    }

    /// Writes four bytes.
    pub fn write_u32(&self, offset: usize, value: u32) {
        // SAFETY: as for `write_u64`.
        unsafe { self.at::<u32>(offset).write_volatile(value) }
    }

    /// Copies out bytes; offset and length are multiples of eight.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        for (index, chunk) in into.chunks_exact_mut(8).enumerate() {
            chunk.copy_from_slice(&self.read_u64(offset + 8 * index).to_ne_bytes());
        }
    }

    /// Zeroes bytes; offset and length are multiples of eight.
    pub fn zero(&self, offset: usize, len: usize) {
        for at in (offset..offset + len).step_by(8) {
            self.write_u64(at, 0);
        }
    }
}

fn map(len: usize, extra: libc::c_int) -> io::Result<Region> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra;
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
    let base =
        unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    match NonNull::new(base.cast::<u8>()) {
        Some(start) if base != libc::MAP_FAILED => Ok(Region { base: start, len, iova: 0 }),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; nothing refers to it, since its bytes are never lent.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The memory that a device in software reaches, by the device's addresses: what an IOMMU is to hardware.
#[derive(Debug, Default)]
pub struct DmaMap {
    ranges: BTreeMap<u64, DmaRange>,
}

/// The device used an address that nothing is mapped at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaFault {
    /// The address.
    pub iova: u64,
}

impl DmaMap {
    /// Maps a range.
    ///
    /// # Safety
    /// As [`crate::bus::Bus::map`].
    pub unsafe fn insert(&mut self, iova: u64, range: DmaRange) {
        self.ranges.insert(iova, range);
    }

    /// Ends a mapping. `false` if there is none at this address.
    pub fn remove(&mut self, iova: u64) -> bool {
        self.ranges.remove(&iova).is_some()
    }

    /// How many ranges are mapped.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    fn resolve(&self, iova: u64, len: usize) -> Result<*mut u8, DmaFault> {
        let fault = DmaFault { iova };
        let (start, range) = self.ranges.range(..=iova).next_back().ok_or(fault)?;
        let offset = usize::try_from(iova - start).map_err(|_| fault)?;
        let end = offset.checked_add(len).ok_or(fault)?;
        if end > range.len {
            return Err(fault);
        }
        // SAFETY: within the range, which is mapped memory by the contract of `insert`.
        Ok(unsafe { range.base.cast_mut().add(offset) })
    }

    /// The device reads memory.
    ///
    /// # Errors
    /// A fault, with nothing read.
    pub fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), DmaFault> {
        let from = self.resolve(iova, into.len())?;
        // SAFETY: `resolve` has checked the range; `into` is other memory, since mapped memory is behind no reference.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// The device writes memory.
    ///
    /// # Errors
    /// A fault, with nothing written.
    pub fn write(&self, iova: u64, from: &[u8]) -> Result<(), DmaFault> {
        let into = self.resolve(iova, from.len())?;
        // SAFETY: as for `read`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
        Ok(())
    }

    /// The device writes one eight-byte word at once, as the second half of a completion must be.
    ///
    /// # Errors
    /// A fault, with nothing written.
    pub fn write_word(&self, iova: u64, word: u64) -> Result<(), DmaFault> {
        let into = self.resolve(iova, 8)?;
        // SAFETY: as for `read`; the device's structures are aligned to their words, which is checked here.
        unsafe {
            assert!(into.cast::<u64>().is_aligned(), "a completion is aligned");
            into.cast::<u64>().write_volatile(word);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_zeroed_and_keeps_what_is_written() {
        let region = Region::new(5000).unwrap();
        assert_eq!((region.len(), region.read_u64(8184)), (8192, 0));
        region.write_u64(8, 0x1122_3344_5566_7788);
        assert_eq!(region.read_u32(12), 0x1122_3344);
        region.write_u32(8, 1);
        let mut bytes = [0; 16];
        region.copy_out(0, &mut bytes);
        assert_eq!(bytes[8..], [1, 0, 0, 0, 0x44, 0x33, 0x22, 0x11]);
        region.zero(8, 8);
        assert_eq!(region.read_u64(8), 0);
    }

    #[test]
    #[should_panic(expected = "is within the region")]
    fn a_region_ends() {
        Region::new(4096).unwrap().read_u64(4096);
    }

    #[test]
    fn a_map_resolves_what_is_mapped_and_faults_beyond() {
        let region = Region::new(8192).unwrap();
        let mut map = DmaMap::default();
        // SAFETY: the region outlives the map.
        unsafe { map.insert(0x10_0000, region.range()) };
        map.write(0x10_0ff8, &[7; 16]).unwrap();
        assert_eq!(region.read_u64(0x1000), 0x0707_0707_0707_0707);
        let mut bytes = [0; 8];
        map.read(0x10_1000, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 8]);
        assert_eq!(map.write(0x10_1ffc, &[0; 8]), Err(DmaFault { iova: 0x10_1ffc }));
        assert_eq!(map.read(0xf_ffff, &mut bytes), Err(DmaFault { iova: 0xf_ffff }));
        assert_eq!(map.read(u64::MAX, &mut bytes), Err(DmaFault { iova: u64::MAX }));
        assert!(map.remove(0x10_0000) && !map.remove(0x10_0000));
        assert!(map.read(0x10_0000, &mut bytes).is_err());
    }
}
