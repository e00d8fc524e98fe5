//! The checkpoint: index, PGs and the kept map written in the background, so that the log stays short.
//!
//! It is exact: it holds the effects of every record up to one position and of none after it. What changes while it
//! runs is serialised just before it does (`Index::touch`, `Pg::touch`). Everything is written to free blocks; the
//! anchor, written last, makes it the newest checkpoint, and only then are the blocks of the one before and of the
//! log behind it free.

use super::Store;
use super::alloc::Run;
use super::codec::{BLOCK, Put};
use super::io::Purpose;
use super::layout::{Anchor, RANGES_MAX, Range, Segment};
use super::page::{self, PAGE_DATA, Tag, pages_for};
use super::pgs::{Pg, PgSnapshot};
use loligo_config::id::{Epoch, PgId};
use loligo_config::units::Lba;
use loligo_reactor::env::{BlockDevice, DiskOp, WriteList};
use loligo_reactor::planted::{self, Bug};
use std::collections::{BTreeMap, BTreeSet};

/// Buckets that one table page names.
pub(super) const TABLE_ENTRIES: usize = 500;
const _: () = assert!(TABLE_ENTRIES * 8 <= PAGE_DATA);
/// Checkpoint writes in flight: few, so that a client's write does not queue behind them. Guessed.
const WRITES_MAX: u32 = 8;
/// Streams written in one poll: about 2 µs each.
const JOBS_MAX: usize = 8;

/// A list of page addresses.
pub(super) type Pages = Box<[u64]>;

#[derive(Debug)]
pub(super) struct Checkpoint {
    /// The newest anchor on the device.
    pub anchor: Anchor,
    /// The pages of every bucket, as last written.
    pub buckets: Vec<Pages>,
    /// The table's pages; 0: all its buckets are empty and it has none.
    pub tables: Vec<u64>,
    pub pgs: BTreeMap<PgId, Pages>,
    pub root: Pages,
    pub map: Option<(Epoch, Vec<u8>)>,
    pub map_pages: Pages,
    pub map_dirty: bool,
    /// Pages that nothing of the next checkpoint refers to.
    pub drop_next: Vec<u64>,
    /// A checkpoint is asked for.
    pub wanted: bool,
    /// Nothing may be submitted before the next one is complete.
    pub required: bool,
    /// Log blocks after which one begins.
    pub trigger: u64,
    pub completed: u64,
    running: Option<Box<Running>>,
    batch: Batch,
}

#[derive(Debug)]
struct Running {
    /// The last position in it.
    position: u64,
    number: u64,
    log_offset: u32,
    segments: Vec<Segment>,
    ranges: Vec<Range>,
    phase: Phase,
    buckets: Vec<u32>,
    pgs: Vec<PgId>,
    tables: BTreeSet<u32>,
    /// What did not find space or a buffer.
    stalled: Option<Job>,
    /// Pages of the checkpoint before that this one does not use.
    drops: Vec<u64>,
    outstanding: u32,
    /// Pages that it was expected to take, and has taken.
    cost: u64,
    spent: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Buckets,
    Pgs,
    Tables,
    Map,
    Root,
    /// Everything is handed over: wait until it is written.
    Drain,
    Flush,
    /// Wait until the log is durable up to the position.
    Log,
    Anchor,
}

#[derive(Debug)]
enum Job {
    Bucket(u32, Vec<u8>),
    Pg(PgId, PgSnapshot),
    Table(u32, Vec<u8>),
    Map(Vec<u8>),
    Root(Vec<u8>),
}

/// Pages that lie behind one another, for one write.
#[derive(Debug, Default)]
struct Batch {
    lba: u64,
    pages: WriteList,
}

