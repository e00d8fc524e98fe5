//! The loop: polls, then spins, yields or parks. `reactor/docs/reactor.md` has the rule and the measurements.

use super::clock::boot_time;
use super::cpu::{self, ClaimError, CoreClaim};
use super::ring::Ring;
use super::spin::{SPIN_MAX, Spin};
use super::stats::{ReactorStats, Stall, nanos};
use crate::env::Instant;
use crate::mailbox::Waker;
use crate::poller::{Activity, Poller, Turn};
use loligo_config::file::PollMode;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A poll longer than this is counted as a stall, with the poller's name. Guessed: ten times what a poll should take
/// at most, and longer than the slice that a contending thread gets.
const STALL: Duration = Duration::from_millis(5);

/// How a reactor runs.
#[derive(Clone, Debug)]
pub struct ReactorSettings {
    /// The core that its thread is pinned to; `None`: any.
    pub core: Option<usize>,
    /// What it does when there is nothing to do.
    pub mode: PollMode,
    /// For the thread and the log.
    pub name: String,
}

/// Why a reactor could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ReactorError {
    /// Busy mode without a core.
    #[error(
        "busy mode needs a core of its own: name one in the host file (`cores`), or choose the mode `adaptive`"
    )]
    BusyWithoutCore,
    /// The core is not to be had.
    #[error(transparent)]
    Core(#[from] ClaimError),
}

impl From<ReactorError> for io::Error {
    fn from(error: ReactorError) -> Self {
        let kind = match &error {
            ReactorError::BusyWithoutCore => io::ErrorKind::InvalidInput,
            ReactorError::Core(ClaimError::System(error)) => error.kind(),
            ReactorError::Core(_) => io::ErrorKind::ResourceBusy,
        };
        io::Error::new(kind, error)
    }
}

/// Ends [`Reactor::run`]: of all reactors that run with it, from any thread. (From a signal handler itself it must not
/// be called, since it takes a lock; hand the signal to a thread, as `signal_hook::iterator` does.)
#[derive(Clone, Debug, Default)]
pub struct StopFlag {
    inner: Arc<StopInner>,
}

#[derive(Debug, Default)]
struct StopInner {
    stopped: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
}

impl StopFlag {
    /// Not yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stops, and wakes whoever is parked.
    pub fn stop(&self) {
        self.inner.stopped.store(true, Ordering::SeqCst);
        for waker in self.inner.wakers.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            waker.wake();
        }
    }

    /// Whether it was stopped.
    pub fn is_stopped(&self) -> bool {
        self.inner.stopped.load(Ordering::Acquire)
    }

    fn attach(&self, waker: Waker) {
        self.inner.wakers.lock().unwrap_or_else(PoisonError::into_inner).push(waker);
    }
}

/// One polling loop on one thread.
#[derive(Debug)]
pub struct Reactor {
    name: String,
    mode: PollMode,
    ring: Ring,
    /// Kept as long as the thread is pinned, for others to see.
    _claim: Option<CoreClaim>,
    spin: Spin,
    was_expecting: bool,
    stats: ReactorStats,
}

impl Reactor {
    /// A reactor for this thread, which is pinned if a core is given.
    ///
    /// # Errors
    /// `InvalidInput` or `ResourceBusy` for busy mode without a dedicated core, for a core that does not exist or that
    /// another reactor has to itself; the message says what to do.
    pub fn new(settings: ReactorSettings, ring: Ring) -> io::Result<Self> {
        let claim = claim(&settings)?;
        if let Some(core) = settings.core {
            cpu::pin(core)?;
        }
        let ReactorSettings { mode, name, .. } = settings;
        tracing::debug!(reactor = name, ?mode, core = ?settings.core, ring = ?ring.flags(), "reactor made");
        let spin = Spin::new(SPIN_MAX);
        Ok(Self { name, mode, ring, _claim: claim, spin, was_expecting: false, stats: ReactorStats::new() })
    }

    /// Changes the longest spin of the adaptive mode.
    #[must_use]
    pub fn with_spin_max(mut self, max: Duration) -> Self {
        self.spin = Spin::new(max);
        self
    }

    /// Turns until stopped.
    pub fn run(&mut self, pollers: &mut [&mut dyn Poller], stop: &StopFlag) {
        stop.attach(self.ring.waker());
        while !stop.is_stopped() {
            self.turn(pollers);
        }
    }

    /// What it did with its time.
    pub fn stats(&self) -> &ReactorStats {
        &self.stats
    }

