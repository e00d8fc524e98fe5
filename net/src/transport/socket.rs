//! Connections and their bytes: what TCP frames and foreign streams have in common.
//!
//! ```text
//!   connect ──▶ Connecting ──▶ Open ──close──▶ Draining ──all sent, or given up──▶ Lingering ──▶ gone
//!   accept  ────────────────────▲ └──peer closed, network failed──▶ Failed ──operations ended──▶ gone
//! ```
//! `Closed` is told when `Draining` or `Failed` ends; what lingers is nobody's business but the kernel's: it reads and
//! drops what the peer still sends, because closing a socket with unread bytes resets the connection and may
//! take away from the peer what was sent last.

mod close;
mod detach;

pub(super) use close::Drain;

use close::LINGER_BYTES_MAX;

use super::listener::Listener;
use super::ring::{Done, OpKey, ReceiveMode, SocketRing, Tag, tcp_socket};
use loligo_reactor::dma::{Buffer, BufferPool, SharedBuffer};
use loligo_reactor::env::{CloseReason, ConnectionId};
use loligo_reactor::os::ring::Ring;
use slab::Slab;
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::rc::Rc;

/// What a receive of unknown length takes at first: a 4 KiB block with its header, and not much memory for a
/// connection that is idle.
const STAGING_LEN_MIN: usize = 8 << 10;
/// The same for a connection that keeps it full.
const STAGING_LEN_MAX: usize = 64 << 10;
/// The same before the peer has proven who it is.
const STAGING_LEN_UNTRUSTED: usize = 4 << 10;
/// A send queue that was full is writable again at this part of its limit.
const WRITABLE_PART: usize = 2;

const INDEX_BITS: u32 = 16;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;
/// Tags: a connection's index and part, a listener's index with this bit, or the nudge.
const TAG_LISTENER: Tag = 1 << 63;
const TAG_NUDGE: Tag = u64::MAX;

/// Bounds and options of a set of sockets.
#[derive(Clone, Copy, Debug)]
pub(super) struct SocketSettings {
    /// Bytes waiting to be sent from which on a connection refuses more.
    pub send_queue_max: usize,
    /// Whether small packets go out at once.
    pub nodelay: bool,
    /// Connections in all, lingering ones apart.
    pub connections_max: usize,
}

/// What happened.
#[derive(Debug)]
pub(super) enum SocketEvent {
    Accepted {
        connection: ConnectionId,
        from: Option<SocketAddr>,
    },
    Connected {
        connection: ConnectionId,
    },
    /// `buffer[from..to]` is new.
    Received {
        connection: ConnectionId,
        buffer: Buffer,
        from: usize,
        to: usize,
    },
    Writable {
        connection: ConnectionId,
    },
    Closed {
        connection: ConnectionId,
        reason: CloseReason,
    },
}

/// Why bytes were not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendRefusal {
    QueueFull,
    Closed,
}

/// The sockets of one transport.
pub(super) struct SocketSet {
    ring: SocketRing,
    pool: BufferPool,
    settings: SocketSettings,
    connections: Slab<Connection>,
    listeners: Vec<Listener>,
    lingering: usize,
    next_serial: u64,
    events: VecDeque<SocketEvent>,
    /// Connections whose close waits for the kernel to have been entered.
    closing: Vec<usize>,
}

struct Connection {
    id: ConnectionId,
    fd: Option<Rc<OwnedFd>>,
    state: State,
    receive: Option<OpKey>,
    send: Option<OpKey>,
    connect: Option<OpKey>,
    timer: Option<OpKey>,
    queue: VecDeque<SharedBuffer>,
    /// Bytes in the queue and in flight.
    unsent: usize,
    refused: bool,
    /// The socket was empty when last seen.
    dry: bool,
    trusted: bool,
    staging_len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Connecting,
    Open,
    Draining,
    Failed(CloseReason),
    /// `drain_timer`: the timer that runs is still the one of `Draining`.
    Lingering {
        dropped: usize,
        drain_timer: bool,
    },
}

#[derive(Clone, Copy)]
enum Part {
    Receive = 0,
    Send = 1,
    Connect = 2,
    Timer = 3,
}

fn tag(index: usize, part: Part) -> Tag {
    (index as u64) << 2 | part as u64
}

