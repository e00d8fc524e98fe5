//! The end of a mount: where the log goes on, which blocks are free.

use super::{Mount, MountError, Phase};
use crate::store::alloc::{Allocator, Run};
use crate::store::index::FRAGMENT_BLOCKS;
use crate::store::layout::{RANGES_MAX, Range, Segment};
use crate::store::log::LogStart;
use crate::store::replay::{Replayed, Scan, replay};
use loligo_config::id::{ObjectId, ObjectVersion, PgId};
use loligo_reactor::env::BlockDevice;
use std::collections::{BTreeSet, VecDeque};

impl<D: BlockDevice> Mount<D> {
    /// Cuts the tail, replays, and finds out which blocks are free.
    pub(super) fn resolve(&mut self) -> Result<(), MountError> {
        let scan = self.scan.take().expect("the log has been read");
        let cut = scan.cut(&self.wrong);
        let mut replayed = replay(&scan, cut, &mut self.state);
        let checkpoint = self.checkpoint.as_mut().expect("loaded");
        checkpoint.drop_next.append(&mut replayed.left.dropped);
        for (id, pg) in replayed.removed.iter().zip(&replayed.left.removed) {
            checkpoint.drop_next.extend(pg.page_lbas());
            checkpoint.drop_next.extend(checkpoint.pgs.remove(id).unwrap_or_default());
        }
        if !replayed.lost.is_empty() {
            tracing::error!(shard = self.shard.0, lost = ?replayed.lost, "durable log records are lost");
        }
        if self.damaged {
            for pg in self.state.pgs.values_mut() {
                pg.touch(&mut Vec::new());
                pg.status.incomplete = true;
            }
        }
        self.required |= self.damaged || !replayed.lost.is_empty();
        let log = self.log_start(&scan, cut);
        let alloc = self.rebuild(&log, &replayed)?;
        for pg in self.state.pgs.values_mut() {
            pg.status.durable = pg.status.last;
        }
        self.state.recount();
        self.ready = Some((alloc, log));
        self.phase = Phase::Claims;
        Ok(())
    }

    /// Where the log goes on.
    pub(super) fn log_start(&mut self, scan: &Scan, cut: u64) -> LogStart {
        let kept = || scan.found.range(..cut);
        let last = kept().next_back().map(|(_, found)| found);
        let (segments, offset) = match last {
            Some(found) => {
                let current = found.record.segments[0];
                let offset = (found.lba - current.lba) as u32 + 1 + found.record.inline;
                (found.record.segments.clone(), offset)
            }
            None => (self.anchor.segments.clone(), self.anchor.log_offset),
        };
        let mut ranges = self.anchor.ranges.clone();
        let generation = ranges.last().map_or(1, |range| range.generation + 1);
        // A generation of which nothing survived leaves no range: the list does not grow while crashes follow one
        // another without a write in between.
        if ranges.last().is_some_and(|range| range.start == cut) {
            ranges.pop();
        }
        ranges.push(Range { start: cut, generation });
        self.required |= ranges.len() >= RANGES_MAX - 2;
        let mut segments = VecDeque::from(segments);
        let current = segments.pop_front().unwrap_or(Segment { ordinal: 0, lba: 0, len: 0 });
        let blocks = kept().map(|(position, found)| (*position, Run { lba: found.lba, count: 1 })).collect();
        LogStart {
            generation,
            ranges,
            next: cut,
            start: self.anchor.log_start,
            current,
            offset,
            upcoming: segments,
            blocks,
            segment_blocks: (self.superblock.chunk_blocks / 4).min(1024) as u32,
        }
    }

    pub(super) fn add_owned_chunks(&mut self, alloc: &mut Allocator, log: &LogStart) {
        self.chunks.owned_by(self.shard).for_each(|chunk| alloc.add_chunk(chunk));
        // Chunks whose claim is unreadable and that the index, the checkpoint or the log refers to are taken back.
        let runs = self.state.index.fragments().flat_map(|fragment| fragment.runs().map(|run| run.lba));
        let pages = self.checkpoint.as_ref().expect("loaded").pages();
        let pg_logs = self.state.pgs.values().flat_map(|pg| pg.page_lbas());
        let segments = [log.current].into_iter().chain(log.upcoming.iter().copied());
        let segments = segments.filter(|segment| segment.len > 0).map(|segment| segment.lba);
        let records = log.blocks.iter().map(|(_, run)| run.lba);
        for lba in runs.chain(pages).chain(pg_logs).chain(segments).chain(records) {
            if alloc.owns(lba) {
                continue;
            }
            if let Some(chunk) = self.superblock.chunk_of(lba).filter(|c| self.chunks.reclaim(self.shard, *c))
            {
                alloc.add_chunk(chunk);
                self.writes.claims.push(chunk);
            }
        }
    }

