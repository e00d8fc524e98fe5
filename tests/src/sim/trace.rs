//! What happens in a run: always as a hash over every event, on request as lines to read.

use loligo_net::wire::op::OpReply;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

/// Lines kept for a report.
const LINES_MAX: usize = 4000;

/// How much is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Level {
    /// Nothing.
    #[default]
    None,
    /// Faults, processes that start and end, states of the cluster.
    Faults,
    /// And the clients' requests.
    Ops,
    /// And every message.
    Net,
    /// And every disk operation.
    Disk,
}

/// A run's trace. Clones are handles to the same.
#[derive(Clone, Debug, Default)]
pub struct Trace(Rc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    hash: Cell<u64>,
    now: Cell<u64>,
    level: Level,
    print: bool,
    lines: RefCell<VecDeque<String>>,
    acks: RefCell<Vec<OpReply>>,
}

impl Trace {
    /// One that keeps lines up to `level`, and prints them if `print`.
    pub fn new(level: Level, print: bool) -> Self {
        Self(Rc::new(Inner { level, print, ..Inner::default() }))
    }

    /// The time that lines begin with.
    pub fn set_now(&self, now: u64) {
        self.0.now.set(now);
        self.mix(now);
    }

    /// Takes a value into the hash.
    pub fn mix(&self, value: u64) {
        // The finish of SplitMix64 over the sum: cheap, and every bit counts.
        let mut z = self.0.hash.get().rotate_left(5) ^ value;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.0.hash.set(z ^ (z >> 31));
    }

    /// The hash over everything so far.
    pub fn value(&self) -> u64 {
        self.0.hash.get()
    }

    /// Whether lines of this level are wanted.
    pub fn wants(&self, level: Level) -> bool {
        level <= self.0.level
    }

    /// A line, if its level is wanted.
    pub fn note(&self, level: Level, line: impl FnOnce() -> String) {
        if !self.wants(level) {
            return;
        }
        let now = self.0.now.get();
        let line = format!("{:>12.6} {}", now as f64 / 1e9, line());
        if self.0.print {
            println!("{line}");
        }
        let mut lines = self.0.lines.borrow_mut();
        if lines.len() == LINES_MAX {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// A write was answered as done.
    pub fn ack(&self, reply: OpReply) {
        self.0.acks.borrow_mut().push(reply);
    }

    /// The writes that were answered since the last call.
    pub fn take_acks(&self) -> Vec<OpReply> {
        std::mem::take(&mut *self.0.acks.borrow_mut())
    }

    /// The last lines, oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.0.lines.borrow().iter().cloned().collect()
    }
}
