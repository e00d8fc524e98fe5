//! One submission queue and one completion queue (NVMe Base 2.0 §3.3.1), and their doorbells.

use super::memory::Region;
use crate::bus::Bus;
use crate::spec::command::{COMMAND_LEN, Command};
use crate::spec::completion::{COMPLETION_LEN, CompletionEntry, phase};
use crate::spec::registers::DOORBELLS;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// A doorbell: a register, and where the controller offers it a shadow in memory (NVMe Base 2.0 §5.8, annex B.5).
#[derive(Clone, Debug)]
pub struct Doorbell {
    register: u32,
    shadow: Option<Shadow>,
    value: u16,
}

#[derive(Clone, Debug)]
struct Shadow {
    /// A page of doorbells, then a page of event indices.
    pages: Arc<Region>,
    offset: usize,
}

const SHADOW_PAGE_LEN: usize = 4096;

impl Doorbell {
    /// The doorbell at this register. With `shadow` (a page of shadows, then one of event indices) the register is only
    /// written when the controller wants it.
    pub fn new(register: u32, shadow: Option<Arc<Region>>) -> Self {
        let offset = (register - DOORBELLS) as usize;
        let shadow = shadow.filter(|_| offset + 4 <= SHADOW_PAGE_LEN).map(|pages| Shadow { pages, offset });
        Self { register, shadow, value: 0 }
    }

    /// Tells the controller the new index. What was written to memory before is visible to it then.
    pub fn ring<B: Bus>(&mut self, bus: &B, index: u16) {
        let old = std::mem::replace(&mut self.value, index);
        // Entries before the index.
        fence(Ordering::Release);
        if let Some(shadow) = &self.shadow {
            shadow.pages.write_u32(shadow.offset, index.into());
            // The shadow before the look at the event index: the controller does the reverse, so that one of the two
            // sees the other's write.
            fence(Ordering::SeqCst);
            let event = shadow.pages.read_u32(SHADOW_PAGE_LEN + shadow.offset) as u16;
            if !wants_register(event, index, old) {
                return;
            }
        }
        bus.write32(self.register, index.into());
    }

    /// The queue begins anew at index 0, without a shadow.
    pub fn reset(&mut self) {
        *self = Self::new(self.register, None);
    }

    /// Zeroes the shadow and the event index that an earlier queue of this number may have left, before the controller
    /// is asked to make this one.
    pub fn clear(&self, pages: &Region) {
        let offset = (self.register - DOORBELLS) as usize;
        if offset + 4 <= SHADOW_PAGE_LEN {
            pages.write_u32(offset, 0);
            pages.write_u32(SHADOW_PAGE_LEN + offset, 0);
        }
    }

    /// Says whether there is a shadow, before the doorbell is used.
    pub fn set_shadow(&mut self, shadow: Option<Arc<Region>>) {
        *self = Self::new(self.register, shadow);
    }
}

