//! The index in memory: a hash table of fragments (128 blocks of one object each) whose buckets are also the units
//! that a checkpoint writes.
//!
//! A fragment and not an object is the unit, since one random 4 KiB write then dirties one page and not the 25 KiB
//! that describe a whole scattered object. A bucket that a running checkpoint still has to write is serialised just
//! before it changes, so that a checkpoint is exact and nothing ever waits for it.

use super::alloc::Run;
use super::codec::{Put, Take};
use loligo_config::id::{ObjectId, ObjectVersion, PgId};
use loligo_reactor::planted::{self, Bug};
use std::collections::BTreeMap;

/// Blocks of one fragment.
pub(super) const FRAGMENT_BLOCKS: u32 = 128;
/// The address of a block that corruption took away: reading it reports corruption.
pub(super) const LOST: u64 = (1 << 48) - 1;

const DIRTY: u8 = 1;
const PENDING: u8 = 2;

/// Blocks written by one write and stored one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub version: ObjectVersion,
    /// Address (48 bits), first block in the fragment (8), count (8).
    packed: u64,
}

impl Extent {
    fn new(version: ObjectVersion, lba: u64, block: u32, count: u32) -> Self {
        assert!(lba <= LOST, "block addresses have 48 bits");
        assert!(count > 0 && block + count <= FRAGMENT_BLOCKS);
        Self { version, packed: lba | u64::from(block) << 48 | u64::from(count) << 56 }
    }

    pub fn lba(&self) -> u64 {
        self.packed & LOST
    }

    pub fn block(&self) -> u32 {
        (self.packed >> 48 & 0xff) as u32
    }

    pub fn count(&self) -> u32 {
        (self.packed >> 56) as u32
    }

    pub fn end(&self) -> u32 {
        self.block() + self.count()
    }

    fn part(&self, block: u32, end: u32) -> Self {
        let skip = u64::from(block - self.block());
        let lba = if self.lba() == LOST { LOST } else { self.lba() + skip };
        Self::new(self.version, lba, block, end - block)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fragment {
    pub object: ObjectId,
    pub number: u32,
    pub pg: PgId,
    /// The object's version when the fragment last changed.
    pub version: ObjectVersion,
    /// In order, without overlaps.
    pub extents: Vec<Extent>,
    /// One per block of the extents, in their order.
    pub checksums: Vec<u32>,
}

/// What is known of an object besides its fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Object {
    pub pg: PgId,
    pub version: ObjectVersion,
    pub blocks: u32,
    /// One bit per fragment that exists.
    pub fragments: u64,
}

/// A block of data as a read needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    /// First block in the object.
    pub block: u32,
    pub lba: u64,
    pub count: u32,
    pub version: ObjectVersion,
}

#[derive(Debug)]
pub(super) struct Index {
    buckets: Vec<Vec<Fragment>>,
    states: Vec<u8>,
    dirty: Vec<u32>,
    /// Bytes that the dirty buckets take when they are written.
    dirty_bytes: u64,
    /// Buckets as they were when the running checkpoint began, serialised because they changed since.
    captured: Vec<(u32, Vec<u8>)>,
    objects: BTreeMap<ObjectId, Object>,
    fragments: u64,
    extents: u64,
    blocks: u64,
}

impl Index {
    pub fn new(buckets: u32) -> Self {
        assert!(buckets.is_power_of_two());
        Self {
            buckets: vec![Vec::new(); buckets as usize],
            states: vec![0; buckets as usize],
            dirty: Vec::new(),
            dirty_bytes: 0,
            captured: Vec::new(),
            objects: BTreeMap::new(),
            fragments: 0,
            extents: 0,
            blocks: 0,
        }
    }

