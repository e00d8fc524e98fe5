//! Where things are on a device, and its fixed blocks: superblocks, chunk claims, anchors.
//!
//! ```text
//! 0, 1        superblock, two copies
//! 2 ..        chunk claims: one block per chunk
//! ..          anchors: four blocks per shard (two slots of two copies)
//! ..          chunk 0, chunk 1, ... , and less than a chunk that stays unused
//! ```

use super::codec::{BLOCK, BlockKind, HEAD, Identity, NO_SHARD, Put, Take, identify, open, seal};
use loligo_config::id::{ClusterId, DeviceId, OsdId, ShardId};
use loligo_config::limits::SHARDS_MAX;

const CHUNK_BLOCKS_MIN: u64 = 256; // 1 MiB
const CHUNK_BLOCKS_MAX: u64 = 16_384; // 64 MiB
/// Chunks that a shard needs at least: its log, its checkpoint and reserve, and some data.
const SHARD_CHUNKS_MIN: u64 = 6;
/// Blocks of one shard's anchors.
pub(super) const ANCHOR_BLOCKS: u64 = 4;

/// What mkfs decided about a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The cluster.
    pub cluster: ClusterId,
    /// The OSD.
    pub osd: OsdId,
    /// This device.
    pub device: DeviceId,
    /// How many shards it is divided among.
    pub shards: u16,
    /// Blocks of the device at mkfs.
    pub blocks: u64,
    /// Blocks of one chunk.
    pub chunk_blocks: u64,
    /// Chunks.
    pub chunks: u64,
}

impl Superblock {
    /// The layout of a device of `blocks` blocks; `None` if it is too small.
    pub(super) fn plan(
        cluster: ClusterId,
        osd: OsdId,
        device: DeviceId,
        shards: u16,
        blocks: u64,
    ) -> Option<Self> {
        let chunk_blocks = (blocks / 128).next_power_of_two().clamp(CHUNK_BLOCKS_MIN, CHUNK_BLOCKS_MAX);
        let fixed = 2 + ANCHOR_BLOCKS * u64::from(shards);
        let chunks = blocks.checked_sub(fixed)? / (chunk_blocks + 1);
        let enough = chunks >= SHARD_CHUNKS_MIN * u64::from(shards) && blocks < 1 << 47;
        enough.then_some(Self { cluster, osd, device, shards, blocks, chunk_blocks, chunks })
    }

    /// The smallest device for so many shards, in blocks.
    pub fn blocks_min(shards: u16) -> u64 {
        let shards = u64::from(shards);
        2 + ANCHOR_BLOCKS * shards + SHARD_CHUNKS_MIN * shards * (CHUNK_BLOCKS_MIN + 1)
    }

    /// The identity of a shard's blocks.
    pub fn identity(&self, shard: ShardId) -> Identity {
        Identity { cluster: self.cluster, osd: self.osd, device: self.device, shard }
    }

    pub(super) fn claim_lba(&self, chunk: u64) -> u64 {
        assert!(chunk < self.chunks);
        2 + chunk
    }

    pub(super) fn anchor_lba(&self, shard: ShardId) -> u64 {
        assert!(shard.0 < self.shards);
        2 + self.chunks + ANCHOR_BLOCKS * u64::from(shard.0)
    }

    pub(super) fn chunk_lba(&self, chunk: u64) -> u64 {
        2 + self.chunks + ANCHOR_BLOCKS * u64::from(self.shards) + chunk * self.chunk_blocks
    }

    /// The chunk that holds this block.
    pub(super) fn chunk_of(&self, lba: u64) -> Option<u64> {
        let chunk = lba.checked_sub(self.chunk_lba(0))? / self.chunk_blocks;
        (chunk < self.chunks).then_some(chunk)
    }

    /// Whether these blocks are in one chunk.
    pub(super) fn holds(&self, lba: u64, count: u64) -> bool {
        let last = lba.checked_add(count.max(1) - 1);
        self.chunk_of(lba).is_some_and(|chunk| last.and_then(|last| self.chunk_of(last)) == Some(chunk))
    }

