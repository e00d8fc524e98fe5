//! The whole driver on the software controller.

mod chaos;
mod conforms;
mod faults;

use super::Namespace;
use crate::controller::{Controller, ControllerError, ControllerOptions};
use crate::model::controller::{Misuse, SoftController, SoftOptions};
use crate::spec::status::Verdict;
use loligo_config::units::{BLOCK_SIZE, Lba};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{
    BlockDevice, Clock, Completion, Completions, DiskError, DiskOp, Instant, Ticket, WriteList,
};
use std::cell::Cell;
use std::rc::Rc;

const BLOCK: usize = BLOCK_SIZE as usize;

/// A clock that goes when it is told to.
#[derive(Clone, Debug, Default)]
struct TestClock(Rc<Cell<u64>>);

impl TestClock {
    fn pass_ms(&self, ms: u64) {
        self.0.set(self.0.get() + ms * 1_000_000);
    }
}

impl Clock for TestClock {
    fn now(&self) -> Instant {
        Instant(self.0.get())
    }

    fn unix_seconds(&self) -> u64 {
        0
    }
}

type Device = Namespace<SoftController, TestClock>;

/// A software controller, its driver, and time.
struct Bench {
    soft: SoftController,
    clock: TestClock,
    pool: BufferPool,
    controller: Option<Controller<SoftController>>,
    next: u64,
}

fn open(
    soft: &SoftController,
    clock: &TestClock,
    options: ControllerOptions,
) -> Result<Controller<SoftController>, ControllerError> {
    Controller::open(soft.clone(), options, clock, &mut || {
        soft.step();
        clock.pass_ms(1);
    })
}

impl Bench {
    fn new(options: SoftOptions) -> Self {
        Self::with(options, ControllerOptions::default())
    }

    fn with(soft: SoftOptions, options: ControllerOptions) -> Self {
        let (soft, clock) = (SoftController::new(soft), TestClock::default());
        let controller = Some(open(&soft, &clock, options).expect("a sound controller comes up"));
        Self { soft, clock, pool: BufferPool::new(64 << 20), controller, next: 0 }
    }

    fn device(&self, nsid: u32) -> Device {
        self.controller().queue(nsid, &self.pool, self.clock.clone()).expect("a namespace and a queue for it")
    }

    fn controller(&self) -> &Controller<SoftController> {
        self.controller.as_ref().expect("open")
    }

    /// Opens it anew, as after the death of the process.
    fn reopen(&mut self) {
        self.controller = None;
        self.controller = Some(open(&self.soft, &self.clock, ControllerOptions::default()).unwrap());
    }

    fn turn(&self) {
        self.soft.step();
        self.clock.pass_ms(1);
    }

    fn submit(&mut self, device: &mut Device, op: DiskOp) -> Ticket {
        self.next += 1;
        let ticket = Ticket(self.next);
        assert!(device.submit(op, ticket).is_ok(), "there is room");
        ticket
    }

    /// Turns until nothing is in flight, at most for 100 seconds.
    fn finish(&mut self, device: &mut Device) -> Vec<Completion> {
        let mut done = Completions::new();
        for _ in 0..100_000 {
            device.poll(u32::MAX, &mut done);
            if device.in_flight() == 0 {
                return done.into();
            }
            self.turn();
        }
        panic!("{} operations never end", device.in_flight());
    }

    fn one(&mut self, device: &mut Device, op: DiskOp) -> Completion {
        self.submit(device, op);
        let mut done = self.finish(device);
        assert_eq!(done.len(), 1);
        done.remove(0)
    }

    fn write_op(&self, lba: u64, fill: u8, blocks: usize, fua: bool) -> DiskOp {
        let mut data = WriteList::new();
        data.push(self.pool.copy_of(&vec![fill; blocks * BLOCK]).unwrap());
        DiskOp::Write { lba: Lba(lba), data, fua }
    }

    fn read_op(&self, lba: u64, blocks: usize) -> DiskOp {
        DiskOp::Read { lba: Lba(lba), buffer: self.pool.alloc_zeroed(blocks * BLOCK).unwrap() }
    }

    fn write(&mut self, device: &mut Device, lba: u64, fill: u8) -> Result<(), DiskError> {
        let op = self.write_op(lba, fill, 1, true);
        self.one(device, op).result
    }

    fn read(&mut self, device: &mut Device, lba: u64) -> Result<u8, DiskError> {
        let op = self.read_op(lba, 1);
        let end = self.one(device, op);
        let DiskOp::Read { buffer, .. } = &end.op else { panic!("a read comes back as a read") };
        end.result?;
        assert!(buffer.iter().all(|byte| *byte == buffer[0]), "a block of one byte");
        Ok(buffer[0])
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.soft.misuse(), Misuse::default(), "the driver keeps to the rules");
        }
    }
}
