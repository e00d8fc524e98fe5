//! The legs that acknowledgements carry are parts of what the client has waited.

use anyhow::{Context, Result, ensure};
use loligo_tests::process::{Cluster, ClusterOptions};

/// How far the sum of the stages may be from the latency.
const TOLERANCE: f64 = 0.05;

#[test]
fn the_stages_of_a_write_add_up_to_its_latency() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::default())?;
    cluster.make_image("16M")?;
    let bench = ["rbd", "bench", "pool/image", "--io-type", "write", "--io-threads", "1", "--io-total", "2M"];
    let report = cluster.json(&bench)?;
    let of = |group: &str, name: &str| {
        report[group][name].as_f64().with_context(|| format!("{group}.{name} is a number in {report}"))
    };
    let leg = |name: &str| of("write_legs", name);
    let total = of("write_latency", "mean_us")?;
    let sum = leg("client_us")? + leg("network_us")? + leg("primary_us")?;
    ensure!((sum - total).abs() <= total * TOLERANCE, "{sum} of {total} us are accounted for: {report}");
    for name in ["client_us", "network_us", "primary_submit_us", "primary_device_us", "replica_device_us"] {
        ensure!(leg(name)? > 0.0, "{name} takes time: {report}");
    }
    let within = |part: f64, whole: f64| part <= whole * (1.0 + TOLERANCE);
    let (round_trip, replica) = (leg("replica_round_trip_us")?, leg("replica_us")?);
    ensure!(
        within(leg("primary_submit_us")? + round_trip, leg("primary_us")?),
        "within the primary: {report}"
    );
    ensure!(within(replica, round_trip), "within the replica's leg: {report}");
    ensure!(within(leg("replica_device_us")?, replica), "within the replica's time: {report}");
    cluster.check()
}
