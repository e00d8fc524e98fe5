#![allow(clippy::disallowed_methods, reason = "the back end is tested on a real file")]
use super::*;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::WriteList;
use std::collections::BTreeSet;

const BLOCK: usize = BLOCK_SIZE as usize;

/// A model with a pool and completions, driven until idle.
struct Bench<B> {
    pool: BufferPool,
    model: Model<B>,
    done: Completions,
    tickets: u64,
}

impl<B: Backing> Bench<B> {
    fn over(backing: B, options: ModelOptions) -> Self {
        let model = Model::new(backing, options);
        Self { pool: BufferPool::new(64 << 20), model, done: Completions::new(), tickets: 0 }
    }

    fn submit(&mut self, op: DiskOp) -> Ticket {
        self.tickets += 1;
        self.model.submit(op, Ticket(self.tickets)).expect("the queue has room");
        Ticket(self.tickets)
    }

    fn write_op(&self, lba: u64, blocks: &[u8], fua: bool) -> DiskOp {
        let mut data = WriteList::new();
        for fill in blocks {
            data.push(self.pool.copy_of(&[*fill; BLOCK]).unwrap());
        }
        DiskOp::Write { lba: Lba(lba), data, fua }
    }

    fn finish(&mut self) -> Vec<Completion> {
        for _ in 0..10_000 {
            if self.model.in_flight() == 0 {
                break;
            }
            self.model.poll(64, &mut self.done);
        }
        self.done.drain(..).collect()
    }

    fn run(&mut self, op: DiskOp) -> Result<(), DiskError> {
        let ticket = self.submit(op);
        let completion = self.finish().pop().expect("it completes");
        assert_eq!(completion.ticket, ticket);
        completion.result
    }

    fn write(&mut self, lba: u64, blocks: &[u8], fua: bool) -> Result<(), DiskError> {
        self.run(self.write_op(lba, blocks, fua))
    }

    fn flush(&mut self) -> Result<(), DiskError> {
        self.run(DiskOp::Flush)
    }

    fn read(&mut self, lba: u64, count: usize) -> Result<Vec<u8>, DiskError> {
        let buffer = self.pool.alloc(count * BLOCK).unwrap();
        self.submit(DiskOp::Read { lba: Lba(lba), buffer });
        let completion = self.finish().pop().expect("it completes");
        completion.result?;
        let DiskOp::Read { buffer, .. } = completion.op else { panic!("the read comes back as a read") };
        Ok(buffer.to_vec())
    }

    fn sectors(&mut self, lba: u64) -> Vec<u8> {
        self.read(lba, 1).unwrap().chunks(SECTOR_LEN).map(uniform).collect()
    }
}

fn uniform(bytes: &[u8]) -> u8 {
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a sector never tears");
    bytes[0]
}

/// Nothing happens by itself: no destage, one poll each, in order.
fn quiet() -> ModelOptions {
    let latency = Latency::Polls { min: 1, max: 1 };
    ModelOptions { latency, reorders: false, destage_per_poll: 0, ..ModelOptions::default() }
}

fn bench(options: ModelOptions) -> Bench<Memory> {
    Bench::over(Memory::new(BlockCount(64)), options)
}

fn image_block(image: &Memory, lba: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    image.read_at(Lba(lba).to_bytes().unwrap(), &mut block).unwrap();
    block.chunks(SECTOR_LEN).map(uniform).collect()
}

#[test]
fn what_was_written_is_read_and_unflushed_data_is_only_in_ram() {
    let mut bench = bench(quiet());
    bench.write(3, &[1, 2], false).unwrap();
    assert_eq!(bench.sectors(4), [2; 8]);
    assert_eq!(image_block(bench.model.backing(), 4), [0; 8]);
    bench.flush().unwrap();
    assert_eq!(image_block(bench.model.backing(), 3), [1; 8]);
    assert!(bench.model.unflushed().is_empty());
}

