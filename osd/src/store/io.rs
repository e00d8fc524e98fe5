//! The device queue as the store uses it: operations wait here when the device refuses them, urgent ones first.

use super::api::ReadError;
use loligo_reactor::env::{BlockDevice, Completion, Completions, DiskError, DiskOp, QueueFull, Ticket};
use std::collections::VecDeque;

/// Completions taken in one poll: bounds it.
const COMPLETIONS_MAX: u32 = 256;

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

#[derive(Debug)]
pub(super) struct Io<D> {
    pub device: D,
    urgent: VecDeque<(DiskOp, Ticket)>,
    background: VecDeque<(DiskOp, Ticket)>,
    done: Completions,
}

impl<D: BlockDevice> Io<D> {
    pub fn new(device: D) -> Self {
        Self {
            device,
            urgent: VecDeque::with_capacity(64),
            background: VecDeque::new(),
            done: Completions::with_capacity(COMPLETIONS_MAX as usize),
        }
    }

    /// Hands an operation that somebody waits for to the device, or keeps it until the device takes it.
    pub fn send(&mut self, op: DiskOp, ticket: Ticket) {
        if !self.urgent.is_empty() {
            self.urgent.push_back((op, ticket));
        } else if let Err(QueueFull(op)) = self.device.submit(op, ticket) {
            self.urgent.push_back((op, ticket));
        }
    }

    /// As [`Io::send`], behind everything urgent.
    pub fn send_background(&mut self, op: DiskOp, ticket: Ticket) {
        self.background.push_back((op, ticket));
    }

    /// Hands over what is waiting.
    pub fn pump(&mut self) -> bool {
        let mut moved = false;
        for queue in [&mut self.urgent, &mut self.background] {
            while let Some((op, ticket)) = queue.pop_front() {
                if let Err(QueueFull(op)) = self.device.submit(op, ticket) {
                    queue.push_front((op, ticket));
                    return moved;
                }
                moved = true;
            }
        }
        moved
    }

    /// Takes completions off the device; they are in [`Io::next`].
    pub fn poll(&mut self) -> u32 {
        self.device.poll(COMPLETIONS_MAX, &mut self.done)
    }

    pub fn next(&mut self) -> Option<Completion> {
        self.done.pop_front()
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
