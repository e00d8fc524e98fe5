//! The admin side: the admin queue, one command at a time, and what is done with it.

use super::facts::{self, ControllerFacts, NAMESPACES_MAX, NamespaceFacts, Unusable};
use super::lifecycle::{Action, Event, Fault, Lifecycle, Phase};
use super::{ControllerError, ControllerOptions, QueueLayout, Shared, Standing, refusal};
use crate::bus::{self, Bus};
use crate::queue::{CompletionRing, Doorbell, Region, SubmissionRing};
use crate::spec::PAGE_LEN;
use crate::spec::command::Command;
use crate::spec::completion::CompletionEntry;
use crate::spec::feature::{FeatureId, QueueCounts};
use crate::spec::identify::{self, IdentifyController};
use crate::spec::registers::{self, Cap, Cc, Csts};
use crate::spec::status::{Status, Verdict};
use loligo_reactor::env::{Instant, WriteCache};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Entries of the admin queues: one command is in flight at a time.
const ENTRIES: u16 = 8;
const CQ_OFFSET: usize = PAGE_LEN;
const DATA_OFFSET: usize = 2 * PAGE_LEN;
/// How often the status of a live controller is looked at.
const LOOK: Duration = Duration::from_millis(500);
/// Admin commands of tools that wait at once.
const REQUESTS_MAX: usize = 8;

/// Why an admin command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    /// The controller refused it.
    #[error("the controller refuses: {status}")]
    Refused {
        /// Its words.
        status: Status,
    },
    /// The controller is not up, or was reset meanwhile.
    #[error("the controller is not up")]
    NotUp,
    /// Too many wait already.
    #[error("too many admin commands wait already")]
    Busy,
}

type Reply = Result<(u32, Vec<u8>), AdminError>;

/// What queues and people want of the admin side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Wish {
    Create { queue: u16 },
    Delete { queue: u16 },
    Abort { queue: u16, cid: u16 },
    Request { ticket: u64, command: Command },
}

/// What the command in flight is for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Task {
    Identify,
    CountQueues,
    LimitZeroes,
    ReadCache,
    ListNamespaces,
    IdentifyNamespace { index: usize },
    ShareDoorbells,
    CreateCq { queue: u16 },
    CreateSq { queue: u16 },
    DeleteSq { queue: u16 },
    DeleteCq { queue: u16 },
    Abort,
    Request { ticket: u64 },
}

#[derive(Clone, Copy, Debug)]
struct Running {
    cid: u16,
    task: Task,
    deadline: Instant,
}

#[derive(Debug)]
struct QueueState {
    taken: bool,
    memory: Option<Arc<Region>>,
}

/// What the set-up has learned so far.
#[derive(Debug, Default)]
struct Draft {
    identity: IdentifyController,
    queue_pairs: u16,
    zeroes_len_max: Option<u64>,
    write_cache: Option<WriteCache>,
    listed: Vec<u32>,
    namespaces: Vec<NamespaceFacts>,
    unusable: Vec<(u32, Unusable)>,
}

/// The admin side. It is behind a lock.
#[derive(Debug)]
pub(super) struct Admin {
    life: Lifecycle,
    memory: Arc<Region>,
    sq: SubmissionRing,
    cq: CompletionRing,
    cid: u16,
    running: Option<Running>,
    /// The next step of the set-up.
    next: Option<Task>,
    draft: Draft,
    wishes: VecDeque<Wish>,
    replies: Vec<(u64, Reply)>,
    tickets: u64,
    queues: Vec<QueueState>,
    look: Instant,
    /// Why it was last reset or given up.
    fault: Option<Fault>,
}

