//! mkfs and probe.

use super::chunks::ChunkTable;
use super::codec::BLOCK;
use super::layout::{Anchor, Claim, Superblock, decode_claim, encode_claim};
use super::write_op;
use loligo_config::id::{ClusterId, DeviceId, OsdId, ShardId};
use loligo_config::limits::SHARDS_MAX;
use loligo_config::units::Lba;
use loligo_reactor::dma::{Buffer, BufferPool, SharedBuffer};
use loligo_reactor::env::{
    BlockDevice, Completions, DiskError, DiskOp, Instant, QueueFull, Ticket, WriteCache, WriteList,
};
use std::collections::VecDeque;
use std::sync::Arc;

/// Blocks of one write of zeroes: 1 MiB.
const ZERO_BLOCKS: u64 = 256;
/// Operations in flight.
const DEPTH: u32 = 8;
/// Blocks looked at to say what else is on a device: 72 KiB, where the superblocks of common file systems are.
const FOREIGN_BLOCKS: u64 = 18;

/// What mkfs is to make.
#[derive(Clone, Copy, Debug)]
pub struct FormatOptions {
    /// The cluster.
    pub cluster: ClusterId,
    /// The OSD.
    pub osd: OsdId,
    /// The device's identity, drawn at random.
    pub device: DeviceId,
    /// How many shards share it: as many as the OSD has reactors.
    pub shards: u16,
    /// Write every block, so that a file has its space and a first write costs what every write costs.
    pub write_fully: bool,
    /// Format a device that holds something.
    pub force: bool,
}

/// Why a device could not be formatted. Nothing was changed unless it says so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MkfsError {
    /// Too small.
    #[error("the device has {blocks} blocks of 4 KiB; {shards} shard(s) need at least {least} ({} MiB)", .least.div_ceil(256))]
    TooSmall {
        /// Its blocks.
        blocks: u64,
        /// The shards asked for.
        shards: u16,
        /// The blocks that they need.
        least: u64,
    },
    /// More shards than there may be, or none.
    #[error("{0} shards: there may be 1 to {SHARDS_MAX}")]
    Shards(u16),
    /// It holds something.
    #[error("{0}; use --force to overwrite it")]
    InUse(Contents),
    /// The device failed; it may be changed in part.
    #[error("the device failed at block {lba}: {error}")]
    Device {
        /// The first block of the failed operation.
        lba: u64,
        /// Why.
        error: DiskError,
    },
}

/// What is on a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Contents {
    /// A Loligo device.
    #[error("the device belongs to {osd} of cluster {cluster}")]
    Loligo {
        /// Its cluster.
        cluster: ClusterId,
        /// Its OSD.
        osd: OsdId,
    },
    /// A Loligo device with a format that this version does not know.
    #[error("the device has Loligo format {found}, this program knows format {}", super::FORMAT)]
    OtherFormat {
        /// Its format.
        found: u16,
    },
    /// Both superblocks of a Loligo device are unreadable.
    #[error("the device was a Loligo device, but both its superblocks are damaged")]
    Damaged,
    /// Something else that was recognised.
    #[error("the device holds {0}")]
    Foreign(&'static str),
    /// Data of an unknown kind.
    #[error("the device holds data of an unknown kind and is not a Loligo device")]
    Unknown,
    /// Only zeroes where a superblock would be.
    #[error("the device is empty: it was not formatted with mkfs")]
    Empty,
}

/// Why a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// It is not a Loligo device that this program knows.
    #[error("not a usable device: {0}")]
    Contents(Contents),
    /// It is another cluster's or OSD's.
    #[error("the device belongs to {found_osd} of cluster {found}, not to {osd} of cluster {cluster}")]
    Other {
        /// The cluster it belongs to.
        found: ClusterId,
        /// The OSD it belongs to.
        found_osd: OsdId,
        /// The cluster expected.
        cluster: ClusterId,
        /// The OSD expected.
        osd: OsdId,
    },
    /// It has become smaller.
    #[error("the device has {blocks} blocks, but had {formatted} when it was formatted")]
    Shrunk {
        /// Its blocks.
        blocks: u64,
        /// Its blocks at mkfs.
        formatted: u64,
    },
    /// It could not be read.
    #[error("the device could not be read at block {lba}: {error}")]
    Device {
        /// The first block of the failed read.
        lba: u64,
        /// Why.
        error: DiskError,
    },
}

