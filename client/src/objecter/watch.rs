//! Watches: "tell me when this object changes", kept alive over lost connections and changes of the primary.
//!
//! A watch lives in its primary's memory, bound to one connection. Whenever either may be gone it is armed again; the
//! reply carries the object's version, so a change in between is not missed.

use super::link::Target;
use loligo_config::id::{ObjectId, ObjectVersion, PgId};
use loligo_reactor::env::Instant;
use std::time::Duration;

/// A primary that has too many watchers is asked again after this long. Until then the header is as last read.
pub(super) const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// Where a watch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WatchState {
    /// To be armed, but not before this.
    Idle { until: Instant },
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

impl Watch {
    /// When it is to be armed.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            WatchState::Idle { until } => Some(until),
            WatchState::Arming | WatchState::Armed { .. } => None,
        }
    }
}

/// A watched object may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The watch, as `Objecter::watch` returned it.
    pub watch: u64,
    /// The object's version.
    pub version: ObjectVersion,
}
