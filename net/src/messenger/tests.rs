//! Two or more messengers, and peers that misbehave, on a network in memory.

mod faults;
mod refusals;
mod sockets;

use super::*;
use crate::transport::memory::{MemoryHub, MemoryTransport};
use crate::wire::handshake::{PROTOCOL_VERSION, Welcome};
use crate::wire::samples::Draw;
use crate::wire::{mon, op, replica};
use loligo_config::id::{ObjectId, ObjectVersion, OpId, PgId};
use loligo_config::limits;
use loligo_config::map::AuthMode;
use loligo_reactor::dma::BufferPool;

impl Entropy for Draw {
    fn next_u64(&mut self) -> u64 {
        self.next()
    }
}

type Net = Messenger<MemoryTransport, Draw>;

const MON: u8 = 1;
const CLIENT: u8 = 9;

fn address(n: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, n], 6800))
}

fn cluster(n: u128) -> ClusterId {
    ClusterId(uuid::Uuid::from_u128(n))
}

fn osd(n: u32) -> Role {
    Role::Osd(OsdId(n))
}

fn identity(role: Role) -> Identity {
    Identity { cluster: Some(cluster(1)), role, incarnation: Incarnation(77) }
}

fn settings(role: Role) -> MessengerSettings {
    MessengerSettings::new(identity(role), BufferPool::new(64 << 20))
}

/// A network with a clock, and what each of its processes has heard.
struct Bed {
    hub: MemoryHub,
    now: Instant,
    nodes: BTreeMap<u8, (Net, VecDeque<MessengerEvent>)>,
}

impl Bed {
    fn new() -> Self {
        let hub = MemoryHub::new();
        hub.set_now(Instant(1_000_000_000));
        Self { hub, now: Instant(1_000_000_000), nodes: BTreeMap::new() }
    }

    fn add(&mut self, n: u8, settings: MessengerSettings) -> &mut Net {
        let messenger = Messenger::new(settings, self.hub.endpoint(address(n)), Draw(u64::from(n)));
        self.nodes.insert(n, (messenger, VecDeque::new()));
        self.net(n)
    }

    /// A mon and OSDs 2, 3, … at these addresses.
    fn with_osds(count: u8) -> Self {
        let mut bed = Self::new();
        bed.add(MON, settings(Role::Mon)).set_sessions(100..1000);
        for n in 2..2 + count {
            bed.add(n, settings(osd(u32::from(n))));
        }
        bed
    }

    fn net(&mut self, n: u8) -> &mut Net {
        &mut self.nodes.get_mut(&n).unwrap().0
    }

    fn events(&mut self, n: u8) -> Vec<MessengerEvent> {
        self.nodes.get_mut(&n).unwrap().1.drain(..).collect()
    }

    /// Polls everybody until nothing moves.
    fn settle(&mut self) {
        loop {
            let mut busy = false;
            for (messenger, events) in self.nodes.values_mut() {
                busy |= messenger.poll(self.now, events) == Activity::Busy;
            }
            if !busy {
                break;
            }
        }
    }

    /// Time goes on from deadline to deadline, as a parked reactor sees it.
    fn pass(&mut self, ms: u64) {
        let end = self.now.after(Duration::from_millis(ms));
        loop {
            self.settle();
            let deadlines = self.nodes.values().filter_map(|(messenger, _)| messenger.next_deadline());
            // What is due for somebody who is not polled does not hold the clock.
            let arrival = self.hub.next_arrival().filter(|at| *at > self.now);
            let next = deadlines.chain(arrival).min().unwrap_or(end);
            assert!(next > self.now, "everything due was done");
            if next >= end {
                break;
            }
            self.now = next;
            self.hub.set_now(next);
        }
        self.now = end;
        self.hub.set_now(end);
        self.settle();
    }

    fn connect(&mut self, from: u8, to: u8, expected: Role) -> ConnectionId {
        self.net(from).connect(address(to), expected, CoreId(0))
    }

    /// Connects, and gives both ids.
    fn up(&mut self, from: u8, to: u8, expected: Role) -> (ConnectionId, ConnectionId) {
        let near = self.connect(from, to, expected);
        self.settle();
        let far = match &self.events(to)[..] {
            [MessengerEvent::Up { connection, accepted: true, .. }] => *connection,
            other => panic!("{other:?}"),
        };
        match &self.events(from)[..] {
            [MessengerEvent::Up { connection, accepted: false, .. }] if *connection == near => {}
            other => panic!("{other:?}"),
        }
        (near, far)
    }

    /// The one event of this node, which must be the end of a connection.
    fn down(&mut self, n: u8) -> (ConnectionId, DownReason) {
        match &self.events(n)[..] {
            [MessengerEvent::Down { connection, reason, .. }] => (*connection, *reason),
            other => panic!("{other:?}"),
        }
    }
}

/// A process that speaks the protocol by hand.
struct Raw {
    transport: MemoryTransport,
    pool: BufferPool,
    inbox: VecDeque<TransportEvent>,
}

