//! Hostile devices: a formatted device with some blocks changed, most with their checksums and addresses made right,
//! is probed, mounted, read, written and mounted again. Superblock, chunk table, anchors, checkpoint pages and log
//! records are decoded on the way.

use super::{Input, Target, chunk, with_pool};
use loligo_config::id::*;
use loligo_config::units::BlockCount;
use loligo_net::wire::checksum::crc32c;
use loligo_osd::store::Store;
use loligo_osd::store::api::{Change, PgMeta, StoreEvent, SubmitError, Transaction};
use loligo_osd::store::format::{FormatOptions, Mkfs, Probe};
use loligo_osd::store::mount::Mount;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{
    BlockDevice, Completion, Completions, DiskError, DiskOp, Geometry, Instant, QueueFull, Ticket, WriteCache,
};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// Changes to a formatted device.
pub const TARGET: Target = Target { name: "disk", run, seeds, words: &[b"LOLI"], len_max: 8 << 10 };

const BLOCK: usize = 4096;
const HEAD: usize = 64;
const POOL: usize = 256 << 20;
/// As large as two shards need.
const BLOCKS: u64 = 3100;
const CHANGES_MAX: usize = 32;
/// Polls after which anything on a device of this size must have ended.
const POLLS_MAX: u32 = 20_000;
/// Memory that the tables of a store on such a device may take.
const MEMORY_MAX: u64 = 64 << 20;

type Blocks = BTreeMap<u64, Rc<[u8]>>;

/// A device in memory without a cache, in order.
#[derive(Debug)]
struct Disk {
    geometry: Geometry,
    blocks: Rc<std::cell::RefCell<Blocks>>,
    queue: VecDeque<(DiskOp, Ticket)>,
}

impl Disk {
    fn new(blocks: &Rc<std::cell::RefCell<Blocks>>) -> Self {
        let geometry = Geometry {
            blocks: BlockCount(BLOCKS),
            logical_block: 4096,
            dma_alignment: 512,
            atomic_blocks: BlockCount(1),
            transfer_blocks_max: BlockCount(256),
            queue_depth_max: 64,
            write_cache: WriteCache::None,
            discards: false,
        };
        Self { geometry, blocks: Rc::clone(blocks), queue: VecDeque::new() }
    }

    fn complete(&self, op: &mut DiskOp) -> Result<(), DiskError> {
        let blocks = &mut *self.blocks.borrow_mut();
        let within = |lba: u64, count: usize| lba.checked_add(count as u64).is_some_and(|end| end <= BLOCKS);
        match op {
            DiskOp::Read { lba, buffer } => {
                if !within(lba.0, buffer.len() / BLOCK) {
                    return Err(DiskError::Invalid);
                }
                for (block, at) in buffer.chunks_exact_mut(BLOCK).zip(lba.0..) {
                    match blocks.get(&at) {
                        Some(found) => block.copy_from_slice(found),
                        None => block.fill(0),
                    }
                }
            }
            DiskOp::Write { lba, data, .. } => {
                let count = data.iter().map(|piece| piece.len() / BLOCK).sum();
                assert!(within(lba.0, count), "a write beyond the device");
                let all = data.iter().flat_map(|piece| piece.chunks_exact(BLOCK));
                blocks.extend((lba.0..).zip(all.map(Rc::from)));
            }
            DiskOp::Flush => {}
            DiskOp::Discard { .. } | DiskOp::WriteZeroes { .. } => panic!("the store does not use it here"),
        }
        Ok(())
    }
}

impl BlockDevice for Disk {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        if self.queue.len() >= self.geometry.queue_depth_max as usize {
            return Err(QueueFull(op));
        }
        self.queue.push_back((op, ticket));
        Ok(())
    }

    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32 {
        let count = self.queue.len().min(budget as usize);
        for _ in 0..count {
            let (mut op, ticket) = self.queue.pop_front().expect("counted");
            let result = self.complete(&mut op);
            done.push_back(Completion { ticket, result, op });
        }
        count as u32
    }

    fn in_flight(&self) -> u32 {
        self.queue.len() as u32
    }
}

