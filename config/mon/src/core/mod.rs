//! The mon's state machine, sans-I/O: events in, drafts of maps and actions out.
//!
//! Events change a *draft* of the next map; answers that depend on it wait. [`Core::draft`] closes the draft, the
//! caller makes it durable, and [`Core::committed`] publishes it: nobody hears of an epoch that could be forgotten.
//! Changes that come together share one epoch: those of the membership are collected for a moment, since a whole rack
//! that restarts would otherwise give every PG of the cluster one new interval per OSD.
//!
//! ```text
//!            boot (first, or new incarnation, or after down)
//!   absent ─────────────▶ up ◀───────────────────────────────┐
//!                         │  connection closed               │ same incarnation connects again
//!                         ▼                                  │
//!                        up, lost ───────────────────────────┘
//!                         │  not back in `down_after`, or a peer's word
//!                         ▼
//!                        down ──boot──▶ up, with new intervals for its PGs
//! ```

mod boot;
mod draft;
mod fence;
mod osds;
#[cfg(test)]
mod tests;

pub(crate) use draft::Change;
pub(crate) use osds::Usage;

use crate::command;
use crate::store::Extra;
use draft::Draft;
use fence::Fence;
use loligo_config::id::{ClusterId, Epoch, Incarnation, OsdId, SessionId};
use loligo_config::map::{AuthMode, ClusterMap};
use loligo_net::wire::mon::{BootInfo, BootStatus, OsdReport};
use loligo_reactor::env::{ConnectionId, Instant};
use osds::Osds;
use std::net::SocketAddr;
use std::time::Duration;

/// How a mon behaves.
#[derive(Clone, Debug)]
pub struct MonSettings {
    /// The cluster to make when the store is new.
    pub new_cluster: ClusterId,
    /// The cluster that the store must hold, when the host file names one.
    pub expected_cluster: Option<ClusterId>,
    /// Authentication mode of a new cluster.
    pub auth: AuthMode,
    /// Its name in `mon dump`.
    pub name: String,
    /// Where it listens, for `mon dump`.
    pub addresses: Vec<SocketAddr>,
    /// An OSD whose connection closed is down when it is not back after this.
    pub down_after: Duration,
    /// After a start of the mon its OSDs have this long to come back.
    pub start_grace: Duration,
    /// Membership changes within this time share one epoch.
    pub batch: Duration,
    /// How long `blocklist add` waits until no OSD may serve the session any more.
    pub fence_wait: Duration,
}

impl MonSettings {
    /// The defaults.
    pub fn new(new_cluster: ClusterId) -> Self {
        Self {
            new_cluster,
            expected_cluster: None,
            auth: AuthMode::None,
            name: "a".to_owned(),
            addresses: Vec::new(),
            // A connection that closes and comes back within this time was a hiccup of the network; a process that
            // died does not come back sooner.
            down_after: Duration::from_millis(500),
            start_grace: Duration::from_secs(5),
            // Processes killed together are seen within a few milliseconds of each other. Guessed.
            batch: Duration::from_millis(20),
            // A map takes milliseconds; an OSD that is slower than this hangs, and is marked down soon. Guessed.
            fence_wait: Duration::from_secs(5),
        }
    }
}

/// What happened.
#[derive(Debug)]
pub enum Event<'a> {
    /// An OSD has connected.
    Connected {
        /// Over which connection.
        connection: ConnectionId,
        /// The OSD.
        osd: OsdId,
        /// Which start.
        incarnation: Incarnation,
    },
    /// A connection of an OSD has ended.
    Lost {
        /// Which.
        connection: ConnectionId,
    },
    /// An OSD says that it is there. `info` is `None` when it could not be read.
    Boot {
        /// Over which connection.
        connection: ConnectionId,
        /// The OSD.
        osd: OsdId,
        /// Which start.
        incarnation: Incarnation,
        /// What it says of itself.
        info: Option<BootInfo>,
    },
    /// An OSD says that it has a map of this epoch.
    Seen {
        /// The OSD.
        osd: OsdId,
        /// Which start.
        incarnation: Incarnation,
        /// The epoch.
        epoch: Epoch,
    },
    /// An OSD tells how it is.
    Report {
        /// The OSD.
        osd: OsdId,
        /// Which start.
        incarnation: Incarnation,
        /// The newest map that all of it goes by.
        epoch: Epoch,
        /// How it is.
        report: OsdReport,
    },
    /// An OSD says that another does not answer.
    Failure {
        /// Who says so.
        reporter: OsdId,
        /// Who does not answer.
        osd: OsdId,
        /// Which start of it.
        incarnation: Incarnation,
    },
    /// An admin command.
    Command {
        /// Over which connection.
        connection: ConnectionId,
        /// Brought back by the answer.
        number: u64,
        /// JSON.
        request: &'a [u8],
    },
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Answer a boot.
    BootReply {
        /// Over which connection.
        connection: ConnectionId,
        /// How it went.
        status: BootStatus,
        /// The epoch that has it, or the newest.
        epoch: Epoch,
    },
    /// Answer a command.
    CommandReply {
        /// Over which connection.
        connection: ConnectionId,
        /// Which command.
        number: u64,
        /// The epoch in which its effect is seen.
        epoch: Epoch,
        /// The answer.
        answer: serde_json::Value,
    },
    /// There is a new map: send it to all subscribers.
    Publish,
}

