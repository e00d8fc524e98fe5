use super::super::exports::{ExportName, Exports};
use super::super::server::{Images, Server, ServerSettings};
use super::*;
use crate::error::{ImageError, IoError};
use crate::event::{AdminReply, ClientEvent, ImageHandle, ListEntry};
use loligo_config::id::ImageId;
use loligo_reactor::dma::SharedBuffer;
use loligo_reactor::env::{CloseReason, ConnectionId, Instant, QueueFull, StreamEvent, Streams, Ticket};
use loligo_reactor::poller::{Activity, Poller};
use std::collections::BTreeMap;
use std::time::Duration;

/// Streams whose other ends are in the test's hands.
#[derive(Debug)]
struct Pipes {
    events: VecDeque<StreamEvent>,
    sent: BTreeMap<ConnectionId, Vec<u8>>,
    paused: Vec<(ConnectionId, bool)>,
    closed: Vec<ConnectionId>,
    room: usize,
}

impl Streams for Pipes {
    fn send(&mut self, connection: ConnectionId, data: SharedBuffer) -> Result<(), QueueFull<SharedBuffer>> {
        if self.room < data.len() {
            return Err(QueueFull(data));
        }
        self.room -= data.len();
        self.sent.entry(connection).or_default().extend_from_slice(&data);
        Ok(())
    }

    fn pause(&mut self, connection: ConnectionId, paused: bool) {
        self.paused.push((connection, paused));
    }

    fn close(&mut self, connection: ConnectionId) {
        self.closed.push(connection);
        self.events.push_back(StreamEvent::Closed { connection, reason: CloseReason::Local });
    }

    fn poll(&mut self, budget: u32, inbox: &mut VecDeque<StreamEvent>) -> u32 {
        let count = self.events.len().min(budget as usize);
        inbox.extend(self.events.drain(..count));
        count as u32
    }
}

/// A pool `rbd` with the images `disk` and `other`; requests complete at the next poll, if there is room for them.
struct Shelf {
    pool: BufferPool,
    image: Memory,
    events: VecDeque<ClientEvent>,
    queue: VecDeque<(ImageHandle, ImageIo, Ticket)>,
    room: usize,
    held: bool,
    next: u64,
    open: Vec<ImageHandle>,
}

impl Images for Shelf {
    fn open(&mut self, name: &ExportName, ticket: Ticket) {
        let result = match name.image.as_str() {
            "disk" | "other" => {
                self.next += 1;
                self.open.push(ImageHandle(self.next));
                Ok(ImageHandle(self.next))
            }
            _ => Err(ImageError::NotFound { pool: name.pool.clone(), image: name.image.clone() }),
        };
        self.events.push_back(ClientEvent::Opened { ticket, result });
    }

    fn close(&mut self, image: ImageHandle, ticket: Ticket) {
        self.open.retain(|open| *open != image);
        self.events.push_back(ClientEvent::Closed { ticket });
    }

    fn list(&mut self, pool: &str, ticket: Ticket) {
        let entry = |name: &str, removing| ListEntry { name: name.to_owned(), id: ImageId(1), removing };
        let entries = vec![entry("disk", false), entry("gone", true), entry("other", false)];
        let result = match pool {
            "rbd" => Ok(AdminReply::List(entries)),
            _ => Err(ImageError::NoPool { pool: pool.to_owned() }),
        };
        self.events.push_back(ClientEvent::Admin { ticket, result });
    }

    fn shape(&self, _: ImageHandle) -> (u64, u8) {
        (self.image.bytes.len() as u64, 22)
    }

    fn submit(&mut self, image: ImageHandle, io: ImageIo, ticket: Ticket) -> Result<(), QueueFull<ImageIo>> {
        if self.queue.len() >= self.room {
            return Err(QueueFull(io));
        }
        self.queue.push_back((image, io, ticket));
        Ok(())
    }

    fn poll(&mut self, _: Instant) -> Activity {
        let count = if self.held { 0 } else { self.queue.len() };
        for (image, io, ticket) in self.queue.drain(..count) {
            let result = self.image.run(io, &self.pool).map_err(|_| IoError::Media);
            self.events.push_back(ClientEvent::Io { image, ticket, result });
        }
        Activity::Idle
    }

    fn next_event(&mut self) -> Option<ClientEvent> {
        self.events.pop_front()
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn expecting(&self) -> bool {
        false
    }
}

const ONE: ConnectionId = ConnectionId(1);

struct Bed {
    server: Server<Pipes, Shelf>,
    pool: BufferPool,
    now: Instant,
}

impl Bed {
    fn new(exports: Exports) -> Self {
        let pool = BufferPool::new(64 << 20);
        let pipes = Pipes {
            events: VecDeque::new(),
            sent: BTreeMap::new(),
            paused: Vec::new(),
            closed: Vec::new(),
            room: usize::MAX,
        };
        let shelf = Shelf {
            pool: pool.clone(),
            image: Memory::new(4 << 20),
            events: VecDeque::new(),
            queue: VecDeque::new(),
            room: 100,
            held: false,
            next: 0,
            open: Vec::new(),
        };
        let settings = ServerSettings { exports, read_only: false, handshake: Duration::from_secs(10) };
        Self { server: Server::new(settings, pipes, shelf, pool.clone()), pool, now: Instant(1) }
    }

