//! What a reactor did with its time.

use crate::env::Instant;
use hdrhistogram::Histogram;
use std::fmt;
use std::time::Duration;

/// Counters and histograms of one reactor. Cheap to keep: a few additions per round, a histogram entry per round that
/// had work. Times are in nanoseconds.
#[derive(Clone)]
pub struct ReactorStats {
    /// Rounds in all.
    pub rounds: u64,
    /// Rounds in which a poller had work or the ring had completions.
    pub busy_rounds: u64,
    /// Time in those.
    pub busy_nanos: u64,
    /// Time in rounds without work, while an answer was expected (or in busy mode).
    pub spun_nanos: u64,
    /// Time given to others by yielding.
    pub yielded_nanos: u64,
    /// Time parked.
    pub parked_nanos: u64,
    /// Yields.
    pub yields: u64,
    /// Parks.
    pub parks: u64,
    /// Spins that ended without an answer.
    pub spins_in_vain: u64,
    /// Rounds without work that took far longer than they should: others had the core.
    pub losses: u64,
    /// Time of the rounds with work.
    pub loop_nanos: Histogram<u64>,
    /// Completions per round with work.
    pub loop_events: Histogram<u64>,
    /// Polls that took longer than the threshold.
    pub stalls: u64,
    /// The longest of them.
    pub stall_longest: Option<Stall>,
    /// The last of them.
    pub stall_last: Option<Stall>,
}

/// A poll that took too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Who.
    pub poller: &'static str,
    /// How long.
    pub time: Duration,
    /// When it ended.
    pub at: Instant,
}

impl fmt::Debug for ReactorStats {
    /// Without the histograms' thousands of buckets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReactorStats")
            .field("rounds", &self.rounds)
            .field("busy_rounds", &self.busy_rounds)
            .field("busy_nanos", &self.busy_nanos)
            .field("spun_nanos", &self.spun_nanos)
            .field("yielded_nanos", &self.yielded_nanos)
            .field("parked_nanos", &self.parked_nanos)
            .field("yields", &self.yields)
            .field("parks", &self.parks)
            .field("spins_in_vain", &self.spins_in_vain)
            .field("losses", &self.losses)
            .field("loop_nanos_p99", &self.loop_nanos.value_at_quantile(0.99))
            .field("loop_events_p99", &self.loop_events.value_at_quantile(0.99))
            .field("stalls", &self.stalls)
            .field("stall_longest", &self.stall_longest)
            .finish_non_exhaustive()
    }
}

impl ReactorStats {
    pub(super) fn new() -> Self {
        let histogram =
            |high| Histogram::new_with_bounds(1, high, 2).expect("bounds that the histogram allows");
        Self {
            rounds: 0,
            busy_rounds: 0,
            busy_nanos: 0,
            spun_nanos: 0,
            yielded_nanos: 0,
            parked_nanos: 0,
            yields: 0,
            parks: 0,
            spins_in_vain: 0,
            losses: 0,
            loop_nanos: histogram(10_000_000_000),
            loop_events: histogram(1 << 20),
            stalls: 0,
            stall_longest: None,
            stall_last: None,
        }
    }

    pub(super) fn busy_round(&mut self, time: Duration, events: u64) {
        let nanos = nanos(time);
        self.busy_rounds += 1;
        self.busy_nanos += nanos;
        self.loop_nanos.saturating_record(nanos.max(1));
        self.loop_events.saturating_record(events);
    }

    pub(super) fn stall(&mut self, stall: Stall) {
        self.stalls += 1;
        self.stall_last = Some(stall);
        if self.stall_longest.is_none_or(|longest| longest.time < stall.time) {
            self.stall_longest = Some(stall);
        }
    }
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