fn run(input: &[u8]) {
    thread_local!(static BASES: Vec<(Blocks, Vec<u64>)> = bases());
    let mut input = Input(input);
    let base = usize::from(input.u8());
    let mut blocks = BASES.with(|bases| {
        let (blocks, ours) = &bases[base % bases.len()];
        let mut blocks = blocks.clone();
        for _ in 0..CHANGES_MAX {
            if input.is_empty() {
                break;
            }
            change(&mut blocks, ours, &mut input);
        }
        blocks
    });
    with_pool(POOL, |pool| {
        for turn in 0..2 {
            let shared = Rc::new(std::cell::RefCell::new(std::mem::take(&mut blocks)));
            let mounted = use_device(&shared, pool, turn);
            blocks = shared.take();
            assert!(turn == 0 || mounted, "what was mounted and written to can be mounted again");
            if !mounted {
                break;
            }
        }
    });
}

/// One change of one block: which, how, whether its checksum and address are made right, and with what.
fn change(blocks: &mut Blocks, ours: &[u64], input: &mut Input<'_>) {
    let how = input.u8();
    let at = ours[usize::from(input.u16()) % ours.len()];
    let mut block = blocks.get(&at).map_or_else(|| vec![0; BLOCK], |block| block.to_vec());
    let place = usize::from(input.u16()) % BLOCK;
    match how % 8 {
        0 => block[place] ^= input.u8(),
        1 => block[place] = input.u8(),
        2 | 3 => put(&mut block, HEAD + place % 128, &input.u64().to_le_bytes()),
        4 => put(&mut block, place, &input.u32().to_le_bytes()),
        5 => put(&mut block, HEAD + place % 256, input.chunk()),
        6 => {
            let other = ours[usize::from(input.u16()) % ours.len()];
            block = blocks.get(&other).map_or_else(|| vec![0; BLOCK], |block| block.to_vec());
        }
        _ => block.fill(0),
    }
    if how & 0x80 == 0 {
        block[..4].copy_from_slice(b"LOLI");
        block[56..64].copy_from_slice(&at.to_le_bytes());
        let crc = crc32c(&block[8..]);
        block[4..8].copy_from_slice(&crc.to_le_bytes());
    }
    blocks.insert(at, block.into());
}

fn put(block: &mut [u8], at: usize, bytes: &[u8]) {
    let len = bytes.len().min(block.len() - at);
    block[at..at + len].copy_from_slice(&bytes[..len]);
}

/// Probes, mounts every shard, reads all and writes to one. Whether everything could be mounted.
fn use_device(blocks: &Rc<std::cell::RefCell<Blocks>>, pool: &BufferPool, turn: u64) -> bool {
    let mut now = Instant(turn * 1_000_000_000);
    let mut probe = Probe::new(Disk::new(blocks), pool.clone());
    let probed = (0..POLLS_MAX).find_map(|_| probe.poll(now)).expect("a probe ends");
    let Ok(probed) = probed else { return false };
    let mut stores = Vec::new();
    for shard in 0..probed.superblock.shards {
        let mut mount = Mount::new(
            Disk::new(blocks),
            ShardId(shard),
            std::sync::Arc::clone(&probed.chunks),
            pool.clone(),
        );
        let mounted = (0..POLLS_MAX).find_map(|_| {
            now.0 += 1000;
            mount.poll(now)
        });
        match mounted.expect("a mount ends") {
            Ok(store) => stores.push(store),
            Err(error) => assert!(!error.to_string().is_empty(), "an error says what is wrong"),
        }
    }
    let all = stores.len() == usize::from(probed.superblock.shards);
    for mut store in stores {
        assert!(store.memory() < MEMORY_MAX, "{} bytes of tables", store.memory());
        store.audit().expect("every block has one owner");
        read_everything(&mut store, &mut now);
        write_something(&mut store, pool, &mut now, turn);
        store.audit().expect("every block has one owner after writing");
    }
    all
}

