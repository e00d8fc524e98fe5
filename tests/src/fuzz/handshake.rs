//! A messenger against byte streams from strangers: before, in and after the handshake.

use super::wire::{sample_frames, seal};
use super::{Input, Target, chunk, with_pool};
use loligo_config::id::*;
use loligo_config::map::AuthMode;
use loligo_net::framing::FrameReader;
use loligo_net::messenger::{Messenger, MessengerEvent, MessengerSettings, SendError};
use loligo_net::wire::handshake::{Hello, Identity, Ping, Role, Welcome};
use loligo_net::wire::{self, Body, Envelope, Kind, Message};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{
    CloseReason, ConnectionId, Entropy, Frame, Instant, SendRefused, Transport, TransportEvent,
};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// Steps of up to four connections with one messenger.
pub const TARGET: Target = Target { name: "handshake", run, seeds, words: &[b"LOLI"], len_max: 8 << 10 };

const POOL: usize = 64 << 20;
const CLUSTER: ClusterId = ClusterId(uuid::Uuid::from_u128(1));
const STEPS_MAX: usize = 256;
const CONNECTIONS_MAX: usize = 4;

/// The steps of an input.
const ACCEPT: u8 = 0;
const DIAL: u8 = 1;
const BYTES: u8 = 2;
const FRAME: u8 = 3;
const HELLO: u8 = 4;
const WELCOME: u8 = 5;
const WAIT: u8 = 6;
const SEND: u8 = 7;
const CLOSE: u8 = 8;
const PEER_CLOSES: u8 = 9;
const FENCE: u8 = 10;
const STEP_COUNT: u8 = 11;

struct Counting(u64);

impl Entropy for Counting {
    fn next_u64(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }
}

struct Link {
    reader: FrameReader,
    /// What the peer sent and the reader did not take.
    waiting: VecDeque<u8>,
    /// Frames that the messenger sent.
    sent: Vec<Frame>,
    open: bool,
    trusted: bool,
    next_sequence: u64,
}

/// Connections whose other ends the input speaks for.
#[derive(Default)]
struct Net {
    links: BTreeMap<ConnectionId, Link>,
    events: VecDeque<TransportEvent>,
    next: u64,
}

#[derive(Clone)]
struct Ends(Rc<RefCell<Net>>);

impl Net {
    fn begin(&mut self, pool: &BufferPool) -> ConnectionId {
        self.next += 1;
        let id = ConnectionId(self.next);
        let reader = FrameReader::new(pool.clone());
        let waiting = VecDeque::new();
        let link = Link { reader, waiting, sent: Vec::new(), open: true, trusted: false, next_sequence: 1 };
        self.links.insert(id, link);
        id
    }

    fn end(&mut self, id: ConnectionId, reason: CloseReason) {
        if let Some(link) = self.links.get_mut(&id).filter(|link| link.open) {
            link.open = false;
            self.events.push_back(TransportEvent::Closed { connection: id, reason });
        }
    }

    /// As a real transport does: feeds the reader and delivers its frames.
    fn pump(&mut self, id: ConnectionId) {
        let Some(link) = self.links.get_mut(&id).filter(|link| link.open) else { return };
        loop {
            let fed = link.reader.feed(link.waiting.make_contiguous());
            let mut frames = 0;
            while let Some(frame) = link.reader.next_frame() {
                frames += 1;
                self.events.push_back(TransportEvent::Frame { connection: id, frame });
            }
            match fed {
                Ok(count) => {
                    link.waiting.drain(..count);
                    if count == 0 && frames == 0 || link.waiting.is_empty() {
                        return;
                    }
                }
                Err(reason) => return self.end(id, reason),
            }
        }
    }
}

impl Transport for Ends {
    fn connect(&mut self, _to: SocketAddr) -> ConnectionId {
        let net = &mut *self.0.borrow_mut();
        let id = with_pool(POOL, |pool| net.begin(pool));
        net.events.push_back(TransportEvent::Connected { connection: id });
        id
    }

    fn send(&mut self, connection: ConnectionId, frame: Frame) -> Result<(), SendRefused> {
        let net = &mut *self.0.borrow_mut();
        let Some(link) = net.links.get_mut(&connection).filter(|link| link.open) else {
            return Err(SendRefused::Closed(frame));
        };
        assert_eq!(wire::check(&frame), Ok(()), "what is sent is right");
        link.sent.push(frame);
        Ok(())
    }

    fn close(&mut self, connection: ConnectionId) {
        self.0.borrow_mut().end(connection, CloseReason::Local);
    }

