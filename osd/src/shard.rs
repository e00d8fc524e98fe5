//! One reactor's part of an OSD: it binds store, PGs and connections.
//!
//! One poll takes all frames that have arrived, steps their PGs, lets the store write what they submitted as one
//! commit, and sends what completions allow.

pub mod counters;
mod deliver;
pub mod links;
mod maps;
pub mod peers;
mod seam;
mod stalled;

use crate::map_client::{BootError, MapAction, MapClient, MapClientSettings};
use crate::pg::{Actions, Context, Payload, Pg, PgEvent, RETRY_INTERVAL, Requester, ticket};
use crate::store::Store;
use crate::store::api::StoreEvent;
use counters::ShardCounters;
use deliver::Backlog;
use links::{ShardLinks, ShardMessage};
use loligo_config::id::{CoreId, Epoch, Incarnation, OsdId, PgId, SessionId};
use loligo_config::map::ClusterMap;
use loligo_net::messenger::{DownReason, Messenger, MessengerEvent};
use loligo_net::wire::handshake::{Identity, Role};
use loligo_net::wire::mon::OsdReport;
use loligo_net::wire::op::OpKind;
use loligo_net::wire::{Body, Message, Received};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Clock, ConnectionId, DiskError, Instant, World};
use loligo_reactor::planted::{self, Bug};
use loligo_reactor::poller::{Activity, Poller};
use peers::Peers;
use stalled::Stalled;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Messages of other shards taken in one poll.
const MAILBOX_BUDGET: usize = 64;
/// Connections begun in one poll.
const DIAL_BUDGET: usize = 16;

/// What one shard is told at its start.
#[derive(Clone, Debug)]
pub struct ShardSettings {
    /// The OSD.
    pub osd: OsdId,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// The reactor that runs it: clients find it in the map under this number.
    pub core: CoreId,
    /// Buffers.
    pub pool: BufferPool,
    /// On the first shard: how to talk with the mon.
    pub map_client: Option<MapClientSettings>,
}

/// Why an OSD must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardFailure {
    /// Its device failed a write or a flush: nothing that it says can be believed any more.
    #[error("the device has failed: {0}")]
    Device(DiskError),
    /// The mon does not take it.
    #[error(transparent)]
    Boot(BootError),
}

#[derive(Debug)]
struct Slot {
    pg: Pg,
    /// The core of each other member on which its PG lives, as far as its answers have shown.
    cores: Vec<(OsdId, CoreId)>,
    /// Who asked last, and over which connection: answers go there.
    asked_by: Option<(OsdId, ConnectionId)>,
    /// Whether it is in the list of those that wait for room.
    is_stalled: bool,
}

#[derive(Clone, Copy, Debug)]
struct ClientState {
    /// The session that it was welcomed with.
    session: SessionId,
    outstanding: u32,
    credits: u32,
}

/// One shard. See the top of the file.
pub struct Shard<W: World> {
    settings: ShardSettings,
    store: Store<W::Device>,
    messenger: Messenger<W::Transport, W::Entropy>,
    clock: W::Clock,
    links: ShardLinks,
    map: Option<Arc<ClusterMap>>,
    map_client: Option<MapClient>,
    map_actions: Vec<MapAction>,
    /// By the slot in tickets; a slot is never used again.
    slots: Vec<Option<Slot>>,
    by_pg: BTreeMap<PgId, usize>,
    removing: Vec<PgId>,
    fenced: Vec<SessionId>,
    peers: Peers,
    clients: BTreeMap<ConnectionId, ClientState>,
    backlog: Backlog,
    stalled: Stalled,
    actions: Actions,
    net_events: VecDeque<MessengerEvent>,
    store_events: VecDeque<StoreEvent>,
    next_tick: Instant,
    next_part_report: Instant,
    next_flush: Instant,
    parts: BTreeMap<u16, OsdReport>,
    counters: ShardCounters,
    failure: Option<ShardFailure>,
}

