//! The tail rule and the replay (DESIGN section 4, RELIABILITY section 3): which records of a log count, and what
//! they make of the state that the checkpoint left.

use super::alloc::Run;
use super::codec::{BLOCK, Identity, crc32c};
use super::layout::{Anchor, Range, Segment, Superblock};
use super::record::{Entry, EntryKind, Record};
use super::state::{Leftovers, State};
use loligo_config::id::{ObjectId, ObjectVersion, PgId};
use loligo_reactor::planted::{self, Bug};
use std::collections::BTreeMap;

/// A record that was found.
#[derive(Debug)]
pub(super) struct Found {
    pub record: Record,
    pub lba: u64,
    /// Whether the data behind it is what its checksums say.
    pub inline_right: bool,
}

/// Every record found in the segments that can be reached.
#[derive(Debug)]
pub(super) struct Scan {
    superblock: Superblock,
    identity: Identity,
    ranges: Vec<Range>,
    log_start: u64,
    pub found: BTreeMap<u64, Found>,
    /// Segments known, by ordinal.
    pub segments: BTreeMap<u64, Segment>,
}

impl Scan {
    pub fn new(superblock: Superblock, identity: Identity, anchor: &Anchor) -> Self {
        let segments = anchor.segments.iter().map(|segment| (segment.ordinal, *segment)).collect();
        let (ranges, log_start) = (anchor.ranges.clone(), anchor.log_start);
        Self { superblock, identity, ranges, log_start, found: BTreeMap::new(), segments }
    }

    /// Whether a record of this generation may be at this position: else it was cut off by an earlier mount. One that
    /// names places outside of the chunks, or a position that a device of this size cannot have reached since the
    /// checkpoint, was written by no store.
    fn accepts(&self, record: &Record) -> bool {
        let range = self.ranges.iter().rev().find(|range| range.start <= record.position);
        let generation = range.is_some_and(|range| {
            range.generation == record.generation || planted::active(Bug::OldGenerationAccepted)
        });
        let reachable = (self.log_start..=self.log_start + self.superblock.blocks).contains(&record.position);
        let mut runs = record.entries.iter().flat_map(|entry| &entry.runs);
        reachable
            && generation
            && record.segments.iter().all(|at| self.superblock.holds(at.lba, u64::from(at.len)))
            && runs.all(|run| self.superblock.holds(run.lba, u64::from(run.count)))
    }

    /// Looks for records in the blocks of a segment from `offset` on.
    pub fn segment(&mut self, segment: Segment, offset: u32, bytes: &[u8]) {
        let blocks: Vec<&[u8]> = bytes.chunks_exact(BLOCK).collect();
        let mut at = offset as usize;
        while let Some(block) = blocks.get(at) {
            let lba = segment.lba + at as u64;
            at += 1;
            let Some(record) = Record::decode(block, &self.identity, lba) else { continue };
            let inline = record.inline as usize;
            if !self.accepts(&record)
                || record.segments.first() != Some(&segment)
                || at + inline > blocks.len()
            {
                continue;
            }
            let inline_right = inline_right(&record, lba, &blocks[at..at + inline]);
            for named in &record.segments {
                self.segments.entry(named.ordinal).or_insert(*named);
            }
            at += inline;
            self.found.insert(record.position, Found { record, lba, inline_right });
        }
    }

    /// The highest position that is known to have been durable.
    pub fn mark(&self) -> u64 {
        let marks = self.found.values().map(|found| found.record.mark);
        let begun = self.ranges.last().map_or(0, |range| range.start.saturating_sub(1));
        marks.max().unwrap_or(0).max(begun).max(self.log_start - 1)
    }

    /// Data above the mark that is not behind its record, and so still has to be read and checked: (position, run,
    /// checksums).
    pub fn unverified(&self) -> Vec<(u64, Run, Vec<u32>)> {
        let mark = self.mark();
        let mut out = Vec::new();
        for (position, found) in self.found.range(mark + 1..) {
            for entry in &found.record.entries {
                let mut at = 0;
                for run in &entry.runs {
                    let checksums = &entry.checksums[at..at + run.count as usize];
                    at += run.count as usize;
                    if !is_inline(found, *run) {
                        out.push((*position, *run, checksums.to_vec()));
                    }
                }
            }
        }
        out
    }

