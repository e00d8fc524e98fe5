//! Random operations against the oracle, with crashes as ordinary operations.

use super::harness::{Harness, What, object, pg};
use crate::store::api::{PgMeta, SubmitError};
use loligo_config::id::Epoch;
use loligo_reactor::env::WriteCache;

const PGS: u64 = 4;

struct Run {
    harness: Harness,
    steps: u64,
    crashes: u64,
    full: u64,
    /// Blocks of the longest write.
    longest: u64,
    objects: u64,
}

impl Run {
    fn new(blocks: u64, seed: u64) -> Self {
        let harness = Harness::new(blocks, seed);
        // A small device gets more objects than it can hold.
        let objects = if blocks < 2000 { 60 } else { 12 };
        let longest = [4, 20, 60][(seed % 3) as usize];
        Self { harness, steps: 0, crashes: 0, full: 0, longest, objects }
    }

    fn step(&mut self) {
        self.steps += 1;
        let harness = &mut self.harness;
        let id = harness.rng.below(self.objects);
        let (pg_id, object) = (pg((id % PGS) as u32), object(id));
        if !harness.exists(pg_id) {
            harness.make_pg(pg_id);
            return;
        }
        let block = if harness.rng.chance(3) { 110 } else { 0 } + harness.rng.below(30) as u32;
        let result = match harness.rng.below(100) {
            0..40 => {
                let count = 1 + harness.rng.below(self.longest) as u32;
                let stamps = harness.stamps(count);
                harness.submit(pg_id, What::Write(object, block, stamps))
            }
            40..46 => {
                let count = 1 + harness.rng.below(150) as u32;
                harness.submit(pg_id, What::Free(object, block, count))
            }
            46..49 => harness.submit(pg_id, What::Remove(object)),
            49..51 => harness.submit(pg_id, What::Result),
            51..52 => {
                let promised = Epoch(harness.rng.below(100) as u32);
                harness.submit(pg_id, What::Meta(PgMeta { promised, activated: Epoch(1) }))
            }
            52 if harness.rng.chance(8) => harness.submit(pg_id, What::RemovePg),
            53..65 => {
                let count = 1 + harness.rng.below(160) as u32;
                harness.read(pg_id, object, block, count);
                Ok(())
            }
            65 if harness.rng.chance(3) => {
                harness.store().request_checkpoint();
                Ok(())
            }
            66 if harness.rng.chance(3) => {
                let epoch = Epoch(harness.next_stamp as u32);
                harness.keep_map(epoch);
                Ok(())
            }
            67 if harness.rng.chance(2) => {
                harness.store().audit().unwrap();
                Ok(())
            }
            68 if harness.rng.chance(2) => return self.crash(),
            _ => {
                harness.poll();
                Ok(())
            }
        };
        match result {
            Ok(()) => (),
            Err(SubmitError::Busy) => harness.poll(),
            Err(SubmitError::NoSpace) => {
                self.full += 1;
                harness
                    .submit_wait(pg_id, What::Remove(object))
                    .expect("deletes work when nothing else does");
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn crash(&mut self) {
        self.crashes += 1;
        let harness = &mut self.harness;
        harness.store().audit().unwrap();
        if harness.rng.chance(4) {
            harness.stop();
            harness.media.borrow_mut().process_killed();
        } else {
            harness.power_cut();
        }
        // Sometimes the mount is cut too, at any point.
        while harness.rng.chance(3) {
            let polls = harness.rng.below(40);
            let mut mount = harness.begin_mount();
            for _ in 0..polls {
                harness.now.0 += 1000;
                if let Some(done) = mount.poll(harness.now) {
                    done.unwrap();
                    break;
                }
            }
            harness.media.borrow_mut().power_cut();
        }
        harness.mount();
        harness.verify();
    }
}

fn run(seeds: std::ops::Range<u64>, blocks: u64, steps: u64, cache: WriteCache) -> (u64, u64, u64) {
    let (mut crashes, mut full, mut committed) = (0, 0, 0);
    for seed in seeds {
        println!("SEED={seed} blocks={blocks} steps={steps} cache={cache:?}");
        let mut run = Run::new(blocks, seed);
        run.harness.stop();
        run.harness.media.borrow_mut().power_cut();
        {
            let geometry = &mut run.harness.media.borrow_mut().geometry;
            (geometry.write_cache, geometry.discards) = (cache, seed % 2 == 1);
        }
        run.harness.mount();
        for _ in 0..steps {
            run.step();
        }
        run.harness.commit();
        run.harness.settle();
        run.harness.store().audit().unwrap();
        run.harness.verify_contents();
        crashes += run.crashes;
        full += run.full;
        committed += run.harness.oracle.committed;
    }
    println!("crashes={crashes} full={full} committed={committed}");
    (crashes, full, committed)
}

#[test]
fn acked_transactions_survive_every_crash() {
    let (crashes, _, committed) = run(0..30, 3000, 4000, WriteCache::Volatile);
    assert!(crashes > 300 && committed > 20_000);
}

#[test]
fn the_same_holds_without_a_volatile_cache() {
    let (crashes, ..) = run(100..110, 3000, 4000, WriteCache::None);
    assert!(crashes > 100);
}

#[test]
fn the_same_holds_on_a_device_that_is_nearly_always_full() {
    let (crashes, full, _) = run(200..215, 1560, 4000, WriteCache::Volatile);
    assert!(crashes > 150 && full > 50, "{crashes} {full}");
}

/// One run of each kind; with `LOLIGO_SOAK=1` many (`tests/run --long`).
#[test]
fn soak() {
    let seeds = if std::env::var_os("LOLIGO_SOAK").is_some() { 400 } else { 1 };
    let (crashes, ..) = run(1000..1000 + seeds, 3000, 10_000, WriteCache::Volatile);
    let (crashes_full, full, _) = run(2000..2000 + seeds, 1560, 10_000, WriteCache::Volatile);
    assert!(crashes > 0 && crashes_full > 0 && full > 0, "{crashes} {crashes_full} {full}");
}
