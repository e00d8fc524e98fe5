//! An OSD's talk with its mon: maps, boots, reports, failures. Sans-I/O; the shard owns the connection.
//!
//! ```text
//!   Waiting --(time)--> Connecting --(up)--> Connected: Subscribe, Boot
//!      ^                    |                    | Boot again every second until the map has this start as up
//!      |  (down, backoff, next mon)              | Report, Failure
//!      +--------------------+--------------------+
//! ```

use loligo_config::id::{ClusterId, Epoch, Incarnation, OsdId, PgId};
use loligo_config::map::ClusterMap;
use loligo_net::messenger::DownReason;
use loligo_net::outage::Outage;
use loligo_net::wire::Message;
use loligo_net::wire::handshake::RefuseReason;
use loligo_net::wire::mon::{
    Boot, BootInfo, BootReply, BootStatus, Failure, OsdReport, PgReport, Report, Subscribe,
};
use loligo_reactor::env::{ConnectionId, Instant};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
const BOOT_INTERVAL: Duration = Duration::from_millis(500);
/// How long the OSD waits for an older start of itself to be marked down before it gives up.
const RUNNING_MAX: Duration = Duration::from_secs(15);
/// Reports go this often when something changed,
pub const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// and this often when nothing did.
const REPORT_INTERVAL_IDLE: Duration = Duration::from_secs(5);
/// PGs of one report: 64 KiB of postcard at most.
const REPORT_PGS_MAX: usize = 1500;

/// Who and where this OSD is.
#[derive(Clone, Debug)]
pub struct MapClientSettings {
    /// The OSD.
    pub osd: OsdId,
    /// Which start.
    pub incarnation: Incarnation,
    /// Its cluster, from its device: maps of another one are refused.
    pub cluster: ClusterId,
    /// Where mons may be.
    pub mons: Vec<SocketAddr>,
    /// What it says of itself; `newest_map` is filled in.
    pub boot: BootInfo,
}

/// What the shard is to do.
#[derive(Debug)]
pub enum MapAction {
    /// Connect to a mon, and tell the number to [`MapClient::connecting`].
    Connect(SocketAddr),
    /// Close the connection; another mon is tried.
    Close(ConnectionId),
    /// Send to the mon.
    Send {
        /// Over this connection.
        connection: ConnectionId,
        /// The message.
        message: Message,
        /// Its data.
        data: Option<Vec<u8>>,
    },
}

/// Why this OSD cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BootError {
    /// The mon refused for good.
    #[error("the mon refused this OSD: {0}")]
    Refused(BootStatus),
    /// Every mon refused the connection, for a reason that does not go away by itself.
    #[error("the mon at {mon} refused the connection: {reason}")]
    Handshake {
        /// The last one asked.
        mon: SocketAddr,
        /// Why.
        reason: RefuseReason,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting {
        until: Instant,
    },
    Connecting {
        connection: ConnectionId,
    },
    Connected {
        connection: ConnectionId,
        next_boot: Instant,
        next_report: Instant,
        next_idle_report: Instant,
    },
}

/// See the file's picture.
#[derive(Debug)]
pub struct MapClient {
    settings: MapClientSettings,
    state: State,
    mon: usize,
    backoff: Duration,
    newest: Epoch,
    /// The newest interval that a PG here has promised: the cluster has come that far, whatever a mon says.
    promised: Epoch,
    /// The newest map that every shard goes by, and the one that the mon was told of.
    taken: (Epoch, Epoch),
    is_up_in_map: bool,
    refused_since: Option<Instant>,
    failure: Option<BootError>,
    /// Mons that refused the connection for good, one behind the other.
    refusals: usize,
    problem: Option<BootStatus>,
    /// Without a mon, and why it could not be reached last.
    outage: Outage,
    last_down: Option<DownReason>,
    /// What the mon was told of each PG over this connection.
    told: BTreeMap<PgId, PgReport>,
    last_report: OsdReport,
}

