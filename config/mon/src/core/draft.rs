//! The next map while it is being made.

use loligo_config::id::{OsdId, PgId, PoolId, SessionId};
use loligo_config::map::{BlocklistEntry, ClusterMap, Interval, Osd};
use loligo_config::placement;
use loligo_config::pool::Pool;
use loligo_reactor::env::Instant;
use std::collections::BTreeSet;

/// One change of the map, already checked.
#[derive(Debug)]
pub(crate) enum Change {
    /// An OSD is up.
    Boot(Box<Osd>),
    /// An OSD is down.
    Down(OsdId),
    /// A new pool; its id and epoch are set here.
    PoolCreate(Pool),
    /// A pool goes, with its PGs.
    PoolRemove(PoolId),
    /// How many members of a PG are enough to serve.
    PoolMinSize(PoolId, u8),
    /// A session is fenced.
    Fence(SessionId),
    /// A session is fenced no more.
    Unfence(SessionId),
}

/// The next map: epoch, intervals and counters are set when it is closed.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) map: ClusterMap,
    /// When it must be closed.
    pub(super) due: Instant,
    /// How many changes it has.
    pub(super) changes: u32,
    came_up: BTreeSet<OsdId>,
}

impl Draft {
    pub(super) fn new(map: ClusterMap, due: Instant) -> Self {
        Self { map, due, changes: 0, came_up: BTreeSet::new() }
    }

    pub(super) fn apply(&mut self, change: Change) {
        self.changes += 1;
        match change {
            Change::Boot(osd) => {
                self.came_up.insert(osd.id);
                self.map.osds.insert(osd.id, *osd);
            }
            Change::Down(osd) => {
                // Also when it came up in this very draft: whoever had it as up before must learn of the break.
                let entry = self.map.osds.get_mut(&osd).expect("only a known OSD is marked down");
                entry.up = false;
            }
            Change::PoolCreate(mut pool) => {
                pool.id = self.map.next_pool;
                pool.created = self.map.epoch.next();
                self.map.next_pool =
                    PoolId(pool.id.0.checked_add(1).expect("a cluster makes fewer than 2^32 pools"));
                self.map.pools.insert(pool.id, pool);
            }
            Change::PoolRemove(pool) => {
                self.map.pools.remove(&pool);
                self.map.intervals.retain(|pg, _| pg.pool != pool);
                self.map.overrides.retain(|pg, _| pg.pool != pool);
            }
            Change::PoolMinSize(pool, min_size) => {
                self.map.pools.get_mut(&pool).expect("only a known pool is changed").min_size = min_size;
            }
            Change::Fence(session) => {
                let since = self.map.epoch.next();
                if let Err(at) = self.map.blocklist.binary_search_by_key(&session, |entry| entry.session) {
                    self.map.blocklist.insert(at, BlocklistEntry { session, since });
                }
            }
            Change::Unfence(session) => self.map.blocklist.retain(|entry| entry.session != session),
        }
    }

    /// Sets the epoch and records the intervals.
    pub(super) fn close(
        mut self,
        before: &ClusterMap,
        session_limit: SessionId,
        unix_seconds: u64,
    ) -> ClusterMap {
        self.map.epoch = before.epoch.next();
        self.map.modified = unix_seconds;
        self.map.next_session = session_limit;
        let pools: Vec<Pool> = self.map.pools.values().cloned().collect();
        for pool in &pools {
            self.record(pool);
        }
        self.map
    }

    /// Gives the pool's PGs their members and begins new intervals: where the members change, and where one comes up,
    /// since the members must then agree on the tail before they serve.
    fn record(&mut self, pool: &Pool) {
        let epoch = self.map.epoch;
        let movable = |map: &ClusterMap, pg: PgId| map.acting(pg).len() < usize::from(pool.min_size);
        let places = if ClusterMap::pgs_of(pool).any(|pg| movable(&self.map, pg)) {
            placement::place_pool(&self.map, pool)
        } else {
            Vec::new()
        };
        for (index, pg) in ClusterMap::pgs_of(pool).enumerate() {
            // A PG with enough members to serve may hold data: its members stay, since data does not follow by itself.
            let place = places.get(index).filter(|_| movable(&self.map, pg));
            let recorded = self.map.intervals.get(&pg);
            let acting = place.cloned().unwrap_or_else(|| self.map.acting(pg).to_vec());
            let same = recorded.is_some_and(|interval| interval.acting == acting);
            if !same || acting.iter().any(|osd| self.came_up.contains(osd)) {
                self.map.intervals.insert(pg, Interval { since: epoch, acting });
            }
        }
    }
}
