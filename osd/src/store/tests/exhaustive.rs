//! All sequences of up to three operations, and after each every state in which a power cut may leave the device.
//!
//! A *sequence* is up to three of [`OPS`], on one of the [`BASES`]. It runs once for every way in which the operations
//! before the last may overlap: each is either waited for or still in flight when the next one comes, and the device
//! completes the oldest or the newest of what is in flight first. While the last operation runs, and until
//! everything has ended, the device does one thing at a time; every moment that differs is a *crash point*, and every
//! *image* that it may leave (see `images`, also for the bound) is mounted and must be what a prefix of the
//! transactions in flight makes of what was acked, with every block of the device owned once. Then it takes a write
//! and a free, and a power cut that loses all that is not durable: after another mount it must be the same. (What
//! earlier operations leave in flight is looked at in the shorter sequences, so every crash point counts once.)
//!
//! The devices: one with a volatile cache that tears blocks, and one without a cache whose blocks do not tear.
//! A normal run tries all sequences of one and two operations and a part of those of three, with at most
//! [`BOUND`] images of one crash point; with `LOLIGO_EXHAUSTIVE=1` (`tests/run --long`) all of them, with at most
//! [`BOUND_LONG`].

use super::device::{Block, Media, Rng};
use super::harness::{Harness, Moment, What, object, pg};
use super::images::Image;
use super::oracle::Oracle;
use crate::store::api::{PgMeta, SubmitError};
use loligo_config::id::{Epoch, PgId};
use loligo_config::units::BlockCount;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Geometry, WriteCache};
use std::collections::BTreeSet;

/// Images of one crash point in a normal run, and in a long one.
const BOUND: usize = 12;
const BOUND_LONG: usize = 48;
/// The longest write that the device takes, in blocks: short, so that a few blocks already have to be scattered.
const TRANSFER: u64 = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    /// One block.
    Write,
    /// Four blocks across the border of two fragments of the index.
    WriteMany,
    /// Parts of what the base and `WriteMany` have written, and one block more.
    Overwrite,
    /// Another object of the same PG.
    WriteOther,
    /// An object of another PG.
    WriteElsewhere,
    /// More than one device write takes: scattered, in parallel with its record.
    WriteScattered,
    /// Two transactions of two PGs in one record.
    Pair,
    /// Two overlapping writes of one object in one record.
    Twice,
    /// Part of an object: a discard.
    Free,
    /// The whole range of an object, which stays: a write of zeroes.
    FreeAll,
    Remove,
    /// An op's result alone.
    Result,
    /// A promise.
    Promise,
    /// A new PG and a write in it.
    MakePg,
    RemovePg,
    KeepMap,
    Checkpoint,
    /// Waits for everything, checkpoints, mounts again.
    Restart,
    /// The process dies, what the device has got it completes.
    Kill,
    /// The power fails, and what was not durable is lost.
    PowerCut,
}

const OPS: [Op; 20] = [
    Op::Write,
    Op::WriteMany,
    Op::Overwrite,
    Op::WriteOther,
    Op::WriteElsewhere,
    Op::WriteScattered,
    Op::Pair,
    Op::Twice,
    Op::Free,
    Op::FreeAll,
    Op::Remove,
    Op::Result,
    Op::Promise,
    Op::MakePg,
    Op::RemovePg,
    Op::KeepMap,
    Op::Checkpoint,
    Op::Restart,
    Op::Kill,
    Op::PowerCut,
];

/// What is on the device before the first operation.
#[derive(Clone, Copy, Debug)]
enum Base {
    /// Two PGs and nothing else.
    New,
    /// Objects, a checkpoint, a log behind it with superseded blocks, and few blocks left in the log's segment.
    Worn,
    /// As good as full, in single blocks.
    Full,
}

#[derive(Debug, Default)]
struct Counts {
    sequences: u64,
    runs: u64,
    points: u64,
    images: u64,
    same: u64,
    cut_off: u128,
}

/// One run of a sequence.
struct Run<'a> {
    base: Base,
    cache: WriteCache,
    ops: &'a [Op],
    /// Bit n: operation n is waited for.
    waited: u32,
    newest_first: bool,
    bound: usize,
}

struct Start {
    geometry: Geometry,
    durable: Vec<Block>,
    moment: Moment,
}

fn geometry(cache: WriteCache) -> Geometry {
    let media = Media::new(1, 0);
    let mut geometry = media.borrow().geometry.clone();
    geometry.blocks = BlockCount(1560);
    geometry.transfer_blocks_max = BlockCount(TRANSFER);
    geometry.write_cache = cache;
    geometry.atomic_blocks = BlockCount(u64::from(cache == WriteCache::None));
    geometry
}

