//! Mount: anchor, checkpoint, log, tail rule, then a store that goes on where the log ends.
//!
//! Phases, each waiting for the reads and writes of the one before:
//!
//! ```text
//! Anchors -> Root -> Tables -> Buckets -> Pgs -> PgLogs -> Map -> Log -> Tail -> Claims -> Flush -> Anchor
//! ```

use super::alloc::{Allocator, Run};
use super::api::LogEntry;
use super::checkpoint::Checkpoint;
use super::chunks::ChunkTable;
use super::codec::{BLOCK, Identity, crc32c};
use super::fetch::{Chains, Fetch, Fetched};
use super::io::Io;
use super::layout::{ANCHOR_BLOCKS, Anchor, Segment, Superblock, encode_claim};
use super::log::{Log, LogStart};
use super::page::Tag;
use super::read::Reads;
use super::replay::Scan;
use super::space::Discards;
use super::state::{Leftovers, State};
use super::{Store, write_op};
use loligo_config::id::{PgId, ShardId};
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::{
    BlockDevice, Completions, DiskError, DiskOp, Instant, QueueFull, Ticket, WriteCache,
};
use loligo_reactor::planted::{self, Bug};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Reads taken in one poll: bounds it.
const READS_PER_POLL: usize = 256;
/// Blocks of a long read.
const READ_BLOCKS: u32 = 64;

mod load;
mod settle;

/// Why a shard could not be mounted. Nothing was changed, except that chunks may have been claimed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MountError {
    /// A structure without which nothing is found is unreadable in every copy.
    #[error("shard {shard}: the {what} is damaged; the shard's data has to come from its peers")]
    Damaged {
        /// The shard.
        shard: u16,
        /// What.
        what: &'static str,
    },
    /// The device failed where no copy helps.
    #[error("shard {shard}: the device failed: {error}")]
    Device {
        /// The shard.
        shard: u16,
        /// Why.
        error: DiskError,
    },
    /// Other shards own every chunk.
    #[error("shard {shard}: no chunk of the device is free")]
    NoSpace {
        /// The shard.
        shard: u16,
    },
    /// The superblock knows no such shard.
    #[error("the device was formatted for {shards} shard(s), there is no shard {shard}")]
    NoShard {
        /// The shard.
        shard: u16,
        /// The shards that there are.
        shards: u16,
    },
    /// The buffer pool is too small to mount with.
    #[error("no buffer of {len} bytes to mount with")]
    NoBuffer {
        /// Bytes asked for.
        len: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Anchors,
    Root,
    Tables,
    Buckets,
    Pgs,
    PgLogs,
    Map,
    Log,
    Tail,
    Claims,
    Flush,
    Anchor,
}

/// Mounts one shard.
#[derive(Debug)]
pub struct Mount<D> {
    fetch: Option<Fetch<D>>,
    pool: BufferPool,
    shard: ShardId,
    chunks: Arc<ChunkTable>,
    superblock: Superblock,
    identity: Identity,
    phase: Phase,
    chains: Chains,
    anchors: Vec<Anchor>,
    anchor: Anchor,
    checkpoint: Option<Checkpoint>,
    state: State,
    /// A part of the checkpoint could not be read: no PG is known to be complete.
    damaged: bool,
    pg_starts: Vec<(PgId, u64)>,
    pg_chains: BTreeMap<u64, PgId>,
    log_chains: BTreeMap<u64, (PgId, usize)>,
    pg_logs: BTreeMap<PgId, PgLogs>,
    map_lba: u64,
    scan: Option<Scan>,
    segment: Option<(Segment, Vec<u8>)>,
    segment_next: u64,
    unverified: Vec<(u64, Run, Vec<u32>)>,
    wrong: Vec<u64>,
    writes: Writes,
    /// The store, complete but for the durable anchor.
    ready: Option<(Allocator, LogStart)>,
    new_anchor: Option<Anchor>,
    required: bool,
    error: Option<MountError>,
}

/// The entries of a PG's log, page by page, and its tail.
#[derive(Debug, Default)]
struct PgLogs {
    pages: Vec<Option<Vec<LogEntry>>>,
    tail: Vec<LogEntry>,
}

/// Writes at the end of a mount.
#[derive(Debug, Default)]
struct Writes {
    /// Chunks whose claims are to be written, and whether they are queued.
    claims: Vec<u64>,
    claimed: bool,
    queue: VecDeque<DiskOp>,
    in_flight: u32,
    done: Completions,
}

