//! `cargo sim`: seeds of the simulated cluster, fresh ones for a time or one to be looked at.
#![allow(clippy::disallowed_methods, reason = "people wait for it in real time")]

#[cfg(feature = "planted")]
use anyhow::Context;
use anyhow::Result;
use clap::Parser;
use loligo_reactor::env::Entropy;
use loligo_reactor::os::OsEntropy;
use loligo_tests::sim::options::Overrides;
use loligo_tests::sim::run::{Order, Outcome, Stats, catch_panics, run};
use loligo_tests::sim::shrink::shrink;
use loligo_tests::sim::trace::Level;
use loligo_tests::sim::workload::name_of;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Runs of the shrinker at most, and its time.
const SHRINK_TRIES: u32 = 300;
const SHRINK_TIME: Duration = Duration::from_secs(60);
/// Lines of the trace that are printed of a failed run.
const LINES: usize = 60;

/// The whole cluster in one deterministic simulation.
#[derive(Debug, Parser)]
#[command(name = "cargo sim")]
struct Args {
    /// Replay this seed and print what happens.
    seed: Option<u64>,
    /// Only these faults of the seed's plan (their numbers, comma-separated; "none" for none).
    #[arg(long, value_name = "LIST")]
    only: Option<String>,
    /// What is printed of a replay.
    #[arg(long, value_enum, default_value = "faults")]
    trace: Level,
    /// How long to run fresh seeds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// First of the fresh seeds; drawn at random when not given.
    #[arg(long)]
    from: Option<u64>,
    /// How many seeds; without it as many as the time allows.
    #[arg(long)]
    seeds: Option<u64>,
    /// Seeds at once; all cores when not given.
    #[arg(long)]
    jobs: Option<usize>,
    /// Run each seed twice and compare the hashes of their traces.
    #[arg(long)]
    twice: bool,
    /// Stop after so many simulated hours.
    #[arg(long)]
    hours: Option<f64>,
    /// Go on after a failure, and count.
    #[arg(long)]
    keep_going: bool,
    /// Do not look for a smaller plan after a failure.
    #[arg(long)]
    no_shrink: bool,
    /// Requests per simulated second, all clients together.
    #[arg(long)]
    ops_per_second: Option<u64>,
    /// OSDs of each cluster.
    #[arg(long)]
    osds: Option<u32>,
    /// Shards of each OSD.
    #[arg(long)]
    shards: Option<u16>,
    /// Clients of each cluster.
    #[arg(long)]
    clients: Option<u32>,
    /// Damage beyond what the redundancy repairs: errors are allowed, wrong data is not.
    #[arg(long)]
    damage: bool,
    /// Plant bugs, one after the other, and see whether a check notices each.
    #[arg(long)]
    mutants: bool,
    /// Plant these bugs only (their names, comma-separated; "list" lists them).
    #[arg(long, value_name = "NAMES")]
    mutant: Option<String>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if args.mutants || args.mutant.is_some() {
        return mutants(&args);
    }
    catch_panics();
    let failed = match args.seed {
        Some(seed) => replay(&args, seed),
        None => explore(&args),
    };
    std::process::exit(i32::from(failed));
}

#[cfg(feature = "planted")]
fn mutants(args: &Args) -> Result<()> {
    use loligo_reactor::planted::Bug;
    use loligo_tests::sim::mutants::{Effort, SEEDS, hunt_all, print_list, print_table};
    let named = |name: &str| Bug::by_name(name).with_context(|| format!("no bug is {name}: --mutant list"));
    let bugs = match args.mutant.as_deref() {
        Some("list") => {
            print_list();
            return Ok(());
        }
        Some(names) => names.split(',').map(named).collect::<Result<_>>()?,
        None => Bug::ALL.to_vec(),
    };
    catch_panics();
    let jobs = args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let effort = Effort { from: args.from.unwrap_or(1), seeds: args.seeds.unwrap_or(SEEDS), jobs };
    let fates = hunt_all(&bugs, &effort)?;
    print_table(&fates);
    std::process::exit(i32::from(fates.iter().any(|fate| fate.killed_by.is_none())));
}

