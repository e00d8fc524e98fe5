//! Client ops on the primary: admission, order among ops of one object, and replies.
//!
//! ```text
//!   admitted --(waits for an earlier op on the same blocks, or for room)--> Waiting (`waiting`)
//!   Waiting  --> Reading (Read) --> [Held until what it saw is durable] --> reply
//!            --> Merging (parts of blocks) --> [Merged: waits for room] --> in flight --> reply
//!            --> in flight (whole blocks)  --> reply
//!   Reading, Merging --(no memory)--> Waiting
//! ```
//!
//! Whole-block writes to one block need no waiting: every member applies them in the order of their versions. What
//! depends on contents or version (reads, parts of blocks, guards) waits until no write to its blocks is in flight.

use super::blocks::{Merge, Span};
use super::phase::Phase;
use super::replication::InFlight;
use super::{Actions, BlockRange, Context, Payload, Pg, PgAction, PgStore, Requester, blocks, ended};
use crate::store::api::{Change, OpLookup, ReadData};
use loligo_config::id::{CoreId, Epoch, ObjectVersion};
use loligo_config::limits::{OBJECT_ORDER_MAX, OP_BLOCKS_MAX, OP_DATA_LEN_MAX, PG_WRITES_IN_FLIGHT_MAX};
use loligo_net::wire::op::{Guard, OpKind, OpReply, OpRequest, OpStatus, Residence};
use loligo_reactor::dma::SharedBuffer;
use loligo_reactor::env::Instant;
use loligo_reactor::planted::{self, Bug};

/// Ops that one PG holds besides its writes in flight. Guessed: twice the writes in flight.
pub const OPS_HELD_MAX: usize = 2 * PG_WRITES_IN_FLIGHT_MAX;
const OBJECT_LEN_MAX: u32 = 1 << OBJECT_ORDER_MAX;

/// An op as it arrived.
#[derive(Debug)]
pub struct Arrival {
    /// The op.
    pub request: OpRequest,
    /// The client's epoch.
    pub epoch: Epoch,
    /// Its data.
    pub payload: Option<Payload>,
    /// Who waits for it.
    pub from: Requester,
    /// When it arrived.
    pub arrived: Instant,
}

/// An op that is not yet a write in flight.
#[derive(Debug)]
pub struct Op {
    /// The op.
    pub request: OpRequest,
    /// Its data.
    pub payload: Option<Payload>,
    /// Who waits for it; nobody when the connection is gone.
    pub from: Option<Requester>,
    /// When it arrived.
    pub arrived: Instant,
    /// The blocks that it depends on.
    pub range: BlockRange,
    /// Tells its reads from those of an earlier op in the same place of the table.
    pub generation: u32,
    /// When its read was begun.
    pub started: Instant,
    /// What it waits for.
    pub state: OpState,
}

/// See the picture at the top of the file.
#[derive(Debug)]
pub enum OpState {
    /// For its turn.
    Waiting,
    /// For the old contents of its first and last block.
    Merging(Merge),
    /// For room, with the contents of its whole blocks.
    Merged {
        /// The blocks.
        data: SharedBuffer,
        /// Their checksums.
        checksums: SharedBuffer,
    },
    /// For its data.
    Reading,
    /// It has read a version that is not yet durable on every member.
    Held {
        /// The blocks.
        data: ReadData,
        /// Goes when this version is.
        until: ObjectVersion,
        /// The device reads, in nanoseconds.
        device_ns: u32,
    },
}

pub(super) fn span_of(request: &OpRequest) -> Option<Span> {
    let end = request.offset.checked_add(request.len)?;
    (request.len > 0 && end <= OBJECT_LEN_MAX).then_some(Span { offset: request.offset, len: request.len })
}

/// Only the guard needs the version, and only then is it known to be durable.
fn refused_version<S: PgStore>(cx: &Context<'_, S>, request: &OpRequest, status: OpStatus) -> ObjectVersion {
    match status {
        OpStatus::VersionMismatch => cx.store.object_version(request.object),
        _ => ObjectVersion::NONE,
    }
}

