//! The checks that every `BlockDevice` must pass: one body for the kernel back end, the model and whatever follows.
//!
//! A failed check panics. The device must be at least [`BLOCKS_MIN`] blocks long, lose its contents without regret, and
//! not fail by itself.

use loligo_config::units::{BLOCK_SIZE, BlockCount, Lba};
use loligo_reactor::dma::{Buffer, BufferPool, SharedBuffer};
use loligo_reactor::env::{BlockDevice, Completion, Completions, DiskError, DiskOp, Ticket, WriteList};
use std::collections::BTreeMap;

/// Blocks that the checks use: 4 MiB.
pub const BLOCKS_MIN: u64 = 1024;

const BLOCK: usize = BLOCK_SIZE as usize;
/// Turns without any completion after which a device counts as stuck.
const TURNS_MAX: u64 = 1_000_000;

/// Runs all checks. `turn` is called between polls: to wait, or to let simulated time pass.
pub fn check<D: BlockDevice>(device: &mut D, pool: &BufferPool, turn: &mut dyn FnMut(&mut D)) {
    let mut run = Run { device, pool, turn, next: 0 };
    run.geometry_makes_sense();
    run.what_is_written_is_read();
    run.pieces_lie_one_behind_the_other();
    run.large_transfers_work();
    run.fua_and_flush_complete();
    run.zeroes_read_as_zero();
    run.discards_complete_and_spare_the_neighbours();
    run.what_lies_beyond_is_invalid();
    run.many_complete_in_any_order();
    run.a_full_queue_returns_the_operation();
    run.a_budget_bounds_a_poll();
    run.the_last_block_is_usable();
    assert_eq!(run.device.in_flight(), 0, "nothing is left in flight");
}

struct Run<'run, D> {
    device: &'run mut D,
    pool: &'run BufferPool,
    turn: &'run mut dyn FnMut(&mut D),
    next: u64,
}

/// Contents of `count` blocks that differ from block to block and by `seed`.
fn pattern(seed: u64, count: usize) -> Vec<u8> {
    let word = |at: u64| (seed << 32 ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..(count * BLOCK / 8) as u64).flat_map(word).collect()
}

