//! The event loop: who is polled when. A process is polled when something has arrived for it or its deadline is due, until
//! it is idle, as a reactor polls it, and always a little later than it could be.

use super::admin::Admin;
use super::client::ClientMachine;
use super::clock::{MachineClock, Time};
use super::disk::Media;
use super::mon::MonMachine;
use super::options::Options;
use super::osd::{Exit, OsdMachine};
use super::trace::{Level, Trace};
use super::workload::{Failure, Work};
use super::world::{MICROSECOND, MILLISECOND, Machine, SECOND};
use crate::random::Random;
use loligo_config::id::Epoch;
use loligo_mon::{StartError, StoreError};
use loligo_net::transport::memory::MemoryHub;
use loligo_reactor::env::Instant;
use loligo_reactor::poller::Activity;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::SocketAddr;

/// Polls of one wake-up; a process that is still busy then goes on a little later.
const POLLS_MAX: u32 = 16;
/// Wake-ups of one process in a row that lead to nothing, before it counts as spinning.
const SPINS_MAX: u32 = 2000;
/// Wake-ups of one process in a row that do not end in peace, before it counts as spinning.
const RESTLESS_MAX: u32 = 5000;
/// How soon an OSD or a mon that ended by itself is started again, at most.
const RESTART_MAX: u64 = 2 * SECOND;

/// What happens at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A reactor may have something to do.
    Wake(u32),
    /// A process is to start again.
    Start(Machine, u64),
    /// What holds the network or a process up ends.
    Heal(u32),
}

/// One reactor.
#[derive(Debug)]
struct Node {
    machine: Machine,
    core: u16,
    /// The earliest wake-up that is still to come.
    wake: u64,
    /// It does something else until then.
    busy_until: u64,
    /// Its last wake-up, and how many in a row came soon after another and led to nothing.
    woken: u64,
    spins: u32,
    /// Wake-ups in a row after which it was still busy.
    restless: u32,
    /// What a wake-up takes, and until when, if it is slow.
    slow: (u64, u64),
}

/// What a partition of the network is, while it lasts.
#[derive(Clone, Debug)]
pub(super) struct Break {
    pub pairs: Vec<(SocketAddr, SocketAddr)>,
    pub slow: bool,
}

/// A whole cluster.
pub struct Cluster {
    pub(super) options: Options,
    pub(super) time: Time,
    pub(super) trace: Trace,
    pub(super) hub: MemoryHub,
    pub(super) random: Random,
    pub(super) mon: MonMachine,
    pub(super) osds: Vec<OsdMachine>,
    pub(super) clients: Vec<ClientMachine>,
    pub(super) admin: Admin,
    /// The load and its history.
    pub work: Work,
    pub(super) breaks: BTreeMap<u32, Break>,
    pub(super) last_break: u32,
    nodes: Vec<Node>,
    by_address: BTreeMap<SocketAddr, u32>,
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    wakeups: Vec<(SocketAddr, Instant)>,
    /// A start is named by a number, so that an older one is not taken for a newer.
    starts: BTreeMap<Machine, u64>,
    pub(super) mon_epoch: Epoch,
    pub(super) osd_epochs: BTreeMap<(u32, u16), Epoch>,
    pub(super) primaries: super::watch::Primaries,
    pub(super) failure: Option<Failure>,
    /// Processes that ended by themselves.
    pub(super) exits: u64,
    /// Wake-ups so far.
    pub(super) wakes: u64,
    /// Polls so far.
    pub(super) polls: u64,
}

impl Cluster {
    /// A cluster whose machines are on, and whose processes start now.
    pub fn new(options: &Options, trace: &Trace) -> Self {
        let time = Time::default();
        time.advance(SECOND);
        trace.set_now(time.now());
        let mut random = Random::new(options.stream(4));
        let hub = MemoryHub::new();
        hub.set_seed(options.stream(5));
        hub.set_now(Instant(time.now()));
        hub.record_wakeups();
        hub.set_default_link(options.net.profile(true));
        hub.set_send_queue_max(options.net.send_queue);
        let drift = options.drift_ppm;
        let mut clock = || {
            let uptime = SECOND + random.below(1_000_000) * SECOND;
            let ppm = random.below(2 * drift as u64 + 1) as i64 - drift;
            MachineClock::new(&time, uptime, ppm)
        };
        let mon = MonMachine::new(options, clock(), &hub, trace);
        let osd = |id: u32, clock| {
            let seed = options.stream(3000 + u64::from(id));
            let media = Media::new(format!("osd.{id}'s disk"), options.disk, &time, trace, seed);
            OsdMachine::new(id, options, clock, &hub, media, trace)
        };
        let osds: Vec<_> = (0..options.osds).map(|id| osd(id, clock())).collect();
        let clients =
            (0..options.clients).map(|n| ClientMachine::new(n, options, clock(), &hub, trace)).collect();
        let admin = Admin::new(options, clock(), &hub, trace);
        let mut cluster = Self {
            work: Work::new(options, trace),
            options: options.clone(),
            time,
            trace: trace.clone(),
            hub,
            random,
            mon,
            osds,
            clients,
            admin,
            breaks: BTreeMap::new(),
            last_break: 0,
            nodes: Vec::new(),
            by_address: BTreeMap::new(),
            heap: BinaryHeap::new(),
            sequence: 0,
            wakeups: Vec::new(),
            starts: BTreeMap::new(),
            mon_epoch: Epoch(0),
            osd_epochs: BTreeMap::new(),
            primaries: BTreeMap::new(),
            failure: None,
            exits: 0,
            wakes: 0,
            polls: 0,
        };
        cluster.make_nodes();
        for machine in cluster.servers() {
            cluster.start(machine);
        }
        cluster.wake_machine(Machine::Client(options.clients));
        cluster
    }

