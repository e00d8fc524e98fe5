//! `loligo osd run`

use super::admission;
use super::device::{Source, drive};
use crate::args::{Global, OsdRunArgs};
use crate::cluster;
use crate::daemon;
use crate::output::{Failure, Outcome};
use crate::world::{Device, Network, Os};
use loligo_config::file::{Backend, Cores, HostFile, MEMORY_TARGET_DEFAULT, PollMode};
use loligo_config::id::{CoreId, Incarnation, OsdId, ShardId};
use loligo_net::messenger::{Messenger, MessengerSettings};
use loligo_net::transport::tcp::{OwnedSocket, TcpOptions};
use loligo_net::wire::handshake::{Identity, Role};
use loligo_net::wire::mon::BootInfo;
use loligo_osd::map_client::MapClientSettings;
use loligo_osd::shard::links::ShardLinks;
use loligo_osd::shard::{Shard, ShardFailure, ShardSettings};
use loligo_osd::store::format::Probe;
use loligo_osd::store::mount::Mount;
use loligo_osd::store::{ChunkTable, Store, Superblock};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{BlockDevice, DiskError, Entropy, Instant};
use loligo_reactor::mailbox::{Receiver, Sender, mailbox};
use loligo_reactor::os::ring::Ring;
use loligo_reactor::os::{OsClock, OsEntropy, ReactorSettings, StopFlag, spawn};
use loligo_reactor::poller::{Activity, Poller};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Entries of a reactor's ring: device and sockets together.
const RING_ENTRIES: u32 = 1024;
/// Least bytes of one reactor's buffers.
const POOL_LEN_MIN: usize = 32 << 20;
/// Connections on their way from the reactor that accepts them to their own.
const HAND_OVER_MAX: usize = 256;
/// How long a mount may keep a stop waiting.
const CHECKPOINT_MAX: Duration = Duration::from_secs(5);

/// What one OSD process is to do, from flags and host file.
#[derive(Clone)]
struct Plan {
    osd: OsdId,
    device: PathBuf,
    backend: Backend,
    listen: SocketAddr,
    mons: Vec<SocketAddr>,
    mode: PollMode,
    /// One entry for each reactor; `None`: not pinned. Empty at first when nothing says how many: then as many as
    /// the device was made for.
    cores: Vec<Option<usize>>,
    memory_target: u64,
    device_timeout: Duration,
    boot_host: String,
    boot_rack: String,
    device_class: String,
    cluster: Option<loligo_config::id::ClusterId>,
    heartbeat: loligo_config::file::HeartbeatSection,
}

/// Runs an OSD until told to stop.
///
/// # Errors
/// When it cannot start, its device fails, or the mon does not take it.
pub fn run(global: &Global, args: &OsdRunArgs) -> Outcome {
    let stop = daemon::begin(global.log_format)?;
    let host = cluster::host_file(global)?;
    let mut plan = plan(global, args, host.as_ref())?;
    daemon::check_daemon_listen(plan.listen, args.insecure_listen, host.as_ref())?;
    // Early, before a device is looked at; the transport says it again if it loses a race.
    daemon::wait_for_port(plan.listen)?;
    let source = Source::open(&plan.device, plan.backend)?;
    let (superblock, chunks) = probe(&source, &plan)?;
    if plan.cores.is_empty() {
        plan.cores = vec![None; usize::from(superblock.shards)];
    }
    if usize::from(superblock.shards) != plan.cores.len() {
        return Err(Failure::new(
            format!(
                "{} was made for {} reactor(s), and {} are to run",
                plan.device.display(),
                superblock.shards,
                plan.cores.len()
            ),
            "give as many cores with --cores (host file: cores), or make the device anew with `osd mkfs --shards`",
        ));
    }
    admission::ask(&plan.mons, plan.osd, &plan.device, &superblock, plan.heartbeat.grace, &stop)?;
    run_reactors(&plan, &source, superblock, &chunks, &stop)
}

