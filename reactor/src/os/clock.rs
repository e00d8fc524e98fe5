//! The boot-time clock.

use crate::env::{Clock, Instant};
use std::time::Duration;

/// The system's clocks. `now` is one call into the vDSO, without a system call where the machine's clock source allows.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsClock;

impl Clock for OsClock {
    fn now(&self) -> Instant {
        boot_time()
    }

    fn unix_seconds(&self) -> u64 {
        read(libc::CLOCK_REALTIME) / 1_000_000_000
    }
}

/// Now, on the boot-time clock.
pub(super) fn boot_time() -> Instant {
    Instant(read(libc::CLOCK_BOOTTIME))
}

/// The time that this thread has been on a processor, for CPU per I/O.
pub fn thread_cpu_time() -> Duration {
    Duration::from_nanos(read(libc::CLOCK_THREAD_CPUTIME_ID))
}

fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes a `timespec` into the one that `time` is.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    assert_eq!(result, 0, "every kernel that Loligo runs on has clock {clock}");
    // None of these clocks was ever before its origin.
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_goes_on() {
        let clock = OsClock;
        let first = clock.now();
        while clock.now() == first {}
        assert!(clock.now() > first);
        assert!(clock.unix_seconds() > 1_700_000_000);
    }
}
