//! Ops on objects: where they go, in which order, and again when an answer is lost. Sans-I/O.
//!
//! ```text
//!             no earlier overlapping write      number, credit, link up
//!   submit -> Blocked -------------------> Ready -------------------> Sent -> reply: ended
//!                                           ^                          |
//!                                           +-- link lost, new primary +
//!                                               or interval, "not now"
//! ```
//!
//! An op has no time limit unless one is set: it waits for the cluster, as RBD does. It gets its number when it is
//! first sent; from the second time on it says that it was sent before. The PG keeps the results, so it never applies
//! twice. What the objecter needs of the network is the trait [`Wire`]; what the network tells are [`WireEvent`]s.

mod link;
mod map;
mod mon;
mod op;
mod order;
mod pg;
mod reply;
mod watch;
mod wire;

#[cfg(test)]
mod tests;

pub(crate) use reply::extent_entries;

pub use op::{ObjectOp, OpDone, OpOutcome, OpTiming};
pub use watch::Notice;
pub use wire::{LinkDown, Refused, Wire, WireEvent};

use crate::error::{CommandError, ConnectError, IoError};
use link::{Link, LinkState};
use loligo_config::id::{CoreId, Epoch, ObjectId, OpId, OsdId, PgId, SessionId};
use loligo_config::map::ClusterMap;
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::Message;
use loligo_net::wire::handshake::Role;
use loligo_net::wire::op::{OpKind, OpRequest};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{ConnectionId, Instant, Ticket};
use loligo_reactor::planted::{self, Bug};
use mon::MonLink;
use op::{Op, Origin};
use order::Order;
use pg::PgQueue;
use serde_json::Value;
use slab::Slab;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use watch::{Watch, WatchState};

/// `first` doubled for every earlier attempt, at most `max`.
fn backoff(first: Duration, attempts: u32, max: Duration) -> Duration {
    first.saturating_mul(1 << attempts.min(16)).min(max)
}

/// What an objecter is told when it is made.
#[derive(Clone, Debug)]
pub struct ObjecterSettings {
    /// The mons, in the order in which they are tried.
    pub mons: Vec<SocketAddr>,
    /// For the data of control messages.
    pub pool: BufferPool,
    /// After how long an op is given up; `None`: never.
    pub op_timeout: Option<Duration>,
}

/// Where the session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Session {
    /// No mon has given one yet.
    None,
    /// In use.
    Live(SessionId),
    /// A PG has dropped its results: no new op gets a number, and when those with one have ended, a new session is
    /// asked for. While those that are left wait for a PG that is not served, others go on (see `renew_session`).
    Ending(SessionId),
    /// Fenced: nothing is served any more.
    Fenced,
}

/// The state machine. `O` says whom an op belongs to.
#[derive(Debug)]
pub struct Objecter<O> {
    settings: ObjecterSettings,
    now: Instant,
    /// When an op was last handed to the transport.
    last_sent: Instant,
    session: Session,
    map: Option<Arc<ClusterMap>>,
    mon: MonLink,
    ops: Slab<Op<O>>,
    /// Ops that wait for a map with their pool.
    unplaced: Vec<usize>,
    order: Order,
    /// Ops by number.
    numbers: BTreeMap<u64, usize>,
    last_number: u64,
    pgs: BTreeMap<PgId, PgQueue>,
    /// PGs with ops to be sent.
    active: BTreeSet<PgId>,
    /// The PG that is served first in the next round, so that none takes all credits of a link.
    cursor: PgId,
    links: Vec<Link>,
    links_by_core: BTreeMap<(OsdId, CoreId), usize>,
    links_by_connection: BTreeMap<ConnectionId, usize>,
    watches: BTreeMap<u64, Watch>,
    last_watch: u64,
    deadlines: BTreeSet<(Instant, usize)>,
    /// Something has happened that may let ops go.
    dirty: bool,
    done: VecDeque<OpDone<O>>,
    notices: VecDeque<Notice>,
    /// Reused, so that no op allocates.
    freed: Vec<usize>,
    /// The session is ending, and what keeps it is not out anywhere.
    is_renewal_stuck: bool,
}