impl<W: World> Shard<W> {
    /// A shard on a mounted store. PGs serve once a map says so.
    pub fn new(
        settings: ShardSettings,
        store: Store<W::Device>,
        messenger: Messenger<W::Transport, W::Entropy>,
        clock: W::Clock,
        links: ShardLinks,
    ) -> Self {
        let mut shard = Self {
            map_client: None,
            store,
            messenger,
            clock,
            links,
            map: None,
            map_actions: Vec::new(),
            slots: Vec::new(),
            by_pg: BTreeMap::new(),
            removing: Vec::new(),
            fenced: Vec::new(),
            peers: Peers::default(),
            clients: BTreeMap::new(),
            backlog: Backlog::default(),
            stalled: Stalled::default(),
            actions: Actions::new(),
            net_events: VecDeque::new(),
            store_events: VecDeque::new(),
            next_tick: Instant(0),
            next_part_report: Instant(0),
            next_flush: Instant(0),
            parts: BTreeMap::new(),
            counters: ShardCounters::default(),
            failure: None,
            settings,
        };
        shard.adopt_stored_pgs();
        shard.begin_with_kept_map();
        shard
    }

    fn adopt_stored_pgs(&mut self) {
        let stored: Vec<_> = self.store.pgs().collect();
        self.links.register(stored.iter().map(|(id, status)| (*id, status.meta.promised)));
        for (id, _) in stored {
            self.add_slot(id);
        }
    }

    /// The newest map on the device tells where peers were; whether this start is up, only the mon can say.
    fn begin_with_kept_map(&mut self) {
        let kept = self.store.kept_map().and_then(|(_, bytes)| ClusterMap::decode(bytes).ok());
        if let Some(settings) = self.settings.map_client.take() {
            let kept = kept.as_ref().filter(|map| map.cluster == settings.cluster);
            let newest = kept.map_or(Epoch(0), |map| map.epoch);
            self.messenger.set_cluster(settings.cluster);
            self.map_client = Some(MapClient::new(settings, newest));
        }
        self.messenger.set_epoch(kept.map_or(Epoch(0), |map| map.epoch));
    }

    fn add_slot(&mut self, id: PgId) -> usize {
        let slot = self.slots.len();
        let number = u32::try_from(slot).expect("fewer than 2^24 PGs in the life of a process");
        assert!(number < 1 << 24, "a ticket has 24 bits for the slot");
        let pg = Pg::new(id, self.settings.osd, number, self.store.pg(id));
        self.slots.push(Some(Slot { pg, cores: Vec::new(), asked_by: None, is_stalled: false }));
        self.by_pg.insert(id, slot);
        slot
    }

    /// Why the process must end, if so.
    pub fn failure(&self) -> Option<ShardFailure> {
        self.failure
    }

    /// Sums since the start.
    pub fn counters(&self) -> &ShardCounters {
        &self.counters
    }

    /// The newest map.
    pub fn map(&self) -> Option<&Arc<ClusterMap>> {
        self.map.as_ref()
    }

    /// The PGs of this shard.
    pub fn pgs(&self) -> impl Iterator<Item = &Pg> {
        self.slots.iter().flatten().map(|slot| &slot.pg)
    }

    /// Its store.
    pub fn store(&self) -> &Store<W::Device> {
        &self.store
    }

    /// Asks the store for a checkpoint before a clean stop.
    pub fn store_mut(&mut self) -> &mut Store<W::Device> {
        &mut self.store
    }

    /// Where messages of other shards arrive: attach the reactor's waker to it.
    pub fn links(&self) -> &ShardLinks {
        &self.links
    }

    /// Its messenger, for what the executable sets up.
    pub fn messenger_mut(&mut self) -> &mut Messenger<W::Transport, W::Entropy> {
        &mut self.messenger
    }

    /// Ends the shard and gives the store back.
    pub fn into_store(self) -> Store<W::Device> {
        self.store
    }

    fn epoch(&self) -> Epoch {
        self.map.as_ref().map_or(Epoch(0), |map| map.epoch)
    }

