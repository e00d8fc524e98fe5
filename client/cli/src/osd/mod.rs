//! `loligo osd …`

mod admission;
mod device;
mod mkfs;
mod run;

pub use mkfs::{format, place_of, shards};

use crate::args::{Global, OsdCommand};
use crate::cluster;
use crate::output::{self, Align, Outcome, Table, bytes, list, number, real, string};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// `loligo osd …`
///
/// # Errors
/// When the cluster cannot be reached, or the device cannot be used.
pub fn run(global: &Global, command: OsdCommand) -> Outcome {
    match command {
        OsdCommand::Tree => show(global, "osd tree", plain_tree),
        OsdCommand::Df => show(global, "osd df", plain_df),
        OsdCommand::Mkfs(args) => mkfs::run(global, &args),
        OsdCommand::Run(args) => run::run(global, &args),
    }
}

fn show(global: &Global, prefix: &str, plain: fn(&Value) -> String) -> Outcome {
    let answer = cluster::connect(global)?.command(json!({ "prefix": prefix }))?;
    output::show(global.format, &answer, plain);
    Ok(())
}

fn id(node: &Value) -> i64 {
    node.get("id").and_then(Value::as_i64).unwrap_or_default()
}

fn plain_tree(answer: &Value) -> String {
    let columns = [
        ("ID", Align::Right),
        ("CLASS", Align::Right),
        ("WEIGHT", Align::Right),
        ("TYPE NAME", Align::Left),
        ("STATUS", Align::Right),
        ("REWEIGHT", Align::Right),
        ("PRI-AFF", Align::Right),
    ];
    let mut table = Table::new(&columns);
    let nodes: BTreeMap<i64, &Value> = list(answer, "nodes").iter().map(|node| (id(node), node)).collect();
    let children = |node: &Value| {
        let mut ids: Vec<i64> = list(node, "children").iter().filter_map(Value::as_i64).collect();
        ids.sort_by_key(|id| (*id < 0, id.abs()));
        ids
    };
    let held: Vec<i64> = nodes.values().flat_map(|node| children(node)).collect();
    let mut stack: Vec<(i64, usize)> =
        nodes.keys().rev().filter(|id| !held.contains(id)).map(|id| (*id, 0)).collect();
    let mut left = nodes.len(); // An answer with a loop in it must end, too.
    while let Some((at, depth)) = stack.pop() {
        let Some(node) = nodes.get(&at).filter(|_| left > 0) else { continue };
        left -= 1;
        table.row(tree_row(node, depth, weight(&nodes, at, nodes.len())));
        stack.extend(children(node).into_iter().rev().map(|child| (child, depth + 1)));
    }
    table.to_string()
}

/// The weight of a node: its own, or that of what is below it.
fn weight(nodes: &BTreeMap<i64, &Value>, at: i64, deepest: usize) -> f64 {
    let Some(node) = nodes.get(&at).filter(|_| deepest > 0) else { return 0.0 };
    let below = list(node, "children").iter().filter_map(Value::as_i64);
    real(node, "crush_weight") + below.map(|child| weight(nodes, child, deepest - 1)).sum::<f64>()
}

fn tree_row(node: &Value, depth: usize, weight: f64) -> Vec<String> {
    let (kind, name) = (string(node, "type"), string(node, "name"));
    let indent = "    ".repeat(depth);
    let osd = kind == "osd";
    let named = if osd { format!("{indent}{name}") } else { format!("{indent}{kind} {name}") };
    let only = |text: String| if osd { text } else { String::new() };
    vec![
        id(node).to_string(),
        string(node, "device_class").to_owned(),
        format!("{weight:.5}"),
        named,
        only(string(node, "status").to_owned()),
        only(format!("{:.5}", real(node, "reweight"))),
        only(format!("{:.5}", node.get("primary_affinity").and_then(Value::as_f64).unwrap_or(1.0))),
    ]
}

