//! An NVMe controller in software: registers, admin and I/O queues, DMA, and namespaces that are block device models
//! with their caches. The driver runs on it as on hardware.
//!
//! Deterministic and passive: it works in [`SoftController::step`] only, one round of everything per step. It checks its
//! driver: an access to memory that is not mapped, a doorbell of no queue or a command beyond a queue's end is
//! counted in [`Misuse`], which stays empty under a driver that is right. And it misbehaves on demand ([`Mischief`]).
//!
//! Limits: commands are for whole 4 KiB blocks, whatever the logical block; PRPs only; one admin queue page.

mod admin;
mod io;
mod mischief;
mod state;

pub use mischief::{Mischief, Misuse};
pub use state::{NamespaceOptions, SoftOptions};

use crate::bus::{Bus, BusError};
use crate::model::device::{Memory, Model};
use crate::queue::DmaRange;
use crate::spec::registers;
use state::State;
use std::cell::RefCell;
use std::rc::Rc;

/// A handle to the controller; clones are handles to the same one, and one of them is the driver's bus.
#[derive(Clone, Debug)]
pub struct SoftController {
    state: Rc<RefCell<State>>,
}

impl SoftController {
    /// A controller just powered on.
    pub fn new(options: SoftOptions) -> Self {
        Self { state: Rc::new(RefCell::new(State::new(options))) }
    }

    /// One round: registers take effect, commands are fetched, the media work, completions are posted.
    pub fn step(&self) {
        self.state.borrow_mut().step();
    }

    /// Adds mischief to the I/O command that is the `after`-th from now (0: the next one) and `times - 1` more.
    pub fn inject(&self, mischief: Mischief, after: u64, times: u64) {
        self.state.borrow_mut().inject(mischief, after, times);
    }

    /// Pulls it out (`true`) or plugs it in again.
    pub fn set_gone(&self, gone: bool) {
        self.state.borrow_mut().gone = gone;
    }

    /// Says that the system wants it back.
    pub fn want_back(&self) {
        self.state.borrow_mut().wanted_back = true;
    }

    /// Sets CSTS.CFS: it does nothing any more until a reset.
    pub fn set_fatal(&self) {
        self.state.borrow_mut().fatal = true;
    }

    /// How many steps CSTS.RDY takes to follow CC.EN; `u64::MAX`: for ever.
    pub fn set_reset_steps(&self, to_idle: u64, to_ready: u64) {
        let mut state = self.state.borrow_mut();
        (state.steps_to_idle, state.steps_to_ready) = (to_idle, to_ready);
    }

    /// Whether Abort finds the commands that were lost.
    pub fn set_aborts(&self, aborts: bool) {
        self.state.borrow_mut().aborts = aborts;
    }

    /// What the driver has done wrong so far.
    pub fn misuse(&self) -> Misuse {
        self.state.borrow().misuse
    }

    /// Whether it may reach memory now: it is enabled or was not seen idle, and is on the bus.
    pub fn may_write(&self) -> bool {
        let state = self.state.borrow();
        state.on_bus && state.ready
    }

    /// I/O commands fetched so far.
    pub fn commands(&self) -> u64 {
        self.state.borrow().io_commands
    }

    /// Writes to doorbell registers so far.
    pub fn doorbells(&self) -> u64 {
        self.state.borrow().doorbell_writes
    }

    /// Ranges of memory that it is given.
    pub fn mapped(&self) -> usize {
        self.state.borrow().dma.len()
    }

    /// Uses one of its namespaces' media, counted from 0: for power cuts, rot and the record of what was asked.
    pub fn with_media<R>(&self, index: usize, use_it: impl FnOnce(&mut Model<Memory>) -> R) -> R {
        use_it(&mut self.state.borrow_mut().media[index].device)
    }

    /// Cuts the power: caches are lost by chance, and it is as after power-on.
    ///
    /// # Panics
    /// Never: media in memory do not fail.
    pub fn power_cut(&self) {
        self.state.borrow_mut().power_cut();
    }
}

#[allow(unsafe_code)]
impl Bus for SoftController {
    fn read32(&self, offset: u32) -> u32 {
        self.state.borrow_mut().read32(offset)
    }

    fn read64(&self, offset: u32) -> u64 {
        let mut state = self.state.borrow_mut();
        u64::from(state.read32(offset + 4)) << 32 | u64::from(state.read32(offset))
    }

    fn write32(&self, offset: u32, value: u32) {
        self.state.borrow_mut().write32(offset, value);
    }

    fn write64(&self, offset: u32, value: u64) {
        let mut state = self.state.borrow_mut();
        match offset {
            registers::ASQ => state.asq = value,
            registers::ACQ => state.acq = value,
            _ => state.misuse.registers += 1,
        }
    }

    unsafe fn map(&self, memory: DmaRange) -> Result<u64, BusError> {
        let mut state = self.state.borrow_mut();
        let iova = state.next_iova;
        // A gap behind each range, so that what runs over its end faults.
        state.next_iova += memory.len as u64 + (1 << 20);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { state.dma.insert(iova, memory) };
        Ok(iova)
    }

    fn unmap(&self, iova: u64, _: usize) {
        let mut state = self.state.borrow_mut();
        let known = state.dma.remove(iova);
        state.misuse.unmaps += u64::from(!known);
    }

    fn connect(&self) -> Result<(), BusError> {
        self.state.borrow_mut().on_bus = true;
        Ok(())
    }

    fn isolate(&self) {
        self.state.borrow_mut().on_bus = false;
    }

    fn is_wanted_back(&self) -> bool {
        self.state.borrow().wanted_back
    }
}
