//! Frames over TCP.

use super::listener::Listener;
use super::socket::{Drain, SendRefusal, SocketEvent, SocketSet, SocketSettings};
use crate::framing::FrameReader;
use loligo_config::limits;
use loligo_reactor::dma::{Buffer, BufferPool};
use loligo_reactor::env::{CloseReason, ConnectionId, Frame, SendRefused, Transport, TransportEvent};
use loligo_reactor::os::ring::Ring;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;

/// Events waiting to be fetched from which on nothing more is received.
const EVENTS_MAX: usize = 1024;

/// Bounds and options of a transport.
#[derive(Clone, Copy, Debug)]
pub struct TcpOptions {
    /// Bytes waiting to be sent on one connection from which on more frames are refused. One frame may exceed it.
    pub send_queue_max: usize,
    /// Sends small packets at once (`TCP_NODELAY`).
    pub nodelay: bool,
    /// Connections at once; more are closed when they arrive.
    pub connections_max: usize,
    /// Accepted connections whose peers have not proven who they are; more are closed when they arrive.
    pub untrusted_max: usize,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            // A few ops of the largest size: what one connection may hold back while its peer does not read.
            send_queue_max: 8 << 20,
            nodelay: true,
            connections_max: limits::CONNECTIONS_MAX,
            // The messenger makes room for new ones by closing old ones, which takes a moment: were this its own
            // limit, nobody would get in any more once it is reached.
            untrusted_max: 2 * limits::PREAUTH_CONNECTIONS_MAX,
        }
    }
}

/// The transport of one reactor.
///
/// A process listens on one port. With several reactors the one that listens reads the handshake, and gives the
/// connection to the core that it names: [`TcpTransport::hand_over`], a mailbox, [`TcpTransport::adopt`].
pub struct TcpTransport {
    sockets: SocketSet,
    pool: BufferPool,
    options: TcpOptions,
    links: BTreeMap<ConnectionId, Link>,
    untrusted: usize,
    raw: VecDeque<SocketEvent>,
    events: VecDeque<TransportEvent>,
    /// Connections that wait for a buffer, or for events to be fetched.
    stalled: Vec<ConnectionId>,
}

struct Link {
    reader: FrameReader,
    /// Received bytes that the reader has not taken yet.
    staged: Option<Staged>,
    /// A receive goes straight into the data of a frame.
    direct: bool,
    receiving: bool,
    trusted: bool,
    /// Counted in `untrusted`.
    counted: bool,
    closing: bool,
    /// Before trust: bytes that the reader has taken and that belong to no delivered frame, for `hand_over`.
    partial: Vec<u8>,
}

struct Staged {
    buffer: Buffer,
    from: usize,
    to: usize,
}

/// A connection on its way to another reactor, with the bytes that were already read.
#[derive(Debug)]
pub struct OwnedSocket {
    fd: OwnedFd,
    received: Vec<u8>,
    unsent: Vec<u8>,
}

impl OwnedSocket {
    /// Puts a frame that was read from this connection back in front of what comes: the adopting side receives it
    /// again.
    pub fn put_back(&mut self, frame: &Frame) {
        let mut bytes = bytes_of(frame);
        bytes.append(&mut self.received);
        self.received = bytes;
    }
}

fn bytes_of(frame: &Frame) -> Vec<u8> {
    let mut bytes = frame.head.to_vec();
    bytes.extend_from_slice(frame.data.as_deref().unwrap_or(&[]));
    bytes
}

fn frame_len(frame: &Frame) -> usize {
    frame.head.len() + frame.data.as_ref().map_or(0, |data| data.len())
}

impl TcpTransport {
    /// A transport on this reactor's ring, receiving into buffers of this pool.
    pub fn new(ring: &Ring, pool: &BufferPool, options: TcpOptions) -> Self {
        let settings = SocketSettings {
            send_queue_max: options.send_queue_max,
            nodelay: options.nodelay,
            connections_max: options.connections_max,
        };
        Self {
            sockets: SocketSet::new(ring, pool, settings),
            pool: pool.clone(),
            options,
            links: BTreeMap::new(),
            untrusted: 0,
            raw: VecDeque::new(),
            events: VecDeque::new(),
            stalled: Vec::new(),
        }
    }

    /// Accepts connections on this address; port 0 is any free one. Returns the address in use.
    ///
    /// # Errors
    /// As the system refuses it, with the address in the message: busy, not ours, not allowed.
    pub fn listen(&mut self, address: SocketAddr) -> io::Result<SocketAddr> {
        let (listener, address) = Listener::tcp(address)?;
        self.sockets.listen(listener);
        Ok(address)
    }

