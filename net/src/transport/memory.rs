//! A transport within one thread: deterministic, for tests and simulations.
//!
//! A [`MemoryHub`] connects endpoints by address, as a network does. It keeps what TCP keeps (frames of one
//! connection arrive in order, once, or the connection ends) and breaks what TCP breaks, on demand: it delays, cuts,
//! stalls, resets and damages, at once or as each direction's [`LinkProfile`] says. Frames are checked on arrival as they
//! are by a real transport, and before [`Transport::trust`] one handshake frame is delivered and nothing behind it.
//!
//! [`MemoryHub`] is here, the network itself in `hub`, what a direction does to a frame in `link`.

mod hub;
mod link;

pub use link::{LinkProfile, LinkStats};

use hub::{Endpoint, Half, Hub, Item};
use link::Links;

#[cfg(test)]
use crate::wire;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{
    CloseReason, ConnectionId, Frame, Instant, SendRefused, Transport, TransportEvent,
};
use loligo_reactor::random::Random;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// Frames that one side of a connection may have on their way before its send queue counts as full.
const SEND_QUEUE_MAX: usize = 1024;
/// Bytes for damaged copies of frames.
const DAMAGE_POOL_LEN: usize = 64 << 20;

/// A network. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct MemoryHub {
    inner: Rc<RefCell<Hub>>,
}

/// One process's access to a [`MemoryHub`]. Dropping it is the end of the process: its connections break.
#[derive(Debug)]
pub struct MemoryTransport {
    hub: MemoryHub,
    address: SocketAddr,
}

impl Default for MemoryHub {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryHub {
    /// A network without endpoints or delay.
    pub fn new() -> Self {
        let hub = Hub {
            now: Instant(0),
            send_queue_max: SEND_QUEUE_MAX,
            arrivals: 0,
            connections: 0,
            endpoints: BTreeMap::new(),
            halves: BTreeMap::new(),
            cuts: BTreeSet::new(),
            stalls: BTreeSet::new(),
            dark: BTreeSet::new(),
            damage: BTreeMap::new(),
            links: Links::new(),
            wakeups: None,
            pool: BufferPool::new(DAMAGE_POOL_LEN),
        };
        Self { inner: Rc::new(RefCell::new(hub)) }
    }

    /// A process that listens at `address`, and connects from it.
    ///
    /// # Panics
    /// If the address is in use.
    pub fn endpoint(&self, address: SocketAddr) -> MemoryTransport {
        let hub = &mut *self.inner.borrow_mut();
        hub.dark.remove(&address);
        let before = hub.endpoints.insert(address, Endpoint::default());
        assert!(before.is_none(), "{address} is in use");
        MemoryTransport { hub: self.clone(), address }
    }

    /// The time. Only a network with delay needs it.
    pub fn set_now(&self, now: Instant) {
        self.inner.borrow_mut().now = now;
    }

    /// What is sent from now on arrives this much later, where no profile says otherwise.
    pub fn set_delay(&self, delay: Duration) {
        self.inner.borrow_mut().links.default.delay = delay;
    }

    /// Seeds what the network does by chance.
    pub fn set_seed(&self, seed: u64) {
        self.inner.borrow_mut().links.random = Random::new(seed);
    }

    /// How every direction behaves that has no profile of its own.
    pub fn set_default_link(&self, profile: LinkProfile) {
        self.inner.borrow_mut().links.default = profile;
    }

    /// How one direction behaves; `None`: as the default.
    pub fn set_link(&self, from: SocketAddr, to: SocketAddr, profile: Option<LinkProfile>) {
        self.inner.borrow_mut().links.set(from, to, profile);
    }

    /// What links have done so far.
    pub fn link_stats(&self) -> LinkStats {
        self.inner.borrow().links.stats
    }

    /// From now on `take_wakeups` tells of every arrival that becomes the first one of its endpoint.
    pub fn record_wakeups(&self) {
        self.inner.borrow_mut().wakeups = Some(Vec::new());
    }

    /// Moves the endpoints whose first arrival became an earlier one, and when it is due, to `into`.
    pub fn take_wakeups(&self, into: &mut Vec<(SocketAddr, Instant)>) {
        if let Some(wakeups) = &mut self.inner.borrow_mut().wakeups {
            into.append(wakeups);
        }
    }

    /// When the next arrival at an endpoint is due.
    pub fn next_arrival_at(&self, address: SocketAddr) -> Option<Instant> {
        let hub = self.inner.borrow();
        Some(hub.endpoints.get(&address)?.arriving.first_key_value()?.0.0)
    }

    /// Resets all connections between the two, at any byte: of the frames on their way some arrive, `late` after now at
    /// the latest or so, the rest is lost, and each side learns of it at a time of its own. New connections can be made.
    pub fn reset(&self, a: SocketAddr, b: SocketAddr, late: Duration) {
        let hub = &mut *self.inner.borrow_mut();
        for id in hub.between(a, b) {
            hub.links.stats.reset += 1;
            hub.sever(id, late);
        }
    }

