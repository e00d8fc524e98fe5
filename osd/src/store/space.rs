//! Space: what may be submitted, chunks taken and given back, discards.
//!
//! Two rules keep a full shard working. The allocator always has as many free blocks as the checkpoint of everything
//! dirty takes, so the log can always be cut. Writes leave a reserve on top, so that deletes, promises and restarts
//! still find log space when writes do not.

use super::Store;
use super::alloc::Run;
use super::api::{SubmitError, WRITE_OVERHEAD};
use super::codec::BLOCK;
use super::index::FRAGMENT_BLOCKS;
use super::io::Purpose;
use super::layout::encode_claim;
use super::record::{Entry, EntryKind};
use loligo_config::limits::{OP_BLOCKS_MAX, PG_DEVICE_BYTES_MIN};
use loligo_config::units::{BlockCount, Lba};
use loligo_reactor::env::{BlockDevice, DiskOp, Instant, WriteList};
use loligo_reactor::planted::{self, Bug};
use std::collections::VecDeque;
use std::time::Duration;

/// Free blocks that even deletes leave.
const FLOOR: u64 = 24;
/// Shortest run worth a discard: devices map in units of this order. Guessed.
const DISCARD_BLOCKS_MIN: u32 = 8;
/// Discards waiting; further runs are freed without one.
const DISCARDS_MAX: usize = 1024;
/// Time between two discards.
const DISCARD_INTERVAL: Duration = Duration::from_millis(2);

/// What one PG may have in flight to this member: an op of the largest size at least, and what makes its primary no
/// slower at most (16 MiB; guessed).
const WINDOW_MIN: u64 = OP_BLOCKS_MAX as u64 + WRITE_OVERHEAD;
const WINDOW_MAX: u64 = 4096;
/// In between, all windows together are this part of the shard.
const WINDOWS_SHARE: u64 = 10;
/// No more than this part is kept back for windows. On a shard with more PGs than it has room for a window is smaller than
/// the largest op, which is refused then: what a primary may send must be there, or a full PG stands still for good.
const WINDOWS_PART: u64 = 4;
const _: () = assert!(WINDOWS_PART * WINDOW_MIN * BLOCK as u64 == PG_DEVICE_BYTES_MIN);
/// Log blocks, and twice the cost of a checkpoint, that are worth one when space is short. Guessed.
const RECLAIM_MIN: u64 = 64;

/// What a shard has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// This shard's part of the device, in blocks.
    pub blocks: u64,
    /// Blocks free or about to be.
    pub free: u64,
    /// Blocks that may still be granted to writers: the reserve and the windows of all PGs are excluded.
    pub credit: u64,
    /// What is granted to the primary of one PG at most; less than the largest op when there are too many PGs for the
    /// shard. As much is kept back for every PG: of what other primaries have sent since it heard of the credit last, a
    /// primary knows nothing.
    pub window: u64,
    /// Blocks of live data.
    pub data: u64,
}

#[derive(Debug, Default)]
pub(super) struct Discards {
    waiting: VecDeque<Run>,
    in_flight: Option<Run>,
    next: Instant,
}

impl Discards {
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.waiting.iter().chain(&self.in_flight).copied()
    }
}

impl<D: BlockDevice> Store<D> {
    fn reserve(&self) -> u64 {
        128 + self.superblock.chunk_blocks / 8
    }

    /// What this shard has; unclaimed chunks are divided evenly among the shards.
    pub fn space(&self) -> Space {
        let shards = u64::from(self.superblock.shards);
        let unclaimed = self.chunks.free() * self.superblock.chunk_blocks / shards;
        let now = self.alloc.free() + self.log.remaining();
        let soon = self.log.freed_count + self.discards.runs().map(|run| u64::from(run.count)).sum::<u64>();
        // What one more write of a few blocks makes dirty is kept back too: see `admit`.
        let floor = self.checkpoint_cost() + FLOOR + 16;
        let chunked = (self.alloc.free() + unclaimed).saturating_sub(floor);
        let logged = (now + unclaimed).saturating_sub(floor + self.reserve());
        let blocks = self.superblock.chunks * self.superblock.chunk_blocks / shards;
        let pgs = (self.state.pgs.len() as u64).max(1);
        let window = (blocks / (WINDOWS_SHARE * pgs)).clamp(WINDOW_MIN, WINDOW_MAX);
        let window = window.min(blocks / (WINDOWS_PART * pgs));
        Space {
            blocks,
            free: now + soon + unclaimed,
            credit: logged.min(chunked).saturating_sub(window * pgs),
            window,
            data: self.state.index.counts().2,
        }
    }

    /// Whether there is space for an entry and for what it makes dirty.
    pub(super) fn admit(&mut self, entry: &Entry) -> Result<(), SubmitError> {
        let dirty = match entry.kind {
            EntryKind::Write | EntryKind::Free => {
                let numbers =
                    entry.block / FRAGMENT_BLOCKS..=(entry.block + entry.count - 1) / FRAGMENT_BLOCKS;
                self.state.index.dirty_cost(entry.object, numbers)
            }
            EntryKind::Remove => self.state.index.remove_cost(entry.object),
            EntryKind::Result | EntryKind::Meta | EntryKind::RemovePg => 4,
        };
        let kept_back = self.checkpoint_cost() + dirty + FLOOR;
        let free = self.alloc.free();
        let writes = entry.kind == EntryKind::Write;
        let enough = free + self.log.remaining() > kept_back + self.reserve() + u64::from(entry.count);
        if free < kept_back || (writes && !enough) {
            return Err(self.out_of_space());
        }
        Ok(())
    }

