use super::*;
use crate::wire::samples::Draw;
use crate::wire::{Envelope, Kind, encode};
use loligo_config::id::Epoch;

fn address(n: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, n], 6800))
}

struct Pair {
    hub: MemoryHub,
    near: MemoryTransport,
    far: MemoryTransport,
    pool: BufferPool,
}

impl Pair {
    fn new() -> Self {
        let hub = MemoryHub::new();
        let (near, far) = (hub.endpoint(address(1)), hub.endpoint(address(2)));
        Self { hub, near, far, pool: BufferPool::new(64 << 20) }
    }

    fn frame(&self, kind: Kind, seed: u64) -> Frame {
        let (message, body) = Draw(seed).message(kind, &self.pool, 9000);
        encode(&self.pool, &Envelope { epoch: Epoch(1), message }, body).unwrap()
    }

    /// Connects and trusts on both sides.
    fn connect(&mut self) -> (ConnectionId, ConnectionId) {
        let near = self.near.connect(address(2));
        assert!(
            matches!(&events(&mut self.near)[..], [TransportEvent::Connected { connection }] if *connection == near)
        );
        let far = match &events(&mut self.far)[..] {
            [TransportEvent::Accepted { connection, from }] if *from == address(1) => *connection,
            other => panic!("{other:?}"),
        };
        self.near.trust(near);
        self.far.trust(far);
        (near, far)
    }
}

fn events(transport: &mut MemoryTransport) -> Vec<TransportEvent> {
    let mut inbox = VecDeque::new();
    while transport.poll(3, &mut inbox) > 0 {}
    inbox.into()
}

fn kinds(transport: &mut MemoryTransport) -> Vec<Result<Kind, CloseReason>> {
    let event = |event: TransportEvent| match event {
        TransportEvent::Frame { frame, .. } => Ok(wire::kind_of(&frame).unwrap()),
        TransportEvent::Closed { reason, .. } => Err(reason),
        other => panic!("{other:?}"),
    };
    events(transport).into_iter().map(event).collect()
}

#[test]
fn frames_arrive_in_order_and_then_the_end() {
    let mut pair = Pair::new();
    let (near, far) = pair.connect();
    for kind in [Kind::Ping, Kind::Map, Kind::Notify] {
        pair.near.send(near, pair.frame(kind, 1)).unwrap();
    }
    pair.near.close(near);
    assert!(matches!(pair.near.send(near, pair.frame(Kind::Ping, 1)), Err(SendRefused::Closed(_))));
    assert_eq!(kinds(&mut pair.near), [Err(CloseReason::Local)]);
    assert_eq!(
        kinds(&mut pair.far),
        [Ok(Kind::Ping), Ok(Kind::Map), Ok(Kind::Notify), Err(CloseReason::Peer)]
    );
    assert!(matches!(pair.far.send(far, pair.frame(Kind::Ping, 1)), Err(SendRefused::Closed(_))));
    assert_eq!(pair.hub.connection_count(), 0);
}

#[test]
fn delay_keeps_the_order_also_when_it_shrinks() {
    let mut pair = Pair::new();
    let (near, _) = pair.connect();
    pair.hub.set_delay(Duration::from_nanos(100));
    pair.near.send(near, pair.frame(Kind::Map, 1)).unwrap();
    pair.hub.set_delay(Duration::ZERO);
    pair.near.send(near, pair.frame(Kind::Ping, 1)).unwrap();
    assert_eq!(pair.hub.next_arrival(), Some(Instant(100)));
    pair.hub.set_now(Instant(99));
    assert_eq!(kinds(&mut pair.far), []);
    pair.hub.set_now(Instant(100));
    assert_eq!(kinds(&mut pair.far), [Ok(Kind::Map), Ok(Kind::Ping)]);
}

