//! One block, checked while its history is made.
//!
//! A *group* is a write with the reads that saw it. Two times of a group matter: `f`, when the first of its operations
//! ended, and `s`, when the last of them began. Group A must come before group B when `f(A) < s(B)`; a history of unique
//! values is legal if and only if no two groups must each come before the other (Gibbons and Korach 1997: the same as
//! "no two forward zones overlap, no backward zone lies in a forward zone"), and no read ends before its write begins.
//!
//! Online, `f` is set once, at the first end, and only the end of a read moves `s`, to a time not before `horizon`, the
//! begin of the oldest read that still runs. So a group that must come before another one that has ended before the
//! horizon can never be read again, and is forgotten. A later conflict with it would show with the other group as well:
//! whichever group could still conflict with the forgotten one only is forgotten in the same step.
//!
//! Zeroes: every zero write is a group of its own, and a read of zeroes joins one of them. Where more than one is
//! possible and none is possible without changing its times, the register goes on with one *state* for each, as long as
//! there are not too many.

use super::Outcome;
use super::violation::{Event, EventKind, Violation};
use crate::stamp::Stamp;
use std::collections::{BTreeMap, VecDeque};

/// Events kept for the report (RELIABILITY 2.4).
const EVENTS_MAX: usize = 50;
/// Possible assignments of zero reads at most; beyond it one takes their place that allows what any of them allows. Guessed: a
/// handful of clients on one block does not come near.
const STATES_MAX: usize = 1024;
/// A time that never comes.
const NEVER: u64 = u64::MAX;

/// A write and the reads that saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    op: u64,
    value: Stamp,
    /// When the first of its operations ended: `f`.
    first_end: u64,
    /// When the last of its operations began: `s`.
    last_begin: u64,
    /// If anyone has seen or will see the write, it ended by this time: its outcome is unknown, but bounded.
    bound: u64,
}

impl Group {
    /// `f`, if a read sees the group.
    fn first_end_if_read(&self) -> u64 {
        self.first_end.min(self.bound)
    }
}

/// One block: see the module.
#[derive(Clone, Debug)]
pub struct Register {
    /// Counts the calls: the order of events, finer than any clock.
    time: u64,
    /// Every assignment of zero reads that is possible; never empty before a violation.
    states: Vec<Vec<Group>>,
    /// Reads that run, and when they began.
    reads: Vec<(u64, u64)>,
    /// How often there were too many states.
    loosened: u64,
    /// Groups at which a look for forgettable ones is worth it.
    forget_at: usize,
    events: VecDeque<Event>,
}

impl Default for Register {
    fn default() -> Self {
        Self::new()
    }
}

impl Register {
    /// A block that was never written.
    pub fn new() -> Self {
        let zero = Group { op: u64::MAX, value: Stamp::Zero, first_end: 0, last_begin: 0, bound: NEVER };
        Self {
            time: 0,
            states: vec![vec![zero]],
            reads: Vec::new(),
            loosened: 0,
            forget_at: 4,
            events: VecDeque::new(),
        }
    }

    /// A write begins.
    ///
    /// # Panics
    /// If a non-zero value is written twice.
    pub fn begin_write(&mut self, now: u64, op: u64, value: Stamp) {
        let begin = self.tick(now, op, EventKind::WriteBegins(value));
        for state in &mut self.states {
            let same = |group: &Group| group.op == op || (value != Stamp::Zero && group.value == value);
            assert!(!state.iter().any(same), "write {op} of {value} comes twice");
            state.push(Group { op, value, first_end: NEVER, last_begin: begin, bound: NEVER });
        }
    }

    /// Zeroes in it that reads may still see: what the work of the checker grows with.
    pub fn zeroes(&self) -> usize {
        let of_state = |state: &Vec<Group>| state.iter().filter(|group| group.value == Stamp::Zero).count();
        self.states.iter().map(of_state).max().unwrap_or_default()
    }

    /// How often the zeroes in it were told apart no more, since there were too many ways to.
    pub fn loosened(&self) -> u64 {
        self.loosened
    }

    /// A write was answered.
    ///
    /// # Errors
    /// When a refused write was seen by a read.
    pub fn end_write(&mut self, now: u64, op: u64, outcome: Outcome) -> Result<(), Violation> {
        let end = self.tick(now, op, EventKind::WriteEnds(outcome));
        match outcome {
            Outcome::Maybe => {}
            Outcome::Acked => {
                for group in self.states.iter_mut().filter_map(|state| find(state, op)) {
                    group.first_end = group.first_end.min(end);
                }
                self.forget(end);
            }
            Outcome::Refused => self.refuse(now, op)?,
        }
        Ok(())
    }