impl Superblock {
    /// Checks that the device is the one that is meant.
    ///
    /// # Errors
    /// `Other` names both.
    pub fn expect(&self, cluster: ClusterId, osd: OsdId) -> Result<(), ProbeError> {
        if self.cluster == cluster && self.osd == osd {
            return Ok(());
        }
        Err(ProbeError::Other { found: self.cluster, found_osd: self.osd, cluster, osd })
    }
}

/// What the first blocks of a device say.
fn contents(head: &[u8]) -> Result<Superblock, Contents> {
    let copies = head.chunks_exact(BLOCK).zip(0u64..2);
    if let Some(found) = copies.filter_map(|(block, lba)| Superblock::decode(block, lba)).next() {
        return Ok(found);
    }
    if let Some(block) = head.chunks_exact(BLOCK).take(2).find(|block| block[..4] == super::codec::MAGIC) {
        let found = u16::from_le_bytes([block[10], block[11]]);
        return Err(if found == super::FORMAT { Contents::Damaged } else { Contents::OtherFormat { found } });
    }
    let has = |at: usize, magic: &[u8]| head.get(at..at + magic.len()) == Some(magic);
    // Places of the magic numbers as file(1) and libblkid know them.
    let foreign = [
        (1080, &b"\x53\xef"[..], "an ext2/3/4 file system"),
        (0, b"XFSB", "an XFS file system"),
        (65_600, b"_BHRfS_M", "a btrfs file system"),
        (512, b"EFI PART", "a GPT partition table"),
        (510, b"\x55\xaa", "an MBR partition table or boot sector"),
        (512, b"LABELONE", "an LVM physical volume"),
        (0, b"LUKS\xba\xbe", "a LUKS volume"),
        (4086, b"SWAPSPACE2", "swap space"),
        (0, b"bluestore block device", "a Ceph BlueStore device"),
        (0, b"QFI\xfb", "a qcow2 image"),
    ];
    if let Some((_, _, name)) = foreign.iter().find(|(at, magic, _)| has(*at, magic)) {
        return Err(Contents::Foreign(name));
    }
    Err(if head.iter().all(|byte| *byte == 0) { Contents::Empty } else { Contents::Unknown })
}

/// How far mkfs is.
#[derive(Debug)]
pub struct MkfsProgress<D> {
    /// Blocks written.
    pub written: u64,
    /// Blocks to write.
    pub total: u64,
    /// The end: the device, ready to be mounted, or why not.
    pub done: Option<Result<D, MkfsError>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Look,
    Zero,
    /// Chunk claims and anchors.
    Tables,
    Flush,
    Superblocks,
    LastFlush,
    Done,
}

/// Formats a device: zeroes, then the chunk table and the anchors, and the superblocks last, so that a device whose
/// mkfs was interrupted is not taken for a good one.
#[derive(Debug)]
pub struct Mkfs<D> {
    device: Option<D>,
    options: FormatOptions,
    pool: BufferPool,
    plan: Option<Superblock>,
    step: Step,
    queue: VecDeque<DiskOp>,
    done: Completions,
    zeroes: Option<SharedBuffer>,
    next: u64,
    written: u64,
    total: u64,
    error: Option<MkfsError>,
}