impl MapClient {
    /// Begins at `now` with the newest map kept on the device.
    ///
    /// # Panics
    /// Without a mon to talk to.
    pub fn new(settings: MapClientSettings, newest: Epoch) -> Self {
        assert!(!settings.mons.is_empty(), "an OSD has a mon");
        Self {
            settings,
            state: State::Waiting { until: Instant(0) },
            mon: 0,
            backoff: BACKOFF_MIN,
            newest,
            promised: Epoch(0),
            taken: (Epoch(0), Epoch(0)),
            is_up_in_map: false,
            refused_since: None,
            failure: None,
            refusals: 0,
            problem: None,
            outage: Outage::default(),
            last_down: None,
            told: BTreeMap::new(),
            last_report: OsdReport::default(),
        }
    }

    /// Why the process should end, if so.
    pub fn failure(&self) -> Option<BootError> {
        self.failure
    }

    /// What keeps it from being up for now.
    pub fn problem(&self) -> Option<BootStatus> {
        self.problem
    }

    /// A PG here has promised this interval: the map of that epoch was there, also if it is not on the device.
    pub fn note_promised(&mut self, promised: Epoch) {
        self.promised = self.promised.max(promised);
    }

    /// Every shard goes by this map: the mon is told at once, since somebody may wait for a session to be fenced.
    pub fn note_taken(&mut self, now: Instant, epoch: Epoch) {
        if epoch <= self.taken.0 {
            return;
        }
        self.taken.0 = epoch;
        if let State::Connected { next_report, .. } = &mut self.state {
            *next_report = now;
        }
    }

    /// Whether this is the mon's connection.
    pub fn owns(&self, connection: ConnectionId) -> bool {
        match self.state {
            State::Waiting { .. } => false,
            State::Connecting { connection: own } | State::Connected { connection: own, .. } => {
                own == connection
            }
        }
    }

    /// The connection asked for by [`MapAction::Connect`] was begun.
    pub fn connecting(&mut self, connection: ConnectionId) {
        self.state = State::Connecting { connection };
    }

    /// When there is something to do.
    pub fn next_deadline(&self) -> Instant {
        let speak = self.outage.deadline().unwrap_or(Instant(u64::MAX));
        match self.state {
            State::Waiting { until } => until.min(speak),
            // The messenger ends a handshake that takes too long.
            State::Connecting { .. } => speak,
            State::Connected { next_boot, next_report, .. } if !self.is_up_in_map => {
                next_boot.min(next_report)
            }
            State::Connected { next_report, .. } => next_report,
        }
    }

    /// The connection to the mon is there.
    pub fn on_up(&mut self, now: Instant, out: &mut Vec<MapAction>) {
        let State::Connecting { connection } = self.state else { return };
        self.backoff = BACKOFF_MIN;
        self.refusals = 0;
        if self.outage.found() {
            tracing::warn!(osd = self.settings.osd.0, mon = %self.settings.mons[self.mon], "a mon answers now");
        }
        self.told.clear();
        self.taken.1 = Epoch(0);
        // A mon that was started anew knows nothing of this OSD. To one that has not taken its boot a report is of no use.
        let next_report = if self.is_up_in_map { now } else { now.after(REPORT_INTERVAL) };
        let next_boot = now;
        self.state = State::Connected { connection, next_boot, next_report, next_idle_report: now };
        let message = Message::Subscribe(Subscribe { have: self.newest });
        out.push(MapAction::Send { connection, message, data: None });
        self.tick(now, out);
    }

