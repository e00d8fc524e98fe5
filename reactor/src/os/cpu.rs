//! Cores: which there are, pinning, and who else is pinned to one.

use std::fs;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Reactors that share one core and are told apart; more is a configuration that nobody wants.
const CLAIMS_MAX: usize = 32;

/// The cores that this thread may run on, in ascending order.
///
/// # Errors
/// When the kernel does not tell.
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    let mut set = empty_set();
    // SAFETY: the kernel writes at most the given size into `set`, which is as large.
    if unsafe { libc::sched_getaffinity(0, std::mem::size_of_val(&set), &raw mut set) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: every index is below the set's size.
    let allowed = |core: &usize| unsafe { libc::CPU_ISSET(*core, &set) };
    Ok((0..libc::CPU_SETSIZE as usize).filter(allowed).collect())
}

/// Pins this thread to one core.
///
/// # Errors
/// When there is no such core, or this process may not use it; the message says which it may.
pub fn pin(core: usize) -> io::Result<()> {
    if core >= libc::CPU_SETSIZE as usize {
        return Err(no_such_core(core));
    }
    let mut set = empty_set();
    // SAFETY: `core` is below the set's size.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: the kernel reads `set`, of the given size.
    if unsafe { libc::sched_setaffinity(0, std::mem::size_of_val(&set), &raw const set) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(if error.raw_os_error() == Some(libc::EINVAL) { no_such_core(core) } else { error })
}

fn empty_set() -> libc::cpu_set_t {
    // SAFETY: zeroes are the empty set.
    unsafe { std::mem::zeroed() }
}

fn no_such_core(core: usize) -> io::Error {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let message = format!("core {core} is not one that this process may use (online: {})", online.trim());
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

/// A reactor's word, to every reactor of this machine, that it is pinned to a core. It ends with the process: it is an
/// abstract Unix socket, of which no file is left behind. (Reactors in other network namespaces do not see it.)
#[derive(Debug)]
pub struct CoreClaim {
    _socket: UnixDatagram,
    _alone: Option<UnixDatagram>,
}

/// Why a core could not be claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Somebody has it to itself.
    #[error("core {core} belongs to a reactor in busy mode: choose another core")]
    Dedicated {
        /// The core.
        core: usize,
    },
    /// It was wanted alone, and is not.
    #[error(
        "busy mode needs a core of its own, and core {core} has another reactor: choose another core, or the \
             mode `adaptive`"
    )]
    Shared {
        /// The core.
        core: usize,
    },
    /// It was wanted alone, and it is the only one.
    #[error(
        "busy mode needs a core of its own, and this process may use only core {core}, which the system needs \
             too: choose the mode `adaptive`"
    )]
    OnlyCore {
        /// The core.
        core: usize,
    },
    /// The system refused.
    #[error(transparent)]
    System(#[from] io::Error),
}

fn bind(core: usize, place: &str) -> io::Result<Option<UnixDatagram>> {
    let address = SocketAddr::from_abstract_name(format!("loligo/core/{core}/{place}"))?;
    match UnixDatagram::bind_addr(&address) {
        Ok(socket) => Ok(Some(socket)),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
        Err(error) => Err(error),
    }
}

/// The gate is held for good by a loner, and while claiming also by those who share, so that two who come at once do
/// not miss each other.
#[allow(clippy::disallowed_methods, reason = "start-up of a real thread, before there is a loop with timers")]
fn enter_gate(core: usize) -> Result<UnixDatagram, ClaimError> {
    for _ in 0..100 {
        if let Some(gate) = bind(core, "alone")? {
            return Ok(gate);
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    Err(ClaimError::Dedicated { core })
}

impl CoreClaim {
    /// Claims a core, alone or together with others that do not want it alone.
    ///
    /// # Errors
    /// See [`ClaimError`].
    pub fn new(core: usize, alone: bool) -> Result<Self, ClaimError> {
        let gate = enter_gate(core)?;
        let mut claim = None;
        for place in 0..CLAIMS_MAX {
            match bind(core, &place.to_string())? {
                None if alone => return Err(ClaimError::Shared { core }),
                None => {}
                Some(socket) if claim.is_none() => {
                    claim = Some(socket);
                    if !alone {
                        break;
                    }
                }
                // Only looked whether somebody is there.
                Some(_) => {}
            }
        }
        let socket = claim.ok_or(ClaimError::Shared { core })?;
        Ok(Self { _socket: socket, _alone: alone.then_some(gate) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Numbers of cores that no machine has, and no other test uses.
    const FIRST: usize = 1_000_000;

    #[test]
    fn a_thread_is_pinned_to_a_core_that_it_may_use() {
        let cores = allowed_cores().unwrap();
        let last = *cores.last().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                pin(last).unwrap();
                assert_eq!(allowed_cores().unwrap(), [last]);
            });
        });
        assert_eq!(allowed_cores().unwrap(), cores, "the others are not pinned");
        let error = pin(1023).unwrap_err();
        assert!(error.to_string().contains("online"), "{error}");
        assert!(pin(usize::MAX).is_err());
    }

    #[test]
    fn sharers_may_be_many_and_loners_are_alone() {
        let one = CoreClaim::new(FIRST, false).unwrap();
        let other = CoreClaim::new(FIRST, false).unwrap();
        drop(one);
        assert!(matches!(CoreClaim::new(FIRST, true), Err(ClaimError::Shared { .. })));
        drop(other);
        let alone = CoreClaim::new(FIRST, true).unwrap();
        for alone_too in [false, true] {
            assert!(matches!(CoreClaim::new(FIRST, alone_too), Err(ClaimError::Dedicated { .. })));
        }
        drop(alone);
        CoreClaim::new(FIRST, true).unwrap();
    }
}
