//! Layouts of peering.

use super::{ObjectLayout, OpIdLayout, PgLayout, VersionLayout, flag, layout, zeroed};
use crate::wire::codec::DecodeError;
use crate::wire::peering::{
    PeerActivate, PeerFetch, PeerInfo, PeerPush, PeerPushAck, PeerPushDone, PeerQuery, PushKind,
};
use loligo_config::id::Epoch;
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

layout! {
    /// `PeerQuery`.
    PeerQueryLayout(12) { pg: PgLayout, interval: U32, }
}

impl From<&PeerQuery> for PeerQueryLayout {
    fn from(query: &PeerQuery) -> Self {
        Self { pg: query.pg.into(), interval: query.interval.0.into() }
    }
}

impl TryFrom<&PeerQueryLayout> for PeerQuery {
    type Error = DecodeError;

    fn try_from(query: &PeerQueryLayout) -> Result<Self, DecodeError> {
        Ok(Self { pg: query.pg.into(), interval: Epoch(query.interval.get()) })
    }
}

layout! {
    /// `PeerInfo`.
    PeerInfoLayout(64) {
        pg: PgLayout,
        interval: U32,
        activated: U32,
        last: VersionLayout,
        committed: VersionLayout,
        space_credit: U64,
        incomplete: u8,
        reserved: [u8; 7],
    }
}

impl From<&PeerInfo> for PeerInfoLayout {
    fn from(info: &PeerInfo) -> Self {
        Self {
            pg: info.pg.into(),
            interval: info.interval.0.into(),
            activated: info.activated.0.into(),
            last: info.last.into(),
            committed: info.committed.into(),
            space_credit: info.space_credit.into(),
            incomplete: u8::from(info.incomplete),
            ..zeroed()
        }
    }
}

impl TryFrom<&PeerInfoLayout> for PeerInfo {
    type Error = DecodeError;

    fn try_from(info: &PeerInfoLayout) -> Result<Self, DecodeError> {
        Ok(Self {
            pg: info.pg.into(),
            interval: Epoch(info.interval.get()),
            activated: Epoch(info.activated.get()),
            last: info.last.into(),
            committed: info.committed.into(),
            incomplete: flag(info.incomplete)?,
            space_credit: info.space_credit.get(),
        })
    }
}

layout! {
    /// `PeerFetch`.
    PeerFetchLayout(32) { pg: PgLayout, interval: U32, reserved: U32, since: VersionLayout, }
}

impl From<&PeerFetch> for PeerFetchLayout {
    fn from(fetch: &PeerFetch) -> Self {
        let since = fetch.since.into();
        Self { pg: fetch.pg.into(), interval: fetch.interval.0.into(), since, ..zeroed() }
    }
}

impl TryFrom<&PeerFetchLayout> for PeerFetch {
    type Error = DecodeError;

    fn try_from(fetch: &PeerFetchLayout) -> Result<Self, DecodeError> {
        let interval = Epoch(fetch.interval.get());
        Ok(Self { pg: fetch.pg.into(), interval, since: fetch.since.into() })
    }
}

layout! {
    /// `PeerPush`.
    PeerPushLayout(128) {
        pg: PgLayout,
        interval: U32,
        number: U32,
        version: VersionLayout,
        previous: VersionLayout,
        object: ObjectLayout,
        block: U32,
        count: U32,
        op: OpIdLayout,
        lowest_outstanding: U64,
        snap_seq: U64,
        kind: U16,
        reserved: [u8; 14],
    }
}
const _: () = assert!(offset_of!(PeerPushLayout, object) == 48);
const _: () = assert!(offset_of!(PeerPushLayout, op) == 80);
const _: () = assert!(offset_of!(PeerPushLayout, kind) == 112);

