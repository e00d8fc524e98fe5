//! Messages to frames and back.
//!
//! Every length is checked against the kind of message before anything is allocated or read for it: [`Plan`] is what
//! the first 64 bytes promise, and the body must agree with it.

use super::checksum::{self, crc32c, piece_count, read_checksums};
use super::handshake::PROTOCOL_VERSION;
use super::layout::{self, CRC_FROM, Common, Kind, MAGIC, UNIT};
use super::op::OpKind;
use super::peering::PushKind;
use super::{Envelope, Message};
use loligo_config::id::Epoch;
use loligo_config::limits;
use loligo_config::units::BLOCK_SIZE;
use loligo_reactor::dma::{BufferPool, PoolExhausted, SharedBuffer};
use loligo_reactor::env::{CloseReason, Frame};
use std::mem::offset_of;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Longest header of a handshake message, in bytes. Longer than any that this program sends, so that a newer peer
/// may say more in its first message.
pub const HANDSHAKE_HEAD_LEN_MAX: usize = 1024;
const _: () = assert!(HANDSHAKE_HEAD_LEN_MAX < limits::PREAUTH_BYTES_MAX);
/// Longest data of the messages to the mon, in bytes: 1 MiB. They are small by nature; the bound keeps a process
/// that lies about its length from taking the mon's buffers.
pub const REQUEST_DATA_LEN_MAX: u32 = 1 << 20;

/// Where the checksums of the data pieces come from.
#[derive(Clone, Debug, Default)]
pub enum Checksums {
    /// Computed here: at the origin of the data.
    #[default]
    Compute,
    /// They came with the data: four little-endian bytes per piece.
    Given(SharedBuffer),
}

/// The data of a message.
#[derive(Clone, Debug, Default)]
pub struct Body {
    /// The data; `None` and an empty buffer are the same.
    pub data: Option<SharedBuffer>,
    /// How far into its block of the object the first byte is. 0 for data that belongs to no object.
    pub within_block: u32,
    /// The checksums.
    pub checksums: Checksums,
}

impl Body {
    /// No data.
    pub const NONE: Self = Self { data: None, within_block: 0, checksums: Checksums::Compute };

    /// Data that starts at a block boundary, or belongs to no object; its checksums are computed.
    pub fn of(data: SharedBuffer) -> Self {
        Self { data: Some(data), ..Self::NONE }
    }

    /// Whole blocks with the checksums that came with them.
    pub fn with_checksums(data: SharedBuffer, checksums: SharedBuffer) -> Self {
        Self { data: Some(data), within_block: 0, checksums: Checksums::Given(checksums) }
    }
}

/// A message as it arrived.
#[derive(Clone, Debug)]
pub struct Received {
    /// The message and the sender's epoch.
    pub envelope: Envelope,
    /// Its data.
    pub data: Option<SharedBuffer>,
    /// How far into its block the first byte is.
    pub within_block: u32,
    /// The checksums of the data's pieces, four little-endian bytes each; a view of the header.
    pub checksums: SharedBuffer,
    /// Its place among the frames of the connection, from 1.
    pub sequence: u64,
}

/// Why a message cannot be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// No buffer for the header: try again later.
    #[error(transparent)]
    Pool(#[from] PoolExhausted),
    /// More data than a message of this kind may have.
    #[error("{len} bytes of data are too many for this message")]
    TooLong {
        /// Bytes of data.
        len: usize,
    },
    /// The data's length, place in its block, or list of checksums is not what the message says.
    #[error("the data does not fit the message")]
    Mismatch,
}

/// Why a frame is not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The peer does not speak this protocol.
    #[error("not a Loligo frame")]
    Magic,
    /// A version of the protocol that this program does not speak.
    #[error("unknown protocol version")]
    Version,
    /// No such message.
    #[error("unknown kind of message")]
    Kind,
    /// A length does not fit the kind of message, or the frame.
    #[error("wrong length")]
    Length,
    /// The header was damaged on its way.
    #[error("header checksum mismatch")]
    HeadChecksum,
    /// The data was damaged on its way.
    #[error("data checksum mismatch")]
    DataChecksum,
    /// Reserved bytes are in use.
    #[error("reserved bytes are not zero")]
    Reserved,
    /// An authentication mode that this program does not know.
    #[error("unknown authentication mode")]
    UnknownAuth,
    /// A field holds what it cannot hold.
    #[error("invalid {0}")]
    Value(&'static str),
}

