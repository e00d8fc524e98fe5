use super::{TURNS_MAX, World, pattern};
use crate::transport::tcp::{OwnedSocket, TcpOptions, TcpTransport};
use crate::wire::handshake::{Hello, Identity, Ping, Role};
use crate::wire::{self, Body, Envelope, Message, mon};
use loligo_config::id::{CoreId, Epoch, Incarnation, OsdId};
use loligo_config::map::AuthMode;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{CloseReason, ConnectionId, Frame, SendRefused, Transport, TransportEvent};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

const LOCAL: &str = "127.0.0.1:0";

struct Node {
    tcp: TcpTransport,
    events: VecDeque<TransportEvent>,
}

impl Node {
    fn new(world: &World) -> Self {
        Self::with(world, TcpOptions::default())
    }

    fn with(world: &World, options: TcpOptions) -> Self {
        Self { tcp: TcpTransport::new(&world.ring, &world.pool, options), events: VecDeque::new() }
    }

    fn poll(&mut self) {
        self.tcp.poll(64, &mut self.events);
    }

    fn frames(&mut self, of: ConnectionId) -> Vec<Frame> {
        let mut frames = Vec::new();
        self.events.retain(|event| match event {
            TransportEvent::Frame { connection, frame } if *connection == of => {
                frames.push(frame.clone());
                false
            }
            _ => true,
        });
        frames
    }

    fn closed(&self, of: ConnectionId) -> Option<CloseReason> {
        self.events.iter().find_map(|event| match event {
            TransportEvent::Closed { connection, reason } if *connection == of => Some(*reason),
            _ => None,
        })
    }

    fn accepted(&mut self) -> Option<ConnectionId> {
        let at = self.events.iter().position(|event| matches!(event, TransportEvent::Accepted { .. }))?;
        match self.events.remove(at) {
            Some(TransportEvent::Accepted { connection, .. }) => Some(connection),
            _ => None,
        }
    }
}

/// Turns until `done` gives something.
fn until<T>(
    world: &World,
    nodes: &mut [&mut Node],
    mut done: impl FnMut(&mut [&mut Node]) -> Option<T>,
) -> T {
    for _ in 0..TURNS_MAX {
        world.turn();
        nodes.iter_mut().for_each(|node| node.poll());
        if let Some(found) = done(nodes) {
            return found;
        }
    }
    panic!("nothing came of it; events: {:?}", nodes.iter().map(|node| &node.events).collect::<Vec<_>>());
}

fn hello(pool: &BufferPool, nonce: u64) -> Frame {
    let identity = Identity { cluster: None, role: Role::Osd(OsdId(1)), incarnation: Incarnation(1) };
    let hello = Hello {
        version: 1,
        version_min: 1,
        features: 0,
        features_required: 0,
        identity,
        expected: Role::Mon,
        core: CoreId(0),
        auth: AuthMode::None,
        nonce,
    };
    wire::encode(pool, &Envelope { epoch: Epoch(1), message: Message::Hello(hello) }, Body::NONE).unwrap()
}

fn ping(pool: &BufferPool, number: u64) -> Frame {
    let message = Message::Ping(Ping { number });
    wire::encode(pool, &Envelope { epoch: Epoch(1), message }, Body::NONE).unwrap()
}

fn number_of(frame: &Frame) -> u64 {
    match wire::decode(frame).unwrap().envelope.message {
        Message::Ping(ping) => ping.number,
        other => panic!("not a ping: {other:?}"),
    }
}

/// A frame with `len` bytes of data.
fn bulk(pool: &BufferPool, len: usize, seed: u8) -> Frame {
    let data = pool.copy_of(&pattern(len, seed)).unwrap();
    let message = Message::Map(mon::Map { epoch: Epoch(7) });
    wire::encode(pool, &Envelope { epoch: Epoch(7), message }, Body::of(data)).unwrap()
}

fn raw(frame: &Frame) -> Vec<u8> {
    let mut bytes = frame.head.to_vec();
    bytes.extend_from_slice(frame.data.as_deref().unwrap_or(&[]));
    bytes
}

