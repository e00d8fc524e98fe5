//! The cluster map: one epoch-numbered value that says who is where, which PG is served by whom, and since when.

use crate::id::{ClusterId, DeviceId, Epoch, Incarnation, OsdId, PgId, PoolId, SessionId};
use crate::pool::Pool;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// How peers prove who they are (DESIGN section 9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AuthMode {
    /// Nothing is proven beyond cluster, role and id. Shown in health; loopback only unless forced.
    #[default]
    None,
}

/// One OSD as the map knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Osd {
    /// Its id.
    pub id: OsdId,
    /// The device it was made on; another device with the same OSD id is refused.
    pub device: DeviceId,
    /// Which start of the daemon this entry speaks of.
    pub incarnation: Incarnation,
    /// Whether it is running and reachable.
    pub up: bool,
    /// Whether data is placed on it.
    pub is_in: bool,
    /// Where each of its reactors is reached, by core. One port may serve several cores: the handshake names one.
    pub addresses: Vec<SocketAddr>,
    /// Placement weight in units of 1/65536 TiB; never 0 for an OSD that is in.
    pub weight: u32,
    /// Host name in the failure-domain tree.
    pub host: String,
    /// Rack name in the failure-domain tree.
    pub rack: String,
    /// `nvme`, `ssd`, `hdd` or what the operator calls it.
    pub device_class: String,
    /// Capacity of its device in bytes.
    pub capacity: u64,
}

/// The newest interval of one PG: its acting set, fixed since `since`. Recorded before the PG serves in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// First epoch of the interval.
    pub since: Epoch,
    /// The acting set, primary first.
    pub acting: Vec<OsdId>,
}

/// A session that no OSD serves any more. A session, never an address (DESIGN section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlocklistEntry {
    /// The fenced session.
    pub session: SessionId,
    /// The epoch in which the entry was made.
    pub since: Epoch,
}

/// The whole map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterMap {
    /// The cluster.
    pub cluster: ClusterId,
    /// This version.
    pub epoch: Epoch,
    /// Seconds since 1970 when this version was made: for people, never for a decision.
    pub modified: u64,
    /// Authentication mode.
    pub auth: AuthMode,
    /// Sessions below this one and in no one's hands were assigned before this map; the next id to assign is not lower.
    pub next_session: SessionId,
    /// All OSDs, by id.
    pub osds: BTreeMap<OsdId, Osd>,
    /// All pools, by id.
    pub pools: BTreeMap<PoolId, Pool>,
    /// The newest interval of every PG.
    pub intervals: BTreeMap<PgId, Interval>,
    /// PGs placed by hand.
    pub overrides: BTreeMap<PgId, Vec<OsdId>>,
    /// Fenced sessions.
    pub blocklist: Vec<BlocklistEntry>,
    /// The next pool id, so that ids are never reused.
    pub next_pool: PoolId,
}
