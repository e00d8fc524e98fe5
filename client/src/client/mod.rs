//! The client: a passive component of one reactor. Every call queues and returns; answers come as events.

pub(crate) mod core;
#[cfg(test)]
mod tests;

pub use self::core::ClientSettings;

use self::core::Core;
use crate::error::ConnectError;
use crate::event::{ClientEvent, ImageHandle, ImageIo};
use crate::image::header::{CreateOptions, ImageHeader};
use crate::image::stats::ImageStats;
use crate::image::{ImageName, admin, resize};
use crate::objecter::{LinkDown, Refused, Wire, WireEvent};
use loligo_config::id::{ClusterId, CoreId, Epoch, SessionId};
use loligo_config::map::ClusterMap;
use loligo_config::units::ByteLen;
use loligo_net::messenger::{DownReason, Messenger, MessengerEvent, SendError};
use loligo_net::wire::handshake::Role;
use loligo_net::wire::{Body, Checksums, Message};
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::{Clock, ConnectionId, Entropy, Instant, QueueFull, Ticket, Transport, World};
use loligo_reactor::poller::{Activity, Poller};
use serde_json::Value;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

/// Access to the images of one cluster, and to its mon. It connects when it is first polled, and goes on trying.
pub struct Client<W: World> {
    messenger: Messenger<W::Transport, W::Entropy>,
    clock: W::Clock,
    pool: BufferPool,
    core: Core,
    inbox: VecDeque<MessengerEvent>,
    alarm: Option<Instant>,
}

impl<W: World> std::fmt::Debug for Client<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("core", &self.core).finish_non_exhaustive()
    }
}

impl<W: World> Client<W> {
    /// A client. The messenger's identity is `Role::Client(SessionId(0))`: the mon gives the session.
    pub fn new(
        settings: ClientSettings,
        messenger: Messenger<W::Transport, W::Entropy>,
        clock: W::Clock,
    ) -> Self {
        let pool = settings.pool.clone();
        Self { messenger, clock, pool, core: Core::new(settings), inbox: VecDeque::new(), alarm: None }
    }

    /// The pool that buffers for writes are best taken from.
    pub fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// The client's clock.
    pub fn clock(&self) -> &W::Clock {
        &self.clock
    }

    /// The newest map.
    pub fn map(&self) -> Option<&Arc<ClusterMap>> {
        self.core.map()
    }

    /// The session, when there is one.
    pub fn session(&self) -> Option<SessionId> {
        self.core.session()
    }

    /// Whether the client has had a session and a map. OSDs may still be down.
    pub fn is_connected(&self) -> bool {
        self.core.is_connected()
    }

    /// Whether the session is fenced: every request fails.
    pub fn is_fenced(&self) -> bool {
        self.core.is_fenced()
    }

    /// What is wrong while the client is not connected; `None` before the first try has failed.
    pub fn connect_problem(&self) -> Option<ConnectError> {
        self.core.connect_problem().cloned()
    }

    /// Whether every mon has refused this client for a reason that does not go away by itself: another cluster, another
    /// authentication mode. It goes on trying, in vain unless something is changed at the mon.
    pub fn is_refused(&self) -> bool {
        self.core.is_refused()
    }

    /// Asks to be polled at this time at the latest, for a caller that waits with a time limit.
    pub fn set_alarm(&mut self, at: Option<Instant>) {
        self.alarm = at;
    }

    /// Sends an admin command, `{"prefix": "pool create", …}`; `ClientEvent::Command` follows, not before the map
    /// that shows the command's effect is there.
    pub fn command(&mut self, request: Value, ticket: Ticket) {
        self.core.command(&request, ticket);
    }

    /// Makes an image; `Admin` with `Created` follows.
    pub fn create(&mut self, pool: &str, image: &str, options: CreateOptions, ticket: Ticket) {
        let name = name_of(pool, image);
        self.core.admin(ticket, |context| admin::create(context, name, options));
    }

    /// Removes an image and its data, or finishes a removal that was broken off; `Progress` and `Admin` with `Removed`
    /// follow. One that other clients have open is refused with `InUse`, unless `force` is set; they lose it then.
    pub fn remove(&mut self, pool: &str, image: &str, force: bool, ticket: Ticket) {
        let name = name_of(pool, image);
        self.core.admin(ticket, |context| admin::remove(context, name, force, ticket));
    }

    /// Gives an image another name in the same pool; `Admin` with `Renamed` follows. Open handles stay valid.
    pub fn rename(&mut self, pool: &str, from: &str, to: &str, ticket: Ticket) {
        let (from, to) = (name_of(pool, from), to.to_owned());
        self.core.admin(ticket, |context| admin::rename(context, from, to));
    }

    /// Gives an image another size; `Progress` (when it shrinks) and `Admin` with `Resized` follow, and `Resized` at
    /// everybody who has it open. What lies beyond the new size is lost.
    pub fn resize(&mut self, pool: &str, image: &str, size: ByteLen, ticket: Ticket) {
        let name = name_of(pool, image);
        self.core.admin(ticket, |context| resize::resize(context, name, size.0, ticket));
    }

    /// Lists the images of a pool; `Admin` with `List` follows.
    pub fn list(&mut self, pool: &str, ticket: Ticket) {
        let pool = pool.to_owned();
        self.core.admin(ticket, |context| admin::list(context, pool));
    }

    /// Reads an image's header; `Admin` with `Info` follows.
    pub fn info(&mut self, pool: &str, image: &str, ticket: Ticket) {
        let name = name_of(pool, image);
        self.core.admin(ticket, |context| admin::info(context, name));
    }

