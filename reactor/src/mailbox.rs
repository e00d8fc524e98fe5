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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_full_mailbox_returns_the_message() {
        let (sender, receiver) = mailbox(2);
        sender.send(1).unwrap();
        sender.clone().send(2).unwrap();
        assert_eq!(sender.send(3).unwrap_err().0, 3);
        assert_eq!((receiver.receive(), receiver.len()), (Some(1), 1));
        sender.send(3).unwrap();
        assert_eq!((receiver.receive(), receiver.receive(), receiver.receive()), (Some(2), Some(3), None));
        assert!(receiver.is_empty());
    }

    #[test]
    fn a_token_keeps_the_owner_awake_once() {
        let bell = Bell::new();
        assert!(!bell.ring(), "not parked: nobody to wake");
        assert!(!bell.prepare_to_park());
        assert!(bell.prepare_to_park());
        assert!(bell.is_parked());
        assert!(bell.ring(), "parked: wake it");
        assert!(!bell.ring(), "but only once");
        bell.leave_park();
        assert!(bell.prepare_to_park());
    }

    #[test]
    fn what_was_sent_before_attaching_is_looked_for() {
        let (sender, receiver) = mailbox(2);
        sender.send(1).unwrap();
        let waker = Waker::new().unwrap();
        receiver.attach(waker.clone());
        assert!(!waker.bell().prepare_to_park(), "there may be messages");
        assert!(waker.bell().prepare_to_park());
        sender.send(2).unwrap();
        assert!(!waker.bell().is_parked());
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p loligo-reactor --release mailbox::loom_tests`: every order of events between
/// a reactor that parks and two senders. The queue is a counter and the eventfd a condition variable, since loom
/// knows neither crossbeam's queue nor system calls.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::Bell;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    struct World {
        bell: Bell,
        queued: AtomicUsize,
        event: Mutex<bool>,
        signal: Condvar,
    }

    impl World {
        fn send(&self) {
            // As weak as a queue's push may be.
            self.queued.fetch_add(1, Ordering::Release);
            if self.bell.ring() {
                *self.event.lock().unwrap() = true;
                self.signal.notify_one();
            }
        }

        /// The loop of a reactor: look, and park when there was nothing. loom reports a wake-up that is lost as
        /// a deadlock.
        fn receive(&self, wanted: usize) {
            while self.queued.load(Ordering::Acquire) < wanted {
                if !self.bell.prepare_to_park() {
                    continue;
                }
                let mut event = self.event.lock().unwrap();
                while !*event {
                    event = self.signal.wait(event).unwrap();
                }
                *event = false;
                drop(event);
                self.bell.leave_park();
            }
        }
    }

    fn check(senders: usize) {
        let mut model = loom::model::Builder::new();
        // All orders with up to three preemptions; without a bound two senders take half a minute.
        model.preemption_bound = Some(3);
        model.check(move || {
            let world = Arc::new(World {
                bell: Bell::new(),
                queued: AtomicUsize::new(0),
                event: Mutex::new(false),
                signal: Condvar::new(),
            });
            let threads: Vec<_> = (0..senders)
                .map(|_| {
                    let world = Arc::clone(&world);
                    thread::spawn(move || world.send())
                })
                .collect();
            world.receive(senders);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }

    #[test]
    fn no_wake_up_is_lost_with_one_sender() {
        check(1);
    }

    #[test]
    fn no_wake_up_is_lost_with_two_senders() {
        check(2);
    }
}