    fn make_nodes(&mut self) {
        let osds = (0..self.options.osds)
            .flat_map(|osd| (0..self.options.shards).map(move |core| (Machine::Osd(osd), core)));
        let clients = (0..=self.options.clients).map(|client| (Machine::Client(client), 0));
        let all: Vec<_> = std::iter::once((Machine::Mon, 0)).chain(osds).chain(clients).collect();
        for (machine, core) in all {
            self.by_address.insert(machine.address(core), self.nodes.len() as u32);
            self.nodes.push(Node {
                machine,
                core,
                wake: u64::MAX,
                busy_until: 0,
                woken: 0,
                spins: 0,
                restless: 0,
                slow: (0, 0),
            });
        }
    }

    /// The mon and the OSDs.
    pub fn servers(&self) -> Vec<Machine> {
        std::iter::once(Machine::Mon).chain((0..self.options.osds).map(Machine::Osd)).collect()
    }

    /// All machines but the administrator's.
    pub fn machines(&self) -> Vec<Machine> {
        self.servers().into_iter().chain((0..self.options.clients).map(Machine::Client)).collect()
    }

    /// Now, by the true time.
    pub fn now(&self) -> u64 {
        self.time.now()
    }

    // ------------------------------------------------------------------------------------------- the loop

    fn push(&mut self, at: u64, event: Event) {
        self.sequence += 1;
        self.heap.push(Reverse((at, self.sequence, event)));
    }

    fn wake(&mut self, node: u32, at: u64) {
        let entry = &mut self.nodes[node as usize];
        let at = at.max(entry.busy_until).max(self.time.now());
        if at < entry.wake {
            entry.wake = at;
            self.push(at, Event::Wake(node));
        }
    }

    /// Lets every reactor of a machine look for what there is to do.
    pub fn wake_machine(&mut self, machine: Machine) {
        for node in 0..self.nodes.len() {
            if self.nodes[node].machine == machine {
                self.wake(node as u32, self.time.now());
            }
        }
    }