#[test]
fn fua_is_durable_alone_and_supersedes_older_writes_of_its_blocks() {
    let mut bench = bench(quiet());
    bench.write(0, &[1, 1], false).unwrap();
    bench.write(1, &[2], true).unwrap();
    let left = bench.model.unflushed();
    assert_eq!(left.len(), 1);
    assert_eq!((left[0].lba, left[0].count, left[0].completed), (Lba(0), BlockCount(2), true));
    assert_eq!(left[0].sectors, (0..8).collect::<Vec<_>>(), "the block behind it is superseded");
    bench.model.power_cut_with(|_, _| Choice::New).unwrap();
    assert_eq!((bench.sectors(0), bench.sectors(1)), (vec![1; 8], vec![2; 8]));
}

#[test]
fn a_device_without_a_cache_keeps_what_it_acknowledged() {
    let mut bench = bench(ModelOptions { write_cache: WriteCache::None, ..quiet() });
    bench.write(0, &[1], false).unwrap();
    bench.run(DiskOp::WriteZeroes { lba: Lba(1), count: BlockCount(2), fua: false }).unwrap();
    bench.submit(bench.write_op(5, &[9], false));
    assert_eq!(bench.model.unflushed().len(), 1, "only the one in flight");
    bench.model.power_cut_with(|_, sector| if sector < 3 { Choice::New } else { Choice::Old }).unwrap();
    assert_eq!(bench.model.in_flight(), 0);
    assert_eq!(bench.sectors(0), [1; 8]);
    assert_eq!(bench.sectors(5), [9, 9, 9, 0, 0, 0, 0, 0], "a torn block");
}

#[test]
fn a_flush_covers_only_what_completed_before_it_was_submitted() {
    let latency = Latency::Schedule(vec![1, 5, 2, 1]);
    let mut bench = bench(ModelOptions { latency, reorders: true, ..quiet() });
    bench.write(0, &[1], false).unwrap();
    bench.submit(bench.write_op(1, &[2], false)); // takes 5 polls
    bench.submit(DiskOp::Flush); // takes 2
    bench.submit(bench.write_op(2, &[3], false)); // takes 1: complete before the flush, submitted after it
    bench.finish();
    let lost = bench.model.crash_image(|_, _| Choice::Old);
    assert_eq!(image_block(&lost, 0), [1; 8]);
    assert_eq!(image_block(&lost, 1), [0; 8]);
    assert_eq!(image_block(&lost, 2), [0; 8]);
}

#[test]
fn crash_images_enumerate_loss_reordering_and_tearing() {
    let mut bench = bench(quiet());
    bench.write(7, &[1], true).unwrap();
    bench.write(7, &[2], false).unwrap();
    bench.write(7, &[3], false).unwrap();
    bench.write(8, &[4], false).unwrap();
    let mut seen = BTreeSet::new();
    for bits in 0..16_u32 {
        // Writes 0 and 1 whole, write 2 in halves.
        let image = bench.model.crash_image(|write, sector| {
            let bit = if write < 2 { write as u32 } else { 2 + sector / 4 };
            if bits >> bit & 1 == 1 { Choice::New } else { Choice::Old }
        });
        let (first, second) = (image_block(&image, 7), image_block(&image, 8));
        seen.insert((first[0], second[0], second[7]));
    }
    let expected = [1, 2, 3]
        .into_iter()
        .flat_map(|a| [(0, 0), (0, 4), (4, 0), (4, 4)].into_iter().map(move |(b, c)| (a, b, c)));
    assert_eq!(seen, expected.collect());
    assert_eq!(bench.sectors(7), [3; 8], "the model goes on unchanged");
}

#[test]
fn a_device_that_does_not_tear_decides_per_block() {
    let mut bench = bench(ModelOptions { tears_blocks: false, ..quiet() });
    assert_eq!(bench.model.geometry().atomic_blocks, BlockCount(1));
    bench.write(0, &[1, 2], false).unwrap();
    assert_eq!(bench.model.unflushed()[0].sectors, [0, 8]);
    bench.model.power_cut_with(|_, sector| if sector == 8 { Choice::New } else { Choice::Old }).unwrap();
    assert_eq!((bench.sectors(0), bench.sectors(1)), (vec![0; 8], vec![2; 8]));
}

