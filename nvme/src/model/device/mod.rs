//! A software model of a device with a volatile cache, behind the `BlockDevice` seam.
//!
//! Acknowledged writes stay in RAM until a flush or FUA, or until the background destage happens to write some of
//! their sectors. At a power cut what is in RAM is lost, kept out of order, or torn, sector by sector, as
//! a real drive may do. Over [`Memory`] the cut is a call ([`Model::power_cut`]) and every legal outcome can be
//! enumerated ([`Model::crash_image`]); over [`File`] inside an OSD process, SIGKILL is the cut: the page cache of the
//! machine would otherwise hide every missing flush.
//!
//! The model also checks its caller (never two writes to one block in flight), counts what it is asked ([`Record`])
//! and fails on demand ([`Fault`]). It is deterministic: one seed, no clock, and nothing happens but in calls.

mod backing;
mod cache;
mod fault;
mod prng;
mod record;
#[cfg(test)]
mod tests;

pub use backing::{Backing, File, FileError, Memory, SyncMode};
pub use fault::{Aim, Fault, OpKind};
pub use prng::Prng;
pub use record::{Counts, RECORDED_WRITES_MAX, Record, RecordedWrite};

use cache::{Cache, Content, Unit};
use fault::{Faults, Plan};
use loligo_config::units::{BLOCK_SIZE, BlockCount, Lba};
use loligo_reactor::env::{
    BlockDevice, Completion, Completions, DiskError, DiskOp, Entropy, Geometry, QueueFull, Ticket, WriteCache,
};
use prng::below;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

const SECTOR_LEN: usize = 512;

/// How many polls an operation takes.
#[derive(Clone, Debug)]
pub enum Latency {
    /// By chance, evenly between two numbers. The first poll after the submission is 1; 0 counts as 1.
    Polls {
        /// At least.
        min: u32,
        /// At most.
        max: u32,
    },
    /// The numbers in turn, one per submission, round and round. Empty: one poll each.
    Schedule(Vec<u32>),
}

/// What kind of device a model is.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// For latency, order, destage and failures.
    pub seed: u64,
    /// Its size; `None`: that of the backing, which is also the most.
    pub blocks: Option<BlockCount>,
    /// Whether acknowledged writes can be lost.
    pub write_cache: WriteCache,
    /// Whether a power cut tears a 4 KiB block at its 512-byte sectors; if not, blocks are kept or lost whole.
    pub tears_blocks: bool,
    /// Whether discards do something.
    pub discards: bool,
    /// Largest read or write.
    pub transfer_blocks_max: BlockCount,
    /// Most operations in flight.
    pub queue_depth_max: u32,
    /// How long operations take.
    pub latency: Latency,
    /// Whether operations of equal latency complete in any order, and slower ones are overtaken. If not, they complete
    /// in the order of submission.
    pub reorders: bool,
    /// Sectors (or blocks, if they do not tear) that the background destage tries to write in each poll.
    pub destage_per_poll: u32,
    /// Blocks of completed writes that the cache holds; beyond, the oldest are destaged.
    pub cache_blocks_max: BlockCount,
    /// Whether a failed write or flush makes all later ones fail, as the other back ends do.
    pub poisons: bool,
    /// Whether two writes to one block in flight at once are a panic.
    pub checks_caller: bool,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            blocks: None,
            write_cache: WriteCache::Volatile,
            tears_blocks: true,
            discards: true,
            transfer_blocks_max: BlockCount(512),
            queue_depth_max: 128,
            latency: Latency::Polls { min: 1, max: 3 },
            reorders: true,
            destage_per_poll: 1,
            // 64 MiB: about what a drive with DRAM keeps for writes.
            cache_blocks_max: BlockCount(16_384),
            poisons: true,
            checks_caller: true,
        }
    }
}

/// What becomes of one sector of a write at a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The write's sector is lost: what was there before stays.
    Old,
    /// The write's sector is kept.
    New,
}

/// A write that a power cut may lose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnflushedWrite {
    /// First block.
    pub lba: Lba,
    /// How many blocks.
    pub count: BlockCount,
    /// Whether it was acknowledged.
    pub completed: bool,
    /// The 512-byte sectors, counted from the write's start, that a crash decides about; on a device that does
    /// not tear, the first sector of each block. The others are on the medium already or superseded.
    pub sectors: Vec<u32>,
}

