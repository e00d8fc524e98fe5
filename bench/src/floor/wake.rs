//! What the clock, the scheduler and the timer cost: the price of asking, of yielding and of sleeping.
#![allow(clippy::disallowed_methods, reason = "a measurement of the real world")]

use super::{nanos, pin, two_cores};
use crate::load::histogram;
use hdrhistogram::Histogram;
use loligo_reactor::env::Clock;
use loligo_reactor::os::OsClock;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What the timer is asked for: about what a reactor would wait for a device.
pub const SLEEP: Duration = Duration::from_micros(50);
/// Calls per sample where one takes less than reading the clock.
const BATCH: u32 = 100;

/// Reading the clock, for `time`: nanoseconds per reading.
pub fn clock_reads(time: Duration) -> Histogram<u64> {
    per_call(time, || {
        black_box(OsClock.now());
    })
}

/// Yielding the core, for `time`: nanoseconds per call. Whoever else wants the core gets it meanwhile.
pub fn yields(time: Duration) -> Histogram<u64> {
    per_call(time, std::thread::yield_now)
}

fn per_call(time: Duration, mut call: impl FnMut()) -> Histogram<u64> {
    sample(time, || {
        let begun = OsClock.now();
        (0..BATCH).for_each(|_| call());
        OsClock.now().since(begun) / BATCH
    })
}

/// Sleeping for [`SLEEP`], for `time`: nanoseconds that it takes longer.
pub fn timer_overshoots(time: Duration) -> Histogram<u64> {
    sample(time, || {
        let begun = OsClock.now();
        std::thread::sleep(SLEEP);
        OsClock.now().since(begun).saturating_sub(SLEEP)
    })
}

fn sample(time: Duration, mut measure: impl FnMut() -> Duration) -> Histogram<u64> {
    let mut samples = histogram();
    let end = OsClock.now().after(time);
    while OsClock.now() < end {
        samples.saturating_record(nanos(measure()));
    }
    samples
}

/// Two parked threads on two cores that wake each other in turn, for `time`: nanoseconds of one wake-up, half of each
/// round.
pub fn wakes(time: Duration) -> Histogram<u64> {
    let cores = two_cores();
    let near = std::thread::spawn(move || {
        pin(cores, 0);
        wake_in_turn(cores, time)
    });
    near.join().expect("measuring does not panic")
}

fn wake_in_turn(cores: Option<[usize; 2]>, time: Duration) -> Histogram<u64> {
    /// Ends the other thread.
    const END: u64 = u64::MAX;
    let turn = AtomicU64::new(0);
    let near = std::thread::current();
    std::thread::scope(|scope| {
        let far = scope.spawn(|| {
            pin(cores, 1);
            // Odd numbers are this thread's turn.
            loop {
                match turn.load(Ordering::Acquire) {
                    END => return,
                    number if number % 2 == 1 => {
                        turn.store(number + 1, Ordering::Release);
                        near.unpark();
                    }
                    _ => std::thread::park(),
                }
            }
        });
        let mut number = 0;
        let samples = sample(time, || {
            let begun = OsClock.now();
            turn.store(number + 1, Ordering::Release);
            far.thread().unpark();
            number += 2;
            while turn.load(Ordering::Acquire) != number {
                std::thread::park();
            }
            OsClock.now().since(begun) / 2
        });
        turn.store(END, Ordering::Release);
        far.thread().unpark();
        samples
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cost_is_sampled_and_waking_ends() {
        let short = Duration::from_millis(20);
        for (what, samples) in [
            ("clock", clock_reads(short)),
            ("yield", yields(short)),
            ("timer", timer_overshoots(short)),
            ("wake", wakes(short)),
        ] {
            assert!(!samples.is_empty(), "{what}");
        }
    }
}
