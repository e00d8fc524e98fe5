//! The history checker: every block is a register, and reads and writes of it are linearizable (RELIABILITY 2.1, 2.4).
//!
//! Every written value is unique (see [`crate::stamp`]), so a read names the write that it saw, and what is hard in
//! general becomes a comparison of a few times. Zeroes (never written, discarded, written as zeroes) are not unique:
//! there the checker keeps every assignment of reads to zero writes that is still possible.
//!
//! [`Register`] checks one block while the history is made, in memory that does not grow with its length.
//! [`History`] is many of them with the requests that touch several blocks. [`zones`] checks a recorded history of one
//! block at once. [`Violation`] is what both report. A third one, `search`, tries every order; it is far too slow for
//! anything but the small random histories by which the other two are tested.
//!
//! What a write without an answer may do: take effect once, at any time, or never, until [`History::settle`] or
//! [`History::bound`] says that it cannot any more. A crash changes nothing in these rules: an acked write is durable on
//! every member, so it is there after any crash, and what was read once stays.

mod register;
pub mod zones;

mod violation;

#[cfg(test)]
mod search;
#[cfg(test)]
mod tests;

pub use register::Register;
pub use violation::{Event, EventKind, Violation};

use crate::stamp::Stamp;
use std::collections::BTreeMap;

/// How a write ended for the one who asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// It took effect before the answer.
    Acked,
    /// Nobody knows: it may take effect once, at any time, or never.
    Maybe,
    /// It never takes effect.
    Refused,
}

/// All blocks of a run, and the requests on them. Block numbers are the caller's: with several images, put the image
/// into the upper bits.
#[derive(Debug, Default)]
pub struct History {
    blocks: BTreeMap<u64, Register>,
    /// The blocks of every request without an answer, and of every write whose fate is open.
    requests: BTreeMap<u64, Request>,
    acked: u64,
    reads: u64,
}

#[derive(Debug)]
struct Request {
    write: bool,
    /// The client knows that it does not know: answered with [`Outcome::Maybe`].
    unknown: bool,
    blocks: Vec<u64>,
}

impl History {
    /// Of blocks that were never written.
    pub fn new() -> Self {
        Self::default()
    }

    /// Request `op` is about to write `stamp` into `block`. Call it again with the same `op` for every further block of
    /// the request. `now` is only printed: what counts is the order of the calls.
    ///
    /// # Panics
    /// If a non-zero `stamp` is not new to the block, as far as it is still known.
    pub fn begin_write(&mut self, now: u64, op: u64, block: u64, stamp: Stamp) {
        self.request(op, true).blocks.push(block);
        self.blocks.entry(block).or_default().begin_write(now, op, stamp);
    }

    /// The client has the answer to write `op`, for all its blocks.
    ///
    /// # Errors
    /// When a refused write was seen by a read.
    ///
    /// # Panics
    /// If no such write runs.
    pub fn end_write(&mut self, now: u64, op: u64, outcome: Outcome) -> Result<(), Violation> {
        let mut request = self.requests.remove(&op).expect("a write that ends has begun");
        assert!(request.write, "request {op} is a read");
        for block in &request.blocks {
            let register = self.blocks.get_mut(block).expect("a begun write has made its register");
            register.end_write(now, op, outcome).map_err(|violation| violation.of_block(*block))?;
        }
        match outcome {
            Outcome::Acked => self.acked += request.blocks.len() as u64,
            Outcome::Refused => {}
            Outcome::Maybe => {
                request.unknown = true;
                self.requests.insert(op, request);
            }
        }
        Ok(())
    }

    /// From now on write `op`, whose outcome was [`Outcome::Maybe`], cannot take effect any more: its session is fenced,
    /// or a later write of the same client on the same block was acked.
    ///
    /// # Panics
    /// If its outcome is not open.
    pub fn bound(&mut self, now: u64, op: u64) {
        let request = self.requests.remove(&op).expect("a bounded write has begun");
        assert!(request.unknown, "write {op} still waits for its answer");
        for block in &request.blocks {
            self.blocks.get_mut(block).expect("a begun write has made its register").bound(now, op);
        }
    }