impl Checkpoint {
    pub fn new(anchor: Anchor, buckets: u32, trigger: u64) -> Self {
        let buckets = buckets as usize;
        Self {
            anchor,
            buckets: vec![Pages::default(); buckets],
            tables: vec![0; buckets.div_ceil(TABLE_ENTRIES)],
            pgs: BTreeMap::new(),
            root: Pages::default(),
            map: None,
            map_pages: Pages::default(),
            map_dirty: false,
            drop_next: Vec::new(),
            wanted: false,
            required: false,
            trigger,
            completed: 0,
            running: None,
            batch: Batch::default(),
        }
    }

    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Pages that the running one still takes.
    pub fn cost_left(&self) -> u64 {
        self.running.as_ref().map_or(0, |running| running.cost.saturating_sub(running.spent))
    }

    /// Adds pages that the running checkpoint has just found it does not need.
    pub fn drop_pages(&mut self, dropped: &mut Vec<u64>) {
        let running = self.running.as_mut().map(|running| &mut running.drops);
        running.unwrap_or(&mut self.drop_next).append(dropped);
    }

    /// Every page that is allocated, aside from those of the PGs' logs.
    pub fn pages(&self) -> impl Iterator<Item = u64> + '_ {
        let lists = self.buckets.iter().chain(self.pgs.values()).chain([&self.root, &self.map_pages]);
        let drops = self.running.iter().flat_map(|running| &running.drops);
        let tables = self.tables.iter().filter(|lba| **lba != 0);
        let stalled = self.running.iter().filter_map(|running| match &running.stalled {
            Some(Job::Pg(_, snapshot)) => Some(&snapshot.written),
            _ => None,
        });
        let lists = lists.flatten().chain(stalled.flatten());
        lists.chain(tables).chain(&self.drop_next).chain(drops).copied()
    }

    pub fn memory(&self) -> u64 {
        let pages: usize = self.buckets.iter().map(|pages| pages.len() * 8 + 16).sum();
        let map = self.map.as_ref().map_or(0, |(_, map)| map.len());
        (pages + map + self.tables.len() * 8) as u64
    }
}

impl<D: BlockDevice> Store<D> {
    /// Pages that the checkpoints to come take at most, with a few for what this does not count.
    pub(super) fn checkpoint_cost(&self) -> u64 {
        let tables = self.state.index.dirty_count().min(self.checkpoint.tables.len() as u64);
        let root = pages_for(self.checkpoint.tables.len() * 8 + self.state.pgs.len() * 16 + 64) as u64;
        let map = self.checkpoint.map.as_ref().map_or(0, |(_, map)| pages_for(map.len() + 4) as u64);
        let next = self.state.index.dirty_pages() + tables + self.state.pg_pages + root + map;
        self.checkpoint.cost_left() + next + 8
    }

    fn wants_checkpoint(&self) -> bool {
        let checkpoint = &self.checkpoint;
        checkpoint.wanted
            || checkpoint.required
            || checkpoint.map_dirty
            || self.log.block_count + self.log.logged_data >= checkpoint.trigger
    }

    /// Goes on with the checkpoint, or begins one when it is time.
    pub(super) fn checkpoint_step(&mut self) -> bool {
        if self.failed.is_some() {
            return false;
        }
        if self.checkpoint.running.is_none() {
            if !self.wants_checkpoint() {
                return false;
            }
            self.begin_checkpoint();
        }
        let mut running = self.checkpoint.running.take().expect("just begun");
        let mut done_jobs = 0;
        while done_jobs < JOBS_MAX && running.outstanding < WRITES_MAX && running.phase < Phase::Drain {
            if !self.checkpoint_job(&mut running) {
                break;
            }
            done_jobs += 1;
        }
        let moved = self.advance_phase(&mut running);
        self.checkpoint.running = Some(running);
        moved || done_jobs > 0
    }

    fn begin_checkpoint(&mut self) {
        // The open record's effects are in the index: it belongs to this checkpoint.
        self.close_record();
        let cost = self.checkpoint_cost();
        let (buckets, pgs) = self.state.begin_checkpoint();
        self.checkpoint.wanted = false;
        let position = self.log.next - 1;
        let mut ranges = self.log.ranges.clone();
        while ranges.get(1).is_some_and(|next| next.start <= position + 1) {
            ranges.remove(0);
        }
        self.checkpoint.running = Some(Box::new(Running {
            position,
            number: self.checkpoint.anchor.checkpoint + 1,
            log_offset: self.log.offset,
            segments: self.log.segments().collect(),
            ranges,
            phase: Phase::Buckets,
            buckets,
            pgs,
            tables: BTreeSet::new(),
            stalled: None,
            drops: std::mem::take(&mut self.checkpoint.drop_next),
            outstanding: 0,
            cost,
            spent: 0,
        }));
        self.log.logged_data = 0;
    }

