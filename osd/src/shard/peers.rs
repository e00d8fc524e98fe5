//! Connections that this shard opened to other OSDs: one per core of theirs that it needs.

use loligo_config::id::{CoreId, Incarnation, OsdId};
use loligo_config::map::ClusterMap;
use loligo_reactor::env::{ConnectionId, Instant};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// A peer that the map has as up and that cannot be reached for this long is reported.
const UNREACHABLE_REPORT: Duration = Duration::from_millis(500);

/// One core of one other OSD.
pub type PeerKey = (OsdId, CoreId);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    /// Not connected; to be tried again then.
    Waiting(Instant),
    Connecting(ConnectionId),
    Up(ConnectionId),
}

#[derive(Debug)]
struct Peer {
    address: SocketAddr,
    incarnation: Incarnation,
    link: Link,
    backoff: Duration,
    down_since: Option<Instant>,
    reported: Option<Instant>,
}

/// All of them, by OSD and core.
#[derive(Debug, Default)]
pub struct Peers {
    peers: BTreeMap<PeerKey, Peer>,
    by_connection: BTreeMap<ConnectionId, PeerKey>,
}

/// A connection to be begun; its number goes to [`Peers::connecting`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dial {
    /// Whom to reach.
    pub key: PeerKey,
    /// Where.
    pub address: SocketAddr,
}

impl Peers {
    /// A new map: `wanted` are the OSDs that share a PG with this shard. Returns connections to close: to OSDs that
    /// are down, started anew, or share nothing any more.
    pub fn on_map(&mut self, map: &ClusterMap, wanted: &[OsdId], now: Instant) -> Vec<ConnectionId> {
        let mut close = Vec::new();
        self.peers.retain(|(osd, core), peer| {
            let keep = map.osds.get(osd).is_some_and(|known| {
                known.up
                    && wanted.contains(osd)
                    && known.incarnation == peer.incarnation
                    && known.addresses.get(usize::from(core.0)) == Some(&peer.address)
            });
            if let (false, Link::Connecting(connection) | Link::Up(connection)) = (keep, peer.link) {
                close.push(connection);
            }
            keep
        });
        for osd in wanted.iter().filter_map(|osd| map.osds.get(osd)).filter(|osd| osd.up) {
            for (core, address) in (0u16..).zip(&osd.addresses) {
                self.peers.entry((osd.id, CoreId(core))).or_insert_with(|| Peer {
                    address: *address,
                    incarnation: osd.incarnation,
                    link: Link::Waiting(now),
                    backoff: BACKOFF_MIN,
                    down_since: Some(now),
                    reported: None,
                });
            }
        }
        close
    }

    /// A connection to begin now, if any.
    pub fn next_dial(&self, now: Instant) -> Option<Dial> {
        let due = |link| matches!(link, Link::Waiting(at) if at <= now);
        let (key, peer) = self.peers.iter().find(|(_, peer)| due(peer.link))?;
        Some(Dial { key: *key, address: peer.address })
    }

