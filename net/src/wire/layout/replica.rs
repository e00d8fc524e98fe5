//! Layouts of replication.

use super::op::op_kind;
use super::{ObjectLayout, OpIdLayout, PgLayout, VersionLayout, layout, zeroed};
use crate::wire::codec::DecodeError;
use crate::wire::op::OpKind;
use crate::wire::replica::{RepAck, RepStatus, RepWrite};
use loligo_config::id::Epoch;
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

layout! {
    /// `RepWrite`.
    RepWriteLayout(128) {
        pg: PgLayout,
        interval: U32,
        kind: U16,
        reserved: U16,
        version: VersionLayout,
        previous: VersionLayout,
        committed: VersionLayout,
        object: ObjectLayout,
        block: U32,
        count: U32,
        op: OpIdLayout,
        lowest_outstanding: U64,
        snap_seq: U64,
    }
}
const _: () = assert!(offset_of!(RepWriteLayout, version) == 16);
const _: () = assert!(offset_of!(RepWriteLayout, object) == 64);
const _: () = assert!(offset_of!(RepWriteLayout, op) == 96);

impl From<&RepWrite> for RepWriteLayout {
    fn from(write: &RepWrite) -> Self {
        Self {
            pg: write.pg.into(),
            interval: write.interval.0.into(),
            kind: (write.kind as u16).into(),
            version: write.version.into(),
            previous: write.previous.into(),
            committed: write.committed.into(),
            object: write.object.into(),
            block: write.block.into(),
            count: write.count.into(),
            op: write.op.into(),
            lowest_outstanding: write.lowest_outstanding.into(),
            snap_seq: write.snap_seq.into(),
            ..zeroed()
        }
    }
}

impl TryFrom<&RepWriteLayout> for RepWrite {
    type Error = DecodeError;

    fn try_from(write: &RepWriteLayout) -> Result<Self, DecodeError> {
        let kind = op_kind(write.kind.get())?;
        if !matches!(kind, OpKind::Write | OpKind::Discard | OpKind::Remove) {
            return Err(DecodeError::Value("kind of a replicated write"));
        }
        Ok(Self {
            pg: write.pg.into(),
            interval: Epoch(write.interval.get()),
            version: write.version.into(),
            previous: write.previous.into(),
            committed: write.committed.into(),
            object: write.object.try_into()?,
            kind,
            block: write.block.get(),
            count: write.count.get(),
            op: write.op.into(),
            lowest_outstanding: write.lowest_outstanding.get(),
            snap_seq: write.snap_seq.get(),
        })
    }
}

layout! {
    /// `RepAck`.
    RepAckLayout(48) {
        pg: PgLayout,
        interval: U32,
        status: U16,
        reserved: U16,
        version: VersionLayout,
        residence_ns: U32,
        device_ns: U32,
        space_credit: U64,
    }
}

impl From<&RepAck> for RepAckLayout {
    fn from(ack: &RepAck) -> Self {
        Self {
            pg: ack.pg.into(),
            interval: ack.interval.0.into(),
            status: (ack.status as u16).into(),
            version: ack.version.into(),
            residence_ns: ack.residence_ns.into(),
            device_ns: ack.device_ns.into(),
            space_credit: ack.space_credit.into(),
            ..zeroed()
        }
    }
}

impl TryFrom<&RepAckLayout> for RepAck {
    type Error = DecodeError;

    fn try_from(ack: &RepAckLayout) -> Result<Self, DecodeError> {
        let status = match ack.status.get() {
            0 => RepStatus::Durable,
            1 => RepStatus::StaleInterval,
            2 => RepStatus::Gap,
            3 => RepStatus::Failed,
            4 => RepStatus::Busy,
            5 => RepStatus::Damaged,
            6 => RepStatus::NotReady,
            _ => return Err(DecodeError::Value("status of a replicated write")),
        };
        Ok(Self {
            pg: ack.pg.into(),
            interval: Epoch(ack.interval.get()),
            version: ack.version.into(),
            status,
            residence_ns: ack.residence_ns.get(),
            device_ns: ack.device_ns.get(),
            space_credit: ack.space_credit.get(),
        })
    }
}
