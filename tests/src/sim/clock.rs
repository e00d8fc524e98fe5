//! Time: one true time for the whole world, and each machine's clock that shows it more or less well.

use loligo_reactor::env::{Clock, Instant};
use std::cell::Cell;
use std::rc::Rc;

const MILLION: i128 = 1_000_000;
/// The wall clock at the start of every run: seconds since 1970.
const UNIX_START: u64 = 1_800_000_000;

/// The true time, in nanoseconds since the start of the run. Clones are handles to the same.
#[derive(Clone, Debug, Default)]
pub struct Time(Rc<Cell<u64>>);

impl Time {
    /// Now.
    pub fn now(&self) -> u64 {
        self.0.get()
    }

    /// Goes on to `now`.
    pub fn advance(&self, now: u64) {
        assert!(now >= self.0.get(), "time goes back from {} to {now}", self.0.get());
        self.0.set(now);
    }
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    /// True time from which on it holds.
    since: u64,
    /// What the boot-time clock showed then.
    shown: u64,
    /// How much too fast the clock runs, in millionths.
    drift_ppm: i64,
    /// What the wall clock is off, in seconds.
    wall_offset: i64,
}

/// One machine's clocks. Clones are handles to the same.
#[derive(Clone, Debug)]
pub struct MachineClock {
    time: Time,
    setting: Rc<Cell<Setting>>,
}

impl MachineClock {
    /// A clock of a machine that had been up for `uptime` nanoseconds when the run began.
    pub fn new(time: &Time, uptime: u64, drift_ppm: i64) -> Self {
        let setting = Setting { since: time.now(), shown: uptime, drift_ppm, wall_offset: 0 };
        Self { time: time.clone(), setting: Rc::new(Cell::new(setting)) }
    }

    /// From now on it runs this much too fast.
    pub fn set_drift(&self, drift_ppm: i64) {
        let (since, shown) = (self.time.now(), self.now().0);
        self.setting.set(Setting { since, shown, drift_ppm, ..self.setting.get() });
    }

    /// The wall clock jumps.
    pub fn jump_wall(&self, seconds: i64) {
        let setting = self.setting.get();
        self.setting.set(Setting { wall_offset: setting.wall_offset + seconds, ..setting });
    }

    /// The true time at which this clock shows at least `shown`.
    pub fn true_time(&self, shown: Instant) -> u64 {
        let setting = self.setting.get();
        let left = i128::from(shown.0) - i128::from(setting.shown);
        if left <= 0 {
            return setting.since;
        }
        let speed = MILLION + i128::from(setting.drift_ppm);
        let took = (left * MILLION + speed - 1) / speed;
        u64::try_from(i128::from(setting.since) + took).unwrap_or(u64::MAX)
    }
}

impl Clock for MachineClock {
    fn now(&self) -> Instant {
        let setting = self.setting.get();
        let passed = i128::from(self.time.now() - setting.since);
        let shown = passed * (MILLION + i128::from(setting.drift_ppm)) / MILLION;
        Instant(setting.shown + u64::try_from(shown).expect("clocks run forwards"))
    }

    fn unix_seconds(&self) -> u64 {
        let true_seconds = UNIX_START + self.time.now() / 1_000_000_000;
        true_seconds.saturating_add_signed(self.setting.get().wall_offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_due_when_the_clock_shows_it() {
        let time = Time::default();
        time.advance(5_000);
        for drift in [-500, 0, 3, 500] {
            let clock = MachineClock::new(&time, 1_234_567, drift);
            let deadline = Instant(clock.now().0 + 987_654_321);
            let at = clock.true_time(deadline);
            time.advance(at.max(time.now()));
            assert!(clock.now() >= deadline, "at {drift} ppm");
            assert!(clock.now().0 <= deadline.0 + 2, "at {drift} ppm");
            clock.set_drift(-drift);
            assert!(clock.now() >= deadline, "a new rate does not set it back");
        }
    }
}