#[test]
fn background_destage_is_a_subset_and_never_goes_back() {
    let mut bench = bench(ModelOptions { destage_per_poll: 3, seed: 5, ..quiet() });
    bench.write(0, &[1; 8], false).unwrap();
    bench.write(0, &[2; 8], false).unwrap();
    for _ in 0..8 {
        bench.model.poll(1, &mut Completions::new());
    }
    let lost = bench.model.crash_image(|_, _| Choice::Old);
    let sectors: Vec<u8> = (0..8).flat_map(|lba| image_block(&lost, lba)).collect();
    let of = |value| sectors.iter().filter(|sector| **sector == value).count();
    assert!(of(0) > 0 && of(1) + of(2) > 0, "some are on the medium, some are not: {sectors:?}");
    assert_eq!((0..8).map(|lba| bench.sectors(lba)).collect::<Vec<_>>(), vec![vec![2; 8]; 8]);
    for _ in 0..20_000 {
        bench.model.poll(1, &mut Completions::new());
    }
    assert!(bench.model.unflushed().is_empty(), "in the end all is on the medium");
    assert_eq!(image_block(bench.model.backing(), 3), [2; 8]);
}

#[test]
fn the_cache_is_bounded() {
    let mut bench = bench(ModelOptions { cache_blocks_max: BlockCount(4), ..quiet() });
    for lba in 0..10 {
        bench.write(lba, &[9], false).unwrap();
    }
    let left: Vec<_> = bench.model.unflushed().into_iter().map(|write| write.lba.0).collect();
    assert_eq!(left, [6, 7, 8, 9]);
}

#[test]
fn reads_beside_a_write_in_flight_see_old_or_new_sectors() {
    let latency = Latency::Schedule(vec![1, 50, 1, 1, 1, 1, 1, 1]);
    let mut bench = bench(ModelOptions { latency, reorders: true, ..quiet() });
    bench.write(0, &[1], true).unwrap();
    bench.submit(bench.write_op(0, &[2], false));
    let mut last = vec![1; 8];
    for _ in 0..4 {
        let buffer = bench.pool.alloc(BLOCK).unwrap();
        bench.submit(DiskOp::Read { lba: Lba(0), buffer });
        bench.model.poll(1, &mut bench.done);
        let Some(DiskOp::Read { buffer, .. }) = bench.done.pop_front().map(|done| done.op) else {
            panic!("the read completes first")
        };
        let now: Vec<u8> = buffer.chunks(SECTOR_LEN).map(uniform).collect();
        assert!(now.iter().zip(&last).all(|(now, last)| now >= last), "{last:?} → {now:?}");
        last = now;
    }
    assert!(last.contains(&2), "after four looks some sector has landed: {last:?}");
    bench.finish();
    assert_eq!(bench.sectors(0), [2; 8]);
}

#[test]
#[should_panic(expected = "two writes to block 4 in flight")]
fn two_writes_to_one_block_in_flight_are_the_callers_bug() {
    let mut bench = bench(quiet());
    bench.submit(bench.write_op(3, &[1, 1], false));
    bench.submit(bench.write_op(4, &[2], false));
}

