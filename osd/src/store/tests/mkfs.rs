//! mkfs and probe: what they refuse, and how they say it.

use super::device::Rng;
use super::harness::{Harness, options, pg};
use super::oracle::Oracle;
use crate::store::codec::BLOCK;
use crate::store::format::{Contents, FormatOptions, MkfsError, ProbeError};
use crate::store::layout::Superblock;
use loligo_config::id::{ClusterId, DeviceId, OsdId};

fn harness() -> Harness {
    let mut harness = Harness::new(3000, 9);
    harness.stop();
    harness
}

#[test]
fn a_formatted_device_is_not_formatted_again_by_accident() {
    let mut harness = harness();
    let error = harness.mkfs(options(1)).unwrap_err();
    assert!(matches!(error, MkfsError::InUse(Contents::Loligo { osd: OsdId(3), .. })), "{error}");
    harness.mkfs(FormatOptions { force: true, write_fully: true, ..options(1) }).unwrap();
    harness.mount();
    assert_eq!(harness.store().pgs().count(), 0);
}

#[test]
fn too_small_a_device_is_refused_with_the_least_size() {
    let mut harness = harness();
    harness.media.borrow_mut().geometry.blocks.0 = 1000;
    let least = Superblock::blocks_min(1);
    let error = harness.mkfs(FormatOptions { force: true, ..options(1) }).unwrap_err();
    assert_eq!(error, MkfsError::TooSmall { blocks: 1000, shards: 1, least });
    assert!(error.to_string().contains("MiB"), "{error}");
    harness.media.borrow_mut().geometry.blocks.0 = least;
    harness.mkfs(FormatOptions { force: true, ..options(1) }).unwrap();
    harness.mount();
    assert_eq!(harness.mkfs(options(0)).unwrap_err(), MkfsError::Shards(0));
}

#[test]
fn a_probe_says_what_is_there_instead() {
    let mut harness = harness();
    let found = harness.probe().unwrap().superblock;
    assert_eq!(found.expect(options(1).cluster, OsdId(3)), Ok(()));
    let other = found.expect(ClusterId(uuid::Uuid::from_u128(9)), OsdId(3)).unwrap_err();
    assert!(matches!(other, ProbeError::Other { found_osd: OsdId(3), .. }), "{other}");
    harness.media.borrow_mut().geometry.blocks.0 = 2999;
    assert_eq!(harness.probe().unwrap_err(), ProbeError::Shrunk { blocks: 2999, formatted: 3000 });
    harness.media.borrow_mut().geometry.blocks.0 = 3000;
    // One copy is enough, none is damage.
    harness.media.borrow_mut().set(0, &[0; BLOCK]);
    assert_eq!(harness.probe().unwrap().superblock, found);
    let mut damaged = harness.media.borrow().get(1).to_vec();
    damaged[100] ^= 1;
    harness.media.borrow_mut().set(1, &damaged);
    assert_eq!(harness.probe().unwrap_err(), ProbeError::Contents(Contents::Damaged));
    damaged[10] = 1;
    harness.media.borrow_mut().set(1, &damaged);
    assert_eq!(harness.probe().unwrap_err(), ProbeError::Contents(Contents::OtherFormat { found: 1 }));
    let mut ext4 = vec![0; BLOCK];
    ext4[1080..1082].copy_from_slice(b"\x53\xef");
    harness.media.borrow_mut().set(0, &ext4);
    harness.media.borrow_mut().set(1, &[0; BLOCK]);
    let foreign = Contents::Foreign("an ext2/3/4 file system");
    assert_eq!(harness.probe().unwrap_err(), ProbeError::Contents(foreign.clone()));
    assert_eq!(harness.mkfs(options(1)).unwrap_err(), MkfsError::InUse(foreign));
}

#[test]
fn an_interrupted_mkfs_leaves_no_usable_device() {
    for n in 1..40 {
        let mut harness = harness();
        harness.media.borrow_mut().set(0, &[0; BLOCK]);
        harness.media.borrow_mut().set(1, &[0; BLOCK]);
        harness.media.borrow_mut().operations = 0;
        harness.media.borrow_mut().fail_at = Some(n);
        let result = harness.mkfs(FormatOptions { force: true, ..options(1) });
        harness.media.borrow_mut().fail_at = None;
        harness.media.borrow_mut().power_cut();
        match result {
            Ok(()) => {
                harness.mount();
                return;
            }
            Err(error) => assert!(matches!(error, MkfsError::Device { .. }), "{error}"),
        }
        // A superblock may have reached the device only after everything else was durable.
        if harness.probe().is_ok() {
            harness.mount();
        }
    }
    panic!("a mkfs takes fewer operations");
}

/// Of each crash point at most so many images are tried.
const IMAGES: usize = 24;

#[test]
fn a_crash_in_mkfs_leaves_the_old_device_or_the_new_one_or_none() {
    let mut counts = [0u64; 3];
    for write_fully in [false, true] {
        let mut harness = Harness::new(1560, 9);
        harness.media.borrow_mut().chaos = false;
        for index in 0..2 {
            harness.make_pg(pg(index));
            harness.write(pg(index), super::harness::object(u64::from(index)), 0, 9);
        }
        harness.commit();
        harness.checkpoint();
        harness.write(pg(0), super::harness::object(0), 3, 2);
        harness.commit();
        harness.stop();
        harness.media.borrow_mut().settle(true);
        (harness.moments, harness.one_at_a_time) = (Some(Vec::new()), true);
        let new = DeviceId(uuid::Uuid::from_u128(77));
        harness.mkfs(FormatOptions { force: true, write_fully, device: new, ..options(1) }).unwrap();
        for moment in harness.moments.take().unwrap() {
            for image in moment.crash.images(IMAGES, &mut Rng(1)) {
                let mut after = Harness::after(&moment, moment.crash.media(&image), &harness.pool);
                match after.probe() {
                    // What is said is what a person can act upon.
                    Err(ProbeError::Contents(Contents::Empty | Contents::Damaged | Contents::Unknown)) => {
                        counts[0] += 1
                    }
                    Err(other) => panic!("{other}: {}", moment.crash.describe(&image)),
                    Ok(found) => {
                        let is_new = found.superblock.device == new;
                        counts[1 + usize::from(is_new)] += 1;
                        if is_new {
                            after.oracle = Oracle::default();
                        }
                        after.mount();
                        after.verify();
                    }
                }
            }
        }
    }
    assert!(counts.iter().all(|count| *count > 5), "refused, old, new: {counts:?}");
}
