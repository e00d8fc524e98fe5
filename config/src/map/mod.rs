//! The cluster map: one epoch-numbered value that says who is where, which PG is served by whom, and since when.
//!
//! Everybody gets it from a mon over the wire or from a disk, so it is untrusted input: [`ClusterMap::decode`] lets
//! only maps through that hold every rule of [`ClusterMap::check`]. `docs/map.md` has the design.

mod codec;
#[cfg(test)]
mod tests;

pub use codec::MapError;

use crate::id::{ClusterId, DeviceId, Epoch, Incarnation, OsdId, PgId, PoolId, SessionId};
use crate::limits::NAME_LEN_MAX;
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
    /// Fenced sessions, by session, each once.
    pub blocklist: Vec<BlocklistEntry>,
    /// The next pool id, so that ids are never reused.
    pub next_pool: PoolId,
}

/// Why a name is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// No name at all.
    #[error("the name is empty")]
    Empty,
    /// More than [`NAME_LEN_MAX`] bytes.
    #[error("the name is longer than {NAME_LEN_MAX} bytes")]
    TooLong,
    /// A character that a command line, a path or a terminal could take for something else.
    #[error("names are made of letters, digits, `-`, `_` and `.`, and begin with a letter or digit")]
    Character,
}

/// Checks the name of a pool, host, rack or device class.
///
/// # Errors
/// When it is empty, too long or holds other characters than ASCII letters, digits, `-`, `_` and `.`.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let first = name.bytes().next().ok_or(NameError::Empty)?;
    if name.len() > NAME_LEN_MAX {
        return Err(NameError::TooLong);
    }
    let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if first.is_ascii_alphanumeric() && name.bytes().all(known) { Ok(()) } else { Err(NameError::Character) }
}

impl ClusterMap {
    /// The first map of a cluster, epoch 1, with nothing in it. `modified` in seconds since 1970.
    pub fn new(cluster: ClusterId, auth: AuthMode, modified: u64) -> Self {
        Self {
            cluster,
            epoch: Epoch(1),
            modified,
            auth,
            next_session: SessionId(1),
            osds: BTreeMap::new(),
            pools: BTreeMap::new(),
            intervals: BTreeMap::new(),
            overrides: BTreeMap::new(),
            blocklist: Vec::new(),
            next_pool: PoolId(1),
        }
    }

    /// The PG's newest interval; `None` when there is no such PG.
    pub fn interval(&self, pg: PgId) -> Option<&Interval> {
        self.intervals.get(&pg)
    }

    /// The PG's acting set, primary first; empty when there is no such PG or it has no place.
    pub fn acting(&self, pg: PgId) -> &[OsdId] {
        self.intervals.get(&pg).map_or(&[], |interval| &interval.acting)
    }

    /// The PG's primary.
    pub fn primary(&self, pg: PgId) -> Option<OsdId> {
        self.acting(pg).first().copied()
    }

    /// Whether the PG may serve: its acting set has at least `min_size` members and all of them are up.
    pub fn pg_serves(&self, pg: PgId) -> bool {
        let Some(pool) = self.pools.get(&pg.pool) else { return false };
        let acting = self.acting(pg);
        !acting.is_empty()
            && acting.len() >= usize::from(pool.min_size)
            && acting.iter().all(|osd| self.is_up(*osd))
    }

    /// Whether the OSD is known and up.
    pub fn is_up(&self, osd: OsdId) -> bool {
        self.osds.get(&osd).is_some_and(|osd| osd.up)
    }

    /// Whether the session is on the blocklist.
    pub fn is_fenced(&self, session: SessionId) -> bool {
        self.blocklist.binary_search_by_key(&session, |entry| entry.session).is_ok()
    }

    /// The pool with this name.
    pub fn pool_by_name(&self, name: &str) -> Option<&Pool> {
        self.pools.values().find(|pool| pool.name == name)
    }

    /// The ids of all PGs of a pool, in order.
    pub fn pgs_of(pool: &Pool) -> impl Iterator<Item = PgId> + use<> {
        let id = pool.id;
        (0..pool.pg_count).map(move |index| PgId { pool: id, index })
    }
}
