//! A process without free descriptors: a test binary of its own, because the limit is the process's.
#![allow(clippy::disallowed_methods, reason = "a test of real sockets and descriptors")]

use loligo_net::transport::tcp::{TcpOptions, TcpTransport};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{CloseReason, Transport, TransportEvent};
use loligo_reactor::os::ring::Ring;
use std::collections::VecDeque;
use std::fs::File;
use std::net::TcpStream;
use std::process::Command;

#[test]
fn without_descriptors_accepting_pauses_and_connecting_fails_clearly() {
    let limited = Command::new("prlimit")
        .args(["--nofile=64", "--pid", &std::process::id().to_string()])
        .status()
        .expect("util-linux is there");
    assert!(limited.success());
    let (ring, pool) = (Ring::new(64).unwrap(), BufferPool::new(16 << 20));
    let mut tcp = TcpTransport::new(&ring, &pool, TcpOptions::default());
    let address = tcp.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    ring.submit().unwrap();

    let mut fill: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    fill.pop();
    let peer = TcpStream::connect(address).expect("the last descriptor");
    let mut events = VecDeque::new();
    let connection = tcp.connect(address);
    for _ in 0..100 {
        ring.submit().unwrap();
        ring.reap();
        tcp.poll(16, &mut events);
    }
    match events.pop_front() {
        Some(TransportEvent::Closed { connection: its, reason }) => {
            assert_eq!((its, reason), (connection, CloseReason::Unreachable(24)), "EMFILE");
        }
        other => panic!("{other:?}"),
    }
    assert!(events.is_empty(), "nothing was accepted: {events:?}");

    fill.clear();
    // The pause's own timer wakes the reactor.
    while events.is_empty() {
        ring.wait(None).unwrap();
        tcp.poll(16, &mut events);
    }
    assert!(matches!(events[0], TransportEvent::Accepted { from, .. } if from == peer.local_addr().unwrap()));
}