    fn bucket_of(&self, object: ObjectId, number: u32) -> usize {
        // Multiplicative hashing of the identifying words; the odd constants are from splitmix64.
        let mut hash = u64::from(object.pool.0) << 32 | u64::from(object.kind as u32);
        for word in [object.image.0, object.index, u64::from(number)] {
            hash = (hash ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            hash = (hash ^ hash >> 29).wrapping_mul(0x94d0_49bb_1331_11eb);
            hash ^= hash >> 32;
        }
        (hash % self.buckets.len() as u64) as usize
    }

    fn find(&self, object: ObjectId, number: u32) -> Option<&Fragment> {
        let bucket = &self.buckets[self.bucket_of(object, number)];
        let at = bucket.binary_search_by(|one| (one.object, one.number).cmp(&(object, number))).ok()?;
        Some(&bucket[at])
    }

    pub fn object(&self, object: ObjectId) -> Option<&Object> {
        self.objects.get(&object)
    }

    pub fn objects(&self) -> impl Iterator<Item = (&ObjectId, &Object)> {
        self.objects.iter()
    }

    pub fn objects_from(&self, from: ObjectId) -> impl Iterator<Item = (&ObjectId, &Object)> {
        self.objects.range(from..)
    }

    /// The stored blocks of a range, in order.
    pub fn stored(&self, object: ObjectId, block: u32, count: u32) -> impl Iterator<Item = Stored> + '_ {
        self.pieces(object, block, count).map(|(stored, _)| stored)
    }

