//! One device: what is on it, what is in its cache, and what is to go wrong.

use crate::random::Random;
use crate::sim::clock::Time;
use crate::sim::trace::{Level, Trace};
use loligo_config::units::{BLOCK_SIZE, BlockCount};
use loligo_reactor::env::{DiskError, DiskOp, Geometry, Ticket, WriteCache};
use std::collections::BTreeMap;

pub(super) const BLOCK: usize = BLOCK_SIZE as usize;
const SECTOR: usize = 512;
/// Blocks of memory kept for later writes.
const SPARE_MAX: usize = 256;

pub(super) type Block = Box<[u8; BLOCK]>;

/// What a device is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DiskOptions {
    /// Blocks of 4 KiB.
    pub blocks: u64,
    /// Whether it loses acknowledged writes at a power cut.
    pub volatile: bool,
    /// Whether a 4 KiB block tears at its sectors.
    pub tears: bool,
    /// Whether discards do something.
    pub discards: bool,
    /// Operations in flight of one queue.
    pub queue_depth: u32,
    /// Blocks of one transfer.
    pub transfer_blocks: u64,
    /// The least time of an operation, in nanoseconds. Some take many times as long.
    pub latency: u64,
}

/// Which operations fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum FailKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes, and writes with FUA on a device without a volatile cache.
    Flush,
}

/// A failure to come: the `after`-th operation of its kind from now on, and all later ones until `until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which operations.
    pub kind: FailKind,
    /// How many succeed before.
    pub after: u32,
    /// True time until which later ones fail, too; 0: only one does.
    pub until: u64,
}

/// Damage that no power cut explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Damage {
    /// Bits of so many blocks flip.
    Rot(u32),
    /// The next write is acknowledged and dropped.
    LostWrite,
    /// The next write lands at another place.
    Misdirected,
    /// So many blocks cannot be read any more.
    Unreadable(u32),
}

/// What a device has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Blocks of which a power cut lost a write.
    pub lost: u64,
    /// Blocks that a power cut has torn.
    pub torn: u64,
    /// Operations that failed.
    pub failed: u64,
}

#[derive(Debug)]
struct Version {
    /// The write that made it.
    write: u64,
    /// Its place in the order of completions, once it is complete.
    completed: Option<u64>,
    bytes: Block,
}

/// An operation in flight.
#[derive(Debug)]
pub(super) struct Pending {
    pub op: DiskOp,
    pub ticket: Ticket,
    pub error: Option<DiskError>,
    /// Of the data when it was submitted: nobody may change a buffer in flight.
    digest: u32,
    /// A flush covers what completed before this.
    covers: u64,
    /// A read was served at its submission already.
    served: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Media {
    pub(super) name: String,
    pub(super) options: DiskOptions,
    pub(super) time: Time,
    pub(super) trace: Trace,
    random: Random,
    blocks: Vec<Option<Block>>,
    /// Newer versions of blocks, oldest first.
    cache: BTreeMap<u64, Vec<Version>>,
    /// Blocks of writes in flight: never two of one.
    writing: BTreeMap<u64, u64>,
    unreadable: BTreeMap<u64, ()>,
    /// By queue, due time and number.
    pub(super) pending: BTreeMap<(u32, u64, u64), Pending>,
    queues: u32,
    sequence: u64,
    completions: u64,
    spare: Vec<Block>,
    failures: Vec<Failure>,
    damage: Option<Damage>,
    slow: (u64, u64),
    hung_until: u64,
    instant: bool,
    stats: DiskStats,
}

impl Media {
    /// An empty device.
    pub fn new(name: String, options: DiskOptions, time: &Time, trace: &Trace, seed: u64) -> Self {
        Self {
            name,
            options,
            time: time.clone(),
            trace: trace.clone(),
            random: Random::new(seed),
            blocks: (0..options.blocks).map(|_| None).collect(),
            cache: BTreeMap::new(),
            writing: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            pending: BTreeMap::new(),
            queues: 0,
            sequence: 0,
            completions: 0,
            spare: Vec::new(),
            failures: Vec::new(),
            damage: None,
            slow: (0, 1),
            hung_until: 0,
            instant: false,
            stats: DiskStats::default(),
        }
    }

    /// Operations complete at once, also those in flight, for what is not part of the run: mkfs before it, the audit
    /// after it.
    pub fn set_instant(&mut self, instant: bool) {
        self.instant = instant;
    }

    /// What it has done.
    pub fn stats(&self) -> DiskStats {
        self.stats
    }

