//! Ops to their PG, and what PGs ask for to its connection.

use super::links::{Copied, ShardMessage};
use super::{Shard, brings_data};
use crate::pg::op::Arrival;
use crate::pg::replication::nanos;
use crate::pg::{Payload, PgAction, PgEvent, Requester};
use loligo_config::id::{CoreId, ObjectVersion, OsdId, PgId};
use loligo_config::placement::object_to_pg;
use loligo_config::units::BLOCK_SIZE;
use loligo_net::messenger::SendError;
use loligo_net::wire::op::{OpKind, OpReply, OpRequest, OpStatus, Residence};
use loligo_net::wire::{Body, Checksums, Message};
use loligo_reactor::env::{Clock, ConnectionId, Instant, World};
use loligo_reactor::planted::{self, Bug};
use loligo_reactor::poller::Activity;
use std::collections::{BTreeMap, VecDeque};

/// Messages that wait for room on one connection. A peer that lets more pile up is cut off; what it misses it asks
/// for again.
const BACKLOG_MAX: usize = 4096;

/// Messages that a full connection did not take, in order.
#[derive(Debug, Default)]
pub struct Backlog {
    waiting: BTreeMap<ConnectionId, VecDeque<(Message, Body)>>,
}

impl Backlog {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The connection is gone.
    pub fn forget(&mut self, connection: ConnectionId) {
        if !self.waiting.is_empty() {
            self.waiting.remove(&connection);
        }
    }
}

impl<W: World> Shard<W> {
    /// A client's op: checked against the map as far as no PG is needed, then stepped or forwarded.
    pub(super) fn on_op(&mut self, now: Instant, op: Arrival) {
        self.counters.ops += 1;
        if !self.admit(op.from.connection) {
            return self.refuse(&op, OpStatus::Busy);
        }
        if !self.is_own_session(&op) {
            self.counters.foreign_session += 1;
            return self.refuse(&op, OpStatus::Invalid);
        }
        if let Some(status) = self.misrouted(&op.request) {
            return self.refuse(&op, status);
        }
        match self.by_pg.get(&op.request.pg).copied() {
            Some(slot) => self.step_op(slot, now, op),
            None => self.forward(op),
        }
    }

    pub(super) fn step_op(&mut self, slot: usize, now: Instant, op: Arrival) {
        let Arrival { request, epoch, payload, from, arrived } = op;
        let payload = payload.filter(|_| brings_data(request.kind));
        // A read's submit stage ends with this step, so that it needs the time of the step itself.
        let now = if request.kind == OpKind::Read { self.clock.now().max(now) } else { now };
        self.step(slot, now, PgEvent::Op { request, epoch, payload, from, arrived });
    }

    /// Credits are a promise of the client; beyond twice of them it gets no service.
    fn admit(&mut self, connection: ConnectionId) -> bool {
        let Some(client) = self.clients.get_mut(&connection) else { return false };
        client.outstanding += 1;
        let is_within = client.outstanding <= client.credits.saturating_mul(2);
        if !is_within {
            self.counters.over_credit += 1;
        }
        is_within
    }

    /// The session of an op is what fences and op-id tables go by: a client may only speak in its own.
    fn is_own_session(&self, op: &Arrival) -> bool {
        let client = self.clients.get(&op.from.connection);
        client.is_some_and(|client| client.session == op.request.op.session)
    }

    /// Whether the object is not in the PG that the client says.
    fn misrouted(&self, request: &OpRequest) -> Option<OpStatus> {
        let Some(map) = &self.map else { return Some(OpStatus::NotActive) };
        match map.pools.get(&request.object.pool) {
            // A PG is asked for its objects of an image by the number of any of them.
            Some(pool) if request.kind == OpKind::List && request.pg.index < pool.pg_count => None,
            Some(pool) if object_to_pg(pool, &request.object) == request.pg => None,
            Some(_) => Some(OpStatus::Invalid),
            // The pool may be newer than this map, or gone.
            None => Some(OpStatus::NotPrimary),
        }
    }

