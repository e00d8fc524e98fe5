//! The free blocks of the chunks that one shard owns.

use super::layout::Superblock;
use std::collections::BTreeMap;

/// Chunks looked at for one contiguous run before the best one found is taken: bounds the time of one allocation on
/// a full and fragmented device. Guessed; 64 bitmaps of 64 MiB chunks are 128 KiB of memory.
const RUN_CHUNKS_MAX: usize = 64;

/// A contiguous run of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Run {
    pub lba: u64,
    pub count: u32,
}

impl Run {
    pub fn end(self) -> u64 {
        self.lba + u64::from(self.count)
    }
}

#[derive(Debug)]
struct Chunk {
    /// One bit per block, set when it is used.
    bits: Box<[u64]>,
    free: u32,
    /// No free run in it is longer than this.
    longest: u32,
}

#[derive(Debug)]
pub(super) struct Allocator {
    superblock: Superblock,
    chunks: BTreeMap<u64, Chunk>,
    free: u64,
    /// Where the next search begins.
    cursor: u64,
    /// No chunk before this one has a free block.
    low: u64,
}

impl Allocator {
    pub fn new(superblock: Superblock) -> Self {
        Self { superblock, chunks: BTreeMap::new(), free: 0, cursor: 0, low: 0 }
    }

    /// Adds an empty chunk.
    pub fn add_chunk(&mut self, chunk: u64) {
        let blocks = self.superblock.chunk_blocks as u32;
        let bits = vec![0; blocks as usize / 64].into_boxed_slice();
        let old = self.chunks.insert(chunk, Chunk { bits, free: blocks, longest: blocks });
        assert!(old.is_none(), "chunk {chunk} is owned already");
        self.low = self.low.min(chunk);
        self.free += u64::from(blocks);
    }

    /// Takes a wholly free chunk out, if there is one and others remain.
    pub fn remove_empty_chunk(&mut self) -> Option<u64> {
        let blocks = self.superblock.chunk_blocks as u32;
        let chunk = *self.chunks.iter().rev().find(|(_, chunk)| chunk.free == blocks)?.0;
        self.chunks.remove(&chunk);
        self.free -= u64::from(blocks);
        Some(chunk)
    }

    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    pub fn owns(&self, lba: u64) -> bool {
        self.superblock.chunk_of(lba).is_some_and(|chunk| self.chunks.contains_key(&chunk))
    }

    pub fn free(&self) -> u64 {
        self.free
    }

    pub fn memory(&self) -> u64 {
        self.chunks.len() as u64 * (self.superblock.chunk_blocks / 8 + 64)
    }

    fn place(&self, lba: u64) -> (u64, u32) {
        let chunk = self.superblock.chunk_of(lba).expect("the block lies in a chunk");
        (chunk, (lba - self.superblock.chunk_lba(chunk)) as u32)
    }

    /// A contiguous run of `want` blocks, or a shorter one of at least `least`.
    pub fn alloc_run(&mut self, want: u32, least: u32) -> Option<Run> {
        assert!(least > 0 && least <= want);
        if self.free < u64::from(least) {
            return None;
        }
        let want = want.min(self.superblock.chunk_blocks as u32);
        let mut best: Option<(u64, u32, u32)> = None;
        let from = self.cursor;
        let order = self.chunks.range_mut(from..).map(|(chunk, state)| (*chunk, state));
        let (mut looked, mut exact) = (0, None);
        let mut look = |number: u64, chunk: &mut Chunk| {
            let enough = best.map_or(least, |(_, _, len)| len + 1);
            if exact.is_some() || chunk.longest < enough || (looked >= RUN_CHUNKS_MAX && best.is_some()) {
                return;
            }
            looked += 1;
            let (at, len) = chunk.longest_run(want);
            if len >= want {
                exact = Some((number, at, want));
            } else {
                chunk.longest = len;
                if len >= enough {
                    best = Some((number, at, len));
                }
            }
        };
        order.for_each(|(number, chunk)| look(number, chunk));
        self.chunks.range_mut(..from).for_each(|(number, chunk)| look(*number, chunk));
        let (number, at, len) = exact.or(best)?;
        self.cursor = number;
        let run = Run { lba: self.superblock.chunk_lba(number) + u64::from(at), count: len };
        self.mark_used(run).then_some(run)
    }