impl Connection {
    fn idle(&self) -> bool {
        self.receive.is_none() && self.send.is_none() && self.connect.is_none() && self.timer.is_none()
    }

    fn fd(&self) -> Rc<OwnedFd> {
        Rc::clone(self.fd.as_ref().expect("a connection that does I/O has its socket"))
    }
}

impl SocketSet {
    pub fn new(ring: &Ring, pool: &BufferPool, settings: SocketSettings) -> Self {
        Self {
            ring: SocketRing::new(ring),
            pool: pool.clone(),
            settings,
            connections: Slab::new(),
            listeners: Vec::new(),
            lingering: 0,
            next_serial: 1,
            events: VecDeque::new(),
            closing: Vec::new(),
        }
    }

    /// Accepts from this listening socket from now on.
    pub fn listen(&mut self, mut listener: Listener) {
        listener.arm(&mut self.ring, TAG_LISTENER | self.listeners.len() as u64);
        self.listeners.push(listener);
    }

    pub fn connect(&mut self, to: SocketAddr) -> ConnectionId {
        if self.is_full() {
            return self.stillborn(CloseReason::Unreachable(libc::EMFILE));
        }
        let fd = match tcp_socket(to) {
            Ok(fd) => fd,
            Err(error) => return self.stillborn(CloseReason::Unreachable(error.raw_os_error().unwrap_or(0))),
        };
        let fd = Rc::new(self.prepare(fd));
        let (index, id) = self.insert(Rc::clone(&fd), State::Connecting);
        self.connections[index].connect = Some(self.ring.connect(&fd, tag(index, Part::Connect), to));
        id
    }

    /// Takes over an open socket; what was not sent goes out first.
    pub fn adopt(&mut self, fd: OwnedFd, unsent: &[u8]) -> ConnectionId {
        if self.is_full() {
            return self.stillborn(CloseReason::Network(libc::EMFILE));
        }
        let (index, id) = self.insert(Rc::new(fd), State::Open);
        for chunk in unsent.chunks(64 << 10) {
            let Ok(piece) = self.pool.copy_of(chunk) else {
                self.fail(index, CloseReason::Network(libc::ENOBUFS));
                return id;
            };
            self.queue_piece(index, piece);
        }
        self.push_send(index);
        id
    }

    fn is_full(&self) -> bool {
        let open = self.connections.len() - self.lingering;
        open >= self.settings.connections_max || self.connections.len() >= INDEX_MASK as usize
    }

    /// An id whose only event is its end.
    fn stillborn(&mut self, reason: CloseReason) -> ConnectionId {
        let connection = self.next_id(INDEX_MASK as usize);
        self.events.push_back(SocketEvent::Closed { connection, reason });
        self.nudge();
        connection
    }

    fn next_id(&mut self, index: usize) -> ConnectionId {
        let id = ConnectionId(self.next_serial << INDEX_BITS | index as u64);
        self.next_serial += 1;
        id
    }

    fn insert(&mut self, fd: Rc<OwnedFd>, state: State) -> (usize, ConnectionId) {
        let index = self.connections.vacant_key();
        let id = self.next_id(index);
        self.connections.insert(Connection {
            id,
            fd: Some(fd),
            state,
            receive: None,
            send: None,
            connect: None,
            timer: None,
            queue: VecDeque::new(),
            unsent: 0,
            refused: false,
            dry: true,
            trusted: false,
            staging_len: STAGING_LEN_UNTRUSTED,
        });
        (index, id)
    }

    fn prepare(&self, fd: OwnedFd) -> OwnedFd {
        if !self.settings.nodelay {
            return fd;
        }
        let stream = TcpStream::from(fd);
        // Refused for Unix sockets and for connections that are gone, which the next receive tells.
        let _ = stream.set_nodelay(true);
        stream.into()
    }

    fn index_of(&self, id: ConnectionId) -> Option<usize> {
        let index = (id.0 & INDEX_MASK) as usize;
        self.connections.get(index).filter(|connection| connection.id == id).map(|_| index)
    }

    fn open_index(&self, id: ConnectionId) -> Option<usize> {
        let open = |index: &usize| matches!(self.connections[*index].state, State::Open | State::Connecting);
        self.index_of(id).filter(open)
    }

    /// Whether the connection can be used.
    pub fn is_open(&self, id: ConnectionId) -> bool {
        self.open_index(id).is_some()
    }