/// A connection from `a` to `b`, trusted on both sides.
fn pair(world: &World, a: &mut Node, b: &mut Node) -> (ConnectionId, ConnectionId) {
    let address = b.tcp.listen(LOCAL.parse().unwrap()).unwrap();
    join(world, a, b, address)
}

fn join(world: &World, a: &mut Node, b: &mut Node, address: SocketAddr) -> (ConnectionId, ConnectionId) {
    let near = a.tcp.connect(address);
    let far = until(world, &mut [a, b], |nodes| {
        let connected = |event: &TransportEvent| matches!(event, TransportEvent::Connected { connection } if *connection == near);
        nodes[0].events.iter().any(connected).then(|| nodes[1].accepted()).flatten()
    });
    a.events.clear();
    a.tcp.trust(near);
    b.tcp.trust(far);
    (near, far)
}

/// A plain socket connected to a transport, and the transport's end.
fn stranger(world: &World, node: &mut Node) -> (TcpStream, ConnectionId) {
    let address = node.tcp.listen(LOCAL.parse().unwrap()).unwrap();
    let peer = TcpStream::connect(address).unwrap();
    peer.set_nodelay(true).unwrap();
    let connection = until(world, &mut [node], |nodes| nodes[0].accepted());
    (peer, connection)
}

#[test]
fn frames_arrive_whole_and_in_order_in_both_directions() {
    let world = World::new();
    let (mut a, mut b) = (Node::new(&world), Node::new(&world));
    let (near, far) = pair(&world, &mut a, &mut b);
    for number in 0..200 {
        a.tcp.send(near, ping(&world.pool, number)).unwrap();
        b.tcp.send(far, ping(&world.pool, 1000 + number)).unwrap();
    }
    let (mut there, mut here) = (Vec::new(), Vec::new());
    until(&world, &mut [&mut a, &mut b], |nodes| {
        here.extend(nodes[0].frames(near).iter().map(number_of));
        there.extend(nodes[1].frames(far).iter().map(number_of));
        (here.len() == 200 && there.len() == 200).then_some(())
    });
    assert_eq!(there, (0..200).collect::<Vec<_>>());
    assert_eq!(here, (1000..1200).collect::<Vec<_>>());
}

#[test]
fn frames_of_one_poll_are_one_send() {
    let world = World::new();
    let (mut a, mut b) = (Node::new(&world), Node::new(&world));
    let (near, far) = pair(&world, &mut a, &mut b);
    (0..5).for_each(|_| world.turn());
    let before = world.ring.stats();
    for number in 0..8 {
        a.tcp.send(near, ping(&world.pool, number)).unwrap();
    }
    a.tcp.send(near, bulk(&world.pool, 4096, 1)).unwrap();
    world.turn();
    let after = world.ring.stats();
    assert_eq!(after.submitted - before.submitted, 1, "one sendmsg for nine frames");
    let mut got = 0;
    until(&world, &mut [&mut a, &mut b], |nodes| {
        got += nodes[1].frames(far).len();
        (got == 9).then_some(())
    });
}

#[test]
fn large_data_arrives_intact_beside_small_frames() {
    let world = World::new();
    let (mut a, mut b) = (Node::new(&world), Node::new(&world));
    let (near, far) = pair(&world, &mut a, &mut b);
    let lens = [1, 4096, 16 << 10, (16 << 10) + 1, 100_000, 1 << 20, 4096, (4 << 20) + 13, 1];
    let mut to_send: VecDeque<_> =
        lens.iter().enumerate().map(|(seed, len)| bulk(&world.pool, *len, seed as u8)).collect();
    let mut got = Vec::new();
    until(&world, &mut [&mut a, &mut b], |nodes| {
        while let Some(frame) = to_send.pop_front() {
            if let Err(SendRefused::QueueFull(frame)) = nodes[0].tcp.send(near, frame) {
                to_send.push_front(frame);
                break;
            }
        }
        got.extend(nodes[1].frames(far));
        (got.len() == lens.len()).then_some(())
    });
    for (seed, (frame, len)) in got.iter().zip(lens).enumerate() {
        let data = wire::decode(frame).unwrap().data.unwrap();
        assert!(*data == pattern(len, seed as u8)[..], "frame {seed} of {len} bytes");
        assert_eq!(data.as_ptr() as usize % 4096, 0, "data starts at the alignment that devices need");
    }
}

