//! The volatile part of a model: writes that the medium does not have yet, in units that tear.
//!
//! A write is kept from its submission until every unit of it is on the medium, superseded there by a later write, or
//! lost. A unit is 512 bytes, or 4 KiB on a device that does not tear blocks.
//!
//! ```text
//!   Waiting ──lands (completion, or earlier by chance)──▶ Cached ──destage──▶ Done
//!      └──────────── the write failed, this unit with it ────────────────────▶ Done
//! ```
//! Reads see the medium below the `Cached` units in the order of submission. A power cut may keep or lose each
//! `Waiting` and `Cached` unit independently; kept ones apply in the order of submission.

use super::backing::Backing;
use super::prng::{below, mix, noise};
use loligo_config::units::{BLOCK_SIZE, BlockCount, ByteOffset, Lba};
use loligo_reactor::env::{Entropy, WriteList};
use std::collections::BTreeMap;
use std::io;

const BLOCK_LEN: usize = BLOCK_SIZE as usize;

/// What one unit of a write is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Waiting,
    Cached,
    Done,
}

/// The bytes of a write.
#[derive(Debug)]
pub(super) enum Content {
    /// While in flight: the caller's buffers, as a device would read them by DMA.
    Lent(Box<WriteList>),
    /// Afterwards: the device's own memory.
    Own(Vec<u8>),
    Zeroes,
    /// Undefined: some blocks keep what they had, some read as zero, some as noise.
    Discarded {
        seed: u64,
    },
}

impl Content {
    fn copy(&self, at: usize, into: &mut [u8]) {
        match self {
            Self::Own(bytes) => into.copy_from_slice(&bytes[at..at + into.len()]),
            Self::Zeroes => into.fill(0),
            Self::Lent(pieces) => copy_pieces(pieces, at, into),
            Self::Discarded { seed } => {
                let unit_seed = seed ^ mix(at as u64);
                if unit_seed & 1 == 0 { into.fill(0) } else { noise(unit_seed, into) }
            }
        }
    }
}

fn copy_pieces(pieces: &WriteList, at: usize, into: &mut [u8]) {
    let (mut skip, mut filled) = (at, 0);
    for piece in pieces {
        if skip >= piece.len() {
            skip -= piece.len();
            continue;
        }
        let step = (piece.len() - skip).min(into.len() - filled);
        into[filled..filled + step].copy_from_slice(&piece[skip..skip + step]);
        filled += step;
        skip = 0;
    }
    assert_eq!(filled, into.len(), "a write has as many bytes as its blocks");
}

#[derive(Debug)]
pub(super) struct CachedWrite {
    pub lba: Lba,
    pub count: BlockCount,
    content: Content,
    pub units: Vec<Unit>,
    open: usize,
    /// Its place in the order of completions, once it has one.
    pub completed: Option<u64>,
}

/// All writes that are not wholly on the medium.
#[derive(Debug)]
pub(super) struct Cache {
    unit_len: usize,
    writes: BTreeMap<u64, CachedWrite>,
    /// The writes of each block, in the order of submission.
    by_block: BTreeMap<u64, Vec<u64>>,
    /// Blocks of completed writes, counted once per write.
    completed_blocks: u64,
    scratch: Vec<u8>,
}

impl Cache {
    pub fn new(unit_len: usize) -> Self {
        assert_eq!(BLOCK_LEN % unit_len, 0, "a block is a whole number of units");
        Self {
            unit_len,
            writes: BTreeMap::new(),
            by_block: BTreeMap::new(),
            completed_blocks: 0,
            scratch: Vec::new(),
        }
    }

    fn units_per_block(&self) -> usize {
        BLOCK_LEN / self.unit_len
    }

    /// Takes note of a write at its submission; `sequence` is above all earlier ones.
    pub fn begin(&mut self, sequence: u64, lba: Lba, count: BlockCount, content: Content) {
        let blocks = usize::try_from(count.0).expect("a device that fits into memory");
        let units = vec![Unit::Waiting; blocks * self.units_per_block()];
        for block in lba.0..lba.0 + count.0 {
            self.by_block.entry(block).or_default().push(sequence);
        }
        let open = units.len();
        let write = CachedWrite { lba, count, content, units, open, completed: None };
        let last = self.writes.insert(sequence, write);
        assert!(last.is_none(), "a sequence names one write");
    }

    /// The write is complete: what still waits lands in the cache, and the caller's buffers are let go.
    pub fn complete(&mut self, sequence: u64, completion: u64) {
        self.settle(sequence, completion, |_| Unit::Cached);
    }

    /// The write failed: each unit that had not landed lands or is lost.
    pub fn fail(&mut self, sequence: u64, completion: u64, entropy: &mut impl Entropy) {
        self.settle(sequence, completion, |_| if below(entropy, 2) == 0 { Unit::Cached } else { Unit::Done });
    }