    /// Everything is gone: a new disk.
    pub fn wipe(&mut self) {
        assert!(self.pending.is_empty(), "a disk is replaced when nothing runs on it");
        self.blocks.fill_with(|| None);
        self.cache.clear();
        self.unreadable.clear();
        self.failures.clear();
        self.damage = None;
    }

    /// Until `until` operations take `factor` times as long.
    pub fn slow_down(&mut self, until: u64, factor: u64) {
        self.slow = (until, factor.max(1));
    }

    /// Nothing completes before `until`.
    pub fn hang(&mut self, until: u64) {
        self.hung_until = self.hung_until.max(until);
    }

    /// An operation will fail.
    pub fn fail(&mut self, failure: Failure) {
        self.failures.push(failure);
    }

    /// Ends every fault that is still to come or lasts.
    pub fn heal(&mut self) {
        self.failures.clear();
        self.damage = None;
        (self.slow, self.hung_until) = ((0, 1), 0);
    }

    /// Its blocks.
    pub fn geometry_blocks(&self) -> u64 {
        self.options.blocks
    }

    pub(super) fn geometry(&self) -> Geometry {
        Geometry {
            blocks: BlockCount(self.options.blocks),
            logical_block: 512,
            dma_alignment: 512,
            atomic_blocks: BlockCount(u64::from(!self.options.tears)),
            transfer_blocks_max: BlockCount(self.options.transfer_blocks),
            queue_depth_max: self.options.queue_depth,
            write_cache: if self.options.volatile { WriteCache::Volatile } else { WriteCache::None },
            discards: self.options.discards,
        }
    }

    pub(super) fn new_queue(&mut self) -> u32 {
        self.queues += 1;
        self.queues
    }

    // ------------------------------------------------------------------------------------------- operations

    pub(super) fn submit(&mut self, queue: u32, mut op: DiskOp, ticket: Ticket, poisoned: bool) {
        self.sequence += 1;
        let number = self.sequence;
        let mut error = self.refusal(&op, poisoned);
        let (mut digest, mut served) = (0, false);
        if error.is_none() {
            error = self.failure_of(&op);
            match &mut op {
                DiskOp::Read { lba, buffer } => {
                    served = self.random.one_in(2);
                    if served {
                        self.read_into(lba.0, buffer);
                    }
                }
                DiskOp::Write { lba, data, .. } => {
                    digest = digest_of(data);
                    let blocks = data.iter().flat_map(|piece| piece.chunks_exact(BLOCK));
                    for (at, bytes) in (lba.0..).zip(blocks) {
                        self.begin_block(at, number, |block| block.copy_from_slice(bytes));
                    }
                }
                DiskOp::WriteZeroes { lba, count, .. } => {
                    for at in lba.0..lba.0 + count.0 {
                        self.begin_block(at, number, |block| block.fill(0));
                    }
                }
                DiskOp::Discard { lba, count } => {
                    for at in lba.0..lba.0 + count.0 {
                        let seed = self.random.next_u64();
                        self.begin_block(at, number, |block| undefined(seed, block));
                    }
                }
                DiskOp::Flush => {}
            }
        }
        let due = self.time.now() + self.latency(&op);
        self.trace.mix(number << 8 | u64::from(error.is_some()));
        self.trace.note(Level::Disk, || format!("{} begins {}", self.name, describe(&op)));
        let covers = self.completions;
        self.pending.insert((queue, due, number), Pending { op, ticket, error, digest, covers, served });
    }

    fn refusal(&self, op: &DiskOp, poisoned: bool) -> Option<DiskError> {
        let (first, count) = range(op);
        let is_long =
            matches!(op, DiskOp::Read { .. } | DiskOp::Write { .. }) && count > self.options.transfer_blocks;
        if first.saturating_add(count) > self.options.blocks || is_long {
            return Some(DiskError::Invalid);
        }
        (poisoned && !matches!(op, DiskOp::Read { .. })).then_some(DiskError::Poisoned)
    }

    fn failure_of(&mut self, op: &DiskOp) -> Option<DiskError> {
        let now = self.time.now();
        let kind = match op {
            DiskOp::Read { .. } => FailKind::Read,
            DiskOp::Write { .. } | DiskOp::WriteZeroes { .. } => FailKind::Write,
            DiskOp::Flush => FailKind::Flush,
            DiskOp::Discard { .. } => return None,
        };
        let mut failed = false;
        self.failures.retain_mut(|failure| {
            if failure.kind != kind {
                return true;
            }
            if failure.after > 0 {
                failure.after -= 1;
                return true;
            }
            failed |= failure.until == 0 || now < failure.until;
            now < failure.until
        });
        if let DiskOp::Read { lba, buffer } = op {
            let range = lba.0..lba.0 + (buffer.len() / BLOCK) as u64;
            if self.unreadable.range(range).next().is_some() {
                self.stats.failed += 1;
                return Some(DiskError::Media { errno: libc::EIO });
            }
        }
        self.stats.failed += u64::from(failed);
        failed.then_some(DiskError::Io { errno: libc::EIO })
    }