/// The state machine.
#[derive(Debug)]
pub struct Core {
    settings: MonSettings,
    /// The newest durable map.
    map: ClusterMap,
    /// Durable beside it.
    extra: Extra,
    osds: Osds,
    draft: Option<Draft>,
    /// What `extra` will be; differs from it when something is to be made durable without a new epoch.
    extra_draft: Extra,
    /// Answers to be given when the draft is durable; their epoch is not known before.
    waiting: Vec<Action>,
    /// Between `draft` and `committed`.
    in_commit: Option<ClusterMap>,
    unix_seconds: u64,
    now: Instant,
    /// Answers that wait for OSDs.
    fences: Vec<Fence>,
    /// The map that the answer to the current command waits for.
    awaited: Option<Epoch>,
    /// The newest epoch that an OSD has named that was believed, and which.
    seen: (OsdId, Epoch),
}

/// What the store must make durable.
#[derive(Clone, Debug)]
pub struct Commit {
    /// The map: a new epoch or the one there is.
    pub map: ClusterMap,
    /// What is beside it.
    pub extra: Extra,
}

impl Core {
    /// A core over the newest durable map.
    pub fn new(
        settings: MonSettings,
        now: Instant,
        unix_seconds: u64,
        map: ClusterMap,
        extra: Extra,
    ) -> Self {
        let osds = Osds::new(&map, now.after(settings.start_grace));
        let extra_draft = extra.clone();
        Self {
            settings,
            map,
            extra,
            osds,
            draft: None,
            extra_draft,
            waiting: Vec::new(),
            in_commit: None,
            unix_seconds,
            now,
            fences: Vec::new(),
            awaited: None,
            seen: (OsdId(0), Epoch(0)),
        }
    }

    /// The newest durable map.
    pub fn map(&self) -> &ClusterMap {
        &self.map
    }

    /// What is durable beside it.
    pub fn extra(&self) -> &Extra {
        &self.extra
    }

    pub(crate) fn settings(&self) -> &MonSettings {
        &self.settings
    }

