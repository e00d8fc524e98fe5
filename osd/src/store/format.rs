//! mkfs and probe.

use super::codec::BLOCK;
use super::layout::{Anchor, Superblock, encode_claim};
use super::write_op;
use loligo_config::id::{ClusterId, DeviceId, OsdId, ShardId};
use loligo_config::limits::SHARDS_MAX;
use loligo_config::units::Lba;
use loligo_reactor::dma::{Buffer, BufferPool, SharedBuffer};
use loligo_reactor::env::{
    BlockDevice, Completions, DiskError, DiskOp, Instant, QueueFull, Ticket, WriteCache, WriteList,
};
use std::collections::VecDeque;

mod head;
mod probe;

use head::Head;
pub use probe::{Probe, ProbeError, Probed};

/// Blocks of one write of zeroes: 1 MiB.
const ZERO_BLOCKS: u64 = 256;
/// Operations in flight.
const DEPTH: u32 = 8;

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
    #[error("the device was a Loligo device, but both its superblocks are damaged, or its mkfs did not end")]
    Damaged,
    /// Something else that was recognised.
    #[error("the device holds {0}")]
    Foreign(&'static str),
    /// Data of an unknown kind.
    #[error("the device holds data of an unknown kind and is not a Loligo device")]
    Unknown,
    /// Only zeroes where a superblock would be.
    #[error("the device is empty: it was not formatted with mkfs, or that did not end")]
    Empty,
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
    /// The superblocks that are there, if any.
    Erase,
    Zero,
    /// Chunk claims and anchors.
    Tables,
    Flush,
    Superblocks,
    LastFlush,
    Done,
}

/// Formats a device: the old superblocks go first, durably, then zeroes, the chunk table and the anchors are written,
/// and the new superblocks last, so that a device whose mkfs was interrupted is not taken for a good one, nor for what
/// it was before.
#[derive(Debug)]
pub struct Mkfs<D> {
    device: Option<D>,
    options: FormatOptions,
    pool: BufferPool,
    plan: Option<Superblock>,
    step: Step,
    head: Head,
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
            head: Head::new(blocks),
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
        if !self.head.reads(&self.pool, &mut self.queue) {
            self.error = Some(MkfsError::Device { lba: 0, error: DiskError::Io { errno: 12 } });
        }
    }

    /// Goes on. After `done` it must not be called again.
    ///
    /// # Panics
    /// If it is called after `done`.
    pub fn poll(&mut self, _now: Instant) -> MkfsProgress<D> {
        let device = self.device.as_mut().expect("mkfs is not polled after its end");
        device.poll(DEPTH, &mut self.done);
        while let Some(completion) = self.done.pop_front() {
            match (completion.op, completion.result) {
                (DiskOp::Read { lba, buffer }, Ok(())) => self.looked(lba.0, Ok(&buffer)),
                (DiskOp::Read { lba, .. }, Err(error)) => self.looked(lba.0, Err(error)),
                (op, Ok(())) => self.written(&op),
                (op, Err(error)) => self.failed(first_block(&op), error),
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

    fn failed(&mut self, lba: u64, error: DiskError) {
        self.error.get_or_insert(MkfsError::Device { lba, error });
    }

    fn written(&mut self, op: &DiskOp) {
        if let DiskOp::Write { data, .. } = op {
            let len: usize = data.iter().map(|piece| piece.len()).sum();
            self.written = self.total.min(self.written + (len / BLOCK) as u64);
        }
    }

    fn looked(&mut self, lba: u64, block: Result<&[u8], DiskError>) {
        // A device that fails is not formatted; blocks that cannot be read are no reason to keep what is there.
        if let Err(error) = block
            && !(self.options.force && matches!(error, DiskError::Media { .. }))
        {
            self.failed(lba, error);
        }
        if !self.head.take(lba, block) || self.options.force {
            return;
        }
        let found = match self.head.contents() {
            Ok(found) => Contents::Loligo { cluster: found.cluster, osd: found.osd },
            Err(Contents::Empty) => return,
            Err(other) => other,
        };
        self.error.get_or_insert(MkfsError::InUse(found));
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
                self.queue_erase();
                Step::Erase
            }
            Step::Erase => self.queue_flush(Step::Zero),
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

    /// From here on the device is no longer what it was.
    fn queue_erase(&mut self) {
        let blocks = self.zeroes.as_ref().map(|zeroes| zeroes.slice(0..2 * BLOCK));
        self.queue.extend(blocks.map(|blocks| write_op(0, blocks, false)));
    }

    /// Queues the next blocks of claims and anchors; false if there are none left.
    fn queue_tables(&mut self) -> bool {
        let plan = self.plan.expect("checked at the start");
        let transfer = self.device.as_ref().map_or(1, |device| device.geometry().transfer_blocks_max.0);
        let mut any = false;
        while self.queue.len() < DEPTH as usize {
            if self.next < plan.chunks {
                let count = (plan.chunks - self.next).min(transfer.min(16));
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