    /// The same with the checksums.
    pub fn pieces(
        &self,
        object: ObjectId,
        block: u32,
        count: u32,
    ) -> impl Iterator<Item = (Stored, &[u32])> + '_ {
        let end = block.saturating_add(count);
        let known = self.objects.get(&object).map_or(0, |object| object.fragments);
        let numbers = block / FRAGMENT_BLOCKS..end.div_ceil(FRAGMENT_BLOCKS).min(64);
        numbers
            .filter(move |number| known >> number & 1 == 1)
            .filter_map(move |number| self.find(object, number))
            .flat_map(move |fragment| fragment.pieces(block, end))
    }

    /// Serialises the bucket if a checkpoint needs it as it is, then marks it changed.
    pub fn touch(&mut self, bucket: usize) {
        if self.states[bucket] & PENDING != 0 && !planted::active(Bug::CheckpointNotExact) {
            self.states[bucket] &= !PENDING;
            self.captured.push((bucket as u32, encode_bucket(&self.buckets[bucket])));
        }
        if self.states[bucket] & DIRTY == 0 {
            self.states[bucket] |= DIRTY;
            self.dirty.push(bucket as u32);
            self.dirty_bytes += self.buckets[bucket].iter().map(Fragment::encoded_len).sum::<usize>() as u64;
        }
    }

    /// Gives part of one fragment to `change`, making it if it does not exist.
    fn change(
        &mut self,
        object: ObjectId,
        number: u32,
        pg: PgId,
        version: ObjectVersion,
        change: impl FnOnce(&mut Fragment),
    ) {
        let bucket = self.bucket_of(object, number);
        self.touch(bucket);
        let bucket = &mut self.buckets[bucket];
        let at = bucket.binary_search_by(|one| (one.object, one.number).cmp(&(object, number)));
        let at = at.unwrap_or_else(|at| {
            let new = Fragment { object, number, pg, version, extents: Vec::new(), checksums: Vec::new() };
            self.dirty_bytes += new.encoded_len() as u64;
            bucket.insert(at, new);
            self.fragments += 1;
            at
        });
        let fragment = &mut bucket[at];
        let (extents, blocks) = (fragment.extents.len() as u64, fragment.checksums.len());
        let len = fragment.encoded_len() as u64;
        change(fragment);
        self.dirty_bytes = self.dirty_bytes + fragment.encoded_len() as u64 - len;
        fragment.version = version;
        fragment.pg = pg;
        self.extents = self.extents + fragment.extents.len() as u64 - extents;
        self.blocks = self.blocks + fragment.checksums.len() as u64 - blocks as u64;
        let grown = fragment.checksums.len() as i64 - blocks as i64;
        let entry = self.objects.entry(object).or_insert(Object { pg, version, blocks: 0, fragments: 0 });
        entry.pg = pg;
        entry.version = version;
        entry.blocks = u32::try_from(i64::from(entry.blocks) + grown).expect("an object has its blocks");
        entry.fragments |= 1 << number;
    }

    /// Puts written blocks in; what they supersede goes to `freed`.
    #[expect(clippy::too_many_arguments, reason = "they are one log entry's fields")]
    pub fn write(
        &mut self,
        object: ObjectId,
        pg: PgId,
        version: ObjectVersion,
        block: u32,
        runs: &[Run],
        checksums: &[u32],
        freed: &mut Vec<Run>,
    ) {
        let (mut block, mut checksums) = (block, checksums);
        for run in runs {
            let mut run = *run;
            while run.count > 0 {
                let (number, within) = (block / FRAGMENT_BLOCKS, block % FRAGMENT_BLOCKS);
                let count = run.count.min(FRAGMENT_BLOCKS - within);
                let (now, later) = checksums.split_at(count as usize);
                self.change(object, number, pg, version, |fragment| {
                    fragment.punch(within, within + count, freed);
                    fragment.insert(Extent::new(version, run.lba, within, count), now);
                });
                checksums = later;
                block += count;
                run = Run { lba: run.lba + u64::from(count), count: run.count - count };
            }
        }
    }

    /// Takes blocks away. The object gets the version, if it exists.
    pub fn free(
        &mut self,
        object: ObjectId,
        version: ObjectVersion,
        range: (u32, u32),
        freed: &mut Vec<Run>,
    ) {
        let Some(known) = self.objects.get(&object).copied() else { return };
        let (block, end) = (range.0, range.0 + range.1);
        let first = block / FRAGMENT_BLOCKS;
        for number in first..end.div_ceil(FRAGMENT_BLOCKS) {
            // The first one carries the new version even if it holds nothing.
            if number != first && known.fragments >> number & 1 == 0 {
                continue;
            }
            let base = number * FRAGMENT_BLOCKS;
            let (from, to) = (block.max(base) - base, end.min(base + FRAGMENT_BLOCKS) - base);
            self.change(object, number, known.pg, version, |fragment| fragment.punch(from, to, freed));
        }
    }

    /// Removes an object.
    pub fn remove(&mut self, object: ObjectId, freed: &mut Vec<Run>) {
        let Some(known) = self.objects.remove(&object) else { return };
        for number in (0..64).filter(|number| known.fragments >> number & 1 == 1) {
            let bucket = self.bucket_of(object, number);
            self.touch(bucket);
            let bucket = &mut self.buckets[bucket];
            let at = bucket.binary_search_by(|one| (one.object, one.number).cmp(&(object, number)));
            let fragment = bucket.remove(at.expect("the object's fragments exist"));
            self.fragments -= 1;
            self.dirty_bytes -= fragment.encoded_len() as u64;
            self.extents -= fragment.extents.len() as u64;
            self.blocks -= fragment.checksums.len() as u64;
            freed.extend(fragment.runs());
        }
    }

    /// Replaces the address of one block by [`LOST`].
    pub fn lose(&mut self, object: ObjectId, block: u32) {
        let Some(known) = self.objects.get(&object).copied() else { return };
        let within = block % FRAGMENT_BLOCKS;
        self.change(object, block / FRAGMENT_BLOCKS, known.pg, known.version, |fragment| {
            let Some(extent) =
                fragment.extents.iter().find(|one| one.block() <= within && within < one.end())
            else {
                return;
            };
            let version = extent.version;
            fragment.punch(within, within + 1, &mut Vec::new());
            fragment.insert(Extent::new(version, LOST, within, 1), &[0]);
        });
    }

    pub fn dirty_count(&self) -> u64 {
        self.dirty.len() as u64
    }

    /// No more pages than the dirty buckets take.
    pub fn dirty_pages(&self) -> u64 {
        self.dirty.len() as u64 + self.dirty_bytes / super::page::PAGE_DATA as u64
    }

    /// No fewer pages than the checkpoint takes in addition when these fragments change: whole buckets become dirty.
    pub fn dirty_cost(&self, object: ObjectId, numbers: impl Iterator<Item = u32>) -> u64 {
        let one = |number| {
            let bucket = self.bucket_of(object, number);
            if self.states[bucket] & DIRTY != 0 {
                return 2;
            }
            let bytes: usize = self.buckets[bucket].iter().map(Fragment::encoded_len).sum();
            3 + (bytes / super::page::PAGE_DATA) as u64
        };
        numbers.map(one).sum()
    }

    /// The same for removing an object.
    pub fn remove_cost(&self, object: ObjectId) -> u64 {
        let known = self.objects.get(&object).map_or(0, |object| object.fragments);
        self.dirty_cost(object, (0..64).filter(|number| known >> number & 1 == 1))
    }

    /// Everything dirty becomes what the beginning checkpoint has to write.
    pub fn begin_checkpoint(&mut self) -> Vec<u32> {
        assert!(self.captured.is_empty(), "one checkpoint at a time");
        let dirty = std::mem::take(&mut self.dirty);
        self.dirty_bytes = 0;
        for bucket in &dirty {
            self.states[*bucket as usize] = PENDING;
        }
        dirty
    }

    /// A bucket that changed since the checkpoint began, as it was then.
    pub fn take_captured(&mut self) -> Option<(u32, Vec<u8>)> {
        self.captured.pop()
    }

    /// The bucket for the checkpoint, if it still has to be serialised.
    pub fn take_pending(&mut self, bucket: u32) -> Option<Vec<u8>> {
        let state = &mut self.states[bucket as usize];
        if *state & PENDING == 0 {
            return None;
        }
        *state &= !PENDING;
        Some(encode_bucket(&self.buckets[bucket as usize]))
    }

    /// Puts a bucket read from a checkpoint in; `None` if it is not one.
    pub fn load_bucket(&mut self, bucket: u32, bytes: &[u8]) -> Option<()> {
        let mut take = Take(bytes);
        let mut fragments = Vec::new();
        while !take.0.is_empty() {
            let fragment = Fragment::take(&mut take)?;
            if self.bucket_of(fragment.object, fragment.number) != bucket as usize {
                return None;
            }
            fragments.push(fragment);
        }
        if !fragments.is_sorted_by(|a, b| (a.object, a.number) < (b.object, b.number)) {
            return None;
        }
        for fragment in &fragments {
            self.fragments += 1;
            self.extents += fragment.extents.len() as u64;
            self.blocks += fragment.checksums.len() as u64;
            let (pg, version) = (fragment.pg, fragment.version);
            let new = Object { pg, version, blocks: 0, fragments: 0 };
            let object = self.objects.entry(fragment.object).or_insert(new);
            object.blocks += fragment.checksums.len() as u32;
            object.fragments |= 1 << fragment.number;
            if version > object.version {
                (object.pg, object.version) = (pg, version);
            }
        }
        *self.buckets.get_mut(bucket as usize)? = fragments;
        Some(())
    }

    pub fn fragments(&self) -> impl Iterator<Item = &Fragment> {
        self.buckets.iter().flatten()
    }

    /// Bytes of memory: counted, not measured.
    pub fn memory(&self) -> u64 {
        let fragment = size_of::<Fragment>() as u64;
        let object = (size_of::<ObjectId>() + size_of::<Object>()) as u64 * 3 / 2;
        // Vectors grow by doubling: a quarter more than what is used, on average.
        self.buckets.len() as u64 * 25
            + self.fragments * fragment * 5 / 4
            + (self.extents * size_of::<Extent>() as u64 + self.blocks * 4) * 5 / 4
            + self.objects.len() as u64 * object
    }

    pub fn counts(&self) -> (u64, u64, u64) {
        (self.objects.len() as u64, self.extents, self.blocks)
    }

    /// A checksum over everything, to compare two states.
    #[cfg(test)]
    pub fn digest(&self) -> u32 {
        let mut out = Vec::new();
        self.buckets.iter().for_each(|bucket| out.extend(encode_bucket(bucket)));
        super::codec::crc32c(&out)
    }
}

