//! The calls to VFIO (Linux `include/uapi/linux/vfio.h`), each with a safe face.
#![allow(unsafe_code)]

use crate::queue::DmaRange;
use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_BASE, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_UNMAP_FLAG_ALL,
    VFIO_GROUP_FLAGS_VIABLE, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, VFIO_IRQ_SET_ACTION_TRIGGER,
    VFIO_IRQ_SET_DATA_EVENTFD, VFIO_TYPE, VFIO_TYPE1v2_IOMMU, vfio_device_info, vfio_group_status,
    vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap, vfio_irq_info, vfio_region_info,
};

/// `_IO(VFIO_TYPE, VFIO_BASE + number)`: all of VFIO's requests are without size and direction.
const fn request(number: u32) -> libc::c_ulong {
    ((VFIO_TYPE as u32) << 8 | (VFIO_BASE + number)) as libc::c_ulong
}

const GET_API_VERSION: libc::c_ulong = request(0);
const SET_IOMMU: libc::c_ulong = request(2);
const GROUP_GET_STATUS: libc::c_ulong = request(3);
const GROUP_SET_CONTAINER: libc::c_ulong = request(4);
const GROUP_GET_DEVICE_FD: libc::c_ulong = request(6);
const DEVICE_GET_INFO: libc::c_ulong = request(7);
const DEVICE_GET_REGION_INFO: libc::c_ulong = request(8);
const DEVICE_GET_IRQ_INFO: libc::c_ulong = request(9);
const DEVICE_SET_IRQS: libc::c_ulong = request(10);
const IOMMU_GET_INFO: libc::c_ulong = request(12);
const IOMMU_MAP_DMA: libc::c_ulong = request(13);
const IOMMU_UNMAP_DMA: libc::c_ulong = request(14);

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// # Safety
/// `T` is the structure that this request reads and writes, with what it points to.
unsafe fn with<T>(file: BorrowedFd<'_>, request: libc::c_ulong, argument: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the caller answers for the type; the kernel uses it during the call only.
    check(unsafe { libc::ioctl(file.as_raw_fd(), request, std::ptr::from_mut(argument)) })
}

const fn argsz<T>() -> u32 {
    size_of::<T>() as u32
}

/// Whether the container speaks the version that the bindings are of.
pub(super) fn speaks_our_version(container: BorrowedFd<'_>) -> bool {
    // SAFETY: the request takes no argument.
    let version = unsafe { libc::ioctl(container.as_raw_fd(), GET_API_VERSION) };
    version == VFIO_API_VERSION as i32
}

