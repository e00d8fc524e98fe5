//! A disk in memory with a volatile cache: a power cut keeps any of what was not yet durable.

use loligo_config::units::{BLOCK_SIZE, BlockCount};
use loligo_reactor::env::{
    BlockDevice, Completion, Completions, DiskOp, Geometry, QueueFull, Ticket, WriteCache,
};
use loligo_reactor::random::Random;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

const BLOCK: usize = BLOCK_SIZE as usize;

#[derive(Debug, Default)]
pub struct Media {
    durable: BTreeMap<u64, Vec<u8>>,
    /// Written or being written, not durable.
    cache: BTreeMap<u64, Vec<u8>>,
    /// Of those the ones being written, through whichever queue.
    writing: BTreeSet<u64>,
}

impl Media {
    pub fn power_cut(&mut self, random: &mut Random) {
        self.writing.clear();
        for (lba, block) in std::mem::take(&mut self.cache) {
            if random.below(2) == 0 {
                self.durable.insert(lba, block);
            }
        }
    }
}

/// One queue of a disk; several share its media.
#[derive(Debug)]
pub struct Disk {
    media: Rc<RefCell<Media>>,
    geometry: Geometry,
    pending: Vec<(DiskOp, Ticket)>,
    random: Random,
}

impl Disk {
    pub fn new(media: &Rc<RefCell<Media>>, blocks: u64, seed: u64) -> Self {
        let geometry = Geometry {
            blocks: BlockCount(blocks),
            logical_block: 512,
            dma_alignment: 512,
            atomic_blocks: BlockCount(1),
            transfer_blocks_max: BlockCount(512),
            queue_depth_max: 64,
            write_cache: WriteCache::Volatile,
            discards: false,
        };
        Self { media: Rc::clone(media), geometry, pending: Vec::new(), random: Random::new(seed) }
    }
}

impl BlockDevice for Disk {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        if self.pending.len() >= 64 {
            return Err(QueueFull(op));
        }
        if let DiskOp::Write { lba, data, .. } = &op {
            let blocks = data.iter().flat_map(|piece| piece.chunks(BLOCK));
            let mut media = self.media.borrow_mut();
            for (at, block) in (lba.0..).zip(blocks) {
                media.cache.insert(at, block.to_vec());
                assert!(media.writing.insert(at), "block {at} is being written already");
            }
        }
        self.pending.push((op, ticket));
        Ok(())
    }

    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32 {
        let mut count = 0;
        while count < budget && !self.pending.is_empty() && self.random.below(3) != 0 {
            let at = self.random.below(self.pending.len() as u64) as usize;
            let (mut op, ticket) = self.pending.remove(at);
            let mut media = self.media.borrow_mut();
            match &mut op {
                DiskOp::Read { lba, buffer } => {
                    for (at, block) in (lba.0..).zip(buffer.chunks_mut(BLOCK)) {
                        match media.cache.get(&at).or_else(|| media.durable.get(&at)) {
                            Some(bytes) => block.copy_from_slice(bytes),
                            None => block.fill(0),
                        }
                    }
                }
                DiskOp::Write { lba, data, fua } => {
                    let blocks: usize = data.iter().map(|piece| piece.len() / BLOCK).sum();
                    for at in lba.0..lba.0 + blocks as u64 {
                        media.writing.remove(&at);
                        if *fua {
                            let block = media.cache.remove(&at).expect("it is being written");
                            media.durable.insert(at, block);
                        }
                    }
                }
                DiskOp::Flush => {
                    // What is still being written is not in the cache yet; keeping it there is allowed too.
                    let Media { durable, cache, writing } = &mut *media;
                    for (lba, block) in std::mem::take(cache) {
                        let place = if writing.contains(&lba) { &mut *cache } else { &mut *durable };
                        place.insert(lba, block);
                    }
                }
                _ => {}
            }
            done.push_back(Completion { ticket, result: Ok(()), op });
            count += 1;
        }
        count
    }

    fn in_flight(&self) -> u32 {
        self.pending.len() as u32
    }
}
