//! What runs in the guest.
#![allow(clippy::disallowed_methods, reason = "threads and processes of the real world")]

use loligo_config::units::{BLOCK_SIZE, Lba};
use loligo_nvme::conformance;
use loligo_nvme::controller::{Controller, ControllerOptions};
use loligo_nvme::namespace::Namespace;
use loligo_nvme::vfio::{self, PciAddress, VfioBus, VfioDevice};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{BlockDevice, Clock, Completions, DiskOp, Ticket, WriteCache, WriteList};
use loligo_reactor::os::OsClock;
use loligo_reactor::os::ring::Ring;
use std::process::{Command, Stdio};
use std::time::Duration;

const BLOCK: usize = BLOCK_SIZE as usize;
const NAMESPACE_1: u32 = 1;
/// Tells the process that is killed which controller to use.
const VICTIM: &str = "LOLIGO_VFIO_VICTIM";

fn addresses() -> Vec<PciAddress> {
    let list = std::env::var("VM_NVME").expect("this runs in a guest, which names its controllers");
    list.split_whitespace().map(|address| address.parse().expect("a PCI address")).collect()
}

fn open(address: PciAddress, interrupts: u16) -> Controller<VfioBus> {
    let options = ControllerOptions { queue_pairs: 4, ..ControllerOptions::default() };
    vfio::open(address, interrupts, options, &OsClock, &mut std::thread::yield_now)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Fails if the IOMMU has caught the device at memory that is not its own.
fn no_faults() {
    let log = Command::new("dmesg").output().expect("dmesg runs").stdout;
    let log = String::from_utf8_lossy(&log);
    let faults: Vec<_> = log.lines().filter(|line| line.contains("DMAR") && line.contains("fault")).collect();
    assert!(faults.is_empty(), "{faults:#?}");
}

fn spin<D>(_: &mut D) {
    std::thread::yield_now();
}

#[test]
#[ignore = "runs in the guest"]
fn conformance() {
    for address in addresses() {
        let controller = open(address, 2);
        let facts = controller.facts().clone();
        println!("{address}: {facts:?}");
        let health = controller.health(&OsClock, &mut std::thread::yield_now).expect("a health page");
        assert!(
            health.temperature_celsius().is_some_and(|degrees| (0..100).contains(&degrees)),
            "{health:?}"
        );
        controller.errors(4, &OsClock, &mut std::thread::yield_now).expect("an error log");
        for namespace in &facts.namespaces {
            polled(&controller, namespace.nsid);
            parked(&controller, namespace.nsid);
        }
        settle(&controller);
        side_by_side(&controller);
        controller.close(&OsClock, &mut std::thread::yield_now).expect("it is shut down in order");
    }
    no_faults();
}

/// Lets the controller forget the queues that were given back.
fn settle(controller: &Controller<VfioBus>) {
    let deadline = OsClock.now().after(Duration::from_millis(300));
    while OsClock.now() < deadline {
        controller.drive(&OsClock);
        std::thread::yield_now();
    }
}

fn polled(controller: &Controller<VfioBus>, nsid: u32) {
    let pool = BufferPool::new(64 << 20);
    let mut device = controller.queue(nsid, &pool, OsClock).expect("a queue");
    conformance::check(&mut device, &pool, &mut spin);
    let stats = device.stats();
    assert_eq!((stats.unknown, stats.aborts, stats.resets, stats.bounced), (0, 0, 0, 0), "{stats:?}");
}

/// Sleeps in the kernel until the interrupt comes.
fn parked(controller: &Controller<VfioBus>, nsid: u32) {
    let (ring, pool) = (Ring::new(64).expect("a ring"), BufferPool::new(64 << 20));
    let mut device = VfioDevice::new(controller, nsid, &ring, &pool).expect("a queue");
    assert!(device.can_park());
    let begun = OsClock.now();
    conformance::check(&mut device, &pool, &mut |_| ring.wait(None).expect("the ring waits"));
    let (waits, took) = (ring.stats().waits, OsClock.now().since(begun));
    assert!(waits > 10, "it slept {waits} times");
    // Woken by timers alone (each after 500 ms) it would take minutes.
    assert!(took.as_secs() < 60, "{took:?}");
}

/// Two threads with a queue each, on one namespace.
fn side_by_side(controller: &Controller<VfioBus>) {
    let threads: Vec<_> = (0..2u64)
        .map(|at| {
            let controller = controller.clone();
            std::thread::spawn(move || {
                let pool = BufferPool::new(64 << 20);
                let mut device = controller.queue(NAMESPACE_1, &pool, OsClock).expect("a queue");
                let base = at * 256;
                fill(&mut device, &pool, base, 256, at as u8 + 1);
                verify(&mut device, &pool, base, 256, at as u8 + 1);
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("the thread has not panicked");
    }
}

fn finish(device: &mut impl BlockDevice, done: &mut Completions) {
    while device.in_flight() > 0 {
        if device.poll(u32::MAX, done) == 0 {
            std::thread::yield_now();
        }
    }
    for end in &*done {
        assert_eq!(end.result, Ok(()), "{:?}", end.op);
    }
}

fn write_op(pool: &BufferPool, lba: u64, fill: u8) -> DiskOp {
    let mut data = WriteList::new();
    data.push(pool.copy_of(&[fill; BLOCK]).expect("a buffer"));
    DiskOp::Write { lba: Lba(lba), data, fua: true }
}

fn fill(device: &mut impl BlockDevice, pool: &BufferPool, base: u64, count: u64, fill: u8) {
    let mut done = Completions::new();
    for lba in base..base + count {
        while device.submit(write_op(pool, lba, fill), Ticket(lba)).is_err() {
            device.poll(u32::MAX, &mut done);
        }
    }
    finish(device, &mut done);
}

fn verify(device: &mut impl BlockDevice, pool: &BufferPool, base: u64, count: u64, fill: u8) {
    let mut done = Completions::new();
    for lba in base..base + count {
        let op = DiskOp::Read { lba: Lba(lba), buffer: pool.alloc_zeroed(BLOCK).expect("a buffer") };
        device.submit(op, Ticket(lba)).expect("room for a few");
        finish(device, &mut done);
        let Some(DiskOp::Read { buffer, .. }) = done.pop_front().map(|end| end.op) else { panic!("a read") };
        assert!(buffer.iter().all(|byte| *byte == fill), "block {lba} is {} and not {fill}", buffer[0]);
    }
}

#[test]
#[ignore = "runs in the guest"]
fn resets_and_deaths() {
    let addresses = addresses();
    let resets = std::env::var("LOLIGO_RESETS").map_or(100, |count| count.parse().expect("a number"));
    let controller = open(addresses[0], 0);
    assert_eq!(controller.facts().write_cache, WriteCache::Volatile);
    resets_under_load(&controller, resets);
    drop(controller);
    for round in 0..3 {
        death(addresses[1], round);
    }
    no_faults();
}

/// How long until a reset that was asked for has begun.
const RESET_MAX: Duration = Duration::from_secs(10);

/// 32 blocks are always in flight; each block's last value is known.
fn resets_under_load(controller: &Controller<VfioBus>, resets: u64) {
    let pool = BufferPool::new(64 << 20);
    let mut device: Namespace<_, _> = controller.queue(NAMESPACE_1, &pool, OsClock).expect("a queue");
    let mut done = Completions::new();
    for round in 0..resets {
        for lba in 0..32 {
            assert!(device.submit(write_op(&pool, lba, round as u8), Ticket(lba)).is_ok());
        }
        for _ in 0..round % 40 {
            device.poll(4, &mut done);
        }
        controller.reset(OsClock.now());
        // All writes may have ended before it begins, and asked for again it would still be the same one.
        let late = OsClock.now().after(RESET_MAX);
        while controller.resets() <= round {
            assert!(OsClock.now() < late, "reset {round} does not begin");
            device.poll(4, &mut done);
        }
        finish(&mut device, &mut done);
        done.clear();
        if round % 10 == 0 {
            verify(&mut device, &pool, 0, 32, round as u8);
        }
    }
    verify(&mut device, &pool, 0, 32, (resets - 1) as u8);
    assert_eq!(controller.resets(), resets);
    println!("{resets} resets, {:?}", device.stats());
}

/// A process that has the device is killed with writes in flight; the next one brings it up and finds what was
/// acknowledged.
fn death(address: PciAddress, round: u8) {
    let program = std::env::current_exe().expect("this program has a path");
    let mut victim = Command::new(program)
        .args(["--ignored", "--exact", "--nocapture", "inside::victim"])
        .env(VICTIM, format!("{address} {round}"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("a process");
    let mut out = std::io::BufReader::new(victim.stdout.take().expect("piped"));
    let mut line = String::new();
    while !line.starts_with("acknowledged") {
        line.clear();
        let read = std::io::BufRead::read_line(&mut out, &mut line).expect("its output");
        assert!(read > 0, "the victim has ended by itself");
    }
    victim.kill().expect("it is killed");
    victim.wait().expect("it is dead");
    let controller = open(address, 0);
    let pool = BufferPool::new(64 << 20);
    let mut device = controller.queue(NAMESPACE_1, &pool, OsClock).expect("a queue");
    verify(&mut device, &pool, 0, 64, 100 + round);
}

#[test]
#[ignore = "runs in the guest, to be killed"]
fn victim() {
    let job = std::env::var(VICTIM).expect("started by `death`");
    let (address, round) = job.split_once(' ').expect("an address and a number");
    let controller = open(address.parse().expect("an address"), 0);
    let pool = BufferPool::new(64 << 20);
    let mut device = controller.queue(NAMESPACE_1, &pool, OsClock).expect("a queue");
    fill(&mut device, &pool, 0, 64, 100 + round.parse::<u8>().expect("a number"));
    println!("acknowledged");
    let mut done = Completions::new();
    for lba in (64..512).cycle() {
        while device.submit(write_op(&pool, lba, 1), Ticket(lba)).is_err() {
            device.poll(u32::MAX, &mut done);
            done.clear();
        }
    }
}
