//! `loligo bench floor`: what the machine needs, and what an image's writes take above it.

use super::latency;
use super::target::{Shape, Target};
use crate::args::{FloorArgs, Global};
use crate::cluster::ImageSpec;
use crate::output::{self, Align, Failure, Outcome, Progress, Table};
use hdrhistogram::Histogram;
use loligo_bench::floor::disk::{Disk, Place};
use loligo_bench::floor::network::{self, Exchange};
use loligo_bench::floor::{FloorError, Waiting, wake};
use loligo_bench::gap::{Gaps, Ideal};
use loligo_bench::load::{IoType, Latency, Pattern};
use loligo_config::file::PollMode;
use loligo_config::units::BLOCK_SIZE;
use loligo_reactor::env::{Geometry, WriteCache};
use serde_json::{Value, json};
use std::time::Duration;

/// One line of the floor.
struct Figure {
    /// For programs.
    key: String,
    /// For people.
    what: String,
    latency: Latency,
}

/// Everything that was measured of the machine.
struct Floor {
    figures: Vec<Figure>,
    geometry: Option<Geometry>,
}

impl Floor {
    /// The median of a figure, in microseconds.
    fn median(&self, key: &str) -> f64 {
        let figure = self.figures.iter().find(|figure| figure.key == key);
        figure.map_or(0.0, |figure| figure.latency.p50_us)
    }

    fn add(&mut self, key: impl Into<String>, what: impl Into<String>, times: &Histogram<u64>) {
        self.figures.push(Figure { key: key.into(), what: what.into(), latency: Latency::of(times) });
    }
}

/// Measures.
///
/// # Errors
/// When something cannot be measured, or a device or an image holds data that nobody gave up.
pub fn run(global: &Global, args: &FloorArgs) -> Outcome {
    let place = place(args)?;
    let spec = args.image.as_deref().map(|image| ImageSpec::parse(image, None)).transpose()?;
    // First, since it may be refused.
    let target = spec.map(|spec| Target::open(global, &spec, args.poll, args.overwrite)).transpose()?;
    let time = Duration::from_secs(args.seconds);
    let floor = measure(place, args, time)
        .map_err(|error| Failure::new(format!("the floor cannot be measured: {error}"), ""))?;
    let gaps = target.map(|target| hold_against(target, &floor, args.poll, time)).transpose()?;
    output::show(global.format, &as_json(args, &floor, gaps.as_ref()), |_| {
        plain(args, &floor, gaps.as_ref())
    });
    Ok(())
}

fn place(args: &FloorArgs) -> Outcome<Place<'_>> {
    let about = std::fs::metadata(&args.place).map_err(|error| {
        Failure::new(
            format!("{}: {error}", args.place.display()),
            "name a folder on the file system to measure, or a device",
        )
    })?;
    match about.is_dir() {
        true => Ok(Place::Folder(&args.place)),
        false if args.overwrite => Ok(Place::Device(&args.place)),
        false => Err(Failure::new(
            format!("measuring {} overwrites what it holds", args.place.display()),
            "name a folder, or add --overwrite if its data is not needed any more",
        )),
    }
}

fn measure(place: Place<'_>, args: &FloorArgs, time: Duration) -> Result<Floor, FloorError> {
    let copies = usize::from(args.copies);
    let mut progress = Progress::new("measuring this machine", false);
    let total = 4 + 2 + 4 + 4;
    let mut step = 0..=total;
    let mut next = || progress.set(step.next().unwrap_or(total), total);
    next();
    let mut disk = Disk::prepare(place, copies)?;
    let mut floor = Floor { figures: Vec::new(), geometry: disk.geometry().cloned() };
    for waiting in Waiting::ALL {
        let way = waiting.as_str();
        next();
        floor.add(
            format!("write_{way}"),
            format!("durable write, {way}"),
            &disk.durable_writes(1, waiting, time)?,
        );
        next();
        floor.add(
            format!("writes_at_once_{way}"),
            format!("{copies} durable writes at once, {way}"),
            &disk.durable_writes(copies, waiting, time)?,
        );
    }
    next();
    floor.add("flush", "flush behind a cached write, parked", &disk.flushes(Waiting::Parked, time)?);
    drop(disk);
    for (name, words, exchange) in
        [("64", "64 B there and back", Exchange::SHORT), ("4k", "4 KiB there, 128 B back", Exchange::WRITE)]
    {
        for waiting in Waiting::ALL {
            next();
            let way = waiting.as_str();
            floor.add(
                format!("round_trip_{name}_{way}"),
                format!("round trip, loopback TCP, {words}, {way}"),
                &network::round_trips(exchange, waiting, time)?,
            );
        }
    }
    let short = time.min(Duration::from_secs(1)); // Many thousand samples all the same.
    floor.add("clock", "reading the clock", &wake::clock_reads(short));
    floor.add("yield", "yielding the core", &wake::yields(short));
    floor.add("wake", "waking a parked thread", &wake::wakes(short));
    let overshoot = format!("timer of {} us, late by", wake::SLEEP.as_micros());
    floor.add("timer", overshoot, &wake::timer_overshoots(short));
    Ok(floor)
}

