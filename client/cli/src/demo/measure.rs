//! What a durable write and a read take, beside the machine's floor.

use super::Stage;
use crate::bench::latency;
use crate::bench::target::Shape;
use crate::cluster::Connection;
use crate::output::{Align, Failure, Outcome, Table};
use loligo_bench::floor::disk::{Disk, Place};
use loligo_bench::floor::network::{self, Exchange};
use loligo_bench::floor::{FloorError, Waiting};
use loligo_bench::load::{IoType, Latency, Pattern};
use loligo_client::ImageHandle;
use loligo_reactor::env::WriteCache;
use serde_json::{Value, json};
use std::time::Duration;

/// Copies of the demo's pool, and writers of the floor.
const COPIES: usize = 3;

/// What was measured.
pub struct Measured {
    /// A table, and what its figures stand for.
    pub text: String,
    /// The same for programs; times in microseconds.
    pub value: Value,
}

/// Measures.
///
/// # Errors
/// When a request fails.
pub fn run(stage: &Stage, cluster: &mut Connection, image: ImageHandle) -> Outcome<Measured> {
    let time = Duration::from_secs(stage.options().seconds);
    let floor_time = time.div_f64(2.0);
    let failed = |error: FloorError| Failure::new(format!("the floor cannot be measured: {error}"), "");
    // The image's blocks first: an overwrite is what a database does.
    let mut load = |shape: Shape, time| {
        let report = shape.run(cluster, image, super::IMAGE_LEN, time, &mut |_| {});
        report.map_err(|error| Failure::new(error.to_string(), ""))
    };
    load(Shape { io: IoType::Write, pattern: Pattern::Sequential, io_len: 1 << 20, depth: 8 }, None)?;
    let qd1 = |io| Shape { io, pattern: Pattern::Random, io_len: 4096, depth: 1 };
    let writes = load(qd1(IoType::Write), Some(time))?;
    stage.step("durable writes measured");
    let reads = load(qd1(IoType::Read), Some(time))?;
    stage.step("reads measured");
    let mut writers = Disk::prepare(Place::Folder(stage.path()), COPIES).map_err(failed)?;
    let disk = writers.durable_writes(COPIES, Waiting::Spinning, floor_time).map_err(failed)?;
    let cache = writers.geometry().expect("there are writers").write_cache;
    drop(writers);
    let round_trips = |waiting| network::round_trips(Exchange::WRITE, waiting, floor_time).map_err(failed);
    let spinning = round_trips(Waiting::Spinning)?;
    let sleeping = round_trips(Waiting::Parked)?;
    stage.step("the machine's floor measured");
    let titles = [("4 KiB AT QUEUE DEPTH 1", Align::Left), ("COPIES AT ACK", Align::Right)];
    let mut table = Table::new(&[&titles[..], &latency::COLUMNS].concat());
    let copies = writes.copies_min.unwrap_or(0).to_string();
    row(&mut table, "durable write", &copies, &Latency::of(&writes.writes));
    row(&mut table, "read", "-", &Latency::of(&reads.reads));
    row(
        &mut table,
        &format!("floor: {COPIES} durable writes at once on this file system"),
        "-",
        &Latency::of(&disk),
    );
    row(&mut table, "floor: loopback TCP round trip, spinning", "-", &Latency::of(&spinning));
    row(&mut table, "floor: loopback TCP round trip, sleeping", "-", &Latency::of(&sleeping));
    let value = json!({
        "io_size": 4096,
        "queue_depth": 1,
        "poll_mode": stage.options().poll.as_str(),
        "copies_at_ack": writes.copies_min,
        "durable_write": Latency::of(&writes.writes),
        "read": Latency::of(&reads.reads),
        "floor": {
            "durable_writes_at_once": COPIES,
            "durable_write": Latency::of(&disk),
            "round_trip_spinning": Latency::of(&spinning),
            "round_trip_sleeping": Latency::of(&sleeping),
        },
    });
    Ok(Measured { text: format!("\n{table}\n{}\n\n", conditions(stage, &copies, cache)), value })
}

fn conditions(stage: &Stage, copies: &str, cache: WriteCache) -> String {
    let flush = match cache {
        WriteCache::Volatile => "every write is forced through the device's volatile cache (FUA)",
        WriteCache::None => "the device has no volatile cache, so none is flushed",
    };
    format!(
        "A write is acknowledged when {copies} copies are durable; {flush}.\n\
         A write takes two round trips and one device write at least: client, primary, replicas and back.\n\
         Poll mode {}; client, mon and three OSD processes share {} cores.",
        stage.options().poll.as_str(),
        loligo_reactor::os::cpu::allowed_cores().map_or(0, |cores| cores.len()),
    )
}

fn row(table: &mut Table, what: &str, copies: &str, latency: &Latency) {
    let mut cells = vec![what.to_owned(), copies.to_owned()];
    cells.extend(latency::cells(latency, |figure| format!("{figure:.0}")));
    table.row(cells);
}
