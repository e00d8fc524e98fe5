//! The map as bytes, and what a map must be to be believed.
//!
//! A header of 24 bytes, little-endian, and the map in postcard:
//!
//! | offset | bytes | what |
//! | --- | --- | --- |
//! | 0 | 4 | `LGMP` |
//! | 4 | 2 | format version, 1 |
//! | 6 | 2 | 0 |
//! | 8 | 8 | length of the body |
//! | 16 | 8 | XXH3-64 of the body |

use super::{ClusterMap, Interval, NameError, Osd, check_name};
use crate::id::{Epoch, OsdId, PgId, PoolId, SessionId};
use crate::limits::{
    BLOCKLIST_MAX, CLUSTER_PG_COUNT_MAX, CONTROL_DATA_LEN_MAX, OSDS_MAX, POOL_PG_COUNT_MAX, POOL_SIZE_MAX,
    POOLS_MAX, SHARDS_MAX,
};
use crate::pool::Pool;
use std::collections::BTreeSet;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: [u8; 4] = *b"LGMP";
const VERSION: u16 = 1;
const HEAD_LEN: usize = 24;

/// Why bytes are no map, or a map is not to be believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// Something else than a map, or cut off.
    #[error("this is not a cluster map, or it is cut off")]
    NotAMap,
    /// A format of another release.
    #[error("cluster map of format {found}; this program reads format {VERSION}")]
    Version {
        /// The format version found.
        found: u16,
    },
    /// The checksum is wrong, or the body cannot be read.
    #[error("the cluster map is damaged")]
    Damaged,
    /// More of something than a cluster may have.
    #[error("too many {what} in the cluster map: {found}, allowed {max}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// How many there may be.
        max: u64,
    },
    /// Epoch 0, a nil cluster id, or a counter that has fallen behind the ids in use.
    #[error("the cluster map's {what} is invalid")]
    Head {
        /// Which field.
        what: &'static str,
    },
    /// An OSD's entry.
    #[error("{osd} in the cluster map: {what}")]
    Osd {
        /// Which OSD.
        osd: OsdId,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A pool's entry.
    #[error("pool {pool} in the cluster map: {what}")]
    Pool {
        /// Which pool.
        pool: PoolId,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A PG's interval or override.
    #[error("PG {pg} in the cluster map: {what}")]
    Pg {
        /// Which PG.
        pg: PgId,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A name.
    #[error("a name in the cluster map: {0}")]
    Name(#[from] NameError),
    /// An entry of the blocklist.
    #[error("{session} on the cluster map's blocklist: {what}")]
    Blocklist {
        /// Which session.
        session: SessionId,
        /// What is wrong with it.
        what: &'static str,
    },
}

impl ClusterMap {
    /// The map as bytes.
    ///
    /// # Panics
    /// When the map breaks the rules of [`ClusterMap::check`]: a map that nobody would accept must not be made.
    pub fn encode(&self) -> Vec<u8> {
        if let Err(error) = self.check() {
            panic!("an invalid map must not leave its maker: {error}");
        }
        let body = postcard::to_stdvec(self).expect("memory is the only thing that postcard could lack");
        let mut bytes = Vec::with_capacity(HEAD_LEN + body.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&xxh3_64(&body).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Reads a map and checks everything in it. Total: any bytes give a map or an error.
    ///
    /// # Errors
    /// [`MapError`] says what is wrong.
    pub fn decode(bytes: &[u8]) -> Result<ClusterMap, MapError> {
        let (magic, rest) = bytes.split_first_chunk::<4>().ok_or(MapError::NotAMap)?;
        let (version, rest) = rest.split_first_chunk::<2>().ok_or(MapError::NotAMap)?;
        let (reserved, rest) = rest.split_first_chunk::<2>().ok_or(MapError::NotAMap)?;
        if *magic != MAGIC {
            return Err(MapError::NotAMap);
        }
        let version = u16::from_le_bytes(*version);
        if version != VERSION || *reserved != [0; 2] {
            return Err(MapError::Version { found: version });
        }
        let (len, rest) = rest.split_first_chunk::<8>().ok_or(MapError::NotAMap)?;
        let (check, body) = rest.split_first_chunk::<8>().ok_or(MapError::NotAMap)?;
        let (len, check) = (u64::from_le_bytes(*len), u64::from_le_bytes(*check));
        let len_max = u64::from(CONTROL_DATA_LEN_MAX);
        if len > len_max {
            return Err(MapError::TooMany { what: "bytes", found: len, max: len_max });
        }
        if len != body.len() as u64 || check != xxh3_64(body) {
            return Err(MapError::Damaged);
        }
        let (map, rest) = postcard::take_from_bytes::<ClusterMap>(body).map_err(|_| MapError::Damaged)?;
        if !rest.is_empty() {
            return Err(MapError::Damaged);
        }
        map.check()?;
        Ok(map)
    }

    /// Whether the map holds every rule: limits, names, references, counters.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self) -> Result<(), MapError> {
        self.check_head()?;
        self.check_osds()?;
        self.check_pools()?;
        self.check_pgs()?;
        self.check_blocklist()
    }

    fn check_head(&self) -> Result<(), MapError> {
        let counts = [
            ("OSDs", self.osds.len() as u64, OSDS_MAX as u64),
            ("pools", self.pools.len() as u64, POOLS_MAX as u64),
            ("PGs", self.intervals.len() as u64, CLUSTER_PG_COUNT_MAX),
            ("fenced sessions", self.blocklist.len() as u64, BLOCKLIST_MAX as u64),
        ];
        for (what, found, max) in counts {
            if found > max {
                return Err(MapError::TooMany { what, found, max });
            }
        }
        let head = |what| Err(MapError::Head { what });
        if self.epoch == Epoch(0) {
            return head("epoch");
        }
        if self.cluster.0.is_nil() {
            return head("cluster id");
        }
        if self.next_session == SessionId(0) {
            return head("next session");
        }
        let pool_last = self.pools.last_key_value().map_or(PoolId(0), |(id, _)| *id);
        if self.next_pool <= pool_last { head("next pool") } else { Ok(()) }
    }

    fn check_osds(&self) -> Result<(), MapError> {
        let mut devices = BTreeSet::new();
        for (id, osd) in &self.osds {
            check_osd(*id, osd)?;
            if !devices.insert(osd.device) {
                return Err(MapError::Osd { osd: *id, what: "its device is another OSD's" });
            }
        }
        Ok(())
    }

    fn check_pools(&self) -> Result<(), MapError> {
        let mut names = BTreeSet::new();
        for (id, pool) in &self.pools {
            let wrong = |what| Err(MapError::Pool { pool: *id, what });
            check_pool(*id, pool)?;
            if pool.created > self.epoch {
                return wrong("made in the future");
            }
            if !names.insert(&pool.name) {
                return wrong("its name is another pool's");
            }
        }
        Ok(())
    }

    fn check_pgs(&self) -> Result<(), MapError> {
        let pg_count: u64 = self.pools.values().map(|pool| u64::from(pool.pg_count)).sum();
        // Every interval is a PG of a pool (below) and keys are unique: equal counts mean that none is missing.
        if pg_count != self.intervals.len() as u64 {
            return Err(MapError::Head { what: "number of PGs" });
        }
        for (pg, interval) in &self.intervals {
            let pool = self.check_members(*pg, &interval.acting)?;
            let Interval { since, .. } = *interval;
            if since < pool.created || since > self.epoch {
                return Err(MapError::Pg { pg: *pg, what: "its interval lies outside the pool's life" });
            }
        }
        for (pg, members) in &self.overrides {
            self.check_members(*pg, members)?;
        }
        Ok(())
    }

    fn check_members(&self, pg: PgId, members: &[OsdId]) -> Result<&Pool, MapError> {
        let wrong = |what| Err(MapError::Pg { pg, what });
        let Some(pool) = self.pools.get(&pg.pool).filter(|pool| pg.index < pool.pg_count) else {
            return wrong("no such PG");
        };
        if members.len() > usize::from(pool.size) {
            return wrong("more members than copies");
        }
        for (at, member) in members.iter().enumerate() {
            if !self.osds.contains_key(member) {
                return wrong("a member does not exist");
            }
            if members.iter().take(at).any(|before| before == member) {
                return wrong("a member is named twice");
            }
        }
        Ok(pool)
    }

    fn check_blocklist(&self) -> Result<(), MapError> {
        let mut before = SessionId(0);
        for entry in &self.blocklist {
            let wrong = |what| Err(MapError::Blocklist { session: entry.session, what });
            if entry.session <= before {
                return wrong("out of order, or named twice");
            }
            if entry.session >= self.next_session {
                return wrong("never assigned");
            }
            if entry.since == Epoch(0) || entry.since > self.epoch {
                return wrong("fenced in the future");
            }
            before = entry.session;
        }
        Ok(())
    }
}

fn check_osd(id: OsdId, osd: &Osd) -> Result<(), MapError> {
    let wrong = |what| Err(MapError::Osd { osd: id, what });
    if osd.id != id || usize::try_from(id.0).map_or(true, |id| id >= OSDS_MAX) {
        return wrong("its id is invalid");
    }
    if osd.device.0.is_nil() || osd.incarnation.0 == 0 {
        return wrong("its device or incarnation is invalid");
    }
    if osd.addresses.is_empty() || osd.addresses.len() > SHARDS_MAX {
        return wrong("it has no address, or too many");
    }
    if osd.addresses.iter().any(|address| address.port() == 0 || address.ip().is_unspecified()) {
        return wrong("an address cannot be connected to");
    }
    if osd.is_in && osd.weight == 0 {
        return wrong("it is in without a weight");
    }
    check_name(&osd.host)?;
    check_name(&osd.rack)?;
    check_name(&osd.device_class)?;
    Ok(())
}

fn check_pool(id: PoolId, pool: &Pool) -> Result<(), MapError> {
    let wrong = |what| Err(MapError::Pool { pool: id, what });
    if pool.id != id || id == PoolId(0) {
        return wrong("its id is invalid");
    }
    if pool.size == 0 || pool.size > POOL_SIZE_MAX {
        return wrong("its size is out of range");
    }
    if pool.min_size == 0 || pool.min_size > pool.size {
        return wrong("its min_size is out of range");
    }
    if pool.pg_count == 0 || pool.pg_count > POOL_PG_COUNT_MAX {
        return wrong("its pg_count is out of range");
    }
    if pool.created == Epoch(0) {
        return wrong("made in epoch 0");
    }
    check_name(&pool.name)?;
    if let Some(class) = &pool.device_class {
        check_name(class)?;
    }
    Ok(())
}
