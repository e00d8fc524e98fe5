//! A client's machine: a process that opens every image and keeps some requests going.

use super::clock::MachineClock;
use super::options::Options;
use super::trace::{Level, Trace};
use super::workload::{Failure, Kind, Request, Work};
use super::world::{MILLISECOND, Machine, SECOND, SimTransport, SimWorld, Station};
use crate::random::Random;
use loligo_client::{Client, ClientEvent, ClientSettings, ImageHandle, ImageIo};
use loligo_config::id::{Epoch, Incarnation, SessionId};
use loligo_config::units::{ByteLen, ByteOffset};
use loligo_net::transport::memory::MemoryHub;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Clock, Ticket};
use loligo_reactor::poller::{Activity, Poller};
use std::time::Duration;

/// Tickets from here on are those of images that are being opened.
const OPEN_TICKETS: u64 = 1 << 32;
const POOL_LEN: usize = 64 << 20;
/// How soon a refused request or a failed opening is tried again.
const RETRY_AFTER: u64 = 100 * MILLISECOND;

/// A process that uses the client library, as the executable makes it.
pub struct ClientProcess {
    /// The library.
    pub client: Client<SimWorld>,
    /// Buffers.
    pub pool: BufferPool,
}

/// A machine that clients run on.
pub struct Host {
    machine: Machine,
    clock: MachineClock,
    hub: MemoryHub,
    trace: Trace,
    random: Random,
    pool: BufferPool,
    timeout: Option<Duration>,
}

impl Host {
    /// A machine.
    pub fn new(
        machine: Machine,
        options: &Options,
        clock: MachineClock,
        hub: &MemoryHub,
        trace: &Trace,
    ) -> Self {
        let Machine::Client(number) = machine else { panic!("{machine} is no client's machine") };
        let timeout = options.load.timeout_seconds;
        Self {
            machine,
            clock,
            hub: hub.clone(),
            trace: trace.clone(),
            random: Random::new(options.stream(2000 + u64::from(number))),
            pool: BufferPool::new(POOL_LEN),
            timeout: (timeout > 0).then(|| Duration::from_secs(timeout)),
        }
    }

    /// Its clock.
    pub fn clock(&self) -> &MachineClock {
        &self.clock
    }

    /// Starts a process. The one before must be gone.
    pub fn start(&mut self) -> ClientProcess {
        self.trace.note(Level::Faults, || format!("{} starts", self.machine));
        let incarnation = Incarnation(self.random.next_u64().max(1));
        let name = self.machine.to_string();
        let transport = SimTransport::new(&self.hub, self.machine.address(0), &self.trace, name);
        let station = Station { machine: self.machine, core: 0, incarnation, cluster: None };
        let messenger = station.messenger(transport, &self.pool, self.random.next_u64());
        let mons = vec![Machine::Mon.address(0)];
        let settings =
            ClientSettings { op_timeout: self.timeout, ..ClientSettings::new(mons, self.pool.clone()) };
        ClientProcess {
            client: Client::new(settings, messenger, self.clock.clone()),
            pool: self.pool.clone(),
        }
    }

