//! One controller: brought up, watched, reset and shut down; its queue pairs on any thread.
//!
//! Passive: nothing happens but in calls. There is no thread of the controller's own and no owner among the reactors:
//! whichever queue is polled drives the admin side when there is something to do there (`Shared::drive`), so a
//! reactor that sleeps holds up nobody. What the threads share is one word ([`Standing`]) on the data path, and a lock
//! around the admin side that is taken at the rate of the sweep (some times a second), or while the controller is not
//! up.

mod admin;
mod facts;
mod lifecycle;

pub use admin::AdminError;
pub use facts::{ControllerFacts, NamespaceFacts, TRANSFER_LEN_MAX, Unusable};
pub use lifecycle::{Action, Event, Fault, Lifecycle, Phase};

use crate::bus::{self, Bus, BusError};
use crate::namespace::Namespace;
use crate::queue::Region;
use crate::spec::command::{COMMAND_LEN, Command};
use crate::spec::completion::COMPLETION_LEN;
use crate::spec::log::{ERROR_LEN, ErrorEntry, HEALTH_LEN, Health, LOG_ERRORS, LOG_HEALTH};
use crate::spec::registers::{self, Cap};
use crate::spec::{PAGE_LEN, status::Status};
use admin::{Admin, Wish};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Clock, DiskError, Instant};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Most commands of one queue pair in flight. The command id holds the index in ten bits.
pub const QUEUE_DEPTH_MAX: u16 = 1000;

/// How a controller is used.
#[derive(Clone, Debug)]
pub struct ControllerOptions {
    /// I/O queue pairs to ask for: one for each reactor and namespace. The controller may grant fewer.
    pub queue_pairs: u16,
    /// Most operations in flight on one queue pair, within what the controller allows.
    pub queue_depth: u16,
    /// A command without an answer for this long is aborted; without an answer to that for half as long again, the
    /// controller is reset. An operation ends, well or not, within about three times this.
    pub command_timeout: Duration,
    /// Whether shadow doorbells are used where the controller offers them.
    pub shadow_doorbells: bool,
}

impl Default for ControllerOptions {
    fn default() -> Self {
        Self {
            queue_pairs: 64,
            queue_depth: 256,
            // Guessed: drives answer within tens of milliseconds, and in the worst garbage collection within a second
            // or two. Longer would stretch the stall of the clients.
            command_timeout: Duration::from_secs(4),
            shadow_doorbells: true,
        }
    }
}

/// Why a controller cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The bus.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// It cannot do what the driver needs.
    #[error("the controller cannot be used: {0}")]
    Unsupported(&'static str),
    /// It was given up.
    #[error("the controller was given up: {0}")]
    Failed(Fault),
    /// It was shut down.
    #[error("the controller was shut down")]
    Closed,
    /// There is no such namespace, or it cannot be used.
    #[error("namespace {nsid} cannot be used: {}", reason.as_ref().map_or_else(|| "there is none".to_owned(), ToString::to_string))]
    Namespace {
        /// Its number.
        nsid: u32,
        /// Why not; `None`: there is none.
        reason: Option<Unusable>,
    },
    /// All queue pairs are in use.
    #[error("all {granted} queue pairs that the controller grants are in use")]
    NoQueue {
        /// How many.
        granted: u16,
    },
}

/// Where the controller stands, as its queues see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It is being stopped: what it was given it may still write.
    Stopping,
    /// It has stopped. All queues are forgotten, and memory is the host's.
    Stopped,
    /// Queues can be made, and used once they are.
    Live,
    /// It is cut off for good.
    Ended,
}

impl Standing {
    fn from_bits(bits: u64) -> Self {
        match bits & 3 {
            0 => Self::Stopping,
            1 => Self::Stopped,
            2 => Self::Live,
            _ => Self::Ended,
        }
    }
}

/// What the queue pairs of a controller share.
pub(crate) struct Shared<B: Bus> {
    pub(crate) bus: B,
    pub(crate) options: ControllerOptions,
    pub(crate) cap: Cap,
    /// Epoch << 2 | standing. The epoch grows with every stop.
    standing: AtomicU64,
    /// By queue: the epoch in which it was made, 0 for none.
    attached: Box<[AtomicU64]>,
    facts: OnceLock<ControllerFacts>,
    shadow: Arc<Region>,
    uses_shadow: AtomicBool,
    admin: Mutex<Admin>,
    poisoned: Mutex<BTreeMap<u32, Arc<AtomicBool>>>,
    /// Writes into the volatile cache that were completed, and how many of them a flush has covered.
    cached: AtomicU64,
    flushed: AtomicU64,
    /// A reset nobody asked for came over writes that no flush had covered: they may be lost.
    cache_in_doubt: AtomicBool,
}

