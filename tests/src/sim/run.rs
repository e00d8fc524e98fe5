//! One run: a cluster is made, faults strike in rounds, and after each round everything heals and is read back.

use super::cluster::Cluster;
use super::options::{Options, Overrides};
use super::plan::{FaultKind, Plan};
use super::trace::{Level, Trace};
use super::workload::{Failure, Mode, WorkStats};
use super::world::{MILLISECOND, SECOND};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// After the faults stop, everything is active and clean within this time (RELIABILITY G29).
pub const CLEAN_MAX: u64 = 60 * SECOND;
/// The cluster is up and has its images within this time after its first start.
const SETUP_MAX: u64 = 30 * SECOND;
/// How often the cluster is looked at while it is waited for.
const LOOK_EVERY: u64 = 20 * MILLISECOND;
/// What may still be on its way when everything has healed: no frame is older than this.
const SETTLE: u64 = 4 * SECOND;

/// What is to be run.
#[derive(Clone, Debug, Default)]
pub struct Order {
    /// The seed.
    pub seed: u64,
    /// What the caller sets instead of it.
    pub overrides: Overrides,
    /// Only these faults of the seed's plan.
    pub only: Option<Vec<u32>>,
    /// What is told.
    pub level: Level,
    /// Whether it is printed while it happens.
    pub print: bool,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Simulated time, in nanoseconds.
    pub time: u64,
    /// Requests.
    pub work: WorkStats,
    /// Registers read and compared.
    pub reads: u64,
    /// Registers written and acknowledged.
    pub acked: u64,
    /// How often the zeroes of a block were told apart no more.
    pub loosened: u64,
    /// What the administrator did.
    pub admin: u64,
    /// Faults that struck, by kind.
    pub faults: BTreeMap<FaultKind, u64>,
    /// Frames sent, lost and sent again, damaged.
    pub frames: [u64; 3],
    /// Blocks that power cuts lost or tore, and disk operations that failed.
    pub disk: [u64; 3],
    /// Wake-ups and polls.
    pub polls: [u64; 2],
    /// The longest time that healing took, in nanoseconds.
    pub healed_in: u64,
}

/// The end of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was drawn.
    pub options: Options,
    /// The faults.
    pub plan: Plan,
    /// What went wrong.
    pub failure: Option<Failure>,
    /// When, in nanoseconds.
    pub at: u64,
    /// Over every event.
    pub hash: u64,
    /// Sums.
    pub stats: Stats,
    /// The last lines of the trace.
    pub lines: Vec<String>,
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Panics are failures of a run, told with it: from now on they print nothing by themselves in threads that run one.
pub fn catch_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let message = info.payload_as_str().unwrap_or("a panic").to_owned();
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        let kept = RUNNING.with(std::cell::Cell::get);
        if kept {
            PANIC.with_borrow_mut(|panic| {
                panic.get_or_insert(format!("panic at {place}: {message}"));
            });
        } else {
            usual(info);
        }
    }));
}

thread_local! {
    static RUNNING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs a seed.
pub fn run(order: &Order) -> Outcome {
    let options = Options::draw(order.seed, &order.overrides);
    let plan = Plan::draw(&options);
    let plan = order.only.as_ref().map_or_else(|| plan.clone(), |only| plan.only(only));
    let trace = Trace::new(order.level, order.print);
    let progress = RefCell::new((0, Stats::default()));
    RUNNING.set(true);
    PANIC.set(None);
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut story =
            Story { cluster: Cluster::new(&options, &trace), plan: &plan, stats: Stats::default() };
        let result = story.tell();
        story.sum_up();
        *progress.borrow_mut() = (story.cluster.now(), story.stats.clone());
        result
    }));
    RUNNING.set(false);
    let (at, stats) = progress.into_inner();
    let failure = match result {
        Ok(result) => result.err(),
        Err(_) => {
            let what = PANIC.take().unwrap_or_else(|| "a panic".into());
            Some(Failure::new(what))
        }
    };
    Outcome { options, plan, failure, at, hash: trace.value(), stats, lines: trace.lines() }
}

struct Story<'a> {
    cluster: Cluster,
    plan: &'a Plan,
    stats: Stats,
}

