//! The administrator: makes the pools and images at the start, then changes what can be changed while clients work.

use super::client::{ClientProcess, Host};
use super::clock::MachineClock;
use super::options::Options;
use super::trace::{Level, Trace};
use super::workload::{Failure, Work};
use super::world::{MILLISECOND, Machine, SECOND};
use crate::random::Random;
use loligo_client::{AdminReply, ClientEvent, CommandError, CreateOptions, ImageError, IoError};
use loligo_config::id::SessionId;
use loligo_config::units::ByteLen;
use loligo_net::transport::memory::MemoryHub;
use loligo_reactor::env::{Clock, Ticket};
use loligo_reactor::poller::{Activity, Poller};
use serde_json::{Value, json};
use std::collections::VecDeque;

const BLOCK: u64 = 4096;
/// No image of the load grows beyond this.
const BLOCKS_MAX: u64 = 2000;

#[derive(Clone, Debug, PartialEq)]
enum Step {
    /// A command to the mon.
    Command(Value),
    Create {
        pool: String,
        image: String,
        blocks: u64,
        order: u8,
    },
    Rename {
        pool: String,
        from: String,
        to: String,
    },
    Resize {
        pool: String,
        image: String,
        blocks: u64,
    },
    Remove {
        pool: String,
        image: String,
    },
    /// The image must be in the pool's list, or not.
    List {
        pool: String,
        image: String,
        there: bool,
    },
    Usage {
        pool: String,
        image: String,
    },
    /// An image of the load.
    Grow {
        image: usize,
        blocks: u64,
    },
}

/// The administrator's machine.
pub struct Admin {
    host: Host,
    process: ClientProcess,
    random: Random,
    trace: Trace,
    queue: VecDeque<Step>,
    running: Option<(Ticket, Step)>,
    tickets: u64,
    next_at: u64,
    made: u32,
    /// Whether faults are about, so that an answer may get lost.
    lenient: bool,
    active: bool,
    pools: u32,
    /// Nothing is begun before.
    ready: bool,
    done: u64,
}

impl Admin {
    /// Starts its process, which makes pools and images.
    pub fn new(options: &Options, clock: MachineClock, hub: &MemoryHub, trace: &Trace) -> Self {
        let mut host = Host::new(Machine::Client(options.clients), options, clock, hub, trace);
        let process = host.start();
        let mut queue = VecDeque::new();
        for (at, pool) in options.pools.iter().enumerate() {
            queue.push_back(Step::Command(json!({
                "prefix": "pool create", "pool": format!("pool{at}"), "size": pool.size, "min_size": pool.min_size,
                "pg_count": pool.pg_count, "failure_domain": "host",
            })));
        }
        for (at, image) in options.images.iter().enumerate() {
            let (pool, image_name) = (format!("pool{}", image.pool), format!("image{at}"));
            queue.push_back(Step::Create {
                pool,
                image: image_name,
                blocks: image.blocks,
                order: image.order,
            });
        }
        Self {
            host,
            process,
            random: Random::new(options.stream(3)),
            trace: trace.clone(),
            queue,
            running: None,
            tickets: 0,
            next_at: 0,
            made: 0,
            lenient: false,
            active: false,
            pools: options.pools.len() as u32,
            ready: false,
            done: 0,
        }
    }

    /// Pools and images are made from now on.
    pub fn begin_setup(&mut self) {
        self.ready = true;
    }

    /// Steps that have ended well.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Whether it begins new work by itself, and whether answers may get lost meanwhile.
    pub fn set_active(&mut self, active: bool, lenient: bool) {
        (self.active, self.lenient) = (active, lenient);
    }

    /// Whether nothing is left to do.
    pub fn is_at_rest(&self) -> bool {
        self.queue.is_empty() && self.running.is_none()
    }

    /// What it waits for, in words.
    pub fn waits_for(&self) -> Option<String> {
        self.running.as_ref().map(|(_, step)| format!("{step:?}"))
    }

