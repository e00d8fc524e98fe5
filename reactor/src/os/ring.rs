//! One io_uring per reactor, shared by disk, network and wake-up.
//!
//! Everything that waits for the kernel on a reactor goes through one [`Ring`], so that a parked reactor sleeps on one
//! descriptor. Each user (a device, a transport) has a [`RingOwner`] with its own queue of completions; `user_data` is
//! the owner's id in the upper 16 bits and the owner's own value in the lower 48.
//!
//! A ring belongs to the thread that made it (`SINGLE_ISSUER`) and is `!Send`.

use super::clock::boot_time;
use super::registered::Registry;
use crate::env::{Instant, QueueFull};
use crate::mailbox::Waker;
use io_uring::squeue::Entry;
use io_uring::{EnterFlags, IoUring, cqueue, opcode, types};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

/// Bits of `user_data` that belong to the owner.
const USER_BITS: u32 = 48;
const USER_MASK: u64 = (1 << USER_BITS) - 1;
/// The ring's own entries (the wake-up poll) use this id.
const OWN_ID: usize = 0;
const OWNERS_MAX: usize = 1 << 16;
/// User value of cancellations, whose own completion nobody waits for.
const CANCEL_USER: u64 = USER_MASK;

/// One io_uring instance of one reactor. Clones are handles to the same ring.
#[derive(Clone)]
pub struct Ring {
    inner: Rc<RingInner>,
}

pub(super) struct RingInner {
    pub(super) uring: RefCell<IoUring>,
    flags: RingFlags,
    completions_max: usize,
    owners: RefCell<Owners>,
    /// Completions that their owners have not taken yet: a ring with some does not park.
    untaken: Cell<u32>,
    bell: Waker,
    bell_armed: Cell<bool>,
    pub(super) registry: RefCell<Registry>,
    counters: RingCounters,
}

#[derive(Default)]
struct Owners {
    queues: Vec<Option<Rc<OwnerQueue>>>,
    /// Ids of owners that are gone, with nothing of theirs in flight.
    free: Vec<usize>,
}

struct OwnerQueue {
    id: usize,
    completions: RefCell<VecDeque<RingCompletion>>,
    in_flight: Cell<u32>,
    dropped: Cell<bool>,
}

#[derive(Default)]
struct RingCounters {
    enters: Cell<u64>,
    submitted: Cell<u64>,
    completed: Cell<u64>,
    waits: Cell<u64>,
    delayed: Cell<u64>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("flags", &self.flags()).field("stats", &self.stats()).finish()
    }
}

/// What a ring has done, for statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingStats {
    /// System calls made to submit, to run completion work or to wait.
    pub enters: u64,
    /// Entries handed to the kernel.
    pub submitted: u64,
    /// Completions received.
    pub completed: u64,
    /// Times that the thread waited in the kernel.
    pub waits: u64,
    /// Times that the kernel had no room or memory for a submission, which was tried again later.
    pub delayed: u64,
    /// Files that the kernel refused to register; they work through their descriptors.
    pub files_unregistered: u64,
    /// Buffer slabs that were not registered (memory-lock limit, pinning budget, kernel); they work unregistered.
    pub slabs_unregistered: u64,
}

/// How a ring was set up; a kernel without a flag gets a ring without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingFlags {
    /// `SINGLE_ISSUER | DEFER_TASKRUN | TASKRUN_FLAG` (kernel 6.1): completion work runs when the owner enters the
    /// kernel for events, never in between.
    Deferred,
    /// `COOP_TASKRUN | TASKRUN_FLAG` (kernel 5.19): completion work runs at the owner's next system call.
    Cooperative,
    /// No flags: completion work interrupts the owner.
    Plain,
}

/// The end of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingCompletion {
    /// As given to [`RingOwner::push`].
    pub user: u64,
    /// The result; negative: an error number.
    pub result: i32,
    /// `IORING_CQE_F_*`.
    pub flags: u32,
}

impl RingCompletion {
    /// Whether more completions of the same entry follow (multishot, zero-copy send).
    pub fn more(&self) -> bool {
        cqueue::more(self.flags)
    }
}

