//! Authenticated connections on top of a transport: handshake, identity, liveness. Sans-I/O but for the transport.
//!
//! ```text
//!   connect ─▶ Dialing ─Connected, send Hello─▶ HelloSent ─Welcome, checked─▶ Up ─┐
//!                 │                                 │ Refuse, wrong Welcome         │ silence, bad frame,
//!                 │ cannot connect                  │ anything else, deadline       │ close
//!                 ▼                                 ▼                               ▼
//!              (Down) ◀──────transport Closed────── Closing ◀──────────────────────┘
//!                                                   ▲
//!   Accepted ─▶ HelloAwaited ─Hello, checked, send Welcome─▶ Up
//!                    └ anything else, deadline, eviction ─▶ Closing (no event: the owner never heard of it)
//! ```
//!
//! Each side verifies the other. Two OSDs may connect to each other at the same time; both connections live. Each
//! side sends its own requests over the connection that it opened itself, and answers over the one that brought the
//! request, so that no side has to guess which of the two the other one dropped.

mod handshake;
mod judge;
mod peers;
mod rules;
mod settings;
mod strangers;

pub use settings::{DownReason, MessengerEvent, MessengerSettings, MessengerStats, Offer, SendError};

use crate::wire::handshake::{Hello, Identity, Ping, Refuse, RefuseReason, Role};
use crate::wire::{self, Body, DecodeError, EncodeError, Envelope, Message, Received};
use loligo_config::id::{ClusterId, CoreId, Epoch, Incarnation, OsdId, SessionId};
use loligo_reactor::env::{
    CloseReason, ConnectionId, Entropy, Frame, Instant, SendRefused, Transport, TransportEvent,
};
use loligo_reactor::planted::{self, Bug};
use loligo_reactor::poller::Activity;
use peers::KnownPeers;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;
use strangers::Strangers;

/// Transport events taken in one poll, so that one poll is bounded.
const POLL_BUDGET: u32 = 64;

/// All connections of one reactor.
#[derive(Debug)]
pub struct Messenger<T, E> {
    settings: MessengerSettings,
    /// As in the settings, with what was learned since: the cluster, the session.
    identity: Identity,
    transport: T,
    entropy: E,
    epoch: Epoch,
    /// Sessions to hand out.
    sessions: Range<u64>,
    known: KnownPeers,
    connections: BTreeMap<ConnectionId, Connection>,
    /// Accepted and without a handshake.
    strangers: Strangers,
    inbox: VecDeque<TransportEvent>,
    /// When `poll` ran last.
    polled: Option<Instant>,
    /// No deadline of a connection is earlier than this.
    next_check: Option<Instant>,
    /// `connect` was called since the last poll: its deadline starts there.
    undated: bool,
    stats: MessengerStats,
}

#[derive(Debug)]
struct Connection {
    phase: Phase,
    /// Number of the last frame sent.
    sent: u64,
    /// Number of the last frame received.
    received: u64,
}

#[derive(Debug)]
enum Phase {
    Dialing {
        expected: Role,
        core: CoreId,
        deadline: Option<Instant>,
    },
    HelloSent {
        hello: Hello,
        deadline: Instant,
    },
    HelloAwaited {
        deadline: Instant,
    },
    Up(Up),
    /// Closed by this side; the report is given when the transport says that it is gone.
    Closing(Option<Report>),
}

#[derive(Clone, Copy, Debug)]
struct Up {
    peer: Identity,
    accepted: bool,
    /// When something came last.
    heard: Instant,
    /// When it was pinged last.
    pinged: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Report {
    peer: Option<Identity>,
    reason: DownReason,
}

impl<T: Transport, E: Entropy> Messenger<T, E> {
    /// A messenger without connections.
    pub fn new(settings: MessengerSettings, transport: T, entropy: E) -> Self {
        Self {
            identity: settings.identity,
            settings,
            transport,
            entropy,
            epoch: Epoch(0),
            sessions: 0..0,
            known: KnownPeers::default(),
            connections: BTreeMap::new(),
            strangers: Strangers::default(),
            inbox: VecDeque::with_capacity(POLL_BUDGET as usize),
            polled: None,
            next_check: None,
            undated: false,
            stats: MessengerStats::default(),
        }
    }

