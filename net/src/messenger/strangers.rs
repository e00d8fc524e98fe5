//! Accepted connections whose peers have not said who they are: how many there may be, whose turn it is to go, and
//! what the log says of them.

use loligo_reactor::env::{ConnectionId, Instant};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// Time between two lines of the log about strangers: whoever makes connections must not fill the disk with them.
const COMPLAINT_INTERVAL: Duration = Duration::from_millis(100);

/// Whom an address belongs to: an IPv4 address, or the /64 that one host of IPv6 has to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Source(IpAddr);

impl Source {
    fn of(from: SocketAddr) -> Self {
        match from.ip().to_canonical() {
            IpAddr::V4(address) => Self(IpAddr::V4(address)),
            IpAddr::V6(address) => {
                Self(IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64))))
            }
        }
    }
}

/// The half-open connections, oldest first, since ids rise.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    half_open: BTreeMap<ConnectionId, SocketAddr>,
    by_source: BTreeMap<Source, usize>,
    complained: Option<Instant>,
    unsaid: u64,
}

impl Strangers {
    /// Which connection has to go before one more from there may stay, if any: the oldest of its own source when that
    /// has its share, else the oldest of the source with the most when all places are taken. The oldest has had the
    /// most time to say who it is, so that in a flood of silent connections an honest peer, whose handshake takes one
    /// round trip, still gets through, and a flood from one source takes nobody else's place.
    pub fn to_evict(&self, from: SocketAddr, all_max: usize, source_max: usize) -> Option<ConnectionId> {
        let own = Source::of(from);
        let source = if self.by_source.get(&own).is_some_and(|count| *count >= source_max) {
            own
        } else if self.half_open.len() >= all_max {
            *self.by_source.iter().max_by_key(|(_, count)| **count)?.0
        } else {
            return None;
        };
        self.half_open.iter().find(|(_, from)| Source::of(**from) == source).map(|(id, _)| *id)
    }

    pub fn insert(&mut self, id: ConnectionId, from: SocketAddr) {
        self.half_open.insert(id, from);
        *self.by_source.entry(Source::of(from)).or_default() += 1;
    }

    /// It is no stranger any more, or gone. Returns where it came from if it was one.
    pub fn remove(&mut self, id: ConnectionId) -> Option<SocketAddr> {
        let from = self.half_open.remove(&id)?;
        let source = Source::of(from);
        if let Some(count) = self.by_source.get_mut(&source) {
            *count -= 1;
            if *count == 0 {
                self.by_source.remove(&source);
            }
        }
        Some(from)
    }

    /// Says why a stranger's connection was closed, unless something was said just before; then it is counted.
    pub fn complain(&mut self, now: Instant, from: SocketAddr, why: impl Display) {
        if self.complained.is_some_and(|at| now.since(at) < COMPLAINT_INTERVAL) {
            self.unsaid += 1;
            return;
        }
        self.complained = Some(now);
        let more = std::mem::take(&mut self.unsaid);
        tracing::warn!(%from, %why, more, "a connection was closed before its peer was known");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(address: &str) -> SocketAddr {
        SocketAddr::new(address.parse().unwrap(), 1)
    }

    fn filled(addresses: &[&str]) -> Strangers {
        let mut strangers = Strangers::default();
        for (number, address) in (1..).zip(addresses) {
            strangers.insert(ConnectionId(number), from(address));
        }
        strangers
    }

    #[test]
    fn a_source_with_its_share_loses_its_own_oldest() {
        let strangers = filled(&["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2"]);
        assert_eq!(strangers.to_evict(from("10.0.0.2"), 100, 3), Some(ConnectionId(2)));
        assert_eq!(strangers.to_evict(from("::ffff:10.0.0.2"), 100, 3), Some(ConnectionId(2)));
        assert_eq!(strangers.to_evict(from("10.0.0.1"), 100, 3), None);
        assert_eq!(strangers.to_evict(from("10.0.0.3"), 100, 3), None);
    }

    #[test]
    fn when_all_places_are_taken_the_source_with_the_most_gives_one() {
        let mut strangers = filled(&["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"]);
        assert_eq!(strangers.to_evict(from("10.0.0.4"), 4, 3), Some(ConnectionId(2)));
        assert_eq!(strangers.remove(ConnectionId(2)), Some(from("10.0.0.2")));
        assert_eq!(strangers.remove(ConnectionId(2)), None);
        assert_eq!(strangers.to_evict(from("10.0.0.4"), 4, 3), None);
    }

    #[test]
    fn one_host_of_ipv6_is_one_source() {
        let strangers = filled(&["2001:db8:0:1::1", "2001:db8:0:1:ffff::9", "2001:db8:0:2::1"]);
        assert_eq!(strangers.to_evict(from("2001:db8:0:1::77"), 100, 2), Some(ConnectionId(1)));
        assert_eq!(strangers.to_evict(from("2001:db8:0:2::77"), 100, 2), None);
    }

    #[test]
    fn the_log_is_not_filled() {
        let mut strangers = Strangers::default();
        for millis in 0..250 {
            strangers.complain(Instant(millis * 1_000_000), from("10.0.0.1"), "garbage");
        }
        assert_eq!(strangers.complained, Some(Instant(200_000_000)));
        assert_eq!(strangers.unsaid, 49);
    }
}
