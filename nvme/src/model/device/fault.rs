//! What can go wrong with a model, on demand.

use super::record::Counts;
use loligo_config::units::{BlockCount, Lba};
use loligo_reactor::env::{DiskError, DiskOp};

/// A kind of operation, for counting and for aiming faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OpKind {
    /// `DiskOp::Read`.
    Read,
    /// `DiskOp::Write`, with FUA or without.
    Write,
    /// `DiskOp::Flush`.
    Flush,
    /// `DiskOp::Discard`.
    Discard,
    /// `DiskOp::WriteZeroes`.
    WriteZeroes,
}

impl OpKind {
    /// The kind of an operation.
    pub fn of(op: &DiskOp) -> Self {
        match op {
            DiskOp::Read { .. } => Self::Read,
            DiskOp::Write { .. } => Self::Write,
            DiskOp::Flush => Self::Flush,
            DiskOp::Discard { .. } => Self::Discard,
            DiskOp::WriteZeroes { .. } => Self::WriteZeroes,
        }
    }

    /// Whether a failure of it leaves the device poisoned.
    pub fn poisons(self) -> bool {
        matches!(self, Self::Write | Self::Flush | Self::WriteZeroes)
    }
}

/// Which operations a fault hits: the `nth` of a kind, counted from 1 for the next one submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aim {
    /// The kind.
    pub kind: OpKind,
    /// How many submissions from now; 1 is the next.
    pub nth: u64,
    /// Every later one too.
    pub sticky: bool,
}

impl Aim {
    /// The `nth` operation of a kind, that one alone.
    pub fn once(kind: OpKind, nth: u64) -> Self {
        Self { kind, nth, sticky: false }
    }

    /// The `nth` operation of a kind and all later ones.
    pub fn from(kind: OpKind, nth: u64) -> Self {
        Self { kind, nth, sticky: true }
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The operation fails. A failed write leaves each of its sectors old or new; a failed flush makes some durable,
    /// leaves some, and loses some.
    Fail(Aim, DiskError),
    /// Operations of one kind that touch a range fail.
    Range {
        /// The kind.
        kind: OpKind,
        /// First block.
        lba: Lba,
        /// How many blocks.
        count: BlockCount,
        /// With what.
        error: DiskError,
        /// Whether writing over a block makes it good again, as a drive does that remaps it.
        heals: bool,
    },
    /// The operation does not complete before [`super::Model::release_hung`].
    Hang(Aim),
    /// The operation takes this many polls more.
    Slow(Aim, u32),
    /// The write is acknowledged and dropped.
    LostWrite(Aim),
    /// The write is acknowledged and lands at another place.
    MisdirectedWrite(Aim, Lba),
}

/// What the faults have decided for one operation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Plan {
    pub error: Option<DiskError>,
    pub hang: bool,
    pub extra_polls: u64,
    pub lost: bool,
    pub land_at: Option<Lba>,
}

#[derive(Debug, Default)]
pub(super) struct Faults {
    aimed: Vec<(Fault, u64)>,
    ranges: Vec<BadRange>,
}

#[derive(Clone, Copy, Debug)]
struct BadRange {
    kind: OpKind,
    first: u64,
    end: u64,
    error: DiskError,
    heals: bool,
}

impl Faults {
    pub fn add(&mut self, fault: Fault, counts: &Counts) {
        let aim = match fault {
            Fault::Range { kind, lba, count, error, heals } => {
                let end = lba.0.saturating_add(count.0);
                self.ranges.push(BadRange { kind, first: lba.0, end, error, heals });
                return;
            }
            Fault::Fail(aim, _)
            | Fault::Hang(aim)
            | Fault::Slow(aim, _)
            | Fault::LostWrite(aim)
            | Fault::MisdirectedWrite(aim, _) => aim,
        };
        assert!(aim.nth > 0, "operations are counted from 1");
        self.aimed.push((fault, counts.of(aim.kind) + aim.nth));
    }

    pub fn clear(&mut self) {
        self.aimed.clear();
        self.ranges.clear();
    }

    /// What happens to an operation that has just been counted.
    pub fn plan(&self, kind: OpKind, blocks: Option<(Lba, BlockCount)>, counts: &Counts) -> Plan {
        let mut plan = Plan::default();
        for &(fault, target) in &self.aimed {
            let hits = |aim: Aim| {
                let count = counts.of(kind);
                aim.kind == kind && (count == target || (aim.sticky && count > target))
            };
            match fault {
                Fault::Fail(aim, error) if hits(aim) => plan.error = Some(error),
                Fault::Hang(aim) if hits(aim) => plan.hang = true,
                Fault::Slow(aim, polls) if hits(aim) => plan.extra_polls += u64::from(polls),
                Fault::LostWrite(aim) if hits(aim) => plan.lost = true,
                Fault::MisdirectedWrite(aim, lba) if hits(aim) => plan.land_at = Some(lba),
                _ => {}
            }
        }
        if let Some((lba, count)) = blocks {
            let end = lba.0.saturating_add(count.0);
            let bad = self.ranges.iter().find(|bad| bad.kind == kind && bad.first < end && lba.0 < bad.end);
            plan.error = plan.error.or(bad.map(|bad| bad.error));
        }
        plan
    }

    /// A write to these blocks has succeeded.
    pub fn written(&mut self, lba: Lba, count: BlockCount) {
        let (first, end) = (lba.0, lba.0.saturating_add(count.0));
        if !self.ranges.iter().any(|bad| bad.heals && bad.first < end && first < bad.end) {
            return;
        }
        let ranges = std::mem::take(&mut self.ranges);
        for bad in ranges {
            if !bad.heals {
                self.ranges.push(bad);
                continue;
            }
            let before = BadRange { end: bad.end.min(first), ..bad };
            let behind = BadRange { first: bad.first.max(end), ..bad };
            self.ranges.extend([before, behind].into_iter().filter(|part| part.first < part.end));
        }
    }
}