    /// The cluster is known from now on.
    pub fn set_cluster(&mut self, cluster: ClusterId) {
        self.identity.cluster = Some(cluster);
    }

    /// The newest map that this process has; every message carries it.
    pub fn set_epoch(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }

    /// Mon: the sessions to hand out, in order. Replaces what was left. Clients without a session are refused as
    /// `Busy` when none is left.
    pub fn set_sessions(&mut self, sessions: Range<u64>) {
        assert!(sessions.is_empty() || sessions.start > 0, "session 0 means none");
        self.sessions = sessions;
    }

    /// Sessions left to hand out.
    pub fn sessions_left(&self) -> u64 {
        self.sessions.end.saturating_sub(self.sessions.start)
    }

    /// Client: the session to use on connections made from now on; 0 asks the mon for a new one.
    ///
    /// # Panics
    /// If this process is no client.
    pub fn set_session(&mut self, session: SessionId) {
        assert!(matches!(self.identity.role, Role::Client(_)), "only clients have sessions");
        self.identity.role = Role::Client(session);
    }

    /// Client: its session, 0 before the mon gave one. 0 for others.
    pub fn session(&self) -> SessionId {
        match self.identity.role {
            Role::Client(session) => session,
            Role::Osd(_) | Role::Mon => SessionId(0),
        }
    }

    /// The map names this start of an OSD. Starts that it named before are refused as `Stale` from now on, and their
    /// connections closed. A start that the map does not name yet is accepted: it may be ahead of this process.
    pub fn set_incarnation(&mut self, osd: OsdId, incarnation: Incarnation) {
        if !self.known.set_incarnation(osd, incarnation) {
            return;
        }
        let stale: Vec<_> = self
            .connections
            .iter()
            .filter_map(|(id, connection)| match &connection.phase {
                Phase::Up(up) if self.is_retired(&up.peer) => Some(*id),
                _ => None,
            })
            .collect();
        for id in stale {
            self.shut(id, Some(DownReason::Refused(RefuseReason::Stale)));
        }
    }

    fn is_retired(&self, peer: &Identity) -> bool {
        matches!(peer.role, Role::Osd(osd) if self.known.is_retired(osd, peer.incarnation))
    }

    /// Sessions that are refused as `Fenced` at the handshake. Replaces the former ones; connections that are up
    /// stay, since every op is checked by itself.
    pub fn set_fenced(&mut self, sessions: impl IntoIterator<Item = SessionId>) {
        self.known.set_fenced(sessions);
    }

