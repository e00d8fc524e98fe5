//! When a write is told that there is no space.
//!
//! What a primary knows of the space of the others is old, and a store that has none right now may get some from a
//! checkpoint or from superseded blocks. So before a write is refused, everybody is asked, and it waits meanwhile.
//! What was found then holds for a while, or every write to a full cluster would have to wait.

use loligo_reactor::env::Instant;
use std::time::Duration;

/// How long a write waits for space. Guessed: some checkpoints of a small device.
pub const FULL_AFTER: Duration = Duration::from_millis(300);
/// How long others are refused for that. Guessed: short for who has just deleted something.
const FULL_FOR: Duration = Duration::from_secs(1);

/// What is known of a want of space.
#[derive(Debug, Default)]
pub struct Shortage {
    /// Since when somebody waits for space.
    since: Option<Instant>,
    /// So many blocks were not to be had, found then.
    full: Option<(u64, Instant)>,
    asked: Option<Instant>,
}

impl Shortage {
    /// There is no space for a write of so many blocks: whether it is refused. If not, it waits.
    pub fn refuses(&mut self, needed: u64, now: Instant) -> bool {
        if self.full.is_some_and(|(blocks, at)| needed >= blocks && now.since(at) < FULL_FOR) {
            return true;
        }
        let since = *self.since.get_or_insert(now);
        if now.since(since) < FULL_AFTER {
            return false;
        }
        self.since = None;
        self.full = Some((needed, now));
        true
    }

    /// There is space for a write of so many blocks.
    pub fn end(&mut self, needed: u64) {
        self.since = None;
        if self.full.is_some_and(|(blocks, _)| blocks <= needed) {
            self.full = None;
        }
    }

    /// Nobody waits any more. What was found to be full is so still.
    pub fn rest(&mut self) {
        self.since = None;
    }

    /// Nothing is known any more.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// Whether somebody waits for space.
    pub fn is_waiting(&self) -> bool {
        self.since.is_some()
    }

    /// Whether the others are to be asked now; not more often than every `pause`.
    pub fn asks(&mut self, now: Instant, pause: Duration) -> bool {
        let is_due = self.is_waiting() && self.asked.is_none_or(|asked| now.since(asked) >= pause);
        if is_due {
            self.asked = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_waits_before_the_first_refusal_and_again_when_that_is_old() {
        let (mut shortage, start) = (Shortage::default(), Instant(5));
        assert!(!shortage.refuses(10, start));
        assert!(shortage.asks(start, Duration::from_millis(100)));
        assert!(!shortage.asks(start, Duration::from_millis(100)));
        let found = start.after(FULL_AFTER);
        assert!(shortage.refuses(10, found));
        assert!(shortage.refuses(12, found), "a larger one too");
        assert!(!shortage.refuses(9, found), "a smaller one may fit");
        shortage.end(9);
        assert!(shortage.refuses(10, found), "what fits is no sign for what is larger");
        assert!(!shortage.refuses(10, found.after(FULL_FOR)));
        shortage.end(10);
        assert!(!shortage.is_waiting());
    }
}
