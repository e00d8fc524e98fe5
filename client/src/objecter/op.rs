//! One operation on one object, as the objecter sees it.

use crate::error::IoError;
use loligo_config::id::{ObjectId, ObjectVersion, PgId};
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::op::{Guard, OpKind, Residence};
use loligo_reactor::dma::SharedBuffer;
use loligo_reactor::env::Instant;

/// What to do to an object.
#[derive(Clone, Debug)]
pub struct ObjectOp {
    /// The object.
    pub object: ObjectId,
    /// What to do.
    pub kind: OpKind,
    /// For `List`: which PG of the object's pool is asked. `None`: the object's own.
    pub pg: Option<u32>,
    /// First byte in the object.
    pub offset: u32,
    /// How many bytes.
    pub len: u32,
    /// Condition on the object's version.
    pub guard: Guard,
    /// The newest snapshot that the image's header names.
    pub snap_seq: u64,
    /// For `Write`: `len` bytes.
    pub data: Option<SharedBuffer>,
}

impl ObjectOp {
    /// An op without data and condition.
    pub fn new(object: ObjectId, kind: OpKind, offset: u32, len: u32) -> Self {
        Self { object, kind, pg: None, offset, len, guard: Guard::Any, snap_seq: 0, data: None }
    }

    /// The same with a condition.
    #[must_use]
    pub fn guarded(mut self, version: ObjectVersion) -> Self {
        self.guard = Guard::Version(version);
        self
    }

    /// The same for this PG of the object's pool.
    #[must_use]
    pub fn at_pg(mut self, index: u32) -> Self {
        self.pg = Some(index);
        self
    }

    /// The blocks that it may change, as first and one past the last.
    fn blocks(&self) -> (u64, u64) {
        if self.kind == OpKind::Remove {
            return (0, u64::MAX);
        }
        let end = u64::from(self.offset) + u64::from(self.len);
        (u64::from(self.offset / BLOCK_SIZE), end.div_ceil(u64::from(BLOCK_SIZE)))
    }

    /// Whether the order of the two matters: both change one block at least. A read may be served before or after a
    /// write that is in flight at the same time, also when it is sent again.
    pub(super) fn conflicts_with(&self, other: &ObjectOp) -> bool {
        let (first, end) = self.blocks();
        let (other_first, other_end) = other.blocks();
        self.kind.is_write() && other.kind.is_write() && first < other_end && other_first < end
    }
}

/// What an op returned.
#[derive(Clone, Debug)]
pub struct OpOutcome {
    /// The version that a write made, or the object's last version; `NONE`: there is no such object.
    pub version: ObjectVersion,
    /// The data of a `Read` (exactly the length asked for) of `Extents` (whole entries), of `List` or `Watchers`.
    pub data: Option<SharedBuffer>,
}

/// When what happened to an op, by the client's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpTiming {
    /// It was given to the objecter.
    pub submitted: Instant,
    /// Its turn to be sent, for the last time, came.
    pub turn: Instant,
    /// It was handed to the transport.
    pub sent: Instant,
    /// The reply's frame arrived.
    pub arrived: Instant,
    /// Times that it was sent.
    pub sends: u32,
    /// The OSDs' legs.
    pub residence: Residence,
    /// Copies durable at the reply.
    pub copies: u8,
}

/// An op has ended.
#[derive(Clone, Debug)]
pub struct OpDone<O> {
    /// As given to `submit`.
    pub owner: O,
    /// How it went.
    pub result: Result<OpOutcome, IoError>,
    /// Where the time went.
    pub timing: OpTiming,
}

/// Who waits for an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin<O> {
    /// The objecter's user.
    User(O),
    /// The watch with this number.
    Watch(u64),
    /// Nobody any more, or never: it only has to come to its end.
    Nobody,
}

/// An op that has not come to its end.
#[derive(Debug)]
pub(super) struct Op<O> {
    pub(super) origin: Origin<O>,
    pub(super) request: ObjectOp,
    /// `None` until there is a map with its pool.
    pub(super) pg: Option<PgId>,
    /// Its number in the session; 0 until it is first sent.
    pub(super) number: u64,
    /// The link over which it was sent and not yet answered.
    pub(super) link: Option<usize>,
    /// It was sent and that sending was not answered: it may have been applied.
    pub(super) maybe_applied: bool,
    /// Earlier ops of its object that must end first.
    pub(super) blocked_by: u32,
    /// Replies that its data arrived damaged.
    pub(super) damaged: u32,
    pub(super) deadline: Option<Instant>,
    pub(super) timing: OpTiming,
}