    /// Lets everything happen up to the time `until`.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn run_until(&mut self, until: u64) -> Result<(), Failure> {
        while let Some(Reverse((at, _, event))) = self.heap.peek().copied() {
            if at > until {
                break;
            }
            self.heap.pop();
            self.time.advance(at);
            match event {
                Event::Wake(node) if self.nodes[node as usize].wake == at => self.run_node(node)?,
                Event::Wake(_) => {}
                Event::Start(machine, number) => {
                    if self.starts.get(&machine) == Some(&number) {
                        self.start(machine);
                    }
                }
                Event::Heal(number) => self.heal_break(number),
            }
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
        }
        self.time.advance(until);
        Ok(())
    }

    fn run_node(&mut self, node: u32) -> Result<(), Failure> {
        let now = self.time.now();
        self.trace.set_now(now);
        self.trace.mix(u64::from(node));
        self.hub.set_now(Instant(now));
        let Node { machine, core, slow, .. } = self.nodes[node as usize];
        self.nodes[node as usize].wake = u64::MAX;
        self.wakes += 1;
        let mut idle = false;
        for turn in 0..POLLS_MAX {
            self.polls += 1;
            let activity = self.poll(machine, core)?;
            if activity == Activity::Idle {
                idle = true;
                self.note_spin(node, turn == 0)?;
                break;
            }
        }
        let most = if slow.1 > now { slow.0 } else { self.options.wake_max };
        let takes = MICROSECOND + self.random.below(most);
        self.nodes[node as usize].busy_until = now + takes;
        self.spread_wakeups();
        let entry = &mut self.nodes[node as usize];
        entry.restless = if idle { 0 } else { entry.restless + 1 };
        if entry.restless > RESTLESS_MAX {
            return Err(Failure::new(format!("{machine} (core {core}) spins: it is busy without end")));
        }
        if !idle {
            self.wake(node, now);
        } else if let Some(at) = self.next_wake(node) {
            self.wake(node, at);
        }
        if let Machine::Osd(osd) = machine {
            self.wake_siblings(osd, core);
        }
        Ok(())
    }

    /// A process that wants to be polled again and again and does nothing burns a core.
    fn note_spin(&mut self, node: u32, nothing: bool) -> Result<(), Failure> {
        let now = self.time.now();
        let entry = &mut self.nodes[node as usize];
        let again = nothing && now - entry.woken < MILLISECOND;
        entry.woken = now;
        entry.spins = if again { entry.spins + 1 } else { 0 };
        if entry.spins < SPINS_MAX {
            return Ok(());
        }
        let (machine, core) = (entry.machine, entry.core);
        Err(Failure::new(format!(
            "{machine} (core {core}) spins: it wants to be polled and finds nothing to do"
        )))
    }

    fn spread_wakeups(&mut self) {
        let mut wakeups = std::mem::take(&mut self.wakeups);
        self.hub.take_wakeups(&mut wakeups);
        for (address, at) in wakeups.drain(..) {
            if let Some(node) = self.by_address.get(&address).copied() {
                self.wake(node, at.0);
            }
        }
        self.wakeups = wakeups;
    }

    fn next_wake(&self, node: u32) -> Option<u64> {
        let Node { machine, core, .. } = self.nodes[node as usize];
        let listens = match machine {
            Machine::Osd(osd) => self.osds[osd as usize].listens(core),
            _ => true,
        };
        let arrival = self.hub.next_arrival_at(machine.address(core)).filter(|_| listens).map(|at| at.0);
        let deadline = match machine {
            Machine::Mon => self.mon.next_deadline(),
            Machine::Osd(osd) => self.osds[osd as usize].next_deadline(core),
            Machine::Client(client) => match self.clients.get(client as usize) {
                Some(client) => client.next_deadline(&self.work),
                None => self.admin.next_deadline(),
            },
        };
        arrival.into_iter().chain(deadline).min()
    }

    fn wake_siblings(&mut self, osd: u32, core: u16) {
        for other in 0..self.osds[osd as usize].cores() {
            if (other != core || self.options.shards == 1) && self.osds[osd as usize].has_mail(other) {
                let node = self.by_address[&Machine::Osd(osd).address(other)];
                self.wake(node, self.time.now() + MICROSECOND);
            }
        }
    }

    fn poll(&mut self, machine: Machine, core: u16) -> Result<Activity, Failure> {
        let now = self.time.now();
        match machine {
            Machine::Mon => {
                let Some(activity) = self.mon.poll() else {
                    self.trace.note(Level::Faults, || "mon ends: its store has failed".into());
                    self.exits += 1;
                    let after = self.random.below(RESTART_MAX);
                    self.start_later(machine, after);
                    return Ok(Activity::Idle);
                };
                self.see_mon()?;
                Ok(activity)
            }
            Machine::Osd(osd) => {
                let local = self.osds[osd as usize].now();
                match self.osds[osd as usize].poll(core, local) {
                    Ok(activity) => {
                        self.see_osd(osd, core)?;
                        self.see_acks(osd)?;
                        self.see_promises(osd)?;
                        Ok(activity)
                    }
                    Err(exit) => {
                        self.ended(osd, &exit)?;
                        Ok(Activity::Idle)
                    }
                }
            }
            Machine::Client(client) => {
                let Some(machine) = self.clients.get_mut(client as usize) else {
                    let sessions: Vec<_> =
                        self.clients.iter().filter_map(ClientMachine::session_id).collect();
                    return self.admin.poll(&mut self.work, &sessions, now);
                };
                let was_fenced = machine.is_fenced();
                let activity = machine.poll(&mut self.work, now)?;
                if machine.is_fenced() && !was_fenced {
                    // Whoever ran there starts it again.
                    let after = 10 * MILLISECOND + self.random.below(SECOND);
                    self.start_later(Machine::Client(client), after);
                }
                Ok(activity)
            }
        }
    }

    fn ended(&mut self, osd: u32, exit: &Exit) -> Result<(), Failure> {
        self.trace.note(Level::Faults, || format!("osd.{osd} ends: {exit}"));
        self.exits += 1;
        if !self.may_end(exit) {
            return Err(Failure::new(format!("osd.{osd} ends: {exit}")));
        }
        let after = 100 * MILLISECOND + self.random.below(RESTART_MAX);
        self.start_later(Machine::Osd(osd), after);
        self.wake_machine(Machine::Osd(osd));
        Ok(())
    }

    /// Whether a process may end for this reason: its device has failed, or an older start of it seems to run.
    fn may_end(&self, exit: &Exit) -> bool {
        use loligo_net::wire::mon::BootStatus;
        use loligo_osd::map_client::BootError;
        use loligo_osd::shard::ShardFailure;
        use loligo_osd::store::format::ProbeError;
        use loligo_osd::store::mount::MountError;
        match exit {
            Exit::Probe(ProbeError::Device { .. }) | Exit::Mount(MountError::Device { .. }) => true,
            Exit::Shard(ShardFailure::Device(_)) => true,
            Exit::Shard(ShardFailure::Boot(BootError::Refused(BootStatus::Running))) => true,
            Exit::Shard(ShardFailure::Boot(_)) | Exit::Probe(_) | Exit::Mount(_) => self.options.damage,
        }
    }

    /// The administrator makes pools and images, now that there are OSDs to place them on.
    pub(super) fn admin_begins(&mut self) {
        self.admin.begin_setup();
        self.wake_machine(Machine::Client(self.options.clients));
    }

    // ------------------------------------------------------------------------------------------- processes

    /// Starts a machine's process, if it does not run.
    pub fn start(&mut self, machine: Machine) {
        self.trace.set_now(self.time.now());
        self.hub.set_now(Instant(self.time.now()));
        let now = self.time.now();
        match machine {
            Machine::Mon => {
                match self.mon.start() {
                    Ok(()) => {}
                    // Its disk failed once more; a later start may find it well.
                    Err(StartError::Store(StoreError::Io { .. })) => {
                        let after = self.random.below(RESTART_MAX);
                        self.start_later(machine, after);
                    }
                    Err(error) => {
                        self.failure = Some(Failure::new(format!("the mon cannot start: {error}")));
                    }
                }
            }
            Machine::Osd(osd) => {
                self.osd_epochs.retain(|(known, _), _| *known != osd);
                self.osds[osd as usize].start();
            }
            Machine::Client(client) => {
                let machine = &mut self.clients[client as usize];
                if machine.is_fenced() {
                    machine.kill(&mut self.work, now);
                }
                machine.start(&self.work, now);
            }
        }
        self.spread_wakeups();
        self.wake_machine(machine);
    }

    pub(super) fn start_later(&mut self, machine: Machine, after: u64) {
        let number = self.starts.entry(machine).or_default();
        *number += 1;
        let event = Event::Start(machine, *number);
        self.push(self.time.now() + after, event);
    }

    /// Ends a machine's process, with or without its power.
    pub(super) fn stop(&mut self, machine: Machine, power: bool) {
        let now = self.time.now();
        self.trace.set_now(now);
        self.hub.set_now(Instant(now));
        match machine {
            Machine::Mon if power => self.mon.cut_power(),
            Machine::Mon => {
                self.mon.kill();
            }
            Machine::Osd(osd) if power => self.osds[osd as usize].cut_power(),
            Machine::Osd(osd) => {
                self.osds[osd as usize].kill();
            }
            Machine::Client(client) if power => self.clients[client as usize].cut_power(&mut self.work, now),
            Machine::Client(client) => {
                self.clients[client as usize].kill(&mut self.work, now);
            }
        }
        self.spread_wakeups();
    }

    /// Whether a machine's process runs.
    pub fn is_running(&self, machine: Machine) -> bool {
        match machine {
            Machine::Mon => self.mon.process().is_some(),
            Machine::Osd(osd) => self.osds[osd as usize].is_running(),
            Machine::Client(client) => {
                self.clients.get(client as usize).is_none_or(ClientMachine::is_running)
            }
        }
    }

    /// No reactor of the machine is polled before `until`.
    pub(super) fn pause(&mut self, machine: Machine, until: u64) {
        for node in self.nodes.iter_mut().filter(|node| node.machine == machine) {
            node.busy_until = node.busy_until.max(until);
        }
        for node in 0..self.nodes.len() {
            if self.nodes[node].machine == machine {
                self.nodes[node].wake = u64::MAX;
                self.wake(node as u32, until);
            }
        }
    }

    /// Every wake-up of the machine takes up to `takes` until `until`.
    pub(super) fn slow_process(&mut self, machine: Machine, takes: u64, until: u64) {
        for node in self.nodes.iter_mut().filter(|node| node.machine == machine) {
            node.slow = (takes.max(1), until);
        }
    }

    pub(super) fn heal_processes(&mut self) {
        for node in &mut self.nodes {
            (node.slow, node.busy_until) = ((0, 0), node.busy_until.min(self.time.now()));
        }
    }

    pub(super) fn heal_at(&mut self, at: u64, number: u32) {
        self.push(at, Event::Heal(number));
    }
}
