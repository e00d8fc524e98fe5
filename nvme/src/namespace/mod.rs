//! One queue pair for one namespace: a `BlockDevice` on an NVMe controller, owned by one reactor.
//!
//! ```text
//!  submit ─▶ Op ──▶ unsent ──▶ command in flight ──▶ completion: all commands of the op done ─▶ done
//!            │        ▲             │     │   ▲                        
//!            │        │ no slot     │     │   └──── sent again ◀── "retry" (status), after the controller's delay
//!            │                      │     │                   ◀── reset: the controller has stopped, memory is ours
//!            │                      │     │ no answer within the limit: abort asked for
//!            │                      │     │ half as long again: reset asked for; after it the op fails (timeout)
//!            └─ refused at once     └─ controller given up and cut off: the op fails
//! ```
//! Buffers come back only with a completion of the controller, or after it has stopped (CSTS.RDY = 0) or was cut off
//! from memory: never while it may still write to them. Everything that a completion names is checked: one for a
//! command that is not in flight is counted and touches nothing.

mod memory;
mod op;
#[cfg(test)]
mod tests;
mod watch;

use crate::bus::Bus;
use crate::controller::{NamespaceFacts, QueueLayout, Shared, Standing};
use crate::queue::{CompletionRing, Doorbell, Region, SubmissionRing};
use crate::spec::completion::CompletionEntry;
use crate::spec::registers;
use crate::spec::status::Verdict;
use loligo_config::units::{BLOCK_SIZE, BlockCount};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{
    BlockDevice, Clock, Completion, Completions, DiskError, DiskOp, Geometry, Instant, QueueFull, Ticket,
    WriteCache,
};
use memory::PoolMap;
use op::{Bounce, Op, Piece, Scratch, Target, Verb, extent};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Largest read or write: 2 MiB, cut into as many commands as the controller needs.
const TRANSFER_BLOCKS_MAX: u64 = 512;
/// Sweeps per command timeout. A command is aborted at the first sweep after the timeout, so up to an eighth late.
const SWEEPS_PER_TIMEOUT: u8 = 8;
/// How often a parked reactor looks while a controller is reset. Guessed: short against the reset.
const BUSY_POLL: Duration = Duration::from_millis(1);
/// Times that a command is sent again because the controller says so. Linux has the same default.
const ATTEMPTS_MAX: u8 = 5;
/// Bits of a command id that are the slot's index; those above count the slot's uses, so that an old completion does
/// not pass for a new one.
const INDEX_BITS: u32 = 10;

/// Counters of one queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Commands sent, again ones included.
    pub commands: u64,
    /// Commands sent again after a reset.
    pub resent: u64,
    /// Commands sent again because the controller said so.
    pub retried: u64,
    /// Commands that an abort was asked for.
    pub aborts: u64,
    /// Resets asked for.
    pub resets: u64,
    /// Completions for no command in flight.
    pub unknown: u64,
    /// Operations whose buffers were copied, since the controller cannot be given them as pages.
    pub bounced: u64,
    /// Operations that failed.
    pub failed: u64,
}

/// A command's place.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The id of its last command.
    cid: u16,
    piece: Option<Piece>,
    /// Sweeps since it was sent.
    sweeps: u8,
}

/// The device. It is cut loose from the controller when dropped: operations in flight are waited for as long as the
/// clock goes on, and otherwise their buffers are leaked rather than used again.
pub struct Namespace<B: Bus, C: Clock> {
    shared: Arc<Shared<B>>,
    clock: C,
    queue: u16,
    geometry: Geometry,
    target: Target,
    layout: QueueLayout,
    memory: Arc<Region>,
    sq: SubmissionRing,
    cq: CompletionRing,
    map: PoolMap,
    poisoned: Arc<AtomicBool>,
    native_zeroes: bool,
    compares: bool,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    ops: Box<[Op]>,
    /// The caller's part of each operation; `None` where there is none.
    bodies: Box<[Option<DiskOp>]>,
    free_ops: Vec<u32>,
    unsent: VecDeque<u32>,
    resend: VecDeque<Piece>,
    /// Operations that have ended and were not delivered yet.
    ready: VecDeque<u32>,
    /// The controller's epoch that this queue has joined, and whether it was made in it.
    epoch: u64,
    attached: bool,
    now: Instant,
    next_sweep: Instant,
    polls: u32,
    /// Whether some command waits for its abort or for a reset.
    overdue: bool,
    stats: QueueStats,
}

