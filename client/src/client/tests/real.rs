//! The whole client, codec and handshake included, over messengers on a network in memory; through the blocking face.

use crate::blocking::Blocking;
use crate::client::{Client, ClientSettings};
use crate::error::{ConnectError, ImageError, IoError};
use crate::event::{ImageIo, Usage};
use crate::image::header::CreateOptions;
use crate::objecter::WireEvent;
use crate::testing::{POOL, Scripted, Sent, address, cluster_id, map_with, mon_address};
use loligo_config::id::{Incarnation, OsdId, SessionId};
use loligo_config::units::{ByteLen, ByteOffset};
use loligo_net::messenger::{Messenger, MessengerEvent, MessengerSettings};
use loligo_net::transport::memory::{MemoryHub, MemoryTransport};
use loligo_net::wire::handshake::{Identity, Role};
use loligo_net::wire::{Body, Checksums, Message};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{
    BlockDevice, Clock, Completions, DiskOp, Entropy, Geometry, Instant, QueueFull, Ticket, World,
};
use loligo_reactor::poller::{Poller, Turn};
use std::cell::Cell;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

#[derive(Debug)]
struct Memory;

#[derive(Clone, Debug)]
struct TestClock(Rc<Cell<u64>>);

#[derive(Debug)]
struct Count(u64);

/// A client has no disk.
#[derive(Debug)]
enum NoDevice {}

impl Clock for TestClock {
    fn now(&self) -> Instant {
        Instant(self.0.get())
    }

    fn unix_seconds(&self) -> u64 {
        1_800_000_000
    }
}

impl Entropy for Count {
    fn next_u64(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }
}

impl BlockDevice for NoDevice {
    fn geometry(&self) -> &Geometry {
        match *self {}
    }

    fn submit(&mut self, _op: DiskOp, _ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        match *self {}
    }

    fn poll(&mut self, _budget: u32, _done: &mut Completions) -> u32 {
        match *self {}
    }

    fn in_flight(&self) -> u32 {
        match *self {}
    }
}

impl World for Memory {
    type Clock = TestClock;
    type Entropy = Count;
    type Device = NoDevice;
    type Transport = MemoryTransport;
}

type Net = Messenger<MemoryTransport, Count>;

/// The loop: every turn takes ten microseconds and polls the cluster, then the client.
struct Loop {
    hub: MemoryHub,
    clock: TestClock,
    cluster: Scripted,
    servers: Vec<Net>,
    inbox: VecDeque<MessengerEvent>,
}

fn messenger(hub: &MemoryHub, at: SocketAddr, role: Role) -> Net {
    let cluster = (!matches!(role, Role::Client(_))).then(cluster_id);
    let identity = Identity { cluster, role, incarnation: Incarnation(1) };
    let settings = MessengerSettings::new(identity, BufferPool::new(64 << 20));
    Messenger::new(settings, hub.endpoint(at), Count(u64::from(at.port())))
}

impl Turn for Loop {
    fn turn(&mut self, pollers: &mut [&mut dyn Poller]) {
        self.clock.0.set(self.clock.0.get() + 10_000);
        let now = self.clock.now();
        self.hub.set_now(now);
        for server in &mut self.servers {
            server.poll(now, &mut self.inbox);
            while let Some(event) = self.inbox.pop_front() {
                let MessengerEvent::Message { connection, received, .. } = event else { continue };
                let sent = Sent { connection, message: received.envelope.message, data: received.data };
                for answer in self.cluster.answer(&sent) {
                    let WireEvent::Message { connection, message, data, .. } = answer else { continue };
                    let within_block = match message {
                        Message::OpReply(reply) if data.is_some() => reply.offset % 4096,
                        _ => 0,
                    };
                    let body = Body { data, within_block, checksums: Checksums::Compute };
                    // A watcher may be gone, or be another server's.
                    let _ = server.send(connection, message, body);
                }
            }
        }
        for poller in pollers {
            poller.poll(now);
        }
    }
}

fn client_on(hub: MemoryHub, servers: Vec<Net>) -> Blocking<Memory, Loop> {
    let clock = TestClock(Rc::new(Cell::new(1_000_000)));
    let pool = BufferPool::new(256 << 20);
    let net = messenger(&hub, address(9999), Role::Client(SessionId(0)));
    let client = Client::<Memory>::new(ClientSettings::new(vec![mon_address()], pool), net, clock.clone());
    let cluster = Scripted::new(map_with(3, 8));
    Blocking::new(client, Loop { hub, clock, cluster, servers, inbox: VecDeque::new() })
}