/// The device.
#[derive(Debug)]
pub struct Model<B> {
    geometry: Geometry,
    options: ModelOptions,
    backing: B,
    cache: Cache,
    prng: Prng,
    flights: BTreeMap<u64, Flight>,
    /// (poll, tie break, sequence) of every flight that does not hang.
    due: BTreeSet<(u64, u64, u64)>,
    writing: BTreeSet<u64>,
    polls: u64,
    submitted: u64,
    completed: u64,
    last_due: u64,
    faults: Faults,
    totals: Counts,
    record: Record,
    poisoned: bool,
}

#[derive(Debug)]
struct Flight {
    op: DiskOp,
    ticket: Ticket,
    plan: Plan,
    blocks: Option<(Lba, BlockCount)>,
    /// For a flush: the completions that it covers.
    covers: u64,
    /// Whether its blocks are marked as being written.
    claims: bool,
}

impl<B: Backing> Model<B> {
    /// A device over a backing, just powered on.
    ///
    /// # Panics
    /// If the options ask for more blocks than the backing has.
    pub fn new(backing: B, options: ModelOptions) -> Self {
        let blocks = options.blocks.unwrap_or(backing.blocks());
        assert!(blocks <= backing.blocks(), "a device of {blocks} blocks does not fit onto its backing");
        let geometry = Geometry {
            blocks,
            logical_block: if options.tears_blocks { SECTOR_LEN as u32 } else { BLOCK_SIZE },
            dma_alignment: SECTOR_LEN as u32,
            atomic_blocks: BlockCount(u64::from(!options.tears_blocks)),
            transfer_blocks_max: options.transfer_blocks_max,
            queue_depth_max: options.queue_depth_max,
            write_cache: options.write_cache,
            discards: options.discards,
        };
        let unit_len = if options.tears_blocks { SECTOR_LEN } else { BLOCK_SIZE as usize };
        Self {
            geometry,
            backing,
            cache: Cache::new(unit_len),
            prng: Prng::new(options.seed),
            options,
            flights: BTreeMap::new(),
            due: BTreeSet::new(),
            writing: BTreeSet::new(),
            polls: 0,
            submitted: 0,
            completed: 0,
            last_due: 0,
            faults: Faults::default(),
            totals: Counts::default(),
            record: Record::default(),
            poisoned: false,
        }
    }

    /// What was submitted since the record was last taken.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Takes the record and begins a new one.
    pub fn take_record(&mut self) -> Record {
        std::mem::take(&mut self.record)
    }

    /// Adds a fault.
    pub fn inject(&mut self, fault: Fault) {
        self.faults.add(fault, &self.totals);
    }

    /// Takes back all faults. A poisoned device stays poisoned.
    pub fn clear_faults(&mut self) {
        self.faults.clear();
    }

    /// Lets operations that hang complete at the next poll.
    pub fn release_hung(&mut self) {
        let at = self.polls + 1;
        for (&sequence, flight) in &mut self.flights {
            if std::mem::take(&mut flight.plan.hang) {
                self.due.insert((at, sequence, sequence));
            }
        }
    }

    /// Flips the bits of `mask` in one byte of the medium. What the cache has of that block is written before, so
    /// that the rot is seen.
    ///
    /// # Errors
    /// When the backing fails.
    ///
    /// # Panics
    /// If the block lies beyond the device or the byte beyond the block.
    pub fn rot(&mut self, lba: Lba, byte: u32, mask: u8) -> io::Result<()> {
        assert!(lba.0 < self.geometry.blocks.0, "block {lba} is beyond the device");
        assert!(byte < BLOCK_SIZE, "byte {byte} is beyond a block");
        self.cache.destage_block(lba, &mut self.backing)?;
        let offset = lba.to_bytes().expect("within the device");
        let mut block = vec![0; BLOCK_SIZE as usize];
        self.backing.read_at(offset, &mut block)?;
        block[byte as usize] ^= mask;
        self.backing.write_at(offset, &block)
    }

    /// Writes that a power cut at this point may lose, in the order of submission.
    pub fn unflushed(&self) -> Vec<UnflushedWrite> {
        self.cache
            .writes()
            .map(|(_, write)| UnflushedWrite {
                lba: write.lba,
                count: write.count,
                completed: write.completed.is_some(),
                sectors: self.open_sectors(&write.units),
            })
            .filter(|write| !write.sectors.is_empty())
            .collect()
    }

    fn open_sectors(&self, units: &[Unit]) -> Vec<u32> {
        let open = units.iter().enumerate().filter(|(_, unit)| **unit != Unit::Done);
        let per_unit = self.sectors_per_unit();
        open.map(|(index, _)| u32::try_from(index * per_unit).expect("a write of less than 2 TiB")).collect()
    }