impl From<DecodeError> for CloseReason {
    fn from(error: DecodeError) -> Self {
        CloseReason::Protocol(match error {
            DecodeError::Magic => "not a Loligo frame",
            DecodeError::Version => "unknown protocol version",
            DecodeError::Kind => "unknown kind of message",
            DecodeError::Length => "wrong length",
            DecodeError::HeadChecksum => "header checksum mismatch",
            DecodeError::DataChecksum => "data checksum mismatch",
            DecodeError::Reserved => "reserved bytes are not zero",
            DecodeError::UnknownAuth => "unknown authentication mode",
            DecodeError::Value(what) => what,
        })
    }
}

/// Encodes a message without a place in a connection's sequence; see [`encode_numbered`].
///
/// # Errors
/// See [`EncodeError`].
pub fn encode(pool: &BufferPool, envelope: &Envelope, body: Body) -> Result<Frame, EncodeError> {
    encode_numbered(pool, envelope, body, 0)
}

/// Encodes a message as number `sequence` of its connection.
///
/// # Errors
/// See [`EncodeError`].
pub fn encode_numbered(
    pool: &BufferPool,
    envelope: &Envelope,
    body: Body,
    sequence: u64,
) -> Result<Frame, EncodeError> {
    let kind = envelope.message.kind();
    let data = body.data.filter(|data| !data.is_empty());
    let len = data.as_ref().map_or(0, |data| data.len());
    let data_len = u32::try_from(len).map_err(|_| EncodeError::TooLong { len })?;
    if data_len > kind.data_len_max() {
        return Err(EncodeError::TooLong { len });
    }
    let within_block = if len == 0 { 0 } else { body.within_block };
    if within_block >= BLOCK_SIZE || !data_agrees(&envelope.message, data_len, within_block) {
        return Err(EncodeError::Mismatch);
    }
    let head_len = kind.head_len(data_len, within_block);
    let mut head = pool.alloc_zeroed(head_len)?;
    let list = kind.list_at()..kind.list_at() + 4 * piece_count(len, within_block);
    match (&data, &body.checksums) {
        (None, _) => {}
        (Some(data), Checksums::Compute) => checksum::write_checksums(data, within_block, &mut head[list]),
        (Some(_), Checksums::Given(given)) if given.len() == list.len() => {
            head[list].copy_from_slice(given);
        }
        (Some(_), Checksums::Given(_)) => return Err(EncodeError::Mismatch),
    }
    layout::write_body(&envelope.message, &mut head[UNIT..kind.list_at()]);
    let units = u16::try_from(head_len / UNIT).expect("the longest header has fewer than 2^16 units");
    let common = Common {
        magic: MAGIC,
        head_units: units.into(),
        kind: (kind as u16).into(),
        version: PROTOCOL_VERSION.into(),
        epoch: envelope.epoch.0.into(),
        data_len: data_len.into(),
        within_block: within_block.into(),
        sequence: sequence.into(),
        ..Common::new_zeroed()
    };
    head[..UNIT].copy_from_slice(common.as_bytes());
    seal(&mut head);
    Ok(Frame { head: head.freeze(), data })
}

/// Writes the header's checksum.
fn seal(head: &mut [u8]) {
    let crc = crc32c(&head[CRC_FROM..]);
    head[offset_of!(Common, head_crc)..CRC_FROM].copy_from_slice(&crc.to_le_bytes());
}