    /// Does the next piece of work; false if there is none or it has to wait.
    fn checkpoint_job(&mut self, running: &mut Running) -> bool {
        let job = running.stalled.take().or_else(|| self.next_job(running));
        let Some(job) = job else { return false };
        match self.write_job(running, job) {
            Ok(()) => true,
            Err(job) => {
                running.stalled = Some(*job);
                false
            }
        }
    }

    fn next_job(&mut self, running: &mut Running) -> Option<Job> {
        if running.phase == Phase::Buckets {
            if let Some((bucket, bytes)) = self.state.index.take_captured() {
                return Some(Job::Bucket(bucket, bytes));
            }
            while let Some(bucket) = running.buckets.pop() {
                if let Some(bytes) = self.state.index.take_pending(bucket) {
                    return Some(Job::Bucket(bucket, bytes));
                }
            }
            running.phase = Phase::Pgs;
        }
        if running.phase == Phase::Pgs {
            while let Some(pg) = running.pgs.pop() {
                let state = self.state.pgs.get_mut(&pg);
                if let Some(snapshot) = state.and_then(|state| state.take_snapshot(&mut running.drops)) {
                    return Some(Job::Pg(pg, snapshot));
                }
            }
            running.phase = Phase::Tables;
        }
        if running.phase == Phase::Tables {
            if let Some(table) = running.tables.pop_first() {
                let from = table as usize * TABLE_ENTRIES;
                let mut bytes = Vec::with_capacity(TABLE_ENTRIES * 8);
                let buckets = self.checkpoint.buckets[from..].iter().take(TABLE_ENTRIES);
                buckets.for_each(|pages| bytes.u64(pages.first().copied().unwrap_or(0)));
                return Some(Job::Table(table, bytes));
            }
            running.phase = Phase::Map;
        }
        if running.phase == Phase::Map {
            running.phase = Phase::Root;
            if std::mem::take(&mut self.checkpoint.map_dirty) {
                let (epoch, map) = self.checkpoint.map.as_ref().expect("it was kept");
                let mut bytes = Vec::with_capacity(map.len() + 4);
                bytes.u32(epoch.0);
                bytes.put(map);
                return Some(Job::Map(bytes));
            }
        }
        if running.phase == Phase::Root {
            running.phase = Phase::Drain;
            return Some(Job::Root(self.encode_root()));
        }
        None
    }

    fn encode_root(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.u64(self.checkpoint.map_pages.first().copied().unwrap_or(0));
        out.u32(self.checkpoint.buckets.len() as u32);
        self.checkpoint.tables.iter().for_each(|lba| out.u64(*lba));
        for (pg, pages) in &self.checkpoint.pgs {
            out.pg(*pg);
            out.u64(pages[0]);
        }
        out
    }

