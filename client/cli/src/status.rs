//! `loligo status` and `loligo health`, in the looks of `ceph -s` and `ceph health detail`.

use crate::args::{Detail, Global};
use crate::cluster::{self, Connection};
use crate::output::{self, Format, Outcome, bytes, count, list, number, string};
use serde_json::{Value, json};
use std::time::Duration;

/// How often `-w` asks.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// `loligo status`.
///
/// # Errors
/// When the cluster cannot be reached.
pub fn status(global: &Global, watch: bool) -> Outcome {
    let mut cluster = cluster::connect(global)?;
    let status = cluster.command(json!({ "prefix": "status" }))?;
    output::show(global.format, &status, plain);
    if watch { self::watch(global, cluster, status) } else { Ok(()) }
}

/// Prints what has changed, until interrupted. A cluster that cannot be reached for a while is said and waited for.
fn watch(global: &Global, mut cluster: Connection, mut last: Value) -> Outcome {
    loop {
        std::thread::sleep(WATCH_EVERY);
        let status = match cluster.command(json!({ "prefix": "status" })) {
            Ok(status) => status,
            Err(error) => {
                output::line(&format!("{} {error}", clock()));
                continue;
            }
        };
        match global.format {
            Format::Plain => {
                changes(&last, &status).iter().for_each(|line| output::line(&format!("{} {line}", clock())))
            }
            Format::Json | Format::JsonPretty if status != last => {
                output::show(global.format, &status, plain)
            }
            Format::Json | Format::JsonPretty => {}
        }
        last = status;
    }
}

fn clock() -> String {
    jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%z").to_string()
}

/// The lines of one section of the plain status.
fn changes(old: &Value, new: &Value) -> Vec<String> {
    let facts = |status: &Value| {
        [
            health_line(status),
            format!("osd: {}", osd_line(&status["osdmap"])),
            format!("pgmap: {}; {}", pg_line(&status["pgmap"]).join(", "), usage_line(&status["pgmap"])),
            format!("io: {}", io_line(&status["pgmap"]).unwrap_or_else(|| "none".to_owned())),
        ]
    };
    let pairs = facts(new).into_iter().zip(facts(old));
    pairs.filter(|(new, old)| new != old).map(|(new, _)| new).collect()
}

fn health_line(status: &Value) -> String {
    with_summaries(&status["health"], ": ")
}

/// The status and what makes it so, behind `between`.
fn with_summaries(health: &Value, between: &str) -> String {
    let mut line = string(health, "status").to_owned();
    let summaries: Vec<&str> =
        counting(health).map(|(_, check)| string(&check["summary"], "message")).collect();
    if !summaries.is_empty() {
        line.push_str(&format!("{between}{}", summaries.join("; ")));
    }
    if let Some(muted) = muted_names(health) {
        line.push_str(&format!(" {muted}"));
    }
    line
}

fn is_muted(check: &Value) -> bool {
    check["muted"].as_bool().unwrap_or_default()
}

/// The checks that make the status what it is.
fn counting(health: &Value) -> impl Iterator<Item = (&String, &Value)> {
    checks(health).filter(|(_, check)| !is_muted(check))
}

/// The checks that are known and do not count, as Ceph prints them: `(muted: A B)`.
fn muted_names(health: &Value) -> Option<String> {
    let names: Vec<&str> =
        checks(health).filter(|(_, check)| is_muted(check)).map(|(name, _)| name.as_str()).collect();
    (!names.is_empty()).then(|| format!("(muted: {})", names.join(" ")))
}

/// Where more is said, if there is more to say.
fn hint(health: &Value) -> &'static str {
    if checks(health).next().is_some() { "what exactly, and what to do: loligo health detail\n" } else { "" }
}

fn checks(health: &Value) -> impl Iterator<Item = (&String, &Value)> {
    health["checks"].as_object().into_iter().flatten()
}

/// How long something lasts, as Ceph prints it: `67s`, `5m`, `3h`, `12d`.
fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

fn since(map: &Value, key: &str) -> String {
    let now = jiff::Timestamp::now().as_second();
    match map.get(key).and_then(Value::as_i64) {
        Some(then) if then > 0 => format!(" (since {})", age(u64::try_from(now - then).unwrap_or(0))),
        _ => String::new(),
    }
}

fn osd_line(osdmap: &Value) -> String {
    let (all, up, within) =
        (number(osdmap, "num_osds"), number(osdmap, "num_up_osds"), number(osdmap, "num_in_osds"));
    format!(
        "{all} osds: {up} up{}, {within} in{}",
        since(osdmap, "osd_up_since"),
        since(osdmap, "osd_in_since")
    )
}