    fn latency(&mut self, op: &DiskOp) -> u64 {
        if self.instant {
            return 0;
        }
        let base = self.options.latency;
        let (_, count) = range(op);
        let mut time = base + self.random.below(base + 1) + count * base / 64;
        if self.random.one_in(50) {
            time *= 1 + self.random.below(30);
        }
        let (until, factor) = self.slow;
        if self.time.now() < until { time.saturating_mul(factor) } else { time }
    }

    /// A version that is being written.
    fn begin_block(&mut self, at: u64, write: u64, fill: impl FnOnce(&mut [u8; BLOCK])) {
        let other = self.writing.insert(at, write);
        assert!(other.is_none(), "{}: block {at} is written twice at once", self.name);
        let mut bytes = self.spare.pop().unwrap_or_else(|| Box::new([0; BLOCK]));
        fill(&mut bytes);
        self.cache.entry(at).or_default().push(Version { write, completed: None, bytes });
    }

    /// When the next operation of a queue completes.
    pub fn next_due(&self, queue: u32) -> Option<u64> {
        let ((_, due, _), _) = self.pending.range((queue, 0, 0)..=(queue, u64::MAX, u64::MAX)).next()?;
        Some((*due).max(self.hung_until))
    }

    pub(super) fn take_due(&mut self, queue: u32) -> Option<Pending> {
        if self.next_due(queue)? > self.time.now() && !self.instant {
            return None;
        }
        let (key, _) = self.pending.range((queue, 0, 0)..).next()?;
        let key = *key;
        let mut pending = self.pending.remove(&key)?;
        self.completions += 1;
        self.complete(key.2, &mut pending);
        Some(pending)
    }

    fn complete(&mut self, number: u64, pending: &mut Pending) {
        self.trace.mix(number);
        self.trace.note(Level::Disk, || {
            let result = pending.error.map_or_else(String::new, |error| format!(": {error}"));
            format!("{} ends {}{result}", self.name, describe(&pending.op))
        });
        if matches!(pending.error, Some(DiskError::Invalid | DiskError::Poisoned)) {
            return;
        }
        let failed = pending.error.is_some();
        match &mut pending.op {
            DiskOp::Read { lba, buffer } => {
                if !pending.served {
                    self.read_into(lba.0, buffer);
                }
            }
            DiskOp::Write { lba, data, fua } => {
                let now = digest_of(data);
                assert!(
                    now == pending.digest,
                    "{}: a buffer in flight was changed (block {})",
                    self.name,
                    lba.0
                );
                let count = data.iter().map(|piece| piece.len() / BLOCK).sum::<usize>() as u64;
                let durable = *fua || !self.options.volatile;
                self.written(number, lba.0, count, durable, failed);
            }
            DiskOp::WriteZeroes { lba, count, fua } => {
                self.written(number, lba.0, count.0, *fua || !self.options.volatile, failed);
            }
            DiskOp::Discard { lba, count } => {
                self.written(number, lba.0, count.0, !self.options.volatile, failed)
            }
            DiskOp::Flush if failed => self.lose_some_cache(),
            DiskOp::Flush => self.flush(pending.covers),
        }
    }

    fn read_into(&self, lba: u64, buffer: &mut [u8]) {
        for (at, into) in (lba..).zip(buffer.chunks_exact_mut(BLOCK)) {
            match self.visible(at) {
                Some(bytes) => into.copy_from_slice(&bytes[..]),
                None => into.fill(0),
            }
        }
    }

    fn visible(&self, at: u64) -> Option<&Block> {
        let newest = self.cache.get(&at).and_then(|versions| {
            versions
                .iter()
                .filter(|version| version.completed.is_some())
                .max_by_key(|version| version.completed)
        });
        newest.map(|version| &version.bytes).or(self.blocks.get(at as usize)?.as_ref())
    }

