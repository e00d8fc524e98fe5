//! Whole OSDs on disks and a network in memory: three of them with one or more shards, a mon that keeps the map, a
//! client that checks.

mod disk;
mod full;

use super::links::ShardLinks;
use super::{Shard, ShardSettings};
use crate::map_client::MapClientSettings;
use crate::pg::phase::PhaseKind;
use crate::store::ChunkTable;
use crate::store::format::{FormatOptions, Mkfs, Probe};
use crate::store::mount::Mount;
use disk::{Disk, Media};
use loligo_config::id::{
    ClusterId, CoreId, DeviceId, Epoch, Incarnation, ObjectId, ObjectVersion, OpId, OsdId, PgId, PoolId,
    SessionId, ShardId,
};
use loligo_config::map::{AuthMode, ClusterMap, Interval, Osd};
use loligo_config::placement::object_to_pg;
use loligo_config::pool::{FailureDomain, Pool};
use loligo_net::messenger::{Messenger, MessengerEvent, MessengerSettings};
use loligo_net::transport::memory::{MemoryHub, MemoryTransport};
use loligo_net::wire::handshake::{Identity, Role};
use loligo_net::wire::mon::{BootReply, BootStatus, Map};
use loligo_net::wire::op::{Guard, OpKind, OpRequest, OpStatus};
use loligo_net::wire::{Body, Message};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Clock, ConnectionId, Instant, World};
use loligo_reactor::poller::Poller;
use loligo_reactor::random::Random;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: usize = 4096;
const DISK_BLOCKS: u64 = 16_384;
const POOL: PoolId = PoolId(1);
const PG_COUNT: u32 = 4;

#[derive(Clone)]
struct TestClock(Rc<Cell<u64>>);

impl Clock for TestClock {
    fn now(&self) -> Instant {
        Instant(self.0.get())
    }

    fn unix_seconds(&self) -> u64 {
        0
    }
}

struct TestWorld;

impl World for TestWorld {
    type Clock = TestClock;
    type Entropy = Random;
    type Device = Disk;
    type Transport = MemoryTransport;
}

fn cluster() -> ClusterId {
    ClusterId(uuid::Uuid::from_u128(42))
}

fn address(host: u8) -> SocketAddr {
    core_address(host, 0)
}

fn core_address(host: u8, core: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host], 6800 + core))
}

const MON: u8 = 100;
const CLIENT: u8 = 200;

fn device(osd: usize) -> DeviceId {
    DeviceId(uuid::Uuid::from_u128(1000 + osd as u128))
}

type Net = Messenger<MemoryTransport, Random>;

/// Keeps the map as a mon does: a boot makes a new interval of every PG of that OSD, a closed connection marks down.
struct Mon {
    net: Net,
    map: ClusterMap,
    subscribers: Vec<ConnectionId>,
    events: VecDeque<MessengerEvent>,
    reports: u32,
}

impl Mon {
    fn publish(&mut self, pool: &BufferPool) {
        self.map.epoch = self.map.epoch.next();
        self.net.set_epoch(self.map.epoch);
        for connection in self.subscribers.clone() {
            self.send_map(connection, pool);
        }
    }

    fn send_map(&mut self, connection: ConnectionId, pool: &BufferPool) {
        let data = pool.copy_of(&self.map.encode()).unwrap();
        let _ = self.net.send(connection, Message::Map(Map { epoch: self.map.epoch }), Body::of(data));
    }