    fn sectors_per_unit(&self) -> usize {
        if self.options.tears_blocks { 1 } else { BLOCK_SIZE as usize / SECTOR_LEN }
    }

    /// Cuts the power. Every sector that is not on the medium is kept or lost by chance, operations in flight
    /// vanish without a completion, and the device is as after power-on; faults and the record stay.
    ///
    /// # Errors
    /// When the backing fails.
    pub fn power_cut(&mut self, entropy: &mut impl Entropy) -> io::Result<()> {
        // Even chances alone would hardly ever lose or keep everything, so each write draws its own.
        let mut odds = Vec::new();
        self.power_cut_with(|write, _| {
            while odds.len() <= write {
                odds.push([0, 1, 4, 7, 8][usize::try_from(below(entropy, 5)).expect("below 5")]);
            }
            if below(entropy, 8) < odds[write] { Choice::New } else { Choice::Old }
        })
    }

    /// As [`Model::power_cut`], with the outcome chosen by the caller, as for [`Model::crash_image`].
    ///
    /// # Errors
    /// When the backing fails.
    pub fn power_cut_with(&mut self, choice: impl FnMut(usize, u32) -> Choice) -> io::Result<()> {
        let per_unit = self.sectors_per_unit();
        settle_crash(&self.cache, per_unit, &mut self.backing, choice)?;
        self.backing.sync()?;
        self.cache.clear();
        self.flights.clear();
        self.due.clear();
        self.writing.clear();
        self.poisoned = false;
        Ok(())
    }

    /// The medium.
    pub fn backing(&self) -> &B {
        &self.backing
    }

    /// Switches the device off with everything flushed, and gives the medium back.
    ///
    /// # Errors
    /// When the backing fails.
    ///
    /// # Panics
    /// If operations are in flight.
    pub fn into_backing(mut self) -> io::Result<B> {
        assert!(self.flights.is_empty(), "operations are in flight");
        self.sync_all()?;
        Ok(self.backing)
    }

    /// Makes every completed write durable, as a device does that is shut down in order.
    ///
    /// # Errors
    /// When the backing fails.
    pub fn sync_all(&mut self) -> io::Result<()> {
        self.cache.flush(self.completed, &mut self.backing)?;
        self.backing.sync()
    }

    fn plan(&mut self, op: &DiskOp, blocks: Option<(Lba, BlockCount)>) -> Plan {
        let kind = OpKind::of(op);
        let mut plan = self.faults.plan(kind, blocks, &self.totals);
        if !self.is_valid(op, blocks) {
            plan.error = Some(DiskError::Invalid);
        } else if self.poisoned && kind.poisons() {
            plan.error = Some(DiskError::Poisoned);
        }
        plan
    }

    fn is_valid(&self, op: &DiskOp, blocks: Option<(Lba, BlockCount)>) -> bool {
        let Some((lba, count)) = blocks else {
            return true;
        };
        let whole = |len: usize| len.is_multiple_of(BLOCK_SIZE as usize);
        let fits = match op {
            DiskOp::Read { buffer, .. } => whole(buffer.len()) && count <= self.geometry.transfer_blocks_max,
            DiskOp::Write { data, .. } => {
                whole(data.iter().map(|piece| piece.len()).sum())
                    && count <= self.geometry.transfer_blocks_max
            }
            DiskOp::Flush | DiskOp::Discard { .. } | DiskOp::WriteZeroes { .. } => true,
        };
        let within = lba.checked_add(count).is_some_and(|end| end.0 <= self.geometry.blocks.0);
        fits && count.0 > 0 && within
    }

    /// Marks the blocks of a write as being written.
    fn claim(&mut self, lba: Lba, count: BlockCount) {
        for block in lba.0..lba.0 + count.0 {
            let new = self.writing.insert(block);
            assert!(
                new || !self.options.checks_caller,
                "two writes to block {block} in flight: the caller's bug"
            );
        }
    }

    /// Gives the write to the cache, where parts of it may land from now on.
    fn begin(&mut self, sequence: u64, flight: &Flight) {
        let Some((lba, count)) = flight.blocks.filter(|_| flight.claims && !flight.plan.lost) else {
            return;
        };
        let content = match &flight.op {
            DiskOp::Write { data, .. } => Content::Lent(Box::new(data.clone())),
            DiskOp::WriteZeroes { .. } => Content::Zeroes,
            DiskOp::Discard { .. } if self.geometry.discards => {
                Content::Discarded { seed: self.prng.next_u64() }
            }
            DiskOp::Read { .. } | DiskOp::Flush | DiskOp::Discard { .. } => return,
        };
        let target = flight.plan.land_at.unwrap_or(lba);
        let end = target.checked_add(count);
        assert!(
            end.is_some_and(|end| end.0 <= self.geometry.blocks.0),
            "a write misdirected beyond the device"
        );
        self.cache.begin(sequence, target, count, content);
    }

