//! Full, fragmented and shared devices.

use super::device::TestDevice;
use super::harness::{Harness, What, object, options, pg};
use crate::store::api::SubmitError;
use crate::store::mount::Mount;
use loligo_config::id::ShardId;

/// Writes until there is no space; returns the number of objects.
fn fill(harness: &mut Harness, blocks: u32) -> u64 {
    for at in 0..100_000 {
        let stamps = harness.stamps(blocks);
        match harness.submit_wait(pg(0), What::Write(object(at), 0, stamps)) {
            Ok(()) => (),
            Err(SubmitError::NoSpace) => return at,
            Err(other) => panic!("{other}"),
        }
    }
    panic!("never full");
}

#[test]
fn a_full_device_deletes_restarts_and_gives_its_space_back() {
    let mut harness = Harness::new(3000, 3);
    harness.make_pg(pg(0));
    let before = harness.store().space();
    let objects = fill(&mut harness, 8);
    assert!(objects * 8 > before.credit / 2, "{objects} of {before:?}");
    harness.commit();
    assert!(harness.store().space().credit < 8, "{:?}", harness.store().space());
    for _ in 0..3 {
        harness.power_cut();
        harness.mount();
        harness.verify();
    }
    // Deletes and promises work while nothing else does.
    harness.make_pg(pg(1));
    for at in 0..objects {
        let what = if at % 2 == 0 { What::Remove(object(at)) } else { What::Free(object(at), 0, 8) };
        harness.submit_wait(pg(0), what).unwrap();
    }
    harness.commit();
    harness.settle();
    harness.store().audit().unwrap();
    assert_eq!(harness.store().space().data, 0);
    assert!(fill(&mut harness, 8) >= objects * 8 / 10);
    harness.commit();
    harness.power_cut();
    harness.mount();
    harness.verify();
}

#[test]
fn no_write_waits_for_ever_for_the_last_blocks_that_were_freed() {
    for removed in 1..12 {
        let mut harness = Harness::new(12_000, 20 + removed);
        harness.make_pg(pg(0));
        let objects = fill(&mut harness, 1);
        harness.commit();
        harness.settle();
        for at in 0..removed {
            harness.submit_wait(pg(0), What::Remove(object(at * 97 % objects))).unwrap();
        }
        harness.commit();
        harness.settle();
        // Taken or refused: either is an answer.
        let stamps = harness.stamps(1);
        let _ = harness.submit_wait(pg(0), What::Write(object(objects + 1), 0, stamps));
        harness.commit();
        harness.store().audit().unwrap();
    }
}

#[test]
fn a_fragmented_device_commits_scattered_data() {
    let mut harness = Harness::new(3000, 4);
    harness.media.borrow_mut().chaos = false;
    harness.make_pg(pg(0));
    // Single blocks, every second of them freed: no run is longer than the holes.
    let objects = fill(&mut harness, 1);
    for at in (0..objects).step_by(2) {
        harness.submit_wait(pg(0), What::Remove(object(at))).unwrap();
    }
    harness.commit();
    harness.checkpoint();
    harness.settle();
    let before = harness.media.borrow().writes;
    for at in 0..4 {
        harness.write(pg(0), object(1 << 20 | at), 0, 60);
        harness.commit();
    }
    assert!(harness.media.borrow().writes > before + 4, "not every commit was contiguous");
    harness.store().audit().unwrap();
    harness.power_cut();
    harness.mount();
    harness.verify();
}

#[test]
fn overwriting_for_ever_needs_no_more_space() {
    let mut harness = Harness::new(1600, 5);
    harness.make_pg(pg(0));
    for round in 0..3000u32 {
        harness.write(pg(0), object(u64::from(round % 7)), round * 13 % 60, 1 + round % 5);
        if round % 3 == 0 {
            harness.poll();
        }
    }
    harness.commit();
    harness.store().audit().unwrap();
    harness.power_cut();
    harness.mount();
    harness.verify();
}

#[test]
fn an_op_of_the_largest_size_is_taken_and_read_back() {
    let mut harness = Harness::new(40_000, 6);
    harness.make_pg(pg(0));
    for at in 0..8 {
        harness.write(pg(0), object(at), 8192 - 256, 256);
    }
    harness.commit();
    harness.power_cut();
    harness.mount();
    harness.verify();
}

#[test]
fn discards_follow_deletes_and_never_hit_live_blocks() {
    let mut harness = Harness::new(3000, 7);
    harness.stop();
    harness.media.borrow_mut().power_cut();
    harness.media.borrow_mut().geometry.discards = true;
    harness.mount();
    harness.make_pg(pg(0));
    harness.commit();
    for round in 0..600 {
        harness.write(pg(0), object(round % 9), 0, 30);
        harness.poll();
        if round % 50 == 0 {
            harness.store().audit().unwrap();
            harness.power_cut();
            harness.mount();
            harness.verify();
        }
    }
    harness.commit();
    harness.store().audit().unwrap();
    harness.verify_contents();
}

#[test]
fn a_shard_is_not_full_while_its_neighbour_is_empty() {
    let mut harness = Harness::new(8000, 8);
    harness.stop();
    harness.mkfs(crate::store::format::FormatOptions { force: true, ..options(2) }).unwrap();
    let probed = harness.probe().unwrap();
    let chunks = probed.chunks;
    let mut stores: Vec<_> = (0..2)
        .map(|shard| {
            let device = TestDevice::new(&harness.media);
            let mut mount = Mount::new(device, ShardId(shard), chunks.clone(), harness.pool.clone());
            loop {
                if let Some(done) = mount.poll(harness.now) {
                    break done.unwrap();
                }
            }
        })
        .collect();
    let second = stores.pop().unwrap();
    harness.store = stores.pop();
    harness.make_pg(pg(0));
    let half = harness.store().superblock().chunks * harness.store().superblock().chunk_blocks / 2;
    let objects = fill(&mut harness, 16);
    assert!(objects * 16 > half, "{objects} objects of 16 blocks in more than {half}");
    harness.commit();
    assert_eq!(chunks.free(), 0);
    // What one gives back the other can take.
    for at in 0..objects {
        harness.submit_wait(pg(0), What::Remove(object(at))).unwrap();
    }
    harness.commit();
    for _ in 0..30 {
        harness.checkpoint();
        harness.settle();
    }
    assert!(chunks.free() > 5, "{}", chunks.free());
    harness.store().audit().unwrap();
    drop(second);
    harness.power_cut();
    harness.mount();
    harness.verify();
    harness.shard = ShardId(2);
    assert!(harness.try_mount().is_err());
}
