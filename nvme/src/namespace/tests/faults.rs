//! What a controller may do wrong, one at a time.

use super::*;
use crate::controller::{Fault, Phase};
use crate::model::controller::Mischief;
use crate::spec::status::Status;

const TIMEOUT: Result<(), DiskError> = Err(DiskError::Timeout);

fn bench() -> (Bench, Device) {
    let mut bench = Bench::new(SoftOptions::default());
    let mut device = bench.device(1);
    bench.write(&mut device, 1, 1).unwrap();
    (bench, device)
}

/// After whatever happened, reads work and see what was written.
fn is_well(bench: &mut Bench, device: &mut Device) {
    assert_eq!(bench.read(device, 1), Ok(1));
    assert_eq!(bench.controller().phase(), Phase::Live);
}

#[test]
fn every_status_ends_its_operation_as_its_group_says() {
    for bits in (0..=0x7ffu16).filter(|bits| *bits != 0) {
        let status = Status(bits).with_do_not_retry();
        let (mut bench, mut device) = bench();
        bench.soft.inject(Mischief::Fail(status), 0, 1);
        let read = bench.read(&mut device, 1);
        let expected = match status.verdict() {
            Verdict::Media => DiskError::Media { errno: 0 },
            Verdict::Miscompare => DiskError::Media { errno: libc::EILSEQ },
            Verdict::Invalid => DiskError::Invalid,
            Verdict::Aborted => DiskError::Timeout,
            Verdict::Gone => DiskError::Gone,
            Verdict::Failed | Verdict::Retry => DiskError::Io { errno: libc::EIO },
            Verdict::Success => unreachable!("not among them"),
        };
        assert_eq!(read, Err(expected), "{status}");
        is_well(&mut bench, &mut device);
        assert_eq!(bench.write(&mut device, 2, 2), Ok(()), "a failed read poisons nothing");
    }
}

#[test]
fn a_failed_write_or_flush_poisons_the_namespace_on_all_queues() {
    for fails_flush in [false, true] {
        let (mut bench, mut device) = bench();
        let mut other = bench.device(1);
        bench.soft.inject(Mischief::Fail(Status::new(2, 0x80)), 0, 1);
        let op = if fails_flush { DiskOp::Flush } else { bench.write_op(2, 2, 1, true) };
        assert_eq!(bench.one(&mut device, op).result, Err(DiskError::Io { errno: libc::EIO }));
        for device in [&mut device, &mut other] {
            assert_eq!(bench.write(device, 3, 3), Err(DiskError::Poisoned));
            assert_eq!(bench.one(device, DiskOp::Flush).result, Err(DiskError::Poisoned));
            is_well(&mut bench, device);
        }
    }
}

#[test]
fn a_retry_is_sent_again_after_its_delay_and_not_for_ever() {
    let (mut bench, mut device) = bench();
    // Command Interrupted with CRD = 1: 100 ms.
    let status = Status(0x21 | 1 << 11);
    bench.soft.inject(Mischief::Fail(status), 0, 2);
    let before = bench.clock.now();
    assert_eq!(bench.write(&mut device, 2, 2), Ok(()));
    assert!(bench.clock.now().since(before).as_millis() >= 200);
    assert_eq!(device.stats().retried, 2);
    bench.soft.inject(Mischief::Fail(status), 0, u64::MAX);
    assert_eq!(bench.read(&mut device, 1), Err(DiskError::Io { errno: libc::EIO }));
    assert_eq!(device.stats().retried, 2 + u64::from(super::super::ATTEMPTS_MAX));
}

#[test]
fn a_lost_command_is_aborted() {
    let (mut bench, mut device) = bench();
    bench.soft.inject(Mischief::Lose, 0, 1);
    let before = bench.clock.now();
    assert_eq!(bench.read(&mut device, 1).map(|_| ()), TIMEOUT);
    let took = bench.clock.now().since(before).as_millis();
    assert!((4000..5500).contains(&took), "{took} ms");
    assert_eq!((device.stats().aborts, bench.controller().resets()), (1, 0));
    is_well(&mut bench, &mut device);
}

#[test]
fn a_lost_command_that_cannot_be_aborted_costs_a_reset_and_only_itself() {
    let (mut bench, mut device) = bench();
    bench.soft.set_aborts(false);
    bench.soft.inject(Mischief::Lose, 0, 1);
    let op = bench.read_op(1, 1);
    let lost = bench.submit(&mut device, op);
    bench.turn();
    // Others that are in flight at the reset are sent again.
    let mut other = bench.device(1);
    for _ in 0..5800 {
        bench.turn();
        device.poll(u32::MAX, &mut Completions::new());
        other.poll(u32::MAX, &mut Completions::new());
    }
    let op = bench.write_op(2, 2, 1, true);
    bench.submit(&mut other, op);
    let ends = bench.finish(&mut device);
    assert_eq!((ends.len(), ends[0].ticket, ends[0].result), (1, lost, TIMEOUT));
    assert_eq!(bench.finish(&mut other)[0].result, Ok(()));
    assert_eq!(bench.controller().resets(), 1);
    is_well(&mut bench, &mut device);
    is_well(&mut bench, &mut other);
    assert_eq!(bench.write(&mut device, 3, 3), Ok(()), "a read that was lost poisons nothing");
}