    pub(super) fn encode(&self, block: &mut [u8], lba: u64) {
        let mut out = Vec::with_capacity(64);
        out.u16(self.shards);
        out.u64(self.blocks);
        out.u64(self.chunk_blocks);
        out.u64(self.chunks);
        fill(block, &out);
        seal(block, BlockKind::Superblock, &self.identity(NO_SHARD), lba);
    }

    /// `None` if this is no superblock, or one with impossible values.
    pub(super) fn decode(block: &[u8], lba: u64) -> Option<Self> {
        let (identity, mut take) = identify(block, BlockKind::Superblock, lba)?;
        let (shards, blocks, chunk_blocks, chunks) = (take.u16()?, take.u64()?, take.u64()?, take.u64()?);
        if shards == 0 || usize::from(shards) > SHARDS_MAX {
            return None;
        }
        let plan = Self::plan(identity.cluster, identity.osd, identity.device, shards, blocks)?;
        (plan.chunk_blocks == chunk_blocks && plan.chunks == chunks).then_some(plan)
    }
}

/// Zeroes a block and puts the payload in; the header comes with [`seal`].
pub(super) fn fill(block: &mut [u8], payload: &[u8]) {
    assert!(payload.len() <= BLOCK - HEAD, "the payload fits");
    block.fill(0);
    block[HEAD..HEAD + payload.len()].copy_from_slice(payload);
}

/// What a claim block says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    Free,
    Owner(ShardId),
    /// Torn or rotten: see `ChunkTable`.
    Unknown,
}

pub(super) fn encode_claim(block: &mut [u8], superblock: &Superblock, chunk: u64, owner: Option<ShardId>) {
    let mut out = Vec::with_capacity(16);
    out.u16(owner.map_or(NO_SHARD.0, |shard| shard.0));
    fill(block, &out);
    seal(block, BlockKind::Claim, &superblock.identity(NO_SHARD), superblock.claim_lba(chunk));
}

pub(super) fn decode_claim(block: &[u8], superblock: &Superblock, chunk: u64) -> Claim {
    let lba = superblock.claim_lba(chunk);
    let owner =
        open(block, BlockKind::Claim, &superblock.identity(NO_SHARD), lba).and_then(|mut take| take.u16());
    match owner {
        Some(owner) if owner == NO_SHARD.0 => Claim::Free,
        Some(owner) if owner < superblock.shards => Claim::Owner(ShardId(owner)),
        _ => Claim::Unknown,
    }
}

/// A contiguous run of blocks that holds records and, mostly, their data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Its number in the shard's history.
    pub ordinal: u64,
    pub lba: u64,
    pub len: u32,
}

impl Segment {
    pub fn end(&self) -> u64 {
        self.lba + u64::from(self.len)
    }

    pub fn put(&self, out: &mut Vec<u8>) {
        out.u64(self.ordinal);
        out.u64(self.lba);
        out.u32(self.len);
    }

    /// `None` also for one that cannot be: its end or the ordinals after it would not fit their types.
    pub fn take(take: &mut Take<'_>) -> Option<Self> {
        let segment = Self { ordinal: take.u64()?, lba: take.u64()?, len: take.u32()? };
        (segment.ordinal < NUMBER_END && segment.lba < 1 << 47).then_some(segment)
    }
}

/// Positions from `start` on, up to the next range, were written by one mount. Records of other generations there
/// are left-overs of a tail that was cut, and are ignored for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub start: u64,
    pub generation: u64,
}

/// Positions, generations, ordinals and numbers of anchors and checkpoints are below this: a device cannot be written to
/// that often, and what counts on from one of them cannot overflow.
pub(super) const NUMBER_END: u64 = 1 << 55;

/// Most ranges that an anchor holds. The list grows by one at a mount that follows one whose records survived, and
/// shrinks at every checkpoint, which is forced before the list is full.
pub(super) const RANGES_MAX: usize = 128;
/// Most segments that a record or an anchor names: its own and those to come.
pub(super) const SEGMENTS_NAMED_MAX: usize = 8;