/// Whether the doorbell's way from `old` to `new` passes the event index.
fn wants_register(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// The host's side of a submission queue. It has no idea of what is in flight: its user never has more commands
/// outstanding than one less than the entries, and a completed command's entry has been read.
#[derive(Debug)]
pub struct SubmissionRing {
    memory: Arc<Region>,
    offset: usize,
    entries: u16,
    tail: u16,
    rung: u16,
    doorbell: Doorbell,
}

impl SubmissionRing {
    /// A queue of `entries` at `offset` of `memory`.
    pub fn new(memory: Arc<Region>, offset: usize, entries: u16, doorbell: Doorbell) -> Self {
        assert!(entries >= 2, "a queue has at least two entries");
        assert!(
            offset + usize::from(entries) * COMMAND_LEN <= memory.len(),
            "a queue lies within its memory"
        );
        Self { memory, offset, entries, tail: 0, rung: 0, doorbell }
    }

    /// Its address for the controller.
    pub fn iova(&self) -> u64 {
        self.memory.iova(self.offset)
    }

    /// Its size.
    pub fn entries(&self) -> u16 {
        self.entries
    }

    /// Puts a command at the tail. The controller is told by [`SubmissionRing::ring`].
    pub fn push(&mut self, command: Command) {
        let at = self.offset + usize::from(self.tail) * COMMAND_LEN;
        self.memory.write_words(at, command.words());
        self.tail = if self.tail + 1 == self.entries { 0 } else { self.tail + 1 };
    }

    /// Tells the controller what was pushed, if anything was.
    pub fn ring<B: Bus>(&mut self, bus: &B) {
        if self.tail != self.rung {
            self.rung = self.tail;
            self.doorbell.ring(bus, self.tail);
        }
    }

    /// Begins anew: the controller has forgotten the queue. `shadows` are the pages of shadow doorbells that it may be
    /// given.
    pub fn reset(&mut self, shadows: Option<&Region>) {
        (self.tail, self.rung) = (0, 0);
        self.doorbell.reset();
        if let Some(pages) = shadows {
            self.doorbell.clear(pages);
        }
    }

    /// The controller has made the queue, with these shadow doorbells.
    pub fn begin(&mut self, shadow: Option<Arc<Region>>) {
        self.doorbell.set_shadow(shadow);
    }
}

/// The host's side of a completion queue.
#[derive(Debug)]
pub struct CompletionRing {
    memory: Arc<Region>,
    offset: usize,
    entries: u16,
    head: u16,
    phase: bool,
    rung: u16,
    doorbell: Doorbell,
}

impl CompletionRing {
    /// A queue of `entries` at `offset` of `memory`, which is zero there.
    pub fn new(memory: Arc<Region>, offset: usize, entries: u16, doorbell: Doorbell) -> Self {
        assert!(entries >= 2, "a queue has at least two entries");
        assert!(
            offset + usize::from(entries) * COMPLETION_LEN <= memory.len(),
            "a queue lies within its memory"
        );
        Self { memory, offset, entries, head: 0, phase: true, rung: 0, doorbell }
    }

    /// Its address for the controller.
    pub fn iova(&self) -> u64 {
        self.memory.iova(self.offset)
    }

    /// The next completion, copied, if the controller has posted one. Phase first, then the rest.
    pub fn pop(&mut self) -> Option<CompletionEntry> {
        let at = self.offset + usize::from(self.head) * COMPLETION_LEN;
        let high = self.memory.read_u64(at + 8);
        if phase(high) != self.phase {
            return None;
        }
        // The other word, and the data that the command has brought, not before the phase.
        fence(Ordering::Acquire);
        let low = self.memory.read_u64(at);
        self.head += 1;
        if self.head == self.entries {
            self.head = 0;
            self.phase = !self.phase;
        }
        Some(CompletionEntry::from_words([low, high]))
    }

    /// Tells the controller how far the queue was read, if that has changed.
    pub fn ring<B: Bus>(&mut self, bus: &B) {
        if self.head != self.rung {
            self.rung = self.head;
            self.doorbell.ring(bus, self.head);
        }
    }

    /// Begins anew: the controller has forgotten the queue and writes to it no more. `shadows` as for the other ring.
    pub fn reset(&mut self, shadows: Option<&Region>) {
        (self.head, self.rung, self.phase) = (0, 0, true);
        self.memory.zero(self.offset, usize::from(self.entries) * COMPLETION_LEN);
        self.doorbell.reset();
        if let Some(pages) = shadows {
            self.doorbell.clear(pages);
        }
    }

    /// The controller has made the queue, with these shadow doorbells. Its memory is left alone: completions may have
    /// been posted already.
    pub fn begin(&mut self, shadow: Option<Arc<Region>>) {
        self.doorbell.set_shadow(shadow);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::BusError;
    use crate::queue::DmaRange;
    use crate::spec::registers::{cq_doorbell, sq_doorbell};
    use crate::spec::status::Status;
    use std::cell::RefCell;

    #[derive(Default)]
    struct Registers(RefCell<Vec<(u32, u32)>>);

    #[allow(unsafe_code)]
    impl Bus for Registers {
        fn read32(&self, _: u32) -> u32 {
            0
        }
        fn read64(&self, _: u32) -> u64 {
            0
        }
        fn write32(&self, offset: u32, value: u32) {
            self.0.borrow_mut().push((offset, value));
        }
        fn write64(&self, _: u32, _: u64) {}
        unsafe fn map(&self, _: DmaRange) -> Result<u64, BusError> {
            Ok(0)
        }
        fn unmap(&self, _: u64, _: usize) {}
        fn connect(&self) -> Result<(), BusError> {
            Ok(())
        }
        fn isolate(&self) {}
    }

    #[test]
    fn commands_are_pushed_round_and_rung_once() {
        let (bus, memory) = (Registers::default(), Arc::new(Region::new(4096).unwrap()));
        let mut ring = SubmissionRing::new(memory.clone(), 0, 3, Doorbell::new(sq_doorbell(1, 4), None));
        ring.ring(&bus);
        for nsid in 1..=2 {
            ring.push(Command::flush(nsid));
        }
        ring.ring(&bus);
        ring.push(Command::flush(3));
        ring.push(Command::flush(4));
        ring.ring(&bus);
        assert_eq!(*bus.0.borrow(), [(0x1008, 2), (0x1008, 1)]);
        let nsids = [0, 64, 128].map(|at| memory.read_u64(at) >> 32);
        assert_eq!(nsids, [4, 2, 3]);
    }

    #[test]
    fn completions_are_seen_by_their_phase() {
        let (bus, memory) = (Registers::default(), Arc::new(Region::new(4096).unwrap()));
        let mut ring = CompletionRing::new(memory.clone(), 0, 2, Doorbell::new(cq_doorbell(1, 4), None));
        let post = |at: usize, cid: u16, phase: bool| {
            let entry = CompletionEntry { cid, phase, status: Status::new(2, 0x81), ..Default::default() };
            let [low, high] = entry.words();
            memory.write_u64(at * 16, low);
            memory.write_u64(at * 16 + 8, high);
        };
        assert_eq!(ring.pop(), None);
        post(0, 5, true);
        assert_eq!(ring.pop().map(|entry| (entry.cid, entry.status.code())), Some((5, 0x81)));
        assert_eq!(ring.pop(), None);
        post(1, 6, true);
        assert_eq!(ring.pop().map(|entry| entry.cid), Some(6));
        assert_eq!(ring.pop(), None, "the first round's entry is not new");
        post(0, 7, false);
        assert_eq!(ring.pop().map(|entry| entry.cid), Some(7));
        ring.ring(&bus);
        ring.ring(&bus);
        assert_eq!(*bus.0.borrow(), [(0x100c, 1)]);
        ring.reset(None);
        assert_eq!((ring.pop(), memory.read_u64(8)), (None, 0));
    }

    #[test]
    fn a_shadow_spares_the_register_until_it_is_wanted() {
        let (bus, pages) = (Registers::default(), Arc::new(Region::new(8192).unwrap()));
        let mut doorbell = Doorbell::new(sq_doorbell(1, 4), Some(pages.clone()));
        doorbell.ring(&bus, 1);
        assert_eq!((bus.0.borrow().len(), pages.read_u32(8)), (1, 1), "event index 0 is passed");
        doorbell.ring(&bus, 2);
        assert_eq!((bus.0.borrow().len(), pages.read_u32(8)), (1, 2));
        pages.write_u32(4096 + 8, 2);
        doorbell.ring(&bus, 4);
        assert_eq!(bus.0.borrow()[1], (0x1008, 4));
        assert!(wants_register(0xffff, 0, 0xffff) && !wants_register(5, 5, 4));
    }
}