    fn trust(&mut self, connection: ConnectionId) {
        let net = &mut *self.0.borrow_mut();
        if let Some(link) = net.links.get_mut(&connection) {
            link.trusted = true;
            link.reader.trust();
            net.pump(connection);
        }
    }

    fn poll(&mut self, budget: u32, inbox: &mut VecDeque<TransportEvent>) -> u32 {
        let net = &mut *self.0.borrow_mut();
        let count = net.events.len().min(budget as usize);
        inbox.extend(net.events.drain(..count));
        count as u32
    }
}

/// What the owner of the messenger has heard.
#[derive(Default)]
struct Heard {
    dialed: BTreeSet<ConnectionId>,
    up: BTreeMap<ConnectionId, Identity>,
    down: BTreeSet<ConnectionId>,
}

impl Heard {
    fn take(&mut self, event: &MessengerEvent, role: Role) {
        match event {
            MessengerEvent::Up { connection, peer, accepted, .. } => {
                assert!(self.up.insert(*connection, *peer).is_none(), "up once");
                assert!(!self.down.contains(connection), "nothing after down");
                assert_eq!(*accepted, !self.dialed.contains(connection));
                assert_eq!(peer.cluster, Some(CLUSTER), "only members of the cluster");
                assert_ne!(peer.role, Role::Client(SessionId(0)), "every client has a session");
                assert!(!matches!(peer.role, Role::Osd(_)) || peer.incarnation != Incarnation(0));
                assert!(!matches!(role, Role::Client(_)) || !accepted, "clients accept nobody");
            }
            MessengerEvent::Message { connection, received, .. } => {
                let peer = self.up.get(connection).expect("messages come from peers that are up");
                assert!(!self.down.contains(connection), "nothing after down");
                let kind = received.envelope.message.kind();
                assert!(may_send(kind, peer.role, role), "{kind:?} from {:?}", peer.role);
            }
            MessengerEvent::Down { connection, peer, .. } => {
                assert!(self.down.insert(*connection), "down once");
                assert_eq!(peer.is_some(), self.up.contains_key(connection));
                assert!(peer.is_some() || self.dialed.contains(connection), "strangers are not reported");
            }
        }
    }
}

/// Written apart from the messenger's own table.
fn may_send(kind: Kind, from: Role, to: Role) -> bool {
    let kind = kind as u16;
    match (from, to) {
        (Role::Client(_), Role::Osd(_)) => kind == 16,
        (Role::Osd(_), Role::Client(_)) => matches!(kind, 17 | 18),
        (Role::Osd(_), Role::Osd(_)) => matches!(kind, 32 | 33 | 48..=55),
        (Role::Client(_), Role::Mon) => matches!(kind, 64 | 70),
        (Role::Mon, Role::Client(_)) => matches!(kind, 65 | 71),
        (Role::Osd(_), Role::Mon) => matches!(kind, 64 | 66 | 68 | 69),
        (Role::Mon, Role::Osd(_)) => matches!(kind, 65 | 67),
        (Role::Mon, Role::Mon) => matches!(kind, 64 | 65),
        (Role::Client(_), Role::Client(_)) => false,
    }
}

fn role(number: u8) -> Role {
    match number % 4 {
        0 => Role::Osd(OsdId(1)),
        1 => Role::Osd(OsdId(2)),
        2 => Role::Mon,
        _ => Role::Client(SessionId(u64::from(number / 4))),
    }
}

struct Run {
    net: Ends,
    messenger: Messenger<Ends, Counting>,
    role: Role,
    now: Instant,
    heard: Heard,
    connections: Vec<ConnectionId>,
}

fn run(input: &[u8]) {
    let mut input = Input(input);
    let role = role(input.u8());
    let net = Ends(Rc::default());
    let incarnation = if matches!(role, Role::Osd(_)) { Incarnation(5) } else { Incarnation(0) };
    let identity = Identity { cluster: Some(CLUSTER), role, incarnation };
    let mut settings = with_pool(POOL, |pool| MessengerSettings::new(identity, pool.clone()));
    settings.preauth_connections_max = 3;
    settings.preauth_source_max = 2;
    settings.peer_connections_max = 2;
    let mut messenger = Messenger::new(settings, net.clone(), Counting(0));
    if role == Role::Mon {
        messenger.set_sessions(100..103);
    }
    let (now, heard) = (Instant(1), Heard::default());
    let mut run = Run { net, messenger, role, now, heard, connections: Vec::new() };
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        run.step(&mut input);
        run.poll();
    }
    run.finish();
}

