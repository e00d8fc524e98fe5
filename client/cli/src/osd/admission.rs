//! Asking the mon whether it takes an OSD, before anything is written to its device. A mount writes, so a device that
//! was named by mistake must be refused earlier.

use crate::cluster::{self, Target};
use crate::output::{Failure, Outcome};
use crate::world::Os;
use loligo_client::blocking::Blocking;
use loligo_client::{CommandError, ConnectError};
use loligo_config::file::PollMode;
use loligo_config::id::OsdId;
use loligo_osd::store::Superblock;
use loligo_reactor::os::{Reactor, StopFlag};
use serde_json::json;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// How long a mon may take to be found. Without one the OSD starts, as it must when the whole cluster starts: the mon
/// says later what it thinks of it.
const FOUND_WITHIN: Duration = Duration::from_secs(1);
/// How long an answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// How long an older start of this OSD may take to be missed by the mon, at least: as long as a booting OSD asks. A
/// mon with a longer grace for silent peers takes that, and as much again.
const RUNNING_MAX: Duration = Duration::from_secs(15);
const ASK_EVERY: Duration = Duration::from_millis(50);
/// `EBUSY`, as the mon answers when the OSD runs.
const RUNNING: i64 = -16;

const UNCHANGED: &str = "nothing was changed: is it the right device, the right id and the right cluster?";

/// Asks whether this OSD may run on this device.
///
/// # Errors
/// When a mon says that it may not.
pub fn ask(
    mons: &[SocketAddr],
    osd: OsdId,
    path: &Path,
    superblock: &Superblock,
    grace: Duration,
    stop: &StopFlag,
) -> Outcome {
    let refused = |what: String| Failure::new(format!("{}: {what}", path.display()), UNCHANGED);
    let target = Target { mons: mons.to_vec(), cluster: Some(superblock.cluster) };
    let mut mon = match connect(target)? {
        Ok(mon) => mon,
        Err(error @ ConnectError::Refused { reason, .. }) if reason.is_final() => {
            return Err(refused(format!("it is of cluster {}, and {error}", superblock.cluster)));
        }
        Err(_) => return Ok(()),
    };
    let request = json!({ "prefix": "osd check", "id": osd.0, "device": superblock.device.to_string() });
    let end = crate::world::now().after(RUNNING_MAX.max(2 * grace));
    loop {
        match mon.command_within(request.clone(), ANSWER_WITHIN) {
            // Its own predecessor, whose connection is about to close.
            Some(Err(CommandError::Refused { code: RUNNING, .. }))
                if crate::world::now() < end && !stop.is_stopped() =>
            {
                std::thread::sleep(ASK_EVERY);
            }
            Some(Err(error @ CommandError::Refused { .. })) => return Err(refused(error.to_string())),
            Some(Ok(_) | Err(_)) | None => return Ok(()),
        }
    }
}

fn connect(target: Target) -> Outcome<Result<Blocking<Os, Reactor>, ConnectError>> {
    let parts = cluster::client(target, Some(ANSWER_WITHIN))?;
    let reactor = cluster::reactor(&parts.ring, "admission", PollMode::Park, None)?;
    let mut blocking = Blocking::new(parts.client, reactor);
    Ok(blocking.connect(FOUND_WITHIN).map(|()| blocking))
}