/// Prepares a base; it ends with a power cut that loses what is not durable.
fn start(base: Base, cache: WriteCache, pool: &BufferPool) -> Start {
    let geometry = geometry(cache);
    let empty = vec![Block::new(&[0; 4096]); geometry.blocks.0 as usize];
    let media = Media::with(geometry.clone(), empty, 1);
    media.borrow_mut().chaos = false;
    let mut harness = Harness::unformatted(media, pool.clone());
    harness.mkfs(super::harness::options(1)).unwrap();
    harness.mount();
    harness.make_pg(pg(0));
    harness.make_pg(pg(1));
    harness.commit();
    match base {
        Base::New => (),
        Base::Worn => wear(&mut harness),
        Base::Full => fill(&mut harness),
    }
    harness.stop();
    harness.media.borrow_mut().settle(false);
    harness.moments = Some(Vec::new());
    harness.note_moment();
    let moment = harness.moments.take().and_then(|mut all| all.pop()).expect("just noted");
    let durable = (0..geometry.blocks.0).map(|lba| harness.media.borrow().get(lba)).collect();
    Start { geometry, durable, moment }
}

fn wear(harness: &mut Harness) {
    for at in 0..3 {
        harness.write(pg(0), object(0), 124 + at, 3);
        harness.write(pg(1), object(10), 0, 4);
        harness.commit();
    }
    harness.settle();
    harness.checkpoint();
    harness.settle();
    harness.write(pg(0), object(1), 5, 2);
    harness.write(pg(0), object(0), 125, 2);
    harness.commit();
    let left = |harness: &mut Harness| harness.store().log.current.len - harness.store().log.offset;
    while left(harness) > 7 {
        let count = left(harness).min(9) - 6;
        harness.write(pg(1), object(11), 0, count);
        harness.commit();
    }
}

fn fill(harness: &mut Harness) {
    let mut objects = 0;
    loop {
        let stamps = harness.stamps(5);
        match harness.submit_wait(pg(0), What::Write(object(100 + objects), 0, stamps)) {
            Ok(()) => objects += 1,
            Err(SubmitError::NoSpace) => break,
            Err(other) => panic!("{other}"),
        }
    }
    harness.commit();
    harness.settle();
    for at in 0..9 {
        harness.submit_wait(pg(0), What::Free(object(100 + at * 7 % objects), at as u32 % 4, 1)).unwrap();
    }
    harness.commit();
}

impl Op {
    fn run(self, harness: &mut Harness) {
        let (a, other, elsewhere) = (object(0), object(1), object(10));
        let write = |harness: &mut Harness, id, object, block, count| {
            let stamps = harness.stamps(count);
            submit(harness, id, What::Write(object, block, stamps));
        };
        match self {
            Op::Write => write(harness, pg(0), a, 3, 1),
            Op::WriteMany => write(harness, pg(0), a, 126, 4),
            Op::Overwrite => write(harness, pg(0), a, 125, 3),
            Op::WriteOther => write(harness, pg(0), other, 6, 2),
            Op::WriteElsewhere => write(harness, pg(1), elsewhere, 2, 1),
            Op::WriteScattered => write(harness, pg(0), a, 120, TRANSFER as u32 + 1),
            Op::Pair => {
                write(harness, pg(0), a, 0, 2);
                write(harness, pg(1), elsewhere, 0, 1);
            }
            Op::Twice => {
                write(harness, pg(0), a, 4, 2);
                write(harness, pg(0), a, 5, 2);
            }
            Op::Free => submit(harness, pg(0), What::Free(a, 126, 3)),
            Op::FreeAll => submit(harness, pg(0), What::Free(a, 0, 8192)),
            Op::Remove => submit(harness, pg(0), What::Remove(a)),
            Op::Result => submit(harness, pg(0), What::Result),
            Op::Promise => {
                let promised = Epoch(harness.next_stamp as u32);
                harness.stamps(1);
                let known = harness.oracle.current.get(&pg(0)).map_or(PgMeta::default(), |pg| pg.meta);
                submit(harness, pg(0), What::Meta(PgMeta { promised, ..known }));
            }
            Op::MakePg => {
                let meta = PgMeta { promised: Epoch(7), activated: Epoch(6) };
                submit(harness, pg(2), What::Meta(meta));
                write(harness, pg(2), object(20), 0, 1);
            }
            Op::RemovePg => submit(harness, pg(0), What::RemovePg),
            Op::KeepMap => {
                let epoch = Epoch(harness.oracle.maps.last().map_or(1, |newest| newest.0 + 1));
                harness.keep_map(epoch);
            }
            Op::Checkpoint => harness.store().request_checkpoint(),
            Op::Restart => {
                open_gate(harness);
                harness.settle();
                harness.checkpoint();
                harness.settle();
                restart(harness, true);
            }
            Op::Kill => restart(harness, true),
            Op::PowerCut => restart(harness, false),
        }
    }
}