/// Whether all devices of the group are bound to VFIO or to nothing.
pub(super) fn is_viable(group: BorrowedFd<'_>) -> io::Result<bool> {
    let mut status = vfio_group_status { argsz: argsz::<vfio_group_status>(), flags: 0 };
    // SAFETY: the request's own structure.
    unsafe { with(group, GROUP_GET_STATUS, &mut status)? };
    Ok(status.flags & VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// Puts the group into the container.
pub(super) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let mut descriptor = container.as_raw_fd();
    // SAFETY: the request reads one descriptor.
    unsafe { with(group, GROUP_SET_CONTAINER, &mut descriptor).map(drop) }
}

/// Makes the container translate for the devices in it.
pub(super) fn set_iommu(container: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the request takes a number.
    check(unsafe { libc::ioctl(container.as_raw_fd(), SET_IOMMU, libc::c_ulong::from(VFIO_TYPE1v2_IOMMU)) })
        .map(drop)
}

/// The device of this name in the group.
pub(super) fn device(group: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: the request reads a string that ends with a zero.
    let descriptor = check(unsafe { libc::ioctl(group.as_raw_fd(), GROUP_GET_DEVICE_FD, name.as_ptr()) })?;
    // SAFETY: a new descriptor, owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// How many regions and interrupt indices the device has.
pub(super) fn counts(device: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let mut info = vfio_device_info { argsz: argsz::<vfio_device_info>(), ..Default::default() };
    // SAFETY: the request's own structure; `argsz` says how much of it there is.
    unsafe { with(device, DEVICE_GET_INFO, &mut info)? };
    Ok((info.num_regions, info.num_irqs))
}

/// Where a region is in the device's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RegionPlace {
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// Where region `index` is.
pub(super) fn region(device: BorrowedFd<'_>, index: u32) -> io::Result<RegionPlace> {
    let mut info = vfio_region_info { argsz: argsz::<vfio_region_info>(), index, ..Default::default() };
    // SAFETY: as in `counts`.
    unsafe { with(device, DEVICE_GET_REGION_INFO, &mut info)? };
    Ok(RegionPlace { offset: info.offset, len: info.size })
}

/// Vectors of an interrupt index.
pub(super) fn vectors(device: BorrowedFd<'_>, index: u32) -> io::Result<u32> {
    let mut info = vfio_irq_info { argsz: argsz::<vfio_irq_info>(), index, ..Default::default() };
    // SAFETY: as in `counts`.
    unsafe { with(device, DEVICE_GET_IRQ_INFO, &mut info)? };
    Ok(info.count)
}

/// Most vectors that `set_events` takes.
pub(super) const EVENTS_MAX: usize = 256;

#[repr(C)]
struct IrqSet {
    argsz: u32,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    descriptors: [i32; EVENTS_MAX],
}
const _: () = assert!(std::mem::offset_of!(IrqSet, descriptors) == 20);

/// Signals an eventfd for each vector of an interrupt index; `None`: that vector does nothing.
pub(super) fn set_events(
    device: BorrowedFd<'_>,
    index: u32,
    events: &[Option<BorrowedFd<'_>>],
) -> io::Result<()> {
    assert!(events.len() <= EVENTS_MAX, "at most {EVENTS_MAX} vectors");
    let mut descriptors = [-1; EVENTS_MAX];
    for (descriptor, event) in descriptors.iter_mut().zip(events) {
        *descriptor = event.map_or(-1, |event| event.as_raw_fd());
    }
    let count = events.len() as u32;
    let mut set = IrqSet {
        argsz: 20 + 4 * count,
        flags: VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER,
        index,
        start: 0,
        count,
        descriptors,
    };
    // SAFETY: laid out as `vfio_irq_set` (its data begin at 20, as asserted), with as many descriptors as `count`.
    unsafe { with(device, DEVICE_SET_IRQS, &mut set).map(drop) }
}

/// Bytes for the answer of `IOMMU_GET_INFO`: room for some hundred ranges.
const INFO_LEN: usize = 4096;

#[repr(C, align(8))]
struct InfoBytes([u8; INFO_LEN]);

/// The addresses that the IOMMU can translate, from first to last each; `None` if the kernel does not say.
pub(super) fn iova_ranges(container: BorrowedFd<'_>) -> io::Result<Option<Vec<(u64, u64)>>> {
    let mut info = InfoBytes([0; INFO_LEN]);
    info.0[..4].copy_from_slice(&(INFO_LEN as u32).to_ne_bytes());
    // SAFETY: the request writes at most `argsz` bytes, which is what there is; the alignment is the structure's.
    unsafe { with(container, IOMMU_GET_INFO, &mut info)? };
    Ok(parse_ranges(&info.0))
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Finds the list of ranges in a `vfio_iommu_type1_info`: the chain of capabilities begins at the offset in its dword at
/// 16; each has id (u16), version (u16) and the next one's offset.
fn parse_ranges(info: &[u8]) -> Option<Vec<(u64, u64)>> {
    let mut at = u32::from_ne_bytes(word(info, 16)?) as usize;
    // A chain has no loop, but it is input.
    for _ in 0..16 {
        if at == 0 {
            return None;
        }
        if u32::from(u16::from_ne_bytes(word(info, at)?)) == VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE {
            let count = u32::from_ne_bytes(word(info, at + 8)?) as usize;
            let range = |index: usize| {
                let start = u64::from_ne_bytes(word(info, at + 16 + 16 * index)?);
                Some((start, u64::from_ne_bytes(word(info, at + 24 + 16 * index)?)))
            };
            return Some((0..count).map_while(range).collect());
        }
        at = u32::from_ne_bytes(word(info, at + 4)?) as usize;
    }
    None
}

/// Pins memory and lets the device reach it at `iova`.
///
/// # Safety
/// As [`crate::bus::Bus::map`].
pub(super) unsafe fn map(container: BorrowedFd<'_>, range: DmaRange, iova: u64) -> io::Result<()> {
    let mut map = vfio_iommu_type1_dma_map {
        argsz: argsz::<vfio_iommu_type1_dma_map>(),
        flags: VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
        vaddr: range.base as u64,
        iova,
        size: range.len as u64,
    };
    // SAFETY: the request's own structure; the caller answers for the memory.
    unsafe { with(container, IOMMU_MAP_DMA, &mut map).map(drop) }
}

/// Ends the device's access to a range.
pub(super) fn unmap(container: BorrowedFd<'_>, iova: u64, len: u64) -> io::Result<()> {
    unmap_with(container, 0, iova, len)
}

/// Ends the device's access to all memory (kernel 5.12).
pub(super) fn unmap_all(container: BorrowedFd<'_>) -> io::Result<()> {
    unmap_with(container, VFIO_DMA_UNMAP_FLAG_ALL, 0, 0)
}

fn unmap_with(container: BorrowedFd<'_>, flags: u32, iova: u64, size: u64) -> io::Result<()> {
    let mut unmap = vfio_iommu_type1_dma_unmap {
        argsz: argsz::<vfio_iommu_type1_dma_unmap>(),
        flags,
        iova,
        size,
        ..Default::default()
    };
    // SAFETY: the request's own structure, without the bitmap that other flags would ask for.
    unsafe { with(container, IOMMU_UNMAP_DMA, &mut unmap).map(drop) }
}

/// A new eventfd. io_uring waits only for one that blocks; one that does not can be looked at.
pub(super) fn eventfd(blocking: bool) -> io::Result<OwnedFd> {
    let flags = if blocking { 0 } else { libc::EFD_NONBLOCK };
    // SAFETY: the call takes no memory.
    let descriptor = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | flags) })?;
    // SAFETY: a new descriptor, owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_found_in_the_chain() {
        let mut info = vec![0u8; 200];
        info[16] = 32;
        // A capability of another kind, then the ranges.
        info[32] = 9;
        info[36] = 64;
        info[64] = 1;
        info[72] = 2;
        info[80..88].copy_from_slice(&0u64.to_ne_bytes());
        info[88..96].copy_from_slice(&0xfedf_ffffu64.to_ne_bytes());
        info[96..104].copy_from_slice(&0xfef0_0000u64.to_ne_bytes());
        info[104..112].copy_from_slice(&0x7f_ffff_ffffu64.to_ne_bytes());
        assert_eq!(parse_ranges(&info), Some(vec![(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)]));
        info[36] = 32;
        assert_eq!(parse_ranges(&info), None, "a loop ends");
        assert_eq!(parse_ranges(&[0; 20]), None);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_an_answer(info: Vec<u8>) {
            let _ = parse_ranges(&info);
        }
    }
}