impl<B: Bus, C: Clock> Namespace<B, C> {
    #[allow(clippy::too_many_arguments, reason = "the controller's own, called in one place")]
    pub(crate) fn new(
        shared: Arc<Shared<B>>,
        facts: &NamespaceFacts,
        queue: u16,
        layout: QueueLayout,
        memory: Arc<Region>,
        poisoned: Arc<AtomicBool>,
        pool: &BufferPool,
        clock: C,
    ) -> Self {
        let stride = shared.cap.doorbell_stride();
        let sq_doorbell = Doorbell::new(registers::sq_doorbell(queue, stride), None);
        let cq_doorbell = Doorbell::new(registers::cq_doorbell(queue, stride), None);
        let depth = layout.depth();
        let now = clock.now();
        let controller = shared.facts();
        let slot = Slot { cid: 0, piece: None, sweeps: 0 };
        Self {
            queue,
            geometry: geometry(facts, controller, depth),
            target: target(facts, controller),
            sq: SubmissionRing::new(Arc::clone(&memory), 0, layout.entries, sq_doorbell),
            cq: CompletionRing::new(Arc::clone(&memory), layout.cq_offset(), layout.entries, cq_doorbell),
            layout,
            memory,
            map: PoolMap::new(pool),
            poisoned,
            native_zeroes: controller.identity.writes_zeroes,
            compares: controller.identity.compares,
            slots: vec![slot; depth.into()].into(),
            free: (0..depth).rev().collect(),
            ops: (0..depth).map(|_| Op::new(Ticket(0), Verb::Flush, 0, 0)).collect(),
            bodies: (0..depth).map(|_| None).collect(),
            free_ops: (0..u32::from(depth)).rev().collect(),
            unsent: VecDeque::with_capacity(depth.into()),
            resend: VecDeque::with_capacity(depth.into()),
            ready: VecDeque::with_capacity(depth.into()),
            epoch: 0,
            attached: false,
            now,
            next_sweep: now.after(shared.options.command_timeout / SWEEPS_PER_TIMEOUT.into()),
            polls: 0,
            overdue: false,
            stats: QueueStats::default(),
            shared,
            clock,
        }
    }

    /// Counters.
    pub fn stats(&self) -> QueueStats {
        self.stats
    }

    /// The queue's number on the controller.
    pub fn queue(&self) -> u16 {
        self.queue
    }

    /// How soon it wants to be polled, besides when the controller signals a completion: at once (zero) when
    /// completions wait to be taken, soon while the controller is not up, and now and then while commands are in
    /// flight, for their limits of time. `None`: not before the next submission.
    pub fn wants_poll_within(&self) -> Option<Duration> {
        if !self.ready.is_empty() {
            return Some(Duration::ZERO);
        }
        if self.free_ops.len() == self.ops.len() {
            return None;
        }
        let live = self.attached && self.shared.standing() == (self.epoch, Standing::Live);
        if !live || self.overdue || !self.resend.is_empty() {
            return Some(BUSY_POLL);
        }
        Some(self.shared.options.command_timeout / SWEEPS_PER_TIMEOUT.into())
    }