    fn written(&mut self, number: u64, first: u64, count: u64, durable: bool, failed: bool) {
        let damage = self.take_damage();
        for at in first..first + count {
            self.writing.remove(&at);
            if self
                .cache
                .get(&at)
                .is_none_or(|versions| versions.iter().all(|version| version.write != number))
            {
                continue;
            }
            match damage {
                Some(Damage::LostWrite) => self.drop_version(at, number),
                Some(Damage::Misdirected) => {
                    let to = self.random.below(self.options.blocks);
                    let wrong = self.take_version(at, number);
                    if let Some(bytes) = wrong.filter(|_| !self.writing.contains_key(&to)) {
                        self.set_durable(to, bytes);
                    }
                }
                _ if failed => self.settle_torn(at, number),
                _ => self.land(at, number, durable),
            }
        }
    }

    fn take_damage(&mut self) -> Option<Damage> {
        let one = matches!(self.damage, Some(Damage::LostWrite | Damage::Misdirected));
        if one { self.damage.take() } else { None }
    }

    /// A version is complete; if it is durable, what was before it is gone.
    fn land(&mut self, at: u64, number: u64, durable: bool) {
        self.unreadable.remove(&at);
        if durable {
            if let Some(bytes) = self.take_version(at, number) {
                self.drop_older(at, number);
                self.set_durable(at, bytes);
            }
        } else if let Some(versions) = self.cache.get_mut(&at)
            && let Some(version) = versions.iter_mut().find(|version| version.write == number)
        {
            version.completed = Some(self.completions);
        }
    }

    fn take_version(&mut self, at: u64, number: u64) -> Option<Block> {
        let versions = self.cache.get_mut(&at)?;
        let index = versions.iter().position(|version| version.write == number)?;
        let version = versions.remove(index);
        if versions.is_empty() {
            self.cache.remove(&at);
        }
        Some(version.bytes)
    }

    fn drop_version(&mut self, at: u64, number: u64) {
        if let Some(bytes) = self.take_version(at, number) {
            self.recycle(bytes);
        }
    }

    fn drop_older(&mut self, at: u64, number: u64) {
        while let Some(version) = self.cache.get(&at).and_then(|versions| versions.first()) {
            if version.write > number {
                return;
            }
            let write = version.write;
            self.drop_version(at, write);
        }
    }

    fn set_durable(&mut self, at: u64, bytes: Block) {
        if let Some(old) = self.blocks[at as usize].replace(bytes) {
            self.recycle(old);
        }
    }