    /// Steps one PG and does what it asks for.
    fn step(&mut self, slot: usize, now: Instant, event: PgEvent) {
        let Some(Some(entry)) = self.slots.get_mut(slot) else { return };
        let mut cx = Context { now, store: &mut self.store, pool: &self.settings.pool, fenced: &self.fenced };
        entry.pg.step(&mut cx, event, &mut self.actions);
        if entry.pg.wants_room() && !std::mem::replace(&mut entry.is_stalled, true) {
            self.stalled.push(slot);
        }
        self.deliver(slot, now);
        if let Some(Some(Slot { pg, .. })) = self.slots.get_mut(slot)
            && pg.has_unsent()
        {
            // Read anew: `now` is the same for all that came with this poll.
            pg.note_sent(self.clock.now().max(now));
        }
    }

    fn step_all(&mut self, now: Instant, event: impl Fn() -> PgEvent, wants: impl Fn(&Slot) -> bool) {
        for slot in 0..self.slots.len() {
            if self.slots[slot].as_ref().is_some_and(&wants) {
                self.step(slot, now, event());
            }
        }
    }

    // -------------------------------------------------------------------------------------- the network

    fn on_net(&mut self, now: Instant, event: MessengerEvent) {
        match event {
            MessengerEvent::Up { connection, peer, accepted, credits, .. } => {
                self.on_up(now, connection, &peer, accepted, credits);
            }
            MessengerEvent::Down { connection, reason, .. } => self.on_down(now, connection, reason),
            MessengerEvent::Message { connection, received, arrived } => {
                self.on_message(now, connection, received, arrived);
            }
        }
    }

    fn on_up(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        peer: &Identity,
        accepted: bool,
        credits: u32,
    ) {
        if accepted {
            if let Role::Client(session) = peer.role {
                self.clients.insert(connection, ClientState { session, outstanding: 0, credits });
            }
            return;
        }
        if let Some(client) = self.map_client.as_mut().filter(|client| client.owns(connection)) {
            client.on_up(now, &mut self.map_actions);
            return;
        }
        match self.peers.on_up(connection, peer.incarnation) {
            Some((osd, core)) => {
                self.step_all(now, || PgEvent::PeerUp(osd), |slot| slot.uses(osd, core));
            }
            None => self.messenger.close(connection),
        }
    }

    fn on_down(&mut self, now: Instant, connection: ConnectionId, reason: DownReason) {
        self.backlog.forget(connection);
        if let Some(client) = self.map_client.as_mut().filter(|client| client.owns(connection)) {
            return client.on_down(now, reason);
        }
        if let Some((osd, core)) = self.peers.on_down(connection, now) {
            self.step_all(now, || PgEvent::PeerDown(osd), |slot| slot.uses(osd, core));
        }
        if self.clients.remove(&connection).is_some() {
            let from = Requester { core: self.links.index(), connection };
            self.step_all(now, || PgEvent::RequesterGone(from), |_| true);
            for shard in self.links.others() {
                self.links.send(shard, ShardMessage::Gone(from));
            }
        }
    }

    fn on_message(&mut self, now: Instant, connection: ConnectionId, received: Received, arrived: Instant) {
        let Received { envelope, data, checksums, .. } = received;
        let payload = data.map(|data| Payload { data, checksums: Some(checksums) });
        match envelope.message {
            Message::Op(request) => {
                let from = Requester { core: self.links.index(), connection };
                let op = crate::pg::op::Arrival { request, epoch: envelope.epoch, payload, from, arrived };
                self.on_op(now, op);
            }
            Message::Map(_) | Message::BootReply(_) => {
                self.on_mon(now, connection, envelope.message, payload);
            }
            message => self.on_peer_message(now, connection, message, payload, arrived),
        }
    }

    fn on_mon(&mut self, now: Instant, connection: ConnectionId, message: Message, payload: Option<Payload>) {
        let Some(client) = self.map_client.as_mut().filter(|client| client.owns(connection)) else { return };
        match (message, payload) {
            (Message::BootReply(reply), _) => client.on_boot_reply(now, reply),
            (Message::Map(_), Some(payload)) => {
                if let Some(map) = client.on_map(&payload.data) {
                    self.store.keep_map(map.epoch, &payload.data);
                    self.spread_map(now, Arc::new(map));
                }
            }
            _ => {}
        }
    }