#[test]
fn before_trust_one_frame_arrives_and_the_rest_after_it() {
    let mut pair = Pair::new();
    let near = pair.near.connect(address(2));
    for kind in [Kind::Hello, Kind::Ping, Kind::Map] {
        pair.near.send(near, pair.frame(kind, 1)).unwrap();
    }
    let far = match &events(&mut pair.far)[..] {
        [TransportEvent::Accepted { connection, .. }, TransportEvent::Frame { frame, .. }] => {
            assert_eq!(wire::kind_of(frame), Some(Kind::Hello));
            *connection
        }
        other => panic!("{other:?}"),
    };
    assert!(events(&mut pair.far).is_empty());
    pair.far.trust(far);
    assert_eq!(kinds(&mut pair.far), [Ok(Kind::Ping), Ok(Kind::Map)]);
}

#[test]
fn before_trust_other_messages_and_damage_close() {
    let mut pair = Pair::new();
    let near = pair.near.connect(address(2));
    pair.near.send(near, pair.frame(Kind::Ping, 1)).unwrap();
    let reason = CloseReason::Protocol("a message before the handshake");
    assert!(
        matches!(events(&mut pair.far)[..], [_, TransportEvent::Closed { reason: r, .. }] if r == reason)
    );
    let (near, _) = {
        events(&mut pair.near);
        pair.connect()
    };
    pair.hub.damage_next(address(2), 12_345);
    pair.near.send(near, pair.frame(Kind::Map, 1)).unwrap();
    pair.near.send(near, pair.frame(Kind::Ping, 1)).unwrap();
    assert!(matches!(kinds(&mut pair.far)[..], [Err(CloseReason::Protocol(_))]));
    assert_eq!(kinds(&mut pair.near), [Err(CloseReason::Peer)]);
}

#[test]
fn a_cut_breaks_both_sides_until_it_is_healed() {
    let mut pair = Pair::new();
    let (near, _) = pair.connect();
    pair.near.send(near, pair.frame(Kind::Ping, 1)).unwrap();
    pair.hub.cut(address(1), address(2));
    let broken = [Err(CloseReason::Network(libc::ECONNRESET))];
    assert_eq!(kinds(&mut pair.near), broken);
    assert_eq!(kinds(&mut pair.far), broken);
    pair.near.connect(address(2));
    assert_eq!(kinds(&mut pair.near), [Err(CloseReason::Unreachable(libc::EHOSTUNREACH))]);
    pair.hub.heal(address(2), address(1));
    pair.connect();
}

#[test]
fn a_stall_is_silent_and_loses_nothing() {
    let mut pair = Pair::new();
    let (near, far) = pair.connect();
    pair.hub.stall(address(1), address(2));
    pair.near.send(near, pair.frame(Kind::Ping, 1)).unwrap();
    pair.far.send(far, pair.frame(Kind::Pong, 1)).unwrap();
    assert_eq!(kinds(&mut pair.far), []);
    assert_eq!(kinds(&mut pair.near), [Ok(Kind::Pong)], "the other direction works");
    let second = pair.near.connect(address(2));
    pair.near.close(near);
    assert_eq!(kinds(&mut pair.near), [Err(CloseReason::Local)]);
    assert_eq!(kinds(&mut pair.far), []);
    pair.hub.heal(address(1), address(2));
    let arrived = events(&mut pair.far);
    assert!(
        matches!(
            arrived[..],
            [
                TransportEvent::Frame { .. },
                TransportEvent::Closed { reason: CloseReason::Peer, .. },
                TransportEvent::Accepted { .. }
            ]
        ),
        "{arrived:?}"
    );
    assert!(
        matches!(events(&mut pair.near)[..], [TransportEvent::Connected { connection }] if connection == second)
    );
}

#[test]
fn a_full_send_queue_gives_the_frame_back() {
    let mut pair = Pair::new();
    let (near, _) = pair.connect();
    pair.hub.set_send_queue_max(2);
    for _ in 0..2 {
        pair.near.send(near, pair.frame(Kind::Ping, 1)).unwrap();
    }
    assert!(matches!(pair.near.send(near, pair.frame(Kind::Ping, 1)), Err(SendRefused::QueueFull(_))));
    assert_eq!(kinds(&mut pair.far).len(), 2);
    pair.near.send(near, pair.frame(Kind::Ping, 1)).unwrap();
}