impl Run {
    fn step(&mut self, input: &mut Input<'_>) {
        let step = input.u8();
        let at = usize::from(step / STEP_COUNT);
        let current = self.connections.get(at % self.connections.len().max(1)).copied();
        match (step % STEP_COUNT, current) {
            (ACCEPT, _) => self.begin(None),
            // Clients do not listen, so nobody calls them.
            (DIAL, _) => match role(input.u8()) {
                Role::Client(_) => self.begin(Some(Role::Mon)),
                other => self.begin(Some(other)),
            },
            (BYTES, Some(id)) => {
                let bytes = input.chunk().to_vec();
                self.give(id, &bytes);
            }
            (FRAME, Some(id)) => self.frame(id, input),
            (HELLO, Some(id)) => self.hello(id, input),
            (WELCOME, Some(id)) => self.welcome(id, input),
            (WAIT, _) => self.now = self.now.after(Duration::from_millis(u64::from(input.u16()))),
            (SEND, Some(id)) => self.send(id, input),
            (CLOSE, Some(id)) => self.messenger.close(id),
            (PEER_CLOSES, Some(id)) => self.net.0.borrow_mut().end(id, CloseReason::Peer),
            (FENCE, _) => {
                let session = SessionId(u64::from(input.u8()));
                self.messenger.set_fenced([session]);
                let incarnation = Incarnation(u64::from(input.u8()));
                self.messenger.set_incarnation(OsdId(1), incarnation);
            }
            _ => {}
        }
    }

    fn begin(&mut self, dialed: Option<Role>) {
        if self.connections.len() >= CONNECTIONS_MAX {
            return;
        }
        let address = "127.0.0.1:7000".parse().expect("an address");
        let id = match dialed {
            Some(expected) => {
                let id = self.messenger.connect(address, expected, CoreId(0));
                self.heard.dialed.insert(id);
                id
            }
            None => {
                let net = &mut *self.net.0.borrow_mut();
                let id = with_pool(POOL, |pool| net.begin(pool));
                net.events.push_back(TransportEvent::Accepted { connection: id, from: address });
                id
            }
        };
        self.connections.push(id);
    }

    fn give(&mut self, id: ConnectionId, bytes: &[u8]) {
        let net = &mut *self.net.0.borrow_mut();
        if let Some(link) = net.links.get_mut(&id).filter(|link| link.open) {
            link.waiting.extend(bytes);
            net.pump(id);
        }
    }

    /// A header and data from the input, with the next sequence number and right checksums.
    fn frame(&mut self, id: ConnectionId, input: &mut Input<'_>) {
        let (mut head, data) = (input.chunk().to_vec(), input.chunk());
        let sequence = self.next_sequence(id);
        if head.len() >= 40 {
            head[32..40].copy_from_slice(&sequence.to_le_bytes());
        }
        seal(&mut head, data);
        self.give(id, &[&head, data].concat());
    }

    fn next_sequence(&mut self, id: ConnectionId) -> u64 {
        let net = &mut *self.net.0.borrow_mut();
        let link = net.links.get_mut(&id).expect("a connection of this run");
        link.next_sequence += 1;
        link.next_sequence - 1
    }

    fn give_message(&mut self, id: ConnectionId, message: Message) {
        let sequence = self.next_sequence(id);
        let envelope = Envelope { epoch: Epoch(1), message };
        let frame = with_pool(POOL, |pool| wire::encode_numbered(pool, &envelope, Body::NONE, sequence));
        self.give(id, &frame.expect("a valid message").head);
    }

    fn hello(&mut self, id: ConnectionId, input: &mut Input<'_>) {
        let [who, whom, odd] = input.array();
        let cluster = (odd & 1 == 0).then_some(CLUSTER);
        let hello = Hello {
            version: wire::handshake::PROTOCOL_VERSION,
            version_min: wire::handshake::PROTOCOL_VERSION - u16::from(odd & 2 == 0),
            features: 0,
            features_required: u64::from(odd & 4),
            identity: Identity { cluster, role: role(who), incarnation: Incarnation(u64::from(odd >> 4)) },
            expected: role(whom),
            core: CoreId(0),
            auth: AuthMode::None,
            nonce: 1,
        };
        self.give_message(id, Message::Hello(hello));
    }

