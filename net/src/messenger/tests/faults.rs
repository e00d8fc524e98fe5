//! Garbage, floods, silence, restarts, and handshakes out of order.

use super::*;

#[test]
fn an_address_where_nobody_listens_is_down() {
    let mut bed = Bed::with_osds(1);
    let near = bed.connect(2, 33, osd(33));
    bed.settle();
    assert_eq!(bed.down(2), (near, DownReason::Closed(CloseReason::Unreachable(libc::ECONNREFUSED))));
}

#[test]
fn garbage_before_the_handshake_ends_that_connection_alone() {
    let mut bed = Bed::with_osds(2);
    let (near, _) = bed.up(3, 2, osd(2));
    let mut raw = Raw::new(&bed, 50);
    let mut draw = Draw(5);
    for round in 0..200 {
        let id = raw.transport.connect(address(2));
        let bytes = draw.bytes(64 + round % 500);
        let head = raw.pool.copy_of(&bytes).unwrap();
        raw.transport.send(id, Frame { head, data: None }).unwrap();
        bed.settle();
        let (messages, end) = raw.heard();
        assert_eq!((messages.len(), end), (0, Some(CloseReason::Peer)));
    }
    assert!(bed.events(2).is_empty());
    assert_eq!(bed.net(2).connection_count(), 1);
    assert_eq!(bed.net(2).stats().broken, 200);
    assert_eq!(bed.net(3).send(near, rep_ack(), Body::NONE), Ok(()));
    bed.settle();
    assert!(matches!(bed.events(2)[..], [MessengerEvent::Message { .. }]));
}

#[test]
fn a_flood_of_half_open_connections_is_bounded_and_honest_peers_get_through() {
    let mut bed = Bed::with_osds(2);
    let mut raw = Raw::new(&bed, 50);
    let max = limits::PREAUTH_CONNECTIONS_MAX;
    for round in 0..40 {
        for _ in 0..100 {
            raw.transport.connect(address(2));
        }
        bed.settle();
        assert!(bed.net(2).connection_count() <= max + 1);
        if round % 10 == 9 {
            let (near, _) = bed.up(3, 2, osd(2));
            bed.net(3).close(near);
            bed.settle();
            bed.events(2);
            bed.events(3);
        }
    }
    assert!(bed.net(2).stats().evicted > 3000, "{:?}", bed.net(2).stats());
    assert!(bed.events(2).is_empty());
    bed.pass(limits::HANDSHAKE_MS_MAX + 1);
    assert_eq!(bed.net(2).connection_count(), 0, "the rest ran out of time");
    assert!(bed.events(2).is_empty());
    let pool = bed.net(2).settings.pool.clone();
    assert!(pool.mapped() <= 2 << 20, "{}", pool.mapped());
}

#[test]
fn a_flood_from_one_source_takes_nobody_elses_place() {
    let mut bed = Bed::with_osds(1);
    let (mut flood, mut slow) = (Raw::new(&bed, 50), Raw::new(&bed, 51));
    let id = slow.transport.connect(address(2));
    bed.settle();
    for _ in 0..500 {
        flood.transport.connect(address(2));
    }
    bed.settle();
    assert_eq!(bed.net(2).connection_count(), limits::PREAUTH_SOURCE_MAX + 1);
    slow.send(id, Message::Hello(hello(osd(3), osd(2))), 1);
    bed.settle();
    assert!(
        matches!(bed.events(2)[..], [MessengerEvent::Up { .. }]),
        "the one that came first was slow only"
    );
}

#[test]
fn a_handshake_has_a_deadline_on_both_sides() {
    let mut bed = Bed::with_osds(1);
    let mut raw = Raw::new(&bed, 50);
    // Accepted, and silent.
    raw.transport.connect(address(2));
    bed.pass(limits::HANDSHAKE_MS_MAX - 1);
    assert_eq!(bed.net(2).connection_count(), 1);
    bed.pass(2);
    assert_eq!(bed.net(2).connection_count(), 0);
    assert!(raw.poll().iter().any(|event| matches!(event, TransportEvent::Closed { .. })));
    // Connected, and never answered; and not even connected.
    let unanswered = bed.connect(2, 50, osd(3));
    bed.pass(limits::HANDSHAKE_MS_MAX - 1);
    assert!(bed.events(2).is_empty());
    bed.pass(2);
    assert_eq!(bed.down(2), (unanswered, DownReason::Timeout));
    bed.hub.stall(address(2), address(50));
    let lost = bed.connect(2, 50, osd(3));
    bed.pass(limits::HANDSHAKE_MS_MAX + 1);
    assert_eq!(bed.down(2), (lost, DownReason::Timeout));
}