    fn recycle(&mut self, bytes: Block) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(bytes);
        }
    }

    fn flush(&mut self, covers: u64) {
        let durable = |versions: &Vec<Version>| {
            let completed = versions.iter().filter_map(|version| Some((version.completed?, version.write)));
            completed.filter(|(at, _)| *at <= covers).max().map(|(_, write)| write)
        };
        let list: Vec<_> =
            self.cache.iter().filter_map(|(at, versions)| Some((*at, durable(versions)?))).collect();
        for (at, number) in list {
            if let Some(bytes) = self.take_version(at, number) {
                self.drop_older(at, number);
                self.set_durable(at, bytes);
            }
        }
    }

    // ----------------------------------------------------------------------------------------- what breaks

    /// A failed flush: of what was in the cache some is durable, some stays, and some is gone as if never written.
    fn lose_some_cache(&mut self) {
        let completed = |(at, versions): (&u64, &Vec<Version>)| {
            let last = versions.iter().rev().find(|version| version.completed.is_some())?;
            Some((*at, last.write))
        };
        for (at, number) in self.cache.iter().filter_map(completed).collect::<Vec<_>>() {
            match self.random.below(3) {
                0 => self.drop_version(at, number),
                1 => self.land(at, number, true),
                _ => {}
            }
        }
    }

    /// A write that was broken off: each sector is old or new.
    fn settle_torn(&mut self, at: u64, number: u64) {
        let Some(mut bytes) = self.take_version(at, number) else { return };
        let kept = self.random.below(3);
        if kept == 2 && self.options.tears {
            let below = self.visible(at).map(|block| **block);
            for sector in 0..BLOCK / SECTOR {
                if self.random.one_in(2) {
                    let range = sector * SECTOR..(sector + 1) * SECTOR;
                    match &below {
                        Some(old) => bytes[range.clone()].copy_from_slice(&old[range]),
                        None => bytes[range].fill(0),
                    }
                }
            }
        } else if kept == 0 {
            return self.recycle(bytes);
        }
        self.completions += 1;
        if self.options.volatile {
            let completed = Some(self.completions);
            self.cache.entry(at).or_default().push(Version { write: number, completed, bytes });
        } else {
            self.drop_older(at, number);
            self.set_durable(at, bytes);
        }
    }

    /// The process of a queue is gone: what it had in flight is done, or in part, or not.
    pub(super) fn abandon(&mut self, queue: u32) {
        while let Some((key, _)) = self.pending.range((queue, 0, 0)..=(queue, u64::MAX, u64::MAX)).next() {
            let key = *key;
            let Some(pending) = self.pending.remove(&key) else { return };
            let (first, count) = range(&pending.op);
            if matches!(pending.op, DiskOp::Read { .. } | DiskOp::Flush) {
                continue;
            }
            for at in first..first + count {
                if self.writing.get(&at) == Some(&key.2) {
                    self.writing.remove(&at);
                    self.settle_torn(at, key.2);
                }
            }
        }
    }

    /// The power is gone: of each block in the cache any version may be what is found afterwards.
    pub fn power_cut(&mut self) {
        assert!(self.pending.is_empty(), "processes end with their power");
        for (at, versions) in std::mem::take(&mut self.cache) {
            let count = versions.len() as u64 + 1;
            let newest = self.random.below(count) as usize;
            let tears = self.options.tears && self.random.one_in(3);
            let mut bytes = self.blocks[at as usize].take().unwrap_or_else(|| Box::new([0; BLOCK]));
            for sector in 0..BLOCK / SECTOR {
                let pick = if tears { self.random.below(count) as usize } else { newest };
                if pick > 0 {
                    let range = sector * SECTOR..(sector + 1) * SECTOR;
                    bytes[range.clone()].copy_from_slice(&versions[pick - 1].bytes[range]);
                }
            }
            self.stats.torn += u64::from(tears);
            self.stats.lost += u64::from(!tears && newest + 1 < count as usize);
            self.trace.note(Level::Disk, || match (tears, newest + 1 == count as usize) {
                (true, _) => format!("{}: block {at} is torn", self.name),
                (false, true) => format!("{}: block {at} is kept", self.name),
                (false, false) => format!("{}: block {at} has lost its last write", self.name),
            });
            self.blocks[at as usize] = Some(bytes);
        }
    }

    /// Damages what is on the device, or what is written next.
    pub fn damage(&mut self, damage: Damage) {
        let count = match damage {
            Damage::LostWrite | Damage::Misdirected => {
                self.damage = Some(damage);
                return;
            }
            Damage::Rot(count) | Damage::Unreadable(count) => count,
        };
        let used: Vec<usize> = (0..self.blocks.len()).filter(|at| self.blocks[*at].is_some()).collect();
        for _ in 0..count.min(used.len() as u32) {
            let at = used[self.random.below(used.len() as u64) as usize];
            if matches!(damage, Damage::Unreadable(_)) {
                self.unreadable.insert(at as u64, ());
            } else if let Some(block) = &mut self.blocks[at] {
                let bit = self.random.below(BLOCK as u64 * 8) as usize;
                block[bit / 8] ^= 1 << (bit % 8);
            }
            self.trace.note(Level::Faults, || format!("{}: block {at} is damaged", self.name));
        }
    }
}

fn digest_of(data: &[loligo_reactor::dma::SharedBuffer]) -> u32 {
    data.iter().fold(0, |sum: u32, piece| sum.rotate_left(1) ^ loligo_osd::store::crc32c(piece))
}

/// What a discarded block reads as.
fn undefined(seed: u64, block: &mut [u8; BLOCK]) {
    match seed % 2 {
        0 => block.fill(0),
        _ => block.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&seed.to_le_bytes())),
    }
}

/// First block and count.
fn range(op: &DiskOp) -> (u64, u64) {
    match op {
        DiskOp::Read { lba, buffer } => (lba.0, (buffer.len() / BLOCK) as u64),
        DiskOp::Write { lba, data, .. } => {
            (lba.0, data.iter().map(|piece| piece.len() / BLOCK).sum::<usize>() as u64)
        }
        DiskOp::Discard { lba, count } | DiskOp::WriteZeroes { lba, count, .. } => (lba.0, count.0),
        DiskOp::Flush => (0, 0),
    }
}

fn describe(op: &DiskOp) -> String {
    let (first, count) = range(op);
    match op {
        DiskOp::Read { .. } => format!("read of {count} at {first}"),
        DiskOp::Write { fua, .. } => {
            format!("write of {count} at {first}{}", if *fua { " (FUA)" } else { "" })
        }
        DiskOp::Flush => "flush".to_owned(),
        DiskOp::Discard { .. } => format!("discard of {count} at {first}"),
        DiskOp::WriteZeroes { .. } => format!("zeroes of {count} at {first}"),
    }
}
