//! The mon as a poller: a messenger on one side, a store on the other, the core between them.

#[cfg(test)]
mod tests;

use crate::core::{Action, Core, Event, MonSettings};
use crate::store::{Extra, MapStore, StoreError};
use loligo_config::id::{ClusterId, Epoch, OsdId};
use loligo_config::map::{ClusterMap, MapError};
use loligo_net::messenger::{Messenger, MessengerEvent, SendError};
use loligo_net::wire::handshake::Role;
use loligo_net::wire::{Body, Message, Received, mon as wire};
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::{Clock, ConnectionId, Instant, World};
use loligo_reactor::planted::{self, Bug};
use loligo_reactor::poller::{Activity, Poller};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Sessions made durable at a time: one disk flush for a thousand clients.
const SESSIONS_RESERVED: u64 = 1000;
/// More are reserved when fewer are left.
const SESSIONS_LOW: u64 = 200;
/// Messenger events taken in one poll.
const EVENTS_MAX: usize = 256;
/// Answers that wait for room in a send queue; whose peer does not read is closed beyond this.
const OUTBOX_MAX: usize = 4096;
/// How soon a refused send is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(5);

/// Why a mon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store is another cluster's.
    #[error(
        "the mon's store is of cluster {found}, the host file names {expected}: correct the id or the data folder"
    )]
    OtherCluster {
        /// The store's.
        found: ClusterId,
        /// The host file's.
        expected: ClusterId,
    },
    /// The cluster cannot be made.
    #[error("the new cluster's map is invalid: {0}")]
    NewCluster(#[from] MapError),
}

/// The keeper of the cluster map.
pub struct Mon<W: World, S: MapStore> {
    core: Core,
    messenger: Messenger<W::Transport, W::Entropy>,
    pool: BufferPool,
    clock: W::Clock,
    store: S,
    inbox: VecDeque<MessengerEvent>,
    actions: Vec<Action>,
    outbox: VecDeque<(ConnectionId, Message, Option<Vec<u8>>)>,
    /// Who wants maps, and the newest that each has been sent.
    subscribers: BTreeMap<ConnectionId, Epoch>,
    /// The newest map as bytes, once made for all.
    encoded: Vec<u8>,
    /// Sends that were refused are tried again then.
    retry_at: Option<Instant>,
    failed: bool,
}

impl<W: World, S: MapStore> Mon<W, S> {
    /// Loads the newest map, or makes a new cluster. `pool` gives the buffers for answers and maps.
    ///
    /// # Errors
    /// When the store cannot be used, or is another cluster's.
    pub fn new(
        settings: MonSettings,
        mut messenger: Messenger<W::Transport, W::Entropy>,
        pool: BufferPool,
        clock: W::Clock,
        mut store: S,
    ) -> Result<Self, StartError> {
        let (map, extra) = match store.load()? {
            Some(kept) => kept,
            None => make_cluster(&settings, clock.unix_seconds(), &mut store)?,
        };
        if let Some(expected) = settings.expected_cluster.filter(|expected| *expected != map.cluster) {
            return Err(StartError::OtherCluster { found: map.cluster, expected });
        }
        messenger.set_cluster(map.cluster);
        let mut core = Core::new(settings, clock.now(), clock.unix_seconds(), map, extra);
        // The ids that an earlier process reserved are left out: which of them it handed out is not known.
        let sessions = core.reserve_sessions(SESSIONS_RESERVED);
        let commit = core.draft(clock.now()).expect("the reservation is to be made durable");
        store.commit(&commit.map, &commit.extra)?;
        core.committed(&mut Vec::new());
        let sessions = if planted::active(Bug::SessionsReused) { 1..sessions.end } else { sessions };
        messenger.set_sessions(sessions);
        let mut mon = Self {
            core,
            messenger,
            pool,
            clock,
            store,
            inbox: VecDeque::new(),
            actions: Vec::new(),
            outbox: VecDeque::new(),
            subscribers: BTreeMap::new(),
            encoded: Vec::new(),
            retry_at: None,
            failed: false,
        };
        mon.take_map();
        Ok(mon)
    }

    /// The newest durable map.
    pub fn map(&self) -> &ClusterMap {
        self.core.map()
    }

    /// The messenger, for what only it knows.
    pub fn messenger_mut(&mut self) -> &mut Messenger<W::Transport, W::Entropy> {
        &mut self.messenger
    }

