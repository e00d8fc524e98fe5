//! The client without a world: open images and tasks on top of the objecter. `Client` ties it to a messenger and a
//! clock; tests tie it to scripts.

use crate::error::{ConnectError, ImageError, IoError};
use crate::event::{AdminReply, ClientEvent, ImageHandle, ImageIo};
use crate::image::header::{ImageHeader, ImageState};
use crate::image::io::{Request, range_of};
use crate::image::stats::ImageStats;
use crate::image::task::{TaskContext, Tasks};
use crate::image::{Found, ImageName};
use crate::objecter::{Objecter, ObjecterSettings, OpDone, Wire, WireEvent};
use loligo_config::id::{ObjectVersion, SessionId};
use loligo_config::map::ClusterMap;
use loligo_config::units::ByteLen;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Instant, QueueFull, Ticket};
use serde_json::Value;
use slab::Slab;
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Requests of one image that may be outstanding, unless set otherwise. Four connections at full credit.
const QUEUE_DEPTH_DEFAULT: usize = 512;
/// Rounds of one poll, so that it is bounded: each lets what the last one freed go on.
const ROUNDS_MAX: u32 = 8;

/// What a client is told when it is made.
#[derive(Clone, Debug)]
pub struct ClientSettings {
    /// The mons, in the order in which they are tried.
    pub mons: Vec<SocketAddr>,
    /// Buffers for what the client itself sends and joins.
    pub pool: BufferPool,
    /// Requests of one image that may be outstanding; more are refused with `QueueFull`.
    pub queue_depth: usize,
    /// After how long a request is given up; `None`: never, as RBD does. What was sent before may still take
    /// effect, see [`IoError::MaybeApplied`].
    pub op_timeout: Option<Duration>,
}

impl ClientSettings {
    /// The defaults: a queue depth of 512, no time limit.
    pub fn new(mons: Vec<SocketAddr>, pool: BufferPool) -> Self {
        Self { mons, pool, queue_depth: QUEUE_DEPTH_DEFAULT, op_timeout: None }
    }
}

/// Whom an object operation belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A request to an open image, and the byte at which the piece begins.
    Io { image: u64, request: usize, at: u64 },
    /// A call of a task.
    Task { task: usize, call: u64 },
}

/// What tasks return.
#[derive(Debug)]
enum Ended {
    Admin { ticket: Ticket, result: Result<AdminReply, ImageError> },
    Open { ticket: Ticket, result: Result<Found, ImageError> },
    Refresh { image: u64, result: Result<Option<(ImageHeader, ObjectVersion)>, ImageError> },
}

/// How the re-reading of an open image's header stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refresh {
    Current,
    Running,
    /// Another change came while it was running.
    Again,
}

#[derive(Debug)]
struct OpenImage {
    found: Found,
    watch: u64,
    refresh: Refresh,
    requests: Slab<Request>,
    closing: Option<Ticket>,
    gone: bool,
    stats: ImageStats,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Core {
    objecter: Objecter<Owner>,
    tasks: Tasks<Ended>,
    images: BTreeMap<u64, OpenImage>,
    last_image: u64,
    queue_depth: usize,
    pool: BufferPool,
    connected: bool,
    fenced: bool,
    events: VecDeque<ClientEvent>,
    /// Reused, so that no poll allocates.
    ended: Vec<Ended>,
}

impl Core {
    pub(crate) fn new(settings: ClientSettings) -> Self {
        let ClientSettings { mons, pool, queue_depth, op_timeout } = settings;
        Self {
            objecter: Objecter::new(ObjecterSettings { mons, pool: pool.clone(), op_timeout }),
            tasks: Tasks::new(pool.clone()),
            images: BTreeMap::new(),
            last_image: 0,
            queue_depth: queue_depth.max(1),
            pool,
            connected: false,
            fenced: false,
            events: VecDeque::new(),
            ended: Vec::new(),
        }
    }

