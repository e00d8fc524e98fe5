//! The N-th operation fails, or the power fails at it, for every N of a script that has everything in it.

use super::harness::{Harness, What, object, pg};
use crate::store::api::SubmitError;
use crate::store::mount::Mount;
use loligo_reactor::env::DiskError;

/// Writes, frees, removes, reads, a map and two checkpoints. Ends early when the store has failed or `until` device
/// operations were done.
fn script(harness: &mut Harness, until: u64) {
    let over = |harness: &mut Harness| {
        harness.store().failed().is_some() || harness.media.borrow().operations >= until
    };
    let submit = |harness: &mut Harness, index: u32, what: What| {
        for _ in 0..100_000 {
            if over(harness) {
                return;
            }
            match harness.submit(pg(index), what.clone()) {
                Err(SubmitError::Busy) => harness.poll(),
                Err(SubmitError::Failed(_)) => return,
                other => return other.unwrap(),
            }
        }
        panic!("busy for ever");
    };
    for round in 0..24u32 {
        let index = round % 2;
        if round < 2 {
            submit(harness, index, What::Meta(Default::default()));
        }
        let stamps = harness.stamps(1 + round);
        submit(harness, index, What::Write(object(u64::from(round % 4)), 120, stamps));
        match round {
            5 => submit(harness, 1, What::Free(object(1), 121, 4)),
            8 => submit(harness, 0, What::Remove(object(0))),
            3 | 9 | 19 => harness.store().request_checkpoint(),
            7 => harness.store().keep_map(loligo_config::id::Epoch(round), &[1; 9000]),
            _ => submit(harness, index, What::Result),
        }
        harness.read(pg(index), object(u64::from(round % 4)), 100, 60);
        for _ in 0..30 {
            if over(harness) {
                return;
            }
            harness.poll();
        }
    }
}

fn fresh(seed: u64) -> Harness {
    let harness = Harness::new(3000, seed);
    harness.media.borrow_mut().operations = 0;
    harness
}

fn length_of_script() -> u64 {
    let mut harness = fresh(5);
    script(&mut harness, u64::MAX);
    let operations = harness.media.borrow().operations;
    assert!(operations > 50 && harness.store().checkpoints() >= 2, "{operations}");
    operations
}

#[test]
fn any_failing_operation_loses_nothing() {
    for sticky in [false, true] {
        for n in 1..=length_of_script() + 10 {
            let mut harness = fresh(5);
            harness.media.borrow_mut().fail_at = Some(n);
            harness.media.borrow_mut().sticky = sticky;
            script(&mut harness, u64::MAX);
            for _ in 0..20 {
                harness.poll();
            }
            if let Some(error) = harness.store().failed() {
                assert_eq!(error, DiskError::Io { errno: 5 });
                let refused = harness.submit(pg(0), What::Result);
                assert_eq!(refused, Err(SubmitError::Failed(error)));
            }
            harness.power_cut();
            harness.media.borrow_mut().fail_at = None;
            harness.mount();
            harness.verify();
        }
    }
}

#[test]
fn a_power_cut_at_any_operation_loses_nothing() {
    for n in 1..=length_of_script() + 10 {
        let mut harness = fresh(5);
        script(&mut harness, n);
        harness.power_cut();
        harness.mount();
        harness.verify();
        harness.power_cut();
        harness.mount();
        harness.verify();
    }
}

#[test]
fn a_mount_that_fails_anywhere_can_be_repeated() {
    for n in 1..200 {
        let mut harness = fresh(5);
        script(&mut harness, u64::MAX);
        harness.power_cut();
        harness.media.borrow_mut().operations = 0;
        harness.media.borrow_mut().fail_at = Some(n);
        if let Ok(probed) = harness.probe() {
            let mut mount = Mount::new(probed.device, harness.shard, probed.chunks, harness.pool.clone());
            while mount.poll(harness.now).is_none() {}
        }
        let reached = harness.media.borrow().operations >= n;
        harness.media.borrow_mut().fail_at = None;
        harness.media.borrow_mut().power_cut();
        harness.mount();
        harness.verify();
        if !reached {
            return;
        }
    }
    panic!("a mount of so little takes fewer operations");
}
