//! Who speaks: the handshake (RELIABILITY sections 1 F27 and 4.1) and keep-alive.
//!
//! The connecting side sends `Hello`; the accepting side checks every field against what it is itself and against the
//! map and answers `Welcome` or `Refuse`. The nonces are fresh for every connection, so that an authentication
//! scheme can bind its proof to both; with [`AuthMode::None`] they only tell connections apart.

use loligo_config::id::{ClusterId, CoreId, Epoch, Incarnation, OsdId, SessionId};
use loligo_config::map::AuthMode;

/// The version of the wire protocol that this program speaks, and the oldest it accepts.
pub const PROTOCOL_VERSION: u16 = 2;

/// Optional features, one bit each. The connection uses those that both sides have; an unknown bit in
/// `features_required` refuses it.
pub const FEATURES_SUPPORTED: u64 = 0;

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Stores data.
    Osd(OsdId),
    /// Keeps the map.
    Mon,
    /// Uses images or administers.
    Client(SessionId),
}

/// Who a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its cluster. `None` for a client or OSD that connects to its mon for the first time and learns it there.
    pub cluster: Option<ClusterId>,
    /// Its role and id.
    pub role: Role,
    /// Which start of the process.
    pub incarnation: Incarnation,
}

/// First message of the connecting side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Newest protocol version spoken.
    pub version: u16,
    /// Oldest protocol version accepted.
    pub version_min: u16,
    /// Features offered.
    pub features: u64,
    /// Features without which the peer is of no use.
    pub features_required: u64,
    /// Who the connecting side is.
    pub identity: Identity,
    /// Whom it wants to reach: role and id are checked by the accepting side.
    pub expected: Role,
    /// Which core of the accepting side it wants to reach.
    pub core: CoreId,
    /// How identities are proven.
    pub auth: AuthMode,
    /// Fresh for every connection.
    pub nonce: u64,
}

/// Answer of the accepting side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The protocol version to use.
    pub version: u16,
    /// The features to use.
    pub features: u64,
    /// Who the accepting side is. Its cluster is always there.
    pub identity: Identity,
    /// The core that serves the connection.
    pub core: CoreId,
    /// From a mon to a client without a session: the session that it has from now on. Else what `Hello` said.
    pub session: SessionId,
    /// Ops that the connecting side may have in flight on this connection.
    pub credits: u32,
    /// How identities are proven.
    pub auth: AuthMode,
    /// The nonce of `Hello`.
    pub nonce_echo: u64,
    /// Fresh for every connection.
    pub nonce: u64,
}

/// Why a peer is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u16)]
pub enum RefuseReason {
    /// No common protocol version.
    #[error("no common protocol version")]
    Version = 1,
    /// A required feature is missing.
    #[error("a required feature is missing")]
    Feature = 2,
    /// Another cluster.
    #[error("the peer belongs to another cluster")]
    Cluster = 3,
    /// The expected role or id is another process's: an address was reused, or configured wrongly.
    #[error("another daemon listens at this address")]
    Identity = 4,
    /// Another authentication mode.
    #[error("the authentication modes differ")]
    Auth = 5,
    /// Too many connections.
    #[error("too many connections")]
    Busy = 6,
    /// The session is on the blocklist or has expired.
    #[error("the session is fenced")]
    Fenced = 7,
    /// An older start of this daemon than the one known.
    #[error("an older incarnation of this daemon")]
    Stale = 8,
}

impl RefuseReason {
    /// Whether asking again would be answered in the same way, so that somebody has to change something first.
    pub fn is_final(self) -> bool {
        match self {
            Self::Version | Self::Feature | Self::Cluster | Self::Identity | Self::Auth => true,
            Self::Busy | Self::Fenced | Self::Stale => false,
        }
    }
}

/// The accepting side refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refuse {
    /// Why.
    pub reason: RefuseReason,
    /// The refusing side's newest map.
    pub epoch: Epoch,
}

/// Keep-alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ping {
    /// Brought back by `Pong`.
    pub number: u64,
}