fn client() -> Blocking<Memory, Loop> {
    let hub = MemoryHub::new();
    let mut mon = messenger(&hub, mon_address(), Role::Mon);
    mon.set_sessions(1..100);
    let osds = (0..3).map(|id| messenger(&hub, address(7000 + id), Role::Osd(OsdId(u32::from(id)))));
    let servers = std::iter::once(mon).chain(osds).collect();
    client_on(hub, servers)
}

#[test]
fn an_image_lives_from_its_creation_to_its_removal() {
    let mut client = client();
    client.connect(Duration::from_secs(1)).unwrap();
    assert_eq!(client.client().session(), Some(SessionId(1)));
    let header = client.create(POOL, "disk", CreateOptions { size: 8 << 20, order: 20 }).unwrap();
    assert_eq!(client.info(POOL, "disk").unwrap(), header);
    let image = client.open(POOL, "disk").unwrap();
    let bytes: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 7) as u8).collect();
    client.write_at(image, 1000, &bytes).unwrap();
    let mut read = vec![0; bytes.len()];
    client.read_at(image, 1000, &mut read).unwrap();
    assert!(read == bytes);
    client.flush(image).unwrap();
    assert_eq!(client.write_at(image, (8 << 20) - 1, &[1, 2]), Err(IoError::Invalid));
    client.write_zeroes(image, ByteOffset(1000), ByteLen(3 << 20)).unwrap();
    client.read_at(image, 1000, &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 0));
    client.discard(image, ByteOffset(0), ByteLen(8 << 20)).unwrap();
    let extents = client.extents(image, ByteOffset(0), ByteLen(8 << 20)).unwrap();
    assert_eq!(extents.len(), 1);
    let usage = client.du(POOL, "disk", &mut |_| {}).unwrap();
    assert_eq!(usage, Usage { provisioned: 8 << 20, used: 0 });
    client.resize(POOL, "disk", ByteLen(1 << 20), &mut |_| {}).unwrap();
    client.rename(POOL, "disk", "disc").unwrap();
    assert_eq!(client.list(POOL).unwrap().len(), 1);
    client.close(image);
    let mut last = None;
    client.remove(POOL, "disc", false, &mut |progress| last = Some(progress)).unwrap();
    assert!(last.is_some_and(|progress| progress.done == progress.total));
    assert!(matches!(client.open(POOL, "disc"), Err(ImageError::NotFound { .. })));
    let answer = client.command(serde_json::json!({"prefix": "status"})).unwrap();
    assert_eq!(answer["done"], true);
}

#[test]
fn requests_in_flight_survive_cut_and_damaged_connections() {
    let mut client = client();
    client.connect(Duration::from_secs(1)).unwrap();
    client.create(POOL, "disk", CreateOptions { size: 4 << 20, order: 16 }).unwrap();
    let image = client.open(POOL, "disk").unwrap();
    let (me, osds) = (address(9999), [address(7000), address(7001), address(7002)]);
    let mut submitted = 0;
    for round in 0..60_u64 {
        for slot in 0..8 {
            let data = client.client().pool().copy_of(&[(round + 1) as u8; 4096]).unwrap();
            let offset = ByteOffset((round * 8 + slot) * 4096);
            client.submit(image, ImageIo::Write { offset, data, fua: false }, Ticket(submitted)).unwrap();
            submitted += 1;
        }
        let (client_part, hub) = (round % 3, client_hub(&client));
        let osd = osds[client_part as usize];
        if round % 2 == 0 {
            hub.cut(me, osd);
            hub.heal(me, osd);
        } else {
            hub.damage_next(osd, (round * 977) as usize);
        }
        while client.outstanding() > 4 {
            client.wait_any().2.unwrap();
        }
    }
    while client.outstanding() > 0 {
        client.wait_any().2.unwrap();
    }
    for round in 0..60_u64 {
        let mut block = vec![0; 8 * 4096];
        client.read_at(image, round * 8 * 4096, &mut block).unwrap();
        assert!(block.iter().all(|byte| u64::from(*byte) == round + 1), "round {round}");
    }
    assert!(client.client().stats(image).unwrap().resends > 0, "connections were lost");
    let (_, turn) = client.into_parts();
    let data_writes = turn.cluster.store.objects.values().map(|object| object.blocks.len()).sum::<usize>();
    assert!(data_writes >= 480);
}

fn client_hub(client: &Blocking<Memory, Loop>) -> MemoryHub {
    client.turn().hub.clone()
}

#[test]
fn without_a_cluster_connect_says_what_is_wrong() {
    let mut client = client_on(MemoryHub::new(), Vec::new());
    let error = client.connect(Duration::from_millis(500)).unwrap_err();
    assert!(matches!(error, ConnectError::NoMon { .. }), "{error}");
}