    /// `count` blocks in as few runs as the fragmentation allows, appended to `runs`; nothing if there are not so
    /// many, or if they would take more than `runs_max` runs.
    pub fn alloc_scattered(&mut self, count: u32, runs_max: usize, runs: &mut Vec<Run>) -> bool {
        if self.free < u64::from(count) {
            return false;
        }
        let start = runs.len();
        let mut left = count;
        while left > 0 && runs.len() - start < runs_max {
            let Some(run) = self.alloc_run(left, 1) else { break };
            runs.push(run);
            left -= run.count;
        }
        if left > 0 {
            runs.drain(start..).for_each(|run| self.release(run));
        }
        left == 0
    }

    /// `count` blocks as low on the device as there are, appended to `runs`; nothing if there are not so many. For
    /// checkpoint pages: they fill holes that are no use to the log, and leave high chunks empty to be given back.
    pub fn alloc_low(&mut self, count: u32, runs: &mut Vec<Run>) -> bool {
        if self.free < u64::from(count) {
            return false;
        }
        let mut left = count;
        while left > 0 {
            let (number, chunk) = self.chunks.range_mut(self.low..).next().expect("there are free blocks");
            let number = *number;
            if chunk.free == 0 {
                self.low = number + 1;
                continue;
            }
            let (at, len) = chunk.first_run(left);
            let run = Run { lba: self.superblock.chunk_lba(number) + u64::from(at), count: len };
            assert!(self.mark_used(run), "the run is free");
            runs.push(run);
            left -= len;
        }
        true
    }

    /// Marks blocks used; false, and nothing marked, if one of them is used already or not of this shard.
    pub fn mark_used(&mut self, run: Run) -> bool {
        if !self.owns(run.lba) || !self.owns(run.end() - 1) {
            return false;
        }
        let (number, at) = self.place(run.lba);
        if self.place(run.end() - 1).0 != number {
            return false;
        }
        let chunk = self.chunks.get_mut(&number).expect("owned");
        if (at..at + run.count).any(|bit| chunk.used(bit)) {
            return false;
        }
        (at..at + run.count).for_each(|bit| chunk.bits[bit as usize / 64] |= 1 << (bit % 64));
        chunk.free -= run.count;
        self.free -= u64::from(run.count);
        true
    }

    /// Whether the block is used.
    pub fn is_used(&self, lba: u64) -> bool {
        let (number, at) = self.place(lba);
        self.chunks.get(&number).is_some_and(|chunk| chunk.used(at))
    }

    /// Frees blocks.
    ///
    /// # Panics
    /// If one of them is free: a block with two owners would be overwritten under one of them.
    pub fn release(&mut self, run: Run) {
        let (number, at) = self.place(run.lba);
        let chunk = self.chunks.get_mut(&number).expect("a freed block's chunk is owned");
        for bit in at..at + run.count {
            assert!(chunk.used(bit), "block {} is freed twice", run.lba);
            chunk.bits[bit as usize / 64] &= !(1 << (bit % 64));
        }
        chunk.free += run.count;
        chunk.longest = chunk.free;
        self.low = self.low.min(number);
        self.free += u64::from(run.count);
    }

    /// Every used block, in order.
    pub fn used_blocks(&self) -> impl Iterator<Item = u64> + '_ {
        let blocks = self.superblock.chunk_blocks as u32;
        self.chunks.iter().flat_map(move |(number, chunk)| {
            let base = self.superblock.chunk_lba(*number);
            (0..blocks).filter(|bit| chunk.used(*bit)).map(move |bit| base + u64::from(bit))
        })
    }
}

