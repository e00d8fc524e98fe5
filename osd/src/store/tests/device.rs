//! A device in memory: volatile cache, completions in any order, power cuts that keep, lose or tear what was not
//! durable, the N-th operation failing.

use crate::store::codec::BLOCK;
use loligo_config::units::BlockCount;
use loligo_reactor::env::{
    BlockDevice, Completion, Completions, DiskError, DiskOp, Geometry, QueueFull, Ticket, WriteCache,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Sebastiano Vigna's splitmix64: small, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}

type Block = Rc<[u8]>;

/// What one device holds, shared by its queue pairs.
#[derive(Debug)]
pub struct Media {
    pub geometry: Geometry,
    pub rng: Rng,
    durable: BTreeMap<u64, Block>,
    /// Completed but not durable, oldest first, with the number of the completion.
    cache: BTreeMap<u64, Vec<(u64, Block)>>,
    completions: u64,
    /// Writes handed over and not completed.
    writing: BTreeMap<u64, Block>,
    /// Fails the operation with this number, and with `sticky` all after it.
    pub fail_at: Option<u64>,
    pub sticky: bool,
    pub operations: u64,
    pub writes: u64,
    pub flushes: u64,
    /// Blocks that cannot be read.
    pub unreadable: Vec<u64>,
    /// Refuse some submissions, and complete in any order.
    pub chaos: bool,
    /// Completes nothing.
    pub hangs: bool,
}

impl Media {
    pub fn new(blocks: u64, seed: u64) -> Rc<RefCell<Self>> {
        let geometry = Geometry {
            blocks: BlockCount(blocks),
            logical_block: 512,
            dma_alignment: 512,
            atomic_blocks: BlockCount(0),
            transfer_blocks_max: BlockCount(512),
            queue_depth_max: 128,
            write_cache: WriteCache::Volatile,
            discards: false,
        };
        Rc::new(RefCell::new(Self {
            geometry,
            rng: Rng(seed),
            durable: BTreeMap::new(),
            cache: BTreeMap::new(),
            completions: 0,
            writing: BTreeMap::new(),
            fail_at: None,
            sticky: false,
            operations: 0,
            writes: 0,
            flushes: 0,
            unreadable: Vec::new(),
            chaos: true,
            hangs: false,
        }))
    }

    fn zero() -> Block {
        thread_local!(static ZERO: Block = Rc::from(vec![0; BLOCK]));
        ZERO.with(Rc::clone)
    }

    pub fn get(&self, lba: u64) -> Block {
        let cached = self.cache.get(&lba).and_then(|versions| versions.last()).map(|(_, block)| block);
        cached.or_else(|| self.durable.get(&lba)).cloned().unwrap_or_else(Self::zero)
    }

    /// Changes what is durable, as rot does.
    pub fn set(&mut self, lba: u64, block: &[u8]) {
        self.cache.remove(&lba);
        self.durable.insert(lba, Rc::from(block));
    }

    /// The power fails: each sector that was not durable keeps its old value or any of the newer ones.
    pub fn power_cut(&mut self) {
        let writing = std::mem::take(&mut self.writing);
        let mut cache = std::mem::take(&mut self.cache);
        for (lba, block) in writing {
            cache.entry(lba).or_default().push((u64::MAX, block));
        }
        for (lba, versions) in cache {
            let old = self.durable.get(&lba).cloned().unwrap_or_else(Self::zero);
            let pick = self.rng.below(4);
            let new = match pick {
                0 => old,
                1 => Rc::clone(&versions[self.rng.below(versions.len() as u64) as usize].1),
                2 => Rc::clone(&versions.last().expect("not empty").1),
                _ => {
                    let mut torn = old.to_vec();
                    for at in (0..BLOCK).step_by(512) {
                        let choice = self.rng.below(versions.len() as u64 + 1) as usize;
                        if let Some((_, version)) = versions.get(choice) {
                            torn[at..at + 512].copy_from_slice(&version[at..at + 512]);
                        }
                    }
                    torn.into()
                }
            };
            self.durable.insert(lba, new);
        }
    }

    /// The process dies, the device goes on: handed-over writes complete or not, the cache stays.
    pub fn process_killed(&mut self) {
        for (lba, block) in std::mem::take(&mut self.writing) {
            if self.rng.chance(2) && self.geometry.write_cache == WriteCache::None {
                self.durable.insert(lba, block);
            } else if self.geometry.write_cache == WriteCache::Volatile && self.rng.chance(2) {
                self.completions += 1;
                self.cache.entry(lba).or_default().push((self.completions, block));
            }
        }
    }

    fn complete(&mut self, op: &mut DiskOp, flush_upto: u64) -> Result<(), DiskError> {
        match op {
            DiskOp::Read { lba, buffer } => {
                for (block, at) in buffer.chunks_exact_mut(BLOCK).zip(lba.0..) {
                    if self.unreadable.contains(&at) {
                        return Err(DiskError::Media { errno: 61 });
                    }
                    block.copy_from_slice(&self.get(at));
                }
            }
            DiskOp::Write { lba, data, fua } => {
                let durable = *fua || self.geometry.write_cache == WriteCache::None;
                let blocks: usize = data.iter().map(|piece| piece.len() / BLOCK).sum();
                for at in lba.0..lba.0 + blocks as u64 {
                    let block = self.writing.remove(&at).expect("it was being written");
                    self.completions += 1;
                    if durable {
                        self.cache.remove(&at);
                        self.durable.insert(at, block);
                    } else {
                        self.cache.entry(at).or_default().push((self.completions, block));
                    }
                }
            }
            DiskOp::Flush => {
                let cache = std::mem::take(&mut self.cache);
                for (lba, versions) in cache {
                    let (done, rest): (Vec<_>, Vec<_>) =
                        versions.into_iter().partition(|(at, _)| *at <= flush_upto);
                    if let Some((_, block)) = done.last() {
                        self.durable.insert(lba, Rc::clone(block));
                    }
                    if !rest.is_empty() {
                        self.cache.insert(lba, rest);
                    }
                }
            }
            DiskOp::Discard { lba, count } => {
                for at in lba.0..lba.0 + count.0 {
                    assert!(!self.writing.contains_key(&at), "a discard of a block that is being written");
                    self.cache.remove(&at);
                    self.durable.insert(at, Rc::from(vec![0xdd; BLOCK]));
                }
            }
            DiskOp::WriteZeroes { .. } => panic!("the store does not use it"),
        }
        Ok(())
    }
}

/// One queue pair.
#[derive(Debug)]
pub struct TestDevice {
    pub media: Rc<RefCell<Media>>,
    geometry: Geometry,
    pending: Vec<(DiskOp, Ticket, bool, u64)>,
}

impl TestDevice {
    pub fn new(media: &Rc<RefCell<Media>>) -> Self {
        let geometry = media.borrow().geometry.clone();
        Self { media: Rc::clone(media), geometry, pending: Vec::new() }
    }
}

impl BlockDevice for TestDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        let mut media = self.media.borrow_mut();
        let full = self.pending.len() >= self.geometry.queue_depth_max as usize;
        if full || (media.chaos && media.rng.chance(10)) {
            return Err(QueueFull(op));
        }
        media.operations += 1;
        let fails =
            media.fail_at.is_some_and(|at| media.operations == at || (media.sticky && media.operations > at));
        if let DiskOp::Write { lba, data, .. } = &op {
            media.writes += 1;
            let blocks: usize = data.iter().map(|piece| piece.len() / BLOCK).sum();
            assert!(blocks as u64 <= self.geometry.transfer_blocks_max.0, "too long a write");
            assert!(lba.0 + blocks as u64 <= self.geometry.blocks.0, "a write beyond the device");
            let all = data.iter().flat_map(|piece| piece.chunks_exact(BLOCK));
            for (block, at) in all.zip(lba.0..) {
                let old = media.writing.insert(at, Rc::from(block));
                assert!(old.is_none(), "two writes of block {at} in flight");
            }
        }
        media.flushes += u64::from(matches!(op, DiskOp::Flush));
        let upto = media.completions;
        self.pending.push((op, ticket, fails, upto));
        Ok(())
    }

    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32 {
        let mut media = self.media.borrow_mut();
        let most =
            if media.chaos { media.rng.below(u64::from(budget).min(8) + 1) } else { u64::from(budget) };
        let most = if media.hangs { 0 } else { most };
        let mut count = 0;
        while u64::from(count) < most && !self.pending.is_empty() {
            let at = if media.chaos { media.rng.below(self.pending.len() as u64) as usize } else { 0 };
            let (mut op, ticket, fails, upto) = self.pending.remove(at);
            // A failed write may have reached the medium in part: it stays among what a power cut decides about.
            let result = if fails { Err(DiskError::Io { errno: 5 }) } else { media.complete(&mut op, upto) };
            done.push_back(Completion { ticket, result, op });
            count += 1;
        }
        count
    }

    fn in_flight(&self) -> u32 {
        self.pending.len() as u32
    }
}
