//! A store, its device, and an oracle that knows every legal state.

use super::device::{Media, Rng, TestDevice};
use super::images::Crash;
pub use super::oracle::What;
use super::oracle::{LOG_COMPARED, Logged, Oracle, PgModel, Seen, Step, map_bytes};
use crate::store::Store;
use crate::store::api::*;
use crate::store::codec::{BLOCK, crc32c};
use crate::store::format::{FormatOptions, Mkfs, MkfsError, Probe, ProbeError, Probed};
use crate::store::mount::{Mount, MountError};
use loligo_config::id::*;
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::{Instant, Ticket};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

pub const POOL: PoolId = PoolId(1);

pub fn pg(index: u32) -> PgId {
    PgId { pool: POOL, index }
}

pub fn object(index: u64) -> ObjectId {
    ObjectId { pool: POOL, kind: ObjectKind::Data, image: ImageId(7), index }
}

pub fn options(shards: u16) -> FormatOptions {
    FormatOptions {
        cluster: ClusterId(uuid::Uuid::from_u128(1)),
        osd: OsdId(3),
        device: DeviceId(uuid::Uuid::from_u128(2)),
        shards,
        write_fully: false,
        force: false,
    }
}

pub struct Harness {
    pub media: Rc<RefCell<Media>>,
    pub pool: BufferPool,
    pub store: Option<Store<TestDevice>>,
    pub rng: Rng,
    pub now: Instant,
    pub oracle: Oracle,
    reads: BTreeMap<Ticket, (ObjectVersion, Vec<Option<u64>>)>,
    /// The answer to the read that was not asked for with [`Harness::read`].
    answer: Option<Result<ReadData, ReadError>>,
    next_ticket: u64,
    pub next_stamp: u64,
    pub shard: ShardId,
    pub events: VecDeque<StoreEvent>,
    /// Transactions that failed.
    pub failed: Vec<Ticket>,
    /// Every moment at which the power may fail and leave something new, when it is wanted.
    pub moments: Option<Vec<Moment>>,
    /// The device completes one operation at most per poll.
    pub one_at_a_time: bool,
    recorded: (u64, u64),
}

/// A moment at which the power may fail.
#[derive(Debug)]
pub struct Moment {
    pub crash: Crash,
    pub oracle: Oracle,
    pub now: Instant,
    pub next_ticket: u64,
    pub next_stamp: u64,
}

impl Harness {
    pub fn new(blocks: u64, seed: u64) -> Self {
        let mut harness = Self::unformatted(Media::new(blocks, seed), BufferPool::new(256 << 20));
        harness.mkfs(options(1)).unwrap();
        harness.mount();
        harness
    }

    /// A device that nothing is known of, with nothing mounted.
    pub fn unformatted(media: Rc<RefCell<Media>>, pool: BufferPool) -> Self {
        let rng = Rng(media.borrow().rng.0 ^ 0xabcd);
        Self {
            media,
            pool,
            store: None,
            rng,
            now: Instant(0),
            oracle: Oracle::default(),
            reads: BTreeMap::new(),
            answer: None,
            next_ticket: 0,
            next_stamp: 1,
            shard: ShardId(0),
            events: VecDeque::new(),
            failed: Vec::new(),
            moments: None,
            one_at_a_time: false,
            recorded: (0, 0),
        }
    }

    /// What is left after a power cut, nothing mounted: `media` holds one of the moment's images.
    pub fn after(moment: &Moment, media: Rc<RefCell<Media>>, pool: &BufferPool) -> Self {
        let harness = Self::unformatted(media, pool.clone());
        let Moment { now, next_ticket, next_stamp, .. } = *moment;
        Self { oracle: moment.oracle.clone(), now, next_ticket, next_stamp, ..harness }
    }

    fn let_through(&self) {
        if self.one_at_a_time {
            self.media.borrow_mut().gate = Some(1);
        }
    }

    /// Notes the moment, if it is wanted and differs from the one before.
    pub fn note_moment(&mut self) {
        let Some(moments) = &mut self.moments else { return };
        let media = self.media.borrow();
        let acked = self.oracle.committed << 32 | self.oracle.pending.len() as u64;
        if std::mem::replace(&mut self.recorded, (media.changes, acked)) != (media.changes, acked) {
            moments.push(Moment {
                crash: media.crash(),
                oracle: self.oracle.clone(),
                now: self.now,
                next_ticket: self.next_ticket,
                next_stamp: self.next_stamp,
            });
        }
    }

