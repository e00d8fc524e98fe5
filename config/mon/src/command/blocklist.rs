//! `blocklist`: sessions that no OSD serves any more (DESIGN section 6).

use super::{Answer, Arguments, Code, CommandError};
use crate::core::{Change, Core};
use loligo_config::id::SessionId;
use loligo_config::limits::BLOCKLIST_MAX;
use serde_json::{Value, json};

pub(super) fn add(core: &mut Core, arguments: &Arguments) -> Answer {
    let session = session(arguments)?;
    if session >= core.newest_extra().session_limit {
        let message =
            format!("{session} was never assigned; the mon's command `blocklist ls` lists what is fenced");
        return Err(CommandError::new(Code::ENOENT, message));
    }
    let known = core.newest().blocklist.iter().find(|entry| entry.session == session).copied();
    if known.is_none() && core.newest().blocklist.len() >= BLOCKLIST_MAX {
        let message = format!(
            "the blocklist has {BLOCKLIST_MAX} entries already; remove those of clients that are gone"
        );
        return Err(CommandError::new(Code::ENOSPC, message));
    }
    let since = known.map_or_else(|| core.map().epoch.next(), |entry| entry.since);
    if known.is_none() {
        core.change(true, Change::Fence(session));
    }
    core.await_fence(since);
    Ok(json!({ "session": session.0, "since": since.0 }))
}

pub(super) fn rm(core: &mut Core, arguments: &Arguments) -> Answer {
    let session = session(arguments)?;
    if !core.newest().is_fenced(session) {
        return Err(CommandError::new(Code::ENOENT, format!("{session} is not on the blocklist")));
    }
    if !arguments.flag("yes_i_really_mean_it")? {
        let message = format!(
            "{session} was fenced so that it writes no more, perhaps because another client took its lock: if it still \
             runs it could now overwrite that client's data. When it is certainly gone, add --yes-i-really-mean-it"
        );
        return Err(CommandError::new(Code::EPERM, message));
    }
    core.change(true, Change::Unfence(session));
    Ok(json!({ "session": session.0 }))
}

pub(super) fn ls(core: &mut Core, _: &Arguments) -> Answer {
    let entry = |entry: &loligo_config::map::BlocklistEntry| json!({ "session": entry.session.0, "since": entry.since.0 });
    Ok(core.newest().blocklist.iter().map(entry).collect::<Value>())
}

fn session(arguments: &Arguments) -> Result<SessionId, CommandError> {
    let session = arguments.number("session", 1, u64::MAX)?;
    session.map(SessionId).ok_or_else(|| CommandError::invalid("the argument `session` is missing"))
}
