//! Random operations under random mischief against an oracle: what reads as what, and that everything ends.

use super::*;
use crate::model::controller::{Mischief, NamespaceOptions};
use crate::spec::status::Status;
use loligo_config::units::BlockCount;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn mischief() -> impl Strategy<Value = Mischief> {
    prop_oneof![
        (1u16..0x7fff).prop_map(|bits| Mischief::Fail(Status(bits))),
        Just(Mischief::Lose),
        Just(Mischief::CompleteAfterReset),
        Just(Mischief::WriteWhileStopping),
        Just(Mischief::WrongId),
        Just(Mischief::WrongQueue),
        Just(Mischief::Twice),
        Just(Mischief::Extra),
        Just(Mischief::OldPhase),
        Just(Mischief::Fatal),
        Just(Mischief::Unplug),
    ]
}

#[derive(Clone, Debug)]
enum Step {
    Write { lba: u64, blocks: usize },
    Read { lba: u64, blocks: usize },
    Zero { lba: u64, blocks: u64 },
    Flush,
    Turn { count: u32 },
    Reset,
    Inject { mischief: Mischief, after: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0u64..200, 1usize..40);
    prop_oneof![
        6 => place().prop_map(|(lba, blocks)| Step::Write { lba, blocks }),
        6 => place().prop_map(|(lba, blocks)| Step::Read { lba, blocks }),
        1 => place().prop_map(|(lba, blocks)| Step::Zero { lba, blocks: blocks as u64 }),
        1 => Just(Step::Flush),
        6 => (1u32..20).prop_map(|count| Step::Turn { count }),
        1 => Just(Step::Reset),
        1 => (mischief(), 0u64..10).prop_map(|(mischief, after)| Step::Inject { mischief, after }),
    ]
}

/// What each block may read as, and which blocks are being written.
#[derive(Default)]
struct Oracle {
    known: BTreeMap<u64, Vec<u8>>,
    busy: BTreeMap<u64, (u64, u64, u8)>,
}

impl Oracle {
    fn is_busy(&self, lba: u64, blocks: u64) -> bool {
        self.busy.values().any(|(other, count, _)| lba < other + count && *other < lba + blocks)
    }

    fn ended(&mut self, end: &Completion) {
        let Some((lba, blocks, fill)) = self.busy.remove(&end.ticket.0) else { return };
        for block in lba..lba + blocks {
            let values = self.known.entry(block).or_default();
            match end.result {
                Ok(()) => *values = vec![fill],
                Err(DiskError::Poisoned) => {}
                // It may have been carried out, or not.
                Err(_) if values.is_empty() => {}
                Err(_) => values.push(fill),
            }
        }
    }

    fn check(&self, end: &Completion) {
        let (DiskOp::Read { lba, buffer }, Ok(())) = (&end.op, end.result) else { return };
        for (index, block) in buffer.chunks_exact(BLOCK).enumerate() {
            let at = lba.0 + index as u64;
            if let Some(values) = self.known.get(&at).filter(|values| !values.is_empty()) {
                let whole = block.chunks_exact(512).all(|sector| values.contains(&sector[0]));
                assert!(whole, "block {at} reads as {}, not as one of {values:?}", block[0]);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn everything_ends_and_nothing_is_lost(seed: u64, mdts in 1u8..6, shift in prop_oneof![Just(9u8), Just(12)],
        shadow: bool, steps in prop::collection::vec(step(), 1..120)) {
        let namespaces = vec![NamespaceOptions { blocks: BlockCount(256), lba_shift: shift }];
        let soft = SoftOptions { seed, mdts, namespaces, shadow_doorbells: shadow, ..Default::default() };
        let mut bench = Bench::new(soft);
        let mut device = bench.device(1);
        let mut oracle = Oracle::default();
        let mut reads: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        let mut done = Completions::new();
        for (index, step) in steps.into_iter().enumerate() {
            let fill = index as u8;
            let reading = |lba: u64, blocks: u64| {
                reads.values().any(|(other, count)| lba < other + count && *other < lba + blocks)
            };
            match step {
                Step::Write { lba, blocks } if !oracle.is_busy(lba, blocks as u64) && !reading(lba, blocks as u64) => {
                    let op = bench.write_op(lba, fill, blocks, true);
                    let ticket = bench.submit(&mut device, op);
                    oracle.busy.insert(ticket.0, (lba, blocks as u64, fill));
                }
                Step::Zero { lba, blocks } if !oracle.is_busy(lba, blocks) && !reading(lba, blocks) => {
                    let op = DiskOp::WriteZeroes { lba: Lba(lba), count: BlockCount(blocks), fua: true };
                    let ticket = bench.submit(&mut device, op);
                    oracle.busy.insert(ticket.0, (lba, blocks, 0));
                }
                Step::Read { lba, blocks } if !oracle.is_busy(lba, blocks as u64) => {
                    let op = bench.read_op(lba, blocks);
                    let ticket = bench.submit(&mut device, op);
                    reads.insert(ticket.0, (lba, blocks as u64));
                }
                Step::Flush => {
                    bench.submit(&mut device, DiskOp::Flush);
                }
                Step::Turn { count } => (0..count).for_each(|_| {
                    bench.turn();
                    device.poll(4, &mut done);
                }),
                Step::Reset => bench.controller().reset(bench.clock.now()),
                Step::Inject { mischief, after } => bench.soft.inject(mischief, after, 1),
                Step::Write { .. } | Step::Zero { .. } | Step::Read { .. } => {}
            }
            for end in done.drain(..) {
                reads.remove(&end.ticket.0);
                oracle.check(&end);
                oracle.ended(&end);
            }
        }
        for end in bench.finish(&mut device) {
            oracle.check(&end);
            oracle.ended(&end);
        }
    }
}
