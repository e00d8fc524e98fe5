//! What a model was asked to do, for tests that count device operations.

use super::fault::OpKind;
use loligo_config::units::{BlockCount, Lba};
use loligo_reactor::env::DiskOp;
use std::collections::VecDeque;

/// Writes that [`Record::writes`] remembers; older ones are forgotten, not uncounted.
pub const RECORDED_WRITES_MAX: usize = 4096;

/// How many operations of each kind were submitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads.
    pub reads: u64,
    /// Writes, those with FUA included.
    pub writes: u64,
    /// Writes and write-zeroes with FUA.
    pub fua: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
    /// Write-zeroes.
    pub write_zeroes: u64,
    /// Bytes asked to be read.
    pub bytes_read: u64,
    /// Bytes handed over in writes.
    pub bytes_written: u64,
    /// Writes that begin where the write submitted before them ends.
    pub contiguous_writes: u64,
}

impl Counts {
    /// Operations of one kind.
    pub fn of(&self, kind: OpKind) -> u64 {
        match kind {
            OpKind::Read => self.reads,
            OpKind::Write => self.writes,
            OpKind::Flush => self.flushes,
            OpKind::Discard => self.discards,
            OpKind::WriteZeroes => self.write_zeroes,
        }
    }
}

/// One write as it was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedWrite {
    /// First block.
    pub lba: Lba,
    /// How many blocks.
    pub count: BlockCount,
    /// In how many pieces.
    pub pieces: usize,
    /// Whether it asked for durability.
    pub fua: bool,
}

/// Everything submitted since the record was last taken.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Counts.
    pub counts: Counts,
    /// The last writes, oldest first; at most [`RECORDED_WRITES_MAX`].
    pub writes: VecDeque<RecordedWrite>,
}

impl Counts {
    pub(super) fn note(&mut self, op: &DiskOp, bytes: u64) {
        match op {
            DiskOp::Read { .. } => {
                self.reads += 1;
                self.bytes_read += bytes;
            }
            DiskOp::Write { fua, .. } => {
                self.writes += 1;
                self.fua += u64::from(*fua);
                self.bytes_written += bytes;
            }
            DiskOp::Flush => self.flushes += 1,
            DiskOp::Discard { .. } => self.discards += 1,
            DiskOp::WriteZeroes { fua, .. } => {
                self.write_zeroes += 1;
                self.fua += u64::from(*fua);
            }
        }
    }
}

impl Record {
    pub(super) fn note(&mut self, op: &DiskOp, count: BlockCount) {
        self.counts.note(op, count.to_bytes().map_or(0, |bytes| bytes.0));
        if let DiskOp::Write { lba, data, fua } = op {
            let follows = |last: &RecordedWrite| last.lba.checked_add(last.count) == Some(*lba);
            self.counts.contiguous_writes += u64::from(self.writes.back().is_some_and(follows));
            if self.writes.len() == RECORDED_WRITES_MAX {
                self.writes.pop_front();
            }
            self.writes.push_back(RecordedWrite { lba: *lba, count, pieces: data.len(), fua: *fua });
        }
    }
}
