//! A transport within one thread: deterministic, for tests and simulations.
//!
//! A [`MemoryHub`] connects endpoints by address, as a network does. It keeps what TCP keeps (frames of one
//! connection arrive in order, once, or the connection ends) and breaks what TCP breaks, on demand: it delays, cuts,
//! stalls and damages. Frames are checked on arrival as they are by a real transport, and before
//! [`Transport::trust`] one handshake frame is delivered and nothing behind it.

use crate::wire;
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::{
    CloseReason, ConnectionId, Frame, Instant, SendRefused, Transport, TransportEvent,
};
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

#[derive(Debug)]
struct Hub {
    now: Instant,
    delay: Duration,
    send_queue_max: usize,
    /// Orders arrivals of the same instant.
    arrivals: u64,
    connections: u64,
    endpoints: BTreeMap<SocketAddr, Endpoint>,
    /// Each connection has two, one for each side.
    halves: BTreeMap<ConnectionId, Half>,
    cuts: BTreeSet<(SocketAddr, SocketAddr)>,
    /// Directions in which everything waits.
    stalls: BTreeSet<(SocketAddr, SocketAddr)>,
    damage: BTreeMap<SocketAddr, usize>,
    pool: BufferPool,
}

#[derive(Debug, Default)]
struct Endpoint {
    arriving: BTreeMap<(Instant, u64), (ConnectionId, Item)>,
}

#[derive(Debug)]
struct Half {
    owner: SocketAddr,
    peer_address: SocketAddr,
    peer: ConnectionId,
    /// Its owner has not closed it. A closed side stays while what it sent is stalled.
    open: bool,
    trusted: bool,
    /// The one frame before `trust` was delivered.
    introduced: bool,
    /// What waits for `trust`, with its place in the endpoint's order.
    held: Vec<((Instant, u64), Item)>,
    /// What this side has sent while its direction was stalled.
    stalled: VecDeque<Item>,
    /// Frames that this side has sent and the other has not taken.
    unread: usize,
    /// When the newest arrival at this side is due: no later one overtakes it.
    newest_due: Instant,
}