/// The blocks on which a valid op depends; `None`: the op makes no sense.
fn range_of(request: &OpRequest, payload: Option<&Payload>) -> Option<BlockRange> {
    let object = request.object;
    let has_no_range = |kind| {
        use OpKind::{List, Remove, Unwatch, Watch, Watchers};
        matches!(kind, Remove | Watch | Unwatch | List | Watchers)
    };
    if has_no_range(request.kind) {
        return Some(BlockRange::whole(object));
    }
    let span = span_of(request)?;
    let is_sized = match request.kind {
        OpKind::Read => span.len <= OP_DATA_LEN_MAX,
        OpKind::Write => {
            let pieces = span.blocks() as usize * 4;
            span.len <= OP_DATA_LEN_MAX
                && span.blocks() as usize <= OP_BLOCKS_MAX
                && payload.is_some_and(|payload| {
                    payload.data.len() == span.len as usize
                        && payload.checksums.as_ref().is_none_or(|list| list.len() == pieces)
                })
        }
        OpKind::WriteZeroes => span.is_whole_blocks() || span.blocks() as usize <= OP_BLOCKS_MAX,
        _ => true,
    };
    if !is_sized {
        return None;
    }
    if request.guard != Guard::Any {
        return Some(BlockRange::whole(object));
    }
    Some(BlockRange { object, block: span.first_block(), count: span.blocks() })
}

impl Pg {
    pub(super) fn on_op<S: PgStore>(&mut self, cx: &mut Context<'_, S>, arrival: Arrival, out: &mut Actions) {
        let request = arrival.request;
        let refusal = self.refusal(cx, &arrival);
        if let Some(status) = refusal {
            return self.refuse(cx, &arrival.request, Some(arrival.from), arrival.arrived, status, out);
        }
        if request.kind.is_write() && (self.join(&arrival, out) || self.answer_again(&arrival, out)) {
            return;
        }
        let Some(range) = range_of(&request, arrival.payload.as_ref()) else {
            return self.refuse(cx, &request, Some(arrival.from), arrival.arrived, OpStatus::Invalid, out);
        };
        match request.kind {
            OpKind::List => return self.reply_list(cx, &arrival, out),
            OpKind::Watchers => return self.reply_watchers(cx, &arrival, out),
            OpKind::Watch if !self.watches.add(request.object, arrival.from, request.op.session) => {
                return self.refuse(cx, &request, Some(arrival.from), arrival.arrived, OpStatus::Busy, out);
            }
            OpKind::Unwatch => self.watches.remove(request.object, arrival.from),
            _ => {}
        }
        if self.ops.ops.len() >= OPS_HELD_MAX {
            self.counters.busy += 1;
            return self.refuse(cx, &request, Some(arrival.from), arrival.arrived, OpStatus::Busy, out);
        }
        let index = self.ops.insert(arrival, range);
        if self.may_start(cx, index, self.ops.waiting()) {
            self.start_op(cx, index, out);
        } else {
            self.ops.wait(index);
        }
    }

    fn refusal<S: PgStore>(&self, cx: &Context<'_, S>, arrival: &Arrival) -> Option<OpStatus> {
        let request = &arrival.request;
        if request.pg != self.id || request.object.pool != self.id.pool {
            return Some(OpStatus::Invalid);
        }
        if !self.is_primary() {
            return Some(OpStatus::NotPrimary);
        }
        if arrival.epoch < self.since() {
            return Some(OpStatus::StaleEpoch);
        }
        if !matches!(self.phase, Phase::Active) {
            return Some(OpStatus::NotActive);
        }
        cx.is_fenced(request.op.session).then_some(OpStatus::Fenced)
    }

