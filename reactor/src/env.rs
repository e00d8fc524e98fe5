//! The seams: every use of time, randomness, disk and network goes through these traits.
//!
//! Real implementations live in `reactor::os`, `nvme` and `net::transport`; simulated ones in `tests`.

use crate::dma::{Buffer, SharedBuffer};
use arrayvec::ArrayVec;
use loligo_config::units::{BlockCount, Lba};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

/// A point on the boot-time clock, in nanoseconds. It goes on while the machine is suspended, and never back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

impl Instant {
    /// The time from `earlier` to this; zero if `earlier` is later.
    pub fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The point `duration` further on.
    #[must_use]
    pub fn after(self, duration: Duration) -> Instant {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Instant(self.0.saturating_add(nanos))
    }
}

/// Time.
pub trait Clock {
    /// Now, on the boot-time clock. All safety rules use this one.
    fn now(&self) -> Instant;

    /// Seconds since 1970, for people to read. It may jump; no decision depends on it.
    fn unix_seconds(&self) -> u64;
}

/// Randomness.
pub trait Entropy {
    /// 64 random bits.
    fn next_u64(&mut self) -> u64;
}

/// The types of one world, real or simulated, so that components have one parameter.
pub trait World: 'static {
    /// Time.
    type Clock: Clock;
    /// Randomness.
    type Entropy: Entropy;
    /// Disk.
    type Device: BlockDevice;
    /// Network.
    type Transport: Transport;
}

// ---------------------------------------------------------------------------------------------- disk

/// Names an operation towards a device or a store; the completion brings it back. The caller chooses the value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Whether a device loses acknowledged writes at a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCache {
    /// It may: durable means FUA or flush. Also when it could not be found out.
    Volatile,
    /// It does not: an acknowledged write is durable and no flush is sent.
    None,
}

/// What a device is. Read from the system, never assumed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Whole 4 KiB blocks.
    pub blocks: BlockCount,
    /// The device's own logical block in bytes (512 or 4096 on most).
    pub logical_block: u32,
    /// Alignment that a buffer's address needs, in bytes.
    pub dma_alignment: u32,
    /// Blocks that the device writes all or nothing across a power cut; 1 if it promises no more than that; 0 when
    /// a 4 KiB block may tear.
    pub atomic_blocks: BlockCount,
    /// Largest read or write in 4 KiB blocks.
    pub transfer_blocks_max: BlockCount,
    /// Most operations in flight.
    pub queue_depth_max: u32,
    /// Its write cache.
    pub write_cache: WriteCache,
    /// Whether `Discard` does something.
    pub discards: bool,
}

/// The pieces of one write, in order; together a multiple of 4 KiB.
pub type WriteList = ArrayVec<SharedBuffer, WRITE_PIECES_MAX>;
/// Most pieces of one write: a record block and the data of the ops that share it.
pub const WRITE_PIECES_MAX: usize = 17;

/// One operation for a device. Buffers are lent by ownership: they come back with the completion.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a box would be an allocation per write")]
pub enum DiskOp {
    /// Fills the buffer, whose length is a multiple of 4 KiB, from `lba` on.
    Read {
        /// First block.
        lba: Lba,
        /// Where the data goes.
        buffer: Buffer,
    },
    /// Writes the pieces one behind the other from `lba` on.
    Write {
        /// First block.
        lba: Lba,
        /// The data.
        data: WriteList,
        /// Complete only when durable, whatever cache the device has.
        fua: bool,
    },
    /// Makes every write completed before its submission durable.
    Flush,
    /// Tells the device that the blocks are unused; what they read as afterwards is undefined.
    Discard {
        /// First block.
        lba: Lba,
        /// How many.
        count: BlockCount,
    },
    /// Makes the blocks read as zero.
    WriteZeroes {
        /// First block.
        lba: Lba,
        /// How many.
        count: BlockCount,
        /// Complete only when durable.
        fua: bool,
    },
}

/// Why an operation failed, grouped by what the caller does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// These blocks cannot be read; others may be: repair from a peer.
    #[error("unrecoverable media error (errno {errno})")]
    Media {
        /// The system's error number, 0 if there was none.
        errno: i32,
    },
    /// The device failed the operation. After a failed write or flush the device is poisoned.
    #[error("I/O error (errno {errno})")]
    Io {
        /// The system's error number, 0 if there was none.
        errno: i32,
    },
    /// The operation lies beyond the device or is not aligned.
    #[error("invalid request")]
    Invalid,
    /// An earlier write or flush failed: nothing is written to this device any more (RELIABILITY section 3).
    #[error("the device failed a write or a flush before")]
    Poisoned,
    /// The device is gone.
    #[error("the device is gone")]
    Gone,
    /// No completion within the limit.
    #[error("the device did not answer in time")]
    Timeout,
}

/// The end of one operation.
#[derive(Debug)]
pub struct Completion {
    /// As given to `submit`.
    pub ticket: Ticket,
    /// How it went. A read that came back short or long is an error.
    pub result: Result<(), DiskError>,
    /// The operation with its buffers.
    pub op: DiskOp,
}

/// Where completions are put.
pub type Completions = VecDeque<Completion>;

