//! What must survive the mon's process: the maps, the sessions handed out, the OSD ids reserved.

mod embedded;
mod memory;
#[cfg(test)]
mod tests;

pub use embedded::Embedded;
pub use memory::Memory;

use loligo_config::id::{DeviceId, OsdId, SessionId};
use loligo_config::map::{ClusterMap, MapError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What is kept beside the map, because changing it needs no new epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extra {
    /// No session from this one on was ever handed out; those below may have been, also by an earlier process.
    pub session_limit: SessionId,
    /// Ids promised to devices that have not booted yet.
    pub reserved: BTreeMap<OsdId, DeviceId>,
}

impl Default for Extra {
    fn default() -> Self {
        Self { session_limit: SessionId(1), reserved: BTreeMap::new() }
    }
}

/// Why the store cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has it.
    #[error("{path} is in use by another process: only one mon may run on a data folder; stop the other one")]
    InUse {
        /// The file.
        path: String,
    },
    /// The file holds something else.
    #[error("{path} is not a mon's store: name another data folder, or move the file away")]
    Foreign {
        /// The file.
        path: String,
    },
    /// The file was a store once.
    #[error(
        "{path} is damaged ({detail}): restore it from a backup, or rebuild the map from the OSDs; it was not changed"
    )]
    Damaged {
        /// The file.
        path: String,
        /// What was found.
        detail: String,
    },
    /// A map in it breaks the rules.
    #[error("the newest map in {path} cannot be used: {source}")]
    Map {
        /// The file.
        path: String,
        /// Why.
        source: MapError,
    },
    /// The disk.
    #[error("{path}: {detail}")]
    Io {
        /// The file.
        path: String,
        /// What the system says.
        detail: String,
    },
}

/// Keeps maps. A failed commit leaves unknown which map is the newest one: the mon stops then.
pub trait MapStore {
    /// The newest map and what is beside it; `None` when the store is new.
    ///
    /// # Errors
    /// When what is there cannot be read.
    fn load(&mut self) -> Result<Option<(ClusterMap, Extra)>, StoreError>;

    /// Returns when both are durable. Blocks for a disk flush: the mon has a reactor of its own and no data path.
    ///
    /// # Errors
    /// It is unknown what a load will find: the old or the new.
    fn commit(&mut self, map: &ClusterMap, extra: &Extra) -> Result<(), StoreError>;
}
