//! Time and the controller's fate: aborts, resets, and what becomes of the operations in flight.

use super::{Namespace, SWEEPS_PER_TIMEOUT};
use crate::bus::Bus;
use crate::controller::{Fault, Standing};
use loligo_reactor::env::{Clock, DiskError};

/// Sweeps without an answer to the abort, after which the controller is reset.
const SWEEPS_OF_GRACE: u8 = 4;
/// Sweeps after which an operation that was sent again and again is given up.
const SWEEPS_MAX: u16 = 3 * SWEEPS_PER_TIMEOUT as u16;
/// Polls with completions between two looks at the clock. Polls without look every time.
const POLLS_PER_LOOK: u32 = 32;

impl<B: Bus, C: Clock> Namespace<B, C> {
    /// The controller has stopped since this queue was last looked at: memory is the host's again.
    pub(super) fn rejoin(&mut self, epoch: u64) {
        (self.epoch, self.attached, self.overdue) = (epoch, false, false);
        self.sq.reset(Some(self.shared.shadow_pages()));
        self.cq.reset(Some(self.shared.shadow_pages()));
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            let timed_out = slot.sweeps > SWEEPS_PER_TIMEOUT;
            let Some(piece) = slot.piece.take() else { continue };
            self.free.push(index as u16);
            let op = &mut self.ops[piece.op as usize];
            if timed_out || op.sweeps > SWEEPS_MAX {
                op.error.get_or_insert(DiskError::Timeout);
                self.close_piece(piece.op);
            } else {
                self.resend.push_back(piece);
                self.stats.resent += 1;
            }
        }
        if self.shared.standing().1 != Standing::Ended {
            self.shared.ask_for_queue(self.queue);
        }
    }

    /// The controller is cut off for good: everything fails.
    pub(super) fn fail_all(&mut self) {
        let error = self.shared.end_error();
        for index in 0..self.slots.len() {
            if self.slots[index].piece.take().is_some() {
                self.free.push(index as u16);
            }
        }
        self.unsent.clear();
        self.resend.clear();
        for index in 0..self.ops.len() {
            if self.bodies[index].is_some() && self.ops[index].result.is_none() {
                let op = &mut self.ops[index];
                op.error.get_or_insert(error);
                (op.outstanding, op.sent) = (0, op.blocks);
                self.finish_if_done(index as u32);
            }
        }
    }

    /// Whatever is not the common case of a live controller with this queue on it.
    #[cold]
    pub(super) fn catch_up(&mut self, epoch: u64, standing: Standing) {
        match standing {
            Standing::Stopping => {}
            Standing::Ended => return self.fail_all(),
            Standing::Stopped | Standing::Live => {
                if epoch != self.epoch {
                    self.rejoin(epoch);
                }
                if standing == Standing::Live && self.shared.is_attached(self.queue, epoch) {
                    // The controller decides anew in each epoch about shadow doorbells, before it is live.
                    self.sq.begin(self.shared.shadow());
                    self.cq.begin(self.shared.shadow());
                    self.attached = true;
                    return;
                }
            }
        }
        self.now = self.clock.now();
        self.shared.drive(self.now);
    }

    /// Looks at the clock, and now and then at what is overdue.
    pub(super) fn look(&mut self, idle: bool) {
        self.polls += 1;
        if !idle && self.polls < POLLS_PER_LOOK {
            return;
        }
        self.polls = 0;
        self.now = self.clock.now();
        if self.now >= self.next_sweep {
            self.sweep();
        }
        if self.overdue {
            self.shared.drive(self.now);
        }
    }

    #[cold]
    pub(super) fn sweep(&mut self) {
        self.next_sweep = self.now.after(self.shared.options.command_timeout / SWEEPS_PER_TIMEOUT.into());
        self.shared.drive(self.now);
        for op in &mut self.ops {
            op.sweeps = op.sweeps.saturating_add(1);
        }
        let mut reset = false;
        for slot in self.slots.iter_mut().filter(|slot| slot.piece.is_some()) {
            slot.sweeps = slot.sweeps.saturating_add(1);
            if slot.sweeps == SWEEPS_PER_TIMEOUT + 1 {
                self.overdue = true;
                self.stats.aborts += 1;
                self.shared.ask_for_abort(self.queue, slot.cid);
            }
            reset |= slot.sweeps > SWEEPS_PER_TIMEOUT + SWEEPS_OF_GRACE;
        }
        if reset {
            self.stats.resets += 1;
            self.shared.ask_for_reset(self.epoch, Fault::CommandTimeout, self.now);
        }
    }
}
