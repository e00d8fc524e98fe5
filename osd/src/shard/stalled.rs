//! PGs that wait for room in the store, or for memory.

use super::Shard;
use crate::pg::PgEvent;
use loligo_reactor::env::{Instant, World};
use loligo_reactor::poller::Activity;
use std::collections::VecDeque;
use std::time::Duration;

/// How often they try when the store does not move: memory comes back without an event. Guessed: a few round trips.
const RETRY: Duration = Duration::from_micros(500);

/// By slot, in the order in which they began to wait.
#[derive(Debug, Default)]
pub(super) struct Stalled {
    slots: VecDeque<usize>,
    next: Instant,
}

impl Stalled {
    pub(super) fn push(&mut self, slot: usize) {
        self.slots.push_back(slot);
    }

    /// When to try again at the latest.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        (!self.slots.is_empty()).then_some(self.next)
    }
}

impl<W: World> Shard<W> {
    /// Lets PGs that wait for room try again when there may be some. All of them: what one waits for may be too much
    /// for now, while the next one only deletes. The order stays, so that the first to wait is the first to go.
    pub(super) fn retry_stalled(&mut self, now: Instant, has_moved: Activity) {
        if self.stalled.slots.is_empty() || (has_moved == Activity::Idle && now < self.stalled.next) {
            return;
        }
        self.stalled.next = now.after(RETRY);
        for _ in 0..self.stalled.slots.len() {
            let Some(slot) = self.stalled.slots.pop_front() else { return };
            if let Some(Some(entry)) = self.slots.get_mut(slot) {
                entry.is_stalled = false;
            }
            // Who still waits is put at the end: after one round the order is the same.
            self.step(slot, now, PgEvent::Room);
        }
    }
}