fn plan(global: &Global, args: &OsdRunArgs, host: Option<&HostFile>) -> Outcome<Plan> {
    let osd = OsdId(args.id);
    let section = host.and_then(|host| host.osd(osd));
    let missing = |what: &str| {
        Failure::usage(
            format!("it is not known {what} of {osd}"),
            format!("give it, or a host file with an [[osd]] section of id {} and --conf", args.id),
        )
    };
    let cores = match (args.cores.as_slice(), host.zip(section)) {
        ([], Some((host, section))) => match host.cores(section) {
            Cores::Pinned(cores) => cores.iter().map(|core| Some(usize::from(core.0))).collect(),
            Cores::Auto => Vec::new(),
        },
        ([], None) => Vec::new(),
        (cores, _) => cores.iter().map(|core| Some(usize::from(*core))).collect(),
    };
    let of_section = section.map_or(Backend::Uring, |section| section.backend);
    let memory = host.zip(section).map(|(host, section)| host.memory_target(section).0);
    Ok(Plan {
        osd,
        device: args
            .device
            .clone()
            .or_else(|| section.map(|section| section.device.clone()))
            .ok_or_else(|| missing("which device: --device PATH"))?,
        backend: if args.volatile_cache { Backend::Model } else { of_section },
        listen: args
            .listen
            .or(section.map(|section| section.listen))
            .ok_or_else(|| missing("the address: --listen ADDR"))?,
        mons: cluster::mons(global, host)?,
        mode: args
            .poll
            .or_else(|| host.zip(section).map(|(host, section)| host.poll_mode(section)))
            .unwrap_or_default(),
        cores,
        memory_target: args.memory_target.or(memory).unwrap_or(MEMORY_TARGET_DEFAULT.0),
        device_timeout: section
            .and_then(|section| section.device_timeout)
            .unwrap_or(loligo_osd::store::OP_LIMIT_DEFAULT),
        boot_host: host.map_or_else(daemon::host_name, |host| host.host.name.clone()),
        boot_rack: host.map_or_else(|| "default".to_owned(), |host| host.host.rack.clone()),
        device_class: section.map_or_else(|| "ssd".to_owned(), |section| section.device_class.clone()),
        cluster: host.and_then(|host| host.cluster.id),
        heartbeat: host.map(|host| host.heartbeat).unwrap_or_default(),
    })
}

fn probe(source: &Source, plan: &Plan) -> Outcome<(Superblock, Arc<ChunkTable>)> {
    let ring = cluster::ring(64)?;
    let pool = BufferPool::new(POOL_LEN_MIN);
    let mut probe = Probe::new(source.queue(&ring, &pool), pool);
    let about =
        |what: String, advice: &str| Failure::new(format!("{}: {what}", plan.device.display()), advice);
    let probed = drive(&ring, source.is_model(), |now| probe.poll(now)).map_err(|error| {
        about(
            error.to_string(),
            "name the right device with --device, or make it ready with `loligo osd mkfs`",
        )
    })?;
    let expected = plan.cluster.unwrap_or(probed.superblock.cluster);
    probed
        .superblock
        .expect(expected, plan.osd)
        .map_err(|error| about(error.to_string(), "start it under its own id, or name the right device"))?;
    Ok((probed.superblock, probed.chunks))
}

/// What one reactor's thread is given.
struct Seat {
    index: u16,
    plan: Plan,
    source: Source,
    superblock: Superblock,
    chunks: Arc<ChunkTable>,
    incarnation: Incarnation,
    links: ShardLinks,
    incoming: Receiver<OwnedSocket>,
    others: Vec<Sender<OwnedSocket>>,
    stop: StopFlag,
}

fn run_reactors(
    plan: &Plan,
    source: &Source,
    superblock: Superblock,
    chunks: &Arc<ChunkTable>,
    stop: &StopFlag,
) -> Outcome {
    let incarnation = Incarnation(OsEntropy::new().next_u64().max(1));
    let links = ShardLinks::new(plan.cores.len());
    let (senders, receivers): (Vec<_>, Vec<_>) = links.iter().map(|_| mailbox(HAND_OVER_MAX)).unzip();
    let mut threads = Vec::new();
    for (links, incoming) in links.into_iter().zip(receivers) {
        let index = links.index();
        let seat = Seat {
            index,
            plan: plan.clone(),
            source: source.clone(),
            superblock,
            chunks: Arc::clone(chunks),
            incarnation,
            links,
            incoming,
            others: if index == 0 { senders.clone() } else { Vec::new() },
            stop: stop.clone(),
        };
        let settings = reactor_settings(plan, index);
        let flag = stop.clone();
        let thread = spawn(&settings, move || {
            let result = sit(seat);
            flag.stop(); // One reactor that ends, ends the process.
            result
        });
        threads.push(thread.map_err(Failure::plain)?);
    }
    let mut outcome = Ok(());
    for thread in threads {
        let result =
            thread.join().unwrap_or_else(|_| Err(Failure::new("a reactor has panicked", "look above")));
        outcome = outcome.and(result);
    }
    outcome
}

fn reactor_settings(plan: &Plan, index: u16) -> ReactorSettings {
    let core = plan.cores.get(usize::from(index)).copied().flatten();
    ReactorSettings { core, mode: plan.mode, name: format!("{}/{index}", plan.osd) }
}

