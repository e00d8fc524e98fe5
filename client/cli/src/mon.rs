//! `loligo mon run`

use crate::args::{Global, MonRunArgs};
use crate::cluster;
use crate::daemon;
use crate::output::{Failure, Outcome};
use crate::world::Os;
use loligo_config::file::PollMode;
use loligo_config::id::{ClusterId, Incarnation};
use loligo_mon::{Embedded, Mon, MonSettings};
use loligo_net::messenger::{Messenger, MessengerSettings};
use loligo_net::transport::tcp::TcpOptions;
use loligo_net::wire::handshake::{Identity, Role};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Entropy, Instant};
use loligo_reactor::os::{OsClock, OsEntropy, StopFlag};
use loligo_reactor::poller::{Activity, Poller};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Bytes that the mon's buffers may take.
const POOL_LEN_MAX: usize = 256 << 20;
const STORE_NAME: &str = "map.redb";

/// Runs a mon until told to stop.
///
/// # Errors
/// When it cannot listen, or its store cannot be used.
pub fn run(global: &Global, args: &MonRunArgs) -> Outcome {
    let stop = daemon::begin(global.log_format)?;
    let host = cluster::host_file(global)?;
    let section = host.as_ref().and_then(|host| host.mon.as_ref());
    let missing = |what: &str| {
        Failure::usage(
            format!("it is not known {what}"),
            "give it, or a host file with a [mon] section and --conf",
        )
    };
    let listen = args.listen.or(section.map(|mon| mon.listen));
    let listen = listen.ok_or_else(|| missing("where the mon listens: --listen ADDR"))?;
    let data = args.data.clone().or_else(|| section.map(|mon| mon.data.clone()));
    let data: PathBuf = data.ok_or_else(|| missing("where the mon's store is: --data DIR"))?;
    daemon::check_daemon_listen(listen, args.insecure_listen, host.as_ref())?;
    let expected = host.as_ref().and_then(|host| host.cluster.id);
    serve(listen, &data, expected, &stop)
}

fn serve(listen: SocketAddr, data: &Path, expected: Option<ClusterId>, stop: &StopFlag) -> Outcome {
    let ring = cluster::ring(256)?;
    let pool = BufferPool::new(POOL_LEN_MAX);
    let mut transport = crate::world::Network::new(&ring, &pool, TcpOptions::default());
    // The port first: a second mon on the same address must not touch the store.
    daemon::wait_for_port(listen)?;
    let address = transport.listen(listen).map_err(|error| daemon::cannot_listen(&error.to_string()))?;
    let unusable = |error: std::io::Error| {
        Failure::new(
            format!("cannot use the folder {}: {error}", data.display()),
            "choose another one with --data",
        )
    };
    std::fs::create_dir_all(data).map_err(unusable)?;
    let store = Embedded::open(&data.join(STORE_NAME)).map_err(Failure::plain)?;
    let mut entropy = OsEntropy::new();
    let incarnation = Incarnation(entropy.next_u64().max(1));
    let identity = Identity { cluster: None, role: Role::Mon, incarnation };
    let messenger = Messenger::new(MessengerSettings::new(identity, pool.clone()), transport, entropy);
    let settings = MonSettings {
        expected_cluster: expected,
        addresses: vec![address],
        ..MonSettings::new(ClusterId(uuid::Uuid::new_v4()))
    };
    let mon = Mon::new(settings, messenger, pool, OsClock, store).map_err(Failure::plain)?;
    // Nobody waits for the mon's latency: it sleeps whenever it can.
    let mut reactor = cluster::reactor(&ring, "mon", PollMode::Park, None)?;
    let mut guarded = Guarded { mon, stop: stop.clone() };
    reactor.run(&mut [&mut guarded], stop);
    if guarded.mon.has_failed() {
        return Err(Failure::new(
            format!("the store in {} cannot be written any more", data.display()),
            "look at the disk (dmesg, df), then start the mon again: nothing that was answered is lost",
        ));
    }
    Ok(())
}

/// Stops the process when the store has failed.
struct Guarded {
    mon: Mon<Os, Embedded>,
    stop: StopFlag,
}

impl Poller for Guarded {
    fn name(&self) -> &'static str {
        self.mon.name()
    }

    fn poll(&mut self, now: Instant) -> Activity {
        let activity = self.mon.poll(now);
        if self.mon.has_failed() {
            self.stop.stop();
        }
        activity
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.mon.next_deadline()
    }

    fn expecting(&self) -> bool {
        self.mon.expecting()
    }
}
