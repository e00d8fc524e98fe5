//! The N-th device operation fails, for every N until a script reaches no more, once and from then on, counting all
//! operations, reads, writes, flushes or discards, completed oldest first and newest first.
//!
//! Whatever fails: nothing panics, the failure is reported as the design says, nothing is acked after it, and on the
//! healthy device, after a power cut, everything acked is there.

use super::device::{Block, Kind, Media};
use super::harness::{Harness, Moment, What, object, options, pg};
use super::oracle::Oracle;
use crate::store::api::{PgMeta, SubmitError};
use crate::store::codec::BLOCK;
use crate::store::format::{FormatOptions, MkfsError, ProbeError};
use crate::store::mount::{Mount, MountError};
use loligo_config::id::{Epoch, PgId};
use loligo_config::units::BlockCount;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{DiskError, Geometry};

const FAILURE: DiskError = DiskError::Io { errno: 5 };

struct Script {
    geometry: fn(&mut Geometry),
    /// On a healthy device, mounted; a power cut that loses nothing follows.
    prepare: fn(&mut Harness),
    /// With the failure planned.
    run: fn(&mut Harness),
    /// Whether `run` begins with a store that is mounted.
    mounted: bool,
}

/// Submits, as long as the store takes anything.
fn put(harness: &mut Harness, id: PgId, what: What) -> bool {
    for _ in 0..10_000 {
        match harness.submit(id, what.clone()) {
            Ok(()) => return true,
            Err(SubmitError::Busy) => harness.poll(),
            Err(SubmitError::Failed(error)) => {
                assert_eq!(error, FAILURE);
                return false;
            }
            // Of a PG whose making failed.
            Err(SubmitError::NoSpace | SubmitError::Invalid) => return false,
            Err(other) => panic!("{other}"),
        }
    }
    panic!("busy for ever");
}

fn write(harness: &mut Harness, index: u32, at: u64, block: u32, count: u32) -> bool {
    let stamps = harness.stamps(count);
    put(harness, pg(index), What::Write(object(u64::from(index) * 100 + at), block, stamps))
}

fn make_pgs(harness: &mut Harness) {
    for index in 0..2 {
        put(harness, pg(index), What::Meta(PgMeta::default()));
    }
}

fn polls(harness: &mut Harness, count: u32) {
    (0..count).for_each(|_| harness.poll());
}

/// Objects, a checkpoint and a log behind it.
fn some(harness: &mut Harness) {
    make_pgs(harness);
    for at in 0..6 {
        write(harness, at as u32 % 2, at, 120, 4 + at as u32);
        harness.commit();
    }
    harness.checkpoint();
    harness.settle();
    for at in 0..6 {
        write(harness, at as u32 % 2, at, 122, 1);
        harness.commit();
    }
}

/// Writes until there is no room.
fn full(harness: &mut Harness) {
    make_pgs(harness);
    let mut at = 0;
    while write(harness, 0, at, 0, 25) {
        at += 1;
    }
    harness.commit();
}

fn commits_one_by_one(harness: &mut Harness) {
    for at in 0..4 {
        write(harness, 0, at, 121, 3);
        polls(harness, 4);
    }
    put(harness, pg(0), What::Free(object(1), 121, 2));
    put(harness, pg(0), What::Remove(object(2)));
    polls(harness, 6);
}

fn commits_in_flight(harness: &mut Harness) {
    for at in 0..5 {
        write(harness, at as u32 % 2, at, 0, 2);
        harness.store().close_record();
    }
    polls(harness, 10);
}

fn checkpoints(harness: &mut Harness) {
    for round in 0..2 {
        write(harness, 0, round, 7, 2);
        harness.keep_map(Epoch(1 + round as u32));
        harness.store().request_checkpoint();
        polls(harness, 3);
        write(harness, 1, round, 7, 2);
        polls(harness, 25);
    }
}

fn reads(harness: &mut Harness) {
    for at in 0..6u64 {
        let index = at as u32 % 2;
        harness.read(pg(index), object(u64::from(index) * 100 + at), 110, 40);
        // One that waits for a write in flight.
        write(harness, index, at, 130, 2);
        harness.read(pg(index), object(u64::from(index) * 100 + at), 129, 3);
        polls(harness, 5);
    }
}

fn frees(harness: &mut Harness) {
    for at in 0..6u64 {
        put(harness, pg(at as u32 % 2), What::Free(object(at % 2 * 100 + at), 0, 8192));
        polls(harness, 60);
    }
    write(harness, 0, 1, 0, 9);
    polls(harness, 60);
}

