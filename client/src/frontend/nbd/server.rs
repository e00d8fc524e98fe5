//! Binds sessions to streams and images: one reactor, no thread hop.

use super::exports::{ExportName, Exports};
use super::session::{Action, Ending, Export, IoKey, OpenRefused, Session};
use crate::error::ImageError;
use crate::event::{AdminReply, ClientEvent, ImageHandle, ImageIo};
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::{ConnectionId, Instant, QueueFull, StreamEvent, Streams, Ticket};
use loligo_reactor::poller::{Activity, Poller};
use slab::Slab;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Connections of one server; more are closed at once.
pub const CONNECTIONS_MAX: usize = 256;
/// Received bytes of one connection that wait for its session before the stream is paused.
const INPUT_BYTES_MAX: usize = 256 << 10;
/// Bytes of one connection that wait to be sent before its session gets no more input.
const OUTPUT_BYTES_MAX: usize = 8 << 20;
/// Stream events taken in one poll.
const EVENTS_PER_POLL: u32 = 64;
/// When a session that found no buffer tries again if nothing else happens. Guessed: short against any timeout.
const STALL_RETRY: Duration = Duration::from_millis(5);
/// How long after a reply the next request is expected: a client at queue depth 1 sends it at once. Guessed from a
/// loopback round trip of 9 to 54 µs (DESIGN section 2).
const NEXT_REQUEST: Duration = Duration::from_micros(50);

/// Where images come from: a [`Client`](crate::Client), or a stand-in for tests. The meaning of each call is the
/// client's.
pub trait Images {
    /// Opens an image; [`ClientEvent::Opened`] follows.
    fn open(&mut self, name: &ExportName, ticket: Ticket);
    /// Closes an image; [`ClientEvent::Closed`] follows.
    fn close(&mut self, image: ImageHandle, ticket: Ticket);
    /// Lists a pool; [`ClientEvent::Admin`] follows.
    fn list(&mut self, pool: &str, ticket: Ticket);
    /// Size and object order of an open image.
    fn shape(&self, image: ImageHandle) -> (u64, u8);
    /// Queues a request; [`ClientEvent::Io`] follows.
    ///
    /// # Errors
    /// `QueueFull` returns the request.
    fn submit(&mut self, image: ImageHandle, io: ImageIo, ticket: Ticket) -> Result<(), QueueFull<ImageIo>>;
    /// Does what there is to do now.
    fn poll(&mut self, now: Instant) -> Activity;
    /// The next thing that happened.
    fn next_event(&mut self) -> Option<ClientEvent>;
    /// When it wants to be polled next.
    fn next_deadline(&self) -> Option<Instant>;
    /// Whether an answer is awaited.
    fn expecting(&self) -> bool;
}

/// What a server needs to know.
#[derive(Clone, Debug)]
pub struct ServerSettings {
    /// Which images.
    pub exports: Exports,
    /// Whether writing is refused.
    pub read_only: bool,
    /// Time from a connection's start until it has chosen an export.
    pub handshake: Duration,
}

/// What a ticket given to [`Images`] stands for.
#[derive(Debug)]
enum Flight {
    Io { connection: ConnectionId, key: IoKey },
    Open { connection: ConnectionId, name: String },
    List { connection: ConnectionId, left: Vec<String>, names: Vec<String> },
    Close,
}

#[derive(Debug)]
struct Connection {
    session: Session,
    /// Received and not yet taken by the session; of the first, `taken` bytes are.
    input: VecDeque<SharedBuffer>,
    taken: usize,
    input_bytes: usize,
    output: VecDeque<SharedBuffer>,
    output_bytes: usize,
    paused: bool,
    image: Option<(String, ImageHandle)>,
    deadline: Instant,
    dirty: bool,
    /// The stream was told to close; `Closed` will follow.
    closing: bool,
}

/// Serves images over NBD.
#[derive(Debug)]
pub struct Server<S: Streams, I: Images> {
    settings: ServerSettings,
    streams: S,
    images: I,
    pool: BufferPool,
    connections: BTreeMap<ConnectionId, Connection>,
    flights: Slab<Flight>,
    /// What the client's queue had no room for.
    refused: VecDeque<(ImageHandle, ImageIo, Ticket)>,
    dirty: Vec<ConnectionId>,
    actions: Vec<Action>,
    inbox: VecDeque<StreamEvent>,
    stalled: bool,
    stopping: bool,
    now: Instant,
    last_reply: Instant,
}

impl<S: Streams, I: Images> Server<S, I> {
    /// A server over streams that listen already. Buffers come from `pool`.
    pub fn new(settings: ServerSettings, streams: S, images: I, pool: BufferPool) -> Self {
        Self {
            settings,
            streams,
            images,
            pool,
            connections: BTreeMap::new(),
            flights: Slab::new(),
            refused: VecDeque::new(),
            dirty: Vec::new(),
            actions: Vec::new(),
            inbox: VecDeque::new(),
            stalled: false,
            stopping: false,
            now: Instant::default(),
            last_reply: Instant::default(),
        }
    }