impl<D: BlockDevice> Mkfs<D> {
    /// Nothing happens before the first `poll`.
    pub fn new(device: D, options: FormatOptions, pool: BufferPool) -> Self {
        let blocks = device.geometry().blocks.0;
        let FormatOptions { cluster, osd, device: id, shards, .. } = options;
        let plan = Superblock::plan(cluster, osd, id, shards, blocks);
        let mut error = None;
        if shards == 0 || usize::from(shards) > SHARDS_MAX {
            error = Some(MkfsError::Shards(shards));
        } else if plan.is_none() {
            error = Some(MkfsError::TooSmall { blocks, shards, least: Superblock::blocks_min(shards) });
        }
        let total = if options.write_fully { blocks } else { plan.map_or(0, |plan| plan.chunk_lba(0)) };
        let (queue, done) = (VecDeque::new(), Completions::new());
        let (device, step, zeroes) = (Some(device), Step::Look, None);
        let mut mkfs = Self {
            device,
            options,
            pool,
            plan,
            step,
            queue,
            done,
            zeroes,
            next: 0,
            written: 0,
            total,
            error,
        };
        if mkfs.error.is_none() {
            mkfs.look();
        }
        mkfs
    }

    fn look(&mut self) {
        let Ok(buffer) = self.pool.alloc(FOREIGN_BLOCKS as usize * BLOCK) else {
            self.error = Some(MkfsError::Device { lba: 0, error: DiskError::Io { errno: 12 } });
            return;
        };
        self.queue.push_back(DiskOp::Read { lba: Lba(0), buffer });
    }

    /// Goes on. After `done` it must not be called again.
    ///
    /// # Panics
    /// If it is called after `done`.
    pub fn poll(&mut self, _now: Instant) -> MkfsProgress<D> {
        let device = self.device.as_mut().expect("mkfs is not polled after its end");
        device.poll(DEPTH, &mut self.done);
        while let Some(completion) = self.done.pop_front() {
            if let Err(error) = completion.result {
                let lba = first_block(&completion.op);
                self.error.get_or_insert(MkfsError::Device { lba, error });
            } else {
                self.completed(completion.op);
            }
        }
        if self.error.is_none() {
            self.feed();
        } else {
            self.queue.clear();
        }
        let device = self.device.as_mut().expect("still here");
        while let Some(op) = self.queue.pop_front() {
            if let Err(QueueFull(op)) = device.submit(op, Ticket(0)) {
                self.queue.push_front(op);
                break;
            }
        }
        let idle = self.queue.is_empty() && device.in_flight() == 0 && self.done.is_empty();
        let mut result = None;
        if idle && (self.error.is_some() || self.step == Step::Done) {
            let device = self.device.take().expect("still here");
            result = Some(match self.error.take() {
                Some(error) => Err(error),
                None => Ok(device),
            });
        }
        MkfsProgress { written: self.written, total: self.total, done: result }
    }

    fn completed(&mut self, op: DiskOp) {
        match op {
            DiskOp::Read { buffer, .. } => self.looked(&buffer),
            DiskOp::Write { data, .. } => {
                let len: usize = data.iter().map(|piece| piece.len()).sum();
                self.written = self.total.min(self.written + (len / BLOCK) as u64);
            }
            _ => (),
        }
    }

    fn looked(&mut self, head: &Buffer) {
        let found = match contents(head) {
            Ok(found) => Contents::Loligo { cluster: found.cluster, osd: found.osd },
            Err(Contents::Empty) => return,
            Err(other) => other,
        };
        if !self.options.force {
            self.error = Some(MkfsError::InUse(found));
        }
    }