    /// Who this process is, with what it learned.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The transport, for what only it knows (where it listens).
    pub fn transport_mut(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Counters.
    pub fn stats(&self) -> &MessengerStats {
        &self.stats
    }

    /// Connections in every state.
    pub fn connection_count(&self) -> usize {
        self.connections.len()
    }

    /// Begins to connect. `Up` or `Down` follows, within the time for the handshake.
    pub fn connect(&mut self, to: SocketAddr, expected: Role, core: CoreId) -> ConnectionId {
        let id = self.transport.connect(to);
        let phase = Phase::Dialing { expected, core, deadline: None };
        self.connections.insert(id, Connection { phase, sent: 0, received: 0 });
        self.undated = true;
        id
    }

    /// Sends a message on a connection that is up.
    ///
    /// # Errors
    /// See [`SendError`]; nothing was sent.
    pub fn send(&mut self, connection: ConnectionId, message: Message, body: Body) -> Result<(), SendError> {
        let Some(Phase::Up(up)) = self.connections.get(&connection).map(|connection| &connection.phase)
        else {
            return Err(SendError::Closed);
        };
        if !rules::allowed(message.kind(), self.identity.role, up.peer.role) {
            return Err(SendError::Forbidden);
        }
        self.put(connection, message, body)
    }

    /// Sends in any phase.
    fn put(&mut self, id: ConnectionId, message: Message, body: Body) -> Result<(), SendError> {
        let connection = self.connections.get_mut(&id).ok_or(SendError::Closed)?;
        let envelope = Envelope { epoch: self.epoch, message };
        let encoded = wire::encode_numbered(&self.settings.pool, &envelope, body, connection.sent + 1);
        let frame = encoded.map_err(|error| match error {
            EncodeError::Pool(_) => SendError::QueueFull,
            error => SendError::Invalid(error),
        })?;
        self.transport.send(id, frame).map_err(|refused| match refused {
            SendRefused::QueueFull(_) => SendError::QueueFull,
            SendRefused::Closed(_) => SendError::Closed,
        })?;
        connection.sent += 1;
        Ok(())
    }

    /// Closes a connection; `Down` follows with `CloseReason::Local`, and no message before it.
    pub fn close(&mut self, connection: ConnectionId) {
        self.shut(connection, Some(DownReason::Closed(CloseReason::Local)));
    }

    /// Who is at the other end of a connection that is up.
    pub fn peer(&self, connection: ConnectionId) -> Option<&Identity> {
        match &self.connections.get(&connection)?.phase {
            Phase::Up(up) => Some(&up.peer),
            _ => None,
        }
    }

    /// Takes what arrived and watches the deadlines.
    pub fn poll(&mut self, now: Instant, out: &mut VecDeque<MessengerEvent>) -> Activity {
        self.forgive_own_pause(now);
        if std::mem::take(&mut self.undated) {
            self.date(now);
        }
        let mut inbox = std::mem::take(&mut self.inbox);
        let mut busy = self.transport.poll(POLL_BUDGET, &mut inbox) > 0;
        while let Some(event) = inbox.pop_front() {
            self.on_event(event, now, out);
        }
        self.inbox = inbox;
        // After the events: what has arrived counts as heard before anybody is called silent.
        if self.next_check.is_some_and(|at| at <= now) {
            busy = true;
            self.check_deadlines(now);
        }
        Activity::from_busy(busy)
    }

    /// When `poll` has something to do even if nothing arrives.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.undated {
            return Some(self.polled.unwrap_or_default());
        }
        self.next_check
    }

    /// When this process itself was stopped and overslept its deadlines, its peers' silence means nothing: their
    /// time starts anew, and what waits in the transport is read first.
    fn forgive_own_pause(&mut self, now: Instant) {
        self.polled = Some(now);
        let overslept = self.next_check.map_or(Duration::ZERO, |at| now.since(at));
        if overslept <= self.settings.ping_grace / 2 {
            return;
        }
        for connection in self.connections.values_mut() {
            if let Phase::Up(up) = &mut connection.phase {
                up.heard = now;
            }
        }
    }

    /// Gives the connections that `connect` began since the last poll their deadline.
    fn date(&mut self, now: Instant) {
        let until = now.after(self.settings.handshake_max);
        for connection in self.connections.values_mut() {
            if let Phase::Dialing { deadline: deadline @ None, .. } = &mut connection.phase {
                *deadline = Some(until);
            }
        }
        self.wake_at(until);
    }

    fn wake_at(&mut self, at: Instant) {
        self.next_check = Some(self.next_check.map_or(at, |earlier| earlier.min(at)));
    }

    fn on_event(&mut self, event: TransportEvent, now: Instant, out: &mut VecDeque<MessengerEvent>) {
        match event {
            TransportEvent::Accepted { connection, from } => self.on_accepted(connection, from, now),
            TransportEvent::Connected { connection } => self.on_connected(connection, now),
            TransportEvent::Frame { connection, frame } => self.on_frame(connection, &frame, now, out),
            TransportEvent::Closed { connection, reason } => self.on_closed(connection, reason, out),
        }
    }

