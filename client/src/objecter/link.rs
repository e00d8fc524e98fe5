//! Connections to OSDs: one per OSD core in use, made on demand and made again when lost.
//!
//! ```text
//!              an op wants it, retry_at reached
//!   Idle ----------------------------------------> Connecting
//!    ^  ^                                              |  |
//!    |  +-------------- refused, failed ---------------+  | Up event
//!    |                                                    v
//!    +------- lost, closed, other address in map -------- Up
//! ```

use super::backoff;
use loligo_config::id::{CoreId, Epoch, Incarnation, OsdId};
use loligo_config::limits::CONNECTION_OPS_MAX;
use loligo_config::map::ClusterMap;
use loligo_reactor::env::{ConnectionId, Instant};
use std::net::SocketAddr;
use std::time::Duration;

const RETRY_FIRST: Duration = Duration::from_millis(5);
/// Short enough that a restarted OSD is found well within the failover goal of DESIGN section 10.
const RETRY_MAX: Duration = Duration::from_millis(250);
/// How soon an op is offered again to a transport whose send queue was full, unless an answer comes before: every offer
/// encodes the op and its checksums anew. Guessed: the time of some hundred KiB at 1 GB/s, and little CPU on a link on
/// which nothing moves.
const FULL_RETRY_FIRST: Duration = Duration::from_micros(250);
const FULL_RETRY_MAX: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkState {
    Idle { retry_at: Instant },
    Connecting { connection: ConnectionId },
    Up { connection: ConnectionId, credits: u32, in_flight: u32 },
}

/// The way to one core of one OSD.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) osd: OsdId,
    pub(super) core: CoreId,
    pub(super) state: LinkState,
    /// Failures in a row.
    attempts: u32,
    /// Ops wait for it.
    pub(super) wanted: bool,
    /// The transport takes no more; it is tried again then. With the number of tries so far.
    full: Option<(Instant, u32)>,
    /// Where and to which start of the OSD it leads.
    place: Option<(SocketAddr, Incarnation)>,
}

impl Link {
    pub(super) fn new(osd: OsdId, core: CoreId) -> Self {
        let state = LinkState::Idle { retry_at: Instant(0) };
        Self { osd, core, state, attempts: 0, wanted: false, full: None, place: None }
    }

    /// Where the map says that the OSD's core is reached; `None` when it is not up or has no such core.
    fn place_in(&self, map: &ClusterMap) -> Option<(SocketAddr, Incarnation)> {
        let osd = map.osds.get(&self.osd).filter(|osd| osd.up)?;
        let address = osd.addresses.get(usize::from(self.core.0))?;
        Some((*address, osd.incarnation))
    }

    /// Where to connect now, if it is time to.
    pub(super) fn due(&mut self, now: Instant, map: &ClusterMap) -> Option<SocketAddr> {
        let LinkState::Idle { retry_at } = self.state else { return None };
        self.wanted = true;
        if retry_at > now {
            return None;
        }
        self.place = self.place_in(map);
        self.place.map(|(address, _)| address)
    }

    pub(super) fn connecting(&mut self, connection: ConnectionId) {
        self.state = LinkState::Connecting { connection };
    }

    pub(super) fn up(&mut self, credits: u32) {
        let LinkState::Connecting { connection } = self.state else { return };
        let credits = credits.clamp(1, CONNECTION_OPS_MAX);
        self.state = LinkState::Up { connection, credits, in_flight: 0 };
        (self.wanted, self.full) = (false, None);
    }

    /// A reply came that makes sense: what went wrong before is over.
    pub(super) fn proven(&mut self) {
        self.attempts = 0;
    }

    pub(super) fn down(&mut self, now: Instant) {
        let wait = backoff(RETRY_FIRST, self.attempts, RETRY_MAX);
        self.attempts = self.attempts.saturating_add(1);
        self.state = LinkState::Idle { retry_at: now.after(wait) };
    }

    /// Goes idle, to be made again at once.
    pub(super) fn reset(&mut self) {
        self.attempts = 0;
        self.state = LinkState::Idle { retry_at: Instant(0) };
    }

    pub(super) fn connection(&self) -> Option<ConnectionId> {
        match self.state {
            LinkState::Idle { .. } => None,
            LinkState::Connecting { connection } | LinkState::Up { connection, .. } => Some(connection),
        }
    }

    /// The transport's send queue is full.
    pub(super) fn full(&mut self, now: Instant) {
        let tries = self.full.map_or(0, |(_, tries)| tries);
        let wait = backoff(FULL_RETRY_FIRST, tries, FULL_RETRY_MAX);
        self.full = Some((now.after(wait), tries.saturating_add(1)));
    }

    /// When to try again because the send queue was full.
    pub(super) fn full_until(&self) -> Option<Instant> {
        let (until, _) = self.full.filter(|_| matches!(self.state, LinkState::Up { .. }))?;
        Some(until)
    }

    /// The connection, when it is up and one more op may be sent over it.
    pub(super) fn ready(&self, now: Instant) -> Option<ConnectionId> {
        if self.full.is_some_and(|(until, _)| until > now) {
            return None;
        }
        match self.state {
            LinkState::Up { connection, credits, in_flight } if in_flight < credits => Some(connection),
            _ => None,
        }
    }

    pub(super) fn is_expecting(&self) -> bool {
        matches!(self.state, LinkState::Up { in_flight, .. } if in_flight > 0)
    }

    pub(super) fn take_credit(&mut self) {
        if let LinkState::Up { credits, in_flight, .. } = &mut self.state {
            *in_flight += 1;
            assert!(*in_flight <= *credits, "an op is sent only when there is a credit");
        }
    }

    pub(super) fn return_credit(&mut self) {
        if let LinkState::Up { in_flight, .. } = &mut self.state {
            assert!(*in_flight > 0, "a credit is returned once");
            *in_flight -= 1;
            // Something was taken off the queue.
            self.full = None;
        }
    }

    /// Whether the new map has the OSD elsewhere or started anew, so that this connection leads nowhere. An OSD that
    /// is down in the map may still answer.
    pub(super) fn is_moved(&self, map: &ClusterMap) -> bool {
        self.place_in(map).is_some_and(|place| self.place != Some(place))
    }
}

/// Who serves a PG, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) osd: OsdId,
    pub(super) incarnation: Incarnation,
    pub(super) since: Epoch,
    /// Cores of the OSD.
    pub(super) cores: u16,
}
