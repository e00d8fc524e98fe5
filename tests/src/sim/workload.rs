//! What clients do, and whether what they see is right.
//!
//! Every image's first blocks are *small*: they are written by the sector, and each 512-byte sector of them is a register
//! of its own. All other blocks are written whole. A register's number is made of image, block and sector.

use super::options::{LoadOptions, Options};
use super::trace::{Level, Trace};
use crate::check::{History, Outcome, Violation};
use crate::random::Random;
use crate::stamp::{self, Stamp};
use loligo_client::{IoDone, IoError};
use loligo_config::id::SessionId;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const SECTOR: u64 = 512;
const BLOCK: u64 = 4096;
/// Blocks at the begin of each image that are written by the sector.
const SMALL_BLOCKS: u64 = 4;
/// Zeroes of one block that reads may still see, beyond which it gets data instead: each of them doubles the ways in which the
/// checker can explain a read, at worst.
const ZEROES_MAX: usize = 6;
/// Blocks of the hot part of an image.
const HOT_BLOCKS: u64 = 12;
/// Blocks of one read of a scan.
const SCAN_BLOCKS: u64 = 32;

/// Why a run has failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// What is wrong.
    pub what: String,
    /// The register, when it is about one, with its last events.
    pub register: Option<(u64, Vec<String>)>,
}

impl Failure {
    /// About no single block.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), register: None }
    }
}

impl From<Violation> for Failure {
    fn from(violation: Violation) -> Self {
        let events = violation.to_string().lines().map(str::to_owned).collect();
        Self { what: "a block holds what it may not hold".into(), register: Some((violation.block, events)) }
    }
}

/// An image, as everybody knows it.
#[derive(Clone, Debug)]
pub struct Image {
    /// Its name.
    pub name: String,
    /// Its pool's name.
    pub pool: String,
    /// Its size in blocks.
    pub blocks: u64,
    /// Objects have 2^order bytes.
    pub order: u8,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Frees whole blocks.
    Discard,
    /// Zeroes.
    WriteZeroes,
    /// Waits for nothing.
    Flush,
    /// Asks what is allocated.
    Extents,
}

impl Kind {
    /// Whether it changes what reads see.
    pub fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes)
    }
}

/// A request to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its number in the run.
    pub op: u64,
    /// Which image.
    pub image: usize,
    /// What.
    pub kind: Kind,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What clients are to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Nothing new.
    Drain,
    /// The load.
    Load,
    /// Reads of everything.
    Scan,
}

/// Sums of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkStats {
    /// Requests that have ended well.
    pub done: u64,
    /// Requests that have ended with an error that is allowed.
    pub refused: u64,
    /// Requests whose client died.
    pub abandoned: u64,
    /// Writes of unknown fate whose session was fenced.
    pub fenced: u64,
}

/// The load of all clients, and the history that it makes.
pub struct Work {
    seed: u64,
    load: LoadOptions,
    damage: bool,
    random: Random,
    trace: Trace,
    history: History,
    /// The images that every client opens.
    pub images: Vec<Image>,
    /// What clients are to do.
    pub mode: Mode,
    scan: VecDeque<(usize, u64, u64)>,
    last_op: u64,
    /// Writes that may still take effect, by the session that sent them.
    open: BTreeMap<SessionId, BTreeSet<u64>>,
    /// Requests whose session was fenced: what their client hears of them says nothing any more.
    fenced: BTreeSet<u64>,
    stats: WorkStats,
}

/// The registers of a range of an image, with their bytes in the range.
fn registers(image: usize, offset: u64, len: u64) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let step = if at < SMALL_BLOCKS * BLOCK { SECTOR } else { BLOCK };
        let from = at;
        at += step;
        let range = (from - offset) as usize..(at - offset) as usize;
        Some((((image as u64) << 32) | (from / SECTOR), range))
    })
}

/// A register in words.
pub fn name_of(register: u64) -> String {
    let (image, sector) = (register >> 32, register & 0xffff_ffff);
    match sector / 8 {
        block if block < SMALL_BLOCKS => format!("image {image} block {block} sector {}", sector % 8),
        block => format!("image {image} block {block}"),
    }
}

impl Work {
    /// Of a run; the images are made later.
    pub fn new(options: &Options, trace: &Trace) -> Self {
        let image = |(at, image): (usize, &super::options::ImageOptions)| Image {
            name: format!("image{at}"),
            pool: format!("pool{}", image.pool),
            blocks: image.blocks,
            order: image.order,
        };
        Self {
            seed: options.seed,
            load: options.load,
            damage: options.damage,
            random: Random::new(options.stream(2)),
            trace: trace.clone(),
            history: History::new(),
            images: options.images.iter().enumerate().map(image).collect(),
            mode: Mode::Drain,
            scan: VecDeque::new(),
            last_op: 0,
            open: BTreeMap::new(),
            fenced: BTreeSet::new(),
            stats: WorkStats::default(),
        }
    }