#[test]
fn many_connections_live_beside_each_other() {
    let world = World::new();
    let (mut a, mut b) = (Node::new(&world), Node::new(&world));
    let address = b.tcp.listen("[::1]:0".parse().unwrap()).unwrap();
    let pairs: Vec<_> = (0..60).map(|_| join(&world, &mut a, &mut b, address)).collect();
    for (number, (near, _)) in pairs.iter().enumerate() {
        a.tcp.send(*near, ping(&world.pool, number as u64)).unwrap();
    }
    let mut got = vec![None; pairs.len()];
    until(&world, &mut [&mut a, &mut b], |nodes| {
        for (number, (_, far)) in pairs.iter().enumerate() {
            if let Some(frame) = nodes[1].frames(*far).first() {
                got[number] = Some(number_of(frame));
            }
        }
        got.iter().all(Option::is_some).then_some(())
    });
    assert!(got.iter().enumerate().all(|(number, it)| *it == Some(number as u64)));
    assert!(world.pool.mapped() <= 8 << 20, "idle connections hold little: {} bytes", world.pool.mapped());
    a.tcp.close(pairs[7].0);
    until(&world, &mut [&mut a, &mut b], |nodes| nodes[1].closed(pairs[7].1));
    a.tcp.send(pairs[8].0, ping(&world.pool, 99)).unwrap();
    until(&world, &mut [&mut a, &mut b], |nodes| nodes[1].frames(pairs[8].1).pop());
    let again = join(&world, &mut a, &mut b, address);
    assert!(pairs.iter().all(|(near, far)| again.0 != *near && again.1 != *far), "ids are never used again");
}

#[test]
fn a_connection_that_nobody_accepts_is_closed_as_unreachable() {
    let world = World::new();
    let mut a = Node::new(&world);
    let unused = TcpListener::bind(LOCAL).unwrap().local_addr().unwrap();
    let connection = a.tcp.connect(unused);
    a.tcp.send(connection, ping(&world.pool, 1)).unwrap();
    let reason = until(&world, &mut [&mut a], |nodes| nodes[0].closed(connection));
    assert_eq!(reason, CloseReason::Unreachable(libc::ECONNREFUSED));
    assert!(matches!(a.tcp.send(connection, ping(&world.pool, 1)), Err(SendRefused::Closed(_))));
    assert_eq!(a.tcp.connections(), 0);
}

#[test]
fn frames_queued_while_connecting_are_sent() {
    let world = World::new();
    let (mut a, mut b) = (Node::new(&world), Node::new(&world));
    let address = b.tcp.listen(LOCAL.parse().unwrap()).unwrap();
    let near = a.tcp.connect(address);
    a.tcp.send(near, hello(&world.pool, 5)).unwrap();
    let far = until(&world, &mut [&mut a, &mut b], |nodes| nodes[1].accepted());
    until(&world, &mut [&mut a, &mut b], |nodes| nodes[1].frames(far).pop());
}

#[test]
fn before_trust_one_handshake_frame_is_taken_and_the_rest_after_it() {
    let world = World::new();
    let mut node = Node::new(&world);
    let (mut peer, connection) = stranger(&world, &mut node);
    let mut bytes = raw(&hello(&world.pool, 1));
    bytes.extend(raw(&ping(&world.pool, 42)));
    peer.write_all(&bytes).unwrap();
    until(&world, &mut [&mut node], |nodes| nodes[0].frames(connection).pop());
    for _ in 0..50 {
        world.turn();
        node.poll();
    }
    assert!(node.frames(connection).is_empty());
    node.tcp.trust(connection);
    let frame = until(&world, &mut [&mut node], |nodes| nodes[0].frames(connection).pop());
    assert_eq!(number_of(&frame), 42);
}

