//! A thin image costs what is in it, however large it is.

use anyhow::{Context, Result, ensure};
use loligo_tests::process::{Cluster, ClusterOptions};
use loligo_tests::workload::Writer;
use std::time::{Duration, Instant};

/// 64 TiB are 16 million objects. Asking for each of them would take hours.
const PATIENCE: Duration = Duration::from_secs(10);

#[test]
fn sixty_four_tebibytes_with_ten_objects_are_counted_and_removed_at_once() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::default())?;
    cluster.make_image("16M")?;
    cluster.run(&["rbd", "create", "pool/thin", "--size", "64T"])?;
    let server = cluster.serve_nbd(&["pool/thin"])?;
    let mut connection = Writer::connect(&server.socket, "pool/thin")?;
    for at in 0..10 {
        connection.write(at * (6 << 40), &[7; 4096])?;
    }
    drop(connection);
    drop(server);
    let begun = Instant::now();
    let usage = cluster.json(&["rbd", "du", "pool/thin"])?;
    let counted = begun.elapsed();
    ensure!(usage["images"][0]["used_size"] == 40 << 10, "ten blocks are in use: {usage}");
    cluster.run(&["rbd", "resize", "pool/thin", "--size", "12T", "--allow-shrink"])?;
    let shrunk = begun.elapsed();
    let usage = cluster.json(&["rbd", "du", "pool/thin"])?;
    ensure!(usage["images"][0]["used_size"] == 8 << 10, "two blocks are below 12 TiB: {usage}");
    cluster.run(&["rbd", "rm", "pool/thin"])?;
    let removed = begun.elapsed();
    eprintln!("du {counted:?}, resize {:?}, du and rm {:?}", shrunk - counted, removed - shrunk);
    ensure!(removed < PATIENCE, "it took {removed:?}");
    let data = || -> Result<u64> {
        let status = cluster.json(&["status"])?;
        status["pgmap"]["data_bytes"].as_u64().context("a number of bytes")
    };
    // The directory and the other image's header are left.
    loligo_tests::process::wait_for("the space to be free", Duration::from_secs(20), || Ok(data()? <= 8192))?;
    cluster.check()
}