impl Admin {
    pub(super) fn new<B: Bus>(
        bus: &B,
        cap: Cap,
        options: &ControllerOptions,
    ) -> Result<Self, ControllerError> {
        let memory = Arc::new(bus::share(bus, 3 * PAGE_LEN)?);
        let entries = u16::try_from(cap.queue_entries_max()).unwrap_or(u16::MAX).min(ENTRIES);
        let stride = cap.doorbell_stride();
        // Never a shadow: the specification leaves the admin queue out of them (NVMe Base 2.0 annex B.5).
        let sq_doorbell = Doorbell::new(registers::sq_doorbell(0, stride), None);
        let cq_doorbell = Doorbell::new(registers::cq_doorbell(0, stride), None);
        let queues = usize::from(options.queue_pairs.max(1)) + 1;
        Ok(Self {
            life: Lifecycle::new(cap.timeout()),
            sq: SubmissionRing::new(Arc::clone(&memory), 0, entries, sq_doorbell),
            cq: CompletionRing::new(Arc::clone(&memory), CQ_OFFSET, entries, cq_doorbell),
            memory,
            cid: 0,
            running: None,
            next: None,
            draft: Draft::default(),
            wishes: VecDeque::new(),
            replies: Vec::new(),
            tickets: 0,
            queues: (0..queues).map(|_| QueueState { taken: false, memory: None }).collect(),
            look: Instant(0),
            fault: None,
        })
    }

    pub(super) fn phase(&self) -> Phase {
        self.life.phase()
    }

    pub(super) fn fault(&self) -> Option<Fault> {
        match self.life.phase() {
            Phase::Failed(fault) => Some(fault),
            _ => None,
        }
    }

    /// All memory that it has shared with the controller.
    pub(super) fn regions(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.queues.iter().filter_map(|queue| queue.memory.as_ref()).chain([&self.memory])
    }

    /// Takes a queue pair that nobody uses, with its memory.
    pub(super) fn take_queue<B: Bus>(
        &mut self,
        shared: &Shared<B>,
        len: usize,
    ) -> Result<(u16, Arc<Region>), ControllerError> {
        let granted = shared.facts.get().map_or(0, |facts| facts.queue_pairs);
        let usable = self.queues.len().min(usize::from(granted) + 1);
        let free = (1..usable).find(|queue| !self.queues[*queue].taken);
        let queue = free.ok_or(ControllerError::NoQueue { granted })?;
        let state = &mut self.queues[queue];
        let memory = match &state.memory {
            Some(memory) => Arc::clone(memory),
            None => Arc::clone(state.memory.insert(Arc::new(bus::share(&shared.bus, len)?))),
        };
        state.taken = true;
        Ok((u16::try_from(queue).expect("counted in 16 bits"), memory))
    }

    /// Gives a queue pair back.
    pub(super) fn release<B: Bus>(&mut self, shared: &Shared<B>, queue: u16) {
        self.wishes.retain(|wish| !matches!(wish, Wish::Create { queue: other } if *other == queue));
        let (epoch, standing) = shared.standing();
        let being_made = self.running.is_some_and(|running| {
            running.task == Task::CreateCq { queue } || running.task == Task::CreateSq { queue }
        });
        if standing == Standing::Live && (shared.is_attached(queue, epoch) || being_made) {
            // It stays taken until the controller has forgotten it.
            self.wish(Wish::Delete { queue });
        } else {
            self.queues[usize::from(queue)].taken = false;
        }
    }

    /// Takes note of a wish; one that waits already is enough.
    pub(super) fn wish(&mut self, wish: Wish) {
        if !self.wishes.contains(&wish) {
            self.wishes.push_back(wish);
        }
    }

    /// Takes an admin command of a tool.
    pub(super) fn request(&mut self, command: Command) -> Result<u64, AdminError> {
        if matches!(self.life.phase(), Phase::Failed(_) | Phase::Closed) {
            return Err(AdminError::NotUp);
        }
        let waiting = self.wishes.iter().filter(|wish| matches!(wish, Wish::Request { .. })).count();
        if waiting + self.replies.len() >= REQUESTS_MAX {
            return Err(AdminError::Busy);
        }
        self.tickets += 1;
        self.wishes.push_back(Wish::Request { ticket: self.tickets, command });
        Ok(self.tickets)
    }

