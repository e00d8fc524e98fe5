//! Which role may send which message to which.

use crate::wire::Kind;
use crate::wire::handshake::Role;

/// Whether `from` may send `kind` to `to` after the handshake. A client cannot replicate, an OSD gives no orders to
/// a mon: a message from the wrong role is a broken peer.
pub(super) fn allowed(kind: Kind, from: Role, to: Role) -> bool {
    match kind {
        Kind::Hello | Kind::Welcome | Kind::Refuse => false,
        Kind::Ping | Kind::Pong => true,
        Kind::Op => matches!((from, to), (Role::Client(_), Role::Osd(_))),
        Kind::OpReply | Kind::Notify => matches!((from, to), (Role::Osd(_), Role::Client(_))),
        Kind::RepWrite
        | Kind::RepAck
        | Kind::PeerQuery
        | Kind::PeerInfo
        | Kind::PeerFetch
        | Kind::PeerPush
        | Kind::PeerPushAck
        | Kind::PeerPushDone
        | Kind::PeerActivate
        | Kind::PeerActivated => matches!((from, to), (Role::Osd(_), Role::Osd(_))),
        Kind::Subscribe => to == Role::Mon,
        Kind::Map => from == Role::Mon,
        Kind::Boot | Kind::Report | Kind::Failure => matches!((from, to), (Role::Osd(_), Role::Mon)),
        Kind::BootReply => matches!((from, to), (Role::Mon, Role::Osd(_))),
        Kind::Command => matches!((from, to), (Role::Client(_), Role::Mon)),
        Kind::CommandReply => matches!((from, to), (Role::Mon, Role::Client(_))),
    }
}
