//! Controller properties in BAR 0 (NVMe Base 2.0 §3.1.3).

use std::time::Duration;

/// Offset of Controller Capabilities, 8 bytes (§3.1.3.1).
pub const CAP: u32 = 0x00;
/// Offset of Version (§3.1.3.2).
pub const VS: u32 = 0x08;
/// Offset of Interrupt Mask Set (§3.1.3.3).
pub const INTMS: u32 = 0x0c;
/// Offset of Controller Configuration (§3.1.3.5).
pub const CC: u32 = 0x14;
/// Offset of Controller Status (§3.1.3.6).
pub const CSTS: u32 = 0x1c;
/// Offset of Admin Queue Attributes (§3.1.3.8).
pub const AQA: u32 = 0x24;
/// Offset of the Admin Submission Queue's base address, 8 bytes (§3.1.3.9).
pub const ASQ: u32 = 0x28;
/// Offset of the Admin Completion Queue's base address, 8 bytes (§3.1.3.10).
pub const ACQ: u32 = 0x30;
/// Offset of the first doorbell (PCIe 1.0 §3.1.2).
pub const DOORBELLS: u32 = 0x1000;

/// What every register of a removed device reads as.
pub const ALL_ONES: u32 = u32::MAX;

/// Controller Capabilities (NVMe Base 2.0 §3.1.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cap(pub u64);

impl Cap {
    /// Most entries of an I/O queue (MQES, 0-based on the wire).
    pub fn queue_entries_max(self) -> u32 {
        (self.0 & 0xffff) as u32 + 1
    }

    /// Whether queues must be physically contiguous (CQR). Ours always are.
    pub fn contiguous_required(self) -> bool {
        self.0 >> 16 & 1 == 1
    }

    /// The longest that enabling or disabling takes (TO, in units of 500 ms). Zero counts as one unit: some
    /// controllers report it, and none is ready in no time.
    pub fn timeout(self) -> Duration {
        Duration::from_millis(500 * (self.0 >> 24 & 0xff).max(1))
    }

    /// Distance of doorbells in bytes: 4 << DSTRD.
    pub fn doorbell_stride(self) -> u32 {
        4 << (self.0 >> 32 & 0xf)
    }

    /// Whether the NVM command set is supported (CSS bit 0).
    pub fn has_nvm_command_set(self) -> bool {
        self.0 >> 37 & 1 == 1
    }

    /// Whether several I/O command sets can be selected (CSS bit 6): CC.CSS = 6 then shows the NVM set and others.
    pub fn has_io_command_sets(self) -> bool {
        self.0 >> 43 & 1 == 1
    }

    /// Smallest memory page: 2^(12 + MPSMIN) bytes.
    pub fn page_shift_min(self) -> u32 {
        12 + (self.0 >> 48 & 0xf) as u32
    }

    /// Largest memory page: 2^(12 + MPSMAX) bytes.
    pub fn page_shift_max(self) -> u32 {
        12 + (self.0 >> 52 & 0xf) as u32
    }
}

/// Controller Configuration (NVMe Base 2.0 §3.1.3.5) as the driver sets it: 4 KiB pages, round robin arbitration, NVM
/// command set, 64-byte submission and 16-byte completion entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cc(pub u32);

impl Cc {
    /// Enabled.
    pub const ENABLED: Cc = Cc(1 | 6 << 16 | 4 << 20);
    /// Not enabled.
    pub const DISABLED: Cc = Cc(6 << 16 | 4 << 20);
    /// Enabled, and asked to shut down: SHN = 01b, which flushes the cache (§3.6.1).
    pub const SHUTTING_DOWN: Cc = Cc(Cc::ENABLED.0 | 1 << 14);

    /// EN.
    pub fn is_enabled(self) -> bool {
        self.0 & 1 == 1
    }

    /// SHN is not 00b.
    pub fn is_shutting_down(self) -> bool {
        self.0 >> 14 & 3 != 0
    }
}