    /// Polls once. `sessions` are those of the clients that run.
    ///
    /// # Errors
    /// When an answer is not allowed.
    pub fn poll(&mut self, work: &mut Work, sessions: &[SessionId], now: u64) -> Result<Activity, Failure> {
        let mut activity = self.process.client.poll(self.host.clock().now());
        while let Some(event) = self.process.client.next_event() {
            activity = Activity::Busy;
            match event {
                ClientEvent::Command { ticket, result } => self.commanded(work, now, ticket, result)?,
                ClientEvent::Admin { ticket, result } => self.administered(work, ticket, result)?,
                _ => {}
            }
        }
        if self.ready && self.running.is_none() && self.process.client.is_connected() {
            if self.queue.is_empty() && self.active && self.next_at <= now {
                self.next_at = now + 50 * MILLISECOND + self.random.below(3 * SECOND);
                self.draw(work, sessions);
            }
            if let Some(step) = self.queue.pop_front() {
                self.begin(work, step);
                activity = Activity::Busy;
            }
        }
        Ok(activity)
    }

    /// When to poll next, by the true time, if nothing arrives before.
    pub fn next_deadline(&self) -> Option<u64> {
        let own = self.process.client.next_deadline().map(|at| self.host.clock().true_time(at));
        let idle = self.running.is_none() && self.process.client.is_connected();
        let next = (idle && self.active).then_some(self.next_at);
        own.into_iter().chain(next).min()
    }

    fn begin(&mut self, work: &Work, step: Step) {
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.trace.note(Level::Ops, || format!("admin begins {step:?}"));
        let client = &mut self.process.client;
        match &step {
            Step::Command(request) => client.command(request.clone(), ticket),
            Step::Create { pool, image, blocks, order } => {
                client.create(pool, image, CreateOptions { size: blocks * BLOCK, order: *order }, ticket);
            }
            Step::Rename { pool, from, to } => client.rename(pool, from, to, ticket),
            Step::Resize { pool, image, blocks } => {
                client.resize(pool, image, ByteLen(blocks * BLOCK), ticket)
            }
            Step::Remove { pool, image } => client.remove(pool, image, true, ticket),
            Step::List { pool, .. } => client.list(pool, ticket),
            Step::Usage { pool, image } => client.du(pool, image, ticket),
            Step::Grow { image, blocks } => {
                let image = &work.images[*image];
                client.resize(&image.pool, &image.name, ByteLen(blocks * BLOCK), ticket);
            }
        }
        self.running = Some((ticket, step));
    }

    fn take_running(&mut self, ticket: Ticket) -> Result<Step, Failure> {
        match self.running.take() {
            Some((own, step)) if own == ticket => Ok(step),
            other => {
                Err(Failure::new(format!("the administrator got an answer {} while {other:?} ran", ticket.0)))
            }
        }
    }

    fn commanded(
        &mut self,
        work: &mut Work,
        now: u64,
        ticket: Ticket,
        result: Result<Value, CommandError>,
    ) -> Result<(), Failure> {
        let step = self.take_running(ticket)?;
        self.trace.note(Level::Ops, || {
            format!("admin ends {step:?}: {}", if result.is_ok() { "done" } else { "failed" })
        });
        match result {
            Ok(_) => {
                self.done += 1;
                if let Step::Command(request) = &step
                    && request["prefix"] == "blocklist add"
                    && let Some(session) = request["session"].as_u64()
                {
                    work.fence(now, SessionId(session));
                }
            }
            // The answer was lost, or the state of the cluster explains the refusal.
            Err(CommandError::MaybeApplied | CommandError::Refused { code: -95 | -2 | -17 | -110, .. })
                if self.lenient =>
            {
                self.queue.clear();
            }
            Err(error) => return Err(Failure::new(format!("the administrator's {step:?} failed: {error}"))),
        }
        Ok(())
    }

