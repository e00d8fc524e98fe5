//! A device in memory: volatile cache, completions in any order or one at a time, power cuts that keep, lose or tear
//! what was not durable, the N-th operation failing.

use super::images::Crash;
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

/// One block's contents, shared by the devices that hold them.
#[derive(Clone, Debug)]
pub struct Block(Rc<(u64, Box<[u8]>)>);

impl Block {
    pub fn new(bytes: &[u8]) -> Self {
        assert_eq!(bytes.len(), BLOCK);
        let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight")));
        // Only equal contents may have equal hashes here; multiplication by the odd constants of splitmix64 mixes.
        let mix = |hash: u64, word: u64| ((hash ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9)).rotate_left(29);
        let hash = words.fold(0x94d0_49bb_1331_11eb, mix);
        Self(Rc::new((hash, bytes.into())))
    }

    pub fn hash(&self) -> u64 {
        self.0.0
    }

    fn zero() -> Self {
        thread_local!(static ZERO: Block = Block::new(&[0; BLOCK]));
        ZERO.with(Block::clone)
    }
}

impl std::ops::Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.1
    }
}

/// Operations that a planned failure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Any,
    Read,
    Write,
    Flush,
    Discard,
}

impl Kind {
    fn of(op: &DiskOp) -> Self {
        match op {
            DiskOp::Read { .. } => Self::Read,
            DiskOp::Write { .. } | DiskOp::WriteZeroes { .. } => Self::Write,
            DiskOp::Flush => Self::Flush,
            DiskOp::Discard { .. } => Self::Discard,
        }
    }
}

