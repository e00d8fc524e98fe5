//! What the mon knows of its OSDs beyond the map: connections, deadlines, reports. None of it is durable.

use loligo_config::id::{Epoch, Incarnation, OsdId, PgId};
use loligo_config::map::ClusterMap;
use loligo_net::wire::mon::{OsdReport, PgReport, PgState};
use loligo_reactor::env::{ConnectionId, Instant};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Replaced starts that are remembered for one OSD. Guessed: more would have to be alive at once.
const RETIRED_MAX: usize = 16;
/// Age of a report from which on its rates say nothing: OSDs report every second.
const REPORT_AGE_MAX: Duration = Duration::from_secs(5);
/// Words of one OSD for people to read.
const PROBLEMS_MAX: usize = 16;

#[derive(Debug, Default)]
struct Link {
    /// The start that the map names.
    incarnation: Incarnation,
    /// Its connections.
    connections: BTreeSet<ConnectionId>,
    /// When it is down unless it comes back.
    deadline: Option<Instant>,
    /// Whether the deadline comes from a lost connection, and not from the start of the mon.
    lost: bool,
    retired: VecDeque<Incarnation>,
    report: Option<Reported>,
    /// The newest map that all of it goes by.
    epoch: Epoch,
}

#[derive(Debug)]
struct Reported {
    at: Instant,
    report: OsdReport,
    rates: Rates,
}

/// Client I/O per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rates {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
}

/// All OSDs.
#[derive(Debug, Default)]
pub(super) struct Osds {
    links: BTreeMap<OsdId, Link>,
    connections: BTreeMap<ConnectionId, (OsdId, Incarnation)>,
    pgs: BTreeMap<PgId, PgReport>,
}

impl Osds {
    pub(super) fn new(map: &ClusterMap, deadline: Instant) -> Self {
        let link =
            |up: bool, incarnation| Link { incarnation, deadline: up.then_some(deadline), ..Link::default() };
        let links = map.osds.values().map(|osd| (osd.id, link(osd.up, osd.incarnation))).collect();
        Self { links, ..Self::default() }
    }

    pub(super) fn connected(&mut self, connection: ConnectionId, osd: OsdId, incarnation: Incarnation) {
        self.connections.insert(connection, (osd, incarnation));
        if let Some(link) = self.links.get_mut(&osd).filter(|link| link.incarnation == incarnation) {
            link.connections.insert(connection);
            (link.deadline, link.lost) = (None, false);
        }
    }

    pub(super) fn lost(&mut self, connection: ConnectionId, deadline: Instant) {
        let Some((osd, _)) = self.connections.remove(&connection) else { return };
        let Some(link) = self.links.get_mut(&osd) else { return };
        if link.connections.remove(&connection) && link.connections.is_empty() {
            (link.deadline, link.lost) = (Some(deadline), true);
        }
    }

    /// The map will name this start.
    pub(super) fn booted(&mut self, connection: ConnectionId, osd: OsdId, incarnation: Incarnation) {
        let link = self.links.entry(osd).or_default();
        if link.incarnation != incarnation {
            if link.incarnation.0 != 0 {
                link.retired.push_back(link.incarnation);
                if link.retired.len() > RETIRED_MAX {
                    link.retired.pop_front();
                }
            }
            link.incarnation = incarnation;
            link.connections.clear();
            link.report = None;
            link.epoch = Epoch(0);
        }
        self.connected(connection, osd, incarnation);
    }

    pub(super) fn is_retired(&self, osd: OsdId, incarnation: Incarnation) -> bool {
        self.links.get(&osd).is_some_and(|link| link.retired.contains(&incarnation))
    }

    pub(super) fn is_connected(&self, osd: OsdId, incarnation: Option<Incarnation>) -> bool {
        self.links
            .get(&osd)
            .is_some_and(|link| Some(link.incarnation) == incarnation && !link.connections.is_empty())
    }

    /// Whether it had a connection and has none now.
    pub(super) fn is_lost(&self, osd: OsdId) -> bool {
        self.links.get(&osd).is_some_and(|link| link.lost)
    }

    pub(super) fn forget_deadline(&mut self, osd: OsdId) {
        if let Some(link) = self.links.get_mut(&osd) {
            link.deadline = None;
        }
    }

