//! `pool`: making, changing and removing pools.

use super::{Answer, Arguments, Code, CommandError};
use crate::answer;
use crate::core::{Change, Core};
use loligo_config::id::{Epoch, PoolId};
use loligo_config::limits::{CLUSTER_PG_COUNT_MAX, POOL_PG_COUNT_MAX, POOL_SIZE_MAX, POOLS_MAX};
use loligo_config::map::{ClusterMap, check_name};
use loligo_config::pool::{FailureDomain, Pool};
use serde_json::{Value, json};

pub(super) const CREATE_ARGUMENTS: [&str; 6] =
    ["pool", "size", "min_size", "pg_count", "failure_domain", "device_class"];
/// Copies of a new pool: what Ceph's users expect.
const SIZE_DEFAULT: u8 = 3;
const SETTINGS: [&str; 5] = ["size", "min_size", "pg_count", "failure_domain", "device_class"];

pub(super) fn create(core: &mut Core, arguments: &Arguments) -> Answer {
    let name = arguments.required_text("pool")?;
    check_name(name)
        .map_err(|error| CommandError::invalid(format!("{name:?} cannot be a pool's name: {error}")))?;
    if core.newest().pool_by_name(name).is_some() {
        let message =
            format!("there is a pool {name:?} already; choose another name, or `loligo pool get {name}`");
        return Err(CommandError::new(Code::EEXIST, message));
    }
    let size = byte(arguments, "size", POOL_SIZE_MAX)?.unwrap_or(SIZE_DEFAULT);
    let min_size = byte(arguments, "min_size", size)?.unwrap_or((size - 1).max(1));
    let suggested = answer::suggested_pg_count(core, size);
    let pg_count = arguments.number("pg_count", 1, POOL_PG_COUNT_MAX.into())?;
    let pg_count = pg_count.and_then(|count| u32::try_from(count).ok()).unwrap_or(suggested);
    check_room(core, pg_count)?;
    let device_class = arguments.text("device_class")?;
    if let Some(class) = device_class {
        check_class(core, class)?;
    }
    let pool = Pool {
        id: PoolId(0),
        name: name.to_owned(),
        size,
        min_size,
        pg_count,
        failure_domain: failure_domain(arguments)?,
        device_class: device_class.map(str::to_owned),
        created: Epoch(0),
    };
    core.change(true, Change::PoolCreate(pool));
    Ok(core.newest().pool_by_name(name).map(answer::pool).unwrap_or_default())
}

fn check_room(core: &Core, pg_count: u32) -> Result<(), CommandError> {
    let pools = &core.newest().pools;
    if pools.len() >= POOLS_MAX {
        return Err(CommandError::new(Code::ENOSPC, format!("the cluster has {POOLS_MAX} pools already")));
    }
    let pgs: u64 = pools.values().map(|pool| u64::from(pool.pg_count)).sum();
    if pgs + u64::from(pg_count) > CLUSTER_PG_COUNT_MAX {
        let message = format!(
            "the cluster has {pgs} PGs; {pg_count} more are above {CLUSTER_PG_COUNT_MAX}: choose a smaller pg_count"
        );
        return Err(CommandError::new(Code::ENOSPC, message));
    }
    Ok(())
}

fn check_class(core: &Core, class: &str) -> Result<(), CommandError> {
    check_name(class)
        .map_err(|error| CommandError::invalid(format!("{class:?} cannot be a device class: {error}")))?;
    let mut classes: Vec<&str> = core.newest().osds.values().map(|osd| osd.device_class.as_str()).collect();
    classes.sort_unstable();
    classes.dedup();
    if classes.contains(&class) {
        return Ok(());
    }
    let message = format!("no OSD is of the device class {class:?}; there are: {}", classes.join(", "));
    Err(CommandError::new(Code::ENOENT, message))
}

fn failure_domain(arguments: &Arguments) -> Result<FailureDomain, CommandError> {
    match arguments.text("failure_domain")? {
        None | Some("host") => Ok(FailureDomain::Host),
        Some("osd") => Ok(FailureDomain::Osd),
        Some("rack") => Ok(FailureDomain::Rack),
        Some(other) => {
            Err(CommandError::invalid(format!("`failure_domain` must be osd, host or rack, not {other:?}")))
        }
    }
}

fn byte(arguments: &Arguments, key: &str, max: u8) -> Result<Option<u8>, CommandError> {
    let number = arguments.number(key, 1, max.into())?;
    Ok(number.and_then(|number| u8::try_from(number).ok()))
}

fn find(core: &Core, name: &str) -> Result<Pool, CommandError> {
    let missing =
        || CommandError::new(Code::ENOENT, format!("there is no pool {name:?}; `loligo pool ls` lists them"));
    core.newest().pool_by_name(name).cloned().ok_or_else(missing)
}

