//! Finding the cluster: host file, mon addresses, a client that waits for its answers.

use crate::args::{Global, ImageArgs};
use crate::output::{Failure, Outcome};
use crate::world::{Network, Os};
use loligo_client::blocking::Blocking;
use loligo_client::{Client, ClientSettings};
use loligo_config::file::{HostFile, PollMode};
use loligo_config::id::{ClusterId, Incarnation, SessionId};
use loligo_net::messenger::{Messenger, MessengerSettings};
use loligo_net::transport::tcp::TcpOptions;
use loligo_net::wire::handshake::{Identity, Role};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::Entropy;
use loligo_reactor::os::ring::Ring;
use loligo_reactor::os::{OsClock, OsEntropy, Reactor, ReactorSettings};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where host files are looked for.
const CONF_PATHS: [&str; 2] = ["loligo-dev/loligo.toml", "/etc/loligo/loligo.toml"];
/// Bytes that a client's buffers may take.
const POOL_LEN_MAX: usize = 512 << 20;
/// Entries of a client's ring.
const RING_ENTRIES: u32 = 512;

/// A client of the real world and its loop.
pub type Connection = Blocking<Os, Reactor>;

/// The host file: the one given, else the first that is found.
///
/// # Errors
/// When it cannot be read, or something in it is wrong.
pub fn host_file(global: &Global) -> Outcome<Option<HostFile>> {
    host_file_path(global).map(|path| read_host_file(&path)).transpose()
}

/// Where the host file is: the one given, else the first that is found.
pub fn host_file_path(global: &Global) -> Option<PathBuf> {
    match &global.conf {
        Some(path) => Some(path.clone()),
        None => CONF_PATHS.iter().map(PathBuf::from).find(|path| path.exists()),
    }
}

/// Reads one host file.
///
/// # Errors
/// When it cannot be read, or something in it is wrong.
pub fn read_host_file(path: &Path) -> Outcome<HostFile> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Failure::new(
            format!("cannot read the host file {}: {error}", path.display()),
            "give another one with --conf, or name a mon with --mon ADDR",
        )
    })?;
    Ok(HostFile::parse(&path.display().to_string(), &text)?)
}

/// Where the mons are: as given, else as the host file says.
///
/// # Errors
/// When neither says it.
pub fn mons(global: &Global, host: Option<&HostFile>) -> Outcome<Vec<SocketAddr>> {
    if !global.mon.is_empty() {
        return Ok(global.mon.clone());
    }
    match host {
        Some(host) if !host.cluster.mons.is_empty() => Ok(host.cluster.mons.clone()),
        _ => Err(Failure::new(
            "it is not known where the cluster's mon is",
            "give --mon ADDR or LOLIGO_MON, or start a cluster on this host with `loligo dev start`",
        )),
    }
}

/// Which cluster a client wants.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where its mons are.
    pub mons: Vec<SocketAddr>,
    /// Which it is, if that is known: a mon of another one is refused.
    pub cluster: Option<ClusterId>,
}

/// The cluster that the command line or the host file names. The host file's id speaks of the host file's mons only.
///
/// # Errors
/// When neither says where a mon is.
pub fn target(global: &Global, host: Option<&HostFile>) -> Outcome<Target> {
    let cluster = host.filter(|_| global.mon.is_empty()).and_then(|host| host.cluster.id);
    Ok(Target { mons: mons(global, host)?, cluster })
}

/// What a client is made of, for those that run it themselves.
pub struct Parts {
    /// The ring of its reactor.
    pub ring: Ring,
    /// Its buffers.
    pub pool: BufferPool,
    /// The client; not connected yet.
    pub client: Client<Os>,
}

/// Makes a client on a new ring.
///
/// # Errors
/// When the system has no io_uring.
pub fn client(target: Target, op_timeout: Option<Duration>) -> Outcome<Parts> {
    let ring = ring(RING_ENTRIES)?;
    let pool = BufferPool::new(POOL_LEN_MAX);
    let mut entropy = OsEntropy::new();
    let incarnation = Incarnation(entropy.next_u64().max(1));
    let identity = Identity { cluster: target.cluster, role: Role::Client(SessionId(0)), incarnation };
    let transport = Network::new(&ring, &pool, TcpOptions::default());
    let messenger = Messenger::new(MessengerSettings::new(identity, pool.clone()), transport, entropy);
    let settings = ClientSettings { op_timeout, ..ClientSettings::new(target.mons, pool.clone()) };
    let client = Client::new(settings, messenger, OsClock);
    Ok(Parts { ring, pool, client })
}

