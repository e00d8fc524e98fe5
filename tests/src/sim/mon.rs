//! The mon's machine: its store stays, its process ends and starts again.

use super::clock::MachineClock;
use super::plan::Options;
use super::trace::{Level, Trace};
use super::world::{Machine, SimTransport, SimWorld, Station, cluster_id};
use crate::random::Random;
use loligo_config::id::Incarnation;
use loligo_config::map::ClusterMap;
use loligo_mon::store::Extra;
use loligo_mon::{MapStore, Memory, Mon, MonSettings, StartError, StoreError};
use loligo_net::transport::memory::MemoryHub;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Clock, Instant};
use loligo_reactor::poller::{Activity, Poller};
use std::cell::Cell;
use std::rc::Rc;

/// How a commit fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitFault {
    /// Nothing is kept.
    Lost,
    /// It is kept all the same.
    Kept,
}

/// The mon's store: durable, but for a commit that fails now and then. Clones are handles to the same.
#[derive(Clone, Debug, Default)]
pub struct SimMapStore {
    kept: Memory,
    fault: Rc<Cell<Option<CommitFault>>>,
}

impl MapStore for SimMapStore {
    fn load(&mut self) -> Result<Option<(ClusterMap, Extra)>, StoreError> {
        self.kept.load()
    }

    fn commit(&mut self, map: &ClusterMap, extra: &Extra) -> Result<(), StoreError> {
        let fault = self.fault.take();
        if fault != Some(CommitFault::Lost) {
            self.kept.commit(map, extra)?;
        }
        match fault {
            None => Ok(()),
            Some(_) => Err(StoreError::Io { path: "the simulated store".into(), detail: "I/O error".into() }),
        }
    }
}

/// The mon's machine.
pub struct MonMachine {
    store: SimMapStore,
    pool: BufferPool,
    clock: MachineClock,
    hub: MemoryHub,
    trace: Trace,
    random: Random,
    process: Option<Box<Mon<SimWorld, SimMapStore>>>,
}

impl MonMachine {
    /// A machine with an empty store, switched off.
    pub fn new(options: &Options, clock: MachineClock, hub: &MemoryHub, trace: &Trace) -> Self {
        Self {
            store: SimMapStore::default(),
            pool: BufferPool::new(64 << 20),
            clock,
            hub: hub.clone(),
            trace: trace.clone(),
            random: Random::new(options.stream(1)),
            process: None,
        }
    }

    /// Its clock.
    pub fn clock(&self) -> &MachineClock {
        &self.clock
    }

    /// Its process, if it runs.
    pub fn process(&self) -> Option<&Mon<SimWorld, SimMapStore>> {
        self.process.as_deref()
    }

    /// Now, by its clock.
    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Starts the process, if it does not run.
    ///
    /// # Errors
    /// When the store cannot be used.
    pub fn start(&mut self) -> Result<(), StartError> {
        if self.process.is_some() {
            return Ok(());
        }
        self.trace.note(Level::Faults, || "mon starts".to_owned());
        let incarnation = Incarnation(self.random.next_u64().max(1));
        let address = Machine::Mon.address(0);
        let transport = SimTransport::new(&self.hub, address, &self.trace, Machine::Mon.to_string());
        let station = Station { machine: Machine::Mon, core: 0, incarnation, cluster: None };
        let messenger = station.messenger(transport, &self.pool, self.random.next_u64());
        let settings = MonSettings { addresses: vec![address], ..MonSettings::new(cluster_id()) };
        let (pool, clock, store) = (self.pool.clone(), self.clock.clone(), self.store.clone());
        self.process = Some(Box::new(Mon::new(settings, messenger, pool, clock, store)?));
        Ok(())
    }

    /// Ends the process.
    pub fn kill(&mut self) -> bool {
        self.process.take().is_some()
    }

    /// The machine loses its power: what was committed is durable.
    pub fn cut_power(&mut self) {
        self.hub.lose_power(Machine::Mon.address(0));
        self.process = None;
    }

    /// The next commit fails.
    pub fn fail_commit(&self, fault: CommitFault) {
        self.store.fault.set(Some(fault));
    }

    /// No commit fails any more.
    pub fn heal(&self) {
        self.store.fault.set(None);
    }

    /// Polls once. `None`: its store has failed, the process has ended.
    pub fn poll(&mut self) -> Option<Activity> {
        let now = self.clock.now();
        let Some(mon) = &mut self.process else { return Some(Activity::Idle) };
        let activity = mon.poll(now);
        if mon.has_failed() {
            self.process = None;
            return None;
        }
        Some(activity)
    }

    /// When to poll next, by the true time, if nothing arrives before.
    pub fn next_deadline(&self) -> Option<u64> {
        Some(self.clock.true_time(self.process.as_ref()?.next_deadline()?))
    }
}
