//! One queue of a device: what a process has.

use super::SharedMedia;
use loligo_reactor::env::{
    BlockDevice, Completion, Completions, DiskError, DiskOp, Geometry, QueueFull, Ticket,
};
use std::rc::Rc;

/// One queue. Dropping it is the end of its process: what is in flight is done, or in part, or not.
#[derive(Debug)]
pub struct SimDisk {
    media: SharedMedia,
    queue: u32,
    geometry: Geometry,
    in_flight: u32,
    /// A write or flush has failed: nothing is written any more, as the other back ends do it.
    poisoned: bool,
}

impl SimDisk {
    /// A queue on `media`.
    pub fn new(media: &SharedMedia) -> Self {
        let (queue, geometry) = {
            let mut media = media.borrow_mut();
            (media.new_queue(), media.geometry())
        };
        Self { media: Rc::clone(media), queue, geometry, in_flight: 0, poisoned: false }
    }

    /// Its number, for `Media::next_due`.
    pub fn queue(&self) -> u32 {
        self.queue
    }
}

impl BlockDevice for SimDisk {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        if self.in_flight >= self.geometry.queue_depth_max {
            return Err(QueueFull(op));
        }
        self.in_flight += 1;
        self.media.borrow_mut().submit(self.queue, op, ticket, self.poisoned);
        Ok(())
    }

    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32 {
        if self.in_flight == 0 {
            return 0;
        }
        let mut media = self.media.borrow_mut();
        let mut count = 0;
        while count < budget
            && let Some(pending) = media.take_due(self.queue)
        {
            let result = pending.error.map_or(Ok(()), Err);
            let is_write = !matches!(pending.op, DiskOp::Read { .. } | DiskOp::Discard { .. });
            self.poisoned |= is_write && matches!(result, Err(DiskError::Io { .. }));
            done.push_back(Completion { ticket: pending.ticket, result, op: pending.op });
            count += 1;
        }
        self.in_flight -= count;
        count
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }
}

impl Drop for SimDisk {
    fn drop(&mut self) {
        // While a panic unwinds the media may be in use; the run has ended then.
        if let Ok(mut media) = self.media.try_borrow_mut() {
            media.abandon(self.queue);
        }
    }
}
