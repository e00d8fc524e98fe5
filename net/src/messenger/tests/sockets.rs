//! The same messengers over real loopback sockets: what the memory transport promises holds there too.
#![allow(clippy::disallowed_methods, reason = "the messenger is tested over real sockets as well")]

use super::*;
use crate::transport::tcp::{TcpOptions, TcpTransport};
use loligo_reactor::os::ring::Ring;
use std::io::Write;
use std::net::TcpStream;

struct Node {
    messenger: Messenger<TcpTransport, Draw>,
    events: VecDeque<MessengerEvent>,
    address: SocketAddr,
}

impl Node {
    fn new(ring: &Ring, role: Role) -> Self {
        let settings = settings(role);
        let mut tcp = TcpTransport::new(ring, &settings.pool, TcpOptions::default());
        let address = tcp.listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        Self { messenger: Messenger::new(settings, tcp, Draw(1)), events: VecDeque::new(), address }
    }
}

/// Turns until `done`; loopback takes far fewer turns than the bound.
fn until(ring: &Ring, nodes: &mut [&mut Node], mut done: impl FnMut(&mut [&mut Node]) -> bool) {
    for turn in 0..20_000 {
        ring.submit().unwrap();
        ring.reap();
        std::thread::yield_now();
        for node in nodes.iter_mut() {
            node.messenger.poll(Instant(turn), &mut node.events);
        }
        if done(nodes) {
            return;
        }
    }
    panic!("nothing came of it: {:?}", nodes.iter().map(|node| &node.events).collect::<Vec<_>>());
}

#[test]
fn a_map_right_behind_the_welcome_arrives() {
    let ring = Ring::new(256).unwrap();
    let (mut mon, mut peer) = (Node::new(&ring, Role::Mon), Node::new(&ring, osd(2)));
    let data = mon.messenger.settings.pool.copy_of(&Draw(3).bytes(3 << 20)).unwrap();
    peer.messenger.connect(mon.address, Role::Mon, CoreId(0));
    until(&ring, &mut [&mut mon, &mut peer], |nodes| {
        let Some(MessengerEvent::Up { connection, .. }) = nodes[0].events.pop_front() else {
            return false;
        };
        // In the same turn as the Welcome: the other side has not seen that yet.
        let map = Message::Map(mon::Map { epoch: Epoch(1) });
        nodes[0].messenger.send(connection, map, Body::of(data.clone())).unwrap();
        true
    });
    until(&ring, &mut [&mut mon, &mut peer], |nodes| nodes[1].events.len() == 2);
    assert!(matches!(peer.events[0], MessengerEvent::Up { accepted: false, .. }));
    match &peer.events[1] {
        MessengerEvent::Message { received, .. } => assert_eq!(received.data.as_deref(), Some(&data[..])),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_refusal_arrives_with_its_reason_before_the_end() {
    let ring = Ring::new(256).unwrap();
    let (mut there, mut here) = (Node::new(&ring, osd(3)), Node::new(&ring, osd(2)));
    for _ in 0..20 {
        here.messenger.connect(there.address, osd(4), CoreId(0));
        until(&ring, &mut [&mut there, &mut here], |nodes| !nodes[1].events.is_empty());
        match here.events.pop_front() {
            Some(MessengerEvent::Down { reason, .. }) => {
                assert_eq!(reason, DownReason::Refused(RefuseReason::Identity));
            }
            other => panic!("{other:?}"),
        }
    }
    until(&ring, &mut [&mut there, &mut here], |nodes| nodes[0].messenger.connection_count() == 0);
    assert!(there.events.is_empty());
}

#[test]
fn garbage_at_the_port_disturbs_nobody() {
    let ring = Ring::new(256).unwrap();
    let (mut there, mut here) = (Node::new(&ring, osd(3)), Node::new(&ring, osd(2)));
    let mut strangers: Vec<_> = (0..20).map(|_| TcpStream::connect(there.address).unwrap()).collect();
    for (seed, stranger) in strangers.iter_mut().enumerate() {
        stranger.write_all(&Draw(seed as u64).bytes(5000)).unwrap();
    }
    until(&ring, &mut [&mut there], |nodes| nodes[0].messenger.stats().broken == 20);
    let near = here.messenger.connect(there.address, osd(3), CoreId(0));
    until(&ring, &mut [&mut there, &mut here], |nodes| !nodes[1].events.is_empty());
    assert_eq!(here.messenger.peer(near), Some(&identity(osd(3))));
    until(&ring, &mut [&mut there, &mut here], |nodes| nodes[0].messenger.connection_count() == 1);
}