fn poll_until(
    store: &mut Store<Disk>,
    now: &mut Instant,
    what: &str,
    mut done: impl FnMut(&Store<Disk>, &mut VecDeque<StoreEvent>) -> bool,
) {
    let mut events = VecDeque::new();
    for _ in 0..POLLS_MAX {
        now.0 += 1_000_000;
        store.poll(*now, &mut events);
        if done(store, &mut events) {
            return;
        }
    }
    panic!("{what} does not end");
}

fn read_everything(store: &mut Store<Disk>, now: &mut Instant) {
    let pgs: Vec<_> = store.pgs().map(|(pg, _)| pg).collect();
    for pg in pgs.into_iter().take(8) {
        let objects: Vec<_> =
            store.objects(pg, ObjectId::default()).map(|(object, _)| object).take(8).collect();
        for object in objects {
            let extents: Vec<_> = store.extents(object, 0, 8192).take(8).collect();
            for (block, count) in extents {
                let count = count.min(256);
                if store.read(object, pg, block, count, Ticket(1)).is_err() {
                    continue;
                }
                poll_until(store, now, "a read", |_, events| {
                    events.drain(..).any(|event| matches!(event, StoreEvent::Read { .. }))
                });
            }
        }
        if let Some(status) = store.pg(pg)
            && let Some(entries) = store.entries_since(pg, ObjectVersion::NONE)
        {
            assert!(entries.take(10_000).all(|entry| entry.version <= status.last));
        }
    }
}

/// A new PG and a write into it, then a checkpoint. A device may refuse for want of space.
fn write_something(store: &mut Store<Disk>, pool: &BufferPool, now: &mut Instant, turn: u64) {
    let pg = PgId { pool: PoolId(77), index: 0 };
    let last = store.pg(pg).map_or(ObjectVersion::NONE, |status| status.last);
    let Some(sequence) = last.sequence.checked_add(1) else { return };
    let version = ObjectVersion { sequence, interval: last.interval.max(Epoch(1)), ..last };
    let object = ObjectId { pool: pg.pool, kind: ObjectKind::Data, image: ImageId(99), index: turn };
    let data = pool.copy_of(&[turn as u8 + 1; BLOCK]).expect("room");
    let checksums = pool.copy_of(&crc32c(&data).to_le_bytes()).expect("room");
    let meta = Change::Meta(PgMeta { promised: Epoch(1), activated: Epoch(1) });
    let write = Change::Write { object, block: 3, data, checksums };
    for (version, previous, change) in
        [(ObjectVersion::NONE, ObjectVersion::NONE, meta), (version, last, write)]
    {
        let (op, lowest_outstanding, snap_seq) = (OpId::default(), 0, 0);
        let tx = Transaction { pg, version, previous, op, lowest_outstanding, snap_seq, change };
        if !submit(store, &tx, now) {
            return;
        }
    }
    let before = store.checkpoints();
    store.request_checkpoint();
    poll_until(store, now, "a checkpoint", |store, _| {
        store.checkpoints() > before && store.is_quiet() || store.failed().is_some()
    });
}

fn submit(store: &mut Store<Disk>, tx: &Transaction, now: &mut Instant) -> bool {
    let mut taken = false;
    let mut refused = false;
    for _ in 0..1000 {
        match store.submit(tx.clone(), Ticket(2)) {
            Ok(()) => taken = true,
            Err(SubmitError::Busy) => {}
            Err(_) => refused = true,
        }
        if taken || refused {
            break;
        }
        now.0 += 1_000_000;
        store.poll(*now, &mut VecDeque::new());
    }
    if taken {
        poll_until(store, now, "a commit", |_, events| {
            events
                .drain(..)
                .any(|event| matches!(event, StoreEvent::Committed { .. } | StoreEvent::Failed { .. }))
        });
    }
    taken
}

/// Devices to change: new, used with log and checkpoint, and one of two shards. With each the blocks that are ours.
fn bases() -> Vec<(Blocks, Vec<u64>)> {
    [(1, false), (1, true), (2, true)]
        .map(|(shards, used)| {
            let blocks = with_pool(POOL, |pool| make_device(shards, used, pool));
            let ours =
                blocks.iter().filter(|(_, block)| block[..4] == *b"LOLI").map(|(lba, _)| *lba).collect();
            (blocks, ours)
        })
        .into()
}