    /// It is gone, or could not be made: the next mon is tried after a while. When every mon has refused for good in
    /// a row, the OSD gives up: it was started with a device of another cluster, or the address of something else.
    pub fn on_down(&mut self, now: Instant, reason: DownReason) {
        self.last_down = Some(reason);
        self.refusals = if is_final(reason) { self.refusals + 1 } else { 0 };
        if let DownReason::Refused(reason) = reason
            && self.refusals >= self.settings.mons.len()
        {
            let mon = self.settings.mons[self.mon];
            self.failure = Some(BootError::Handshake { mon, reason });
        }
        self.state = State::Waiting { until: now.after(self.backoff) };
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
        self.mon = (self.mon + 1) % self.settings.mons.len();
    }

    /// Takes a map with its encoding. `None`: it is to be ignored (older, damaged, or of another cluster).
    pub fn on_map(&mut self, data: &[u8]) -> Option<ClusterMap> {
        let map = match ClusterMap::decode(data) {
            Ok(map) => map,
            Err(error) => {
                tracing::error!(osd = self.settings.osd.0, %error, "the mon sent a map that cannot be read");
                return None;
            }
        };
        if map.cluster != self.settings.cluster || map.epoch <= self.newest || map.epoch < self.promised {
            return None;
        }
        self.note_map(&map);
        Some(map)
    }

    /// What a map, received or kept, says of this OSD.
    pub fn note_map(&mut self, map: &ClusterMap) {
        // The mon takes a PG with a new interval for peering until it is told; it may be active again before the next
        // report, and then nothing seems to have changed.
        let newest = self.newest;
        self.told.retain(|pg, _| map.interval(*pg).is_some_and(|interval| interval.since <= newest));
        self.newest = newest.max(map.epoch);
        self.is_up_in_map = map
            .osds
            .get(&self.settings.osd)
            .is_some_and(|osd| osd.up && osd.incarnation == self.settings.incarnation);
        if self.is_up_in_map {
            self.refused_since = None;
            self.problem = None;
        }
    }

    /// How the mon took the boot.
    pub fn on_boot_reply(&mut self, now: Instant, reply: BootReply) {
        if reply.status == BootStatus::Taken {
            self.problem = None;
            return;
        }
        self.problem = Some(reply.status);
        let since = *self.refused_since.get_or_insert(now);
        match reply.status {
            BootStatus::OtherDevice | BootStatus::OtherId | BootStatus::Invalid => {
                self.failure = Some(BootError::Refused(reply.status));
            }
            BootStatus::Running if now.since(since) >= RUNNING_MAX => {
                self.failure = Some(BootError::Refused(reply.status));
            }
            // An older start is about to be marked down; an old mon may be replaced.
            BootStatus::Running | BootStatus::OldMon | BootStatus::Taken => {}
        }
    }

    /// Connects and boots when it is time.
    pub fn tick(&mut self, now: Instant, out: &mut Vec<MapAction>) {
        if !matches!(self.state, State::Connected { .. }) {
            self.outage.lost(now);
            self.speak_of_outage(now);
        }
        match &mut self.state {
            State::Waiting { until } if *until <= now => {
                // Until the connection has a number, nothing is begun twice.
                *until = now.after(BACKOFF_MAX);
                out.push(MapAction::Connect(self.settings.mons[self.mon]));
            }
            State::Connected { connection, next_boot, .. } if !self.is_up_in_map && *next_boot <= now => {
                *next_boot = now.after(BOOT_INTERVAL);
                let (osd, incarnation) = (self.settings.osd, self.settings.incarnation);
                let info =
                    BootInfo { newest_map: self.newest.max(self.promised), ..self.settings.boot.clone() };
                let data = Some(encode(&info));
                let message = Message::Boot(Boot { osd, incarnation });
                out.push(MapAction::Send { connection: *connection, message, data });
            }
            _ => {}
        }
    }

    /// What is served goes on without a mon; a failure could not be answered. Somebody should look.
    fn speak_of_outage(&mut self, now: Instant) {
        if !self.outage.is_due(now) {
            return;
        }
        let mons: Vec<String> = self.settings.mons.iter().map(SocketAddr::to_string).collect();
        let reason = self.last_down.map_or_else(|| "no answer".to_owned(), |reason| reason.to_string());
        tracing::warn!(
            osd = self.settings.osd.0,
            "no mon answers at {} ({reason}): is `loligo mon run` running there, and are these addresses (`[cluster] mons` \
             or --mon) right? It is tried on",
            mons.join(", ")
        );
    }

