//! What checking a history costs per block operation, while it is made and afterwards.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use loligo_tests::check::zones::{self, Kind, NEVER, Operation};
use loligo_tests::check::{History, Outcome, Register};
use loligo_tests::random::Random;
use loligo_tests::stamp::Stamp;

/// Operations of one round.
const OPS: u64 = 100_000;
/// Operations on one block, for the checks of recorded histories.
const OPS_PER_BLOCK: usize = 1000;

/// Four clients on one block, half reads, overlapping.
fn recorded(zero_writes: bool) -> Vec<Operation> {
    let mut random = Random::new(1);
    let (mut operations, mut value, mut free) = (Vec::new(), Stamp::Zero, [1_u64; 4]);
    for at in 1..=OPS {
        let now = at * 10;
        let client = (0..4).min_by_key(|client| free[*client]).expect("there are four");
        let begin = (now - random.below(9)).max(free[client] + 1);
        let end = now.max(begin) + 1 + random.below(20);
        free[client] = end;
        let kind = if random.one_in(2) { Kind::Read } else { Kind::Write };
        if kind == Kind::Write {
            value = if zero_writes && random.one_in(8) { Stamp::Zero } else { Stamp::Write(at) };
        }
        // A common point in time order: the operation takes effect between begin and end, in the order of the loop.
        operations.push(Operation { begin: begin.min(now), end, kind, value });
    }
    operations
}

fn offline(c: &mut Criterion) {
    let mut group = c.benchmark_group("offline");
    group.throughput(Throughput::Elements(OPS));
    for (name, zero_writes) in [("unique", false), ("with zero writes", true)] {
        let blocks = blocks(&recorded(zero_writes));
        group.bench_function(name, |b| {
            let check = |mut blocks: Vec<Vec<Operation>>| {
                for block in &mut blocks {
                    zones::check(block).expect("the history is legal");
                }
            };
            b.iter_batched(|| blocks.clone(), check, BatchSize::LargeInput);
        });
    }
    group.finish();
}

/// One long history as that of many blocks: each begins with a write, so that no value comes from the part before.
fn blocks(operations: &[Operation]) -> Vec<Vec<Operation>> {
    let block = |part: &[Operation]| {
        let first = part[0];
        let known = Operation { begin: first.begin, end: NEVER, kind: Kind::MaybeWrite, value: first.value };
        let start = (first.kind == Kind::Read && first.value != Stamp::Zero).then_some(known);
        start.into_iter().chain(part.iter().copied()).collect()
    };
    operations.chunks(OPS_PER_BLOCK).map(block).collect()
}

fn online(c: &mut Criterion) {
    let mut group = c.benchmark_group("online");
    group.throughput(Throughput::Elements(OPS));
    group.bench_function("one register", |b| {
        b.iter(|| {
            let mut register = Register::new();
            for op in 1..=OPS / 2 {
                register.begin_read(op, 2 * op);
                register.begin_write(op, 2 * op + 1, Stamp::Write(op));
                register.end_write(op, 2 * op + 1, Outcome::Acked).expect("a write");
                register.end_read(op, 2 * op, Stamp::Write(op)).expect("the history is legal");
            }
        });
    });
    group.bench_function("4096 blocks", |b| {
        b.iter(|| {
            let (mut history, mut random) = (History::new(), Random::new(2));
            for op in 1..=OPS / 2 {
                let block = random.below(4096);
                history.begin_read(op, 2 * op, block);
                history.begin_write(op, 2 * op + 1, block, Stamp::Write(op));
                history.end_write(op, 2 * op + 1, Outcome::Acked).expect("a write");
                history.end_read(op, 2 * op, block, Stamp::Write(op)).expect("the history is legal");
            }
        });
    });
    group.finish();
}

criterion_group!(benches, offline, online);
criterion_main!(benches);
