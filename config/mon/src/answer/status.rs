//! `status`, `mon dump`, `pg dump`.

use super::health::health;
use crate::core::Core;
use loligo_config::id::PoolId;
use loligo_config::map::{ClusterMap, Interval};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// As `ceph -s`.
pub(crate) fn status(core: &Core) -> Value {
    let map = core.map();
    let count =
        |wanted: fn(&loligo_config::map::Osd) -> bool| map.osds.values().filter(|osd| wanted(osd)).count();
    json!({
        "fsid": map.cluster.to_string(),
        "health": health(core),
        "quorum": [0],
        "quorum_names": [core.settings().name],
        "monmap": { "epoch": 1, "num_mons": 1 },
        "osdmap": {
            "epoch": map.epoch.0,
            "num_osds": map.osds.len(),
            "num_up_osds": count(|osd| osd.up),
            "num_in_osds": count(|osd| osd.is_in),
            "num_remapped_pgs": 0,
        },
        "pgmap": pgmap(core),
        "progress_events": {},
    })
}

fn pgmap(core: &Core) -> Value {
    let (map, usage) = (core.map(), core.usage());
    let mut states: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut objects, mut data) = (0u64, 0u64);
    for pg in map.intervals.keys() {
        *states.entry(usage.pg_state(*pg)).or_default() += 1;
        if let Some(report) = usage.pg(*pg) {
            objects = objects.saturating_add(report.objects);
            data = data.saturating_add(report.bytes);
        }
    }
    let mut states: Vec<(&str, u64)> = states.into_iter().collect();
    states.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let states: Vec<Value> =
        states.into_iter().map(|(name, count)| json!({ "state_name": name, "count": count })).collect();
    let (mut used, mut total) = (0u64, 0u64);
    let (mut reads, mut writes, mut read, mut written) = (0u64, 0u64, 0u64, 0u64);
    for osd in map.osds.values() {
        used = used.saturating_add(usage.report(osd.id).map_or(0, |report| report.used));
        total = total.saturating_add(osd.capacity);
        let rates = usage.rates(osd.id);
        reads = reads.saturating_add(rates.reads);
        writes = writes.saturating_add(rates.writes);
        read = read.saturating_add(rates.bytes_read);
        written = written.saturating_add(rates.bytes_written);
    }
    json!({
        "pgs_by_state": states,
        "num_pgs": map.intervals.len(),
        "num_pools": map.pools.len(),
        "num_objects": objects,
        "data_bytes": data,
        "bytes_used": used,
        "bytes_avail": total.saturating_sub(used),
        "bytes_total": total,
        // Up, and silent since this mon began: what they hold is missing above.
        "num_osds_unreported": map.osds.values().filter(|osd| osd.up && usage.report(osd.id).is_none()).count(),
        "read_bytes_sec": read,
        "write_bytes_sec": written,
        "read_op_per_sec": reads,
        "write_op_per_sec": writes,
    })
}

/// As `ceph mon dump`.
pub(crate) fn mon_dump(core: &Core) -> Value {
    let settings = core.settings();
    let addresses: Vec<String> = settings.addresses.iter().map(ToString::to_string).collect();
    let addr = addresses.first().cloned().unwrap_or_default();
    json!({
        "epoch": 1,
        "fsid": core.map().cluster.to_string(),
        "mons": [{ "rank": 0, "name": settings.name, "addr": addr, "public_addrs": addresses }],
        "quorum": [0],
    })
}

/// The PGs of one pool or of all.
pub(crate) fn pg_dump(core: &Core, pool: Option<PoolId>) -> Value {
    let (map, usage): (&ClusterMap, _) = (core.map(), core.usage());
    let wanted = map.intervals.iter().filter(|(pg, _)| pool.is_none_or(|pool| pg.pool == pool));
    let line = |(pg, interval): (&loligo_config::id::PgId, &Interval)| {
        let acting: Vec<u32> = interval.acting.iter().map(|osd| osd.0).collect();
        let report = usage.pg(*pg);
        json!({
            "pgid": pg.to_string(),
            "state": usage.pg_state(*pg),
            "acting": acting,
            "acting_primary": acting.first(),
            "interval_since": interval.since.0,
            "num_objects": report.map(|report| report.objects),
            "num_bytes": report.map(|report| report.bytes),
        })
    };
    json!({ "pg_stats": wanted.map(line).collect::<Vec<Value>>() })
}
