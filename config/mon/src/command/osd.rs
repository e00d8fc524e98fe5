//! `osd new`: an id for a device, before `loligo osd mkfs` writes both to it. `osd check`: whether an OSD would be taken,
//! before `loligo osd run` writes anything to its device.

use super::{Answer, Arguments, Code, CommandError};
use crate::core::Core;
use loligo_config::id::{DeviceId, OsdId};
use loligo_config::limits::OSDS_MAX;
use loligo_net::wire::mon::BootStatus;
use serde_json::json;

pub(super) fn new(core: &mut Core, arguments: &Arguments) -> Answer {
    let (device, wanted) = (device(arguments)?, id(arguments)?);
    let id = match (holder(core, device), wanted) {
        (Some(held), Some(wanted)) if held != wanted => {
            return Err(CommandError::new(
                Code::EEXIST,
                format!("this device is {held} already, not {wanted}"),
            ));
        }
        // Asked again, perhaps because the first answer was lost.
        (Some(held), _) => held,
        (None, Some(wanted)) if is_taken(core, wanted) => {
            let message =
                format!("{wanted} belongs to another device, for ever: leave --id out to get a free one");
            return Err(CommandError::new(Code::EEXIST, message));
        }
        (None, Some(wanted)) => wanted,
        (None, None) => lowest_free(core)?,
    };
    if holder(core, device).is_none() {
        core.newest_extra_mut().reserved.insert(id, device);
    }
    Ok(json!({ "id": id.0, "cluster": core.map().cluster.to_string() }))
}

/// Changes nothing.
pub(super) fn check(core: &mut Core, arguments: &Arguments) -> Answer {
    let device = device(arguments)?;
    let id = id(arguments)?.ok_or_else(|| CommandError::invalid("the argument `id` is missing"))?;
    let refused = |status: BootStatus| {
        let code = if status == BootStatus::Running { Code::EBUSY } else { Code::EEXIST };
        CommandError::new(code, format!("the mon would refuse {id}: {status}"))
    };
    core.may_boot(id, device).map_err(refused)?;
    Ok(json!({ "id": id.0, "cluster": core.map().cluster.to_string() }))
}

fn device(arguments: &Arguments) -> Result<DeviceId, CommandError> {
    let device = arguments.required_text("device")?;
    let device = device.parse::<uuid::Uuid>().ok().filter(|device| !device.is_nil());
    let wrong = || CommandError::invalid("`device` must be a UUID that is not all zeroes");
    device.map(DeviceId).ok_or_else(wrong)
}

fn id(arguments: &Arguments) -> Result<Option<OsdId>, CommandError> {
    let id = arguments.number("id", 0, OSDS_MAX as u64 - 1)?;
    Ok(id.and_then(|id| u32::try_from(id).ok()).map(OsdId))
}

fn holder(core: &Core, device: DeviceId) -> Option<OsdId> {
    let booted = core.newest().osds.values().find(|osd| osd.device == device).map(|osd| osd.id);
    let reserved = || core.newest_extra().reserved.iter().find(|(_, reserved)| **reserved == device);
    booted.or_else(|| reserved().map(|(id, _)| *id))
}

fn is_taken(core: &Core, id: OsdId) -> bool {
    core.newest().osds.contains_key(&id) || core.newest_extra().reserved.contains_key(&id)
}

fn lowest_free(core: &Core) -> Result<OsdId, CommandError> {
    let ids = (0..u32::try_from(OSDS_MAX).unwrap_or(u32::MAX)).map(OsdId);
    let full = || CommandError::new(Code::ENOSPC, format!("the cluster has {OSDS_MAX} OSDs already"));
    ids.into_iter().find(|id| !is_taken(core, *id)).ok_or_else(full)
}