#[test]
fn completions_that_name_the_wrong_command_touch_nothing() {
    for mischief in [Mischief::WrongId, Mischief::WrongQueue] {
        let (mut bench, mut device) = bench();
        bench.soft.inject(mischief, 0, 1);
        assert_eq!(bench.read(&mut device, 1).map(|_| ()), TIMEOUT, "{mischief:?}");
        assert_eq!(device.stats().unknown, 1);
        is_well(&mut bench, &mut device);
    }
}

#[test]
fn extra_completions_are_ignored() {
    for mischief in [Mischief::Twice, Mischief::Extra] {
        let (mut bench, mut device) = bench();
        for _ in 0..2000 {
            bench.soft.inject(mischief, 0, 1);
            assert_eq!(bench.read(&mut device, 1), Ok(1));
        }
        assert!(device.stats().unknown >= 1999, "{:?}", device.stats());
    }
}

#[test]
fn a_completion_of_the_wrong_phase_costs_a_reset() {
    let (mut bench, mut device) = bench();
    bench.soft.inject(Mischief::OldPhase, 0, 1);
    assert_eq!(bench.read(&mut device, 1).map(|_| ()), TIMEOUT);
    is_well(&mut bench, &mut device);
}

#[test]
fn a_completion_that_comes_after_the_reset_touches_nothing() {
    let (mut bench, mut device) = bench();
    bench.soft.inject(Mischief::CompleteAfterReset, 0, 1);
    bench.soft.set_aborts(false);
    let op = bench.read_op(1, 1);
    bench.submit(&mut device, op);
    device.poll(1, &mut Completions::new());
    bench.turn();
    let clock = bench.clock.clone();
    bench.controller().reset(clock.now());
    let end = bench.finish(&mut device).remove(0);
    assert_eq!(end.result, Ok(()), "it was sent again");
    let DiskOp::Read { buffer, .. } = end.op else { panic!("a read comes back as a read") };
    assert_eq!(buffer[0], 1);
    assert_eq!(device.stats().unknown, 1, "the late one");
    is_well(&mut bench, &mut device);
}

/// The buffer of a read that never completed is lent until the controller has stopped, since it may still write to it,
/// and this one does.
#[test]
fn buffers_come_back_only_after_the_controller_has_stopped() {
    let (mut bench, mut device) = bench();
    bench.soft.set_aborts(false);
    bench.soft.set_reset_steps(1500, 2);
    bench.soft.inject(Mischief::WriteWhileStopping, 0, 1);
    let op = bench.read_op(1, 1);
    bench.submit(&mut device, op);
    let mut done = Completions::new();
    let mut stopping = 0;
    while done.is_empty() {
        bench.turn();
        device.poll(u32::MAX, &mut done);
        stopping += u32::from(matches!(bench.controller().phase(), Phase::Stopping { .. }));
    }
    assert!(stopping > 1000, "{stopping} turns");
    assert_eq!(bench.controller().resets(), 1, "the controller has stopped before the buffer came back");
    assert_eq!(done[0].result, TIMEOUT);
    is_well(&mut bench, &mut device);
}

#[test]
fn a_controller_that_does_not_stop_is_cut_off_before_buffers_come_back() {
    let (mut bench, mut device) = bench();
    bench.soft.set_aborts(false);
    bench.soft.set_reset_steps(u64::MAX, 2);
    bench.soft.inject(Mischief::Lose, 0, 1);
    let op = bench.read_op(1, 1);
    bench.submit(&mut device, op);
    let mut done = Completions::new();
    while done.is_empty() {
        bench.turn();
        device.poll(u32::MAX, &mut done);
        assert!(done.is_empty() || !bench.soft.may_write());
    }
    assert!(!bench.soft.may_write());
    assert_eq!(done[0].result, TIMEOUT);
    assert_eq!(bench.controller().phase(), Phase::Failed(Fault::NotReady));
    assert_eq!(bench.write(&mut device, 1, 1), Err(DiskError::Timeout));
    assert_eq!(bench.read(&mut device, 1), Err(DiskError::Timeout));
}

#[test]
fn a_fatal_status_costs_a_reset_and_nothing_else() {
    let (mut bench, mut device) = bench();
    bench.soft.inject(Mischief::Fatal, 3, 1);
    for lba in 2..10 {
        let op = bench.write_op(lba, lba as u8, 1, true);
        bench.submit(&mut device, op);
    }
    assert!(bench.finish(&mut device).iter().all(|end| end.result.is_ok()));
    assert_eq!(bench.controller().resets(), 1);
    for lba in 2..10 {
        assert_eq!(bench.read(&mut device, lba), Ok(lba as u8));
    }
}

