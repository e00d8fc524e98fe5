//! Status codes (NVMe Base 2.0 §3.3.3.2.1), and what each one means for the driver.

use std::fmt;

/// The status field of a completion without its phase tag: SC in bits 7:0, SCT in 10:8, CRD in 12:11, M in 13, DNR
/// in 14.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Status(pub u16);

/// What the driver does about a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is done.
    Success,
    /// The controller asks to send it again, after the delay that it gives.
    Retry,
    /// These blocks cannot be read.
    Media,
    /// The data differ (Compare).
    Miscompare,
    /// The command asks for what cannot be: beyond the end, not supported.
    Invalid,
    /// The host has aborted it.
    Aborted,
    /// The namespace or the path to it is gone.
    Gone,
    /// The controller failed it.
    Failed,
}

/// Status code types.
pub mod kind {
    /// Generic command status (figure 97).
    pub const GENERIC: u8 = 0;
    /// Command specific status (figure 98).
    pub const SPECIFIC: u8 = 1;
    /// Media and data integrity errors (figure 101).
    pub const MEDIA: u8 = 2;
    /// Path related status (figure 102).
    pub const PATH: u8 = 3;
}

impl Status {
    /// Success.
    pub const SUCCESS: Status = Status(0);

    /// A status of this type and code.
    pub const fn new(kind: u8, code: u8) -> Self {
        Self(((kind as u16) & 7) << 8 | code as u16)
    }

    /// The same with the Do Not Retry bit.
    #[must_use]
    pub const fn with_do_not_retry(self) -> Self {
        Self(self.0 | 1 << 14)
    }

    /// SC.
    pub fn code(self) -> u8 {
        self.0 as u8
    }

    /// SCT.
    pub fn kind(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }

    /// CRD: which of the controller's three retry delays applies; 0 for none.
    pub fn retry_delay(self) -> u8 {
        (self.0 >> 11) as u8 & 3
    }

    /// DNR.
    pub fn do_not_retry(self) -> bool {
        self.0 >> 14 & 1 == 1
    }

    /// What to do about it.
    pub fn verdict(self) -> Verdict {
        match (self.kind(), self.code()) {
            (kind::GENERIC, code) => self.generic(code),
            // Invalid queue identifiers, attributes, "Command Size Limit Exceeded" (83h) and the like: the command
            // is wrong. "Attempted Write to Read Only Range" (82h) is the namespace's state, not the command's.
            (kind::SPECIFIC, 0x82) => Verdict::Failed,
            (kind::SPECIFIC, _) => Verdict::Invalid,
            (kind::MEDIA, code) => media(code),
            (kind::PATH, code) => self.path(code),
            _ => Verdict::Failed,
        }
    }

    fn generic(self, code: u8) -> Verdict {
        match code {
            0x00 => Verdict::Success,
            // Command Abort Requested; Command Aborted due to SQ Deletion; … due to Preempt and Abort.
            0x07 | 0x08 | 0x1b => Verdict::Aborted,
            // Invalid Command Opcode, Field, Namespace or Format, SGL and PRP errors, Atomic Write Unit Exceeded, LBA
            // Out of Range.
            0x01 | 0x02 | 0x0a..=0x13 | 0x14 | 0x16 | 0x1e | 0x80 => Verdict::Invalid,
            // The controller's own word that it has not carried it out and that sending it again may help: Command
            // Interrupted, Transient Transport Error, Namespace Not Ready, Admin Command Media Not Ready.
            0x21 | 0x22 | 0x82 | 0x24 if !self.do_not_retry() => Verdict::Retry,
            // Among them Data Transfer Error, Internal Error, Power Loss, Sanitize, Write Protected, Capacity Exceeded.
            _ => Verdict::Failed,
        }
    }

    fn path(self, code: u8) -> Verdict {
        match code {
            // Asymmetric Access Persistent Loss.
            0x01 => Verdict::Gone,
            // Asymmetric Access Transition.
            0x03 if !self.do_not_retry() => Verdict::Retry,
            // Command Aborted By Host.
            0x71 => Verdict::Aborted,
            _ => Verdict::Failed,
        }
    }
}

fn media(code: u8) -> Verdict {
    match code {
        // Unrecovered Read Error; Guard, Application Tag, Reference Tag and Storage Tag Check Error; Deallocated or
        // Unwritten Logical Block.
        0x81..=0x84 | 0x87 | 0x88 => Verdict::Media,
        0x85 => Verdict::Miscompare,
        // Write Fault (80h), Access Denied (86h) and what is not known.
        _ => Verdict::Failed,
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status(type {:x}h, code {:02x}h{})", self.kind(), self.code(), self.dnr())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "status type {:x}h, code {:02x}h{}", self.kind(), self.code(), self.dnr())
    }
}

impl Status {
    fn dnr(self) -> &'static str {
        if self.do_not_retry() { ", do not retry" } else { "" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_words() {
        let status = Status(0b100_1010_1000_0001);
        assert_eq!((status.kind(), status.code(), status.retry_delay()), (2, 0x81, 1));
        assert!(status.do_not_retry());
        assert_eq!(Status::new(2, 0x81).to_string(), "status type 2h, code 81h");
    }

    #[test]
    fn each_group_leads_to_its_action() {
        let verdict = |kind, code| Status::new(kind, code).verdict();
        assert_eq!(verdict(0, 0x00), Verdict::Success);
        assert_eq!(verdict(0, 0x02), Verdict::Invalid);
        assert_eq!(verdict(0, 0x06), Verdict::Failed);
        assert_eq!(verdict(0, 0x07), Verdict::Aborted);
        assert_eq!(verdict(0, 0x20), Verdict::Failed);
        assert_eq!(verdict(0, 0x21), Verdict::Retry);
        assert_eq!(verdict(0, 0x80), Verdict::Invalid);
        assert_eq!(verdict(0, 0x82), Verdict::Retry);
        assert_eq!(Status::new(0, 0x82).with_do_not_retry().verdict(), Verdict::Failed);
        assert_eq!(verdict(1, 0x80), Verdict::Invalid);
        assert_eq!(verdict(2, 0x80), Verdict::Failed);
        assert_eq!(verdict(2, 0x81), Verdict::Media);
        assert_eq!(verdict(2, 0x85), Verdict::Miscompare);
        assert_eq!(verdict(3, 0x03), Verdict::Retry);
        assert_eq!(verdict(7, 0x99), Verdict::Failed);
    }

    #[test]
    fn only_one_status_is_success_and_do_not_retry_is_obeyed() {
        for bits in 0..=0x7fff {
            let status = Status(bits);
            let success = bits & 0x7ff == 0;
            assert_eq!(status.verdict() == Verdict::Success, success, "{status}");
            assert!(!(status.do_not_retry() && status.verdict() == Verdict::Retry), "{status}");
        }
    }
}
