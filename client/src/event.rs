//! What goes into a [`Client`](crate::Client) and what comes out of it.

use crate::error::{CommandError, ImageError, IoError};
use crate::image::header::ImageHeader;
use loligo_config::id::ImageId;
use loligo_config::units::{ByteLen, ByteOffset};
use loligo_net::wire::op::Residence;
use loligo_reactor::dma::SharedBuffer;
use loligo_reactor::env::Ticket;

/// The longest `Read` and `Write` in bytes: 16 MiB, the largest buffer. The other requests have no limit but the
/// image's end.
pub const IO_LEN_MAX: u64 = loligo_reactor::dma::BUFFER_LEN_MAX as u64;

/// An open image of one client. Never reused by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageHandle(pub(crate) u64);

/// One request to an image. Offsets and lengths need no alignment; a length of 0 is done at once.
#[derive(Clone, Debug)]
pub enum ImageIo {
    /// Returns the bytes of the range; at most [`IO_LEN_MAX`].
    Read {
        /// First byte.
        offset: ByteOffset,
        /// How many.
        len: ByteLen,
    },
    /// Writes the bytes; at most [`IO_LEN_MAX`]. Done means durable on every member of each acting set, with and
    /// without `fua`.
    Write {
        /// First byte.
        offset: ByteOffset,
        /// The bytes; their number is the length.
        data: SharedBuffer,
        /// Force unit access: adds nothing, since no write is acknowledged before it is durable.
        fua: bool,
    },
    /// Frees the whole 4 KiB blocks of the range, which read as zero afterwards; other bytes stay untouched.
    Discard {
        /// First byte.
        offset: ByteOffset,
        /// How many.
        len: ByteLen,
    },
    /// Makes the range read as zero; whole blocks are freed.
    WriteZeroes {
        /// First byte.
        offset: ByteOffset,
        /// How many.
        len: ByteLen,
    },
    /// Everything that completed before is durable: true without doing anything, so it completes at once. Writes
    /// still in flight are not covered (RELIABILITY section 2.2).
    Flush,
    /// Returns which parts of the range are allocated, for block status.
    Extents {
        /// First byte.
        offset: ByteOffset,
        /// How many.
        len: ByteLen,
    },
}

/// A run of bytes of an image that is allocated or not. The runs of one answer cover the range asked for, in order,
/// without holes, and neighbours differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte in the image.
    pub offset: ByteOffset,
    /// How many.
    pub len: ByteLen,
    /// Whether storage is allocated there; what is not allocated reads as zero.
    pub allocated: bool,
}

/// A request is done.
#[derive(Clone, Debug)]
pub struct IoDone {
    /// The bytes of a `Read`; `None` for others and for an empty read.
    pub data: Option<SharedBuffer>,
    /// The runs of an `Extents`; empty for others.
    pub extents: Vec<Extent>,
    /// Where the time went, in the slowest (last) of its object operations.
    pub waterfall: Waterfall,
}

/// Where the time of one request went, in nanoseconds: the client's legs by the client's clock, the others as the
/// OSDs measured them by theirs (DESIGN section 3). What remains of `total_ns` is network and wake-ups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waterfall {
    /// From `submit` to completion.
    pub total_ns: u64,
    /// From `submit` until its last object operation's turn to be sent came: credits, connection, order, earlier sendings.
    pub queue_ns: u64,
    /// From there until it was handed to the transport: header, checksums.
    pub encode_ns: u64,
    /// From there until the reply's frame arrived: the round trip with the OSDs' time in it.
    pub round_trip_ns: u64,
    /// From the frame's arrival to completion.
    pub completion_ns: u64,
    /// The OSDs' legs.
    pub residence: Residence,
    /// Copies durable at the reply; 0 for reads.
    pub copies: u8,
    /// Times that its object operations were sent again.
    pub resends: u32,
}

impl Waterfall {
    /// The round trip without the primary's time: two network hops with their wake-ups.
    pub fn network_ns(&self) -> u64 {
        self.round_trip_ns.saturating_sub(u64::from(self.residence.primary_ns))
    }
}

/// How far a long operation is. Objects that exist are counted; PGs when an image is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Done.
    pub done: u64,
    /// In all.
    pub total: u64,
}

/// A name in a pool's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// The image's name.
    pub name: String,
    /// Its id.
    pub id: ImageId,
    /// Its removal has begun and not ended.
    pub removing: bool,
}

/// What an image takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that its size promises.
    pub provisioned: u64,
    /// Bytes allocated, one copy.
    pub used: u64,
}

/// What an administrative request returns.
#[derive(Clone, Debug, PartialEq)]
pub enum AdminReply {
    /// An image was made.
    Created(Box<ImageHeader>),
    /// An image was removed.
    Removed,
    /// An image has another name.
    Renamed,
    /// An image has another size.
    Resized,
    /// The images of a pool, by name.
    List(Vec<ListEntry>),
    /// An image's header.
    Info(Box<ImageHeader>),
    /// What an image takes.
    Usage(Usage),
}

/// What a client has to tell.
#[derive(Debug)]
pub enum ClientEvent {
    /// The client has a session and a map. Comes once.
    Connected,
    /// The session is fenced or has ended: every request fails from now on. Comes once.
    Fenced,
    /// An admin command was answered.
    Command {
        /// As given to `command`.
        ticket: Ticket,
        /// The answer.
        result: Result<serde_json::Value, CommandError>,
    },
    /// An administrative request on an image has ended.
    Admin {
        /// As given to it.
        ticket: Ticket,
        /// How it went.
        result: Result<AdminReply, ImageError>,
    },
    /// A long administrative request goes on.
    Progress {
        /// As given to it.
        ticket: Ticket,
        /// How far it is.
        progress: Progress,
    },
    /// An image was opened, or not.
    Opened {
        /// As given to `open`.
        ticket: Ticket,
        /// The image; its header is at hand in `image_info`.
        result: Result<ImageHandle, ImageError>,
    },
    /// An image was closed: its last request has completed.
    Closed {
        /// As given to `close`.
        ticket: Ticket,
    },
    /// A request to an image has ended.
    Io {
        /// Which image.
        image: ImageHandle,
        /// As given to `submit`.
        ticket: Ticket,
        /// How it went.
        result: Result<IoDone, IoError>,
    },
    /// An open image has another size now. Requests are checked against it from here on.
    Resized {
        /// Which image.
        image: ImageHandle,
        /// Its new size in bytes.
        size: ByteLen,
    },
    /// An open image is being removed: its requests fail from now on.
    Removed {
        /// Which image.
        image: ImageHandle,
    },
}
