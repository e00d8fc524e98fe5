//! `loligo rbd bench`: the lines of `rbd bench`, with latencies and what an acknowledgement stood for.

use crate::args::{BenchArgs, BenchPattern, BenchType, Global};
use crate::cluster::{self, ImageSpec};
use crate::output::{self, Failure, Format, Outcome, bytes};
use loligo_bench::legs::MeanLegs;
use loligo_bench::load::{self, IoType, Latency, LoadReport, LoadSettings, Pattern, Tick};
use loligo_reactor::env::Entropy;
use loligo_reactor::os::OsEntropy;
use serde_json::{Value, json};

/// Measures one image.
///
/// # Errors
/// When the cluster cannot be reached, or a request fails.
pub fn run(global: &Global, args: &BenchArgs) -> Outcome {
    let spec = ImageSpec::from_args(&args.image)?;
    let host = cluster::host_file(global)?;
    let target = cluster::target(global, host.as_ref())?;
    let mut cluster = cluster::connect_with(target, global.timeout, None, args.poll)?;
    let image = cluster.open(&spec.pool, &spec.image)?;
    let settings = LoadSettings {
        io: match args.io_type {
            BenchType::Read => IoType::Read,
            BenchType::Write => IoType::Write,
            BenchType::Readwrite => IoType::Mixed { read_percent: args.rw_mix_read },
        },
        pattern: match args.io_pattern {
            BenchPattern::Rand => Pattern::Random,
            BenchPattern::Seq => Pattern::Sequential,
        },
        io_len: args.io_size,
        depth: args.io_threads,
        bytes_max: Some(args.io_total),
        time_max: None,
        seed: OsEntropy::new().next_u64(),
    };
    let plain = global.format == Format::Plain;
    if plain {
        output::text(&heading(args));
    }
    let report = load::run(&mut cluster, image, settings, &mut |tick| {
        if plain {
            output::line(&tick_line(tick));
        }
    });
    let report = report.map_err(|error| Failure::new(error.to_string(), ""))?;
    cluster.close(image);
    let value = as_json(args, &report);
    output::show(global.format, &value, |_| summary(args, &report));
    Ok(())
}

fn words(args: &BenchArgs) -> (&'static str, &'static str) {
    let kind = match args.io_type {
        BenchType::Read => "read",
        BenchType::Write => "write",
        BenchType::Readwrite => "readwrite",
    };
    let pattern = match args.io_pattern {
        BenchPattern::Rand => "random",
        BenchPattern::Seq => "sequential",
    };
    (kind, pattern)
}

fn heading(args: &BenchArgs) -> String {
    let (kind, pattern) = words(args);
    format!(
        "bench  type {kind} io_size {} io_threads {} bytes {} pattern {pattern}\n  SEC       OPS   OPS/SEC   BYTES/SEC\n",
        args.io_size, args.io_threads, args.io_total
    )
}

fn per_second(amount: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { amount as f64 / seconds } else { 0.0 }
}

fn tick_line(tick: Tick) -> String {
    let seconds = tick.elapsed.as_secs_f64();
    format!(
        "{:>5} {:>9} {:>9.2} {:>9}/s",
        tick.elapsed.as_secs(),
        tick.ops,
        per_second(tick.ops, seconds),
        bytes(per_second(tick.bytes, seconds) as u64)
    )
}

fn latency_line(kind: &str, latency: &Latency) -> String {
    format!(
        "{kind} latency (us): mean {:.1}  p50 {:.1}  p99 {:.1}  p99.9 {:.1}  max {:.1}\n",
        latency.mean_us, latency.p50_us, latency.p99_us, latency.p99_9_us, latency.max_us
    )
}

/// One after the other, and in parentheses what happens within.
fn legs_line(legs: &MeanLegs) -> String {
    format!(
        "write legs (mean us): client {:.1} + network {:.1} + primary {:.1} (submit {:.1}, its device {:.1}, replicas {:.1} of \
         which remote {:.1} with its device {:.1})\n",
        legs.client_us,
        legs.network_us,
        legs.primary_us,
        legs.primary_submit_us,
        legs.primary_device_us,
        legs.replica_round_trip_us,
        legs.replica_us,
        legs.replica_device_us
    )
}

fn summary(args: &BenchArgs, report: &LoadReport) -> String {
    let seconds = report.elapsed.as_secs_f64();
    let mut text = format!(
        "elapsed: {seconds:.1}   ops: {}   ops/sec: {:.2}   bytes/sec: {}/s\n",
        report.ops,
        per_second(report.ops, seconds),
        bytes(per_second(report.bytes, seconds) as u64)
    );
    for (kind, latencies) in [("read", &report.reads), ("write", &report.writes)] {
        if !latencies.is_empty() {
            text += &latency_line(kind, &Latency::of(latencies));
        }
    }
    if let Some(copies) = report.copies_min {
        text += &format!("copies durable at each acknowledged write: {copies}\n");
    }
    if let Some(legs) = report.legs.mean() {
        text += &legs_line(&legs);
    }
    text + &format!(
        "queue depth {}, client poll mode {}, {} resends\n",
        args.io_threads,
        args.poll.as_str(),
        report.resends
    )
}

fn as_json(args: &BenchArgs, report: &LoadReport) -> Value {
    let (kind, pattern) = words(args);
    let seconds = report.elapsed.as_secs_f64();
    let latency =
        |latencies: &hdrhistogram::Histogram<u64>| (!latencies.is_empty()).then(|| Latency::of(latencies));
    json!({
        "type": kind,
        "pattern": pattern,
        "io_size": args.io_size,
        "io_threads": args.io_threads,
        "poll_mode": args.poll.as_str(),
        "elapsed_sec": seconds,
        "ops": report.ops,
        "bytes": report.bytes,
        "ops_per_sec": per_second(report.ops, seconds),
        "bytes_per_sec": per_second(report.bytes, seconds),
        "read_latency": latency(&report.reads),
        "write_latency": latency(&report.writes),
        "copies_at_ack": report.copies_min,
        "write_legs": report.legs.mean(),
        "resends": report.resends,
    })
}
