//! Errors, grouped by what the caller does next.

use loligo_config::id::SessionId;
use loligo_config::limits::NAME_LEN_MAX;
use loligo_net::wire::handshake::RefuseReason;

/// Why one operation on an object or an image failed. Everything else is retried inside until it succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// Nothing was changed; free or add space, then try again. `ENOSPC`.
    #[error("no space left in the pool: delete images, discard data or add OSDs")]
    NoSpace,
    /// The request makes no sense: beyond the end of the image, or too long. `EINVAL`.
    #[error("invalid request: beyond the end of the image, or too long")]
    Invalid,
    /// The session is fenced, or this image was closed or removed: nothing is served any more. `ESHUTDOWN`.
    #[error("this client is fenced or the image is gone: open it again with a new client")]
    Fenced,
    /// No copy of these blocks can be read. `EIO`.
    #[error("unrecoverable read error: every copy of some blocks is damaged")]
    Media,
    /// The cluster refused the data as damaged, again and again: suspect this host's memory. Nothing was changed.
    #[error("the data arrives damaged again and again: check this host's memory and network")]
    Damaged,
    /// Whether the operation was applied is not known: the cluster has dropped this session's results, or the
    /// time limit of `ClientSettings::op_timeout` ran out after it was sent.
    #[error("no answer: the operation may or may not have been applied")]
    MaybeApplied,
    /// The time limit of `ClientSettings::op_timeout` ran out before it was sent. Nothing was changed.
    #[error("the cluster did not become ready in time: nothing was changed")]
    Timeout,
    /// The object's version is not the one that the guard names. Nothing was changed.
    #[error("the object was changed by somebody else")]
    Conflict,
}

impl IoError {
    /// The error number that block-layer interfaces report.
    pub fn errno(self) -> i32 {
        match self {
            Self::NoSpace => 28,
            Self::Invalid => 22,
            Self::Fenced => 108,
            Self::Timeout => 110,
            Self::Conflict => 16,
            Self::Media | Self::Damaged | Self::MaybeApplied => 5,
        }
    }
}

/// Why an image could not be opened, made or changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// There is no such pool.
    #[error("there is no pool {pool:?}: `loligo pool ls` lists them, `loligo pool create {pool}` makes one")]
    NoPool {
        /// Its name.
        pool: String,
    },
    /// There is no such image.
    #[error("there is no image {pool}/{image}: `loligo rbd ls {pool}` lists them")]
    NotFound {
        /// The pool.
        pool: String,
        /// The image.
        image: String,
    },
    /// The name is taken.
    #[error("an image {pool}/{image} exists already: choose another name, or remove it first")]
    Exists {
        /// The pool.
        pool: String,
        /// The image.
        image: String,
    },
    /// A name or value is out of range; the text says which and what is allowed.
    #[error("{0}")]
    Invalid(#[from] InvalidImage),
    /// The image is being removed: nothing else can be done with it.
    #[error("{pool}/{image} is being removed: run `loligo rbd rm {pool}/{image}` again to finish")]
    Removing {
        /// The pool.
        pool: String,
        /// The image.
        image: String,
    },
    /// Other clients have the image open: removing it would take it away from under them.
    #[error("{pool}/{image} is in use by {}", sessions_text(sessions))]
    InUse {
        /// The pool.
        pool: String,
        /// The image.
        image: String,
        /// Who has it open.
        sessions: Vec<SessionId>,
    },
    /// Somebody else changes the same image or directory; nothing was lost. Try again.
    #[error("{what} was changed by other clients again and again: try again")]
    Busy {
        /// What was contended.
        what: &'static str,
    },
    /// Another resize took this one over: the image has the other one's size.
    #[error("another client has resized the image meanwhile: look at its size and try again if need be")]
    TakenOver,
    /// The pool's directory is full.
    #[error("the directory of the pool is full: remove images or use another pool")]
    DirectoryFull,
    /// What is stored there is no header or directory that this version understands.
    #[error("{object} cannot be understood: {source}")]
    Corrupt {
        /// The object, printed.
        object: String,
        /// Why.
        #[source]
        source: crate::image::document::DocumentError,
    },
    /// The image has features that this program does not know.
    #[error("the image has features that this version cannot handle (bits {features:#x}): use a newer one")]
    Unsupported {
        /// The unknown feature bits.
        features: u64,
    },
    /// An operation on an object failed.
    #[error("{0}")]
    Io(#[from] IoError),
}

fn sessions_text(sessions: &[SessionId]) -> String {
    let names: Vec<String> = sessions.iter().map(|session| format!("session {}", session.0)).collect();
    names.join(", ")
}

/// Which value of a request is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidImage {
    /// The name.
    #[error(
        "invalid image name: 1 to {NAME_LEN_MAX} bytes without '/', '@', spaces or control characters, not beginning with '-'"
    )]
    Name,
    /// The object order.
    #[error("invalid object size: a power of two from 4K to 32M")]
    Order,
    /// The size.
    #[error(
        "invalid image size: at most 2^63 - 1 bytes, and at most 2^40 objects: choose a larger --object-size"
    )]
    Size,
    /// Too many images by one client process.
    #[error("this client has created too many images: start a new one")]
    TooManyCreated,
}

/// Why an admin command failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// The mon refused or could not do it. Nothing was changed.
    #[error("{message}")]
    Refused {
        /// A negative errno-like number from the mon.
        code: i64,
        /// What happened and what to do.
        message: String,
    },
    /// The connection to the mon was lost after the command was sent, and it is not known to be harmless to send
    /// it again.
    #[error(
        "the connection to the mon was lost: the command may or may not have been carried out; check, then try again"
    )]
    MaybeApplied,
    /// The request is too large.
    #[error("the command is too long")]
    TooLong,
    /// The answer is not what the protocol says.
    #[error("the mon's answer cannot be understood")]
    BadAnswer,
    /// This client's session is fenced.
    #[error("this client is fenced: start a new one")]
    Fenced,
}

/// Why there is no connection to the cluster (yet). `Client` goes on trying; a caller that gives up prints this.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// No mon answers.
    #[error("no mon answers at {mons}: {reason}; is `loligo mon run` or `loligo dev start` running?")]
    NoMon {
        /// The addresses tried.
        mons: String,
        /// The last failure, in words.
        reason: String,
    },
    /// A mon answers, and refuses.
    #[error("the mon at {mon} refuses this client: {reason}")]
    Refused {
        /// Its address.
        mon: String,
        /// Why.
        reason: RefuseReason,
    },
    /// The mon was reached, and has not sent a map yet.
    #[error("the mon answers but has sent no map: look at its log")]
    NoMap,
}
