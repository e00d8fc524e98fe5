//! The steps of the handshake on both sides; `judge` has the checks.

use super::judge::{Distrust, Judge, Terms, judge_welcome};
use super::settings::{DownReason, MessengerEvent};
use super::{Connection, Messenger, Phase};
use crate::wire::handshake::{Hello, Refuse, RefuseReason, Role, Welcome};
use crate::wire::{Body, DecodeError, Message};
use loligo_config::id::SessionId;
use loligo_config::limits;
use loligo_reactor::env::{CloseReason, ConnectionId, Entropy, Instant, Transport};
use std::collections::VecDeque;

impl<T: Transport, E: Entropy> Messenger<T, E> {
    pub(super) fn on_connected(&mut self, id: ConnectionId, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let Phase::Dialing { expected, core, deadline } = connection.phase else {
            return;
        };
        let offer = &self.settings.offer;
        let hello = Hello {
            version: offer.version,
            version_min: offer.version_min,
            features: offer.features,
            features_required: offer.features_required,
            identity: self.identity,
            expected,
            core,
            auth: self.settings.auth,
            nonce: self.entropy.next_u64(),
        };
        let deadline = deadline.unwrap_or_else(|| now.after(self.settings.handshake_max));
        connection.phase = Phase::HelloSent { hello, deadline };
        if self.put(id, Message::Hello(hello), Body::NONE).is_err() {
            self.shut(id, Some(DownReason::Closed(CloseReason::Local)));
        }
    }

    pub(super) fn on_hello(
        &mut self,
        id: ConnectionId,
        hello: &Hello,
        now: Instant,
        out: &mut VecDeque<MessengerEvent>,
    ) {
        let open = self.open_by(hello.identity.role);
        let (settings, identity, known) = (&self.settings, &self.identity, &self.known);
        let verdict = Judge { settings, identity, known, open }.hello(hello);
        let admitted = verdict.and_then(|terms| Ok((terms, self.session_for(hello.identity.role)?)));
        match admitted {
            Ok((terms, session)) => self.welcome(id, hello, terms, session, now, out),
            Err(reason) => self.refuse(id, reason),
        }
    }

    /// Connections that a peer has opened and that are up. A client without a session is a new one.
    fn open_by(&self, role: Role) -> usize {
        if role == Role::Client(SessionId(0)) {
            return 0;
        }
        let opened = |connection: &&Connection| match &connection.phase {
            Phase::Up(up) => up.accepted && up.peer.role == role,
            _ => false,
        };
        self.connections.values().filter(opened).count()
    }

    /// The session that a peer has from now on; a new one is used up by this.
    fn session_for(&mut self, role: Role) -> Result<SessionId, RefuseReason> {
        match role {
            Role::Client(SessionId(0)) => self.sessions.next().map(SessionId).ok_or(RefuseReason::Busy),
            Role::Client(session) => Ok(session),
            Role::Osd(_) | Role::Mon => Ok(SessionId(0)),
        }
    }

    fn welcome(
        &mut self,
        id: ConnectionId,
        hello: &Hello,
        terms: Terms,
        session: SessionId,
        now: Instant,
        out: &mut VecDeque<MessengerEvent>,
    ) {
        let welcome = Welcome {
            version: terms.version,
            features: terms.features,
            identity: self.identity,
            core: self.settings.core,
            session,
            credits: self.settings.credits,
            auth: self.settings.auth,
            nonce_echo: hello.nonce,
            nonce: self.entropy.next_u64(),
        };
        if self.put(id, Message::Welcome(welcome), Body::NONE).is_err() {
            return self.shut(id, None);
        }
        let mut peer = hello.identity;
        if let Role::Client(_) = peer.role {
            peer.role = Role::Client(session);
        }
        peer.cluster = self.identity.cluster;
        self.set_up(id, peer, true, now);
        let (core, credits) = (hello.core, self.settings.credits);
        out.push_back(MessengerEvent::Up { connection: id, peer, accepted: true, core, credits });
    }

    pub(super) fn on_welcome(
        &mut self,
        id: ConnectionId,
        hello: &Hello,
        welcome: &Welcome,
        now: Instant,
        out: &mut VecDeque<MessengerEvent>,
    ) {
        match judge_welcome(hello, welcome, &self.known) {
            Ok(()) => {}
            Err(Distrust::Refused(reason)) => {
                self.stats.refused += 1;
                return self.shut(id, Some(DownReason::Refused(reason)));
            }
            Err(Distrust::Broken(reason)) => return self.break_off(id, reason),
        }
        if self.identity.cluster.is_some_and(|ours| Some(ours) != welcome.identity.cluster) {
            // Learned from another mon since this connection began.
            return self.shut(id, Some(DownReason::Refused(RefuseReason::Cluster)));
        }
        if let Role::Client(said) = hello.identity.role {
            let current = self.session();
            if said == SessionId(0) && current != SessionId(0) {
                // Two mons were asked at once and the other was quicker: this one knows us by a session not in use.
                return self.shut(id, Some(DownReason::Closed(CloseReason::Local)));
            }
            if said == SessionId(0) {
                self.identity.role = Role::Client(welcome.session);
            }
        }
        self.identity.cluster = welcome.identity.cluster;
        self.set_up(id, welcome.identity, false, now);
        out.push_back(MessengerEvent::Up {
            connection: id,
            peer: welcome.identity,
            accepted: false,
            core: welcome.core,
            credits: welcome.credits.min(limits::CONNECTION_OPS_MAX),
        });
    }

    /// The peer proves who it is in a way unknown here.
    pub(super) fn on_unknown_auth(&mut self, id: ConnectionId) {
        match self.connections.get(&id).map(|connection| &connection.phase) {
            Some(Phase::HelloAwaited { .. }) => self.refuse(id, RefuseReason::Auth),
            Some(Phase::HelloSent { .. }) => self.shut(id, Some(DownReason::Refused(RefuseReason::Auth))),
            _ => self.break_off(id, DecodeError::UnknownAuth.into()),
        }
    }

    /// Refuses a peer that said `Hello`.
    fn refuse(&mut self, id: ConnectionId, reason: RefuseReason) {
        self.stats.refused += 1;
        tracing::debug!(connection = id.0, %reason, "peer refused");
        // If the refusal cannot be sent the peer sees a closed connection.
        let _ = self.put(id, Message::Refuse(Refuse { reason, epoch: self.epoch }), Body::NONE);
        self.shut_stranger(id, reason);
    }
}