    /// Whether a report may go out now, so that the shard gathers what it says.
    pub fn wants_report(&self, now: Instant) -> bool {
        matches!(self.state, State::Connected { next_report, .. } if next_report <= now)
    }

    /// Sends a report with the PGs that changed since they were last told; nothing at all when nothing changed.
    pub fn report(&mut self, now: Instant, mut report: OsdReport, out: &mut Vec<MapAction>) {
        let State::Connected { connection, next_report, next_idle_report, .. } = &mut self.state else {
            return;
        };
        *next_report = now.after(REPORT_INTERVAL);
        if let Some(status) = self.problem {
            report.problems.push(format!("osd.{} cannot boot: {status}", self.settings.osd.0));
        }
        let pgs = std::mem::take(&mut report.pgs);
        let told = &self.told;
        report.pgs = pgs.into_iter().filter(|pg| told.get(&pg.pg) != Some(pg)).take(REPORT_PGS_MAX).collect();
        let is_told = self.taken.0 == self.taken.1;
        if report == self.last_report && report.pgs.is_empty() && is_told && now < *next_idle_report {
            return;
        }
        *next_idle_report = now.after(REPORT_INTERVAL_IDLE);
        self.told.extend(report.pgs.iter().map(|pg| (pg.pg, *pg)));
        self.taken.1 = self.taken.0;
        let (osd, incarnation) = (self.settings.osd, self.settings.incarnation);
        let message = Message::Report(Report { osd, incarnation, epoch: self.taken.0 });
        let data = Some(encode(&report));
        out.push(MapAction::Send { connection: *connection, message, data });
        report.pgs.clear();
        self.last_report = report;
    }

    /// Tells the mon that a peer does not answer.
    pub fn report_failure(&self, failure: Failure, out: &mut Vec<MapAction>) {
        if let State::Connected { connection, .. } = self.state {
            out.push(MapAction::Send { connection, message: Message::Failure(failure), data: None });
        }
    }
}

fn is_final(reason: DownReason) -> bool {
    matches!(reason, DownReason::Refused(reason) if reason.is_final())
}