fn make_device(shards: u16, used: bool, pool: &BufferPool) -> Blocks {
    let blocks = Rc::new(std::cell::RefCell::new(Blocks::new()));
    let options = FormatOptions {
        cluster: ClusterId(uuid::Uuid::from_u128(1)),
        osd: OsdId(3),
        device: DeviceId(uuid::Uuid::from_u128(2)),
        shards,
        write_fully: false,
        force: false,
    };
    let mut mkfs = Mkfs::new(Disk::new(&blocks), options, pool.clone());
    let done = (0..POLLS_MAX).find_map(|_| mkfs.poll(Instant(0)).done).expect("mkfs ends");
    done.expect("the device is large enough");
    if used {
        let mut probe = Probe::new(Disk::new(&blocks), pool.clone());
        let probed =
            (0..POLLS_MAX).find_map(|_| probe.poll(Instant(0))).expect("a probe ends").expect("a device");
        for shard in 0..shards {
            let chunks = std::sync::Arc::clone(&probed.chunks);
            let mut mount = Mount::new(Disk::new(&blocks), ShardId(shard), chunks, pool.clone());
            let store = (0..POLLS_MAX).find_map(|_| mount.poll(Instant(1))).expect("a mount ends");
            fill(&mut store.expect("a good device"), pool);
        }
    }
    blocks.take()
}

/// Some life before a checkpoint and some after it.
fn fill(store: &mut Store<Disk>, pool: &BufferPool) {
    let mut now = Instant(1_000_000);
    let mut last = BTreeMap::new();
    for step in 0..80u64 {
        let pg = PgId { pool: PoolId(1), index: (step % 3) as u32 };
        let previous = *last.get(&pg).unwrap_or(&ObjectVersion::NONE);
        let mut version = ObjectVersion { interval: Epoch(1), stream: 0, sequence: previous.sequence + 1 };
        let object = ObjectId { pool: pg.pool, kind: ObjectKind::Data, image: ImageId(5), index: step % 6 };
        let change = match step {
            0..=2 => Change::Meta(PgMeta { promised: Epoch(1), activated: Epoch(1) }),
            _ if step % 11 == 10 => Change::Remove { object },
            _ if step % 7 == 6 => Change::Free { object, block: 1, count: 2 },
            _ if step % 13 == 12 => Change::Result,
            _ => {
                let count = 1 + (step % 4) as usize;
                let data = pool.copy_of(&vec![step as u8 | 1; count * BLOCK]).expect("room");
                let sums: Vec<u8> =
                    data.chunks_exact(BLOCK).flat_map(|block| crc32c(block).to_le_bytes()).collect();
                let checksums = pool.copy_of(&sums).expect("room");
                Change::Write { object, block: (step % 9) as u32 * 3, data, checksums }
            }
        };
        if step < 3 {
            version = ObjectVersion::NONE;
        }
        let op = OpId { session: SessionId(1 + step % 2), number: step };
        let tx = Transaction { pg, version, previous, op, lowest_outstanding: 0, snap_seq: 0, change };
        assert!(submit(store, &tx, &mut now), "a good device takes it");
        last.insert(pg, version);
        if step == 50 {
            store.request_checkpoint();
            poll_until(store, &mut now, "a checkpoint", |store, _| {
                store.checkpoints() > 0 && store.is_quiet()
            });
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for base in 0..3u8 {
        seeds.push(vec![base]);
        for at in 0..96u16 {
            let block = at.to_le_bytes();
            let field = (at % 40).to_le_bytes();
            let wrong = u64::MAX.to_le_bytes();
            seeds.push([&[base, 2][..], &block, &field, &wrong].concat());
            seeds.push([&[base, 5][..], &block, &field, &chunk(&[0xff; 6])].concat());
        }
    }
    seeds
}