/// The bugs are in another build: it is made, and does the work.
#[cfg(not(feature = "planted"))]
fn mutants(_: &Args) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments =
        "run --quiet --locked --profile testing --package loligo-tests --features planted --bin sim --";
    let own = std::env::args_os().skip(1);
    let status = std::process::Command::new(cargo).args(arguments.split(' ')).args(own).status()?;
    std::process::exit(status.code().unwrap_or(1));
}

impl Args {
    fn order(&self, seed: u64) -> Order {
        let overrides = Overrides {
            osds: self.osds,
            clients: self.clients,
            shards: self.shards,
            ops_per_second: self.ops_per_second,
            damage: self.damage,
        };
        let only = self
            .only
            .as_ref()
            .map(|list| list.split(',').filter_map(|part| part.trim().parse().ok()).collect());
        Order { seed, overrides, only, level: Level::None, print: false }
    }
}

fn replay(args: &Args, seed: u64) -> bool {
    let order = Order { level: args.trace, print: args.trace > Level::None, ..args.order(seed) };
    let outcome = run(&order);
    println!("SEED={seed} hash {:016x}", outcome.hash);
    println!("{:#?}", outcome.options);
    for event in &outcome.plan.events {
        println!("  {event}");
    }
    let mut total = Total::default();
    total.add(&outcome);
    if let Some(failure) = &outcome.failure {
        println!("FAILED: {}", failure.what);
        print_register(failure);
    }
    if args.twice {
        let again = run(&order);
        println!(
            "hash again {:016x}: {}",
            again.hash,
            if again.hash == outcome.hash { "equal" } else { "DIFFERENT" }
        );
        if again.hash != outcome.hash {
            return true;
        }
    }
    total.print();
    outcome.failure.is_some()
}

fn print_register(failure: &loligo_tests::sim::workload::Failure) {
    if let Some((register, events)) = &failure.register {
        println!("{}:", name_of(*register));
        for event in events {
            println!("  {event}");
        }
    }
}

#[derive(Default)]
struct Total {
    seeds: u64,
    failed: u64,
    different: u64,
    stats: Stats,
}

impl Total {
    fn add(&mut self, outcome: &Outcome) {
        self.seeds += 1;
        self.failed += u64::from(outcome.failure.is_some());
        let (sum, new) = (&mut self.stats, &outcome.stats);
        sum.time += new.time;
        sum.work.done += new.work.done;
        sum.work.refused += new.work.refused;
        sum.work.abandoned += new.work.abandoned;
        sum.reads += new.reads;
        sum.acked += new.acked;
        sum.loosened += new.loosened;
        sum.admin += new.admin;
        for (kind, count) in &new.faults {
            *sum.faults.entry(*kind).or_default() += count;
        }
        for at in 0..3 {
            sum.frames[at] += new.frames[at];
            sum.disk[at] += new.disk[at];
        }
        for at in 0..2 {
            sum.polls[at] += new.polls[at];
        }
        sum.healed_in = sum.healed_in.max(new.healed_in);
    }

    fn print(&self) {
        let stats = &self.stats;
        let faults: Vec<_> = stats.faults.iter().map(|(kind, count)| format!("{kind:?} {count}")).collect();
        println!(
            "faults: {}; frames {} lost {} damaged {}; blocks lost {} torn {}; disk errors {}",
            faults.join(", "),
            stats.frames[0],
            stats.frames[1],
            stats.frames[2],
            stats.disk[0],
            stats.disk[1],
            stats.disk[2]
        );
        let seconds = stats.time as f64 / 1e9;
        let speed = seconds / cpu_seconds().max(1e-9);
        let Stats { work, reads, acked, loosened, .. } = stats;
        println!(
            "{} seeds, {} failed{}; {:.3} cluster-hours; {} requests checked ({:.0} per simulated second), {} refused, {} \
             abandoned; blocks: {reads} read, {acked} written, {loosened} times with too many zeroes to tell apart; {} \
             admin steps; healed in {:.1} s at most; {:.0} x real time per core (CPU time)",
            self.seeds,
            self.failed,
            if self.different > 0 {
                format!(", {} NOT THE SAME TWICE", self.different)
            } else {
                String::new()
            },
            seconds / 3600.0,
            work.done,
            work.done as f64 / seconds.max(1e-9),
            work.refused,
            work.abandoned,
            stats.admin,
            stats.healed_in as f64 / 1e9,
            speed
        );
    }
}

