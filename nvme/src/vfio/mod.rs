//! NVMe controllers given to user space by VFIO: the driver's bus on hardware.
//!
//! One container, group and device for each controller: its memory is reachable by this device alone. An IOMMU is
//! needed; the mode without one is not offered.
#![allow(clippy::disallowed_methods, reason = "a back end: the hardware behind the seam")]

mod device;
mod ioctl;
mod iova;
pub mod pci;

pub use device::VfioDevice;
pub use pci::PciAddress;

use crate::bus::{Bus, BusError};
use crate::controller::{Controller, ControllerError, ControllerOptions};
use crate::mmio::Bar;
use crate::queue::DmaRange;
use ioctl::RegionPlace;
use iova::IovaSpace;
use loligo_reactor::env::Clock;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
};

/// Offset of the command register in configuration space, and its bits (PCI Local Bus 3.0 §6.2.2).
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// Smallest BAR 0: the controller's registers and the admin queue's doorbells.
const BAR_LEN_MIN: u64 = 0x2000;

/// Why a device cannot be had. Each says what mends it.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// There is no such device.
    #[error("there is no PCI device {address}: `lspci -Dd ::0108` lists the controllers of this host")]
    NoDevice {
        /// The address.
        address: PciAddress,
    },
    /// It is something else.
    #[error("{address} is not an NVMe controller: `lspci -Dd ::0108` lists those of this host")]
    NotNvme {
        /// The address.
        address: PciAddress,
    },
    /// Another driver has it.
    #[error(
        "{address} is with the driver {}: when nothing uses it, give it to user space with `echo vfio-pci \
         >/sys/bus/pci/devices/{address}/driver_override; echo {address} \
         >/sys/bus/pci/devices/{address}/driver/unbind; echo {address} >/sys/bus/pci/drivers_probe`",
        driver.as_deref().unwrap_or("(none)")
    )]
    NotBound {
        /// The address.
        address: PciAddress,
        /// Which one.
        driver: Option<String>,
    },
    /// The kernel has no VFIO.
    #[error("there is no {}: load the module with `modprobe vfio-pci`", path.display())]
    NoVfio {
        /// What was looked for.
        path: PathBuf,
    },
    /// No IOMMU.
    #[error(
        "{address} is in no IOMMU group: enable the IOMMU in the firmware and boot with intel_iommu=on or amd_iommu=on"
    )]
    NoIommu {
        /// The address.
        address: PciAddress,
    },
    /// No rights.
    #[error("no rights to {}: run as root, or `chown $USER {}`", path.display(), path.display())]
    NoRights {
        /// To what.
        path: PathBuf,
    },
    /// Another process has it.
    #[error("{address} is in use: another process has {}", path.display())]
    InUse {
        /// The address.
        address: PciAddress,
        /// The group's file.
        path: PathBuf,
    },
    /// Another device of its group is with a kernel driver.
    #[error("the IOMMU group {group} of {address} holds devices that the kernel uses: {}", list(companions))]
    NotViable {
        /// The address.
        address: PciAddress,
        /// Its group.
        group: u32,
        /// The others.
        companions: Vec<PciAddress>,
    },
    /// The system failed otherwise.
    #[error("{address}: {what}: {source}")]
    System {
        /// The address.
        address: PciAddress,
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The device is not made as an NVMe controller must be.
    #[error("{address} has a register area of {len} bytes, and an NVMe controller needs {BAR_LEN_MIN}")]
    Malformed {
        /// The address.
        address: PciAddress,
        /// Bytes of BAR 0.
        len: u64,
    },
    /// The controller itself.
    #[error("{address}: {source}")]
    Controller {
        /// The address.
        address: PciAddress,
        /// Its reason.
        source: ControllerError,
    },
}

