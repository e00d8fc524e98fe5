//! SIGKILL cycles under a checking writer: `kill-cycles --cycles 200`.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the seed of a run started by hand comes from the clock"
)]

use anyhow::Result;
use clap::Parser;
use loligo_tests::cycles::{CycleOptions, Summary, run};
use std::time::UNIX_EPOCH;

/// Kills random processes of real clusters under a checking writer and reads everything back, twice, after each.
/// Half of the cycles run on devices whose cache is lost with the process.
#[derive(Parser)]
struct Arguments {
    /// How many cycles in all.
    #[arg(long, default_value_t = 200)]
    cycles: u32,
    /// Draws everything; printed at the start.
    #[arg(long)]
    seed: Option<u64>,
    /// Shards of each OSD, with a reactor each.
    #[arg(long, default_value_t = 1)]
    shards: u16,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let clock = std::time::SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let seed = arguments.seed.unwrap_or(clock);
    println!("SEED={seed}");
    let half = arguments.cycles / 2;
    for (volatile_cache, cycles) in [(false, half), (true, arguments.cycles - half)] {
        let what = if volatile_cache { "power cuts" } else { "kills" };
        let options =
            CycleOptions { seed, cycles, volatile_cache, shards: arguments.shards, cores: Vec::new() };
        let summary = run(&options, |cycle, victim| {
            println!("{what} {:>3}/{cycles}: {victim:?}", cycle + 1);
        })?;
        let Summary { cycles, acked, open, recovery_max } = summary;
        println!(
            "{what}: {cycles} cycles, {acked} block writes acked and checked, {open} without an answer found old or new, slowest recovery {recovery_max:.1?}"
        );
    }
    Ok(())
}
