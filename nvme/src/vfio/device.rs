//! A queue pair in a reactor: polled while it spins, and waking it when it parks.
#![allow(unsafe_code)]

use super::VfioBus;
use crate::controller::{Controller, ControllerError};
use crate::namespace::{Namespace, QueueStats};
use io_uring::{opcode, types};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{BlockDevice, Completions, DiskOp, Geometry, QueueFull, Ticket};
use loligo_reactor::os::OsClock;
use loligo_reactor::os::ring::{Ring, RingOwner};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

const USER_EVENT: u64 = 1;
const USER_TIMER: u64 = 2;

/// A namespace of a VFIO controller on a reactor's ring.
pub struct VfioDevice {
    namespace: Namespace<VfioBus, OsClock>,
    wake: Option<Wake>,
}

impl VfioDevice {
    /// A queue pair for a namespace. If the controller was opened with enough interrupts, its completions wake a
    /// reactor that parks on `ring`; else the reactor must spin.
    ///
    /// # Errors
    /// As [`Controller::queue`].
    pub fn new(
        controller: &Controller<VfioBus>,
        nsid: u32,
        ring: &Ring,
        pool: &BufferPool,
    ) -> Result<Self, ControllerError> {
        let namespace = controller.queue(nsid, pool, OsClock)?;
        let event = controller.bus().event(namespace.queue());
        Ok(Self { wake: event.map(|event| Wake::new(ring, event)), namespace })
    }

    /// Counters.
    pub fn stats(&self) -> QueueStats {
        self.namespace.stats()
    }

    /// Whether completions wake a parked reactor.
    pub fn can_park(&self) -> bool {
        self.wake.is_some()
    }
}

impl BlockDevice for VfioDevice {
    fn geometry(&self) -> &Geometry {
        self.namespace.geometry()
    }

    fn submit(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        self.namespace.submit(op, ticket)?;
        if let Some(wake) = &mut self.wake {
            wake.arm(self.namespace.wants_poll_within());
        }
        Ok(())
    }

    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32 {
        let Some(wake) = &mut self.wake else { return self.namespace.poll(budget, done) };
        // The event is taken before the queue is looked at: a completion after the look signals again.
        wake.reap();
        let count = self.namespace.poll(budget, done);
        wake.arm(self.namespace.wants_poll_within());
        count
    }

    fn in_flight(&self) -> u32 {
        self.namespace.in_flight()
    }
}

/// What wakes a parked reactor: the queue's interrupt, and a timer for what has no interrupt (limits of time, resets).
struct Wake {
    owner: RingOwner,
    event: Arc<OwnedFd>,
    memory: Box<WakeMemory>,
    event_armed: bool,
    timer_armed: bool,
}

/// What the kernel reads and writes while the entries are in flight.
struct WakeMemory {
    counter: u64,
    time: types::Timespec,
}

impl Wake {
    fn new(ring: &Ring, event: Arc<OwnedFd>) -> Self {
        let memory = Box::new(WakeMemory { counter: 0, time: types::Timespec::new() });
        Self { owner: ring.owner(), event, memory, event_armed: false, timer_armed: false }
    }

    fn reap(&mut self) {
        self.owner.ring().reap();
        while let Some(end) = self.owner.take() {
            match end.user {
                USER_EVENT => self.event_armed = false,
                _ => self.timer_armed = false,
            }
        }
    }

    /// Sees to it that the reactor wakes for the queue, and within this time if something is in flight.
    fn arm(&mut self, within: Option<Duration>) {
        let Some(within) = within else { return };
        if within.is_zero() {
            return self.owner.ring().nudge();
        }
        if !self.event_armed {
            let counter = std::ptr::from_mut(&mut self.memory.counter).cast();
            let read = opcode::Read::new(types::Fd(self.event.as_raw_fd()), counter, 8).build();
            // SAFETY: the counter is in a box that `self` keeps, and nobody else touches it; `drop` waits for the entry
            // before the box goes. The descriptor is open as long as `self.event`.
            self.event_armed = unsafe { self.owner.push(read, USER_EVENT) }.is_ok();
        }
        if !self.timer_armed {
            self.memory.time = types::Timespec::from(within);
            let timer = opcode::Timeout::new(std::ptr::from_ref(&self.memory.time)).build();
            // SAFETY: as above; the time is changed only while no timer is armed.
            self.timer_armed = unsafe { self.owner.push(timer, USER_TIMER) }.is_ok();
        }
    }
}

impl Drop for Wake {
    fn drop(&mut self) {
        let cancelled = [USER_EVENT, USER_TIMER].map(|user| self.owner.cancel(user).is_ok());
        if cancelled != [true, true] || self.owner.quiesce().is_err() {
            // The kernel may still write there: better lost than used again.
            let memory = std::mem::replace(
                &mut self.memory,
                Box::new(WakeMemory { counter: 0, time: types::Timespec::new() }),
            );
            Box::leak(memory);
        }
    }
}