    fn poll(&mut self, now: Instant, pool: &BufferPool) {
        let mut events = std::mem::take(&mut self.events);
        self.net.poll(now, &mut events);
        for event in events.drain(..) {
            match event {
                MessengerEvent::Message { connection, received, .. } => match received.envelope.message {
                    Message::Subscribe(_) => {
                        self.subscribers.push(connection);
                        self.send_map(connection, pool);
                    }
                    Message::Boot(boot) => {
                        let epoch = self.map.epoch.next();
                        let osd = self.map.osds.get_mut(&boot.osd).unwrap();
                        osd.up = true;
                        osd.incarnation = boot.incarnation;
                        for interval in self.map.intervals.values_mut() {
                            interval.since = epoch;
                        }
                        self.publish(pool);
                        let reply = BootReply { status: BootStatus::Taken, epoch: self.map.epoch };
                        let _ = self.net.send(connection, Message::BootReply(reply), Body::NONE);
                    }
                    Message::Report(_) => self.reports += 1,
                    _ => {}
                },
                MessengerEvent::Down { connection, peer, .. } => {
                    self.subscribers.retain(|other| *other != connection);
                    if let Some(Identity { role: Role::Osd(osd), incarnation, .. }) = peer {
                        let osd = self.map.osds.get_mut(&osd).unwrap();
                        if osd.up && osd.incarnation == incarnation {
                            osd.up = false;
                            self.publish(pool);
                        }
                    }
                }
                MessengerEvent::Up { .. } => {}
            }
        }
        self.events = events;
    }
}

/// What is known of one block: the newest write that was acked, and one on its way.
#[derive(Default)]
struct Block {
    acked: u64,
    pending: Option<OpRequest>,
    stamp: u64,
}

struct Client {
    net: Net,
    links: BTreeMap<(OsdId, u16), (ConnectionId, bool)>,
    cells: Vec<Block>,
    next: u64,
    /// Stamps read back at the end, by op.
    reads: BTreeMap<u64, Option<u64>>,
    events: VecDeque<MessengerEvent>,
    /// The core that each reply named, by op.
    hints: BTreeMap<u64, CoreId>,
    done: u64,
    resend_at: Instant,
}

/// One start of an OSD.
struct Process {
    incarnation: Incarnation,
    chunks: Arc<ChunkTable>,
    shards: Vec<Shard<TestWorld>>,
    /// Shards that have not mounted yet.
    mounting: VecDeque<ShardLinks>,
}

struct Bed {
    hub: MemoryHub,
    clock: TestClock,
    pool: BufferPool,
    media: Vec<Rc<RefCell<Media>>>,
    /// Of each disk.
    blocks: u64,
    pg_count: u32,
    /// Shards of each OSD.
    shard_count: u16,
    osds: Vec<Option<Process>>,
    mon: Mon,
    client: Client,
    random: Random,
    starts: u64,
}

fn messenger(hub: &MemoryHub, host: u8, role: Role, incarnation: u64, pool: &BufferPool) -> Net {
    core_messenger(hub, (host, 0), role, incarnation, pool)
}

fn core_messenger(
    hub: &MemoryHub,
    (host, core): (u8, u16),
    role: Role,
    incarnation: u64,
    pool: &BufferPool,
) -> Net {
    let identity = Identity { cluster: Some(cluster()), role, incarnation: Incarnation(incarnation) };
    let settings = MessengerSettings { core: CoreId(core), ..MessengerSettings::new(identity, pool.clone()) };
    let seed = incarnation * 1000 + u64::from(host) + (u64::from(core) << 32);
    Messenger::new(settings, hub.endpoint(core_address(host, core)), Random::new(seed))
}

fn addresses(host: u8, cores: u16) -> Vec<SocketAddr> {
    (0..cores).map(|core| core_address(host, core)).collect()
}

fn first_map(cores: u16, blocks: u64, pg_count: u32) -> ClusterMap {
    let mut map = ClusterMap::new(cluster(), AuthMode::None, 0);
    map.next_session = SessionId(100);
    map.next_pool = PoolId(2);
    let pool = Pool {
        id: POOL,
        name: "rbd".into(),
        size: 3,
        min_size: 2,
        pg_count,
        failure_domain: FailureDomain::Osd,
        device_class: None,
        created: Epoch(1),
    };
    for index in 0..pg_count {
        let acting = (0..3).map(|at| OsdId((index + at) % 3)).collect();
        map.intervals.insert(PgId { pool: POOL, index }, Interval { since: Epoch(1), acting });
    }
    map.pools.insert(POOL, pool);
    for osd in 0..3u32 {
        let entry = Osd {
            id: OsdId(osd),
            device: device(osd as usize),
            incarnation: Incarnation(1),
            up: false,
            is_in: true,
            addresses: addresses(osd as u8 + 1, cores),
            weight: 1 << 16,
            host: format!("h{osd}"),
            rack: "r".into(),
            device_class: "ssd".into(),
            capacity: blocks * BLOCK as u64,
        };
        map.osds.insert(OsdId(osd), entry);
    }
    map
}

