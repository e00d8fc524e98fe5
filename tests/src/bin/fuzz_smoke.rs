//! The fuzz targets without libFuzzer: kept inputs, seeds, and a few seconds of mutations of both.
#![allow(clippy::disallowed_methods, reason = "a program of its own: it reads files and the time")]

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use loligo_tests::fuzz::{TARGETS, Target, mutate::mutate};
use loligo_tests::random::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Runs every fuzz target on its kept inputs and on mutations of them.
#[derive(Parser)]
struct Args {
    /// Only these targets.
    targets: Vec<String>,
    /// Seconds of mutations for each target.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Draws the mutations; 0 draws one and prints it.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The folder with a folder of inputs for each target.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus"))]
    corpus: PathBuf,
    /// Runs one input of one target and nothing else.
    #[arg(long)]
    input: Option<PathBuf>,
    /// Writes the seeds as inputs into this folder, for libFuzzer, and ends.
    #[arg(long)]
    write_seeds: Option<PathBuf>,
}

/// Address space that inputs may add to a target's run: its pools and tables, and nothing that an input claims.
const MEMORY_MAX: u64 = 768 << 20;
/// How often the address space is looked at.
const INPUTS_PER_LOOK: u64 = 32;

fn main() -> Result<()> {
    let args = Args::parse();
    let known = |name: &String| TARGETS.iter().any(|target| target.name == name);
    if let Some(name) = args.targets.iter().find(|name| !known(name)) {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        bail!("there is no target {name}; there are {}", names.join(", "));
    }
    let chosen =
        |target: &&Target| args.targets.is_empty() || args.targets.iter().any(|name| name == target.name);
    let seed = if args.seed == 0 { std::process::id().into() } else { args.seed };
    if args.write_seeds.is_none() {
        println!("SEED={seed}");
    }
    for target in TARGETS.iter().filter(chosen) {
        if let Some(folder) = &args.write_seeds {
            write_seeds(target, &folder.join(target.name))?;
        } else if let Some(path) = &args.input {
            (target.run)(&std::fs::read(path).with_context(|| path.display().to_string())?);
        } else {
            smoke(target, &args, seed)?;
        }
    }
    Ok(())
}

fn write_seeds(target: &Target, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    for (number, seed) in (target.seeds)().iter().enumerate() {
        std::fs::write(folder.join(format!("seed-{number:03}")), seed)?;
    }
    Ok(())
}

/// Kept inputs in the order of their names, then the seeds.
fn inputs(target: &Target, corpus: &Path) -> Result<Vec<Vec<u8>>> {
    let mut inputs = (target.seeds)();
    let folder = corpus.join(target.name);
    let mut paths = Vec::new();
    if folder.is_dir() {
        for entry in std::fs::read_dir(&folder)? {
            paths.push(entry?.path());
        }
    }
    paths.sort();
    for path in paths {
        inputs.push(std::fs::read(&path).with_context(|| path.display().to_string())?);
    }
    Ok(inputs)
}

fn smoke(target: &Target, args: &Args, seed: u64) -> Result<()> {
    let inputs = inputs(target, &args.corpus)?;
    ensure!(!inputs.is_empty(), "{}: no inputs to begin with", target.name);
    let begin = Instant::now();
    let mut memory = None;
    let mut recent = Vec::new();
    let mut runs = 0;
    let mut slowest = Duration::ZERO;
    let mut random = Random::new(seed);
    loop {
        let made;
        let input = match inputs.get(runs as usize) {
            Some(input) => input,
            None if begin.elapsed().as_secs_f64() >= args.seconds => break,
            None => {
                let pick = |random: &mut Random| random.below(inputs.len() as u64) as usize;
                let (one, other) = (pick(&mut random), pick(&mut random));
                made = mutate(target, &inputs[one], &inputs[other], &mut random);
                &made
            }
        };
        let start = Instant::now();
        if catch_unwind(AssertUnwindSafe(|| (target.run)(input))).is_err() {
            let path = keep(target, "crash", input)?;
            bail!(
                "{} found something (seed {seed}, input {runs}): repeat with `cargo fuzz-smoke {} --input {}`",
                target.name,
                target.name,
                path.display()
            );
        }
        slowest = slowest.max(start.elapsed());
        runs += 1;
        recent.push(input.clone());
        if runs % INPUTS_PER_LOOK == 0 || runs == inputs.len() as u64 {
            look_at_memory(target, &mut memory, &recent)?;
            recent.clear();
        }
    }
    let (seconds, millis) = (begin.elapsed().as_secs_f64(), slowest.as_millis());
    println!(
        "{:16} {} kept inputs, {runs} runs in {seconds:.1} s, slowest {millis} ms",
        target.name,
        inputs.len()
    );
    Ok(())
}

fn keep(target: &Target, what: &str, input: &[u8]) -> Result<PathBuf> {
    let sum = loligo_net::wire::checksum::crc32c(input);
    let path = std::env::temp_dir().join(format!("{}-{what}-{sum:08x}", target.name));
    std::fs::write(&path, input)?;
    Ok(path)
}

/// The highest address space so far may exceed that of the first look by so much.
fn look_at_memory(target: &Target, first: &mut Option<u64>, recent: &[Vec<u8>]) -> Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmPeak:")).context("no VmPeak")?;
    let kib: u64 = line.split_whitespace().nth(1).context("no number in VmPeak")?.parse()?;
    let (peak, first) = (kib << 10, first.get_or_insert(kib << 10));
    if peak - *first <= MEMORY_MAX {
        return Ok(());
    }
    let paths = recent.iter().map(|input| Ok(keep(target, "memory", input)?.display().to_string()));
    let paths = paths.collect::<Result<Vec<_>>>()?;
    bail!("{}: one of these inputs took {} MiB: {}", target.name, (peak - *first) >> 20, paths.join(" "));
}