    /// Queues pieces, all or none.
    pub fn send(&mut self, id: ConnectionId, pieces: &[SharedBuffer]) -> Result<(), SendRefusal> {
        let index = self.open_index(id).ok_or(SendRefusal::Closed)?;
        let connection = &mut self.connections[index];
        if connection.unsent >= self.settings.send_queue_max {
            connection.refused = true;
            return Err(SendRefusal::QueueFull);
        }
        if let (Some(send), true) = (connection.send, connection.queue.is_empty())
            && self.ring.extend(send, pieces)
        {
            connection.unsent += pieces.iter().map(|piece| piece.len()).sum::<usize>();
            return Ok(());
        }
        for piece in pieces {
            self.queue_piece(index, piece.clone());
        }
        self.push_send(index);
        Ok(())
    }

    fn queue_piece(&mut self, index: usize, piece: SharedBuffer) {
        let connection = &mut self.connections[index];
        connection.unsent += piece.len();
        if !piece.is_empty() {
            connection.queue.push_back(piece);
        }
    }

    fn push_send(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        let ready = matches!(connection.state, State::Open | State::Draining);
        if ready && connection.send.is_none() && !connection.queue.is_empty() {
            let fd = connection.fd();
            connection.send = Some(self.ring.send(&fd, tag(index, Part::Send), &mut connection.queue));
        }
    }

    /// Receives into `buffer[from..]`; one receive at a time. Ignored when the connection is not open.
    pub fn receive(&mut self, id: ConnectionId, buffer: Buffer, from: usize, whole: bool) {
        let Some(index) = self.open_index(id) else {
            return;
        };
        let connection = &mut self.connections[index];
        assert!(connection.receive.is_none(), "one receive at a time");
        let how = ReceiveMode { whole, dry: connection.dry };
        let fd = connection.fd();
        connection.receive = Some(self.ring.receive(&fd, tag(index, Part::Receive), buffer, from, how));
    }

    /// Receives what there is into a buffer from the pool, whose size follows what arrives. `false`: there was no
    /// buffer; ask again later.
    #[must_use]
    pub fn receive_some(&mut self, id: ConnectionId) -> bool {
        let Some(index) = self.open_index(id) else {
            return true;
        };
        let wanted = self.connections[index].staging_len;
        // Memory of a pool keeps its size class, so that one class may be exhausted and another not.
        let lens = [wanted, STAGING_LEN_MIN, STAGING_LEN_UNTRUSTED];
        let smaller = lens.into_iter().filter(|len| *len <= wanted);
        let Some(buffer) = smaller.flat_map(|len| self.pool.alloc(len)).next() else {
            return false;
        };
        self.receive(id, buffer, 0, false);
        true
    }

    /// The peer may cost more memory from now on.
    pub fn trust(&mut self, id: ConnectionId) {
        if let Some(index) = self.open_index(id) {
            let connection = &mut self.connections[index];
            connection.trusted = true;
            connection.staging_len = connection.staging_len.max(STAGING_LEN_MIN);
        }
    }

    /// Has `poll` called again before the reactor parks: something waits that no completion tells.
    pub fn nudge(&mut self) {
        self.ring.nudge(TAG_NUDGE);
    }

    fn cancel(&mut self, index: usize, part: Part) {
        let connection = &self.connections[index];
        let key = match part {
            Part::Receive => connection.receive,
            Part::Send => connection.send,
            Part::Connect => connection.connect,
            Part::Timer => connection.timer,
        };
        if let Some(key) = key {
            self.ring.cancel(key);
        }
    }

    fn cancel_all(&mut self, index: usize) {
        for part in [Part::Receive, Part::Send, Part::Connect, Part::Timer] {
            self.cancel(index, part);
        }
    }

    /// Takes what the ring has and moves events to `out`.
    pub fn poll(&mut self, out: &mut VecDeque<SocketEvent>) {
        while let Some((tag, _, done)) = self.ring.take() {
            self.complete(tag, done);
        }
        self.advance_closing();
        if !self.events.is_empty() {
            out.append(&mut self.events);
        }
    }