    pub(crate) fn map(&self) -> Option<&Arc<ClusterMap>> {
        self.objecter.map()
    }

    pub(crate) fn session(&self) -> Option<SessionId> {
        self.objecter.session()
    }

    pub(crate) fn connect_problem(&self) -> Option<&ConnectError> {
        self.objecter.connect_problem()
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.objecter.is_refused()
    }

    /// Whether something has not come to its end.
    #[cfg(test)]
    pub(crate) fn is_waiting(&self) -> bool {
        self.objecter.is_waiting() || !self.tasks.is_empty()
    }

    /// Whether an answer of the cluster is on its way.
    pub(crate) fn is_expecting(&self) -> bool {
        self.objecter.is_expecting()
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.connected
    }

    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.objecter.next_deadline()
    }

    pub(crate) fn next_event(&mut self) -> Option<ClientEvent> {
        self.events.pop_front()
    }

    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    pub(crate) fn command(&mut self, request: &Value, ticket: Ticket) {
        self.objecter.command(request, ticket);
    }

    /// Starts an administrative task.
    pub(crate) fn admin<F>(&mut self, ticket: Ticket, make: impl FnOnce(TaskContext) -> F)
    where
        F: Future<Output = Result<AdminReply, ImageError>> + 'static,
    {
        self.tasks.start(|context| {
            let work = make(context);
            async move { Ended::Admin { ticket, result: work.await } }
        });
    }

    pub(crate) fn open(&mut self, name: ImageName, ticket: Ticket) {
        self.tasks.start(|context| async move { Ended::Open { ticket, result: context.find(&name).await } });
    }

    pub(crate) fn image_info(&self, image: ImageHandle) -> Option<&ImageHeader> {
        self.images.get(&image.0).map(|image| &image.found.header)
    }

    pub(crate) fn stats(&self, image: ImageHandle) -> Option<&ImageStats> {
        self.images.get(&image.0).map(|image| &image.stats)
    }

    pub(crate) fn close(&mut self, image: ImageHandle, ticket: Ticket) {
        match self.images.get_mut(&image.0) {
            Some(open) if open.closing.is_none() => {
                open.closing = Some(ticket);
                self.close_if_empty(image.0);
            }
            _ => self.events.push_back(ClientEvent::Closed { ticket }),
        }
    }

    pub(crate) fn submit(
        &mut self,
        now: Instant,
        image: ImageHandle,
        io: ImageIo,
        ticket: Ticket,
    ) -> Result<(), QueueFull<ImageIo>> {
        let refusal = match self.images.get(&image.0) {
            None => Some(IoError::Fenced),
            Some(open) if open.requests.len() >= self.queue_depth => return Err(QueueFull(io)),
            Some(open) => open.refusal(&io, self.fenced),
        };
        if let Some(error) = refusal {
            if let Some(open) = self.images.get_mut(&image.0) {
                open.stats.record(&io, 0, Err(error));
            }
            self.events.push_back(ClientEvent::Io { image, ticket, result: Err(error) });
            return Ok(());
        }
        let open = self.images.get_mut(&image.0).expect("the image was found above");
        let request = Request::new(io, ticket, now, open.found.header.order, &self.pool)
            .map_err(|(io, _)| QueueFull(io))?;
        let slot = open.requests.insert(request);
        self.send_pieces(now, image.0, slot);
        self.finish_if_ended(now, image.0, slot);
        Ok(())
    }

    /// Hands the objecter as many pieces of a request as may be out at once.
    fn send_pieces(&mut self, now: Instant, image: u64, slot: usize) {
        let Some(open) = self.images.get_mut(&image) else { return };
        let pool = open.found.data_pool();
        while let Some((at, op)) = open.requests[slot].next_piece(pool, &open.found.header) {
            self.objecter.submit(now, op, Owner::Io { image, request: slot, at });
        }
    }

