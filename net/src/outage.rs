//! When to speak of a mon that cannot be reached: once after a while, and once when one is found again.

use loligo_reactor::env::Instant;
use std::time::Duration;

/// How long it stays silent. A mon that is started anew is back sooner.
pub const SAID_AFTER: Duration = Duration::from_secs(5);

/// Since when something is missing, and whether that has been said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outage {
    since: Option<Instant>,
    is_said: bool,
}

impl Outage {
    /// It is missing now.
    pub fn lost(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// When [`Outage::is_due`] becomes true.
    pub fn deadline(&self) -> Option<Instant> {
        self.since.filter(|_| !self.is_said).map(|since| since.after(SAID_AFTER))
    }

    /// Whether it is to be said now; true once for each outage.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.deadline().is_some_and(|at| at <= now);
        self.is_said |= is_due;
        is_due
    }

    /// It is there. Returns whether that is to be said, since its absence was.
    pub fn found(&mut self) -> bool {
        std::mem::take(self).is_said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_said_once_and_its_end_too() {
        let mut outage = Outage::default();
        let at = |ms| Instant(0).after(Duration::from_millis(ms));
        assert!(!outage.is_due(at(9_000)), "nothing is missing");
        outage.lost(at(1_000));
        outage.lost(at(4_000));
        assert!(!outage.is_due(at(5_999)));
        assert_eq!(outage.deadline(), Some(at(6_000)));
        assert!(outage.is_due(at(6_000)));
        assert!(!outage.is_due(at(60_000)), "once");
        assert_eq!(outage.deadline(), None);
        assert!(outage.found());
        assert!(!outage.found());
        outage.lost(at(70_000));
        assert!(!outage.found(), "too short to be spoken of");
    }
}