fn restart(harness: &mut Harness, kept: bool) {
    open_gate(harness);
    harness.stop();
    harness.media.borrow_mut().settle(kept);
    harness.mount();
    harness.verify();
}

fn open_gate(harness: &Harness) {
    harness.media.borrow_mut().gate = None;
}

/// Submits if the PG exists; where there is no room, nothing happens.
fn submit(harness: &mut Harness, id: PgId, what: What) {
    if !harness.exists(id) && !matches!(what, What::Meta(_)) {
        return;
    }
    for _ in 0..10_000 {
        match harness.submit(id, what.clone()) {
            Ok(()) | Err(SubmitError::NoSpace) => return,
            Err(SubmitError::Busy) => {
                // What is in flight has to end, one thing after the other.
                let gate = harness.media.borrow().gate;
                harness.media.borrow_mut().gate = gate.map(|_| 1);
                harness.poll();
                harness.media.borrow_mut().gate = gate;
            }
            Err(other) => panic!("{other}"),
        }
    }
    panic!("busy for ever");
}

/// Says what was being done when a test panics.
struct OnPanic<F: Fn() -> String>(F);

impl<F: Fn() -> String> Drop for OnPanic<F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("FAILED: {}", (self.0)());
        }
    }
}

impl Run<'_> {
    /// What is printed when it fails.
    fn describe(&self) -> String {
        let Self { base, cache, ops, waited, newest_first, .. } = self;
        format!("{base:?} {cache:?} {ops:?}, waited for: {waited:b}, newest first: {newest_first}")
    }

    /// Runs the sequence and returns the crash points of its last operation.
    fn moments(&self, start: &Start, pool: &BufferPool) -> Vec<Moment> {
        let media = Media::with(start.geometry.clone(), start.durable.clone(), 1);
        media.borrow_mut().chaos = false;
        let mut harness = Harness::after(&start.moment, media, pool);
        harness.mount();
        harness.settle();
        harness.media.borrow_mut().newest_first = self.newest_first;
        let last = self.ops.len() - 1;
        for (at, op) in self.ops[..last].iter().enumerate() {
            // Nothing completes that is not waited for: by then the next operation has come.
            harness.media.borrow_mut().gate = Some(0);
            op.run(&mut harness);
            harness.poll();
            if self.waited >> at & 1 == 1 {
                open_gate(&harness);
                harness.settle();
            }
        }
        harness.one_at_a_time = true;
        harness.moments = Some(Vec::new());
        harness.note_moment();
        harness.moments = Some(Vec::new());
        self.ops[last].run(&mut harness);
        harness.settle();
        harness.store().audit().unwrap();
        harness.verify_contents();
        harness.moments.take().expect("noted since the last operation began")
    }

    fn check(&self, start: &Start, pool: &BufferPool, seen: &mut BTreeSet<(u64, u64)>, counts: &mut Counts) {
        counts.runs += 1;
        let moments = {
            let _context = OnPanic(|| self.describe());
            self.moments(start, pool)
        };
        for (at, moment) in moments.iter().enumerate() {
            counts.points += 1;
            self.check_moment(at, moment, pool, seen, counts);
        }
    }

    fn check_moment(
        &self,
        at: usize,
        moment: &Moment,
        pool: &BufferPool,
        seen: &mut BTreeSet<(u64, u64)>,
        counts: &mut Counts,
    ) {
        let mut rng = Rng(counts.runs << 16 | at as u64);
        // Schedules share many images: what was checked does not use the bound up.
        let images = moment.crash.images(self.bound * 4, &mut rng);
        let (mut tried, mut checked) = (0, 0);
        for image in images {
            if checked == self.bound {
                break;
            }
            tried += 1;
            if !seen.insert((moment.crash.hash(&image), knowledge(&moment.oracle))) {
                counts.same += 1;
                continue;
            }
            checked += 1;
            let context =
                || format!("{}, crash point {at}: {}", self.describe(), moment.crash.describe(&image));
            let _context = OnPanic(context);
            check_image(moment, &image, pool);
        }
        counts.images += checked as u64;
        counts.cut_off += moment.crash.count().saturating_sub(tried);
    }
}

