//! What the owner of a messenger has told it about peers: incarnations and fenced sessions.

use arrayvec::ArrayVec;
use loligo_config::id::{Incarnation, OsdId, SessionId};
use std::collections::{BTreeMap, BTreeSet};

/// Earlier starts that are remembered for one OSD. A process older than that has been silent through as many
/// restarts of its successor, and is caught by its stale epochs.
const RETIRED_MAX: usize = 8;

/// Incarnations are drawn at random, so no number is older than another: what is retired is what the owner's map
/// had before what it has now.
#[derive(Debug, Default)]
pub(super) struct KnownPeers {
    osds: BTreeMap<OsdId, Starts>,
    fenced: BTreeSet<SessionId>,
}

#[derive(Debug)]
struct Starts {
    current: Incarnation,
    retired: ArrayVec<Incarnation, RETIRED_MAX>,
}

impl KnownPeers {
    /// The map names this incarnation. Returns whether that retired another one.
    pub fn set_incarnation(&mut self, osd: OsdId, incarnation: Incarnation) -> bool {
        let fresh = Starts { current: incarnation, retired: ArrayVec::new() };
        let starts = self.osds.entry(osd).or_insert(fresh);
        if starts.current == incarnation {
            return false;
        }
        if starts.retired.is_full() {
            starts.retired.remove(0);
        }
        starts.retired.push(starts.current);
        starts.retired.retain(|retired| *retired != incarnation);
        starts.current = incarnation;
        true
    }

    /// Whether this start of the OSD was followed by another.
    pub fn is_retired(&self, osd: OsdId, incarnation: Incarnation) -> bool {
        self.osds.get(&osd).is_some_and(|starts| starts.retired.contains(&incarnation))
    }

    /// Replaces the fenced sessions.
    pub fn set_fenced(&mut self, sessions: impl IntoIterator<Item = SessionId>) {
        self.fenced.clear();
        self.fenced.extend(sessions);
    }

    /// Whether the session is served no more.
    pub fn is_fenced(&self, session: SessionId) -> bool {
        self.fenced.contains(&session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_map_replaced_is_retired_and_the_list_is_bounded() {
        let mut known = KnownPeers::default();
        assert!(!known.set_incarnation(OsdId(1), Incarnation(100)));
        assert!(!known.set_incarnation(OsdId(1), Incarnation(100)));
        assert!(!known.is_retired(OsdId(1), Incarnation(100)));
        assert!(!known.is_retired(OsdId(1), Incarnation(7)), "unknown is not old");
        for start in 101..=110 {
            assert!(known.set_incarnation(OsdId(1), Incarnation(start)));
            assert!(known.is_retired(OsdId(1), Incarnation(start - 1)));
            assert!(!known.is_retired(OsdId(1), Incarnation(start)));
            assert!(!known.is_retired(OsdId(2), Incarnation(start - 1)));
        }
        assert!(!known.is_retired(OsdId(1), Incarnation(101)));
        assert!(known.is_retired(OsdId(1), Incarnation(102)));
    }
}