impl Ring {
    /// A ring with room for `entries` submissions and four times as many completions, with the best flags that the
    /// kernel knows. One owner has at most as many entries in flight as there is room for completions: count a
    /// receive for every connection.
    ///
    /// # Errors
    /// When the kernel has no io_uring, forbids it, or has no memory.
    pub fn new(entries: u32) -> io::Result<Ring> {
        let mut result = Ring::with_flags(entries, RingFlags::Deferred);
        for flags in [RingFlags::Cooperative, RingFlags::Plain] {
            match result {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    result = Ring::with_flags(entries, flags);
                }
                other => return other,
            }
        }
        result
    }

    /// As [`Ring::new`], with these flags and no others.
    ///
    /// # Errors
    /// `EINVAL` when the kernel does not know the flags.
    pub fn with_flags(entries: u32, flags: RingFlags) -> io::Result<Ring> {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp().setup_submit_all();
        builder.setup_cqsize(entries.saturating_mul(4));
        match flags {
            RingFlags::Deferred => {
                builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
            }
            RingFlags::Cooperative => {
                builder.setup_coop_taskrun().setup_taskrun_flag();
            }
            RingFlags::Plain => {}
        }
        let uring = builder.build(entries)?;
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "io_uring of this kernel is older than 5.11",
            ));
        }
        let completions_max = uring.params().cq_entries() as usize;
        let inner = RingInner {
            uring: RefCell::new(uring),
            flags,
            completions_max,
            owners: RefCell::new(Owners { queues: vec![None], free: Vec::new() }),
            untaken: Cell::new(0),
            bell: Waker::new()?,
            bell_armed: Cell::new(false),
            registry: RefCell::new(Registry::default()),
            counters: RingCounters::default(),
        };
        Ok(Ring { inner: Rc::new(inner) })
    }

    /// A new user of this ring.
    ///
    /// # Panics
    /// When there are 65,535 already.
    pub fn owner(&self) -> RingOwner {
        let mut owners = self.inner.owners.borrow_mut();
        let id = owners.free.pop().unwrap_or(owners.queues.len());
        assert!(id < OWNERS_MAX, "a ring has at most {OWNERS_MAX} owners");
        let queue = Rc::new(OwnerQueue {
            id,
            completions: RefCell::new(VecDeque::with_capacity(64)),
            in_flight: Cell::new(0),
            dropped: Cell::new(false),
        });
        if id == owners.queues.len() {
            owners.queues.push(None);
        }
        owners.queues[id] = Some(Rc::clone(&queue));
        RingOwner { ring: self.clone(), queue }
    }

    /// Hands what was queued to the kernel and lets it run pending completion work. Without either it makes no system
    /// call. A kernel that is short of memory or room takes the entries at a later call.
    ///
    /// # Errors
    /// When the kernel refuses the ring as such.
    pub fn submit(&self) -> io::Result<()> {
        let mut uring = self.inner.uring.borrow_mut();
        let queue = uring.submission();
        let queued = queue.len();
        // With deferred task work a completion is not in the queue before an enter with GETEVENTS; this flag, in
        // memory that the kernel shares, is all that tells of it.
        let pending = queue.taskrun() || queue.cq_overflow();
        drop(queue);
        if queued == 0 && !pending {
            return Ok(());
        }
        self.inner.enter(&uring, queued, 0, EnterFlags::GETEVENTS, None)
    }

    /// Sorts the completions that have arrived into their owners' queues and returns how many there were. It makes
    /// no system call.
    pub fn reap(&self) -> u32 {
        self.inner.reap()
    }

    /// Submits, and parks until there is a completion, a wake-up through [`Ring::waker`], `deadline`, or a signal.
    /// It returns at once when completions wait to be taken or a wake-up came since the last call. Reaps at the end.
    ///
    /// # Errors
    /// When the kernel refuses the ring as such.
    pub fn wait(&self, deadline: Option<Instant>) -> io::Result<()> {
        let inner = &self.inner;
        inner.arm_bell();
        inner.reap();
        if inner.untaken.get() > 0 || !inner.bell.bell().prepare_to_park() {
            self.submit()?;
            inner.reap();
            return Ok(());
        }
        let result = inner.park(deadline);
        inner.bell.bell().leave_park();
        inner.reap();
        result
    }

    /// Wakes this ring's thread out of [`Ring::wait`] from any other.
    pub fn waker(&self) -> Waker {
        self.inner.bell.clone()
    }

    /// Makes the next [`Ring::wait`] return at once: for an owner that holds something which needs no kernel and which it
    /// will deliver at its next poll.
    pub fn nudge(&self) {
        // This thread is not parked: nobody to signal.
        self.inner.bell.bell().ring();
    }

    /// The flags that the kernel accepted.
    pub fn flags(&self) -> RingFlags {
        self.inner.flags
    }

    /// Counters.
    pub fn stats(&self) -> RingStats {
        let counters = &self.inner.counters;
        let registry = self.inner.registry.borrow();
        RingStats {
            enters: counters.enters.get(),
            submitted: counters.submitted.get(),
            completed: counters.completed.get(),
            waits: counters.waits.get(),
            delayed: counters.delayed.get(),
            files_unregistered: registry.files_refused,
            slabs_unregistered: registry.slabs_refused,
        }
    }

    pub(super) fn inner(&self) -> &Rc<RingInner> {
        &self.inner
    }
}