impl<O: Copy> Objecter<O> {
    /// One that connects at the first `poll`.
    pub fn new(settings: ObjecterSettings) -> Self {
        Self {
            now: Instant(0),
            last_sent: Instant(0),
            session: Session::None,
            map: None,
            mon: MonLink::new(settings.mons.clone()),
            settings,
            ops: Slab::new(),
            unplaced: Vec::new(),
            order: Order::default(),
            numbers: BTreeMap::new(),
            last_number: 0,
            pgs: BTreeMap::new(),
            active: BTreeSet::new(),
            cursor: PgId::default(),
            links: Vec::new(),
            links_by_core: BTreeMap::new(),
            links_by_connection: BTreeMap::new(),
            watches: BTreeMap::new(),
            last_watch: 0,
            deadlines: BTreeSet::new(),
            dirty: true,
            done: VecDeque::new(),
            notices: VecDeque::new(),
            freed: Vec::new(),
            is_renewal_stuck: false,
        }
    }

    /// The newest map.
    pub fn map(&self) -> Option<&Arc<ClusterMap>> {
        self.map.as_ref()
    }

    /// The session, when there is one.
    pub fn session(&self) -> Option<SessionId> {
        match self.session {
            Session::Live(session) | Session::Ending(session) => Some(session),
            Session::None | Session::Fenced => None,
        }
    }

    /// Whether the session is fenced: every op fails.
    pub fn is_fenced(&self) -> bool {
        self.session == Session::Fenced
    }

    /// Whether every mon has refused this client for a reason that does not go away by itself.
    pub fn is_refused(&self) -> bool {
        self.mon.is_refused()
    }

    /// Why there is no session or no map yet.
    pub fn connect_problem(&self) -> Option<&ConnectError> {
        self.mon.problem()
    }

    /// Ops and commands that have not ended.
    pub fn is_waiting(&self) -> bool {
        !self.ops.is_empty() || self.mon.has_commands()
    }

    /// Whether an answer is on its way: an op or a command is out. Ops that wait for a PG or a connection have none.
    pub fn is_expecting(&self) -> bool {
        self.links.iter().any(Link::is_expecting) || self.mon.is_expecting()
    }

    /// Ops that have not ended.
    pub fn outstanding(&self) -> usize {
        self.ops.len()
    }

    /// Queues an op; `OpDone` follows. Nothing is sent before the next `poll`.
    pub fn submit(&mut self, now: Instant, request: ObjectOp, owner: O) {
        self.submit_from(now, request, Origin::User(owner));
    }

    /// Queues an admin command; its answer follows in `next_answer`.
    pub fn command(&mut self, request: &Value, ticket: Ticket) {
        self.mon.command(request, ticket);
        self.dirty = true;
        if self.is_fenced() {
            self.mon.fail_all();
        }
    }

    /// From now on a `Notice` follows every change of the object, and once when the watch is armed.
    pub fn watch(&mut self, object: ObjectId) -> u64 {
        self.last_watch += 1;
        self.watches.insert(self.last_watch, Watch { object, state: WatchState::Idle { until: Instant(0) } });
        self.dirty = true;
        self.last_watch
    }

    /// Ends a watch.
    pub fn unwatch(&mut self, now: Instant, watch: u64) {
        let Some(watch) = self.watches.remove(&watch) else { return };
        let shared = self.watches.values().any(|other| other.object == watch.object);
        if matches!(watch.state, WatchState::Armed { .. }) && !shared {
            self.submit_from(now, ObjectOp::new(watch.object, OpKind::Unwatch, 0, 0), Origin::Nobody);
        }
    }

    /// The next op that has ended.
    pub fn next_done(&mut self) -> Option<OpDone<O>> {
        self.done.pop_front()
    }

    /// The next word about a watched object.
    pub fn next_notice(&mut self) -> Option<Notice> {
        self.notices.pop_front()
    }

    /// The next answer to an admin command.
    pub fn next_answer(&mut self) -> Option<(Ticket, Result<Value, CommandError>)> {
        self.mon.answers.pop_front()
    }

    /// Takes one event.
    pub fn handle<W: Wire>(&mut self, now: Instant, event: WireEvent, wire: &mut W) {
        self.now = self.now.max(now);
        self.dirty = true;
        match event {
            WireEvent::Up { connection, peer, credits } if self.mon.is(connection) => {
                self.mon_up(connection, peer, credits, wire);
            }
            WireEvent::Up { connection, credits, .. } => match self.links_by_connection.get(&connection) {
                Some(link) => self.links[*link].up(credits),
                None => wire.close(connection),
            },
            WireEvent::Message { connection, message, data, arrived } => {
                self.handle_message(connection, message, data, arrived, wire);
            }
            WireEvent::Down { connection, reason } => self.handle_down(connection, reason),
        }
    }

