//! Starting this executable again as a daemon, and stopping exactly what was started.

use crate::output::{Failure, Outcome};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long to wait for a daemon to stop by itself before it is killed.
const STOP_MAX: Duration = Duration::from_secs(15);

/// How a daemon is tied to the process that starts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tie {
    /// Not at all: its own session, running until stopped.
    None,
    /// It is killed when the starting process dies, however that happens.
    DiesWithParent,
}

/// Starts this executable with arguments, writing to a log.
///
/// # Errors
/// When the log cannot be written or the process cannot be started.
#[allow(unsafe_code, reason = "a new session and the death signal need calls between fork and exec")]
pub fn start(arguments: &[String], log: &Path, tie: Tie) -> Outcome<Child> {
    let failed = |what: &str, error: std::io::Error| Failure::new(format!("cannot {what}: {error}"), "");
    let exe = std::env::current_exe().map_err(|error| failed("find this executable", error))?;
    let output = File::options().create(true).append(true).open(log);
    let output = output.map_err(|error| failed(&format!("write {}", log.display()), error))?;
    let errors = output.try_clone().map_err(|error| failed("copy a descriptor", error))?;
    let mut command = Command::new(exe);
    command.args(arguments).stdin(Stdio::null()).stdout(output).stderr(errors);
    // The environment's cluster is not this one's.
    command.env_remove("LOLIGO_CONF").env_remove("LOLIGO_MON");
    // SAFETY: between fork and exec only async-signal-safe calls are made: setsid and prctl, without allocation.
    unsafe {
        command.pre_exec(move || {
            let result = match tie {
                Tie::None => libc::setsid(),
                Tie::DiesWithParent => libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL),
            };
            if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        });
    }
    command.spawn().map_err(|error| failed("start a daemon", error))
}

/// The last lines of a log, for error messages.
pub fn log_tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(3)..].join(" / ")
}

/// A process by number and start time, so that another one that got the same number later is never meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    started: u64,
}

impl Identity {
    /// Of a process that runs; `None` if there is none of this number, or it has ended and waits for its parent.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may contain anything; the fields follow its last parenthesis (proc_pid_stat(5)).
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let ended = matches!(fields.first(), Some(&"Z" | &"X"));
        let started = fields.get(19)?.parse().ok()?;
        (!ended).then_some(Self { pid, started })
    }

    /// Whether it still runs.
    pub fn is_running(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    #[allow(unsafe_code, reason = "the standard library sends no signals")]
    fn signal(self, signal: i32) {
        let Ok(pid) = i32::try_from(self.pid) else { return };
        if self.is_running() {
            // SAFETY: a plain system call without memory; that the number still means the same process was just checked.
            unsafe { libc::kill(pid, signal) };
        }
    }

    /// Ends it: asks, waits, then kills.
    pub fn stop(self) {
        self.signal(libc::SIGTERM);
        let end = crate::world::now().after(STOP_MAX);
        while self.is_running() {
            if crate::world::now() >= end {
                self.signal(libc::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A file that names a running daemon.
#[derive(Clone, Debug)]
pub struct PidFile(pub PathBuf);

impl PidFile {
    /// Writes it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, identity: Identity) -> Outcome {
        let text = format!("{} {}\n", identity.pid, identity.started);
        std::fs::write(&self.0, text)
            .map_err(|error| Failure::new(format!("cannot write {}: {error}", self.0.display()), ""))
    }

    /// The daemon that it names, if it still runs.
    pub fn running(&self) -> Option<Identity> {
        let text = std::fs::read_to_string(&self.0).ok()?;
        let (pid, started) = text.trim().split_once(' ')?;
        let identity = Identity { pid: pid.parse().ok()?, started: started.parse().ok()? };
        identity.is_running().then_some(identity)
    }

    /// Removes it.
    pub fn remove(&self) {
        let _ = std::fs::remove_file(&self.0); // Already gone is as good.
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_number_and_start() {
        let own = Identity::of(std::process::id()).expect("this process runs");
        assert!(own.is_running());
        let other = Identity { started: own.started + 1, ..own };
        assert!(!other.is_running(), "the same number, another start");
        assert_eq!(Identity::of(u32::MAX), None);
    }

    #[test]
    fn pid_files_name_only_what_still_runs() {
        let path = std::env::temp_dir().join(format!("loligo-pid-{}", std::process::id()));
        let file = PidFile(path);
        assert_eq!(file.running(), None);
        let own = Identity::of(std::process::id()).unwrap();
        file.write(own).unwrap();
        assert_eq!(file.running(), Some(own));
        file.write(Identity { started: own.started + 1, ..own }).unwrap();
        assert_eq!(file.running(), None);
        std::fs::write(&file.0, "garbage").unwrap();
        assert_eq!(file.running(), None);
        file.remove();
    }

    #[test]
    fn stopping_ends_the_process_and_only_it() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let identity = Identity::of(child.id()).unwrap();
        identity.stop();
        assert!(!identity.is_running());
        child.wait().unwrap();
    }
}