/// The writes of an image at queue depth 1, right behind the floor.
fn hold_against(mut target: Target, floor: &Floor, poll: PollMode, time: Duration) -> Outcome<Compared> {
    target.fill()?;
    let qd1 = Shape { io: IoType::Write, pattern: Pattern::Random, io_len: u64::from(BLOCK_SIZE), depth: 1 };
    let report = target.load(qd1, time)?;
    target.close();
    let (Some(copies), Some(legs)) = (report.copies_min, report.legs.median()) else {
        return Err(Failure::new(
            format!("no write of the image ended within {} s", time.as_secs()),
            "measure longer (--seconds), and see `loligo status`",
        ));
    };
    let waiting = match poll {
        PollMode::Busy | PollMode::Adaptive => Waiting::Spinning,
        PollMode::Park => Waiting::Parked,
    };
    let ideal = Ideal {
        round_trip_us: floor.median(&format!("round_trip_4k_{}", waiting.as_str())),
        device_us: floor.median(&format!("writes_at_once_{}", waiting.as_str())),
    };
    let latency = Latency::of(&report.writes);
    let gaps = Gaps::of(ideal, latency.p50_us, copies, &legs);
    Ok(Compared { copies, waiting, ideal, latency, gaps })
}

struct Compared {
    copies: u8,
    waiting: Waiting,
    ideal: Ideal,
    latency: Latency,
    gaps: Gaps,
}

impl Compared {
    /// The largest gap, in words.
    fn verdict(&self) -> String {
        match self.gaps.largest() {
            None => "Largest gap: none, every part is at its floor.".to_owned(),
            Some(part) => format!(
                "Largest gap: {}, {:.1} us above its floor of {:.1} us.",
                part.what, part.gap_us, part.ideal_us
            ),
        }
    }

    fn plain(&self) -> String {
        let mut table = Table::new(&[
            (&format!("{}-COPY 4 KiB WRITE, MEDIANS", self.copies), Align::Left),
            ("ACTUAL us", Align::Right),
            ("IDEAL us", Align::Right),
            ("GAP us", Align::Right),
        ]);
        let mut row = |what: &str, figures: [f64; 3]| {
            let mut cells = vec![what.to_owned()];
            cells.extend(figures.map(|figure| format!("{figure:.1}")));
            table.row(cells);
        };
        for part in &self.gaps.parts {
            row(part.what, [part.actual_us, part.ideal_us, part.gap_us]);
        }
        let Gaps { hops, ideal_us, actual_us, residual_us, residual_per_hop_us, .. } = self.gaps;
        row("the whole write", [actual_us, ideal_us, residual_us]);
        format!(
            "{table}\nIdeal: {hops} hops x {:.1} us / 2 + {:.1} us device = {ideal_us:.1} us ({}).\n\
             Software residual: {residual_us:.1} us, {residual_per_hop_us:.1} us per hop.\n{}\n",
            self.ideal.round_trip_us,
            self.ideal.device_us,
            self.waiting.as_str(),
            self.verdict()
        )
    }
}

fn flush_mode(geometry: &Geometry) -> &'static str {
    match geometry.write_cache {
        WriteCache::Volatile => "volatile cache (or unknown): every write is forced through it (FUA)",
        WriteCache::None => "no volatile cache: nothing is flushed",
    }
}

fn plain(args: &FloorArgs, floor: &Floor, compared: Option<&Compared>) -> String {
    let mut table = Table::new(&[&[("FLOOR", Align::Left)][..], &latency::COLUMNS].concat());
    for Figure { what, latency, .. } in &floor.figures {
        let mut cells = vec![what.clone()];
        cells.extend(latency::cells(latency, precise));
        table.row(cells);
    }
    let mut text = format!("{table}\n4 KiB writes in {}", args.place.display());
    if let Some(geometry) = &floor.geometry {
        text += &format!("; {}", flush_mode(geometry));
    }
    text += ".\n";
    if let Some(compared) = compared {
        text += &format!("\n{}", compared.plain());
    }
    text
}

/// Three digits or so, whatever the size.
fn precise(us: f64) -> String {
    match us {
        ..10.0 => format!("{us:.2}"),
        ..100.0 => format!("{us:.1}"),
        _ => format!("{us:.0}"),
    }
}

fn as_json(args: &FloorArgs, floor: &Floor, compared: Option<&Compared>) -> Value {
    let figures: serde_json::Map<String, Value> =
        floor.figures.iter().map(|figure| (figure.key.clone(), json!(figure.latency))).collect();
    json!({
        "place": args.place.display().to_string(),
        "writers": args.copies,
        "io_size": BLOCK_SIZE,
        "flush": floor.geometry.as_ref().map(flush_mode),
        "floor": figures,
        "write": compared.map(|compared| json!({
            "copies_at_ack": compared.copies,
            "poll_mode": args.poll.as_str(),
            "latency": compared.latency,
            "against": compared.gaps,
            "largest_gap": compared.gaps.largest().map(|part| part.what),
            "verdict": compared.verdict(),
        })),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_as_many_digits_as_mean_something() {
        assert_eq!([0.0251, 9.04, 42.31, 189.4].map(precise), ["0.03", "9.04", "42.3", "189"]);
    }
}
