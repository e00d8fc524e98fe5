//! Pools: how many PGs, how many copies, over which failure domain and device class.

use crate::id::{Epoch, PoolId};
use serde::{Deserialize, Serialize};

/// The level of the failure-domain tree at which copies are kept apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureDomain {
    /// Any two OSDs: for development on one host.
    Osd,
    /// Two hosts. The default.
    #[default]
    Host,
    /// Two racks.
    Rack,
}

/// One replicated pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// Its id, never reused.
    pub id: PoolId,
    /// Its name, unique in the cluster.
    pub name: String,
    /// Copies of each object: 1 to `limits::POOL_SIZE_MAX`.
    pub size: u8,
    /// The smallest acting set that may serve: 1 to `size`. It never lowers the copies that are durable at an ack.
    pub min_size: u8,
    /// PGs: 1 to `limits::POOL_PG_COUNT_MAX`.
    pub pg_count: u32,
    /// Where two copies may not be together.
    pub failure_domain: FailureDomain,
    /// Only OSDs of this class, or any.
    pub device_class: Option<String>,
    /// The epoch in which the pool was made.
    pub created: Epoch,
}
