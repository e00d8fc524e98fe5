//! What a mon waits for, and what it must not do: fences that OSDs do not go by yet, and a store that is behind them.

use super::{Action, Core};
use crate::command::{Code, CommandError};
use loligo_config::id::{Epoch, OsdId};
use loligo_reactor::env::{ConnectionId, Instant};
use std::collections::BTreeSet;

/// An answer that waits until every OSD goes by a map.
#[derive(Debug)]
pub(super) struct Fence {
    since: Epoch,
    connection: ConnectionId,
    number: u64,
    answer: serde_json::Value,
    deadline: Instant,
}

impl Core {
    /// The answer to the command that is being carried out waits for this map.
    pub(crate) fn await_fence(&mut self, since: Epoch) {
        self.awaited = Some(since);
    }

    pub(super) fn hold_answer(
        &mut self,
        since: Epoch,
        connection: ConnectionId,
        number: u64,
        answer: serde_json::Value,
    ) {
        let deadline = self.now.after(self.settings.fence_wait);
        self.fences.push(Fence { since, connection, number, answer, deadline });
    }

    /// OSDs that are up, serve PGs, and have not said that they go by this map.
    fn behind(&self, since: Epoch) -> Vec<OsdId> {
        let acting = self.map.intervals.values().flat_map(|interval| &interval.acting);
        let acting: BTreeSet<OsdId> = acting.copied().filter(|osd| self.map.is_up(*osd)).collect();
        acting.into_iter().filter(|osd| self.osds.epoch(*osd) < since).collect()
    }

    /// Gives the answers to fences that every OSD goes by, and to those that took too long.
    pub fn answer_fences(&mut self, now: Instant, out: &mut Vec<Action>) {
        for at in (0..self.fences.len()).rev() {
            let Fence { since, deadline, .. } = self.fences[at];
            if self.map.epoch < since {
                continue;
            }
            let behind = self.behind(since);
            if !behind.is_empty() && now < deadline {
                continue;
            }
            let fence = self.fences.swap_remove(at);
            let answer = if behind.is_empty() { fence.answer } else { too_late(since, &behind).to_json() };
            let Fence { connection, number, .. } = fence;
            out.push(Action::CommandReply { connection, number, epoch: self.map.epoch, answer });
        }
    }

    pub(super) fn next_fence(&self) -> Option<Instant> {
        self.fences.iter().map(|fence| fence.deadline).min()
    }

    /// An OSD has come as far as this epoch.
    pub(super) fn saw(&mut self, osd: OsdId, epoch: Epoch) {
        if epoch > self.seen.1 {
            self.seen = (osd, epoch);
        }
    }

    /// Who has seen a newer map than this mon has, if anybody: then its store is an old copy, and an epoch that it
    /// made would be used twice.
    pub(crate) fn outdated(&self) -> Option<(OsdId, Epoch)> {
        Some(self.seen).filter(|(_, epoch)| *epoch > self.map.epoch)
    }
}

fn too_late(since: Epoch, behind: &[OsdId]) -> CommandError {
    let names: Vec<String> = behind.iter().map(ToString::to_string).collect();
    let message = format!(
        "the session is fenced from epoch {since} on, but {} did not confirm that epoch yet and may still serve it: run \
         the command again to wait for them, or stop them",
        names.join(", ")
    );
    CommandError::new(Code::ETIMEDOUT, message)
}