    /// A discard is complete: its blocks have lost their content, or not.
    pub fn complete_discard(&mut self, sequence: u64, completion: u64, seed: u64) {
        let per_block = self.units_per_block();
        self.settle(sequence, completion, |unit| {
            let keeps = mix(seed ^ (unit / per_block) as u64).is_multiple_of(3);
            if keeps { Unit::Done } else { Unit::Cached }
        });
    }

    fn settle(&mut self, sequence: u64, completion: u64, mut becomes: impl FnMut(usize) -> Unit) {
        let Some(write) = self.writes.get_mut(&sequence) else {
            return; // a lost write was never begun
        };
        for (index, unit) in write.units.iter_mut().enumerate() {
            if *unit == Unit::Waiting {
                *unit = becomes(index);
                write.open -= usize::from(*unit == Unit::Done);
            }
        }
        write.completed = Some(completion);
        self.completed_blocks += write.count.0;
        if write.open > 0
            && let Content::Lent(pieces) = &write.content
        {
            let mut bytes = vec![0; write.units.len() * self.unit_len];
            copy_pieces(pieces, 0, &mut bytes);
            write.content = Content::Own(bytes);
        }
        self.forget_if_done(sequence);
    }

    /// Puts what the cache knows over what was read from the medium. Units in flight are old or new by chance, and
    /// once seen new they stay new.
    pub fn overlay(&mut self, lba: Lba, into: &mut [u8], entropy: &mut impl Entropy) {
        let per_block = self.units_per_block();
        let end = lba.0 + (into.len() / BLOCK_LEN) as u64;
        for (&block, sequences) in self.by_block.range(lba.0..end) {
            let target = (block - lba.0) as usize * BLOCK_LEN;
            for sequence in sequences {
                let write = self.writes.get_mut(sequence).expect("the index names kept writes");
                let first = (block - write.lba.0) as usize * per_block;
                for unit in first..first + per_block {
                    if write.units[unit] == Unit::Waiting && below(entropy, 2) == 0 {
                        write.units[unit] = Unit::Cached;
                    }
                    if write.units[unit] == Unit::Cached {
                        let at = target + (unit - first) * self.unit_len;
                        write.content.copy(unit * self.unit_len, &mut into[at..at + self.unit_len]);
                    }
                }
            }
        }
    }

    /// Writes units of one write to the medium, in runs; `which` chooses among those that are not done.
    pub fn destage(
        &mut self,
        sequence: u64,
        backing: &mut impl Backing,
        mut which: impl FnMut(usize) -> bool,
    ) -> io::Result<()> {
        let Some(write) = self.writes.get(&sequence) else {
            return Ok(());
        };
        let count = write.units.len();
        let mut at = 0;
        while at < count {
            let run = self.run(sequence, at, &mut which);
            if run == 0 {
                at += 1;
                continue;
            }
            self.write_run(sequence, at, run, backing)?;
            at += run;
        }
        self.forget_if_done(sequence);
        Ok(())
    }

    /// How many units from `first` on are to be written.
    fn run(&self, sequence: u64, first: usize, which: &mut impl FnMut(usize) -> bool) -> usize {
        let write = &self.writes[&sequence];
        let open = |unit: &usize| write.units[*unit] != Unit::Done;
        (first..write.units.len()).take_while(|unit| open(unit) && which(*unit)).count()
    }

    fn write_run(
        &mut self,
        sequence: u64,
        first: usize,
        run: usize,
        backing: &mut impl Backing,
    ) -> io::Result<()> {
        let write = &self.writes[&sequence];
        let lba = write.lba;
        self.scratch.resize(run * self.unit_len, 0);
        for (index, bytes) in self.scratch.chunks_mut(self.unit_len).enumerate() {
            write.content.copy((first + index) * self.unit_len, bytes);
        }
        let start = lba.to_bytes().expect("checked at submission").0 + (first * self.unit_len) as u64;
        backing.write_at(ByteOffset(start), &self.scratch)?;
        for unit in first..first + run {
            self.finish_unit(sequence, lba, unit);
        }
        Ok(())
    }

    /// This unit is on the medium: it is done, and so are older writes of the same place.
    fn finish_unit(&mut self, sequence: u64, lba: Lba, unit: usize) {
        let per_block = self.units_per_block();
        let block = lba.0 + (unit / per_block) as u64;
        let sequences = self.by_block.get(&block).cloned().unwrap_or_default();
        for older in sequences.into_iter().take_while(|other| *other <= sequence) {
            let write = self.writes.get_mut(&older).expect("the index names kept writes");
            let its_unit = (block - write.lba.0) as usize * per_block + unit % per_block;
            if write.units[its_unit] != Unit::Done {
                write.units[its_unit] = Unit::Done;
                write.open -= 1;
            }
            if older != sequence {
                self.forget_if_done(older);
            }
        }
    }

