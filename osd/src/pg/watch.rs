//! Who wants to know when an object changes.

use super::{Actions, PgAction, Requester};
use loligo_config::id::{ObjectId, ObjectVersion, PgId, SessionId};
use loligo_net::wire::op::Notify;
use std::collections::BTreeMap;

/// Watchers of one object: the openers of one image. Guessed; more are refused.
const WATCHERS_MAX: usize = 256;
/// Watched objects of one PG.
const WATCHED_OBJECTS_MAX: usize = 65_536;

#[derive(Clone, Copy, Debug)]
struct Watcher {
    from: Requester,
    session: SessionId,
}

/// The watches of one PG. They live in memory alone: a client renews its own over a new connection.
#[derive(Debug, Default)]
pub struct Watches {
    objects: BTreeMap<ObjectId, Vec<Watcher>>,
}

impl Watches {
    /// Adds a watch; false when there is no room.
    #[must_use]
    pub fn add(&mut self, object: ObjectId, from: Requester, session: SessionId) -> bool {
        if self.objects.len() >= WATCHED_OBJECTS_MAX && !self.objects.contains_key(&object) {
            return false;
        }
        let watchers = self.objects.entry(object).or_default();
        if watchers.iter().any(|watcher| watcher.from == from) {
            return true;
        }
        if watchers.len() >= WATCHERS_MAX {
            return false;
        }
        watchers.push(Watcher { from, session });
        true
    }

    /// Ends a watch.
    pub fn remove(&mut self, object: ObjectId, from: Requester) {
        if let Some(watchers) = self.objects.get_mut(&object) {
            watchers.retain(|watcher| watcher.from != from);
            if watchers.is_empty() {
                self.objects.remove(&object);
            }
        }
    }

    /// Ends all watches of a connection that is gone.
    pub fn forget(&mut self, from: Requester) {
        self.objects.retain(|_, watchers| {
            watchers.retain(|watcher| watcher.from != from);
            !watchers.is_empty()
        });
    }

    /// The sessions that watch an object, each once.
    pub fn sessions(&self, object: ObjectId) -> Vec<SessionId> {
        let watchers = self.objects.get(&object).into_iter().flatten();
        let mut sessions: Vec<SessionId> = watchers.map(|watcher| watcher.session).collect();
        sessions.sort_unstable();
        sessions.dedup();
        sessions
    }

    /// Tells the watchers of one object.
    pub fn notify(&self, pg: PgId, object: ObjectId, version: ObjectVersion, out: &mut Actions) {
        if self.objects.is_empty() {
            return;
        }
        for watcher in self.objects.get(&object).into_iter().flatten() {
            out.push_back(PgAction::Notify { to: watcher.from, notify: Notify { pg, object, version } });
        }
    }

    /// Tells everybody: changes may have been missed. `version` says what each object has now.
    pub fn notify_all(&self, pg: PgId, version: impl Fn(ObjectId) -> ObjectVersion, out: &mut Actions) {
        for object in self.objects.keys() {
            self.notify(pg, *object, version(*object), out);
        }
    }

    /// Ends all watches.
    pub fn clear(&mut self) {
        self.objects.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_reactor::env::ConnectionId;

    fn requester(connection: u64) -> Requester {
        Requester { core: 0, connection: ConnectionId(connection) }
    }

    #[test]
    fn every_watcher_is_told_once_until_it_leaves() {
        let (mut watches, mut out) = (Watches::default(), Actions::new());
        let object = ObjectId::default();
        assert!(watches.add(object, requester(1), SessionId(7)));
        assert!(watches.add(object, requester(1), SessionId(7)));
        assert!(watches.add(object, requester(2), SessionId(7)));
        watches.notify(PgId::default(), object, ObjectVersion::NONE, &mut out);
        assert_eq!(out.len(), 2);
        assert_eq!(watches.sessions(object), [SessionId(7)], "one client over two connections");
        watches.forget(requester(1));
        watches.remove(object, requester(2));
        assert_eq!(watches.sessions(object), []);
        out.clear();
        watches.notify_all(PgId::default(), |_| ObjectVersion::NONE, &mut out);
        assert!(out.is_empty());
    }

    #[test]
    fn a_full_table_refuses() {
        let mut watches = Watches::default();
        for connection in 0..WATCHERS_MAX as u64 {
            assert!(watches.add(ObjectId::default(), requester(connection), SessionId(1)));
        }
        assert!(!watches.add(ObjectId::default(), requester(u64::MAX), SessionId(1)));
    }
}
