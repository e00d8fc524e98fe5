//! One placement group on one member, without I/O (`docs/peering.md`).
//!
//! [`Pg::step`] takes one event, changes the PG's state and pushes what is to be sent into the caller's [`Actions`].
//! The store is the one thing it calls directly, through [`PgStore`], which only queues: whether a transaction is
//! taken has to be known before its version is assigned, or a refusal would leave a hole in the history.
//!
//! Reading order: [`phase`] (states and their table), [`peering`] (a new interval), [`tail`] (the newest writes from
//! one member to another), [`op`] and [`waiting`] (client ops), [`replication`] (writes on the primary), [`shortage`]
//! (no space), [`read`], [`replica`].

pub mod blocks;
pub mod ended;
pub mod list;
pub mod op;
pub mod peering;
pub mod phase;
pub mod read;
pub mod replica;
pub mod replication;
pub mod shortage;
pub mod tail;
pub mod ticket;
pub mod waiting;
pub mod watch;

use crate::store::api::{LogEntry, OpLookup, PgStatus, ReadData, ReadError, SubmitError, Transaction};
use arrayvec::ArrayVec;
use ended::Ended;
use loligo_config::id::{Epoch, ObjectId, ObjectVersion, OpId, OsdId, PgId, SessionId};
use loligo_config::limits::POOL_SIZE_MAX;
use loligo_net::wire::Message;
use loligo_net::wire::mon::PgState;
use loligo_net::wire::op::{Notify, OpReply, OpRequest};
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::{ConnectionId, DiskError, Instant, Ticket};
use phase::Phase;
use replica::ReplicaLog;
use replication::Replication;
use std::collections::VecDeque;
use std::time::Duration;
use waiting::OpTable;
use watch::Watches;

/// One value per member of an acting set, in its order.
pub type PerMember<T> = ArrayVec<T, { POOL_SIZE_MAX as usize }>;

/// How long a PG waits for an answer of a peer before it asks again. Guessed: many round trips and a slow device
/// write, and still short against the time in which an OSD restarts.
pub const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The part of a store that a PG needs. See [`crate::store::api`] for what the methods mean.
pub trait PgStore {
    /// What the store knows of the PG; `None` when it does not have it.
    fn status(&self, pg: PgId) -> Option<PgStatus>;
    /// Queues a transaction; its end comes as [`PgEvent::Committed`] or [`PgEvent::Failed`].
    ///
    /// # Errors
    /// As the store's `submit`: nothing of it was done.
    fn submit(&mut self, transaction: Transaction, ticket: Ticket) -> Result<(), SubmitError>;
    /// Queues a read; its end comes as [`PgEvent::Read`].
    ///
    /// # Errors
    /// [`ReadError::Busy`]: no room now.
    fn read(&mut self, range: BlockRange, pg: PgId, ticket: Ticket) -> Result<(), ReadError>;
    /// The object's newest submitted version; `NONE` when it does not exist.
    fn object_version(&self, object: ObjectId) -> ObjectVersion;
    /// What became of an op.
    fn op_lookup(&self, pg: PgId, op: OpId) -> OpLookup;
    /// Calls `each` with first block and count of every allocated run in the range, in order.
    fn extents(&self, range: BlockRange, each: &mut dyn FnMut(u32, u32));
    /// Calls `each` with every object of the shard from `from` on, in order, its PG, last version and number of
    /// allocated blocks, until it returns false.
    fn objects(&self, from: ObjectId, each: &mut dyn FnMut(ObjectId, PgId, ObjectVersion, u32) -> bool);
    /// Puts every log entry after `since` into `out`, oldest first. False: the kept log does not reach back to it.
    fn entries_since(&self, pg: PgId, since: ObjectVersion, out: &mut Vec<LogEntry>) -> bool;
    /// Blocks that may still be granted, reserve aside.
    fn credit(&self) -> u64;
    /// The part of them that the primary of one PG may have in flight to this member.
    fn grant(&self) -> u64 {
        self.credit()
    }
}

/// Some blocks of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// The object.
    pub object: ObjectId,
    /// First block.
    pub block: u32,
    /// How many; `u32::MAX` for all of them.
    pub count: u32,
}

impl BlockRange {
    /// The whole object.
    pub fn whole(object: ObjectId) -> Self {
        Self { object, block: 0, count: u32::MAX }
    }

    /// The block after the last one.
    pub fn end(self) -> u32 {
        self.block.saturating_add(self.count)
    }

