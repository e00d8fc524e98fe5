//! Every order of a small history of one block, tried out (Wing and Gong 1993): slow, and written apart from the
//! checkers that it checks. Nothing in it knows of groups or zones.

use super::zones::{Kind, Operation};
use crate::stamp::Stamp;
use std::collections::BTreeSet;

/// Whether some order of the operations explains every read.
pub fn is_legal(operations: &[Operation]) -> bool {
    assert!(operations.len() <= 32, "the search is for small histories");
    Search { operations, failed: BTreeSet::new() }.from(0, Stamp::Zero)
}

struct Search<'a> {
    operations: &'a [Operation],
    /// Operations done and the value after them, from where no order leads to the end.
    failed: BTreeSet<(u32, Stamp)>,
}

impl Search<'_> {
    /// `done` is the set of operations that are ordered, or left out, already.
    fn from(&mut self, done: u32, value: Stamp) -> bool {
        if done == (1 << self.operations.len()) - 1 {
            return true;
        }
        if self.failed.contains(&(done, value)) {
            return false;
        }
        let found = (0..self.operations.len()).filter(|at| done & 1 << at == 0).any(|at| {
            let (operation, with) = (self.operations[at], done | 1 << at);
            let left_out = operation.kind == Kind::MaybeWrite && self.from(with, value);
            left_out || (self.may_be_next(done, at) && self.next(operation, with, value))
        });
        if !found {
            self.failed.insert((done, value));
        }
        found
    }

    fn next(&mut self, operation: Operation, with: u32, value: Stamp) -> bool {
        match operation.kind {
            Kind::Read => operation.value == value && self.from(with, value),
            Kind::Write | Kind::MaybeWrite => self.from(with, operation.value),
        }
    }

    /// Nothing that is left over ended before this one began.
    fn may_be_next(&self, done: u32, at: usize) -> bool {
        let ended_before = |other: &Operation| other.end < self.operations[at].begin;
        let left = |other: &usize| done & 1 << other == 0;
        !(0..self.operations.len()).filter(left).any(|other| ended_before(&self.operations[other]))
    }
}
