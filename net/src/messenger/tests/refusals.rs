//! Every reason for which a peer is refused, on either side, and the matrix of versions and features.

use super::*;

/// What a peer that says this hears from the node at `to`.
fn answer(bed: &mut Bed, to: u8, hello: Hello) -> Result<Welcome, RefuseReason> {
    let mut raw = Raw::new(bed, 50);
    let id = raw.transport.connect(address(to));
    raw.send(id, Message::Hello(hello), 1);
    bed.settle();
    let before = bed.events(to).len();
    let (messages, end) = raw.heard();
    match messages[..] {
        [Message::Welcome(welcome)] => {
            assert_eq!((before, end), (1, None));
            drop(raw);
            bed.settle();
            bed.events(to);
            Ok(welcome)
        }
        [Message::Refuse(refuse)] => {
            assert_eq!((before, end), (0, Some(CloseReason::Peer)), "the owner does not hear of it");
            Err(refuse.reason)
        }
        ref other => panic!("{other:?}"),
    }
}

/// How a node takes this answer to its own `Hello`, on its way to OSD 3.
fn taken(bed: &mut Bed, from: u8, answer: impl FnOnce(Hello) -> Message) -> Result<Identity, DownReason> {
    let mut raw = Raw::new(bed, 51);
    let near = bed.net(from).connect(address(51), osd(3), CoreId(0));
    bed.settle();
    let (connection, hello) = match &raw.poll()[..] {
        [_, TransportEvent::Frame { connection, frame }] => {
            match wire::decode(frame).unwrap().envelope.message {
                Message::Hello(hello) => (*connection, hello),
                other => panic!("{other:?}"),
            }
        }
        other => panic!("{other:?}"),
    };
    raw.send(connection, answer(hello), 1);
    bed.settle();
    let outcome = match &bed.events(from)[..] {
        [MessengerEvent::Up { connection, peer, .. }] if *connection == near => Ok(*peer),
        [MessengerEvent::Down { connection, reason, peer: None }] if *connection == near => Err(*reason),
        other => panic!("{other:?}"),
    };
    drop(raw);
    bed.settle();
    bed.events(from);
    outcome
}

#[test]
fn a_right_hello_is_welcome() {
    let mut bed = Bed::with_osds(1);
    let welcome = answer(&mut bed, 2, hello(osd(3), osd(2))).unwrap();
    assert_eq!(welcome.identity, identity(osd(2)));
    assert_eq!((welcome.nonce_echo, welcome.session), (4711, SessionId(0)));
    assert_eq!(welcome.credits, limits::CONNECTION_OPS_MAX);
}

#[test]
fn another_cluster_is_refused() {
    let mut bed = Bed::with_osds(1);
    let with = |role, cluster| {
        let mut hello = hello(osd(3), role);
        hello.identity.cluster = cluster;
        hello
    };
    assert_eq!(answer(&mut bed, 2, with(osd(2), Some(cluster(2)))), Err(RefuseReason::Cluster));
    assert_eq!(
        answer(&mut bed, 2, with(osd(2), None)),
        Err(RefuseReason::Cluster),
        "only the mon teaches it"
    );
    assert_eq!(answer(&mut bed, MON, with(Role::Mon, Some(cluster(2)))), Err(RefuseReason::Cluster));
    assert!(answer(&mut bed, MON, with(Role::Mon, None)).is_ok());
}

#[test]
fn another_identity_is_refused() {
    let mut bed = Bed::with_osds(1);
    bed.add(CLIENT, settings(Role::Client(SessionId(5))));
    let refused = Err(RefuseReason::Identity);
    assert_eq!(answer(&mut bed, 2, hello(osd(3), osd(4))), refused, "the address was another OSD's");
    assert_eq!(answer(&mut bed, 2, hello(osd(3), Role::Mon)), refused);
    assert_eq!(answer(&mut bed, MON, hello(osd(3), osd(2))), refused);
    assert_eq!(answer(&mut bed, 2, hello(osd(2), osd(2))), refused, "its own id");
    let nobody = Role::Client(SessionId(0));
    assert_eq!(answer(&mut bed, 2, hello(nobody, osd(2))), refused, "ops need a session");
    assert_eq!(answer(&mut bed, CLIENT, hello(osd(3), Role::Client(SessionId(5)))), refused);
    let mut unborn = hello(osd(3), osd(2));
    unborn.identity.incarnation = Incarnation(0);
    assert_eq!(answer(&mut bed, 2, unborn), refused);
}

