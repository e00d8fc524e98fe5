//! What the driver needs of the machine: one controller's registers, and memory that the controller can reach.
//!
//! [`crate::vfio`] implements it for hardware, [`crate::model::controller`] for the software controller. The driver
//! names neither.

use crate::queue::{DmaRange, Region};
use std::io;

/// A controller on its bus. All methods can be called from every thread that the implementation can be sent to.
pub trait Bus {
    /// Reads a 32-bit register of BAR 0. All ones when the device is gone.
    fn read32(&self, offset: u32) -> u32;

    /// Reads a 64-bit register of BAR 0.
    fn read64(&self, offset: u32) -> u64;

    /// Writes a 32-bit register of BAR 0. Memory writes made before are visible to the device when it sees this one.
    fn write32(&self, offset: u32, value: u32);

    /// Writes a 64-bit register of BAR 0.
    fn write64(&self, offset: u32, value: u64);

    /// Lets the device reach memory, and returns the address by which it does (IOVA). The address is a multiple of 4 KiB.
    ///
    /// # Errors
    /// When there is no address left, or the system refuses.
    ///
    /// # Safety
    /// The memory stays mapped in this process until [`Bus::unmap`] was called for it or the bus is dropped, and what
    /// the device may write is not behind a reference meanwhile.
    #[allow(unsafe_code, reason = "the caller answers for the memory; there is no unsafe code here")]
    unsafe fn map(&self, memory: DmaRange) -> Result<u64, BusError>;

    /// Ends the device's access to memory that was mapped at this address with this length.
    fn unmap(&self, iova: u64, len: usize);

    /// Lets the device use the bus by itself (bus master), before it is enabled.
    ///
    /// # Errors
    /// When the system refuses.
    fn connect(&self) -> Result<(), BusError>;

    /// Cuts the device off: when this returns, nothing that the device does reaches memory any more, whatever state it
    /// is in, until the next [`Bus::connect`].
    ///
    /// # Panics
    /// If that cannot be guaranteed: memory that a device may still write must not be used again.
    fn isolate(&self);

    /// Whether the system wants the device back (it is to be unplugged or given to another driver).
    fn is_wanted_back(&self) -> bool {
        false
    }

    /// Interrupt vectors for completion queues that [`Bus::vector_for`] can hand out.
    fn vectors(&self) -> u16 {
        0
    }

    /// The interrupt vector of an I/O queue; `None`: polled.
    fn vector_for(&self, queue: u16) -> Option<u16> {
        (queue < self.vectors()).then_some(queue)
    }
}

/// Why memory or the device is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// No memory for queues.
    #[error("no {len} bytes of memory for the controller's queues: {source}")]
    NoMemory {
        /// Bytes asked for.
        len: usize,
        /// The system's reason.
        source: io::Error,
    },
    /// The system refuses to let the device reach memory.
    #[error("the device may not reach {len} bytes of memory: {source}{}", lock_hint(.source))]
    Map {
        /// Bytes asked for.
        len: usize,
        /// The system's reason.
        source: io::Error,
    },
    /// No addresses left that both the device and the IOMMU can use.
    #[error("no I/O addresses left for {len} bytes")]
    NoAddress {
        /// Bytes asked for.
        len: usize,
    },
    /// The device does not answer to what it needs on the bus.
    #[error("the device cannot be used on its bus: {source}")]
    Device {
        /// The system's reason.
        source: io::Error,
    },
}

fn lock_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOMEM) => {
            " (memory for devices is locked: raise the limit with `ulimit -l unlimited`, or LimitMEMLOCK=infinity in the service)"
        }
        _ => "",
    }
}

/// Memory shared with the device for the life of the driver: allocates and maps it.
///
/// # Errors
/// As [`Bus::map`], and when there is no memory.
pub(crate) fn share<B: Bus>(bus: &B, len: usize) -> Result<Region, BusError> {
    let mut region = Region::new(len).map_err(|source| BusError::NoMemory { len, source })?;
    let iova = map_region(bus, &region)?;
    region.set_iova(iova);
    Ok(region)
}

#[allow(unsafe_code)]
fn map_region<B: Bus>(bus: &B, region: &Region) -> Result<u64, BusError> {
    // SAFETY: a `Region` is never behind a reference to its bytes, all access is by volatile copies; its owner keeps it
    // until the device was isolated and `unmap` called (`controller::Shared`, `namespace::Namespace`).
    unsafe { bus.map(region.range()) }
}
