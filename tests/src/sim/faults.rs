//! Faults strike, and end.

use super::cluster::{Break, Cluster};
use super::disk::Failure as DiskFailure;
use super::mon::CommitFault;
use super::plan::Fault;
use super::trace::Level;
use super::world::Machine;
use loligo_net::transport::memory::LinkProfile;
use loligo_reactor::env::Instant;
use std::net::SocketAddr;
use std::time::Duration;

impl Cluster {
    /// A fault strikes now. False: there was nothing that it could strike.
    pub fn strike(&mut self, fault: Fault) -> bool {
        let now = self.now();
        self.trace.set_now(now);
        self.hub.set_now(Instant(now));
        self.trace.note(Level::Faults, || format!("FAULT {fault}"));
        match fault {
            Fault::Kill(machine, down) => return self.take_down(machine, down, false),
            Fault::PowerCut(machine, down) => return self.take_down(machine, down, true),
            Fault::PowerCutAll(down) => {
                for machine in self.servers() {
                    let down = 1 + self.random.below(down.max(1));
                    self.take_down(machine, down, true);
                }
            }
            Fault::Pause(machine, time) => self.pause(machine, now + time),
            Fault::SlowProcess(machine, takes, time) => self.slow_process(machine, takes, now + time),
            Fault::Partition(a, b, time) => self.separate(&self.pairs(a, b), false, time),
            Fault::OneWay(a, b, time) => self.separate(&self.pairs(a, b), true, time),
            Fault::Isolate(machine, time) => {
                let others = self.machines().into_iter().filter(|other| *other != machine);
                let mut pairs: Vec<_> = others.flat_map(|other| self.pairs(machine, other)).collect();
                pairs.extend(self.pairs(machine, Machine::Client(self.options.clients)));
                self.separate(&pairs, false, time);
            }
            Fault::Cut(a, b, time) => {
                let pairs = self.pairs(a, b);
                for (a, b) in &pairs {
                    self.hub.cut(*a, *b);
                }
                self.until(Break { pairs, slow: false }, time);
            }
            Fault::Reset(a, b, late) => {
                for (a, b) in self.pairs(a, b) {
                    self.hub.reset(a, b, Duration::from_nanos(late));
                }
            }
            Fault::SlowLink(a, b, delay, time) => {
                let pairs = self.pairs(a, b);
                let usual = self.options.net.profile(false);
                let profile =
                    LinkProfile { delay: Duration::from_nanos(delay), jitter: usual.jitter * 4, ..usual };
                for (a, b) in &pairs {
                    self.hub.set_link(*a, *b, Some(profile));
                    self.hub.set_link(*b, *a, Some(profile));
                }
                self.until(Break { pairs, slow: true }, time);
            }
            Fault::SlowDisk(osd, factor, time) => {
                self.osds[osd as usize].media().borrow_mut().slow_down(now + time, factor);
            }
            Fault::HungDisk(osd, time) => self.osds[osd as usize].media().borrow_mut().hang(now + time),
            Fault::FailedDisk(osd, kind, after, time) => {
                let until = if time == 0 { 0 } else { now + time };
                self.osds[osd as usize].media().borrow_mut().fail(DiskFailure { kind, after, until });
            }
            Fault::FailedCommit(kept) => {
                self.mon.fail_commit(if kept { CommitFault::Kept } else { CommitFault::Lost });
            }
            Fault::ClockJump(machine, seconds) => {
                if let Some(clock) = self.clock(machine) {
                    clock.jump_wall(seconds);
                }
            }
            Fault::ClockDrift(machine, ppm) => {
                if let Some(clock) = self.clock(machine) {
                    clock.set_drift(ppm);
                }
                self.wake_machine(machine);
            }
            Fault::Damage(osd, damage) => self.osds[osd as usize].media().borrow_mut().damage(damage),
            Fault::NewDisk(osd, down) => {
                self.stop(Machine::Osd(osd), false);
                self.osds[osd as usize].replace_disk();
                self.start_later(Machine::Osd(osd), down);
            }
        }
        true
    }

    fn clock(&self, machine: Machine) -> Option<super::clock::MachineClock> {
        match machine {
            Machine::Mon => Some(self.mon.clock().clone()),
            Machine::Osd(osd) => Some(self.osds[osd as usize].clock().clone()),
            Machine::Client(client) => Some(self.clients.get(client as usize)?.clock().clone()),
        }
    }

    fn take_down(&mut self, machine: Machine, down: u64, power: bool) -> bool {
        let runs = self.is_running(machine);
        if runs {
            self.stop(machine, power);
        }
        self.start_later(machine, down);
        runs
    }

    /// All addresses of one machine with all of another.
    fn pairs(&self, a: Machine, b: Machine) -> Vec<(SocketAddr, SocketAddr)> {
        let addresses = |machine: Machine| -> Vec<SocketAddr> {
            let cores = if matches!(machine, Machine::Osd(_)) { self.options.shards } else { 1 };
            (0..cores).map(|core| machine.address(core)).collect()
        };
        let others = addresses(b);
        addresses(a).into_iter().flat_map(|a| others.iter().map(move |b| (a, *b))).collect()
    }

    fn separate(&mut self, pairs: &[(SocketAddr, SocketAddr)], one_way: bool, time: u64) {
        for (a, b) in pairs {
            self.hub.stall(*a, *b);
            if !one_way {
                self.hub.stall(*b, *a);
            }
        }
        self.until(Break { pairs: pairs.to_vec(), slow: false }, time);
    }

    fn until(&mut self, broken: Break, time: u64) {
        self.last_break += 1;
        self.breaks.insert(self.last_break, broken);
        self.heal_at(self.now() + time, self.last_break);
    }

    /// One partition ends; what another one still holds apart stays apart.
    pub(super) fn heal_break(&mut self, number: u32) {
        let Some(ended) = self.breaks.remove(&number) else { return };
        self.trace.set_now(self.now());
        self.hub.set_now(Instant(self.now()));
        self.trace.note(Level::Faults, || format!("the network heals ({number})"));
        let held = |pair: &(SocketAddr, SocketAddr), slow: bool| {
            let other = (pair.1, pair.0);
            let mut others = self.breaks.values().filter(|broken| broken.slow == slow);
            others.any(|broken| broken.pairs.contains(pair) || broken.pairs.contains(&other))
        };
        for pair in ended.pairs.iter().filter(|pair| !held(pair, ended.slow)) {
            if ended.slow {
                self.hub.set_link(pair.0, pair.1, None);
                self.hub.set_link(pair.1, pair.0, None);
            } else {
                self.hub.heal(pair.0, pair.1);
            }
        }
        self.hear();
    }

    /// Wakes those to whom something came.
    fn hear(&mut self) {
        for machine in self.machines() {
            self.wake_machine(machine);
        }
        self.wake_machine(Machine::Client(self.options.clients));
    }

    /// Every fault ends: the network is whole, every process runs, every disk works.
    pub fn heal(&mut self) {
        self.trace.set_now(self.now());
        self.trace.note(Level::Faults, || "everything heals".into());
        for number in self.breaks.keys().copied().collect::<Vec<_>>() {
            self.heal_break(number);
        }
        self.hub.set_default_link(self.options.net.profile(true));
        for osd in &self.osds {
            osd.media().borrow_mut().heal();
        }
        self.mon.heal();
        self.heal_processes();
        for machine in self.machines() {
            self.start(machine);
        }
        self.hear();
    }
}