    /// Takes no more connections and requests; connections close when what is in flight is answered.
    pub fn stop(&mut self) {
        self.stopping = true;
        let ids: Vec<_> = self.connections.keys().copied().collect();
        for id in ids {
            self.with_session(id, |session, out| session.shut_down(out));
        }
    }

    /// Connections that are open.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Where the images come from.
    pub fn images(&self) -> &I {
        &self.images
    }

    #[cfg(test)]
    pub(super) fn images_mut(&mut self) -> &mut I {
        &mut self.images
    }

    #[cfg(test)]
    pub(super) fn streams_mut(&mut self) -> &mut S {
        &mut self.streams
    }

    #[cfg(test)]
    pub(super) fn flights(&self) -> usize {
        self.flights.len()
    }

    fn stream_event(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::Accepted { connection } => self.accept(connection),
            StreamEvent::Received { connection, data } => self.received(connection, data),
            StreamEvent::Writable { connection } => self.touch(connection),
            StreamEvent::Closed { connection, reason } => {
                tracing::debug!(connection = connection.0, %reason, "NBD connection closed");
                self.forget(connection);
            }
        }
    }

    fn accept(&mut self, id: ConnectionId) {
        if self.stopping || self.connections.len() >= CONNECTIONS_MAX {
            self.streams.close(id);
            return;
        }
        let session = Session::new(self.pool.clone(), &mut self.actions);
        let connection = Connection {
            session,
            input: VecDeque::new(),
            taken: 0,
            input_bytes: 0,
            output: VecDeque::new(),
            output_bytes: 0,
            paused: false,
            image: None,
            deadline: self.now.after(self.settings.handshake),
            dirty: false,
            closing: false,
        };
        self.connections.insert(id, connection);
        self.run_actions(id);
    }

    fn received(&mut self, id: ConnectionId, data: SharedBuffer) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if data.is_empty() || connection.closing {
            return;
        }
        connection.input_bytes += data.len();
        connection.input.push_back(data);
        self.touch(id);
    }

    /// Looks at the connection at the end of this poll.
    fn touch(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(&id).filter(|connection| !connection.dirty) {
            connection.dirty = true;
            self.dirty.push(id);
        }
    }

    /// The stream is gone: what is in flight completes unheard.
    fn forget(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.remove(&id) else { return };
        let flights = &mut self.flights;
        self.refused.retain(|(_, _, ticket)| {
            let mine = matches!(flights.get(index(*ticket)), Some(Flight::Io { connection, .. }) if *connection == id);
            if mine {
                flights.remove(index(*ticket));
            }
            !mine
        });
        if let Some((_, image)) = connection.image {
            self.close_image(image);
        }
    }

    fn close_image(&mut self, image: ImageHandle) {
        let ticket = Ticket(self.flights.insert(Flight::Close) as u64);
        self.images.close(image, ticket);
    }

    fn with_session(&mut self, id: ConnectionId, call: impl FnOnce(&mut Session, &mut Vec<Action>)) {
        if let Some(connection) = self.connections.get_mut(&id) {
            call(&mut connection.session, &mut self.actions);
            self.run_actions(id);
            self.touch(id);
        }
    }

    /// Does what a session asked for. A session may ask for more while it is answered.
    fn run_actions(&mut self, id: ConnectionId) {
        while !self.actions.is_empty() {
            let mut actions = std::mem::take(&mut self.actions);
            for action in actions.drain(..) {
                self.run_action(id, action);
            }
            if self.actions.is_empty() {
                self.actions = actions; // Keeps its memory.
            }
        }
    }

    fn run_action(&mut self, id: ConnectionId, action: Action) {
        match action {
            Action::Send(data) => self.queue_output(id, data),
            Action::Open { name } => self.open(id, name),
            Action::List => self.list(id),
            Action::Io { key, io } => self.submit(id, key, io),
            Action::Close(ending) => {
                if ending != Ending::Orderly {
                    tracing::warn!(connection = id.0, %ending, "closing an NBD connection");
                }
                self.touch(id);
            }
        }
    }

    fn queue_output(&mut self, id: ConnectionId, data: SharedBuffer) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.output.is_empty() {
            self.last_reply = self.now;
            match self.streams.send(id, data) {
                Ok(()) => return,
                Err(QueueFull(data)) => connection.output.push_back(data),
            }
        } else {
            connection.output.push_back(data);
        }
        connection.output_bytes += connection.output.back().map_or(0, |data| data.len());
    }

    fn open(&mut self, id: ConnectionId, name: String) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Some(export) = self.settings.exports.find(&name) else {
            connection.session.opened(Err(OpenRefused::Unknown), &mut self.actions);
            return;
        };
        match connection.image.take() {
            Some((open, image)) if open == name => {
                connection.image = Some((open, image));
                let export = self.export(image);
                let connection = self.connections.get_mut(&id).expect("looked up above");
                connection.session.opened(Ok(export), &mut self.actions);
            }
            other => {
                if let Some((_, image)) = other {
                    self.close_image(image);
                }
                let ticket = Ticket(self.flights.insert(Flight::Open { connection: id, name }) as u64);
                self.images.open(&export, ticket);
            }
        }
    }

    fn export(&self, image: ImageHandle) -> Export {
        let (size, order) = self.images.shape(image);
        let object_len = 1u64.checked_shl(u32::from(order)).unwrap_or(u64::MAX);
        Export { size, object_len, read_only: self.settings.read_only }
    }

    fn list(&mut self, id: ConnectionId) {
        match &self.settings.exports {
            Exports::Only(names) => {
                let names = names.iter().map(ExportName::to_string).collect();
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.session.listed(Ok(names), &mut self.actions);
                }
            }
            Exports::Pools(pools) => {
                let left = pools.iter().rev().cloned().collect();
                self.list_next(id, left, Vec::new());
            }
        }
    }

    /// Lists the last of the pools that are left.
    fn list_next(&mut self, id: ConnectionId, left: Vec<String>, names: Vec<String>) {
        match left.last().cloned() {
            Some(pool) => {
                let flight = Flight::List { connection: id, left, names };
                let ticket = Ticket(self.flights.insert(flight) as u64);
                self.images.list(&pool, ticket);
            }
            None => self.with_session(id, |session, out| session.listed(Ok(names), out)),
        }
    }

    fn submit(&mut self, id: ConnectionId, key: IoKey, io: ImageIo) {
        let Some((_, image)) = self.connections.get(&id).and_then(|connection| connection.image.as_ref())
        else {
            return;
        };
        let image = *image;
        let ticket = Ticket(self.flights.insert(Flight::Io { connection: id, key }) as u64);
        if !self.refused.is_empty() {
            self.refused.push_back((image, io, ticket)); // Nothing overtakes what waits already.
        } else if let Err(QueueFull(io)) = self.images.submit(image, io, ticket) {
            self.refused.push_back((image, io, ticket));
        }
    }

    fn retry_refused(&mut self) {
        while let Some((image, io, ticket)) = self.refused.pop_front() {
            if let Err(QueueFull(io)) = self.images.submit(image, io, ticket) {
                self.refused.push_front((image, io, ticket));
                return;
            }
        }
    }

    fn client_event(&mut self, event: ClientEvent) {
        match event {
            ClientEvent::Io { ticket, result, .. } => {
                if let Some(Flight::Io { connection, key }) = self.flights.try_remove(index(ticket)) {
                    let result = result.map_err(|error| error.errno());
                    self.with_session(connection, |session, out| session.completed(key, result, out));
                }
            }
            ClientEvent::Opened { ticket, result } => {
                if let Some(Flight::Open { connection, name }) = self.flights.try_remove(index(ticket)) {
                    self.opened(connection, name, result);
                }
            }
            ClientEvent::Admin { ticket, result } => {
                if let Some(Flight::List { connection, left, names }) = self.flights.try_remove(index(ticket))
                {
                    self.listed(connection, left, names, result);
                }
            }
            ClientEvent::Closed { ticket } => {
                self.flights.try_remove(index(ticket));
            }
            ClientEvent::Resized { image, size } => {
                let sessions = self.connections.values_mut();
                let of_image = |c: &&mut Connection| c.image.as_ref().is_some_and(|(_, open)| *open == image);
                sessions.filter(of_image).for_each(|connection| connection.session.resized(size.0));
            }
            // Requests to a removed image and of a fenced client fail by themselves.
            ClientEvent::Removed { .. } | ClientEvent::Fenced | ClientEvent::Connected => {}
            ClientEvent::Command { .. } | ClientEvent::Progress { .. } => {}
        }
    }

    fn opened(&mut self, id: ConnectionId, name: String, result: Result<ImageHandle, ImageError>) {
        let result = match result {
            Ok(image) => match self.connections.get_mut(&id) {
                Some(connection) => {
                    connection.image = Some((name, image));
                    Ok(self.export(image))
                }
                None => return self.close_image(image),
            },
            Err(ImageError::NotFound { .. } | ImageError::NoPool { .. } | ImageError::Invalid(_)) => {
                Err(OpenRefused::Unknown)
            }
            Err(error) => Err(OpenRefused::Failed(error.to_string())),
        };
        self.with_session(id, |session, out| session.opened(result, out));
    }

    fn listed(
        &mut self,
        id: ConnectionId,
        mut left: Vec<String>,
        mut names: Vec<String>,
        result: Result<AdminReply, ImageError>,
    ) {
        let Some(pool) = left.pop() else { return };
        match result {
            Ok(AdminReply::List(entries)) => {
                let images = entries.iter().filter(|entry| !entry.removing);
                names.extend(images.map(|entry| format!("{pool}/{}", entry.name)));
                self.list_next(id, left, names);
            }
            Ok(_) => self.list_next(id, left, names),
            Err(error) => self.with_session(id, |session, out| session.listed(Err(error.to_string()), out)),
        }
    }

    /// Sends and feeds what can be, on every connection that something happened to.
    fn settle(&mut self) {
        let mut at = 0;
        while let Some(id) = self.dirty.get(at).copied() {
            at += 1;
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.dirty = false;
            }
            self.flush(id);
            self.feed(id);
            self.finish(id);
        }
        self.dirty.drain(..at);
    }

    fn flush(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        while let Some(data) = connection.output.pop_front() {
            let len = data.len();
            if let Err(QueueFull(data)) = self.streams.send(id, data) {
                connection.output.push_front(data);
                return;
            }
            connection.output_bytes -= len;
        }
    }

    fn feed(&mut self, id: ConnectionId) {
        loop {
            let Some(connection) = self.connections.get_mut(&id) else { return };
            let Some(data) = connection.input.front() else { break };
            if connection.output_bytes > OUTPUT_BYTES_MAX {
                break;
            }
            let rest = data.slice(connection.taken..data.len());
            let taken = connection.session.receive(&rest, &mut self.actions);
            connection.taken += taken;
            connection.input_bytes -= taken;
            let stuck = taken < rest.len();
            if !stuck {
                connection.input.pop_front();
                connection.taken = 0;
            }
            let asked = !self.actions.is_empty();
            self.run_actions(id);
            if stuck && !asked {
                self.stalled = true;
                break;
            }
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let pause = connection.input_bytes > if connection.paused { 0 } else { INPUT_BYTES_MAX };
        if pause != connection.paused {
            connection.paused = pause;
            self.streams.pause(id, pause);
        }
    }

    /// Closes the stream of a session that has ended, once its last bytes are on their way.
    fn finish(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.session.is_closed() && connection.output.is_empty() && !connection.closing {
            connection.closing = true;
            self.streams.close(id);
        }
    }

    /// Ends handshakes that take too long.
    fn check_deadlines(&mut self) {
        let now = self.now;
        let late = |c: &Connection| c.session.in_handshake() && !c.closing && c.deadline <= now;
        let late: Vec<_> = self.connections.iter().filter(|(_, c)| late(c)).map(|(id, _)| *id).collect();
        for id in late {
            tracing::debug!(connection = id.0, "closing an NBD connection: the handshake takes too long");
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.closing = true;
            }
            self.streams.close(id);
        }
    }

    fn handshake_deadline(&self) -> Option<Instant> {
        let open = self.connections.values().filter(|c| c.session.in_handshake() && !c.closing);
        open.map(|connection| connection.deadline).min()
    }
}

