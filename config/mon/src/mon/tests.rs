//! The whole mon on a network in memory.

use super::*;
use crate::store::Memory;
use loligo_config::id::{CoreId, DeviceId, Incarnation, SessionId};
use loligo_net::messenger::MessengerSettings;
use loligo_net::transport::memory::{MemoryHub, MemoryTransport};
use loligo_net::wire::handshake::Identity;
use loligo_net::wire::mon::{Boot, BootInfo, BootReply, BootStatus, Command, CommandReply, Map, Subscribe};
use loligo_reactor::env::{BlockDevice, Completions, DiskOp, Entropy, Geometry, QueueFull, Ticket};
use serde_json::{Value, json};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::rc::Rc;
use uuid::Uuid;

#[derive(Clone, Default)]
struct TestClock {
    now: Rc<Cell<u64>>,
}

impl Clock for TestClock {
    fn now(&self) -> Instant {
        Instant(self.now.get())
    }

    fn unix_seconds(&self) -> u64 {
        1_800_000_000
    }
}

struct Counter(u64);

impl Entropy for Counter {
    fn next_u64(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }
}

/// A mon has no device.
enum NoDevice {}

impl BlockDevice for NoDevice {
    fn geometry(&self) -> &Geometry {
        match *self {}
    }

    fn submit(&mut self, _: DiskOp, _: Ticket) -> Result<(), QueueFull<DiskOp>> {
        match *self {}
    }

    fn poll(&mut self, _: u32, _: &mut Completions) -> u32 {
        match *self {}
    }

    fn in_flight(&self) -> u32 {
        match *self {}
    }
}

struct TestWorld;

impl World for TestWorld {
    type Clock = TestClock;
    type Entropy = Counter;
    type Device = NoDevice;
    type Transport = MemoryTransport;
}

struct Peer {
    messenger: Messenger<MemoryTransport, Counter>,
    connection: ConnectionId,
    events: VecDeque<MessengerEvent>,
}

struct Bed {
    hub: MemoryHub,
    clock: TestClock,
    pool: BufferPool,
    mon: Option<Mon<TestWorld, Memory>>,
    store: Memory,
    peers: Vec<Peer>,
}

const MON: u16 = 1;

fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

impl Bed {
    fn new() -> Self {
        let (hub, clock, pool) = (MemoryHub::new(), TestClock::default(), BufferPool::new(256 << 20));
        let mut bed = Self { hub, clock, pool, mon: None, store: Memory::default(), peers: Vec::new() };
        bed.pass(1000);
        bed.start_mon();
        bed
    }

    fn settings(&self, role: Role, incarnation: u64) -> MessengerSettings {
        let identity = Identity { cluster: None, role, incarnation: Incarnation(incarnation) };
        MessengerSettings::new(identity, self.pool.clone())
    }

    fn start_mon(&mut self) {
        self.mon = None;
        let messenger =
            Messenger::new(self.settings(Role::Mon, 1), self.hub.endpoint(address(MON)), Counter(0));
        let settings = MonSettings::new(ClusterId(Uuid::from_u128(1)));
        let mon = Mon::new(settings, messenger, self.pool.clone(), self.clock.clone(), self.store.clone());
        self.mon = Some(mon.unwrap_or_else(|error| panic!("{error}")));
    }

    fn mon(&mut self) -> &mut Mon<TestWorld, Memory> {
        self.mon.as_mut().unwrap()
    }

    /// Polls everybody for some milliseconds.
    fn pass(&mut self, milliseconds: u64) {
        for _ in 0..milliseconds {
            self.clock.now.set(self.clock.now.get() + 1_000_000);
            let now = self.clock.now();
            self.hub.set_now(now);
            loop {
                let mut activity = self.mon.as_mut().map_or(Activity::Idle, |mon| mon.poll(now));
                for peer in &mut self.peers {
                    activity = activity.or(peer.messenger.poll(now, &mut peer.events));
                }
                if activity == Activity::Idle {
                    break;
                }
            }
        }
    }

