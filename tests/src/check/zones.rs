//! A recorded history of one block, checked at once in O(n log n).

use super::{Outcome, Register};
use crate::stamp::Stamp;

/// The end of a write that was never answered.
pub const NEVER: u64 = u64::MAX;

/// One operation on the block. Operations that only share a moment overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// When it was asked for; from 1, since at 0 the block was zeroes.
    pub begin: u64,
    /// When it was answered; for a write of unknown outcome, when it could take effect at last, or [`NEVER`].
    pub end: u64,
    /// What it is.
    pub kind: Kind,
    /// Written or seen.
    pub value: Stamp,
}

/// What an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// An acked write.
    Write,
    /// A write of unknown outcome: it took effect at most once, between begin and end.
    MaybeWrite,
    /// A read.
    Read,
}

/// Why a history has no legal order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Illegal {
    /// A value came out of nowhere.
    #[error("{0} was read and never written")]
    Unwritten(Stamp),
    /// A read ended before its write began.
    #[error("{0} was read before its write began")]
    Early(Stamp),
    /// Two values must each come before the other.
    #[error("{0} and {1} must each come before the other")]
    Cycle(Stamp, Stamp),
    /// Zeroes were written too, and the search for an order failed.
    #[error("no order explains that {0} was read")]
    Unexplained(Stamp),
}

/// A write with its reads: it holds the block from the first end to the last begin, or, when these are the other way
/// round, for a moment between them.
#[derive(Clone, Copy, Debug)]
struct Group {
    value: Stamp,
    first_end: u64,
    last_begin: u64,
}

/// Checks the history of one block; `operations` is sorted on the way.
///
/// # Errors
/// The first contradiction found.
///
/// # Panics
/// If an operation begins at 0.
pub fn check(operations: &mut [Operation]) -> Result<(), Illegal> {
    assert!(operations.iter().all(|operation| operation.begin > 0), "times count from 1");
    let zeroes = |operation: &Operation| operation.kind != Kind::Read && operation.value == Stamp::Zero;
    if operations.iter().any(zeroes) {
        return replay(operations);
    }
    operations.sort_unstable_by_key(|operation| (operation.value, operation.kind));
    let mut forward = Vec::new();
    let mut backward = Vec::new();
    for same in operations.chunk_by(|a, b| a.value == b.value) {
        match group(same)? {
            Some(group) if group.first_end < group.last_begin => forward.push(group),
            Some(group) => backward.push(group),
            None => {}
        }
    }
    forward.sort_unstable_by_key(|group| group.first_end);
    for pair in forward.windows(2) {
        if pair[1].first_end < pair[0].last_begin {
            return Err(Illegal::Cycle(pair[0].value, pair[1].value));
        }
    }
    for inner in &backward {
        // Forward zones do not overlap, so the last that begins before it is the one that reaches furthest.
        let after = forward.partition_point(|outer| outer.first_end < inner.last_begin);
        if let Some(outer) = forward[..after].last().filter(|outer| inner.first_end < outer.last_begin) {
            return Err(Illegal::Cycle(outer.value, inner.value));
        }
    }
    Ok(())
}

/// The operations of one value, the write first; `None` for a write that may be left out.
fn group(same: &[Operation]) -> Result<Option<Group>, Illegal> {
    let value = same[0].value;
    let before_all = Operation { begin: 0, end: 0, kind: Kind::Write, value };
    let (write, reads) = match same[0].kind {
        Kind::Read if value == Stamp::Zero => (&before_all, same),
        Kind::Read => return Err(Illegal::Unwritten(value)),
        Kind::Write | Kind::MaybeWrite => (&same[0], &same[1..]),
    };
    if write.kind == Kind::MaybeWrite && reads.is_empty() {
        return Ok(None);
    }
    if reads.iter().any(|read| read.end < write.begin) {
        return Err(Illegal::Early(value));
    }
    let first_end = reads.iter().map(|read| read.end).fold(write.end, u64::min);
    let last_begin = reads.iter().map(|read| read.begin).fold(write.begin, u64::max);
    Ok(Some(Group { value, first_end, last_begin }))
}

/// Lets a register look at the operations in the order of their times.
fn replay(operations: &[Operation]) -> Result<(), Illegal> {
    let mut events = Vec::with_capacity(2 * operations.len());
    for (op, operation) in operations.iter().enumerate() {
        events.push((operation.begin, 0, op));
        if operation.end != NEVER {
            events.push((operation.end, 1, op));
        }
    }
    events.sort_unstable();
    let mut register = Register::new();
    for (now, end, index) in events {
        let (operation, op) = (operations[index], index as u64);
        let seen = match (operation.kind, end) {
            (Kind::Read, 0) => {
                register.begin_read(now, op);
                Ok(())
            }
            (Kind::Read, _) => register.end_read(now, op, operation.value),
            (_, 0) => {
                register.begin_write(now, op, operation.value);
                Ok(())
            }
            (Kind::Write, _) => register.end_write(now, op, Outcome::Acked),
            (Kind::MaybeWrite, _) => {
                register.bound(now, op);
                Ok(())
            }
        };
        seen.map_err(|violation| Illegal::Unexplained(violation.seen))?;
    }
    Ok(())
}