    fn complete(&mut self, tag: Tag, done: Done) {
        if tag == TAG_NUDGE {
            return;
        }
        if tag & TAG_LISTENER != 0 {
            self.complete_listener((tag & !TAG_LISTENER) as usize, done);
            return;
        }
        let index = (tag >> 2) as usize;
        match done {
            Done::Received { buffer, from, result, more } => self.received(index, buffer, from, result, more),
            Done::Sent { left, result } => self.sent(index, left, result),
            Done::Connected(result) => self.connected(index, result),
            Done::Elapsed => {
                self.connections[index].timer = None;
                self.elapsed(index);
            }
            Done::Accepted { .. } | Done::Nudged => unreachable!("connections do neither"),
        }
    }

    fn complete_listener(&mut self, index: usize, done: Done) {
        let tag = TAG_LISTENER | index as u64;
        if let Some(fd) = self.listeners[index].complete(&mut self.ring, tag, done) {
            self.accepted(fd);
        }
    }

    fn accepted(&mut self, fd: OwnedFd) {
        if self.is_full() {
            return; // dropping the descriptor closes the connection
        }
        let stream = TcpStream::from(self.prepare(fd));
        let from = stream.peer_addr().ok();
        let (_, connection) = self.insert(Rc::new(stream.into()), State::Open);
        self.events.push_back(SocketEvent::Accepted { connection, from });
    }

    fn connected(&mut self, index: usize, result: Result<(), i32>) {
        let connection = &mut self.connections[index];
        connection.connect = None;
        match (connection.state, result) {
            (State::Connecting, Ok(())) => {
                connection.state = State::Open;
                let connection = connection.id;
                self.events.push_back(SocketEvent::Connected { connection });
                self.push_send(index);
            }
            (State::Connecting, Err(errno)) => self.fail(index, CloseReason::Unreachable(errno)),
            _ => self.closing.push(index),
        }
    }

    fn received(
        &mut self,
        index: usize,
        buffer: Buffer,
        from: usize,
        result: Result<usize, i32>,
        more: bool,
    ) {
        let connection = &mut self.connections[index];
        connection.receive = None;
        connection.dry = !more;
        let id = connection.id;
        match (connection.state, result) {
            (State::Open, Ok(0)) => self.fail(index, CloseReason::Peer),
            (State::Open, Ok(count)) => {
                let to = from + count;
                if connection.trusted {
                    connection.staging_len =
                        if count < STAGING_LEN_MIN { STAGING_LEN_MIN } else { STAGING_LEN_MAX };
                }
                self.events.push_back(SocketEvent::Received { connection: id, buffer, from, to });
            }
            (State::Open, Err(libc::EINTR | libc::EAGAIN)) => self.receive(id, buffer, from, false),
            (State::Open, Err(errno)) => self.fail(index, reason_of(errno)),
            (State::Lingering { dropped, drain_timer }, Ok(count))
                if count > 0 && dropped < LINGER_BYTES_MAX =>
            {
                connection.state = State::Lingering { dropped: dropped + count, drain_timer };
                self.drop_input(index, buffer);
            }
            (State::Lingering { .. }, _) => self.end_linger(index),
            _ => self.closing.push(index),
        }
    }

    fn sent(&mut self, index: usize, mut left: VecDeque<SharedBuffer>, result: Result<usize, i32>) {
        let limit = self.settings.send_queue_max;
        let connection = &mut self.connections[index];
        connection.send = None;
        match (connection.state, result) {
            (State::Open | State::Draining, Ok(count)) => {
                connection.unsent -= count;
                while let Some(piece) = left.pop_back() {
                    connection.queue.push_front(piece);
                }
                if connection.refused && connection.unsent <= limit / WRITABLE_PART {
                    connection.refused = false;
                    self.events.push_back(SocketEvent::Writable { connection: connection.id });
                }
                self.push_send(index);
                self.closing.push(index);
            }
            (State::Open | State::Draining, Err(errno)) => self.fail(index, reason_of(errno)),
            _ => self.closing.push(index),
        }
    }

    fn elapsed(&mut self, index: usize) {
        match self.connections[index].state {
            State::Lingering { dropped, drain_timer: true } => self.linger_on(index, dropped),
            State::Lingering { .. } => self.end_linger(index),
            State::Draining => self.fail(index, CloseReason::Local),
            State::Connecting | State::Open | State::Failed(_) => self.closing.push(index),
        }
    }
}

fn reason_of(errno: i32) -> CloseReason {
    match errno {
        libc::ECONNRESET | libc::EPIPE => CloseReason::Peer,
        errno => CloseReason::Network(errno),
    }
}