    /// The answer to a tool's command, once.
    pub(super) fn take_reply(&mut self, ticket: u64) -> Option<Reply> {
        let index = self.replies.iter().position(|(other, _)| *other == ticket)?;
        Some(self.replies.swap_remove(index).1)
    }

    /// One turn: looks at the controller, and does what is next.
    pub(super) fn step<B: Bus>(&mut self, shared: &Shared<B>, now: Instant) {
        if self.life.watches_status() || now >= self.look {
            self.look = now.after(LOOK);
            if shared.bus.is_wanted_back() {
                self.event(shared, now, Event::Fail(Fault::WantedBack));
            }
            if !matches!(self.life.phase(), Phase::Failed(_) | Phase::Closed) {
                let csts = Csts(shared.bus.read32(registers::CSTS));
                self.event(shared, now, Event::Status(csts));
            }
        }
        if matches!(self.life.phase(), Phase::Configuring | Phase::Live) {
            self.reap(shared, now);
            self.send_next(shared, now);
        }
    }

    /// Takes an event of the controller's life and does what follows.
    pub(super) fn event<B: Bus>(&mut self, shared: &Shared<B>, now: Instant, event: Event) {
        let before = self.life.phase();
        let Some(action) = self.life.step(now, event) else { return };
        let (epoch, _) = shared.standing();
        match action {
            Action::Disable => {
                self.note(shared, before, event);
                self.forget_commands();
                shared.set_standing(epoch, Standing::Stopping);
                shared.bus.write32(registers::CC, Cc::DISABLED.0);
            }
            Action::Enable => self.enable(shared, epoch),
            Action::Configure => {
                self.draft = Draft::default();
                self.next = Some(Task::Identify);
            }
            Action::Announce => shared.set_standing(epoch, Standing::Live),
            Action::ShutDown => {
                self.forget_commands();
                shared.set_standing(epoch, Standing::Stopping);
                shared.bus.write32(registers::CC, Cc::SHUTTING_DOWN.0);
            }
            Action::Isolate => {
                self.forget_commands();
                shared.bus.isolate();
                if let Phase::Failed(fault) = self.life.phase() {
                    tracing::error!(%fault, "the NVMe controller is given up");
                }
                shared.set_standing(epoch + 1, Standing::Ended);
            }
        }
    }

    /// Takes note of why a controller that was up is reset.
    fn note<B: Bus>(&mut self, shared: &Shared<B>, before: Phase, event: Event) {
        if !matches!(before, Phase::Starting { .. } | Phase::Configuring | Phase::Live) {
            return;
        }
        let fault = match event {
            Event::Fault(fault) => fault,
            Event::Status(csts) if csts.is_fatal() => Fault::Fatal,
            _ => Fault::NotReady,
        };
        self.fault = Some(fault);
        if fault != Fault::Asked {
            tracing::warn!(%fault, "the NVMe controller is reset");
            shared.doubt_cache();
        }
    }

    /// The controller has stopped: its memory is ours, and it begins anew.
    fn enable<B: Bus>(&mut self, shared: &Shared<B>, epoch: u64) {
        self.sq.reset(None);
        self.cq.reset(None);
        shared.uses_shadow.store(false, Ordering::Release);
        shared.shadow.zero(0, 2 * PAGE_LEN);
        shared.set_standing(epoch + 1, Standing::Stopped);
        shared.bus.write32(registers::AQA, registers::aqa(self.sq.entries().into()));
        shared.bus.write64(registers::ASQ, self.sq.iova());
        shared.bus.write64(registers::ACQ, self.cq.iova());
        shared.bus.write32(registers::CC, Cc::ENABLED.0);
    }

