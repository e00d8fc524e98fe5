//! How messages lie in a header: fixed little-endian structs without implicit padding.
//!
//! `From<&Message part>` writes a layout, `TryFrom<&layout>` reads it into a type that cannot hold a bad value. Unused
//! bytes are zero; `read_body` refuses others, except in handshake messages, whose unused bytes and surplus length a
//! newer peer may use.

mod handshake;
mod mon;
mod op;
mod peering;
mod replica;

use super::codec::DecodeError;
use super::{Message, handshake as h, mon as m, op as o, peering as p, replica as r};
use loligo_config::id::{Epoch, ImageId, ObjectId, ObjectKind, ObjectVersion, OpId, PgId, PoolId, SessionId};
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Headers and their parts are multiples of this many bytes.
pub(super) const UNIT: usize = 64;
/// First four bytes of every frame.
pub(super) const MAGIC: [u8; 4] = *b"LOLI";
/// The header checksum covers everything from here on; the magic before it is compared.
pub(super) const CRC_FROM: usize = 8;

/// Derives what a layout needs.
macro_rules! layout {
    ($(#[$doc:meta])* $name:ident($len:literal) { $($field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub(in crate::wire) struct $name { $(pub(in crate::wire) $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $len);
    };
}
use layout;

layout! {
    /// The first 64 bytes of every header.
    Common(64) {
        magic: [u8; 4],
        head_crc: U32,
        head_units: U16,
        kind: U16,
        version: U16,
        flags: U16,
        epoch: U32,
        data_len: U32,
        within_block: U32,
        reserved_32: U32,
        sequence: U64,
        reserved: [u8; 24],
    }
}
const _: () = assert!(offset_of!(Common, head_crc) == 4);
const _: () = assert!(offset_of!(Common, head_units) == CRC_FROM);
const _: () = assert!(offset_of!(Common, kind) == 10);
const _: () = assert!(offset_of!(Common, epoch) == 16);
const _: () = assert!(offset_of!(Common, data_len) == 20);
const _: () = assert!(offset_of!(Common, within_block) == 24);
const _: () = assert!(offset_of!(Common, sequence) == 32);
const _: () = assert!(size_of::<Common>() == UNIT);

/// The numbers of the messages and the structs they lie in. A number is never used again for something else.
macro_rules! kinds {
    ($($variant:ident = $number:literal: $message:ty => $layout:ty,)*) => {
        /// Which message a frame holds.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Kind { $(#[doc = concat!("See `Message::", stringify!($variant), "`.")] $variant = $number,)* }

        impl Kind {
            /// All of them, in the order of their numbers.
            pub const ALL: &[Kind] = &[$(Kind::$variant,)*];

            /// The kind with this number on the wire.
            pub fn from_u16(number: u16) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// Bytes of its body in the header: a multiple of 64.
            pub(super) const fn body_len(self) -> usize {
                match self { $(Self::$variant => size_of::<$layout>().next_multiple_of(UNIT),)* }
            }
        }

        impl Message {
            /// Which message this is.
            pub fn kind(&self) -> Kind {
                match self { $(Self::$variant(_) => Kind::$variant,)* }
            }
        }

        /// Writes the body. `out` is zeroed and as long as the kind's body.
        pub(super) fn write_body(message: &Message, out: &mut [u8]) {
            match message {
                $(Message::$variant(body) => {
                    let layout = <$layout>::from(body);
                    out[..size_of::<$layout>()].copy_from_slice(layout.as_bytes());
                })*
            }
        }

        /// Reads the body of a message of this kind.
        pub(super) fn read_body(kind: Kind, bytes: &[u8]) -> Result<Message, DecodeError> {
            match kind {
                $(Kind::$variant => {
                    let (layout, rest) = <$layout>::ref_from_prefix(bytes).map_err(|_| DecodeError::Length)?;
                    let body = <$message>::try_from(layout)?;
                    if !kind.is_handshake() {
                        check_canonical(<$layout>::from(&body).as_bytes(), layout.as_bytes(), rest)?;
                    }
                    Ok(Message::$variant(body))
                })*
            }
        }
    };
}

kinds! {
    Hello = 1: h::Hello => handshake::HelloLayout,
    Welcome = 2: h::Welcome => handshake::WelcomeLayout,
    Refuse = 3: h::Refuse => handshake::RefuseLayout,
    Ping = 4: h::Ping => handshake::PingLayout,
    Pong = 5: h::Ping => handshake::PingLayout,
    Op = 16: o::OpRequest => op::OpLayout,
    OpReply = 17: o::OpReply => op::OpReplyLayout,
    Notify = 18: o::Notify => op::NotifyLayout,
    RepWrite = 32: r::RepWrite => replica::RepWriteLayout,
    RepAck = 33: r::RepAck => replica::RepAckLayout,
    PeerQuery = 48: p::PeerQuery => peering::PeerQueryLayout,
    PeerInfo = 49: p::PeerInfo => peering::PeerInfoLayout,
    PeerFetch = 50: p::PeerFetch => peering::PeerFetchLayout,
    PeerPush = 51: p::PeerPush => peering::PeerPushLayout,
    PeerPushAck = 52: p::PeerPushAck => peering::PeerPushAckLayout,
    PeerPushDone = 53: p::PeerPushDone => peering::PeerPushDoneLayout,
    PeerActivate = 54: p::PeerActivate => peering::PeerActivateLayout,
    PeerActivated = 55: p::PeerActivate => peering::PeerActivateLayout,
    Subscribe = 64: m::Subscribe => mon::EpochLayout,
    Map = 65: m::Map => mon::EpochLayout,
    Boot = 66: m::Boot => mon::StartLayout,
    BootReply = 67: m::BootReply => mon::BootReplyLayout,
    Report = 68: m::Report => mon::ReportLayout,
    Failure = 69: m::Failure => mon::FailureLayout,
    Command = 70: m::Command => mon::CommandLayout,
    CommandReply = 71: m::CommandReply => mon::CommandReplyLayout,
}

/// What was read, written again, must give the same bytes: one rule for reserved bytes, flags, and fields that mean
/// nothing beside the others.
fn check_canonical(again: &[u8], read: &[u8], padding: &[u8]) -> Result<(), DecodeError> {
    if again != read || padding.iter().any(|byte| *byte != 0) {
        return Err(DecodeError::Reserved);
    }
    Ok(())
}

layout! {
    /// A PG.
    PgLayout(8) { pool: U32, index: U32, }
}

impl From<PgId> for PgLayout {
    fn from(pg: PgId) -> Self {
        Self { pool: pg.pool.0.into(), index: pg.index.into() }
    }
}

impl From<PgLayout> for PgId {
    fn from(pg: PgLayout) -> Self {
        Self { pool: PoolId(pg.pool.get()), index: pg.index.get() }
    }
}

layout! {
    /// An object.
    ObjectLayout(24) { pool: U32, kind: U32, image: U64, index: U64, }
}

impl From<ObjectId> for ObjectLayout {
    fn from(object: ObjectId) -> Self {
        Self {
            pool: object.pool.0.into(),
            kind: (object.kind as u32).into(),
            image: object.image.0.into(),
            index: object.index.into(),
        }
    }
}

impl TryFrom<ObjectLayout> for ObjectId {
    type Error = DecodeError;

    fn try_from(object: ObjectLayout) -> Result<Self, DecodeError> {
        let kind = ObjectKind::from_u32(object.kind.get()).ok_or(DecodeError::Value("object kind"))?;
        let pool = PoolId(object.pool.get());
        Ok(Self { pool, kind, image: ImageId(object.image.get()), index: object.index.get() })
    }
}

layout! {
    /// A version.
    VersionLayout(16) { interval: U32, stream: U32, sequence: U64, }
}

impl From<ObjectVersion> for VersionLayout {
    fn from(version: ObjectVersion) -> Self {
        Self {
            interval: version.interval.0.into(),
            stream: version.stream.into(),
            sequence: version.sequence.into(),
        }
    }
}

impl From<VersionLayout> for ObjectVersion {
    fn from(version: VersionLayout) -> Self {
        let interval = Epoch(version.interval.get());
        Self { interval, stream: version.stream.get(), sequence: version.sequence.get() }
    }
}

layout! {
    /// An op's id.
    OpIdLayout(16) { session: U64, number: U64, }
}

impl From<OpId> for OpIdLayout {
    fn from(op: OpId) -> Self {
        Self { session: op.session.0.into(), number: op.number.into() }
    }
}

impl From<OpIdLayout> for OpId {
    fn from(op: OpIdLayout) -> Self {
        Self { session: SessionId(op.session.get()), number: op.number.get() }
    }
}

/// A flag's byte is 0 or 1.
fn flag(byte: u8) -> Result<bool, DecodeError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Value("flag")),
    }
}

/// Zeroes, for a layout's reserved bytes.
fn zeroed<T: FromZeros>() -> T {
    T::new_zeroed()
}
