//! Listening sockets.

use super::ring::{Done, SocketRing, Tag};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

/// Pause after the system had no descriptors or memory for a connection: long enough not to spin, short enough not to
/// be noticed when there are some again. Guessed.
const BACK_OFF: Duration = Duration::from_millis(100);

/// A socket that accepts connections.
pub(super) struct Listener {
    fd: Rc<OwnedFd>,
    multishot: bool,
    /// Removes the socket file at the end.
    _file: Option<SocketFile>,
}

impl Listener {
    /// Listens on a TCP address; port 0 is any free one. Returns the address in use.
    pub fn tcp(address: SocketAddr) -> io::Result<(Self, SocketAddr)> {
        let context = |error| explain(error, &format!("cannot listen on {address}"));
        let listener = TcpListener::bind(address).map_err(context)?;
        let address = listener.local_addr().map_err(context)?;
        Ok((Self { fd: Rc::new(listener.into()), multishot: true, _file: None }, address))
    }

    /// Listens on a Unix socket. A socket file that nobody listens on is replaced.
    pub fn unix(path: &Path) -> io::Result<Self> {
        let context = |error| explain(error, &format!("cannot listen on {}", path.display()));
        remove_stale(path).map_err(context)?;
        let listener = UnixListener::bind(path).map_err(context)?;
        let file = SocketFile::new(path).map_err(context)?;
        Ok(Self { fd: Rc::new(listener.into()), multishot: true, _file: Some(file) })
    }

    pub fn arm(&mut self, ring: &mut SocketRing, tag: Tag) {
        ring.accept(&self.fd, tag, self.multishot);
    }

    /// Handles a result of the accept or of the pause after it; returns a new connection.
    pub fn complete(&mut self, ring: &mut SocketRing, tag: Tag, done: Done) -> Option<OwnedFd> {
        let Done::Accepted { result, armed } = done else {
            self.arm(ring, tag);
            return None;
        };
        match result {
            Ok(fd) => {
                if !armed {
                    self.arm(ring, tag);
                }
                Some(fd)
            }
            Err(_) if armed => None,
            Err(libc::EINVAL) if self.multishot => {
                // A kernel before 5.19.
                self.multishot = false;
                self.arm(ring, tag);
                None
            }
            Err(libc::ECONNABORTED | libc::EINTR | libc::EPROTO) => {
                self.arm(ring, tag);
                None
            }
            Err(errno) => {
                tracing::warn!(errno, "cannot accept connections now: trying again soon");
                ring.timer(tag, BACK_OFF);
                None
            }
        }
    }
}

/// The same error with what was tried in front, and the kind kept.
fn explain(error: io::Error, what: &str) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Removes the file of a server that has died. A live one, and anything that is not a socket, stays.
fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(about) if !about.file_type().is_socket() => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path exists and is not a socket"));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// A socket file of ours, by inode: one that somebody else has put in its place is not removed.
struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_path_buf(), identity: identity(path)? })
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let about = std::fs::symlink_metadata(path)?;
    Ok((about.dev(), about.ino()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