    fn write_job(&mut self, running: &mut Running, job: Job) -> Result<(), Box<Job>> {
        match job {
            Job::Bucket(bucket, bytes) => {
                let pages = if bytes.is_empty() {
                    Some(Pages::default())
                } else {
                    self.write_stream(running, Tag::Bucket(bucket), &bytes)
                };
                let Some(pages) = pages else { return Err(Box::new(Job::Bucket(bucket, bytes))) };
                let old = std::mem::replace(&mut self.checkpoint.buckets[bucket as usize], pages);
                running.drops.extend(old);
                running.tables.insert(bucket / TABLE_ENTRIES as u32);
            }
            Job::Pg(pg, snapshot) => return self.write_pg(running, pg, snapshot),
            Job::Table(table, bytes) => {
                let Some(pages) = self.write_stream(running, Tag::Table(table), &bytes) else {
                    return Err(Box::new(Job::Table(table, bytes)));
                };
                let old = std::mem::replace(&mut self.checkpoint.tables[table as usize], pages[0]);
                running.drops.extend((old != 0).then_some(old));
            }
            Job::Map(bytes) => {
                let Some(pages) = self.write_stream(running, Tag::Map, &bytes) else {
                    return Err(Box::new(Job::Map(bytes)));
                };
                running.drops.extend(std::mem::replace(&mut self.checkpoint.map_pages, pages));
            }
            Job::Root(bytes) => {
                let Some(pages) = self.write_stream(running, Tag::Root, &bytes) else {
                    // The root goes last, so its phase has passed: it is tried again as what stalled.
                    running.phase = Phase::Root;
                    return Err(Box::new(Job::Root(bytes)));
                };
                running.phase = Phase::Drain;
                running.drops.extend(std::mem::replace(&mut self.checkpoint.root, pages));
            }
        }
        Ok(())
    }

    fn write_pg(
        &mut self,
        running: &mut Running,
        pg: PgId,
        mut snapshot: PgSnapshot,
    ) -> Result<(), Box<Job>> {
        while let Some(full) = snapshot.full.first() {
            let Some(pages) = self.write_stream(running, Tag::PgLog, full) else {
                return Err(Box::new(Job::Pg(pg, snapshot)));
            };
            snapshot.full.remove(0);
            snapshot.written.push(pages[0]);
        }
        let bytes = Pg::encode(&snapshot, pg, &snapshot.written);
        let Some(pages) = self.write_stream(running, Tag::Pg, &bytes) else {
            return Err(Box::new(Job::Pg(pg, snapshot)));
        };
        running.drops.extend(self.checkpoint.pgs.insert(pg, pages).unwrap_or_default());
        if let Some(state) = self.state.pgs.get_mut(&pg) {
            state.pages_written(&snapshot.written);
        }
        Ok(())
    }

    /// Writes a stream to free blocks; `None`, and nothing done, if there are not enough or no buffers.
    fn write_stream(&mut self, running: &mut Running, tag: Tag, bytes: &[u8]) -> Option<Pages> {
        let count = pages_for(bytes.len());
        let mut buffers = Vec::with_capacity(count);
        for _ in 0..count {
            buffers.push(self.pool.alloc(BLOCK).ok()?);
        }
        let mut runs = Vec::new();
        if !self.alloc.alloc_low(u32::try_from(count).ok()?, &mut runs) {
            self.checkpoint_short_of_space();
            return None;
        }
        let lbas: Pages = runs.iter().flat_map(|run| run.lba..run.end()).collect();
        for (at, mut block) in buffers.into_iter().enumerate() {
            let next = lbas.get(at + 1).copied().unwrap_or(0);
            let data = &bytes[at * PAGE_DATA..bytes.len().min((at + 1) * PAGE_DATA)];
            page::encode(&mut block, &self.identity, lbas[at], next, running.number, tag, data);
            let batch = &self.checkpoint.batch;
            let full = batch.pages.is_full() || batch.pages.len() >= self.transfer_max as usize;
            if full || batch.lba + batch.pages.len() as u64 != lbas[at] {
                self.flush_batch(running);
                self.checkpoint.batch.lba = lbas[at];
            }
            self.checkpoint.batch.pages.push(block.freeze());
        }
        running.spent += count as u64;
        Some(lbas)
    }

    fn flush_batch(&mut self, running: &mut Running) {
        let data = std::mem::take(&mut self.checkpoint.batch.pages);
        if data.is_empty() {
            return;
        }
        let lba = Lba(self.checkpoint.batch.lba);
        running.outstanding += 1;
        self.io.send_background(DiskOp::Write { lba, data, fua: false }, Purpose::Page.ticket(0));
    }