    fn schedule(&mut self, sequence: u64, plan: &Plan) {
        let polls = match &self.options.latency {
            Latency::Polls { min, max } => {
                u64::from(*min) + below(&mut self.prng, u64::from(max.saturating_sub(*min)) + 1)
            }
            Latency::Schedule(polls) if polls.is_empty() => 1,
            Latency::Schedule(polls) => u64::from(polls[(sequence % polls.len() as u64) as usize]),
        };
        let mut due = self.polls + polls.max(1) + plan.extra_polls;
        let mut tie = 0;
        if self.options.reorders {
            tie = self.prng.next_u64();
        } else {
            due = due.max(self.last_due);
            self.last_due = due;
        }
        if !plan.hang {
            self.due.insert((due, tie, sequence));
        }
    }

    /// Carries out one operation, at its completion.
    fn execute(&mut self, sequence: u64, flight: &mut Flight) -> Result<(), DiskError> {
        self.completed += 1;
        let result = self.carry_out(sequence, flight);
        if let (Err(_), true) = (result, OpKind::of(&flight.op).poisons() && self.options.poisons) {
            self.poisoned |= !matches!(result, Err(DiskError::Invalid));
        }
        result
    }

    fn carry_out(&mut self, sequence: u64, flight: &mut Flight) -> Result<(), DiskError> {
        if let Some(error) = flight.plan.error {
            self.cache.fail(sequence, self.completed, &mut self.prng);
            if flight.op_is_flush() && error != DiskError::Poisoned {
                let result = self.cache.fail_flush(flight.covers, &mut self.backing, &mut self.prng);
                result.map_err(io_error)?;
            }
            return Err(error);
        }
        match &mut flight.op {
            DiskOp::Read { lba, buffer } => {
                let offset = lba.to_bytes().ok_or(DiskError::Invalid)?;
                self.backing.read_at(offset, buffer).map_err(media_error)?;
                self.cache.overlay(*lba, buffer, &mut self.prng);
                Ok(())
            }
            DiskOp::Write { fua, .. } | DiskOp::WriteZeroes { fua, .. } => {
                let durable = *fua || self.geometry.write_cache == WriteCache::None;
                self.finish_write(sequence, durable).map_err(io_error)?;
                if let Some((lba, count)) = flight.blocks {
                    self.faults.written(lba, count);
                }
                Ok(())
            }
            DiskOp::Flush => self.cache.flush(flight.covers, &mut self.backing).map_err(io_error),
            DiskOp::Discard { .. } => {
                let seed = self.prng.next_u64();
                self.cache.complete_discard(sequence, self.completed, seed);
                if self.geometry.write_cache == WriteCache::None {
                    self.cache.flush(self.completed, &mut self.backing).map_err(io_error)?;
                }
                Ok(())
            }
        }
    }

    fn finish_write(&mut self, sequence: u64, durable: bool) -> io::Result<()> {
        if durable {
            self.cache.destage(sequence, &mut self.backing, |_| true)?;
        }
        self.cache.complete(sequence, self.completed);
        self.cache.shrink(self.options.cache_blocks_max.0, &mut self.backing)
    }

    /// Whether a successful completion of this operation claims that something is durable.
    fn is_durable(&self, op: &DiskOp) -> bool {
        match op {
            DiskOp::Write { fua, .. } | DiskOp::WriteZeroes { fua, .. } => {
                *fua || self.geometry.write_cache == WriteCache::None
            }
            DiskOp::Flush => true,
            DiskOp::Read { .. } | DiskOp::Discard { .. } => false,
        }
    }

    /// One sync of the backing for all that this poll claims to be durable, before anybody is told.
    fn sync_for(&mut self, done: &mut Completions, first: usize) {
        let claims = |completion: &Completion, model: &Self| {
            completion.result.is_ok() && model.is_durable(&completion.op)
        };
        if !done.range(first..).any(|completion| claims(completion, self)) {
            return;
        }
        let Err(error) = self.backing.sync() else {
            return;
        };
        for completion in done.range_mut(first..) {
            if claims(completion, self) {
                completion.result = Err(io_error(error_again(&error)));
            }
        }
        self.poisoned |= self.options.poisons;
    }
}