impl<D: BlockDevice> Mount<D> {
    /// Nothing happens before the first `poll`. `chunks` comes from the probe of the same device and is shared by
    /// its shards; `device` is this shard's queue on it.
    pub fn new(device: D, shard: ShardId, chunks: Arc<ChunkTable>, pool: BufferPool) -> Self {
        let superblock = *chunks.superblock();
        let error = (shard.0 >= superblock.shards)
            .then_some(MountError::NoShard { shard: shard.0, shards: superblock.shards });
        let mut fetch = Fetch::new(device);
        if error.is_none() {
            let first = superblock.anchor_lba(shard);
            (0..ANCHOR_BLOCKS).for_each(|at| fetch.read(first + at, 1, at));
        }
        Self {
            fetch: Some(fetch),
            pool,
            shard,
            identity: superblock.identity(shard),
            superblock,
            chunks,
            phase: Phase::Anchors,
            chains: Chains::default(),
            anchors: Vec::new(),
            anchor: Anchor::empty(),
            checkpoint: None,
            state: State::new(1),
            damaged: false,
            pg_starts: Vec::new(),
            pg_chains: BTreeMap::new(),
            log_chains: BTreeMap::new(),
            pg_logs: BTreeMap::new(),
            map_lba: 0,
            scan: None,
            segment: None,
            segment_next: 0,
            unverified: Vec::new(),
            wrong: Vec::new(),
            writes: Writes::default(),
            ready: None,
            new_anchor: None,
            required: false,
            error,
        }
    }

    /// Goes on; the result comes once.
    ///
    /// # Panics
    /// If it is called after the result.
    pub fn poll(&mut self, now: Instant) -> Option<Result<Store<D>, MountError>> {
        let mut fetch = self.fetch.take().expect("a mount is not polled after its end");
        for _ in 0..READS_PER_POLL {
            if self.error.is_some() {
                break;
            }
            if self.phase >= Phase::Claims {
                if !self.write(&mut fetch) {
                    break;
                }
            } else if let Some(fetched) = fetch.poll(&self.pool) {
                self.fetched(&mut fetch, fetched);
                continue;
            } else if !fetch.is_idle() {
                break;
            }
            if let Err(error) = self.advance(&mut fetch) {
                self.error = Some(error);
            }
            if self.new_anchor.is_some() && self.phase == Phase::Anchor && self.writes.is_idle() {
                return Some(Ok(self.finish(fetch, now)));
            }
        }
        if let Some(error) = self.error.take() {
            return Some(Err(error));
        }
        self.fetch = Some(fetch);
        None
    }

    fn damaged_error(&self, what: &'static str) -> MountError {
        MountError::Damaged { shard: self.shard.0, what }
    }

    fn fetched(&mut self, fetch: &mut Fetch<D>, fetched: Fetched) {
        // Blocks that cannot be read are damage to live with. A device that fails is no reason to give PGs up: the
        // next attempt may read them.
        if let Err(error) = fetched.result
            && !matches!(error, DiskError::Media { .. })
        {
            self.error = Some(MountError::Device { shard: self.shard.0, error });
            return;
        }
        if fetched.result.is_err() && fetched.count > 1 {
            // One of them is unreadable, which must not take the others with it.
            let all = fetched.lba..fetched.lba + u64::from(fetched.count);
            return all.for_each(|lba| fetch.read(lba, 1, fetched.tag));
        }
        match self.phase {
            Phase::Anchors => {
                let Ok(block) = &fetched.result else { return };
                let anchor = Anchor::decode(block, &self.superblock, self.shard, fetched.lba);
                let right = |anchor: &Anchor| {
                    let at = anchor.lba(&self.superblock, self.shard);
                    fetched.lba == at || fetched.lba == at + 1
                };
                self.anchors.extend(anchor.filter(right));
            }
            Phase::Log => {
                let Some((segment, bytes)) = &mut self.segment else { return };
                // What cannot be read stays zero, which is no record.
                if let Ok(buffer) = &fetched.result {
                    let at = (fetched.lba - segment.lba) as usize * BLOCK;
                    bytes[at..at + buffer.len()].copy_from_slice(buffer);
                }
            }
            Phase::Tail => self.verified(&fetched),
            _ => {
                let (newest, blocks) = (self.anchor.checkpoint, self.superblock.blocks);
                let end = self.chains.page(fetch, fetched, &self.identity, newest, blocks);
                if let Some((tag, id, chain)) = end
                    && let Err(error) = self.stream(fetch, tag, id, chain)
                {
                    self.error = Some(error);
                }
            }
        }
    }

