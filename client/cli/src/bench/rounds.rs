//! `loligo bench qd1` and `loligo bench profile`: tests in rounds, one after the other, kept and held against what was
//! kept before.

use super::processes::OsdProcesses;
use super::target::{Shape, Target};
use crate::args::{Global, RoundsArgs};
use crate::cluster::{self, ImageSpec};
use crate::output::{self, Align, Failure, Outcome, Progress, Table};
use hdrhistogram::Histogram;
use loligo_bench::compare::{self, Verdict};
use loligo_bench::load::{self, IoType, Latency, LoadReport, Pattern};
use loligo_bench::recording::{Compared, Recording, Round, Test, VERSION};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A test: its name and what it does.
type Named = (&'static str, Shape);

const fn shape(io: IoType, pattern: Pattern, io_len: u64, depth: u32) -> Shape {
    Shape { io, pattern, io_len, depth }
}

/// What a database's commit and its reads wait for.
pub const QD1: [Named; 2] = [
    ("4k_qd1_write", shape(IoType::Write, Pattern::Random, 4096, 1)),
    ("4k_qd1_read", shape(IoType::Read, Pattern::Random, 4096, 1)),
];

/// The tests that storage systems are usually compared by.
pub const PROFILE: [Named; 5] = [
    ("4k_qd32_read", shape(IoType::Read, Pattern::Random, 4096, 32)),
    ("4k_qd32_write", shape(IoType::Write, Pattern::Random, 4096, 32)),
    ("4k_qd1_write", shape(IoType::Write, Pattern::Random, 4096, 1)),
    ("1m_qd8_read", shape(IoType::Read, Pattern::Sequential, 1 << 20, 8)),
    ("1m_qd8_write", shape(IoType::Write, Pattern::Sequential, 1 << 20, 8)),
];

/// Measures.
///
/// # Errors
/// When the image is not to be overwritten, a request fails, or a recording cannot be read or written.
pub fn run(global: &Global, args: &RoundsArgs, tests: &[Named]) -> Outcome {
    let spec = ImageSpec::parse(&args.image, None)?;
    let folder = folder(global, args)?;
    // Before the measurement, which takes minutes.
    let old = args.against.as_deref().map(|name| read(&folder, name)).transpose()?;
    let mut target = Target::open(global, &spec, args.poll, args.overwrite)?;
    target.fill()?;
    let osds = OsdProcesses::beside(global)?;
    let osd_poll = cluster::host_file(global)?.map_or("unknown", |host| host.reactor.poll.as_str());
    let measured = measure(&mut target, args, tests, &osds)?;
    target.close();
    let recording = recording(args, measured, &osds, osd_poll);
    if let Some(name) = &args.record {
        write(&folder, name, &recording)?;
    }
    let compared = old.as_ref().map(|old| recording.against(old)).transpose().map_err(|error| {
        Failure::new(
            format!("the recording cannot be compared: {error}"),
            "measure both under the same conditions",
        )
    })?;
    output::show(global.format, &as_json(&recording, compared.as_deref()), |_| {
        plain(&recording, args, compared.as_deref())
    });
    Ok(())
}

/// What all rounds measured.
struct Measured {
    tests: BTreeMap<String, Test>,
    copies: Option<u8>,
}

fn measure(
    target: &mut Target,
    args: &RoundsArgs,
    tests: &[Named],
    osds: &OsdProcesses,
) -> Outcome<Measured> {
    let mut progress = Progress::new("measuring", false);
    let (mut done, total) = (0, u64::from(args.rounds) * tests.len() as u64);
    let mut measured = Measured { tests: BTreeMap::new(), copies: None };
    let mut latencies: BTreeMap<&str, Histogram<u64>> = BTreeMap::new();
    for _ in 0..args.rounds {
        for (name, shape) in tests {
            progress.set(done, total);
            done += 1;
            if args.ramp > 0 {
                target.load(*shape, Duration::from_secs(args.ramp))?;
            }
            let before = osds.cpu();
            let report = target.load(*shape, Duration::from_secs(args.seconds))?;
            let cpu = before.zip(osds.cpu()).map(|(before, after)| after.saturating_sub(before));
            measured.copies = [measured.copies, report.copies_min].into_iter().flatten().min();
            let both = latencies.entry(name).or_insert_with(load::histogram);
            for times in [&report.reads, &report.writes] {
                both.add(times).expect("both have the bounds of `load::histogram`");
            }
            measured.tests.entry((*name).to_owned()).or_default().rounds.push(round(name, &report, cpu)?);
        }
    }
    for (name, times) in latencies {
        measured.tests.entry(name.to_owned()).or_default().set_latencies(&times);
    }
    Ok(measured)
}

fn round(name: &str, report: &LoadReport, cpu: Option<Duration>) -> Outcome<Round> {
    if report.ops == 0 {
        return Err(Failure::new(format!("no request of {name} ended"), "measure longer (--seconds)"));
    }
    let times = if report.writes.is_empty() { &report.reads } else { &report.writes };
    let Latency { p50_us, p99_us, p99_9_us, .. } = Latency::of(times);
    let ops = report.ops as f64;
    Ok(Round {
        p50_us,
        p99_us,
        p99_9_us,
        iops: ops / report.elapsed.as_secs_f64(),
        cpu_us_per_op: cpu.map(|cpu| cpu.as_secs_f64() * 1e6 / ops),
    })
}

fn recording(args: &RoundsArgs, measured: Measured, osds: &OsdProcesses, osd_poll: &str) -> Recording {
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpu = text("/proc/cpuinfo");
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cores = loligo_reactor::os::cpu::allowed_cores().map_or(0, |cores| cores.len());
    let map = |pairs: &[(&str, String)]| {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect::<BTreeMap<_, _>>()
    };
    Recording {
        version: VERSION,
        name: args.record.clone().unwrap_or_default(),
        conditions: map(&[
            ("client_poll_mode", args.poll.as_str().to_owned()),
            ("host_file_poll_mode", osd_poll.to_owned()),
            ("copies_at_ack", measured.copies.map_or_else(|| "-".to_owned(), |copies| copies.to_string())),
            ("seconds", args.seconds.to_string()),
            ("engine", "lib".to_owned()),
        ]),
        host: map(&[
            ("name", crate::daemon::host_name()),
            ("cpu", model.map_or("unknown", |(_, name)| name).to_owned()),
            ("cores", cores.to_string()),
            ("kernel", text("/proc/sys/kernel/osrelease").trim().to_owned()),
            ("osd_processes_known", osds.len().to_string()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ]),
        tests: measured.tests,
    }
}

fn folder(global: &Global, args: &RoundsArgs) -> Outcome<PathBuf> {
    match &args.recordings {
        Some(folder) => Ok(folder.clone()),
        None => {
            let conf = cluster::host_file_path(global);
            let beside = conf.as_deref().and_then(Path::parent).map(|folder| folder.join("recordings"));
            if beside.is_none() && (args.record.is_some() || args.against.is_some()) {
                return Err(Failure::usage(
                    "there is no host file to keep recordings beside",
                    "name their folder with --recordings DIR",
                ));
            }
            Ok(beside.unwrap_or_default())
        }
    }
}

fn file(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.json"))
}

fn read(folder: &Path, name: &str) -> Outcome<Recording> {
    let path = file(folder, name);
    let advice = "name one with --against, and its folder with --recordings";
    let failed = |error: &dyn std::fmt::Display| {
        Failure::new(format!("cannot read the recording {}: {error}", path.display()), advice)
    };
    let text = std::fs::read_to_string(&path).map_err(|error| failed(&error))?;
    Recording::parse(&text).map_err(|error| failed(&error))
}

fn write(folder: &Path, name: &str, recording: &Recording) -> Outcome {
    let path = file(folder, name);
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, recording.to_json()));
    written.map_err(|error| {
        Failure::new(
            format!("cannot write the recording {}: {error}", path.display()),
            "name another folder with --recordings",
        )
    })
}