    /// Whether the two share a block.
    pub fn overlaps(self, other: Self) -> bool {
        self.object == other.object && self.block < other.end() && other.block < self.end()
    }

    /// Whether every block of `other` is in this one.
    pub fn covers(self, other: Self) -> bool {
        self.object == other.object && self.block <= other.block && other.end() <= self.end()
    }
}

/// What a step may use.
pub struct Context<'a, S> {
    /// Now.
    pub now: Instant,
    /// The shard's store.
    pub store: &'a mut S,
    /// Buffers for merged blocks and small lists.
    pub pool: &'a BufferPool,
    /// The map's fenced sessions, ascending.
    pub fenced: &'a [SessionId],
}

impl<S> Context<'_, S> {
    fn is_fenced(&self, session: SessionId) -> bool {
        self.fenced.binary_search(&session).is_ok()
    }
}

/// Where an op came from and its reply goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Requester {
    /// The core whose connection it is: another one than the PG's when the op was forwarded.
    pub core: u16,
    /// The connection there.
    pub connection: ConnectionId,
}

/// Data of a message.
#[derive(Clone, Debug)]
pub struct Payload {
    /// The bytes.
    pub data: SharedBuffer,
    /// CRC-32C of each piece, four bytes each, little-endian. `None`: to be computed.
    pub checksums: Option<SharedBuffer>,
}

/// The map's word on a PG.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// First epoch of the interval.
    pub since: Epoch,
    /// The acting set, primary first.
    pub acting: PerMember<OsdId>,
    /// Whether every member is up, this one in its own incarnation, and there are enough of them.
    pub complete: bool,
}

/// What happened.
#[derive(Debug)]
pub enum PgEvent {
    /// A new map, as far as it concerns the PG; `None`: the PG is not in it.
    Map(Option<View>),
    /// A client's op.
    Op {
        /// The op.
        request: OpRequest,
        /// The client's epoch.
        epoch: Epoch,
        /// Its data.
        payload: Option<Payload>,
        /// Who waits for the reply.
        from: Requester,
        /// When it arrived.
        arrived: Instant,
    },
    /// A message of another OSD about this PG.
    Peer {
        /// Who sent it.
        from: OsdId,
        /// The message.
        message: Message,
        /// Its data.
        payload: Option<Payload>,
        /// When it arrived.
        arrived: Instant,
    },
    /// See `StoreEvent::Committed`.
    Committed {
        /// Of which transaction.
        ticket: Ticket,
        /// The device write, in nanoseconds.
        device_ns: u32,
    },
    /// See `StoreEvent::Failed`.
    Failed {
        /// Of which transaction.
        ticket: Ticket,
        /// Why.
        error: DiskError,
    },
    /// See `StoreEvent::Read`.
    Read {
        /// Of which read.
        ticket: Ticket,
        /// The blocks.
        result: Result<ReadData, ReadError>,
        /// The device reads, in nanoseconds.
        device_ns: u32,
    },
    /// A connection to another OSD, in the incarnation that the map has, is there.
    PeerUp(OsdId),
    /// It is gone; what was sent over it may be lost.
    PeerDown(OsdId),
    /// The store may have room for what it did not take before: after every move of it while [`Pg::wants_room`].
    Room,
    /// A client's connection is gone.
    RequesterGone(Requester),
    /// Time has passed; at least every [`RETRY_INTERVAL`] while [`Pg::wants_tick`].
    Tick,
}

/// What is to be done.
#[derive(Debug)]
pub enum PgAction {
    /// Send to another OSD. Dropped when there is no connection: whoever waits asks again.
    Send {
        /// To whom.
        to: OsdId,
        /// What.
        message: Message,
        /// Its data.
        payload: Option<Payload>,
    },
    /// Answer a client.
    Reply {
        /// To whom.
        to: Requester,
        /// The answer; the sender fills in `core`.
        reply: OpReply,
        /// Its data.
        payload: Option<Payload>,
        /// When the op arrived: the sender fills in `primary_ns`.
        arrived: Instant,
    },
    /// An op was sent again: this is who asked before, and gets no reply.
    Superseded {
        /// Who.
        to: Requester,
    },
    /// Tell a watcher.
    Notify {
        /// Whom.
        to: Requester,
        /// Of what.
        notify: Notify,
    },
}

/// Actions of one or more steps, taken by the caller; the memory is used again.
pub type Actions = VecDeque<PgAction>;

