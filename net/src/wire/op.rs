//! Client operations (DESIGN section 3).

use loligo_config::id::{CoreId, ObjectId, ObjectVersion, OpId, OsdId, PgId};

/// What an op does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum OpKind {
    /// Returns the data of the range; unwritten parts read as zero.
    Read = 1,
    /// Writes the data to the range.
    Write = 2,
    /// Frees whole blocks of the range, which then read as zero; parts of blocks stay untouched.
    Discard = 3,
    /// The range reads as zero afterwards; whole blocks are freed, parts of blocks are written.
    WriteZeroes = 4,
    /// Removes the object.
    Remove = 5,
    /// Returns which blocks of the range are allocated: data is a list of `ExtentEntry`, `version` the object's.
    Extents = 6,
    /// From now on `Notify` follows every change of the object, over this connection. Not kept over a reconnect.
    Watch = 7,
    /// Ends a watch.
    Unwatch = 8,
    /// Returns the objects that the PG has of the image and kind that `object` names, from that object on: data as in
    /// `wire::list`. `pg` is any of the pool's, not the object's own.
    List = 9,
    /// Returns the sessions that watch the object: data as in `wire::list`.
    Watchers = 10,
}

impl OpKind {
    /// Whether the op changes the object, so that it gets a version and its result is kept.
    pub fn is_write(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes | Self::Remove)
    }
}

/// A condition on the object's version before the op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Guard {
    /// None.
    #[default]
    Any,
    /// The object's last version is this one; [`ObjectVersion::NONE`]: the object does not exist. Compare-and-set.
    Version(ObjectVersion),
}

/// Client → primary. `offset` and `len` in bytes within the object; `len` ≤ `limits::OP_DATA_LEN_MAX` for reads and
/// writes, up to the object's size for the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpRequest {
    /// The PG that the client computed.
    pub pg: PgId,
    /// The object.
    pub object: ObjectId,
    /// What to do.
    pub kind: OpKind,
    /// First byte.
    pub offset: u32,
    /// How many bytes.
    pub len: u32,
    /// Which op this is.
    pub op: OpId,
    /// The lowest op of this session that the client still waits for: results below it are dropped.
    pub lowest_outstanding: u64,
    /// The newest snapshot that the client knows; 0 when there is none.
    pub snap_seq: u64,
    /// Condition.
    pub guard: Guard,
    /// How often this op was sent before, modulo 256: the answer goes to where the last one came from, in whatever order
    /// they arrive; see [`OpRequest::is_before`].
    pub attempt: u8,
    /// Nanoseconds that it waited in the client before it was sent.
    pub client_queue_ns: u32,
}

impl OpRequest {
    /// Whether this is an earlier sending of the same op, in serial number arithmetic (RFC 1982): no copy is on its way
    /// for 128 sendings.
    pub fn is_before(&self, other: &Self) -> bool {
        self.attempt.wrapping_sub(other.attempt) > u8::MAX / 2
    }
}

/// How an op ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u16)]
pub enum OpStatus {
    /// Done; a write is durable on every member of the acting set.
    #[error("done")]
    Done = 0,
    /// The client's map is too old for this PG: get the epoch that the reply carries, and try again.
    #[error("the map is too old")]
    StaleEpoch = 1,
    /// This OSD is not the primary of the PG in its newest map.
    #[error("not the primary")]
    NotPrimary = 2,
    /// The PG does not serve now: try again after a new map or a while.
    #[error("the PG is not active")]
    NotActive = 3,
    /// Too much in flight: try again.
    #[error("busy")]
    Busy = 4,
    /// The guard does not hold; `version` is the object's. Nothing was changed.
    #[error("the object has another version")]
    VersionMismatch = 5,
    /// No space. Nothing was changed.
    #[error("no space left")]
    NoSpace = 6,
    /// The op makes no sense: beyond the object, wrong PG, too long.
    #[error("invalid operation")]
    Invalid = 7,
    /// The data arrived damaged; nothing was changed.
    #[error("damaged data")]
    Damaged = 8,
    /// No copy of these blocks can be read.
    #[error("unrecoverable read error")]
    MediaError = 9,
    /// The session is fenced. Nothing was changed by this op from now on.
    #[error("the session is fenced")]
    Fenced = 10,
    /// The PG does not know this session any more: whether a resent op was applied is unknown; an op that was not
    /// sent before was not.
    #[error("the session has expired")]
    SessionExpired = 11,
    /// The write's snapshot context is older than the newest cut.
    #[error("the snapshot context is too old")]
    StaleSnap = 12,
}

/// Replicas whose legs a reply carries: those of a pool of five copies. Of a larger one the slowest are kept.
pub const REPLICA_LEGS_MAX: usize = 4;

/// One replica's part of a write, in nanoseconds. All zero: no replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaLeg {
    /// Which OSD.
    pub osd: OsdId,
    /// From the end of the primary's submit stage to the ack's arrival, by the primary's clock.
    pub leg_ns: u32,
    /// Of that: from the frame's arrival at the replica to the ack's departure, by the replica's clock.
    pub residence_ns: u32,
    /// Of that: its device write.
    pub device_ns: u32,
}