    /// Whether the store failed. The mon has stopped: which map is the newest is only known after a new start.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Tells the messenger what the new map says.
    fn take_map(&mut self) {
        let map = self.core.map();
        self.encoded = map.encode();
        self.messenger.set_epoch(map.epoch);
        for osd in map.osds.values() {
            self.messenger.set_incarnation(osd.id, osd.incarnation);
        }
        self.messenger.set_fenced(map.blocklist.iter().map(|entry| entry.session));
    }

    fn on_event(&mut self, now: Instant, event: MessengerEvent) {
        match event {
            MessengerEvent::Up { connection, peer, .. } => match peer.role {
                Role::Osd(osd) => {
                    let incarnation = peer.incarnation;
                    self.apply(now, Event::Connected { connection, osd, incarnation });
                }
                // Nobody but a liar has a session that was not handed out.
                Role::Client(session) if session >= self.core.extra().session_limit => {
                    self.messenger.close(connection);
                }
                Role::Client(_) | Role::Mon => {}
            },
            MessengerEvent::Down { connection, .. } => {
                self.subscribers.remove(&connection);
                self.outbox.retain(|(to, ..)| *to != connection);
                self.apply(now, Event::Lost { connection });
            }
            MessengerEvent::Message { connection, received, .. } => {
                self.on_message(now, connection, &received)
            }
        }
    }

    fn on_message(&mut self, now: Instant, connection: ConnectionId, received: &Received) {
        let data = received.data.as_deref().unwrap_or_default();
        match received.envelope.message {
            Message::Subscribe(wire::Subscribe { have }) => {
                self.subscribers.insert(connection, have);
                let peer = self.messenger.peer(connection).map(|peer| (peer.role, peer.incarnation));
                if let Some((Role::Osd(osd), incarnation)) = peer {
                    self.apply(now, Event::Seen { osd, incarnation, epoch: have });
                }
            }
            Message::Command(wire::Command { number }) => {
                self.apply(now, Event::Command { connection, number, request: data });
            }
            Message::Boot(boot) if self.is_from(connection, boot.osd) => {
                let info = postcard::from_bytes(data).ok();
                let (osd, incarnation) = (boot.osd, boot.incarnation);
                self.apply(now, Event::Boot { connection, osd, incarnation, info });
            }
            Message::Report(report) if self.is_from(connection, report.osd) => {
                let wire::Report { osd, incarnation, epoch } = report;
                if let Ok(report) = postcard::from_bytes(data) {
                    self.apply(now, Event::Report { osd, incarnation, epoch, report });
                }
            }
            Message::Failure(failure) => {
                let Some(Role::Osd(reporter)) = self.messenger.peer(connection).map(|peer| peer.role) else {
                    return;
                };
                let (osd, incarnation) = (failure.osd, failure.incarnation);
                self.apply(now, Event::Failure { reporter, osd, incarnation });
            }
            // Somebody speaks in another's name, or sends what a mon has no use for.
            _ => self.messenger.close(connection),
        }
    }

    fn is_from(&self, connection: ConnectionId, osd: OsdId) -> bool {
        self.messenger.peer(connection).is_some_and(|peer| peer.role == Role::Osd(osd))
    }

    fn apply(&mut self, now: Instant, event: Event<'_>) {
        self.core.apply(now, self.clock.unix_seconds(), event, &mut self.actions);
    }

    /// Makes the draft durable and only then speaks of it.
    fn commit(&mut self, now: Instant) -> Activity {
        let sessions = self.more_sessions();
        let Some(commit) = self.core.draft(now) else { return Activity::Idle };
        let stored = match planted::active(Bug::MapNotDurable) {
            true => Ok(()),
            false => self.store.commit(&commit.map, &commit.extra),
        };
        if let Err(error) = stored {
            tracing::error!(epoch = commit.map.epoch.0, %error, "the map cannot be made durable: this mon stops");
            self.failed = true;
            return Activity::Busy;
        }
        self.core.committed(&mut self.actions);
        if let Some(sessions) = sessions {
            self.messenger.set_sessions(sessions);
        }
        Activity::Busy
    }

    /// What is left and what is reserved now are one range: nobody else reserves.
    fn more_sessions(&mut self) -> Option<std::ops::Range<u64>> {
        if self.core.outdated().is_some() {
            // They may have been handed out before.
            self.messenger.set_sessions(0..0);
            return None;
        }
        let left = self.messenger.sessions_left();
        if left >= SESSIONS_LOW {
            return None;
        }
        let new = self.core.reserve_sessions(SESSIONS_RESERVED);
        Some(new.start - left..new.end)
    }