#[test]
fn an_older_start_is_refused_and_its_connection_closed() {
    let mut bed = Bed::with_osds(2);
    bed.net(2).set_incarnation(OsdId(3), Incarnation(77));
    let (near, far) = bed.up(3, 2, osd(2));
    // The OSD was started again; the peer is ahead of the map, and welcome.
    let mut restarted = hello(osd(3), osd(2));
    restarted.identity.incarnation = Incarnation(5);
    assert!(answer(&mut bed, 2, restarted).is_ok());
    bed.net(2).set_incarnation(OsdId(3), Incarnation(5));
    bed.settle();
    assert_eq!(bed.down(2), (far, DownReason::Refused(RefuseReason::Stale)));
    assert_eq!(bed.down(3), (near, DownReason::Closed(CloseReason::Peer)));
    assert_eq!(answer(&mut bed, 2, hello(osd(3), osd(2))), Err(RefuseReason::Stale));
    assert!(answer(&mut bed, 2, restarted).is_ok());
}

#[test]
fn a_fenced_session_is_refused_until_the_fence_goes() {
    let mut bed = Bed::with_osds(1);
    bed.net(2).set_fenced([SessionId(5), SessionId(6)]);
    let client = |session| hello(Role::Client(SessionId(session)), osd(2));
    assert_eq!(answer(&mut bed, 2, client(5)), Err(RefuseReason::Fenced));
    assert_eq!(answer(&mut bed, 2, client(7)).unwrap().session, SessionId(7));
    bed.net(2).set_fenced([SessionId(6)]);
    assert!(answer(&mut bed, 2, client(5)).is_ok());
}

#[test]
fn an_unknown_authentication_mode_is_refused_on_both_sides() {
    let mut bed = Bed::with_osds(1);
    let mut raw = Raw::new(&bed, 50);
    let id = raw.transport.connect(address(2));
    let unknown = |frame: Frame, at: usize, pool: &BufferPool| {
        let mut head = pool.alloc(frame.head.len()).unwrap();
        head.copy_from_slice(&frame.head);
        head[at..at + 2].copy_from_slice(&[9, 0]);
        let crc = wire::checksum::crc32c(&head[8..]).to_le_bytes();
        head[4..8].copy_from_slice(&crc);
        Frame { head: head.freeze(), data: None }
    };
    let frame = unknown(raw.frame(Message::Hello(hello(osd(3), osd(2))), 1), 68, &raw.pool);
    raw.transport.send(id, frame).unwrap();
    bed.settle();
    let (messages, _) = raw.heard();
    assert!(matches!(messages[..], [Message::Refuse(Refuse { reason: RefuseReason::Auth, .. })]));

    let mut raw = Raw::new(&bed, 51);
    let near = bed.connect(2, 51, osd(3));
    bed.settle();
    let [TransportEvent::Accepted { connection, .. }, _] = raw.poll()[..] else { panic!("no hello") };
    let frame = unknown(raw.frame(Message::Welcome(welcome(osd(3))), 1), 68, &raw.pool);
    raw.transport.send(connection, frame).unwrap();
    bed.settle();
    assert_eq!(bed.down(2), (near, DownReason::Refused(RefuseReason::Auth)));
}

#[test]
fn one_peer_cannot_take_all_connections() {
    let mut bed = Bed::new();
    bed.add(2, MessengerSettings { peer_connections_max: 3, ..settings(osd(2)) });
    bed.add(3, settings(osd(3)));
    bed.add(4, settings(osd(4)));
    for _ in 0..3 {
        bed.up(3, 2, osd(2));
    }
    let fourth = bed.connect(3, 2, osd(2));
    bed.settle();
    assert_eq!(bed.down(3), (fourth, DownReason::Refused(RefuseReason::Busy)));
    bed.up(4, 2, osd(2));
    // Those that this side opened itself are not the peer's.
    bed.up(2, 3, osd(3));
}