    /// The machine of a process loses its power: its peers hear nothing, and connecting to it brings no answer until it
    /// listens again. The process's transport is to be dropped after this.
    pub fn lose_power(&self, address: SocketAddr) {
        self.inner.borrow_mut().lose_power(address);
    }

    /// Frames that one side of a connection may have on their way; `QueueFull` beyond it.
    pub fn set_send_queue_max(&self, frames: usize) {
        self.inner.borrow_mut().send_queue_max = frames;
    }

    /// When the next arrival anywhere is due.
    pub fn next_arrival(&self) -> Option<Instant> {
        let hub = self.inner.borrow();
        hub.endpoints.values().filter_map(|endpoint| Some(endpoint.arriving.first_key_value()?.0.0)).min()
    }

    /// Breaks all connections between the two and lets no new one be made until `heal`.
    pub fn cut(&self, a: SocketAddr, b: SocketAddr) {
        let mut hub = self.inner.borrow_mut();
        hub.cuts.insert((a, b));
        hub.cuts.insert((b, a));
        for id in hub.between(a, b) {
            hub.break_half(id, CloseReason::Network(libc::ECONNRESET));
        }
    }

    /// From now on nothing from `from` arrives at `to`, and neither side notices. `heal` delivers it.
    pub fn stall(&self, from: SocketAddr, to: SocketAddr) {
        self.inner.borrow_mut().stalls.insert((from, to));
    }

    /// Ends `cut` and `stall` between the two, in both directions.
    pub fn heal(&self, a: SocketAddr, b: SocketAddr) {
        let mut hub = self.inner.borrow_mut();
        for direction in [(a, b), (b, a)] {
            hub.cuts.remove(&direction);
            hub.stalls.remove(&direction);
        }
        for id in hub.between(a, b) {
            hub.release_stalled(id);
        }
    }

    /// Flips one bit of the next frame sent to `to`: bit number `bit` of header and data together, counted round.
    pub fn damage_next(&self, to: SocketAddr, bit: usize) {
        self.inner.borrow_mut().damage.insert(to, bit);
    }

    /// Connections that are open, both sides counted as one; half-closed ones count.
    pub fn connection_count(&self) -> usize {
        self.inner.borrow().halves.len().div_ceil(2)
    }
}

impl Transport for MemoryTransport {
    fn connect(&mut self, to: SocketAddr) -> ConnectionId {
        let hub = &mut *self.hub.inner.borrow_mut();
        let (here, there) = (hub.next_connection(), hub.next_connection());
        hub.halves.insert(here, Half::new(self.address, to, there));
        if hub.cuts.contains(&(self.address, to)) {
            hub.deliver(here, Item::Closed(CloseReason::Unreachable(libc::EHOSTUNREACH)));
        } else if hub.endpoints.contains_key(&to) {
            hub.halves.insert(there, Half::new(to, self.address, here));
            hub.dial(here, there, self.address, to);
        } else if !hub.dark.contains(&to) {
            hub.deliver(here, Item::Closed(CloseReason::Unreachable(libc::ECONNREFUSED)));
        }
        here
    }

    fn send(&mut self, connection: ConnectionId, frame: Frame) -> Result<(), SendRefused> {
        let hub = &mut *self.hub.inner.borrow_mut();
        let max = hub.send_queue_max;
        let Some(half) =
            hub.halves.get_mut(&connection).filter(|half| half.open && half.owner == self.address)
        else {
            return Err(SendRefused::Closed(frame));
        };
        if half.unread >= max {
            return Err(SendRefused::QueueFull(frame));
        }
        half.unread += 1;
        let to = half.peer_address;
        hub.links.stats.frames += 1;
        let frame = hub.damaged(self.address, to, frame);
        hub.send(connection, Item::Frame(frame));
        Ok(())
    }

    fn close(&mut self, connection: ConnectionId) {
        let hub = &mut *self.hub.inner.borrow_mut();
        if hub.halves.get(&connection).is_some_and(|half| half.open && half.owner == self.address) {
            hub.close(connection, self.address);
        }
    }

    fn trust(&mut self, connection: ConnectionId) {
        self.hub.inner.borrow_mut().trust(connection, self.address);
    }

    fn poll(&mut self, budget: u32, inbox: &mut VecDeque<TransportEvent>) -> u32 {
        let hub = &mut *self.hub.inner.borrow_mut();
        let mut count = 0;
        while count < budget {
            let Some(event) = hub.next_event(self.address) else { break };
            if let Some(event) = event {
                inbox.push_back(event);
                count += 1;
            }
        }
        count
    }
}

impl Drop for MemoryTransport {
    fn drop(&mut self) {
        self.hub.inner.borrow_mut().end_process(self.address);
    }
}

#[cfg(test)]
mod tests;