    /// Compares what is on the device with `data` of a write, which is not written. The completion has the operation
    /// as a write; its result is `Media` with errno `EILSEQ` when they differ.
    ///
    /// # Errors
    /// As `submit`.
    #[allow(clippy::result_large_err, reason = "the operation comes back in it, without an allocation")]
    pub fn submit_compare(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        if !self.compares || !matches!(op, DiskOp::Write { .. }) {
            return self.submit_as(op, ticket, Verb::Compare, Some(Err(DiskError::Invalid)));
        }
        self.submit_as(op, ticket, Verb::Compare, None)
    }

    #[inline]
    #[allow(clippy::result_large_err, reason = "the operation comes back in it, without an allocation")]
    fn submit_as(
        &mut self,
        op: DiskOp,
        ticket: Ticket,
        verb: Verb,
        verdict: Option<Result<(), DiskError>>,
    ) -> Result<(), QueueFull<DiskOp>> {
        let Some(&index) = self.free_ops.last() else { return Err(QueueFull(op)) };
        // Lengths that are not whole blocks count as none, which is as wrong.
        let (lba, blocks) = extent(&op).map_or((0, 0), |(lba, count)| (lba.0, count.0));
        let mut state = Op::new(ticket, verb, lba, blocks);
        state.result = verdict.or_else(|| self.verdict(verb, lba, blocks));
        if state.result.is_none() {
            match self.bounce(&op) {
                Ok(bounce) => state.bounce = bounce,
                Err(()) => return Err(QueueFull(op)),
            }
            if verb == Verb::Flush {
                state.covers = self.shared.cached();
            }
        }
        let ended = state.result.is_some();
        self.free_ops.pop();
        self.ops[index as usize] = state;
        self.bodies[index as usize] = Some(op);
        if ended {
            self.ready.push_back(index);
        } else {
            self.begin(index);
        }
        Ok(())
    }

    /// Sends an operation, or as much of it as there is room for.
    fn begin(&mut self, index: u32) {
        let idle = self.free.len() == self.slots.len();
        self.unsent.push_back(index);
        if self.attached && self.shared.standing() == (self.epoch, Standing::Live) {
            self.send_waiting();
            // The first is told at once, since its latency counts; what follows in this round goes with the poll.
            if idle {
                self.sq.ring(&self.shared.bus);
            }
        }
    }

    fn verb(&self, op: &DiskOp) -> Verb {
        let volatile = self.geometry.write_cache == WriteCache::Volatile;
        match op {
            DiskOp::Read { .. } => Verb::Read,
            DiskOp::Write { fua, .. } => Verb::Write { fua: *fua && volatile },
            DiskOp::WriteZeroes { fua, .. } if self.native_zeroes => Verb::Zero { fua: *fua && volatile },
            DiskOp::WriteZeroes { fua, .. } => Verb::WriteZeroes { fua: *fua && volatile },
            DiskOp::Discard { .. } => Verb::Deallocate,
            DiskOp::Flush => Verb::Flush,
        }
    }

    /// How an operation ends that the controller need not be asked for.
    fn verdict(&self, verb: Verb, lba: u64, blocks: u64) -> Option<Result<(), DiskError>> {
        let transfers = matches!(verb, Verb::Read | Verb::Write { .. } | Verb::Compare);
        let within = lba.checked_add(blocks).is_some_and(|end| end <= self.geometry.blocks.0);
        if blocks == 0 || !within || transfers && blocks > self.geometry.transfer_blocks_max.0 {
            return Some(Err(DiskError::Invalid));
        }
        if self.shared.standing().1 == Standing::Ended {
            return Some(Err(self.shared.end_error()));
        }
        if verb.changes_data() && self.poisoned.load(Ordering::Acquire) {
            return Some(Err(DiskError::Poisoned));
        }
        match verb {
            Verb::Flush if self.geometry.write_cache == WriteCache::None => Some(Ok(())),
            Verb::Deallocate if !self.geometry.discards => Some(Ok(())),
            _ => None,
        }
    }