fn plain_df(answer: &Value) -> String {
    let names =
        ["ID", "CLASS", "WEIGHT", "REWEIGHT", "SIZE", "RAW USE", "DATA", "OMAP", "META", "AVAIL", "%USE"];
    let names = names.into_iter().chain(["VAR", "PGS", "STATUS"]);
    let columns: Vec<(&str, Align)> = names.map(|name| (name, Align::Right)).collect();
    let mut table = Table::new(&columns);
    let sizes =
        |value: &Value, keys: [&str; 6]| keys.map(|key| bytes(number(value, key).saturating_mul(1024)));
    for node in list(answer, "nodes") {
        let keys = ["kb", "kb_used", "kb_used_data", "kb_used_omap", "kb_used_meta", "kb_avail"];
        let mut row = vec![id(node).to_string(), string(node, "device_class").to_owned()];
        row.extend(["crush_weight", "reweight"].map(|key| format!("{:.5}", real(node, key))));
        row.extend(sizes(node, keys));
        row.extend(["utilization", "var"].map(|key| format!("{:.2}", real(node, key))));
        row.extend([number(node, "pgs").to_string(), string(node, "status").to_owned()]);
        table.row(row);
    }
    let summary = &answer["summary"];
    let keys = ["kb", "kb_used", "kb_used_data", "kb_used_omap", "kb_used_meta", "kb_avail"];
    let totals = keys.map(|key| format!("total_{key}"));
    let mut row = vec![String::new(), String::new(), String::new(), "TOTAL".to_owned()];
    row.extend(totals.iter().map(|key| bytes(number(summary, key).saturating_mul(1024))));
    row.push(format!("{:.2}", real(summary, "average_utilization")));
    row.extend(vec![String::new(); 3]);
    table.row(row);
    format!(
        "{table}MIN/MAX VAR: {:.2}/{:.2}  STDDEV: {}\n",
        real(summary, "min_var"),
        real(summary, "max_var"),
        short(real(summary, "dev"))
    )
}

/// As Ceph prints a deviation: `0`, `1.25`.
fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_looks_as_cephs() {
        let osd = |id: i64| {
            json!({
                "id": id, "device_class": "hdd", "name": format!("osd.{id}"), "type": "osd", "crush_weight": 0.00099,
                "status": "up", "reweight": 1.0, "primary_affinity": 1.0,
            })
        };
        let answer = json!({ "nodes": [
            { "id": -1, "name": "default", "type": "root", "children": [-3] },
            { "id": -3, "name": "vm", "type": "host", "children": [2, 1, 0] },
            osd(0), osd(1), osd(2),
        ] });
        let expected = "\
ID  CLASS   WEIGHT  TYPE NAME      STATUS  REWEIGHT  PRI-AFF
-1         0.00297  root default
-3         0.00297      host vm
 0    hdd  0.00099          osd.0      up   1.00000  1.00000
 1    hdd  0.00099          osd.1      up   1.00000  1.00000
 2    hdd  0.00099          osd.2      up   1.00000  1.00000
";
        assert_eq!(plain_tree(&answer), expected);
    }

    #[test]
    fn a_tree_with_a_loop_in_it_ends() {
        let answer = json!({ "nodes": [
            { "id": -1, "type": "root", "name": "a", "children": [-2] },
            { "id": -2, "type": "host", "name": "b", "children": [-2, -1, 5] },
            { "id": -3, "type": "root", "name": "c", "children": [-2] },
        ] });
        assert!(plain_tree(&answer).lines().count() <= 4);
        assert!(plain_df(&json!([])).contains("TOTAL"));
    }

    #[test]
    fn df_looks_as_cephs() {
        let node = json!({
            "id": 0, "device_class": "hdd", "crush_weight": 0.000991, "reweight": 1, "kb": 1_048_576,
            "kb_used": 297_748, "kb_used_data": 652, "kb_used_omap": 0, "kb_used_meta": 297_088, "kb_avail": 750_828,
            "utilization": 28.395, "var": 1, "pgs": 53, "status": "up",
        });
        let summary = json!({
            "total_kb": 1_048_576, "total_kb_used": 297_748, "total_kb_used_data": 652, "total_kb_used_omap": 0,
            "total_kb_used_meta": 297_088, "total_kb_avail": 750_828, "average_utilization": 28.395,
            "min_var": 1, "max_var": 1, "dev": 0,
        });
        let expected = "\
ID  CLASS   WEIGHT  REWEIGHT   SIZE  RAW USE     DATA  OMAP     META    AVAIL   %USE   VAR  PGS  STATUS
 0    hdd  0.00099   1.00000  1 GiB  291 MiB  652 KiB   0 B  290 MiB  733 MiB  28.39  1.00   53      up
                       TOTAL  1 GiB  291 MiB  652 KiB   0 B  290 MiB  733 MiB  28.39
MIN/MAX VAR: 1.00/1.00  STDDEV: 0
";
        assert_eq!(plain_df(&json!({ "nodes": [node], "summary": summary })), expected);
    }
}
