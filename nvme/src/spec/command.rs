//! Submission queue entries (NVMe Base 2.0 §3.3.3.1) and the commands that the driver sends.

use super::feature::FeatureId;
use std::mem::{offset_of, size_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Admin commands (NVMe Base 2.0 §5, figure 138).
pub mod admin {
    /// Delete I/O Submission Queue.
    pub const DELETE_SQ: u8 = 0x00;
    /// Create I/O Submission Queue.
    pub const CREATE_SQ: u8 = 0x01;
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Delete I/O Completion Queue.
    pub const DELETE_CQ: u8 = 0x04;
    /// Create I/O Completion Queue.
    pub const CREATE_CQ: u8 = 0x05;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0a;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER_CONFIG: u8 = 0x7c;
}

/// Commands of the NVM command set (NVM 1.0 §3, figure 16).
pub mod io {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
}

/// One command, 64 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Command {
    /// OPC.
    pub opcode: u8,
    /// FUSE in bits 1:0, PSDT in bits 7:6 (00b: PRPs).
    pub flags: u8,
    /// CID: what the completion names it by.
    pub cid: u16,
    /// NSID.
    pub nsid: u32,
    /// Command dword 2.
    pub cdw2: u32,
    /// Command dword 3.
    pub cdw3: u32,
    /// MPTR: unused, since namespaces with metadata are refused.
    pub mptr: u64,
    /// PRP entry 1, or the first half of an SGL descriptor.
    pub prp1: u64,
    /// PRP entry 2, or the second half of an SGL descriptor.
    pub prp2: u64,
    /// Command dword 10.
    pub cdw10: u32,
    /// Command dword 11.
    pub cdw11: u32,
    /// Command dword 12.
    pub cdw12: u32,
    /// Command dword 13.
    pub cdw13: u32,
    /// Command dword 14.
    pub cdw14: u32,
    /// Command dword 15.
    pub cdw15: u32,
}

/// Bytes of a submission queue entry.
pub const COMMAND_LEN: usize = 64;

const _: () = assert!(size_of::<Command>() == COMMAND_LEN);
const _: () = assert!(offset_of!(Command, cid) == 2);
const _: () = assert!(offset_of!(Command, nsid) == 4);
const _: () = assert!(offset_of!(Command, mptr) == 16);
const _: () = assert!(offset_of!(Command, prp1) == 24);
const _: () = assert!(offset_of!(Command, prp2) == 32);
const _: () = assert!(offset_of!(Command, cdw10) == 40);
const _: () = assert!(offset_of!(Command, cdw15) == 60);

/// FUA: bit 30 of command dword 12 (NVM 1.0 §3.2.6).
pub const FUA: u32 = 1 << 30;
/// AD: deallocate, bit 2 of command dword 11 (NVM 1.0 §3.2.3).
pub const DEALLOCATE: u32 = 1 << 2;
/// PSDT = 01b: the data pointer is an SGL (NVMe Base 2.0 figure 86).
pub const USES_SGL: u8 = 1 << 6;

/// Logical blocks of a namespace, counted as the controller does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbaRange {
    /// The first.
    pub first: u64,
    /// How many: at least 1. On the wire it is 0-based.
    pub count: u32,
}

impl Command {
    /// The entry as it lies in the queue.
    pub fn words(self) -> [u64; COMMAND_LEN / 8] {
        zerocopy::transmute!(self)
    }

    /// An entry from its bytes.
    pub fn from_words(words: [u64; COMMAND_LEN / 8]) -> Self {
        zerocopy::transmute!(words)
    }

    /// Identify (NVMe Base 2.0 §5.17): `cns` says what, 4 KiB to `page`.
    pub fn identify(cns: u8, nsid: u32, page: u64) -> Self {
        Self { opcode: admin::IDENTIFY, nsid, prp1: page, cdw10: cns.into(), ..Self::default() }
    }

    /// Create I/O Completion Queue (§5.4): contiguous, of `entries`; with the interrupt vector if there is one.
    pub fn create_cq(queue: u16, entries: u32, base: u64, vector: Option<u16>) -> Self {
        let interrupts = vector.map_or(0, |vector| u32::from(vector) << 16 | 1 << 1);
        Self {
            opcode: admin::CREATE_CQ,
            prp1: base,
            cdw10: (entries - 1) << 16 | u32::from(queue),
            cdw11: interrupts | 1,
            ..Self::default()
        }
    }

