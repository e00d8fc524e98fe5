//! The ops of one PG: which are out, which wait, and for what.

use super::backoff;
use super::link::Target;
use loligo_config::id::CoreId;
use loligo_config::limits::SESSION_RESULTS_MAX;
use loligo_reactor::env::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// How long to wait before an op is sent again, by what the primary said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HoldReason {
    /// Too many ops wait there already: some end within a device write.
    Busy,
    /// It does not serve the PG, or not yet. A new map ends the wait; that the members have agreed, nothing tells.
    NotServing,
}

impl HoldReason {
    /// First pause and longest one. Guessed: a device write and some of them; a round trip of peering and a restart.
    fn pauses(self) -> (Duration, Duration) {
        match self {
            Self::Busy => (Duration::from_micros(40), Duration::from_millis(5)),
            Self::NotServing => (Duration::from_millis(1), Duration::from_millis(50)),
        }
    }
}

/// The primary asked to come again later: at most one op goes there, as a probe, until one succeeds. Else
/// every op with its data would go over the network every few milliseconds for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pause {
    pub(super) until: Instant,
    attempts: u32,
    pub(super) probe: Option<usize>,
}

/// One PG.
#[derive(Debug, Default)]
pub(super) struct PgQueue {
    pub(super) target: Option<Target>,
    /// The core that the last reply named.
    pub(super) core: CoreId,
    /// Ops to be sent: those with a number first, in its order.
    pub(super) ready: VecDeque<usize>,
    /// All ops with a number that have not ended, and how many ops of this PG got a number before each.
    numbered: BTreeMap<u64, u64>,
    sequence: u64,
    pub(super) pause: Option<Pause>,
    /// It has dropped the results of this session: until there is another one, no op gets a number here.
    pub(super) is_expired: bool,
}

impl PgQueue {
    /// Whether one more op may get a number: the PG keeps the results of a bounded number of ops from the lowest
    /// outstanding one on, and drops the session when there are more.
    pub(super) fn has_window(&self) -> bool {
        let first = self.numbered.first_key_value().map_or(self.sequence, |(_, sequence)| *sequence);
        self.sequence - first < SESSION_RESULTS_MAX as u64
    }

    pub(super) fn number(&mut self, number: u64) {
        self.numbered.insert(number, self.sequence);
        self.sequence += 1;
    }

    pub(super) fn forget(&mut self, number: u64) {
        self.numbered.remove(&number);
    }

    /// The lowest number still outstanding. It counts this PG alone: a PG keeps the results of its own ops, so an
    /// op that is stuck in one PG does not close the window of the others.
    pub(super) fn lowest(&self) -> Option<u64> {
        self.numbered.first_key_value().map(|(number, _)| *number)
    }

    /// The op may not be sent before some time has passed or a new map has come.
    pub(super) fn hold(&mut self, now: Instant, reason: HoldReason) {
        if self.pause.is_some_and(|pause| pause.until > now) {
            // Another op that was out at the same time was refused before.
            return;
        }
        let attempts = self.pause.map_or(0, |pause| pause.attempts);
        let (first, max) = reason.pauses();
        let until = now.after(backoff(first, attempts, max));
        self.pause = Some(Pause { until, attempts: attempts.saturating_add(1), probe: None });
    }

    /// Things may have changed: try at once, with one op first if it was refused before.
    pub(super) fn wake(&mut self) {
        if let Some(pause) = &mut self.pause {
            *pause = Pause { until: Instant(0), attempts: 0, probe: None };
        }
    }

    pub(super) fn may_send(&self, now: Instant) -> bool {
        self.pause.is_none_or(|pause| pause.until <= now && pause.probe.is_none())
    }

    pub(super) fn sent(&mut self, slot: usize) {
        if let Some(pause) = &mut self.pause {
            pause.probe = Some(slot);
        }
    }

    /// The op is not out any more without having succeeded.
    pub(super) fn returned(&mut self, slot: usize) {
        if let Some(pause) = &mut self.pause
            && pause.probe == Some(slot)
        {
            pause.probe = None;
        }
    }
}