impl<D: BlockDevice> Run<'_, D> {
    fn buffer(&self, len: usize) -> Buffer {
        self.pool.alloc_zeroed(len).expect("the pool is large enough for the checks")
    }

    fn shared(&self, bytes: &[u8]) -> SharedBuffer {
        self.pool.copy_of(bytes).expect("the pool is large enough for the checks")
    }

    fn write_op(&self, lba: u64, bytes: &[u8], fua: bool) -> DiskOp {
        let mut data = WriteList::new();
        data.push(self.shared(bytes));
        DiskOp::Write { lba: Lba(lba), data, fua }
    }

    fn read_op(&self, lba: u64, count: usize) -> DiskOp {
        let mut buffer = self.buffer(count * BLOCK);
        buffer.fill(0xa5);
        DiskOp::Read { lba: Lba(lba), buffer }
    }

    fn ticket(&mut self) -> Ticket {
        self.next += 1;
        Ticket(self.next)
    }

    /// Submits all, as many at a time as the device takes, and returns their ends in the order of submission.
    fn run(&mut self, ops: Vec<DiskOp>) -> Vec<Completion> {
        let total = ops.len();
        let mut ends = BTreeMap::new();
        let mut waiting = ops.into_iter().peekable();
        let mut refused = None;
        let mut turns = 0;
        while ends.len() < total {
            while let Some(op) = refused.take().or_else(|| waiting.next()) {
                let ticket = self.ticket();
                if let Err(full) = self.device.submit(op, ticket) {
                    refused = Some(full.0);
                    break;
                }
            }
            let taken = self.take(u32::MAX);
            turns = if taken.is_empty() { turns + 1 } else { 0 };
            assert!(turns < TURNS_MAX, "{} of {total} operations never complete", total - ends.len());
            for end in taken {
                assert!(ends.insert(end.ticket, end).is_none(), "an operation completes once");
            }
        }
        ends.into_values().collect()
    }

    fn take(&mut self, budget: u32) -> Vec<Completion> {
        let mut done = Completions::new();
        let before = self.device.in_flight();
        let count = self.device.poll(budget, &mut done);
        assert_eq!(count as usize, done.len(), "poll returns how many it delivered");
        assert!(count <= budget, "poll delivers within its budget");
        assert_eq!(self.device.in_flight(), before - count, "a delivered operation is in flight no more");
        if done.is_empty() {
            (self.turn)(self.device);
        }
        done.into()
    }

    fn run_one(&mut self, op: DiskOp) -> Completion {
        self.run(vec![op]).pop().expect("one end for one operation")
    }

    fn succeed(&mut self, ops: Vec<DiskOp>) -> Vec<DiskOp> {
        let ends = self.run(ops).into_iter();
        ends.map(|end| {
            assert_eq!(end.result, Ok(()), "{:?}", end.op);
            end.op
        })
        .collect()
    }

    fn write(&mut self, lba: u64, bytes: &[u8]) {
        let op = self.write_op(lba, bytes, false);
        self.succeed(vec![op]);
    }

    fn read(&mut self, lba: u64, count: usize) -> Vec<u8> {
        let op = self.read_op(lba, count);
        match self.succeed(vec![op]).pop() {
            Some(DiskOp::Read { buffer, .. }) => buffer.to_vec(),
            other => panic!("a read comes back as a read, not {other:?}"),
        }
    }

    fn geometry_makes_sense(&mut self) {
        let geometry = self.device.geometry();
        assert!(geometry.blocks.0 >= BLOCKS_MIN, "the checks need {BLOCKS_MIN} blocks");
        assert!(geometry.logical_block.is_power_of_two());
        assert!(geometry.dma_alignment.is_power_of_two() && geometry.dma_alignment <= BLOCK_SIZE);
        assert!(geometry.transfer_blocks_max.0 >= 257, "a record block and 1 MiB of data in one write");
        assert!(geometry.queue_depth_max >= 1);
        assert_eq!(self.device.in_flight(), 0);
    }

    fn what_is_written_is_read(&mut self) {
        self.write(3, &pattern(1, 1));
        self.write(4, &pattern(2, 2));
        assert_eq!(self.read(3, 3), [pattern(1, 1), pattern(2, 2)].concat());
        self.write(4, &pattern(3, 1));
        assert_eq!(self.read(4, 2), [&pattern(3, 1), &pattern(2, 2)[BLOCK..]].concat());
    }

    fn pieces_lie_one_behind_the_other(&mut self) {
        let whole = pattern(4, 17);
        let mut data = WriteList::new();
        for piece in whole.chunks(BLOCK) {
            data.push(self.shared(piece));
        }
        self.succeed(vec![DiskOp::Write { lba: Lba(100), data, fua: false }]);
        assert_eq!(self.read(100, 17), whole);

        // A view in the middle of a buffer.
        let whole = pattern(5, 6);
        let shared = self.shared(&whole);
        let mut data = WriteList::new();
        data.push(shared.slice(4 * BLOCK..6 * BLOCK));
        data.push(shared.slice(0..BLOCK));
        self.succeed(vec![DiskOp::Write { lba: Lba(120), data, fua: true }]);
        assert_eq!(self.read(120, 3), [&whole[4 * BLOCK..], &whole[..BLOCK]].concat());
    }

    fn large_transfers_work(&mut self) {
        let (head, body) = (pattern(6, 1), pattern(7, 256));
        let mut data = WriteList::new();
        data.push(self.shared(&head));
        data.push(self.shared(&body));
        self.succeed(vec![DiskOp::Write { lba: Lba(256), data, fua: false }]);
        assert_eq!(self.read(256, 257), [head, body].concat());
    }

    fn fua_and_flush_complete(&mut self) {
        let op = self.write_op(10, &pattern(8, 1), true);
        self.succeed(vec![op]);
        let op = self.write_op(11, &pattern(9, 1), false);
        self.succeed(vec![op]);
        self.succeed(vec![DiskOp::Flush]);
        assert_eq!(self.read(10, 2), [pattern(8, 1), pattern(9, 1)].concat());
    }

    fn zeroes_read_as_zero(&mut self) {
        let before = pattern(10, 302);
        for (at, chunk) in before.chunks(151 * BLOCK).enumerate() {
            self.write(520 + 151 * at as u64, chunk);
        }
        for fua in [false, true] {
            self.succeed(vec![DiskOp::WriteZeroes { lba: Lba(521), count: BlockCount(300), fua }]);
            assert_eq!(self.read(520, 1), before[..BLOCK]);
            assert!(self.read(521, 300).iter().all(|byte| *byte == 0));
            assert_eq!(self.read(821, 1), before[301 * BLOCK..]);
        }
    }

    fn discards_complete_and_spare_the_neighbours(&mut self) {
        self.write(600, &pattern(11, 4));
        self.succeed(vec![DiskOp::Discard { lba: Lba(601), count: BlockCount(2) }]);
        assert_eq!(self.read(600, 1), pattern(11, 4)[..BLOCK]);
        assert_eq!(self.read(603, 1), pattern(11, 4)[3 * BLOCK..]);
        self.write(601, &pattern(12, 2));
        assert_eq!(self.read(601, 2), pattern(12, 2));
    }

    fn what_lies_beyond_is_invalid(&mut self) {
        let end = self.device.geometry().blocks.0;
        let two = pattern(13, 2);
        let beyond = |lba| DiskOp::Discard { lba: Lba(lba), count: BlockCount(2) };
        let zeroes = |lba, count| DiskOp::WriteZeroes { lba: Lba(lba), count: BlockCount(count), fua: false };
        let ops = vec![
            self.read_op(end - 1, 2),
            self.read_op(end, 1),
            self.read_op(u64::MAX, 1),
            self.write_op(end - 1, &two, false),
            self.write_op(u64::MAX - 1, &two, true),
            beyond(end - 1),
            beyond(u64::MAX),
            zeroes(end - 1, 2),
            zeroes(1, u64::MAX),
            self.write_op(0, &two[..BLOCK + 512], false),
            DiskOp::Write { lba: Lba(0), data: WriteList::new(), fua: false },
        ];
        for end in self.run(ops) {
            assert_eq!(end.result, Err(DiskError::Invalid), "{:?}", end.op);
        }
        // Refusals have changed nothing, and poisoned nothing.
        self.write(0, &two);
        assert_eq!(self.read(0, 2), two);
    }

    fn many_complete_in_any_order(&mut self) {
        let writes = (0..200).map(|at| self.write_op(at, &pattern(1000 + at, 1), at % 3 == 0)).collect();
        self.succeed(writes);
        let reads = (0..200).rev().map(|at| self.read_op(at, 1)).collect();
        for op in self.succeed(reads) {
            let DiskOp::Read { lba, buffer } = op else { panic!("a read comes back as a read") };
            assert_eq!(buffer[..], pattern(1000 + lba.0, 1), "block {lba}");
        }
    }

    fn a_full_queue_returns_the_operation(&mut self) {
        let depth = self.device.geometry().queue_depth_max;
        for at in 0..depth {
            let ticket = self.ticket();
            let op = self.read_op(u64::from(at) % BLOCKS_MIN, 1);
            assert!(self.device.submit(op, ticket).is_ok(), "{at} of {depth} in flight");
        }
        assert_eq!(self.device.in_flight(), depth);
        let refused = self.write_op(77, &pattern(14, 1), false);
        let ticket = self.ticket();
        let refused = self.device.submit(refused, ticket).expect_err("more than the queue holds").0;
        let DiskOp::Write { lba: Lba(77), data, fua: false } = &refused else {
            panic!("came back as {refused:?}")
        };
        assert_eq!(data[0][..], pattern(14, 1));
        let mut left = depth;
        for _ in 0..TURNS_MAX {
            left -= self.take(u32::MAX).len() as u32;
            if left == 0 {
                break;
            }
        }
        assert_eq!(left, 0, "all that were taken complete");
        self.succeed(vec![refused]);
        assert_eq!(self.read(77, 1), pattern(14, 1));
    }

    fn a_budget_bounds_a_poll(&mut self) {
        let depth = self.device.geometry().queue_depth_max.min(8);
        for at in 0..depth {
            let ticket = self.ticket();
            let op = self.read_op(at.into(), 1);
            assert!(self.device.submit(op, ticket).is_ok());
        }
        assert!(self.take(0).is_empty());
        let mut left = depth;
        for _ in 0..TURNS_MAX {
            left -= self.take(1).len() as u32;
            if left == 0 {
                break;
            }
        }
        assert_eq!(left, 0, "small budgets come to the end too");
    }

    fn the_last_block_is_usable(&mut self) {
        let end = self.device.geometry().blocks.0;
        self.write(end - 1, &pattern(15, 1));
        assert_eq!(self.read(end - 1, 1), pattern(15, 1));
        let end = self.run_one(DiskOp::Flush);
        assert_eq!(end.result, Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Memory, Model, ModelOptions};
    use loligo_config::units::BlockCount;

    #[test]
    fn the_model_conforms() {
        for seed in 0..8 {
            let options = ModelOptions { seed, ..ModelOptions::default() };
            let mut device = Model::new(Memory::new(BlockCount(2 * BLOCKS_MIN)), options);
            check(&mut device, &BufferPool::new(64 << 20), &mut |_| ());
        }
    }
}