    /// The controller will not answer what it was asked.
    fn forget_commands(&mut self) {
        let running = self.running.take().map(|running| running.task);
        let mut released = Vec::new();
        if let Some(Task::DeleteSq { queue } | Task::DeleteCq { queue }) = running {
            released.push(queue);
        }
        if let Some(Task::Request { ticket }) = running {
            self.replies.push((ticket, Err(AdminError::NotUp)));
        }
        self.next = None;
        for wish in std::mem::take(&mut self.wishes) {
            match wish {
                // A reset deletes all queues.
                Wish::Delete { queue } => released.push(queue),
                Wish::Request { ticket, .. } => self.replies.push((ticket, Err(AdminError::NotUp))),
                // Queues ask again when they find their controller stopped.
                Wish::Create { .. } | Wish::Abort { .. } => {}
            }
        }
        for queue in released {
            self.queues[usize::from(queue)].taken = false;
        }
    }

    fn reap<B: Bus>(&mut self, shared: &Shared<B>, now: Instant) {
        while let Some(entry) = self.cq.pop() {
            self.cq.ring(&shared.bus);
            match self.running {
                Some(running) if running.cid == entry.cid && entry.sq_id == 0 => {
                    self.running = None;
                    if let Err(fault) = self.finish(shared, now, running.task, entry) {
                        return self.event(shared, now, fault);
                    }
                }
                // An answer to nothing that was asked.
                _ => tracing::warn!(cid = entry.cid, "an admin completion for an unknown command"),
            }
        }
        if self.running.is_some_and(|running| now >= running.deadline) {
            self.event(shared, now, Event::Fault(Fault::CommandTimeout));
        }
    }

    fn send_next<B: Bus>(&mut self, shared: &Shared<B>, now: Instant) {
        if self.running.is_some() {
            return;
        }
        if let Some(task) = self.next.take() {
            let command = self.set_up_command(shared, task);
            return self.send(shared, now, task, command);
        }
        if self.life.phase() == Phase::Configuring {
            return self.conclude(shared, now);
        }
        let Some(wish) = self.wishes.pop_front() else { return };
        let (task, command) = match wish {
            Wish::Create { queue } => (Task::CreateCq { queue }, self.create_cq(shared, queue)),
            Wish::Delete { queue } => (Task::DeleteSq { queue }, Command::delete_sq(queue)),
            Wish::Abort { queue, cid } => (Task::Abort, Command::abort(queue, cid)),
            Wish::Request { ticket, command } => {
                (Task::Request { ticket }, Command { prp1: self.memory.iova(DATA_OFFSET), ..command })
            }
        };
        self.send(shared, now, task, command);
    }

    fn send<B: Bus>(&mut self, shared: &Shared<B>, now: Instant, task: Task, command: Command) {
        self.memory.zero(DATA_OFFSET, PAGE_LEN);
        self.cid = self.cid.wrapping_add(1) & 0x7fff;
        let deadline = now.after(shared.options.command_timeout);
        self.running = Some(Running { cid: self.cid, task, deadline });
        self.sq.push(Command { cid: self.cid, ..command });
        self.sq.ring(&shared.bus);
    }

    fn set_up_command<B: Bus>(&self, shared: &Shared<B>, task: Task) -> Command {
        let page = self.memory.iova(DATA_OFFSET);
        match task {
            Task::CountQueues => Command::set_feature(
                FeatureId::NumberOfQueues,
                QueueCounts::pairs(shared.options.queue_pairs).to_dword(),
            ),
            Task::LimitZeroes => Command::identify(identify::CNS_COMMAND_SET_CONTROLLER, 0, page),
            Task::ReadCache => Command::get_feature(FeatureId::VolatileWriteCache, 0),
            Task::ListNamespaces => Command::identify(identify::CNS_NAMESPACE_LIST, 0, page),
            Task::IdentifyNamespace { index } => {
                Command::identify(identify::CNS_NAMESPACE, self.draft.listed[index], page)
            }
            Task::ShareDoorbells => {
                Command::doorbell_buffer_config(shared.shadow.iova(0), shared.shadow.iova(PAGE_LEN))
            }
            _ => Command::identify(identify::CNS_CONTROLLER, 0, page),
        }
    }