    fn connect(&mut self, role: Role, incarnation: u64) -> usize {
        let port = 100 + u16::try_from(self.peers.len()).unwrap();
        let transport = self.hub.endpoint(address(port));
        let mut messenger = Messenger::new(self.settings(role, incarnation), transport, Counter(port.into()));
        let connection = messenger.connect(address(MON), Role::Mon, CoreId(0));
        self.peers.push(Peer { messenger, connection, events: VecDeque::new() });
        self.peers.len() - 1
    }

    fn send(&mut self, peer: usize, message: Message, data: &[u8]) {
        let body = if data.is_empty() { Body::NONE } else { Body::of(self.pool.copy_of(data).unwrap()) };
        let peer = &mut self.peers[peer];
        peer.messenger.send(peer.connection, message, body).unwrap();
    }

    fn messages(&mut self, peer: usize) -> Vec<(Message, Vec<u8>)> {
        let events = self.peers[peer].events.drain(..);
        let messages = events.filter_map(|event| match event {
            MessengerEvent::Message { received, .. } => {
                Some((received.envelope.message, received.data.as_deref().unwrap_or_default().to_vec()))
            }
            _ => None,
        });
        messages.collect()
    }

    fn boot(&mut self, osd: u32) -> usize {
        let (id, incarnation) = (OsdId(osd), Incarnation(50 + u64::from(osd)));
        let peer = self.connect(Role::Osd(id), incarnation.0);
        self.pass(1);
        let info = BootInfo {
            device: DeviceId(Uuid::from_u128(u128::from(osd) + 9)),
            addresses: vec![address(7000 + u16::try_from(osd).unwrap())],
            capacity: 1 << 30,
            host: format!("h{osd}"),
            rack: "default".into(),
            device_class: "ssd".into(),
            newest_map: Epoch(0),
        };
        let boot = Message::Boot(Boot { osd: id, incarnation });
        self.send(peer, boot, &postcard::to_stdvec(&info).unwrap());
        peer
    }

    fn command(&mut self, peer: usize, request: &Value) -> Value {
        self.send(peer, Message::Command(Command { number: 3 }), request.to_string().as_bytes());
        self.pass(1);
        let messages = self.messages(peer);
        let mut answers = messages.iter().filter_map(|(message, data)| match message {
            Message::CommandReply(CommandReply { number: 3, .. }) => serde_json::from_slice(data).ok(),
            _ => None,
        });
        answers.next_back().expect("an answer within a millisecond")
    }
}

#[test]
fn boots_maps_and_commands_travel() {
    let mut bed = Bed::new();
    let osds = [0, 1, 2].map(|osd| bed.boot(osd));
    let client = bed.connect(Role::Client(SessionId(0)), 7);
    bed.pass(1);
    assert_eq!(bed.peers[client].messenger.session(), SessionId(1));
    bed.send(client, Message::Subscribe(Subscribe { have: Epoch(0) }), &[]);
    bed.pass(30);
    for osd in osds {
        let taken = Message::BootReply(BootReply { status: BootStatus::Taken, epoch: Epoch(2) });
        assert_eq!(bed.messages(osd), [(taken, vec![])], "three boots, one epoch");
    }
    let maps = bed.messages(client);
    let epochs: Vec<Message> = maps.iter().map(|(message, _)| *message).collect();
    assert_eq!(epochs, [1, 2].map(|epoch| Message::Map(Map { epoch: Epoch(epoch) })));
    let map = ClusterMap::decode(&maps[1].1).unwrap();
    assert_eq!(map.osds.values().filter(|osd| osd.up).count(), 3);
    let made = bed.command(client, &json!({ "prefix": "pool create", "pool": "rbd", "pg_count": 8 }));
    assert_eq!(made["ok"]["pg_count"], 8, "{made}");
    assert_eq!(bed.mon().map().intervals.len(), 8);
    let refused = bed.command(client, &json!({ "prefix": "pool create", "pool": "rbd" }));
    assert_eq!(refused["error"]["code"], -17);
    let connection = bed.peers[osds[1]].connection;
    bed.peers[osds[1]].messenger.close(connection);
    bed.pass(600);
    assert!(!bed.mon().map().is_up(OsdId(1)));
}

