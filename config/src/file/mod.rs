//! The host file: what runs on one machine, in TOML.
//!
//! ```toml
//! [cluster]
//! mons = ["10.0.0.1:7400"]
//!
//! [host]
//! name = "node1"
//! rack = "r1"
//!
//! [[osd]]
//! id = 0
//! device = "/dev/nvme0n1"
//! listen = "10.0.0.1:7410"
//! ```
//!
//! `config/examples/` has complete samples. Every wrong key and value is reported with file, line and key, what is
//! allowed there and the nearest valid word ([`FileError`]): a misspelt key that is silently ignored would, for
//! instance, let an OSD run with a memory target that nobody asked for. [`read`](self) walks the parsed document by
//! hand, since serde's own errors have neither the line of a wrong value nor suggestions.

mod error;
mod read;
#[cfg(test)]
mod tests;
mod value;
mod write;

pub use error::{FileError, Problem};
pub use value::Cidr;

use crate::id::{ClusterId, CoreId, OsdId};
use crate::map::AuthMode;
use crate::units::ByteLen;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Memory that one OSD aims to stay below when the file does not say: 1 GiB (DESIGN section 10).
pub const MEMORY_TARGET_DEFAULT: ByteLen = ByteLen(1 << 30);
/// Smallest memory target: 64 MiB, what an idle OSD takes (DESIGN section 10).
pub const MEMORY_TARGET_MIN: ByteLen = ByteLen(64 << 20);
/// Time between two heartbeats when the file does not say. Guessed: six fit into the default grace.
pub const HEARTBEAT_INTERVAL_DEFAULT: Duration = Duration::from_millis(500);
/// Silence after which a peer is reported when the file does not say. Guessed: a third of Ceph's 10 s and more, since
/// a closed connection is noticed at once and only a hanging peer needs the grace.
pub const HEARTBEAT_GRACE_DEFAULT: Duration = Duration::from_secs(3);

/// What a reactor does when there is nothing to do (DESIGN section 2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollMode {
    /// Never yields and never parks. Needs a core of its own.
    Busy,
    /// Spins while an answer is on its way, yields when its core is shared, parks when nothing is expected.
    #[default]
    Adaptive,
    /// Parks as soon as there is nothing to do.
    Park,
}

impl PollMode {
    /// As the host file writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Adaptive => "adaptive",
            Self::Park => "park",
        }
    }
}

/// Where reactors run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cores {
    /// One reactor, not pinned: the system chooses.
    #[default]
    Auto,
    /// One reactor pinned to each of these cores, at least one.
    Pinned(Vec<CoreId>),
}

/// How a device is driven.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// A file or a block device of the kernel's, over io_uring.
    #[default]
    Uring,
    /// A software device with a volatile write cache before a file: for tests, so that a kill is a power cut.
    Model,
}

impl Backend {
    /// As the host file writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Model => "model",
        }
    }
}

/// A whole host file with the defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFile {
    /// `[cluster]`
    pub cluster: ClusterSection,
    /// `[host]`
    pub host: HostSection,
    /// `[mon]`, when this host runs one.
    pub mon: Option<MonSection>,
    /// `[reactor]`
    pub reactor: ReactorSection,
    /// `[[osd]]`
    pub osds: Vec<OsdSection>,
    /// `[network]`
    pub network: NetworkSection,
    /// `[auth]`
    pub auth: AuthSection,
    /// `[heartbeat]`
    pub heartbeat: HeartbeatSection,
}

/// `[cluster]`: how the cluster is found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSection {
    /// Its id. Without one, the first mon that answers says which it is.
    pub id: Option<ClusterId>,
    /// Where its mons listen, at least one.
    pub mons: Vec<SocketAddr>,
}

/// `[host]`: where this machine is in the failure-domain tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSection {
    /// Its name, unique in the cluster.
    pub name: String,
    /// The rack it is in; `default` when not given.
    pub rack: String,
}