    /// Answers the `Hello` that the messenger sent.
    fn welcome(&mut self, id: ConnectionId, input: &mut Input<'_>) {
        let [odd, session] = input.array();
        let said = self.net.0.borrow().links.get(&id).and_then(|link| {
            let received = wire::decode(link.sent.first()?).ok()?;
            match received.envelope.message {
                Message::Hello(hello) => Some(hello),
                _ => None,
            }
        });
        let Some(hello) = said else { return };
        let given = match hello.identity.role {
            Role::Client(SessionId(0)) => SessionId(7),
            Role::Client(session) => session,
            Role::Osd(_) | Role::Mon => SessionId(0),
        };
        let incarnation = Incarnation(u64::from(odd >> 4));
        let welcome = Welcome {
            version: wire::handshake::PROTOCOL_VERSION,
            features: 0,
            identity: Identity { cluster: Some(CLUSTER), role: hello.expected, incarnation },
            core: CoreId(0),
            session: if odd & 1 == 0 { given } else { SessionId(u64::from(session)) },
            credits: u32::MAX,
            auth: AuthMode::None,
            nonce_echo: hello.nonce + u64::from(odd & 2),
            nonce: 3,
        };
        self.give_message(id, Message::Welcome(welcome));
    }

    fn send(&mut self, id: ConnectionId, input: &mut Input<'_>) {
        let message = match input.u8() % 3 {
            0 => Message::Ping(Ping { number: 1 }),
            1 => Message::Subscribe(wire::mon::Subscribe { have: Epoch(0) }),
            _ => Message::Map(wire::mon::Map { epoch: Epoch(1) }),
        };
        match self.messenger.send(id, message, Body::NONE) {
            Ok(()) => assert!(self.messenger.peer(id).is_some(), "only to peers that are up"),
            Err(SendError::Closed) => assert!(self.messenger.peer(id).is_none()),
            Err(SendError::Forbidden) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn poll(&mut self) {
        let mut out = VecDeque::new();
        for _ in 0..4 {
            self.messenger.poll(self.now, &mut out);
            for event in out.drain(..) {
                self.heard.take(&event, self.role);
            }
        }
        assert!(self.messenger.connection_count() <= self.connections.len());
    }

    /// Everybody falls silent: nothing half open stays.
    fn finish(&mut self) {
        for _ in 0..8 {
            self.now = self.now.after(Duration::from_secs(2));
            self.poll();
        }
        for id in &self.connections {
            if self.messenger.peer(*id).is_none() {
                assert!(!self.net.0.borrow().links[id].open, "strangers and silent peers are closed");
            }
            let reported = self.heard.dialed.contains(id) || self.heard.up.contains_key(id);
            assert_eq!(reported, self.heard.down.contains(id), "every connection that was told of ends");
        }
        assert_eq!(self.messenger.connection_count(), 0);
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let frames = sample_frames();
    let frame = |kind: u16| {
        let number = kind.to_le_bytes();
        let (head, _) = frames.iter().find(|(head, _)| head[10..12] == number).expect("a sample of it");
        [&[FRAME][..], &chunk(head), &chunk(&[])].concat()
    };
    // Who listens, who comes, and all kinds that it may send.
    let visits: [(u8, u8, &[u16]); 4] = [
        (0, 7, &[4, 16]),
        (0, 1, &[5, 32, 33, 48, 49, 50, 51, 52, 53, 54, 55]),
        (2, 3, &[64, 70, 4]),
        (2, 1, &[64, 66, 68, 69]),
    ];
    let mut seeds = Vec::new();
    for (here, there, kinds) in visits {
        let mut seed = vec![here, ACCEPT, HELLO, there, here, 0x10];
        kinds.iter().for_each(|kind| seed.extend(frame(*kind)));
        seeds.push(seed.clone());
        seed.extend([WAIT, 0, 8, HELLO, there, here, 0x10]);
        seeds.push(seed);
    }
    for (here, there, kinds) in [(3, 2, [65, 71]), (7, 0, [17, 18]), (1, 2, [65, 67]), (1, 0, [4, 32])] {
        let mut seed = vec![here, DIAL, there, WELCOME, 0x10, 0, SEND, 0];
        kinds.iter().for_each(|kind| seed.extend(frame(*kind)));
        seed.extend([CLOSE, DIAL, there, PEER_CLOSES]);
        seeds.push(seed);
    }
    seeds.push([&[0, ACCEPT, BYTES][..], &chunk(b"GET / HTTP/1.1\r\n\r\n")].concat());
    seeds.push([&[2, ACCEPT][..], &frame(3), &frame(2)].concat());
    seeds.push(vec![2, ACCEPT, ACCEPT, ACCEPT, ACCEPT, FENCE, 2, 9, HELLO, 3, 2, 0x10]);
    seeds
}