#[test]
fn operations_overtake_each_other_and_a_seed_repeats_its_run() {
    let order = |seed| {
        let latency = Latency::Polls { min: 1, max: 4 };
        let mut bench = bench(ModelOptions { seed, latency, reorders: true, ..quiet() });
        for lba in 0..16 {
            bench.submit(bench.write_op(lba, &[1], false));
        }
        bench.finish().into_iter().map(|done| done.ticket.0).collect::<Vec<_>>()
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    assert_ne!(order(1), (1..=16).collect::<Vec<_>>());
}

#[test]
fn the_queue_depth_and_the_budget_hold() {
    let mut bench = bench(ModelOptions { queue_depth_max: 2, ..quiet() });
    bench.submit(bench.write_op(0, &[1], false));
    bench.submit(bench.write_op(1, &[1], false));
    let op = bench.write_op(2, &[1], false);
    let QueueFull(DiskOp::Write { lba, .. }) = bench.model.submit(op, Ticket(9)).unwrap_err() else {
        panic!("the operation comes back")
    };
    assert_eq!(lba, Lba(2));
    assert_eq!(bench.model.poll(1, &mut bench.done), 1);
    assert_eq!(bench.model.poll(1, &mut bench.done), 1);
    assert_eq!(bench.model.poll(1, &mut bench.done), 0);
}

#[test]
fn requests_beyond_the_device_or_its_limits_are_invalid_and_change_nothing() {
    let mut bench = bench(ModelOptions { transfer_blocks_max: BlockCount(2), ..quiet() });
    assert_eq!(bench.write(63, &[1, 1], false), Err(DiskError::Invalid));
    assert_eq!(bench.write(u64::MAX, &[1], false), Err(DiskError::Invalid));
    assert_eq!(bench.write(0, &[1, 1, 1], false), Err(DiskError::Invalid));
    assert_eq!(bench.write(0, &[], false), Err(DiskError::Invalid));
    assert_eq!(bench.read(64, 1), Err(DiskError::Invalid));
    let odd = DiskOp::Read { lba: Lba(0), buffer: bench.pool.alloc(5000).unwrap() };
    assert_eq!(bench.run(odd), Err(DiskError::Invalid));
    let far = DiskOp::Discard { lba: Lba(1), count: BlockCount(u64::MAX) };
    assert_eq!(bench.run(far), Err(DiskError::Invalid));
    bench.write(62, &[7, 7], false).unwrap();
    assert_eq!(bench.sectors(63), [7; 8]);
}

#[test]
fn a_failed_write_is_old_or_new_per_sector_and_poisons() {
    let mut bench = bench(quiet());
    bench.write(0, &[1; 4], true).unwrap();
    let error = DiskError::Io { errno: 5 };
    bench.model.inject(Fault::Fail(Aim::once(OpKind::Write, 1), error));
    assert_eq!(bench.write(0, &[2; 4], true), Err(error));
    let sectors: Vec<u8> = (0..4).flat_map(|lba| bench.sectors(lba)).collect();
    assert!(sectors.contains(&1) && sectors.contains(&2), "{sectors:?}");
    assert_eq!(bench.write(9, &[3], false), Err(DiskError::Poisoned));
    assert_eq!(bench.flush(), Err(DiskError::Poisoned));
    bench.model.power_cut(&mut Prng::new(1)).unwrap();
    assert_eq!(bench.write(9, &[3], false), Ok(()), "power-on makes it usable again");
}

#[test]
fn a_failed_flush_makes_some_durable_and_loses_some() {
    let mut bench = bench(quiet());
    bench.write(0, &[1; 8], true).unwrap();
    bench.write(0, &[2; 8], false).unwrap();
    let error = DiskError::Io { errno: 5 };
    bench.model.inject(Fault::Fail(Aim::once(OpKind::Flush, 1), error));
    assert_eq!(bench.flush(), Err(error));
    let visible: Vec<u8> = (0..8).flat_map(|lba| bench.sectors(lba)).collect();
    let medium = bench.model.crash_image(|_, _| Choice::Old);
    let durable: Vec<u8> = (0..8).flat_map(|lba| image_block(&medium, lba)).collect();
    assert!(visible.contains(&1), "some were lost: {visible:?}");
    assert!(durable.contains(&2), "some are durable: {durable:?}");
    assert!(visible != durable, "some are still cached");
}

#[test]
fn faults_count_from_the_next_operation_and_stick_when_asked() {
    let mut bench = bench(ModelOptions { poisons: false, ..quiet() });
    let error = DiskError::Media { errno: 61 };
    bench.read(0, 1).unwrap();
    bench.model.inject(Fault::Fail(Aim::once(OpKind::Read, 2), error));
    assert!(bench.read(0, 1).is_ok());
    assert_eq!(bench.read(0, 1), Err(error));
    assert!(bench.read(0, 1).is_ok());
    bench.model.inject(Fault::Fail(Aim::from(OpKind::Write, 1), error));
    assert_eq!(bench.write(0, &[1], false), Err(error));
    assert_eq!(bench.write(0, &[1], false), Err(error));
    bench.model.clear_faults();
    assert_eq!(bench.write(0, &[1], false), Ok(()));
}

#[test]
fn bad_ranges_fail_until_they_are_written() {
    let mut bench = bench(quiet());
    let error = DiskError::Media { errno: 61 };
    let (lba, count) = (Lba(4), BlockCount(3));
    bench.model.inject(Fault::Range { kind: OpKind::Read, lba, count, error, heals: true });
    assert_eq!(bench.read(2, 3), Err(error));
    assert!(bench.read(7, 1).is_ok());
    bench.write(5, &[1], false).unwrap();
    assert_eq!(bench.sectors(5), [1; 8]);
    assert_eq!(bench.read(4, 1), Err(error));
    assert_eq!(bench.read(6, 1), Err(error));
}

#[test]
fn hung_operations_hold_their_buffers_until_released() {
    let mut bench = bench(quiet());
    bench.model.inject(Fault::Hang(Aim::once(OpKind::Write, 1)));
    bench.model.inject(Fault::Slow(Aim::once(OpKind::Read, 1), 10));
    bench.submit(bench.write_op(0, &[1], false));
    let buffer = bench.pool.alloc(BLOCK).unwrap();
    bench.submit(DiskOp::Read { lba: Lba(9), buffer });
    for _ in 0..10 {
        assert_eq!(bench.model.poll(8, &mut bench.done), 0);
    }
    assert_eq!(bench.model.poll(8, &mut bench.done), 1, "the slow one");
    for _ in 0..100 {
        assert_eq!(bench.model.poll(8, &mut bench.done), 0);
    }
    assert_eq!(bench.model.in_flight(), 1);
    bench.model.release_hung();
    assert_eq!(bench.model.poll(8, &mut bench.done), 1);
}

#[test]
fn rot_lost_and_misdirected_writes_are_not_noticed_by_the_device() {
    let mut bench = bench(quiet());
    bench.write(0, &[1], false).unwrap();
    bench.model.rot(Lba(0), 700, 0x80).unwrap();
    let block = bench.read(0, 1).unwrap();
    assert_eq!((block[699], block[700], block[701]), (1, 0x81, 1));
    bench.model.inject(Fault::LostWrite(Aim::once(OpKind::Write, 1)));
    bench.write(0, &[2], true).unwrap();
    assert_eq!(bench.read(0, 1).unwrap()[0], 1);
    bench.model.inject(Fault::MisdirectedWrite(Aim::once(OpKind::Write, 1), Lba(9)));
    bench.write(0, &[3], true).unwrap();
    assert_eq!((bench.read(0, 1).unwrap()[0], bench.sectors(9)), (1, vec![3; 8]));
}

#[test]
fn zeroes_and_discards() {
    let mut bench = bench(quiet());
    bench.write(0, &[1; 16], true).unwrap();
    bench.write(16, &[1; 16], true).unwrap();
    bench.run(DiskOp::WriteZeroes { lba: Lba(0), count: BlockCount(2), fua: true }).unwrap();
    assert_eq!(image_block(bench.model.backing(), 1), [0; 8]);
    bench.run(DiskOp::Discard { lba: Lba(2), count: BlockCount(28) }).unwrap();
    let after = bench.read(2, 30).unwrap();
    let untouched = after.chunks(BLOCK).filter(|block| **block == [1; BLOCK]).count();
    assert!((3..30).contains(&untouched), "some keep what they had, most do not: {untouched}");
    assert_eq!(after[28 * BLOCK..], [1; 2 * BLOCK], "blocks behind the range are whole");
    let mut deaf = Bench::over(Memory::new(BlockCount(4)), ModelOptions { discards: false, ..quiet() });
    deaf.write(0, &[1], false).unwrap();
    deaf.run(DiskOp::Discard { lba: Lba(0), count: BlockCount(1) }).unwrap();
    assert_eq!(deaf.sectors(0), [1; 8]);
}

#[test]
fn the_record_counts_what_was_asked() {
    let mut bench = bench(quiet());
    bench.write(0, &[1, 2], true).unwrap();
    bench.write(2, &[3], false).unwrap();
    bench.write(9, &[3], false).unwrap();
    bench.flush().unwrap();
    bench.read(0, 2).unwrap();
    let record = bench.model.take_record();
    let counts = record.counts;
    assert_eq!((counts.writes, counts.fua, counts.flushes, counts.reads), (3, 1, 1, 1));
    assert_eq!((counts.bytes_written, counts.bytes_read), (4 * 4096, 2 * 4096));
    assert_eq!(counts.contiguous_writes, 1);
    let first = RecordedWrite { lba: Lba(0), count: BlockCount(2), pieces: 2, fua: true };
    assert_eq!(record.writes[0], first);
    assert_eq!(bench.model.record().counts, Counts::default());
}

#[test]
fn the_callers_buffers_come_back_alone() {
    let mut bench = bench(quiet());
    bench.submit(bench.write_op(0, &[1], false));
    let DiskOp::Write { mut data, .. } = bench.finish().pop().unwrap().op else { panic!("a write") };
    assert!(data.pop().unwrap().try_unique().is_ok(), "the cache has its own copy");
}

#[test]
fn over_a_file_only_what_was_flushed_survives_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, vec![0; 16 * BLOCK]).unwrap();
    let open = || File::open(&path, SyncMode::ProcessOnly).unwrap();
    let mut bench = Bench::over(open(), quiet());
    bench.write(0, &[1], true).unwrap();
    bench.write(1, &[2], false).unwrap();
    bench.flush().unwrap();
    bench.write(2, &[3], false).unwrap();
    drop(bench); // what SIGKILL does: the cache is gone
    let mut bench = Bench::over(open(), quiet());
    assert_eq!(bench.sectors(0), [1; 8]);
    assert_eq!(bench.sectors(1), [2; 8]);
    assert_eq!(bench.sectors(2), [0; 8]);
}