impl Bed {
    fn new(seed: u64, shard_count: u16) -> Self {
        Self::sized(seed, shard_count, DISK_BLOCKS, PG_COUNT)
    }

    fn sized(seed: u64, shard_count: u16, blocks: u64, pg_count: u32) -> Self {
        let pool = BufferPool::new(1 << 30);
        let hub = MemoryHub::new();
        let clock = TestClock(Rc::new(Cell::new(1_000_000_000)));
        hub.set_now(clock.now());
        let media: Vec<_> = (0..3).map(|_| Rc::new(RefCell::new(Media::default()))).collect();
        let mut mon_net = messenger(&hub, MON, Role::Mon, 7, &pool);
        mon_net.set_epoch(Epoch(1));
        let map = first_map(shard_count, blocks, pg_count);
        let mon = Mon { net: mon_net, map, subscribers: vec![], events: VecDeque::new(), reports: 0 };
        let client = Client {
            net: messenger(&hub, CLIENT, Role::Client(SessionId(5)), 9, &pool),
            links: BTreeMap::new(),
            cells: (0..24).map(|_| Block::default()).collect(),
            next: 1,
            reads: BTreeMap::new(),
            events: VecDeque::new(),
            hints: BTreeMap::new(),
            done: 0,
            resend_at: Instant(0),
        };
        let mut bed = Self {
            hub,
            clock,
            pool,
            media,
            blocks,
            pg_count,
            shard_count,
            osds: vec![None, None, None],
            mon,
            client,
            random: Random::new(seed),
            starts: 1,
        };
        for osd in 0..3 {
            let options = FormatOptions {
                cluster: cluster(),
                osd: OsdId(osd as u32),
                device: device(osd),
                shards: shard_count,
                write_fully: false,
                force: false,
            };
            let mut mkfs = Mkfs::new(bed.disk(osd), options, bed.pool.clone());
            while mkfs.poll(Instant(0)).done.map(Result::unwrap).is_none() {}
            bed.start(osd);
        }
        bed
    }

    fn disk(&mut self, osd: usize) -> Disk {
        Disk::new(&self.media[osd], self.blocks, self.random.below(u64::MAX))
    }

    fn start(&mut self, osd: usize) {
        if self.osds[osd].is_some() {
            return;
        }
        let mut probe = Probe::new(self.disk(osd), self.pool.clone());
        let probed = loop {
            if let Some(result) = probe.poll(self.clock.now()) {
                break result.unwrap();
            }
        };
        self.starts += 1;
        let mut process = Process {
            incarnation: Incarnation(self.starts),
            chunks: probed.chunks,
            shards: Vec::new(),
            // Small, so that they are full now and then.
            mounting: ShardLinks::with_capacity(usize::from(self.shard_count), 8).into(),
        };
        self.mount_next(osd, &mut process);
        self.osds[osd] = Some(process);
    }

    fn mount_next(&mut self, osd: usize, process: &mut Process) {
        let Some(links) = process.mounting.pop_front() else { return };
        let index = links.index();
        let chunks = Arc::clone(&process.chunks);
        let mut mount = Mount::new(self.disk(osd), ShardId(index), chunks, self.pool.clone());
        let store = loop {
            if let Some(result) = mount.poll(self.clock.now()) {
                break result.unwrap();
            }
        };
        let id = OsdId(osd as u32);
        let host = osd as u8 + 1;
        let boot = loligo_net::wire::mon::BootInfo {
            device: device(osd),
            addresses: addresses(host, self.shard_count),
            capacity: self.blocks * BLOCK as u64,
            host: format!("h{osd}"),
            rack: "r".into(),
            device_class: "ssd".into(),
            newest_map: Epoch(0),
        };
        let incarnation = process.incarnation;
        let map_client =
            MapClientSettings { osd: id, incarnation, cluster: cluster(), mons: vec![address(MON)], boot };
        let settings = ShardSettings {
            osd: id,
            incarnation,
            core: CoreId(index),
            pool: self.pool.clone(),
            map_client: (index == 0).then_some(map_client),
        };
        let net = core_messenger(&self.hub, (host, index), Role::Osd(id), incarnation.0, &self.pool);
        process.shards.push(Shard::new(settings, store, net, self.clock.clone(), links));
    }

