//! A store, its device, and an oracle that knows every legal state.

use super::device::{Media, Rng, TestDevice};
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

/// Contents of every object of a PG, and its version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PgModel {
    pub exists: bool,
    pub last: ObjectVersion,
    pub meta: PgMeta,
    pub objects: BTreeMap<ObjectId, (ObjectVersion, BTreeMap<u32, u64>)>,
}

pub type Model = BTreeMap<PgId, PgModel>;

/// What a transaction does to the model.
#[derive(Clone, Debug)]
pub struct Step {
    pub pg: PgId,
    pub version: ObjectVersion,
    pub op: OpId,
    pub what: What,
}

#[derive(Clone, Debug)]
pub enum What {
    Write(ObjectId, u32, Vec<u64>),
    Free(ObjectId, u32, u32),
    Remove(ObjectId),
    Result,
    Meta(PgMeta),
    RemovePg,
}

pub fn apply(model: &mut Model, step: &Step) {
    let state = model.entry(step.pg).or_default();
    match &step.what {
        What::Write(object, block, stamps) => {
            let entry = state.objects.entry(*object).or_default();
            entry.0 = step.version;
            entry.1.extend((*block..).zip(stamps.iter().copied()));
        }
        What::Free(object, block, count) => {
            if let Some(entry) = state.objects.get_mut(object) {
                entry.0 = step.version;
                entry.1.retain(|at, _| *at < *block || *at >= block + count);
            }
        }
        What::Remove(object) => {
            state.objects.remove(object);
        }
        What::Result => (),
        What::Meta(meta) => {
            state.exists = true;
            state.meta = *meta;
            return;
        }
        What::RemovePg => {
            *state = PgModel::default();
            return;
        }
    }
    state.last = step.version;
}

pub struct Harness {
    pub media: Rc<RefCell<Media>>,
    pub pool: BufferPool,
    pub store: Option<Store<TestDevice>>,
    pub rng: Rng,
    pub now: Instant,
    /// Everything acked.
    pub acked: Model,
    /// Everything submitted.
    pub current: Model,
    /// Submitted and not acked, in order.
    pub pending: VecDeque<(Ticket, Step)>,
    reads: BTreeMap<Ticket, (ObjectVersion, Vec<Option<u64>>)>,
    next_ticket: u64,
    pub next_stamp: u64,
    pub shard: ShardId,
    pub events: VecDeque<StoreEvent>,
    pub committed: u64,
}

impl Harness {
    pub fn new(blocks: u64, seed: u64) -> Self {
        let media = Media::new(blocks, seed);
        let mut harness = Self {
            media,
            pool: BufferPool::new(256 << 20),
            store: None,
            rng: Rng(seed ^ 0xabcd),
            now: Instant(0),
            acked: Model::new(),
            current: Model::new(),
            pending: VecDeque::new(),
            reads: BTreeMap::new(),
            next_ticket: 0,
            next_stamp: 1,
            shard: ShardId(0),
            events: VecDeque::new(),
            committed: 0,
        };
        harness.mkfs(options(1)).unwrap();
        harness.mount();
        harness
    }

