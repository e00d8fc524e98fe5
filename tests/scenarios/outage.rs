//! Parts of the cluster are away for a while.

use anyhow::{Context, Result, ensure};
use loligo_tests::nbd::Command;
use loligo_tests::process::{Cluster, ClusterOptions, wait_for};
use loligo_tests::workload::Writer;
use std::time::{Duration, Instant};

/// "R=3, one member away": writes wait, no error reaches the user, and all goes on when it is back.
#[test]
fn a_missing_member_stops_the_pg_until_it_is_back() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::default())?;
    let image = cluster.make_image("16M")?;
    let server = cluster.serve_nbd(&[&image])?;
    let mut connection = Writer::connect(&server.socket, &image)?;
    connection.write(0, &[1; 4096])?;
    cluster.kill_osd(1)?;
    wait_for("health to say so", Duration::from_secs(10), || {
        let status = cluster.json(&["status"])?;
        Ok(status["osdmap"]["num_up_osds"].as_u64() == Some(2))
    })?;
    connection.send(Command::Write, 7, 0, 4096, &[2; 4096])?;
    std::thread::sleep(Duration::from_secs(1));
    cluster.start_osd(1)?;
    let reply = connection.receive()?;
    ensure!(reply.cookie == 7 && reply.error == 0, "the write must succeed in the end: {reply:?}");
    ensure!(connection.read(0, 4096)? == [2; 4096], "and be read");
    cluster.check()
}

/// "The mon is away": I/O goes on.
#[test]
fn io_goes_on_without_the_mon() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::default())?;
    let image = cluster.make_image("16M")?;
    let server = cluster.serve_nbd(&[&image])?;
    let mut connection = Writer::connect(&server.socket, &image)?;
    connection.write(0, &[1; 4096])?;
    cluster.kill_mon()?;
    let begin = Instant::now();
    let mut writer = Writer::new(5, 4096);
    writer.write_until(&mut connection, begin + Duration::from_secs(3))?;
    let (acked, open) = (writer.history.acked(), writer.history.open());
    ensure!(acked > 100 && open == 0, "{acked} block writes acked, {open} without an answer");
    writer.verify(&mut connection)?;
    cluster.start_mon()?;
    let status = cluster.json(&["status"]).context("the mon answers again")?;
    ensure!(status["osdmap"]["num_up_osds"].as_u64() == Some(3), "nobody was marked down: {status}");
    cluster.check()
}