    fn act(&mut self) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Publish => self.take_map(),
                Action::BootReply { connection, status, epoch } => {
                    let message = Message::BootReply(wire::BootReply { status, epoch });
                    self.outbox.push_back((connection, message, None));
                }
                Action::CommandReply { connection, number, epoch, answer } => {
                    let message = Message::CommandReply(wire::CommandReply { number, epoch });
                    self.outbox.push_back((connection, message, Some(answer.to_string().into_bytes())));
                }
            }
        }
    }

    /// Sends what waits. A peer that takes nothing more is tried again later; its neighbours are not held up.
    fn send(&mut self, now: Instant) -> Activity {
        self.retry_at = None;
        let mut sent = self.send_maps();
        for (connection, message, data) in std::mem::take(&mut self.outbox) {
            match self.try_send(connection, message, data.as_deref()) {
                Ok(()) => sent = true,
                Err(SendError::QueueFull) if self.outbox.len() < OUTBOX_MAX => {
                    self.outbox.push_back((connection, message, data));
                }
                Err(SendError::Closed) => {}
                Err(error) => {
                    tracing::warn!(connection = connection.0, %error, "an answer cannot be sent: connection closed");
                    self.messenger.close(connection);
                }
            }
        }
        let newest = self.core.map().epoch;
        if !self.outbox.is_empty() || self.subscribers.values().any(|have| *have < newest) {
            self.retry_at = Some(now.after(RETRY_AFTER));
        }
        Activity::from_busy(sent)
    }

    fn send_maps(&mut self) -> bool {
        let epoch = self.core.map().epoch;
        if self.subscribers.values().all(|have| *have >= epoch) {
            return false;
        }
        let Ok(data) = self.pool.copy_of(&self.encoded) else { return false };
        let message = Message::Map(wire::Map { epoch });
        let mut sent = false;
        for (connection, have) in self.subscribers.iter_mut().filter(|(_, have)| **have < epoch) {
            if self.messenger.send(*connection, message, Body::of(data.clone())).is_ok() {
                (*have, sent) = (epoch, true);
            }
        }
        sent
    }

    fn try_send(&mut self, to: ConnectionId, message: Message, data: Option<&[u8]>) -> Result<(), SendError> {
        let data: Option<SharedBuffer> = match data {
            Some(data) => Some(self.pool.copy_of(data).map_err(|_| SendError::QueueFull)?),
            None => None,
        };
        self.messenger.send(to, message, data.map_or(Body::NONE, Body::of))
    }
}

fn make_cluster<S: MapStore>(
    settings: &MonSettings,
    unix_seconds: u64,
    store: &mut S,
) -> Result<(ClusterMap, Extra), StartError> {
    let cluster = settings.expected_cluster.unwrap_or(settings.new_cluster);
    let map = ClusterMap::new(cluster, settings.auth, unix_seconds);
    map.check()?;
    let extra = Extra::default();
    store.commit(&map, &extra)?;
    Ok((map, extra))
}

impl<W: World, S: MapStore> Poller for Mon<W, S> {
    fn name(&self) -> &'static str {
        "mon"
    }

    fn poll(&mut self, now: Instant) -> Activity {
        if self.failed {
            return Activity::Idle;
        }
        let mut activity = self.messenger.poll(now, &mut self.inbox);
        for _ in 0..EVENTS_MAX {
            let Some(event) = self.inbox.pop_front() else { break };
            self.on_event(now, event);
        }
        self.core.tick(now, self.clock.unix_seconds());
        activity = activity.or(self.commit(now));
        self.core.answer_fences(now, &mut self.actions);
        if self.failed {
            return activity;
        }
        self.act();
        let waiting = self.retry_at.is_some_and(|at| at > now);
        if !waiting || activity == Activity::Busy {
            activity = activity.or(self.send(now));
        }
        activity.or(Activity::from_busy(!self.inbox.is_empty()))
    }

    fn next_deadline(&self) -> Option<Instant> {
        let deadlines = [self.messenger.next_deadline(), self.core.next_deadline(), self.retry_at];
        deadlines.into_iter().flatten().min()
    }

    fn expecting(&self) -> bool {
        false
    }
}