    pub fn mkfs(&mut self, options: FormatOptions) -> Result<(), MkfsError> {
        let mut mkfs = Mkfs::new(TestDevice::new(&self.media), options, self.pool.clone());
        loop {
            self.let_through();
            let progress = mkfs.poll(self.now);
            self.note_moment();
            assert!(progress.written <= progress.total);
            if let Some(done) = progress.done {
                return done.map(|_| assert!(progress.written > 0));
            }
        }
    }

    pub fn probe(&mut self) -> Result<Probed<TestDevice>, ProbeError> {
        let mut probe = Probe::new(TestDevice::new(&self.media), self.pool.clone());
        loop {
            if let Some(done) = probe.poll(self.now) {
                return done;
            }
        }
    }

    pub fn begin_mount(&mut self) -> Mount<TestDevice> {
        let probed = self.probe().unwrap();
        Mount::new(probed.device, self.shard, probed.chunks, self.pool.clone())
    }

    pub fn try_mount(&mut self) -> Result<(), MountError> {
        let mut mount = self.begin_mount();
        loop {
            self.now.0 += 1000;
            self.let_through();
            let done = mount.poll(self.now);
            self.note_moment();
            if let Some(done) = done {
                let store = done?;
                store.audit().unwrap();
                self.store = Some(store);
                return Ok(());
            }
        }
    }

    pub fn mount(&mut self) {
        self.try_mount().unwrap();
    }

    pub fn store(&mut self) -> &mut Store<TestDevice> {
        self.store.as_mut().expect("mounted")
    }

    pub fn last(&self, pg: PgId) -> ObjectVersion {
        self.oracle.current.get(&pg).map_or(ObjectVersion::NONE, |pg| pg.last)
    }

    pub fn exists(&self, pg: PgId) -> bool {
        self.oracle.current.contains_key(&pg)
    }