#[test]
fn garbage_closes_only_its_connection() {
    let world = World::new();
    let mut node = Node::new(&world);
    let (mut good, kept) = stranger(&world, &mut node);
    for seed in 0..8 {
        let (mut bad, connection) = stranger(&world, &mut node);
        bad.write_all(&pattern(3000, seed)).unwrap();
        let reason = until(&world, &mut [&mut node], |nodes| nodes[0].closed(connection));
        assert!(matches!(reason, CloseReason::Protocol(_)), "{reason:?}");
        let _ = bad.read(&mut [0; 16]);
    }
    let (mut early, connection) = stranger(&world, &mut node);
    early.write_all(&raw(&ping(&world.pool, 1))).unwrap();
    let reason = until(&world, &mut [&mut node], |nodes| nodes[0].closed(connection));
    assert!(matches!(reason, CloseReason::Protocol(_)), "a message before the handshake: {reason:?}");
    good.write_all(&raw(&hello(&world.pool, 1))).unwrap();
    until(&world, &mut [&mut node], |nodes| nodes[0].frames(kept).pop());
    assert_eq!(node.tcp.connections(), 1);
}

#[test]
fn a_peer_may_vanish_at_any_byte() {
    let world = World::new();
    let mut node = Node::new(&world);
    let bytes = raw(&bulk(&world.pool, 40_000, 3));
    for cut in [0, 1, 63, 64, 65, 191, 192, 4000, 20_000, bytes.len() - 1] {
        for reset in [false, true] {
            let (mut peer, connection) = stranger(&world, &mut node);
            node.tcp.trust(connection);
            peer.write_all(&bytes[..cut]).unwrap();
            for _ in 0..5 {
                world.turn();
                node.poll();
            }
            if reset {
                // Unread input makes the system reset the connection.
                node.tcp.send(connection, ping(&world.pool, 1)).unwrap();
                world.turn();
            }
            drop(peer);
            let reason = until(&world, &mut [&mut node], |nodes| nodes[0].closed(connection));
            assert_eq!(reason, CloseReason::Peer, "after {cut} bytes");
            assert!(node.frames(connection).is_empty());
        }
    }
}

#[test]
fn bytes_may_arrive_one_by_one() {
    let world = World::new();
    let mut node = Node::new(&world);
    let (mut peer, connection) = stranger(&world, &mut node);
    node.tcp.trust(connection);
    let mut bytes = raw(&ping(&world.pool, 1));
    bytes.extend(raw(&bulk(&world.pool, 700, 9)));
    for byte in &bytes {
        peer.write_all(std::slice::from_ref(byte)).unwrap();
        world.turn();
        node.poll();
    }
    let mut got = node.frames(connection).len();
    until(&world, &mut [&mut node], |nodes| {
        got += nodes[0].frames(connection).len();
        (got == 2).then_some(())
    });
}

#[test]
fn a_peer_that_does_not_read_fills_the_queue_and_nothing_is_lost() {
    let world = World::new();
    let options = TcpOptions { send_queue_max: 1 << 20, ..TcpOptions::default() };
    let (mut a, mut b) = (Node::with(&world, options), Node::new(&world));
    let (near, far) = pair(&world, &mut a, &mut b);
    let mut sent = 0_u8;
    let refused = loop {
        match a.tcp.send(near, bulk(&world.pool, 300_000, sent)) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        world.turn();
        a.poll();
        assert!(sent < 200, "the queue is bounded");
    };
    let SendRefused::QueueFull(back) = refused else { panic!("{refused:?}") };
    assert_eq!(back.data.unwrap().len(), 300_000);
    assert!(sent >= 4);
    let mut got = Vec::new();
    until(&world, &mut [&mut a, &mut b], |nodes| {
        got.extend(nodes[1].frames(far));
        (got.len() == usize::from(sent)).then_some(())
    });
    for (seed, frame) in got.iter().enumerate() {
        assert!(*wire::decode(frame).unwrap().data.unwrap() == pattern(300_000, seed as u8)[..]);
    }
    assert!(a.tcp.send(near, ping(&world.pool, 1)).is_ok());
}