    pub(crate) fn usage(&self) -> Usage<'_> {
        Usage { osds: &self.osds, map: &self.map, now: self.now }
    }

    /// Takes an event; actions that need no new map are put into `out` at once.
    pub fn apply(&mut self, now: Instant, unix_seconds: u64, event: Event<'_>, out: &mut Vec<Action>) {
        assert!(self.in_commit.is_none(), "an event between a draft and its commit");
        (self.now, self.unix_seconds) = (now, unix_seconds);
        match event {
            Event::Connected { connection, osd, incarnation } => {
                self.osds.connected(connection, osd, incarnation)
            }
            Event::Lost { connection } => self.osds.lost(connection, now.after(self.settings.down_after)),
            Event::Boot { connection, osd, incarnation, info } => {
                self.on_boot(connection, osd, incarnation, info, out)
            }
            Event::Seen { osd, incarnation, epoch } => self.heard(osd, incarnation, epoch),
            Event::Report { osd, incarnation, epoch, report } => {
                self.heard(osd, incarnation, epoch);
                self.osds.report(&self.map, now, osd, incarnation, epoch, report)
            }
            Event::Failure { reporter, osd, incarnation } => self.on_failure(reporter, osd, incarnation),
            Event::Command { connection, number, request } => {
                self.on_command(connection, number, request, out)
            }
        }
    }

    /// Marks down whose time has run out.
    pub fn tick(&mut self, now: Instant, unix_seconds: u64) {
        assert!(self.in_commit.is_none(), "a tick between a draft and its commit");
        (self.now, self.unix_seconds) = (now, unix_seconds);
        for osd in self.osds.expired(now) {
            self.mark_down(osd);
        }
    }

    /// When `tick` or `draft` has something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        let draft = self.draft.as_ref().map(|draft| draft.due);
        [draft, self.osds.next_deadline(), self.next_fence()].into_iter().flatten().min()
    }

    /// Whether nobody may hear anything before [`Core::draft`] has been committed.
    pub fn is_due(&self, now: Instant) -> bool {
        self.extra_draft != self.extra || self.draft.as_ref().is_some_and(|draft| draft.due <= now)
    }

    /// Closes the draft, if there is one and it is due. The caller makes it durable and calls [`Core::committed`]; if
    /// that fails the core must not be used any further.
    pub fn draft(&mut self, now: Instant) -> Option<Commit> {
        if !self.is_due(now) {
            return None;
        }
        let map = match self.draft.take() {
            Some(draft) => draft.close(&self.map, self.extra_draft.session_limit, self.unix_seconds),
            None => self.map.clone(),
        };
        self.in_commit = Some(map.clone());
        Some(Commit { map, extra: self.extra_draft.clone() })
    }

    /// The draft is durable: publishes it and gives the answers that waited.
    ///
    /// # Panics
    /// When there is no draft.
    pub fn committed(&mut self, out: &mut Vec<Action>) {
        let map = self.in_commit.take().expect("a commit follows a draft");
        self.extra = self.extra_draft.clone();
        if map.epoch != self.map.epoch {
            assert!(map.epoch == self.map.epoch.next(), "epochs rise by one");
            self.osds.new_map(&map);
            self.map = map;
            out.push(Action::Publish);
        }
        let newest = self.map.epoch;
        out.extend(self.waiting.drain(..).map(|mut action| {
            if let Action::BootReply { epoch, .. } | Action::CommandReply { epoch, .. } = &mut action {
                *epoch = newest;
            }
            action
        }));
    }

    /// Reserves `count` sessions that were never handed out before: usable once the next draft is committed.
    pub fn reserve_sessions(&mut self, count: u64) -> std::ops::Range<u64> {
        let first = self.extra_draft.session_limit.0;
        let end = first.checked_add(count).expect("a cluster does not hand out 2^64 sessions");
        self.extra_draft.session_limit = SessionId(end);
        first..end
    }

    /// The newest state, drafted or durable: what commands are checked against.
    pub(crate) fn newest(&self) -> &ClusterMap {
        self.draft.as_ref().map_or(&self.map, |draft| &draft.map)
    }

    pub(crate) fn newest_extra(&self) -> &Extra {
        &self.extra_draft
    }

    pub(crate) fn newest_extra_mut(&mut self) -> &mut Extra {
        &mut self.extra_draft
    }

    /// Changes the draft; it is committed after the time for batching at the latest, at once for a command.
    pub(crate) fn change(&mut self, at_once: bool, change: Change) {
        let due = if at_once { self.now } else { self.now.after(self.settings.batch) };
        let draft = self.draft.get_or_insert_with(|| Draft::new(self.map.clone(), due));
        draft.due = draft.due.min(due);
        draft.apply(change);
    }

    fn mark_down(&mut self, osd: OsdId) {
        // An old copy of the store makes no epochs.
        if self.outdated().is_none() && self.newest().is_up(osd) {
            self.change(false, Change::Down(osd));
        }
    }

    /// A peer's word is enough when the OSD has no connection here either: both would have to be wrong.
    fn on_failure(&mut self, reporter: OsdId, osd: OsdId, incarnation: Incarnation) {
        let known = self.newest().osds.get(&osd).is_some_and(|osd| osd.incarnation == incarnation);
        if known && reporter != osd && self.newest().is_up(reporter) && self.osds.is_lost(osd) {
            self.osds.forget_deadline(osd);
            self.mark_down(osd);
        }
    }

    fn on_command(&mut self, connection: ConnectionId, number: u64, request: &[u8], out: &mut Vec<Action>) {
        let before = (self.draft.as_ref().map(|draft| draft.changes), self.extra_draft.clone());
        let result = command::execute(self, request);
        let changed = before != (self.draft.as_ref().map(|draft| draft.changes), self.extra_draft.clone());
        let answer = match result {
            Ok(value) => serde_json::json!({ "ok": value }),
            Err(error) => error.to_json(),
        };
        if let Some(since) = self.awaited.take() {
            return self.hold_answer(since, connection, number, answer);
        }
        let reply = Action::CommandReply { connection, number, epoch: self.map.epoch, answer };
        if changed { self.waiting.push(reply) } else { out.push(reply) }
    }
}
