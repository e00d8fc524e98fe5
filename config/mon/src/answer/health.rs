//! Health checks: what somebody should look at, and what to run.

use crate::core::Core;
use loligo_config::limits::PG_DEVICE_BYTES_MIN;
use loligo_config::map::{AuthMode, ClusterMap, Osd};
use loligo_config::placement;
use loligo_config::pool::{FailureDomain, Pool};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// A `pg_count` this many times below or above the suggested one is a warning. Ceph warns at 3 times.
const PG_COUNT_FACTOR: u32 = 4;
/// Lines of one check that are listed; the rest is counted.
const DETAIL_MAX: usize = 50;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    Ok,
    Warn,
    Error,
}

impl Severity {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "HEALTH_OK",
            Self::Warn => "HEALTH_WARN",
            Self::Error => "HEALTH_ERR",
        }
    }
}

struct Check {
    code: &'static str,
    severity: Severity,
    message: String,
    detail: Vec<String>,
    /// Shown, and yet no reason to warn.
    muted: bool,
}

impl Check {
    fn warn(code: &'static str, message: String, detail: Vec<String>) -> Self {
        Self { code, severity: Severity::Warn, message, detail, muted: false }
    }
}

/// As `ceph health detail`.
pub(crate) fn health(core: &Core) -> Value {
    let checks = checks(core);
    let worst = checks.iter().filter(|check| !check.muted).map(|check| check.severity).max();
    let mutes: Vec<Value> = checks
        .iter()
        .filter(|check| check.muted)
        .map(|check| json!({ "code": check.code, "sticky": true }))
        .collect();
    let checks: Map<String, Value> =
        checks.into_iter().map(|check| (check.code.to_owned(), to_json(&check))).collect();
    json!({ "status": worst.unwrap_or(Severity::Ok).as_str(), "checks": checks, "mutes": mutes })
}

fn to_json(check: &Check) -> Value {
    let count = check.detail.len();
    let mut detail: Vec<Value> =
        check.detail.iter().take(DETAIL_MAX).map(|line| json!({ "message": line })).collect();
    if count > DETAIL_MAX {
        detail.push(json!({ "message": format!("... and {} more", count - DETAIL_MAX) }));
    }
    json!({
        "severity": check.severity.as_str(),
        "summary": { "message": check.message, "count": count },
        "detail": detail,
        "muted": check.muted,
    })
}

fn checks(core: &Core) -> Vec<Check> {
    let checks = [
        outdated(core),
        auth(core),
        osd_down(core),
        osd_problem(core),
        availability(core),
        pg_count(core),
        unplaceable(core),
    ];
    checks.into_iter().flatten().collect()
}

fn auth(core: &Core) -> Option<Check> {
    let AuthMode::None = core.map().auth;
    let line = "every process that can connect reads and writes all data: keep the cluster on loopback or on a network \
                of its own";
    let message = "authentication mode is none".to_owned();
    Some(Check { muted: true, ..Check::warn("AUTH_NONE", message, vec![line.to_owned()]) })
}

fn outdated(core: &Core) -> Option<Check> {
    let (osd, epoch) = core.outdated()?;
    let line = crate::command::outdated(core.map().epoch, osd, epoch);
    let message = "the mon's store is an old copy".to_owned();
    Some(Check { severity: Severity::Error, ..Check::warn("MON_OUTDATED", message, vec![line]) })
}

fn osd_down(core: &Core) -> Option<Check> {
    let down: Vec<&Osd> = core.map().osds.values().filter(|osd| !osd.up && osd.is_in).collect();
    let line = |osd: &&Osd| {
        let (id, host, number) = (osd.id, &osd.host, osd.id.0);
        format!(
            "{id} on host {host} is down; start it there: loligo osd run --id {number}, and read what it says"
        )
    };
    let message = format!("{} osds down", down.len());
    (!down.is_empty()).then(|| Check::warn("OSD_DOWN", message, down.iter().map(line).collect()))
}

fn osd_problem(core: &Core) -> Option<Check> {
    let usage = core.usage();
    let lines: Vec<String> = core
        .map()
        .osds
        .keys()
        .flat_map(|osd| {
            usage.report(*osd).into_iter().flat_map(|report| &report.problems).map(move |text| (osd, text))
        })
        .map(|(osd, text)| format!("{osd}: {text}"))
        .collect();
    let message = format!("{} problems reported by osds", lines.len());
    (!lines.is_empty())
        .then(|| Check { severity: Severity::Error, ..Check::warn("OSD_PROBLEM", message, lines) })
}

