//! An OSD's machine: its disk stays, its process starts (probe, mount, serve), ends and starts again.

use super::clock::MachineClock;
use super::disk::{Media, SharedMedia, SimDisk};
use super::plan::Options;
use super::trace::{Level, Trace};
use super::world::{Machine, SimTransport, SimWorld, Station, cluster_id, device_id};
use crate::random::Random;
use loligo_config::id::{CoreId, Epoch, Incarnation, OsdId, ShardId};
use loligo_net::transport::memory::MemoryHub;
use loligo_net::wire::mon::BootInfo;
use loligo_osd::map_client::MapClientSettings;
use loligo_osd::shard::links::ShardLinks;
use loligo_osd::shard::{Shard, ShardFailure, ShardSettings};
use loligo_osd::store::Store;
use loligo_osd::store::format::{FormatOptions, Mkfs, Probe, ProbeError};
use loligo_osd::store::mount::{Mount, MountError};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Clock, Instant};
use loligo_reactor::poller::{Activity, Poller};
use std::cell::RefCell;
use std::rc::Rc;

/// Why an OSD's process ended by itself.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Exit {
    /// It cannot use its device.
    #[error("the device cannot be used: {0}")]
    Probe(ProbeError),
    /// It cannot mount a shard.
    #[error(transparent)]
    Mount(MountError),
    /// It gave up while it ran.
    #[error(transparent)]
    Shard(ShardFailure),
}

/// What one reactor does.
enum Seat {
    /// The first one looks at the device, the others wait.
    Probing(Box<Probe<SimDisk>>),
    Waiting,
    Mounting(Box<Mount<SimDisk>>, ShardLinks, SimTransport),
    Running(Box<Shard<SimWorld>>),
    /// Between two states.
    Gone,
}

struct Reactor {
    seat: Seat,
    /// Of its queue on the device.
    queue: u32,
    transport: Option<SimTransport>,
}

struct Process {
    incarnation: Incarnation,
    reactors: Vec<Reactor>,
}

/// One OSD's machine.
pub struct OsdMachine {
    id: OsdId,
    shards: u16,
    media: SharedMedia,
    pools: Vec<BufferPool>,
    clock: MachineClock,
    hub: MemoryHub,
    trace: Trace,
    random: Random,
    replaced: u32,
    process: Option<Process>,
}

impl OsdMachine {
    /// A machine with a formatted disk, switched off.
    pub fn new(
        id: u32,
        options: &Options,
        clock: MachineClock,
        hub: &MemoryHub,
        media: Media,
        trace: &Trace,
    ) -> Self {
        let random = Random::new(options.stream(1000 + u64::from(id)));
        let pools = (0..options.shards).map(|_| BufferPool::new(options.pool_len)).collect();
        let media = Rc::new(RefCell::new(media));
        let mut machine = Self {
            id: OsdId(id),
            shards: options.shards,
            media,
            pools,
            clock,
            hub: hub.clone(),
            trace: trace.clone(),
            random,
            replaced: 0,
            process: None,
        };
        machine.format();
        machine
    }

    fn format(&mut self) {
        self.media.borrow_mut().set_instant(true);
        let options = FormatOptions {
            cluster: cluster_id(),
            osd: self.id,
            device: device_id(self.id, self.replaced),
            shards: self.shards,
            write_fully: false,
            force: false,
        };
        let mut mkfs = Mkfs::new(SimDisk::new(&self.media), options, self.pools[0].clone());
        while mkfs
            .poll(Instant(0))
            .done
            .map(|result| result.expect("an empty disk can be formatted"))
            .is_none()
        {}
        self.media.borrow_mut().set_instant(false);
    }

    /// Which machine it is.
    pub fn machine(&self) -> Machine {
        Machine::Osd(self.id.0)
    }

    /// Its clock.
    pub fn clock(&self) -> &MachineClock {
        &self.clock
    }