    /// Counts what an image takes; `Progress` and `Admin` with `Usage` follow.
    pub fn du(&mut self, pool: &str, image: &str, ticket: Ticket) {
        let name = name_of(pool, image);
        self.core.admin(ticket, |context| admin::usage(context, name, ticket));
    }

    /// Opens an image; `Opened` follows. Its header is watched from then on.
    pub fn open(&mut self, pool: &str, image: &str, ticket: Ticket) {
        self.core.open(name_of(pool, image), ticket);
    }

    /// Closes an image: no request is taken any more; `Closed` follows when the last one has completed.
    pub fn close(&mut self, image: ImageHandle, ticket: Ticket) {
        self.core.close(image, ticket);
    }

    /// The header of an open image as last read.
    pub fn image_info(&self, image: ImageHandle) -> Option<&ImageHeader> {
        self.core.image_info(image)
    }

    /// What an open image has done so far.
    pub fn stats(&self, image: ImageHandle) -> Option<&ImageStats> {
        self.core.stats(image)
    }

    /// Submits a request and sends what can be sent at once; `ClientEvent::Io` follows, for errors too.
    ///
    /// # Errors
    /// `QueueFull` returns the request when too many are outstanding, or no buffer is to be had to join a read in: try
    /// again after the next event.
    pub fn submit(
        &mut self,
        image: ImageHandle,
        io: ImageIo,
        ticket: Ticket,
    ) -> Result<(), QueueFull<ImageIo>> {
        let now = self.clock.now();
        self.core.submit(now, image, io, ticket)?;
        self.core.flush(now, &mut MessengerWire { messenger: &mut self.messenger, clock: &self.clock });
        Ok(())
    }

    /// The next thing that the client has to tell.
    pub fn next_event(&mut self) -> Option<ClientEvent> {
        self.core.next_event()
    }

    /// Whether `next_event` has something now.
    pub fn has_events(&self) -> bool {
        self.core.has_events()
    }

    fn take_inbox(&mut self, now: Instant) {
        let wire = &mut MessengerWire { messenger: &mut self.messenger, clock: &self.clock };
        while let Some(event) = self.inbox.pop_front() {
            let event = match event {
                MessengerEvent::Up { connection, peer, credits, .. } => {
                    WireEvent::Up { connection, peer, credits }
                }
                MessengerEvent::Message { connection, received, arrived } => {
                    let message = received.envelope.message;
                    WireEvent::Message { connection, message, data: received.data, arrived }
                }
                MessengerEvent::Down { connection, reason, .. } => {
                    WireEvent::Down { connection, reason: link_down(reason) }
                }
            };
            self.core.handle(now, event, wire);
        }
    }
}

fn name_of(pool: &str, image: &str) -> ImageName {
    ImageName { pool: pool.to_owned(), image: image.to_owned() }
}

fn link_down(reason: DownReason) -> LinkDown {
    match reason {
        DownReason::Closed(reason) => LinkDown::Closed(reason),
        DownReason::Refused(reason) => LinkDown::Refused(reason),
        DownReason::Timeout => LinkDown::Timeout,
    }
}

impl<W: World> Poller for Client<W> {
    fn name(&self) -> &'static str {
        "client"
    }

    fn poll(&mut self, now: Instant) -> Activity {
        if self.alarm.is_some_and(|at| at <= now) {
            self.alarm = None;
        }
        let activity = self.messenger.poll(now, &mut self.inbox);
        self.take_inbox(now);
        let unix_seconds = self.clock.unix_seconds();
        let busy = self.core.poll(
            now,
            unix_seconds,
            &mut MessengerWire { messenger: &mut self.messenger, clock: &self.clock },
        );
        activity.or(Activity::from_busy(busy))
    }

    fn next_deadline(&self) -> Option<Instant> {
        let deadlines = [self.messenger.next_deadline(), self.core.next_deadline(), self.alarm];
        deadlines.into_iter().flatten().min()
    }

    fn expecting(&self) -> bool {
        self.core.is_expecting()
    }
}

/// The messenger as the objecter sees it.
struct MessengerWire<'a, T, E, C> {
    messenger: &'a mut Messenger<T, E>,
    clock: &'a C,
}

impl<T: Transport, E: Entropy, C: Clock> Wire for MessengerWire<'_, T, E, C> {
    fn now(&self) -> Instant {
        self.clock.now()
    }

    fn connect(&mut self, to: SocketAddr, expected: Role, core: CoreId) -> ConnectionId {
        self.messenger.connect(to, expected, core)
    }

    fn send(
        &mut self,
        connection: ConnectionId,
        message: Message,
        data: Option<SharedBuffer>,
        within_block: u32,
    ) -> Result<(), Refused> {
        let within_block = if data.is_some() { within_block } else { 0 };
        let body = Body { data, within_block, checksums: Checksums::Compute };
        self.messenger.send(connection, message, body).map_err(|error| match error {
            SendError::QueueFull => Refused::Full,
            SendError::Closed => Refused::Closed,
            error @ (SendError::Forbidden | SendError::Invalid(_)) => {
                panic!("a client makes no message that may not be sent: {error}")
            }
        })
    }

    fn close(&mut self, connection: ConnectionId) {
        self.messenger.close(connection);
    }

    fn set_cluster(&mut self, cluster: ClusterId) {
        self.messenger.set_cluster(cluster);
    }

    fn set_epoch(&mut self, epoch: Epoch) {
        self.messenger.set_epoch(epoch);
    }

    fn session(&self) -> SessionId {
        self.messenger.session()
    }

    fn forget_session(&mut self) {
        self.messenger.set_session(SessionId(0));
    }
}