    fn connect(&mut self, connection: ConnectionId) {
        self.server.streams_mut().events.push_back(StreamEvent::Accepted { connection });
        self.give(connection, &3u32.to_be_bytes());
        self.take(connection);
    }

    fn ready(&mut self, connection: ConnectionId) {
        self.connect(connection);
        self.give(connection, &option(7, &info_request("rbd/disk", &[])));
        assert_ne!(self.take(connection).len(), 0);
    }

    fn give(&mut self, connection: ConnectionId, bytes: &[u8]) {
        for part in bytes.chunks(1 << 20) {
            let data = self.pool.copy_of(part).unwrap();
            self.server.streams_mut().events.push_back(StreamEvent::Received { connection, data });
        }
        self.poll();
    }

    fn poll(&mut self) {
        for _ in 0..20 {
            self.server.poll(self.now);
        }
    }

    fn take(&mut self, connection: ConnectionId) -> Vec<u8> {
        self.server.streams_mut().sent.remove(&connection).unwrap_or_default()
    }
}

fn only(images: &[&str]) -> Exports {
    let name = |image: &&str| ExportName { pool: "rbd".to_owned(), image: (*image).to_owned() };
    Exports::Only(images.iter().map(name).collect())
}

#[test]
fn a_request_goes_through_to_the_image_and_back() {
    let mut bed = Bed::new(only(&["disk", "other"]));
    bed.ready(ONE);
    let data = pattern(5000, 2);
    bed.give(ONE, &write(77, &data));
    bed.give(ONE, &request(0, command::READ, 77, 5000, &[]));
    assert_eq!(bed.take(ONE), [simple(0), simple(0), data].concat());
}

#[test]
fn the_empty_name_is_the_only_export() {
    let go = option(7, &info_request("", &[]));
    for (exports, accepted) in [
        (only(&["disk"]), true),
        (only(&["disk", "other"]), false),
        (Exports::Pools(vec!["rbd".to_owned()]), false),
    ] {
        let mut bed = Bed::new(exports);
        bed.connect(ONE);
        bed.give(ONE, &go);
        assert_eq!(bed.take(ONE) != option_reply(7, 0x8000_0006, b"no such export"), accepted);
    }
}

#[test]
fn only_what_was_given_is_served_and_listed() {
    let mut bed = Bed::new(only(&["disk"]));
    bed.connect(ONE);
    bed.give(ONE, &option(3, &[]));
    assert_eq!(bed.take(ONE), [option_reply(3, 2, &text("rbd/disk")), option_reply(3, 1, &[])].concat());
    bed.give(ONE, &option(7, &info_request("rbd/other", &[])));
    assert_eq!(bed.take(ONE), option_reply(7, 0x8000_0006, b"no such export"));
}

#[test]
fn a_pool_serves_all_its_images() {
    let mut bed = Bed::new(Exports::Pools(vec!["rbd".to_owned()]));
    bed.connect(ONE);
    bed.give(ONE, &option(3, &[]));
    let names = ["rbd/disk", "rbd/other"].map(|name| option_reply(3, 2, &text(name))).concat();
    assert_eq!(bed.take(ONE), [names, option_reply(3, 1, &[])].concat());
    bed.give(ONE, &option(6, &info_request("rbd/nothing", &[])));
    assert_eq!(bed.take(ONE), option_reply(6, 0x8000_0006, b"no such export"));
    bed.give(ONE, &option(6, &info_request("vms/disk", &[])));
    assert_eq!(bed.take(ONE), option_reply(6, 0x8000_0006, b"no such export"));
    assert_eq!(bed.server.images().open.len(), 0);
}

#[test]
fn an_image_is_opened_once_for_info_and_go_and_closed_with_its_connection() {
    let mut bed = Bed::new(only(&["disk", "other"]));
    bed.connect(ONE);
    bed.give(ONE, &option(6, &info_request("rbd/other", &[])));
    bed.give(ONE, &option(6, &info_request("rbd/disk", &[])));
    bed.give(ONE, &option(7, &info_request("rbd/disk", &[])));
    assert_eq!(bed.server.images().open, [ImageHandle(2)]);
    bed.give(ONE, &request(0, command::DISC, 0, 0, &[]));
    assert_eq!(bed.server.streams_mut().closed, [ONE]);
    assert_eq!((bed.server.connections(), bed.server.images().open.len()), (0, 0));
}

#[test]
fn a_full_client_queue_delays_and_loses_nothing() {
    let mut bed = Bed::new(only(&["disk"]));
    bed.ready(ONE);
    bed.server.images_mut().room = 1;
    let writes: Vec<u8> = (0..50u64).flat_map(|at| write(at * 4096, &pattern(4096, at as u8))).collect();
    bed.give(ONE, &writes);
    bed.poll();
    bed.poll();
    assert_eq!(bed.take(ONE), simple(0).repeat(50));
    assert_eq!(bed.server.images().image.log.len(), 50);
}

#[test]
fn a_slow_reader_holds_its_own_connection_only() {
    let two = ConnectionId(2);
    let mut bed = Bed::new(only(&["disk"]));
    bed.ready(ONE);
    bed.ready(two);
    bed.server.streams_mut().room = 0;
    let reads = request(0, command::READ, 0, 1 << 20, &[]).repeat(40);
    bed.give(ONE, &reads);
    assert_eq!(bed.take(ONE).len(), 0);
    let asked = bed.server.images().image.log.len();
    assert!(asked <= 40, "{asked} reads for one that does not take the answers");
    bed.server.streams_mut().room = usize::MAX;
    bed.give(two, &request(0, command::FLUSH, 0, 0, &[]));
    assert_eq!(bed.take(two), simple(0));
    bed.server.streams_mut().events.push_back(StreamEvent::Writable { connection: ONE });
    bed.poll();
    assert_eq!(bed.take(ONE).len(), 40 * (16 + (1 << 20)));
}

#[test]
fn a_stream_that_sends_faster_than_it_is_served_is_paused() {
    let mut bed = Bed::new(only(&["disk"]));
    bed.ready(ONE);
    bed.server.images_mut().held = true;
    let data = pattern(1 << 20, 4);
    // 64 MiB may be in flight, and the pool is smaller than that.
    for _ in 0..70 {
        if bed.server.streams_mut().paused.last() == Some(&(ONE, true)) {
            break;
        }
        bed.give(ONE, &write(0, &data));
    }
    assert_eq!(bed.server.streams_mut().paused, [(ONE, true)]);
    let writes = bed.server.images().queue.len();
    bed.server.images_mut().held = false;
    bed.poll();
    assert_eq!(bed.server.streams_mut().paused, [(ONE, true), (ONE, false)]);
    assert!(bed.take(ONE).len() >= writes * 16);
}

#[test]
fn garbage_closes_that_connection_only() {
    let two = ConnectionId(2);
    let mut bed = Bed::new(only(&["disk"]));
    bed.ready(ONE);
    bed.ready(two);
    bed.give(two, &[0x47; 500]);
    assert_eq!(bed.server.streams_mut().closed, [two]);
    bed.give(ONE, &request(0, command::FLUSH, 0, 0, &[]));
    assert_eq!(bed.take(ONE), simple(0));
}

#[test]
fn a_handshake_has_a_deadline_and_an_export_has_none() {
    let two = ConnectionId(2);
    let mut bed = Bed::new(only(&["disk"]));
    bed.connect(ONE);
    bed.ready(two);
    let deadline = bed.server.next_deadline().expect("a handshake is going on");
    assert_eq!(deadline, bed.now.after(Duration::from_secs(10)));
    bed.now = deadline;
    bed.poll();
    assert_eq!(bed.server.streams_mut().closed, [ONE]);
    assert_eq!((bed.server.connections(), bed.server.next_deadline()), (1, None));
}

#[test]
fn a_connection_that_breaks_leaves_nothing_behind() {
    let mut bed = Bed::new(only(&["disk"]));
    bed.ready(ONE);
    bed.server.images_mut().held = true;
    bed.server.images_mut().room = 0;
    bed.give(ONE, &write(0, b"never submitted"));
    let closed = StreamEvent::Closed { connection: ONE, reason: CloseReason::Peer };
    bed.server.streams_mut().events.push_back(closed);
    bed.server.images_mut().room = 100;
    bed.server.images_mut().held = false;
    bed.poll();
    assert_eq!(bed.server.images().image.log.len(), 0);
    assert_eq!(bed.server.flights(), 0);
}

#[test]
fn stopping_refuses_newcomers_and_lets_the_others_finish() {
    let two = ConnectionId(2);
    let mut bed = Bed::new(only(&["disk"]));
    bed.ready(ONE);
    bed.server.images_mut().held = true;
    bed.give(ONE, &write(0, b"data"));
    bed.server.stop();
    bed.server.streams_mut().events.push_back(StreamEvent::Accepted { connection: two });
    bed.poll();
    assert_eq!(bed.server.streams_mut().closed, [two]);
    bed.server.images_mut().held = false;
    bed.poll();
    assert_eq!(bed.take(ONE), simple(0));
    assert_eq!(bed.server.connections(), 0);
}