    /// Zeroes in a block that reads may still see; see [`Register::zeroes`].
    pub fn zeroes(&self, block: u64) -> usize {
        self.blocks.get(&block).map_or(0, Register::zeroes)
    }

    /// How often zeroes were told apart no more, over all blocks; see [`Register::loosened`].
    pub fn loosened(&self) -> u64 {
        self.blocks.values().map(Register::loosened).sum()
    }

    /// Request `op` is about to read `block`. Call it again with the same `op` for every further block.
    pub fn begin_read(&mut self, now: u64, op: u64, block: u64) {
        self.request(op, false).blocks.push(block);
        self.blocks.entry(block).or_default().begin_read(now, op);
    }

    /// Read `op` found `stamp` in `block`.
    ///
    /// # Errors
    /// When no order of the operations so far explains it.
    ///
    /// # Panics
    /// If no such read runs.
    pub fn end_read(&mut self, now: u64, op: u64, block: u64, stamp: Stamp) -> Result<(), Violation> {
        let request = self.requests.get_mut(&op).expect("a read that ends has begun");
        let at = request.blocks.iter().position(|other| *other == block).expect("the read is of this block");
        request.blocks.swap_remove(at);
        if request.blocks.is_empty() {
            self.requests.remove(&op);
        }
        self.reads += 1;
        let register = self.blocks.get_mut(&block).expect("a begun read has made its register");
        register.end_read(now, op, stamp).map_err(|violation| violation.of_block(block))
    }

    /// The client of request `op` died, or the read failed: a read will never say what it saw, a write may still take
    /// effect. A request that has ended already is left alone.
    pub fn abandon(&mut self, now: u64, op: u64) {
        let Some(request) = self.requests.get_mut(&op) else { return };
        if request.unknown {
            return;
        }
        request.unknown = request.write;
        let write = request.write;
        for block in &request.blocks {
            let register = self.blocks.get_mut(block).expect("a begun request has made its register");
            if write {
                let ended = register.end_write(now, op, Outcome::Maybe);
                ended.expect("a write of unknown fate contradicts nothing");
            } else {
                register.abandon_read(now, op);
            }
        }
        if !write {
            self.requests.remove(&op);
        }
    }

    /// Nothing of what happened so far can take effect any more: writes without a known outcome did, or never will.
    /// What is read from now on stays. Requests that still wait for their answer are not touched.
    pub fn settle(&mut self, now: u64) {
        let open = self.requests.iter().filter(|(_, request)| request.unknown);
        for op in open.map(|(op, _)| *op).collect::<Vec<_>>() {
            self.bound(now, op);
        }
    }

    /// A read of `block` that begins and ends now.
    ///
    /// # Errors
    /// When no order of the operations so far explains it.
    pub fn observe(&mut self, now: u64, block: u64, stamp: Stamp) -> Result<(), Violation> {
        let register = self.blocks.entry(block).or_default();
        self.reads += 1;
        register.begin_read(now, u64::MAX);
        register.end_read(now, u64::MAX, stamp).map_err(|violation| violation.of_block(block))
    }

    /// Acknowledged block writes so far.
    pub fn acked(&self) -> u64 {
        self.acked
    }

    /// Block reads checked so far.
    pub fn reads(&self) -> u64 {
        self.reads
    }

    /// Requests that still wait for their answer.
    pub fn waiting(&self) -> usize {
        self.requests.values().filter(|request| !request.unknown).count()
    }

    /// Writes of blocks whose outcome is not known and may still change.
    pub fn open(&self) -> usize {
        self.requests.values().filter(|request| request.unknown).map(|request| request.blocks.len()).sum()
    }

    /// Every block that was ever touched, in order.
    pub fn blocks(&self) -> impl Iterator<Item = u64> {
        self.blocks.keys().copied()
    }

    fn request(&mut self, op: u64, write: bool) -> &mut Request {
        assert_ne!(op, u64::MAX, "this number is kept for observations");
        let fresh = Request { write, unknown: false, blocks: Vec::new() };
        let request = self.requests.entry(op).or_insert(fresh);
        assert!(request.write == write && !request.unknown, "request number {op} is used twice");
        request
    }
}
