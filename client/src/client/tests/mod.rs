//! Images against a scripted cluster.

mod admin;
mod io;
mod real;

use super::core::{ClientSettings, Core};
use crate::error::{ImageError, IoError};
use crate::event::{AdminReply, ClientEvent, ImageHandle, ImageIo, IoDone};
use crate::image::header::CreateOptions;
use crate::image::task::TaskContext;
use crate::image::{ImageName, admin as operations, resize};
use crate::testing::{POOL, Scripted, Sent, map_with, mon_address};
use loligo_net::wire::Message;
use loligo_net::wire::handshake::Role;
use loligo_reactor::env::{Instant, Ticket};
use std::future::Future;
use std::time::Duration;

/// A client with its network; `cluster` is handed on when a client dies and another goes on.
struct Host {
    core: Core,
    now: Instant,
    /// Events that nobody waited for.
    seen: Vec<ClientEvent>,
}

fn name(image: &str) -> ImageName {
    ImageName { pool: POOL.into(), image: image.into() }
}

fn cluster() -> Scripted {
    Scripted::new(map_with(3, 8))
}

impl Host {
    /// A new client process: its own connections and session.
    fn new(cluster: &mut Scripted) -> Self {
        cluster.connections.clear();
        cluster.dialing.clear();
        cluster.sent.clear();
        cluster.session = loligo_config::id::SessionId(0);
        cluster.epoch = loligo_config::id::Epoch(0);
        let settings = ClientSettings {
            queue_depth: 64,
            ..ClientSettings::new(vec![mon_address()], cluster.pool.clone())
        };
        Self { core: Core::new(settings), now: Instant(1_000), seen: Vec::new() }
    }

    /// One round; returns whether something moved. `limit` counts the ops that are still served.
    fn turn(&mut self, cluster: &mut Scripted, limit: &mut usize) -> bool {
        let mut moved = self.core.poll(self.now, 1_800_000_000, cluster);
        while let Some(event) = cluster.next_up() {
            self.core.handle(self.now, event, cluster);
            moved = true;
        }
        while *limit > 0
            && let Some(sent) = cluster.sent.pop_front()
        {
            if matches!(sent.message, Message::Op(_)) {
                *limit -= 1;
            }
            self.answer(cluster, &sent);
            moved = true;
        }
        moved
    }

    fn answer(&mut self, cluster: &mut Scripted, sent: &Sent) {
        for event in cluster.answer(sent) {
            self.core.handle(self.now, event, cluster);
        }
    }

    fn settle(&mut self, cluster: &mut Scripted) {
        while self.turn(cluster, &mut usize::MAX.clone()) {
            self.now = self.now.after(Duration::from_micros(1));
        }
    }

    /// Runs an administrative operation to its end, or until `limit` ops were served: `None`, as if the client had died.
    fn run_limited<F>(
        &mut self,
        cluster: &mut Scripted,
        mut limit: usize,
        make: impl FnOnce(TaskContext) -> F,
    ) -> Option<Result<AdminReply, ImageError>>
    where
        F: Future<Output = Result<AdminReply, ImageError>> + 'static,
    {
        self.core.admin(Ticket(1), make);
        loop {
            let moved = self.turn(cluster, &mut limit);
            while let Some(event) = self.core.next_event() {
                match event {
                    ClientEvent::Admin { ticket: Ticket(1), result } => return Some(result),
                    event => self.seen.push(event),
                }
            }
            if !moved {
                return None;
            }
        }
    }

    fn run<F>(
        &mut self,
        cluster: &mut Scripted,
        make: impl FnOnce(TaskContext) -> F,
    ) -> Result<AdminReply, ImageError>
    where
        F: Future<Output = Result<AdminReply, ImageError>> + 'static,
    {
        self.run_limited(cluster, usize::MAX, make).expect("the cluster answers everything")
    }

    fn create(
        &mut self,
        cluster: &mut Scripted,
        image: &str,
        size: u64,
        order: u8,
    ) -> Result<AdminReply, ImageError> {
        self.run(cluster, |context| operations::create(context, name(image), CreateOptions { size, order }))
    }

    fn remove(&mut self, cluster: &mut Scripted, image: &str) -> Result<AdminReply, ImageError> {
        self.run(cluster, |context| operations::remove(context, name(image), true, Ticket(1)))
    }

    fn resize(&mut self, cluster: &mut Scripted, image: &str, size: u64) -> Result<AdminReply, ImageError> {
        self.run(cluster, |context| resize::resize(context, name(image), size, Ticket(1)))
    }

    fn rename(&mut self, cluster: &mut Scripted, from: &str, to: &str) -> Result<AdminReply, ImageError> {
        let to = to.to_owned();
        self.run(cluster, |context| operations::rename(context, name(from), to))
    }

    fn names(&mut self, cluster: &mut Scripted) -> Vec<String> {
        match self.run(cluster, |context| operations::list(context, POOL.into())) {
            Ok(AdminReply::List(entries)) => entries.into_iter().map(|entry| entry.name).collect(),
            other => panic!("a list, not {other:?}"),
        }
    }

    fn open(&mut self, cluster: &mut Scripted, image: &str) -> Result<ImageHandle, ImageError> {
        self.core.open(name(image), Ticket(2));
        self.settle(cluster);
        loop {
            match self.core.next_event().expect("an open ends") {
                ClientEvent::Opened { result, .. } => return result,
                event => self.seen.push(event),
            }
        }
    }

    fn io(&mut self, cluster: &mut Scripted, image: ImageHandle, io: ImageIo) -> Result<IoDone, IoError> {
        self.core.submit(self.now, image, io, Ticket(3)).expect("the queue is not full");
        self.settle(cluster);
        loop {
            match self.core.next_event().expect("a request ends") {
                ClientEvent::Io { result, .. } => return result,
                event => self.seen.push(event),
            }
        }
    }

    fn events(&mut self) -> Vec<ClientEvent> {
        let mut events = std::mem::take(&mut self.seen);
        events.extend(std::iter::from_fn(|| self.core.next_event()));
        events
    }

    /// All connections to OSDs are lost.
    fn lose_osds(&mut self, cluster: &mut Scripted) {
        let osds: Vec<_> = cluster
            .connections
            .iter()
            .filter(|(_, (role, _))| *role != Role::Mon)
            .map(|(id, _)| *id)
            .collect();
        for connection in osds {
            let down = cluster.cut(connection);
            self.core.handle(self.now, down, cluster);
        }
        self.now = self.now.after(Duration::from_millis(300));
    }
}