    /// kill -9 and a power cut of its disk.
    fn kill(&mut self, osd: usize) {
        if self.osds[osd].take().is_some() {
            self.media[osd].borrow_mut().power_cut(&mut self.random);
        }
    }

    fn shards(&self) -> impl Iterator<Item = &Shard<TestWorld>> {
        self.osds.iter().flatten().flat_map(|process| &process.shards)
    }

    fn poll_osds(&mut self, now: Instant) {
        for osd in 0..3 {
            let Some(mut process) = self.osds[osd].take() else { continue };
            for shard in &mut process.shards {
                if self.random.below(4) != 0 {
                    shard.poll(now);
                }
                assert_eq!(shard.failure(), None);
            }
            if !process.mounting.is_empty() && self.random.below(100) == 0 {
                self.mount_next(osd, &mut process);
            }
            self.osds[osd] = Some(process);
        }
    }

    fn turn(&mut self) {
        self.clock.0.set(self.clock.0.get() + 20_000 + self.random.below(100_000));
        let now = self.clock.now();
        self.hub.set_now(now);
        self.mon.poll(now, &self.pool);
        self.poll_osds(now);
        self.poll_client(now);
    }

    // ------------------------------------------------------------------------------------- the client

    fn object(cell: usize) -> ObjectId {
        ObjectId { pool: POOL, index: (cell / 2) as u64, ..ObjectId::default() }
    }

    fn request(&mut self, cell: usize, kind: OpKind) -> OpRequest {
        let object = Self::object(cell);
        let number = self.client.next;
        self.client.next += 1;
        let pending = self.client.cells.iter().filter_map(|cell| cell.pending).map(|op| op.op.number);
        let lowest = pending.chain(self.client.reads.keys().copied()).min().unwrap_or(number).min(number);
        OpRequest {
            pg: object_to_pg(&self.mon.map.pools[&POOL], &object),
            object,
            kind,
            offset: (cell % 2 * BLOCK) as u32,
            len: BLOCK as u32,
            op: OpId { session: SessionId(5), number },
            lowest_outstanding: lowest,
            snap_seq: 0,
            guard: Guard::Any,
            attempt: 0,
            client_queue_ns: 0,
        }
    }

    fn send(&mut self, request: OpRequest, stamp: u64) {
        let Some(primary) = self.mon.map.primary(request.pg) else { return };
        // Now and then to the wrong core, which forwards it.
        let core = self.random.below(u64::from(self.shard_count)) as u16;
        let Some((connection, true)) = self.client.links.get(&(primary, core)).copied() else { return };
        let body = match request.kind {
            OpKind::Write => Body::of(self.pool.copy_of(&stamp.to_le_bytes().repeat(BLOCK / 8)).unwrap()),
            _ => Body::NONE,
        };
        self.client.net.set_epoch(self.mon.map.epoch);
        let _ = self.client.net.send(connection, Message::Op(request), body);
    }

    fn write(&mut self, cell: usize) {
        if self.client.cells[cell].pending.is_none() {
            let request = self.request(cell, OpKind::Write);
            let state = &mut self.client.cells[cell];
            state.pending = Some(request);
            state.stamp = request.op.number;
            let stamp = state.stamp;
            self.send(request, stamp);
        }
    }

