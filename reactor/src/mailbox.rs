//! Bounded messages between reactors, and what wakes a parked one.
//!
//! The wake-up is a token as in `std::thread::park`: whoever has something for a reactor sets it, and a reactor parks
//! only by exchanging "no token" for "parked". So no order of events loses a wake-up:
//!
//! ```text
//!             wake                        wake: writes to the eventfd
//!   IDLE ------------> RUNG <------------------------------------ PARKED
//!    ^ \                |                                            ^ |
//!    |  \_______________|____________ prepare_to_park _______________/ |
//!    |                  | prepare_to_park: refused                     |
//!    \__________________/______________________ leave_park ____________/
//! ```
//!
//! A sender makes a system call only when the receiver is parked; a spinning receiver costs it one exchange.
#![allow(unsafe_code)]

use crate::env::QueueFull;
use crossbeam_queue::ArrayQueue;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

const IDLE: u32 = 0;
const RUNG: u32 = 1;
const PARKED: u32 = 2;

/// The token; see the picture above.
#[derive(Debug)]
pub(crate) struct Bell {
    state: AtomicU32,
}

impl Bell {
    pub(crate) fn new() -> Self {
        Self { state: AtomicU32::new(IDLE) }
    }

    /// Sets the token. True: the owner is parked and must be woken by the caller.
    pub(crate) fn ring(&self) -> bool {
        // Release: what was queued before is seen by whoever takes the token. An exchange even when the token is
        // set already: a mere load could be ordered before the caller's push.
        self.state.swap(RUNG, Ordering::AcqRel) == PARKED
    }

    /// Takes the token if it is set and then returns false: look for messages again. Else the owner may sleep.
    pub(crate) fn prepare_to_park(&self) -> bool {
        match self.state.compare_exchange(IDLE, PARKED, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(_) => {
                self.leave_park();
                false
            }
        }
    }

    /// Takes the token, after sleeping or instead of it. The messages are looked at after this.
    pub(crate) fn leave_park(&self) {
        self.state.swap(IDLE, Ordering::AcqRel);
    }

    #[cfg(test)]
    pub(crate) fn is_parked(&self) -> bool {
        self.state.load(Ordering::Acquire) == PARKED
    }
}

/// Wakes one reactor, from any thread.
#[derive(Clone, Debug)]
pub struct Waker {
    inner: Arc<WakerInner>,
}

#[derive(Debug)]
struct WakerInner {
    bell: Bell,
    event: OwnedFd,
}

impl Waker {
    /// A waker whose reactor polls [`Waker::raw_fd`].
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: the call takes no memory.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and has no other owner.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { inner: Arc::new(WakerInner { bell: Bell::new(), event }) })
    }

    /// Makes the reactor look at its pollers again, now or as soon as it would park.
    pub fn wake(&self) {
        if self.inner.bell.ring() {
            self.signal();
        }
    }

    fn signal(&self) {
        let one = 1u64.to_ne_bytes();
        // The result carries nothing: it fails only when the counter is at its end, and then it is readable anyhow.
        // SAFETY: the kernel reads the eight bytes of `one`.
        let _ = unsafe { libc::write(self.inner.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    pub(crate) fn bell(&self) -> &Bell {
        &self.inner.bell
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.inner.event.as_raw_fd()
    }
}

#[derive(Debug)]
struct Shared<T> {
    queue: ArrayQueue<T>,
    waker: OnceLock<Waker>,
}

/// Sends to one receiver, from any thread.
#[derive(Debug)]
pub struct Sender<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

/// Receives. It belongs to one reactor.
#[derive(Debug)]
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
}

/// A queue of at most `capacity` messages. Without [`Receiver::attach`] nothing is woken: so it is in the simulator,
/// where all pollers are polled anyhow.
///
/// # Panics
/// If `capacity` is zero.
pub fn mailbox<T: Send>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared { queue: ArrayQueue::new(capacity), waker: OnceLock::new() });
    (Sender { shared: Arc::clone(&shared) }, Receiver { shared })
}

impl<T: Send> Sender<T> {
    /// Queues a message and wakes the receiver's reactor if it is parked.
    ///
    /// # Errors
    /// `QueueFull` returns the message.
    pub fn send(&self, message: T) -> Result<(), QueueFull<T>> {
        self.shared.queue.push(message).map_err(QueueFull)?;
        if let Some(waker) = self.shared.waker.get() {
            waker.wake();
        }
        Ok(())
    }
}

impl<T: Send> Receiver<T> {
    /// The oldest message.
    pub fn receive(&self) -> Option<T> {
        self.shared.queue.pop()
    }

    /// From now on senders wake this reactor (see `Ring::waker`).
    ///
    /// # Panics
    /// If it was attached before.
    pub fn attach(&self, waker: Waker) {
        // A sender that does not see the waker yet has pushed before: the token makes the owner look.
        let sender_missed = waker.clone();
        assert!(self.shared.waker.set(waker).is_ok(), "a receiver is attached once");
        sender_missed.wake();
    }

    /// Messages waiting.
    pub fn len(&self) -> usize {
        self.shared.queue.len()
    }

    /// Whether none is waiting.
    pub fn is_empty(&self) -> bool {
        self.shared.queue.is_empty()
    }
}
