//! What the objecter needs of the network: a face of the messenger that a test can script.

use loligo_config::id::{ClusterId, CoreId, Epoch, SessionId};
use loligo_net::wire::Message;
use loligo_net::wire::handshake::{Identity, RefuseReason, Role};
use loligo_reactor::dma::SharedBuffer;
use loligo_reactor::env::{CloseReason, ConnectionId, Instant};
use std::net::SocketAddr;

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Too much waits to be sent, or no buffer is to be had: try again after the next poll.
    Full,
    /// The connection is closed; its end was or will be told.
    Closed,
}

/// The sending side of a messenger.
pub trait Wire {
    /// Begins to connect.
    fn connect(&mut self, to: SocketAddr, expected: Role, core: CoreId) -> ConnectionId;

    /// Sends a message, with data that starts `within_block` bytes into a block.
    ///
    /// # Errors
    /// When it was not taken.
    fn send(
        &mut self,
        connection: ConnectionId,
        message: Message,
        data: Option<SharedBuffer>,
        within_block: u32,
    ) -> Result<(), Refused>;

    /// Now: later than the time of the poll in which it is asked.
    fn now(&self) -> Instant;

    /// Closes a connection. Whether its end is told afterwards does not matter.
    fn close(&mut self, connection: ConnectionId);

    /// The cluster that every peer has to belong to from now on.
    fn set_cluster(&mut self, cluster: ClusterId);

    /// The epoch that every message carries from now on.
    fn set_epoch(&mut self, epoch: Epoch);

    /// The session that the mon gave; 0 when there is none.
    fn session(&self) -> SessionId;

    /// Forgets the session, so that the next mon gives a new one.
    fn forget_session(&mut self);
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkDown {
    /// It was closed or could not be made.
    #[error("{0}")]
    Closed(CloseReason),
    /// The other side refused the handshake.
    #[error("{0}")]
    Refused(RefuseReason),
    /// The other side did not answer.
    #[error("no answer")]
    Timeout,
}

/// What the messenger tells.
#[derive(Debug)]
pub enum WireEvent {
    /// A connection is there.
    Up {
        /// Which.
        connection: ConnectionId,
        /// Who is at its other end.
        peer: Identity,
        /// Ops that may be in flight on it.
        credits: u32,
    },
    /// A message.
    Message {
        /// Over which connection.
        connection: ConnectionId,
        /// What it says.
        message: Message,
        /// Its data.
        data: Option<SharedBuffer>,
        /// When its frame arrived.
        arrived: Instant,
    },
    /// A connection has ended.
    Down {
        /// Which.
        connection: ConnectionId,
        /// Why.
        reason: LinkDown,
    },
}