fn overfill(harness: &mut Harness) {
    for at in 0..4 {
        write(harness, 1, at, 0, 20);
        put(harness, pg(0), What::Remove(object(at)));
        write(harness, 1, at, 0, 3);
        polls(harness, 10);
    }
}

fn fill_and_empty(harness: &mut Harness) {
    for at in 0..18 {
        write(harness, 0, at, 0, 60);
        polls(harness, 3);
    }
    for at in 0..18 {
        put(harness, pg(0), What::Remove(object(at)));
    }
    for _ in 0..4 {
        harness.store().request_checkpoint();
        polls(harness, 30);
    }
}

fn remove_and_make(harness: &mut Harness) {
    put(harness, pg(0), What::RemovePg);
    polls(harness, 3);
    make_pgs(harness);
    write(harness, 0, 1, 0, 2);
    polls(harness, 5);
    harness.store().request_checkpoint();
    polls(harness, 25);
}

/// Probe and mount, as far as they get.
fn mount(harness: &mut Harness) {
    let probed = match harness.probe() {
        Ok(probed) => probed,
        Err(error) => return assert!(matches!(error, ProbeError::Device { error: FAILURE, .. }), "{error}"),
    };
    let mut mount = Mount::new(probed.device, harness.shard, probed.chunks, harness.pool.clone());
    for _ in 0..100_000 {
        match mount.poll(harness.now) {
            None => (),
            Some(Ok(store)) => {
                store.audit().unwrap();
                assert_eq!(harness.media.borrow().failures, 0, "every operation of a mount counts");
                return;
            }
            Some(Err(error)) => {
                return assert_eq!(error, MountError::Device { shard: 0, error: FAILURE });
            }
        }
    }
    panic!("a mount that never ends");
}

/// Formats over what is there.
fn format(harness: &mut Harness, write_fully: bool) {
    let result = harness.mkfs(FormatOptions { force: true, write_fully, ..options(1) });
    match result {
        Ok(()) => assert_eq!(harness.media.borrow().failures, 0, "every operation of mkfs counts"),
        Err(error) => assert!(matches!(error, MkfsError::Device { error: FAILURE, .. }), "{error}"),
    }
    // The first write takes the old superblocks away; before it is complete the device is what it was.
    if harness.media.borrow().writes > 1 {
        harness.oracle = Oracle::default();
    }
}

fn nothing(_: &mut Harness) {}

fn format_only(harness: &mut Harness) {
    harness.stop();
    harness.mkfs(FormatOptions { force: true, ..options(1) }).unwrap();
}

fn usual(geometry: &mut Geometry) {
    geometry.blocks = BlockCount(1560);
}

fn short_transfers(geometry: &mut Geometry) {
    usual(geometry);
    geometry.transfer_blocks_max = BlockCount(4);
}

fn discards(geometry: &mut Geometry) {
    usual(geometry);
    geometry.discards = true;
}

fn many_chunks(geometry: &mut Geometry) {
    geometry.blocks = BlockCount(3000);
}

/// Runs a script with every N; returns how many operations were failed.
fn every_n(script: &Script) -> u64 {
    let pool = BufferPool::new(64 << 20);
    let media = Media::new(1, 0);
    let mut geometry = media.borrow().geometry.clone();
    (script.geometry)(&mut geometry);
    let media = Media::with(geometry.clone(), vec![Block::new(&[0; BLOCK]); geometry.blocks.0 as usize], 1);
    media.borrow_mut().chaos = false;
    let mut harness = Harness::unformatted(media, pool.clone());
    harness.mkfs(options(1)).unwrap();
    harness.mount();
    (script.prepare)(&mut harness);
    if harness.store.is_some() {
        harness.commit();
        harness.stop();
    }
    harness.media.borrow_mut().settle(true);
    harness.moments = Some(Vec::new());
    harness.note_moment();
    let start = harness.moments.take().and_then(|mut all| all.pop()).expect("just noted");
    let mut failed = 0;
    for kind in [Kind::Any, Kind::Read, Kind::Write, Kind::Flush, Kind::Discard] {
        for (sticky, newest_first) in [(false, false), (true, false), (false, true)] {
            for n in 1.. {
                if !trial(script, &start, &pool, (kind, n, sticky), newest_first) {
                    break;
                }
                failed += 1;
            }
        }
    }
    failed
}