#[derive(Debug)]
enum Item {
    Accepted(SocketAddr),
    Connected,
    Frame(Frame),
    Closed(CloseReason),
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
            delay: Duration::ZERO,
            send_queue_max: SEND_QUEUE_MAX,
            arrivals: 0,
            connections: 0,
            endpoints: BTreeMap::new(),
            halves: BTreeMap::new(),
            cuts: BTreeSet::new(),
            stalls: BTreeSet::new(),
            damage: BTreeMap::new(),
            pool: BufferPool::new(DAMAGE_POOL_LEN),
        };
        Self { inner: Rc::new(RefCell::new(hub)) }
    }

    /// A process that listens at `address`, and connects from it.
    ///
    /// # Panics
    /// If the address is in use.
    pub fn endpoint(&self, address: SocketAddr) -> MemoryTransport {
        let before = self.inner.borrow_mut().endpoints.insert(address, Endpoint::default());
        assert!(before.is_none(), "{address} is in use");
        MemoryTransport { hub: self.clone(), address }
    }

    /// The time. Only a network with delay needs it.
    pub fn set_now(&self, now: Instant) {
        self.inner.borrow_mut().now = now;
    }

    /// What is sent from now on arrives this much later.
    pub fn set_delay(&self, delay: Duration) {
        self.inner.borrow_mut().delay = delay;
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

impl Hub {
    fn between(&self, a: SocketAddr, b: SocketAddr) -> Vec<ConnectionId> {
        let joins = |half: &Half| {
            (half.owner, half.peer_address) == (a, b) || (half.owner, half.peer_address) == (b, a)
        };
        self.halves.iter().filter(|(_, half)| joins(half)).map(|(id, _)| *id).collect()
    }

    fn next_connection(&mut self) -> ConnectionId {
        self.connections += 1;
        ConnectionId(self.connections)
    }

    fn next_place(&mut self, due: Instant) -> (Instant, u64) {
        self.arrivals += 1;
        (due, self.arrivals)
    }

    /// Something arrives at the side `id` after the delay, behind all that is on its way to it.
    fn deliver(&mut self, id: ConnectionId, item: Item) {
        let due = self.now.after(self.delay);
        self.deliver_at(id, item, due);
    }

    fn deliver_at(&mut self, id: ConnectionId, item: Item, due: Instant) {
        let Some(half) = self.halves.get_mut(&id).filter(|half| half.open) else {
            return;
        };
        let due = due.max(half.newest_due);
        half.newest_due = due;
        let owner = half.owner;
        let place = self.next_place(due);
        if let Some(endpoint) = self.endpoints.get_mut(&owner) {
            endpoint.arriving.insert(place, (id, item));
        }
    }

    /// The side `from` sends something to its peer.
    fn send(&mut self, from: ConnectionId, item: Item) {
        let Some(half) = self.halves.get_mut(&from) else {
            return;
        };
        let peer = half.peer;
        if self.stalls.contains(&(half.owner, half.peer_address)) {
            half.stalled.push_back(item);
        } else {
            self.deliver(peer, item);
        }
    }

    fn stall_item(&mut self, from: ConnectionId, item: Item) {
        if let Some(half) = self.halves.get_mut(&from) {
            half.stalled.push_back(item);
        }
    }

    fn release_stalled(&mut self, from: ConnectionId) {
        let Some(half) = self.halves.get_mut(&from) else {
            return;
        };
        let peer = half.peer;
        let mut closed = false;
        for item in std::mem::take(&mut half.stalled) {
            closed |= matches!(item, Item::Closed(_));
            self.deliver(peer, item);
        }
        if closed {
            self.halves.remove(&from);
        }
    }

    /// The network breaks one side: what is on its way to it is lost.
    fn break_half(&mut self, id: ConnectionId, reason: CloseReason) {
        self.forget_arriving(id);
        self.deliver_at(id, Item::Closed(reason), self.now);
    }

    fn forget_arriving(&mut self, id: ConnectionId) {
        let Some(half) = self.halves.get_mut(&id) else {
            return;
        };
        half.held.clear();
        half.newest_due = Instant(0);
        half.trusted = true;
        let owner = half.owner;
        if let Some(endpoint) = self.endpoints.get_mut(&owner) {
            endpoint.arriving.retain(|_, (to, _)| *to != id);
        }
    }

    /// The side `id` is gone; its peer hears it after all that was sent before.
    fn hang_up(&mut self, id: ConnectionId) {
        self.send(id, Item::Closed(CloseReason::Peer));
        match self.halves.get_mut(&id) {
            Some(half) if !half.stalled.is_empty() => half.open = false,
            _ => {
                self.halves.remove(&id);
            }
        }
    }

    fn damaged(&mut self, to: SocketAddr, frame: Frame) -> Frame {
        let Some(bit) = self.damage.remove(&to) else {
            return frame;
        };
        let head_len = frame.head.len();
        let len = head_len + frame.data.as_ref().map_or(0, |data| data.len());
        let bit = bit % (len * 8);
        let (byte, mask) = (bit / 8, 1 << (bit % 8));
        let flip = |buffer: &SharedBuffer, at: usize| {
            let mut copy = self.pool.alloc(buffer.len()).expect("the pool holds more than the largest frame");
            copy.copy_from_slice(buffer);
            copy[at] ^= mask;
            copy.freeze()
        };
        match &frame.data {
            Some(data) if byte >= head_len => Frame { data: Some(flip(data, byte - head_len)), ..frame },
            _ => Frame { head: flip(&frame.head, byte), data: frame.data },
        }
    }

    /// What one arrival becomes for the owner of the side: an event, or nothing yet.
    fn arrive(&mut self, place: (Instant, u64), id: ConnectionId, item: Item) -> Option<TransportEvent> {
        let half = self.halves.get_mut(&id)?;
        let connection = id;
        if !half.trusted && half.introduced {
            half.held.push((place, item));
            return None;
        }
        match item {
            Item::Accepted(from) => Some(TransportEvent::Accepted { connection, from }),
            Item::Connected => Some(TransportEvent::Connected { connection }),
            Item::Closed(reason) => {
                self.halves.remove(&id);
                Some(TransportEvent::Closed { connection, reason })
            }
            Item::Frame(frame) => {
                half.introduced = true;
                let verdict = admit(&frame, half.trusted);
                let peer = half.peer;
                if let Some(sender) = self.halves.get_mut(&peer) {
                    sender.unread = sender.unread.saturating_sub(1);
                }
                match verdict {
                    Ok(()) => Some(TransportEvent::Frame { connection, frame }),
                    Err(reason) => {
                        self.forget_arriving(id);
                        self.hang_up(id);
                        Some(TransportEvent::Closed { connection, reason })
                    }
                }
            }
        }
    }
}

/// The checks of a real transport's frame reader.
fn admit(frame: &Frame, trusted: bool) -> Result<(), CloseReason> {
    wire::check(frame)?;
    if !trusted && !wire::kind_of(frame).is_some_and(wire::Kind::is_handshake) {
        return Err(CloseReason::Protocol("a message before the handshake"));
    }
    Ok(())
}

impl Transport for MemoryTransport {
    fn connect(&mut self, to: SocketAddr) -> ConnectionId {
        let hub = &mut *self.hub.inner.borrow_mut();
        let (here, there) = (hub.next_connection(), hub.next_connection());
        let half = |owner, peer_address, peer| Half {
            owner,
            peer_address,
            peer,
            open: true,
            trusted: false,
            introduced: false,
            held: Vec::new(),
            stalled: VecDeque::new(),
            unread: 0,
            newest_due: Instant(0),
        };
        hub.halves.insert(here, half(self.address, to, there));
        if hub.cuts.contains(&(self.address, to)) {
            hub.deliver(here, Item::Closed(CloseReason::Unreachable(libc::EHOSTUNREACH)));
        } else if hub.endpoints.contains_key(&to) {
            hub.halves.insert(there, half(to, self.address, here));
            let (towards, back) = ((self.address, to), (to, self.address));
            if hub.stalls.contains(&towards) || hub.stalls.contains(&back) {
                // Making a connection takes packets in both directions.
                hub.stall_item(here, Item::Accepted(self.address));
                hub.stall_item(there, Item::Connected);
            } else {
                hub.deliver(there, Item::Accepted(self.address));
                hub.deliver(here, Item::Connected);
            }
        } else {
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
        let frame = hub.damaged(to, frame);
        hub.send(connection, Item::Frame(frame));
        Ok(())
    }

    fn close(&mut self, connection: ConnectionId) {
        let hub = &mut *self.hub.inner.borrow_mut();
        if hub.halves.get(&connection).is_none_or(|half| !half.open || half.owner != self.address) {
            return;
        }
        hub.forget_arriving(connection);
        let place = hub.next_place(hub.now);
        hub.hang_up(connection);
        if let Some(endpoint) = hub.endpoints.get_mut(&self.address) {
            endpoint.arriving.insert(place, (connection, Item::Closed(CloseReason::Local)));
        }
    }

    fn trust(&mut self, connection: ConnectionId) {
        let hub = &mut *self.hub.inner.borrow_mut();
        let Some(half) = hub.halves.get_mut(&connection) else {
            return;
        };
        half.trusted = true;
        let held = std::mem::take(&mut half.held);
        if let Some(endpoint) = hub.endpoints.get_mut(&self.address) {
            endpoint.arriving.extend(held.into_iter().map(|(place, item)| (place, (connection, item))));
        }
    }

    fn poll(&mut self, budget: u32, inbox: &mut VecDeque<TransportEvent>) -> u32 {
        let hub = &mut *self.hub.inner.borrow_mut();
        let mut count = 0;
        while count < budget {
            let Some(endpoint) = hub.endpoints.get_mut(&self.address) else {
                break;
            };
            let Some(entry) = endpoint.arriving.first_entry().filter(|entry| entry.key().0 <= hub.now) else {
                break;
            };
            let (place, (id, item)) = entry.remove_entry();
            let event = match item {
                // This side's own close: the connection is gone already.
                Item::Closed(reason @ CloseReason::Local) => {
                    Some(TransportEvent::Closed { connection: id, reason })
                }
                item => hub.arrive(place, id, item),
            };
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
        let hub = &mut *self.hub.inner.borrow_mut();
        let own = |half: &Half| half.open && half.owner == self.address;
        let ids: Vec<_> = hub.halves.iter().filter(|(_, half)| own(half)).map(|(id, _)| *id).collect();
        for id in ids {
            hub.hang_up(id);
        }
        hub.endpoints.remove(&self.address);
    }
}

#[cfg(test)]
mod tests;
