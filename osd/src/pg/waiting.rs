//! Ops that wait: for their turn among those on the same blocks, for room in this member's store or in another's, for
//! memory.
//!
//! An op is never sent back because there is no room *now*: it waits here, and goes on when a write in flight is
//! durable, a member grants more, or the shard says that its store has moved. A client that had to come again would
//! find the moment by chance, some back-off later. Who waits for room keeps those behind it from taking it, or large
//! writes would starve beside small ones. An op that waits is given up when its client's connection is gone (the
//! client sends it again) and given back when the interval ends.

use super::blocks::Span;
use super::op::{Arrival, Op, OpState, span_of};
use super::replication::Room;
use super::{Actions, BlockRange, Context, Pg, PgStore, Requester};
use loligo_net::wire::op::{Guard, OpKind, OpRequest};
use slab::Slab;
use std::collections::VecDeque;

/// All ops of a PG that are not yet writes in flight.
#[derive(Debug, Default)]
pub struct OpTable {
    /// The ops.
    pub ops: Slab<Op>,
    waiting: VecDeque<usize>,
    pub(super) merging: Vec<usize>,
    /// Reads in state `Held`.
    pub held: Vec<usize>,
    generation: u32,
    may_go_on: bool,
    /// The first of the writes with data that wait does so for room: none behind it may take that.
    is_room_taken: bool,
}

impl OpTable {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Nobody waits any more at this connection. What has not begun never does: its client sends it again.
    pub fn forget(&mut self, from: Requester) {
        for (_, op) in &mut self.ops {
            op.from = op.from.filter(|requester| *requester != from);
        }
        let ops = &mut self.ops;
        let before = self.waiting.len();
        self.waiting.retain(|index| {
            let is_wanted = ops[*index].from.is_some();
            if !is_wanted {
                ops.remove(*index);
            }
            is_wanted
        });
        self.may_go_on |= self.waiting.len() < before;
    }

    /// A write is no longer in flight, a merge is done, or there is more room: waiting ops may start.
    pub fn wake(&mut self) {
        self.may_go_on = true;
    }

    /// Whether writes wait for room.
    pub fn is_room_taken(&self) -> bool {
        self.is_room_taken
    }

    /// Puts an op that cannot go on now before all others: what it conflicts with came later.
    pub(super) fn put_back(&mut self, index: usize) {
        let op = &mut self.ops[index];
        if !matches!(op.state, OpState::Merged { .. }) {
            op.state = OpState::Waiting;
        }
        self.is_room_taken |= stored_blocks(&op.request) > 0;
        self.waiting.push_front(index);
    }

    pub(super) fn insert(&mut self, arrival: Arrival, range: BlockRange) -> usize {
        self.generation = self.generation.wrapping_add(1) & 0x1f_ffff;
        let Arrival { request, payload, from, arrived, .. } = arrival;
        self.ops.insert(Op {
            request,
            payload,
            from: Some(from),
            arrived,
            started: arrived,
            range,
            generation: self.generation,
            state: OpState::Waiting,
        })
    }

    /// What was read for it so far comes back to nobody.
    pub(super) fn forget_reads(&mut self, index: usize) {
        self.generation = self.generation.wrapping_add(1) & 0x1f_ffff;
        self.ops[index].generation = self.generation;
    }

    pub(super) fn wait(&mut self, index: usize) {
        self.waiting.push_back(index);
    }

    /// Takes an op out of the table.
    pub fn take(&mut self, index: usize) -> Op {
        let op = self.ops.remove(index);
        if matches!(op.state, OpState::Merging(_)) {
            self.end_merge(index);
        }
        op
    }

    pub(super) fn end_merge(&mut self, index: usize) {
        self.merging.retain(|merging| *merging != index);
        self.may_go_on = true;
    }

    /// Takes all of them, in no order.
    pub(super) fn drain(&mut self, each: impl FnMut(Op)) {
        self.waiting.clear();
        self.merging.clear();
        self.held.clear();
        self.is_room_taken = false;
        self.ops.drain().for_each(each);
    }

    fn conflicts(&self, index: usize, earlier_waiting: usize) -> bool {
        let op = &self.ops[index];
        let earlier = self.waiting.iter().take(earlier_waiting).chain(&self.merging);
        earlier.map(|other| &self.ops[*other]).any(|other| {
            other.range.overlaps(op.range) && (other.request.kind.is_write() || op.request.kind.is_write())
        })
    }
}

/// Blocks that an op stores on every member. Zeroes for whole blocks take none.
fn stored_blocks(request: &OpRequest) -> u64 {
    let stores = |span: &Span| match request.kind {
        OpKind::Write => true,
        OpKind::WriteZeroes => !span.is_whole_blocks(),
        _ => false,
    };
    span_of(request).filter(stores).map_or(0, |span| span.blocks().into())
}

impl Pg {
    /// Whether an op may start, with so many of those that wait before it.
    pub(super) fn may_start<S: PgStore>(
        &mut self,
        cx: &Context<'_, S>,
        index: usize,
        earlier_waiting: usize,
    ) -> bool {
        let op = &self.ops.ops[index];
        let request = op.request;
        let blocks = stored_blocks(&request);
        if blocks > 0 && self.ops.is_room_taken {
            return false;
        }
        // Every merge becomes a write in flight.
        if request.kind.is_write() && !self.replication.has_room_for(self.ops.merging.len() + 1) {
            return false;
        }
        if self.ops.conflicts(index, earlier_waiting) {
            return false;
        }
        let is_plain_write = match request.kind {
            // What it depends on was read when nothing else was in flight there, and nothing passed it since.
            _ if matches!(op.state, OpState::Merged { .. }) => true,
            _ if request.guard != Guard::Any => false,
            OpKind::Write => span_of(&request).is_some_and(Span::is_whole_blocks),
            // Nothing is logged for an object that does not exist; whether it does must be durable then.
            OpKind::Discard | OpKind::WriteZeroes | OpKind::Remove => {
                cx.store.object_version(request.object).is_some()
                    && (request.kind != OpKind::WriteZeroes
                        || span_of(&request).is_some_and(Span::is_whole_blocks))
            }
            _ => false,
        };
        if !is_plain_write && self.replication.overlaps(op.range) {
            return false;
        }
        self.ops.is_room_taken |= blocks > 0 && self.room_for(cx, blocks) == Room::Later;
        blocks == 0 || !self.ops.is_room_taken
    }

    /// An op that finds no room or no memory goes back to those that wait.
    pub(super) fn stall(&mut self, index: usize) {
        self.counters.stalled += 1;
        self.is_stalled = true;
        self.ops.put_back(index);
    }

    pub(super) fn start_waiting_ops<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        if !std::mem::take(&mut self.ops.may_go_on) {
            return;
        }
        self.ops.is_room_taken = false;
        let mut at = 0;
        while let Some(index) = self.ops.waiting.get(at).copied() {
            if !self.may_start(cx, index, at) {
                at += 1;
                continue;
            }
            self.ops.waiting.remove(at);
            let left = self.ops.waiting.len();
            self.start_op(cx, index, out);
            // One that was put back is before the others now.
            at += usize::from(self.ops.waiting.len() > left);
        }
        if !self.ops.is_room_taken {
            self.replication.rest();
        }
    }
}