#[test]
fn the_end_of_a_process_closes_its_connections_and_its_port() {
    let mut pair = Pair::new();
    pair.connect();
    let hub = pair.hub.clone();
    let Pair { mut near, far, .. } = pair;
    drop(far);
    assert_eq!(kinds(&mut near), [Err(CloseReason::Peer)]);
    near.connect(address(2));
    assert_eq!(kinds(&mut near), [Err(CloseReason::Unreachable(libc::ECONNREFUSED))]);
    let mut far = hub.endpoint(address(2));
    near.connect(address(2));
    assert_eq!(events(&mut far).len(), 1);
}

#[test]
fn a_lossy_slow_link_delivers_everything_in_order_and_late() {
    let mut pair = Pair::new();
    let (near, _) = pair.connect();
    let profile = LinkProfile {
        delay: Duration::from_micros(10),
        jitter: Duration::from_micros(50),
        lost_per_million: 300_000,
        bytes_per_second: 1_000_000,
        ..LinkProfile::default()
    };
    pair.hub.set_link(address(1), address(2), Some(profile));
    for _ in 0..50 {
        pair.near.send(near, pair.frame(Kind::Ping, 1)).unwrap();
    }
    pair.near.send(near, pair.frame(Kind::Map, 1)).unwrap();
    let lost = pair.hub.link_stats().lost;
    assert!(lost > 5, "{lost} of 51 frames were lost");
    pair.hub.set_now(Instant(200_000_000));
    assert!(kinds(&mut pair.far).len() < 51, "a lost frame holds up those behind it");
    pair.hub.set_now(Instant(60_000_000_000));
    assert_eq!(kinds(&mut pair.far).last(), Some(&Ok(Kind::Map)));
}

#[test]
fn after_a_reset_some_of_what_was_sent_arrives_late_and_then_the_end() {
    let arrived =
        |seed: u64| {
            let mut pair = Pair::new();
            pair.hub.set_seed(seed);
            let (near, far) = pair.connect();
            pair.hub.set_delay(Duration::from_micros(1));
            for kind in [Kind::Ping, Kind::Map, Kind::Notify] {
                pair.near.send(near, pair.frame(kind, 1)).unwrap();
            }
            pair.hub.reset(address(1), address(2), Duration::from_secs(1));
            pair.near.send(near, pair.frame(Kind::Ping, 1)).unwrap();
            let other = pair.near.connect(address(2));
            pair.hub.set_now(Instant(5_000_000_000));
            let near_end = events(&mut pair.near);
            assert!(near_end.iter().any(|event| matches!(event,
            TransportEvent::Closed { connection, reason: CloseReason::Network(_) } if *connection == near)));
            assert!(near_end.iter().any(
                |event| matches!(event, TransportEvent::Connected { connection } if *connection == other)
            ));
            let far_end = events(&mut pair.far);
            let frames = far_end.iter().filter(|event| matches!(event, TransportEvent::Frame { .. })).count();
            assert!(far_end.iter().any(|event| matches!(event,
            TransportEvent::Closed { connection, reason: CloseReason::Network(_) } if *connection == far)));
            frames
        };
    let counts: BTreeSet<usize> = (0..40).map(arrived).collect();
    assert_eq!(counts, BTreeSet::from([0, 1, 2, 3]), "any number of them, never what was sent afterwards");
}

#[test]
fn a_machine_without_power_is_silent_until_it_is_back() {
    let mut pair = Pair::new();
    let (near, _) = pair.connect();
    let hub = pair.hub.clone();
    hub.lose_power(address(2));
    let Pair { near: mut transport, far, pool, .. } = pair;
    drop(far);
    assert_eq!(kinds(&mut transport), [], "nobody told it");
    let second = transport.connect(address(2));
    assert_eq!(kinds(&mut transport), [], "nobody answers");
    let _back = hub.endpoint(address(2));
    let (message, body) = Draw(1).message(Kind::Ping, &pool, 0);
    let frame = encode(&pool, &Envelope { epoch: Epoch(1), message }, body).unwrap();
    transport.send(near, frame).unwrap();
    assert_eq!(
        kinds(&mut transport),
        [Err(CloseReason::Network(libc::ECONNRESET))],
        "it knows no such connection"
    );
    transport.close(second);
    assert_eq!(kinds(&mut transport), [Err(CloseReason::Local)]);
}