fn add(cell: &Cell<u64>, count: u64) {
    cell.set(cell.get().wrapping_add(count));
}

impl RingInner {
    fn enter(
        &self,
        uring: &IoUring,
        queued: usize,
        want: u32,
        flags: EnterFlags,
        args: Option<&types::SubmitArgs<'_, '_>>,
    ) -> io::Result<()> {
        add(&self.counters.enters, 1);
        let queued = u32::try_from(queued).expect("the queue is shorter than 2^32");
        // SAFETY: what the queued entries refer to is valid by the contract of `RingOwner::push`; `args` is a live
        // reference of the type that EXT_ARG, set by the caller together with it, announces.
        match unsafe { uring.submitter().enter(queued, want, flags.bits(), args) } {
            Ok(submitted) => {
                add(&self.counters.submitted, submitted as u64);
                Ok(())
            }
            Err(error) => match error.raw_os_error() {
                // ETIME: the wait's deadline; EINTR: a signal. Both may hide that entries were taken, which the
                // queue's own head tells at the next call.
                Some(libc::ETIME | libc::EINTR) => Ok(()),
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {
                    add(&self.counters.delayed, 1);
                    Ok(())
                }
                _ => Err(error),
            },
        }
    }

    /// Completions that nobody takes stay with the kernel once as many are waiting as its queue holds.
    fn reap(&self) -> u32 {
        self.reap_up_to(self.completions_max)
    }

    fn reap_up_to(&self, untaken_max: usize) -> u32 {
        let mut uring = self.uring.borrow_mut();
        let mut count = 0;
        let owners = self.owners.borrow();
        let mut gone = None;
        let mut completions = uring.completion();
        while (self.untaken.get() as usize) < untaken_max {
            let Some(entry) = completions.next() else { break };
            count += 1;
            if let Some(id) = self.deliver(&owners, &entry) {
                gone = Some(id);
                break;
            }
        }
        drop(completions);
        drop(owners);
        drop(uring);
        add(&self.counters.completed, u64::from(count));
        match gone {
            Some(id) => {
                self.forget_owner(id);
                count + self.reap_up_to(untaken_max)
            }
            None => count,
        }
    }

    /// Puts one completion where it belongs. Returns the owner's id when it was the last one of an owner that is gone.
    fn deliver(&self, owners: &Owners, entry: &cqueue::Entry) -> Option<usize> {
        let id = (entry.user_data() >> USER_BITS) as usize;
        let completion = RingCompletion {
            user: entry.user_data() & USER_MASK,
            result: entry.result(),
            flags: entry.flags(),
        };
        if id == OWN_ID {
            self.bell_armed.set(self.bell_armed.get() && completion.more());
            return None;
        }
        let queue = owners.queues.get(id).and_then(Option::as_ref).expect("completions carry ids of owners");
        if !completion.more() {
            queue.in_flight.set(queue.in_flight.get().checked_sub(1).expect("one last completion per entry"));
        }
        if queue.dropped.get() {
            return (queue.in_flight.get() == 0).then_some(id);
        }
        if completion.user != CANCEL_USER {
            queue.completions.borrow_mut().push_back(completion);
            self.untaken.set(self.untaken.get() + 1);
        }
        None
    }

    fn forget_owner(&self, id: usize) {
        let mut owners = self.owners.borrow_mut();
        owners.queues[id] = None;
        owners.free.push(id);
    }

    fn push(&self, entry: Entry) -> Result<(), QueueFull<Entry>> {
        let mut uring = self.uring.borrow_mut();
        if uring.submission().is_full() {
            let queued = uring.submission().len();
            if self.enter(&uring, queued, 0, EnterFlags::GETEVENTS, None).is_err() {
                return Err(QueueFull(entry));
            }
        }
        // SAFETY: what the entry refers to is valid by the contract of `RingOwner::push`, or it refers to nothing.
        unsafe { uring.submission().push(&entry) }.map_err(|_| QueueFull(entry))
    }

    /// A multishot poll of the eventfd: every write to it is a completion, so it is neither read nor armed again.
    fn arm_bell(&self) {
        if self.bell_armed.get() {
            return;
        }
        let entry = opcode::PollAdd::new(types::Fd(self.bell.raw_fd()), libc::POLLIN as u32)
            .multi(true)
            .build()
            .user_data(0);
        self.bell_armed.set(self.push(entry).is_ok());
    }