/// What one device holds, shared by its queue pairs.
#[derive(Debug)]
pub struct Media {
    pub geometry: Geometry,
    pub rng: Rng,
    durable: Vec<Block>,
    /// Completed but not durable, oldest first, with the number of the completion.
    cache: BTreeMap<u64, Vec<(u64, Block)>>,
    completions: u64,
    /// Writes handed over and not completed.
    writing: BTreeMap<u64, Block>,
    /// Fails the operation with this number, and with `sticky` all after it.
    pub fail_at: Option<u64>,
    pub sticky: bool,
    /// Which operations are counted, and which fail.
    pub kind: Kind,
    pub operations: u64,
    pub failures: u64,
    pub writes: u64,
    pub flushes: u64,
    /// Blocks that cannot be read.
    pub unreadable: Vec<u64>,
    /// Refuse some submissions, and complete in any order.
    pub chaos: bool,
    /// Completes nothing.
    pub hangs: bool,
    /// Completions that are let through from now on; `None`: all.
    pub gate: Option<u32>,
    /// The newest operation completes first.
    pub newest_first: bool,
    /// Rises with everything that changes what a power cut may leave.
    pub changes: u64,
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
        Self::with(geometry, vec![Block::zero(); blocks as usize], seed)
    }

    /// A device that holds these blocks, durably.
    pub fn with(geometry: Geometry, durable: Vec<Block>, seed: u64) -> Rc<RefCell<Self>> {
        Rc::new(RefCell::new(Self {
            geometry,
            rng: Rng(seed),
            durable,
            cache: BTreeMap::new(),
            completions: 0,
            writing: BTreeMap::new(),
            fail_at: None,
            sticky: false,
            kind: Kind::Any,
            operations: 0,
            failures: 0,
            writes: 0,
            flushes: 0,
            unreadable: Vec::new(),
            chaos: true,
            hangs: false,
            gate: None,
            newest_first: false,
            changes: 0,
        }))
    }

    /// What a power cut now may leave.
    pub fn crash(&self) -> Crash {
        let mut unsettled: BTreeMap<u64, Vec<Block>> = BTreeMap::new();
        for (lba, versions) in &self.cache {
            unsettled.entry(*lba).or_default().extend(versions.iter().map(|(_, block)| block.clone()));
        }
        for (lba, block) in &self.writing {
            unsettled.entry(*lba).or_default().push(block.clone());
        }
        Crash::new(self.geometry.clone(), self.durable.clone(), unsettled)
    }

    pub fn get(&self, lba: u64) -> Block {
        let cached = self.cache.get(&lba).and_then(|versions| versions.last()).map(|(_, block)| block);
        cached.unwrap_or(&self.durable[lba as usize]).clone()
    }

    /// Changes what is durable, as rot does.
    pub fn set(&mut self, lba: u64, block: &[u8]) {
        self.cache.remove(&lba);
        self.durable[lba as usize] = Block::new(block);
    }

    /// The power fails: each sector that was not durable keeps its old value or any of the newer ones; with a device
    /// whose blocks do not tear, each block.
    pub fn power_cut(&mut self) {
        let writing = std::mem::take(&mut self.writing);
        let mut cache = std::mem::take(&mut self.cache);
        for (lba, block) in writing {
            cache.entry(lba).or_default().push((u64::MAX, block));
        }
        let picks = if self.geometry.atomic_blocks.0 == 0 { 4 } else { 3 };
        for (lba, versions) in cache {
            let old = self.durable[lba as usize].clone();
            let pick = self.rng.below(picks);
            let new = match pick {
                0 => old,
                1 => versions[self.rng.below(versions.len() as u64) as usize].1.clone(),
                2 => versions.last().expect("not empty").1.clone(),
                _ => {
                    let mut torn = old.to_vec();
                    for at in (0..BLOCK).step_by(512) {
                        let choice = self.rng.below(versions.len() as u64 + 1) as usize;
                        if let Some((_, version)) = versions.get(choice) {
                            torn[at..at + 512].copy_from_slice(&version[at..at + 512]);
                        }
                    }
                    Block::new(&torn)
                }
            };
            self.durable[lba as usize] = new;
        }
        self.changes += 1;
    }

    /// The process dies, the device goes on: handed-over writes complete or not, the cache stays.
    pub fn process_killed(&mut self) {
        for (lba, block) in std::mem::take(&mut self.writing) {
            if self.rng.chance(2) {
                self.keep(lba, block, self.geometry.write_cache == WriteCache::None);
            }
        }
        self.changes += 1;
    }

    /// The process dies or the power fails, and all that was not durable is kept, or all of it lost.
    pub fn settle(&mut self, kept: bool) {
        let cache = std::mem::take(&mut self.cache).into_iter();
        let cache = cache.filter_map(|(lba, mut versions)| Some((lba, versions.pop()?.1)));
        let writing = std::mem::take(&mut self.writing);
        for (lba, block) in cache.chain(writing).filter(|_| kept) {
            self.durable[lba as usize] = block;
        }
        self.changes += 1;
    }

    fn keep(&mut self, lba: u64, block: Block, durable: bool) {
        self.completions += 1;
        if durable {
            self.cache.remove(&lba);
            self.durable[lba as usize] = block;
        } else {
            self.cache.entry(lba).or_default().push((self.completions, block));
        }
    }

    fn begin_write(&mut self, lba: u64, block: Block) {
        let old = self.writing.insert(lba, block);
        assert!(old.is_none(), "two writes of block {lba} in flight");
        self.changes += 1;
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
                self.end_write(lba.0, blocks as u64, durable);
            }
            DiskOp::Flush => {
                self.changes += 1;
                let cache = std::mem::take(&mut self.cache);
                for (lba, versions) in cache {
                    let (done, rest): (Vec<_>, Vec<_>) =
                        versions.into_iter().partition(|(at, _)| *at <= flush_upto);
                    if let Some((_, block)) = done.last() {
                        self.durable[lba as usize] = block.clone();
                    }
                    if !rest.is_empty() {
                        self.cache.insert(lba, rest);
                    }
                }
            }
            DiskOp::Discard { lba, count } => {
                self.end_write(lba.0, count.0, self.geometry.write_cache == WriteCache::None);
            }
            DiskOp::WriteZeroes { .. } => panic!("the store does not use it"),
        }
        Ok(())
    }

    fn end_write(&mut self, lba: u64, count: u64, durable: bool) {
        self.changes += 1;
        for at in lba..lba + count {
            let block = self.writing.remove(&at).expect("it was being written");
            self.keep(at, block, durable);
        }
    }

    /// Counts an operation and says whether it fails.
    fn fails(&mut self, op: &DiskOp) -> bool {
        if self.kind != Kind::Any && self.kind != Kind::of(op) {
            return false;
        }
        self.operations += 1;
        let now = self.operations;
        let fails = self.fail_at.is_some_and(|at| now == at || (self.sticky && now > at));
        self.failures += u64::from(fails);
        fails
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
        let fails = media.fails(&op);
        match &op {
            DiskOp::Write { lba, data, .. } => {
                media.writes += 1;
                let blocks: usize = data.iter().map(|piece| piece.len() / BLOCK).sum();
                assert!(blocks as u64 <= self.geometry.transfer_blocks_max.0, "too long a write");
                assert!(lba.0 + blocks as u64 <= self.geometry.blocks.0, "a write beyond the device");
                let all = data.iter().flat_map(|piece| piece.chunks_exact(BLOCK));
                all.zip(lba.0..).for_each(|(block, at)| media.begin_write(at, Block::new(block)));
            }
            // What discarded blocks read as is undefined, and a power cut may undo it.
            DiskOp::Discard { lba, count } => {
                let garbage = Block::new(&[0xdd; BLOCK]);
                (lba.0..lba.0 + count.0).for_each(|at| media.begin_write(at, garbage.clone()));
            }
            DiskOp::Flush => media.flushes += 1,
            DiskOp::Read { buffer, .. } => {
                let blocks = (buffer.len() / BLOCK) as u64;
                assert!(blocks <= self.geometry.transfer_blocks_max.0, "too long a read");
            }
            DiskOp::WriteZeroes { .. } => (),
        }
        let upto = media.completions;
        self.pending.push((op, ticket, fails, upto));
        Ok(())
    }

    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32 {
        let mut media = self.media.borrow_mut();
        let mut most =
            if media.chaos { media.rng.below(u64::from(budget).min(8) + 1) } else { u64::from(budget) };
        most = if media.hangs { 0 } else { most.min(media.gate.map_or(u64::MAX, u64::from)) };
        let mut count = 0;
        while u64::from(count) < most && !self.pending.is_empty() {
            let at = match (media.chaos, media.newest_first) {
                (true, _) => media.rng.below(self.pending.len() as u64) as usize,
                (false, true) => self.pending.len() - 1,
                (false, false) => 0,
            };
            let (mut op, ticket, fails, upto) = self.pending.remove(at);
            // A failed write may have reached the medium in part: it stays among what a power cut decides about.
            let result = if fails { Err(DiskError::Io { errno: 5 }) } else { media.complete(&mut op, upto) };
            done.push_back(Completion { ticket, result, op });
            count += 1;
        }
        media.gate = media.gate.map(|gate| gate - count);
        count
    }

    fn in_flight(&self) -> u32 {
        self.pending.len() as u32
    }
}
