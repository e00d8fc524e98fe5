//! The OSDs of this machine's development cluster, for what they spend.

use crate::args::Global;
use crate::cluster;
use crate::output::{Failure, Outcome};
use crate::process::{Identity, PidFile};
use std::path::Path;
use std::time::Duration;

/// The processes of all OSDs, if all are known.
pub struct OsdProcesses(Vec<Identity>);

impl OsdProcesses {
    /// From the pid files of `loligo dev start` beside the host file; none where one is missing, since a part of the
    /// CPU time would pass for all of it.
    ///
    /// # Errors
    /// When the host file is wrong.
    pub fn beside(global: &Global) -> Outcome<Self> {
        let path = cluster::host_file_path(global);
        let (Some(path), Some(host)) = (path, cluster::host_file(global)?) else {
            return Ok(Self(Vec::new()));
        };
        // The mons of the command line are another cluster's.
        if !global.mon.is_empty() {
            return Ok(Self(Vec::new()));
        }
        let run = path.parent().unwrap_or(Path::new("")).join("run");
        let identity = |name: String| PidFile(run.join(format!("{name}.pid"))).running();
        let all: Option<Vec<Identity>> = host.osds.iter().map(|osd| identity(osd.id.to_string())).collect();
        Ok(Self(all.unwrap_or_default()))
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// CPU time that all of them have used so far; `None` if they are not known or one has ended.
    pub fn cpu(&self) -> Option<Duration> {
        let all: Option<Vec<Duration>> = self.0.iter().map(|osd| cpu_of(*osd).ok()).collect();
        all.filter(|all| !all.is_empty()).map(|all| all.iter().sum())
    }
}

/// Of all threads, to the nanosecond: the first number of `schedstat` (kernel: Documentation/scheduler/sched-stats.rst).
fn cpu_of(process: Identity) -> Outcome<Duration> {
    let tasks = format!("/proc/{}/task", process.pid);
    let mut sum = Duration::ZERO;
    for task in std::fs::read_dir(&tasks).map_err(Failure::plain)? {
        let path = task.map_err(Failure::plain)?.path().join("schedstat");
        let text = std::fs::read_to_string(&path).map_err(Failure::plain)?;
        let nanos = text.split_whitespace().next().and_then(|word| word.parse().ok());
        sum += Duration::from_nanos(nanos.ok_or_else(|| Failure::plain("schedstat has no number"))?);
    }
    if process.is_running() { Ok(sum) } else { Err(Failure::plain("the process has ended")) }
}