    /// A unit that is lost: the device believes that it has been written.
    fn lose(&mut self, sequence: u64, unit: usize) {
        let write = self.writes.get_mut(&sequence).expect("only kept writes are lost");
        if write.units[unit] != Unit::Done {
            write.units[unit] = Unit::Done;
            write.open -= 1;
        }
    }

    fn forget_if_done(&mut self, sequence: u64) {
        let done =
            self.writes.get(&sequence).is_some_and(|write| write.open == 0 && write.completed.is_some());
        if !done {
            return;
        }
        let write = self.writes.remove(&sequence).expect("it was there");
        self.completed_blocks -= write.count.0;
        for block in write.lba.0..write.lba.0 + write.count.0 {
            let sequences =
                self.by_block.get_mut(&block).expect("the index names every block of a kept write");
            sequences.retain(|other| *other != sequence);
            if sequences.is_empty() {
                self.by_block.remove(&block);
            }
        }
    }

    /// Makes every write durable that completed at or before `completion`.
    pub fn flush(&mut self, completion: u64, backing: &mut impl Backing) -> io::Result<()> {
        for sequence in self.completed_until(completion) {
            self.destage(sequence, backing, |_| true)?;
        }
        Ok(())
    }

    /// A flush failed: of what it covers, some is durable, some still cached, and some lost.
    pub fn fail_flush(
        &mut self,
        completion: u64,
        backing: &mut impl Backing,
        entropy: &mut impl Entropy,
    ) -> io::Result<()> {
        for sequence in self.completed_until(completion) {
            self.destage(sequence, backing, |_| below(entropy, 3) == 0)?;
            let units = self.writes.get(&sequence).map_or(0, |write| write.units.len());
            for unit in 0..units {
                if below(entropy, 2) == 0 {
                    self.lose(sequence, unit);
                }
            }
            self.forget_if_done(sequence);
        }
        Ok(())
    }

    fn completed_until(&self, completion: u64) -> Vec<u64> {
        let covered = |write: &CachedWrite| write.completed.is_some_and(|at| at <= completion);
        self.writes.iter().filter(|(_, write)| covered(write)).map(|(sequence, _)| *sequence).collect()
    }

    /// Writes a random unit to the medium, of a write in flight or complete. By chance it finds none.
    pub fn destage_some(&mut self, backing: &mut impl Backing, entropy: &mut impl Entropy) -> io::Result<()> {
        let (Some((&first, _)), Some((&last, _))) =
            (self.writes.first_key_value(), self.writes.last_key_value())
        else {
            return Ok(());
        };
        let from = first + below(entropy, last - first + 1);
        let (&sequence, write) = self.writes.range(from..).next().expect("`last` is at or above `from`");
        let units = write.units.len() as u64;
        let discard_in_flight =
            write.completed.is_none() && matches!(write.content, Content::Discarded { .. });
        if units == 0 || discard_in_flight {
            return Ok(());
        }
        let chosen = usize::try_from(below(entropy, units)).expect("an index into a vector");
        self.destage(sequence, backing, |unit| unit == chosen)
    }

    /// Keeps the cache within its bound: the oldest completed writes go to the medium.
    pub fn shrink(&mut self, blocks_max: u64, backing: &mut impl Backing) -> io::Result<()> {
        while self.completed_blocks > blocks_max {
            let oldest = self.writes.iter().find(|(_, write)| write.completed.is_some());
            let sequence = *oldest.expect("completed blocks belong to completed writes").0;
            self.destage(sequence, backing, |_| true)?;
        }
        Ok(())
    }

    /// Writes everything that the cache has of one block to the medium, completed writes only.
    pub fn destage_block(&mut self, lba: Lba, backing: &mut impl Backing) -> io::Result<()> {
        let per_block = self.units_per_block();
        for sequence in self.by_block.get(&lba.0).cloned().unwrap_or_default() {
            let Some(write) = self.writes.get(&sequence).filter(|write| write.completed.is_some()) else {
                continue;
            };
            let first = (lba.0 - write.lba.0) as usize * per_block;
            self.destage(sequence, backing, |unit| (first..first + per_block).contains(&unit))?;
        }
        Ok(())
    }

    /// The writes that the medium does not have, in the order of submission.
    pub fn writes(&self) -> impl Iterator<Item = (u64, &CachedWrite)> {
        self.writes.iter().map(|(sequence, write)| (*sequence, write))
    }

    /// Copies one unit of a write to another medium.
    pub fn copy_unit(&self, sequence: u64, unit: usize, to: &mut impl Backing) -> io::Result<()> {
        let write = &self.writes[&sequence];
        let mut bytes = vec![0; self.unit_len];
        write.content.copy(unit * self.unit_len, &mut bytes);
        let start = write.lba.to_bytes().expect("checked at submission").0 + (unit * self.unit_len) as u64;
        to.write_at(ByteOffset(start), &bytes)
    }

    /// Everything volatile is gone.
    pub fn clear(&mut self) {
        self.writes.clear();
        self.by_block.clear();
        self.completed_blocks = 0;
    }
}