    /// Takes a connection that is not trusted yet out of this transport; its id is over without a `Closed`. Frames that
    /// were received and not fetched by `poll` go along, and so do bytes not yet sent.
    ///
    /// `None`: there is no such connection, it is not connected or already trusted, or it is at its end.
    pub fn hand_over(&mut self, connection: ConnectionId) -> Option<OwnedSocket> {
        let link = self.links.get(&connection).filter(|link| !link.trusted && !link.closing)?;
        let staged = link.staged.as_ref().map_or(Vec::new(), |staged| staged.bytes().to_vec());
        let detached = self.sockets.detach(connection)?;
        let link = self.links.remove(&connection).expect("it was there");
        self.untrusted -= usize::from(link.counted);
        let mut received = Vec::new();
        self.events.retain(|event| match event {
            TransportEvent::Frame { connection: its, frame } if *its == connection => {
                received.extend(bytes_of(frame));
                false
            }
            TransportEvent::Accepted { connection: its, .. }
            | TransportEvent::Connected { connection: its } => *its != connection,
            _ => true,
        });
        received.extend(link.partial);
        received.extend(staged);
        received.extend(detached.received);
        Some(OwnedSocket { fd: detached.fd, received, unsent: detached.unsent })
    }

    /// Takes over a connection from another reactor. `Accepted` follows, then what its peer sends, from the first byte
    /// that no delivered frame held on the other side.
    pub fn adopt(&mut self, socket: OwnedSocket) -> ConnectionId {
        let OwnedSocket { fd, received, unsent } = socket;
        let stream = TcpStream::from(fd);
        let from = stream.peer_addr();
        let id = self.sockets.adopt(stream.into(), &unsent);
        let Ok(from) = from else {
            self.sockets.close(id, Drain::Nothing, CloseReason::Peer);
            return id;
        };
        self.begin(id, true);
        self.events.push_back(TransportEvent::Accepted { connection: id, from });
        if !received.is_empty() {
            match self.pool.alloc(received.len()) {
                Ok(mut buffer) => {
                    buffer.copy_from_slice(&received);
                    let to = received.len();
                    let link = self.links.get_mut(&id).expect("it has just begun");
                    link.staged = Some(Staged { buffer, from: 0, to });
                }
                Err(_) => self.sockets.close(id, Drain::Nothing, CloseReason::Network(libc::ENOBUFS)),
            }
        }
        self.pump(id);
        self.sockets.nudge();
        id
    }

    /// Connections that are open or being made.
    pub fn connections(&self) -> usize {
        self.links.len()
    }

    fn begin(&mut self, id: ConnectionId, counted: bool) {
        let link = Link {
            reader: FrameReader::new(self.pool.clone()),
            staged: None,
            direct: false,
            receiving: false,
            trusted: false,
            counted,
            closing: false,
            partial: Vec::new(),
        };
        self.untrusted += usize::from(counted);
        self.links.insert(id, link);
    }

    fn handle(&mut self, event: SocketEvent) {
        match event {
            SocketEvent::Accepted { connection, from: Some(from) }
                if self.untrusted < self.options.untrusted_max =>
            {
                self.begin(connection, true);
                self.events.push_back(TransportEvent::Accepted { connection, from });
                self.pump(connection);
            }
            SocketEvent::Accepted { connection, .. } => {
                // Gone already, or too many strangers. Nobody was told of it.
                self.sockets.close(connection, Drain::Nothing, CloseReason::Local);
            }
            SocketEvent::Connected { connection } => {
                self.events.push_back(TransportEvent::Connected { connection });
                self.pump(connection);
            }
            SocketEvent::Received { connection, buffer, from, to } => {
                self.received(connection, buffer, from, to)
            }
            SocketEvent::Writable { .. } => {}
            SocketEvent::Closed { connection, reason } => {
                if let Some(link) = self.links.remove(&connection) {
                    self.untrusted -= usize::from(link.counted);
                    self.events.push_back(TransportEvent::Closed { connection, reason });
                }
            }
        }
    }

