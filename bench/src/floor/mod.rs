//! The floor: what the machine itself needs for a replicated durable write, measured beside it (DESIGN section 1).
//!
//! [`disk`] writes durably, alone and with as many writers at once as copies share the device; [`network`] makes round
//! trips; [`wake`] asks the clock, the scheduler and the timer. Where it matters, both ways of waiting are measured:
//! spinning and parked.

pub mod disk;
pub mod network;
pub mod wake;

use loligo_nvme::uring::OpenError;
use loligo_reactor::dma::PoolExhausted;
use loligo_reactor::env::DiskError;
use loligo_reactor::os::cpu;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why the floor could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum FloorError {
    /// A file could not be made or used.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A device holds fewer blocks than it has writers.
    #[error("{}: {blocks} blocks of 4 KiB are too few for {writers} writers", path.display())]
    TooSmall {
        /// Which.
        path: PathBuf,
        /// What it holds.
        blocks: u64,
        /// Who would share it.
        writers: usize,
    },
    /// A file could not be opened as a device.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A write failed.
    #[error("a write failed: {0}")]
    Write(#[from] DiskError),
    /// No memory.
    #[error(transparent)]
    Memory(#[from] PoolExhausted),
    /// The kernel gives no ring or takes no calls for it.
    #[error("io_uring: {0}")]
    Ring(#[source] io::Error),
    /// The network failed.
    #[error("network: {0}")]
    Network(#[source] io::Error),
}

/// How a waiting thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// It asks again and again, yielding in between.
    Spinning,
    /// It sleeps until it is woken.
    Parked,
}

impl Waiting {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Spinning, Self::Parked];

    /// In a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Spinning => "spinning",
            Self::Parked => "parked",
        }
    }
}

/// The first two cores that this process may have, for two threads that answer each other; `None` if it has but one.
/// Without pinning a busy machine puts both on one core, where an answer needs no wake-up of another core.
fn two_cores() -> Option<[usize; 2]> {
    let cores = cpu::allowed_cores().ok()?;
    Some([*cores.first()?, *cores.get(1)?])
}

/// Pins this thread to its core of the two.
fn pin(cores: Option<[usize; 2]>, index: usize) {
    if let Some(cores) = cores {
        let _ = cpu::pin(cores[index]); // Refused, it stays where the scheduler puts it.
    }
}

/// For a histogram, which holds no zero.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).max(1)
}
