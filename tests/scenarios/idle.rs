//! An idle cluster costs nearly nothing.

use anyhow::Result;
use loligo_tests::process::{Cluster, ClusterOptions};
use std::time::Duration;

const MIB: u64 = 1 << 20;

#[test]
fn an_idle_cluster_parks_and_stays_small() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::default())?;
    cluster.make_image("64M")?;
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
