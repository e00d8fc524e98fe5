//! What every daemon does: closes what it inherited, writes a log, stops on a signal, listens where it may.

use crate::args::LogFormat;
use crate::output::{Failure, Outcome};
use loligo_config::file::HostFile;
use loligo_reactor::os::StopFlag;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// How long a daemon may take to stop in order. A second signal ends it at once.
const STOP_MAX: Duration = Duration::from_secs(10);

/// How long a port or a device may stay held after the process that had it is gone.
const RELEASE_MAX: Duration = Duration::from_secs(3);

/// Prepares this process to run as a daemon and returns the flag that signals raise.
///
/// # Errors
/// When the system gives no signals or no thread.
pub fn begin(log: LogFormat) -> Outcome<StopFlag> {
    close_inherited();
    start_log(log);
    let stop = StopFlag::new();
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(Failure::plain)?;
    let flag = stop.clone();
    let watch = move || {
        for (count, _) in signals.forever().enumerate() {
            flag.stop();
            if count > 0 {
                std::process::exit(1);
            }
            // Crash-safe is the rule: whoever does not get to an orderly end loses nothing by this.
            std::thread::spawn(|| {
                std::thread::sleep(STOP_MAX);
                std::process::exit(1);
            });
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(Failure::plain)?;
    Ok(stop)
}

/// Closes every descriptor above the standard ones: a listening socket or a lock of the starting process, kept open
/// here, would outlive it.
#[allow(unsafe_code, reason = "no safe call closes descriptors that are nobody's")]
fn close_inherited() {
    // SAFETY: called before anything of this process was opened, so that no descriptor above 2 has an owner here.
    unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32) };
}

fn start_log(format: LogFormat) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LOLIGO_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
}

/// Refuses to listen beyond loopback while nobody proves who they are (DESIGN section 9).
///
/// # Errors
/// When the address is not loopback and neither the command nor the host file allows it.
pub fn check_listen(address: SocketAddr, forced: bool, host: Option<&HostFile>) -> Outcome {
    let allowed = forced || host.is_some_and(|host| host.auth.allow_insecure);
    if address.ip().is_loopback() || allowed {
        return Ok(());
    }
    Err(Failure::new(
        format!(
            "{address} can be reached from other machines, and with authentication mode none anybody there could read and write everything"
        ),
        "listen on 127.0.0.1 or ::1, or add --insecure-listen (host file: [auth] allow_insecure = true) on a network that you trust",
    ))
}

/// As [`check_listen`], for the daemons that peers must reach: the address must also be in one of the host file's networks.
///
/// # Errors
/// When it may not be listened on.
pub fn check_daemon_listen(address: SocketAddr, forced: bool, host: Option<&HostFile>) -> Outcome {
    check_listen(address, forced, host)?;
    let Some(host) = host else { return Ok(()) };
    let networks = [host.network.public, host.network.cluster];
    let mut networks = networks.iter().flatten().peekable();
    if networks.peek().is_some() && !networks.any(|network| network.contains(address.ip())) {
        return Err(Failure::new(
            format!("{address} is in neither of the networks of [network] in the host file"),
            "listen on an address that is, or correct [network]",
        ));
    }
    Ok(())
}

/// Tries until it works or fails for another reason than that something is `held`, or for [`RELEASE_MAX`]. The kernel ends
/// a killed process's ring in the background, and what that had open (device, listening socket) stays so until then: a
/// daemon that is started again at once must wait for it.
///
/// # Errors
/// The last attempt's.
pub fn when_released<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
    held: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let end = Instant::now() + RELEASE_MAX;
    loop {
        match attempt() {
            Err(error) if held(&error) && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5))
            }
            result => return result,
        }
    }
}

/// Waits until a port can be had.
///
/// # Errors
/// When somebody has it, or it is not this machine's.
pub fn wait_for_port(listen: SocketAddr) -> Outcome {
    let taken = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
    match when_released(|| TcpListener::bind(listen), taken) {
        Ok(_) => Ok(()),
        Err(error) => Err(cannot_listen(&format!("cannot listen on {listen}: {error}"))),
    }
}

/// The failure of a daemon that cannot listen.
pub fn cannot_listen(what: &str) -> Failure {
    Failure::new(what, "stop who has the port, or choose another one with --listen")
}

/// The name of this host, as the kernel knows it.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_listened_on_unless_forced() {
        let local: SocketAddr = "127.0.0.1:7400".parse().unwrap();
        let open: SocketAddr = "0.0.0.0:7400".parse().unwrap();
        let mut host = HostFile::new("node", vec![local]);
        assert!(check_listen(local, false, None).is_ok());
        assert!(check_listen("[::1]:7400".parse().unwrap(), false, None).is_ok());
        assert!(check_listen(open, false, Some(&host)).is_err());
        assert!(check_listen(open, true, None).is_ok());
        host.auth.allow_insecure = true;
        assert!(check_listen(open, false, Some(&host)).is_ok());
    }

    #[test]
    fn daemons_listen_only_in_the_networks_of_the_host_file() {
        let local: SocketAddr = "127.0.0.1:7400".parse().unwrap();
        let mut host = HostFile::new("node", vec![local]);
        assert!(check_daemon_listen(local, false, Some(&host)).is_ok());
        host.network.public = Some("10.0.0.0/24".parse().unwrap());
        let outside = check_daemon_listen(local, false, Some(&host)).unwrap_err();
        assert!(outside.what.contains("[network]"), "{outside}");
        assert!(check_daemon_listen("10.0.0.7:7400".parse().unwrap(), true, Some(&host)).is_ok());
        assert!(check_daemon_listen("10.0.1.7:7400".parse().unwrap(), true, Some(&host)).is_err());
    }
}
