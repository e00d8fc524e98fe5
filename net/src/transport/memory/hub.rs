//! The network: connections, and what is on its way.

use super::link::{Links, time_up_to};
use crate::wire;
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::{CloseReason, ConnectionId, Frame, Instant, TransportEvent};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Hub {
    pub now: Instant,
    pub send_queue_max: usize,
    /// Orders arrivals of the same instant.
    pub arrivals: u64,
    pub connections: u64,
    pub endpoints: BTreeMap<SocketAddr, Endpoint>,
    /// Each connection has two, one for each side.
    pub halves: BTreeMap<ConnectionId, Half>,
    pub cuts: BTreeSet<(SocketAddr, SocketAddr)>,
    /// Directions in which everything waits.
    pub stalls: BTreeSet<(SocketAddr, SocketAddr)>,
    /// Addresses of machines without power: nobody answers there, not even with a refusal.
    pub dark: BTreeSet<SocketAddr>,
    pub damage: BTreeMap<SocketAddr, usize>,
    pub links: Links,
    /// New first arrivals of endpoints, when somebody wants to know.
    pub wakeups: Option<Vec<(SocketAddr, Instant)>>,
    pub pool: BufferPool,
}

#[derive(Debug, Default)]
pub(super) struct Endpoint {
    pub arriving: BTreeMap<(Instant, u64), (ConnectionId, Item)>,
}

#[derive(Debug)]
pub(super) struct Half {
    pub owner: SocketAddr,
    pub peer_address: SocketAddr,
    pub peer: ConnectionId,
    /// Its owner has not closed it. A closed side stays while what it sent is stalled.
    pub open: bool,
    /// What it sends goes nowhere any more: the connection was reset, or the peer's machine has lost its power.
    pub severed: bool,
    pub trusted: bool,
    /// The one frame before `trust` was delivered.
    pub introduced: bool,
    /// What waits for `trust`, with its place in the endpoint's order.
    pub held: Vec<((Instant, u64), Item)>,
    /// What this side has sent while its direction was stalled.
    pub stalled: VecDeque<Item>,
    /// Frames that this side has sent and the other has not taken.
    pub unread: usize,
    /// When the newest arrival at this side is due: no later one overtakes it.
    pub newest_due: Instant,
}

impl Half {
    pub fn new(owner: SocketAddr, peer_address: SocketAddr, peer: ConnectionId) -> Self {
        Self {
            owner,
            peer_address,
            peer,
            open: true,
            severed: false,
            trusted: false,
            introduced: false,
            held: Vec::new(),
            stalled: VecDeque::new(),
            unread: 0,
            newest_due: Instant(0),
        }
    }
}

#[derive(Debug)]
pub(super) enum Item {
    Accepted(SocketAddr),
    Connected,
    Frame(Frame),
    Closed(CloseReason),
}

impl Item {
    fn len(&self) -> usize {
        match self {
            Self::Frame(frame) => frame.head.len() + frame.data.as_ref().map_or(0, |data| data.len()),
            _ => 0,
        }
    }
}

impl Hub {
    pub fn between(&self, a: SocketAddr, b: SocketAddr) -> Vec<ConnectionId> {
        let joins = |half: &Half| {
            (half.owner, half.peer_address) == (a, b) || (half.owner, half.peer_address) == (b, a)
        };
        self.halves.iter().filter(|(_, half)| joins(half)).map(|(id, _)| *id).collect()
    }

    pub fn next_connection(&mut self) -> ConnectionId {
        self.connections += 1;
        ConnectionId(self.connections)
    }

    /// Something is on its way to the side `id`, or there.
    fn enqueue(&mut self, owner: SocketAddr, due: Instant, id: ConnectionId, item: Item) {
        self.arrivals += 1;
        let place = (due, self.arrivals);
        let Some(endpoint) = self.endpoints.get_mut(&owner) else { return };
        let is_first = endpoint.arriving.first_key_value().is_none_or(|(first, _)| place < *first);
        endpoint.arriving.insert(place, (id, item));
        if is_first && let Some(wakeups) = &mut self.wakeups {
            wakeups.push((owner, due));
        }
    }