fn encode_bucket(bucket: &[Fragment]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bucket.iter().map(Fragment::encoded_len).sum());
    bucket.iter().for_each(|fragment| fragment.put(&mut out));
    out
}

impl Fragment {
    fn pieces(&self, block: u32, end: u32) -> impl Iterator<Item = (Stored, &[u32])> {
        let base = self.number * FRAGMENT_BLOCKS;
        let mut rank = 0;
        self.extents.iter().filter_map(move |extent| {
            let at = rank;
            rank += extent.count() as usize;
            let (from, to) = (block.max(base + extent.block()), end.min(base + extent.end()));
            if from >= to {
                return None;
            }
            let part = extent.part(from - base, to - base);
            let skip = at + (part.block() - extent.block()) as usize;
            let checksums = &self.checksums[skip..skip + part.count() as usize];
            let stored = Stored { block: from, lba: part.lba(), count: part.count(), version: part.version };
            Some((stored, checksums))
        })
    }

    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.extents
            .iter()
            .filter(|extent| extent.lba() != LOST)
            .map(|extent| Run { lba: extent.lba(), count: extent.count() })
    }

    /// Takes the blocks `from..to` out.
    fn punch(&mut self, from: u32, to: u32, freed: &mut Vec<Run>) {
        let first = self.extents.partition_point(|extent| extent.end() <= from);
        let last = self.extents.partition_point(|extent| extent.block() < to);
        if first >= last {
            return;
        }
        let rank: usize = self.extents[..first].iter().map(|extent| extent.count() as usize).sum();
        let (head, tail) = (self.extents[first], self.extents[last - 1]);
        let span: usize = self.extents[first..last].iter().map(|extent| extent.count() as usize).sum();
        let keep_head = from.saturating_sub(head.block()) as usize;
        let keep_tail = tail.end().saturating_sub(to) as usize;
        for extent in &self.extents[first..last] {
            let part = extent.part(extent.block().max(from), extent.end().min(to));
            if part.lba() != LOST {
                freed.push(Run { lba: part.lba(), count: part.count() });
            }
        }
        self.checksums.drain(rank + keep_head..rank + span - keep_tail);
        let kept_head = (keep_head > 0).then(|| head.part(head.block(), from));
        let kept_tail = (keep_tail > 0).then(|| tail.part(to, tail.end()));
        let kept_tail = match kept_tail {
            Some(tail) if planted::active(Bug::ExtentTailMisplaced) => {
                Some(Extent::new(tail.version, tail.lba() + 1, tail.block(), tail.count()))
            }
            kept => kept,
        };
        self.extents.splice(first..last, kept_head.into_iter().chain(kept_tail));
    }

    /// Puts an extent where nothing is.
    fn insert(&mut self, extent: Extent, checksums: &[u32]) {
        let at = self.extents.partition_point(|one| one.end() <= extent.block());
        let rank: usize = self.extents[..at].iter().map(|one| one.count() as usize).sum();
        self.extents.insert(at, extent);
        self.checksums.splice(rank..rank, checksums.iter().copied());
    }

    fn encoded_len(&self) -> usize {
        24 + 1 + 8 + 16 + 2 + self.extents.len() * 24 + self.checksums.len() * 4
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.object(self.object);
        out.u8(self.number as u8);
        out.pg(self.pg);
        out.version(self.version);
        out.u16(self.extents.len() as u16);
        for extent in &self.extents {
            out.version(extent.version);
            out.u64(extent.packed);
        }
        self.checksums.iter().for_each(|checksum| out.u32(*checksum));
    }

    fn take(take: &mut Take<'_>) -> Option<Self> {
        let (object, number) = (take.object()?, u32::from(take.u8()?));
        let (pg, version) = (take.pg()?, take.version()?);
        let (mut extents, mut end, mut blocks) = (Vec::new(), 0, 0);
        for _ in 0..take.u16()? {
            let extent = Extent { version: take.version()?, packed: take.u64()? };
            if extent.block() < end || extent.count() == 0 || extent.end() > FRAGMENT_BLOCKS {
                return None;
            }
            end = extent.end();
            blocks += extent.count();
            extents.push(extent);
        }
        let checksums = (0..blocks).map(|_| take.u32()).collect::<Option<Vec<_>>>()?;
        (number < 64).then_some(Self { object, number, pg, version, extents, checksums })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_config::id::{Epoch, PoolId};

    fn version(sequence: u64) -> ObjectVersion {
        ObjectVersion { interval: Epoch(1), stream: 0, sequence }
    }

    fn object(index: u64) -> ObjectId {
        ObjectId { pool: PoolId(1), index, ..ObjectId::default() }
    }

    fn runs(index: &Index) -> Vec<(u32, u64, u32)> {
        index.stored(object(1), 0, 8192).map(|one| (one.block, one.lba, one.count)).collect()
    }

    #[test]
    fn a_write_splits_what_it_supersedes() {
        let mut index = Index::new(4);
        let (pg, mut freed) = (PgId::default(), Vec::new());
        let sums: Vec<u32> = (0..10).collect();
        index.write(object(1), pg, version(1), 124, &[Run { lba: 1000, count: 10 }], &sums, &mut freed);
        assert_eq!(runs(&index), [(124, 1000, 4), (128, 1004, 6)]);
        index.write(object(1), pg, version(2), 130, &[Run { lba: 50, count: 2 }], &[77, 78], &mut freed);
        assert_eq!(runs(&index), [(124, 1000, 4), (128, 1004, 2), (130, 50, 2), (132, 1008, 2)]);
        assert_eq!(freed, [Run { lba: 1006, count: 2 }]);
        let sums: Vec<u32> = index.pieces(object(1), 127, 6).flat_map(|(_, sums)| sums.to_vec()).collect();
        assert_eq!(sums, [3, 4, 5, 77, 78, 8]);
        freed.clear();
        index.free(object(1), version(3), (126, 5), &mut freed);
        assert_eq!(runs(&index), [(124, 1000, 2), (131, 51, 1), (132, 1008, 2)]);
        assert_eq!(freed.iter().map(|run| run.count).sum::<u32>(), 5);
        assert_eq!(index.object(object(1)).unwrap().blocks, 5);
        index.lose(object(1), 132);
        assert_eq!(runs(&index), [(124, 1000, 2), (131, 51, 1), (132, LOST, 1), (133, 1009, 1)]);
        freed.clear();
        index.remove(object(1), &mut freed);
        assert_eq!(freed.iter().map(|run| run.count).sum::<u32>(), 4);
        assert_eq!(index.counts(), (0, 0, 0));
    }

    #[test]
    fn a_checkpoint_sees_buckets_as_they_were() {
        let mut index = Index::new(1);
        let (pg, mut freed) = (PgId::default(), Vec::new());
        index.write(object(1), pg, version(1), 0, &[Run { lba: 7, count: 1 }], &[1], &mut freed);
        assert_eq!(index.begin_checkpoint(), [0]);
        let before = index.digest();
        index.write(object(2), pg, version(2), 0, &[Run { lba: 8, count: 1 }], &[2], &mut freed);
        assert_eq!(index.take_pending(0), None);
        let (bucket, bytes) = index.take_captured().unwrap();
        assert_eq!((bucket, index.dirty_count()), (0, 1));
        let mut loaded = Index::new(1);
        loaded.load_bucket(0, &bytes).unwrap();
        assert_eq!(loaded.digest(), before);
        assert_eq!(loaded.counts(), (1, 1, 1));
        assert_eq!(Index::new(1).load_bucket(0, &bytes[1..]), None);
    }

    #[test]
    fn freeing_in_an_empty_fragment_keeps_the_version() {
        let mut index = Index::new(2);
        let (pg, mut freed) = (PgId::default(), Vec::new());
        index.free(object(1), version(1), (0, 8), &mut freed);
        assert_eq!(index.object(object(1)), None);
        index.write(object(1), pg, version(2), 300, &[Run { lba: 7, count: 1 }], &[1], &mut freed);
        index.free(object(1), version(3), (0, 8), &mut freed);
        let mut loaded = Index::new(2);
        for bucket in index.begin_checkpoint() {
            loaded.load_bucket(bucket, &index.take_pending(bucket).unwrap()).unwrap();
        }
        assert_eq!(loaded.object(object(1)), index.object(object(1)));
        assert_eq!(loaded.object(object(1)).unwrap().version, version(3));
    }
}