    /// An op that is here already, sent again: its reply goes to where it was asked for last, not to where a late copy from
    /// a connection that is gone came from.
    fn join(&mut self, arrival: &Arrival, out: &mut Actions) -> bool {
        let op = arrival.request.op;
        let held = self.ops.ops.iter_mut().map(|(_, held)| (&mut held.request, &mut held.from));
        let in_flight = self.replication.in_flight_mut().map(|write| (&mut write.request, &mut write.from));
        match held.chain(in_flight).find(|(request, _)| request.op == op) {
            Some(_) if planted::active(Bug::ReplyToOldConnection) => true,
            Some((request, from)) => {
                let is_late = arrival.request.is_before(request) && !planted::active(Bug::ReplyToLateCopy);
                let superseded = if is_late {
                    Some(arrival.from)
                } else {
                    request.attempt = arrival.request.attempt;
                    from.replace(arrival.from)
                };
                out.extend(superseded.map(|to| PgAction::Superseded { to }));
                true
            }
            None => false,
        }
    }

    /// An op that was answered without a trace in the log gets the same answer, or none that counts.
    fn answer_again(&mut self, arrival: &Arrival, out: &mut Actions) -> bool {
        let request = &arrival.request;
        let (status, version) = match self.ended.lookup(request.op, request.lowest_outstanding) {
            ended::Lookup::New => return false,
            _ if planted::active(Bug::LateCopyApplied) => return false,
            ended::Lookup::Answered(status, version) => (status, version),
            ended::Lookup::Over => (OpStatus::Invalid, ObjectVersion::NONE),
        };
        let copies = if status == OpStatus::Done { self.copies() } else { 0 };
        let end = OpEnd { status, version, copies, ..OpEnd::DONE };
        self.reply(request, Some(arrival.from), arrival.arrived, end, out);
        true
    }

    pub(super) fn start_op<S: PgStore>(&mut self, cx: &mut Context<'_, S>, index: usize, out: &mut Actions) {
        let request = self.ops.ops[index].request;
        let version = cx.store.object_version(request.object);
        if request.kind.is_write() && !self.is_new(cx, index, out) {
            return;
        }
        if let Guard::Version(wanted) = request.guard
            && wanted != version
        {
            return self.finish_refused(cx, index, OpStatus::VersionMismatch, out);
        }
        match request.kind {
            OpKind::Read => self.start_read(cx, index),
            OpKind::Extents => self.reply_extents(cx, index, out),
            OpKind::Watch | OpKind::Unwatch | OpKind::List | OpKind::Watchers => {
                self.finish_without_change(cx, index, out);
            }
            OpKind::Remove if !version.is_some() => self.finish_without_change(cx, index, out),
            OpKind::Discard | OpKind::WriteZeroes if !version.is_some() => {
                self.finish_without_change(cx, index, out);
            }
            OpKind::Remove => {
                let change = Change::Remove { object: request.object };
                self.submit_write(cx, index, change, out);
            }
            OpKind::Discard => self.start_free(cx, index, out),
            OpKind::Write | OpKind::WriteZeroes => self.start_write(cx, index, out),
        }
    }

    /// Whether a write is to be applied: its session may, and it was not applied before.
    fn is_new<S: PgStore>(&mut self, cx: &mut Context<'_, S>, index: usize, out: &mut Actions) -> bool {
        let op = self.ops.ops[index].request.op;
        if cx.is_fenced(op.session) {
            self.finish_refused(cx, index, OpStatus::Fenced, out);
            return false;
        }
        match cx.store.op_lookup(self.id, op) {
            OpLookup::New => true,
            OpLookup::Forgotten if planted::active(Bug::LateCopyApplied) => true,
            OpLookup::Applied(version) => {
                // What is applied and no longer in flight is durable on every member.
                let copies = self.copies();
                let op = self.ops.take(index);
                self.reply(&op.request, op.from, op.arrived, OpEnd { version, copies, ..OpEnd::DONE }, out);
                false
            }
            OpLookup::Forgotten => {
                self.finish_refused(cx, index, OpStatus::Invalid, out);
                false
            }
            OpLookup::SessionExpired => {
                self.finish_refused(cx, index, OpStatus::SessionExpired, out);
                false
            }
        }
    }