fn encode<T: serde::Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("plain data in memory can be encoded")
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_config::id::DeviceId;
    use loligo_config::map::{AuthMode, Osd};
    use loligo_net::wire::mon::PgState;

    fn settings() -> MapClientSettings {
        let boot = BootInfo {
            device: DeviceId(uuid::Uuid::from_u128(7)),
            addresses: vec!["127.0.0.1:7000".parse().unwrap()],
            capacity: 1 << 30,
            host: "h".into(),
            rack: "r".into(),
            device_class: "ssd".into(),
            newest_map: Epoch(0),
        };
        MapClientSettings {
            osd: OsdId(3),
            incarnation: Incarnation(9),
            cluster: ClusterId(uuid::Uuid::from_u128(1)),
            mons: vec!["127.0.0.1:1".parse().unwrap(), "127.0.0.1:2".parse().unwrap()],
            boot,
        }
    }

    fn map(cluster: u128, epoch: u32, incarnation: u64) -> ClusterMap {
        let mut map = ClusterMap::new(ClusterId(uuid::Uuid::from_u128(cluster)), AuthMode::None, 0);
        map.epoch = Epoch(epoch);
        let settings = settings();
        map.osds.insert(
            OsdId(3),
            Osd {
                id: OsdId(3),
                device: settings.boot.device,
                incarnation: Incarnation(incarnation),
                up: true,
                is_in: true,
                addresses: settings.boot.addresses,
                weight: 1 << 16,
                host: "h".into(),
                rack: "r".into(),
                device_class: "ssd".into(),
                capacity: 1 << 30,
            },
        );
        map
    }

    fn connected() -> (MapClient, Vec<MapAction>) {
        let mut client = MapClient::new(settings(), Epoch(4));
        let mut out = Vec::new();
        client.tick(Instant(0), &mut out);
        assert!(matches!(out[..], [MapAction::Connect(_)]));
        out.clear();
        client.connecting(ConnectionId(5));
        client.on_up(Instant(0), &mut out);
        (client, out)
    }

    #[test]
    fn it_subscribes_and_boots_until_the_map_has_it() {
        let (mut client, mut out) = connected();
        assert!(matches!(
            out[..],
            [
                MapAction::Send { message: Message::Subscribe(Subscribe { have: Epoch(4) }), .. },
                MapAction::Send { message: Message::Boot(_), .. }
            ]
        ));
        out.clear();
        client.tick(Instant(1), &mut out);
        assert!(out.is_empty());
        client.tick(Instant(0).after(BOOT_INTERVAL), &mut out);
        assert!(matches!(out[..], [MapAction::Send { message: Message::Boot(_), .. }]));
        out.clear();
        assert!(client.on_map(&map(1, 5, 9).encode()).is_some());
        client.tick(Instant(0).after(BOOT_INTERVAL * 4), &mut out);
        assert!(out.is_empty(), "it is up");
        assert!(client.on_map(&map(1, 6, 8).encode()).is_some());
        client.tick(Instant(0).after(BOOT_INTERVAL * 8), &mut out);
        assert_eq!(out.len(), 1, "another start is up in the map: it boots again");
    }

    #[test]
    fn older_and_foreign_maps_are_ignored() {
        let (mut client, _) = connected();
        assert!(client.on_map(&map(1, 4, 9).encode()).is_none());
        assert!(client.on_map(&map(2, 9, 9).encode()).is_none());
        assert!(client.on_map(b"garbage").is_none());
        assert!(client.on_map(&map(1, 5, 9).encode()).is_some());
    }

    /// A promise is durable at once, the map behind it only later: both tell how far the cluster has come.
    #[test]
    fn a_mon_that_is_behind_a_promise_is_told_and_its_map_ignored() {
        let mut client = MapClient::new(settings(), Epoch(4));
        client.note_promised(Epoch(8));
        let mut out = Vec::new();
        client.tick(Instant(0), &mut out);
        client.connecting(ConnectionId(5));
        client.on_up(Instant(0), &mut out);
        let boot = out.iter().find_map(|action| match action {
            MapAction::Send { message: Message::Boot(_), data: Some(data), .. } => Some(data),
            _ => None,
        });
        let info: BootInfo = postcard::from_bytes(boot.unwrap()).unwrap();
        assert_eq!(info.newest_map, Epoch(8));
        assert!(client.on_map(&map(1, 7, 9).encode()).is_none());
        assert!(client.on_map(&map(1, 8, 9).encode()).is_some());
    }

    #[test]
    fn the_mon_hears_at_once_which_map_every_shard_goes_by() {
        let (mut client, mut out) = connected();
        client.report(Instant(1), OsdReport::default(), &mut out);
        out.clear();
        assert!(!client.wants_report(Instant(2)));
        client.note_taken(Instant(2), Epoch(6));
        assert!(client.wants_report(Instant(2)));
        client.report(Instant(2), OsdReport::default(), &mut out);
        let [MapAction::Send { message: Message::Report(report), .. }] = out[..] else { panic!("{out:?}") };
        assert_eq!(report.epoch, Epoch(6));
        client.note_taken(Instant(3), Epoch(6));
        assert!(!client.wants_report(Instant(3)));
    }

    #[test]
    fn it_gives_up_when_every_mon_belongs_to_another_cluster() {
        let (mut client, _) = connected();
        let foreign = DownReason::Refused(RefuseReason::Cluster);
        client.on_down(Instant(0), foreign);
        assert_eq!(client.failure(), None, "the other mon may be the right one");
        client.on_down(Instant(1), DownReason::Timeout);
        client.on_down(Instant(2), foreign);
        assert_eq!(client.failure(), None, "not in a row");
        client.on_down(Instant(3), foreign);
        let Some(BootError::Handshake { reason, .. }) = client.failure() else { panic!("it goes on") };
        assert_eq!(reason, RefuseReason::Cluster);
    }

    #[test]
    fn a_lost_mon_is_replaced_by_the_next_with_backoff() {
        let (mut client, mut out) = connected();
        client.on_down(Instant(0), DownReason::Timeout);
        out.clear();
        client.tick(Instant(0), &mut out);
        assert!(out.is_empty());
        client.tick(Instant(0).after(BACKOFF_MAX), &mut out);
        assert!(matches!(out[..], [MapAction::Connect(address)] if address.port() == 2));
    }

    #[test]
    fn some_refusals_are_final() {
        let (mut client, _) = connected();
        let refuse = |status| BootReply { status, epoch: Epoch(5) };
        client.on_boot_reply(Instant(0), refuse(BootStatus::Running));
        assert_eq!(client.failure(), None);
        client.on_boot_reply(Instant(0).after(RUNNING_MAX), refuse(BootStatus::Running));
        assert_eq!(client.failure(), Some(BootError::Refused(BootStatus::Running)));
        let (mut client, _) = connected();
        client.on_boot_reply(Instant(0), refuse(BootStatus::OtherDevice));
        assert_eq!(client.failure(), Some(BootError::Refused(BootStatus::OtherDevice)));
    }

    #[test]
    fn a_mon_that_was_started_anew_gets_a_report_at_once() {
        let (mut client, mut out) = connected();
        assert!(!client.wants_report(Instant(0)), "its boot was not taken yet");
        client.note_map(&map(1, 5, 9));
        client.on_down(Instant(1), DownReason::Timeout);
        client.connecting(ConnectionId(6));
        client.on_up(Instant(2), &mut out);
        assert!(client.wants_report(Instant(2)));
    }

    #[test]
    fn reports_carry_changes_alone() {
        let (mut client, mut out) = connected();
        let pg = PgReport { pg: PgId::default(), state: PgState::Active, objects: 0, bytes: 0 };
        let report = OsdReport { pgs: vec![pg], ..OsdReport::default() };
        out.clear();
        client.report(Instant(1), report.clone(), &mut out);
        assert_eq!(out.len(), 1);
        client.report(Instant(2), report, &mut out);
        assert_eq!(out.len(), 1, "nothing has changed");
        let changed = PgReport { state: PgState::Down, ..pg };
        client.report(Instant(3), OsdReport { pgs: vec![changed], ..OsdReport::default() }, &mut out);
        assert_eq!(out.len(), 2);
    }

    #[test]
    fn a_pg_with_a_new_interval_is_told_again() {
        let (mut client, mut out) = connected();
        let pg = PgReport { pg: PgId::default(), state: PgState::Active, objects: 0, bytes: 0 };
        let report = OsdReport { pgs: vec![pg], ..OsdReport::default() };
        out.clear();
        client.report(Instant(1), report.clone(), &mut out);
        let mut newer = map(1, 6, 9);
        let acting = vec![OsdId(3)];
        newer.intervals.insert(pg.pg, loligo_config::map::Interval { since: Epoch(5), acting });
        client.note_map(&newer);
        client.report(Instant(2), report.clone(), &mut out);
        assert_eq!(out.len(), 2, "epoch 5 is newer than the map before");
        newer.epoch = Epoch(7);
        client.note_map(&newer);
        client.report(Instant(3), report, &mut out);
        assert_eq!(out.len(), 2, "nothing has changed");
    }
}