#[test]
fn a_connection_begun_after_a_long_idle_time_has_its_full_deadline() {
    let mut bed = Bed::with_osds(1);
    bed.settle();
    bed.now = bed.now.after(Duration::from_secs(3600));
    bed.hub.set_now(bed.now);
    bed.hub.set_delay(Duration::from_secs(1));
    bed.connect(2, MON, Role::Mon);
    bed.pass(4900);
    assert!(matches!(bed.events(2)[..], [MessengerEvent::Up { .. }]));
}

#[test]
fn an_idle_connection_lives_on_pings() {
    let mut bed = Bed::with_osds(2);
    bed.hub.set_delay(Duration::from_millis(40));
    bed.connect(2, 3, osd(3));
    bed.pass(60_000);
    assert!(matches!(bed.events(2)[..], [MessengerEvent::Up { .. }]));
    assert!(matches!(bed.events(3)[..], [MessengerEvent::Up { .. }]));
}

#[test]
fn a_silent_peer_is_down_after_interval_and_grace() {
    let mut bed = Bed::with_osds(2);
    let (near, far) = bed.up(2, 3, osd(3));
    bed.hub.stall(address(3), address(2));
    bed.pass(2900);
    assert!(bed.events(2).is_empty());
    bed.pass(200);
    assert_eq!(bed.down(2), (near, DownReason::Timeout));
    assert_eq!(bed.down(3), (far, DownReason::Closed(CloseReason::Peer)), "the other direction works");
    assert_eq!(bed.net(2).stats().timed_out, 1);
    // Both directions: both sides find out by themselves.
    bed.hub.heal(address(2), address(3));
    let (near, far) = bed.up(2, 3, osd(3));
    bed.hub.stall(address(2), address(3));
    bed.hub.stall(address(3), address(2));
    bed.pass(3100);
    assert_eq!(bed.down(2), (near, DownReason::Timeout));
    assert_eq!(bed.down(3), (far, DownReason::Timeout));
}

#[test]
fn a_process_that_was_stopped_does_not_blame_its_peers() {
    let mut bed = Bed::with_osds(2);
    bed.up(2, 3, osd(3));
    // Node 2 is not polled for 2 s: node 3 still waits, and its pings lie in the transport.
    let stopped = bed.nodes.remove(&2).unwrap();
    bed.pass(2000);
    assert!(bed.events(3).is_empty());
    bed.nodes.insert(2, stopped);
    bed.pass(5000);
    assert!(bed.events(2).is_empty());
    assert!(bed.events(3).is_empty());
    // For longer than that: the others gave it up, and it hears that from them.
    let stopped = bed.nodes.remove(&2).unwrap();
    bed.pass(60_000);
    assert_eq!(bed.down(3).1, DownReason::Timeout);
    bed.nodes.insert(2, stopped);
    bed.settle();
    assert_eq!(bed.down(2).1, DownReason::Closed(CloseReason::Peer));
}

#[test]
fn a_peer_that_restarts_is_down_and_comes_back_with_another_incarnation() {
    let mut bed = Bed::with_osds(2);
    let (near, _) = bed.up(2, 3, osd(3));
    bed.nodes.remove(&3);
    bed.settle();
    assert_eq!(bed.down(2), (near, DownReason::Closed(CloseReason::Peer)));
    let again = Identity { incarnation: Incarnation(78), ..identity(osd(3)) };
    bed.add(3, MessengerSettings::new(again, BufferPool::new(64 << 20)));
    let (near, _) = bed.up(2, 3, osd(3));
    assert_eq!(bed.net(2).peer(near), Some(&again));
    // The map says so as well, and nobody takes the new one for the old one.
    bed.net(2).set_incarnation(OsdId(3), Incarnation(77));
    bed.net(2).set_incarnation(OsdId(3), Incarnation(78));
    bed.settle();
    assert!(bed.events(2).is_empty());
}

#[test]
fn damage_ends_one_connection_and_others_go_on() {
    let mut bed = Bed::with_osds(3);
    let (near, far) = bed.up(3, 2, osd(2));
    let (other, _) = bed.up(4, 2, osd(2));
    bed.hub.damage_next(address(2), 777);
    bed.net(3).send(near, rep_ack(), Body::NONE).unwrap();
    bed.net(4).send(other, rep_ack(), Body::NONE).unwrap();
    bed.settle();
    let events = bed.events(2);
    let broken = |event: &MessengerEvent| matches!(event, MessengerEvent::Down { connection, reason: DownReason::Closed(CloseReason::Protocol(_)), .. } if *connection == far);
    assert!(events.iter().any(broken), "{events:?}");
    assert!(events.iter().any(|event| matches!(event, MessengerEvent::Message { .. })));
    assert_eq!(bed.down(3), (near, DownReason::Closed(CloseReason::Peer)));
}