/// A ring, or why there is none.
///
/// # Errors
/// When the system has no io_uring.
pub fn ring(entries: u32) -> Outcome<Ring> {
    Ring::new(entries).map_err(|error| {
        Failure::new(
            format!("the kernel gives no io_uring: {error}"),
            "Loligo needs Linux 6.1 or later with io_uring enabled (sysctl kernel.io_uring_disabled=0) \
             and a sufficient limit of locked memory (ulimit -l)",
        )
    })
}

/// A reactor for this thread.
///
/// # Errors
/// When its core is not to be had.
pub fn reactor(ring: &Ring, name: &str, mode: PollMode, core: Option<usize>) -> Outcome<Reactor> {
    let settings = ReactorSettings { core, mode, name: name.to_owned() };
    Reactor::new(settings, ring.clone()).map_err(Failure::plain)
}

/// A connected client that waits for its answers. `op_timeout`: when a request is given up, if ever.
///
/// # Errors
/// When the cluster cannot be reached within `--timeout`.
pub fn connect_with(
    target: Target,
    timeout: Duration,
    op_timeout: Option<Duration>,
    mode: PollMode,
) -> Outcome<Connection> {
    let parts = client(target, op_timeout)?;
    // `busy` needs a core of its own; a command takes the first that it may have.
    let core = match mode {
        PollMode::Busy => loligo_reactor::os::cpu::allowed_cores().map_err(Failure::plain)?.last().copied(),
        PollMode::Adaptive | PollMode::Park => None,
    };
    let reactor = reactor(&parts.ring, "client", mode, core)?;
    let mut blocking = Blocking::new(parts.client, reactor);
    blocking.connect(timeout)?;
    Ok(blocking)
}

/// A connected client for an administrative command, whose requests are given up after `--timeout`.
///
/// # Errors
/// When the cluster cannot be reached.
pub fn connect(global: &Global) -> Outcome<Connection> {
    let host = host_file(global)?;
    connect_with(target(global, host.as_ref())?, global.timeout, Some(global.timeout), PollMode::Adaptive)
}

/// A pool and an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// The pool.
    pub pool: String,
    /// The image.
    pub image: String,
}

impl ImageSpec {
    /// `pool/image`, or an image of `pool`.
    ///
    /// # Errors
    /// When there is no pool, or too much.
    pub fn parse(text: &str, pool: Option<&str>) -> Outcome<Self> {
        let wrong = |what: String| Err(Failure::usage(what, "write POOL/IMAGE, such as rbd/disk"));
        let (pool, image) = match (text.split_once('/'), pool) {
            (Some((pool, image)), None) => (pool, image),
            (Some((own, image)), Some(pool)) if own == pool => (pool, image),
            (Some(_), Some(pool)) => return wrong(format!("{text:?} and --pool {pool} name two pools")),
            (None, Some(pool)) => (pool, text),
            (None, None) => return wrong(format!("{text:?} names no pool")),
        };
        if pool.is_empty() || image.is_empty() || image.contains('/') {
            return wrong(format!("{text:?} is no image"));
        }
        Ok(Self { pool: pool.to_owned(), image: image.to_owned() })
    }

    /// From the arguments of a command.
    ///
    /// # Errors
    /// When they name no image, or two.
    pub fn from_args(args: &ImageArgs) -> Outcome<Self> {
        match (&args.spec, &args.image) {
            (Some(text), None) | (None, Some(text)) => Self::parse(text, args.pool.as_deref()),
            (Some(spec), Some(image)) => Err(Failure::usage(
                format!("{spec:?} and --image {image} name two images"),
                "give one of them",
            )),
            (None, None) => Err(Failure::usage("no image was given", "write POOL/IMAGE, such as rbd/disk")),
        }
    }
}

impl std::fmt::Display for ImageSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.pool, self.image)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_named_as_pool_and_image() {
        let parse =
            |text, pool| ImageSpec::parse(text, pool).map(|spec| spec.to_string()).map_err(|f| f.code);
        assert_eq!(parse("rbd/disk", None), Ok("rbd/disk".to_owned()));
        assert_eq!(parse("disk", Some("rbd")), Ok("rbd/disk".to_owned()));
        assert_eq!(parse("rbd/disk", Some("rbd")), Ok("rbd/disk".to_owned()));
        for (text, pool) in
            [("disk", None), ("rbd/disk", Some("vms")), ("/disk", None), ("rbd/", None), ("a/b/c", None)]
        {
            assert_eq!(parse(text, pool), Err(2), "{text} {pool:?}");
        }
    }
}