#[test]
fn all_connections_are_capped() {
    let mut bed = Bed::new();
    bed.add(2, MessengerSettings { connections_max: 2, ..settings(osd(2)) });
    for n in 3..6 {
        bed.add(n, settings(osd(u32::from(n))));
    }
    bed.up(3, 2, osd(2));
    bed.up(4, 2, osd(2));
    let third = bed.connect(5, 2, osd(2));
    bed.settle();
    assert_eq!(bed.down(5), (third, DownReason::Refused(RefuseReason::Busy)));
    assert_eq!(bed.net(2).connection_count(), 2);
    assert_eq!(bed.net(2).stats().turned_away, 1);
}

#[test]
fn without_sessions_left_the_mon_is_busy_and_a_refused_client_uses_none() {
    let mut bed = Bed::with_osds(0);
    bed.net(MON).set_sessions(7..8);
    let new = |cluster| {
        let mut hello = hello(Role::Client(SessionId(0)), Role::Mon);
        hello.identity.cluster = cluster;
        hello
    };
    assert_eq!(answer(&mut bed, MON, new(Some(cluster(2)))), Err(RefuseReason::Cluster));
    assert_eq!(bed.net(MON).sessions_left(), 1);
    assert_eq!(answer(&mut bed, MON, new(None)).unwrap().session, SessionId(7));
    assert_eq!(answer(&mut bed, MON, new(None)), Err(RefuseReason::Busy));
    assert_eq!(
        answer(&mut bed, MON, hello(Role::Client(SessionId(3)), Role::Mon)).unwrap().session,
        SessionId(3)
    );
}