/// Decodes a frame whose checksums were verified before, by [`check`] or by a `FrameReader`. It reads damaged
/// frames without harm, but does not notice all damage.
///
/// # Errors
/// See [`DecodeError`].
pub fn decode(frame: &Frame) -> Result<Received, DecodeError> {
    let plan = Plan::read(&frame.head)?;
    if frame.head.len() != plan.head_len || data_len(frame) != plan.data_len as usize {
        return Err(DecodeError::Length);
    }
    let message = plan.message(&frame.head)?;
    let list = plan.kind.list_at();
    Ok(Received {
        envelope: Envelope { epoch: plan.epoch, message },
        data: frame.data.clone().filter(|data| !data.is_empty()),
        within_block: plan.within_block,
        checksums: frame.head.slice(list..list + 4 * plan.pieces()),
        sequence: plan.sequence,
    })
}

/// Whether a frame is what its sender made: lengths that fit its kind and both kinds of checksums.
///
/// # Errors
/// `CloseReason::Protocol`: the connection that it came over must be closed.
pub fn check(frame: &Frame) -> Result<(), CloseReason> {
    let plan = Plan::read(&frame.head)?;
    if frame.head.len() != plan.head_len || data_len(frame) != plan.data_len as usize {
        return Err(DecodeError::Length.into());
    }
    plan.verify_head(&frame.head)?;
    let data: &[u8] = frame.data.as_deref().unwrap_or_default();
    for (piece, crc) in checksum::pieces(data, plan.within_block).zip(plan.checksums(&frame.head)) {
        if crc32c(piece) != crc {
            return Err(DecodeError::DataChecksum.into());
        }
    }
    Ok(())
}

fn data_len(frame: &Frame) -> usize {
    frame.data.as_ref().map_or(0, |data| data.len())
}

/// The kind of message that a frame's header names; `None` when it is no header of ours.
pub fn kind_of(frame: &Frame) -> Option<Kind> {
    Plan::read(&frame.head).ok().map(|plan| plan.kind)
}

impl Kind {
    /// Whether it may come before the peer has proven who it is.
    pub fn is_handshake(self) -> bool {
        matches!(self, Self::Hello | Self::Welcome | Self::Refuse)
    }

    /// Most data that it may have, in bytes.
    pub fn data_len_max(self) -> u32 {
        match self {
            Self::Op | Self::OpReply | Self::RepWrite | Self::PeerPush => limits::OP_DATA_LEN_MAX,
            Self::Map | Self::CommandReply => limits::CONTROL_DATA_LEN_MAX,
            Self::Boot | Self::Report | Self::Command => REQUEST_DATA_LEN_MAX,
            _ => 0,
        }
    }

    /// Whether its data may start within a block.
    fn may_start_within(self) -> bool {
        matches!(self, Self::Op | Self::OpReply)
    }

    /// Where the list of checksums starts in the header.
    fn list_at(self) -> usize {
        UNIT + self.body_len()
    }

    fn head_len(self, data_len: u32, within_block: u32) -> usize {
        self.list_at() + (4 * piece_count(data_len as usize, within_block)).next_multiple_of(UNIT)
    }
}

/// What the first 64 bytes of a header promise, each length within the bounds of its kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub kind: Kind,
    pub head_len: usize,
    pub data_len: u32,
    pub within_block: u32,
    pub epoch: Epoch,
    pub sequence: u64,
    head_crc: u32,
}

impl Plan {
    /// Reads the common part at the start of `head`. Its checksum is not verified yet: what follows from the result
    /// is bounded by the kind of message, and nothing is kept for data before [`Plan::verify_head`].
    pub fn read(head: &[u8]) -> Result<Self, DecodeError> {
        let (common, _) = Common::ref_from_prefix(head).map_err(|_| DecodeError::Length)?;
        if common.magic != MAGIC {
            return Err(DecodeError::Magic);
        }
        if common.version.get() != PROTOCOL_VERSION {
            return Err(DecodeError::Version);
        }
        let kind = Kind::from_u16(common.kind.get()).ok_or(DecodeError::Kind)?;
        let reserved = common.flags.get() == 0 && common.reserved_32.get() == 0 && common.reserved == [0; 24];
        if !reserved && !kind.is_handshake() {
            return Err(DecodeError::Reserved);
        }
        let plan = Self {
            kind,
            head_len: usize::from(common.head_units.get()) * UNIT,
            data_len: common.data_len.get(),
            within_block: common.within_block.get(),
            epoch: Epoch(common.epoch.get()),
            sequence: common.sequence.get(),
            head_crc: common.head_crc.get(),
        };
        if plan.lengths_fit() { Ok(plan) } else { Err(DecodeError::Length) }
    }