/// Controller Status (NVMe Base 2.0 §3.1.3.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Csts(pub u32);

impl Csts {
    /// The device is not there any more.
    pub fn is_gone(self) -> bool {
        self.0 == ALL_ONES
    }

    /// RDY.
    pub fn is_ready(self) -> bool {
        self.0 & 1 == 1
    }

    /// CFS: a fatal error that only a reset can mend.
    pub fn is_fatal(self) -> bool {
        self.0 >> 1 & 1 == 1
    }

    /// SHST = 10b.
    pub fn shutdown_complete(self) -> bool {
        self.0 >> 2 & 3 == 2
    }
}

/// Version, as (major, minor, tertiary) (NVMe Base 2.0 §3.1.3.2).
pub fn version(vs: u32) -> (u16, u8, u8) {
    ((vs >> 16) as u16, (vs >> 8) as u8, vs as u8)
}

/// Admin Queue Attributes for an admin queue pair of this many entries each (§3.1.3.8).
///
/// # Panics
/// If it is not 2 to 4096.
pub fn aqa(entries: u32) -> u32 {
    assert!((2..=4096).contains(&entries), "an admin queue has 2 to 4096 entries");
    (entries - 1) << 16 | (entries - 1)
}

/// Offset of a submission queue's tail doorbell (PCIe 1.0 §3.1.2.1).
pub fn sq_doorbell(queue: u16, stride: u32) -> u32 {
    DOORBELLS + 2 * u32::from(queue) * stride
}

/// Offset of a completion queue's head doorbell (PCIe 1.0 §3.1.2.2).
pub fn cq_doorbell(queue: u16, stride: u32) -> u32 {
    DOORBELLS + (2 * u32::from(queue) + 1) * stride
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_of_an_emulated_controller() {
        // What QEMU 10 reports: MQES 2047, CQR, TO 15, CSS NVM and I/O command sets, MPSMAX 4.
        let cap = Cap(2047 | 1 << 16 | 15 << 24 | 1 << 37 | 1 << 43 | 4 << 52);
        assert_eq!(cap.queue_entries_max(), 2048);
        assert!(cap.contiguous_required() && cap.has_nvm_command_set() && cap.has_io_command_sets());
        assert_eq!(cap.timeout(), Duration::from_millis(7500));
        assert_eq!((cap.doorbell_stride(), cap.page_shift_min(), cap.page_shift_max()), (4, 12, 16));
        assert_eq!(Cap(0).timeout(), Duration::from_millis(500));
        assert_eq!(Cap(3 << 32).doorbell_stride(), 32);
        assert_eq!(Cap(u64::MAX).queue_entries_max(), 65536);
    }

    #[test]
    fn configuration_and_status_bits() {
        assert_eq!(Cc::ENABLED.0, 0x0046_0001);
        assert_eq!(Cc::SHUTTING_DOWN.0, 0x0046_4001);
        assert!(Cc::SHUTTING_DOWN.is_shutting_down() && !Cc::ENABLED.is_shutting_down());
        assert!(
            Csts(1).is_ready() && !Csts(1).is_fatal() && Csts(2).is_fatal() && Csts(8).shutdown_complete()
        );
        assert!(!Csts(4).shutdown_complete() && Csts(u32::MAX).is_gone());
        assert_eq!(version(0x0001_0400), (1, 4, 0));
        assert_eq!(aqa(64), 0x003f_003f);
    }

    #[test]
    fn doorbells_alternate() {
        assert_eq!((sq_doorbell(0, 4), cq_doorbell(0, 4)), (0x1000, 0x1004));
        assert_eq!((sq_doorbell(3, 4), cq_doorbell(3, 4)), (0x1018, 0x101c));
        assert_eq!((sq_doorbell(1, 32), cq_doorbell(1, 32)), (0x1040, 0x1060));
    }
}
