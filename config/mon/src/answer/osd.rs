//! `osd tree`, `osd df`, `osd dump`.

use crate::core::Core;
use loligo_config::id::OsdId;
use loligo_config::map::Osd;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const RACK_DEFAULT: &str = "default";

fn weight_tib(weight: u64) -> f64 {
    // Weights are below 2^32 each: exact in the 53 bits of a double for any cluster.
    weight as f64 / 65_536.0
}

fn status(osd: &Osd) -> &'static str {
    if osd.up { "up" } else { "down" }
}

fn reweight(osd: &Osd) -> u32 {
    u32::from(osd.is_in)
}

/// As `ceph osd tree`: a root, its racks (without the rack that nobody named), hosts, OSDs.
pub(crate) fn osd_tree(core: &Core) -> Value {
    let mut racks: BTreeMap<&str, BTreeMap<&str, Vec<&Osd>>> = BTreeMap::new();
    for osd in core.map().osds.values() {
        racks.entry(&osd.rack).or_default().entry(&osd.host).or_default().push(osd);
    }
    let mut tree = Tree { nodes: Vec::new(), next: -2 };
    let mut top = Vec::new();
    for (rack, hosts) in &racks {
        if *rack == RACK_DEFAULT {
            top.extend(hosts.iter().map(|(host, osds)| tree.host(host, osds, 1)));
            continue;
        }
        let (id, at) = (tree.id(), tree.nodes.len());
        let children: Vec<i64> = hosts.iter().map(|(host, osds)| tree.host(host, osds, 2)).collect();
        let node =
            json!({ "id": id, "name": rack, "type": "rack", "type_id": 3, "depth": 1, "children": children });
        tree.nodes.insert(at, node);
        top.push(id);
    }
    let root =
        json!({ "id": -1, "name": "default", "type": "root", "type_id": 11, "depth": 0, "children": top });
    tree.nodes.insert(0, root);
    json!({ "nodes": tree.nodes, "stray": [] })
}

struct Tree {
    nodes: Vec<Value>,
    next: i64,
}

impl Tree {
    fn id(&mut self) -> i64 {
        self.next -= 1;
        self.next + 1
    }

    fn host(&mut self, name: &str, osds: &[&Osd], depth: u32) -> i64 {
        let id = self.id();
        let children: Vec<u32> = osds.iter().map(|osd| osd.id.0).collect();
        let node = json!({ "id": id, "name": name, "type": "host", "type_id": 1, "depth": depth, "children": children });
        self.nodes.push(node);
        self.nodes.extend(osds.iter().map(|osd| {
            json!({
                "id": osd.id.0,
                "device_class": osd.device_class,
                "name": osd.id.to_string(),
                "type": "osd",
                "type_id": 0,
                "crush_weight": weight_tib(osd.weight.into()),
                "depth": depth + 1,
                "exists": 1,
                "status": status(osd),
                "reweight": reweight(osd),
                "primary_affinity": 1,
            })
        }));
        id
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

/// As `ceph osd df`.
pub(crate) fn osd_df(core: &Core) -> Value {
    let (map, usage) = (core.map(), core.usage());
    let mut pgs: BTreeMap<OsdId, u64> = BTreeMap::new();
    for osd in map.intervals.values().flat_map(|interval| &interval.acting) {
        *pgs.entry(*osd).or_default() += 1;
    }
    let (mut total, mut total_used, mut total_data) = (0u64, 0u64, 0u64);
    for osd in map.osds.values() {
        total = total.saturating_add(osd.capacity);
        total_used = total_used.saturating_add(usage.report(osd.id).map_or(0, |report| report.used));
        total_data = total_data.saturating_add(usage.report(osd.id).map_or(0, |report| report.data));
    }
    let average = percent(total_used, total);
    let var = |used: f64| if average == 0.0 { 1.0 } else { used / average };
    let mut vars = Vec::new();
    let mut nodes = Vec::new();
    for osd in map.osds.values() {
        let (used, data) = usage.report(osd.id).map_or((0, 0), |report| (report.used, report.data));
        let utilization = percent(used, osd.capacity);
        vars.push(var(utilization));
        nodes.push(json!({
            "id": osd.id.0,
            "device_class": osd.device_class,
            "name": osd.id.to_string(),
            "type": "osd",
            "type_id": 0,
            "crush_weight": weight_tib(osd.weight.into()),
            "depth": 0,
            "reweight": reweight(osd),
            "kb": osd.capacity / 1024,
            "kb_used": used / 1024,
            "kb_used_data": data / 1024,
            "kb_used_omap": 0,
            "kb_used_meta": used.saturating_sub(data) / 1024,
            "kb_avail": osd.capacity.saturating_sub(used) / 1024,
            "utilization": utilization,
            "var": var(utilization),
            "pgs": pgs.get(&osd.id).copied().unwrap_or(0),
            "status": status(osd),
        }));
    }
    let fold = |pick: fn(f64, f64) -> f64| vars.iter().copied().reduce(pick).unwrap_or(1.0);
    json!({
        "nodes": nodes,
        "stray": [],
        "summary": {
            "total_kb": total / 1024,
            "total_kb_used": total_used / 1024,
            "total_kb_used_data": total_data / 1024,
            "total_kb_used_omap": 0,
            "total_kb_used_meta": total_used.saturating_sub(total_data) / 1024,
            "total_kb_avail": total.saturating_sub(total_used) / 1024,
            "average_utilization": average,
            "min_var": fold(f64::min),
            "max_var": fold(f64::max),
        },
    })
}

/// As `ceph osd dump`.
pub(crate) fn osd_dump(core: &Core) -> Value {
    let map = core.map();
    let osd = |osd: &Osd| {
        let addresses: Vec<String> = osd.addresses.iter().map(ToString::to_string).collect();
        json!({
            "osd": osd.id.0,
            "uuid": osd.device.to_string(),
            "up": u32::from(osd.up),
            "in": u32::from(osd.is_in),
            "weight": reweight(osd),
            "crush_weight": weight_tib(osd.weight.into()),
            // A text: JSON readers that know only doubles would round it.
            "incarnation": osd.incarnation.to_string(),
            "public_addr": addresses.first(),
            "public_addrs": addresses,
            "host": osd.host,
            "rack": osd.rack,
            "device_class": osd.device_class,
            "capacity": osd.capacity,
        })
    };
    let blocklist =
        map.blocklist.iter().map(|entry| json!({ "session": entry.session.0, "since": entry.since.0 }));
    json!({
        "epoch": map.epoch.0,
        "fsid": map.cluster.to_string(),
        "modified": map.modified,
        "pool_max": map.next_pool.0 - 1,
        "max_osd": map.osds.keys().last().map_or(0, |osd| osd.0 + 1),
        "pools": map.pools.values().map(super::pool).collect::<Vec<Value>>(),
        "osds": map.osds.values().map(osd).collect::<Vec<Value>>(),
        "blocklist": blocklist.collect::<Vec<Value>>(),
    })
}
