//! `loligo pool …`

use crate::args::{Detail, Global, PoolCommand, PoolCreateArgs};
use crate::cluster;
use crate::output::{self, Failure, Outcome, list, number, string};
use loligo_config::pool::FailureDomain;
use serde_json::{Map, Value, json};

/// `loligo pool …`
///
/// # Errors
/// When the cluster cannot be reached or refuses.
pub fn run(global: &Global, command: PoolCommand) -> Outcome {
    match command {
        PoolCommand::Create(args) => create(global, args),
        PoolCommand::Ls { detail } => ls(global, detail),
        PoolCommand::Get { pool, key } => get(global, &pool, &key),
        PoolCommand::Set { pool, key, value } => {
            let request = json!({ "prefix": "pool set", "pool": pool, "var": key, "val": value });
            let answer = cluster::connect(global)?.command(request)?;
            output::show(global.format, &answer, |_| format!("set pool '{pool}' {key} to {value}"));
            Ok(())
        }
        PoolCommand::Rm { pool, again, yes_i_really_really_mean_it } => {
            rm(global, &pool, again.as_deref(), yes_i_really_really_mean_it)
        }
    }
}

fn create(global: &Global, args: PoolCreateArgs) -> Outcome {
    let mut request = json!({
        "prefix": "pool create",
        "pool": args.pool,
        "size": args.size,
        "failure_domain": args.failure_domain,
    });
    // What is not given is the mon's to choose.
    let mut add = |key: &str, value: Option<Value>| {
        if let (Some(value), Some(fields)) = (value, request.as_object_mut()) {
            fields.insert(key.to_owned(), value);
        }
    };
    add("min_size", args.min_size.map(Value::from));
    add("pg_count", args.pg_count.map(Value::from));
    add("device_class", args.device_class.map(Value::from));
    let mut cluster = cluster::connect(global)?;
    let answer = cluster.command(request)?;
    output::show(global.format, &answer, |_| format!("pool '{}' created", args.pool));
    // The pool is there: that its health cannot be asked for is no failure of this command.
    let health = cluster.command(json!({ "prefix": "health" })).unwrap_or_default();
    if let Some(warning) = unplaceable(&health, &args.pool, args.failure_domain) {
        eprintln!("loligo: warning: {warning}");
    }
    Ok(())
}

/// What is to be said of a new pool whose copies find no places.
fn unplaceable(health: &Value, pool: &str, domain: FailureDomain) -> Option<String> {
    let begin = format!("pool {pool}: ");
    let lines = list(&health["checks"]["POOL_UNPLACEABLE"], "detail").iter();
    let line = lines.map(|line| string(line, "message")).find(|line| line.starts_with(&begin))?;
    let again = match domain {
        FailureDomain::Osd => String::new(),
        FailureDomain::Host | FailureDomain::Rack => format!(
            "\n        on one host: loligo pool rm {pool} {pool} --yes-i-really-really-mean-it, then create it with \
             --failure-domain osd"
        ),
    };
    Some(format!("{line}{again}"))
}

fn ls(global: &Global, detail: Option<Detail>) -> Outcome {
    let mut cluster = cluster::connect(global)?;
    let request = match detail {
        Some(Detail::Detail) => json!({ "prefix": "pool ls", "detail": true }),
        None => json!({ "prefix": "pool ls" }),
    };
    let answer = cluster.command(request)?;
    output::show(global.format, &answer, |answer| {
        let pools = answer.as_array().map(Vec::as_slice).unwrap_or_default();
        pools.iter().map(|pool| pool_line(pool) + "\n").collect()
    });
    Ok(())
}

fn pool_line(pool: &Value) -> String {
    if let Some(name) = pool.as_str() {
        return name.to_owned();
    }
    let class = match string(pool, "device_class") {
        "" => String::new(),
        class => format!(" device_class {class}"),
    };
    format!(
        "pool {} '{}' replicated size {} min_size {} pg_count {} failure_domain {}{class}",
        number(pool, "pool_id"),
        string(pool, "pool_name"),
        number(pool, "size"),
        number(pool, "min_size"),
        number(pool, "pg_count"),
        string(pool, "failure_domain"),
    )
}

fn get(global: &Global, pool: &str, key: &str) -> Outcome {
    let var = Some(key).filter(|key| *key != "all");
    let request = json!({ "prefix": "pool get", "pool": pool, "var": var });
    let answer = cluster::connect(global)?.command(request)?;
    output::show(global.format, &answer, |answer| plain_settings(answer, key));
    Ok(())
}

fn plain_settings(answer: &Value, key: &str) -> String {
    let none = Map::new();
    let settings = answer.as_object().unwrap_or(&none).iter();
    let asked = settings.filter(|(name, _)| key == "all" || name.as_str() == key);
    let lines = asked.map(|(name, value)| match value.as_str() {
        Some(text) => format!("{name}: {text}\n"),
        None => format!("{name}: {value}\n"),
    });
    lines.collect()
}

fn rm(global: &Global, pool: &str, again: Option<&str>, sure: bool) -> Outcome {
    if again != Some(pool) || !sure {
        return Err(Failure::usage(
            format!("removing pool {pool:?} destroys every image in it, for ever"),
            format!("if that is what you want: loligo pool rm {pool} {pool} --yes-i-really-really-mean-it"),
        ));
    }
    let request = json!({
        "prefix": "pool rm",
        "pool": pool,
        "pool2": pool,
        "yes_i_really_really_mean_it": true,
    });
    let answer = cluster::connect(global)?.command(request)?;
    output::show(global.format, &answer, |_| format!("pool '{pool}' removed"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_listed_by_name_or_in_detail() {
        assert_eq!(pool_line(&json!("rbd")), "rbd");
        let pool = json!({
            "pool_id": 2, "pool_name": "rbd", "size": 3, "min_size": 2, "pg_count": 32, "failure_domain": "host",
        });
        assert_eq!(
            pool_line(&pool),
            "pool 2 'rbd' replicated size 3 min_size 2 pg_count 32 failure_domain host"
        );
    }

    #[test]
    fn a_pool_without_places_is_warned_of() {
        let health = json!({ "checks": { "POOL_UNPLACEABLE": { "detail": [
            { "message": "pool other: it needs 3 racks, there are 1" },
            { "message": "pool rbd: it needs 3 hosts, there are 1" },
        ] } } });
        let told = unplaceable(&health, "rbd", FailureDomain::Host).unwrap();
        assert!(told.starts_with("pool rbd: it needs 3 hosts, there are 1\n"), "{told}");
        assert!(told.contains("loligo pool rm rbd rbd") && told.contains("--failure-domain osd"), "{told}");
        let told = unplaceable(&health, "rbd", FailureDomain::Osd).unwrap();
        assert_eq!(told, "pool rbd: it needs 3 hosts, there are 1");
        assert_eq!(unplaceable(&health, "rb", FailureDomain::Host), None);
        assert_eq!(unplaceable(&Value::Null, "rbd", FailureDomain::Host), None);
    }

    #[test]
    fn settings_print_as_ceph_prints_them() {
        let answer = json!({ "pool": "rbd", "pool_id": 2, "size": 3 });
        assert_eq!(plain_settings(&answer, "size"), "size: 3\n");
        assert_eq!(plain_settings(&answer, "all"), "pool: rbd\npool_id: 2\nsize: 3\n");
    }
}
