//! The checkers against the search, and against histories with known verdicts.

use super::zones::{self, Illegal, Kind, NEVER, Operation};
use super::{History, Outcome, Register, Violation, search};
use crate::random::Random;
use crate::stamp::Stamp::{self, Write, Zero};

/// A random history of one block, as it happened: calls in order.
#[derive(Clone, Copy, Debug)]
enum Call {
    BeginWrite(u64, Stamp),
    EndWrite(u64, Outcome),
    Bound(u64),
    BeginRead(u64),
    EndRead(u64, Stamp),
    AbandonRead(u64),
}

/// What one client of a generated history is doing.
#[derive(Clone, Copy)]
enum Doing {
    Write { op: u64, value: Stamp, applied: bool, outcome: Outcome },
    Read { op: u64, seen: Option<Stamp> },
}

/// Clients on a true register, and then sometimes a lie.
struct Generator {
    random: Random,
    calls: Vec<Call>,
    value: Stamp,
    ops: u64,
    clients: Vec<Option<Doing>>,
    /// Writes whose client is gone.
    loose: Vec<(u64, Stamp)>,
}

impl Generator {
    fn history(seed: u64, ops_max: u64) -> Vec<Call> {
        let mut random = Random::new(seed);
        let clients = vec![None; 2 + random.below(3) as usize];
        let ops_count = 3 + random.below(ops_max - 2);
        let mut generator =
            Self { random, calls: Vec::new(), value: Zero, ops: 0, clients, loose: Vec::new() };
        while generator.ops < ops_count || generator.clients.iter().any(Option::is_some) {
            generator.turn(ops_count);
        }
        generator.lie();
        generator.calls
    }

    fn turn(&mut self, ops_count: u64) {
        self.loose_write();
        let client = self.random.below(self.clients.len() as u64) as usize;
        self.clients[client] = match self.clients[client] {
            None if self.ops < ops_count => Some(self.begin()),
            None => None,
            Some(Doing::Write { op, value, applied: false, outcome: Outcome::Acked }) => {
                self.value = value;
                Some(Doing::Write { op, value, applied: true, outcome: Outcome::Acked })
            }
            Some(Doing::Write { op, value, outcome, .. }) => {
                if outcome == Outcome::Maybe {
                    self.loose.push((op, value));
                }
                self.calls.push(Call::EndWrite(op, outcome));
                None
            }
            Some(Doing::Read { op, seen: None }) => Some(Doing::Read { op, seen: Some(self.value) }),
            Some(Doing::Read { op, .. }) if self.random.one_in(12) => {
                self.calls.push(Call::AbandonRead(op));
                None
            }
            Some(Doing::Read { op, seen: Some(value) }) => {
                self.calls.push(Call::EndRead(op, value));
                None
            }
        };
    }

    /// A write without an answer takes effect, or never will.
    fn loose_write(&mut self) {
        if self.loose.is_empty() || !self.random.one_in(6) {
            return;
        }
        let (op, value) = self.loose.swap_remove(0);
        if self.random.one_in(2) {
            self.value = value;
        }
        if self.random.one_in(2) {
            self.calls.push(Call::Bound(op));
        }
    }

    fn begin(&mut self) -> Doing {
        self.ops += 1;
        let op = self.ops;
        if self.random.one_in(2) {
            self.calls.push(Call::BeginRead(op));
            return Doing::Read { op, seen: None };
        }
        let value = if self.random.one_in(4) { Zero } else { Write(op) };
        let outcome = match self.random.below(10) {
            0 | 1 => Outcome::Maybe,
            2 => Outcome::Refused,
            _ => Outcome::Acked,
        };
        self.calls.push(Call::BeginWrite(op, value));
        Doing::Write { op, value, applied: false, outcome }
    }