    fn poll_client(&mut self, now: Instant) {
        let mut events = std::mem::take(&mut self.client.events);
        self.client.net.poll(now, &mut events);
        for event in events.drain(..) {
            match event {
                MessengerEvent::Up { connection, .. } => {
                    self.client
                        .links
                        .values_mut()
                        .filter(|link| link.0 == connection)
                        .for_each(|link| link.1 = true);
                }
                MessengerEvent::Down { connection, .. } => {
                    self.client.links.retain(|_, link| link.0 != connection);
                }
                MessengerEvent::Message { received, .. } => {
                    let Message::OpReply(reply) = received.envelope.message else { continue };
                    if reply.status != OpStatus::Done {
                        continue;
                    }
                    self.client.hints.insert(reply.op.number, reply.core);
                    let number = reply.op.number;
                    if let Some(read) = self.client.reads.get_mut(&number) {
                        let data = received.data.expect("a read brings data");
                        assert!(
                            data.chunks(8).all(|bytes| bytes == &data[..8]),
                            "never mixed within a block"
                        );
                        *read = Some(u64::from_le_bytes(data[..8].try_into().unwrap()));
                    }
                    let is_it = |cell: &&mut Block| cell.pending.is_some_and(|op| op.op.number == number);
                    if let Some(cell) = self.client.cells.iter_mut().find(is_it) {
                        assert_eq!(reply.copies, 3);
                        cell.acked = cell.stamp;
                        cell.pending = None;
                        self.client.done += 1;
                    }
                }
            }
        }
        self.client.events = events;
        for key in (0..3).flat_map(|osd| (0..self.shard_count).map(move |core| (OsdId(osd), core))) {
            if !self.client.links.contains_key(&key) && self.random.below(50) == 0 {
                let (osd, core) = key;
                let to = core_address(osd.0 as u8 + 1, core);
                let connection = self.client.net.connect(to, Role::Osd(osd), CoreId(core));
                self.client.links.insert(key, (connection, false));
            }
        }
        if self.client.resend_at <= now {
            self.client.resend_at = now.after(Duration::from_millis(20));
            let pending: Vec<_> =
                self.client.cells.iter().filter_map(|cell| Some((cell.pending?, cell.stamp))).collect();
            for (request, stamp) in pending {
                self.send(OpRequest { attempt: 1, ..request }, stamp);
            }
        }
    }

    fn read(&mut self, cell: usize) -> u64 {
        let request = self.request(cell, OpKind::Read);
        self.client.reads.insert(request.op.number, None);
        for turn in 0..200_000 {
            if turn % 500 == 0 {
                self.send(request, 0);
            }
            self.turn();
            if let Some(value) = self.client.reads[&request.op.number] {
                self.client.reads.remove(&request.op.number);
                assert_eq!(self.client.hints[&request.op.number], self.owner(request.pg), "the core hint");
                return value;
            }
        }
        panic!("a read does not end");
    }

    /// The core of the PG's primary that has it.
    fn owner(&self, pg: PgId) -> CoreId {
        let primary = self.mon.map.primary(pg).unwrap().0 as usize;
        let shards = &self.osds[primary].as_ref().unwrap().shards;
        shards.iter().find(|shard| shard.pgs().any(|own| own.id() == pg)).unwrap().settings.core
    }

    fn all_active(&self) -> bool {
        let active = |shard: &Shard<TestWorld>| {
            shard.pgs().filter(|pg| pg.phase().kind() == PhaseKind::Active).count()
        };
        self.shards().map(active).sum::<usize>() == self.pg_count as usize
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        for _ in 0..300_000 {
            if done(self) {
                return;
            }
            self.turn();
        }
        panic!("{what} does not come");
    }

    fn assert_replicas_equal(&self) {
        for index in 0..self.pg_count {
            let pg = PgId { pool: POOL, index };
            let stores: Vec<_> =
                self.shards().map(Shard::store).filter(|store| store.pg(pg).is_some()).collect();
            assert_eq!(stores.len(), 3, "pg {pg} is in one shard of each OSD");
            let view = |at: usize| {
                let status = stores[at].pg(pg).unwrap();
                let objects: Vec<(ObjectId, ObjectVersion)> =
                    stores[at].objects(pg, ObjectId::default()).collect();
                let extents: Vec<Vec<_>> =
                    objects.iter().map(|(id, _)| stores[at].extents(*id, 0, 8).collect()).collect();
                (status.last, status.durable, status.meta, objects, extents)
            };
            assert_eq!(view(0), view(1), "pg {pg}");
            assert_eq!(view(0), view(2), "pg {pg}");
        }
    }