/// Where the time of one op went, in nanoseconds; each leg measured by one clock (`docs/stages.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residence {
    /// Primary: from the frame's arrival to the reply's departure.
    pub primary_ns: u32,
    /// Primary: from arrival until its own write was with the store and the copies with the transport.
    pub submit_ns: u32,
    /// Primary: from there until its own copy was durable; of a read, until the data was there.
    pub own_ns: u32,
    /// Of that: the device operation.
    pub device_ns: u32,
    /// The replicas, in the order of the acting set.
    pub replicas: [ReplicaLeg; REPLICA_LEGS_MAX],
}

impl Residence {
    /// Nothing measured.
    pub const NONE: Self = Self {
        primary_ns: 0,
        submit_ns: 0,
        own_ns: 0,
        device_ns: 0,
        replicas: [ReplicaLeg { osd: OsdId(0), leg_ns: 0, residence_ns: 0, device_ns: 0 }; REPLICA_LEGS_MAX],
    };

    /// The replicas that acknowledged.
    pub fn legs(&self) -> impl Iterator<Item = &ReplicaLeg> {
        self.replicas.iter().filter(|leg| leg.leg_ns > 0)
    }

    /// The replica that took longest.
    pub fn slowest(&self) -> Option<&ReplicaLeg> {
        self.legs().max_by_key(|leg| leg.leg_ns)
    }

    /// From the end of the submit stage until the last copy was durable.
    pub fn copies_ns(&self) -> u32 {
        self.slowest().map_or(0, |leg| leg.leg_ns).max(self.own_ns)
    }

    /// From then to the reply's departure: earlier writes of the PG that have to be answered first, and the reply.
    pub fn reply_ns(&self) -> u32 {
        self.primary_ns.saturating_sub(self.submit_ns).saturating_sub(self.copies_ns())
    }

    /// Notes a replica's leg; when there is no place for it, the slowest stay.
    pub fn note_replica(&mut self, leg: ReplicaLeg) {
        let leg = ReplicaLeg { leg_ns: leg.leg_ns.max(1), ..leg };
        let known = self.replicas.iter_mut().position(|other| other.leg_ns > 0 && other.osd == leg.osd);
        let place = known.or_else(|| self.replicas.iter().position(|other| other.leg_ns == 0));
        if let Some(place) = place {
            self.replicas[place] = leg;
        } else if let Some(fastest) = self.replicas.iter_mut().min_by_key(|other| other.leg_ns)
            && fastest.leg_ns < leg.leg_ns
        {
            *fastest = leg;
        }
    }
}

/// Primary → client. For `Read`, `Extents`, `List` and `Watchers` the data follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpReply {
    /// Which op.
    pub op: OpId,
    /// How it ended.
    pub status: OpStatus,
    /// The version that a write made, or the object's last version.
    pub version: ObjectVersion,
    /// First byte of the range, as in the request: where the data's first block boundary is.
    pub offset: u32,
    /// Bytes of data.
    pub len: u32,
    /// The core that owns the PG: connect there.
    pub core: CoreId,
    /// Copies durable at this reply; 0 for reads.
    pub copies: u8,
    /// Where the time went.
    pub residence: Residence,
}

/// One allocated run of blocks in the data of an `Extents` reply: 8 bytes, little-endian, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentEntry {
    /// First block in the object.
    pub block: u32,
    /// How many blocks.
    pub count: u32,
}

/// A watched object has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notify {
    /// Its PG.
    pub pg: PgId,
    /// The object.
    pub object: ObjectId,
    /// Its new version.
    pub version: ObjectVersion,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_replicas_keep_their_place() {
        let mut residence = Residence { primary_ns: 100, submit_ns: 10, own_ns: 50, ..Residence::NONE };
        assert_eq!((residence.copies_ns(), residence.reply_ns()), (50, 40));
        for osd in 1..=6 {
            residence.note_replica(ReplicaLeg { osd: OsdId(osd), leg_ns: osd * 10, ..ReplicaLeg::default() });
        }
        let mut osds: Vec<u32> = residence.legs().map(|leg| leg.osd.0).collect();
        osds.sort_unstable();
        assert_eq!(osds, [3, 4, 5, 6]);
        assert_eq!(residence.slowest().unwrap().osd, OsdId(6));
        assert_eq!((residence.copies_ns(), residence.reply_ns()), (60, 30));
    }

    #[test]
    fn a_replica_that_acks_twice_has_one_leg() {
        let mut residence = Residence::NONE;
        for leg_ns in [0, 7] {
            residence.note_replica(ReplicaLeg { osd: OsdId(1), leg_ns, ..ReplicaLeg::default() });
        }
        assert_eq!(residence.legs().map(|leg| leg.leg_ns).collect::<Vec<_>>(), [7]);
    }
}