    /// Most histories get a read of something that was written some time, or a refusal of a write.
    fn lie(&mut self) {
        let values = self.calls.iter().filter_map(|call| match call {
            Call::BeginWrite(_, value) => Some(*value),
            _ => None,
        });
        let values: Vec<_> = values.chain([Zero]).collect();
        let lies = self.random.below(4);
        let ends = |call: &&mut Call| matches!(call, Call::EndRead(..) | Call::EndWrite(_, Outcome::Acked));
        let mut ends: Vec<_> = self.calls.iter_mut().filter(ends).collect();
        for _ in 0..lies.min(ends.len() as u64) {
            let at = self.random.below(ends.len() as u64) as usize;
            match &mut ends[at] {
                Call::EndRead(_, seen) => *seen = values[self.random.below(values.len() as u64) as usize],
                Call::EndWrite(_, outcome) if self.random.one_in(3) => *outcome = Outcome::Refused,
                _ => {}
            }
        }
    }
}

/// Online.
fn run(calls: &[Call]) -> Result<(), Violation> {
    let mut register = Register::new();
    for (now, call) in (1..).zip(calls) {
        match *call {
            Call::BeginWrite(op, value) => register.begin_write(now, op, value),
            Call::EndWrite(op, outcome) => register.end_write(now, op, outcome)?,
            Call::Bound(op) => register.bound(now, op),
            Call::BeginRead(op) => register.begin_read(now, op),
            Call::EndRead(op, value) => register.end_read(now, op, value)?,
            Call::AbandonRead(op) => register.abandon_read(now, op),
        }
    }
    Ok(())
}

/// The same as operations with times.
fn operations(calls: &[Call]) -> Vec<Operation> {
    let mut operations: Vec<(u64, Operation)> = Vec::new();
    for (now, call) in (1..).zip(calls) {
        let at = |op: u64| operations.iter().position(|(other, _)| *other == op).expect("it has begun");
        match *call {
            Call::BeginWrite(op, value) => {
                let operation = Operation { begin: now, end: NEVER, kind: Kind::MaybeWrite, value };
                operations.push((op, operation));
            }
            Call::EndWrite(op, Outcome::Acked) => {
                let at = at(op);
                operations[at].1.kind = Kind::Write;
                operations[at].1.end = now;
            }
            Call::EndWrite(_, Outcome::Maybe) => {}
            Call::EndWrite(op, Outcome::Refused) | Call::AbandonRead(op) => {
                let at = at(op);
                operations.remove(at);
            }
            Call::Bound(op) => {
                let at = at(op);
                operations[at].1.end = now;
            }
            Call::BeginRead(op) => {
                operations.push((op, Operation { begin: now, end: NEVER, kind: Kind::Read, value: Zero }));
            }
            Call::EndRead(op, value) => {
                let at = at(op);
                operations[at].1.end = now;
                operations[at].1.value = value;
            }
        }
    }
    operations.into_iter().map(|(_, operation)| operation).collect()
}

#[test]
fn the_checkers_agree_with_the_search_on_every_small_history() {
    let (mut legal, mut illegal, mut with_zero_writes) = (0_u32, 0_u32, 0_u32);
    for seed in 0..120_000 {
        let calls = Generator::history(seed, 14);
        let mut operations = operations(&calls);
        let expected = search::is_legal(&operations);
        let online = run(&calls);
        assert_eq!(online.is_ok(), expected, "SEED={seed}, online: {online:?}\n{calls:#?}");
        let zero_write = |operation: &Operation| operation.kind != Kind::Read && operation.value == Zero;
        with_zero_writes += u32::from(operations.iter().any(zero_write));
        let offline = zones::check(&mut operations);
        assert_eq!(offline.is_ok(), expected, "SEED={seed}, offline: {offline:?}\n{calls:#?}");
        if expected { legal += 1 } else { illegal += 1 }
    }
    assert!(legal > 30_000, "{legal} legal histories only");
    assert!(illegal > 30_000, "{illegal} illegal histories only");
    assert!((30_000..110_000).contains(&with_zero_writes), "{with_zero_writes} histories with zero writes");
}

#[test]
fn operations_of_one_moment_overlap() {
    for seed in 0..20_000 {
        let mut operations = operations(&Generator::history(seed, 8));
        for operation in &mut operations {
            operation.begin = 1 + operation.begin / 3;
            operation.end = if operation.end == NEVER { NEVER } else { 1 + operation.end / 3 };
        }
        let expected = search::is_legal(&operations);
        let offline = zones::check(&mut operations);
        assert_eq!(offline.is_ok(), expected, "SEED={seed}: {offline:?}, {operations:#?}");
    }
}