    /// Sums.
    pub fn stats(&self) -> WorkStats {
        self.stats
    }

    /// The history so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// A random number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    /// From now on nothing of what happened before can take effect any more.
    pub fn settle(&mut self, now: u64) {
        self.history.settle(now);
        self.open.clear();
    }

    /// The mon has said that every OSD goes by the fence of this session: nothing of it takes effect any more.
    pub fn fence(&mut self, now: u64, session: SessionId) {
        let ops = self.open.remove(&session).unwrap_or_default();
        self.stats.fenced += ops.len() as u64;
        for op in ops {
            self.history.abandon(now, op);
            self.history.bound(now, op);
            self.fenced.insert(op);
        }
    }

    /// Everything is to be read.
    pub fn begin_scan(&mut self) {
        self.mode = Mode::Scan;
        for (at, image) in self.images.iter().enumerate() {
            let mut block = 0;
            while block < image.blocks {
                let count = SCAN_BLOCKS.min(image.blocks - block);
                self.scan.push_back((at, block, count));
                block += count;
            }
        }
    }

    /// Whether reads of a scan are still to be begun.
    pub fn is_scanning(&self) -> bool {
        !self.scan.is_empty()
    }

    /// The next request of a client to whom the images have these sizes in blocks; `None`: nothing to do now.
    pub fn next_request(&mut self, sizes: impl Fn(usize) -> Option<u64>) -> Option<Request> {
        let (image, kind, offset, len) = match self.mode {
            Mode::Drain => return None,
            Mode::Scan => {
                let (image, block, count) = *self.scan.front()?;
                // Not before this client can see all of it.
                sizes(image).filter(|size| *size >= block + count)?;
                self.scan.pop_front();
                (image, Kind::Read, block * BLOCK, count * BLOCK)
            }
            Mode::Load => {
                let image = self.random.below(self.images.len() as u64) as usize;
                let (mut kind, offset, len) = self.draw(sizes(image)?);
                let has_zeroes = |(register, _)| self.history.zeroes(register) >= ZEROES_MAX;
                let frees = matches!(kind, Kind::Discard | Kind::WriteZeroes);
                if frees && registers(image, offset, len).any(has_zeroes) {
                    kind = Kind::Write;
                }
                (image, kind, offset, len)
            }
        };
        self.last_op += 1;
        Some(Request { op: self.last_op, image, kind, offset, len })
    }

    /// A request that its client did not take: what a scan is to read is still to be read.
    pub fn give_back(&mut self, request: &Request) {
        if self.mode == Mode::Scan {
            self.scan.push_front((request.image, request.offset / BLOCK, request.len / BLOCK));
        }
    }

    fn draw(&mut self, blocks: u64) -> (Kind, u64, u64) {
        let load = self.load;
        let random = &mut self.random;
        let roll = random.below(100);
        let kind = match roll {
            roll if roll < load.reads => Kind::Read,
            roll if roll < load.reads + load.frees => {
                if random.one_in(2) {
                    Kind::Discard
                } else {
                    Kind::WriteZeroes
                }
            }
            98 => Kind::Flush,
            99 => Kind::Extents,
            _ => Kind::Write,
        };
        if random.below(100) < load.small && kind != Kind::Discard {
            let sectors = SMALL_BLOCKS * BLOCK / SECTOR;
            let first = random.below(sectors);
            let count = 1 + random.below(9.min(sectors - first));
            return (kind, first * SECTOR, count * SECTOR);
        }
        let room = blocks - SMALL_BLOCKS;
        let span = if random.below(100) < load.hot { HOT_BLOCKS.min(room) } else { room };
        let first = SMALL_BLOCKS + random.below(span);
        let most = match random.below(20) {
            0 => load.blocks_max,
            1..=5 => load.blocks_max.min(8),
            _ => 1,
        };
        let count = 1 + random.below(most.min(blocks - first));
        (kind, first * BLOCK, count * BLOCK)
    }

    /// Fills the data of a write.
    pub fn fill(&self, request: &Request, data: &mut [u8]) {
        for (register, range) in registers(request.image, request.offset, request.len) {
            stamp::fill(&mut data[range], register, request.op, self.seed);
        }
    }

    /// A request was taken by its client.
    pub fn begin(&mut self, now: u64, who: &str, session: Option<SessionId>, request: &Request) {
        self.trace.mix(request.op);
        self.trace.note(Level::Ops, || format!("{who} begins {}", describe(request)));
        if let Some(session) = session.filter(|_| request.kind.writes()) {
            self.open.entry(session).or_default().insert(request.op);
        }
        for (register, _) in registers(request.image, request.offset, request.len) {
            match request.kind {
                Kind::Read => self.history.begin_read(now, request.op, register),
                Kind::Write => {
                    self.history.begin_write(now, request.op, register, Stamp::Write(request.op));
                }
                Kind::Discard | Kind::WriteZeroes => {
                    self.history.begin_write(now, request.op, register, Stamp::Zero);
                }
                Kind::Flush | Kind::Extents => return,
            }
        }
    }