    fn finish_if_ended(&mut self, now: Instant, image: u64, slot: usize) {
        let Some(open) = self.images.get_mut(&image) else { return };
        if !open.requests[slot].has_ended() {
            return;
        }
        let mut request = open.requests.remove(slot);
        let result = request.finish(now);
        let outcome = result.as_ref().map(|done| &done.waterfall).map_err(|error| *error);
        open.stats.record(&request.io, request.len, outcome);
        self.events.push_back(ClientEvent::Io { image: ImageHandle(image), ticket: request.ticket, result });
        self.close_if_empty(image);
    }

    fn close_if_empty(&mut self, image: u64) {
        let Some(open) = self.images.get(&image) else { return };
        let Some(ticket) = open.closing else { return };
        if open.requests.is_empty() {
            let watch = open.watch;
            self.images.remove(&image);
            // The objecter's clock is the last one it was told; nothing is timed by it here.
            self.objecter.unwatch(Instant(0), watch);
            self.events.push_back(ClientEvent::Closed { ticket });
        }
    }

    /// Takes one event of the network.
    pub(crate) fn handle<W: Wire>(&mut self, now: Instant, event: WireEvent, wire: &mut W) {
        self.objecter.handle(now, event, wire);
    }

    /// Does everything that there is to do now. Returns whether anything was.
    pub(crate) fn poll<W: Wire>(&mut self, now: Instant, unix_seconds: u64, wire: &mut W) -> bool {
        let mut busy = false;
        for _ in 0..ROUNDS_MAX {
            let mut moved = self.objecter.poll(now, wire);
            self.note_connection();
            moved |= self.take_done(now, wire);
            self.take_notices();
            moved |= self.run_tasks(now, unix_seconds);
            while let Some((ticket, result)) = self.objecter.next_answer() {
                self.events.push_back(ClientEvent::Command { ticket, result });
            }
            busy |= moved;
            if !moved {
                break;
            }
        }
        busy
    }

    /// Sends at once what was just submitted.
    pub(crate) fn flush<W: Wire>(&mut self, now: Instant, wire: &mut W) {
        self.objecter.poll(now, wire);
    }

    fn note_connection(&mut self) {
        if !self.connected && self.objecter.session().is_some() && self.objecter.map().is_some() {
            self.connected = true;
            self.events.push_back(ClientEvent::Connected);
        }
        if !self.fenced && self.objecter.is_fenced() {
            self.fenced = true;
            self.events.push_back(ClientEvent::Fenced);
        }
    }

    fn take_done<W: Wire>(&mut self, now: Instant, wire: &W) -> bool {
        let mut any = false;
        // Read when there is something that it is the end of.
        let mut end = now;
        while let Some(OpDone { owner, result, timing }) = self.objecter.next_done() {
            if !std::mem::replace(&mut any, true) {
                end = wire.now().max(now);
            }
            match owner {
                Owner::Task { task, call } => self.tasks.call_done(task, call, result),
                Owner::Io { image, request, at } => {
                    let Some(open) = self.images.get_mut(&image) else { continue };
                    open.requests[request].piece_done(at, result, &timing, open.found.header.order);
                    self.send_pieces(now, image, request);
                    self.finish_if_ended(end, image, request);
                }
            }
        }
        any
    }

    fn take_notices(&mut self) {
        while let Some(notice) = self.objecter.next_notice() {
            let changed =
                |open: &OpenImage| open.watch == notice.watch && open.found.version != notice.version;
            let image = self.images.iter().find(|(_, open)| changed(open)).map(|(image, _)| *image);
            if let Some(image) = image {
                self.refresh(image);
            }
        }
    }

    fn refresh(&mut self, image: u64) {
        let Some(open) = self.images.get_mut(&image) else { return };
        if open.refresh != Refresh::Current {
            open.refresh = Refresh::Again;
            return;
        }
        open.refresh = Refresh::Running;
        let (pool, id) = (open.found.pool, open.found.header.id);
        self.tasks
            .start(|context| async move { Ended::Refresh { image, result: context.header(pool, id).await } });
    }

