//! What a mon waits for, and what it must not do: fences that OSDs do not go by yet, and a store that is behind them.

use super::{Action, Core};
use crate::command::{Code, CommandError};
use loligo_config::id::{Epoch, Incarnation, OsdId};
use loligo_reactor::env::{ConnectionId, Instant};
use std::collections::BTreeSet;

/// An answer that waits until no OSD may take writes by an older map.
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

    /// OSDs that may still serve a session that is fenced from this epoch on: those that are up, serve PGs, and have
    /// not said that they go by this map, and all members of a PG of which no member that is up has said so.
    ///
    /// That an OSD is down here does not mean that it has stopped: it may be cut off from the mon alone. A write needs
    /// every acting member, so one member that refuses makes its PG safe; members that are all down may go on together.
    fn behind(&self, since: Epoch) -> Vec<OsdId> {
        let mut behind = BTreeSet::new();
        for interval in self.map.intervals.values() {
            let confirmed = |osd: &OsdId| self.map.is_up(*osd) && self.osds.epoch(*osd) >= since;
            let is_safe = interval.acting.iter().any(confirmed);
            let late = |osd: &&OsdId| !is_safe || (self.map.is_up(**osd) && !confirmed(osd));
            behind.extend(interval.acting.iter().filter(late).copied());
        }
        behind.into_iter().collect()
    }

    /// Gives the answers to fences that no OSD may be behind any more, and to those that took too long.
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

    /// An OSD says that it has come as far as this epoch. Believed is the start that the map names; another has to
    /// boot first, and to name its device.
    pub(super) fn heard(&mut self, osd: OsdId, incarnation: Incarnation, epoch: Epoch) {
        if self.newest().osds.get(&osd).is_some_and(|known| known.incarnation == incarnation) {
            self.saw(osd, epoch);
        } else if epoch > self.map.epoch {
            let newest = self.map.epoch.0;
            tracing::debug!(%osd, epoch = epoch.0, newest, "an unknown start of an OSD names a newer map: ignored");
        }
    }

    /// An OSD that is believed has come as far as this epoch.
    pub(super) fn saw(&mut self, osd: OsdId, epoch: Epoch) {
        if epoch <= self.seen.1 {
            return;
        }
        self.seen = (osd, epoch);
        if epoch > self.map.epoch {
            let newest = self.map.epoch.0;
            tracing::error!(%osd, epoch = epoch.0, newest, "an OSD has a newer map: this mon makes no more changes");
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
         the command again to wait for them. Those that are down confirm it when they are back; they may run, cut off \
         from the mon",
        names.join(", ")
    );
    CommandError::new(Code::ETIMEDOUT, message)
}