fn availability(core: &Core) -> Option<Check> {
    let map = core.map();
    let missing = |pg: &_| {
        let down: Vec<String> =
            map.acting(*pg).iter().filter(|osd| !map.is_up(**osd)).map(ToString::to_string).collect();
        if down.is_empty() {
            "too few OSDs for it".to_owned()
        } else {
            format!("waiting for {}", down.join(", "))
        }
    };
    let usage = core.usage();
    let lines: Vec<String> = map
        .intervals
        .keys()
        .filter(|pg| !map.pg_serves(**pg) || usage.pg_state(**pg) == "incomplete")
        .map(|pg| match usage.pg_state(*pg) {
            "incomplete" => format!("pg {pg} is incomplete: a member lost writes; see the OSDs' problems"),
            state => format!("pg {pg} is {state}, {}", missing(pg)),
        })
        .collect();
    let message = format!("Reduced data availability: {} pgs inactive", lines.len());
    (!lines.is_empty())
        .then(|| Check { severity: Severity::Error, ..Check::warn("PG_AVAILABILITY", message, lines) })
}

/// A good `pg_count` for a pool of this size on the OSDs that are in.
pub(crate) fn suggested_pg_count(core: &Core, size: u8) -> u32 {
    let osds = core.newest().osds.values().filter(|osd| osd.is_in);
    let (count, cores) = osds.fold((0, 0), |(count, cores), osd| (count + 1, cores + osd.addresses.len()));
    let suggested = placement::suggested_pg_count(count, size, cores);
    // Small devices have room for few.
    let smallest = core.newest().osds.values().filter(|osd| osd.is_in).map(|osd| osd.capacity).min();
    let by_room = smallest.map_or(u64::MAX, |capacity| {
        (capacity / PG_DEVICE_BYTES_MIN).saturating_mul(count as u64) / u64::from(size.max(1))
    });
    let by_room = u32::try_from(by_room).unwrap_or(u32::MAX).max(1);
    if suggested <= by_room { suggested } else { 1 << by_room.ilog2() }
}

fn pg_count(core: &Core) -> Option<Check> {
    let wrong = |pool: &&Pool| {
        let suggested = suggested_pg_count(core, pool.size);
        let (low, high) =
            (pool.pg_count.saturating_mul(PG_COUNT_FACTOR), suggested.saturating_mul(PG_COUNT_FACTOR));
        low < suggested || pool.pg_count > high
    };
    let line = |pool: &Pool| {
        let (name, count, suggested) = (&pool.name, pool.pg_count, suggested_pg_count(core, pool.size));
        format!(
            "pool {name} has {count} placement groups, should have {suggested}; make one that has: loligo pool create \
             NEW --pg-count {suggested}, copy the images, remove {name}"
        )
    };
    let lines: Vec<String> = core.map().pools.values().filter(wrong).map(line).collect();
    let message = format!("{} pools have the wrong number of placement groups", lines.len());
    (!lines.is_empty()).then(|| Check::warn("POOL_PG_COUNT", message, lines))
}

fn unplaceable(core: &Core) -> Option<Check> {
    let map = core.map();
    let lines: Vec<String> = map.pools.values().filter_map(|pool| unplaceable_line(map, pool)).collect();
    let message = format!("{} pools have fewer places than copies", lines.len());
    (!lines.is_empty()).then(|| Check::warn("POOL_UNPLACEABLE", message, lines))
}

fn unplaceable_line(map: &ClusterMap, pool: &Pool) -> Option<String> {
    let size = usize::from(pool.size);
    let short = ClusterMap::pgs_of(pool).filter(|pg| map.acting(*pg).len() < size).count();
    if short == 0 {
        return None;
    }
    let class = |osd: &&Osd| pool.device_class.as_ref().is_none_or(|class| *class == osd.device_class);
    let domains: BTreeSet<String> = map
        .osds
        .values()
        .filter(|osd| osd.is_in && class(osd))
        .map(|osd| match pool.failure_domain {
            FailureDomain::Osd => osd.id.to_string(),
            FailureDomain::Host => osd.host.clone(),
            FailureDomain::Rack => osd.rack.clone(),
        })
        .collect();
    let (name, level, found) = (&pool.name, super::failure_domain(pool.failure_domain), domains.len());
    Some(format!(
        "pool {name}: {short} placement groups have fewer than {size} copies; it needs {size} {level}s, there are {found}: \
         start OSDs on more {level}s, or make a pool with fewer copies or, for tests, --failure-domain osd"
    ))
}
