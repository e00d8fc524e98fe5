//! What runs on a reactor: passive components that do nothing until they are polled.

use crate::env::Instant;

/// What one poll did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Something was done: poll again at once.
    Busy,
    /// There was nothing to do.
    Idle,
}

impl Activity {
    /// `Busy` if `busy`.
    pub fn from_busy(busy: bool) -> Self {
        if busy { Self::Busy } else { Self::Idle }
    }

    /// Busy if either is.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self::from_busy(self == Self::Busy || other == Self::Busy)
    }
}

/// A passive component: an OSD's shard, the mon, a client, a front end. The real reactor and the simulator call
/// the same functions. It must not block, and one poll must be bounded in what it does.
pub trait Poller {
    /// For counters and stall reports.
    fn name(&self) -> &'static str;

    /// Does what there is to do now.
    fn poll(&mut self, now: Instant) -> Activity;

    /// When it wants to be polled next even if nothing arrives; `None`: never.
    fn next_deadline(&self) -> Option<Instant>;

    /// Whether an answer is on its way whose latency somebody waits for, so that the reactor spins for it
    /// instead of parking (DESIGN section 2).
    fn expecting(&self) -> bool;
}

/// One turn of a loop that drives pollers: the real reactor's, or a simulator's. It lets code at the edges (command
/// line, tests) wait for a passive component: turn until the answer is there.
pub trait Turn {
    /// Polls each once, then spins, yields or parks by the loop's rule.
    fn turn(&mut self, pollers: &mut [&mut dyn Poller]);
}