    fn advance_phase(&mut self, running: &mut Running) -> bool {
        match running.phase {
            Phase::Drain => {
                self.flush_batch(running);
                if running.outstanding > 0 {
                    return false;
                }
                let flushes = self.volatile && !planted::active(Bug::CheckpointWithoutFlush);
                running.phase = if flushes { Phase::Flush } else { Phase::Log };
                if flushes {
                    running.outstanding = 1;
                    self.io.send_background(DiskOp::Flush, Purpose::Flush.ticket(0));
                }
                true
            }
            Phase::Flush if running.outstanding == 0 => {
                running.phase = Phase::Log;
                true
            }
            Phase::Log if self.log.durable >= running.position => self.write_anchor(running),
            _ => false,
        }
    }

    fn write_anchor(&mut self, running: &mut Running) -> bool {
        let anchor = Anchor {
            sequence: self.checkpoint.anchor.sequence + 1,
            root: self.checkpoint.root[0],
            checkpoint: running.number,
            log_start: running.position + 1 + u64::from(planted::active(Bug::CheckpointCoversTooMuch)),
            log_offset: running.log_offset,
            segments: running.segments.clone(),
            ranges: running.ranges.clone(),
        };
        let Ok(mut blocks) = self.pool.alloc(2 * BLOCK) else { return false };
        anchor.encode(&mut blocks, &self.superblock, self.shard);
        let lba = Lba(anchor.lba(&self.superblock, self.shard));
        self.checkpoint.anchor = anchor;
        running.phase = Phase::Anchor;
        running.outstanding = 1;
        let data = WriteList::from_iter([blocks.freeze()]);
        let fua = self.volatile && !planted::active(Bug::AnchorWithoutFua);
        let op = DiskOp::Write { lba, data, fua };
        self.io.send_background(op, Purpose::Anchor.ticket(0));
        true
    }

    /// A page, the flush or the anchor is written.
    pub(super) fn checkpoint_completed(&mut self) {
        let running = self.checkpoint.running.as_mut().expect("its write has just ended");
        running.outstanding -= 1;
        if running.phase == Phase::Anchor {
            self.finish_checkpoint();
        }
    }

    fn finish_checkpoint(&mut self) {
        let running = self.checkpoint.running.take().expect("it is being finished");
        self.checkpoint.completed += 1;
        self.checkpoint.required = false;
        for lba in running.drops {
            self.alloc.release(Run { lba, count: 1 });
        }
        let free_to = running.position + u64::from(planted::active(Bug::CheckpointFreesLiveRecord));
        while self.log.blocks.front().is_some_and(|(position, _)| *position <= free_to) {
            let (_, run) = self.log.blocks.pop_front().expect("just seen");
            self.log.block_count -= u64::from(run.count);
            self.alloc.release(run);
        }
        self.log.start = running.position + 1;
        self.checkpointed(running.position);
        self.log.ranges = running.ranges;
        assert!(self.log.ranges.len() <= RANGES_MAX);
        let named = running.segments.last().map_or(0, |segment| segment.ordinal);
        self.log.named = self.log.named.max(named);
        self.release_chunks();
    }

    /// Keeps a cluster map on the device, in the background. The newest epoch wins.
    pub fn keep_map(&mut self, epoch: Epoch, map: &[u8]) {
        if self.checkpoint.map.as_ref().is_some_and(|(kept, _)| *kept >= epoch) {
            return;
        }
        self.checkpoint.map = Some((epoch, map.to_vec()));
        self.checkpoint.map_dirty = true;
    }

    /// The newest map that was kept.
    pub fn kept_map(&self) -> Option<(Epoch, &[u8])> {
        self.checkpoint.map.as_ref().map(|(epoch, map)| (*epoch, &map[..]))
    }

    /// Takes a removed PG's pages out of the checkpoint.
    pub(super) fn drop_pg_pages(&mut self, id: PgId, pg: &Pg) {
        assert!(self.checkpoint.running.is_none(), "a PG is not removed while a checkpoint runs");
        self.checkpoint.drop_next.extend(pg.page_lbas());
        self.checkpoint.drop_next.extend(self.checkpoint.pgs.remove(&id).unwrap_or_default());
    }
}
