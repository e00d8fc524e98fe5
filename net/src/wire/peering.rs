//! Peering: the members of a PG agree on the newest writes before it serves (DESIGN section 5).

use loligo_config::id::{Epoch, ObjectId, ObjectVersion, OpId, PgId};

/// Primary → member. Before it answers, the member makes `interval` durable as a promise and from then on refuses
/// replication from older intervals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerQuery {
    /// The PG.
    pub pg: PgId,
    /// First epoch of the new interval.
    pub interval: Epoch,
}

/// Member → primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// The PG.
    pub pg: PgId,
    /// The interval of the query, now promised; or the newer one that this member has promised before.
    pub interval: Epoch,
    /// The newest interval in which this member was activated; 0 if never.
    pub activated: Epoch,
    /// The member's newest durable write.
    pub last: ObjectVersion,
    /// Every version up to this one is known durable on the whole acting set of its interval.
    pub committed: ObjectVersion,
    /// The member's history is broken by a corruption: it has no vote.
    pub incomplete: bool,
    /// Blocks that the member grants to the PG's primary.
    pub space_credit: u64,
}

/// Primary → a member: send all writes after `since`, oldest first, as `PeerPush`, then `PeerPushDone`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerFetch {
    /// The PG.
    pub pg: PgId,
    /// The interval.
    pub interval: Epoch,
    /// What the asker has.
    pub since: ObjectVersion,
}

/// What a pushed range holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum PushKind {
    /// Data follows.
    Data = 1,
    /// The blocks are free.
    Free = 2,
    /// Only the op's result: its blocks were superseded by later pushes, or it had none.
    Result = 3,
}

/// Blocks as one write of the tail left them, unless a later write of the tail supersedes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerPush {
    /// The PG.
    pub pg: PgId,
    /// The interval.
    pub interval: Epoch,
    /// Number of this push in its sequence, from 0.
    pub number: u32,
    /// What follows.
    pub kind: PushKind,
    /// The write that made these blocks.
    pub version: ObjectVersion,
    /// The PG's version before that write.
    pub previous: ObjectVersion,
    /// The object.
    pub object: ObjectId,
    /// First block in the object.
    pub block: u32,
    /// How many blocks.
    pub count: u32,
    /// Whose op it was.
    pub op: OpId,
    /// See `OpRequest::lowest_outstanding`.
    pub lowest_outstanding: u64,
    /// See `OpRequest::snap_seq`.
    pub snap_seq: u64,
}

/// A push is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerPushAck {
    /// The PG.
    pub pg: PgId,
    /// The interval.
    pub interval: Epoch,
    /// The push's number.
    pub number: u32,
    /// Whether it could be stored.
    pub stored: bool,
}

/// The sequence of pushes is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerPushDone {
    /// The PG.
    pub pg: PgId,
    /// The interval.
    pub interval: Epoch,
    /// How many pushes there were.
    pub count: u32,
    /// The newest write that they contain.
    pub last: ObjectVersion,
    /// The log does not reach back to `since`: the tail cannot be given.
    pub incomplete: bool,
}

/// Everything chosen is durable on every member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerActivate {
    /// The PG.
    pub pg: PgId,
    /// The interval.
    pub interval: Epoch,
    /// The PG's newest write, now durable everywhere.
    pub last: ObjectVersion,
}