    /// A write of unknown outcome cannot take effect after this.
    pub fn bound(&mut self, now: u64, op: u64) {
        let end = self.tick(now, op, EventKind::WriteBounded);
        for group in self.states.iter_mut().filter_map(|state| find(state, op)) {
            group.bound = group.bound.min(end);
        }
        self.forget(end);
    }

    /// A read begins.
    pub fn begin_read(&mut self, now: u64, op: u64) {
        let begin = self.tick(now, op, EventKind::ReadBegins);
        self.reads.push((op, begin));
    }

    /// The one who asked for the read will never say what it saw.
    ///
    /// # Panics
    /// If no such read runs.
    pub fn abandon_read(&mut self, now: u64, op: u64) {
        self.tick(now, op, EventKind::ReadAbandoned);
        self.finish_read(op);
    }

    /// A read saw `value`.
    ///
    /// # Errors
    /// When no order of the operations so far explains it.
    ///
    /// # Panics
    /// If no such read runs.
    pub fn end_read(&mut self, now: u64, op: u64, value: Stamp) -> Result<(), Violation> {
        let end = self.tick(now, op, EventKind::ReadEnds(value));
        let begin = self.finish_read(op);
        let explained = match value {
            Stamp::Write(_) => self.join_unique(value, begin, end),
            Stamp::Zero => self.join_zero(begin, end),
        };
        if !explained {
            let allowed = self.allowed(begin, end);
            return Err(self.violation(now, op, value, allowed));
        }
        self.forget(end);
        Ok(())
    }

    /// Groups remembered, over all states.
    #[cfg(test)]
    pub(super) fn size(&self) -> usize {
        self.states.iter().map(Vec::len).sum()
    }

    /// A read of a unique value: the states in which it is possible stay. False, and no change, when there are none.
    fn join_unique(&mut self, value: Stamp, begin: u64, end: u64) -> bool {
        let joined = |state: &[Group]| {
            let at = state.iter().position(|group| group.value == value)?;
            join(state, at, begin, end).map(|group| (at, group))
        };
        if let [state] = self.states.as_mut_slice() {
            let Some((at, group)) = joined(state) else { return false };
            state[at] = group;
            return true;
        }
        if !self.states.iter().any(|state| joined(state).is_some()) {
            return false;
        }
        self.states.retain_mut(|state| match joined(state) {
            Some((at, group)) => {
                state[at] = group;
                true
            }
            None => false,
        });
        true
    }

    /// A read of zeroes: every group of zeroes that it may have seen. False, and no change, when there is none.
    fn join_zero(&mut self, begin: u64, end: u64) -> bool {
        let unchanged = |group: &Group| {
            group.value == Stamp::Zero && group.first_end != NEVER && group.last_begin >= begin
        };
        let mut after: Vec<Vec<Group>> = Vec::new();
        for state in &self.states {
            if state.iter().any(unchanged) {
                after.push(state.clone());
                continue;
            }
            for at in (0..state.len()).filter(|at| state[*at].value == Stamp::Zero) {
                if let Some(group) = join(state, at, begin, end) {
                    after.push(state.clone());
                    after.last_mut().expect("just pushed")[at] = group;
                }
            }
        }
        if after.is_empty() {
            return false;
        }
        self.states = after;
        self.drop_needless_states();
        true
    }

    /// Drops states that explain nothing that another one does not explain as well.
    fn drop_needless_states(&mut self) {
        let mut kept: Vec<Vec<Group>> = Vec::new();
        for state in std::mem::take(&mut self.states) {
            if !kept.iter().any(|other| covers(other, &state)) {
                kept.retain(|other| !covers(&state, other));
                kept.push(state);
            }
        }
        if kept.len() > STATES_MAX {
            kept = vec![loosest(&kept)];
            self.loosened += 1;
        }
        self.states = kept;
    }

    fn refuse(&mut self, now: u64, op: u64) -> Result<(), Violation> {
        let unseen = |state: &[Group]| state.iter().any(|group| group.op == op && group.first_end == NEVER);
        if !self.states.iter().any(|state| unseen(state)) {
            let value = self.states.iter().flatten().find(|group| group.op == op).map(|group| group.value);
            return Err(self.violation(now, op, value.unwrap_or(Stamp::Zero), Vec::new()));
        }
        self.states.retain(|state| unseen(state));
        for state in &mut self.states {
            state.retain(|group| group.op != op);
        }
        Ok(())
    }

    /// Drops groups that no read can see any more.
    fn forget(&mut self, now: u64) {
        if self.states[0].len() < self.forget_at {
            return;
        }
        let horizon = self.reads.iter().map(|(_, begin)| *begin).min().unwrap_or(now + 1);
        for state in &mut self.states {
            forget(state, horizon);
        }
        if self.states.len() > 1 {
            self.drop_needless_states();
        }
        self.forget_at = (2 * self.states[0].len()).max(4);
    }

