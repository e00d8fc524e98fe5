//! Layouts of client operations.

use super::{ObjectLayout, OpIdLayout, PgLayout, VersionLayout, layout, zeroed};
use crate::wire::codec::DecodeError;
use crate::wire::op::{
    Guard, Notify, OpKind, OpReply, OpRequest, OpStatus, REPLICA_LEGS_MAX, ReplicaLeg, Residence,
};
use loligo_config::id::{CoreId, OsdId};
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const GUARD_ANY: u8 = 0;
const GUARD_VERSION: u8 = 1;

/// The op kind with this number.
pub(super) fn op_kind(number: u16) -> Result<OpKind, DecodeError> {
    Ok(match number {
        1 => OpKind::Read,
        2 => OpKind::Write,
        3 => OpKind::Discard,
        4 => OpKind::WriteZeroes,
        5 => OpKind::Remove,
        6 => OpKind::Extents,
        7 => OpKind::Watch,
        8 => OpKind::Unwatch,
        9 => OpKind::List,
        10 => OpKind::Watchers,
        _ => return Err(DecodeError::Value("op kind")),
    })
}

layout! {
    /// `Op`.
    OpLayout(128) {
        pg: PgLayout,
        object: ObjectLayout,
        kind: U16,
        guard: u8,
        attempt: u8,
        offset: U32,
        len: U32,
        client_queue_ns: U32,
        op: OpIdLayout,
        lowest_outstanding: U64,
        snap_seq: U64,
        guard_version: VersionLayout,
        reserved: [u8; 32],
    }
}
const _: () = assert!(offset_of!(OpLayout, kind) == 32);
const _: () = assert!(offset_of!(OpLayout, op) == 48);
const _: () = assert!(offset_of!(OpLayout, guard_version) == 80);

impl From<&OpRequest> for OpLayout {
    fn from(op: &OpRequest) -> Self {
        let (guard, guard_version) = match op.guard {
            Guard::Any => (GUARD_ANY, zeroed()),
            Guard::Version(version) => (GUARD_VERSION, version.into()),
        };
        Self {
            pg: op.pg.into(),
            object: op.object.into(),
            kind: (op.kind as u16).into(),
            guard,
            attempt: op.attempt,
            offset: op.offset.into(),
            len: op.len.into(),
            client_queue_ns: op.client_queue_ns.into(),
            op: op.op.into(),
            lowest_outstanding: op.lowest_outstanding.into(),
            snap_seq: op.snap_seq.into(),
            guard_version,
            ..zeroed()
        }
    }
}

impl TryFrom<&OpLayout> for OpRequest {
    type Error = DecodeError;

    fn try_from(op: &OpLayout) -> Result<Self, DecodeError> {
        let guard = match op.guard {
            GUARD_ANY => Guard::Any,
            GUARD_VERSION => Guard::Version(op.guard_version.into()),
            _ => return Err(DecodeError::Value("guard")),
        };
        Ok(Self {
            pg: op.pg.into(),
            object: op.object.try_into()?,
            kind: op_kind(op.kind.get())?,
            offset: op.offset.get(),
            len: op.len.get(),
            op: op.op.into(),
            lowest_outstanding: op.lowest_outstanding.get(),
            snap_seq: op.snap_seq.get(),
            guard,
            attempt: op.attempt,
            client_queue_ns: op.client_queue_ns.get(),
        })
    }
}

fn op_status(number: u16) -> Result<OpStatus, DecodeError> {
    Ok(match number {
        0 => OpStatus::Done,
        1 => OpStatus::StaleEpoch,
        2 => OpStatus::NotPrimary,
        3 => OpStatus::NotActive,
        4 => OpStatus::Busy,
        5 => OpStatus::VersionMismatch,
        6 => OpStatus::NoSpace,
        7 => OpStatus::Invalid,
        8 => OpStatus::Damaged,
        9 => OpStatus::MediaError,
        10 => OpStatus::Fenced,
        11 => OpStatus::SessionExpired,
        12 => OpStatus::StaleSnap,
        _ => return Err(DecodeError::Value("op status")),
    })
}