    fn on_peer_message(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        message: Message,
        payload: Option<Payload>,
        arrived: Instant,
    ) {
        let Some(Identity { role: Role::Osd(from), .. }) = self.messenger.peer(connection).copied() else {
            return;
        };
        let Some(pg) = pg_of(&message) else { return };
        // Queries go to every core of an OSD; the one that has the PG answers.
        let Some(slot) = self.by_pg.get(&pg).copied() else { return };
        if let Some(Some(entry)) = self.slots.get_mut(slot) {
            match self.peers.key(connection) {
                Some((_, core)) => entry.learn_core(from, core),
                None if planted::active(Bug::PeerAnsweredOnOldConnection) && entry.asked_by.is_some() => {}
                None => entry.asked_by = Some((from, connection)),
            }
        }
        self.step(slot, now, PgEvent::Peer { from, message, payload, arrived });
    }

    // ----------------------------------------------------------------------------------------- the rest

    fn on_store(&mut self, now: Instant, event: StoreEvent) {
        let (ticket, event) = match event {
            StoreEvent::Committed { ticket, device_ns } => {
                self.counters.device_write.record(u64::from(device_ns));
                (ticket, PgEvent::Committed { ticket, device_ns })
            }
            StoreEvent::Failed { ticket, error } => (ticket, PgEvent::Failed { ticket, error }),
            StoreEvent::Read { ticket, result, device_ns } => {
                (ticket, PgEvent::Read { ticket, result, device_ns })
            }
        };
        self.step(ticket::slot(ticket) as usize, now, event);
    }

    /// After a failed write every PG stops, also those that had nothing in flight.
    fn watch_device(&mut self, now: Instant) {
        if self.failure.is_some() {
            return;
        }
        if let Some(error) = self.store.failed() {
            tracing::error!(osd = self.settings.osd.0, %error, "the device failed: this OSD stops");
            self.failure = Some(ShardFailure::Device(error));
            let failed = || PgEvent::Failed { ticket: loligo_reactor::env::Ticket(0), error };
            self.step_all(now, failed, |_| true);
        }
        if let Some(error) = self.map_client.as_ref().and_then(MapClient::failure) {
            tracing::error!(osd = self.settings.osd.0, %error, "this OSD cannot join the cluster");
            self.failure = Some(ShardFailure::Boot(error));
        }
    }

    fn on_timers(&mut self, now: Instant) {
        if self.next_tick <= now {
            self.next_tick = now.after(RETRY_INTERVAL / 2);
            self.step_all(now, || PgEvent::Tick, |slot| slot.pg.wants_tick());
            self.go_on_removing();
        }
        for _ in 0..DIAL_BUDGET {
            let Some(dial) = self.peers.next_dial(now) else { break };
            let connection = self.messenger.connect(dial.address, Role::Osd(dial.key.0), dial.key.1);
            self.peers.connecting(dial.key, connection);
        }
        self.note_epochs(now);
        self.report(now);
        self.run_map_client(now);
    }

    /// Messages that a full mailbox did not take are tried again after others had time to read.
    fn flush_links(&mut self, now: Instant) -> Activity {
        let busy = self.links.is_blocked() && self.links.flush();
        self.next_flush = now.after(links::OUTBOX_RETRY);
        Activity::from_busy(busy)
    }

    fn run_map_client(&mut self, now: Instant) {
        let Some(client) = self.map_client.as_mut().filter(|_| self.links.is_complete()) else { return };
        client.tick(now, &mut self.map_actions);
        for action in self.map_actions.drain(..) {
            match action {
                MapAction::Connect(address) => {
                    client.connecting(self.messenger.connect(address, Role::Mon, CoreId(0)));
                }
                MapAction::Close(connection) => self.messenger.close(connection),
                MapAction::Send { connection, message, data } => {
                    let data = data.map(|data| self.settings.pool.copy_of(&data));
                    let body = match data {
                        None => Body::NONE,
                        Some(Ok(data)) => Body::of(data),
                        // No memory now; reports and boots are repeated.
                        Some(Err(_)) => continue,
                    };
                    if self.messenger.send(connection, message, body).is_err() {
                        // A mon that does not take a few small messages is as good as gone.
                        self.messenger.close(connection);
                    }
                }
            }
        }
    }
}

