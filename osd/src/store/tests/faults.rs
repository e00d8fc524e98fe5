//! The N-th operation fails, or the power fails at it, for every N of a script that has everything in it.

use super::harness::{Harness, What, object, pg};
use crate::store::OP_LIMIT_DEFAULT;
use crate::store::api::SubmitError;
use crate::store::mount::Mount;
use loligo_reactor::env::{BlockDevice, DiskError};
use std::time::Duration;

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
            7 => harness.keep_map(loligo_config::id::Epoch(round)),
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

/// Waits for a device that does not answer, in steps of 100 ms.
fn wait_for_device(harness: &mut Harness, time: Duration) {
    for _ in 0..time.as_millis() / 100 {
        harness.now.0 += 100_000_000;
        harness.poll();
    }
}

#[test]
fn a_device_that_does_not_answer_fails_the_store_and_what_ends_late_counts_for_nothing() {
    for is_read in [false, true] {
        let mut harness = fresh(6);
        harness.make_pg(pg(0));
        harness.write(pg(0), object(1), 0, 4);
        harness.commit();
        harness.settle();
        let committed = harness.oracle.committed;
        harness.media.borrow_mut().hangs = true;
        if is_read {
            harness.read(pg(0), object(1), 0, 4);
        } else {
            harness.write(pg(0), object(1), 0, 4);
        }
        harness.poll();
        assert!(harness.store().next_deadline().is_some(), "a parked reactor wakes for it");
        wait_for_device(&mut harness, OP_LIMIT_DEFAULT - Duration::from_secs(1));
        assert_eq!(harness.store().failed(), None);
        wait_for_device(&mut harness, Duration::from_secs(4));
        assert_eq!(harness.store().failed(), Some(DiskError::Timeout));
        assert_eq!(harness.submit(pg(0), What::Result), Err(SubmitError::Failed(DiskError::Timeout)));
        let writes = harness.media.borrow().writes;
        harness.media.borrow_mut().hangs = false;
        wait_for_device(&mut harness, Duration::from_secs(20));
        assert_eq!(harness.oracle.committed, committed, "nothing is acknowledged");
        assert_eq!(harness.media.borrow().writes, writes, "nothing more is written");
        assert_eq!(harness.store().device().in_flight(), 0, "its buffers came back");
    }
}

#[test]
fn a_pause_of_the_process_is_no_fault_of_the_device() {
    let mut harness = fresh(7);
    harness.make_pg(pg(0));
    harness.media.borrow_mut().hangs = true;
    harness.write(pg(0), object(1), 0, 4);
    harness.poll();
    // The process wakes after a minute, and does not see at once what has ended meanwhile.
    harness.now.0 += 60_000_000_000;
    harness.poll();
    harness.media.borrow_mut().hangs = false;
    harness.commit();
    assert_eq!(harness.store().failed(), None);
}

#[test]
fn the_limit_of_an_operation_can_be_set() {
    let mut harness = fresh(8);
    harness.make_pg(pg(0));
    harness.store().set_op_limit(Duration::from_millis(300));
    harness.media.borrow_mut().hangs = true;
    harness.write(pg(0), object(1), 0, 4);
    harness.poll();
    wait_for_device(&mut harness, Duration::from_millis(1600));
    assert_eq!(harness.store().failed(), Some(DiskError::Timeout));
}