    fn run_tasks(&mut self, now: Instant, unix_seconds: u64) -> bool {
        if self.tasks.is_empty() {
            return false;
        }
        let session = self.objecter.session().unwrap_or_default();
        self.tasks.see(self.objecter.map(), session, unix_seconds);
        let mut ended = std::mem::take(&mut self.ended);
        let ran = self.tasks.run(&mut ended);
        while let Some(call) = self.tasks.next_call() {
            self.objecter.submit(now, call.op, Owner::Task { task: call.task, call: call.number });
        }
        while let Some((ticket, progress)) = self.tasks.next_progress() {
            self.events.push_back(ClientEvent::Progress { ticket, progress });
        }
        for end in ended.drain(..) {
            self.task_ended(end);
        }
        self.ended = ended;
        ran
    }

    fn task_ended(&mut self, ended: Ended) {
        match ended {
            Ended::Admin { ticket, result } => {
                if matches!(result, Ok(AdminReply::Resized)) {
                    // An open image of this very client shall not wait for the notification.
                    let images: Vec<u64> = self.images.keys().copied().collect();
                    images.into_iter().for_each(|image| self.refresh(image));
                }
                self.events.push_back(ClientEvent::Admin { ticket, result });
            }
            Ended::Open { ticket, result } => {
                let result = result.map(|found| self.opened(found));
                self.events.push_back(ClientEvent::Opened { ticket, result });
            }
            Ended::Refresh { image, result } => self.refreshed(image, result),
        }
    }

    fn opened(&mut self, found: Found) -> ImageHandle {
        let header = crate::image::header::header_object(found.pool, found.header.id);
        let watch = self.objecter.watch(header);
        self.last_image += 1;
        let open = OpenImage {
            found,
            watch,
            refresh: Refresh::Current,
            requests: Slab::new(),
            closing: None,
            gone: false,
            stats: ImageStats::default(),
        };
        self.images.insert(self.last_image, open);
        ImageHandle(self.last_image)
    }

    fn refreshed(&mut self, image: u64, result: Result<Option<(ImageHeader, ObjectVersion)>, ImageError>) {
        let Some(open) = self.images.get_mut(&image) else { return };
        let mut again = std::mem::replace(&mut open.refresh, Refresh::Current) == Refresh::Again;
        let handle = ImageHandle(image);
        match result {
            Ok(Some((header, version))) if header.state == ImageState::Ready => {
                let resized = header.size != open.found.header.size;
                let name = std::mem::take(&mut open.found.header.name);
                open.found.version = version;
                open.found.header = ImageHeader { name, ..header };
                if resized {
                    let size = ByteLen(open.found.header.size);
                    self.events.push_back(ClientEvent::Resized { image: handle, size });
                }
            }
            Ok(_) if !open.gone => {
                open.gone = true;
                self.events.push_back(ClientEvent::Removed { image: handle });
            }
            Ok(_) => {}
            // Out of time: nobody would tell again what was told already.
            Err(ImageError::Io(IoError::Timeout | IoError::MaybeApplied)) => again = true,
            // The old header stays in use; the next notice or reconnection brings another try.
            Err(error) => tracing::warn!(%error, "an open image's header cannot be read again"),
        }
        if again {
            self.refresh(image);
        }
    }
}

impl OpenImage {
    /// Why a request is not even tried.
    fn refusal(&self, io: &ImageIo, fenced: bool) -> Option<IoError> {
        if fenced || self.gone || self.closing.is_some() {
            return Some(IoError::Fenced);
        }
        let (offset, len) = range_of(io)?;
        let is_long = match io {
            ImageIo::Read { .. } | ImageIo::Write { .. } => len > crate::event::IO_LEN_MAX,
            _ => false,
        };
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.found.header.size);
        (is_long || !fits).then_some(IoError::Invalid)
    }
}