/// A hash of what is acked and what is in flight: the same image must then be judged in the same way.
fn knowledge(oracle: &Oracle) -> u64 {
    let pgs = oracle.acked.iter().chain(&oracle.current);
    let words =
        pgs.flat_map(|(id, pg)| [u64::from(id.index), pg.last.sequence, u64::from(pg.meta.promised.0)]);
    let maps = oracle.maps.iter().map(|epoch| u64::from(epoch.0));
    let words = words.chain(maps).chain([oracle.pending.len() as u64]);
    words.fold(1, |hash: u64, word| (hash ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(29))
}

fn check_image(moment: &Moment, image: &Image, pool: &BufferPool) {
    let mut harness = Harness::after(moment, moment.crash.media(image), pool);
    harness.mount();
    harness.verify();
    if !harness.exists(pg(0)) {
        harness.make_pg(pg(0));
    }
    let stamps = harness.stamps(2);
    submit(&mut harness, pg(0), What::Write(object(0), 127, stamps));
    submit(&mut harness, pg(0), What::Free(object(1), 6, 1));
    harness.commit();
    harness.store().audit().unwrap();
    harness.verify_contents();
    harness.stop();
    harness.media.borrow_mut().settle(false);
    harness.mount();
    harness.verify();
}

/// Every `stride`-th sequence of `len` operations, in all its schedules.
fn sequences(
    start: &Start,
    run: (Base, WriteCache),
    len: u32,
    stride: usize,
    pool: &BufferPool,
    counts: &mut Counts,
) {
    let bound = if is_long() { BOUND_LONG } else { BOUND };
    let all = OPS.len().pow(len);
    // In an order that has every kind of sequence early on: a run that is ended before its time says something too.
    for step in (0..all).step_by(stride) {
        let number = step * 3571 % all;
        let digits = (0..len).map(|at| number / OPS.len().pow(at) % OPS.len());
        let ops: Vec<Op> = digits.map(|digit| OPS[digit]).collect();
        let mut seen = BTreeSet::new();
        for waited in 0..1 << (len - 1) {
            for newest_first in [false, true] {
                let run = Run { base: run.0, cache: run.1, ops: &ops, waited, newest_first, bound };
                run.check(start, pool, &mut seen, counts);
            }
        }
        counts.sequences += 1;
        if counts.sequences.is_multiple_of(500) {
            println!("{run:?}: {step} of {all} sequences of {len}: {counts:?}");
        }
    }
}

fn is_long() -> bool {
    std::env::var_os("LOLIGO_EXHAUSTIVE").is_some()
}

/// `strides`: of the sequences of one, two and three operations in a normal run; 0: none.
fn exhaust(base: Base, cache: WriteCache, strides: [usize; 3], long: [usize; 3]) -> Counts {
    let pool = BufferPool::new(64 << 20);
    let start = start(base, cache, &pool);
    let mut counts = Counts::default();
    let strides = if is_long() { long } else { strides };
    for (len, stride) in (1..).zip(strides).filter(|(_, stride)| *stride > 0) {
        sequences(&start, (base, cache), len, stride, &pool, &mut counts);
    }
    let bound = if is_long() { BOUND_LONG } else { BOUND };
    println!(
        "{base:?} {cache:?}: {} sequences of up to 3 of {} operations, {} runs, {} crash points, {} images \
         checked, {} more the same as one checked, {} cut off by the bound of {bound} per crash point",
        counts.sequences,
        OPS.len(),
        counts.runs,
        counts.points,
        counts.images,
        counts.same,
        counts.cut_off,
    );
    counts
}

fn small(base: Base, cache: WriteCache) {
    let counts = exhaust(base, cache, [1, 1, 401], [1, 1, 1]);
    assert!(counts.images > 8_000, "{counts:?}");
}

#[test]
fn every_sequence_on_a_new_device_with_a_cache() {
    small(Base::New, WriteCache::Volatile);
}

#[test]
fn every_sequence_on_a_worn_device_with_a_cache() {
    small(Base::Worn, WriteCache::Volatile);
}

#[test]
fn every_sequence_on_a_new_device_without_a_cache() {
    small(Base::New, WriteCache::None);
}

#[test]
fn every_sequence_on_a_worn_device_without_a_cache() {
    small(Base::Worn, WriteCache::None);
}

/// Sequences of two at most: this takes ten times as long for each image.
#[test]
fn every_sequence_on_a_full_device() {
    for cache in [WriteCache::Volatile, WriteCache::None] {
        let counts = exhaust(Base::Full, cache, [1, 0, 0], [1, 1, 0]);
        assert!(counts.images > 100, "{counts:?}");
    }
}
