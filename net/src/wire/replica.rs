//! Replication: primary → replica, and back.

use super::op::OpKind;
use loligo_config::id::{Epoch, ObjectId, ObjectVersion, OpId, PgId};

/// One write for a replica. Always whole blocks: the primary has merged what was not. The data and its block
/// checksums follow for `Write`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepWrite {
    /// The PG.
    pub pg: PgId,
    /// First epoch of the interval in which the sender is primary. A replica with a newer promise refuses.
    pub interval: Epoch,
    /// The version of this write.
    pub version: ObjectVersion,
    /// The PG's version before it: a replica that has another one has a hole, and refuses.
    pub previous: ObjectVersion,
    /// Every version up to this one is durable on the whole acting set.
    pub committed: ObjectVersion,
    /// The object.
    pub object: ObjectId,
    /// `Write`, `Discard` or `Remove` (a discard of everything).
    pub kind: OpKind,
    /// First block in the object.
    pub block: u32,
    /// How many blocks.
    pub count: u32,
    /// Whose op it is, for the op-id table.
    pub op: OpId,
    /// See `OpRequest::lowest_outstanding`.
    pub lowest_outstanding: u64,
    /// See `OpRequest::snap_seq`.
    pub snap_seq: u64,
}

/// How a replica took a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum RepStatus {
    /// Durable.
    Durable = 0,
    /// The replica has promised a newer interval.
    StaleInterval = 1,
    /// `previous` is not what the replica has: it missed a write.
    Gap = 2,
    /// The replica cannot write: it leaves the PG.
    Failed = 3,
    /// No room for another write now: send again.
    Busy = 4,
    /// The data arrived damaged.
    Damaged = 5,
    /// The replica does not know the interval yet: send again after its map has come.
    NotReady = 6,
}

/// Replica → primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepAck {
    /// The PG.
    pub pg: PgId,
    /// The interval of the write.
    pub interval: Epoch,
    /// The write.
    pub version: ObjectVersion,
    /// How it went.
    pub status: RepStatus,
    /// From the frame's arrival to the ack's departure, in nanoseconds.
    pub residence_ns: u32,
    /// The device write, in nanoseconds.
    pub device_ns: u32,
    /// Blocks that the replica still grants to this PG's primary (space credit).
    pub space_credit: u64,
}