    fn on_accepted(&mut self, id: ConnectionId, from: SocketAddr, now: Instant) {
        self.stats.accepted += 1;
        let (all_max, source_max) = (self.settings.preauth_connections_max, self.settings.preauth_source_max);
        if let Some(oldest) = self.strangers.to_evict(from, all_max, source_max) {
            self.stats.evicted += 1;
            self.shut_stranger(oldest, "too many connections from there, or in all");
        }
        if self.connections.len() >= self.settings.connections_max {
            // Not even remembered: what is not in the table costs nothing here.
            self.stats.turned_away += 1;
            self.turn_away(id);
            return;
        }
        let deadline = now.after(self.settings.handshake_max);
        let phase = Phase::HelloAwaited { deadline };
        self.connections.insert(id, Connection { phase, sent: 0, received: 0 });
        self.strangers.insert(id, from);
        self.wake_at(deadline);
    }

    /// Refuses a connection that has no place in the table. The peer is told where there is a buffer for it.
    fn turn_away(&mut self, id: ConnectionId) {
        let refuse = Message::Refuse(Refuse { reason: RefuseReason::Busy, epoch: self.epoch });
        let envelope = Envelope { epoch: self.epoch, message: refuse };
        if let Ok(frame) = wire::encode_numbered(&self.settings.pool, &envelope, Body::NONE, 1) {
            // A refused send changes nothing: the connection is closed either way.
            let _ = self.transport.send(id, frame);
        }
        self.transport.close(id);
    }