/// One client, one operation at a time: every read has exactly one right answer.
fn sequential(seed: u64) -> Vec<Call> {
    let mut random = Random::new(seed);
    let (mut calls, mut value) = (Vec::new(), Zero);
    for op in 1..300 {
        if random.one_in(2) {
            value = Write(op);
            calls.extend([Call::BeginWrite(op, value), Call::EndWrite(op, Outcome::Acked)]);
        } else {
            calls.extend([Call::BeginRead(op), Call::EndRead(op, value)]);
        }
    }
    calls
}

fn reads(calls: &[Call]) -> Vec<(usize, Stamp)> {
    let read = |(at, call): (usize, &Call)| match call {
        Call::EndRead(_, value) => Some((at, *value)),
        _ => None,
    };
    calls.iter().enumerate().filter_map(read).collect()
}

fn set(calls: &mut [Call], at: usize, value: Stamp) {
    let Call::EndRead(_, seen) = &mut calls[at] else { panic!("this is a read") };
    *seen = value;
}

fn assert_rejected(calls: &[Call], mutation: &str) {
    assert!(run(calls).is_err(), "{mutation}, online: {calls:?}");
    assert!(zones::check(&mut operations(calls)).is_err(), "{mutation}, offline: {calls:?}");
}

#[test]
fn mutants_of_a_good_history_are_rejected() {
    for seed in 0..300 {
        let good = sequential(seed);
        assert_eq!(run(&good), Ok(()));
        assert_eq!(zones::check(&mut operations(&good)), Ok(()));
        let reads = reads(&good);
        for pair in reads.windows(2).filter(|pair| pair[0].1 != pair[1].1).step_by(9) {
            let mut swapped = good.clone();
            set(&mut swapped, pair[0].0, pair[1].1);
            set(&mut swapped, pair[1].0, pair[0].1);
            assert_rejected(&swapped, "two reads swapped");
            let mut stale = good.clone();
            set(&mut stale, pair[1].0, pair[0].1);
            assert_rejected(&stale, "a stale read");
            let mut lost = good.clone();
            for (at, _) in reads.iter().filter(|(_, value)| *value == pair[1].1) {
                set(&mut lost, *at, pair[0].1);
            }
            assert_rejected(&lost, "a lost write");
        }
    }
}

#[test]
fn memory_does_not_grow_with_the_history() {
    let mut register = Register::new();
    for op in 1..10_000 {
        let (writer, reader) = (3 * op, 3 * op + 1);
        register.begin_read(op, reader);
        register.begin_write(op, writer, if op % 5 == 0 { Zero } else { Write(op) });
        register.end_write(op, writer, Outcome::Acked).unwrap();
        register.end_read(op, reader, if op % 5 == 0 { Zero } else { Write(op) }).unwrap();
        assert!(register.size() <= 64, "{} groups after {op} writes", register.size());
    }
}

#[test]
fn a_violation_says_what_was_seen_what_was_allowed_and_what_happened() {
    let mut history = History::new();
    history.begin_write(10, 1, 7, Write(1));
    history.end_write(20, 1, Outcome::Acked).unwrap();
    history.begin_write(30, 2, 7, Write(2));
    history.begin_read(40, 3, 7);
    let violation = history.end_read(50, 3, 7, Zero).unwrap_err();
    assert_eq!((violation.block, violation.now, violation.op), (7, 50, 3));
    assert_eq!(violation.allowed, [Write(1), Write(2)]);
    let text = violation.to_string();
    assert!(text.starts_with("block 7: read 3 at 50 saw zeroes\n  allowed: write 1, write 2\n"), "{text}");
    assert!(text.contains("write 1 ends: acked"), "{text}");
    history.begin_read(60, 4, 7);
    let violation = history.end_read(70, 4, 7, Write(9)).unwrap_err();
    assert!(violation.to_string().contains("write 9, which was overwritten long ago or never asked for"));
}