    fn lengths_fit(&self) -> bool {
        if self.data_len > self.kind.data_len_max() || self.within_block >= BLOCK_SIZE {
            return false;
        }
        if self.within_block != 0 && (self.data_len == 0 || !self.kind.may_start_within()) {
            return false;
        }
        let head_len = self.kind.head_len(self.data_len, self.within_block);
        if self.kind.is_handshake() {
            (head_len..=HANDSHAKE_HEAD_LEN_MAX).contains(&self.head_len)
        } else {
            self.head_len == head_len
        }
    }

    /// Checks a whole header: its checksum first, then that its body can be read and agrees with the lengths.
    pub fn verify_head(&self, head: &[u8]) -> Result<(), DecodeError> {
        let covered = head.get(CRC_FROM..self.head_len).ok_or(DecodeError::Length)?;
        if crc32c(covered) != self.head_crc {
            return Err(DecodeError::HeadChecksum);
        }
        // An unknown authentication mode is no damage: the messenger answers it with a refusal.
        match self.message(head) {
            Ok(_) | Err(DecodeError::UnknownAuth) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Reads the body.
    fn message(&self, head: &[u8]) -> Result<Message, DecodeError> {
        let list = self.kind.list_at();
        let body = head.get(UNIT..list).ok_or(DecodeError::Length)?;
        let message = layout::read_body(self.kind, body)?;
        if !data_agrees(&message, self.data_len, self.within_block) {
            return Err(DecodeError::Length);
        }
        let padding = head.get(list + 4 * self.pieces()..self.head_len).ok_or(DecodeError::Length)?;
        if !self.kind.is_handshake() && padding.iter().any(|byte| *byte != 0) {
            return Err(DecodeError::Reserved);
        }
        Ok(message)
    }

    /// How many pieces the data has.
    pub fn pieces(&self) -> usize {
        piece_count(self.data_len as usize, self.within_block)
    }

    /// The list of checksums in a whole header.
    pub fn checksums<'a>(&self, head: &'a [u8]) -> impl ExactSizeIterator<Item = u32> + use<'a> {
        let list = self.kind.list_at();
        read_checksums(head.get(list..list + 4 * self.pieces()).unwrap_or_default())
    }

    /// The checksum of one piece.
    pub fn checksum(&self, head: &[u8], index: usize) -> Option<u32> {
        let at = self.kind.list_at() + 4 * index;
        head.get(at..)?.first_chunk::<4>().map(|bytes| u32::from_le_bytes(*bytes))
    }
}

/// Whether the data's length and place are what the message itself says.
fn data_agrees(message: &Message, data_len: u32, within_block: u32) -> bool {
    let place = |offset: u32| if data_len == 0 { 0 } else { offset % BLOCK_SIZE };
    let blocks = |count: u32| u64::from(count) * u64::from(BLOCK_SIZE) == u64::from(data_len);
    match message {
        Message::Op(op) if op.kind == OpKind::Write => data_len == op.len && within_block == place(op.offset),
        // The entries of an `Extents` reply are no object data and start at no place in a block.
        Message::OpReply(reply) => {
            (data_len == 0 || data_len == reply.len)
                && (within_block == 0 || within_block == place(reply.offset))
        }
        Message::RepWrite(write) if write.kind == OpKind::Write => blocks(write.count) && within_block == 0,
        Message::PeerPush(push) if push.kind == PushKind::Data => blocks(push.count) && within_block == 0,
        other => match other.kind() {
            Kind::Map | Kind::CommandReply | Kind::Boot | Kind::Report | Kind::Command => within_block == 0,
            _ => data_len == 0,
        },
    }
}

#[cfg(test)]
mod tests;