    fn start_free<S: PgStore>(&mut self, cx: &mut Context<'_, S>, index: usize, out: &mut Actions) {
        let request = self.ops.ops[index].request;
        let (block, count) = span_of(&request).map_or((0, 0), Span::inner_blocks);
        if count == 0 {
            return self.finish_without_change(cx, index, out);
        }
        let count = count + u32::from(planted::active(Bug::DiscardTakesNeighbour));
        self.submit_write(cx, index, Change::Free { object: request.object, block, count }, out);
    }

    fn start_write<S: PgStore>(&mut self, cx: &mut Context<'_, S>, index: usize, out: &mut Actions) {
        let op = &mut self.ops.ops[index];
        let object = op.request.object;
        let Some(span) = span_of(&op.request) else {
            return self.finish_refused(cx, index, OpStatus::Invalid, out);
        };
        let block = span.first_block();
        if let OpState::Merged { data, checksums } = &op.state {
            let (data, checksums) = (data.clone(), checksums.clone());
            return self.submit_write(cx, index, Change::Write { object, block, data, checksums }, out);
        }
        if !span.is_whole_blocks() {
            return self.start_merge(cx, index, span);
        }
        if op.request.kind == OpKind::WriteZeroes {
            let count = span.blocks();
            let count = count - u32::from(count > 1 && planted::active(Bug::WriteZeroesShort));
            return self.submit_write(cx, index, Change::Free { object, block, count }, out);
        }
        let Some(Payload { data, checksums }) = op.payload.clone() else {
            return self.finish_refused(cx, index, OpStatus::Invalid, out);
        };
        match checksums.map_or_else(|| blocks::checksums_of(cx.pool, &data), Ok) {
            Ok(checksums) => {
                self.submit_write(cx, index, Change::Write { object, block, data, checksums }, out);
            }
            Err(_) => self.stall(index),
        }
    }

    fn start_merge<S: PgStore>(&mut self, cx: &mut Context<'_, S>, index: usize, span: Span) {
        let op = &mut self.ops.ops[index];
        let data = op.payload.as_ref().map(|payload| &payload.data[..]);
        let Ok(mut merge) = Merge::new(cx.pool, span, data) else {
            return self.stall(index);
        };
        let (object, generation) = (op.request.object, op.generation);
        let last = span.first_block() + span.blocks() - 1;
        let edges =
            [(span.has_partial_head(), span.first_block(), false), (span.has_partial_tail(), last, true)];
        for (_, block, is_tail) in edges.into_iter().filter(|(is_partial, ..)| *is_partial) {
            let range = BlockRange { object, block, count: 1 };
            let ticket = self.read_ticket(index, generation, is_tail);
            if cx.store.read(range, self.id, ticket).is_err() {
                // A read that was begun comes back to nobody.
                self.ops.forget_reads(index);
                return self.stall(index);
            }
            merge.pending += 1;
        }
        self.ops.ops[index].state = OpState::Merging(merge);
        self.ops.merging.push(index);
    }