    fn park(&self, deadline: Option<Instant>) -> io::Result<()> {
        let mut uring = self.uring.borrow_mut();
        if !self.bell_armed.get() {
            // Not to be woken by others: rather poll than sleep through a message.
            return Ok(());
        }
        let queued = uring.submission().len();
        add(&self.counters.waits, 1);
        let Some(deadline) = deadline else {
            return self.enter(&uring, queued, 1, EnterFlags::GETEVENTS, None);
        };
        let left = deadline.since(boot_time());
        let time = types::Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
        let args = types::SubmitArgs::new().timespec(&time);
        self.enter(&uring, queued, 1, EnterFlags::GETEVENTS | EnterFlags::EXT_ARG, Some(&args))
    }
}

/// One user of a ring: a device, a transport. It has its own queue of completions.
///
/// When it is dropped its later completions go nowhere, but its entries are not taken back: memory that they name must
/// outlive them. [`RingOwner::quiesce`] waits for that.
pub struct RingOwner {
    ring: Ring,
    queue: Rc<OwnerQueue>,
}

impl RingOwner {
    /// Queues an entry; [`Ring::submit`] hands it to the kernel. When the queue is full it is submitted first. Its
    /// `user_data` is set here. Entries must not suppress their completion (`SKIP_SUCCESS`).
    ///
    /// # Errors
    /// `QueueFull` when the kernel takes no more, or as many operations are in flight as completions have room.
    ///
    /// # Panics
    /// If `user` is 2^48 - 1 or more.
    ///
    /// # Safety
    /// The memory that the entry names stays valid, and is not used otherwise as far as the kernel may write to it,
    /// until its last completion was taken.
    pub unsafe fn push(&self, entry: Entry, user: u64) -> Result<(), QueueFull<Entry>> {
        assert!(user < CANCEL_USER, "user data has 48 bits");
        self.push_with(entry, user)
    }

    fn push_with(&self, entry: Entry, user: u64) -> Result<(), QueueFull<Entry>> {
        let in_flight = self.queue.in_flight.get();
        if in_flight as usize >= self.ring.inner.completions_max {
            return Err(QueueFull(entry));
        }
        let id = self.queue.id as u64;
        self.ring.inner.push(entry.user_data(id << USER_BITS | user))?;
        self.queue.in_flight.set(in_flight + 1);
        Ok(())
    }

    /// Asks the kernel to give up every entry that was pushed with this `user` value. The entries complete as they
    /// would anyhow, with `-ECANCELED` if they were stopped; the request itself has no completion.
    ///
    /// # Errors
    /// `QueueFull` as [`RingOwner::push`].
    pub fn cancel(&self, user: u64) -> Result<(), QueueFull<Entry>> {
        let id = self.queue.id as u64;
        let builder = types::CancelBuilder::user_data(id << USER_BITS | user).all();
        self.push_with(opcode::AsyncCancel2::new(builder).build(), CANCEL_USER)
    }

    /// The next completion, if there is one. [`Ring::reap`] brings them.
    pub fn take(&self) -> Option<RingCompletion> {
        let completion = self.queue.completions.borrow_mut().pop_front()?;
        let untaken = &self.ring.inner.untaken;
        untaken.set(untaken.get() - 1);
        Some(completion)
    }

    /// Entries whose last completion has not been reaped yet.
    pub fn in_flight(&self) -> u32 {
        self.queue.in_flight.get()
    }

    /// Blocks until nothing of this owner is in flight, and forgets its completions. For shutting down: cancel first
    /// what would never end by itself.
    ///
    /// # Errors
    /// When the kernel refuses the ring; then entries may still be in flight.
    pub fn quiesce(&self) -> io::Result<()> {
        loop {
            while self.take().is_some() {}
            if self.in_flight() == 0 {
                return Ok(());
            }
            let inner = &self.ring.inner;
            let queued = {
                let mut uring = inner.uring.borrow_mut();
                uring.submission().len()
            };
            inner.enter(&inner.uring.borrow(), queued, 1, EnterFlags::GETEVENTS, None)?;
            // Without the bound: what fills the queues may belong to owners that are not polled any more.
            inner.reap_up_to(usize::MAX);
        }
    }

    /// The ring.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }
}

impl Drop for RingOwner {
    fn drop(&mut self) {
        while self.take().is_some() {}
        self.queue.dropped.set(true);
        if self.queue.in_flight.get() == 0 {
            self.ring.inner.forget_owner(self.queue.id);
        }
    }
}

#[cfg(test)]
mod tests;