    fn forward(&mut self, op: Arrival) {
        let owner = if self.links.is_single() { None } else { self.links.owner(op.request.pg) };
        let Some(owner) = owner.filter(|owner| *owner != self.links.index()) else {
            return self.refuse(&op, OpStatus::NotPrimary);
        };
        self.counters.forwarded += 1;
        let data = op.payload.as_ref().filter(|_| brings_data(op.request.kind)).map(Copied::of);
        let Arrival { request, epoch, from, arrived, .. } = op;
        let message = ShardMessage::Op { request, epoch, data, from, arrived };
        if !self.links.offer(owner, message) {
            self.refuse(&Arrival { request, epoch, payload: None, from, arrived }, OpStatus::Busy);
        }
    }

    /// Where the client should send the PG's ops.
    fn core_of(&self, pg: PgId) -> CoreId {
        if self.links.is_single() || self.by_pg.contains_key(&pg) {
            return self.settings.core;
        }
        // A shard's index is the number of its core in the map.
        self.links.owner(pg).map_or(self.settings.core, CoreId)
    }

    pub(super) fn refuse(&mut self, op: &Arrival, status: OpStatus) {
        let reply = OpReply {
            op: op.request.op,
            status,
            version: ObjectVersion::NONE,
            offset: op.request.offset,
            len: 0,
            core: self.core_of(op.request.pg),
            copies: 0,
            residence: Residence::default(),
        };
        self.reply(op.from, reply, None, op.arrived);
    }

    /// Does what a step asked for.
    pub(super) fn deliver(&mut self, slot: usize, now: Instant) {
        while let Some(action) = self.actions.pop_front() {
            match action {
                PgAction::Send { to, message, payload } => self.send_to_peer(slot, to, message, payload),
                PgAction::Reply { to, reply, payload, arrived } => {
                    let mut reply = reply;
                    reply.core = self.settings.core;
                    reply.residence.primary_ns = nanos(self.clock.now().max(now).since(arrived));
                    self.reply(to, reply, payload, arrived);
                }
                PgAction::Superseded { to } => self.superseded(to),
                PgAction::Notify { to, notify } if to.core == self.links.index() => {
                    self.post(to.connection, Message::Notify(notify), Body::NONE);
                }
                PgAction::Notify { to, notify } => {
                    // A full mailbox loses a notification as a lost connection does: the client asks at its next op.
                    let _ = self.links.offer(to.core, ShardMessage::Notify { to: to.connection, notify });
                }
            }
        }
    }

    pub(super) fn superseded(&mut self, to: Requester) {
        if to.core != self.links.index() {
            self.links.send(to.core, ShardMessage::Superseded(to.connection));
        } else if let Some(client) = self.clients.get_mut(&to.connection) {
            client.outstanding = client.outstanding.saturating_sub(1);
        }
    }

    /// Requests of a primary go over the connection that this side opened, to the core that has the PG there;
    /// answers over the connection that brought the request.
    fn send_to_peer(&mut self, slot: usize, to: OsdId, message: Message, payload: Option<Payload>) {
        let Some(Some(entry)) = self.slots.get(slot) else { return };
        let is_request = match message {
            Message::RepWrite(_)
            | Message::PeerQuery(_)
            | Message::PeerFetch(_)
            | Message::PeerActivate(_) => true,
            Message::RepAck(_) | Message::PeerInfo(_) | Message::PeerActivated(_) => false,
            _ => entry.pg.acting().first() == Some(&self.settings.osd),
        };
        let body = body_of(payload, 0);
        if matches!(message, Message::PeerQuery(_)) {
            // Which of its cores has the PG, the answer will show.
            let cores: Vec<_> = self.peers.cores(to).collect();
            for key in cores {
                if let Some(connection) = self.peers.connection(key) {
                    self.post(connection, message, body.clone());
                }
            }
            return;
        }
        let connection = if is_request {
            entry.core_of(to).and_then(|core| self.peers.connection((to, core)))
        } else {
            entry.asked_by.filter(|(from, _)| *from == to).map(|(_, connection)| connection)
        };
        match connection {
            Some(connection) => self.post(connection, message, body),
            None => self.counters.unsent += 1,
        }
    }