#[test]
fn an_exhausted_pool_stops_receiving_until_buffers_come_back() {
    let (near_world, mut far_world) = (World::new(), World::new());
    far_world.pool = BufferPool::new(16 << 20);
    far_world.ring = near_world.ring.clone();
    let (mut a, mut b) = (Node::new(&near_world), Node::new(&far_world));
    let (near, far) = pair(&near_world, &mut a, &mut b);
    // A pool's memory keeps its size class: what receiving needs must exist before the hoard takes the rest.
    a.tcp.send(near, bulk(&near_world.pool, 1 << 20, 1)).unwrap();
    until(&near_world, &mut [&mut a, &mut b], |nodes| nodes[1].frames(far).pop());
    let hoard: Vec<_> = std::iter::from_fn(|| far_world.pool.alloc(1 << 20).ok()).collect();
    for seed in 0..3 {
        a.tcp.send(near, bulk(&near_world.pool, 1 << 20, seed)).unwrap();
    }
    for _ in 0..200 {
        near_world.turn();
        a.poll();
        b.poll();
    }
    assert!(b.frames(far).is_empty() && b.closed(far).is_none());
    drop(hoard);
    let mut got = 0;
    until(&near_world, &mut [&mut a, &mut b], |nodes| {
        got += nodes[1].frames(far).len();
        (got == 3).then_some(())
    });
}

#[test]
fn a_close_sends_what_was_queued_and_is_the_last_event() {
    let world = World::new();
    let (mut a, mut b) = (Node::new(&world), Node::new(&world));
    let (near, far) = pair(&world, &mut a, &mut b);
    // Unread input at the closing side would make the system reset the connection and take the answer away.
    b.tcp.send(far, bulk(&world.pool, 50_000, 1)).unwrap();
    (0..20).for_each(|_| world.turn());
    for number in 0..3 {
        a.tcp.send(near, ping(&world.pool, number)).unwrap();
    }
    a.tcp.close(near);
    assert!(matches!(a.tcp.send(near, ping(&world.pool, 9)), Err(SendRefused::Closed(_))));
    let mut got = 0;
    let reason = until(&world, &mut [&mut a, &mut b], |nodes| {
        got += nodes[1].frames(far).len();
        nodes[1].closed(far)
    });
    assert_eq!((got, reason), (3, CloseReason::Peer));
    let reason = until(&world, &mut [&mut a, &mut b], |nodes| nodes[0].closed(near));
    assert_eq!(reason, CloseReason::Local);
    assert!(matches!(a.events.back(), Some(TransportEvent::Closed { .. })));
    a.tcp.close(near);
    a.tcp.trust(near);
}

#[test]
fn a_close_does_not_wait_for_a_peer_that_does_not_read() {
    let world = World::new();
    let mut node = Node::new(&world);
    let (_peer, connection) = stranger(&world, &mut node);
    node.tcp.trust(connection);
    while node.tcp.send(connection, bulk(&world.pool, 1 << 20, 1)).is_ok() {
        world.turn();
        node.poll();
    }
    node.tcp.close(connection);
    for _ in 0..100 {
        world.ring.wait(None).unwrap();
        node.poll();
        if node.closed(connection).is_some() {
            break;
        }
    }
    assert_eq!(node.closed(connection), Some(CloseReason::Local));
}

