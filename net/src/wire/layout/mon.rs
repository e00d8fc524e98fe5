//! Layouts of the messages to and from the mon.

use super::{layout, zeroed};
use crate::wire::codec::DecodeError;
use crate::wire::mon::{Boot, BootReply, BootStatus, Command, CommandReply, Failure, Map, Report, Subscribe};
use loligo_config::id::{Epoch, Incarnation, OsdId};
use std::mem::size_of;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

layout! {
    /// `Subscribe` and `Map`.
    EpochLayout(4) { epoch: U32, }
}

impl From<&Subscribe> for EpochLayout {
    fn from(subscribe: &Subscribe) -> Self {
        Self { epoch: subscribe.have.0.into() }
    }
}

impl TryFrom<&EpochLayout> for Subscribe {
    type Error = DecodeError;

    fn try_from(layout: &EpochLayout) -> Result<Self, DecodeError> {
        Ok(Self { have: Epoch(layout.epoch.get()) })
    }
}

impl From<&Map> for EpochLayout {
    fn from(map: &Map) -> Self {
        Self { epoch: map.epoch.0.into() }
    }
}

impl TryFrom<&EpochLayout> for Map {
    type Error = DecodeError;

    fn try_from(layout: &EpochLayout) -> Result<Self, DecodeError> {
        Ok(Self { epoch: Epoch(layout.epoch.get()) })
    }
}

layout! {
    /// `Boot`.
    StartLayout(16) { incarnation: U64, osd: U32, reserved: U32, }
}

impl From<&Boot> for StartLayout {
    fn from(boot: &Boot) -> Self {
        Self { incarnation: boot.incarnation.0.into(), osd: boot.osd.0.into(), ..zeroed() }
    }
}

impl TryFrom<&StartLayout> for Boot {
    type Error = DecodeError;

    fn try_from(layout: &StartLayout) -> Result<Self, DecodeError> {
        Ok(Self { osd: OsdId(layout.osd.get()), incarnation: Incarnation(layout.incarnation.get()) })
    }
}

layout! {
    /// `Report`.
    ReportLayout(16) { incarnation: U64, osd: U32, epoch: U32, }
}

impl From<&Report> for ReportLayout {
    fn from(report: &Report) -> Self {
        Self {
            incarnation: report.incarnation.0.into(),
            osd: report.osd.0.into(),
            epoch: report.epoch.0.into(),
        }
    }
}

impl TryFrom<&ReportLayout> for Report {
    type Error = DecodeError;

    fn try_from(layout: &ReportLayout) -> Result<Self, DecodeError> {
        Ok(Self {
            osd: OsdId(layout.osd.get()),
            incarnation: Incarnation(layout.incarnation.get()),
            epoch: Epoch(layout.epoch.get()),
        })
    }
}

layout! {
    /// `BootReply`.
    BootReplyLayout(8) { status: U16, reserved: U16, epoch: U32, }
}

impl From<&BootReply> for BootReplyLayout {
    fn from(reply: &BootReply) -> Self {
        Self { status: (reply.status as u16).into(), epoch: reply.epoch.0.into(), ..zeroed() }
    }
}

impl TryFrom<&BootReplyLayout> for BootReply {
    type Error = DecodeError;

    fn try_from(layout: &BootReplyLayout) -> Result<Self, DecodeError> {
        let status = match layout.status.get() {
            0 => BootStatus::Taken,
            1 => BootStatus::OtherDevice,
            2 => BootStatus::OtherId,
            3 => BootStatus::Running,
            4 => BootStatus::OldMon,
            5 => BootStatus::Invalid,
            _ => return Err(DecodeError::Value("status of a boot")),
        };
        Ok(Self { status, epoch: Epoch(layout.epoch.get()) })
    }
}

layout! {
    /// `Failure`.
    FailureLayout(16) { incarnation: U64, osd: U32, silent_ms: U32, }
}

impl From<&Failure> for FailureLayout {
    fn from(failure: &Failure) -> Self {
        Self {
            incarnation: failure.incarnation.0.into(),
            osd: failure.osd.0.into(),
            silent_ms: failure.silent_ms.into(),
        }
    }
}

impl TryFrom<&FailureLayout> for Failure {
    type Error = DecodeError;

    fn try_from(layout: &FailureLayout) -> Result<Self, DecodeError> {
        let incarnation = Incarnation(layout.incarnation.get());
        Ok(Self { osd: OsdId(layout.osd.get()), incarnation, silent_ms: layout.silent_ms.get() })
    }
}

layout! {
    /// `Command`.
    CommandLayout(8) { number: U64, }
}

impl From<&Command> for CommandLayout {
    fn from(command: &Command) -> Self {
        Self { number: command.number.into() }
    }
}

impl TryFrom<&CommandLayout> for Command {
    type Error = DecodeError;

    fn try_from(layout: &CommandLayout) -> Result<Self, DecodeError> {
        Ok(Self { number: layout.number.get() })
    }
}

layout! {
    /// `CommandReply`.
    CommandReplyLayout(16) { number: U64, epoch: U32, reserved: U32, }
}

impl From<&CommandReply> for CommandReplyLayout {
    fn from(reply: &CommandReply) -> Self {
        Self { number: reply.number.into(), epoch: reply.epoch.0.into(), ..zeroed() }
    }
}

impl TryFrom<&CommandReplyLayout> for CommandReply {
    type Error = DecodeError;

    fn try_from(layout: &CommandReplyLayout) -> Result<Self, DecodeError> {
        Ok(Self { number: layout.number.get(), epoch: Epoch(layout.epoch.get()) })
    }
}