    /// The first position of the torn tail. `wrong` are the positions whose data was read and found wrong.
    pub fn cut(&self, wrong: &[u64]) -> u64 {
        let mut position = if planted::active(Bug::CutBelowMark) { self.log_start } else { self.mark() + 1 };
        while self.found.get(&position).is_some_and(|found| {
            (found.inline_right || planted::active(Bug::TornTailAccepted)) && !wrong.contains(&position)
        }) {
            position += 1;
        }
        position
    }

    /// The PG versions that a missing record made, from the echo of a later one; `None` if no echo reaches it.
    fn echo_of(&self, position: u64) -> Option<Vec<PgId>> {
        let mut later = self.found.range(position + 1..).map(|(_, found)| &found.record);
        let witness = later.find(|record| record.echo_from <= position)?;
        let touched = witness.echo.iter().filter(|touched| touched.position == position);
        Some(touched.map(|touched| touched.pg).collect())
    }
}

fn is_inline(found: &Found, run: Run) -> bool {
    let first = found.lba + 1;
    run.lba >= first && run.end() <= first + u64::from(found.record.inline)
}

fn inline_right(record: &Record, lba: u64, data: &[&[u8]]) -> bool {
    record.entries.iter().all(|entry| {
        let lbas = entry.runs.iter().flat_map(|run| run.lba..run.end());
        lbas.zip(&entry.checksums).all(|(block, checksum)| {
            let at = block.checked_sub(lba + 1).and_then(|at| usize::try_from(at).ok());
            at.and_then(|at| data.get(at)).is_none_or(|bytes| crc32c(bytes) == *checksum)
        })
    })
}

/// What a replay found out.
#[derive(Debug, Default)]
pub(super) struct Replayed {
    /// Positions that were durable and are lost.
    pub lost: Vec<u64>,
    /// Who wrote each block of the log last, if anything was lost: then the index may hold older claims.
    pub writers: BTreeMap<u64, (ObjectId, ObjectVersion)>,
    pub left: Leftovers,
    /// PGs removed.
    pub removed: Vec<PgId>,
}

/// Applies the records before `cut` to what the checkpoint held.
pub(super) fn replay(scan: &Scan, cut: u64, state: &mut State) -> Replayed {
    let lost = (scan.log_start..cut).filter(|position| !scan.found.contains_key(position)).collect();
    let mut replayed = Replayed { lost, ..Replayed::default() };
    for position in scan.log_start..cut {
        let Some(found) = scan.found.get(&position) else {
            lose(scan.echo_of(position), state, &mut replayed);
            continue;
        };
        for entry in &found.record.entries {
            check_chain(entry, state, &mut replayed);
            if entry.kind == EntryKind::RemovePg && state.pgs.contains_key(&entry.pg) {
                replayed.removed.push(entry.pg);
            }
            state.apply(entry, &mut replayed.left);
            replayed.left.freed.clear();
            if !replayed.lost.is_empty() {
                let lbas = entry.runs.iter().flat_map(|run| run.lba..run.end());
                replayed.writers.extend(lbas.map(|lba| (lba, (entry.object, entry.version))));
            }
        }
    }
    replayed
}

/// A record below the mark is lost: the PGs that it touched are incomplete here, or all if nothing tells which.
fn lose(touched: Option<Vec<PgId>>, state: &mut State, replayed: &mut Replayed) {
    let pgs = touched.unwrap_or_else(|| state.pgs.keys().copied().collect());
    for id in pgs {
        let pg = state.pgs.entry(id).or_default();
        pg.touch(&mut replayed.left.dropped);
        pg.status.incomplete = true;
        pg.clear_log(&mut replayed.left.dropped);
    }
}

fn check_chain(entry: &Entry, state: &mut State, replayed: &mut Replayed) {
    if matches!(entry.kind, EntryKind::Meta | EntryKind::RemovePg) {
        return;
    }
    let known = state.pgs.contains_key(&entry.pg);
    let pg = state.pgs.entry(entry.pg).or_default();
    if !known || pg.status.last != entry.previous {
        pg.touch(&mut replayed.left.dropped);
        pg.status.incomplete = true;
        pg.clear_log(&mut replayed.left.dropped);
    }
}