    /// `Busy` if waiting helps, and then what is waited for is under way.
    pub(super) fn out_of_space(&mut self) -> SubmitError {
        if self.release_discards() || self.claim_chunk() || !self.log.is_idle() {
            return SubmitError::Busy;
        }
        if self.log.freed_count > 0 {
            self.log.mark_wanted = true;
            return SubmitError::Busy;
        }
        if self.checkpoint.is_running() {
            return SubmitError::Busy;
        }
        // A checkpoint frees these; below that it would free less than it takes for itself at times.
        if self.log.block_count + self.checkpoint.drop_next.len() as u64 > 32 {
            self.checkpoint.wanted = true;
            return SubmitError::Busy;
        }
        SubmitError::NoSpace
    }

    /// When the credit runs out, what was superseded is given back before somebody is refused.
    pub(super) fn reclaim(&mut self) {
        if self.chunks.free() > 0 || self.checkpoint.is_running() {
            return;
        }
        let space = self.space();
        if space.credit >= space.window {
            return;
        }
        self.release_discards();
        self.log.mark_wanted |= self.log.freed_count > 0;
        let worth = self.log.block_count + self.checkpoint.drop_next.len() as u64;
        self.checkpoint.wanted |= worth > RECLAIM_MIN.max(2 * self.checkpoint_cost());
    }

    pub(super) fn checkpoint_short_of_space(&mut self) {
        self.release_discards();
        self.claim_chunk();
    }

    /// Takes a chunk; true if one is on its way.
    fn claim_chunk(&mut self) -> bool {
        if self.claiming.is_some() || self.failed.is_some() {
            return self.claiming.is_some();
        }
        let Some(chunk) = self.chunks.claim(self.shard, 0) else { return false };
        self.claiming = Some(chunk);
        self.claim_queued = true;
        true
    }

    /// Writes the claims that wait for a buffer, and takes a chunk ahead of need: while there is still space beside what
    /// the next checkpoint keeps for itself, so that no write waits for a claim.
    pub(super) fn chunks_step(&mut self) {
        if self.alloc.free() < self.superblock.chunk_blocks * 2 + self.reserve() + self.checkpoint_cost() {
            self.claim_chunk();
        }
        if let Some(chunk) = self.claiming.filter(|_| self.claim_queued) {
            self.claim_queued = !self.write_claim(chunk, true);
        }
        if let Some(chunk) = self.releasing.filter(|_| self.release_queued) {
            self.release_queued = !self.write_claim(chunk, false);
        }
    }

    fn write_claim(&mut self, chunk: u64, owned: bool) -> bool {
        let Ok(mut block) = self.pool.alloc(BLOCK) else { return false };
        encode_claim(&mut block, &self.superblock, chunk, owned.then_some(self.shard));
        let lba = Lba(self.superblock.claim_lba(chunk));
        let op = DiskOp::Write { lba, data: WriteList::from_iter([block.freeze()]), fua: self.volatile };
        self.io.send_background(op, Purpose::Claim.ticket(chunk));
        true
    }

    pub(super) fn claim_completed(&mut self, chunk: u64) {
        if self.claiming == Some(chunk) {
            self.claiming = None;
            self.alloc.add_chunk(chunk);
        } else {
            assert_eq!(self.releasing.take(), Some(chunk), "a claim write that was asked for");
            self.chunks.release(self.shard, chunk);
        }
    }

    /// Gives an empty chunk back when there is plenty, for other shards.
    pub(super) fn release_chunks(&mut self) {
        let plenty = self.superblock.chunk_blocks * 3 + self.reserve() + self.checkpoint_cost();
        if self.releasing.is_some() || self.claiming.is_some() || self.alloc.free() < plenty {
            return;
        }
        self.releasing = self.alloc.remove_empty_chunk();
        self.release_queued = self.releasing.is_some();
    }

    /// Frees data blocks, by way of a discard where the device has them.
    pub(super) fn release_data(&mut self, run: Run) {
        let worth = self.discards_enabled && run.count >= DISCARD_BLOCKS_MIN;
        if worth && self.discards.waiting.len() < DISCARDS_MAX && self.failed.is_none() {
            self.discards.waiting.push_back(run);
        } else {
            self.alloc.release(run);
        }
    }

    /// Frees what waits for a discard, without one: the space is needed.
    fn release_discards(&mut self) -> bool {
        let any = !self.discards.waiting.is_empty();
        self.discards.waiting.drain(..).for_each(|run| self.alloc.release(run));
        any
    }

    /// Sends the next discard. Its blocks stay used until it is complete: a write must not overtake it.
    pub(super) fn discard_step(&mut self) {
        if self.discards.in_flight.is_some() || self.now < self.discards.next || self.failed.is_some() {
            return;
        }
        let Some(run) = self.discards.waiting.pop_front() else { return };
        self.discards.in_flight = Some(run);
        if planted::active(Bug::ReuseUnderDiscard) {
            self.alloc.release(run);
        }
        self.discards.next = self.now.after(DISCARD_INTERVAL);
        let op = DiskOp::Discard { lba: Lba(run.lba), count: BlockCount(u64::from(run.count)) };
        self.io.send_background(op, Purpose::Discard.ticket(0));
    }

    /// A discard has ended; whether it worked does not matter.
    pub(super) fn discard_completed(&mut self) {
        let run = self.discards.in_flight.take().expect("one was in flight");
        if !planted::active(Bug::ReuseUnderDiscard) {
            self.alloc.release(run);
        }
    }

    pub(super) fn discard_deadline(&self) -> Option<Instant> {
        let due = !self.discards.waiting.is_empty() && self.discards.in_flight.is_none();
        due.then_some(self.discards.next)
    }
}