    /// Its disk.
    pub fn media(&self) -> &SharedMedia {
        &self.media
    }

    /// Whether its process runs.
    pub fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// Its shards that serve.
    pub fn running_shards(&self) -> impl Iterator<Item = &Shard<SimWorld>> {
        self.process.iter().flat_map(|process| &process.reactors).filter_map(|reactor| match &reactor.seat {
            Seat::Running(shard) => Some(&**shard),
            _ => None,
        })
    }

    /// Whether every shard serves.
    pub fn serves(&self) -> bool {
        self.running_shards().count() == usize::from(self.shards)
    }

    /// Starts the process, if it does not run.
    pub fn start(&mut self) {
        if self.process.is_some() {
            return;
        }
        let incarnation = Incarnation(self.random.next_u64().max(1));
        self.trace.note(Level::Faults, || format!("{} starts as {incarnation}", self.machine()));
        let mut reactors = Vec::new();
        for core in 0..self.shards {
            let name = if self.shards == 1 {
                self.machine().to_string()
            } else {
                format!("{}/{core}", self.machine())
            };
            let transport = SimTransport::new(&self.hub, self.machine().address(core), &self.trace, name);
            reactors.push(Reactor { seat: Seat::Waiting, queue: 0, transport: Some(transport) });
        }
        let disk = SimDisk::new(&self.media);
        reactors[0].queue = disk.queue();
        reactors[0].seat = Seat::Probing(Box::new(Probe::new(disk, self.pools[0].clone())));
        self.process = Some(Process { incarnation, reactors });
    }

    /// Ends the process as SIGKILL does: the device keeps its power, the kernel closes the connections.
    pub fn kill(&mut self) -> bool {
        self.process.take().is_some()
    }

    /// The machine loses its power.
    pub fn cut_power(&mut self) {
        for core in 0..self.shards {
            self.hub.lose_power(self.machine().address(core));
        }
        self.process = None;
        self.media.borrow_mut().power_cut();
    }

    /// A new disk under the old id.
    pub fn replace_disk(&mut self) {
        assert!(self.process.is_none(), "a disk is replaced when nothing runs on it");
        self.replaced += 1;
        self.media.borrow_mut().wipe();
        self.format();
    }

    /// Polls one reactor once.
    ///
    /// # Errors
    /// Why the process has ended.
    pub fn poll(&mut self, core: u16, now: Instant) -> Result<Activity, Exit> {
        let Some(process) = &mut self.process else { return Ok(Activity::Idle) };
        let reactor = &mut process.reactors[usize::from(core)];
        let result = match &mut reactor.seat {
            Seat::Probing(probe) => match probe.poll(now) {
                None => Ok(Activity::Idle),
                Some(Ok(probed)) => {
                    let expected = probed.superblock.expect(cluster_id(), self.id);
                    expected.map_err(Exit::Probe).map(|()| {
                        let links = ShardLinks::new(usize::from(self.shards));
                        for (at, links) in links.into_iter().enumerate() {
                            let disk = SimDisk::new(&self.media);
                            let reactor = &mut process.reactors[at];
                            reactor.queue = disk.queue();
                            let shard = ShardId(links.index());
                            let chunks = probed.chunks.clone();
                            let mount = Mount::new(disk, shard, chunks, self.pools[at].clone());
                            let transport = reactor.transport.take().expect("each mounts once");
                            reactor.seat = Seat::Mounting(Box::new(mount), links, transport);
                        }
                        Activity::Busy
                    })
                }
                Some(Err(error)) => Err(Exit::Probe(error)),
            },
            Seat::Mounting(mount, ..) => match mount.poll(now) {
                None => Ok(Activity::Idle),
                Some(Err(error)) => Err(Exit::Mount(error)),
                Some(Ok(store)) => {
                    let seat = std::mem::replace(&mut reactor.seat, Seat::Gone);
                    let Seat::Mounting(_, links, transport) = seat else {
                        unreachable!("it has just been mounted")
                    };
                    let incarnation = process.incarnation;
                    let shard = self.shard(core, incarnation, store, links, transport);
                    if let Some(process) = &mut self.process {
                        process.reactors[usize::from(core)].seat = Seat::Running(Box::new(shard));
                    }
                    Ok(Activity::Busy)
                }
            },
            Seat::Running(shard) => {
                let activity = shard.poll(now);
                shard.failure().map_or(Ok(activity), |failure| Err(Exit::Shard(failure)))
            }
            Seat::Waiting | Seat::Gone => Ok(Activity::Idle),
        };
        if result.is_err() {
            self.process = None;
        }
        result
    }

