//! Probe: whose a device is, and its chunk table.

use super::head::Head;
use super::{Contents, DEPTH, first_block};
use crate::store::chunks::ChunkTable;
use crate::store::codec::BLOCK;
use crate::store::layout::{Claim, Superblock, decode_claim};
use loligo_config::id::{ClusterId, OsdId};
use loligo_config::units::Lba;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{
    BlockDevice, Completion, Completions, DiskError, DiskOp, Instant, QueueFull, Ticket,
};
use std::collections::VecDeque;
use std::sync::Arc;

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
    head: Head,
    superblock: Option<Superblock>,
    /// One per chunk; what could not be read stays unknown.
    claims: Vec<Claim>,
    /// The first claim not asked for yet.
    next: u64,
    queue: VecDeque<DiskOp>,
    done: Completions,
    error: Option<ProbeError>,
}

impl<D: BlockDevice> Probe<D> {
    /// Nothing happens before the first `poll`.
    pub fn new(device: D, pool: BufferPool) -> Self {
        let blocks = device.geometry().blocks.0;
        let (head, mut queue) = (Head::new(blocks), VecDeque::new());
        let mut error = (blocks == 0).then_some(ProbeError::Contents(Contents::Empty));
        if !head.reads(&pool, &mut queue) {
            error = Some(no_memory(0));
        }
        let (done, claims) = (Completions::new(), Vec::new());
        let device = Some(device);
        Self { device, pool, head, superblock: None, claims, next: 0, queue, done, error }
    }

    /// Goes on; the result comes once.
    ///
    /// # Panics
    /// If it is called after the result.
    pub fn poll(&mut self, _now: Instant) -> Option<Result<Probed<D>, ProbeError>> {
        let device = self.device.as_mut().expect("a probe is not polled after its end");
        device.poll(DEPTH, &mut self.done);
        while let Some(completion) = self.done.pop_front() {
            self.completed(completion);
        }
        if self.error.is_some() {
            self.queue.clear();
        } else if self.queue.is_empty() && self.device.as_ref().is_some_and(|device| device.in_flight() == 0)
        {
            self.read_claims();
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

    fn completed(&mut self, completion: Completion) {
        let lba = first_block(&completion.op);
        let DiskOp::Read { buffer, .. } = completion.op else { return };
        if let Err(error) = completion.result
            && !matches!(error, DiskError::Media { .. })
        {
            self.error.get_or_insert(ProbeError::Device { lba, error });
        }
        let blocks = completion.result.map(|()| &buffer[..]);
        let Some(superblock) = self.superblock else {
            if self.head.take(lba, blocks) {
                self.looked();
            }
            return;
        };
        let (first, count) = (lba - superblock.claim_lba(0), buffer.len() / BLOCK);
        match blocks {
            Ok(blocks) => {
                for (block, chunk) in blocks.chunks_exact(BLOCK).zip(first..) {
                    self.claims[chunk as usize] = decode_claim(block, &superblock, chunk);
                }
            }
            // One of them cannot be read, which must not hide the others.
            Err(_) if count > 1 => (lba..lba + count as u64).for_each(|lba| self.read(lba, 1)),
            Err(_) => (),
        }
    }

    fn looked(&mut self) {
        let blocks = self.device.as_ref().map_or(0, |device| device.geometry().blocks.0);
        match (self.head.contents(), self.head.unreadable) {
            (Ok(superblock), _) if blocks < superblock.blocks => {
                self.error.get_or_insert(ProbeError::Shrunk { blocks, formatted: superblock.blocks });
            }
            (Ok(superblock), _) => {
                self.superblock = Some(superblock);
                self.claims = vec![Claim::Unknown; superblock.chunks as usize];
            }
            (Err(_), Some((lba, error))) => {
                self.error.get_or_insert(ProbeError::Device { lba, error });
            }
            (Err(contents), None) => {
                self.error.get_or_insert(ProbeError::Contents(contents));
            }
        }
    }

    /// Claims are read one read behind the other: they are few, and it happens once per start.
    fn read_claims(&mut self) {
        let Some(superblock) = self.superblock else { return };
        let step = self.device.as_ref().map_or(1, |device| device.geometry().transfer_blocks_max.0.min(1024));
        let count = (superblock.chunks - self.next).min(step);
        if count > 0 {
            self.read(superblock.claim_lba(self.next), count);
            self.next += count;
        }
    }

    fn read(&mut self, lba: u64, count: u64) {
        match self.pool.alloc(count as usize * BLOCK) {
            Ok(buffer) => self.queue.push_back(DiskOp::Read { lba: Lba(lba), buffer }),
            Err(_) => self.error = Some(no_memory(lba)),
        }
    }
}

fn no_memory(lba: u64) -> ProbeError {
    ProbeError::Device { lba, error: DiskError::Io { errno: 12 } }
}
