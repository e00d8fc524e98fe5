//! What a messenger is told at its start, and what it tells.

use crate::wire::handshake::{FEATURES_SUPPORTED, Identity, PROTOCOL_VERSION, RefuseReason};
use crate::wire::{EncodeError, Received};
use loligo_config::id::CoreId;
use loligo_config::limits;
use loligo_config::map::AuthMode;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{CloseReason, ConnectionId, Instant};
use std::time::Duration;

/// Protocol versions and features that a process offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Newest protocol version spoken.
    pub version: u16,
    /// Oldest protocol version accepted.
    pub version_min: u16,
    /// Features offered.
    pub features: u64,
    /// Features without which a peer is of no use.
    pub features_required: u64,
}

impl Default for Offer {
    /// What this program speaks.
    fn default() -> Self {
        Self {
            version: PROTOCOL_VERSION,
            version_min: PROTOCOL_VERSION,
            features: FEATURES_SUPPORTED,
            features_required: 0,
        }
    }
}

/// How a messenger behaves.
#[derive(Clone, Debug)]
pub struct MessengerSettings {
    /// Who this process is.
    pub identity: Identity,
    /// How identities are proven; a peer with another mode is refused.
    pub auth: AuthMode,
    /// Versions and features.
    pub offer: Offer,
    /// The reactor that this messenger runs on; accepting sides say so in `Welcome`.
    pub core: CoreId,
    /// Buffers for headers.
    pub pool: BufferPool,
    /// Ops that a connecting peer may have in flight on one connection.
    pub credits: u32,
    /// A connection silent for this long is pinged. Zero: never, and silence is no failure.
    pub ping_interval: Duration,
    /// A connection still silent for this long after that is down.
    pub ping_grace: Duration,
    /// Time for the handshake, connecting included.
    pub handshake_max: Duration,
    /// Connections in all; peers beyond it are refused.
    pub connections_max: usize,
    /// Accepted connections without a handshake; beyond it the oldest from the source with the most is closed.
    pub preauth_connections_max: usize,
    /// The same from one source (an IPv4 address, or a /64 of IPv6); beyond it the oldest of its own is closed.
    pub preauth_source_max: usize,
    /// Connections that one peer (by role and id) may have opened to this process.
    pub peer_connections_max: usize,
}

impl MessengerSettings {
    /// The limits of `loligo_config::limits`, one ping per second and two more seconds of grace.
    pub fn new(identity: Identity, pool: BufferPool) -> Self {
        Self {
            identity,
            auth: AuthMode::None,
            offer: Offer::default(),
            core: CoreId(0),
            pool,
            credits: limits::CONNECTION_OPS_MAX,
            ping_interval: Duration::from_secs(1),
            ping_grace: Duration::from_secs(2),
            handshake_max: Duration::from_millis(limits::HANDSHAKE_MS_MAX),
            connections_max: limits::CONNECTIONS_MAX,
            preauth_connections_max: limits::PREAUTH_CONNECTIONS_MAX,
            preauth_source_max: limits::PREAUTH_SOURCE_MAX,
            peer_connections_max: 2 * limits::SHARDS_MAX,
        }
    }
}

/// Why a connection is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DownReason {
    /// It ended.
    #[error(transparent)]
    Closed(#[from] CloseReason),
    /// The peer refused this process, or this process the peer.
    #[error("refused: {0}")]
    Refused(#[from] RefuseReason),
    /// The peer did not answer in time.
    #[error("no answer in time")]
    Timeout,
}

/// What a messenger has to tell. `Up` comes at most once for a connection; `Down` exactly once for each that
/// `connect` began or that was up, and nothing after it.
#[derive(Debug)]
pub enum MessengerEvent {
    /// The handshake is done: messages can be sent.
    Up {
        /// Which connection.
        connection: ConnectionId,
        /// Who is at the other end, as proven by the authentication mode.
        peer: Identity,
        /// Whether the peer opened it.
        accepted: bool,
        /// Accepted: the core that the peer asked for. Else the peer's core that serves it.
        core: CoreId,
        /// Ops that the connecting side may have in flight on it.
        credits: u32,
    },
    /// A message arrived.
    Message {
        /// Over which connection.
        connection: ConnectionId,
        /// The message.
        received: Received,
        /// When it was taken from the transport.
        arrived: Instant,
    },
    /// The connection is gone; messages not yet sent are lost.
    Down {
        /// Which connection.
        connection: ConnectionId,
        /// Who was at the other end; `None` if the handshake was not done.
        peer: Option<Identity>,
        /// Why.
        reason: DownReason,
    },
}

/// Why a message was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Too much is waiting to be sent, or no buffer was to be had: back-pressure, try again after a poll.
    #[error("the send queue is full")]
    QueueFull,
    /// The connection is not up.
    #[error("the connection is closed")]
    Closed,
    /// Messages of this kind do not go from this role to the peer's.
    #[error("this peer takes no such message")]
    Forbidden,
    /// The data does not fit the message.
    #[error(transparent)]
    Invalid(EncodeError),
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessengerStats {
    /// Connections that peers opened.
    pub accepted: u64,
    /// Handshakes completed, on either side.
    pub up: u64,
    /// Peers refused by this process.
    pub refused: u64,
    /// Connections closed at once because there were too many.
    pub turned_away: u64,
    /// Half-open connections closed to make room for newer ones.
    pub evicted: u64,
    /// Connections closed because the peer broke the protocol.
    pub broken: u64,
    /// Handshakes and silent peers that ran out of time.
    pub timed_out: u64,
}