    /// Create I/O Submission Queue (§5.5): contiguous, for the completion queue of the same number.
    pub fn create_sq(queue: u16, entries: u32, base: u64) -> Self {
        Self {
            opcode: admin::CREATE_SQ,
            prp1: base,
            cdw10: (entries - 1) << 16 | u32::from(queue),
            cdw11: u32::from(queue) << 16 | 1,
            ..Self::default()
        }
    }

    /// Delete I/O Submission Queue (§5.7).
    pub fn delete_sq(queue: u16) -> Self {
        Self { opcode: admin::DELETE_SQ, cdw10: queue.into(), ..Self::default() }
    }

    /// Delete I/O Completion Queue (§5.6).
    pub fn delete_cq(queue: u16) -> Self {
        Self { opcode: admin::DELETE_CQ, cdw10: queue.into(), ..Self::default() }
    }

    /// Abort (§5.1): the command `cid` of submission queue `queue`.
    pub fn abort(queue: u16, cid: u16) -> Self {
        Self { opcode: admin::ABORT, cdw10: u32::from(cid) << 16 | u32::from(queue), ..Self::default() }
    }

    /// Set Features (§5.27) with the value in dword 11.
    pub fn set_feature(feature: FeatureId, value: u32) -> Self {
        Self { opcode: admin::SET_FEATURES, cdw10: feature as u32, cdw11: value, ..Self::default() }
    }

    /// Get Features (§5.15): the current value.
    pub fn get_feature(feature: FeatureId, nsid: u32) -> Self {
        Self { opcode: admin::GET_FEATURES, nsid, cdw10: feature as u32, ..Self::default() }
    }

    /// Get Log Page (§5.16): the first `len` bytes, a multiple of 4 of at most 4 KiB, of a page of the whole controller.
    pub fn get_log_page(log: u8, len: u16, page: u64) -> Self {
        let dwords = u32::from(len) / 4;
        Self {
            opcode: admin::GET_LOG_PAGE,
            nsid: u32::MAX,
            prp1: page,
            cdw10: dwords.saturating_sub(1) << 16 | u32::from(log),
            ..Self::default()
        }
    }

    /// Doorbell Buffer Config (§5.8): one page of shadow doorbells, one of event indices.
    pub fn doorbell_buffer_config(shadow: u64, events: u64) -> Self {
        Self { opcode: admin::DOORBELL_BUFFER_CONFIG, prp1: shadow, prp2: events, ..Self::default() }
    }

    fn ranged(opcode: u8, nsid: u32, range: LbaRange) -> Self {
        Self {
            opcode,
            nsid,
            cdw10: range.first as u32,
            cdw11: (range.first >> 32) as u32,
            cdw12: range.count.wrapping_sub(1) & 0xffff,
            ..Self::default()
        }
    }

    /// Read (NVM 1.0 §3.2.4), without its data pointer.
    pub fn read(nsid: u32, range: LbaRange) -> Self {
        Self::ranged(io::READ, nsid, range)
    }

    /// Write (NVM 1.0 §3.2.6), without its data pointer.
    pub fn write(nsid: u32, range: LbaRange, fua: bool) -> Self {
        let mut command = Self::ranged(io::WRITE, nsid, range);
        command.cdw12 |= if fua { FUA } else { 0 };
        command
    }

    /// Compare (NVM 1.0 §3.2.1), without its data pointer.
    pub fn compare(nsid: u32, range: LbaRange) -> Self {
        Self::ranged(io::COMPARE, nsid, range)
    }

    /// Write Zeroes (NVM 1.0 §3.2.8).
    pub fn write_zeroes(nsid: u32, range: LbaRange, fua: bool) -> Self {
        let mut command = Self::ranged(io::WRITE_ZEROES, nsid, range);
        command.cdw12 |= if fua { FUA } else { 0 };
        command
    }

    /// Flush (NVMe Base 2.0 §7.1).
    pub fn flush(nsid: u32) -> Self {
        Self { opcode: io::FLUSH, nsid, ..Self::default() }
    }

    /// Dataset Management, deallocate (NVM 1.0 §3.2.3), of one range whose definition is at `ranges`.
    pub fn deallocate(nsid: u32, ranges: u64) -> Self {
        Self {
            opcode: io::DATASET_MANAGEMENT,
            nsid,
            prp1: ranges,
            cdw10: 0,
            cdw11: DEALLOCATE,
            ..Self::default()
        }
    }