    /// The ring.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn poll_all(&mut self, pollers: &mut [&mut dyn Poller], mut now: Instant) -> Activity {
        let mut activity = Activity::Idle;
        for poller in pollers {
            activity = activity.or(poller.poll(now));
            let after = boot_time();
            let time = after.since(now);
            if time >= STALL {
                let poller = poller.name();
                self.stats.stall(Stall { poller, time, at: after });
                tracing::debug!(reactor = self.name, poller, ?time, "a poll took long");
            }
            now = after;
        }
        activity
    }

    /// After a round without work that began at `begin`.
    fn idle(&mut self, pollers: &[&mut dyn Poller], begin: Instant, now: Instant) {
        let spins = match self.mode {
            PollMode::Busy => true,
            PollMode::Adaptive => self.is_expecting(pollers, now) && self.spin_goes_on(now),
            PollMode::Park => false,
        };
        if !spins {
            return self.park(pollers, now);
        }
        let mut end = now;
        if self.mode == PollMode::Adaptive {
            // In every round, even on a core without another reactor: the kernel completes durable writes in a worker
            // thread on the core that took the interrupt, and a spin without yields starves it until the next
            // tick (4 ms instead of 0.1 ms for a durable write; see `reactor/docs/reactor.md`).
            std::thread::yield_now();
            end = boot_time();
            self.stats.yields += 1;
            self.stats.yielded_nanos += nanos(end.since(now));
        } else {
            std::hint::spin_loop();
        }
        self.stats.spun_nanos += nanos(now.since(begin));
        self.stats.losses += u64::from(self.spin.idle_round(end, end.since(begin)));
    }

    fn is_expecting(&mut self, pollers: &[&mut dyn Poller], now: Instant) -> bool {
        let expecting = pollers.iter().any(|poller| poller.expecting());
        if expecting && !self.was_expecting {
            self.spin.begin(now);
        }
        self.was_expecting = expecting;
        expecting
    }

    fn spin_goes_on(&mut self, now: Instant) -> bool {
        let limit = self.spin.limit();
        let goes_on = self.spin.goes_on(now);
        self.stats.spins_in_vain += u64::from(!goes_on && !limit.is_zero());
        goes_on
    }

    fn park(&mut self, pollers: &[&mut dyn Poller], now: Instant) {
        let deadline = pollers.iter().filter_map(|poller| poller.next_deadline()).min();
        if deadline.is_some_and(|deadline| deadline <= now) {
            return;
        }
        self.ring.wait(deadline).expect("the kernel takes calls for a ring that it made");
        let woken = boot_time();
        self.stats.parks += 1;
        self.stats.parked_nanos += nanos(woken.since(now));
        self.spin.event(woken);
    }
}

impl Turn for Reactor {
    fn turn(&mut self, pollers: &mut [&mut dyn Poller]) {
        let begin = boot_time();
        let activity = self.poll_all(pollers, begin);
        // One call for all that the pollers queued; none if they queued nothing and no completion is pending.
        self.ring.submit().expect("the kernel takes calls for a ring that it made");
        let events = self.ring.reap();
        let now = boot_time();
        self.stats.rounds += 1;
        if activity == Activity::Busy || events > 0 {
            self.stats.busy_round(now.since(begin), events.into());
            self.spin.event(now);
            return;
        }
        self.idle(pollers, begin, now);
    }
}

fn claim(settings: &ReactorSettings) -> Result<Option<CoreClaim>, ReactorError> {
    let alone = settings.mode == PollMode::Busy;
    let Some(core) = settings.core else {
        return if alone { Err(ReactorError::BusyWithoutCore) } else { Ok(None) };
    };
    if alone && cpu::allowed_cores().map_err(ClaimError::from)?.len() < 2 && online_cores() < 2 {
        return Err(ClaimError::OnlyCore { core }.into());
    }
    Ok(Some(CoreClaim::new(core, alone)?))
}

fn online_cores() -> i64 {
    // SAFETY: the call takes no memory.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }
}

/// A reactor's thread.
#[derive(Debug)]
pub struct Spawned<R> {
    thread: JoinHandle<Option<R>>,
}

impl<R> Spawned<R> {
    /// Waits for its end.
    ///
    /// # Errors
    /// What it panicked with.
    pub fn join(self) -> std::thread::Result<R> {
        self.thread.join().map(|result| result.expect("the body was started"))
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }
}

/// Starts a thread for a reactor, pinned to the core of `settings` if there is one, before `body` runs. Everything that
/// is `!Send` (ring, pool, reactor) is made inside `body`, so that its memory is local to the core.
///
/// # Errors
/// When the core is not to be had, or the system starts no thread.
#[allow(clippy::disallowed_methods, reason = "the place where reactors' threads are started")]
pub fn spawn<R: Send + 'static>(
    settings: &ReactorSettings,
    body: impl FnOnce() -> R + Send + 'static,
) -> io::Result<Spawned<R>> {
    // Pinned by the thread itself: a failure is known before `body` has made anything.
    let core = settings.core;
    let (report, pinned) = std::sync::mpsc::sync_channel(1);
    let (start, started) = std::sync::mpsc::sync_channel::<()>(1);
    let thread = std::thread::Builder::new().name(settings.name.clone()).spawn(move || {
        // Both channels end only with the other side, which then wants neither report nor body.
        let _ = report.send(core.map_or(Ok(()), cpu::pin));
        started.recv().ok().map(|()| body())
    })?;
    pinned.recv().map_err(|_| io::Error::other("the thread ended before it began"))??;
    let _ = start.send(());
    Ok(Spawned { thread })
}