    /// A request's client has died.
    pub fn abandon(&mut self, now: u64, request: &Request) {
        self.stats.abandoned += 1;
        self.trace.note(Level::Ops, || format!("nobody waits for {} any more", describe(request)));
        let ends = !self.fenced.remove(&request.op);
        if ends && !matches!(request.kind, Kind::Flush | Kind::Extents) {
            self.history.abandon(now, request.op);
        }
    }

    /// A request has ended.
    ///
    /// # Errors
    /// When what it returned is not allowed.
    pub fn end(
        &mut self,
        now: u64,
        who: &str,
        request: &Request,
        result: Result<IoDone, IoError>,
    ) -> Result<(), Failure> {
        self.trace.mix(request.op << 1 | u64::from(result.is_ok()));
        self.trace.note(Level::Ops, || {
            let how = result.as_ref().err().map_or_else(String::new, |error| format!(": {error}"));
            format!("{who} ends {}{how}", describe(request))
        });
        if self.fenced.remove(&request.op) {
            self.stats.refused += 1;
            return Ok(());
        }
        match result {
            Ok(done) => {
                self.stats.done += 1;
                match request.kind {
                    Kind::Read => self.check_read(now, request, &done),
                    kind if kind.writes() => self.end_write(now, request, Outcome::Acked),
                    _ => Ok(()),
                }
            }
            Err(error) => self.failed(now, who, request, error),
        }
    }

    fn check_read(&mut self, now: u64, request: &Request, done: &IoDone) -> Result<(), Failure> {
        let data = done.data.as_deref().unwrap_or_default();
        if data.len() as u64 != request.len {
            return Err(Failure::new(format!("{} returned {} bytes", describe(request), data.len())));
        }
        for (register, range) in registers(request.image, request.offset, request.len) {
            let stamp = stamp::read(&data[range], register, self.seed).map_err(|what| Failure {
                what: format!("{} returned what nobody wrote: {what}", describe(request)),
                register: Some((register, Vec::new())),
            })?;
            self.trace.mix(match stamp {
                Stamp::Zero => 0,
                Stamp::Write(number) => number,
            });
            self.history.end_read(now, request.op, register, stamp)?;
        }
        Ok(())
    }

    fn failed(&mut self, now: u64, who: &str, request: &Request, error: IoError) -> Result<(), Failure> {
        self.stats.refused += 1;
        let timed = self.load.timeout_seconds > 0;
        let allowed = match error {
            // What is freed must go, also when the cluster is full.
            IoError::NoSpace => matches!(request.kind, Kind::Write | Kind::WriteZeroes),
            IoError::Fenced => true,
            IoError::MaybeApplied => timed || request.kind != Kind::Read,
            IoError::Timeout => timed,
            IoError::Media => self.damage,
            IoError::Invalid | IoError::Damaged | IoError::Conflict => false,
        };
        if !allowed {
            return Err(Failure::new(format!("{who}: {} failed: {error}", describe(request))));
        }
        match request.kind {
            Kind::Read => self.history.abandon(now, request.op),
            Kind::Flush | Kind::Extents => {}
            Kind::Write | Kind::Discard | Kind::WriteZeroes => {
                let definite = matches!(error, IoError::NoSpace | IoError::Timeout);
                let outcome =
                    if definite && self.is_one_piece(request) { Outcome::Refused } else { Outcome::Maybe };
                self.end_write(now, request, outcome)?;
            }
        }
        Ok(())
    }

    fn end_write(&mut self, now: u64, request: &Request, outcome: Outcome) -> Result<(), Failure> {
        if outcome != Outcome::Maybe {
            self.open.values_mut().for_each(|ops| {
                ops.remove(&request.op);
            });
        }
        Ok(self.history.end_write(now, request.op, outcome)?)
    }

    /// Whether the client sends it as one operation, so that an error is one for all of it.
    fn is_one_piece(&self, request: &Request) -> bool {
        let object = 1_u64 << self.images[request.image].order;
        let end = request.offset + request.len - 1;
        let whole = request.offset.is_multiple_of(BLOCK) && request.len.is_multiple_of(BLOCK);
        whole && request.len <= 1 << 20 && request.offset / object == end / object
    }
}

/// A request in words.
pub fn describe(request: &Request) -> String {
    let Request { op, image, kind, offset, len } = request;
    let (unit, name) = if offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK) {
        (BLOCK, "block")
    } else {
        (SECTOR, "sector")
    };
    format!("{kind:?} {op} of image {image} {name} {}+{}", offset / unit, len / unit)
}