    /// What a read between `begin` and `end` could see.
    fn allowed(&self, begin: u64, end: u64) -> Vec<Stamp> {
        let of_state = |state: &Vec<Group>| {
            let seen = |at: &usize| join(state, *at, begin, end).is_some();
            (0..state.len()).filter(seen).map(|at| state[at].value).collect::<Vec<_>>()
        };
        let mut values: Vec<_> = self.states.iter().flat_map(of_state).collect();
        values.sort();
        values.dedup();
        values
    }

    fn violation(&self, now: u64, op: u64, seen: Stamp, allowed: Vec<Stamp>) -> Violation {
        Violation { block: 0, now, op, seen, allowed, events: self.events.iter().copied().collect() }
    }

    fn finish_read(&mut self, op: u64) -> u64 {
        let at = self.reads.iter().position(|(read, _)| *read == op).expect("a read that ends has begun");
        self.reads.swap_remove(at).1
    }

    fn tick(&mut self, now: u64, op: u64, kind: EventKind) -> u64 {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(Event { now, op, kind });
        self.time += 1;
        self.time
    }
}

fn find(state: &mut [Group], op: u64) -> Option<&mut Group> {
    state.iter_mut().find(|group| group.op == op)
}

/// Group `at` with a read in it, if that contradicts no other group.
fn join(state: &[Group], at: usize, begin: u64, end: u64) -> Option<Group> {
    let group = state[at];
    let first_end = group.first_end_if_read().min(end);
    let last_begin = group.last_begin.max(begin);
    let conflicts = |other: &Group| first_end < other.last_begin && other.first_end < last_begin;
    let others = || state[..at].iter().chain(&state[at + 1..]);
    (!others().any(conflicts)).then_some(Group { first_end, last_begin, ..group })
}

/// Drops the groups that must come before another one that ended before `horizon`.
fn forget(state: &mut Vec<Group>, horizon: u64) {
    // The two latest begins among the groups that ended before the horizon: the second is for the first one's owner.
    let (mut latest, mut second, mut owner) = (0, 0, usize::MAX);
    for (at, group) in state.iter().enumerate().filter(|(_, group)| group.first_end < horizon) {
        if group.last_begin > latest {
            (second, latest, owner) = (latest, group.last_begin, at);
        } else {
            second = second.max(group.last_begin);
        }
    }
    let mut at = 0;
    state.retain(|group| {
        let successor = if at == owner { second } else { latest };
        at += 1;
        group.first_end_if_read() >= successor
    });
}

/// A state that whatever can follow any of `states` can follow: nothing right is refused, and zeroes that they tell apart
/// are told apart no more. A group that one of them has forgotten is in nobody's way there, so it is in nobody's way here.
fn loosest(states: &[Vec<Group>]) -> Vec<Group> {
    let mut all: BTreeMap<u64, (Group, usize)> = BTreeMap::new();
    for group in states.iter().flatten() {
        let (loose, count) = all.entry(group.op).or_insert((*group, 0));
        loose.first_end = loose.first_end.max(group.first_end);
        loose.last_begin = loose.last_begin.min(group.last_begin);
        *count += 1;
    }
    let free = |(group, count)| match count == states.len() {
        true => group,
        false => Group { last_begin: 0, ..group },
    };
    all.into_values().map(free).collect()
}

/// Whether whatever can follow state `b` can follow state `a` too.
fn covers(a: &[Group], b: &[Group]) -> bool {
    let weaker = |(a, b): (&Group, &Group)| {
        a.op == b.op && a.bound == b.bound && a.first_end >= b.first_end && a.last_begin <= b.last_begin
    };
    a.len() == b.len() && a.iter().zip(b).all(weaker)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each state explains a read by the only one of two discards that it still has; together they must not block each
    /// other.
    #[test]
    fn what_one_state_has_forgotten_is_in_nobodys_way_in_the_loosest() {
        let group =
            |op, first_end, last_begin| Group { op, value: Stamp::Zero, first_end, last_begin, bound: NEVER };
        let open = group(6, NEVER, 6);
        let states = [vec![group(1, 5, 7), open], vec![group(2, 4, 7), open]];
        let union = loosest(&states);
        for state in &states {
            for (at, one) in state.iter().enumerate() {
                let here = union.iter().position(|other| other.op == one.op).unwrap();
                assert!(join(state, at, 5, 9).is_some(), "{one:?} alone");
                assert!(join(&union, here, 5, 9).is_some(), "{one:?} among {union:?}");
            }
        }
    }
}
