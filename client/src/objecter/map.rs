//! New maps: what they change for ops that are out or wait.

use super::Objecter;
use super::link::Target;
use super::op::ObjectOp;
use super::pg::PgQueue;
use super::wire::Wire;
use loligo_config::id::{CoreId, PgId};
use loligo_config::map::ClusterMap;
use loligo_config::placement;
use std::sync::Arc;

/// The op's PG; `None` when the map has no such pool, or the pool no such PG.
pub(super) fn pg_of(map: &ClusterMap, op: &ObjectOp) -> Option<PgId> {
    let pool = map.pools.get(&op.object.pool)?;
    match op.pg {
        None => Some(placement::object_to_pg(pool, &op.object)),
        Some(index) => (index < pool.pg_count).then_some(PgId { pool: pool.id, index }),
    }
}

/// Who serves the PG by this map; `None` when nobody does. The primary alone decides whether the PG is active.
fn target_of(map: &ClusterMap, pg: PgId) -> Option<Target> {
    let interval = map.intervals.get(&pg)?;
    let osd = map.osds.get(interval.acting.first()?).filter(|osd| osd.up)?;
    let cores = u16::try_from(osd.addresses.len()).unwrap_or(u16::MAX);
    Some(Target { osd: osd.id, incarnation: osd.incarnation, since: interval.since, cores })
}

/// An empty queue for a PG that was not used before.
pub(super) fn new_queue(map: &ClusterMap, pg: PgId) -> PgQueue {
    let mut queue = PgQueue::default();
    queue.target = target_of(map, pg);
    queue
}

impl<O: Copy> Objecter<O> {
    /// Takes a map from the mon: never an older one, never another cluster's (RELIABILITY F15, F27).
    pub(super) fn take_map<W: Wire>(&mut self, bytes: &[u8], wire: &mut W) {
        let Ok(map) = ClusterMap::decode(bytes) else {
            tracing::warn!("the mon sent a map that cannot be read");
            return;
        };
        if self.map.as_ref().is_some_and(|have| have.cluster != map.cluster || have.epoch >= map.epoch) {
            return;
        }
        let map = Arc::new(map);
        self.map = Some(Arc::clone(&map));
        wire.set_epoch(map.epoch);
        self.mon.release(map.epoch);
        let session = self.session();
        if map.blocklist.iter().any(|entry| Some(entry.session) == session) {
            self.fence();
            return;
        }
        self.follow_links(&map, wire);
        self.follow_pgs(&map);
        self.place_ops(&map);
    }

    /// Connections to OSDs that have moved or started anew are of no use; those that failed are tried again at once.
    fn follow_links<W: Wire>(&mut self, map: &ClusterMap, wire: &mut W) {
        for index in 0..self.links.len() {
            match self.links[index].connection() {
                Some(connection) if self.links[index].is_moved(map) => {
                    wire.close(connection);
                    self.link_down(index);
                    self.links[index].reset();
                }
                Some(_) => {}
                None => self.links[index].reset(),
            }
        }
    }

    /// Ops that are out at another primary, or in an older interval, are sent again.
    fn follow_pgs(&mut self, map: &ClusterMap) {
        let mut changed = Vec::new();
        for (pg, queue) in &mut self.pgs {
            let target = target_of(map, *pg);
            queue.wake();
            if target == queue.target {
                continue;
            }
            let same_start = |a: Target, b: Target| (a.osd, a.incarnation) == (b.osd, b.incarnation);
            if !target.zip(queue.target).is_some_and(|(new, old)| same_start(new, old)) {
                queue.core = CoreId(0);
            }
            queue.target = target;
            changed.push(*pg);
        }
        for slot in self.slots_where(|op| op.link.is_some() && op.pg.is_some_and(|pg| changed.contains(&pg)))
        {
            self.take_back(slot);
        }
    }

    /// Ops whose PG is not known yet, or is another one after a split, go to their place.
    fn place_ops(&mut self, map: &ClusterMap) {
        self.unplaced.clear();
        for slot in self.slots_where(|_| true) {
            let Some(op) = self.ops.get(slot) else { continue };
            let pg = pg_of(map, &op.request);
            if op.pg.is_some() && op.pg == pg {
                continue;
            }
            self.take_back(slot);
            self.leave_pg(slot);
            self.place(slot);
        }
    }

    fn leave_pg(&mut self, slot: usize) {
        let op = &mut self.ops[slot];
        let Some(pg) = op.pg.take() else { return };
        let Some(queue) = self.pgs.get_mut(&pg) else { return };
        queue.forget(op.number);
        queue.returned(slot);
        queue.ready.retain(|other| *other != slot);
        if queue.ready.is_empty() {
            self.active.remove(&pg);
        }
    }
}