    /// The old contents of one edge block are here.
    pub(super) fn on_edge_read<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        index: usize,
        is_tail: bool,
        old: &ReadData,
        out: &mut Actions,
    ) {
        let op = &mut self.ops.ops[index];
        let OpState::Merging(merge) = &mut op.state else { return };
        merge.fill_edge(is_tail, old.data.as_deref());
        if merge.pending > 0 {
            return;
        }
        let OpState::Merging(merge) = std::mem::replace(&mut op.state, OpState::Waiting) else { return };
        self.ops.end_merge(index);
        if cx.is_fenced(self.ops.ops[index].request.op.session) {
            return self.finish_refused(cx, index, OpStatus::Fenced, out);
        }
        let op = &mut self.ops.ops[index];
        let given = op.payload.as_ref().and_then(|payload| payload.checksums.as_deref());
        match merge.finish(cx.pool, given) {
            Ok((data, checksums)) => {
                op.state = OpState::Merged { data, checksums };
                op.payload = None;
                self.start_write(cx, index, out);
            }
            Err(_) => self.stall(index),
        }
    }

    // ----------------------------------------------------------------------------------------- replies

    pub(super) fn copies(&self) -> u8 {
        u8::try_from(self.acting().len()).expect("an acting set has at most POOL_SIZE_MAX members")
    }

    pub(super) fn finish_refused<S: PgStore>(
        &mut self,
        cx: &Context<'_, S>,
        index: usize,
        status: OpStatus,
        out: &mut Actions,
    ) {
        if status == OpStatus::Busy {
            self.counters.busy += 1;
        }
        let op = self.ops.take(index);
        let is_final = matches!(status, OpStatus::VersionMismatch | OpStatus::NoSpace | OpStatus::MediaError);
        if is_final && op.request.kind.is_write() {
            self.ended.record(op.request.op, status, refused_version(cx, &op.request, status));
        }
        self.refuse(cx, &op.request, op.from, op.arrived, status, out);
    }

    fn finish_without_change<S: PgStore>(&mut self, cx: &Context<'_, S>, index: usize, out: &mut Actions) {
        let op = self.ops.take(index);
        let version = cx.store.object_version(op.request.object);
        let is_write = op.request.kind.is_write();
        if is_write {
            self.ended.record(op.request.op, OpStatus::Done, version);
        }
        let copies = if is_write { self.copies() } else { 0 };
        self.reply(&op.request, op.from, op.arrived, OpEnd { version, copies, ..OpEnd::DONE }, out);
    }

    fn refuse<S: PgStore>(
        &self,
        cx: &Context<'_, S>,
        request: &OpRequest,
        from: Option<Requester>,
        arrived: Instant,
        status: OpStatus,
        out: &mut Actions,
    ) {
        let version = refused_version(cx, request, status);
        self.reply(request, from, arrived, OpEnd { status, version, ..OpEnd::DONE }, out);
    }

    pub(super) fn reply(
        &self,
        request: &OpRequest,
        from: Option<Requester>,
        arrived: Instant,
        end: OpEnd,
        out: &mut Actions,
    ) {
        let Some(to) = from else { return };
        let OpEnd { status, version, copies, residence, payload } = end;
        let len = payload.as_ref().map_or(0, |payload| payload.data.len());
        let reply = OpReply {
            op: request.op,
            status,
            version,
            offset: if request.kind == OpKind::Extents { 0 } else { request.offset },
            len: u32::try_from(len).expect("data of one op is below 4 GiB"),
            core: CoreId(0),
            copies,
            residence,
        };
        out.push_back(PgAction::Reply { to, reply, payload, arrived });
    }

    /// The interval is over for this primary: every op is given back, whether it was applied or not. The client sends
    /// it again, and the op-id table tells.
    pub(super) fn abandon_ops(&mut self, out: &mut Actions) {
        let end = || OpEnd { status: OpStatus::NotActive, ..OpEnd::DONE };
        while let Some(InFlight { request, from, arrived, .. }) = self.replication.abandon_next() {
            self.reply(&request, from, arrived, end(), out);
        }
        let mut ops = std::mem::take(&mut self.ops);
        ops.drain(|op| self.reply(&op.request, op.from, op.arrived, end(), out));
        self.ops = ops;
        self.replication.rest();
    }
}

/// How an op ended.
#[derive(Debug)]
pub struct OpEnd {
    /// See `OpReply`.
    pub status: OpStatus,
    /// See `OpReply`.
    pub version: ObjectVersion,
    /// See `OpReply`.
    pub copies: u8,
    /// See `OpReply`.
    pub residence: Residence,
    /// The data.
    pub payload: Option<Payload>,
}

impl OpEnd {
    /// Done, with nothing to say.
    pub const DONE: Self = Self {
        status: OpStatus::Done,
        version: ObjectVersion::NONE,
        copies: 0,
        residence: Residence::NONE,
        payload: None,
    };
}