    fn administered(
        &mut self,
        work: &mut Work,
        ticket: Ticket,
        result: Result<AdminReply, ImageError>,
    ) -> Result<(), Failure> {
        let step = self.take_running(ticket)?;
        self.trace.note(Level::Ops, || format!("admin ends {step:?}: {:?}", result.as_ref().err()));
        match (&step, &result) {
            (Step::Grow { image, blocks }, Ok(_)) => work.images[*image].blocks = *blocks,
            (Step::List { image, there, pool }, Ok(AdminReply::List(list))) => {
                if list.iter().any(|entry| entry.name == *image) != *there {
                    let wrong = if *there { "is missing in" } else { "is still in" };
                    return Err(Failure::new(format!("{image} {wrong} the list of {pool}")));
                }
            }
            (_, Ok(_)) => {}
            // A full cluster takes nothing new; what is removed must go.
            (
                Step::Create { .. } | Step::Rename { .. } | Step::Resize { .. } | Step::Grow { .. },
                Err(error),
            ) if *error == ImageError::Io(IoError::NoSpace) => {
                self.queue.clear();
            }
            (_, Err(ImageError::Io(IoError::MaybeApplied | IoError::Timeout | IoError::Media)))
                if self.lenient =>
            {
                self.queue.clear();
                // How large the image is now has to be known, or the next size could be a smaller one.
                if let Step::Grow { .. } = step {
                    self.queue.push_back(step);
                }
            }
            (_, Err(error)) => {
                return Err(Failure::new(format!("the administrator's {step:?} failed: {error}")));
            }
        }
        self.done += u64::from(result.is_ok());
        Ok(())
    }

    /// What it does next by itself.
    fn draw(&mut self, work: &Work, sessions: &[SessionId]) {
        let pool = format!("pool{}", self.random.below(self.pools.into()));
        match self.random.below(12) {
            0..=2 => self.live_an_image(pool),
            3 | 4 => {
                let image = self.random.below(work.images.len() as u64) as usize;
                let blocks = work.images[image].blocks + 1 + self.random.below(40);
                if blocks <= BLOCKS_MAX {
                    self.queue.push_back(Step::Grow { image, blocks });
                }
            }
            5 => {
                let val = 1 + self.random.below(3);
                let request =
                    json!({ "prefix": "pool set", "pool": pool, "var": "min_size", "val": val.min(2) });
                self.queue.push_back(Step::Command(request));
            }
            6 if !sessions.is_empty() => {
                let session = sessions[self.random.below(sessions.len() as u64) as usize];
                self.queue
                    .push_back(Step::Command(json!({ "prefix": "blocklist add", "session": session.0 })));
            }
            7 => self.live_a_pool(),
            _ => {
                let prefixes =
                    ["status", "health", "osd tree", "osd df", "pg dump", "mon dump", "blocklist ls"];
                let prefix = prefixes[self.random.below(prefixes.len() as u64) as usize];
                self.queue.push_back(Step::Command(json!({ "prefix": prefix })));
            }
        }
    }

    fn fresh_name(&mut self, kind: &str) -> String {
        self.made += 1;
        format!("{kind}{}", self.made)
    }

    fn live_an_image(&mut self, pool: String) {
        let (image, to) = (self.fresh_name("temp"), self.fresh_name("named"));
        let blocks = 1 + self.random.below(300);
        let order = 12 + self.random.below(11) as u8;
        let named = || (pool.clone(), to.clone());
        self.queue.push_back(Step::Create { pool: pool.clone(), image: image.clone(), blocks, order });
        self.queue.push_back(Step::Rename { pool: pool.clone(), from: image.clone(), to: to.clone() });
        self.queue.push_back(Step::List { pool: pool.clone(), image, there: false });
        for _ in 0..self.random.below(3) {
            let (pool, image) = named();
            self.queue.push_back(Step::Resize { pool, image, blocks: self.random.below(400) });
        }
        let (pool, image) = named();
        self.queue.push_back(Step::Usage { pool: pool.clone(), image: image.clone() });
        self.queue.push_back(Step::List { pool: pool.clone(), image: image.clone(), there: true });
        self.queue.push_back(Step::Remove { pool: pool.clone(), image: image.clone() });
        self.queue.push_back(Step::List { pool, image, there: false });
    }

    fn live_a_pool(&mut self) {
        let pool = self.fresh_name("pond");
        let create =
            json!({ "prefix": "pool create", "pool": pool, "size": 2, "pg_count": 1 + self.random.below(4) });
        self.queue.push_back(Step::Command(create));
        if self.random.one_in(2) {
            let image = self.fresh_name("temp");
            self.queue.push_back(Step::Create { pool: pool.clone(), image, blocks: 100, order: 14 });
        }
        let remove =
            json!({ "prefix": "pool rm", "pool": pool, "pool2": pool, "yes_i_really_really_mean_it": true });
        self.queue.push_back(Step::Command(remove));
    }
}