    pub fn mkfs(&mut self, options: FormatOptions) -> Result<(), MkfsError> {
        let mut mkfs = Mkfs::new(TestDevice::new(&self.media), options, self.pool.clone());
        loop {
            let progress = mkfs.poll(self.now);
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
            if let Some(done) = mount.poll(self.now) {
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
        self.current.get(&pg).map_or(ObjectVersion::NONE, |pg| pg.last)
    }

    pub fn exists(&self, pg: PgId) -> bool {
        self.current.get(&pg).is_some_and(|pg| pg.exists)
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
        let lowest_outstanding = version.sequence.saturating_sub(50);
        let tx = Transaction { pg, version, previous, op, lowest_outstanding, snap_seq: 0, change };
        let ticket = Ticket(self.next_ticket);
        self.store().submit(tx, ticket)?;
        self.next_ticket += 1;
        let step = Step { pg, version, op, what };
        apply(&mut self.current, &step);
        self.pending.push_back((ticket, step));
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
        let (now, mut events) = (self.now, std::mem::take(&mut self.events));
        self.store().poll(now, &mut events);
        while let Some(event) = events.pop_front() {
            self.event(event);
        }
        self.events = events;
    }

    fn event(&mut self, event: StoreEvent) {
        match event {
            StoreEvent::Committed { ticket, .. } => {
                let (expected, step) = self.pending.pop_front().expect("something was pending");
                assert_eq!(ticket, expected, "commits come in order");
                apply(&mut self.acked, &step);
                self.committed += 1;
            }
            StoreEvent::Failed { .. } => assert!(self.store().failed().is_some()),
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
            quiet =
                if self.store().is_quiet() && !self.store().checkpoint.is_running() { quiet + 1 } else { 0 };
            if quiet > 3 {
                return;
            }
        }
        panic!("never quiet");
    }

    /// Polls until everything submitted is acked.
    pub fn commit(&mut self) {
        for _ in 0..100_000 {
            if self.pending.is_empty() {
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
        let known = self.current.get(&pg).and_then(|pg| pg.objects.get(&object)).cloned().unwrap_or_default();
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
    }

    pub fn power_cut(&mut self) {
        self.stop();
        self.media.borrow_mut().power_cut();
    }

    /// After a mount: the state must be what some prefix of the pending transactions makes, and stays so.
    pub fn verify(&mut self) {
        let mut model = self.acked.clone();
        let pending: Vec<_> = self.pending.drain(..).map(|(_, step)| step).collect();
        let mut applied = 0;
        if !self.matches(&model) {
            for step in &pending {
                apply(&mut model, step);
                applied += 1;
                if self.matches(&model) {
                    break;
                }
            }
        }
        assert!(
            self.matches(&model),
            "no prefix of what was pending gives this state\n{:?}\n{pending:?}",
            self.store().pgs().collect::<Vec<_>>()
        );
        for step in pending.iter().take(applied).filter(|step| step.version.is_some()) {
            // A PG removed later in the prefix knows nothing any more.
            if self.store().pg(step.pg).is_some_and(|pg| pg.last >= step.version) {
                let found = self.store().op_lookup(step.pg, step.op);
                assert!(matches!(found, OpLookup::Applied(_) | OpLookup::Forgotten), "{found:?}");
            }
        }
        self.acked = model.clone();
        self.current = model;
        self.verify_contents();
    }

    fn matches(&self, model: &Model) -> bool {
        let store = self.store.as_ref().expect("mounted");
        let found: BTreeMap<_, _> = store.pgs().collect();
        let known = model.iter().filter(|(_, pg)| pg.exists);
        let expected: BTreeMap<_, _> = known.map(|(id, pg)| (*id, pg)).collect();
        found.len() == expected.len()
            && expected.iter().all(|(id, pg)| {
                found.get(id).is_some_and(|status| status.last == pg.last && status.meta == pg.meta)
            })
    }

    /// Reads everything and compares.
    pub fn verify_contents(&mut self) {
        let objects: Vec<_> = self
            .current
            .iter()
            .flat_map(|(pg, state)| {
                state.objects.iter().map(|(id, (version, blocks))| (*pg, *id, *version, blocks.clone()))
            })
            .collect();
        for (pg, id, version, blocks) in objects {
            assert_eq!(self.store().object_version(id), version, "{id}");
            let (first, last) = match (blocks.keys().next(), blocks.keys().next_back()) {
                (Some(first), Some(last)) => (*first, *last),
                _ => (0, 0),
            };
            for from in (first..=last).step_by(256) {
                self.read(pg, id, from, 256.min(last + 1 - from));
                while !self.reads.is_empty() {
                    self.poll();
                }
            }
        }
        let model: BTreeMap<_, _> = self
            .current
            .iter()
            .filter(|(_, pg)| pg.exists)
            .map(|(id, pg)| {
                let blocks: usize = pg.objects.values().map(|(_, blocks)| blocks.len()).sum();
                (*id, (pg.objects.len() as u64, blocks as u64))
            })
            .collect();
        let found: BTreeMap<_, _> =
            self.store().pgs().map(|(id, pg)| (id, (pg.objects, pg.blocks))).collect();
        assert_eq!(found, model);
        self.check_entries();
    }

    /// The kept log of every PG is a chain that ends in its last version.
    fn check_entries(&mut self) {
        let pgs: Vec<_> = self.store().pgs().collect();
        for (id, status) in pgs {
            assert!(!status.incomplete, "{id}");
            let from = ObjectVersion { sequence: status.last.sequence.saturating_sub(30), ..status.last };
            let from = if from.sequence == 0 { ObjectVersion::NONE } else { from };
            let mut last = from;
            for entry in self.store().entries_since(id, from).expect("the last 30 are kept") {
                assert_eq!(entry.previous, last);
                last = entry.version;
            }
            assert_eq!(last, status.last);
        }
    }
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