/// Random operations against an oracle that knows, for each sector, which values a crash may leave.
#[test]
fn power_cuts_leave_only_values_that_the_history_allows() {
    for seed in 0..60 {
        history(seed);
    }
}

fn history(seed: u64) {
    let mut dice = Prng::new(seed);
    let write_cache = if seed % 4 == 3 { WriteCache::None } else { WriteCache::Volatile };
    let tears_blocks = !seed.is_multiple_of(3);
    let destage_per_poll = (seed % 3) as u32;
    let options =
        ModelOptions { seed, write_cache, tears_blocks, destage_per_poll, ..ModelOptions::default() };
    let mut bench = Bench::over(Memory::new(BlockCount(8)), options);
    // Per block: values possible after a crash, the current one last.
    let mut possible: Vec<Vec<u8>> = vec![vec![0]; 8];
    let mut value = 0_u8;
    for _ in 0..40 {
        for _ in 0..below(&mut dice, 6) {
            let lba = below(&mut dice, 8);
            value = value.wrapping_add(1);
            match below(&mut dice, 6) {
                0 => {
                    bench.flush().unwrap();
                    possible.iter_mut().for_each(|values| drop(values.drain(..values.len() - 1)));
                }
                1 => {
                    bench.write(lba, &[value], true).unwrap();
                    possible[lba as usize] = vec![value];
                }
                _ => {
                    bench.write(lba, &[value], false).unwrap();
                    possible[lba as usize].push(value);
                    if write_cache == WriteCache::None {
                        possible[lba as usize] = vec![value];
                    }
                }
            }
            assert_eq!(bench.sectors(lba)[0], *possible[lba as usize].last().unwrap());
        }
        bench.submit(bench.write_op(below(&mut dice, 8), &[255], true));
        let in_flight = bench.model.record().writes.back().unwrap().lba.0 as usize;
        bench.model.poll(0, &mut bench.done);
        possible[in_flight].push(255);
        bench.model.power_cut(&mut dice).unwrap();
        for (lba, values) in possible.iter_mut().enumerate() {
            let sectors = bench.sectors(lba as u64);
            assert!(sectors.iter().all(|sector| values.contains(sector)), "{sectors:?} of {values:?}");
            assert!(tears_blocks || sectors.iter().all(|sector| *sector == sectors[0]), "{sectors:?}");
            assert_eq!(bench.sectors(lba as u64), sectors, "what was recovered stays");
            bench.write(lba as u64, &[sectors[0]], true).unwrap();
            *values = vec![sectors[0]];
        }
    }
}
