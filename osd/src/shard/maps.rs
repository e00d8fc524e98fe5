//! New maps, PGs that come and go, and reports.

use super::Shard;
use super::links::ShardMessage;
use crate::map_client::REPORT_INTERVAL;
use crate::pg::phase::Phase;
use crate::pg::{PerMember, Pg, PgEvent, View, ticket};
use crate::store::api::{Change, SubmitError, Transaction, WRITE_OVERHEAD};
use loligo_config::id::{ObjectVersion, OpId, OsdId, PgId};
use loligo_config::limits::{OP_BLOCKS_MAX, POOL_SIZE_MAX};
use loligo_config::map::{ClusterMap, Interval};
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::mon::{Failure, OsdReport, PgReport};
use loligo_reactor::env::{Instant, World};
use std::sync::Arc;

impl<W: World> Shard<W> {
    /// A map from the mon: for this shard and the others.
    pub(super) fn spread_map(&mut self, now: Instant, map: Arc<ClusterMap>) {
        self.links.publish(&map, self.settings.osd);
        self.on_map(now, map);
    }

    pub(super) fn on_map(&mut self, now: Instant, map: Arc<ClusterMap>) {
        if map.epoch <= self.epoch() {
            return;
        }
        self.messenger.set_epoch(map.epoch);
        for osd in map.osds.values() {
            self.messenger.set_incarnation(osd.id, osd.incarnation);
        }
        self.fenced = map.blocklist.iter().map(|entry| entry.session).collect();
        self.fenced.sort_unstable();
        self.messenger.set_fenced(self.fenced.iter().copied());
        self.forget_cores(&map);
        self.map = Some(Arc::clone(&map));
        self.make_new_pgs(&map);
        let wanted = self.peers_wanted(&map);
        for connection in self.peers.on_map(&map, &wanted, now) {
            self.messenger.close(connection);
        }
        for slot in 0..self.slots.len() {
            let Some(id) = self.slots[slot].as_ref().map(|entry| entry.pg.id()) else { continue };
            let view = self.view(&map, id);
            self.step(slot, now, PgEvent::Map(view));
            let is_pool_gone = !map.pools.contains_key(&id.pool) && id.pool < map.next_pool;
            if is_pool_gone {
                self.remove_pg(slot, id);
            }
        }
        self.links.note_taken(map.epoch);
    }

    /// What the mon is to know of this OSD's epochs.
    pub(super) fn note_epochs(&mut self, now: Instant) {
        if let Some(client) = self.map_client.as_mut().filter(|_| self.links.is_complete()) {
            client.note_promised(self.links.promised());
            client.note_taken(now, self.links.taken_by_all());
        }
    }

    /// A new start of an OSD may have put PGs that it had not stored yet on other cores.
    fn forget_cores(&mut self, map: &ClusterMap) {
        let Some(before) = &self.map else { return };
        let incarnation = |map: &ClusterMap, osd: OsdId| map.osds.get(&osd).map(|osd| osd.incarnation);
        for slot in self.slots.iter_mut().flatten() {
            slot.cores.retain(|(osd, _)| incarnation(before, *osd) == incarnation(map, *osd));
        }
    }

    fn make_new_pgs(&mut self, map: &ClusterMap) {
        let own = self.links.index();
        for (id, interval) in &map.intervals {
            let is_member = interval.acting.contains(&self.settings.osd);
            if is_member && !self.by_pg.contains_key(id) && self.links.owner(*id) == Some(own) {
                self.add_slot(*id);
            }
        }
    }

    fn peers_wanted(&self, map: &ClusterMap) -> Vec<OsdId> {
        let own = self.settings.osd;
        let mut wanted: Vec<_> = self
            .by_pg
            .keys()
            .filter_map(|id| map.interval(*id))
            .filter(|interval| interval.acting.first() == Some(&own))
            .flat_map(|interval| interval.acting.iter().copied())
            .filter(|osd| *osd != own)
            .collect();
        wanted.sort_unstable();
        wanted.dedup();
        wanted
    }

    fn view(&self, map: &ClusterMap, id: PgId) -> Option<View> {
        let Interval { since, acting } = map.interval(id)?;
        if acting.len() > usize::from(POOL_SIZE_MAX) {
            return None;
        }
        let acting: PerMember<OsdId> = acting.iter().copied().collect();
        // In an older map this OSD may be up as an earlier start of itself, whose promises are not this one's.
        let is_self_up = map
            .osds
            .get(&self.settings.osd)
            .is_some_and(|osd| osd.up && osd.incarnation == self.settings.incarnation);
        Some(View { since: *since, acting, complete: is_self_up && map.pg_serves(id) })
    }

    fn remove_pg(&mut self, slot: usize, id: PgId) {
        self.slots[slot] = None;
        self.by_pg.remove(&id);
        self.removing.push(id);
        self.go_on_removing();
    }