/// The queue is full; the operation comes back untouched.
#[derive(Debug, thiserror::Error)]
#[error("the queue is full")]
pub struct QueueFull<T>(pub T);

/// One queue pair on one device: owned by one reactor, polled, passive.
///
/// Operations may complete in any order. Two writes to one block must not be in flight at once: their order is
/// undefined, and so it is the caller's bug.
pub trait BlockDevice {
    /// What the device is.
    fn geometry(&self) -> &Geometry;

    /// Queues an operation. It is handed to the device at once or at the next `poll`.
    ///
    /// # Errors
    /// `QueueFull` returns the operation.
    #[allow(clippy::result_large_err, reason = "the operation comes back in it, without an allocation")]
    fn submit(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>>;

    /// Moves at most `budget` completions to `done` and returns how many.
    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32;

    /// Operations submitted and not yet completed.
    fn in_flight(&self) -> u32;
}

// ------------------------------------------------------------------------------------------- network

/// A connection of one transport. Never reused within one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// One message: a header in a multiple of 64 bytes and its data. The layout is `net::wire`'s.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The header, checksum included.
    pub head: SharedBuffer,
    /// The data; empty frames have none. It starts at the alignment that devices need.
    pub data: Option<SharedBuffer>,
}

/// Why a connection ended or could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// The peer closed it.
    #[error("closed by the peer")]
    Peer,
    /// The network failed (errno).
    #[error("network error (errno {0})")]
    Network(i32),
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Protocol(&'static str),
    /// Nobody listens there, or it cannot be reached (errno).
    #[error("cannot connect (errno {0})")]
    Unreachable(i32),
    /// This side closed it.
    #[error("closed by this side")]
    Local,
}

/// What a transport has to tell.
#[derive(Debug)]
pub enum TransportEvent {
    /// A peer connected to this process.
    Accepted {
        /// The new connection.
        connection: ConnectionId,
        /// Where it comes from.
        from: SocketAddr,
    },
    /// A connection that `connect` began is there.
    Connected {
        /// Which.
        connection: ConnectionId,
    },
    /// A message whose checksums are right.
    Frame {
        /// Over which connection.
        connection: ConnectionId,
        /// The message.
        frame: Frame,
    },
    /// A connection has ended; nothing more comes from it. Frames not yet sent are lost.
    Closed {
        /// Which.
        connection: ConnectionId,
        /// Why.
        reason: CloseReason,
    },
}

/// Why a frame was not taken.
#[derive(Debug, thiserror::Error)]
pub enum SendRefused {
    /// Too much is waiting to be sent on this connection.
    #[error("the send queue is full")]
    QueueFull(Frame),
    /// There is no such connection any more.
    #[error("the connection is closed")]
    Closed(Frame),
}

/// Moves frames between processes: reliable and in order while a connection lasts, as TCP is.
pub trait Transport {
    /// Begins to connect. `Connected` or `Closed` follows.
    fn connect(&mut self, to: SocketAddr) -> ConnectionId;

    /// Queues a frame.
    ///
    /// # Errors
    /// Returns the frame when the queue of the connection is full or the connection is closed.
    fn send(&mut self, connection: ConnectionId, frame: Frame) -> Result<(), SendRefused>;

    /// Closes a connection. What was queued before is still sent where the peer takes it at once; `Closed` follows
    /// with `CloseReason::Local`.
    fn close(&mut self, connection: ConnectionId);

    /// Accepts frames with more than the small pre-authentication size from now on: the peer has proven who it is.
    fn trust(&mut self, connection: ConnectionId);

    /// Moves at most `budget` events to `inbox` and returns how many.
    fn poll(&mut self, budget: u32, inbox: &mut VecDeque<TransportEvent>) -> u32;
}

/// What a byte stream has to tell.
#[derive(Debug)]
pub enum StreamEvent {
    /// A peer connected.
    Accepted {
        /// The new stream.
        connection: ConnectionId,
    },
    /// Bytes arrived, in order.
    Received {
        /// Over which stream.
        connection: ConnectionId,
        /// The bytes.
        data: SharedBuffer,
    },
    /// The send queue, full before, has room again.
    Writable {
        /// Of which stream.
        connection: ConnectionId,
    },
    /// The stream has ended; nothing more comes from it.
    Closed {
        /// Which.
        connection: ConnectionId,
        /// Why.
        reason: CloseReason,
    },
}

/// Accepted byte streams (Unix or TCP sockets) for protocols that are not ours, such as NBD.
pub trait Streams {
    /// Queues bytes.
    ///
    /// # Errors
    /// Returns the bytes when the send queue of the stream is full; `Writable` follows.
    fn send(&mut self, connection: ConnectionId, data: SharedBuffer) -> Result<(), QueueFull<SharedBuffer>>;

    /// Stops or resumes receiving: back-pressure. What is on its way is still delivered.
    fn pause(&mut self, connection: ConnectionId, paused: bool);

    /// Closes a stream after what was queued has been sent. `Closed` follows.
    fn close(&mut self, connection: ConnectionId);

    /// Moves at most `budget` events to `inbox` and returns how many.
    fn poll(&mut self, budget: u32, inbox: &mut VecDeque<StreamEvent>) -> u32;
}
