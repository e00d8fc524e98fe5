//! The data path allocates nothing: counted by a heap profiler, in a process of its own.
#![allow(clippy::disallowed_methods, reason = "a test on a real file")]

use loligo_config::units::Lba;
use loligo_nvme::uring::{UringDevice, UringOptions};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{BlockDevice, Completions, DiskOp, Ticket, WriteList};
use loligo_reactor::os::ring::Ring;

#[global_allocator]
static HEAP: dhat::Alloc = dhat::Alloc;

const DEPTH: u64 = 16;

fn round(device: &mut UringDevice, pool: &BufferPool, ring: &Ring, done: &mut Completions) {
    for at in 0..DEPTH {
        let mut data = WriteList::new();
        // One piece on even turns (a registered buffer), two on odd ones (vectors).
        for _ in 0..=at % 2 {
            data.push(pool.alloc(4096).unwrap().freeze());
        }
        let op = match at % 4 {
            3 => DiskOp::Read { lba: Lba(2 * at), buffer: pool.alloc(4096).unwrap() },
            _ => DiskOp::Write { lba: Lba(2 * at), data, fua: true },
        };
        device.submit(op, Ticket(at)).unwrap();
    }
    device.submit(DiskOp::Flush, Ticket(DEPTH)).unwrap();
    while device.in_flight() > 0 {
        ring.wait(None).unwrap();
        device.poll(8, done);
        done.drain(..).for_each(|end| end.result.unwrap());
    }
}

#[test]
fn reads_writes_and_flushes_allocate_nothing() {
    let program = std::env::current_exe().unwrap();
    let file = tempfile::NamedTempFile::new_in(program.parent().unwrap()).unwrap();
    std::fs::write(file.path(), vec![1; 1 << 20]).unwrap();
    let _profiler = dhat::Profiler::builder().testing().build();
    let ring = Ring::new(64).unwrap();
    let pool = BufferPool::new(8 << 20);
    let options = UringOptions { queue_depth: 64, ..UringOptions::default() };
    let mut device = UringDevice::open(file.path(), &ring, &pool, options).unwrap();
    let mut done = Completions::with_capacity(64);
    for _ in 0..10 {
        round(&mut device, &pool, &ring, &mut done);
    }
    let before = dhat::HeapStats::get().total_blocks;
    for _ in 0..100 {
        round(&mut device, &pool, &ring, &mut done);
    }
    let after = dhat::HeapStats::get().total_blocks;
    dhat::assert_eq!(after - before, 0);
}
