//! The store: one log and index per shard (DESIGN section 4, `docs/on-disk-format.md`).
//!
//! [`api`] is what PGs see, [`Store`] what they call. Reading order behind it: `layout` and `codec` (fixed blocks),
//! `record` and `log` (a commit), `index` and `state` (what the log describes), `read`, `page` and `checkpoint`,
//! `space`, then [`mount`] (crash recovery) and [`format`](mod@format) (mkfs and probe).

mod alloc;
pub mod api;
mod audit;
mod checkpoint;
mod chunks;
mod codec;
mod fetch;
pub mod format;
mod index;
mod io;
mod layout;
mod log;
pub mod mount;
mod page;
mod pgs;
mod read;
mod record;
mod replay;
mod space;
mod state;
#[cfg(test)]
mod tests;

pub use chunks::ChunkTable;
pub use codec::{FORMAT, Identity, crc32c};
pub use io::OP_LIMIT_DEFAULT;
pub use layout::Superblock;
pub use space::Space;

use alloc::Allocator;
use api::{Change, LogEntry, OpLookup, PgStatus, StoreEvent, SubmitError, Transaction};
use checkpoint::Checkpoint;
use io::{Io, Purpose};
use log::Log;
use loligo_config::id::{ObjectId, ObjectVersion, OpId, PgId, ShardId};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{BlockDevice, Completion, DiskError, DiskOp, Instant, Ticket};
use loligo_reactor::poller::Activity;
use read::Reads;
use record::{Entry, EntryKind, OBJECT_BLOCKS_MAX};
use space::Discards;
use state::{Leftovers, State};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// One shard's store on one device. Passive: everything happens in [`Store::poll`].
///
/// Made by [`mount::Mount`].
#[derive(Debug)]
pub struct Store<D> {
    io: Io<D>,
    pool: BufferPool,
    superblock: Superblock,
    identity: Identity,
    shard: ShardId,
    chunks: Arc<ChunkTable>,
    volatile: bool,
    transfer_max: u32,
    discards_enabled: bool,
    state: State,
    alloc: Allocator,
    log: Log,
    reads: Reads,
    checkpoint: Checkpoint,
    discards: Discards,
    /// The chunk whose claim is being written.
    claiming: Option<u64>,
    claim_queued: bool,
    /// The chunk whose release is being written.
    releasing: Option<u64>,
    release_queued: bool,
    failed: Option<DiskError>,
    events: VecDeque<StoreEvent>,
    now: Instant,
    entry: Entry,
    left: Leftovers,
}

impl<D: BlockDevice> Store<D> {
    /// Queues a transaction. `Committed` or `Failed` follows, in the order of submission; reads see its effects from
    /// now on.
    ///
    /// # Errors
    /// Nothing was done; see [`SubmitError`].
    pub fn submit(&mut self, tx: Transaction, ticket: Ticket) -> Result<(), SubmitError> {
        if let Some(error) = self.failed {
            return Err(SubmitError::Failed(error));
        }
        if self.checkpoint.required || self.log_too_long() {
            return Err(SubmitError::Busy);
        }
        let mut entry = std::mem::take(&mut self.entry);
        let result = self.submit_entry(&tx, &mut entry, ticket);
        self.entry = entry;
        result
    }

    fn submit_entry(
        &mut self,
        tx: &Transaction,
        entry: &mut Entry,
        ticket: Ticket,
    ) -> Result<(), SubmitError> {
        entry.set(tx).ok_or(SubmitError::Invalid)?;
        self.check(entry)?;
        self.admit(entry)?;
        let data = match &tx.change {
            Change::Write { data, .. } => Some(data),
            _ => None,
        };
        self.place(entry, data)?;
        let mut left = std::mem::take(&mut self.left);
        self.state.apply(entry, &mut left);
        self.checkpoint.drop_pages(&mut left.dropped);
        for pg in left.removed.drain(..) {
            self.drop_pg_pages(entry.pg, &pg);
        }
        self.note(entry, &mut left.freed, Some(ticket));
        self.left = left;
        Ok(())
    }

