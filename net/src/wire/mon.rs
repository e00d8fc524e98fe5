//! The mon: maps, boots, reports and admin commands.

use loligo_config::id::{DeviceId, Epoch, Incarnation, OsdId, PgId};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// → mon: send every map newer than `have`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subscribe {
    /// The newest map that the sender has.
    pub have: Epoch,
}

/// mon →: a map follows as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Map {
    /// Its epoch.
    pub epoch: Epoch,
}

/// OSD → mon; `BootInfo` follows as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The OSD.
    pub osd: OsdId,
    /// Which start.
    pub incarnation: Incarnation,
}

/// What an OSD says of itself when it starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootInfo {
    /// Its device.
    pub device: DeviceId,
    /// Where each of its reactors is reached.
    pub addresses: Vec<SocketAddr>,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Host name in the failure-domain tree.
    pub host: String,
    /// Rack name in the failure-domain tree.
    pub rack: String,
    /// Device class.
    pub device_class: String,
    /// The newest map on its own disk: the mon's must not be older.
    pub newest_map: Epoch,
}

/// Whether a boot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u16)]
pub enum BootStatus {
    /// The map from `epoch` on has it as up.
    #[error("taken")]
    Taken = 0,
    /// Another device is known under this OSD id.
    #[error("this OSD id belongs to another device")]
    OtherDevice = 1,
    /// This device is known under another OSD id.
    #[error("this device belongs to another OSD id")]
    OtherId = 2,
    /// Another process with this id is up.
    #[error("an OSD with this id is running already")]
    Running = 3,
    /// The mon's map is older than the OSD's: the mon was restored from an older backup.
    #[error("the mon's map is older than this OSD's")]
    OldMon = 4,
    /// The boot message could not be read, or holds values out of range.
    #[error("invalid boot message")]
    Invalid = 5,
}

/// mon → OSD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootReply {
    /// How it went.
    pub status: BootStatus,
    /// The epoch that has it, or the mon's newest.
    pub epoch: Epoch,
}

/// OSD → mon, every second; `OsdReport` follows as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// The OSD.
    pub osd: OsdId,
    /// Which start.
    pub incarnation: Incarnation,
    /// The newest map that every core of it has taken: what this one fences is served there no more.
    pub epoch: Epoch,
}

/// The state of one PG on its primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PgState {
    /// A member is missing: it does not serve.
    Down,
    /// The members agree on the tail.
    Peering,
    /// It cannot choose: a member's history is broken.
    Incomplete,
    /// It serves with all copies.
    Active,
}

/// One PG as its primary sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PgReport {
    /// The PG.
    pub pg: PgId,
    /// Its state.
    pub state: PgState,
    /// Objects in it.
    pub objects: u64,
    /// Bytes of data in it, one copy.
    pub bytes: u64,
}

/// An OSD's state for `status` and `osd df`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OsdReport {
    /// Bytes of the device in use, data and bookkeeping.
    pub used: u64,
    /// Bytes of data.
    pub data: u64,
    /// Bytes of the device.
    pub capacity: u64,
    /// Client ops since start: reads, writes, bytes read, bytes written.
    pub reads: u64,
    /// See `reads`.
    pub writes: u64,
    /// See `reads`.
    pub bytes_read: u64,
    /// See `reads`.
    pub bytes_written: u64,
    /// The PGs that it is primary of; a large OSD sends them in turns, so that a report stays below 64 KiB.
    pub pgs: Vec<PgReport>,
    /// PGs that it has a copy of.
    pub pg_count: u32,
    /// What somebody must look at, in words: `device failed: …`.
    pub problems: Vec<String>,
}

/// OSD → mon: a peer does not answer heartbeats, or its connection closed and cannot be made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Who does not answer.
    pub osd: OsdId,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// For how long, in milliseconds.
    pub silent_ms: u32,
}

/// An admin command; JSON follows as data (`mon::command` documents the verbs).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Brought back by the reply.
    pub number: u64,
}

/// Its answer; JSON follows as data: `{"ok": …}` or `{"error": {"code": …, "message": …}}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandReply {
    /// The command.
    pub number: u64,
    /// Epoch in which its effect is seen.
    pub epoch: Epoch,
}