impl From<&PeerPush> for PeerPushLayout {
    fn from(push: &PeerPush) -> Self {
        Self {
            pg: push.pg.into(),
            interval: push.interval.0.into(),
            number: push.number.into(),
            version: push.version.into(),
            previous: push.previous.into(),
            object: push.object.into(),
            block: push.block.into(),
            count: push.count.into(),
            op: push.op.into(),
            lowest_outstanding: push.lowest_outstanding.into(),
            snap_seq: push.snap_seq.into(),
            kind: (push.kind as u16).into(),
            ..zeroed()
        }
    }
}

impl TryFrom<&PeerPushLayout> for PeerPush {
    type Error = DecodeError;

    fn try_from(push: &PeerPushLayout) -> Result<Self, DecodeError> {
        let kind = match push.kind.get() {
            1 => PushKind::Data,
            2 => PushKind::Free,
            3 => PushKind::Result,
            _ => return Err(DecodeError::Value("kind of a push")),
        };
        Ok(Self {
            pg: push.pg.into(),
            interval: Epoch(push.interval.get()),
            number: push.number.get(),
            kind,
            version: push.version.into(),
            previous: push.previous.into(),
            object: push.object.try_into()?,
            block: push.block.get(),
            count: push.count.get(),
            op: push.op.into(),
            lowest_outstanding: push.lowest_outstanding.get(),
            snap_seq: push.snap_seq.get(),
        })
    }
}

layout! {
    /// `PeerPushAck`.
    PeerPushAckLayout(20) { pg: PgLayout, interval: U32, number: U32, stored: u8, reserved: [u8; 3], }
}

impl From<&PeerPushAck> for PeerPushAckLayout {
    fn from(ack: &PeerPushAck) -> Self {
        Self {
            pg: ack.pg.into(),
            interval: ack.interval.0.into(),
            number: ack.number.into(),
            stored: u8::from(ack.stored),
            ..zeroed()
        }
    }
}

impl TryFrom<&PeerPushAckLayout> for PeerPushAck {
    type Error = DecodeError;

    fn try_from(ack: &PeerPushAckLayout) -> Result<Self, DecodeError> {
        let interval = Epoch(ack.interval.get());
        Ok(Self { pg: ack.pg.into(), interval, number: ack.number.get(), stored: flag(ack.stored)? })
    }
}

layout! {
    /// `PeerPushDone`.
    PeerPushDoneLayout(36) {
        pg: PgLayout,
        interval: U32,
        count: U32,
        last: VersionLayout,
        incomplete: u8,
        reserved: [u8; 3],
    }
}

impl From<&PeerPushDone> for PeerPushDoneLayout {
    fn from(done: &PeerPushDone) -> Self {
        Self {
            pg: done.pg.into(),
            interval: done.interval.0.into(),
            count: done.count.into(),
            last: done.last.into(),
            incomplete: u8::from(done.incomplete),
            ..zeroed()
        }
    }
}

impl TryFrom<&PeerPushDoneLayout> for PeerPushDone {
    type Error = DecodeError;

    fn try_from(done: &PeerPushDoneLayout) -> Result<Self, DecodeError> {
        Ok(Self {
            pg: done.pg.into(),
            interval: Epoch(done.interval.get()),
            count: done.count.get(),
            last: done.last.into(),
            incomplete: flag(done.incomplete)?,
        })
    }
}

layout! {
    /// `PeerActivate` and `PeerActivated`.
    PeerActivateLayout(32) { pg: PgLayout, interval: U32, reserved: U32, last: VersionLayout, }
}

impl From<&PeerActivate> for PeerActivateLayout {
    fn from(activate: &PeerActivate) -> Self {
        let last = activate.last.into();
        Self { pg: activate.pg.into(), interval: activate.interval.0.into(), last, ..zeroed() }
    }
}

impl TryFrom<&PeerActivateLayout> for PeerActivate {
    type Error = DecodeError;

    fn try_from(activate: &PeerActivateLayout) -> Result<Self, DecodeError> {
        let interval = Epoch(activate.interval.get());
        Ok(Self { pg: activate.pg.into(), interval, last: activate.last.into() })
    }
}