    fn check(&self, entry: &Entry) -> Result<(), SubmitError> {
        let known = self.state.pgs.get(&entry.pg);
        match entry.kind {
            EntryKind::Meta => return Ok(()),
            // Its pages may be in the checkpoint that is being written.
            EntryKind::RemovePg if self.checkpoint.is_running() => return Err(SubmitError::Busy),
            EntryKind::RemovePg => return Ok(()),
            _ => (),
        }
        let last = known.ok_or(SubmitError::Invalid)?.status.last;
        if entry.previous != last {
            return Err(SubmitError::NotNext { last });
        }
        let object = self.state.index.object(entry.object);
        if entry.kind != EntryKind::Result && object.is_some_and(|object| object.pg != entry.pg) {
            return Err(SubmitError::Invalid);
        }
        Ok(())
    }

    /// Whether the log has outgrown its checkpoint so far that a mount would take too long.
    fn log_too_long(&self) -> bool {
        self.checkpoint.is_running()
            && self.log.block_count + self.log.logged_data > self.checkpoint.trigger * 8
    }

    /// Does what there is to do: takes completions, writes the record of what was submitted, goes on with the
    /// checkpoint. Events are appended to `out`.
    pub fn poll(&mut self, now: Instant, out: &mut VecDeque<StoreEvent>) -> Activity {
        self.now = now;
        self.io.now = now;
        let mut busy = self.io.poll() > 0;
        while let Some(completion) = self.io.next() {
            self.completed(completion);
        }
        if self.failed.is_none() && self.io.is_late() {
            self.fail(DiskError::Timeout);
        }
        busy |= self.log.has_open();
        self.close_record();
        busy |= self.start_reads();
        busy |= self.release_freed();
        if self.failed.is_none() {
            let lacks_mark = self.log.wants_mark() && self.log.is_idle();
            if lacks_mark && (self.log.mark_wanted || self.space_is_short()) {
                self.write_mark();
                busy = true;
            }
            self.reclaim();
            self.chunks_step();
            busy |= self.checkpoint_step();
            self.discard_step();
        }
        busy |= self.io.pump();
        busy |= !self.events.is_empty();
        out.append(&mut self.events);
        Activity::from_busy(busy)
    }

    /// Whether superseded blocks are needed now, or are so many that they should not wait for the next write.
    fn space_is_short(&self) -> bool {
        self.alloc.free() < self.superblock.chunk_blocks
            || self.log.freed_count >= self.superblock.chunk_blocks / 4
    }

    fn completed(&mut self, completion: Completion) {
        let (purpose, number) = Purpose::of(completion.ticket);
        if purpose == Purpose::Read {
            return self.read_completed(number, completion);
        }
        if purpose == Purpose::Discard {
            return self.discard_completed();
        }
        if let Err(error) = completion.result {
            self.fail(error);
        }
        if self.failed.is_some() {
            return;
        }
        match purpose {
            Purpose::Record => self.record_completed(number),
            Purpose::Page | Purpose::Flush | Purpose::Anchor => self.checkpoint_completed(),
            Purpose::Claim => self.claim_completed(number),
            Purpose::Read | Purpose::Discard => (),
        }
    }

    /// A write or flush failed, or something does not end: what is on the device is unknown until the next mount, so
    /// nothing is written any more and nothing in flight counts as durable. Reads go on.
    fn fail(&mut self, error: DiskError) {
        if self.failed.is_some() {
            return;
        }
        tracing::error!(shard = self.shard.0, %error, "the device failed: this shard writes no more");
        self.failed = Some(error);
        self.io.drop_writes();
        self.fail_log(error);
    }

    /// When to poll next even if nothing arrives.
    pub fn next_deadline(&self) -> Option<Instant> {
        let late = self.io.deadline().filter(|_| self.failed.is_none());
        [late, self.discard_deadline()].into_iter().flatten().min()
    }

    /// Transactions and reads whose events are still to come.
    pub fn in_flight(&self) -> u32 {
        let all = self.log.tickets_in_flight() + self.reads.in_flight() + self.events.len();
        u32::try_from(all).unwrap_or(u32::MAX)
    }

    /// Whether device operations are still to complete, background ones included.
    pub fn is_quiet(&self) -> bool {
        self.in_flight() == 0 && self.io.waiting() == 0 && self.io.device.in_flight() == 0
    }

