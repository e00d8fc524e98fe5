//! Kill, restart, check, again: SIGKILL to random processes under the checking writer.

use crate::process::{Cluster, ClusterOptions, NbdServer};
use crate::random::Random;
use crate::workload::{Writer, Written};
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

/// How long the mon may take to hear from all PGs when everything can be read: reports come once in a second.
const CLEAN_MAX: Duration = Duration::from_secs(15);

/// Who is killed in one cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Victim {
    /// One OSD.
    Osd(usize),
    /// All OSDs at once.
    AllOsds,
    /// The mon.
    Mon,
    /// The NBD server with the client in it, the mon and all OSDs: writes without an answer stay behind.
    Everything,
}

/// One run of many cycles.
#[derive(Clone, Debug)]
pub struct CycleOptions {
    /// Draws everything.
    pub seed: u64,
    /// How many.
    pub cycles: u32,
    /// OSDs on the volatile-cache model: each SIGKILL is a power cut.
    pub volatile_cache: bool,
    /// Shards of each OSD, with a reactor each.
    pub shards: u16,
    /// Cores that the reactors are pinned to, if any.
    pub cores: Vec<u16>,
}

impl Default for CycleOptions {
    fn default() -> Self {
        Self { seed: 1, cycles: 12, volatile_cache: false, shards: 1, cores: Vec::new() }
    }
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Cycles done.
    pub cycles: u32,
    /// Block writes acknowledged and checked.
    pub acked: u64,
    /// Writes of blocks that had no answer at a kill: each block was found old or new, and stayed so.
    pub open: u64,
    /// The longest time from a restart until everything could be read.
    pub recovery_max: Duration,
}

struct Run {
    cluster: Cluster,
    server: NbdServer,
    image: String,
    writer: Writer,
    random: Random,
    summary: Summary,
}

/// Runs the cycles; `progress` is called after each with its number and victim.
///
/// # Errors
/// The first violation, with the seed that led to it.
pub fn run(options: &CycleOptions, mut progress: impl FnMut(u32, Victim)) -> Result<Summary> {
    let cluster_options = ClusterOptions {
        volatile_cache: options.volatile_cache,
        shards: options.shards,
        cores: options.cores.clone(),
        ..ClusterOptions::default()
    };
    let cluster = Cluster::start(cluster_options)?;
    let image = cluster.make_image("16M")?;
    let server = cluster.serve_nbd(&[&image])?;
    let writer = Writer::new(options.seed, (16 << 20) / 4096);
    let random = Random::new(options.seed ^ 0x6b69_6c6c);
    let mut run = Run { cluster, server, image, writer, random, summary: Summary::default() };
    for cycle in 0..options.cycles {
        let victim = run.draw_victim();
        let story = || format!("SEED={} cycle {cycle}, victim {victim:?}, {options:?}", options.seed);
        if let Err(error) = run.cycle(victim) {
            let kept = run.cluster.folder().with_extension("failed");
            // The evidence is worth more than a tidy disk.
            let _ = std::fs::rename(run.cluster.folder(), &kept);
            return Err(error.context(format!("{}; logs and devices kept in {}", story(), kept.display())));
        }
        progress(cycle, victim);
    }
    run.summary.cycles = options.cycles;
    run.summary.acked = run.writer.history.acked();
    Ok(run.summary)
}

impl Run {
    fn draw_victim(&mut self) -> Victim {
        match self.random.below(8) {
            0..=2 => Victim::Osd(self.random.below(self.cluster.osd_count() as u64) as usize),
            3 | 4 => Victim::AllOsds,
            5 => Victim::Mon,
            _ => Victim::Everything,
        }
    }

    /// Writes, kills in the middle, restarts, and reads everything twice.
    fn cycle(&mut self, victim: Victim) -> Result<()> {
        let before = Duration::from_millis(50 + self.random.below(300));
        let down = Duration::from_millis(self.random.below(300));
        let mut connection = Writer::connect(&self.server.socket, &self.image)?;
        let writer = &mut self.writer;
        let cluster = &mut self.cluster;
        let server = &mut self.server;
        let written = std::thread::scope(|scope| -> Result<Written> {
            let end = Instant::now() + before + Duration::from_millis(100);
            let writing = scope.spawn(move || writer.write_until(&mut connection, end));
            std::thread::sleep(before);
            kill(cluster, server, victim)?;
            std::thread::sleep(down);
            restart(cluster, victim)?;
            writing.join().expect("the writer does not panic")
        })?;
        ensure!(written.acked > 0, "nothing was acknowledged before the kill");
        let open = self.writer.history.open();
        if victim != Victim::Everything {
            ensure!(!written.broken, "the NBD connection broke although its server was not killed");
            ensure!(open == 0, "{open} blocks stayed without an answer although the client lives");
        }
        self.summary.open += open as u64;
        self.read_back(victim)
    }

    fn read_back(&mut self, victim: Victim) -> Result<()> {
        let begin = Instant::now();
        if victim == Victim::Everything {
            self.server = self.cluster.serve_nbd(&[&self.image])?;
            // Everybody who had heard of a write without an answer is gone.
            self.writer.settle();
        }
        for turn in ["first", "second"] {
            let mut connection = Writer::connect(&self.server.socket, &self.image)?;
            self.writer.verify(&mut connection).with_context(|| format!("{turn} read after the restart"))?;
            connection.close()?;
        }
        self.summary.recovery_max = self.summary.recovery_max.max(begin.elapsed());
        self.cluster.wait_until_clean(CLEAN_MAX)?;
        self.server.daemon.check()?;
        self.cluster.check()
    }
}

fn kill(cluster: &mut Cluster, server: &mut NbdServer, victim: Victim) -> Result<()> {
    match victim {
        Victim::Osd(id) => cluster.kill_osd(id),
        Victim::Mon => cluster.kill_mon(),
        Victim::AllOsds => (0..cluster.osd_count()).try_for_each(|id| cluster.kill_osd(id)),
        Victim::Everything => {
            server.daemon.kill()?;
            cluster.kill_mon()?;
            (0..cluster.osd_count()).try_for_each(|id| cluster.kill_osd(id))
        }
    }
}

fn restart(cluster: &mut Cluster, victim: Victim) -> Result<()> {
    match victim {
        Victim::Osd(id) => cluster.start_osd(id),
        Victim::Mon => cluster.start_mon(),
        Victim::AllOsds => (0..cluster.osd_count()).try_for_each(|id| cluster.start_osd(id)),
        Victim::Everything => {
            cluster.start_mon()?;
            (0..cluster.osd_count()).try_for_each(|id| cluster.start_osd(id))
        }
    }
}