    /// Takes those whose deadline has passed.
    pub(super) fn expired(&mut self, now: Instant) -> Vec<OsdId> {
        let late =
            self.links.iter_mut().filter(|(_, link)| link.deadline.is_some_and(|deadline| deadline <= now));
        late.map(|(osd, link)| {
            link.deadline = None;
            *osd
        })
        .collect()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.links.values().filter_map(|link| link.deadline).min()
    }

    pub(super) fn report(
        &mut self,
        map: &ClusterMap,
        now: Instant,
        osd: OsdId,
        incarnation: Incarnation,
        epoch: Epoch,
        mut report: OsdReport,
    ) {
        let Some(link) = self.links.get_mut(&osd).filter(|link| link.incarnation == incarnation) else {
            return;
        };
        link.epoch = link.epoch.max(epoch);
        for pg in report.pgs.drain(..).filter(|report| map.primary(report.pg) == Some(osd)) {
            self.pgs.insert(pg.pg, pg);
        }
        report.problems.truncate(PROBLEMS_MAX);
        report.problems.iter_mut().for_each(|problem| *problem = problem.chars().take(200).collect());
        let rates = link.report.as_ref().map_or(Rates::default(), |before| before.rates_to(now, &report));
        link.report = Some(Reported { at: now, report, rates });
    }

    /// The newest map that all of an OSD goes by, as far as it has told.
    pub(super) fn epoch(&self, osd: OsdId) -> Epoch {
        self.links.get(&osd).map_or(Epoch(0), |link| link.epoch)
    }

    /// PGs with a new interval peer first; PGs of removed pools are forgotten.
    pub(super) fn new_map(&mut self, map: &ClusterMap) {
        self.pgs.retain(|pg, report| {
            let interval = map.interval(*pg);
            if interval.is_some_and(|interval| interval.since == map.epoch) {
                report.state = PgState::Peering;
            }
            interval.is_some()
        });
    }
}

impl Reported {
    /// Counters start anew with the process, so the later one may be smaller.
    fn rates_to(&self, now: Instant, report: &OsdReport) -> Rates {
        let milliseconds = u64::try_from(now.since(self.at).as_millis()).unwrap_or(u64::MAX).max(1);
        let rate = |before: u64, after: u64| after.saturating_sub(before).saturating_mul(1000) / milliseconds;
        Rates {
            reads: rate(self.report.reads, report.reads),
            writes: rate(self.report.writes, report.writes),
            bytes_read: rate(self.report.bytes_read, report.bytes_read),
            bytes_written: rate(self.report.bytes_written, report.bytes_written),
        }
    }
}

/// What the reports say, for the answers.
pub(crate) struct Usage<'a> {
    pub(super) osds: &'a Osds,
    pub(super) map: &'a ClusterMap,
    pub(super) now: Instant,
}

impl<'a> Usage<'a> {
    /// The last report of an OSD, however old.
    pub(crate) fn report(&self, osd: OsdId) -> Option<&'a OsdReport> {
        self.osds.links.get(&osd)?.report.as_ref().map(|reported| &reported.report)
    }

    /// The client I/O of an OSD.
    pub(crate) fn rates(&self, osd: OsdId) -> Rates {
        let reported = self.osds.links.get(&osd).and_then(|link| link.report.as_ref());
        let fresh = reported.filter(|reported| self.now.since(reported.at) <= REPORT_AGE_MAX);
        fresh.map_or(Rates::default(), |reported| reported.rates)
    }

    /// What the PG's primary said last.
    pub(crate) fn pg(&self, pg: PgId) -> Option<&'a PgReport> {
        self.osds.pgs.get(&pg)
    }

    /// The PG's state in Ceph's words.
    pub(crate) fn pg_state(&self, pg: PgId) -> &'static str {
        if !self.map.pg_serves(pg) {
            return "down";
        }
        let size = self.map.pools.get(&pg.pool).map_or(0, |pool| usize::from(pool.size));
        match self.pg(pg).map(|report| report.state) {
            None => "unknown",
            Some(PgState::Down) => "down",
            Some(PgState::Peering) => "peering",
            Some(PgState::Incomplete) => "incomplete",
            Some(PgState::Active) if self.map.acting(pg).len() < size => "active+undersized+degraded",
            Some(PgState::Active) => "active+clean",
        }
    }
}