impl Raw {
    fn new(bed: &Bed, n: u8) -> Self {
        let transport = bed.hub.endpoint(address(n));
        Self { transport, pool: BufferPool::new(64 << 20), inbox: VecDeque::new() }
    }

    fn frame(&self, message: Message, sequence: u64) -> Frame {
        wire::encode_numbered(&self.pool, &Envelope { epoch: Epoch(3), message }, Body::NONE, sequence)
            .unwrap()
    }

    fn send(&mut self, id: ConnectionId, message: Message, sequence: u64) {
        let frame = self.frame(message, sequence);
        self.transport.send(id, frame).unwrap();
    }

    fn poll(&mut self) -> Vec<TransportEvent> {
        while self.transport.poll(100, &mut self.inbox) > 0 {}
        self.inbox.drain(..).collect()
    }

    /// The messages that came, and why the connection ended if it did.
    fn heard(&mut self) -> (Vec<Message>, Option<CloseReason>) {
        let (mut messages, mut end) = (Vec::new(), None);
        for event in self.poll() {
            match event {
                TransportEvent::Frame { frame, connection } => {
                    messages.push(wire::decode(&frame).unwrap().envelope.message);
                    self.transport.trust(connection);
                }
                TransportEvent::Closed { reason, .. } => end = Some(reason),
                TransportEvent::Accepted { .. } | TransportEvent::Connected { .. } => {}
            }
        }
        // What waited for `trust`.
        for event in self.poll() {
            if let TransportEvent::Closed { reason, .. } = event {
                end = Some(reason);
            }
        }
        (messages, end)
    }
}

fn hello(role: Role, expected: Role) -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        version_min: PROTOCOL_VERSION,
        features: 0,
        features_required: 0,
        identity: identity(role),
        expected,
        core: CoreId(3),
        auth: AuthMode::None,
        nonce: 4711,
    }
}

fn welcome(role: Role) -> Welcome {
    Welcome {
        version: PROTOCOL_VERSION,
        features: 0,
        identity: identity(role),
        core: CoreId(5),
        session: SessionId(0),
        credits: 16,
        auth: AuthMode::None,
        nonce_echo: 0,
        nonce: 1,
    }
}

fn op_request() -> Message {
    Message::Op(op::OpRequest {
        pg: PgId::default(),
        object: ObjectId::default(),
        kind: op::OpKind::Read,
        offset: 0,
        len: 4096,
        op: OpId::default(),
        lowest_outstanding: 0,
        snap_seq: 0,
        guard: op::Guard::Any,
        attempt: 0,
        client_queue_ns: 0,
    })
}

fn rep_ack() -> Message {
    Message::RepAck(replica::RepAck {
        pg: PgId::default(),
        interval: Epoch(1),
        version: ObjectVersion::NONE,
        status: replica::RepStatus::Durable,
        residence_ns: 0,
        device_ns: 0,
        space_credit: 0,
    })
}