/// Applies the kept sectors of every write that is not on the medium, in the order of submission.
fn settle_crash(
    cache: &Cache,
    sectors_per_unit: usize,
    to: &mut impl Backing,
    mut choice: impl FnMut(usize, u32) -> Choice,
) -> io::Result<()> {
    let mut index = 0;
    for (sequence, write) in cache.writes() {
        let mut asked = false;
        for (unit, state) in write.units.iter().enumerate().filter(|(_, unit)| **unit != Unit::Done) {
            debug_assert_ne!(*state, Unit::Done);
            asked = true;
            let sector = u32::try_from(unit * sectors_per_unit).expect("a write of less than 2 TiB");
            if choice(index, sector) == Choice::New {
                cache.copy_unit(sequence, unit, to)?;
            }
        }
        index += usize::from(asked);
    }
    Ok(())
}

impl Model<Memory> {
    /// The medium as a power cut at this point may leave it. `choice` is asked for each entry of
    /// [`Model::unflushed`] (by index) and each of its sectors, in that order; the model itself does not change.
    pub fn crash_image(&self, choice: impl FnMut(usize, u32) -> Choice) -> Memory {
        let mut image = self.backing.clone();
        settle_crash(&self.cache, self.sectors_per_unit(), &mut image, choice).expect("memory does not fail");
        image
    }
}

impl Flight {
    fn op_is_flush(&self) -> bool {
        matches!(self.op, DiskOp::Flush)
    }
}

/// The blocks that an operation touches; a length that is no whole number of blocks is rounded up.
fn blocks_of(op: &DiskOp) -> Option<(Lba, BlockCount)> {
    let blocks = |len: usize| BlockCount((len as u64).div_ceil(u64::from(BLOCK_SIZE)));
    match op {
        DiskOp::Read { lba, buffer } => Some((*lba, blocks(buffer.len()))),
        DiskOp::Write { lba, data, .. } => Some((*lba, blocks(data.iter().map(|piece| piece.len()).sum()))),
        DiskOp::Flush => None,
        DiskOp::Discard { lba, count } | DiskOp::WriteZeroes { lba, count, .. } => Some((*lba, *count)),
    }
}

fn io_error(error: io::Error) -> DiskError {
    DiskError::Io { errno: error.raw_os_error().unwrap_or(0) }
}

fn media_error(error: io::Error) -> DiskError {
    DiskError::Media { errno: error.raw_os_error().unwrap_or(0) }
}

fn error_again(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| io::Error::from(error.kind()), io::Error::from_raw_os_error)
}

impl<B: Backing> BlockDevice for Model<B> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        if self.flights.len() >= self.options.queue_depth_max as usize {
            return Err(QueueFull(op));
        }
        let blocks = blocks_of(&op);
        let count = blocks.map_or(BlockCount(0), |(_, count)| count);
        self.totals.note(&op, 0);
        self.record.note(&op, count);
        let sequence = self.submitted;
        self.submitted += 1;
        let plan = self.plan(&op, blocks);
        let refused = matches!(plan.error, Some(DiskError::Invalid | DiskError::Poisoned));
        let writes = matches!(op, DiskOp::Write { .. } | DiskOp::WriteZeroes { .. } | DiskOp::Discard { .. });
        let flight = Flight { op, ticket, plan, blocks, covers: self.completed, claims: writes && !refused };
        if let (Some((lba, count)), true) = (blocks, flight.claims) {
            self.claim(lba, count);
        }
        self.begin(sequence, &flight);
        self.schedule(sequence, &plan);
        self.flights.insert(sequence, flight);
        Ok(())
    }

    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32 {
        self.polls += 1;
        for _ in 0..self.options.destage_per_poll {
            // A medium that fails in the background: the same error comes back at the flush, from the same backing.
            let _ = self.cache.destage_some(&mut self.backing, &mut self.prng);
        }
        let (first, mut delivered) = (done.len(), 0);
        while delivered < budget {
            let Some(&entry) = self.due.first().filter(|(poll, ..)| *poll <= self.polls) else {
                break;
            };
            self.due.remove(&entry);
            let mut flight = self.flights.remove(&entry.2).expect("what is due is in flight");
            let result = self.execute(entry.2, &mut flight);
            if let (Some((lba, count)), true) = (flight.blocks, flight.claims) {
                (lba.0..lba.0 + count.0).for_each(|block| {
                    self.writing.remove(&block);
                });
            }
            done.push_back(Completion { ticket: flight.ticket, result, op: flight.op });
            delivered += 1;
        }
        self.sync_for(done, first);
        delivered
    }

    fn in_flight(&self) -> u32 {
        u32::try_from(self.flights.len()).expect("at most the queue depth")
    }
}