/// One reactor's life: mount, serve, stop.
fn sit(seat: Seat) -> Outcome {
    let ring = cluster::ring(RING_ENTRIES)?;
    let share = seat.plan.memory_target / 2 / seat.plan.cores.len() as u64;
    let pool = BufferPool::new(usize::try_from(share).unwrap_or(usize::MAX).max(POOL_LEN_MIN));
    let mut network = Network::new(&ring, &pool, TcpOptions::default());
    if seat.index == 0 {
        network.listen(seat.plan.listen).map_err(|error| daemon::cannot_listen(&error.to_string()))?;
    }
    let mut store = mount(&seat, &ring, &pool)?;
    store.set_op_limit(seat.plan.device_timeout);
    let settings = reactor_settings(&seat.plan, seat.index);
    let mut reactor = loligo_reactor::os::Reactor::new(settings, ring.clone()).map_err(Failure::plain)?;
    seat.links.receiver().attach(ring.waker());
    seat.incoming.attach(ring.waker());
    let (osd, index) = (seat.plan.osd.0, seat.index);
    let stop = seat.stop.clone();
    let device = seat.plan.device.clone();
    let shard = shard(seat, store, network, pool);
    let mut guarded = Guarded { shard, stop: stop.clone(), failure: None };
    reactor.run(&mut [&mut guarded], &stop);
    let counters = guarded.shard.counters();
    tracing::info!(osd, core = index, ops = counters.ops, forwarded = counters.forwarded, "the reactor ends");
    match guarded.failure {
        None => {
            checkpoint(&mut guarded.shard, &mut reactor);
            Ok(())
        }
        Some(failure @ ShardFailure::Device(error)) => {
            let failure = Failure::new(
                format!("{}: {failure}", device.display()),
                "replace the device; its data is on the other members",
            );
            if error == DiskError::Timeout {
                // To leave in good order would be to wait for the device.
                eprintln!("{failure}");
                std::process::exit(failure.code.into());
            }
            Err(failure)
        }
        Some(failure @ ShardFailure::Boot(_)) => Err(Failure::new(
            failure.to_string(),
            "is it the right device, the right id and the right cluster?",
        )),
    }
}

fn mount(seat: &Seat, ring: &Ring, pool: &BufferPool) -> Outcome<Store<Device>> {
    let device = seat.source.queue(ring, pool);
    let mut mount = Mount::new(device, ShardId(seat.index), Arc::clone(&seat.chunks), pool.clone());
    let restless = seat.source.is_model();
    drive(ring, restless, |now| mount.poll(now)).map_err(|error| {
        let what = format!("{}: cannot mount shard {}: {error}", seat.plan.device.display(), seat.index);
        Failure::new(what, "its data is on the other members; nothing was changed")
    })
}

fn shard(seat: Seat, store: Store<Device>, mut network: Network, pool: BufferPool) -> Shard<Os> {
    let Seat { index, plan, superblock, incarnation, links, incoming, others, .. } = seat;
    let core = CoreId(index);
    network.share(core, others, incoming);
    let identity = Identity { cluster: Some(superblock.cluster), role: Role::Osd(plan.osd), incarnation };
    let messenger_settings = MessengerSettings {
        core,
        ping_interval: plan.heartbeat.interval,
        ping_grace: plan.heartbeat.grace,
        ..MessengerSettings::new(identity, pool.clone())
    };
    let messenger = Messenger::new(messenger_settings, network, OsEntropy::new());
    let map_client = (index == 0).then(|| MapClientSettings {
        osd: plan.osd,
        incarnation,
        cluster: superblock.cluster,
        mons: plan.mons.clone(),
        boot: BootInfo {
            device: superblock.device,
            addresses: vec![plan.listen; plan.cores.len()],
            capacity: store.device().geometry().blocks.to_bytes().map_or(0, |len| len.0),
            host: plan.boot_host.clone(),
            rack: plan.boot_rack.clone(),
            device_class: plan.device_class.clone(),
            newest_map: loligo_config::id::Epoch(0),
        },
    });
    let settings = ShardSettings { osd: plan.osd, incarnation, core, pool, map_client };
    Shard::new(settings, store, messenger, OsClock, links)
}

/// Makes the next start short. Nothing depends on it.
fn checkpoint(shard: &mut Shard<Os>, reactor: &mut loligo_reactor::os::Reactor) {
    use loligo_reactor::poller::Turn;
    shard.store_mut().request_checkpoint();
    let end = crate::world::now().after(CHECKPOINT_MAX);
    while !shard.store().is_quiet() && crate::world::now() < end {
        reactor.turn(&mut [shard]);
    }
}

/// Stops the process when its shard must not go on.
struct Guarded {
    shard: Shard<Os>,
    stop: StopFlag,
    failure: Option<ShardFailure>,
}

impl Poller for Guarded {
    fn name(&self) -> &'static str {
        self.shard.name()
    }

    fn poll(&mut self, now: Instant) -> Activity {
        let activity = self.shard.poll(now);
        if let Some(failure) = self.shard.failure() {
            self.failure = Some(failure);
            self.stop.stop();
        }
        activity
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.shard.next_deadline()
    }

    fn expecting(&self) -> bool {
        self.shard.expecting()
    }
}