/// Where a shard's state is found at a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Anchor {
    /// Rises with every anchor written.
    pub sequence: u64,
    /// The checkpoint's root page; 0: nothing was ever checkpointed.
    pub root: u64,
    /// The checkpoint's number, which its root carries.
    pub checkpoint: u64,
    /// The first position that is not in the checkpoint.
    pub log_start: u64,
    /// Blocks of the first segment that come before that position.
    pub log_offset: u32,
    /// The segment where the log starts and those to come; empty before the first mount.
    pub segments: Vec<Segment>,
    /// Oldest first.
    pub ranges: Vec<Range>,
}

impl Anchor {
    /// What mkfs writes.
    pub fn empty() -> Self {
        Self {
            sequence: 1,
            root: 0,
            checkpoint: 0,
            log_start: 1,
            log_offset: 0,
            segments: Vec::new(),
            ranges: Vec::new(),
        }
    }

    /// Where this one is written: two copies at the slot of its sequence.
    pub fn lba(&self, superblock: &Superblock, shard: ShardId) -> u64 {
        superblock.anchor_lba(shard) + 2 * (self.sequence % 2)
    }

    /// Fills both copies.
    pub fn encode(&self, blocks: &mut [u8], superblock: &Superblock, shard: ShardId) {
        assert!(self.ranges.len() <= RANGES_MAX);
        assert!(self.segments.len() <= SEGMENTS_NAMED_MAX);
        let mut out = Vec::with_capacity(BLOCK);
        for value in [self.sequence, self.root, self.checkpoint, self.log_start] {
            out.u64(value);
        }
        out.u32(self.log_offset);
        out.u16(self.segments.len() as u16);
        out.u16(self.ranges.len() as u16);
        self.segments.iter().for_each(|segment| segment.put(&mut out));
        for range in &self.ranges {
            out.u64(range.start);
            out.u64(range.generation);
        }
        for (copy, lba) in blocks.chunks_exact_mut(BLOCK).zip(self.lba(superblock, shard)..) {
            fill(copy, &out);
            seal(copy, BlockKind::Anchor, &superblock.identity(shard), lba);
        }
    }

    pub fn decode(block: &[u8], superblock: &Superblock, shard: ShardId, lba: u64) -> Option<Self> {
        let mut take = open(block, BlockKind::Anchor, &superblock.identity(shard), lba)?;
        let (sequence, root, checkpoint, log_start) = (take.u64()?, take.u64()?, take.u64()?, take.u64()?);
        let log_offset = take.u32()?;
        let (segments, ranges) = (usize::from(take.u16()?), usize::from(take.u16()?));
        if segments > SEGMENTS_NAMED_MAX || ranges > RANGES_MAX {
            return None;
        }
        let segments = (0..segments).map(|_| Segment::take(&mut take)).collect::<Option<Vec<_>>>()?;
        let range = |take: &mut Take<'_>| Some(Range { start: take.u64()?, generation: take.u64()? });
        let ranges = (0..ranges).map(|_| range(&mut take)).collect::<Option<Vec<_>>>()?;
        let anchor = Self { sequence, root, checkpoint, log_start, log_offset, segments, ranges };
        anchor.is_possible(superblock).then_some(anchor)
    }