    /// The machine loses its power.
    pub fn cut_power(&self) {
        self.hub.lose_power(self.machine.address(0));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opened {
    /// To be opened from then on.
    No(u64),
    Opening,
    Yes(ImageHandle),
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// When the next request begins, if none is out.
    next_at: u64,
    request: Option<Request>,
}

struct Session {
    process: ClientProcess,
    images: Vec<Opened>,
    slots: Vec<Slot>,
    fenced: bool,
    /// The newest map that it has seen.
    epoch: Epoch,
}

/// One client's machine.
pub struct ClientMachine {
    host: Host,
    name: String,
    depth: usize,
    /// Mean time between two requests of one slot.
    think: u64,
    session: Option<Session>,
}

impl ClientMachine {
    /// A machine, switched off.
    pub fn new(number: u32, options: &Options, clock: MachineClock, hub: &MemoryHub, trace: &Trace) -> Self {
        let machine = Machine::Client(number);
        let slots = u64::from(options.clients * options.load.depth);
        Self {
            host: Host::new(machine, options, clock, hub, trace),
            name: machine.to_string(),
            depth: options.load.depth as usize,
            think: slots * SECOND / options.load.ops_per_second,
            session: None,
        }
    }

    /// Its clock.
    pub fn clock(&self) -> &MachineClock {
        self.host.clock()
    }

    /// Whether its process runs.
    pub fn is_running(&self) -> bool {
        self.session.is_some()
    }

    /// Whether its process is fenced: only a new one goes on.
    pub fn is_fenced(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.fenced)
    }

    /// Its session, if it has one.
    pub fn session_id(&self) -> Option<SessionId> {
        self.session.as_ref()?.process.client.session()
    }

    /// The newest map of its process.
    pub fn epoch(&self) -> Option<Epoch> {
        Some(self.session.as_ref()?.process.client.map()?.epoch)
    }

    /// Starts the process, if it does not run.
    pub fn start(&mut self, work: &Work, now: u64) {
        if self.session.is_some() {
            return;
        }
        let process = self.host.start();
        let images = vec![Opened::No(now); work.images.len()];
        let slots = vec![Slot { next_at: now, request: None }; self.depth];
        self.session = Some(Session { process, images, slots, fenced: false, epoch: Epoch(0) });
    }

    /// Ends the process.
    pub fn kill(&mut self, work: &mut Work, now: u64) -> bool {
        let Some(session) = self.session.take() else { return false };
        for request in session.slots.iter().filter_map(|slot| slot.request) {
            work.abandon(now, &request);
        }
        true
    }

    /// The machine loses its power.
    pub fn cut_power(&mut self, work: &mut Work, now: u64) {
        self.host.cut_power();
        self.kill(work, now);
    }

    /// Requests without an answer.
    pub fn outstanding(&self) -> usize {
        let session = self.session.iter();
        session.flat_map(|session| &session.slots).filter(|slot| slot.request.is_some()).count()
    }

    /// What it waits for, in words.
    pub fn waits_for(&self) -> Vec<String> {
        let Some(session) = &self.session else { return vec!["it does not run".into()] };
        let requests = session.slots.iter().filter_map(|slot| slot.request);
        let mut list: Vec<_> = requests.map(|request| super::workload::describe(&request)).collect();
        if !session.process.client.is_connected() {
            list.push(format!("a mon ({:?})", session.process.client.connect_problem()));
        }
        for (at, image) in session.images.iter().enumerate() {
            if !matches!(image, Opened::Yes(_)) {
                list.push(format!("image {at} to be open"));
            }
        }
        list
    }

    /// Whether everything is open and nothing is out.
    pub fn is_at_rest(&self) -> bool {
        self.waits_for().is_empty()
    }

    /// Polls once.
    ///
    /// # Errors
    /// When it sees what it may not see.
    pub fn poll(&mut self, work: &mut Work, now: u64) -> Result<Activity, Failure> {
        let Some(session) = &mut self.session else { return Ok(Activity::Idle) };
        let mut activity = session.process.client.poll(self.host.clock.now());
        while let Some(event) = session.process.client.next_event() {
            activity = Activity::Busy;
            session.take(work, &self.name, event, now, self.think)?;
        }
        session.see_map(&self.name)?;
        if session.fenced {
            return Ok(activity);
        }
        session.open_images(work, now);
        if session.submit(work, &self.name, now, self.think) {
            activity = Activity::Busy;
        }
        Ok(activity)
    }

    /// When to poll next, by the true time, if nothing arrives before.
    pub fn next_deadline(&self, work: &Work) -> Option<u64> {
        let session = self.session.as_ref()?;
        let own = session.process.client.next_deadline().map(|at| self.host.clock.true_time(at));
        let busy = work.mode != super::workload::Mode::Drain && !session.fenced;
        let slots =
            session.slots.iter().filter(|slot| busy && slot.request.is_none()).map(|slot| slot.next_at);
        let opens = session.images.iter().filter_map(|image| match image {
            Opened::No(at) => Some(*at),
            _ => None,
        });
        let connected = session.process.client.is_connected() && !session.fenced;
        own.into_iter().chain(slots.filter(|_| connected)).chain(opens.filter(|_| connected)).min()
    }
}

impl Session {
    fn see_map(&mut self, name: &str) -> Result<(), Failure> {
        let Some(epoch) = self.process.client.map().map(|map| map.epoch) else { return Ok(()) };
        if epoch < self.epoch {
            return Err(Failure::new(format!("{name} goes back from map {} to {epoch}", self.epoch)));
        }
        self.epoch = epoch;
        Ok(())
    }