impl Story<'_> {
    fn tell(&mut self) -> Result<(), Failure> {
        self.set_up()?;
        for round in 0..self.cluster.options.rounds {
            self.faults(round)?;
            self.heal()?;
            if !self.cluster.options.damage {
                self.read_back()?;
            }
        }
        if self.cluster.options.damage { Ok(()) } else { self.cluster.audit() }
    }

    fn look(
        &mut self,
        what: &str,
        most: u64,
        until: impl Fn(&Cluster) -> Vec<String>,
    ) -> Result<u64, Failure> {
        let begin = self.cluster.now();
        loop {
            let missing = until(&self.cluster);
            let took = self.cluster.now() - begin;
            if missing.is_empty() {
                return Ok(took);
            }
            if took > most {
                let list: Vec<_> = missing.into_iter().take(12).collect();
                let seconds = most / SECOND;
                return Err(Failure::new(format!("{what}: not within {seconds} s: {}", list.join("; "))));
            }
            self.cluster.run_until(self.cluster.now() + LOOK_EVERY)?;
        }
    }

    /// Pools and images are made, clients come, while nothing fails.
    fn set_up(&mut self) -> Result<(), Failure> {
        self.look("the first start", SETUP_MAX, |cluster| {
            // The administrator's pools are placed when all OSDs are there.
            let up =
                cluster.mon.process().map_or(0, |mon| mon.map().osds.values().filter(|osd| osd.up).count());
            if up < cluster.osds.len() { vec![format!("{up} OSDs are up")] } else { Vec::new() }
        })?;
        self.cluster.admin_begins();
        self.look("pools and images", SETUP_MAX, |cluster| {
            if cluster.admin.is_at_rest() {
                Vec::new()
            } else {
                vec![format!("{:?}", cluster.admin.waits_for())]
            }
        })?;
        for machine in self.cluster.machines() {
            self.cluster.start(machine);
        }
        self.look("clients", SETUP_MAX, Cluster::unclean)?;
        Ok(())
    }

    fn faults(&mut self, round: u32) -> Result<(), Failure> {
        let begin = self.cluster.now();
        let cluster = &mut self.cluster;
        cluster.trace.note(Level::Faults, || format!("round {round} begins"));
        cluster.hub.set_default_link(cluster.options.net.profile(false));
        cluster.work.mode = Mode::Load;
        cluster.admin.set_active(cluster.options.admin, true);
        for machine in cluster.machines() {
            cluster.wake_machine(machine);
        }
        for event in self.plan.events.iter().filter(|event| event.round == round) {
            self.cluster.run_until(begin + event.at)?;
            if self.cluster.strike(event.fault) {
                *self.stats.faults.entry(event.fault.kind()).or_default() += 1;
            }
        }
        self.cluster.run_until((begin + self.cluster.options.round_time).max(self.cluster.now()))
    }

    fn heal(&mut self) -> Result<(), Failure> {
        self.cluster.work.mode = Mode::Drain;
        self.cluster.admin.set_active(false, true);
        self.cluster.heal();
        if self.cluster.options.damage {
            return self.cluster.run_until(self.cluster.now() + CLEAN_MAX / 4);
        }
        let took = self.look("active and clean", CLEAN_MAX, Cluster::unclean)?;
        self.stats.healed_in = self.stats.healed_in.max(took);
        Ok(())
    }

    /// What dead clients had sent arrives, or nothing of it is left, and what was given up after its time limit has its end. A
    /// disk that hung before may still end an OSD, and what clients have sent waits for it: then it takes longer.
    fn come_to_rest(&mut self) -> Result<(), Failure> {
        let epoch = |cluster: &Cluster| cluster.mon.process().map(|mon| mon.map().epoch);
        let last = self.cluster.now() + CLEAN_MAX;
        loop {
            let before = (epoch(&self.cluster), self.cluster.exits);
            self.cluster.run_until(self.cluster.now() + SETTLE)?;
            if before == (epoch(&self.cluster), self.cluster.exits) {
                return Ok(());
            }
            if self.cluster.now() > last {
                return Err(Failure::new("the map changes without end, though everything has healed"));
            }
            self.look("active and clean again", CLEAN_MAX, Cluster::unclean)?;
        }
    }

    /// Everything is read twice: what was acked is there, and what was in doubt does not change any more.
    fn read_back(&mut self) -> Result<(), Failure> {
        self.come_to_rest()?;
        let now = self.cluster.now();
        self.cluster.work.settle(now);
        for turn in ["first", "second"] {
            self.cluster.trace.note(Level::Faults, || format!("the {turn} reading of everything"));
            self.cluster.work.begin_scan();
            for machine in self.cluster.machines() {
                self.cluster.wake_machine(machine);
            }
            self.look(&format!("the {turn} reading of everything"), CLEAN_MAX, |cluster| {
                let mut list = cluster.unclean();
                if cluster.work.is_scanning() {
                    list.push("there is more to read".into());
                }
                list
            })?;
            self.cluster.work.mode = Mode::Drain;
        }
        self.cluster.see_logs()
    }

    fn sum_up(&mut self) {
        let cluster = &self.cluster;
        let links = cluster.hub.link_stats();
        let stats = &mut self.stats;
        stats.time = cluster.now();
        stats.work = cluster.work.stats();
        let history = cluster.work.history();
        (stats.reads, stats.acked, stats.loosened) = (history.reads(), history.acked(), history.loosened());
        stats.admin = cluster.admin.done();
        stats.frames = [links.frames, links.lost, links.damaged];
        stats.polls = [cluster.wakes, cluster.polls];
        for osd in &cluster.osds {
            let disk = osd.media().borrow().stats();
            stats.disk[0] += disk.lost;
            stats.disk[1] += disk.torn;
            stats.disk[2] += disk.failed;
        }
    }
}