/// CPU time that this process has used: other work on the machine does not count.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let ticks: u64 = fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    ticks as f64 / 100.0
}

fn explore(args: &Args) -> bool {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = args.jobs.unwrap_or(cores).max(1);
    let first = args.from.unwrap_or_else(|| OsEntropy::new().next_u64() % 1_000_000_000 * 1000);
    let begin = Instant::now();
    let total = Arc::new(Mutex::new(Total::default()));
    let next = AtomicU64::new(first);
    let stop = AtomicBool::new(false);
    let end = args.seeds.map(|count| first + count);
    println!("seeds from {first} on");
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let late = end.is_none() && begin.elapsed() >= Duration::from_secs(args.seconds);
                    if late || end.is_some_and(|end| seed >= end) {
                        return;
                    }
                    one(args, seed, &total, &stop, begin);
                }
            });
        }
    });
    let total = total.lock().expect("no panic while it was held");
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
    total.print();
    total.failed + total.different > 0
}

fn one(args: &Args, seed: u64, total: &Mutex<Total>, stop: &AtomicBool, begin: Instant) {
    let order = args.order(seed);
    let outcome = run(&order);
    let different = args.twice && run(&order).hash != outcome.hash;
    let hours = {
        let mut total = total.lock().expect("no panic while it was held");
        total.add(&outcome);
        total.different += u64::from(different);
        let hours = total.stats.time as f64 / 3.6e12;
        if std::io::stderr().is_terminal() {
            let done = total.stats.work.done;
            eprint!(
                "\r\x1b[K{} seeds, {hours:.2} cluster-hours, {done} requests, {:.0} s",
                total.seeds,
                begin.elapsed().as_secs_f64()
            );
            let _ = std::io::stderr().flush();
        }
        hours
    };
    if args.hours.is_some_and(|most| hours >= most) {
        stop.store(true, Ordering::Relaxed);
    }
    if different {
        println!("SEED={seed} is not the same twice");
        stop.fetch_or(!args.keep_going, Ordering::Relaxed);
    }
    if outcome.failure.is_none() {
        return;
    }
    if args.keep_going {
        let failure = outcome.failure.as_ref().expect("just seen");
        println!("SEED={seed} at {:.3} s: {}", outcome.at as f64 / 1e9, failure.what);
        return;
    }
    if !stop.swap(true, Ordering::Relaxed) {
        tell(args, &order, &outcome);
    }
}

/// What is known of a failed seed.
fn tell(args: &Args, order: &Order, outcome: &Outcome) {
    let seed = order.seed;
    println!("\nSEED={seed}\n{:#?}", outcome.options);
    let (numbers, smallest) = if args.no_shrink {
        (outcome.plan.numbers(), outcome.clone())
    } else {
        println!("looking for a smaller plan than {} faults ...", outcome.plan.events.len());
        let begin = Instant::now();
        shrink(order, outcome, SHRINK_TRIES, || begin.elapsed() < SHRINK_TIME)
    };
    let list: Vec<_> = numbers.iter().map(u32::to_string).collect();
    let list = if list.is_empty() { "none".into() } else { list.join(",") };
    let told = run(&Order { only: Some(numbers), level: Level::Ops, ..order.clone() });
    for line in told.lines.iter().rev().take(LINES).rev() {
        println!("{line}");
    }
    println!("\nwith these faults:");
    for event in &smallest.plan.events {
        println!("  {event}");
    }
    let (first, small) = (outcome.failure.as_ref(), smallest.failure.as_ref());
    if let (Some(first), Some(small)) = (first, small) {
        println!("FAILED: {}", small.what);
        print_register(small);
        if first.what != small.what {
            println!("(with all faults: {})", first.what);
        }
    }
    let overrides = &order.overrides;
    println!("replay: cargo sim {seed} --only {list}{overrides}   (all faults: cargo sim {seed}{overrides})");
}