    fn received(&mut self, id: ConnectionId, buffer: Buffer, from: usize, to: usize) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.receiving = false;
        if std::mem::take(&mut link.direct) {
            if let Err(reason) = link.reader.direct_done(buffer, to) {
                self.break_off(id, reason);
                return;
            }
        } else {
            link.staged = Some(Staged { buffer, from, to });
        }
        self.pump(id);
    }

    /// The peer broke the protocol.
    fn break_off(&mut self, id: ConnectionId, reason: CloseReason) {
        if let Some(link) = self.links.get_mut(&id) {
            link.closing = true;
            link.staged = None;
        }
        self.sockets.close(id, Drain::Nothing, reason);
    }

    /// Moves received bytes on as far as they go, and receives more.
    fn pump(&mut self, id: ConnectionId) {
        let full = self.events.len() >= EVENTS_MAX;
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if link.closing || link.receiving || !self.sockets.is_open(id) {
            return;
        }
        if full {
            self.stalled.push(id);
            return;
        }
        match link.digest(id, &mut self.events) {
            Err(reason) => self.break_off(id, reason),
            Ok(Digest::Waits) if link.trusted => self.stalled.push(id),
            Ok(Digest::Waits) => {} // for `trust`
            Ok(Digest::Empty) => self.receive(id),
        }
    }

    fn receive(&mut self, id: ConnectionId) {
        let link = self.links.get_mut(&id).expect("the caller has looked");
        link.receiving = true;
        if let Some((buffer, filled)) = link.reader.direct() {
            link.direct = true;
            self.sockets.receive(id, buffer, filled, true);
        } else if !self.sockets.receive_some(id) {
            link.receiving = false;
            self.stalled.push(id);
        }
    }
}

enum Digest {
    /// All that was received is taken.
    Empty,
    /// The reader takes no more now.
    Waits,
}

impl Staged {
    fn bytes(&self) -> &[u8] {
        &self.buffer[self.from..self.to]
    }
}

impl Link {
    /// Feeds the reader with what was received and delivers its frames.
    fn digest(
        &mut self,
        connection: ConnectionId,
        events: &mut VecDeque<TransportEvent>,
    ) -> Result<Digest, CloseReason> {
        loop {
            let bytes = self.staged.as_ref().map_or(&[][..], Staged::bytes);
            let fed = self.reader.feed(bytes);
            if let Ok(count) = fed
                && !self.trusted
            {
                self.partial.extend_from_slice(&bytes[..count]);
            }
            let mut frames = 0;
            while let Some(frame) = self.reader.next_frame() {
                if !self.trusted {
                    self.partial.drain(..frame_len(&frame).min(self.partial.len()));
                }
                events.push_back(TransportEvent::Frame { connection, frame });
                frames += 1;
            }
            let count = fed?;
            if let Some(staged) = &mut self.staged {
                staged.from += count;
                if staged.from == staged.to {
                    self.staged = None;
                }
            }
            if self.staged.is_none() {
                return Ok(Digest::Empty);
            }
            if count == 0 && frames == 0 {
                return Ok(Digest::Waits);
            }
        }
    }
}

impl Transport for TcpTransport {
    fn connect(&mut self, to: SocketAddr) -> ConnectionId {
        let id = self.sockets.connect(to);
        self.begin(id, false);
        id
    }

    fn send(&mut self, connection: ConnectionId, frame: Frame) -> Result<(), SendRefused> {
        let result = match &frame.data {
            Some(data) => self.sockets.send(connection, &[frame.head.clone(), data.clone()]),
            None => self.sockets.send(connection, std::slice::from_ref(&frame.head)),
        };
        match result {
            Ok(()) => Ok(()),
            Err(SendRefusal::QueueFull) => Err(SendRefused::QueueFull(frame)),
            Err(SendRefusal::Closed) => Err(SendRefused::Closed(frame)),
        }
    }

    fn close(&mut self, connection: ConnectionId) {
        if let Some(link) = self.links.get_mut(&connection) {
            link.closing = true;
            link.staged = None;
            self.sockets.close(connection, Drain::AtOnce, CloseReason::Local);
        }
    }

    fn trust(&mut self, connection: ConnectionId) {
        if let Some(link) = self.links.get_mut(&connection) {
            link.trusted = true;
            link.reader.trust();
            link.partial = Vec::new();
            self.untrusted -= usize::from(std::mem::take(&mut link.counted));
            self.sockets.trust(connection);
            self.pump(connection);
            if !self.events.is_empty() {
                self.sockets.nudge();
            }
        }
    }

    fn poll(&mut self, budget: u32, inbox: &mut VecDeque<TransportEvent>) -> u32 {
        self.sockets.poll(&mut self.raw);
        while let Some(event) = self.raw.pop_front() {
            self.handle(event);
        }
        if !self.stalled.is_empty() {
            for id in std::mem::take(&mut self.stalled) {
                self.pump(id);
            }
        }
        if self.events.is_empty() {
            return 0;
        }
        let count = self.events.len().min(budget as usize);
        inbox.extend(self.events.drain(..count));
        if !self.events.is_empty() {
            self.sockets.nudge();
        }
        u32::try_from(count).expect("at most the budget")
    }
}
