//! What the commands answer: JSON in the shapes that Ceph's tools print, from the newest durable map and the reports.

mod health;
mod osd;
mod status;

pub(crate) use health::{health, suggested_pg_count};
pub(crate) use osd::{osd_df, osd_dump, osd_tree};
pub(crate) use status::{mon_dump, pg_dump, status};

use loligo_config::pool::{FailureDomain, Pool};
use serde_json::{Value, json};

/// A pool with all its settings.
pub(crate) fn pool(pool: &Pool) -> Value {
    json!({
        "pool_id": pool.id.0,
        "pool_name": pool.name,
        "size": pool.size,
        "min_size": pool.min_size,
        "pg_count": pool.pg_count,
        "failure_domain": failure_domain(pool.failure_domain),
        "device_class": pool.device_class,
        "create_epoch": pool.created.0,
    })
}

fn failure_domain(level: FailureDomain) -> &'static str {
    match level {
        FailureDomain::Osd => "osd",
        FailureDomain::Host => "host",
        FailureDomain::Rack => "rack",
    }
}
