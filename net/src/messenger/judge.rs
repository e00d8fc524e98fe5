//! The checks of both sides of the handshake: pure functions of what is known and what was said.

use super::peers::KnownPeers;
use super::settings::{MessengerSettings, Offer};
use crate::wire::handshake::{Hello, Identity, RefuseReason, Role, Welcome};
use loligo_config::id::{ClusterId, Incarnation, SessionId};
use loligo_reactor::env::CloseReason;

/// Version and features that both sides use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    pub version: u16,
    pub features: u64,
}

/// What the accepting side knows.
pub(super) struct Judge<'a> {
    pub settings: &'a MessengerSettings,
    /// With the cluster and session as known now.
    pub identity: &'a Identity,
    pub known: &'a KnownPeers,
    /// Connections that this peer has already opened.
    pub open: usize,
}

impl Judge<'_> {
    /// Whether a peer is welcome. The order is that of usefulness to a person who reads the reason: first whether
    /// both sides understand each other, then whether they belong together, then whether there is room.
    pub fn hello(&self, hello: &Hello) -> Result<Terms, RefuseReason> {
        let terms = agree(&self.settings.offer, hello)?;
        if hello.auth != self.settings.auth {
            return Err(RefuseReason::Auth);
        }
        self.cluster(hello.identity.cluster)?;
        self.roles(hello)?;
        if let Role::Osd(osd) = hello.identity.role
            && self.known.is_retired(osd, hello.identity.incarnation)
        {
            return Err(RefuseReason::Stale);
        }
        if let Role::Client(session) = hello.identity.role
            && self.known.is_fenced(session)
        {
            return Err(RefuseReason::Fenced);
        }
        if self.open >= self.settings.peer_connections_max {
            return Err(RefuseReason::Busy);
        }
        Ok(terms)
    }

    /// A peer that does not know its cluster yet may ask the mon, and nobody else.
    fn cluster(&self, theirs: Option<ClusterId>) -> Result<(), RefuseReason> {
        let belongs = match (self.identity.cluster, theirs) {
            (None, _) => false,
            (Some(ours), Some(theirs)) => ours == theirs,
            (Some(_), None) => self.identity.role == Role::Mon,
        };
        if belongs { Ok(()) } else { Err(RefuseReason::Cluster) }
    }

    fn roles(&self, hello: &Hello) -> Result<(), RefuseReason> {
        let ours = self.identity.role;
        let possible = match hello.identity.role {
            // Our own id at the other end: this process's address was given to somebody else, or it called itself.
            Role::Osd(_) if hello.identity.role == ours => false,
            Role::Osd(_) => hello.identity.incarnation != Incarnation(0),
            Role::Mon => true,
            // Ops need a session, and only the mon gives one.
            Role::Client(session) => session != SessionId(0) || ours == Role::Mon,
        };
        // Clients do not listen.
        let reached = hello.expected == ours && !matches!(ours, Role::Client(_));
        if possible && reached { Ok(()) } else { Err(RefuseReason::Identity) }
    }
}

/// The newest version and all features that both have.
fn agree(ours: &Offer, hello: &Hello) -> Result<Terms, RefuseReason> {
    let version = ours.version.min(hello.version);
    if version < ours.version_min || version < hello.version_min {
        return Err(RefuseReason::Version);
    }
    let missing_here = hello.features_required & !ours.features;
    let missing_there = ours.features_required & !hello.features;
    if missing_here != 0 || missing_there != 0 {
        return Err(RefuseReason::Feature);
    }
    Ok(Terms { version, features: ours.features & hello.features })
}

/// Why the connecting side does not believe a `Welcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Distrust {
    Refused(RefuseReason),
    Broken(CloseReason),
}

impl From<RefuseReason> for Distrust {
    fn from(reason: RefuseReason) -> Self {
        Self::Refused(reason)
    }
}

/// Checks a `Welcome` against the `Hello` that it answers: the other end must be the one that was meant.
pub(super) fn judge_welcome(hello: &Hello, welcome: &Welcome, known: &KnownPeers) -> Result<(), Distrust> {
    if welcome.nonce_echo != hello.nonce {
        return Err(Distrust::Broken(CloseReason::Protocol("the answer is for another connection")));
    }
    if !(hello.version_min..=hello.version).contains(&welcome.version) {
        return Err(RefuseReason::Version.into());
    }
    if welcome.features & !hello.features != 0 || hello.features_required & !welcome.features != 0 {
        return Err(RefuseReason::Feature.into());
    }
    if welcome.auth != hello.auth {
        return Err(RefuseReason::Auth.into());
    }
    let cluster = welcome.identity.cluster.ok_or(RefuseReason::Cluster)?;
    let belongs = match hello.identity.cluster {
        Some(ours) => ours == cluster,
        None => hello.expected == Role::Mon,
    };
    if !belongs {
        return Err(RefuseReason::Cluster.into());
    }
    if welcome.identity.role != hello.expected {
        return Err(RefuseReason::Identity.into());
    }
    if let Role::Osd(osd) = welcome.identity.role {
        if welcome.identity.incarnation == Incarnation(0) {
            return Err(RefuseReason::Identity.into());
        }
        if known.is_retired(osd, welcome.identity.incarnation) {
            return Err(RefuseReason::Stale.into());
        }
    }
    session_fits(hello, welcome)
}

/// A mon gives a session to a client that has none; everybody else repeats the one that was said.
fn session_fits(hello: &Hello, welcome: &Welcome) -> Result<(), Distrust> {
    let fits = match hello.identity.role {
        Role::Client(SessionId(0)) => welcome.session != SessionId(0),
        Role::Client(session) => welcome.session == session,
        Role::Osd(_) | Role::Mon => welcome.session == SessionId(0),
    };
    if fits { Ok(()) } else { Err(Distrust::Broken(CloseReason::Protocol("the answer has another session"))) }
}
