//! The mutation gate: every planted bug is run until a check notices it.
//!
//! A failure counts only when the same seed passes without the bug. What the simulated cluster does not show, since it
//! takes damage below a durable mark or a peer that breaks the protocol, the unit tests of the packages are run for,
//! with the bug in their environment.

use super::options::Overrides;
use super::run::{Order, run};
use loligo_reactor::planted::{Bug, VARIABLE, choose};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Seeds for one bug, when it is not said how many.
pub const SEEDS: u64 = 60;
/// Characters of a failure that the table has room for.
const WHAT_MAX: usize = 96;
/// Packages whose unit tests see bugs.
const SUITES: [&str; 4] = ["loligo-osd", "loligo-net", "loligo-client", "loligo-mon"];

/// How hard to try.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// The first seed.
    pub from: u64,
    /// Seeds for one bug at most.
    pub seeds: u64,
    /// Bugs at once.
    pub jobs: usize,
}

/// What became of one bug.
#[derive(Clone, Debug)]
pub struct Fate {
    /// Which.
    pub bug: Bug,
    /// The check that noticed it; `None`: it survives.
    pub killed_by: Option<String>,
    /// Seeds run with it.
    pub seeds: u64,
    /// Simulated time with it, in nanoseconds.
    pub time: u64,
    /// Seeds on which the program failed without any bug.
    pub unclear: Vec<u64>,
}

/// Every fourth seed has damage beyond what the redundancy repairs: there errors are allowed, and wrong data is not. Every
/// second one has four clients, who meet.
fn order(seed: u64) -> Order {
    let clients = seed.is_multiple_of(2).then_some(4);
    let overrides = Overrides { damage: seed.is_multiple_of(4), clients, ..Overrides::default() };
    Order { seed, overrides, ..Order::default() }
}

/// Runs seeds with the bug until a check notices it.
pub fn hunt(bug: Bug, from: u64, seeds: u64) -> Fate {
    let mut fate = Fate { bug, killed_by: None, seeds: 0, time: 0, unclear: Vec::new() };
    for seed in from..from + seeds {
        choose(Some(bug));
        let outcome = run(&order(seed));
        choose(None);
        fate.seeds += 1;
        fate.time += outcome.stats.time.max(outcome.at);
        let Some(failure) = outcome.failure else { continue };
        if run(&order(seed)).failure.is_some() {
            fate.unclear.push(seed);
            continue;
        }
        fate.killed_by = Some(format!("seed {seed}: {}", failure.what));
        break;
    }
    fate
}

/// Hunts several bugs at once and prints what becomes of each. Returns those that survive.
pub fn hunt_all(bugs: &[Bug], effort: &Effort) -> Vec<Bug> {
    println!("{:<28} {:>5} {:>9}  killed by", "bug", "seeds", "simulated");
    let next = AtomicUsize::new(0);
    let survivors = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..effort.jobs.max(1) {
            scope.spawn(|| {
                while let Some(bug) = bugs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut fate = hunt(*bug, effort.from, effort.seeds);
                    fate.killed_by = fate.killed_by.or_else(|| suite(*bug));
                    if fate.killed_by.is_none() {
                        survivors.lock().expect("no panic while it was held").push(*bug);
                    }
                    print(&fate);
                }
            });
        }
    });
    survivors.into_inner().expect("no panic while it was held")
}

/// Names and descriptions.
pub fn print_list() {
    for bug in Bug::ALL {
        println!("{:<28} {}", format!("{bug:?}"), bug.description());
    }
}

fn print(fate: &Fate) {
    let Fate { bug, killed_by, seeds, time, unclear } = fate;
    let what = killed_by.as_deref().unwrap_or("NOTHING").lines().next().unwrap_or_default();
    let what: String = what.chars().take(WHAT_MAX).collect();
    println!("{:<28} {seeds:>5} {:>7.0} s  {what}", format!("{bug:?}"), *time as f64 / 1e9);
    if !unclear.is_empty() {
        println!("{:<28} without it too: seeds {unclear:?}", "");
    }
}

/// Runs the unit tests of the packages with the bug: the first test that fails.
fn suite(bug: Bug) -> Option<String> {
    SUITES.iter().find_map(|package| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let arguments = "test --quiet --profile testing --lib --features planted --package";
        let mut command = Command::new(cargo);
        command.args(arguments.split(' ')).arg(package).env(VARIABLE, format!("{bug:?}"));
        let output = command.output().expect("cargo can be run");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let failed = text.lines().find_map(|line| line.strip_prefix("---- ")?.strip_suffix(" stdout ----"));
        failed.map(|test| format!("unit test of {package}: {test}"))
    })
}