fn pg_line(pgmap: &Value) -> Vec<String> {
    let states = list(pgmap, "pgs_by_state");
    states.iter().map(|state| format!("{} {}", number(state, "count"), string(state, "state_name"))).collect()
}

fn usage_line(pgmap: &Value) -> String {
    let of = |key: &str| bytes(number(pgmap, key));
    let unknown = match number(pgmap, "num_osds_unreported") {
        0 => String::new(),
        count => format!(" ({count} osds have not reported yet)"),
    };
    format!("{} used, {} / {} avail{unknown}", of("bytes_used"), of("bytes_avail"), of("bytes_total"))
}

fn io_line(pgmap: &Value) -> Option<String> {
    let of = |key: &str| number(pgmap, key);
    let mut parts = Vec::new();
    for (key, word) in [("read_bytes_sec", "rd"), ("write_bytes_sec", "wr")] {
        if of(key) > 0 {
            parts.push(format!("{}/s {word}", bytes(of(key))));
        }
    }
    for (key, word) in [("read_op_per_sec", "rd"), ("write_op_per_sec", "wr")] {
        if of(key) > 0 || !parts.is_empty() {
            parts.push(format!("{} op/s {word}", count(of(key))));
        }
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

fn plain(status: &Value) -> String {
    let (osdmap, pgmap, health) = (&status["osdmap"], &status["pgmap"], &status["health"]);
    let mut text = format!("  cluster:\n    id:     {}\n", string(status, "fsid"));
    text += &format!("    health: {}\n", string(health, "status"));
    for (_, check) in counting(health) {
        text += &format!("            {}\n", string(&check["summary"], "message"));
    }
    if let Some(muted) = muted_names(health) {
        text += &format!("            {muted}\n");
    }
    let mons = number(&status["monmap"], "num_mons").max(1);
    let names: Vec<&str> = list(status, "quorum_names").iter().filter_map(Value::as_str).collect();
    let quorum = if names.is_empty() { String::new() } else { format!(", quorum {}", names.join(",")) };
    let quorum_age = status.get("quorum_age").and_then(Value::as_u64);
    let quorum_age = quorum_age.map(|seconds| format!(" (age {})", age(seconds))).unwrap_or_default();
    text += &format!(
        "\n  services:\n    mon: {mons} daemons{quorum}{quorum_age}\n    osd: {}\n",
        osd_line(osdmap)
    );
    text += &format!(
        "\n  data:\n    pools:   {} pools, {} pgs\n",
        number(pgmap, "num_pools"),
        number(pgmap, "num_pgs")
    );
    let objects = count(number(pgmap, "num_objects"));
    text += &format!("    objects: {objects} objects, {}\n", bytes(number(pgmap, "data_bytes")));
    text += &format!("    usage:   {}\n", usage_line(pgmap));
    let states = pg_line(pgmap);
    let states = if states.is_empty() { vec![String::new()] } else { states };
    for (index, state) in states.iter().enumerate() {
        let label = if index == 0 { "pgs:     " } else { "         " };
        text += format!("    {label}{state}").trim_end();
        text.push('\n');
    }
    if let Some(io) = io_line(pgmap) {
        text += &format!("\n  io:\n    client:   {io}\n");
    }
    let hint = hint(health);
    if !hint.is_empty() {
        text += &format!("\n  {hint}");
    }
    text
}

/// `loligo health`.
///
/// # Errors
/// When the cluster cannot be reached.
pub fn health(global: &Global, detail: Option<Detail>) -> Outcome {
    let mut cluster = cluster::connect(global)?;
    let health = cluster.command(json!({ "prefix": "health" }))?;
    output::show(global.format, &health, |health| plain_health(health, detail.is_some()));
    Ok(())
}

fn plain_health(health: &Value, detail: bool) -> String {
    let mut text = with_summaries(health, " ");
    text.push('\n');
    if !detail {
        return text + hint(health);
    }
    for (name, check) in checks(health) {
        let severity = match string(check, "severity") {
            "HEALTH_ERR" => "ERR",
            "HEALTH_OK" => "INF",
            _ => "WRN",
        };
        let muted = if is_muted(check) { "(MUTED) " } else { "" };
        text += &format!("{muted}[{severity}] {name}: {}\n", string(&check["summary"], "message"));
        for line in list(check, "detail") {
            text += &format!("    {}\n", string(line, "message"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Ceph 16 prints it, cut to what there is here.
    fn sample() -> Value {
        json!({
            "fsid": "07106c78-6ae2-4c16-aaca-30e396ace972",
            "health": { "status": "HEALTH_WARN", "checks": { "POOL_TOO_MANY_PGS": {
                "severity": "HEALTH_WARN",
                "summary": { "message": "1 pools have too many placement groups", "count": 1 },
                "detail": [{ "message": "Pool meta has 32 placement groups, should have 32" }],
            } } },
            "quorum_names": ["a"], "quorum_age": 67, "monmap": { "num_mons": 1 },
            "osdmap": { "epoch": 32, "num_osds": 3, "num_up_osds": 3, "num_in_osds": 3 },
            "pgmap": {
                "pgs_by_state": [{ "state_name": "active+clean", "count": 65 }], "num_pgs": 65, "num_pools": 3,
                "num_objects": 44, "data_bytes": 6_846_265, "bytes_used": 914_681_856u64,
                "bytes_avail": 2_306_543_616u64, "bytes_total": 3_221_225_472u64,
                "read_bytes_sec": 15_670, "read_op_per_sec": 19, "write_op_per_sec": 0,
            },
        })
    }

    #[test]
    fn the_status_looks_as_cephs() {
        let expected = "  cluster:
    id:     07106c78-6ae2-4c16-aaca-30e396ace972
    health: HEALTH_WARN
            1 pools have too many placement groups

  services:
    mon: 1 daemons, quorum a (age 67s)
    osd: 3 osds: 3 up, 3 in

  data:
    pools:   3 pools, 65 pgs
    objects: 44 objects, 6.5 MiB
    usage:   872 MiB used, 2.1 GiB / 3 GiB avail
    pgs:     65 active+clean

  io:
    client:   15 KiB/s rd, 19 op/s rd, 0 op/s wr

  what exactly, and what to do: loligo health detail
";
        assert_eq!(plain(&sample()), expected);
    }

    #[test]
    fn what_is_not_known_yet_is_said() {
        let mut status = sample();
        status["pgmap"]["num_osds_unreported"] = json!(2);
        let line = "    usage:   872 MiB used, 2.1 GiB / 3 GiB avail (2 osds have not reported yet)\n";
        assert!(plain(&status).contains(line), "{}", plain(&status));
    }

    #[test]
    fn health_in_detail_looks_as_cephs() {
        let health = &sample()["health"];
        let first = "HEALTH_WARN 1 pools have too many placement groups\n";
        let hint = "what exactly, and what to do: loligo health detail\n";
        assert_eq!(plain_health(health, false), format!("{first}{hint}"));
        let detail = "[WRN] POOL_TOO_MANY_PGS: 1 pools have too many placement groups
    Pool meta has 32 placement groups, should have 32\n";
        assert_eq!(plain_health(health, true), format!("{first}{detail}"));
        assert_eq!(plain_health(&json!({ "status": "HEALTH_OK", "checks": {} }), true), "HEALTH_OK\n");
    }

    #[test]
    fn what_is_muted_does_not_contradict_the_status() {
        let mut status = sample();
        status["health"] = json!({ "status": "HEALTH_OK", "checks": { "AUTH_NONE": {
            "severity": "HEALTH_WARN",
            "summary": { "message": "authentication mode is none", "count": 1 },
            "detail": [{ "message": "keep it on loopback" }],
            "muted": true,
        } } });
        let health = &status["health"];
        assert!(plain(&status).contains("    health: HEALTH_OK\n            (muted: AUTH_NONE)\n\n"));
        assert!(plain_health(health, false).starts_with("HEALTH_OK (muted: AUTH_NONE)\n"));
        let detail = "HEALTH_OK (muted: AUTH_NONE)
(MUTED) [WRN] AUTH_NONE: authentication mode is none
    keep it on loopback\n";
        assert_eq!(plain_health(health, true), detail);
    }

    #[test]
    fn watching_prints_only_what_changed() {
        let (old, mut new) = (sample(), sample());
        assert!(changes(&old, &new).is_empty());
        new["osdmap"]["num_up_osds"] = json!(2);
        assert_eq!(changes(&old, &new), ["osd: 3 osds: 2 up, 3 in"]);
    }

    #[test]
    fn an_answer_of_another_shape_does_not_panic() {
        for value in [json!(null), json!([]), json!({ "health": 1, "pgmap": [], "osdmap": "x" })] {
            assert!(plain(&value).contains("cluster:"));
            plain_health(&value, true);
        }
    }
}