/// A hand-made peer says these messages with these numbers; whether it was let in, and whether it was cut off.
fn said(messages: &[(Message, u64)]) -> (bool, bool) {
    let mut bed = Bed::with_osds(1);
    let mut raw = Raw::new(&bed, 50);
    let id = raw.transport.connect(address(2));
    for (message, sequence) in messages {
        raw.send(id, *message, *sequence);
    }
    bed.settle();
    let events = bed.events(2);
    let up = events.iter().any(|event| matches!(event, MessengerEvent::Up { .. }));
    assert!(
        !events.iter().any(|event| matches!(event, MessengerEvent::Message { .. })) || messages.len() > 1
    );
    let (_, end) = raw.heard();
    (up, end.is_some())
}

#[test]
fn handshake_messages_come_once_and_first() {
    let open = Message::Hello(hello(osd(3), osd(2)));
    let ack = rep_ack();
    let late = Message::Welcome(welcome(osd(3)));
    let refuse = Message::Refuse(Refuse { reason: RefuseReason::Busy, epoch: Epoch(1) });
    assert_eq!(said(&[(open, 1)]), (true, false));
    assert_eq!(said(&[(open, 1), (ack, 2)]), (true, false));
    assert_eq!(said(&[(ack, 1)]), (false, true), "a stripped handshake");
    assert_eq!(said(&[(ack, 2)]), (false, true));
    assert_eq!(said(&[(late, 1)]), (false, true), "an answer from the connecting side");
    assert_eq!(said(&[(refuse, 1)]), (false, true));
    assert_eq!(said(&[(open, 1), (open, 2)]), (true, true), "a second Hello");
    assert_eq!(said(&[(open, 1), (late, 2)]), (true, true));
    assert_eq!(said(&[(open, 1), (refuse, 2)]), (true, true));
    assert_eq!(said(&[(open, 0)]), (false, true), "numbers count from 1");
    assert_eq!(said(&[(open, 1), (ack, 1)]), (true, true), "a frame doubled");
    assert_eq!(said(&[(open, 1), (ack, 3)]), (true, true), "a frame stripped");
    assert_eq!(said(&[(open, 1), (op_request(), 2)]), (true, true), "an op from an OSD");
}

#[test]
fn the_answering_side_must_answer() {
    for (message, sequence) in [
        (rep_ack(), 1),
        (Message::Ping(Ping { number: 1 }), 1),
        (Message::Hello(hello(osd(3), osd(2))), 1),
        (Message::Refuse(Refuse { reason: RefuseReason::Busy, epoch: Epoch(1) }), 2),
    ] {
        let mut bed = Bed::with_osds(1);
        let mut raw = Raw::new(&bed, 50);
        let near = bed.connect(2, 50, osd(3));
        bed.settle();
        let [TransportEvent::Accepted { connection, .. }, _] = raw.poll()[..] else { panic!("no hello") };
        raw.send(connection, message, sequence);
        bed.settle();
        let (down, reason) = bed.down(2);
        assert_eq!(down, near);
        assert!(matches!(reason, DownReason::Closed(CloseReason::Protocol(_))), "{message:?}: {reason:?}");
    }
}

/// Any sequence of messages from a stranger: no panic, bounded state, and honest peers are served.
#[test]
fn strangers_who_say_anything_in_any_order_do_no_harm() {
    for seed in 0..300 {
        let mut draw = Draw(seed);
        let mut bed = Bed::with_osds(2);
        let mut raw = Raw::new(&bed, 50);
        let mut ids = vec![raw.transport.connect(address(2))];
        let mut sequence = 0;
        for _ in 0..draw.below(20) {
            sequence += u64::from(draw.below(8) != 0);
            let kind = wire::Kind::ALL[draw.below(wire::Kind::ALL.len() as u64) as usize];
            let honest = Message::Hello(hello(osd(draw.below(4) as u32), osd(2)));
            let (message, body) = draw.message(kind, &raw.pool, 9000);
            let (message, body) = if draw.flag() { (honest, Body::NONE) } else { (message, body) };
            let envelope = Envelope { epoch: Epoch(draw.u32()), message };
            let frame = wire::encode_numbered(&raw.pool, &envelope, body, sequence).unwrap();
            if draw.below(10) == 0 {
                bed.hub.damage_next(address(2), draw.u32() as usize);
            }
            if draw.below(4) == 0 {
                ids.push(raw.transport.connect(address(2)));
                sequence = 0;
            }
            // A refusal means that the connection is closed already.
            let _ = raw.transport.send(ids[ids.len() - 1], frame);
            bed.settle();
            bed.events(2);
        }
        bed.up(3, 2, osd(2));
        drop(raw);
        bed.settle();
        assert_eq!(bed.net(2).connection_count(), 1, "seed {seed}");
    }
}