    /// The blocks that a ranged command is about.
    pub fn range(&self) -> LbaRange {
        LbaRange {
            first: u64::from(self.cdw11) << 32 | u64::from(self.cdw10),
            count: (self.cdw12 & 0xffff) + 1,
        }
    }
}

/// One range of Dataset Management (NVM 1.0 figure 41), 16 bytes: attributes, length, first block.
pub fn deallocate_range(range: LbaRange) -> [u64; 2] {
    [u64::from(range.count) << 32, range.first]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(command: Command) -> [u8; 64] {
        zerocopy::transmute!(command)
    }

    #[test]
    fn a_write_is_laid_out_as_specified() {
        let range = LbaRange { first: 0x1_2345_6789, count: 8 };
        let mut command = Command::write(3, range, true);
        (command.cid, command.prp1, command.prp2) = (0xbeef, 0x1111_2222_3333_4444, 0x5555);
        let mut expected = [0; 64];
        expected[0] = 1;
        expected[2..4].copy_from_slice(&[0xef, 0xbe]);
        expected[4] = 3;
        expected[24..32].copy_from_slice(&[0x44, 0x44, 0x33, 0x33, 0x22, 0x22, 0x11, 0x11]);
        expected[32..34].copy_from_slice(&[0x55, 0x55]);
        expected[40..45].copy_from_slice(&[0x89, 0x67, 0x45, 0x23, 0x01]);
        expected[48..52].copy_from_slice(&[7, 0, 0, 0x40]);
        assert_eq!(bytes(command), expected);
        assert_eq!(Command::from_words(command.words()), command);
        assert_eq!(command.range(), range);
    }

    #[test]
    fn queue_commands() {
        let cq = Command::create_cq(2, 256, 0x8000, Some(5));
        assert_eq!((cq.opcode, cq.prp1, cq.cdw10, cq.cdw11), (5, 0x8000, 0x00ff_0002, 0x0005_0003));
        assert_eq!(Command::create_cq(2, 256, 0x8000, None).cdw11, 1);
        let sq = Command::create_sq(2, 256, 0x9000);
        assert_eq!((sq.opcode, sq.prp1, sq.cdw10, sq.cdw11), (1, 0x9000, 0x00ff_0002, 0x0002_0001));
        assert_eq!((Command::delete_sq(7).opcode, Command::delete_sq(7).cdw10), (0, 7));
        assert_eq!((Command::delete_cq(7).opcode, Command::delete_cq(7).cdw10), (4, 7));
        assert_eq!(Command::abort(2, 0x30).cdw10, 0x0030_0002);
    }

    #[test]
    fn admin_commands() {
        let identify = Command::identify(1, 0, 0x1000);
        assert_eq!((identify.opcode, identify.cdw10, identify.prp1), (6, 1, 0x1000));
        let log = Command::get_log_page(2, 512, 0x1000);
        assert_eq!((log.opcode, log.nsid, log.cdw10), (2, u32::MAX, 127 << 16 | 2));
        let queues = Command::set_feature(FeatureId::NumberOfQueues, 0x0003_0003);
        assert_eq!((queues.opcode, queues.cdw10, queues.cdw11), (9, 7, 0x0003_0003));
        let shadow = Command::doorbell_buffer_config(0x1000, 0x2000);
        assert_eq!((shadow.opcode, shadow.prp1, shadow.prp2), (0x7c, 0x1000, 0x2000));
    }

    #[test]
    fn commands_without_data() {
        let zeroes = Command::write_zeroes(1, LbaRange { first: 16, count: 65536 }, false);
        assert_eq!((zeroes.opcode, zeroes.cdw10, zeroes.cdw12), (8, 16, 0xffff));
        assert_eq!(zeroes.range().count, 65536);
        assert_eq!(Command::flush(1).words()[0], 1 << 32);
        let discard = Command::deallocate(1, 0x3000);
        assert_eq!((discard.opcode, discard.cdw10, discard.cdw11, discard.prp1), (9, 0, 4, 0x3000));
        assert_eq!(deallocate_range(LbaRange { first: 9, count: 2 }), [2 << 32, 9]);
    }
}
