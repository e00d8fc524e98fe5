//! What a PG asks of its store, and what the store answers.
//!
//! A store is passive: [`Store::submit`](super) queues, everything queued before one `poll` shares one record block
//! and goes out as one contiguous device write, and the answers come as [`StoreEvent`]s. All data is in whole 4 KiB
//! blocks, with the CRC-32C of each block as it came over the wire.

use loligo_config::id::{Epoch, ObjectId, ObjectVersion, OpId, PgId};
use loligo_reactor::dma::SharedBuffer;
use loligo_reactor::env::{DiskError, Ticket};

/// Blocks that a write takes besides its data, as far as space is granted by it: a log record, and what it makes dirty.
pub const WRITE_OVERHEAD: u64 = 8;

/// One atomic change of one PG: durable as a whole or not at all.
#[derive(Clone, Debug)]
pub struct Transaction {
    /// The PG.
    pub pg: PgId,
    /// The version that this change makes; [`ObjectVersion::NONE`] for `Meta`.
    pub version: ObjectVersion,
    /// The PG's version before it: the store refuses a transaction that does not follow its last one.
    pub previous: ObjectVersion,
    /// Whose op it is; the zero `OpId` for none. Its result is kept in the PG's op-id table.
    pub op: OpId,
    /// Results of the op's session below this number are dropped.
    pub lowest_outstanding: u64,
    /// The newest snapshot known to the writer.
    pub snap_seq: u64,
    /// What changes.
    pub change: Change,
}

/// What one transaction changes.
#[derive(Clone, Debug)]
pub enum Change {
    /// New contents of whole blocks.
    Write {
        /// The object; made if it does not exist.
        object: ObjectId,
        /// First block in the object.
        block: u32,
        /// The blocks: a multiple of 4 KiB, at most `limits::OP_DATA_LEN_MAX`.
        data: SharedBuffer,
        /// CRC-32C of each block, four bytes each, little-endian.
        checksums: SharedBuffer,
    },
    /// Blocks that hold nothing any more and read as zero. The object stays, with a new version.
    Free {
        /// The object.
        object: ObjectId,
        /// First block in the object.
        block: u32,
        /// How many.
        count: u32,
    },
    /// The object is removed.
    Remove {
        /// The object.
        object: ObjectId,
    },
    /// The version and the op's result alone: for a write of the tail whose blocks later writes supersede.
    Result,
    /// Makes the PG or changes what its member must not forget.
    Meta(PgMeta),
    /// Removes the PG with everything in it.
    RemovePg,
}

/// What a member durably keeps about a PG besides its objects (DESIGN section 5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PgMeta {
    /// The newest interval promised to a primary: replication from older ones is refused, also after a restart.
    pub promised: Epoch,
    /// The newest interval in which this member held the chosen log and everything acked.
    pub activated: Epoch,
}

/// What the store knows of one PG.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PgStatus {
    /// See [`PgMeta`].
    pub meta: PgMeta,
    /// Its newest submitted version.
    pub last: ObjectVersion,
    /// Its newest durable version.
    pub durable: ObjectVersion,
    /// A corruption below a durable mark broke its history on this member: no vote until repaired.
    pub incomplete: bool,
    /// Objects in it.
    pub objects: u64,
    /// Blocks of data in it.
    pub blocks: u64,
}

/// What the op-id table says about an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpLookup {
    /// It was never applied here.
    New,
    /// It was applied, as this version.
    Applied(ObjectVersion),
    /// It is below what its session still waits for: a delayed duplicate, to be refused.
    Forgotten,
    /// The session's results were dropped: whether it was applied is unknown.
    SessionExpired,
}

/// One entry of a PG's log: enough to send the tail to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// The write.
    pub version: ObjectVersion,
    /// The PG's version before it.
    pub previous: ObjectVersion,
    /// What it changed.
    pub object: ObjectId,
    /// First block in the object.
    pub block: u32,
    /// How many; `u32::MAX` when the object was removed.
    pub count: u32,
    /// What it did.
    pub kind: LogKind,
    /// Whose op it was.
    pub op: OpId,
    /// See [`Transaction::lowest_outstanding`].
    pub lowest_outstanding: u64,
    /// See [`Transaction::snap_seq`].
    pub snap_seq: u64,
}

/// What a logged write did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogKind {
    /// New contents.
    Write,
    /// Freed blocks.
    Free,
    /// Removed the object.
    Remove,
    /// Nothing but its result.
    Result,
}

/// Why a transaction was not taken. Nothing of it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Too much in flight: try again after the next event.
    #[error("too much in flight")]
    Busy,
    /// No space, reserve aside.
    #[error("no space left")]
    NoSpace,
    /// `previous` is not the PG's last version.
    #[error("the PG's last version is {last}")]
    NotNext {
        /// What it is.
        last: ObjectVersion,
    },
    /// The device has failed: nothing is written any more.
    #[error("the device has failed: {0}")]
    Failed(DiskError),
    /// Lengths or ranges do not fit.
    #[error("invalid transaction")]
    Invalid,
}

/// Why blocks could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// What the device returned is not what was written: checksum or identity is wrong at this block of the object.
    #[error("checksum mismatch at block {block}")]
    Corrupt {
        /// The first bad block in the object.
        block: u32,
    },
    /// The device could not read.
    #[error("read failed at block {block}: {error}")]
    Device {
        /// The first block of the failed read.
        block: u32,
        /// Why.
        error: DiskError,
    },
    /// No buffer or too many reads in flight: try again.
    #[error("busy")]
    Busy,
}

/// Blocks of an object.
#[derive(Clone, Debug)]
pub struct ReadData {
    /// The data, `count` blocks; blocks that were never written are zero. `None`: all of it is.
    pub data: Option<SharedBuffer>,
    /// CRC-32C of each block, four bytes each, little-endian; empty when `data` is `None`.
    pub checksums: Option<SharedBuffer>,
    /// The object's last version; `NONE` if it does not exist.
    pub version: ObjectVersion,
}

/// What the store has to tell.
#[derive(Debug)]
pub enum StoreEvent {
    /// The transaction and every earlier position of the log are durable.
    Committed {
        /// As given to `submit`.
        ticket: Ticket,
        /// The device write, in nanoseconds.
        device_ns: u32,
    },
    /// The transaction could not be made durable. Whether it is on the disk is unknown until the next mount; the
    /// device is poisoned.
    Failed {
        /// As given to `submit`.
        ticket: Ticket,
        /// Why.
        error: DiskError,
    },
    /// A read has ended.
    Read {
        /// As given to `read`.
        ticket: Ticket,
        /// The blocks.
        result: Result<ReadData, ReadError>,
        /// The device reads, in nanoseconds; 0 when none was needed.
        device_ns: u32,
    },
}