/// One failure; false if the script did not reach it.
fn trial(
    script: &Script,
    start: &Moment,
    pool: &BufferPool,
    (kind, n, sticky): (Kind, u64, bool),
    newest_first: bool,
) -> bool {
    let media = start.crash.media(&Vec::new());
    media.borrow_mut().rng.0 ^= n;
    let mut harness = Harness::after(start, media, pool);
    if script.mounted {
        harness.mount();
        harness.settle();
    }
    {
        let mut media = harness.media.borrow_mut();
        (media.kind, media.operations, media.failures, media.writes) = (kind, 0, 0, 0);
        (media.fail_at, media.sticky, media.newest_first) = (Some(n), sticky, newest_first);
    }
    (script.run)(&mut harness);
    if harness.store.is_some() {
        polls(&mut harness, 20);
        check_report(&mut harness, kind);
        harness.stop();
    }
    let reached = harness.media.borrow().failures > 0;
    {
        let mut media = harness.media.borrow_mut();
        (media.fail_at, media.kind) = (None, Kind::Any);
        media.power_cut();
    }
    // A device whose mkfs failed is refused, or as good as one whose mkfs did not.
    match harness.probe() {
        Err(error) => assert!(!script.mounted && matches!(error, ProbeError::Contents(_)), "{error}"),
        Ok(_) => {
            harness.mount();
            harness.verify();
        }
    }
    reached
}

/// What the store says of a failure that it has met.
fn check_report(harness: &mut Harness, kind: Kind) {
    let Some(error) = harness.store().failed() else {
        let harmless = matches!(kind, Kind::Read | Kind::Discard | Kind::Any);
        assert!(harmless || harness.media.borrow().failures == 0, "the store has not noticed");
        assert!(harness.failed.is_empty());
        return assert!(harness.oracle.pending.is_empty(), "every transaction is answered");
    };
    assert_eq!(error, FAILURE);
    let unanswered: Vec<_> = harness.oracle.pending.iter().map(|(ticket, _)| *ticket).collect();
    assert_eq!(harness.failed, unanswered, "each transaction fails once, in order");
    assert_eq!(harness.submit(pg(0), What::Result), Err(SubmitError::Failed(FAILURE)));
    // A poisoned device gets no more writes, but reads what it can.
    let writes = harness.media.borrow().writes;
    harness.store().request_checkpoint();
    harness.keep_map(Epoch(1000));
    harness.read(pg(0), object(0), 0, 10);
    polls(harness, 20);
    assert_eq!(harness.media.borrow().writes, writes);
    assert_eq!(harness.store().in_flight(), 0, "every read is answered");
}

fn check(prepare: fn(&mut Harness), run: fn(&mut Harness), geometry: fn(&mut Geometry), mounted: bool) {
    let failed = every_n(&Script { geometry, prepare, run, mounted });
    println!("{failed} failures");
    assert!(failed > 20, "{failed}");
}

#[test]
fn in_mkfs() {
    check(nothing, |harness| format(harness, false), usual, false);
}

#[test]
fn in_mkfs_of_every_block_over_an_older_store() {
    check(some, |harness| format(harness, true), usual, false);
}

#[test]
fn in_the_first_mount() {
    check(format_only, mount, usual, false);
}

#[test]
fn in_a_mount_after_a_crash() {
    check(some, mount, usual, false);
}

#[test]
fn in_a_mount_with_short_transfers() {
    check(some, mount, short_transfers, false);
}

#[test]
fn in_commits() {
    check(some, commits_one_by_one, usual, true);
}

#[test]
fn in_commits_in_flight_together() {
    check(some, commits_in_flight, usual, true);
}

#[test]
fn in_scattered_commits() {
    check(some, commits_one_by_one, short_transfers, true);
    check(some, commits_in_flight, short_transfers, true);
}

#[test]
fn in_checkpoints_and_kept_maps() {
    check(some, checkpoints, usual, true);
}

#[test]
fn in_reads() {
    check(some, reads, usual, true);
}

#[test]
fn in_discards() {
    check(some, frees, discards, true);
}

#[test]
fn on_a_full_device() {
    check(full, overfill, usual, true);
}

#[test]
fn in_a_mount_of_a_full_device() {
    check(full, mount, usual, false);
}

#[test]
fn while_chunks_are_taken_and_given_back() {
    check(make_pgs, fill_and_empty, many_chunks, true);
}

#[test]
fn while_a_pg_is_removed_and_made_again() {
    check(some, remove_and_make, usual, true);
}
