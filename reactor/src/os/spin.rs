//! How long a reactor spins for an answer before it parks: pure arithmetic, fed with times.
//!
//! Waking an idle virtual core takes some 25 µs, so spinning for an answer is worth its CPU as long as the answer comes
//! soon and the core has nothing better to do. Both are learnt: a spin that finds nothing until its end, and a round
//! that took far longer than its work (another thread or another guest had the core), halve the next spins; answers
//! that come in time, and a while without such loss, double them again.

use crate::env::Instant;
use std::time::Duration;

/// Longest spin. Three times the slowest durable write of three copies on a small virtual machine (DESIGN section 2),
/// so that a disk's usual outliers are still waited for.
pub(super) const SPIN_MAX: Duration = Duration::from_micros(1000);
/// A spin shorter than waking a core is worth nothing: below, it is none at all.
const SPIN_FLOOR: Duration = Duration::from_micros(30);
/// A round without work that took this long was time lost to others. A yield to a peer that works for us costs up
/// to 100 µs; a thread that computes takes the scheduler's whole slice, 2.8 ms here, and so does a stolen core.
pub(super) const LOSS: Duration = Duration::from_micros(300);
/// After this long without loss or failure the spin grows again. Guessed: ten slices of a scheduler.
const RECOVERY: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug)]
pub(super) struct Spin {
    max: Duration,
    limit: Duration,
    /// Since when an answer is waited for without any event.
    since: Instant,
    last_bad: Instant,
}

impl Spin {
    pub(super) fn new(max: Duration) -> Self {
        Self { max, limit: max, since: Instant(0), last_bad: Instant(0) }
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// There was something to do: whatever is waited for next has the whole spin before it.
    pub(super) fn event(&mut self, now: Instant) {
        if now.since(self.since) < self.limit {
            self.grow();
        }
        self.since = now;
    }

    /// Somebody waits for an answer who did not a round ago, perhaps on behalf of code outside the loop.
    pub(super) fn begin(&mut self, now: Instant) {
        self.since = now;
    }

    /// Whether to go on spinning. False once, at the end of a spin in vain, shortens the next.
    pub(super) fn goes_on(&mut self, now: Instant) -> bool {
        if now.since(self.last_bad) >= RECOVERY && self.limit < self.max {
            self.last_bad = now;
            self.grow();
        }
        if now.since(self.since) < self.limit {
            return true;
        }
        if !self.limit.is_zero() {
            self.shrink(now);
        }
        false
    }

    /// A round without work took `time`. True: much of it was lost to others.
    pub(super) fn idle_round(&mut self, now: Instant, time: Duration) -> bool {
        let lost = time >= LOSS;
        if lost {
            self.shrink(now);
        }
        lost
    }

    fn shrink(&mut self, now: Instant) {
        self.last_bad = now;
        self.limit /= 2;
        if self.limit < SPIN_FLOOR {
            self.limit = Duration::ZERO;
        }
    }

    fn grow(&mut self) {
        self.limit = (self.limit * 2).max(SPIN_FLOOR).min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Instant {
        Instant(1_000_000_000 + micros * 1000)
    }

    #[test]
    fn answers_in_time_keep_the_whole_spin() {
        let mut spin = Spin::new(SPIN_MAX);
        for answer in 0..100 {
            spin.event(at(answer * 500));
            assert!(spin.goes_on(at(answer * 500 + 499)));
        }
        assert_eq!(spin.limit(), SPIN_MAX);
    }

    #[test]
    fn spins_in_vain_get_shorter_and_end_until_the_next_try() {
        let mut spin = Spin::new(SPIN_MAX);
        spin.event(at(0));
        let mut now = 0;
        let mut spins = 0;
        while !spin.limit().is_zero() {
            now += 1100;
            assert!(!spin.goes_on(at(now)));
            spin.event(at(now));
            spins += 1;
            assert!(spins < 10);
        }
        assert!(!spin.goes_on(at(now + 1)));
        now += 21_000;
        spin.event(at(now));
        assert!(spin.goes_on(at(now + 1)), "one more try after the recovery time");
        spin.event(at(now + 10));
        assert_eq!(spin.limit(), SPIN_FLOOR * 2, "which an answer in time makes longer");
    }

    #[test]
    fn time_lost_to_others_shortens_it() {
        let mut spin = Spin::new(SPIN_MAX);
        assert!(!spin.idle_round(at(0), Duration::from_micros(100)));
        assert!(spin.idle_round(at(10), Duration::from_millis(3)));
        assert_eq!(spin.limit(), SPIN_MAX / 2);
    }
}