impl Slot {
    /// Whether this PG's primary, here, talks to that core.
    fn uses(&self, osd: OsdId, core: CoreId) -> bool {
        self.pg.acting().contains(&osd)
            && self.cores.iter().find(|(known, _)| *known == osd).is_none_or(|(_, known)| *known == core)
    }

    fn core_of(&self, osd: OsdId) -> Option<CoreId> {
        self.cores.iter().find(|(known, _)| *known == osd).map(|(_, core)| *core)
    }

    fn learn_core(&mut self, osd: OsdId, core: CoreId) {
        match self.cores.iter_mut().find(|(known, _)| *known == osd) {
            Some((_, known)) => *known = core,
            None => self.cores.push((osd, core)),
        }
    }
}

/// The PG that a message between OSDs is about.
fn pg_of(message: &Message) -> Option<PgId> {
    Some(match message {
        Message::RepWrite(write) => write.pg,
        Message::RepAck(ack) => ack.pg,
        Message::PeerQuery(query) => query.pg,
        Message::PeerInfo(info) => info.pg,
        Message::PeerFetch(fetch) => fetch.pg,
        Message::PeerPush(push) => push.pg,
        Message::PeerPushAck(ack) => ack.pg,
        Message::PeerPushDone(done) => done.pg,
        Message::PeerActivate(activate) | Message::PeerActivated(activate) => activate.pg,
        _ => return None,
    })
}

impl<W: World> Poller for Shard<W> {
    fn name(&self) -> &'static str {
        "osd shard"
    }

    fn poll(&mut self, now: Instant) -> Activity {
        let mut busy = Activity::Idle;
        if let Some(map) = self.links.newer_map(self.epoch()) {
            busy = Activity::Busy;
            self.on_map(now, map);
        }
        for _ in 0..MAILBOX_BUDGET {
            let Some(message) = self.links.receiver().receive() else { break };
            busy = Activity::Busy;
            self.on_shard_message(now, message);
        }
        let mut net = std::mem::take(&mut self.net_events);
        busy = busy.or(self.messenger.poll(now, &mut net));
        while let Some(event) = net.pop_front() {
            self.on_net(now, event);
        }
        self.net_events = net;
        let mut stored = std::mem::take(&mut self.store_events);
        // A later time than this poll's: records are submitted in there, and the device's time begins then.
        let has_moved = self.store.poll(self.clock.now().max(now), &mut stored);
        busy = busy.or(has_moved);
        if !stored.is_empty() {
            let now = self.clock.now();
            while let Some(event) = stored.pop_front() {
                self.on_store(now, event);
            }
        }
        self.store_events = stored;
        self.retry_stalled(now, has_moved);
        self.watch_device(now);
        self.on_timers(now);
        self.flush_links(now).or(busy).or(self.drain_backlog())
    }

    fn next_deadline(&self) -> Option<Instant> {
        let ticks = self.slots.iter().flatten().any(|slot| slot.pg.wants_tick()) || !self.removing.is_empty();
        [
            ticks.then_some(self.next_tick),
            self.messenger.next_deadline(),
            self.store.next_deadline(),
            self.map_client.as_ref().filter(|_| self.links.is_complete()).map(MapClient::next_deadline),
            self.links.is_blocked().then_some(self.next_flush),
            self.stalled.next_deadline(),
            self.peers.next_deadline(),
            // The first shard's reports are the map client's.
            (self.links.index() != 0).then_some(self.next_part_report),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    fn expecting(&self) -> bool {
        self.store.in_flight() > 0
            || self.links.is_blocked()
            || !self.backlog.is_empty()
            || self.clients.values().any(|client| client.outstanding > 0)
            || self.slots.iter().flatten().any(|slot| slot.pg.is_busy())
    }
}

/// Whether a request's data travels with it: only writes bring some.
fn brings_data(kind: OpKind) -> bool {
    kind == OpKind::Write
}

#[cfg(test)]
mod tests;