#[test]
fn the_newest_common_version_is_used() {
    let offer = |version_min, version| Offer { version, version_min, ..Offer::default() };
    for (ours, theirs, expected) in [
        ((1, 1), (1, 1), Some(1)),
        ((1, 3), (1, 2), Some(2)),
        ((1, 2), (2, 5), Some(2)),
        ((2, 3), (1, 9), Some(3)),
        ((2, 3), (1, 1), None),
        ((1, 1), (2, 3), None),
        ((1, 1), (3, 2), None),
    ] {
        let mut bed = Bed::new();
        bed.add(2, MessengerSettings { offer: offer(ours.0, ours.1), ..settings(osd(2)) });
        let said = Hello { version_min: theirs.0, version: theirs.1, ..hello(osd(3), osd(2)) };
        let answer = answer(&mut bed, 2, said).map(|welcome| welcome.version);
        assert_eq!(answer, expected.ok_or(RefuseReason::Version), "{ours:?} {theirs:?}");
        // The same in the other direction, between two messengers.
        let mut bed = Bed::new();
        bed.add(2, MessengerSettings { offer: offer(ours.0, ours.1), ..settings(osd(2)) });
        bed.add(3, MessengerSettings { offer: offer(theirs.0, theirs.1), ..settings(osd(3)) });
        bed.connect(3, 2, osd(2));
        bed.settle();
        match (&bed.events(3)[..], expected) {
            ([MessengerEvent::Up { .. }], Some(_)) => {}
            ([MessengerEvent::Down { reason: DownReason::Refused(RefuseReason::Version), .. }], None) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn features_are_what_both_have_and_each_requires() {
    for (ours, ours_required, theirs, theirs_required, expected) in [
        (0b0000, 0b0000, 0b0000, 0b0000, Some(0b0000)),
        (0b0110, 0b0000, 0b0011, 0b0000, Some(0b0010)),
        (0b0110, 0b0010, 0b0011, 0b0010, Some(0b0010)),
        (0b0110, 0b0100, 0b0011, 0b0000, None),
        (0b0110, 0b0000, 0b0011, 0b0001, None),
        (0b0000, 0b0000, 1 << 63, 1 << 63, None),
    ] {
        let mut bed = Bed::new();
        let offer = Offer { features: ours, features_required: ours_required, ..Offer::default() };
        bed.add(2, MessengerSettings { offer, ..settings(osd(2)) });
        let said = Hello { features: theirs, features_required: theirs_required, ..hello(osd(3), osd(2)) };
        let answer = answer(&mut bed, 2, said).map(|welcome| welcome.features);
        assert_eq!(answer, expected.ok_or(RefuseReason::Feature));
    }
}

#[test]
fn the_connecting_side_checks_the_answer_too() {
    let mut bed = Bed::with_osds(1);
    let offer = Offer { features: 0b11, features_required: 0b01, ..Offer::default() };
    bed.add(4, MessengerSettings { offer, ..settings(osd(4)) });
    let right = |hello: Hello| Welcome { nonce_echo: hello.nonce, features: 0b01, ..welcome(osd(3)) };
    let mut with = |change: fn(&mut Welcome)| {
        taken(&mut bed, 4, |hello| {
            let mut welcome = right(hello);
            change(&mut welcome);
            Message::Welcome(welcome)
        })
    };
    let refused = |reason| Err(DownReason::Refused(reason));
    assert_eq!(with(|_| {}), Ok(identity(osd(3))));
    assert_eq!(with(|w| w.version = PROTOCOL_VERSION + 1), refused(RefuseReason::Version));
    assert_eq!(with(|w| w.version = 0), refused(RefuseReason::Version));
    assert_eq!(with(|w| w.features = 0b101), refused(RefuseReason::Feature));
    assert_eq!(with(|w| w.features = 0), refused(RefuseReason::Feature));
    assert_eq!(with(|w| w.identity.cluster = Some(cluster(2))), refused(RefuseReason::Cluster));
    assert_eq!(with(|w| w.identity.cluster = None), refused(RefuseReason::Cluster));
    assert_eq!(with(|w| w.identity.role = osd(5)), refused(RefuseReason::Identity));
    assert_eq!(with(|w| w.identity.role = Role::Mon), refused(RefuseReason::Identity));
    assert_eq!(with(|w| w.identity.incarnation = Incarnation(0)), refused(RefuseReason::Identity));
    assert!(matches!(with(|w| w.nonce_echo ^= 1), Err(DownReason::Closed(CloseReason::Protocol(_)))));
    assert!(matches!(with(|w| w.session = SessionId(1)), Err(DownReason::Closed(CloseReason::Protocol(_)))));
    bed.net(4).set_incarnation(OsdId(3), Incarnation(77));
    bed.net(4).set_incarnation(OsdId(3), Incarnation(78));
    let stale = taken(&mut bed, 4, |hello| Message::Welcome(right(hello)));
    assert_eq!(stale, refused(RefuseReason::Stale));
}

#[test]
fn every_refusal_reaches_the_connecting_side() {
    use RefuseReason as R;
    let mut bed = Bed::with_osds(1);
    for reason in [R::Version, R::Feature, R::Cluster, R::Identity, R::Auth, R::Busy, R::Fenced, R::Stale] {
        let refuse = Message::Refuse(Refuse { reason, epoch: Epoch(9) });
        assert_eq!(taken(&mut bed, 2, |_| refuse), Err(DownReason::Refused(reason)));
    }
}

#[test]
fn credits_of_a_peer_are_bounded() {
    let mut bed = Bed::with_osds(1);
    let mut raw = Raw::new(&bed, 51);
    bed.connect(2, 51, osd(3));
    bed.settle();
    let (connection, hello) = match &raw.poll()[..] {
        [_, TransportEvent::Frame { connection, frame }] => (*connection, wire::decode(frame).unwrap()),
        other => panic!("{other:?}"),
    };
    let Message::Hello(hello) = hello.envelope.message else { panic!("{hello:?}") };
    let generous = Welcome { nonce_echo: hello.nonce, credits: u32::MAX, ..welcome(osd(3)) };
    raw.send(connection, Message::Welcome(generous), 1);
    bed.settle();
    match &bed.events(2)[..] {
        [MessengerEvent::Up { credits, core: CoreId(5), .. }] => {
            assert_eq!(*credits, limits::CONNECTION_OPS_MAX)
        }
        other => panic!("{other:?}"),
    }
}