    pub(super) fn rebuild(&mut self, log: &LogStart, replayed: &Replayed) -> Result<Allocator, MountError> {
        let mut alloc = Allocator::new(self.superblock);
        self.add_owned_chunks(&mut alloc, log);
        let pg_logs = self.state.pgs.values().flat_map(|pg| pg.page_lbas());
        for lba in self.checkpoint.as_ref().expect("loaded").pages().chain(pg_logs) {
            if !alloc.mark_used(Run { lba, count: 1 }) {
                // Streams that could not be read are known by their first page only; no page is in two streams.
                return Err(self.damaged_error("checkpoint's page list"));
            }
        }
        let left = log.current.len - log.offset.min(log.current.len);
        let current = Run { lba: log.current.lba + u64::from(log.offset), count: left };
        let upcoming = log.upcoming.iter().map(|segment| Run { lba: segment.lba, count: segment.len });
        let records = log.blocks.iter().map(|(_, run)| *run);
        for run in records.chain(upcoming).chain([current]).filter(|run| run.count > 0) {
            if !alloc.mark_used(run) {
                return Err(self.damaged_error("log's segment list"));
            }
        }
        self.mark_extents(&mut alloc, replayed);
        Ok(alloc)
    }

    /// Marks the data. A block that seems to have two owners is possible only after a loss: a lost record freed it,
    /// a later one has used it. The last writer keeps it, for the others it is lost.
    pub(super) fn mark_extents(&mut self, alloc: &mut Allocator, replayed: &Replayed) {
        let mut contested: BTreeSet<u64> = BTreeSet::new();
        for run in self.state.index.fragments().flat_map(|fragment| fragment.runs()) {
            if !alloc.mark_used(run) {
                for lba in run.lba..run.end() {
                    if !alloc.mark_used(Run { lba, count: 1 }) {
                        contested.insert(lba);
                    }
                }
            }
        }
        if contested.is_empty() {
            return;
        }
        let mut losers: Vec<(ObjectId, u32, PgId)> = Vec::new();
        let mut kept: BTreeSet<u64> = BTreeSet::new();
        for fragment in self.state.index.fragments() {
            for extent in &fragment.extents {
                for at in 0..extent.count() {
                    let lba = extent.lba() + u64::from(at);
                    if !contested.contains(&lba) {
                        continue;
                    }
                    let writer: Option<&(ObjectId, ObjectVersion)> = replayed.writers.get(&lba);
                    if writer == Some(&(fragment.object, extent.version)) {
                        kept.insert(lba);
                    } else {
                        let block = fragment.number * FRAGMENT_BLOCKS + extent.block() + at;
                        losers.push((fragment.object, block, fragment.pg));
                    }
                }
            }
        }
        for (object, block, pg) in losers {
            self.state.index.lose(object, block);
            let pg = self.state.pgs.entry(pg).or_default();
            pg.touch(&mut Vec::new());
            pg.status.incomplete = true;
        }
        self.required = true;
    }

    /// Takes the chunks and segments that a shard needs to write at all.
    pub(super) fn settle(&mut self) -> Result<(), MountError> {
        let (alloc, log) = self.ready.as_mut().expect("resolved");
        if log.current.len > 0 {
            return Ok(());
        }
        while log.upcoming.len() < 3 {
            let want = log.segment_blocks;
            let run = alloc.alloc_run(want, 1).ok_or(MountError::NoSpace { shard: self.shard.0 })?;
            let ordinal = log.upcoming.back().map_or(1, |last| last.ordinal + 1);
            log.upcoming.push_back(Segment { ordinal, lba: run.lba, len: run.count });
        }
        log.current = log.upcoming.pop_front().expect("just filled");
        log.offset = 0;
        self.anchor.segments = [log.current].into_iter().chain(log.upcoming.iter().copied()).collect();
        Ok(())
    }
}