impl Chunk {
    fn used(&self, bit: u32) -> bool {
        self.bits[bit as usize / 64] >> (bit % 64) & 1 == 1
    }

    /// The first run of free blocks, at most `want` long.
    fn first_run(&self, want: u32) -> (u32, u32) {
        let (at, word) =
            (0u32..).step_by(64).zip(&self.bits).find(|(_, word)| **word != u64::MAX).expect("free");
        let bit = word.trailing_ones();
        let len = (word >> bit).trailing_zeros().min(64 - bit);
        (at + bit, len.min(want))
    }

    /// Where the first run of `want` free blocks begins, else the longest run; and its length, at most `want`.
    fn longest_run(&self, want: u32) -> (u32, u32) {
        let (mut best_at, mut best) = (0, 0);
        let (mut at, mut len) = (0u32, 0u32);
        for (word_at, word) in (0u32..).step_by(64).zip(&self.bits) {
            let mut bit = 0;
            while bit < 64 {
                let rest = word >> bit;
                let free = if rest == 0 { 64 - bit } else { rest.trailing_zeros() };
                if free > 0 {
                    if len == 0 {
                        at = word_at + bit;
                    }
                    len += free;
                    if len > best {
                        (best_at, best) = (at, len);
                    }
                    if best >= want {
                        return (best_at, want);
                    }
                }
                bit += free;
                if bit < 64 {
                    bit += (word >> bit).trailing_ones();
                    len = 0;
                }
            }
        }
        (best_at, best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_config::id::{ClusterId, DeviceId, OsdId};

    fn allocator(chunks: u64) -> Allocator {
        let id = uuid::Uuid::from_u128(1);
        let plan = Superblock::plan(ClusterId(id), OsdId(0), DeviceId(id), 1, 10_000).unwrap();
        let mut allocator = Allocator::new(plan);
        (0..chunks).for_each(|chunk| allocator.add_chunk(chunk));
        allocator
    }

    #[test]
    fn runs_are_found_across_words_and_never_twice() {
        let mut allocator = allocator(2);
        let first = allocator.alloc_run(60, 60).unwrap();
        let second = allocator.alloc_run(130, 1).unwrap();
        assert_eq!(second.lba, first.end());
        assert_eq!(second.count, 130);
        assert_eq!(allocator.free(), 512 - 190);
        allocator.release(first);
        assert_eq!(allocator.alloc_run(61, 61).map(|run| run.lba), Some(second.end()));
        assert_eq!(allocator.alloc_run(60, 60), Some(first));
    }

    #[test]
    fn a_fragmented_shard_gives_what_it_has() {
        let mut allocator = allocator(1);
        let all = allocator.alloc_run(256, 256).unwrap();
        assert_eq!(allocator.alloc_run(1, 1), None);
        (0..256).step_by(2).for_each(|at| allocator.release(Run { lba: all.lba + at, count: 1 }));
        assert_eq!(allocator.alloc_run(2, 2), None);
        let mut runs = Vec::new();
        assert!(!allocator.alloc_scattered(128, 127, &mut runs));
        assert!(!allocator.alloc_scattered(129, 256, &mut runs));
        assert_eq!(allocator.free(), 128);
        assert!(allocator.alloc_scattered(128, 128, &mut runs));
        assert_eq!((runs.len(), allocator.free()), (128, 0));
        assert_eq!(allocator.used_blocks().count(), 256);
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn freeing_twice_is_a_broken_invariant() {
        let mut allocator = allocator(1);
        let run = allocator.alloc_run(3, 3).unwrap();
        allocator.release(run);
        allocator.release(run);
    }

    #[test]
    fn only_empty_chunks_leave() {
        let mut allocator = allocator(2);
        let run = allocator.alloc_run(1, 1).unwrap();
        assert!(allocator.remove_empty_chunk().is_some());
        assert_eq!(allocator.remove_empty_chunk(), None);
        allocator.release(run);
        assert!(allocator.remove_empty_chunk().is_some());
        assert_eq!((allocator.chunks(), allocator.free()), (0, 0));
    }
}