    /// Everything that the phase asked for is there.
    fn advance(&mut self, fetch: &mut Fetch<D>) -> Result<(), MountError> {
        match self.phase {
            Phase::Anchors => {
                let newest = self.anchors.drain(..).max_by_key(|anchor| anchor.sequence);
                self.anchor = newest.ok_or_else(|| self.damaged_error("anchor"))?;
                if self.anchor.root == 0 {
                    let shards = u64::from(self.superblock.shards);
                    let buckets =
                        (self.superblock.blocks / 256 / shards).next_power_of_two().clamp(16, 1 << 24);
                    self.set_buckets(buckets as u32);
                } else {
                    self.chains.read(fetch, Tag::Root, self.anchor.root);
                }
                self.phase = Phase::Root;
            }
            Phase::Root => {
                let tables = (0u32..).zip(&self.checkpoint.as_ref().expect("loaded").tables);
                for (table, lba) in tables.filter(|(_, lba)| **lba != 0) {
                    self.chains.read(fetch, Tag::Table(table), *lba);
                }
                self.phase = Phase::Tables;
            }
            Phase::Tables => {
                let buckets = (0u32..).zip(&self.checkpoint.as_ref().expect("loaded").buckets);
                for (bucket, pages) in buckets {
                    if let Some(lba) = pages.first() {
                        self.chains.read(fetch, Tag::Bucket(bucket), *lba);
                    }
                }
                self.phase = Phase::Buckets;
            }
            Phase::Buckets => {
                for (pg, lba) in std::mem::take(&mut self.pg_starts) {
                    let chain = self.chains.read(fetch, Tag::Pg, lba);
                    self.pg_chains.insert(chain, pg);
                }
                self.phase = Phase::Pgs;
            }
            Phase::Pgs => self.phase = Phase::PgLogs,
            Phase::PgLogs => {
                self.join_pg_logs();
                if self.map_lba != 0 {
                    self.chains.read(fetch, Tag::Map, self.map_lba);
                }
                self.phase = Phase::Map;
            }
            Phase::Map => {
                self.scan = Some(Scan::new(self.superblock, self.identity, &self.anchor));
                self.segment_next = self.anchor.segments.first().map_or(0, |segment| segment.ordinal);
                self.phase = Phase::Log;
                self.read_segment(fetch);
            }
            Phase::Log => self.segment_read(fetch),
            Phase::Tail => self.resolve()?,
            Phase::Claims => {
                self.settle()?;
                self.phase = Phase::Flush;
                let is_volatile = fetch.device.geometry().write_cache == WriteCache::Volatile;
                if is_volatile && !planted::active(Bug::MountWithoutFlush) {
                    self.writes.queue.push_back(DiskOp::Flush);
                }
            }
            Phase::Flush => {
                self.write_anchor(fetch.device.geometry().write_cache == WriteCache::Volatile)?;
                self.phase = Phase::Anchor;
            }
            Phase::Anchor => (),
        }
        Ok(())
    }

    fn read_segment(&mut self, fetch: &mut Fetch<D>) {
        let scan = self.scan.as_ref().expect("in the log");
        let Some(segment) = scan.segments.get(&self.segment_next).copied() else {
            self.unverified = scan.unverified();
            self.phase = Phase::Tail;
            for (at, (_, run, _)) in self.unverified.iter().enumerate() {
                // Runs are split so that a read never exceeds what a device takes.
                let step = READ_BLOCKS.min(transfer_max(&fetch.device));
                for from in (0..run.count).step_by(step as usize) {
                    fetch.read(run.lba + u64::from(from), step.min(run.count - from), at as u64);
                }
            }
            return;
        };
        // A damaged length must not take the memory: no segment is longer than a chunk.
        if u64::from(segment.len) > self.superblock.chunk_blocks || segment.lba > self.superblock.blocks {
            self.segment = Some((Segment { len: 0, ..segment }, Vec::new()));
            return;
        }
        self.segment = Some((segment, vec![0; segment.len as usize * BLOCK]));
        let step = READ_BLOCKS.min(transfer_max(&fetch.device));
        for from in (0..segment.len).step_by(step as usize) {
            fetch.read(segment.lba + u64::from(from), step.min(segment.len - from), 0);
        }
    }

    fn segment_read(&mut self, fetch: &mut Fetch<D>) {
        if let Some((segment, bytes)) = self.segment.take() {
            let first = self.anchor.segments.first().is_some_and(|first| first.ordinal == segment.ordinal);
            let offset = if first { self.anchor.log_offset } else { 0 };
            self.scan.as_mut().expect("in the log").segment(segment, offset, &bytes);
            self.segment_next += 1;
        }
        self.read_segment(fetch);
    }