/// Sums since the PG was made here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Client reads answered with data.
    pub reads: u64,
    /// Client writes (of all kinds) that became durable.
    pub writes: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Ops refused because too much was waiting already.
    pub busy: u64,
    /// Times that something had to wait because the store had no room or there was no memory.
    pub stalled: u64,
    /// Replicated writes sent again.
    pub resent: u64,
}

/// One PG on one member.
#[derive(Debug)]
pub struct Pg {
    id: PgId,
    me: OsdId,
    slot: u32,
    view: Option<View>,
    phase: Phase,
    member: peering::Member,
    ops: OpTable,
    ended: Ended,
    replication: Replication,
    replica: ReplicaLog,
    tail: Option<tail::Sender>,
    tails_sent: u64,
    watches: Watches,
    counters: Counters,
    /// Something waits until the store takes more, or for memory.
    is_stalled: bool,
}

impl Pg {
    /// The PG as its store has it, before any map.
    ///
    /// `slot` is brought back in every ticket (see [`ticket`]).
    pub fn new(id: PgId, me: OsdId, slot: u32, status: Option<PgStatus>) -> Self {
        Self {
            id,
            me,
            slot,
            view: None,
            phase: Phase::Idle,
            member: peering::Member::new(status.unwrap_or_default()),
            ops: OpTable::default(),
            ended: Ended::default(),
            replication: Replication::default(),
            replica: ReplicaLog::default(),
            tail: None,
            tails_sent: 0,
            watches: Watches::default(),
            counters: Counters::default(),
            is_stalled: false,
        }
    }

    /// Its id.
    pub fn id(&self) -> PgId {
        self.id
    }

    /// Sums.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Its state in the words of the map; `None` when this member is not its primary.
    pub fn reported_state(&self) -> Option<PgState> {
        if !self.is_primary() && !matches!(self.phase, Phase::Failed | Phase::Idle) {
            return None;
        }
        self.phase.reported()
    }

    /// Its state.
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    /// The acting set of the current interval; empty without one.
    pub fn acting(&self) -> &[OsdId] {
        self.view.as_ref().map_or(&[], |view| view.acting.as_slice())
    }

    /// Whether somebody waits for it: client ops, replication or peering under way.
    pub fn is_busy(&self) -> bool {
        !self.ops.is_empty()
            || !self.replication.is_empty()
            || !self.replica.is_empty()
            || self.phase.is_peering()
    }

    /// Whether it needs [`PgEvent::Tick`].
    pub fn wants_tick(&self) -> bool {
        self.phase.is_peering()
            || matches!(self.phase, Phase::Incomplete { .. })
            || self.member.is_waiting()
            || self.replication.wants_tick()
    }

    /// Whether it needs [`PgEvent::Room`].
    pub fn wants_room(&self) -> bool {
        self.is_stalled
    }

    fn is_primary(&self) -> bool {
        self.acting().first() == Some(&self.me)
    }

    fn since(&self) -> Epoch {
        self.view.as_ref().map_or(Epoch(0), |view| view.since)
    }

    fn member_index(&self, osd: OsdId) -> Option<usize> {
        self.acting().iter().position(|member| *member == osd)
    }

    /// Takes one event.
    pub fn step<S: PgStore>(&mut self, cx: &mut Context<'_, S>, event: PgEvent, out: &mut Actions) {
        match event {
            PgEvent::Map(view) => self.on_map(cx, view, out),
            PgEvent::Op { request, epoch, payload, from, arrived } => {
                self.on_op(cx, op::Arrival { request, epoch, payload, from, arrived }, out);
            }
            PgEvent::Peer { from, message, payload, arrived } => {
                self.on_peer(cx, from, message, payload, arrived, out);
            }
            PgEvent::Committed { ticket, device_ns } => self.on_committed(cx, ticket, device_ns, out),
            PgEvent::Failed { error, .. } => self.on_failed(error, out),
            PgEvent::Read { ticket, result, device_ns } => self.on_read(cx, ticket, result, device_ns, out),
            PgEvent::PeerUp(osd) => self.on_peer_up(cx, osd, out),
            PgEvent::PeerDown(osd) => self.on_peer_down(cx, osd, out),
            PgEvent::Room => self.on_room(cx, out),
            PgEvent::RequesterGone(from) => {
                self.watches.forget(from);
                self.ops.forget(from);
            }
            PgEvent::Tick => self.on_tick(cx, out),
        }
        self.start_waiting_ops(cx, out);
        self.ask_for_credit(cx.now, out);
        self.check_invariants(&*cx.store);
    }