    fn on_frame(
        &mut self,
        id: ConnectionId,
        frame: &Frame,
        now: Instant,
        out: &mut VecDeque<MessengerEvent>,
    ) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        if matches!(connection.phase, Phase::Closing(_)) {
            return;
        }
        let received = match wire::decode(frame) {
            Ok(received) => received,
            Err(DecodeError::UnknownAuth) => return self.on_unknown_auth(id),
            Err(error) => return self.break_off(id, error.into()),
        };
        let is_next = received.sequence == connection.received + 1;
        if !is_next && !planted::active(Bug::FrameSequenceUnchecked) {
            return self.break_off(id, CloseReason::Protocol("a frame is missing or came twice"));
        }
        connection.received += 1;
        match (&mut connection.phase, received.envelope.message) {
            (Phase::HelloAwaited { .. }, Message::Hello(hello)) => self.on_hello(id, &hello, now, out),
            (Phase::HelloSent { hello, .. }, Message::Welcome(welcome)) => {
                let hello = *hello;
                self.on_welcome(id, &hello, &welcome, now, out);
            }
            (Phase::HelloSent { .. }, Message::Refuse(refuse)) => {
                self.shut(id, Some(DownReason::Refused(refuse.reason)));
            }
            (Phase::Up(up), message) => {
                up.heard = now;
                let from = up.peer.role;
                if !rules::allowed(message.kind(), from, self.identity.role) {
                    return self.break_off(id, CloseReason::Protocol("a message that the peer may not send"));
                }
                self.on_message(id, received, now, out);
            }
            _ => self.break_off(id, CloseReason::Protocol("a message out of order in the handshake")),
        }
    }

    fn on_message(
        &mut self,
        id: ConnectionId,
        received: Received,
        now: Instant,
        out: &mut VecDeque<MessengerEvent>,
    ) {
        match received.envelope.message {
            Message::Ping(ping) => {
                // With a full queue the frames in it are sign of life enough.
                let _ = self.put(id, Message::Pong(ping), Body::NONE);
            }
            Message::Pong(_) => {}
            _ => out.push_back(MessengerEvent::Message { connection: id, received, arrived: now }),
        }
    }

    fn set_up(&mut self, id: ConnectionId, peer: Identity, accepted: bool, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.phase = Phase::Up(Up { peer, accepted, heard: now, pinged: now });
        self.strangers.remove(id);
        self.stats.up += 1;
        self.transport.trust(id);
        if !self.settings.ping_interval.is_zero() {
            self.wake_at(now.after(self.settings.ping_interval));
        }
    }

    /// Closes the connection of a peer that broke the protocol; others go on.
    fn break_off(&mut self, id: ConnectionId, reason: CloseReason) {
        self.stats.broken += 1;
        tracing::debug!(connection = id.0, %reason, "connection closed");
        self.complain(id, reason);
        self.shut(id, Some(DownReason::Closed(reason)));
    }

    /// Closes a connection whose peer is not known.
    fn shut_stranger(&mut self, id: ConnectionId, why: impl Display) {
        self.complain(id, why);
        self.shut(id, None);
    }

    /// Says in the log why a stranger's connection ends; others are reported to the owner.
    fn complain(&mut self, id: ConnectionId, why: impl Display) {
        let now = self.polled.unwrap_or_default();
        if let Some(from) = self.strangers.remove(id) {
            self.strangers.complain(now, from, why);
        }
    }

    /// Closes a connection. The reason is reported if the owner knows of the connection.
    fn shut(&mut self, id: ConnectionId, reason: Option<DownReason>) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let peer = match &connection.phase {
            Phase::Closing(_) => return,
            Phase::Up(up) => Some(Some(up.peer)),
            Phase::Dialing { .. } | Phase::HelloSent { .. } => Some(None),
            Phase::HelloAwaited { .. } => None,
        };
        let report = peer.zip(reason).map(|(peer, reason)| Report { peer, reason });
        connection.phase = Phase::Closing(report);
        self.strangers.remove(id);
        self.transport.close(id);
    }

    fn on_closed(&mut self, id: ConnectionId, reason: CloseReason, out: &mut VecDeque<MessengerEvent>) {
        let Some(connection) = self.connections.remove(&id) else {
            return;
        };
        if matches!(reason, CloseReason::Protocol(_)) {
            self.stats.broken += 1;
            self.complain(id, reason);
        }
        self.strangers.remove(id);
        let reason = DownReason::Closed(reason);
        let report = match connection.phase {
            Phase::Closing(report) => report,
            Phase::Up(up) => Some(Report { peer: Some(up.peer), reason }),
            Phase::Dialing { .. } | Phase::HelloSent { .. } => Some(Report { peer: None, reason }),
            Phase::HelloAwaited { .. } => None,
        };
        if let Some(Report { peer, reason }) = report {
            out.push_back(MessengerEvent::Down { connection: id, peer, reason });
        }
    }

    /// Pings who is silent, gives up who is silent for too long, and finds the next deadline.
    fn check_deadlines(&mut self, now: Instant) {
        let (interval, grace) = (self.settings.ping_interval, self.settings.ping_grace);
        let mut expired = Vec::new();
        let mut silent = Vec::new();
        let mut next: Option<Instant> = None;
        for (id, connection) in &mut self.connections {
            let due = match &mut connection.phase {
                Phase::Dialing { deadline: None, .. } | Phase::Closing(_) => continue,
                Phase::Dialing { deadline: Some(deadline), .. }
                | Phase::HelloSent { deadline, .. }
                | Phase::HelloAwaited { deadline } => {
                    if *deadline <= now {
                        expired.push(*id);
                        continue;
                    }
                    *deadline
                }
                Phase::Up(_) if interval.is_zero() => continue,
                Phase::Up(up) if up.limit(interval, grace) <= now => {
                    expired.push(*id);
                    continue;
                }
                Phase::Up(up) => {
                    if up.ping_at(interval) <= now {
                        up.pinged = now;
                        silent.push((*id, connection.sent));
                    }
                    up.ping_at(interval).min(up.limit(interval, grace))
                }
            };
            next = Some(next.map_or(due, |earlier| earlier.min(due)));
        }
        self.next_check = next;
        for (id, number) in silent {
            // With a full queue the frames in it ask for a sign of life as well.
            let _ = self.put(id, Message::Ping(Ping { number }), Body::NONE);
        }
        for id in expired {
            self.stats.timed_out += 1;
            self.complain(id, "no handshake in time");
            self.shut(id, Some(DownReason::Timeout));
        }
    }
}

impl Up {
    fn ping_at(&self, interval: Duration) -> Instant {
        self.heard.max(self.pinged).after(interval)
    }

    fn limit(&self, interval: Duration, grace: Duration) -> Instant {
        self.heard.after(interval).after(grace)
    }
}

#[cfg(test)]
mod tests;