    fn shard(
        &mut self,
        core: u16,
        incarnation: Incarnation,
        store: Store<SimDisk>,
        links: ShardLinks,
        transport: SimTransport,
    ) -> Shard<SimWorld> {
        let pool = self.pools[usize::from(core)].clone();
        let cluster = Some(cluster_id());
        let station = Station { machine: self.machine(), core, incarnation, cluster };
        let messenger = station.messenger(transport, &pool, self.random.next_u64());
        let boot = BootInfo {
            device: device_id(self.id, self.replaced),
            addresses: (0..self.shards).map(|core| self.machine().address(core)).collect(),
            capacity: self.media.borrow().geometry_blocks() * 4096,
            host: format!("host{}", self.id.0),
            rack: "default".into(),
            device_class: "ssd".into(),
            newest_map: Epoch(0),
        };
        let mons = vec![Machine::Mon.address(0)];
        let map_client = (core == 0).then(|| MapClientSettings {
            osd: self.id,
            incarnation,
            cluster: cluster_id(),
            mons,
            boot,
        });
        let settings = ShardSettings { osd: self.id, incarnation, core: CoreId(core), pool, map_client };
        Shard::new(settings, store, messenger, self.clock.clone(), links)
    }

    /// When a reactor is to be polled next, by the true time, if nothing arrives before.
    pub fn next_deadline(&self, core: u16) -> Option<u64> {
        let reactor = self.process.as_ref()?.reactors.get(usize::from(core))?;
        let shard = match &reactor.seat {
            Seat::Running(shard) => shard.next_deadline().map(|at| self.clock.true_time(at)),
            _ => None,
        };
        let disk = self.media.borrow().next_due(reactor.queue);
        [shard, disk].into_iter().flatten().min()
    }

    /// Whether another reactor, or an earlier state of this one, has left it something to do.
    pub fn has_mail(&self, core: u16) -> bool {
        let Some(reactor) = self.process.as_ref().and_then(|process| process.reactors.get(usize::from(core)))
        else {
            return false;
        };
        match &reactor.seat {
            Seat::Running(shard) => !shard.links().receiver().is_empty(),
            Seat::Mounting(..) => self.media.borrow().next_due(reactor.queue).is_none(),
            _ => false,
        }
    }

    /// Whether a reactor takes what arrives: not before it has mounted.
    pub fn listens(&self, core: u16) -> bool {
        let reactor = self.process.as_ref().and_then(|process| process.reactors.get(usize::from(core)));
        reactor.is_some_and(|reactor| matches!(reactor.seat, Seat::Running(_)))
    }

    /// Its cores.
    pub fn cores(&self) -> u16 {
        self.shards
    }

    /// Now, by its clock.
    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Ends the process and gives its stores, for the audit. The disk completes everything at once from now on.
    pub fn into_stores(&mut self) -> Vec<Store<SimDisk>> {
        self.media.borrow_mut().set_instant(true);
        let reactors = self.process.take().into_iter().flat_map(|process| process.reactors);
        let shards = reactors.filter_map(|reactor| match reactor.seat {
            Seat::Running(shard) => Some(shard.into_store()),
            _ => None,
        });
        shards.collect()
    }
}
