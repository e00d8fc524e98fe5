//! Instructions of the driver per command, for callgrind: on the software controller, whose own work is not counted.
//!
//!     cargo bench -p loligo-nvme --bench driver --no-run
//!     valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*measured*' PROGRAM [depth] [commands]
//!
//! Divide "Collected" by the number of commands that it prints.

use loligo_config::units::Lba;
use loligo_nvme::bus::{Bus, BusError};
use loligo_nvme::controller::{Controller, ControllerOptions};
use loligo_nvme::model::Latency;
use loligo_nvme::model::controller::{SoftController, SoftOptions};
use loligo_nvme::namespace::Namespace;
use loligo_nvme::queue::DmaRange;
use loligo_nvme::spec::registers::DOORBELLS;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{BlockDevice, Completions, DiskOp, Ticket, WriteList};
use loligo_reactor::os::OsClock;
use std::cell::Cell;
use std::rc::Rc;

/// The software controller with doorbells that cost what they cost on hardware, a store: they reach it later.
#[derive(Clone)]
struct Delayed {
    soft: SoftController,
    rung: Rc<[Cell<u32>; 8]>,
}

impl Delayed {
    /// Passes on what was rung.
    fn step(&self) {
        for (index, rung) in self.rung.iter().enumerate() {
            let value = rung.replace(u32::MAX);
            if value != u32::MAX {
                self.soft.write32(DOORBELLS + 4 * index as u32, value);
            }
        }
        self.soft.step();
    }
}

#[allow(unsafe_code)]
impl Bus for Delayed {
    fn read32(&self, offset: u32) -> u32 {
        self.soft.read32(offset)
    }
    fn read64(&self, offset: u32) -> u64 {
        self.soft.read64(offset)
    }
    fn write32(&self, offset: u32, value: u32) {
        match offset.checked_sub(DOORBELLS) {
            Some(doorbell) => self.rung[doorbell as usize / 4].set(value),
            None => self.soft.write32(offset, value),
        }
    }
    fn write64(&self, offset: u32, value: u64) {
        self.soft.write64(offset, value);
    }
    unsafe fn map(&self, memory: DmaRange) -> Result<u64, BusError> {
        // SAFETY: the same contract.
        unsafe { self.soft.map(memory) }
    }
    fn unmap(&self, iova: u64, len: usize) {
        self.soft.unmap(iova, len);
    }
    fn connect(&self) -> Result<(), BusError> {
        self.soft.connect()
    }
    fn isolate(&self) {
        self.soft.isolate();
    }
}

type Device = Namespace<Delayed, OsClock>;

#[inline(never)]
fn measured_submit(device: &mut Device, op: DiskOp, ticket: Ticket) {
    assert!(device.submit(op, ticket).is_ok());
}

#[inline(never)]
fn measured_poll(device: &mut Device, done: &mut Completions) {
    device.poll(u32::MAX, done);
}

fn main() {
    let mut numbers = std::env::args().filter_map(|word| word.parse::<u64>().ok());
    let depth = numbers.next().unwrap_or(1).clamp(1, 128);
    let commands = numbers.next().unwrap_or(10_000);
    let latency = Latency::Polls { min: 1, max: 1 };
    let soft = SoftController::new(SoftOptions { latency, ..SoftOptions::default() });
    let bus = Delayed { soft, rung: Rc::new(std::array::from_fn(|_| Cell::new(u32::MAX))) };
    let options = ControllerOptions::default();
    let controller =
        Controller::open(bus.clone(), options, &OsClock, &mut || bus.step()).expect("it comes up");
    let pool = BufferPool::new(32 << 20);
    let mut device = controller.queue(1, &pool, OsClock).expect("a queue");
    let mut done = Completions::with_capacity(256);
    // The queue is made, and the pool mapped.
    for write in [true, false] {
        round(&controller, &mut device, &pool, &mut done, 1, write, false);
    }
    for at in 0..commands / depth {
        round(&controller, &mut device, &pool, &mut done, depth, at % 2 == 0, true);
    }
    println!("{} commands, {depth} at a time", commands / depth * depth);
}

/// Submits so many, lets the controller finish them, and polls once.
fn round(
    controller: &Controller<Delayed>,
    device: &mut Device,
    pool: &BufferPool,
    done: &mut Completions,
    depth: u64,
    write: bool,
    counted: bool,
) {
    for lba in 0..depth {
        let buffer = pool.alloc(4096).expect("a buffer");
        let op = if write {
            let mut data = WriteList::new();
            data.push(buffer.freeze());
            DiskOp::Write { lba: Lba(lba), data, fua: true }
        } else {
            DiskOp::Read { lba: Lba(lba), buffer }
        };
        if counted {
            measured_submit(device, op, Ticket(lba));
        } else {
            assert!(device.submit(op, Ticket(lba)).is_ok());
        }
    }
    while device.in_flight() > 0 {
        if counted && depth > 1 {
            // The doorbell of all but the first.
            measured_poll(device, done);
        }
        (0..4).for_each(|_| controller.bus().step());
        if counted {
            measured_poll(device, done);
        } else {
            device.poll(u32::MAX, done);
        }
    }
    done.clear();
}