#[test]
fn both_sides_learn_who_the_other_is() {
    let mut bed = Bed::with_osds(2);
    let near = bed.net(2).connect(address(3), osd(3), CoreId(4));
    bed.settle();
    match &bed.events(2)[..] {
        [MessengerEvent::Up { connection, peer, accepted: false, core: CoreId(0), credits }] => {
            assert_eq!((*connection, *peer, *credits), (near, identity(osd(3)), limits::CONNECTION_OPS_MAX));
        }
        other => panic!("{other:?}"),
    }
    match &bed.events(3)[..] {
        [MessengerEvent::Up { connection, peer, accepted: true, core: CoreId(4), .. }] => {
            let (connection, peer) = (*connection, *peer);
            assert_eq!(peer, identity(osd(2)));
            assert_eq!(bed.net(3).peer(connection), Some(&peer));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn messages_carry_data_and_the_senders_epoch() {
    let mut bed = Bed::with_osds(1);
    let (_, far) = bed.up(2, MON, Role::Mon);
    bed.net(MON).set_epoch(Epoch(12));
    let data = BufferPool::new(8 << 20).copy_of(&[6; 70_000]).unwrap();
    let map = Message::Map(mon::Map { epoch: Epoch(12) });
    assert_eq!(bed.net(MON).send(far, map, Body::of(data.clone())), Ok(()));
    bed.settle();
    match &bed.events(2)[..] {
        [MessengerEvent::Message { received, arrived, .. }] => {
            assert_eq!(received.envelope, Envelope { epoch: Epoch(12), message: map });
            assert_eq!(received.data.as_deref(), Some(&data[..]));
            assert_eq!(*arrived, bed.now);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_new_client_gets_a_session_and_keeps_it() {
    let mut bed = Bed::with_osds(1);
    for (client, session) in [(CLIENT, 100), (CLIENT + 1, 101)] {
        let nobody = Identity { cluster: None, ..identity(Role::Client(SessionId(0))) };
        bed.add(client, MessengerSettings::new(nobody, BufferPool::new(64 << 20)));
        let (near, far) = bed.up(client, MON, Role::Mon);
        assert_eq!(bed.net(client).session(), SessionId(session));
        assert_eq!(bed.net(client).identity().cluster, Some(cluster(1)));
        assert_eq!(bed.net(MON).peer(far).unwrap().role, Role::Client(SessionId(session)));
        bed.net(client).close(near);
        bed.settle();
        bed.events(client);
        bed.events(MON);
        // It is the same client at the OSDs, and at the mon when it comes back.
        for n in [2, MON] {
            let role = *bed.net(n).identity();
            let (_, far) = bed.up(client, n, role.role);
            assert_eq!(bed.net(n).peer(far).unwrap().role, Role::Client(SessionId(session)));
        }
    }
    assert_eq!(bed.net(MON).sessions_left(), 898);
}

#[test]
fn of_two_sessions_given_at_once_the_first_is_used() {
    let mut bed = Bed::with_osds(0);
    bed.add(CLIENT, settings(Role::Client(SessionId(0))));
    bed.connect(CLIENT, MON, Role::Mon);
    let second = bed.connect(CLIENT, MON, Role::Mon);
    bed.settle();
    let events = bed.events(CLIENT);
    assert!(matches!(events[0], MessengerEvent::Up { .. }));
    assert!(matches!(events[1], MessengerEvent::Down { connection, .. } if connection == second));
    assert_eq!(events.len(), 2);
    assert_eq!(bed.net(CLIENT).session(), SessionId(100));
}

#[test]
fn osds_that_connect_to_each_other_at_once_have_two_connections() {
    let mut bed = Bed::with_osds(2);
    let from_2 = bed.connect(2, 3, osd(3));
    let from_3 = bed.connect(3, 2, osd(2));
    bed.settle();
    assert_eq!((bed.events(2).len(), bed.events(3).len()), (2, 2));
    for (node, connection) in [(2, from_2), (3, from_3)] {
        assert_eq!(bed.net(node).send(connection, rep_ack(), Body::NONE), Ok(()));
    }
    bed.settle();
    for node in [2, 3] {
        assert!(matches!(bed.events(node)[..], [MessengerEvent::Message { .. }]));
    }
}

#[test]
fn a_closed_connection_is_down_on_both_sides_once() {
    let mut bed = Bed::with_osds(2);
    let (near, far) = bed.up(2, 3, osd(3));
    bed.net(3).send(far, rep_ack(), Body::NONE).unwrap();
    bed.net(2).close(near);
    bed.net(2).close(near);
    assert_eq!(bed.net(2).send(near, rep_ack(), Body::NONE), Err(SendError::Closed));
    bed.settle();
    assert_eq!(bed.down(2), (near, DownReason::Closed(CloseReason::Local)));
    assert_eq!(bed.down(3), (far, DownReason::Closed(CloseReason::Peer)));
    assert_eq!((bed.net(2).connection_count(), bed.net(3).connection_count()), (0, 0));
    assert_eq!(bed.net(2).peer(near), None);
}

#[test]
fn each_role_sends_only_what_is_its_own() {
    let mut bed = Bed::with_osds(2);
    bed.add(CLIENT, settings(Role::Client(SessionId(5))));
    let (peer, _) = bed.up(2, 3, osd(3));
    let (client, at_osd) = bed.up(CLIENT, 2, osd(2));
    assert_eq!(bed.net(CLIENT).send(client, op_request(), Body::NONE), Ok(()));
    assert_eq!(bed.net(CLIENT).send(client, rep_ack(), Body::NONE), Err(SendError::Forbidden));
    assert_eq!(bed.net(2).send(at_osd, rep_ack(), Body::NONE), Err(SendError::Forbidden));
    assert_eq!(bed.net(2).send(peer, op_request(), Body::NONE), Err(SendError::Forbidden));
    assert_eq!(bed.net(2).send(peer, rep_ack(), Body::NONE), Ok(()));
    let map = Message::Map(mon::Map { epoch: Epoch(1) });
    assert_eq!(bed.net(2).send(peer, map, Body::NONE), Err(SendError::Forbidden));
    let ready = Message::Hello(hello(osd(2), osd(3)));
    assert_eq!(bed.net(2).send(peer, ready, Body::NONE), Err(SendError::Forbidden));
}

#[test]
fn back_pressure_loses_nothing_and_skips_no_number() {
    let mut bed = Bed::with_osds(2);
    let (near, _) = bed.up(2, 3, osd(3));
    bed.hub.set_send_queue_max(2);
    let mut sent = 0;
    for _ in 0..3 {
        while bed.net(2).send(near, rep_ack(), Body::NONE) == Ok(()) {
            sent += 1;
        }
        assert_eq!(bed.net(2).send(near, rep_ack(), Body::NONE), Err(SendError::QueueFull));
        bed.settle();
    }
    assert_eq!(sent, 6);
    let events = bed.events(3);
    assert_eq!(events.iter().filter(|event| matches!(event, MessengerEvent::Message { .. })).count(), 6);
}
