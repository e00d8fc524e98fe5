//! The driver allocates nothing per command: counted by a heap profiler, in a process of its own.

use loligo_config::units::Lba;
use loligo_nvme::controller::{Controller, ControllerOptions};
use loligo_nvme::model::controller::{SoftController, SoftOptions};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{BlockDevice, Clock, Completions, DiskOp, Instant, Ticket, WriteList};
use std::cell::Cell;

#[global_allocator]
static HEAP: dhat::Alloc = dhat::Alloc;

/// More than the queue holds at a time, in commands: operations are cut and wait.
const DEPTH: u64 = 32;

#[derive(Clone, Copy)]
struct StillClock;

impl Clock for StillClock {
    fn now(&self) -> Instant {
        Instant(1)
    }

    fn unix_seconds(&self) -> u64 {
        0
    }
}

/// Runs some of the driver, and counts what it has allocated. The software controller itself is not counted.
fn counted<R>(count: &Cell<u64>, run: impl FnOnce() -> R) -> R {
    let before = dhat::HeapStats::get().total_blocks;
    let result = run();
    count.set(count.get() + dhat::HeapStats::get().total_blocks - before);
    result
}

#[test]
fn reads_writes_and_flushes_allocate_nothing() {
    let _profiler = dhat::Profiler::builder().testing().build();
    let soft = SoftController::new(SoftOptions { mdts: 2, ..SoftOptions::default() });
    let options = ControllerOptions { queue_depth: DEPTH as u16, ..ControllerOptions::default() };
    let controller =
        Controller::open(soft.clone(), options, &StillClock, &mut || soft.step()).expect("it comes up");
    let pool = BufferPool::new(32 << 20);
    let mut device = controller.queue(1, &pool, StillClock).expect("a queue");
    let mut done = Completions::with_capacity(64);
    let count = Cell::new(0);
    for round in 0..110 {
        if round == 10 {
            count.set(0);
        }
        for at in 0..DEPTH {
            let mut data = WriteList::new();
            for _ in 0..=at % 3 {
                data.push(pool.alloc(16 << 10).unwrap().freeze());
            }
            let lba = Lba(16 * at);
            let op = match at % 4 {
                3 => DiskOp::Read { lba, buffer: pool.alloc(32 << 10).unwrap() },
                2 => DiskOp::Flush,
                _ => DiskOp::Write { lba, data, fua: at % 8 == 0 },
            };
            counted(&count, || device.submit(op, Ticket(at)).expect("room"));
        }
        while device.in_flight() > 0 {
            soft.step();
            counted(&count, || device.poll(8, &mut done));
            done.drain(..).for_each(|end| end.result.unwrap());
        }
    }
    assert!(device.stats().commands > 110 * DEPTH);
    dhat::assert_eq!(count.get(), 0);
}
