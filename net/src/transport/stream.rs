//! Byte streams of foreign protocols, over TCP and Unix sockets.

use super::listener::Listener;
use super::socket::{Drain, SendRefusal, SocketEvent, SocketSet, SocketSettings};
use loligo_config::limits;
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::{CloseReason, ConnectionId, QueueFull, StreamEvent, Streams};
use loligo_reactor::os::ring::Ring;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::path::Path;

/// Events waiting to be fetched from which on nothing more is received.
const EVENTS_MAX: usize = 1024;

/// Bounds and options of a server.
#[derive(Clone, Copy, Debug)]
pub struct StreamOptions {
    /// Bytes waiting to be sent on one stream from which on more are refused. One buffer may exceed it.
    pub send_queue_max: usize,
    /// Streams at once; more are closed when they arrive.
    pub connections_max: usize,
}

impl Default for StreamOptions {
    fn default() -> Self {
        // Two of the largest requests that NBD clients commonly make.
        Self { send_queue_max: 64 << 20, connections_max: limits::CONNECTIONS_MAX }
    }
}

/// Accepts byte streams on one reactor.
pub struct StreamServer {
    sockets: SocketSet,
    links: BTreeMap<ConnectionId, Link>,
    raw: VecDeque<SocketEvent>,
    events: VecDeque<StreamEvent>,
    /// Streams that wait for a buffer, or for events to be fetched.
    stalled: Vec<ConnectionId>,
}

#[derive(Default)]
struct Link {
    paused: bool,
    receiving: bool,
}

impl StreamServer {
    /// A server on this reactor's ring, receiving into buffers of this pool.
    pub fn new(ring: &Ring, pool: &BufferPool, options: StreamOptions) -> Self {
        let settings = SocketSettings {
            send_queue_max: options.send_queue_max,
            nodelay: true,
            connections_max: options.connections_max,
        };
        Self {
            sockets: SocketSet::new(ring, pool, settings),
            links: BTreeMap::new(),
            raw: VecDeque::new(),
            events: VecDeque::new(),
            stalled: Vec::new(),
        }
    }

    /// Accepts streams on this address; port 0 is any free one. Returns the address in use.
    ///
    /// # Errors
    /// As the system refuses it, with the address in the message.
    pub fn listen_tcp(&mut self, address: SocketAddr) -> io::Result<SocketAddr> {
        let (listener, address) = Listener::tcp(address)?;
        self.sockets.listen(listener);
        Ok(address)
    }

    /// Accepts streams on a Unix socket. A socket file on which nobody listens is replaced; the file is removed when
    /// the server is dropped.
    ///
    /// # Errors
    /// As the system refuses it, with the path in the message; also when somebody listens there, or the path is
    /// something else than a socket.
    pub fn listen_unix(&mut self, path: &Path) -> io::Result<()> {
        self.sockets.listen(Listener::unix(path)?);
        Ok(())
    }

    fn handle(&mut self, event: SocketEvent) {
        match event {
            SocketEvent::Accepted { connection, .. } => {
                self.sockets.trust(connection);
                self.links.insert(connection, Link::default());
                self.events.push_back(StreamEvent::Accepted { connection });
                self.receive(connection);
            }
            SocketEvent::Connected { .. } => unreachable!("a server does not connect"),
            SocketEvent::Received { connection, buffer, from, to } => {
                let data = buffer.freeze().slice(from..to);
                self.events.push_back(StreamEvent::Received { connection, data });
                if let Some(link) = self.links.get_mut(&connection) {
                    link.receiving = false;
                    self.receive(connection);
                }
            }
            SocketEvent::Writable { connection } => {
                self.events.push_back(StreamEvent::Writable { connection })
            }
            SocketEvent::Closed { connection, reason } => {
                self.links.remove(&connection);
                self.events.push_back(StreamEvent::Closed { connection, reason });
            }
        }
    }

    fn receive(&mut self, id: ConnectionId) {
        let Some(link) = self.links.get_mut(&id).filter(|link| !link.paused && !link.receiving) else {
            return;
        };
        if self.events.len() < EVENTS_MAX && self.sockets.receive_some(id) {
            link.receiving = true;
        } else {
            self.stalled.push(id);
        }
    }
}

impl Streams for StreamServer {
    fn send(&mut self, connection: ConnectionId, data: SharedBuffer) -> Result<(), QueueFull<SharedBuffer>> {
        match self.sockets.send(connection, std::slice::from_ref(&data)) {
            // What goes to a stream that has ended is lost, as if it had been sent; `Closed` tells.
            Ok(()) | Err(SendRefusal::Closed) => Ok(()),
            Err(SendRefusal::QueueFull) => Err(QueueFull(data)),
        }
    }

    fn pause(&mut self, connection: ConnectionId, paused: bool) {
        if let Some(link) = self.links.get_mut(&connection) {
            link.paused = paused;
            self.receive(connection);
        }
    }

    fn close(&mut self, connection: ConnectionId) {
        if let Some(link) = self.links.get_mut(&connection) {
            link.paused = true;
            self.sockets.close(connection, Drain::Everything, CloseReason::Local);
        }
    }

    fn poll(&mut self, budget: u32, inbox: &mut VecDeque<StreamEvent>) -> u32 {
        self.sockets.poll(&mut self.raw);
        while let Some(event) = self.raw.pop_front() {
            self.handle(event);
        }
        if !self.stalled.is_empty() {
            for id in std::mem::take(&mut self.stalled) {
                self.receive(id);
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