    /// Data of the tail that is not behind its record has been read.
    fn verified(&mut self, fetched: &Fetched) {
        let (position, run, checksums) = &self.unverified[fetched.tag as usize];
        let from = (fetched.lba - run.lba) as usize;
        let right = fetched.result.as_ref().is_ok_and(|bytes| {
            let blocks = bytes.chunks_exact(BLOCK).zip(&checksums[from..]);
            blocks.into_iter().all(|(block, checksum)| crc32c(block) == *checksum)
        });
        if !right && !planted::active(Bug::TornScatteredAccepted) {
            self.wrong.push(*position);
        }
    }

    fn write_anchor(&mut self, volatile: bool) -> Result<(), MountError> {
        let (_, log) = self.ready.as_ref().expect("resolved");
        let mut anchor = self.anchor.clone();
        anchor.sequence += 1;
        anchor.ranges = log.ranges.clone();
        let len = 2 * BLOCK;
        let mut blocks = self.pool.alloc(len).map_err(|_| MountError::NoBuffer { len })?;
        anchor.encode(&mut blocks, &self.superblock, self.shard);
        let lba = anchor.lba(&self.superblock, self.shard);
        self.writes.queue.push_back(write_op(lba, blocks.freeze(), volatile));
        self.new_anchor = Some(anchor);
        Ok(())
    }

    /// Moves writes on; true when all are complete.
    fn write(&mut self, fetch: &mut Fetch<D>) -> bool {
        let volatile = fetch.device.geometry().write_cache == WriteCache::Volatile;
        if self.phase == Phase::Claims
            && !self.writes.claimed
            && let Err(error) = self.queue_claims(volatile)
        {
            self.error = Some(error);
            return false;
        }
        let writes = &mut self.writes;
        while let Some(op) = writes.queue.pop_front() {
            if let Err(QueueFull(op)) = fetch.device.submit(op, Ticket(0)) {
                writes.queue.push_front(op);
                break;
            }
            writes.in_flight += 1;
        }
        fetch.device.poll(64, &mut writes.done);
        while let Some(completion) = writes.done.pop_front() {
            writes.in_flight -= 1;
            if let Err(error) = completion.result {
                self.error = Some(MountError::Device { shard: self.shard.0, error });
                return false;
            }
        }
        self.writes.is_idle()
    }

    fn queue_claims(&mut self, volatile: bool) -> Result<(), MountError> {
        self.writes.claimed = true;
        let (alloc, log) = self.ready.as_mut().expect("resolved");
        // A new shard needs two chunks: one for the log, one to grow into.
        while log.current.len == 0 && alloc.chunks() < 2 {
            let Some(chunk) = self.chunks.claim(self.shard, 0) else {
                return Err(MountError::NoSpace { shard: self.shard.0 });
            };
            self.writes.claims.push(chunk);
            // It is used only after the claim is durable: the phase waits for that.
            alloc.add_chunk(chunk);
        }
        for chunk in std::mem::take(&mut self.writes.claims) {
            let mut block = self.pool.alloc(BLOCK).map_err(|_| MountError::NoBuffer { len: BLOCK })?;
            encode_claim(&mut block, &self.superblock, chunk, Some(self.shard));
            let block: SharedBuffer = block.freeze();
            self.writes.queue.push_back(write_op(self.superblock.claim_lba(chunk), block, volatile));
        }
        Ok(())
    }

    fn finish(&mut self, fetch: Fetch<D>, now: Instant) -> Store<D> {
        let (alloc, log) = self.ready.take().expect("resolved");
        let mut checkpoint = self.checkpoint.take().expect("loaded");
        checkpoint.anchor = self.new_anchor.take().expect("written");
        checkpoint.required = self.required;
        self.chunks.shard_mounted();
        let geometry = fetch.device.geometry();
        let volatile = geometry.write_cache == WriteCache::Volatile;
        let (transfer_max, discards_enabled) = (transfer_max(&fetch.device), geometry.discards);
        let state = std::mem::replace(&mut self.state, State::new(1));
        Store {
            io: Io::new(fetch.device),
            pool: self.pool.clone(),
            superblock: self.superblock,
            identity: self.identity,
            shard: self.shard,
            chunks: Arc::clone(&self.chunks),
            volatile,
            transfer_max,
            discards_enabled,
            state,
            alloc,
            log: Log::new(log),
            reads: Reads::default(),
            checkpoint,
            discards: Discards::default(),
            claiming: None,
            claim_queued: false,
            releasing: None,
            release_queued: false,
            failed: None,
            events: VecDeque::with_capacity(256),
            now,
            entry: super::record::Entry::default(),
            left: Leftovers::default(),
        }
    }
}

fn transfer_max<D: BlockDevice>(device: &D) -> u32 {
    u32::try_from(device.geometry().transfer_blocks_max.0).unwrap_or(u32::MAX).clamp(1, 4096)
}

impl Writes {
    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.in_flight == 0
    }
}