    /// Queues what comes next when the step before is complete.
    fn feed(&mut self) {
        let device = self.device.as_ref().expect("still here");
        let in_flight = device.in_flight() as usize + self.queue.len();
        if self.step == Step::Zero {
            let end = self.total;
            while self.next < end && self.queue.len() + (device.in_flight() as usize) < DEPTH as usize {
                let step = ZERO_BLOCKS.min(device.geometry().transfer_blocks_max.0);
                let count = step.min(end - self.next);
                let Some(zeroes) = &self.zeroes else { return };
                let data = zeroes.slice(0..count as usize * BLOCK);
                self.queue.push_back(write_op(self.next, data, false));
                self.next += count;
            }
        }
        if in_flight > 0 || !self.queue.is_empty() {
            return;
        }
        let step = self.step;
        self.step = match step {
            Step::Look => {
                self.zeroes = self.pool.alloc_zeroed(ZERO_BLOCKS as usize * BLOCK).ok().map(Buffer::freeze);
                if self.zeroes.is_none() {
                    self.error = Some(MkfsError::Device { lba: 0, error: DiskError::Io { errno: 12 } });
                }
                Step::Zero
            }
            Step::Zero => {
                self.next = 0;
                Step::Tables
            }
            Step::Tables if self.queue_tables() => Step::Tables,
            Step::Tables => self.queue_flush(Step::Flush),
            Step::Flush => {
                self.queue_superblocks();
                Step::Superblocks
            }
            Step::Superblocks => self.queue_flush(Step::LastFlush),
            Step::LastFlush | Step::Done => Step::Done,
        };
    }

    fn queue_flush(&mut self, step: Step) -> Step {
        let device = self.device.as_ref().expect("still here");
        if device.geometry().write_cache == WriteCache::Volatile {
            self.queue.push_back(DiskOp::Flush);
        }
        step
    }

    /// Queues the next blocks of claims and anchors; false if there are none left.
    fn queue_tables(&mut self) -> bool {
        let plan = self.plan.expect("checked at the start");
        let mut any = false;
        while self.queue.len() < DEPTH as usize {
            if self.next < plan.chunks {
                let count = (plan.chunks - self.next).min(16);
                let Ok(mut blocks) = self.pool.alloc(count as usize * BLOCK) else { return true };
                for (block, chunk) in blocks.chunks_exact_mut(BLOCK).zip(self.next..) {
                    encode_claim(block, &plan, chunk, None);
                }
                self.queue.push_back(write_op(plan.claim_lba(self.next), blocks.freeze(), false));
                self.next += count;
            } else if self.next < plan.chunks + u64::from(plan.shards) {
                let shard = ShardId((self.next - plan.chunks) as u16);
                let Ok(mut blocks) = self.pool.alloc(2 * BLOCK) else { return true };
                let anchor = Anchor::empty();
                anchor.encode(&mut blocks, &plan, shard);
                self.queue.push_back(write_op(anchor.lba(&plan, shard), blocks.freeze(), false));
                self.next += 1;
            } else {
                break;
            }
            any = true;
        }
        any
    }

    fn queue_superblocks(&mut self) {
        let plan = self.plan.expect("checked at the start");
        let Ok(mut blocks) = self.pool.alloc(2 * BLOCK) else {
            self.error = Some(MkfsError::Device { lba: 0, error: DiskError::Io { errno: 12 } });
            return;
        };
        for (block, lba) in blocks.chunks_exact_mut(BLOCK).zip(0u64..) {
            block.fill(0);
            plan.encode(block, lba);
        }
        let data = WriteList::from_iter([blocks.freeze()]);
        self.queue.push_back(DiskOp::Write { lba: Lba(0), data, fua: false });
    }
}

fn first_block(op: &DiskOp) -> u64 {
    match op {
        DiskOp::Read { lba, .. }
        | DiskOp::Write { lba, .. }
        | DiskOp::Discard { lba, .. }
        | DiskOp::WriteZeroes { lba, .. } => lba.0,
        DiskOp::Flush => 0,
    }
}

/// A device that was recognised.
#[derive(Debug)]
pub struct Probed<D> {
    /// The device.
    pub device: D,
    /// What mkfs decided about it.
    pub superblock: Superblock,
    /// Its chunk table, to be shared by all shards of the process.
    pub chunks: Arc<ChunkTable>,
}