    fn data(&self, stamps: &[u64]) -> (SharedBuffer, SharedBuffer) {
        let mut data = self.pool.alloc(stamps.len() * BLOCK).unwrap();
        let mut sums = Vec::new();
        for (block, stamp) in data.chunks_exact_mut(BLOCK).zip(stamps) {
            block.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&stamp.to_le_bytes()));
            sums.extend(crc32c(block).to_le_bytes());
        }
        (data.freeze(), self.pool.copy_of(&sums).unwrap())
    }

    pub fn submit(&mut self, pg: PgId, what: What) -> Result<(), SubmitError> {
        let previous = self.last(pg);
        let version = match what {
            What::Meta(_) | What::RemovePg => ObjectVersion::NONE,
            _ => ObjectVersion { interval: Epoch(1), stream: 0, sequence: previous.sequence + 1 },
        };
        let change = match &what {
            What::Write(object, block, stamps) => {
                let (data, checksums) = self.data(stamps);
                Change::Write { object: *object, block: *block, data, checksums }
            }
            What::Free(object, block, count) => {
                Change::Free { object: *object, block: *block, count: *count }
            }
            What::Remove(object) => Change::Remove { object: *object },
            What::Result => Change::Result,
            What::Meta(meta) => Change::Meta(*meta),
            What::RemovePg => Change::RemovePg,
        };
        let op = match version.is_some() {
            true => OpId { session: SessionId(1 + version.sequence % 3), number: version.sequence },
            false => OpId::default(),
        };
        let lowest = version.sequence.saturating_sub(50);
        let tx = Transaction { pg, version, previous, op, lowest_outstanding: lowest, snap_seq: 0, change };
        let ticket = Ticket(self.next_ticket);
        self.store().submit(tx, ticket)?;
        self.next_ticket += 1;
        self.oracle.submitted(ticket, Step { pg, version, op, lowest, what });
        Ok(())
    }

    /// Submits, waiting while the store is busy.
    pub fn submit_wait(&mut self, pg: PgId, what: What) -> Result<(), SubmitError> {
        for _ in 0..100_000 {
            match self.submit(pg, what.clone()) {
                Err(SubmitError::Busy) => self.poll(),
                other => return other,
            }
        }
        panic!("busy for ever: {:?}", self.store().space());
    }

    pub fn stamps(&mut self, count: u32) -> Vec<u64> {
        let from = self.next_stamp;
        self.next_stamp += u64::from(count);
        (from..self.next_stamp).collect()
    }

    pub fn write(&mut self, pg: PgId, object: ObjectId, block: u32, count: u32) {
        let stamps = self.stamps(count);
        self.submit_wait(pg, What::Write(object, block, stamps)).unwrap();
    }

    pub fn make_pg(&mut self, pg: PgId) {
        self.submit_wait(pg, What::Meta(PgMeta { promised: Epoch(1), activated: Epoch(1) })).unwrap();
    }

    pub fn poll(&mut self) {
        self.now.0 += 50_000;
        self.let_through();
        let (now, mut events) = (self.now, std::mem::take(&mut self.events));
        self.store().poll(now, &mut events);
        while let Some(event) = events.pop_front() {
            self.event(event);
        }
        self.events = events;
        self.note_moment();
    }

    /// Keeps a map; its bytes follow from its epoch.
    pub fn keep_map(&mut self, epoch: Epoch) {
        self.store().keep_map(epoch, &map_bytes(epoch));
        if self.oracle.maps.last().is_some_and(|newest| *newest < epoch) {
            self.oracle.maps.push(epoch);
        }
    }

    fn event(&mut self, event: StoreEvent) {
        match event {
            StoreEvent::Committed { ticket, .. } => {
                assert!(self.failed.is_empty(), "nothing is acked after the device has failed");
                self.oracle.committed(ticket);
            }
            StoreEvent::Failed { ticket, error } => {
                assert_eq!(self.store().failed(), Some(error));
                self.failed.push(ticket);
            }
            StoreEvent::Read { ticket: Ticket(u64::MAX), result, .. } => self.answer = Some(result),
            StoreEvent::Read { ticket, result, .. } => {
                let (version, expected) = self.reads.remove(&ticket).expect("the read was asked for");
                let Ok(data) = result else {
                    assert!(
                        self.media.borrow().fail_at.is_some(),
                        "{result:?} {ticket:?} {version} {:?}",
                        expected.iter().take(3).collect::<Vec<_>>()
                    );
                    return;
                };
                assert_eq!(data.version, version);
                check_blocks(&data, &expected);
            }
        }
    }

    /// Polls until nothing is in flight, background work included.
    pub fn settle(&mut self) {
        let mut quiet = 0;
        for _ in 0..200_000 {
            self.poll();
            let store = self.store();
            let rests = store.is_quiet() && !store.checkpoint.is_running() && !store.checkpoint.wanted;
            quiet = if rests { quiet + 1 } else { 0 };
            if quiet > 3 {
                if !self.store().checkpoint.map_dirty {
                    self.oracle.map_durable();
                }
                return;
            }
        }
        panic!("never quiet");
    }

    /// Polls until everything submitted is acked.
    pub fn commit(&mut self) {
        for _ in 0..100_000 {
            if self.oracle.pending.is_empty() {
                return;
            }
            self.poll();
        }
        panic!("not acked");
    }

    pub fn checkpoint(&mut self) {
        let before = self.store().checkpoints();
        self.store().request_checkpoint();
        for _ in 0..100_000 {
            if self.store().checkpoints() > before {
                return;
            }
            self.poll();
        }
        panic!("no checkpoint");
    }

    /// Begins a read and remembers what it must return.
    pub fn read(&mut self, pg: PgId, object: ObjectId, block: u32, count: u32) {
        let known =
            self.oracle.current.get(&pg).and_then(|pg| pg.objects.get(&object)).cloned().unwrap_or_default();
        let expected = (block..block + count).map(|at| known.1.get(&at).copied()).collect();
        let ticket = Ticket(self.next_ticket);
        if self.store().read(object, pg, block, count, ticket).is_ok() {
            self.next_ticket += 1;
            self.reads.insert(ticket, (known.0, expected));
        }
    }

    /// Ends the store: what was in flight stays with the device.
    pub fn stop(&mut self) {
        let device = self.store.take().expect("mounted").into_device();
        drop(device);
        self.reads.clear();
        self.events.clear();
        self.failed.clear();
    }

    pub fn power_cut(&mut self) {
        self.stop();
        self.media.borrow_mut().power_cut();
    }

    /// After a mount: the state must be what some prefix of the pending transactions makes.
    pub fn verify(&mut self) {
        let ops = self.oracle.ops();
        let seen = self.see(&ops);
        if let Err(wrong) = self.oracle.resolve(&seen) {
            panic!("{wrong}");
        }
    }

    /// The state must be what everything submitted makes.
    pub fn verify_contents(&mut self) {
        assert!(self.oracle.pending.is_empty(), "everything is acked");
        self.verify();
    }

    /// Reads everything there is, by way of what PGs call.
    pub fn see(&mut self, ops: &[(PgId, OpId)]) -> Seen {
        let mut seen = Seen::default();
        let pgs: Vec<_> = self.store().pgs().collect();
        for (id, status) in pgs {
            assert!(!status.incomplete, "{id} is incomplete");
            let mut model = PgModel { last: status.last, meta: status.meta, ..PgModel::default() };
            let objects: Vec<_> = self.store().objects(id, ObjectId::default()).collect();
            for (object, version) in objects {
                let blocks = self.see_object(id, object, version);
                model.objects.insert(object, (version, blocks));
            }
            let blocks: usize = model.objects.values().map(|(_, blocks)| blocks.len()).sum();
            assert_eq!((status.objects, status.blocks), (model.objects.len() as u64, blocks as u64), "{id}");
            model.log = self.see_log(id, status.last);
            seen.model.insert(id, model);
        }
        seen.lookups = ops.iter().map(|(pg, op)| (*pg, *op, self.store().op_lookup(*pg, *op))).collect();
        if let Some((epoch, bytes)) = self.store().kept_map() {
            assert_eq!(bytes, map_bytes(epoch), "the kept map is whole");
            seen.map = epoch;
        }
        seen
    }

    fn see_object(&mut self, pg: PgId, object: ObjectId, version: ObjectVersion) -> BTreeMap<u32, u64> {
        let runs: Vec<_> = self.store().extents(object, 0, 8192).collect();
        let mut blocks = BTreeMap::new();
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return blocks };
        let (first, end) = (first.0, last.0 + last.1);
        let stored = |at: u32| runs.iter().any(|(from, count)| (*from..from + count).contains(&at));
        for from in (first..end).step_by(256) {
            let count = 256.min(end - from);
            let data = self.read_now(pg, object, from, count);
            assert_eq!(data.version, version, "{object}");
            let stamps = check_stamps(&data, count);
            for (at, stamp) in (from..).zip(stamps) {
                if stored(at) {
                    blocks.insert(at, stamp);
                } else {
                    assert_eq!(stamp, 0, "block {at} of {object} was never written");
                }
            }
        }
        blocks
    }

    fn read_now(&mut self, pg: PgId, object: ObjectId, block: u32, count: u32) -> ReadData {
        let ticket = Ticket(u64::MAX);
        self.store().read(object, pg, block, count, ticket).expect("the store is idle");
        for _ in 0..10_000 {
            self.poll();
            if let Some(result) = self.answer.take() {
                return result.unwrap_or_else(|error| panic!("block {block} of {object}: {error}"));
            }
        }
        panic!("a read was never answered");
    }

    /// The newest entries of a PG's log; they must be a chain that ends in its last version.
    fn see_log(&mut self, id: PgId, last: ObjectVersion) -> VecDeque<Logged> {
        let from = ObjectVersion { sequence: last.sequence.saturating_sub(LOG_COMPARED), ..last };
        let from = if from.sequence == 0 { ObjectVersion::NONE } else { from };
        let entries = self.store().entries_since(id, from).expect("the newest are kept");
        let logged = entries.map(|entry| Logged {
            version: entry.version,
            previous: entry.previous,
            op: entry.op,
            kind: entry.kind,
            range: (entry.object, entry.block, entry.count),
        });
        logged.collect()
    }
}