#[test]
fn sessions_go_on_rising_over_refills_and_restarts() {
    let mut bed = Bed::new();
    let mut seen = BTreeSet::new();
    for round in 0..2 {
        let mut clients = Vec::new();
        // In groups, since only so many may be in their handshake at a time.
        for _ in 0..17 {
            clients.extend((0..50).map(|_| bed.connect(Role::Client(SessionId(0)), 7)).collect::<Vec<_>>());
            bed.pass(2);
        }
        for client in clients {
            let session = bed.peers[client].messenger.session();
            assert!(session > seen.last().copied().unwrap_or_default(), "round {round}: {session}");
            seen.insert(session);
        }
        bed.peers.clear();
        bed.start_mon();
    }
    assert_eq!(seen.len(), 1700);
}

#[test]
fn who_speaks_in_anothers_name_is_cut_off() {
    let mut bed = Bed::new();
    let osd = bed.boot(0);
    bed.pass(30);
    let boot = Message::Boot(Boot { osd: OsdId(1), incarnation: Incarnation(50) });
    bed.send(osd, boot, &[1]);
    let liar = bed.connect(Role::Client(SessionId(1_000_000)), 7);
    bed.pass(5);
    for peer in [osd, liar] {
        let down = bed.peers[peer].events.iter().any(|event| matches!(event, MessengerEvent::Down { .. }));
        assert!(down, "peer {peer}");
    }
}

#[test]
fn a_store_of_another_cluster_is_refused() {
    let mut bed = Bed::new();
    bed.mon = None;
    let messenger = Messenger::new(bed.settings(Role::Mon, 1), bed.hub.endpoint(address(MON)), Counter(0));
    let settings = MonSettings {
        expected_cluster: Some(ClusterId(Uuid::from_u128(2))),
        ..MonSettings::new(ClusterId(Uuid::from_u128(3)))
    };
    let mon =
        Mon::<TestWorld, _>::new(settings, messenger, bed.pool.clone(), bed.clock.clone(), bed.store.clone());
    assert!(matches!(mon.err(), Some(StartError::OtherCluster { .. })));
}

/// Fails from the given commit on.
struct Failing {
    commits_left: u32,
    inner: Memory,
}

impl MapStore for Failing {
    fn load(&mut self) -> Result<Option<(ClusterMap, Extra)>, StoreError> {
        self.inner.load()
    }

    fn commit(&mut self, map: &ClusterMap, extra: &Extra) -> Result<(), StoreError> {
        if self.commits_left == 0 {
            return Err(StoreError::Io { path: "x".into(), detail: "no space left".into() });
        }
        self.commits_left -= 1;
        self.inner.commit(map, extra)
    }
}

#[test]
fn a_mon_whose_store_fails_says_nothing_more() {
    let mut bed = Bed::new();
    bed.mon = None;
    let messenger = Messenger::new(bed.settings(Role::Mon, 1), bed.hub.endpoint(address(MON)), Counter(0));
    let store = Failing { commits_left: 1, inner: bed.store.clone() };
    let settings = MonSettings::new(ClusterId(Uuid::from_u128(1)));
    let (pool, clock) = (bed.pool.clone(), bed.clock.clone());
    let mut mon = Mon::<TestWorld, _>::new(settings, messenger, pool, clock, store).ok().unwrap();
    let client = bed.connect(Role::Client(SessionId(0)), 7);
    let mut pass = |bed: &mut Bed| {
        for _ in 0..10 {
            mon.poll(bed.clock.now());
            bed.pass(1);
        }
        mon.has_failed()
    };
    assert!(!pass(&mut bed));
    let request = json!({ "prefix": "pool create", "pool": "rbd" }).to_string();
    bed.send(client, Message::Command(Command { number: 3 }), request.as_bytes());
    assert!(pass(&mut bed));
    assert!(bed.messages(client).is_empty(), "nobody knows whether the pool is there");
}