impl<B: Bus> Shared<B> {
    /// The epoch and the standing.
    #[inline]
    pub(crate) fn standing(&self) -> (u64, Standing) {
        let bits = self.standing.load(Ordering::Acquire);
        (bits >> 2, Standing::from_bits(bits))
    }

    fn set_standing(&self, epoch: u64, standing: Standing) {
        self.standing.store(epoch << 2 | standing as u64, Ordering::Release);
    }

    /// Whether the queue exists since the last stop.
    pub(crate) fn is_attached(&self, queue: u16, epoch: u64) -> bool {
        self.attached[usize::from(queue)].load(Ordering::Acquire) == epoch
    }

    /// What the controller is.
    pub(crate) fn facts(&self) -> &ControllerFacts {
        self.facts.get().expect("known since it was opened")
    }

    fn admin(&self) -> MutexGuard<'_, Admin> {
        self.admin.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the admin side on, unless another thread is at it.
    pub(crate) fn drive(&self, now: Instant) {
        if let Ok(mut admin) = self.admin.try_lock() {
            admin.step(self, now);
        }
    }

    /// Asks for a queue to be made.
    pub(crate) fn ask_for_queue(&self, queue: u16) {
        self.admin().wish(Wish::Create { queue });
    }

    /// Asks for a command to be aborted.
    pub(crate) fn ask_for_abort(&self, queue: u16, cid: u16) {
        self.admin().wish(Wish::Abort { queue, cid });
    }

    /// Asks for a reset in this epoch; one that has happened since is enough.
    pub(crate) fn ask_for_reset(&self, epoch: u64, fault: Fault, now: Instant) {
        let mut admin = self.admin();
        if self.standing() == (epoch, Standing::Live) {
            admin.event(self, now, Event::Fault(fault));
        }
    }

    /// Gives a queue back. Nothing is in flight on it.
    pub(crate) fn release_queue(&self, queue: u16) {
        self.admin().release(self, queue);
    }

    /// Why everything fails from now on.
    pub(crate) fn end_error(&self) -> DiskError {
        match self.admin().fault() {
            Some(Fault::Gone | Fault::WantedBack | Fault::Changed) | None => DiskError::Gone,
            Some(Fault::CommandTimeout | Fault::NotReady) => DiskError::Timeout,
            Some(Fault::Fatal | Fault::Setup | Fault::Asked) => DiskError::Io { errno: libc::EIO },
        }
    }

    /// The pages of shadow doorbells, used or not.
    pub(crate) fn shadow_pages(&self) -> &Region {
        &self.shadow
    }

    pub(crate) fn shadow(&self) -> Option<Arc<Region>> {
        self.uses_shadow.load(Ordering::Acquire).then(|| Arc::clone(&self.shadow))
    }

    /// A write into the volatile cache is complete.
    pub(crate) fn count_cached(&self) {
        self.cached.fetch_add(1, Ordering::AcqRel);
    }

    /// What a flush that is submitted now will cover.
    pub(crate) fn cached(&self) -> u64 {
        self.cached.load(Ordering::Acquire)
    }

    /// A flush that covers so much is complete.
    pub(crate) fn count_flushed(&self, covered: u64) {
        self.flushed.fetch_max(covered, Ordering::AcqRel);
    }

    /// Whether a flush would vouch for writes that a reset may have lost.
    pub(crate) fn cache_in_doubt(&self) -> bool {
        self.cache_in_doubt.load(Ordering::Acquire)
    }

    fn doubt_cache(&self) {
        if self.cached.load(Ordering::Acquire) > self.flushed.load(Ordering::Acquire) {
            self.cache_in_doubt.store(true, Ordering::Release);
        }
    }
}

impl<B: Bus> Drop for Shared<B> {
    fn drop(&mut self) {
        // No queue is left. The device may still write to queues and into buffers of commands that were never
        // answered: cut off before their memory goes.
        self.bus.isolate();
        let admin = self.admin.get_mut().unwrap_or_else(PoisonError::into_inner);
        for region in admin.regions().chain([&self.shadow]) {
            self.bus.unmap(region.iova(0), region.len());
        }
    }
}

/// A handle to a controller. Clones are handles to the same one; it is cut off from memory with the last handle and
/// the last queue.
pub struct Controller<B: Bus> {
    shared: Arc<Shared<B>>,
}

impl<B: Bus> Clone for Controller<B> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<B: Bus> std::fmt::Debug for Controller<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (epoch, standing) = self.shared.standing();
        f.debug_struct("Controller")
            .field("epoch", &epoch)
            .field("standing", &standing)
            .finish_non_exhaustive()
    }
}