pub(super) fn ls(core: &mut Core, arguments: &Arguments) -> Answer {
    let pools = core.newest().pools.values();
    if arguments.flag("detail")? {
        return Ok(pools.map(answer::pool).collect());
    }
    Ok(pools.map(|pool| Value::from(pool.name.as_str())).collect())
}

pub(super) fn get(core: &mut Core, arguments: &Arguments) -> Answer {
    let pool = find(core, arguments.required_text("pool")?)?;
    let all = answer::pool(&pool);
    let mut answer = json!({ "pool": pool.name, "pool_id": pool.id.0 });
    match arguments.text("var")?.filter(|var| *var != "all") {
        None => SETTINGS.iter().for_each(|key| answer[key] = all[key].clone()),
        // Under the name that was asked for.
        Some(var) if SETTINGS.contains(&setting(var)) => answer[var] = all[setting(var)].clone(),
        Some(var) => return Err(unknown_setting(var)),
    }
    Ok(answer)
}

/// A setting's own name: Ceph's word for the number of PGs is another.
fn setting(var: &str) -> &str {
    if var == "pg_num" { "pg_count" } else { var }
}

fn unknown_setting(var: &str) -> CommandError {
    CommandError::invalid(format!("pools have no setting {var:?}; they have: {}", SETTINGS.join(", ")))
}

/// Refuses a `min_size` above the members of a PG that may serve now: it would count as a PG that never served, be given
/// other members, and these have none of its data.
fn check_min_size(core: &Core, pool: &Pool, min_size: u8) -> Result<(), CommandError> {
    let map = core.newest();
    let members = |pg| map.acting(pg).len();
    let serving = ClusterMap::pgs_of(pool).filter(|pg| members(*pg) >= usize::from(pool.min_size));
    let Some(short) = serving.min_by_key(|pg| members(*pg)).filter(|pg| members(*pg) < usize::from(min_size))
    else {
        return Ok(());
    };
    let message = format!(
        "pg {short} has {} member(s), fewer than {min_size}, and may hold data: make a pool with this min_size and copy \
         the images",
        members(short)
    );
    Err(CommandError::new(Code::EOPNOTSUPP, message))
}

pub(super) fn set(core: &mut Core, arguments: &Arguments) -> Answer {
    let pool = find(core, arguments.required_text("pool")?)?;
    let refused = |message: &str| Err(CommandError::new(Code::EOPNOTSUPP, message));
    match setting(arguments.required_text("var")?) {
        "min_size" => {
            let missing = || CommandError::invalid("the argument `val` is missing");
            let min_size = arguments.number_called("val", "min_size", 1, pool.size.into())?;
            let min_size = min_size.and_then(|size| u8::try_from(size).ok()).ok_or_else(missing)?;
            check_min_size(core, &pool, min_size)?;
            if min_size != pool.min_size {
                core.change(true, Change::PoolMinSize(pool.id, min_size));
            }
        }
        "size" => {
            return refused(
                "the number of copies of a pool cannot be changed yet, since data would have to be copied: make a pool \
                 of the wanted size and copy the images",
            );
        }
        "pg_count" => {
            return refused(
                "the number of PGs of a pool cannot be changed yet, since PGs would have to be split: make a pool with \
                 the wanted pg_count and copy the images",
            );
        }
        var @ ("failure_domain" | "device_class") => {
            return refused(&format!(
                "`{var}` cannot be changed, since data would have to move: make a new pool and copy the images"
            ));
        }
        var => return Err(unknown_setting(var)),
    }
    find(core, &pool.name).map(|pool| answer::pool(&pool))
}

pub(super) fn rm(core: &mut Core, arguments: &Arguments) -> Answer {
    let pool = find(core, arguments.required_text("pool")?)?;
    let again = arguments.text("pool2")?;
    if again != Some(pool.name.as_str()) || !arguments.flag("yes_i_really_really_mean_it")? {
        let name = &pool.name;
        let message = format!(
            "removing pool {name:?} destroys all its images for ever. If you are certain, name it twice and add the flag: \
             loligo pool rm {name} {name} --yes-i-really-really-mean-it"
        );
        return Err(CommandError::new(Code::EPERM, message));
    }
    core.change(true, Change::PoolRemove(pool.id));
    Ok(json!({ "pool": pool.name, "pool_id": pool.id.0 }))
}

pub(super) fn pg_dump(core: &mut Core, arguments: &Arguments) -> Answer {
    let pool = arguments.text("pool")?.map(|name| find(core, name)).transpose()?;
    Ok(answer::pg_dump(core, pool.map(|pool| pool.id)))
}
