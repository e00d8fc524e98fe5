//! Two shards on one device, with the chunk table between them: random operations of both, on a device that is too
//! small for them, and crashes of both at once, also while one has mounted and the other has not.

use super::device::{Media, TestDevice};
use super::harness::{Harness, What, object, options, pg};
use crate::store::api::SubmitError;
use crate::store::mount::Mount;
use loligo_config::id::ShardId;
use loligo_reactor::dma::BufferPool;

struct Two {
    shards: [Harness; 2],
    crashes: u64,
    full: u64,
}

impl Two {
    fn new(blocks: u64, seed: u64) -> Self {
        let (media, pool) = (Media::new(blocks, seed), BufferPool::new(256 << 20));
        let shards = [0, 1].map(|shard| {
            let mut harness = Harness::unformatted(media.clone(), pool.clone());
            harness.shard = ShardId(shard);
            harness.rng.0 ^= u64::from(shard);
            harness
        });
        let mut two = Self { shards, crashes: 0, full: 0 };
        two.shards[0].mkfs(options(2)).unwrap();
        two.mount();
        two
    }

    /// Mounts both with one probe; one of them may work already while the other is still mounting.
    fn mount(&mut self) {
        loop {
            let chunks = self.shards[0].probe().unwrap().chunks;
            let mut mounts = [0, 1].map(|shard| {
                let device = TestDevice::new(&self.shards[0].media);
                Some(Mount::new(device, ShardId(shard), chunks.clone(), self.shards[0].pool.clone()))
            });
            let rng = &mut self.shards[0].rng;
            let cut_after = if rng.chance(3) { rng.below(60) } else { u64::MAX };
            for polls in 0.. {
                if mounts.iter().all(Option::is_none) {
                    return;
                }
                if polls >= cut_after {
                    break;
                }
                let at = self.shards[0].rng.below(2) as usize;
                let harness = &mut self.shards[at];
                let Some(mount) = &mut mounts[at] else {
                    self.step(at);
                    continue;
                };
                harness.now.0 += 1000;
                if let Some(done) = mount.poll(harness.now) {
                    mounts[at] = None;
                    harness.store = Some(done.unwrap());
                    harness.store().audit().unwrap();
                    harness.verify();
                }
            }
            drop(mounts);
            self.cut();
        }
    }

    fn cut(&mut self) {
        for harness in self.shards.iter_mut().filter(|harness| harness.store.is_some()) {
            harness.store().audit().unwrap();
            harness.stop();
        }
        self.shards[0].media.borrow_mut().power_cut();
        self.crashes += 1;
    }

    fn step(&mut self, at: usize) {
        let harness = &mut self.shards[at];
        let id = harness.rng.below(80);
        let (pg_id, object) = (pg((id % 2) as u32), object(id));
        if !harness.exists(pg_id) {
            return harness.make_pg(pg_id);
        }
        let block = harness.rng.below(30) as u32;
        let result = match harness.rng.below(20) {
            0..7 => {
                let count = 1 + harness.rng.below(40) as u32;
                let stamps = harness.stamps(count);
                harness.submit(pg_id, What::Write(object, block, stamps))
            }
            7 => harness.submit(pg_id, What::Free(object, block, 40)),
            8..10 => harness.submit(pg_id, What::Remove(object)),
            10 => {
                harness.read(pg_id, object, block, 30);
                Ok(())
            }
            11 if harness.rng.chance(10) => {
                harness.store().request_checkpoint();
                Ok(())
            }
            _ => {
                harness.poll();
                Ok(())
            }
        };
        match result {
            Err(SubmitError::NoSpace) => {
                self.full += 1;
                let removed = harness.submit(pg_id, What::Remove(object));
                assert!(matches!(removed, Ok(()) | Err(SubmitError::Busy)), "{removed:?}");
            }
            Err(SubmitError::Busy) => harness.poll(),
            other => other.unwrap(),
        }
    }
}

fn run(seeds: std::ops::Range<u64>, steps: u64) {
    let (mut crashes, mut full, mut committed, mut moved) = (0, 0, 0, 0);
    for seed in seeds {
        println!("SEED={seed} steps={steps}");
        let mut two = Two::new(3100, seed);
        for _ in 0..steps {
            let at = two.shards[0].rng.below(2) as usize;
            two.step(at);
            if two.shards[0].rng.chance(200) {
                let before = two.shards[0].store().chunks.owned_by(ShardId(0)).count();
                two.cut();
                two.mount();
                moved += u64::from(two.shards[0].store().chunks.owned_by(ShardId(0)).count() != before);
            }
        }
        for harness in &mut two.shards {
            harness.commit();
            harness.settle();
            harness.store().audit().unwrap();
            harness.verify_contents();
            committed += harness.oracle.committed;
        }
        crashes += two.crashes;
        full += two.full;
    }
    println!("crashes={crashes} full={full} committed={committed} moved={moved}");
    assert!(crashes > 10 && full > 10 && moved > 0, "{crashes} {full} {moved}");
}

/// With `LOLIGO_SOAK=1` many (`tests/run --long`).
#[test]
fn two_shards_crash_together() {
    let seeds = if std::env::var_os("LOLIGO_SOAK").is_some() { 200 } else { 6 };
    run(3000..3000 + seeds, 3000);
}