    fn layout<B: Bus>(shared: &Shared<B>) -> QueueLayout {
        QueueLayout::new(&shared.options, shared.facts())
    }

    fn create_cq<B: Bus>(&self, shared: &Shared<B>, queue: u16) -> Command {
        let (memory, layout) = (self.queue_memory(queue), Self::layout(shared));
        let vector = shared.bus.vector_for(queue);
        Command::create_cq(queue, layout.entries.into(), memory.iova(layout.cq_offset()), vector)
    }

    fn queue_memory(&self, queue: u16) -> &Region {
        self.queues[usize::from(queue)].memory.as_ref().expect("a queue that was taken has memory")
    }

    /// The command in flight is complete.
    fn finish<B: Bus>(
        &mut self,
        shared: &Shared<B>,
        now: Instant,
        task: Task,
        entry: CompletionEntry,
    ) -> Result<(), Event> {
        let success = entry.status.verdict() == Verdict::Success;
        match task {
            Task::CreateCq { queue } if success => {
                let layout = Self::layout(shared);
                let base = self.queue_memory(queue).iova(0);
                let command = Command::create_sq(queue, layout.entries.into(), base);
                self.send(shared, now, Task::CreateSq { queue }, command);
            }
            Task::CreateSq { queue } if success => {
                let (epoch, _) = shared.standing();
                shared.attached[usize::from(queue)].store(epoch, Ordering::Release);
            }
            Task::DeleteSq { queue } if success => {
                self.send(shared, now, Task::DeleteCq { queue }, Command::delete_cq(queue));
            }
            Task::DeleteCq { queue } if success => {
                shared.attached[usize::from(queue)].store(0, Ordering::Release);
                self.queues[usize::from(queue)].taken = false;
            }
            Task::CreateCq { .. } | Task::CreateSq { .. } | Task::DeleteSq { .. } | Task::DeleteCq { .. } => {
                tracing::error!(?task, status = %entry.status, "the controller refuses a queue");
                return Err(Event::Fault(Fault::Setup));
            }
            // Whether it has aborted anything shows in the command's own completion.
            Task::Abort => {}
            Task::Request { ticket } => {
                let reply =
                    if success { Ok((entry.result, self.data())) } else { Err(refusal(entry.status)) };
                self.replies.push((ticket, reply));
            }
            _ => return self.learn(shared, task, entry, success),
        }
        Ok(())
    }

    fn data(&self) -> Vec<u8> {
        let mut data = vec![0; PAGE_LEN];
        self.memory.copy_out(DATA_OFFSET, &mut data);
        data
    }

    /// One step of the set-up is answered.
    fn learn<B: Bus>(
        &mut self,
        shared: &Shared<B>,
        task: Task,
        entry: CompletionEntry,
        success: bool,
    ) -> Result<(), Event> {
        let needed = matches!(task, Task::Identify | Task::CountQueues | Task::ListNamespaces);
        if needed && !success {
            tracing::error!(?task, status = %entry.status, "the controller refuses to be set up");
            return Err(Event::Fault(Fault::Setup));
        }
        let data = self.data();
        self.next = match task {
            Task::Identify => {
                self.draft.identity = IdentifyController::parse(&data);
                Some(Task::CountQueues)
            }
            Task::CountQueues => {
                self.draft.queue_pairs = QueueCounts::from_dword(entry.result).pair_count();
                Some(Task::LimitZeroes)
            }
            Task::LimitZeroes => {
                let shift = shared.cap.page_shift_min();
                self.draft.zeroes_len_max =
                    if success { identify::write_zeroes_len_max(&data, shift) } else { None };
                Some(Task::ReadCache)
            }
            Task::ReadCache => {
                // Without a cache the feature does not exist. With one, what cannot be found out counts as volatile.
                let volatile =
                    self.draft.identity.volatile_write_cache && (!success || entry.result & 1 == 1);
                self.draft.write_cache = Some(if volatile { WriteCache::Volatile } else { WriteCache::None });
                Some(Task::ListNamespaces)
            }
            Task::ListNamespaces => {
                self.draft.listed = identify::namespace_list(&data, NAMESPACES_MAX);
                self.after_namespace(shared, 0)
            }
            Task::IdentifyNamespace { index } => {
                let nsid = self.draft.listed[index];
                let described = if success {
                    NamespaceFacts::new(nsid, &data, &self.draft.identity)
                } else {
                    Err(Unusable::Refused)
                };
                match described {
                    Ok(facts) => self.draft.namespaces.push(facts),
                    Err(reason) => self.draft.unusable.push((nsid, reason)),
                }
                self.after_namespace(shared, index + 1)
            }
            _ => {
                shared.uses_shadow.store(success, Ordering::Release);
                None
            }
        };
        Ok(())
    }