/// `[mon]`: the keeper of the map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonSection {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The folder of its store.
    pub data: PathBuf,
}

/// `[reactor]`: what holds for every daemon of this host that does not say otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReactorSection {
    /// Where reactors run.
    pub cores: Cores,
    /// What they do when idle.
    pub poll: PollMode,
    /// Memory that one OSD aims to stay below.
    pub memory_target: ByteLen,
}

impl Default for ReactorSection {
    fn default() -> Self {
        Self { cores: Cores::default(), poll: PollMode::default(), memory_target: MEMORY_TARGET_DEFAULT }
    }
}

/// One `[[osd]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OsdSection {
    /// Its id.
    pub id: OsdId,
    /// Path of its device or file.
    pub device: PathBuf,
    /// Where it listens.
    pub listen: SocketAddr,
    /// `nvme`, `ssd`, `hdd` or what the operator calls it; `ssd` when not given.
    pub device_class: String,
    /// Instead of `[reactor] cores`.
    pub cores: Option<Cores>,
    /// Instead of `[reactor] poll`.
    pub poll: Option<PollMode>,
    /// Instead of `[reactor] memory_target`.
    pub memory_target: Option<ByteLen>,
    /// An operation that its device does not end within this time fails the OSD; 10 s when not given.
    pub device_timeout: Option<Duration>,
    /// How its device is driven.
    pub backend: Backend,
}

/// `[network]`: which networks the listen addresses must be in, a guard against a daemon on the wrong wire.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkSection {
    /// Where clients and mons are. Every listen address must be in it or in `cluster`.
    pub public: Option<Cidr>,
    /// Where OSDs talk among themselves.
    pub cluster: Option<Cidr>,
}

/// `[auth]`: how peers prove who they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuthSection {
    /// The mode; the map has the same one.
    pub mode: AuthMode,
    /// Lets mode `none` listen beyond loopback (DESIGN section 9).
    pub allow_insecure: bool,
}

/// `[heartbeat]`: how a peer that hangs is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeartbeatSection {
    /// Time between two heartbeats.
    pub interval: Duration,
    /// Silence after which a peer is reported.
    pub grace: Duration,
}

impl Default for HeartbeatSection {
    fn default() -> Self {
        Self { interval: HEARTBEAT_INTERVAL_DEFAULT, grace: HEARTBEAT_GRACE_DEFAULT }
    }
}

impl HostFile {
    /// A file for this host and these mons, everything else by default.
    pub fn new(host: &str, mons: Vec<SocketAddr>) -> Self {
        Self {
            cluster: ClusterSection { id: None, mons },
            host: HostSection { name: host.to_owned(), rack: read::RACK_DEFAULT.to_owned() },
            mon: None,
            reactor: ReactorSection::default(),
            osds: Vec::new(),
            network: NetworkSection::default(),
            auth: AuthSection::default(),
            heartbeat: HeartbeatSection::default(),
        }
    }

    /// Reads a file's text; `path_name` is only for messages.
    ///
    /// # Errors
    /// The first thing that is wrong, with its line. Never panics, whatever the text.
    pub fn parse(path_name: &str, text: &str) -> Result<HostFile, FileError> {
        read::host_file(path_name, text)
    }

    /// The OSD with this id.
    pub fn osd(&self, id: OsdId) -> Option<&OsdSection> {
        self.osds.iter().find(|osd| osd.id == id)
    }

    /// Where this OSD's reactors run.
    pub fn cores<'a>(&'a self, osd: &'a OsdSection) -> &'a Cores {
        osd.cores.as_ref().unwrap_or(&self.reactor.cores)
    }

    /// What this OSD's reactors do when idle.
    pub fn poll_mode(&self, osd: &OsdSection) -> PollMode {
        osd.poll.unwrap_or(self.reactor.poll)
    }

    /// This OSD's memory target.
    pub fn memory_target(&self, osd: &OsdSection) -> ByteLen {
        osd.memory_target.unwrap_or(self.reactor.memory_target)
    }
}
