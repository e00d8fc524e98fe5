//! What the checker found, in words that lead to the cause.

use super::Outcome;
use crate::stamp::Stamp;
use std::fmt;

/// One thing that happened to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, on the caller's clock.
    pub now: u64,
    /// The request.
    pub op: u64,
    /// What.
    pub kind: EventKind,
}

/// What can happen to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A write of this value was asked for.
    WriteBegins(Stamp),
    /// It was answered.
    WriteEnds(Outcome),
    /// A write of unknown outcome cannot take effect any more.
    WriteBounded,
    /// A read was asked for.
    ReadBegins,
    /// It was answered with this value.
    ReadEnds(Stamp),
    /// The reader is gone.
    ReadAbandoned,
}

/// A block held what no order of the operations explains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The block.
    pub block: u64,
    /// When it was noticed, on the caller's clock.
    pub now: u64,
    /// The read that saw it, or the refused write that was seen.
    pub op: u64,
    /// What was seen.
    pub seen: Stamp,
    /// What a read could have seen; empty for a refused write that was seen earlier.
    pub allowed: Vec<Stamp>,
    /// What happened to the block last, oldest first.
    pub events: Vec<Event>,
}

impl Violation {
    pub(super) fn of_block(self, block: u64) -> Self {
        Self { block, ..self }
    }

    /// What is known of the write that was seen.
    fn origin(&self) -> String {
        let Stamp::Write(number) = self.seen else { return String::from("zeroes") };
        let begins = |event: &&Event| event.kind == EventKind::WriteBegins(self.seen);
        let Some(begin) = self.events.iter().find(begins) else {
            return format!("write {number}, which was overwritten long ago or never asked for");
        };
        let ends = |event: &&Event| event.op == begin.op && matches!(event.kind, EventKind::WriteEnds(_));
        match self.events.iter().find(ends).map(|event| (event.now, event.kind)) {
            Some((now, EventKind::WriteEnds(outcome))) => {
                format!("write {number}, asked for at {} and {outcome} at {now}", begin.now)
            }
            _ => format!("write {number}, asked for at {} and not answered yet", begin.now),
        }
    }
}

impl std::error::Error for Violation {}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block, now, op, .. } = self;
        if self.allowed.is_empty() {
            writeln!(f, "block {block}: write {op} was refused at {now}, but its value was read")?;
        } else {
            writeln!(f, "block {block}: read {op} at {now} saw {}", self.origin())?;
            let allowed: Vec<_> = self.allowed.iter().map(Stamp::to_string).collect();
            writeln!(f, "  allowed: {}", allowed.join(", "))?;
        }
        writeln!(f, "  last events of the block:")?;
        for event in &self.events {
            writeln!(f, "    {event}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { now, op, kind } = self;
        write!(f, "{now:>16}  ")?;
        match kind {
            EventKind::WriteBegins(stamp) => write!(f, "write {op} of {stamp} begins"),
            EventKind::WriteEnds(outcome) => write!(f, "write {op} ends: {outcome}"),
            EventKind::WriteBounded => write!(f, "write {op} cannot take effect any more"),
            EventKind::ReadBegins => write!(f, "read {op} begins"),
            EventKind::ReadEnds(stamp) => write!(f, "read {op} ends: {stamp}"),
            EventKind::ReadAbandoned => write!(f, "read {op} has lost its reader"),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Acked => "acked",
            Self::Maybe => "left without an answer",
            Self::Refused => "refused",
        })
    }
}
