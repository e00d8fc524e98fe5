//! One durable 4 KiB write at a time on a fully written file: what the ways to wait for it cost.
//!
//! `cargo bench -p loligo-nvme --bench qd1 -- [folder] [writes]`. The folder must be on a file system with O_DIRECT;
//! default: that of the program. Prints per way the median and p99 of one write, the median of the best turn, and the CPU
//! time of the thread. The ways take turns of 50 writes, so that a slow moment of the machine hits all; on a
//! machine with other work the best turn comes closest to a quiet one.
#![allow(clippy::disallowed_methods, reason = "a measurement of the real world")]

use loligo_config::file::PollMode;
use loligo_config::units::Lba;
use loligo_nvme::uring::{UringDevice, UringOptions};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{BlockDevice, Clock, Completions, DiskOp, Instant, Ticket, WriteList};
use loligo_reactor::os::ring::{Ring, RingFlags};
use loligo_reactor::os::{OsClock, Reactor, ReactorSettings, thread_cpu_time};
use loligo_reactor::poller::{Activity, Poller, Turn};
use std::path::{Path, PathBuf};
use std::time::Duration;

const BLOCKS: u64 = 16 << 10;
const TURN_WRITES: u64 = 50;

#[derive(Clone, Copy)]
enum Way {
    /// Look at the ring without a pause.
    Spin,
    /// Yield after every look.
    SpinYield,
    /// The reactor's rule.
    Reactor(PollMode),
}

struct Case {
    name: &'static str,
    flags: RingFlags,
    way: Way,
    registered: bool,
    write: bool,
}

/// Writes one block after the other, each when the last is durable.
struct Writer {
    device: UringDevice,
    pool: BufferPool,
    write: bool,
    left: u64,
    sequence: u64,
    begun: Option<Instant>,
    done: Completions,
    times: Vec<u64>,
}

impl Poller for Writer {
    fn name(&self) -> &'static str {
        "writer"
    }

    fn poll(&mut self, now: Instant) -> Activity {
        if let Some(begun) = self.begun {
            if self.device.poll(1, &mut self.done) == 0 {
                return Activity::Idle;
            }
            self.times.push(OsClock.now().since(begun).as_nanos() as u64);
            let end = self.done.pop_front().expect("one was delivered");
            end.result.expect("the device works");
            self.begun = None;
        }
        if self.left == 0 {
            return Activity::Busy;
        }
        self.left -= 1;
        self.sequence += 1;
        let lba = Lba(self.sequence * 7919 % BLOCKS);
        let mut buffer = self.pool.alloc(4096).expect("the pool is large enough");
        let op = if self.write {
            // A different value each time.
            buffer[..8].copy_from_slice(&self.sequence.to_le_bytes());
            let mut data = WriteList::new();
            data.push(buffer.freeze());
            DiskOp::Write { lba, data, fua: true }
        } else {
            DiskOp::Read { lba, buffer }
        };
        self.device.submit(op, Ticket(0)).expect("one at a time");
        self.begun = Some(now);
        Activity::Busy
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn expecting(&self) -> bool {
        self.begun.is_some()
    }
}

