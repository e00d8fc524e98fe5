//! Numbers and layouts of the protocol. All integers are big-endian.

use loligo_config::units::BLOCK_SIZE;

/// First eight bytes of a server's greeting: `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes, and the start of every option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of every option reply.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a structured reply chunk.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Length of an option's header: magic, option, length.
pub const OPTION_HEADER_LEN: usize = 16;
/// Length of a request: magic, flags, type, cookie, offset, length.
pub const REQUEST_LEN: usize = 28;
/// Length of a simple reply: magic, error, cookie.
pub const SIMPLE_REPLY_LEN: usize = 16;
/// Length of a chunk's header: magic, flags, type, cookie, length.
pub const CHUNK_HEADER_LEN: usize = 20;

/// Handshake flags, the server's and the client's: fixed newstyle.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flags, the server's and the client's: no 124 zeroes after `EXPORT_NAME`.
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

/// What the client can ask for in the handshake ("Option types").
pub mod option {
    #![allow(missing_docs, reason = "the names are the protocol's own, which its document explains")]
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// What the server answers to an option ("Option reply types").
pub mod reply {
    #![allow(missing_docs, reason = "the names are the protocol's own, which its document explains")]
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    const ERROR: u32 = 1 << 31;
    pub const ERR_UNSUP: u32 = ERROR + 1;
    pub const ERR_POLICY: u32 = ERROR + 2;
    pub const ERR_INVALID: u32 = ERROR + 3;
    pub const ERR_PLATFORM: u32 = ERROR + 4;
    pub const ERR_UNKNOWN: u32 = ERROR + 6;
    pub const ERR_SHUTDOWN: u32 = ERROR + 7;
    pub const ERR_TOO_BIG: u32 = ERROR + 9;
}

/// Kinds of information in `reply::INFO`.
pub mod info {
    #![allow(missing_docs, reason = "the names are the protocol's own, which its document explains")]
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export can do.
pub mod transmission_flag {
    #![allow(missing_docs, reason = "the names are the protocol's own, which its document explains")]
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Request types.
pub mod command {
    #![allow(missing_docs, reason = "the names are the protocol's own, which its document explains")]
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Request flags.
pub mod command_flag {
    #![allow(missing_docs, reason = "the names are the protocol's own, which its document explains")]
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Types of structured reply chunks, and their flag.
pub mod chunk {
    #![allow(missing_docs, reason = "the names are the protocol's own, which its document explains")]
    pub const FLAG_DONE: u16 = 1 << 0;
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) + 1;
}

/// Error numbers of replies ("Error values"); the only ones that may go over the wire.
pub mod error {
    #![allow(missing_docs, reason = "the names are the protocol's own, which its document explains")]
    pub const EPERM: u32 = 1;
    pub const EIO: u32 = 5;
    pub const ENOMEM: u32 = 12;
    pub const EINVAL: u32 = 22;
    pub const ENOSPC: u32 = 28;
    pub const ENOTSUP: u32 = 95;
    pub const ESHUTDOWN: u32 = 108;
}

/// Flags of `base:allocation` extents: no storage is allocated.
pub const STATE_HOLE: u32 = 1 << 0;
/// Flags of `base:allocation` extents: reads as zero.
pub const STATE_ZERO: u32 = 1 << 1;
/// The metadata context that is offered.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";
/// The number under which `base:allocation` is reported.
pub const CONTEXT_ALLOCATION_ID: u32 = 1;

/// Longest string of the protocol in bytes ("Conventions").
pub const STRING_LEN_MAX: usize = 4096;
/// Longest option that is looked at, in bytes: a name and a few queries or information requests. It is all that one
/// connection can make the server keep in the handshake (RELIABILITY section 4.1).
pub const OPTION_LEN_MAX: u32 = 12 << 10;
/// Longest read or write, in bytes: what the protocol lets clients assume ("Block size constraints").
pub const PAYLOAD_LEN_MAX: u32 = 32 << 20;
/// Smallest request, in bytes.
pub const BLOCK_LEN_MIN: u32 = 1;
/// What is fastest: multiples of the store's block, at multiples of it.
pub const BLOCK_LEN_PREFERRED: u32 = BLOCK_SIZE;

/// One request, decoded; nothing in it is checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Command flags.
    pub flags: u16,
    /// Command.
    pub command: u16,
    /// Brought back by the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// How many bytes.
    pub len: u32,
}

impl Request {
    /// Reads a request; `None` if the magic number is wrong.
    pub fn decode(bytes: &[u8; REQUEST_LEN]) -> Option<Request> {
        let mut fields = Fields(bytes);
        (fields.u32()? == REQUEST_MAGIC).then_some(())?;
        Some(Request {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset: fields.u64()?,
            len: fields.u32()?,
        })
    }
}

/// Reads big-endian fields off the front of some bytes.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    /// The next 16 bits; `None` when there are fewer, here and below.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// The next `len` bytes.
    pub fn bytes(&mut self, len: u32) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(usize::try_from(len).ok()?)?;
        self.0 = rest;
        Some(head)
    }

    /// A string with its length before it.
    pub fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()?;
        std::str::from_utf8(self.bytes(len)?).ok()
    }
}

/// Writes big-endian fields one behind the other into a buffer that is long enough.
#[derive(Debug)]
pub struct Writer<'a> {
    bytes: &'a mut [u8],
    /// Bytes written so far.
    pub len: usize,
}

impl<'a> Writer<'a> {
    /// Writes from the start of `bytes`.
    pub fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, len: 0 }
    }

    /// Appends bytes.
    ///
    /// # Panics
    /// When they do not fit: replies are sized before they are written.
    pub fn bytes(&mut self, part: &[u8]) -> &mut Self {
        let end = self.len + part.len();
        self.bytes[self.len..end].copy_from_slice(part);
        self.len = end;
        self
    }

    /// Appends 16 bits.
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    /// Appends 32 bits.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    /// Appends 64 bits.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    /// Appends a simple reply.
    pub fn simple_reply(&mut self, error: u32, cookie: u64) -> &mut Self {
        self.u32(SIMPLE_REPLY_MAGIC).u32(error).u64(cookie)
    }

    /// Appends the header of a structured reply chunk.
    pub fn chunk(&mut self, flags: u16, kind: u16, cookie: u64, len: u32) -> &mut Self {
        self.u32(CHUNK_MAGIC).u16(flags).u16(kind).u64(cookie).u32(len)
    }
}