layout! {
    /// One replica's leg in an `OpReply`.
    ReplicaLegLayout(16) { osd: U32, leg_ns: U32, residence_ns: U32, device_ns: U32, }
}

impl From<ReplicaLeg> for ReplicaLegLayout {
    fn from(leg: ReplicaLeg) -> Self {
        Self {
            osd: leg.osd.0.into(),
            leg_ns: leg.leg_ns.into(),
            residence_ns: leg.residence_ns.into(),
            device_ns: leg.device_ns.into(),
        }
    }
}

impl From<ReplicaLegLayout> for ReplicaLeg {
    fn from(leg: ReplicaLegLayout) -> Self {
        Self {
            osd: OsdId(leg.osd.get()),
            leg_ns: leg.leg_ns.get(),
            residence_ns: leg.residence_ns.get(),
            device_ns: leg.device_ns.get(),
        }
    }
}

layout! {
    /// `OpReply`.
    OpReplyLayout(128) {
        op: OpIdLayout,
        status: U16,
        core: U16,
        copies: u8,
        reserved_24: [u8; 3],
        version: VersionLayout,
        offset: U32,
        len: U32,
        primary_ns: U32,
        submit_ns: U32,
        own_ns: U32,
        device_ns: U32,
        replicas: [ReplicaLegLayout; REPLICA_LEGS_MAX],
    }
}
const _: () = assert!(offset_of!(OpReplyLayout, version) == 24);
const _: () = assert!(offset_of!(OpReplyLayout, primary_ns) == 48);
const _: () = assert!(offset_of!(OpReplyLayout, replicas) == 64);

impl From<&OpReply> for OpReplyLayout {
    fn from(reply: &OpReply) -> Self {
        Self {
            op: reply.op.into(),
            status: (reply.status as u16).into(),
            core: reply.core.0.into(),
            copies: reply.copies,
            version: reply.version.into(),
            offset: reply.offset.into(),
            len: reply.len.into(),
            primary_ns: reply.residence.primary_ns.into(),
            submit_ns: reply.residence.submit_ns.into(),
            own_ns: reply.residence.own_ns.into(),
            device_ns: reply.residence.device_ns.into(),
            replicas: reply.residence.replicas.map(Into::into),
            ..zeroed()
        }
    }
}

impl TryFrom<&OpReplyLayout> for OpReply {
    type Error = DecodeError;

    fn try_from(reply: &OpReplyLayout) -> Result<Self, DecodeError> {
        Ok(Self {
            op: reply.op.into(),
            status: op_status(reply.status.get())?,
            version: reply.version.into(),
            offset: reply.offset.get(),
            len: reply.len.get(),
            core: CoreId(reply.core.get()),
            copies: reply.copies,
            residence: Residence {
                primary_ns: reply.primary_ns.get(),
                submit_ns: reply.submit_ns.get(),
                own_ns: reply.own_ns.get(),
                device_ns: reply.device_ns.get(),
                replicas: reply.replicas.map(Into::into),
            },
        })
    }
}

layout! {
    /// `Notify`.
    NotifyLayout(48) { pg: PgLayout, object: ObjectLayout, version: VersionLayout, }
}

impl From<&Notify> for NotifyLayout {
    fn from(notify: &Notify) -> Self {
        Self { pg: notify.pg.into(), object: notify.object.into(), version: notify.version.into() }
    }
}

impl TryFrom<&NotifyLayout> for Notify {
    type Error = DecodeError;

    fn try_from(notify: &NotifyLayout) -> Result<Self, DecodeError> {
        let object = notify.object.try_into()?;
        Ok(Self { pg: notify.pg.into(), object, version: notify.version.into() })
    }
}