/// The cache of a controller that broke down may be gone, and its flush would not know.
#[test]
fn a_flush_does_not_vouch_for_writes_from_before_a_breakdown() {
    let (mut bench, mut device) = bench();
    let op = bench.write_op(2, 2, 1, false);
    assert_eq!(bench.one(&mut device, op).result, Ok(()));
    bench.soft.set_fatal();
    is_well(&mut bench, &mut device);
    assert_eq!(bench.one(&mut device, DiskOp::Flush).result, Err(DiskError::Io { errno: libc::EIO }));
    assert_eq!(bench.write(&mut device, 3, 3), Err(DiskError::Poisoned));

    // With nothing in the cache there is nothing to doubt, nor after a reset in order.
    let (mut bench, mut device) = super::faults::bench();
    bench.soft.set_fatal();
    is_well(&mut bench, &mut device);
    assert_eq!(bench.one(&mut device, DiskOp::Flush).result, Ok(()));
}

#[test]
fn a_controller_that_breaks_down_again_and_again_is_given_up() {
    let (mut bench, mut device) = bench();
    bench.soft.set_reset_steps(2, u64::MAX);
    bench.soft.set_fatal();
    assert_eq!(bench.read(&mut device, 1), Err(DiskError::Timeout));
    assert_eq!(bench.controller().phase(), Phase::Failed(Fault::NotReady));
    assert!(!bench.soft.may_write());
}

#[test]
fn an_unplugged_controller_fails_everything_at_once() {
    let (mut bench, mut device) = bench();
    bench.soft.inject(Mischief::Unplug, 2, 1);
    for lba in 2..10 {
        let op = bench.write_op(lba, lba as u8, 1, true);
        bench.submit(&mut device, op);
    }
    let before = bench.clock.now();
    let ends = bench.finish(&mut device);
    assert!(
        ends.len() == 8
            && ends.iter().all(|end| end.result.is_ok_and(|()| true) || end.result == Err(DiskError::Gone))
    );
    assert!(ends.iter().any(|end| end.result == Err(DiskError::Gone)));
    assert!(bench.clock.now().since(before).as_secs() < 2);
    assert_eq!(bench.read(&mut device, 1), Err(DiskError::Gone));
    assert_eq!(bench.controller().phase(), Phase::Failed(Fault::Gone));
    // Plugged in again and opened anew, what was acknowledged is there.
    drop(device);
    bench.soft.set_gone(false);
    bench.reopen();
    let mut device = bench.device(1);
    is_well(&mut bench, &mut device);
    for end in ends.iter().filter(|end| end.result.is_ok()) {
        let DiskOp::Write { lba, .. } = end.op else { panic!("a write comes back as a write") };
        assert_eq!(bench.read(&mut device, lba.0), Ok(lba.0 as u8));
    }
}

#[test]
fn a_device_that_is_wanted_back_is_let_go() {
    let (mut bench, mut device) = bench();
    bench.soft.inject(Mischief::Lose, 0, 1);
    let op = bench.read_op(1, 1);
    bench.submit(&mut device, op);
    bench.turn();
    bench.soft.want_back();
    assert_eq!(bench.finish(&mut device)[0].result, Err(DiskError::Gone));
    assert!(!bench.soft.may_write());
}

#[test]
fn a_missing_or_dead_controller_is_refused_at_the_start() {
    let clock = TestClock::default();
    let refused = |prepare: &dyn Fn(&SoftController)| {
        let soft = SoftController::new(SoftOptions::default());
        prepare(&soft);
        open(&soft, &clock, ControllerOptions::default()).unwrap_err().to_string()
    };
    assert!(refused(&|soft| soft.set_gone(true)).contains("registers read as all ones"));
    assert!(refused(&|soft| soft.set_reset_steps(2, u64::MAX)).contains("did not become ready"));
}

#[test]
fn a_thousand_resets_under_load_lose_nothing() {
    let (mut bench, mut device) = bench();
    let mut other = bench.device(1);
    let clock = bench.clock.clone();
    let mut expected = vec![None; 64];
    for round in 0..1000u64 {
        for at in 0..4 {
            let lba = (round * 7 + at * 16) % 64;
            let device = if at % 2 == 0 { &mut device } else { &mut other };
            let op = bench.write_op(lba, round as u8, 1, true);
            bench.submit(device, op);
            expected[lba as usize] = Some(round as u8);
        }
        for _ in 0..round % 5 {
            bench.turn();
            device.poll(1, &mut Completions::new());
        }
        bench.controller().reset(clock.now());
        for device in [&mut device, &mut other] {
            assert!(bench.finish(device).iter().all(|end| end.result.is_ok()), "round {round}");
        }
    }
    assert!(bench.controller().resets() >= 1000);
    for (lba, fill) in expected.into_iter().enumerate() {
        if let Some(fill) = fill {
            assert_eq!(bench.read(&mut device, lba as u64), Ok(fill));
        }
    }
}