    fn after_namespace<B: Bus>(&self, shared: &Shared<B>, index: usize) -> Option<Task> {
        if index < self.draft.listed.len() {
            return Some(Task::IdentifyNamespace { index });
        }
        let wanted = shared.options.shadow_doorbells && self.draft.identity.shadow_doorbells;
        wanted.then_some(Task::ShareDoorbells)
    }

    /// The set-up is complete: do the facts fit the driver, and those of before a reset?
    fn conclude<B: Bus>(&mut self, shared: &Shared<B>, now: Instant) {
        let draft = std::mem::take(&mut self.draft);
        let (cap, identity) = (shared.cap, draft.identity);
        if identity.sq_entry_shift_min > 6 || identity.cq_entry_shift_min > 4 {
            tracing::error!("the controller wants larger queue entries than the specification's");
            return self.event(shared, now, Event::Fail(Fault::Setup));
        }
        let transfer_len_max = facts::transfer_len_max(&identity, cap.page_shift_min());
        let found = ControllerFacts {
            version: registers::version(shared.bus.read32(registers::VS)),
            queue_pairs: draft.queue_pairs.min(shared.options.queue_pairs.max(1)),
            queue_entries_max: cap.queue_entries_max(),
            transfer_len_max,
            // Where it is not reported, the limit of transfers is kept, as Linux does.
            zeroes_len_max: draft.zeroes_len_max.unwrap_or(transfer_len_max.into()),
            write_cache: draft.write_cache.unwrap_or(WriteCache::Volatile),
            namespaces: draft.namespaces,
            unusable: draft.unusable,
            identity,
        };
        let known = shared.facts.get_or_init(|| found.clone());
        if !is_same_device(known, &found) {
            tracing::error!(?known, ?found, "the controller came back as another one");
            return self.event(shared, now, Event::Fail(Fault::Changed));
        }
        self.event(shared, now, Event::Configured);
    }
}

/// Whether a controller after a reset is the one that it was, as far as its users rely on it.
fn is_same_device(before: &ControllerFacts, after: &ControllerFacts) -> bool {
    let same_controller = before.identity.serial == after.identity.serial
        && before.identity.model == after.identity.model
        && before.write_cache == after.write_cache
        && before.queue_pairs <= after.queue_pairs
        && before.transfer_len_max <= after.transfer_len_max;
    // A namespace that has grown stays usable at its old size.
    let unchanged = |namespace: &NamespaceFacts| {
        let same = |other: &&NamespaceFacts| other.nsid == namespace.nsid;
        after.namespaces.iter().find(same).is_some_and(|other| {
            let (old, new) = (&namespace.identity, &other.identity);
            (old.lba_shift, old.nguid, old.eui64) == (new.lba_shift, new.nguid, new.eui64)
                && namespace.blocks <= other.blocks
                && namespace.atomic_blocks <= other.atomic_blocks
        })
    };
    same_controller && before.namespaces.iter().all(unchanged)
}
