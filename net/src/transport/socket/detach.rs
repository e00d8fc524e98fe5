//! Taking a connection out of its set, for another reactor.

use super::{ConnectionId, Part, SharedBuffer, SocketEvent, SocketSet, State, tag};
use crate::transport::ring::{Done, Tag};
use loligo_reactor::env::CloseReason;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;

/// Turns of the ring that taking a socket out may need; the cancellation is over within the first.
const DETACH_TURNS_MAX: u32 = 1000;

/// A socket taken out of its set, with what was not sent.
pub(in crate::transport) struct Detached {
    pub fd: OwnedFd,
    pub unsent: Vec<u8>,
    /// Bytes that arrived while the socket was being taken out.
    pub received: Vec<u8>,
}

impl SocketSet {
    /// Takes an open socket out of the set. Other connections' events that come meanwhile are kept for `poll`.
    /// `None`: it is not open, or its operations did not end (then it is being closed).
    pub fn detach(&mut self, id: ConnectionId) -> Option<Detached> {
        let index = self.open_index(id).filter(|index| self.connections[*index].state == State::Open)?;
        self.cancel_all(index);
        let mut received = Vec::new();
        let mut unsent = VecDeque::new();
        let mut kept = std::mem::take(&mut self.events);
        kept.retain(|event| match event {
            SocketEvent::Received { connection, buffer, from, to } if *connection == id => {
                received.extend_from_slice(&buffer[*from..*to]);
                false
            }
            _ => true,
        });
        for _ in 0..DETACH_TURNS_MAX {
            let connection = &mut self.connections[index];
            if connection.idle() {
                unsent.append(&mut connection.queue);
                let fd = self.connections.remove(index).fd.expect("an open connection has its socket");
                let fd = Rc::into_inner(fd).expect("idle: no operation holds the socket");
                let unsent = unsent.iter().flat_map(|piece| piece.iter().copied()).collect();
                self.events = kept;
                return Some(Detached { fd, unsent, received });
            }
            if self.ring.turn().is_err() {
                break;
            }
            while let Some((its_tag, _, done)) = self.ring.take() {
                self.detach_step(index, its_tag, done, &mut received, &mut unsent);
            }
            kept.append(&mut self.events);
        }
        self.events = kept;
        self.fail(index, CloseReason::Network(libc::ETIMEDOUT));
        None
    }

    fn detach_step(
        &mut self,
        index: usize,
        its_tag: Tag,
        done: Done,
        received: &mut Vec<u8>,
        unsent: &mut VecDeque<SharedBuffer>,
    ) {
        match done {
            Done::Received { buffer, from, result, .. } if its_tag == tag(index, Part::Receive) => {
                self.connections[index].receive = None;
                received.extend_from_slice(&buffer[from..from + result.unwrap_or(0)]);
            }
            Done::Sent { mut left, .. } if its_tag == tag(index, Part::Send) => {
                self.connections[index].send = None;
                unsent.append(&mut left);
            }
            done => self.complete(its_tag, done),
        }
    }
}