    /// A copy for the controller, if it needs one. `Err`: there is no buffer for it now.
    fn bounce(&mut self, op: &DiskOp) -> Result<Option<Bounce>, ()> {
        let pool = self.map.pool();
        let bounce = match op {
            DiskOp::Read { buffer, .. } => {
                if memory::is_page_aligned(buffer) && self.map.owns(buffer.slab(), buffer) {
                    return Ok(None);
                }
                Bounce::Into(pool.alloc(buffer.len()).map_err(|_| ())?)
            }
            DiskOp::Write { data, .. } => {
                if memory::is_paged(data) && data.iter().all(|piece| self.map.owns(piece.slab(), piece)) {
                    return Ok(None);
                }
                Bounce::From(memory::gather(pool, data).ok_or(())?.freeze())
            }
            DiskOp::Flush | DiskOp::Discard { .. } | DiskOp::WriteZeroes { .. } => return Ok(None),
        };
        self.stats.bounced += 1;
        Ok(Some(bounce))
    }

    /// Sends what waits, as far as there are slots.
    fn send_waiting(&mut self) {
        for _ in 0..self.resend.len() {
            if self.free.is_empty() {
                return;
            }
            let piece = self.resend.pop_front().expect("counted");
            if piece.not_before > self.now {
                self.resend.push_back(piece);
            } else {
                self.send(piece);
                self.finish_if_done(piece.op);
            }
        }
        while let Some(&index) = self.unsent.front() {
            loop {
                let op = &mut self.ops[index as usize];
                if op.error.is_some() {
                    op.sent = op.blocks;
                }
                if op.sent == op.blocks {
                    break;
                }
                if self.free.is_empty() {
                    return;
                }
                let blocks = (op.blocks - op.sent).min(self.target.blocks_max(op.verb).into());
                let piece = Piece {
                    op: index,
                    first: op.sent,
                    blocks: u32::try_from(blocks).expect("at most what one command takes"),
                    attempts: 0,
                    not_before: Instant(0),
                };
                op.sent += blocks;
                op.outstanding += 1;
                self.send(piece);
            }
            self.unsent.pop_front();
            self.finish_if_done(index);
        }
    }

    /// Sends one command. There is a free slot.
    fn send(&mut self, piece: Piece) {
        let index = self.free.pop().expect("the caller has looked");
        let scratch = Scratch {
            memory: &self.memory,
            list: self.layout.lists_offset() + usize::from(index) * self.layout.list_stride,
            zeroes: self.layout.zeroes_offset(),
        };
        let op = &mut self.ops[piece.op as usize];
        let body = self.bodies[piece.op as usize].as_ref().expect("a command belongs to an operation");
        match op.command(body, &piece, &self.target, &scratch, &mut self.map, &self.shared.bus) {
            Ok(mut command) => {
                let slot = &mut self.slots[usize::from(index)];
                slot.cid = next_cid(slot.cid, index);
                (slot.piece, slot.sweeps) = (Some(piece), 0);
                command.cid = slot.cid;
                self.sq.push(command);
                self.stats.commands += 1;
            }
            Err(error) => {
                tracing::error!(%error, "a buffer cannot be given to the device");
                self.free.push(index);
                op.outstanding -= 1;
                op.error = Some(DiskError::Io { errno: libc::ENOMEM });
                // An operation with more to send is finished by `send_waiting`.
            }
        }
    }

