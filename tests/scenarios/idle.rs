//! An idle cluster costs nearly nothing.

use anyhow::Result;
use loligo_tests::nbd::Command;
use loligo_tests::process::{Cluster, ClusterOptions};
use loligo_tests::workload::Writer;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

#[test]
fn an_idle_cluster_parks_and_stays_small() -> Result<()> {
    parks_and_stays_small(ClusterOptions::default())
}

/// "Two reactors, idle after load": nothing that was under way between them keeps one awake.
#[test]
fn idle_osds_with_two_reactors_park() -> Result<()> {
    parks_and_stays_small(ClusterOptions { shards: 2, ..ClusterOptions::default() })
}

fn parks_and_stays_small(options: ClusterOptions) -> Result<()> {
    let mut cluster = Cluster::start(options)?;
    let image = cluster.make_image("16M")?;
    let mut server = cluster.serve_nbd(&[&image])?;
    let mut connection = Writer::connect(&server.socket, &image)?;
    let mut writer = Writer::new(21, 1024);
    writer.write_until(&mut connection, Instant::now() + Duration::from_millis(500))?;
    // In the middle of writes that nobody waits for any more.
    for cookie in 0..8 {
        connection.send(Command::Write, cookie, cookie << 20, 4096, &[7; 4096])?;
    }
    server.daemon.kill()?;
    cluster.wait_until_clean(Duration::from_secs(10))?;
    std::thread::sleep(Duration::from_secs(2));
    let begin = usages(&mut cluster)?;
    let window = Duration::from_secs(10);
    std::thread::sleep(window);
    let end = usages(&mut cluster)?;
    let used: Duration = begin.iter().zip(&end).map(|(a, b)| b.1 - a.1).sum();
    let share = used.as_secs_f64() / window.as_secs_f64();
    assert!(share <= 0.02, "mon and three OSDs used {:.1} % of a core while idle", share * 100.0);
    let largest = end.iter().map(|(rss, _)| *rss).max().unwrap_or(0);
    assert!(largest <= 64 * MIB, "a daemon holds {} MiB while idle", largest / MIB);
    Ok(())
}

fn usages(cluster: &mut Cluster) -> Result<Vec<(u64, Duration)>> {
    cluster.daemons().map(|daemon| daemon.usage()).collect()
}
