//! Opening an OSD's device, and waiting for what is done with it before a reactor runs.

use crate::daemon;
use crate::output::{Failure, Outcome};
use crate::world::Device;
use loligo_config::file::Backend;
use loligo_nvme::model::{File, Latency, Model, ModelOptions, SyncMode};
use loligo_nvme::uring::{OpenDevice, OpenError, UringOptions};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Entropy, Instant};
use loligo_reactor::os::OsEntropy;
use loligo_reactor::os::ring::Ring;
use std::path::Path;
use std::time::Duration;

/// How long to sleep at most while a device works: completions wake earlier.
const NAP: Duration = Duration::from_millis(1);

/// A device that is open and locked; it makes a queue for every reactor.
#[derive(Clone)]
pub enum Source {
    /// The kernel's.
    Uring(OpenDevice),
    /// The model before a file, with a cache for every reactor.
    Model(File),
}

impl Source {
    /// Opens a device.
    ///
    /// # Errors
    /// When it is in use, or cannot be a device.
    pub fn open(path: &Path, backend: Backend) -> Outcome<Self> {
        match backend {
            Backend::Uring => open_when_free(path).map(Self::Uring).map_err(Failure::plain),
            Backend::Model => {
                File::open(path, SyncMode::ProcessOnly).map(Self::Model).map_err(Failure::plain)
            }
        }
    }

    /// A queue of it on a reactor's ring.
    pub fn queue(&self, ring: &Ring, pool: &BufferPool) -> Device {
        match self {
            Self::Uring(device) => Device::Uring(device.queue(ring, pool)),
            Self::Model(file) => {
                let seed = OsEntropy::new().next_u64();
                // Completions at the next poll: what the model is for here is what a kill loses, not waiting.
                let latency = Latency::Polls { min: 1, max: 1 };
                let options = ModelOptions { seed, latency, queue_depth_max: 256, ..ModelOptions::default() };
                Device::Model(Box::new(Model::new(file.clone(), options)))
            }
        }
    }

    /// Whether a poll can make progress without anything arriving on the ring.
    pub fn is_model(&self) -> bool {
        matches!(self, Self::Model(_))
    }
}

/// Opens a device; one whose process was killed is waited for.
fn open_when_free(path: &Path) -> Result<OpenDevice, OpenError> {
    let held =
        |error: &OpenError| matches!(error, OpenError::InUse { pid, .. } if !pid.is_some_and(is_alive));
    daemon::when_released(|| OpenDevice::open(path, UringOptions::default()), held)
}

fn is_alive(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = status.rsplit_once(") ").map(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some(None | Some('Z' | 'X')))
}

/// Polls until there is a result, sleeping in between.
pub fn drive<R>(ring: &Ring, restless: bool, mut poll: impl FnMut(Instant) -> Option<R>) -> R {
    loop {
        let now = crate::world::now();
        if let Some(result) = poll(now) {
            return result;
        }
        ring.submit().expect("the kernel takes calls for a ring that it made");
        if ring.reap() == 0 && !restless {
            ring.wait(Some(now.after(NAP))).expect("the kernel takes calls for a ring that it made");
        }
    }
}