#[test]
fn a_write_of_a_dead_client_is_there_or_not_until_the_run_is_settled() {
    let mut history = History::new();
    history.begin_write(1, 1, 7, Write(1));
    history.begin_write(1, 1, 8, Write(2));
    history.begin_read(2, 2, 7);
    history.abandon(3, 1);
    history.abandon(3, 2);
    assert_eq!((history.open(), history.waiting()), (2, 0));
    history.observe(4, 7, Zero).unwrap();
    history.observe(5, 7, Write(1)).unwrap();
    history.observe(6, 7, Zero).unwrap_err();
    history.settle(7);
    assert_eq!(history.open(), 0);
    history.observe(8, 8, Zero).unwrap();
    history.observe(9, 8, Write(2)).unwrap_err();
    assert_eq!(history.reads(), 5);
}

#[test]
fn a_refused_write_is_never_seen() {
    let mut history = History::new();
    history.begin_write(1, 1, 7, Write(1));
    history.end_write(2, 1, Outcome::Refused).unwrap();
    history.observe(3, 7, Write(1)).unwrap_err();
    history.begin_write(4, 2, 7, Write(2));
    history.observe(5, 7, Write(2)).unwrap();
    let violation = history.end_write(6, 2, Outcome::Refused).unwrap_err();
    assert!(
        violation.to_string().contains("write 2 was refused at 6, but its value was read"),
        "{violation}"
    );
    assert_eq!(history.acked(), 0);
}

#[test]
fn zeroes_are_told_apart_as_far_as_they_can_be() {
    let mut history = History::new();
    for (op, stamp) in [(1, Write(1)), (2, Zero)] {
        history.begin_write(op, op, 7, stamp);
    }
    history.end_write(3, 1, Outcome::Acked).unwrap();
    history.observe(4, 7, Zero).unwrap();
    // Either the first zeroes are the discard and the write came before, or they are what was there and the discard
    // comes later; both allow this.
    history.observe(5, 7, Write(1)).unwrap_err();
    history.observe(6, 7, Zero).unwrap();
    history.end_write(7, 2, Outcome::Acked).unwrap();
    history.observe(8, 7, Write(1)).unwrap_err();
}

/// Many zeroes in flight at once, with reads of each moment: more ways to explain them than are kept.
#[test]
fn too_many_zeroes_cost_precision_and_refuse_nothing_right() {
    let mut history = History::new();
    let (mut now, mut op) = (0, 0);
    let mut next = || {
        op += 1;
        op
    };
    let writes: Vec<u64> = (0..14).map(|_| next()).collect();
    for write in &writes {
        now += 1;
        history.begin_write(now, *write, 7, Zero);
    }
    for _ in 0..40 {
        // Two reads that overlap each other and every write.
        let (first, second) = (next(), next());
        for read in [first, second] {
            now += 1;
            history.begin_read(now, read, 7);
        }
        for read in [first, second] {
            now += 1;
            history.end_read(now, read, 7, Zero).unwrap();
        }
        let write = next();
        history.begin_write(now + 1, write, 7, Write(write));
        history.end_write(now + 2, write, Outcome::Acked).unwrap();
        now += 3;
        history.observe(now, 7, Write(write)).unwrap();
    }
    assert!(history.loosened() > 0, "there were too many ways");
    for write in writes {
        now += 1;
        history.end_write(now, write, Outcome::Acked).unwrap();
    }
    let write = next();
    history.begin_write(now + 1, write, 7, Write(write));
    history.end_write(now + 2, write, Outcome::Acked).unwrap();
    history.observe(now + 3, 7, Zero).unwrap_err();
}

#[test]
fn what_is_wrong_offline_is_named() {
    let operation = |begin, end, kind, value| Operation { begin, end, kind, value };
    let read_of_nothing = operation(1, 2, Kind::Read, Write(4));
    assert_eq!(zones::check(&mut [read_of_nothing]), Err(Illegal::Unwritten(Write(4))));
    let early = [operation(1, 2, Kind::Read, Write(4)), operation(3, 4, Kind::Write, Write(4))];
    assert_eq!(zones::check(&mut early.clone()), Err(Illegal::Early(Write(4))));
    let stale = [
        operation(1, 2, Kind::Write, Write(4)),
        operation(3, 4, Kind::Write, Write(5)),
        operation(5, 6, Kind::Read, Write(4)),
    ];
    assert_eq!(zones::check(&mut stale.clone()), Err(Illegal::Cycle(Write(4), Write(5))));
}