    /// Takes one completion of the controller.
    fn complete(&mut self, entry: CompletionEntry) {
        let index = entry.cid & ((1 << INDEX_BITS) - 1);
        let slot = self.slots.get_mut(usize::from(index)).filter(|slot| slot.cid == entry.cid);
        let piece = slot.and_then(|slot| if entry.sq_id == self.queue { slot.piece.take() } else { None });
        let Some(piece) = piece else {
            if self.stats.unknown == 0 {
                tracing::warn!(cid = entry.cid, queue = entry.sq_id, "a completion for no command in flight");
            }
            self.stats.unknown += 1;
            return;
        };
        self.free.push(index);
        let verdict = entry.status.verdict();
        let op = &mut self.ops[piece.op as usize];
        let error = match verdict {
            Verdict::Success => None,
            Verdict::Retry if piece.attempts < ATTEMPTS_MAX => {
                let delay = self.shared.facts().identity.retry_delay(entry.status.retry_delay());
                self.now = self.clock.now();
                let piece =
                    Piece { attempts: piece.attempts + 1, not_before: self.now.after(delay), ..piece };
                self.resend.push_back(piece);
                self.stats.retried += 1;
                return;
            }
            Verdict::Media if op.verb == Verb::Read => Some(DiskError::Media { errno: 0 }),
            Verdict::Miscompare => Some(DiskError::Media { errno: libc::EILSEQ }),
            Verdict::Invalid => Some(DiskError::Invalid),
            Verdict::Aborted => Some(DiskError::Timeout),
            Verdict::Gone => Some(DiskError::Gone),
            Verdict::Media | Verdict::Retry | Verdict::Failed => Some(DiskError::Io { errno: libc::EIO }),
        };
        if let Some(error) = error {
            tracing::warn!(status = %entry.status, verb = ?op.verb, lba = op.lba + piece.first, blocks = piece.blocks,
                "a command failed");
            op.error.get_or_insert(error);
        }
        self.close_piece(piece.op);
    }

    fn close_piece(&mut self, index: u32) {
        self.ops[index as usize].outstanding -= 1;
        self.finish_if_done(index);
    }

    /// Ends an operation whose commands have all ended. One that still waits in `unsent` is ended from there.
    fn finish_if_done(&mut self, index: u32) {
        let at = index as usize;
        if !self.ops[at].is_complete() || self.unsent.front() == Some(&index) {
            return;
        }
        let result = self.result(&self.ops[at]);
        self.ops[at].result = Some(result);
        if let (Some(Bounce::Into(from)), Some(DiskOp::Read { buffer, .. })) =
            (&self.ops[at].bounce, &mut self.bodies[at])
        {
            buffer.copy_from_slice(from);
        }
        if let Err(error) = result {
            self.report(at, error);
        }
        self.ready.push_back(index);
    }

    fn result(&self, op: &Op) -> Result<(), DiskError> {
        if let Some(error) = op.error {
            return Err(error);
        }
        let volatile = self.geometry.write_cache == WriteCache::Volatile;
        if volatile && op.verb.may_stay_cached() {
            self.shared.count_cached();
        }
        if op.verb == Verb::Flush {
            // What the cache held may be gone since a reset, and the controller would not know.
            if self.shared.cache_in_doubt() {
                return Err(DiskError::Io { errno: libc::EIO });
            }
            self.shared.count_flushed(op.covers);
        }
        Ok(())
    }

    #[cold]
    fn report(&mut self, at: usize, error: DiskError) {
        self.stats.failed += 1;
        let op = &self.ops[at];
        let refused = error == DiskError::Invalid;
        if op.verb.changes_data() && !refused && !self.poisoned.swap(true, Ordering::AcqRel) {
            tracing::error!(
                %error, verb = ?op.verb, lba = op.lba, blocks = op.blocks,
                "a write or flush failed: nothing is written to this namespace any more"
            );
        }
    }

    fn deliver(&mut self, budget: u32, done: &mut Completions) -> u32 {
        let count = self.ready.len().min(budget as usize);
        for _ in 0..count {
            let index = self.ready.pop_front().expect("counted");
            let op = &mut self.ops[index as usize];
            let result = op.result.expect("what is ready has ended");
            op.bounce = None;
            let body = self.bodies[index as usize].take().expect("an operation is delivered once");
            done.push_back(Completion { ticket: op.ticket, result, op: body });
            self.free_ops.push(index);
        }
        count as u32
    }
}

