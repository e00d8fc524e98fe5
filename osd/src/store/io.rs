//! The device queue as the store uses it: operations wait here when the device refuses them, urgent ones first, and
//! each that the device has is watched: one that does not end in time is the end of the device.

use super::api::ReadError;
use loligo_reactor::env::{
    BlockDevice, Completion, Completions, DiskError, DiskOp, Instant, QueueFull, Ticket,
};
use slab::Slab;
use std::collections::VecDeque;
use std::time::Duration;

/// Completions taken in one poll: bounds it.
const COMPLETIONS_MAX: u32 = 256;

/// How long an operation may take unless another limit is set. Guessed: far beyond what a device needs for its own error
/// recovery, and below what applications wait.
pub const OP_LIMIT_DEFAULT: Duration = Duration::from_secs(10);
/// From when an operation is first seen to be late until that counts: to a process that was paused everything is late
/// at once, and what has ended meanwhile is still to be taken.
const LATE_AGAIN: Duration = Duration::from_secs(1);

/// What an operation was for: the upper byte of its ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Purpose {
    /// Part of a log record; number: its position.
    Record = 1,
    /// Part of a client's read; number: the read and its part.
    Read = 2,
    /// A checkpoint's page.
    Page = 3,
    /// The flush before an anchor.
    Flush = 4,
    Anchor = 5,
    /// A chunk claim; number: the chunk.
    Claim = 6,
    Discard = 7,
}

impl Purpose {
    pub fn ticket(self, number: u64) -> Ticket {
        assert!(number < 1 << 56);
        Ticket((self as u64) << 56 | number)
    }

    /// The purpose and number of a ticket that was made here.
    pub fn of(ticket: Ticket) -> (Self, u64) {
        let purpose = match ticket.0 >> 56 {
            1 => Self::Record,
            2 => Self::Read,
            3 => Self::Page,
            4 => Self::Flush,
            5 => Self::Anchor,
            6 => Self::Claim,
            7 => Self::Discard,
            other => panic!("the device returned a ticket of kind {other} that nobody gave it"),
        };
        (purpose, ticket.0 & ((1 << 56) - 1))
    }

    fn is_read(self) -> bool {
        self == Self::Read
    }
}

/// An operation that the device has; its place in the table is its ticket there.
#[derive(Debug)]
struct Flight {
    ticket: Ticket,
    since: Instant,
}

#[derive(Debug)]
pub(super) struct Io<D> {
    pub device: D,
    pub now: Instant,
    pub limit: Duration,
    flights: Slab<Flight>,
    /// When to look for late operations, and whether one was seen then.
    look_at: Instant,
    was_late: bool,
    urgent: VecDeque<(DiskOp, Ticket)>,
    background: VecDeque<(DiskOp, Ticket)>,
    done: Completions,
}

impl<D: BlockDevice> Io<D> {
    pub fn new(device: D) -> Self {
        Self {
            device,
            now: Instant(0),
            limit: OP_LIMIT_DEFAULT,
            flights: Slab::with_capacity(COMPLETIONS_MAX as usize),
            look_at: Instant(0),
            was_late: false,
            urgent: VecDeque::with_capacity(64),
            background: VecDeque::new(),
            done: Completions::with_capacity(COMPLETIONS_MAX as usize),
        }
    }

    /// Hands an operation that somebody waits for to the device, or keeps it until the device takes it.
    pub fn send(&mut self, op: DiskOp, ticket: Ticket) {
        if !self.urgent.is_empty() {
            self.urgent.push_back((op, ticket));
        } else if let Some(op) = self.refused(op, ticket) {
            self.urgent.push_back((op, ticket));
        }
    }

    /// Hands an operation to the device, or returns it.
    fn refused(&mut self, op: DiskOp, ticket: Ticket) -> Option<DiskOp> {
        let place = self.flights.vacant_entry();
        if let Err(QueueFull(op)) = self.device.submit(op, Ticket(place.key() as u64)) {
            return Some(op);
        }
        place.insert(Flight { ticket, since: self.now });
        if self.flights.len() == 1 {
            self.look_at = self.now.after(self.limit);
            self.was_late = false;
        }
        None
    }

    /// Whether an operation has not ended in time. After it the device is not to be used any more; what it still does
    /// with its buffers goes on in memory that nobody else gets before its end.
    pub fn is_late(&mut self) -> bool {
        if self.flights.is_empty() || self.now < self.look_at {
            return false;
        }
        let oldest = self.flights.iter().map(|(_, flight)| flight.since).min().expect("there is one");
        let due = oldest.after(self.limit);
        if self.now < due {
            (self.look_at, self.was_late) = (due, false);
            return false;
        }
        self.look_at = self.now.after(LATE_AGAIN);
        std::mem::replace(&mut self.was_late, true)
    }

    /// When [`Io::is_late`] is to be asked.
    pub fn deadline(&self) -> Option<Instant> {
        (!self.flights.is_empty()).then_some(self.look_at)
    }

    /// As [`Io::send`], behind everything urgent.
    pub fn send_background(&mut self, op: DiskOp, ticket: Ticket) {
        self.background.push_back((op, ticket));
    }

    /// Hands over what is waiting.
    pub fn pump(&mut self) -> bool {
        let mut moved = false;
        loop {
            let is_urgent = !self.urgent.is_empty();
            let queue = if is_urgent { &mut self.urgent } else { &mut self.background };
            let Some((op, ticket)) = queue.pop_front() else { return moved };
            if let Some(op) = self.refused(op, ticket) {
                let queue = if is_urgent { &mut self.urgent } else { &mut self.background };
                queue.push_front((op, ticket));
                return moved;
            }
            moved = true;
        }
    }

    /// Takes completions off the device; they are in [`Io::next`].
    pub fn poll(&mut self) -> u32 {
        self.device.poll(COMPLETIONS_MAX, &mut self.done)
    }

    pub fn next(&mut self) -> Option<Completion> {
        let completion = self.done.pop_front()?;
        let place = usize::try_from(completion.ticket.0).expect("a place in a table");
        let Flight { ticket, .. } = self.flights.remove(place);
        Some(Completion { ticket, ..completion })
    }

    /// Drops the writes that the device has not got yet: it is poisoned.
    pub fn drop_writes(&mut self) {
        self.urgent.retain(|(_, ticket)| Purpose::of(*ticket).0.is_read());
        self.background.clear();
    }

    pub fn waiting(&self) -> usize {
        self.urgent.len() + self.background.len()
    }
}

/// A device's refusal to read as a PG sees it.
pub(super) fn read_error(block: u32, error: DiskError) -> ReadError {
    ReadError::Device { block, error }
}