/// Reads superblock and chunk table. One probe serves all shards of a device.
#[derive(Debug)]
pub struct Probe<D> {
    device: Option<D>,
    pool: BufferPool,
    superblock: Option<Superblock>,
    claims: Vec<Claim>,
    queue: VecDeque<DiskOp>,
    done: Completions,
    error: Option<ProbeError>,
}

impl<D: BlockDevice> Probe<D> {
    /// Nothing happens before the first `poll`.
    pub fn new(device: D, pool: BufferPool) -> Self {
        let mut queue = VecDeque::new();
        let blocks = FOREIGN_BLOCKS.min(device.geometry().blocks.0);
        let buffer = pool.alloc(blocks as usize * BLOCK).ok().filter(|_| blocks > 0);
        queue.extend(buffer.map(|buffer| DiskOp::Read { lba: Lba(0), buffer }));
        let error = queue.is_empty().then_some(ProbeError::Contents(Contents::Empty));
        let (done, claims) = (Completions::new(), Vec::new());
        Self { device: Some(device), pool, superblock: None, claims, queue, done, error }
    }

    /// Goes on; the result comes once.
    ///
    /// # Panics
    /// If it is called after the result.
    pub fn poll(&mut self, _now: Instant) -> Option<Result<Probed<D>, ProbeError>> {
        let device = self.device.as_mut().expect("a probe is not polled after its end");
        device.poll(DEPTH, &mut self.done);
        while let Some(completion) = self.done.pop_front() {
            let DiskOp::Read { lba, buffer } = completion.op else { continue };
            match completion.result {
                Err(error) => self.error = Some(ProbeError::Device { lba: lba.0, error }),
                Ok(()) => self.read(&buffer),
            }
        }
        let device = self.device.as_mut().expect("still here");
        while let Some(op) = self.queue.pop_front() {
            if let Err(QueueFull(op)) = device.submit(op, Ticket(0)) {
                self.queue.push_front(op);
                break;
            }
        }
        if device.in_flight() > 0 || !self.queue.is_empty() {
            return None;
        }
        let device = self.device.take().expect("still here");
        Some(match (self.error.take(), self.superblock) {
            (None, Some(superblock)) => {
                let chunks = Arc::new(ChunkTable::new(superblock, &self.claims));
                Ok(Probed { device, superblock, chunks })
            }
            (error, _) => Err(error.unwrap_or(ProbeError::Contents(Contents::Damaged))),
        })
    }

    fn read(&mut self, blocks: &Buffer) {
        let Some(superblock) = self.superblock else {
            match contents(blocks) {
                Ok(superblock) => self.superblock = Some(superblock),
                Err(contents) => self.error = Some(ProbeError::Contents(contents)),
            }
            self.check_size();
            self.read_claims();
            return;
        };
        for block in blocks.chunks_exact(BLOCK) {
            self.claims.push(decode_claim(block, &superblock, self.claims.len() as u64));
        }
        self.read_claims();
    }

    fn check_size(&mut self) {
        let blocks = self.device.as_ref().map_or(0, |device| device.geometry().blocks.0);
        if let Some(superblock) = self.superblock.filter(|superblock| blocks < superblock.blocks) {
            self.error = Some(ProbeError::Shrunk { blocks, formatted: superblock.blocks });
        }
    }

    /// Claims are read one read behind the other: they are few, and it happens once per start.
    fn read_claims(&mut self) {
        let (Some(superblock), None) = (self.superblock, &self.error) else { return };
        let from = self.claims.len() as u64;
        let step = self.device.as_ref().map_or(1, |device| device.geometry().transfer_blocks_max.0.min(1024));
        let count = (superblock.chunks - from).min(step);
        if count == 0 {
            return;
        }
        match self.pool.alloc(count as usize * BLOCK) {
            Ok(buffer) => self.queue.push_back(DiskOp::Read { lba: Lba(superblock.claim_lba(from)), buffer }),
            Err(_) => self.error = Some(ProbeError::Device { lba: from, error: DiskError::Io { errno: 12 } }),
        }
    }
}
