//! A client for code that waits: command line, tests, load generators.

use crate::client::Client;
use crate::error::{CommandError, ConnectError, ImageError, IoError};
use crate::event::{
    AdminReply, ClientEvent, Extent, IO_LEN_MAX, ImageHandle, ImageIo, IoDone, ListEntry, Progress, Usage,
};
use crate::image::header::{CreateOptions, ImageHeader};
use loligo_config::units::{ByteLen, ByteOffset};
use loligo_reactor::env::{Clock, QueueFull, Ticket, World};
use loligo_reactor::poller::Turn;
use serde_json::Value;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::time::Duration;

/// Tickets from here on are the wrapper's own.
const OWN_TICKETS: u64 = 1 << 63;

/// A client and the loop that drives it: every call turns the loop until its answer is there.
#[derive(Debug)]
pub struct Blocking<W: World, L> {
    client: Client<W>,
    turn: L,
    last_ticket: u64,
    /// Requests submitted with `submit` that have ended.
    done: VecDeque<(ImageHandle, Ticket, Result<IoDone, IoError>)>,
    /// What nobody waited for: sizes and removals of open images, fencing.
    news: VecDeque<ClientEvent>,
    outstanding: usize,
}

impl<W: World, L: Turn> Blocking<W, L> {
    /// Takes a client and a loop.
    pub fn new(client: Client<W>, turn: L) -> Self {
        let (done, news) = (VecDeque::new(), VecDeque::new());
        Self { client, turn, last_ticket: OWN_TICKETS, done, news, outstanding: 0 }
    }

    /// The client.
    pub fn client(&self) -> &Client<W> {
        &self.client
    }

    /// The client, to change it. Events that its user takes away are missing here.
    pub fn client_mut(&mut self) -> &mut Client<W> {
        &mut self.client
    }

    /// The loop.
    pub fn turn(&self) -> &L {
        &self.turn
    }

    /// The client and the loop.
    pub fn into_parts(self) -> (Client<W>, L) {
        (self.client, self.turn)
    }

    /// Waits for a session and a map.
    ///
    /// # Errors
    /// What is wrong, when there is none within `timeout`; at once when every mon has refused this client for good.
    pub fn connect(&mut self, timeout: Duration) -> Result<(), ConnectError> {
        let deadline = self.client.clock().now().after(timeout);
        while !self.client.is_connected() {
            if self.client.clock().now() >= deadline || self.client.is_refused() {
                return Err(self.client.connect_problem().unwrap_or(ConnectError::NoMap));
            }
            self.client.set_alarm(Some(deadline));
            self.turn_once();
        }
        self.client.set_alarm(None);
        Ok(())
    }

    fn turn_once(&mut self) {
        self.turn.turn(&mut [&mut self.client]);
    }

    /// Waits for the event that `take` takes.
    fn wait_for<R>(&mut self, mut take: impl FnMut(ClientEvent) -> ControlFlow<R, ClientEvent>) -> R {
        loop {
            while let Some(event) = self.client.next_event() {
                match take(event) {
                    ControlFlow::Break(found) => return found,
                    ControlFlow::Continue(event) => self.keep(event),
                }
            }
            self.turn_once();
        }
    }

    fn keep(&mut self, event: ClientEvent) {
        match event {
            ClientEvent::Io { image, ticket, result } => self.done.push_back((image, ticket, result)),
            ClientEvent::Connected | ClientEvent::Progress { .. } => {}
            event => self.news.push_back(event),
        }
    }

    /// What has happened to open images and to the session without being asked for.
    pub fn next_news(&mut self) -> Option<ClientEvent> {
        self.news.pop_front()
    }

    fn ticket(&mut self) -> Ticket {
        self.last_ticket += 1;
        Ticket(self.last_ticket)
    }

    /// Sends an admin command and waits for its answer.
    ///
    /// # Errors
    /// See [`CommandError`].
    pub fn command(&mut self, request: Value) -> Result<Value, CommandError> {
        let own = self.ticket();
        self.client.command(request, own);
        self.wait_for(|event| match event {
            ClientEvent::Command { ticket, result } if ticket == own => ControlFlow::Break(result),
            event => ControlFlow::Continue(event),
        })
    }

    /// As [`Blocking::command`], for at most `timeout`; `None`: there is no answer yet, and none will be returned.
    ///
    /// # Errors
    /// See [`CommandError`].
    pub fn command_within(
        &mut self,
        request: Value,
        timeout: Duration,
    ) -> Option<Result<Value, CommandError>> {
        let own = self.ticket();
        self.client.command(request, own);
        let deadline = self.client.clock().now().after(timeout);
        loop {
            while let Some(event) = self.client.next_event() {
                match event {
                    ClientEvent::Command { ticket, result } if ticket == own => {
                        self.client.set_alarm(None);
                        return Some(result);
                    }
                    event => self.keep(event),
                }
            }
            if self.client.clock().now() >= deadline {
                self.client.set_alarm(None);
                return None;
            }
            self.client.set_alarm(Some(deadline));
            self.turn_once();
        }
    }