fn plain(recording: &Recording, args: &RoundsArgs, compared: Option<&[Compared]>) -> String {
    let right = |name| (name, Align::Right);
    let mut table = Table::new(&[
        ("TEST", Align::Left),
        right("P50 us"),
        right("P99 us"),
        right("P99.9 us"),
        right("IOPS"),
        right("OSD CPU us/op"),
    ]);
    for (name, test) in &recording.tests {
        let middle = |figure: fn(&Round) -> f64| {
            compare::median(&test.rounds.iter().map(figure).collect::<Vec<_>>()).unwrap_or_default()
        };
        let cpu: Option<Vec<f64>> = test.rounds.iter().map(|round| round.cpu_us_per_op).collect();
        let cpu = cpu.and_then(|cpu| compare::median(&cpu));
        let mut cells = vec![name.clone()];
        let times: [fn(&Round) -> f64; 3] =
            [|round| round.p50_us, |round| round.p99_us, |round| round.p99_9_us];
        cells.extend(times.map(|figure| format!("{:.1}", middle(figure))));
        cells.push(format!("{:.0}", middle(|round| round.iops)));
        cells.push(cpu.map_or_else(|| "-".to_owned(), |cpu| format!("{cpu:.1}")));
        table.row(cells);
    }
    let facts = |map: &BTreeMap<String, String>| {
        map.iter()
            .map(|(key, value)| format!("{} {value}", key.replace('_', " ")))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut text = format!(
        "{table}\nMedians over {} rounds of each round's figure; an acknowledged write is durable in all its copies.\n\
         Conditions: {}.\nHost: {}.\n",
        args.rounds,
        facts(&recording.conditions),
        facts(&recording.host)
    );
    if let Some(compared) = compared {
        text += &format!("\n{}", plain_compared(args, compared));
    }
    text
}

fn plain_compared(args: &RoundsArgs, compared: &[Compared]) -> String {
    let right = |name| (name, Align::Right);
    let against = format!("AGAINST {}", args.against.as_deref().unwrap_or_default());
    let mut table = Table::new(&[
        (&against, Align::Left),
        ("FIGURE", Align::Left),
        right("OLD"),
        right("NEW"),
        right("RATIO"),
        right("INTERVAL"),
        ("VERDICT", Align::Left),
    ]);
    for one in compared {
        let verdict = match one.comparison.verdict {
            Verdict::Better => "better",
            Verdict::Same => "same",
            Verdict::Worse => "worse",
        };
        let compare::Comparison { ratio, ratio_low, ratio_high, .. } = one.comparison;
        table.row(vec![
            one.test.clone(),
            one.figure.to_owned(),
            format!("{:.1}", one.old),
            format!("{:.1}", one.new),
            format!("{ratio:.3}"),
            format!("{ratio_low:.3} to {ratio_high:.3}"),
            verdict.to_owned(),
        ]);
    }
    table.to_string()
}

fn as_json(recording: &Recording, compared: Option<&[Compared]>) -> Value {
    json!({ "recording": recording, "against": compared })
}
