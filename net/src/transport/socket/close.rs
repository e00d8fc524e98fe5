//! How connections end.

use super::{Buffer, CloseReason, ConnectionId, Part, SocketEvent, SocketSet, State, TAG_NUDGE, tag};
use crate::transport::ring::{ReceiveMode, shutdown_write};
use std::time::Duration;

/// How long a closed connection waits for the peer's end of stream. Guessed: some round trips on a bad link.
const LINGER: Duration = Duration::from_secs(1);
/// How long a stream that is closed after its queue may take to send it. Guessed.
const DRAIN: Duration = Duration::from_secs(5);
/// The same for a connection whose queue is only to be sent if the peer takes it at once.
const DRAIN_AT_ONCE: Duration = Duration::from_millis(50);
/// Bytes read and dropped while lingering.
pub(super) const LINGER_BYTES_MAX: usize = 1 << 20;
/// Closed connections that linger at once; more are closed at once.
const LINGERING_MAX: usize = 64;

/// How a close treats what is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport) enum Drain {
    /// What the peer takes at once is sent.
    AtOnce,
    /// Everything is sent, within a time.
    Everything,
    /// Nothing more.
    Nothing,
}

impl SocketSet {
    /// Closes; `Closed` follows with `reason`-`Local`, or the one of a protocol error.
    pub fn close(&mut self, id: ConnectionId, drain: Drain, reason: CloseReason) {
        let Some(index) = self.open_index(id) else {
            return;
        };
        let connection = &mut self.connections[index];
        if drain == Drain::Nothing || connection.state == State::Connecting {
            self.fail(index, reason);
            return;
        }
        connection.state = State::Draining;
        if connection.unsent > 0 {
            let limit = if drain == Drain::Everything { DRAIN } else { DRAIN_AT_ONCE };
            connection.timer = Some(self.ring.timer(tag(index, Part::Timer), limit));
        }
        self.cancel(index, Part::Receive);
        self.look_again(index);
    }

    /// Has the connection's end looked at in the next poll, and sees to it that the reactor does not park before.
    pub(super) fn look_again(&mut self, index: usize) {
        self.closing.push(index);
        self.ring.nudge(TAG_NUDGE);
    }

    /// The connection is at its end; the event follows when the kernel has given everything back.
    pub(super) fn fail(&mut self, index: usize, reason: CloseReason) {
        let connection = &mut self.connections[index];
        if matches!(connection.state, State::Failed(_) | State::Lingering { .. }) {
            return;
        }
        // Whatever ends a connection that this side was closing, it was closed by this side.
        let reason = if matches!(connection.state, State::Draining) { CloseReason::Local } else { reason };
        connection.state = State::Failed(reason);
        connection.queue.clear();
        self.cancel_all(index);
        self.look_again(index);
    }

    /// Looks again at the connections whose end may have come nearer.
    pub(super) fn advance_closing(&mut self) {
        while let Some(index) = self.closing.pop() {
            if self.connections.contains(index) {
                self.advance_close(index);
            }
        }
    }

    fn advance_close(&mut self, index: usize) {
        let connection = &self.connections[index];
        match connection.state {
            State::Draining if connection.send.is_none() && connection.queue.is_empty() => {
                self.begin_linger(index);
            }
            State::Failed(reason) if connection.idle() => {
                let connection = self.connections.remove(index).id;
                self.events.push_back(SocketEvent::Closed { connection, reason });
            }
            _ => {}
        }
    }

    fn begin_linger(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        let (fd, id) = (connection.fd(), connection.id);
        if connection.receive.is_some() {
            return; // its cancellation brings us here again
        }
        shutdown_write(&fd);
        if self.lingering >= LINGERING_MAX {
            self.fail(index, CloseReason::Local);
            return;
        }
        self.events.push_back(SocketEvent::Closed { connection: id, reason: CloseReason::Local });
        self.lingering += 1;
        if self.connections[index].timer.is_some() {
            self.connections[index].state = State::Lingering { dropped: 0, drain_timer: true };
        } else {
            self.linger_on(index, 0);
        }
        match self.pool.alloc(4096) {
            Ok(buffer) => self.drop_input(index, buffer),
            Err(_) => self.end_linger(index),
        }
    }

    /// From now on the time of the linger runs.
    pub(super) fn linger_on(&mut self, index: usize, dropped: usize) {
        let timer = self.ring.timer(tag(index, Part::Timer), LINGER);
        let connection = &mut self.connections[index];
        connection.timer = Some(timer);
        connection.state = State::Lingering { dropped, drain_timer: false };
    }

    pub(super) fn drop_input(&mut self, index: usize, buffer: Buffer) {
        let connection = &mut self.connections[index];
        let fd = connection.fd();
        let how = ReceiveMode::default();
        connection.receive = Some(self.ring.receive(&fd, tag(index, Part::Receive), buffer, 0, how));
    }

    pub(super) fn end_linger(&mut self, index: usize) {
        self.connections[index].state = State::Lingering { dropped: LINGER_BYTES_MAX, drain_timer: false };
        self.cancel_all(index);
        if self.connections[index].idle() {
            self.connections.remove(index);
            self.lingering -= 1;
        }
    }
}
