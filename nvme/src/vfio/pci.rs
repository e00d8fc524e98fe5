//! PCI devices as the kernel shows them in `/sys/bus/pci`.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Class code of an NVMe controller: mass storage, non-volatile memory, NVM Express.
const CLASS_NVME: u32 = 0x01_08_02;
/// The driver that gives devices to user space.
pub const VFIO_DRIVER: &str = "vfio-pci";

/// A PCI address: domain, bus, device, function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// Not a PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a PCI address: write it as 0000:01:00.0")]
pub struct NotAnAddress(String);

impl FromStr for PciAddress {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<Self, NotAnAddress> {
        Self::parse(text).ok_or_else(|| NotAnAddress(text.to_owned()))
    }
}

impl PciAddress {
    fn parse(text: &str) -> Option<Self> {
        let hex = |part: &str, len: usize| {
            let digits = part.len() == len && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            digits.then(|| u32::from_str_radix(part, 16).ok()).flatten()
        };
        let (rest, function) = text.rsplit_once('.')?;
        let parts: Vec<&str> = rest.split(':').collect();
        let (domain, bus, device) = match parts[..] {
            [domain, bus, device] => (hex(domain, domain.len().clamp(4, 8))?, hex(bus, 2)?, hex(device, 2)?),
            [bus, device] => (0, hex(bus, 2)?, hex(device, 2)?),
            _ => return None,
        };
        let function = hex(function, 1).filter(|function| *function < 8)?;
        let device = u8::try_from(device).ok().filter(|device| *device < 32)?;
        Some(Self { domain, bus: u8::try_from(bus).ok()?, device, function: u8::try_from(function).ok()? })
    }

    fn path(self) -> PathBuf {
        Path::new("/sys/bus/pci/devices").join(self.to_string())
    }

    fn link(self, name: &str) -> Option<String> {
        let target = fs::read_link(self.path().join(name)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    fn value(self, name: &str) -> Option<String> {
        Some(fs::read_to_string(self.path().join(name)).ok()?.trim().to_owned())
    }

    /// Whether there is such a device.
    pub fn exists(self) -> bool {
        self.path().exists()
    }

    /// Whether it is an NVMe controller.
    pub fn is_nvme(self) -> bool {
        let class = self.value("class").unwrap_or_default();
        u32::from_str_radix(class.trim_start_matches("0x"), 16) == Ok(CLASS_NVME)
    }

    /// The driver that has it, if one has.
    pub fn driver(self) -> Option<String> {
        self.link("driver")
    }

    /// Its IOMMU group; none without an IOMMU.
    pub fn iommu_group(self) -> Option<u32> {
        self.link("iommu_group")?.parse().ok()
    }

    /// Its NUMA node; none where there is only one.
    pub fn numa_node(self) -> Option<u32> {
        self.value("numa_node")?.parse().ok()
    }

    /// The other devices of its IOMMU group, bridges left out: they stay with the kernel.
    pub fn group_companions(self) -> Vec<PciAddress> {
        let Ok(entries) = fs::read_dir(self.path().join("iommu_group/devices")) else { return Vec::new() };
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut others: Vec<PciAddress> = names.filter_map(|name| name.parse().ok()).collect();
        others.retain(|other| *other != self && !other.is_bridge());
        others.sort_unstable();
        others
    }

    fn is_bridge(self) -> bool {
        self.value("class").is_some_and(|class| class.starts_with("0x0604"))
    }

    /// The kernel's block devices on it: names of namespaces such as `nvme0n1`, while the kernel's driver has it.
    pub fn block_devices(self) -> Vec<String> {
        let list = |path: &Path| -> Vec<PathBuf> {
            fs::read_dir(path)
                .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
                .unwrap_or_default()
        };
        let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let controllers = list(&self.path().join("nvme"));
        let inside = controllers.iter().flat_map(|controller| list(controller));
        let mut found: Vec<String> =
            inside.filter(|path| path.join("queue").exists()).filter_map(|path| name(&path)).collect();
        found.sort_unstable();
        found
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// All NVMe controllers of the machine.
///
/// # Errors
/// When the kernel shows no PCI devices.
pub fn controllers() -> io::Result<Vec<PciAddress>> {
    let entries = fs::read_dir("/sys/bus/pci/devices")?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut found: Vec<PciAddress> = names.filter_map(|name| name.parse().ok()).collect();
    found.retain(|address| address.is_nvme());
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, shown) in [
            ("0000:01:00.0", "0000:01:00.0"),
            ("c1:1f.7", "0000:c1:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
        ] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), shown);
        }
        for wrong in [
            "",
            "1:00.0",
            "0000:01:20.0",
            "0000:01:00.8",
            "0000:01:00",
            "x:01:00.0",
            "0000:+1:00.0",
            "0:0:0:0.0",
        ] {
            let error = wrong.parse::<PciAddress>().unwrap_err();
            assert!(error.to_string().contains("0000:01:00.0"), "{error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_an_address_or_not(text: String) {
            if let Ok(address) = text.parse::<PciAddress>() {
                proptest::prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }
    }
}