    fn take(
        &mut self,
        work: &mut Work,
        name: &str,
        event: ClientEvent,
        now: u64,
        think: u64,
    ) -> Result<(), Failure> {
        match event {
            ClientEvent::Io { ticket, result, .. } => {
                let slot = &mut self.slots[ticket.0 as usize];
                let request = slot.request.take().ok_or_else(|| {
                    Failure::new(format!("{name}: a request was answered twice (slot {})", ticket.0))
                })?;
                slot.next_at = now + work.below(2 * think + 1);
                work.end(now, name, &request, result)
            }
            ClientEvent::Opened { ticket, result } => {
                let image = (ticket.0 - OPEN_TICKETS) as usize;
                self.images[image] = match result {
                    Ok(handle) => Opened::Yes(handle),
                    Err(_) => Opened::No(now + RETRY_AFTER),
                };
                Ok(())
            }
            ClientEvent::Fenced => {
                self.fenced = true;
                Ok(())
            }
            ClientEvent::Removed { .. } => {
                Err(Failure::new(format!("{name}: an image was removed by nobody")))
            }
            _ => Ok(()),
        }
    }

    fn open_images(&mut self, work: &Work, now: u64) {
        if !self.process.client.is_connected() {
            return;
        }
        for (at, image) in self.images.iter_mut().enumerate() {
            if matches!(image, Opened::No(from) if *from <= now) {
                let Some(known) = work.images.get(at) else { continue };
                self.process.client.open(&known.pool, &known.name, Ticket(OPEN_TICKETS + at as u64));
                *image = Opened::Opening;
            }
        }
    }

    fn size(client: &Client<SimWorld>, image: Opened) -> Option<u64> {
        match image {
            Opened::Yes(handle) => Some(client.image_info(handle)?.size / 4096),
            _ => None,
        }
    }

    fn submit(&mut self, work: &mut Work, name: &str, now: u64, think: u64) -> bool {
        let scan = work.mode == super::workload::Mode::Scan;
        let mut busy = false;
        for at in 0..self.slots.len() {
            let slot = self.slots[at];
            if slot.request.is_some() || (slot.next_at > now && !scan) {
                continue;
            }
            self.slots[at].next_at = now + work.below(2 * think + 1).max(1);
            let Session { process, images, .. } = self;
            let Some(request) = work.next_request(|image| Self::size(&process.client, images[image])) else {
                self.slots[at].next_at = now + RETRY_AFTER;
                continue;
            };
            let Opened::Yes(handle) = images[request.image] else { continue };
            let Some(io) = io_of(work, &request, &process.pool) else { continue };
            if process.client.submit(handle, io, Ticket(at as u64)).is_ok() {
                work.begin(now, name, process.client.session(), &request);
                self.slots[at].request = Some(request);
                busy = true;
            } else {
                work.give_back(&request);
            }
        }
        busy
    }
}

fn io_of(work: &Work, request: &Request, pool: &BufferPool) -> Option<ImageIo> {
    let (offset, len) = (ByteOffset(request.offset), ByteLen(request.len));
    Some(match request.kind {
        Kind::Read => ImageIo::Read { offset, len },
        Kind::Discard => ImageIo::Discard { offset, len },
        Kind::WriteZeroes => ImageIo::WriteZeroes { offset, len },
        Kind::Extents => ImageIo::Extents { offset, len },
        Kind::Flush => ImageIo::Flush,
        Kind::Write => {
            let mut buffer = pool.alloc(request.len as usize).ok()?;
            work.fill(request, &mut buffer);
            ImageIo::Write { offset, data: buffer.freeze(), fua: request.op.is_multiple_of(5) }
        }
    })
}