    fn finish(&mut self) -> u64 {
        (0..3).for_each(|osd| self.start(osd));
        self.until("an active cluster", Self::all_active);
        self.until("the last ack", |bed| bed.client.cells.iter().all(|cell| cell.pending.is_none()));
        for cell in 0..self.client.cells.len() {
            assert_eq!(self.read(cell), self.client.cells[cell].acked, "cell {cell}");
        }
        self.assert_replicas_equal();
        self.client.done
    }
}

fn run(seed: u64, shard_count: u16, turns: usize) -> u64 {
    let mut bed = Bed::new(seed, shard_count);
    let kill_in = [400, 1500, 6000][bed.random.below(3) as usize];
    for _ in 0..turns {
        bed.turn();
        for _ in 0..bed.random.below(4) {
            let cell = bed.random.below(bed.client.cells.len() as u64) as usize;
            bed.write(cell);
        }
        if bed.random.below(kill_in) == 0 {
            let is_all = bed.random.below(4) == 0;
            let one = bed.random.below(3) as usize;
            (0..3).filter(|osd| is_all || *osd == one).for_each(|osd| bed.kill(osd));
        }
        if bed.random.below(200) == 0 {
            let osd = bed.random.below(3) as usize;
            bed.start(osd);
        }
    }
    bed.finish()
}

fn boots_serves_and_reports(shard_count: u16) {
    let mut bed = Bed::new(1, shard_count);
    bed.until("an active cluster", Bed::all_active);
    let load = |shard: &Shard<TestWorld>| shard.pgs().count() == (PG_COUNT / u32::from(shard_count)) as usize;
    assert!(bed.shards().all(load), "PGs are spread evenly");
    assert_eq!(bed.read(0), 0, "never written");
    bed.write(0);
    bed.until("the ack", |bed| bed.client.cells[0].pending.is_none());
    assert_eq!(bed.read(0), bed.client.cells[0].acked);
    for cell in 0..bed.client.cells.len() {
        assert_eq!(bed.read(cell), bed.client.cells[cell].acked);
    }
    let forwarded: u64 = bed.shards().map(|shard| shard.counters().forwarded).sum();
    assert_eq!(forwarded > 0, shard_count > 1, "{forwarded} ops went to another core first");
    bed.until("a report", |bed| bed.mon.reports >= 3);
    bed.assert_replicas_equal();
    assert!(bed.shards().all(|shard| !shard.expecting()), "an idle shard expects nothing");
}

#[test]
fn a_cluster_boots_serves_and_reports() {
    boots_serves_and_reports(1);
    boots_serves_and_reports(2);
}

/// Else a fenced client would write on under another's session, or take the answers to its ops.
#[test]
fn an_op_in_another_session_than_its_connection_is_refused() {
    let mut bed = Bed::new(1, 2);
    bed.until("an active cluster", Bed::all_active);
    bed.until("connections", |bed| {
        bed.client.links.len() == 6 && bed.client.links.values().all(|(_, is_up)| *is_up)
    });
    let request = bed.request(0, OpKind::Write);
    for session in [4, 6] {
        let foreign =
            OpRequest { op: OpId { session: SessionId(session), number: request.op.number }, ..request };
        bed.send(foreign, 77);
        (0..2000).for_each(|_| bed.turn());
    }
    let refused: u64 = bed.shards().map(|shard| shard.counters().foreign_session).sum();
    assert_eq!(refused, 2);
    assert_eq!(bed.read(0), 0, "nothing was written");
}

#[test]
fn acked_writes_survive_kills_and_power_cuts() {
    let mut done = 0;
    for seed in 0..40 {
        println!("SEED={seed}");
        done += run(seed, 1, 6000);
    }
    assert!(done > 10_000, "the schedules let writes through: {done}");
}

#[test]
fn acked_writes_survive_kills_of_osds_with_two_shards() {
    let mut done = 0;
    for seed in 100..130 {
        println!("SEED={seed}");
        done += run(seed, 2, 6000);
    }
    assert!(done > 5_000, "the schedules let writes through: {done}");
}