impl<B: Bus> Controller<B> {
    /// Resets a controller, whatever state it was left in, and brings it up. `idle` is called while it works.
    ///
    /// # Errors
    /// When it cannot be reached, lacks what the driver needs, or does not come up.
    pub fn open(
        bus: B,
        options: ControllerOptions,
        clock: &impl Clock,
        idle: &mut dyn FnMut(),
    ) -> Result<Self, ControllerError> {
        bus.connect()?;
        let cap = Cap(bus.read64(registers::CAP));
        check(&bus, cap)?;
        let shadow = Arc::new(bus::share(&bus, 2 * PAGE_LEN)?);
        let admin = Admin::new(&bus, cap, &options)?;
        let queues = usize::from(options.queue_pairs.max(1)) + 1;
        #[allow(clippy::arc_with_non_send_sync, reason = "the software controller's bus stays on one thread")]
        let shared = Arc::new(Shared {
            bus,
            cap,
            standing: AtomicU64::new(0),
            attached: (0..queues).map(|_| AtomicU64::new(0)).collect(),
            facts: OnceLock::new(),
            shadow,
            uses_shadow: AtomicBool::new(false),
            admin: Mutex::new(admin),
            poisoned: Mutex::default(),
            cached: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            cache_in_doubt: AtomicBool::new(false),
            options,
        });
        let controller = Self { shared };
        controller.shared.admin().event(&controller.shared, clock.now(), Event::Begin);
        controller.drive_until(clock, idle, |phase| (phase == Phase::Live).then_some(()))?;
        Ok(controller)
    }

    fn drive_until<R>(
        &self,
        clock: &impl Clock,
        idle: &mut dyn FnMut(),
        mut done: impl FnMut(Phase) -> Option<R>,
    ) -> Result<R, ControllerError> {
        loop {
            let phase = {
                let mut admin = self.shared.admin();
                admin.step(&self.shared, clock.now());
                admin.phase()
            };
            if let Some(result) = done(phase) {
                return Ok(result);
            }
            match phase {
                Phase::Failed(fault) => return Err(ControllerError::Failed(fault)),
                Phase::Closed => return Err(ControllerError::Closed),
                _ => idle(),
            }
        }
    }

    /// What it is.
    pub fn facts(&self) -> &ControllerFacts {
        self.shared.facts()
    }

    /// Where it is in its life.
    pub fn phase(&self) -> Phase {
        self.shared.admin().phase()
    }

    /// The machine below it.
    pub fn bus(&self) -> &B {
        &self.shared.bus
    }

    /// How often it was stopped so far, by resets.
    pub fn resets(&self) -> u64 {
        self.shared.standing().0.saturating_sub(1)
    }

    /// Asks for a reset: what is in flight is sent again. For tests, and for people.
    pub fn reset(&self, now: Instant) {
        let (epoch, _) = self.shared.standing();
        self.shared.ask_for_reset(epoch, Fault::Asked, now);
    }

    /// Moves the admin side on: what nobody's poll does while no queue is in use.
    pub fn drive(&self, clock: &impl Clock) {
        self.shared.drive(clock.now());
    }

    /// A queue pair of its own for a namespace, for one reactor with this pool. It exists a few polls later.
    ///
    /// # Errors
    /// When there is no such namespace, no queue pair left, or no memory for it.
    pub fn queue<C: Clock>(
        &self,
        nsid: u32,
        pool: &BufferPool,
        clock: C,
    ) -> Result<Namespace<B, C>, ControllerError> {
        let facts = self.facts();
        let namespace =
            facts.namespaces.iter().find(|namespace| namespace.nsid == nsid).ok_or_else(|| {
                let reason =
                    facts.unusable.iter().find(|(other, _)| *other == nsid).map(|(_, reason)| *reason);
                ControllerError::Namespace { nsid, reason }
            })?;
        let layout = QueueLayout::new(&self.shared.options, facts);
        let (queue, memory) = self.shared.admin().take_queue(&self.shared, layout.len())?;
        let mut poisoned = self.shared.poisoned.lock().unwrap_or_else(PoisonError::into_inner);
        let poisoned = Arc::clone(poisoned.entry(nsid).or_default());
        let shared = Arc::clone(&self.shared);
        Ok(Namespace::new(shared, namespace, queue, layout, memory, poisoned, pool, clock))
    }