    fn on_peer<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        message: Message,
        payload: Option<Payload>,
        arrived: Instant,
        out: &mut Actions,
    ) {
        match message {
            Message::RepWrite(write) => self.on_rep_write(cx, from, write, payload, arrived, out),
            Message::RepAck(ack) => self.on_rep_ack(cx, from, ack, out),
            Message::PeerQuery(query) => self.on_query(cx, from, query, out),
            Message::PeerInfo(info) => self.on_info(cx, from, info, out),
            Message::PeerFetch(fetch) => self.on_fetch(cx, from, fetch, out),
            Message::PeerPush(push) => self.on_push(cx, from, push, payload, out),
            Message::PeerPushAck(ack) => self.on_push_ack(cx, from, ack, out),
            Message::PeerPushDone(done) => self.on_push_done(cx, from, done, out),
            Message::PeerActivate(activate) => self.on_activate(cx, from, activate, out),
            Message::PeerActivated(activated) => self.on_activated(cx, from, activated, out),
            _ => {}
        }
    }

    fn on_committed<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        ticket: Ticket,
        device_ns: u32,
        out: &mut Actions,
    ) {
        let (kind, number) = ticket::split(ticket);
        match kind {
            ticket::Kind::Write => self.on_own_commit(cx, number, device_ns, out),
            ticket::Kind::Replica => self.on_replica_commit(cx, number, device_ns, out),
            ticket::Kind::Meta => self.on_meta_commit(cx, number, out),
            ticket::Kind::Push => self.on_push_commit(cx, number, out),
            ticket::Kind::Read | ticket::Kind::TailRead => {}
        }
        self.answer_query_when_drained(cx, out);
    }

    fn on_read<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        ticket: Ticket,
        result: Result<ReadData, ReadError>,
        device_ns: u32,
        out: &mut Actions,
    ) {
        let (kind, number) = ticket::split(ticket);
        match kind {
            ticket::Kind::TailRead => self.on_tail_read(cx, number, result, out),
            ticket::Kind::Read => self.on_op_read(cx, number, result, device_ns, out),
            _ => {}
        }
    }

    /// The device is poisoned: nothing that this member says about new writes can be believed any more.
    fn on_failed(&mut self, _error: DiskError, out: &mut Actions) {
        self.abandon_ops(out);
        self.tail = None;
        self.phase = Phase::Failed;
    }

    fn on_peer_up<S: PgStore>(&mut self, cx: &mut Context<'_, S>, osd: OsdId, out: &mut Actions) {
        let Some(index) = self.member_index(osd) else { return };
        match self.phase {
            Phase::Active => self.resend_writes(cx.now, index, out),
            Phase::Querying(_) => self.send_queries(cx, out),
            Phase::Incomplete { .. } => self.begin_peering(cx, out),
            _ => {}
        }
    }

    fn on_peer_down<S: PgStore>(&mut self, cx: &mut Context<'_, S>, osd: OsdId, out: &mut Actions) {
        if self.member_index(osd).is_none() {
            return;
        }
        if self.tail.as_ref().is_some_and(|tail| tail.to() == osd) {
            self.tail = None;
        }
        if self.phase.is_peering() && self.is_primary() {
            self.begin_peering(cx, out);
        }
    }

    fn on_room<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        if !std::mem::take(&mut self.is_stalled) {
            return;
        }
        self.submit_held(cx, out);
        self.answer_query_when_drained(cx, out);
        self.finish_activation(cx, out);
        self.advance_tail(cx, out);
        self.ops.wake();
    }

    fn on_tick<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        self.answer_query_when_drained(cx, out);
        self.retry_peering(cx, out);
        self.retry_writes(cx.now, out);
    }

    /// The invariants that do not depend on others. Cheap: it runs after every event.
    ///
    /// # Panics
    /// When one is broken.
    pub fn check_invariants<S: PgStore>(&self, store: &S) {
        self.replication.check_invariants(self.since());
        if !matches!(self.phase, Phase::Active) {
            assert!(self.replication.is_empty(), "{}: writes in flight while not active", self.id);
            assert!(self.ops.is_empty(), "{}: ops held while not active", self.id);
        } else {
            assert!(self.is_primary(), "{}: only the primary is active", self.id);
            assert!(self.member.activated() == self.since(), "{}: active before it was recorded", self.id);
        }
        debug_assert!(
            self.replication.is_empty()
                || store.status(self.id).is_some_and(|status| Some(status.last) == self.replication.last()),
            "{}: the newest write in flight is the store's newest",
            self.id
        );
    }
}

#[cfg(test)]
mod tests;
