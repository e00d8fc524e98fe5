//! The mutation gate: every planted bug is run until a check notices it.
//!
//! A failure counts only when the same seed passes without the bug. What the simulated cluster does not show, since it
//! takes damage below a durable mark or a peer that breaks the protocol, has a unit test that does: see `suites`.
#![allow(clippy::disallowed_methods, reason = "people wait for it in real time")]

mod suites;

use super::options::Overrides;
use super::run::{Order, run};
use anyhow::Result;
use loligo_reactor::planted::{Bug, choose};
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use suites::{Suites, test_of};

/// Seeds for one bug, when it is not said how many.
pub const SEEDS: u64 = 60;
/// Characters of a failure that the table has room for.
const WHAT_MAX: usize = 96;
/// Columns of the longest name.
const NAME_WIDTH: usize = 28;

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
    /// The check or the test that noticed it; `None`: it survives.
    pub killed_by: Option<String>,
    /// Seeds run with it; none when a test is there for it.
    pub seeds: u64,
    /// Real time that it took.
    pub took: Duration,
    /// What must be looked at besides: failures without any bug.
    pub notes: Vec<String>,
}

impl Fate {
    fn new(bug: Bug) -> Self {
        Self { bug, killed_by: None, seeds: 0, took: Duration::ZERO, notes: Vec::new() }
    }

    /// A line of the table, with a line for each note.
    fn row(&self) -> String {
        let what = self.killed_by.as_deref().unwrap_or("NOTHING").lines().next().unwrap_or_default();
        let what: String = what.chars().take(WHAT_MAX).collect();
        let seeds = if self.seeds > 0 { self.seeds.to_string() } else { "-".into() };
        let name = format!("{:?}", self.bug);
        let mut row = format!("{name:<NAME_WIDTH$} {seeds:>5} {:>7.1}  {what}", self.took.as_secs_f64());
        for note in &self.notes {
            let _ = write!(row, "\n{:<NAME_WIDTH$} {note}", "");
        }
        row
    }
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
    let mut fate = Fate::new(bug);
    for seed in from..from + seeds {
        choose(Some(bug));
        let outcome = run(&order(seed));
        choose(None);
        fate.seeds += 1;
        let Some(failure) = outcome.failure else { continue };
        if run(&order(seed)).failure.is_some() {
            fate.notes.push(format!("seed {seed} fails without it too"));
            continue;
        }
        fate.killed_by = Some(format!("seed {seed}: {}", failure.what));
        break;
    }
    fate
}

/// Hunts several bugs at once: by its unit test where it has one, else on seeds. Tells of each on standard error as soon
/// as it is known, and returns all fates in the order of the bugs.
///
/// # Errors
/// When the unit tests cannot be built.
pub fn hunt_all(bugs: &[Bug], effort: &Effort) -> Result<Vec<Fate>> {
    let suites = Suites::build(bugs)?;
    let next = AtomicUsize::new(0);
    let fates = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..effort.jobs.max(1) {
            scope.spawn(|| {
                while let Some(bug) = bugs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let begin = Instant::now();
                    let mut fate = match test_of(*bug) {
                        Some(test) => suites.hunt(*bug, &test),
                        None => hunt(*bug, effort.from, effort.seeds),
                    };
                    fate.took = begin.elapsed();
                    let mut fates = fates.lock().expect("no panic while it was held");
                    fates.push(fate.clone());
                    eprintln!("{:>2}/{} {}", fates.len(), bugs.len(), fate.row());
                }
            });
        }
    });
    let mut fates = fates.into_inner().expect("no panic while it was held");
    fates.sort_by_key(|fate| bugs.iter().position(|bug| *bug == fate.bug));
    Ok(fates)
}

/// The table, and a last line with the sum.
pub fn print_table(fates: &[Fate]) {
    println!("{:<NAME_WIDTH$} {:>5} {:>7}  killed by", "bug", "seeds", "seconds");
    for fate in fates {
        println!("{}", fate.row());
    }
    let killed = fates.iter().filter(|fate| fate.killed_by.is_some()).count();
    println!("{killed} of {} bugs killed", fates.len());
}

/// Names and descriptions.
pub fn print_list() {
    for bug in Bug::ALL {
        println!("{:<NAME_WIDTH$} {}", format!("{bug:?}"), bug.description());
    }
}