    /// A connection was begun.
    pub fn connecting(&mut self, key: PeerKey, connection: ConnectionId) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.link = Link::Connecting(connection);
            self.by_connection.insert(connection, key);
        }
    }

    /// A connection is up. `None`: it is to be closed, the peer being another start than the map says or not wanted
    /// any more.
    pub fn on_up(&mut self, connection: ConnectionId, incarnation: Incarnation) -> Option<PeerKey> {
        let key = *self.by_connection.get(&connection)?;
        let peer = self.peers.get_mut(&key)?;
        if peer.link != Link::Connecting(connection) || peer.incarnation != incarnation {
            return None;
        }
        peer.link = Link::Up(connection);
        peer.backoff = BACKOFF_MIN;
        peer.down_since = None;
        Some(key)
    }

    /// A connection that this shard opened is gone; whose it was.
    pub fn on_down(&mut self, connection: ConnectionId, now: Instant) -> Option<PeerKey> {
        let key = self.by_connection.remove(&connection)?;
        if let Some(peer) = self.peers.get_mut(&key)
            && matches!(peer.link, Link::Connecting(own) | Link::Up(own) if own == connection)
        {
            peer.link = Link::Waiting(now.after(peer.backoff));
            peer.backoff = (peer.backoff * 2).min(BACKOFF_MAX);
            peer.down_since.get_or_insert(now);
        }
        Some(key)
    }

    /// The connection to a peer's core, if it is up.
    pub fn connection(&self, key: PeerKey) -> Option<ConnectionId> {
        match self.peers.get(&key)?.link {
            Link::Up(connection) => Some(connection),
            _ => None,
        }
    }

    /// The peer at the other end of a connection that this shard opened.
    pub fn key(&self, connection: ConnectionId) -> Option<PeerKey> {
        self.by_connection.get(&connection).copied()
    }

    /// All connections to an OSD that are up.
    pub fn cores(&self, osd: OsdId) -> impl Iterator<Item = PeerKey> + '_ {
        let range = (osd, CoreId(0))..=(osd, CoreId(u16::MAX));
        self.peers.range(range).filter(|(_, peer)| matches!(peer.link, Link::Up(_))).map(|(key, _)| *key)
    }

    /// Peers that cannot be reached: start and time of silence. Each is told again only after a while.
    pub fn unreachable(&mut self, now: Instant) -> Vec<(OsdId, Incarnation, Duration)> {
        let mut list = Vec::new();
        for ((osd, _), peer) in &mut self.peers {
            let Some(since) = peer.down_since else { continue };
            let silent = now.since(since);
            let is_told = peer.reported.is_some_and(|at| now.since(at) < UNREACHABLE_REPORT);
            if silent >= UNREACHABLE_REPORT && !is_told {
                peer.reported = Some(now);
                list.push((*osd, peer.incarnation, silent));
            }
        }
        list
    }

    /// When to dial or report next.
    pub fn next_deadline(&self) -> Option<Instant> {
        let dial = self.peers.values().filter_map(|peer| match peer.link {
            Link::Waiting(at) => Some(at),
            _ => None,
        });
        let report = self.peers.values().filter_map(|peer| {
            let since = peer.down_since?;
            Some(peer.reported.map_or(since, |told| told.max(since)).after(UNREACHABLE_REPORT))
        });
        dial.chain(report).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_config::id::{ClusterId, DeviceId};
    use loligo_config::map::{AuthMode, Osd};

    fn map(up: bool, incarnation: u64) -> ClusterMap {
        let mut map = ClusterMap::new(ClusterId(uuid::Uuid::from_u128(1)), AuthMode::None, 0);
        map.osds.insert(
            OsdId(1),
            Osd {
                id: OsdId(1),
                device: DeviceId(uuid::Uuid::from_u128(2)),
                incarnation: Incarnation(incarnation),
                up,
                is_in: true,
                addresses: vec!["127.0.0.1:1".parse().unwrap()],
                weight: 1,
                host: "h".into(),
                rack: "r".into(),
                device_class: "ssd".into(),
                capacity: 0,
            },
        );
        map
    }

    #[test]
    fn a_peer_is_dialled_checked_and_dialled_again() {
        let mut peers = Peers::default();
        let key = (OsdId(1), CoreId(0));
        assert!(peers.on_map(&map(true, 5), &[OsdId(1)], Instant(0)).is_empty());
        assert_eq!(peers.next_dial(Instant(0)).unwrap().key, key);
        peers.connecting(key, ConnectionId(1));
        assert_eq!(peers.next_dial(Instant(0)), None);
        assert_eq!(peers.on_up(ConnectionId(1), Incarnation(4)), None, "another start");
        assert_eq!(peers.on_up(ConnectionId(1), Incarnation(5)), Some(key));
        assert_eq!(peers.connection(key), Some(ConnectionId(1)));
        assert_eq!(peers.on_down(ConnectionId(1), Instant(10)), Some(key));
        assert_eq!(peers.next_dial(Instant(10)), None);
        assert!(peers.next_dial(Instant(10).after(BACKOFF_MIN)).is_some());
        assert_eq!(peers.unreachable(Instant(10).after(UNREACHABLE_REPORT)).len(), 1);
        assert_eq!(peers.unreachable(Instant(11).after(UNREACHABLE_REPORT)).len(), 0, "told already");
    }

    #[test]
    fn a_new_start_gets_a_new_connection() {
        let mut peers = Peers::default();
        peers.on_map(&map(true, 5), &[OsdId(1)], Instant(0));
        peers.connecting((OsdId(1), CoreId(0)), ConnectionId(1));
        peers.on_up(ConnectionId(1), Incarnation(5));
        assert_eq!(peers.on_map(&map(true, 6), &[OsdId(1)], Instant(1)), [ConnectionId(1)]);
        assert!(peers.next_dial(Instant(1)).is_some());
        assert!(peers.on_map(&map(false, 6), &[OsdId(1)], Instant(2)).is_empty());
        assert_eq!(peers.next_dial(Instant(2)), None);
    }
}