    /// Begins a connection between two sides that were just made.
    pub fn dial(&mut self, here: ConnectionId, there: ConnectionId, from: SocketAddr, to: SocketAddr) {
        if self.stalls.contains(&(from, to)) || self.stalls.contains(&(to, from)) {
            // Making a connection takes packets in both directions.
            self.stall_item(here, Item::Accepted(from));
            self.stall_item(there, Item::Connected);
            return;
        }
        let accepted = self.links.arrival(self.now, from, to, 0);
        self.deliver_at(there, Item::Accepted(from), accepted);
        let connected = self.links.arrival(accepted, to, from, 0);
        self.deliver_at(here, Item::Connected, connected);
    }

    /// Something arrives at the side `id` after the direction's delay, behind all that is on its way to it.
    pub fn deliver(&mut self, id: ConnectionId, item: Item) {
        let Some(half) = self.halves.get(&id) else { return };
        let due = self.links.arrival(self.now, half.peer_address, half.owner, item.len());
        self.deliver_at(id, item, due);
    }

    fn deliver_at(&mut self, id: ConnectionId, item: Item, due: Instant) {
        let Some(half) = self.halves.get_mut(&id).filter(|half| half.open) else {
            return;
        };
        let due = due.max(half.newest_due);
        half.newest_due = due;
        let owner = half.owner;
        self.enqueue(owner, due, id, item);
    }

    /// The side `from` sends something to its peer.
    pub fn send(&mut self, from: ConnectionId, item: Item) {
        let Some(half) = self.halves.get_mut(&from) else {
            return;
        };
        let (peer, owner, peer_address) = (half.peer, half.owner, half.peer_address);
        if half.severed {
            return self.send_nowhere(from, peer_address);
        }
        if self.stalls.contains(&(owner, peer_address)) {
            half.stalled.push_back(item);
        } else {
            self.deliver(peer, item);
        }
    }

    /// Whoever answers at an address that knows the connection no more, resets it.
    fn send_nowhere(&mut self, from: ConnectionId, to: SocketAddr) {
        let told = self.halves.get(&from).is_none_or(|half| half.newest_due == Instant(u64::MAX));
        if self.endpoints.contains_key(&to) && !told {
            self.deliver(from, Item::Closed(CloseReason::Network(libc::ECONNRESET)));
            if let Some(half) = self.halves.get_mut(&from) {
                half.newest_due = Instant(u64::MAX);
            }
        }
    }

    fn stall_item(&mut self, from: ConnectionId, item: Item) {
        if let Some(half) = self.halves.get_mut(&from) {
            half.stalled.push_back(item);
        }
    }

