//! Watches: "tell me when this object changes", kept alive over lost connections and changes of the primary.
//!
//! A watch lives in its primary's memory, bound to one connection. Whenever either may be gone it is armed again; the
//! reply carries the object's version, so a change in between is not missed.

use super::link::Target;
use loligo_config::id::{ObjectId, ObjectVersion, PgId};

/// Where a watch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WatchState {
    /// To be armed.
    Idle,
    /// The op is under way.
    Arming,
    /// Notifications come over this link, as long as the target is this.
    Armed { link: usize, pg: PgId, target: Target },
}

/// One watch.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) object: ObjectId,
    pub(super) state: WatchState,
}

/// A watched object may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The watch, as `Objecter::watch` returned it.
    pub watch: u64,
    /// The object's version.
    pub version: ObjectVersion,
}
