use super::{TURNS_MAX, World, pattern};
use crate::transport::stream::{StreamOptions, StreamServer};
use loligo_reactor::env::{CloseReason, ConnectionId, QueueFull, StreamEvent, Streams};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};

struct Server {
    world: World,
    streams: StreamServer,
    events: VecDeque<StreamEvent>,
}

impl Server {
    fn new(options: StreamOptions) -> Self {
        let world = World::new();
        let streams = StreamServer::new(&world.ring, &world.pool, options);
        Self { world, streams, events: VecDeque::new() }
    }

    fn turn(&mut self) {
        self.world.turn();
        self.streams.poll(16, &mut self.events);
    }

    fn until<T>(&mut self, mut done: impl FnMut(&mut VecDeque<StreamEvent>) -> Option<T>) -> T {
        for _ in 0..TURNS_MAX {
            self.turn();
            if let Some(found) = done(&mut self.events) {
                return found;
            }
        }
        panic!("nothing came of it; events: {:?}", self.events);
    }

    fn accepted(&mut self) -> ConnectionId {
        self.until(|events| match events.pop_front() {
            Some(StreamEvent::Accepted { connection }) => Some(connection),
            _ => None,
        })
    }

    fn tcp(&mut self) -> (TcpStream, ConnectionId) {
        let address = self.streams.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        (TcpStream::connect(address).unwrap(), self.accepted())
    }

    fn receive(&mut self, of: ConnectionId, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.until(|events| {
            events.retain(|event| match event {
                StreamEvent::Received { connection, data } if *connection == of => {
                    bytes.extend_from_slice(data);
                    false
                }
                _ => true,
            });
            (bytes.len() >= len).then_some(())
        });
        bytes
    }

    fn closed(&mut self, of: ConnectionId) -> CloseReason {
        self.until(|events| {
            events.iter().find_map(|event| match event {
                StreamEvent::Closed { connection, reason } if *connection == of => Some(*reason),
                _ => None,
            })
        })
    }
}

#[test]
fn bytes_go_both_ways_over_tcp_and_unix_sockets() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut server = Server::new(StreamOptions::default());
    server.streams.listen_unix(&path).unwrap();
    let mut unix = UnixStream::connect(&path).unwrap();
    let unix_id = server.accepted();
    let (mut tcp, tcp_id) = server.tcp();
    unix.write_all(&pattern(70_000, 1)).unwrap();
    assert_eq!(server.receive(unix_id, 70_000), pattern(70_000, 1));
    tcp.write_all(b"hello").unwrap();
    assert_eq!(server.receive(tcp_id, 5), b"hello");
    for part in [&b"one "[..], b"two ", b"three"] {
        let data = server.world.pool.copy_of(part).unwrap();
        server.streams.send(unix_id, data).unwrap();
    }
    server.turn();
    let mut answer = [0; 13];
    unix.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"one two three");
    drop(tcp);
    assert_eq!(server.closed(tcp_id), CloseReason::Peer);
    drop(server);
    assert!(!path.exists(), "the socket file goes with its server");
}

#[test]
fn a_full_queue_refuses_and_tells_when_there_is_room() {
    let mut server = Server::new(StreamOptions { send_queue_max: 200_000, ..StreamOptions::default() });
    let (mut peer, id) = server.tcp();
    let mut sent = Vec::new();
    loop {
        let bytes = pattern(100_000, sent.len() as u8);
        let data = server.world.pool.copy_of(&bytes).unwrap();
        match server.streams.send(id, data) {
            Ok(()) => sent.extend(bytes),
            Err(QueueFull(back)) => {
                assert_eq!(*back, bytes[..]);
                break;
            }
        }
        server.turn();
        assert!(sent.len() < 64 << 20, "the queue is bounded");
    }
    peer.set_nonblocking(true).unwrap();
    let mut got = Vec::new();
    let mut chunk = vec![0; 1 << 16];
    server.until(|events| {
        while let Ok(count) = peer.read(&mut chunk) {
            got.extend_from_slice(&chunk[..count]);
        }
        let writable =
            |event: &StreamEvent| matches!(event, StreamEvent::Writable { connection } if *connection == id);
        events.iter().any(writable).then_some(())
    });
    server.until(|_| {
        while let Ok(count) = peer.read(&mut chunk) {
            got.extend_from_slice(&chunk[..count]);
        }
        (got.len() == sent.len()).then_some(())
    });
    assert!(got == sent);
}

#[test]
fn a_paused_stream_delivers_only_what_was_on_its_way() {
    let mut server = Server::new(StreamOptions::default());
    let (mut peer, id) = server.tcp();
    server.streams.pause(id, true);
    peer.write_all(b"first").unwrap();
    assert_eq!(server.receive(id, 5), b"first");
    peer.write_all(b"second").unwrap();
    (0..100).for_each(|_| server.turn());
    assert!(server.events.is_empty(), "{:?}", server.events);
    server.streams.pause(id, false);
    assert_eq!(server.receive(id, 6), b"second");
}

#[test]
fn a_close_sends_the_queue_first() {
    let mut server = Server::new(StreamOptions::default());
    let (mut peer, id) = server.tcp();
    let bytes = pattern(12 << 20, 5);
    for chunk in bytes.chunks(1 << 20) {
        let data = server.world.pool.copy_of(chunk).unwrap();
        server.streams.send(id, data).unwrap();
    }
    server.streams.close(id);
    peer.set_nonblocking(true).unwrap();
    let mut got = Vec::new();
    let mut chunk = vec![0; 1 << 16];
    server.until(|_| {
        loop {
            match peer.read(&mut chunk) {
                Ok(0) => return Some(()),
                Ok(count) => got.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) => panic!("{error}"),
            }
        }
    });
    assert!(got == bytes);
    assert_eq!(server.closed(id), CloseReason::Local);
    let late = server.world.pool.copy_of(b"late").unwrap();
    assert!(server.streams.send(id, late).is_ok(), "it is dropped");
}

#[test]
fn only_a_dead_socket_file_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut server = Server::new(StreamOptions::default());
    let alive = UnixListener::bind(&path).unwrap();
    let error = server.streams.listen_unix(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrInUse);
    assert!(error.to_string().contains("socket"), "{error}");
    drop(alive); // the file stays, as after a crash
    assert!(path.exists());
    server.streams.listen_unix(&path).unwrap();
    let _peer = UnixStream::connect(&path).unwrap();
    server.accepted();
    let file = folder.path().join("file");
    std::fs::write(&file, b"precious").unwrap();
    assert_eq!(server.streams.listen_unix(&file).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, b"of somebody else").unwrap();
    drop(server);
    assert!(path.exists(), "what is not ours stays");
}

#[test]
fn a_server_may_be_dropped_at_any_time() {
    for turns in 0..4 {
        let mut server = Server::new(StreamOptions::default());
        let (mut peer, id) = server.tcp();
        peer.write_all(&pattern(100_000, 1)).unwrap();
        for _ in 0..8 {
            let data = server.world.pool.copy_of(&pattern(1 << 20, 2)).unwrap();
            server.streams.send(id, data).unwrap();
        }
        (0..turns).for_each(|_| server.turn());
    }
}