    /// Runs an admin command whose data, if it has any, go to one page (the command's `prp1` is set here), and returns
    /// the completion's dword 0 with the page.
    ///
    /// # Errors
    /// The status, or that the controller is not up.
    pub fn admin_command(
        &self,
        command: Command,
        clock: &impl Clock,
        idle: &mut dyn FnMut(),
    ) -> Result<(u32, Vec<u8>), AdminError> {
        let ticket = self.shared.admin().request(command)?;
        loop {
            {
                let mut admin = self.shared.admin();
                admin.step(&self.shared, clock.now());
                if let Some(reply) = admin.take_reply(ticket) {
                    return reply;
                }
            }
            idle();
        }
    }

    /// The SMART / health page.
    ///
    /// # Errors
    /// As [`Controller::admin_command`].
    pub fn health(&self, clock: &impl Clock, idle: &mut dyn FnMut()) -> Result<Health, AdminError> {
        let (_, page) = self.admin_command(Command::get_log_page(LOG_HEALTH, HEALTH_LEN, 0), clock, idle)?;
        Ok(Health::parse(&page))
    }

    /// The newest entries of the error log, at most `count` of at most 64.
    ///
    /// # Errors
    /// As [`Controller::admin_command`].
    pub fn errors(
        &self,
        count: u16,
        clock: &impl Clock,
        idle: &mut dyn FnMut(),
    ) -> Result<Vec<ErrorEntry>, AdminError> {
        let len = count.clamp(1, 64) * ERROR_LEN;
        let (_, page) = self.admin_command(Command::get_log_page(LOG_ERRORS, len, 0), clock, idle)?;
        let entries = page[..usize::from(len)].chunks_exact(usize::from(ERROR_LEN));
        Ok(entries.filter_map(ErrorEntry::parse).collect())
    }

    /// Shuts it down in order: the cache is saved, then it is stopped and cut off. What is in flight on queues fails.
    ///
    /// # Errors
    /// When it was given up before or meanwhile.
    pub fn close(&self, clock: &impl Clock, idle: &mut dyn FnMut()) -> Result<(), ControllerError> {
        self.shared.admin().event(&self.shared, clock.now(), Event::Close);
        self.drive_until(clock, idle, |phase| (phase == Phase::Closed).then_some(()))
    }
}

/// Refuses what the driver cannot work with, before anything is written to it.
fn check<B: Bus>(bus: &B, cap: Cap) -> Result<(), ControllerError> {
    let unsupported = |reason| Err(ControllerError::Unsupported(reason));
    if bus.read32(registers::VS) == registers::ALL_ONES {
        return Err(ControllerError::Failed(Fault::Gone));
    }
    if !cap.has_nvm_command_set() && !cap.has_io_command_sets() {
        return unsupported("it has no NVM command set (CAP.CSS)");
    }
    if cap.page_shift_min() > 12 {
        return unsupported("it wants memory pages larger than 4 KiB (CAP.MPSMIN)");
    }
    if cap.queue_entries_max() < 2 {
        return unsupported("its queues have a single entry (CAP.MQES)");
    }
    Ok(())
}

/// Where the parts of a queue pair's memory are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLayout {
    /// Entries of both queues.
    pub(crate) entries: u16,
    /// Bytes of PRP list for each command.
    pub(crate) list_stride: usize,
}

impl QueueLayout {
    fn new(options: &ControllerOptions, facts: &ControllerFacts) -> Self {
        let depth = options.queue_depth.clamp(1, QUEUE_DEPTH_MAX);
        let entries = u16::try_from(facts.queue_entries_max.min(u32::from(depth) + 1)).expect("at most 1001");
        // One entry for each page but the first, and room for a deallocate range; a power of two, so that no list
        // crosses a page (NVMe Base 2.0 §4.1.1).
        let pages = facts.transfer_len_max as usize / PAGE_LEN;
        let list_stride = (pages * 8).next_power_of_two().clamp(16, PAGE_LEN);
        Self { entries, list_stride }
    }

    /// Most commands in flight.
    pub(crate) fn depth(&self) -> u16 {
        self.entries - 1
    }

    /// Where the completion queue begins.
    pub(crate) fn cq_offset(&self) -> usize {
        (usize::from(self.entries) * COMMAND_LEN).next_multiple_of(PAGE_LEN)
    }

    /// Where the PRP lists begin.
    pub(crate) fn lists_offset(&self) -> usize {
        self.cq_offset() + (usize::from(self.entries) * COMPLETION_LEN).next_multiple_of(PAGE_LEN)
    }

    /// Where the page of zeroes is.
    pub(crate) fn zeroes_offset(&self) -> usize {
        self.lists_offset() + (usize::from(self.depth()) * self.list_stride).next_multiple_of(PAGE_LEN)
    }

    fn len(&self) -> usize {
        self.zeroes_offset() + PAGE_LEN
    }
}

/// A status that is not a success, as an error for people.
pub(crate) fn refusal(status: Status) -> AdminError {
    AdminError::Refused { status }
}