/// The stamp of every block, after checking that each is whole and has the checksum that came with it.
fn check_stamps(data: &ReadData, count: u32) -> Vec<u64> {
    let Some(bytes) = &data.data else { return vec![0; count as usize] };
    assert_eq!(bytes.len(), count as usize * BLOCK);
    let sums = data.checksums.as_ref().expect("data has checksums");
    let blocks = bytes.chunks_exact(BLOCK).zip(sums.chunks_exact(4));
    let stamp = |(block, sum): (&[u8], &[u8])| {
        assert!(block.chunks_exact(8).all(|word| word == &block[..8]), "a block of one write");
        assert_eq!(crc32c(block).to_le_bytes(), sum);
        u64::from_le_bytes(block[..8].try_into().expect("eight bytes"))
    };
    blocks.map(stamp).collect()
}

fn check_blocks(data: &ReadData, expected: &[Option<u64>]) {
    let Some(bytes) = &data.data else {
        assert!(expected.iter().all(Option::is_none), "zeroes in place of data");
        return;
    };
    assert_eq!(bytes.len(), expected.len() * BLOCK);
    let sums = data.checksums.as_ref().expect("data has checksums");
    for ((block, sum), stamp) in bytes.chunks_exact(BLOCK).zip(sums.chunks_exact(4)).zip(expected) {
        let stamp = stamp.unwrap_or(0).to_le_bytes();
        assert!(
            block.chunks_exact(8).all(|word| word == stamp),
            "found {:?}, expected {stamp:?}",
            &block[..8]
        );
        assert_eq!(crc32c(block).to_le_bytes(), *sum);
    }
}