    pub(super) fn reply(
        &mut self,
        to: Requester,
        reply: OpReply,
        payload: Option<Payload>,
        arrived: Instant,
    ) {
        if to.core != self.links.index() && !planted::active(Bug::ForwardedReplyMisrouted) {
            let data = payload.as_ref().map(Copied::of);
            self.links.send(to.core, ShardMessage::Reply { to: to.connection, reply, data, arrived });
            return;
        }
        if let Some(client) = self.clients.get_mut(&to.connection) {
            client.outstanding = client.outstanding.saturating_sub(1);
        }
        let histogram = match reply.copies {
            0 => &mut self.counters.read_residence,
            _ => &mut self.counters.write_residence,
        };
        histogram.record(u64::from(reply.residence.primary_ns));
        let body = body_of(payload, reply.offset % BLOCK_SIZE);
        self.post(to.connection, Message::OpReply(reply), body);
    }

    /// Sends, or keeps it until there is room.
    pub(super) fn post(&mut self, connection: ConnectionId, message: Message, body: Body) {
        if !self.backlog.waiting.is_empty()
            && let Some(waiting) = self.backlog.waiting.get_mut(&connection)
        {
            if waiting.len() < BACKLOG_MAX {
                waiting.push_back((message, body));
            } else {
                self.messenger.close(connection);
            }
            return;
        }
        match self.messenger.send(connection, message, body.clone()) {
            Ok(()) | Err(SendError::Closed) => {}
            Err(SendError::QueueFull) => {
                self.backlog.waiting.entry(connection).or_default().push_back((message, body));
            }
            Err(error @ (SendError::Forbidden | SendError::Invalid(_))) => {
                tracing::error!(?message, %error, "a message could not be sent");
                debug_assert!(false, "{message:?}: {error}");
            }
        }
    }

    /// Sends what waited for room.
    pub(super) fn drain_backlog(&mut self) -> Activity {
        if self.backlog.waiting.is_empty() {
            return Activity::Idle;
        }
        let mut busy = false;
        let mut waiting = std::mem::take(&mut self.backlog.waiting);
        waiting.retain(|connection, queue| {
            while let Some((message, body)) = queue.pop_front() {
                match self.messenger.send(*connection, message, body.clone()) {
                    Err(SendError::QueueFull) => {
                        queue.push_front((message, body));
                        return true;
                    }
                    Err(SendError::Closed) => return false,
                    _ => busy = true,
                }
            }
            false
        });
        self.backlog.waiting = waiting;
        Activity::from_busy(busy)
    }

    pub(super) fn on_shard_message(&mut self, now: Instant, message: ShardMessage) {
        match message {
            // The next poll does.
            ShardMessage::Look => {}
            ShardMessage::Op { request, epoch, data, from, arrived } => {
                let payload = data.map(|data| data.into_payload(&self.settings.pool)).transpose();
                let (payload, is_short) = payload.map_or((None, true), |payload| (payload, false));
                let op = Arrival { request, epoch, payload, from, arrived };
                match self.by_pg.get(&request.pg).copied() {
                    _ if is_short => self.refuse(&op, OpStatus::Busy),
                    Some(slot) => self.step_op(slot, now, op),
                    None => self.refuse(&op, OpStatus::NotPrimary),
                }
            }
            ShardMessage::Reply { to, mut reply, data, arrived } => {
                let payload = data.map(|data| data.into_payload(&self.settings.pool)).transpose();
                let payload = payload.unwrap_or_else(|_| {
                    // Only reads bring data, and may be done again.
                    (reply.status, reply.len) = (OpStatus::Busy, 0);
                    None
                });
                let from = Requester { core: self.links.index(), connection: to };
                self.reply(from, reply, payload, arrived);
            }
            ShardMessage::Superseded(connection) => {
                self.superseded(Requester { core: self.links.index(), connection });
            }
            ShardMessage::Notify { to, notify } => self.post(to, Message::Notify(notify), Body::NONE),
            ShardMessage::Gone(from) => self.step_all(now, || PgEvent::RequesterGone(from), |_| true),
            ShardMessage::Report { shard, report } => {
                self.parts.insert(shard, report);
            }
            ShardMessage::Failure(failure) => {
                if let Some(client) = &self.map_client {
                    client.report_failure(failure, &mut self.map_actions);
                }
            }
        }
    }
}

fn body_of(payload: Option<Payload>, within_block: u32) -> Body {
    match payload {
        None => Body::NONE,
        Some(Payload { data, checksums }) => Body {
            data: Some(data),
            within_block,
            checksums: checksums.map_or(Checksums::Compute, Checksums::Given),
        },
    }
}