fn run(case: &Case, path: &Path, writes: u64) -> (Vec<u64>, Duration) {
    let ring = Ring::with_flags(64, case.flags).expect("the kernel knows these flags");
    let pool = BufferPool::new(16 << 20);
    // Buffers of a pool that the device does not know are not registered.
    let known = if case.registered { pool.clone() } else { BufferPool::new(1) };
    let device =
        UringDevice::open(path, &ring, &known, UringOptions::default()).expect("the file is a device");
    let mut writer = Writer {
        device,
        pool,
        write: case.write,
        left: writes,
        sequence: u64::from(std::process::id()),
        begun: None,
        done: Completions::new(),
        times: Vec::with_capacity(writes as usize),
    };
    let mode = if let Way::Reactor(mode) = case.way { mode } else { PollMode::Park };
    let settings = ReactorSettings { core: None, mode, name: case.name.to_owned() };
    let mut reactor = Reactor::new(settings, ring.clone()).expect("a reactor without a core");
    let cpu = thread_cpu_time();
    while writer.left > 0 || writer.begun.is_some() {
        match case.way {
            Way::Reactor(_) => reactor.turn(&mut [&mut writer]),
            Way::Spin => drop(writer.poll(OsClock.now())),
            Way::SpinYield => {
                if writer.poll(OsClock.now()) == Activity::Idle {
                    std::thread::yield_now();
                }
            }
        }
    }
    (writer.times, thread_cpu_time() - cpu)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let program = std::env::current_exe().expect("the program has a path");
    let folder = words.first().map_or_else(|| program.with_file_name(""), PathBuf::from);
    let writes: u64 = words.get(1).map_or(2000, |word| word.parse().expect("a number of writes"));
    let file = tempfile::NamedTempFile::new_in(folder).expect("the folder takes a file");
    std::fs::write(file.path(), vec![0xa5; (BLOCKS * 4096) as usize]).expect("the file can be written");
    file.as_file().sync_all().expect("the file can be made durable");

    use RingFlags::{Cooperative, Deferred, Plain};
    let case = |name, flags, way, registered, write| Case { name, flags, way, registered, write };
    let adaptive = Way::Reactor(PollMode::Adaptive);
    let parked = Way::Reactor(PollMode::Park);
    let cases = [
        case("write, deferred, spin", Deferred, Way::Spin, true, true),
        case("write, deferred, spin and yield", Deferred, Way::SpinYield, true, true),
        case("write, deferred, reactor adaptive", Deferred, adaptive, true, true),
        case("write, deferred, reactor adaptive, unregistered", Deferred, adaptive, false, true),
        case("write, deferred, reactor parked", Deferred, parked, true, true),
        case("write, cooperative, spin", Cooperative, Way::Spin, true, true),
        case("write, cooperative, spin and yield", Cooperative, Way::SpinYield, true, true),
        case("write, cooperative, reactor parked", Cooperative, parked, true, true),
        case("write, plain, spin", Plain, Way::Spin, true, true),
        case("write, plain, spin and yield", Plain, Way::SpinYield, true, true),
        case("write, plain, reactor parked", Plain, parked, true, true),
        case("read, deferred, spin", Deferred, Way::Spin, true, false),
        case("read, deferred, reactor adaptive", Deferred, adaptive, true, false),
        case("read, deferred, reactor adaptive, unregistered", Deferred, adaptive, false, false),
        case("read, deferred, reactor parked", Deferred, parked, true, false),
        case("read, cooperative, spin", Cooperative, Way::Spin, true, false),
        case("read, plain, spin", Plain, Way::Spin, true, false),
    ];
    let mut results: Vec<(Vec<u64>, Duration)> = cases.iter().map(|_| Default::default()).collect();
    let mut best: Vec<u64> = cases.iter().map(|_| u64::MAX).collect();
    for _ in 0..writes.div_ceil(TURN_WRITES) {
        for ((case, result), best) in cases.iter().zip(&mut results).zip(&mut best) {
            let (mut times, cpu) = run(case, file.path(), TURN_WRITES);
            times.sort_unstable();
            *best = (*best).min(times[times.len() / 2]);
            result.0.extend(times);
            result.1 += cpu;
        }
    }
    println!("{:<52} {:>9} {:>9} {:>9} {:>9}", "", "p50 us", "p99 us", "best p50", "CPU us");
    for ((case, (times, cpu)), best) in cases.iter().zip(&mut results).zip(best) {
        times.sort_unstable();
        let micros = |quantile: f64| times[(times.len() as f64 * quantile) as usize] as f64 / 1000.0;
        let cpu = cpu.as_secs_f64() * 1e6 / times.len() as f64;
        let best = best as f64 / 1000.0;
        println!("{:<52} {:>9.1} {:>9.1} {best:>9.1} {cpu:>9.1}", case.name, micros(0.5), micros(0.99));
    }
}