fn list(addresses: &[PciAddress]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A device opened through VFIO.
#[derive(Debug)]
pub struct VfioBus {
    address: PciAddress,
    bar: Bar,
    config: RegionPlace,
    /// By interrupt vector. Vector 0 is the admin queue's, which is polled.
    events: Vec<Option<Arc<OwnedFd>>>,
    wanted_back: Option<File>,
    space: Mutex<IovaSpace>,
    // Closed in this order: the device, which the kernel resets then, before the container that its memory is mapped in.
    device: File,
    _group: File,
    container: File,
}

impl VfioBus {
    /// Opens a device that is bound to `vfio-pci`. With `interrupts`, so many I/O queues can signal an eventfd; the
    /// others are polled.
    ///
    /// # Errors
    /// When it is not there, not bound, in use, or the system refuses.
    pub fn open(address: PciAddress, interrupts: u16) -> Result<Self, VfioError> {
        let system = |what| move |source| VfioError::System { address, what, source };
        let group_number = check_device(address)?;
        let container = open_file(Path::new("/dev/vfio/vfio"), address)?;
        if !ioctl::speaks_our_version(container.as_fd()) {
            let source = io::Error::from_raw_os_error(libc::EPROTO);
            return Err(system("the kernel speaks another version of VFIO")(source));
        }
        let group = open_file(&PathBuf::from(format!("/dev/vfio/{group_number}")), address)?;
        if !ioctl::is_viable(group.as_fd()).map_err(system("asking for the group's state"))? {
            let companions = address.group_companions();
            return Err(VfioError::NotViable { address, group: group_number, companions });
        }
        ioctl::set_container(group.as_fd(), container.as_fd()).map_err(system("using its group"))?;
        ioctl::set_iommu(container.as_fd()).map_err(system("using the IOMMU"))?;
        let name = CString::new(address.to_string()).expect("an address has no zeroes");
        let device = File::from(ioctl::device(group.as_fd(), &name).map_err(system("opening the device"))?);
        let region = |index| ioctl::region(device.as_fd(), index).map_err(system("finding its regions"));
        let (bar, config) = (region(VFIO_PCI_BAR0_REGION_INDEX)?, region(VFIO_PCI_CONFIG_REGION_INDEX)?);
        if bar.len < BAR_LEN_MIN {
            return Err(VfioError::Malformed { address, len: bar.len });
        }
        let len = usize::try_from(bar.len).unwrap_or(usize::MAX);
        let bar = Bar::map(device.as_fd(), bar.offset, len).map_err(system("mapping its registers"))?;
        let events = make_events(&device, interrupts).map_err(system("setting up its interrupts"))?;
        let ranges =
            ioctl::iova_ranges(container.as_fd()).map_err(system("asking for the IOMMU's ranges"))?;
        Ok(Self {
            address,
            bar,
            config,
            events,
            wanted_back: watch_requests(&device),
            space: Mutex::new(IovaSpace::new(ranges.unwrap_or_else(default_ranges))),
            device,
            _group: group,
            container,
        })
    }

    /// Its address.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// What an I/O queue signals, if it does.
    pub(crate) fn event(&self, queue: u16) -> Option<Arc<OwnedFd>> {
        self.events.get(usize::from(queue)).cloned().flatten()
    }

    fn command(&self) -> io::Result<u16> {
        let mut bytes = [0; 2];
        self.device.read_exact_at(&mut bytes, self.config.offset + COMMAND)?;
        Ok(u16::from_le_bytes(bytes))
    }

    fn set_command(&self, value: u16) -> io::Result<()> {
        self.device.write_all_at(&value.to_le_bytes(), self.config.offset + COMMAND)
    }

    /// Clears bus mastering. Whether it is certain that the device masters the bus no more.
    fn stop_mastering(&self) -> io::Result<bool> {
        let command = self.command()?;
        // All ones: it is not there any more.
        if command == u16::MAX || command & COMMAND_BUS_MASTER == 0 {
            return Ok(true);
        }
        self.set_command(command & !COMMAND_BUS_MASTER)?;
        let command = self.command()?;
        Ok(command == u16::MAX || command & COMMAND_BUS_MASTER == 0)
    }

    fn space(&self) -> std::sync::MutexGuard<'_, IovaSpace> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a controller that is bound to `vfio-pci` and brings it up; `idle` is called while it works.
///
/// # Errors
/// Why not, and what mends it.
pub fn open(
    address: PciAddress,
    interrupts: u16,
    options: ControllerOptions,
    clock: &impl Clock,
    idle: &mut dyn FnMut(),
) -> Result<Controller<VfioBus>, VfioError> {
    let bus = VfioBus::open(address, interrupts)?;
    Controller::open(bus, options, clock, idle).map_err(|source| VfioError::Controller { address, source })
}

/// Checks what can be seen without opening anything. Returns the IOMMU group.
fn check_device(address: PciAddress) -> Result<u32, VfioError> {
    if !address.exists() {
        return Err(VfioError::NoDevice { address });
    }
    if !address.is_nvme() {
        return Err(VfioError::NotNvme { address });
    }
    let group = address.iommu_group().ok_or(VfioError::NoIommu { address })?;
    match address.driver() {
        Some(driver) if driver == pci::VFIO_DRIVER => Ok(group),
        driver => Err(VfioError::NotBound { address, driver }),
    }
}

fn open_file(path: &Path, address: PciAddress) -> Result<File, VfioError> {
    OpenOptions::new().read(true).write(true).open(path).map_err(|source| {
        let path = path.to_owned();
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => VfioError::NoVfio { path },
            Some(libc::EACCES | libc::EPERM) => VfioError::NoRights { path },
            Some(libc::EBUSY) => VfioError::InUse { address, path },
            _ => VfioError::System { address, what: "opening VFIO", source },
        }
    })
}

fn make_events(device: &File, interrupts: u16) -> io::Result<Vec<Option<Arc<OwnedFd>>>> {
    if interrupts == 0 {
        return Ok(Vec::new());
    }
    let offered = ioctl::vectors(device.as_fd(), VFIO_PCI_MSIX_IRQ_INDEX)?;
    let count = (usize::from(interrupts) + 1).min(offered as usize).min(ioctl::EVENTS_MAX);
    let mut events = Vec::with_capacity(count);
    for vector in 0..count {
        events.push(if vector == 0 { None } else { Some(Arc::new(ioctl::eventfd(true)?)) });
    }
    let borrowed: Vec<_> = events.iter().map(|event| event.as_ref().map(|event| event.as_fd())).collect();
    ioctl::set_events(device.as_fd(), VFIO_PCI_MSIX_IRQ_INDEX, &borrowed)?;
    Ok(events)
}

/// An eventfd by which the kernel asks for the device, where it can.
fn watch_requests(device: &File) -> Option<File> {
    let (_, indices) = ioctl::counts(device.as_fd()).ok()?;
    if indices <= VFIO_PCI_REQ_IRQ_INDEX {
        return None;
    }
    let event = ioctl::eventfd(false).ok()?;
    ioctl::set_events(device.as_fd(), VFIO_PCI_REQ_IRQ_INDEX, &[Some(event.as_fd())]).ok()?;
    Some(File::from(event))
}

/// For kernels that do not say (before 5.4): 39 bits, which every IOMMU translates, without the range of message
/// interrupts on x86.
fn default_ranges() -> Vec<(u64, u64)> {
    vec![(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)]
}

#[allow(unsafe_code)]
impl Bus for VfioBus {
    fn read32(&self, offset: u32) -> u32 {
        self.bar.read32(offset)
    }

    fn read64(&self, offset: u32) -> u64 {
        self.bar.read64(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        self.bar.write32(offset, value);
    }

    fn write64(&self, offset: u32, value: u64) {
        self.bar.write64(offset, value);
    }

    unsafe fn map(&self, memory: DmaRange) -> Result<u64, BusError> {
        let len = memory.len;
        let iova = self.space().take(len).ok_or(BusError::NoAddress { len })?;
        // SAFETY: the caller keeps the contract, which is the same. The address was free.
        unsafe { ioctl::map(self.container.as_fd(), memory, iova) }.map_err(|source| {
            self.space().give_back(iova, len);
            BusError::Map { len, source }
        })?;
        Ok(iova)
    }

    fn unmap(&self, iova: u64, len: usize) {
        match ioctl::unmap(self.container.as_fd(), iova, len as u64) {
            Ok(()) => self.space().give_back(iova, len),
            // The address stays taken, and the memory pinned until the container is closed.
            Err(error) => tracing::error!(%error, iova, len, "the IOMMU keeps a mapping"),
        }
    }

    fn connect(&self) -> Result<(), BusError> {
        let enabled = self
            .command()
            .and_then(|command| self.set_command(command | COMMAND_MEMORY | COMMAND_BUS_MASTER));
        enabled.map_err(|source| BusError::Device { source })
    }

    fn isolate(&self) {
        match self.stop_mastering() {
            Ok(true) => {}
            // Without its word for it, the IOMMU's.
            Ok(false) | Err(_) => {
                ioctl::unmap_all(self.container.as_fd())
                    .expect("a device must be cut off before memory is used again");
            }
        }
    }

    fn is_wanted_back(&self) -> bool {
        let Some(mut event) = self.wanted_back.as_ref() else { return false };
        event.read_exact(&mut [0; 8]).is_ok()
    }

    fn vectors(&self) -> u16 {
        u16::try_from(self.events.len()).expect("at most 256")
    }
}