#[test]
fn a_busy_port_is_named() {
    let world = World::new();
    let mut node = Node::new(&world);
    let taken = TcpListener::bind(LOCAL).unwrap();
    let address = taken.local_addr().unwrap();
    let error = node.tcp.listen(address).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[test]
fn strangers_beyond_the_limit_are_turned_away() {
    let world = World::new();
    let options = TcpOptions { untrusted_max: 2, connections_max: 4, ..TcpOptions::default() };
    let mut node = Node::with(&world, options);
    let address = node.tcp.listen(LOCAL.parse().unwrap()).unwrap();
    let mut peers: Vec<_> = (0..3).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert_eq!(until(&world, &mut [&mut node], |_| peers[2].take_error().ok().map(|_| 0)), 0);
    for _ in 0..100 {
        world.turn();
        node.poll();
    }
    assert_eq!(node.tcp.connections(), 2);
    assert!(matches!(peers[2].read(&mut [0; 1]), Ok(0) | Err(_)), "the third is closed");
    let first = node.accepted().unwrap();
    node.tcp.trust(first);
    peers.push(TcpStream::connect(address).unwrap());
    until(&world, &mut [&mut node], |nodes| (nodes[0].tcp.connections() == 3).then_some(()));
}

#[test]
fn dropping_with_everything_in_flight_is_safe_and_closes_all_descriptors() {
    let world = World::new();
    let before = super::open_descriptors();
    for turns in 0..6 {
        let (mut a, mut b) = (Node::new(&world), Node::new(&world));
        let address = b.tcp.listen(LOCAL.parse().unwrap()).unwrap();
        let (near, far) = join(&world, &mut a, &mut b, address);
        while a.tcp.send(near, bulk(&world.pool, 2 << 20, 1)).is_ok() {
            world.turn();
            a.poll();
        }
        b.tcp.send(far, ping(&world.pool, 1)).unwrap();
        b.poll();
        let _ = a.tcp.connect(address);
        (0..turns).for_each(|_| world.turn());
    }
    for _ in 0..10 {
        world.turn();
    }
    // Other tests run beside this one, so that the number may be off by their sockets, but not by all of these.
    let after = super::open_descriptors();
    assert!(after <= before + 200, "{before} descriptors before, {after} after");
}

fn moved(socket: OwnedSocket) -> OwnedSocket {
    fn is_send<T: Send>(value: T) -> T {
        value
    }
    is_send(socket)
}

#[test]
fn a_connection_moves_between_reactors_with_every_byte() {
    for cut in [0, 1, 64, 100] {
        for seen in [false, true] {
            hand_over_case(cut, seen);
        }
    }
}

/// The peer has sent the handshake and `cut` bytes of the next frame; its first frame was `seen` by the first reactor
/// or not.
fn hand_over_case(cut: usize, seen: bool) {
    let (first_world, second_world) = (World::new(), World::new());
    let (mut first, mut second) = (Node::new(&first_world), Node::new(&second_world));
    let (mut peer, connection) = stranger(&first_world, &mut first);
    let (mut bystander, other) = stranger(&first_world, &mut first);
    let next = raw(&ping(&first_world.pool, 77));
    let mut bytes = raw(&hello(&first_world.pool, 1));
    bytes.extend_from_slice(&next[..cut]);
    peer.write_all(&bytes).unwrap();
    let mut frame = None;
    if seen {
        frame = Some(until(&first_world, &mut [&mut first], |nodes| nodes[0].frames(connection).pop()));
    }
    bystander.write_all(&raw(&hello(&first_world.pool, 2))).unwrap();
    let mut socket = first.tcp.hand_over(connection).expect("it is open and not trusted");
    if let Some(frame) = &frame {
        socket.put_back(frame);
    }
    assert!(first.tcp.hand_over(connection).is_none());
    let adopted = second.tcp.adopt(moved(socket));
    let found = until(&second_world, &mut [&mut second], |nodes| nodes[0].accepted());
    assert_eq!(found, adopted);
    until(&second_world, &mut [&mut second], |nodes| nodes[0].frames(adopted).pop());
    second.tcp.trust(adopted);
    peer.write_all(&next[cut..]).unwrap();
    let frame = until(&second_world, &mut [&mut second], |nodes| nodes[0].frames(adopted).pop());
    assert_eq!(number_of(&frame), 77);
    second.tcp.send(adopted, ping(&second_world.pool, 78)).unwrap();
    second_world.turn();
    let mut answer = vec![0; next.len()];
    peer.read_exact(&mut answer).unwrap();
    until(&first_world, &mut [&mut first], |nodes| nodes[0].frames(other).pop());
    assert!(first.closed(connection).is_none(), "the id ends without an event");
}