    /// Removes PGs of pools that are gone, as far as the store takes it now.
    pub(super) fn go_on_removing(&mut self) {
        let Self { removing, store, .. } = self;
        removing.retain(|id| {
            let Some(status) = store.pg(*id) else { return false };
            let transaction = Transaction {
                pg: *id,
                version: ObjectVersion::NONE,
                previous: status.last,
                op: OpId::default(),
                lowest_outstanding: 0,
                snap_seq: 0,
                change: Change::RemovePg,
            };
            // No slot has this number: its end is of no interest.
            let nobody = ticket::join((1 << 24) - 1, ticket::Kind::Meta, 0);
            match store.submit(transaction, nobody) {
                Ok(()) => {}
                Err(SubmitError::Busy | SubmitError::NoSpace) => return true,
                Err(error) => tracing::warn!(pg = %id, %error, "a PG of a removed pool stays on the device"),
            }
            false
        });
    }

    // ------------------------------------------------------------------------------------------ reports

    pub(super) fn report(&mut self, now: Instant) {
        self.report_unreachable(now);
        if self.links.index() != 0 {
            if self.next_part_report <= now {
                self.next_part_report = now.after(REPORT_INTERVAL);
                let report = ShardMessage::Report { shard: self.links.index(), report: self.own_report() };
                // The next one follows in a second.
                let _ = self.links.offer(0, report);
            }
            return;
        }
        if !self.map_client.as_ref().is_some_and(|client| client.wants_report(now)) {
            return;
        }
        let mut report = self.own_report();
        for part in self.parts.values() {
            add(&mut report, part);
        }
        if let Some(client) = &mut self.map_client {
            client.report(now, report, &mut self.map_actions);
        }
    }

    fn report_unreachable(&mut self, now: Instant) {
        for (osd, incarnation, silent) in self.peers.unreachable(now) {
            let silent_ms = u32::try_from(silent.as_millis()).unwrap_or(u32::MAX);
            let failure = Failure { osd, incarnation, silent_ms };
            match &self.map_client {
                Some(client) => client.report_failure(failure, &mut self.map_actions),
                None => {
                    // It is told again while it lasts.
                    let _ = self.links.offer(0, ShardMessage::Failure(failure));
                }
            }
        }
    }

    fn own_report(&self) -> OsdReport {
        let space = self.store.space();
        let bytes = |blocks: u64| blocks * u64::from(BLOCK_SIZE);
        let mut report = OsdReport {
            used: bytes(space.blocks.saturating_sub(space.free)),
            data: bytes(space.data),
            capacity: bytes(space.blocks),
            ..OsdReport::default()
        };
        for pg in self.pgs() {
            let counters = pg.counters();
            report.reads += counters.reads;
            report.writes += counters.writes;
            report.bytes_read += counters.bytes_read;
            report.bytes_written += counters.bytes_written;
            report.pg_count += u32::from(!pg.acting().is_empty());
            report.pgs.extend(self.pg_report(pg));
            if matches!(pg.phase(), Phase::Incomplete { .. }) {
                report.problems.push(format!("pg {} is incomplete", pg.id()));
            }
        }
        report.problems.extend(too_many_pgs(space.window, self.by_pg.len()));
        if let Some(failure) = self.failure {
            report.problems.push(failure.to_string());
        }
        report
    }

    fn pg_report(&self, pg: &Pg) -> Option<PgReport> {
        let state = pg.reported_state()?;
        let status = self.store.pg(pg.id()).unwrap_or_default();
        let bytes = status.blocks * u64::from(BLOCK_SIZE);
        Some(PgReport { pg: pg.id(), state, objects: status.objects, bytes })
    }
}

/// What to say when the largest op does not fit into a window.
fn too_many_pgs(window: u64, pgs: usize) -> Option<String> {
    let largest = OP_BLOCKS_MAX as u64 + WRITE_OVERHEAD;
    (window < largest).then(|| {
        let kib = window.saturating_sub(WRITE_OVERHEAD) * u64::from(BLOCK_SIZE) / 1024;
        format!(
            "{pgs} PGs on one shard are too many for its size: writes of more than {kib} KiB are refused; use larger devices, \
             or pools with fewer PGs"
        )
    })
}

fn add(sum: &mut OsdReport, part: &OsdReport) {
    sum.used += part.used;
    sum.data += part.data;
    sum.capacity += part.capacity;
    sum.reads += part.reads;
    sum.writes += part.writes;
    sum.bytes_read += part.bytes_read;
    sum.bytes_written += part.bytes_written;
    sum.pg_count += part.pg_count;
    sum.pgs.extend_from_slice(&part.pgs);
    sum.problems.extend_from_slice(&part.problems);
}