    /// Why nothing is written any more, if so.
    pub fn failed(&self) -> Option<DiskError> {
        self.failed
    }

    /// What is known of a PG.
    pub fn pg(&self, pg: PgId) -> Option<PgStatus> {
        self.state.pgs.get(&pg).map(|pg| pg.status)
    }

    /// All PGs, in order.
    pub fn pgs(&self) -> impl Iterator<Item = (PgId, PgStatus)> + '_ {
        self.state.pgs.iter().map(|(id, pg)| (*id, pg.status))
    }

    /// What became of an op. An unknown PG knows no op.
    pub fn op_lookup(&self, pg: PgId, op: OpId) -> OpLookup {
        self.state.pgs.get(&pg).map_or(OpLookup::New, |pg| pg.ops.lookup(op))
    }

    /// The PG's log after a version, oldest first; `None` if what is kept does not reach back to it.
    pub fn entries_since(
        &self,
        pg: PgId,
        version: ObjectVersion,
    ) -> Option<impl Iterator<Item = LogEntry> + '_> {
        self.state.pgs.get(&pg)?.entries_since(version)
    }

    /// The object's last version; `NONE` if it does not exist.
    pub fn object_version(&self, object: ObjectId) -> ObjectVersion {
        self.state.index.object(object).map_or(ObjectVersion::NONE, |object| object.version)
    }

    /// The objects of a PG with their last versions, in order, from `from` on.
    pub fn objects(&self, pg: PgId, from: ObjectId) -> impl Iterator<Item = (ObjectId, ObjectVersion)> + '_ {
        let all = self.state.index.objects_from(from);
        all.filter(move |(_, object)| object.pg == pg).map(|(id, object)| (*id, object.version))
    }

    /// The objects of all PGs from `from` on, in order: PG, last version, allocated blocks.
    pub fn all_objects(
        &self,
        from: ObjectId,
    ) -> impl Iterator<Item = (ObjectId, PgId, ObjectVersion, u32)> + '_ {
        let all = self.state.index.objects_from(from);
        all.map(|(id, object)| (*id, object.pg, object.version, object.blocks))
    }

    /// The runs of blocks of a range that hold data: (first block, count), ascending, neighbours joined.
    pub fn extents(&self, object: ObjectId, block: u32, count: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let mut stored = self.state.index.stored(object, block, count).peekable();
        std::iter::from_fn(move || {
            let first = stored.next()?;
            let mut run = (first.block, first.count);
            while let Some(next) = stored.next_if(|next| next.block == run.0 + run.1) {
                run.1 += next.count;
            }
            Some(run)
        })
    }

    /// Bytes of memory that the tables take: counted, not measured. Buffers are the pool's.
    pub fn memory(&self) -> u64 {
        let pgs: u64 = self.state.pgs.values().map(pgs::Pg::memory).sum();
        self.state.index.memory() + self.alloc.memory() + self.checkpoint.memory() + pgs
    }

    /// Objects, extents and blocks in the index.
    pub fn counts(&self) -> (u64, u64, u64) {
        self.state.index.counts()
    }

    /// The shard that this is.
    pub fn shard(&self) -> ShardId {
        self.shard
    }

    /// The device that it is on.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The device, for its counters and for tests.
    pub fn device(&self) -> &D {
        &self.io.device
    }

    /// An operation that the device does not end within this time fails the store, reads included.
    pub fn set_op_limit(&mut self, limit: Duration) {
        self.io.limit = limit;
    }

    /// Asks for a checkpoint: before a clean stop, so that the next mount has no log to read.
    pub fn request_checkpoint(&mut self) {
        self.checkpoint.wanted = true;
    }

    /// Checkpoints completed since the mount.
    pub fn checkpoints(&self) -> u64 {
        self.checkpoint.completed
    }

    /// Ends the store and gives the device back. What is in flight is not waited for.
    pub fn into_device(self) -> D {
        self.io.device
    }
}

/// A write of one piece, as the fixed blocks are written.
fn write_op(lba: u64, data: loligo_reactor::dma::SharedBuffer, fua: bool) -> DiskOp {
    let data = loligo_reactor::env::WriteList::from_iter([data]);
    DiskOp::Write { lba: loligo_config::units::Lba(lba), data, fua }
}