    /// Whether a store can have written it. A right checksum says who wrote the bytes, not that they make sense.
    fn is_possible(&self, superblock: &Superblock) -> bool {
        let numbers = [self.sequence, self.checkpoint, self.log_start];
        // Every position since the checkpoint takes a block at least.
        let end = self.log_start.saturating_add(superblock.blocks);
        let in_order = self.ranges.is_sorted_by(|a, b| a.start < b.start && a.generation < b.generation);
        let first = self.segments.first().map_or(0, |first| first.len);
        numbers.iter().all(|number| *number < NUMBER_END)
            && self.log_start > 0
            && self.root < superblock.blocks
            && self.log_offset <= first
            && self.segments.iter().all(|segment| superblock.holds(segment.lba, u64::from(segment.len)))
            && in_order
            && self.ranges.iter().all(|range| range.start <= end && range.generation < NUMBER_END)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(blocks: u64) -> Option<Superblock> {
        let cluster = ClusterId(uuid::Uuid::from_u128(1));
        Superblock::plan(cluster, OsdId(4), DeviceId(uuid::Uuid::from_u128(2)), 2, blocks)
    }

    #[test]
    fn layouts_fit_their_devices() {
        let least = Superblock::blocks_min(2);
        assert!(superblock(least - 1).is_none());
        for blocks in [least, 10_000, 262_144, 268_435_456, 4 << 30] {
            let plan = superblock(blocks).unwrap();
            assert!(plan.chunk_lba(plan.chunks) <= blocks, "{blocks}");
            assert_eq!(plan.chunk_of(plan.chunk_lba(3) + 5), Some(3));
            assert_eq!(plan.chunk_of(1), None);
            let mut block = vec![0; BLOCK];
            plan.encode(&mut block, 1);
            assert_eq!(Superblock::decode(&block, 1), Some(plan));
            assert_eq!(Superblock::decode(&block, 0), None);
        }
    }

    #[test]
    fn anchors_and_claims_come_back() {
        let plan = superblock(10_000).unwrap();
        let anchor = Anchor {
            sequence: 7,
            segments: vec![Segment { ordinal: 3, lba: plan.chunk_lba(3), len: 64 }],
            ranges: (1..=RANGES_MAX as u64).map(|n| Range { start: n, generation: n }).collect(),
            ..Anchor::empty()
        };
        let mut blocks = vec![0; 2 * BLOCK];
        anchor.encode(&mut blocks, &plan, ShardId(1));
        let lba = anchor.lba(&plan, ShardId(1));
        assert_eq!(Anchor::decode(&blocks[..BLOCK], &plan, ShardId(1), lba), Some(anchor.clone()));
        assert_eq!(Anchor::decode(&blocks[BLOCK..], &plan, ShardId(1), lba + 1), Some(anchor));
        assert_eq!(Anchor::decode(&blocks[..BLOCK], &plan, ShardId(0), lba), None);
        let mut block = vec![0; BLOCK];
        assert_eq!(decode_claim(&block, &plan, 3), Claim::Unknown);
        encode_claim(&mut block, &plan, 3, Some(ShardId(1)));
        assert_eq!(decode_claim(&block, &plan, 3), Claim::Owner(ShardId(1)));
        assert_eq!(decode_claim(&block, &plan, 4), Claim::Unknown);
        encode_claim(&mut block, &plan, 3, None);
        assert_eq!(decode_claim(&block, &plan, 3), Claim::Free);
    }

    #[test]
    fn anchors_that_no_store_writes_are_refused() {
        let plan = superblock(10_000).unwrap();
        let segment = Segment { ordinal: 3, lba: plan.chunk_lba(2), len: 64 };
        let range = |start, generation| Range { start, generation };
        let good = Anchor { sequence: 7, log_start: 9, segments: vec![segment], ..Anchor::empty() };
        let decoded = |anchor: Anchor| {
            let mut blocks = vec![0; 2 * BLOCK];
            anchor.encode(&mut blocks, &plan, ShardId(1));
            Anchor::decode(&blocks[..BLOCK], &plan, ShardId(1), anchor.lba(&plan, ShardId(1)))
        };
        assert_eq!(decoded(good.clone()), Some(good.clone()));
        let bad = [
            Anchor { sequence: u64::MAX, ..good.clone() },
            Anchor { checkpoint: NUMBER_END, ..good.clone() },
            Anchor { log_start: 0, ..good.clone() },
            Anchor { log_start: u64::MAX, ..good.clone() },
            Anchor { root: plan.blocks, ..good.clone() },
            Anchor { log_offset: 65, ..good.clone() },
            Anchor { segments: vec![Segment { lba: u64::MAX, ..segment }], ..good.clone() },
            Anchor { segments: vec![Segment { lba: 1, ..segment }], ..good.clone() },
            Anchor { segments: vec![Segment { len: u32::MAX, ..segment }], ..good.clone() },
            Anchor { segments: vec![Segment { ordinal: u64::MAX, ..segment }], ..good.clone() },
            Anchor { ranges: vec![range(1 << 40, 1)], ..good.clone() },
            Anchor { ranges: vec![range(1, u64::MAX)], ..good.clone() },
            Anchor { ranges: vec![range(5, 1), range(4, 2)], ..good.clone() },
        ];
        for anchor in bad {
            assert_eq!(decoded(anchor.clone()), None, "{anchor:?}");
        }
    }
}