fn index(ticket: Ticket) -> usize {
    usize::try_from(ticket.0).unwrap_or(usize::MAX)
}

impl<S: Streams, I: Images> Poller for Server<S, I> {
    fn name(&self) -> &'static str {
        "nbd"
    }

    fn poll(&mut self, now: Instant) -> Activity {
        self.now = now;
        let mut inbox = std::mem::take(&mut self.inbox);
        let mut busy = self.streams.poll(EVENTS_PER_POLL, &mut inbox) > 0;
        for event in inbox.drain(..) {
            self.stream_event(event);
        }
        self.inbox = inbox;
        self.settle();
        let activity = self.images.poll(now);
        while let Some(event) = self.images.next_event() {
            busy = true;
            self.client_event(event);
        }
        self.retry_refused();
        if std::mem::take(&mut self.stalled) {
            let ids: Vec<_> =
                self.connections.iter().filter(|(_, c)| !c.input.is_empty()).map(|(id, _)| *id).collect();
            ids.into_iter().for_each(|id| self.touch(id));
        }
        self.settle();
        self.check_deadlines();
        Activity::from_busy(busy).or(activity)
    }

    fn next_deadline(&self) -> Option<Instant> {
        let stall = self.stalled.then(|| self.now.after(STALL_RETRY));
        [self.images.next_deadline(), self.handshake_deadline(), stall].into_iter().flatten().min()
    }

    fn expecting(&self) -> bool {
        let recent = !self.connections.is_empty() && self.now.since(self.last_reply) < NEXT_REQUEST;
        recent || self.images.expecting() || self.connections.values().any(|c| c.session.is_waiting_for_io())
    }
}