    fn wait_admin(
        &mut self,
        own: Ticket,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<AdminReply, ImageError> {
        self.wait_for(|event| match event {
            ClientEvent::Admin { ticket, result } if ticket == own => ControlFlow::Break(result),
            event => {
                if let ClientEvent::Progress { ticket, progress: at } = &event
                    && *ticket == own
                {
                    progress(*at);
                }
                ControlFlow::Continue(event)
            }
        })
    }

    /// Makes an image.
    ///
    /// # Errors
    /// See [`ImageError`]; also for the functions below.
    pub fn create(
        &mut self,
        pool: &str,
        image: &str,
        options: CreateOptions,
    ) -> Result<ImageHeader, ImageError> {
        let own = self.ticket();
        self.client.create(pool, image, options, own);
        match self.wait_admin(own, &mut |_| {})? {
            AdminReply::Created(header) => Ok(*header),
            reply => unexpected(&reply),
        }
    }

    /// Removes an image, or finishes a removal; `force`: also when others have it open.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn remove(
        &mut self,
        pool: &str,
        image: &str,
        force: bool,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), ImageError> {
        let own = self.ticket();
        self.client.remove(pool, image, force, own);
        self.wait_admin(own, progress).map(|_| ())
    }

    /// Gives an image another name.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn rename(&mut self, pool: &str, from: &str, to: &str) -> Result<(), ImageError> {
        let own = self.ticket();
        self.client.rename(pool, from, to, own);
        self.wait_admin(own, &mut |_| {}).map(|_| ())
    }

    /// Gives an image another size.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn resize(
        &mut self,
        pool: &str,
        image: &str,
        size: ByteLen,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), ImageError> {
        let own = self.ticket();
        self.client.resize(pool, image, size, own);
        self.wait_admin(own, progress).map(|_| ())
    }

    /// Lists the images of a pool.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn list(&mut self, pool: &str) -> Result<Vec<ListEntry>, ImageError> {
        let own = self.ticket();
        self.client.list(pool, own);
        match self.wait_admin(own, &mut |_| {})? {
            AdminReply::List(entries) => Ok(entries),
            reply => unexpected(&reply),
        }
    }

    /// Reads an image's header.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn info(&mut self, pool: &str, image: &str) -> Result<ImageHeader, ImageError> {
        let own = self.ticket();
        self.client.info(pool, image, own);
        match self.wait_admin(own, &mut |_| {})? {
            AdminReply::Info(header) => Ok(*header),
            reply => unexpected(&reply),
        }
    }

    /// Counts what an image takes.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn du(
        &mut self,
        pool: &str,
        image: &str,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Usage, ImageError> {
        let own = self.ticket();
        self.client.du(pool, image, own);
        match self.wait_admin(own, progress)? {
            AdminReply::Usage(usage) => Ok(usage),
            reply => unexpected(&reply),
        }
    }

    /// Opens an image.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn open(&mut self, pool: &str, image: &str) -> Result<ImageHandle, ImageError> {
        let own = self.ticket();
        self.client.open(pool, image, own);
        self.wait_for(|event| match event {
            ClientEvent::Opened { ticket, result } if ticket == own => ControlFlow::Break(result),
            event => ControlFlow::Continue(event),
        })
    }

    /// Closes an image when its last request has completed.
    pub fn close(&mut self, image: ImageHandle) {
        let own = self.ticket();
        self.client.close(image, own);
        self.wait_for(|event| match event {
            ClientEvent::Closed { ticket } if ticket == own => ControlFlow::Break(()),
            event => ControlFlow::Continue(event),
        });
    }

    /// Runs one request to its end.
    ///
    /// # Errors
    /// See [`IoError`]; also for the functions below.
    pub fn run(&mut self, image: ImageHandle, io: ImageIo) -> Result<IoDone, IoError> {
        let own = self.ticket();
        let mut io = io;
        while let Err(QueueFull(back)) = self.client.submit(image, io, own) {
            io = back;
            self.turn_once();
            self.sort_events();
        }
        self.wait_for(|event| match event {
            ClientEvent::Io { ticket, result, .. } if ticket == own => ControlFlow::Break(result),
            event => ControlFlow::Continue(event),
        })
    }

    fn sort_events(&mut self) {
        while let Some(event) = self.client.next_event() {
            self.keep(event);
        }
    }

    /// Fills `buffer` from `offset` on.
    ///
    /// # Errors
    /// See [`IoError`].
    pub fn read_at(&mut self, image: ImageHandle, offset: u64, buffer: &mut [u8]) -> Result<(), IoError> {
        let mut at = offset;
        for chunk in buffer.chunks_mut(IO_LEN_MAX as usize) {
            let len = chunk.len() as u64;
            let done = self.run(image, ImageIo::Read { offset: ByteOffset(at), len: ByteLen(len) })?;
            chunk.copy_from_slice(done.data.as_deref().unwrap_or_default());
            at = at.saturating_add(len);
        }
        Ok(())
    }

    /// Writes `bytes` at `offset`; they are durable afterwards.
    ///
    /// # Errors
    /// See [`IoError`]. `NoSpace` also when the client's own pool has no buffer for them.
    pub fn write_at(&mut self, image: ImageHandle, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        let mut at = offset;
        for chunk in bytes.chunks(IO_LEN_MAX as usize) {
            let data = loop {
                match self.client.pool().copy_of(chunk) {
                    Ok(data) => break data,
                    Err(_) if self.outstanding == 0 => return Err(IoError::NoSpace),
                    Err(_) => {
                        self.turn_once();
                        self.sort_events();
                    }
                }
            };
            self.run(image, ImageIo::Write { offset: ByteOffset(at), data, fua: false })?;
            at = at.saturating_add(chunk.len() as u64);
        }
        Ok(())
    }

    /// Frees the whole blocks of a range.
    ///
    /// # Errors
    /// See [`IoError`].
    pub fn discard(&mut self, image: ImageHandle, offset: ByteOffset, len: ByteLen) -> Result<(), IoError> {
        self.run(image, ImageIo::Discard { offset, len }).map(|_| ())
    }

    /// Makes a range read as zero.
    ///
    /// # Errors
    /// See [`IoError`].
    pub fn write_zeroes(
        &mut self,
        image: ImageHandle,
        offset: ByteOffset,
        len: ByteLen,
    ) -> Result<(), IoError> {
        self.run(image, ImageIo::WriteZeroes { offset, len }).map(|_| ())
    }

    /// See [`ImageIo::Flush`].
    ///
    /// # Errors
    /// See [`IoError`].
    pub fn flush(&mut self, image: ImageHandle) -> Result<(), IoError> {
        self.run(image, ImageIo::Flush).map(|_| ())
    }

    /// Which parts of a range are allocated.
    ///
    /// # Errors
    /// See [`IoError`].
    pub fn extents(
        &mut self,
        image: ImageHandle,
        offset: ByteOffset,
        len: ByteLen,
    ) -> Result<Vec<Extent>, IoError> {
        Ok(self.run(image, ImageIo::Extents { offset, len })?.extents)
    }

    /// Submits a request without waiting, for queue depths above 1; `wait_any` returns its end. Tickets are below 2^63.
    ///
    /// # Errors
    /// As [`Client::submit`].
    ///
    /// # Panics
    /// If the ticket is not below 2^63.
    pub fn submit(
        &mut self,
        image: ImageHandle,
        io: ImageIo,
        ticket: Ticket,
    ) -> Result<(), QueueFull<ImageIo>> {
        assert!(ticket.0 < OWN_TICKETS, "tickets from 2^63 on are the wrapper's own");
        self.client.submit(image, io, ticket)?;
        self.outstanding += 1;
        Ok(())
    }

    /// Requests submitted with `submit` whose end `wait_any` has not returned.
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// The end of any request that was submitted with `submit`.
    ///
    /// # Panics
    /// If there is none: it would wait for ever.
    pub fn wait_any(&mut self) -> (ImageHandle, Ticket, Result<IoDone, IoError>) {
        assert!(self.outstanding > 0, "there is a request to wait for");
        loop {
            if let Some(done) = self.done.pop_front() {
                self.outstanding -= 1;
                return done;
            }
            self.sort_events();
            if self.done.is_empty() {
                self.turn_once();
            }
        }
    }

    /// The end of any request that has ended already; turns the loop once if there is none.
    pub fn poll_any(&mut self) -> Option<(ImageHandle, Ticket, Result<IoDone, IoError>)> {
        if self.done.is_empty() {
            self.turn_once();
            self.sort_events();
        }
        let done = self.done.pop_front()?;
        self.outstanding -= 1;
        Some(done)
    }
}

fn unexpected(reply: &AdminReply) -> ! {
    unreachable!("every operation returns its own kind of reply, not {reply:?}")
}