    pub fn release_stalled(&mut self, from: ConnectionId) {
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
    pub fn break_half(&mut self, id: ConnectionId, reason: CloseReason) {
        self.forget_arriving(id);
        self.deliver_at(id, Item::Closed(reason), self.now);
    }

    /// A reset of the connection somewhere in the middle: of what is on its way to the side `id` some comes, by `late` at
    /// the latest, the rest is lost, and the side learns of it after that.
    pub fn sever(&mut self, id: ConnectionId, late: Duration) {
        let Some(half) = self.halves.get_mut(&id).filter(|half| half.open && !half.severed) else { return };
        half.severed = true;
        half.stalled.clear();
        let (owner, trusted) = (half.owner, half.trusted);
        let Some(endpoint) = self.endpoints.get_mut(&owner) else { return };
        let mut coming = Vec::new();
        // An end that is on its way already comes in any case.
        let mut is_closing = false;
        endpoint.arriving.retain(|place, (to, item)| {
            let own = *to == id;
            is_closing |= own && matches!(item, Item::Closed(_));
            if own && !matches!(item, Item::Closed(_)) {
                let item = std::mem::replace(item, Item::Connected);
                coming.push((*place, item));
            }
            !own || matches!(item, Item::Closed(_))
        });
        let kept = self.links.random.below(coming.len() as u64 + 1) as usize;
        let mut due = self.now;
        for (place, item) in coming.into_iter().take(if trusted { kept } else { 0 }) {
            due = due.max(place.0).after(time_up_to(&mut self.links.random, late / 4));
            self.enqueue(owner, due, id, item);
        }
        if !is_closing {
            let due = due.after(time_up_to(&mut self.links.random, late));
            self.enqueue(owner, due, id, Item::Closed(CloseReason::Network(libc::ECONNRESET)));
        }
        if let Some(half) = self.halves.get_mut(&id) {
            half.newest_due = Instant(u64::MAX);
        }
    }

    pub fn forget_arriving(&mut self, id: ConnectionId) {
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
    pub fn hang_up(&mut self, id: ConnectionId) {
        self.send(id, Item::Closed(CloseReason::Peer));
        match self.halves.get_mut(&id) {
            Some(half) if !half.stalled.is_empty() => half.open = false,
            _ => {
                self.halves.remove(&id);
            }
        }
    }

    /// This side's own close: its connection is gone, and it is told so.
    pub fn close(&mut self, id: ConnectionId, owner: SocketAddr) {
        self.forget_arriving(id);
        self.hang_up(id);
        self.enqueue(owner, self.now, id, Item::Closed(CloseReason::Local));
    }

    /// All connections of the process at `owner` break; the peers hear it.
    pub fn end_process(&mut self, owner: SocketAddr) {
        for id in self.owned_by(owner) {
            self.hang_up(id);
        }
        self.endpoints.remove(&owner);
    }

    /// The machine of the process at `owner` loses its power: nobody hears anything, and of what it had sent some is
    /// lost.
    pub fn lose_power(&mut self, owner: SocketAddr) {
        for id in self.owned_by(owner) {
            let Some(half) = self.halves.remove(&id) else { continue };
            let Some(peer) = self.halves.get_mut(&half.peer) else { continue };
            peer.severed = true;
            let at = peer.owner;
            let kept = self.links.random.below(4);
            let Some(endpoint) = self.endpoints.get_mut(&at) else { continue };
            let mut seen = 0;
            endpoint.arriving.retain(|_, (to, item)| {
                let own = *to == half.peer && matches!(item, Item::Frame(_));
                seen += u64::from(own);
                !own || seen <= kept
            });
        }
        self.endpoints.remove(&owner);
        self.dark.insert(owner);
    }

    fn owned_by(&self, owner: SocketAddr) -> Vec<ConnectionId> {
        let own = |half: &Half| half.open && half.owner == owner;
        self.halves.iter().filter(|(_, half)| own(half)).map(|(id, _)| *id).collect()
    }

    pub fn trust(&mut self, id: ConnectionId, owner: SocketAddr) {
        let Some(half) = self.halves.get_mut(&id) else {
            return;
        };
        half.trusted = true;
        let held = std::mem::take(&mut half.held);
        if let Some(endpoint) = self.endpoints.get_mut(&owner) {
            endpoint.arriving.extend(held.into_iter().map(|(place, item)| (place, (id, item))));
        }
    }

    pub fn damaged(&mut self, from: SocketAddr, to: SocketAddr, frame: Frame) -> Frame {
        let bit = match self.damage.remove(&to) {
            Some(bit) => bit,
            None if self.links.damages(from, to) => self.links.random.next_u64() as usize,
            None => return frame,
        };
        self.links.stats.damaged += 1;
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

    /// The next event of the process at `owner`, if one is due. `None` in it: what came was no event yet.
    pub fn next_event(&mut self, owner: SocketAddr) -> Option<Option<TransportEvent>> {
        let endpoint = self.endpoints.get_mut(&owner)?;
        let entry = endpoint.arriving.first_entry().filter(|entry| entry.key().0 <= self.now)?;
        let (place, (id, item)) = entry.remove_entry();
        Some(match item {
            // This side's own close: the connection is gone already.
            Item::Closed(reason @ CloseReason::Local) => {
                Some(TransportEvent::Closed { connection: id, reason })
            }
            item => self.arrive(place, id, item),
        })
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
                    // Room in a full send queue wakes its owner, as a socket that can be written to does.
                    if sender.unread >= self.send_queue_max
                        && let Some(wakeups) = &mut self.wakeups
                    {
                        wakeups.push((sender.owner, self.now));
                    }
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
