//! Which shard owns which chunk of a device: shared by the shards of a process.

use super::layout::{Claim, Superblock};
use loligo_config::id::ShardId;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

const FREE: u16 = u16::MAX;
const UNKNOWN: u16 = u16::MAX - 1;

/// The chunk table of a device in memory. A shard takes a chunk by compare-exchange, then writes the claim, and uses
/// the chunk when the claim is durable: after a crash in between the chunk is free, or owned and empty.
///
/// A claim block that cannot be read was torn while its chunk was claimed or released, and then the chunk is empty,
/// or it has rotted, and then its owner's index points into it. So nobody takes such a chunk before every shard has
/// mounted and taken back those that it refers to.
#[derive(Debug)]
pub struct ChunkTable {
    superblock: Superblock,
    owners: Vec<AtomicU16>,
    free: AtomicU64,
    mounted: AtomicU32,
}

impl ChunkTable {
    pub(super) fn new(superblock: Superblock, claims: &[Claim]) -> Self {
        assert_eq!(claims.len() as u64, superblock.chunks);
        let owner = |claim: &Claim| match claim {
            Claim::Free => FREE,
            Claim::Unknown => UNKNOWN,
            Claim::Owner(shard) => shard.0,
        };
        let owners: Vec<_> = claims.iter().map(|claim| AtomicU16::new(owner(claim))).collect();
        let free = claims.iter().filter(|claim| **claim == Claim::Free).count() as u64;
        Self { superblock, owners, free: AtomicU64::new(free), mounted: AtomicU32::new(0) }
    }

    /// The device that it belongs to.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Chunks that nobody owns.
    pub fn free(&self) -> u64 {
        self.free.load(Ordering::Relaxed)
    }

    pub(super) fn owned_by(&self, shard: ShardId) -> impl Iterator<Item = u64> + '_ {
        let mine = move |owner: &AtomicU16| owner.load(Ordering::Acquire) == shard.0;
        (0..).zip(&self.owners).filter(move |(_, owner)| mine(owner)).map(|(chunk, _)| chunk)
    }

    /// Takes any free chunk, looking from `from` on.
    pub(super) fn claim(&self, shard: ShardId, from: u64) -> Option<u64> {
        let chunks = self.superblock.chunks;
        let all_mounted = self.mounted.load(Ordering::Acquire) >= u32::from(self.superblock.shards);
        if self.free() == 0 && !all_mounted {
            return None;
        }
        (0..chunks).map(|step| (from + step) % chunks).find(|chunk| {
            self.take(*chunk, FREE, shard) || (all_mounted && self.take(*chunk, UNKNOWN, shard))
        })
    }

    /// Takes back a chunk whose claim was unreadable.
    pub(super) fn reclaim(&self, shard: ShardId, chunk: u64) -> bool {
        self.take(chunk, UNKNOWN, shard)
    }

    fn take(&self, chunk: u64, from: u16, shard: ShardId) -> bool {
        let Some(owner) = usize::try_from(chunk).ok().and_then(|at| self.owners.get(at)) else {
            return false;
        };
        let taken = owner.compare_exchange(from, shard.0, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if taken && from == FREE {
            self.free.fetch_sub(1, Ordering::Relaxed);
        }
        taken
    }

    /// Gives back a chunk whose release is durable.
    pub(super) fn release(&self, shard: ShardId, chunk: u64) {
        let at = usize::try_from(chunk).expect("a chunk's number fits");
        let was = self.owners[at].compare_exchange(shard.0, FREE, Ordering::AcqRel, Ordering::Acquire);
        assert_eq!(was, Ok(shard.0), "only its owner releases a chunk");
        self.free.fetch_add(1, Ordering::Relaxed);
    }

    /// One more shard has its index in memory and every chunk that it refers to.
    pub(super) fn shard_mounted(&self) {
        self.mounted.fetch_add(1, Ordering::AcqRel);
    }
}