impl<B: Bus, C: Clock> BlockDevice for Namespace<B, C> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        let verb = self.verb(&op);
        self.submit_as(op, ticket, verb, None)
    }

    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32 {
        let (epoch, standing) = self.shared.standing();
        if epoch != self.epoch || !self.attached || standing != Standing::Live {
            self.attached &= epoch == self.epoch;
            self.catch_up(epoch, standing);
            if !self.attached || standing != Standing::Live {
                return self.deliver(budget, done);
            }
        }
        let before = self.ready.len();
        // Bounded by what can be in flight: a controller that posts without end gets its turn in the next poll.
        for _ in 0..=self.slots.len() {
            if self.ready.len() >= budget as usize {
                break;
            }
            let Some(entry) = self.cq.pop() else { break };
            self.complete(entry);
        }
        self.cq.ring(&self.shared.bus);
        if !self.unsent.is_empty() || !self.resend.is_empty() {
            self.send_waiting();
        }
        self.sq.ring(&self.shared.bus);
        let idle = self.ready.len() == before;
        if self.free.len() < self.slots.len() || !self.resend.is_empty() {
            self.look(idle);
        } else {
            self.overdue = false;
        }
        self.deliver(budget, done)
    }

    fn in_flight(&self) -> u32 {
        (self.ops.len() - self.free_ops.len()) as u32
    }
}

impl<B: Bus, C: Clock> Drop for Namespace<B, C> {
    fn drop(&mut self) {
        let mut done = Completions::new();
        let deadline = self.clock.now().after(4 * self.shared.options.command_timeout);
        // The bound by number is for clocks that stand still.
        let mut polls = 0u32;
        while self.free_ops.len() < self.ops.len() && self.clock.now() < deadline && polls < 1 << 20 {
            self.poll(u32::MAX, &mut done);
            done.clear();
            polls += 1;
        }
        if self.free_ops.len() < self.ops.len() {
            tracing::error!("buffers in flight are lost: the controller has neither answered nor stopped");
            let ops = (std::mem::take(&mut self.ops), std::mem::take(&mut self.bodies));
            let map = std::mem::replace(&mut self.map, PoolMap::new(&BufferPool::new(0)));
            Box::leak(Box::new((ops, map)));
            return;
        }
        self.map.unmap(&self.shared.bus);
        self.shared.release_queue(self.queue);
    }
}

fn next_cid(last: u16, index: u16) -> u16 {
    (last >> INDEX_BITS).wrapping_add(1) << INDEX_BITS | index
}

fn geometry(facts: &NamespaceFacts, controller: &crate::controller::ControllerFacts, depth: u16) -> Geometry {
    // A write that is cut into several commands is atomic in none of its sizes beyond one command.
    let command_blocks = u64::from(controller.transfer_len_max / BLOCK_SIZE);
    Geometry {
        blocks: facts.blocks,
        logical_block: facts.logical_block(),
        dma_alignment: BLOCK_SIZE,
        atomic_blocks: BlockCount(facts.atomic_blocks.0.min(command_blocks)),
        transfer_blocks_max: BlockCount(TRANSFER_BLOCKS_MAX),
        queue_depth_max: depth.into(),
        write_cache: controller.write_cache,
        discards: controller.identity.deallocates,
    }
}

fn target(facts: &NamespaceFacts, controller: &crate::controller::ControllerFacts) -> Target {
    // The length of a Write Zeroes has 16 bits.
    let lbas_max = 1u64 << 16;
    let zero_blocks_max =
        (controller.zeroes_len_max / u64::from(BLOCK_SIZE)).clamp(1, lbas_max >> facts.lba_per_block_shift);
    let transfer_blocks_max = (controller.transfer_len_max / BLOCK_SIZE).max(1);
    Target {
        nsid: facts.nsid,
        lba_per_block_shift: facts.lba_per_block_shift,
        transfer_blocks_max: transfer_blocks_max.min((lbas_max >> facts.lba_per_block_shift) as u32),
        zero_blocks_max: u32::try_from(zero_blocks_max).expect("at most 65,536"),
    }
}
