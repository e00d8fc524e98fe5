//! The wire format: one file per message group. `docs/wire-protocol.md` has the layouts.
//!
//! A frame is a header in a multiple of 64 bytes (common part, body, block checksums, padding) and the data. The data
//! is cut at 4 KiB boundaries of the *object* (the first piece is shorter when the op starts within a block), and
//! the header carries the CRC-32C of every piece: whole blocks travel with the checksum that is stored with them.

pub mod checksum;
mod codec;
pub mod handshake;
mod layout;
pub mod list;
pub mod mon;
pub mod op;
pub mod peering;
pub mod replica;
#[cfg(test)]
pub(crate) mod samples;

pub(crate) use codec::Plan;
pub use codec::{
    Body, Checksums, DecodeError, EncodeError, HANDSHAKE_HEAD_LEN_MAX, REQUEST_DATA_LEN_MAX, Received, check,
    decode, encode, encode_numbered, kind_of,
};
pub use layout::Kind;

use loligo_config::id::Epoch;

/// One message, decoded from a header: small, `Copy`, without data. Lists (block checksums) and data stay in the
/// frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// First message of the connecting side.
    Hello(handshake::Hello),
    /// Answer of the accepting side.
    Welcome(handshake::Welcome),
    /// The accepting side refuses; it closes the connection.
    Refuse(handshake::Refuse),
    /// Keep-alive; answered by `Pong` with the same number.
    Ping(handshake::Ping),
    /// See `Ping`.
    Pong(handshake::Ping),

    /// Client → primary.
    Op(op::OpRequest),
    /// Primary → client.
    OpReply(op::OpReply),
    /// Primary → client: a watched object has changed.
    Notify(op::Notify),

    /// Primary → replica.
    RepWrite(replica::RepWrite),
    /// Replica → primary.
    RepAck(replica::RepAck),

    /// Primary → member: promise this interval and say what you have.
    PeerQuery(peering::PeerQuery),
    /// Member → primary.
    PeerInfo(peering::PeerInfo),
    /// Primary → the member with the newest log: send what is newer than this.
    PeerFetch(peering::PeerFetch),
    /// One write of the tail, with its data.
    PeerPush(peering::PeerPush),
    /// The push is durable.
    PeerPushAck(peering::PeerPushAck),
    /// The tail is complete.
    PeerPushDone(peering::PeerPushDone),
    /// Primary → member: everything chosen is durable everywhere; record the interval as activated.
    PeerActivate(peering::PeerActivate),
    /// Member → primary.
    PeerActivated(peering::PeerActivate),

    /// → mon: send maps newer than this, now and as they come.
    Subscribe(mon::Subscribe),
    /// mon →: a whole map; the data is `loligo_config::map::ClusterMap::encode`.
    Map(mon::Map),
    /// OSD → mon: I am here. The data is `mon::BootInfo` in postcard.
    Boot(mon::Boot),
    /// mon → OSD: the boot was refused or taken (then the map says so too).
    BootReply(mon::BootReply),
    /// OSD → mon: liveness and usage. The data is `mon::OsdReport` in postcard.
    Report(mon::Report),
    /// OSD → mon: a peer does not answer.
    Failure(mon::Failure),
    /// Client → mon: an admin command in JSON.
    Command(mon::Command),
    /// mon → client: its answer in JSON.
    CommandReply(mon::CommandReply),
}

/// A message with the sender's epoch, which every message carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The newest map the sender has.
    pub epoch: Epoch,
    /// The message.
    pub message: Message,
}
