//! A client as the source of a server's images.

use super::exports::ExportName;
use super::server::Images;
use crate::client::Client;
use crate::event::{ClientEvent, ImageHandle, ImageIo};
use loligo_reactor::env::{Instant, QueueFull, Ticket, World};
use loligo_reactor::poller::{Activity, Poller};

impl<W: World> Images for Client<W> {
    fn open(&mut self, name: &ExportName, ticket: Ticket) {
        Client::open(self, &name.pool, &name.image, ticket);
    }

    fn close(&mut self, image: ImageHandle, ticket: Ticket) {
        Client::close(self, image, ticket);
    }

    fn list(&mut self, pool: &str, ticket: Ticket) {
        Client::list(self, pool, ticket);
    }

    fn shape(&self, image: ImageHandle) -> (u64, u8) {
        self.image_info(image).map_or((0, 0), |header| (header.size, header.order))
    }

    fn submit(&mut self, image: ImageHandle, io: ImageIo, ticket: Ticket) -> Result<(), QueueFull<ImageIo>> {
        Client::submit(self, image, io, ticket)
    }

    fn poll(&mut self, now: Instant) -> Activity {
        Poller::poll(self, now)
    }

    fn next_event(&mut self) -> Option<ClientEvent> {
        Client::next_event(self)
    }

    fn next_deadline(&self) -> Option<Instant> {
        Poller::next_deadline(self)
    }

    fn expecting(&self) -> bool {
        Poller::expecting(self)
    }
}