    /// Sends what can be sent, and runs the timers. Returns whether anything happened.
    pub fn poll<W: Wire>(&mut self, now: Instant, wire: &mut W) -> bool {
        let before = self.now;
        self.now = self.now.max(now);
        self.dirty |= self.is_due(before);
        if !std::mem::take(&mut self.dirty) {
            return false;
        }
        if self.is_fenced() {
            return true;
        }
        self.expire_ops();
        self.renew_session(wire);
        let have = self.epoch();
        self.mon.poll(self.now, have, &self.settings.pool, wire);
        self.dirty |= self.mon.has_unsent();
        self.arm_watches();
        self.dispatch(wire);
        self.check_invariants();
        true
    }

    /// When to poll next even if no event comes.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.is_fenced() {
            return None;
        }
        if self.dirty {
            return Some(self.now);
        }
        let later = |at: Instant| (at > self.now).then_some(at);
        let pauses =
            self.active.iter().filter_map(|pg| self.pgs.get(pg)?.pause).filter_map(|p| later(p.until));
        let links = self.links.iter().filter(|link| link.wanted).filter_map(|link| match link.state {
            LinkState::Idle { retry_at } => later(retry_at),
            _ => None,
        });
        let full = self.links.iter().filter_map(Link::full_until).filter_map(later);
        let ops = self.deadlines.first().map(|(at, _)| *at);
        let watches = self.watches.values().filter_map(Watch::deadline).filter_map(later);
        pauses.chain(watches).chain(links).chain(full).chain(self.mon.deadline()).chain(ops).min()
    }

    /// Whether a timer ran out after `before`. Earlier ones have had their turn: what they wait for now is an event.
    fn is_due(&self, before: Instant) -> bool {
        let due = |at: Instant| at > before && at <= self.now;
        let pauses =
            self.active.iter().filter_map(|pg| self.pgs.get(pg)?.pause).any(|pause| due(pause.until));
        let links = self
            .links
            .iter()
            .any(|link| link.wanted && matches!(link.state, LinkState::Idle { retry_at } if due(retry_at)));
        let full = self.links.iter().filter_map(Link::full_until).any(due);
        let ops = self.deadlines.first().is_some_and(|(at, _)| *at <= self.now);
        let watches = self.watches.values().filter_map(Watch::deadline).any(due);
        pauses || links || full || ops || watches || self.mon.deadline().is_some_and(due)
    }

    fn epoch(&self) -> Epoch {
        self.map.as_ref().map_or(Epoch(0), |map| map.epoch)
    }

    fn submit_from(&mut self, now: Instant, request: ObjectOp, origin: Origin<O>) {
        self.now = self.now.max(now);
        let timing = OpTiming { submitted: now, ..OpTiming::default() };
        // The objecter's own ops go on until they are done: a watch that was given up would never be armed again.
        let limit = self.settings.op_timeout.filter(|_| matches!(origin, Origin::User(_)));
        let deadline = limit.map(|limit| now.after(limit));
        let slot = self.ops.insert(Op {
            origin,
            request,
            pg: None,
            number: 0,
            link: None,
            maybe_applied: false,
            blocked_by: 0,
            damaged: 0,
            deadline,
            timing,
        });
        if self.is_fenced() {
            self.finish(slot, Err(IoError::Fenced));
            return;
        }
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, slot));
        }
        self.ops[slot].blocked_by = self.order.enter(slot, &self.ops);
        self.place(slot);
        self.dirty = true;
    }

    /// Finds the op's PG and queues it there unless it is blocked.
    fn place(&mut self, slot: usize) {
        let Some(map) = &self.map else {
            self.unplaced.push(slot);
            return;
        };
        let Some(pg) = map::pg_of(map, &self.ops[slot].request) else {
            // The pool is removed, or newer than the map: image code looks pools up in the map first.
            self.finish(slot, Err(IoError::Fenced));
            return;
        };
        let queue = self.pgs.entry(pg).or_insert_with(|| map::new_queue(map, pg));
        self.ops[slot].pg = Some(pg);
        if self.ops[slot].number != 0 {
            queue.number(self.ops[slot].number);
        }
        if self.ops[slot].blocked_by == 0 {
            self.enqueue(slot);
        }
    }

    /// Puts an op among those of its PG that are to be sent: by number, those without one behind.
    fn enqueue(&mut self, slot: usize) {
        let op = &self.ops[slot];
        let Some(pg) = op.pg else { return };
        let Some(queue) = self.pgs.get_mut(&pg) else { return };
        let behind = |other: &usize| {
            let other = self.ops[*other].number;
            op.number != 0 && (other == 0 || other > op.number)
        };
        let at = queue.ready.iter().position(behind).unwrap_or(queue.ready.len());
        queue.ready.insert(at, slot);
        self.active.insert(pg);
        self.dirty = true;
    }

    /// The op has come to its end.
    fn finish(&mut self, slot: usize, result: Result<OpOutcome, IoError>) {
        let mut freed = std::mem::take(&mut self.freed);
        self.order.leave(slot, &mut self.ops, &mut freed);
        let op = self.ops.remove(slot);
        if let Some(pg) = op.pg
            && let Some(queue) = self.pgs.get_mut(&pg)
        {
            queue.forget(op.number);
            queue.returned(slot);
            queue.ready.retain(|other| *other != slot);
            if queue.ready.is_empty() {
                self.active.remove(&pg);
            }
        }
        if op.number != 0 {
            self.numbers.remove(&op.number);
        }
        if let Some(link) = op.link.filter(|_| !planted::active(Bug::CreditLeak)) {
            self.links[link].return_credit();
        }
        if let Some(deadline) = op.deadline {
            self.deadlines.remove(&(deadline, slot));
        }
        self.unplaced.retain(|other| *other != slot);
        for slot in freed.drain(..) {
            self.enqueue(slot);
        }
        self.freed = freed;
        self.dirty = true;
        self.deliver(op, result);
    }

    fn deliver(&mut self, op: Op<O>, result: Result<OpOutcome, IoError>) {
        match op.origin {
            Origin::User(owner) => self.done.push_back(OpDone { owner, result, timing: op.timing }),
            Origin::Watch(number) => self.watch_ended(number, result),
            Origin::Nobody => {}
        }
    }

    /// Gives up ops whose time has run out. One that was sent goes on without its user: until its end is known, no
    /// newer write may pass it.
    fn expire_ops(&mut self) {
        while let Some(&(deadline, slot)) = self.deadlines.first() {
            if deadline > self.now {
                return;
            }
            self.deadlines.remove(&(deadline, slot));
            let op = &mut self.ops[slot];
            op.deadline = None;
            if op.timing.sends == 0 {
                self.finish(slot, Err(IoError::Timeout));
            } else if let Origin::User(owner) = std::mem::replace(&mut op.origin, Origin::Nobody) {
                let timing = op.timing;
                self.done.push_back(OpDone { owner, result: Err(IoError::MaybeApplied), timing });
            }
        }
    }

    fn dispatch<W: Wire>(&mut self, wire: &mut W) {
        let (Session::Live(session) | Session::Ending(session)) = self.session else { return };
        // Taken out for the while, so that the links can be changed beside it.
        let Some(map) = self.map.take() else { return };
        self.dispatch_all(session, &map, wire);
        self.map = Some(map);
    }

    fn dispatch_all<W: Wire>(&mut self, session: SessionId, map: &ClusterMap, wire: &mut W) {
        let first = self.active.range(self.cursor..).next().copied();
        let Some(mut pg) = first.or_else(|| self.active.first().copied()) else { return };
        self.cursor = PgId { index: pg.index.wrapping_add(1), ..pg };
        for _ in 0..self.active.len() {
            self.dispatch_pg(session, map, pg, wire);
            let after = self.active.range((std::ops::Bound::Excluded(pg), std::ops::Bound::Unbounded)).next();
            let Some(next) = after.or_else(|| self.active.first()) else { return };
            pg = *next;
        }
    }

    fn dispatch_pg<W: Wire>(&mut self, session: SessionId, map: &ClusterMap, pg: PgId, wire: &mut W) {
        while let Some(queue) = self.pgs.get(&pg)
            && let Some(&slot) = queue.ready.front()
            && let Some(target) = queue.target
            && queue.may_send(self.now)
        {
            let core = if queue.core.0 < target.cores { queue.core } else { CoreId(0) };
            let fresh = self.ops[slot].number == 0;
            let is_ending = matches!(self.session, Session::Ending(_));
            if fresh && (!queue.has_window() || is_ending && (queue.is_expired || !self.is_renewal_stuck)) {
                return;
            }
            let Some((link, connection)) = self.link_to(target.osd, core, map, wire) else { return };
            match self.send(session, pg, slot, connection, wire) {
                Ok(()) => self.mark_sent(pg, slot, link, wire.now()),
                Err(Refused::Full) => return self.links[link].full(self.now),
                Err(Refused::Closed) => return,
            }
        }
    }

    /// The link to a core of an OSD, when one more op may be sent over it now; begins to connect when it is not there.
    fn link_to<W: Wire>(
        &mut self,
        osd: OsdId,
        core: CoreId,
        map: &ClusterMap,
        wire: &mut W,
    ) -> Option<(usize, ConnectionId)> {
        let links = &mut self.links;
        let index = *self.links_by_core.entry((osd, core)).or_insert_with(|| {
            links.push(Link::new(osd, core));
            links.len() - 1
        });
        let link = &mut links[index];
        if let Some(address) = link.due(self.now, map) {
            let connection = wire.connect(address, Role::Osd(osd), core);
            link.connecting(connection);
            self.links_by_connection.insert(connection, index);
        }
        link.ready(self.now).map(|connection| (index, connection))
    }

    fn send<W: Wire>(
        &mut self,
        session: SessionId,
        pg: PgId,
        slot: usize,
        connection: ConnectionId,
        wire: &mut W,
    ) -> Result<(), Refused> {
        let queue = self.pgs.get_mut(&pg).expect("the op was found in this queue");
        let op = &mut self.ops[slot];
        if op.number == 0 {
            self.last_number += 1;
            op.number = self.last_number;
            queue.number(op.number);
            self.numbers.insert(op.number, slot);
        }
        let waited = self.now.since(op.timing.submitted).as_nanos();
        let request = OpRequest {
            pg,
            object: op.request.object,
            kind: op.request.kind,
            offset: op.request.offset,
            len: op.request.len,
            op: OpId { session, number: op.number },
            lowest_outstanding: queue.lowest().unwrap_or(op.number),
            snap_seq: op.request.snap_seq,
            guard: op.request.guard,
            attempt: op.timing.sends.to_le_bytes()[0],
            client_queue_ns: u32::try_from(waited).unwrap_or(u32::MAX),
        };
        assert!(request.lowest_outstanding <= op.number, "an op that is sent is outstanding");
        let within_block = op.request.offset % BLOCK_SIZE;
        wire.send(connection, Message::Op(request), op.request.data.clone(), within_block)
    }

    fn mark_sent(&mut self, pg: PgId, slot: usize, link: usize, sent: Instant) {
        let queue = self.pgs.get_mut(&pg).expect("the op was found in this queue");
        let popped = queue.ready.pop_front();
        assert_eq!(popped, Some(slot), "the first op of the queue was sent");
        queue.sent(slot);
        if queue.ready.is_empty() {
            self.active.remove(&pg);
        }
        self.links[link].take_credit();
        let op = &mut self.ops[slot];
        op.link = Some(link);
        // One after the other: this one's turn came when the one before was sent.
        op.timing.turn = self.last_sent.max(self.now);
        op.timing.sent = sent.max(op.timing.turn);
        self.last_sent = op.timing.sent;
        op.timing.sends = op.timing.sends.saturating_add(1);
    }

    /// Takes an op that is out back among those to be sent; whether it was applied is unknown.
    fn take_back(&mut self, slot: usize) {
        let op = &mut self.ops[slot];
        let Some(link) = op.link.take() else { return };
        op.maybe_applied = true;
        let number = op.number;
        if planted::active(Bug::ResendWithNewId) {
            op.number = 0;
            self.numbers.remove(&number);
        }
        self.links[link].return_credit();
        if let Some(queue) = op.pg.and_then(|pg| self.pgs.get_mut(&pg)) {
            queue.returned(slot);
            if planted::active(Bug::ResendWithNewId) {
                queue.forget(number);
            }
        }
        self.enqueue(slot);
    }

    fn check_invariants(&self) {
        assert!(self.numbers.len() <= self.ops.len(), "an op has one number at most");
        if cfg!(debug_assertions) {
            for (slot, op) in &self.ops {
                let queued = op.pg.and_then(|pg| self.pgs.get(&pg)).is_some_and(|q| q.ready.contains(&slot));
                let places = [queued, op.link.is_some(), op.blocked_by > 0, op.pg.is_none()];
                let count = places.iter().filter(|place| **place).count();
                let both = op.blocked_by > 0 && op.pg.is_none();
                assert!(count == 1 || both, "op {slot} is in one place: {places:?}");
            }
        }
    }
}
