//! Files and block devices through the kernel, by io_uring and O_DIRECT.
//!
//! [`OpenDevice`] has the descriptor, the lock and the geometry; each reactor that uses a share of the device has a
//! [`UringDevice`], a queue on its own ring. The data path makes no allocation: operations live in a table that is
//! made at the start, with their buffers, until the kernel has completed them.
//!
//! After a failed write or flush the device is poisoned: what the kernel had cached may be marked clean without
//! being on the medium, and a second try would report success over lost data (RELIABILITY section 3).
#![allow(clippy::disallowed_methods, reason = "a back end: the device behind the seam")]
#![allow(unsafe_code)]

mod open;
mod slot;
mod system;

pub use open::{OpenDevice, OpenError, UringOptions};

use loligo_config::units::{BLOCK_SIZE, BlockCount};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{
    BlockDevice, Completion, Completions, DiskError, DiskOp, Geometry, QueueFull, Ticket, WRITE_PIECES_MAX,
    WriteCache,
};
use loligo_reactor::os::RegisteredPool;
use loligo_reactor::os::ring::{Ring, RingOwner};
use slot::{DiscardMeans, Means, Slot, Step, Vectors, disk_error, range};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Times that an operation is handed in again when the kernel says "try again" before it is an error.
const RETRIES_MAX: u8 = 16;

/// What all queues of one device share.
#[derive(Debug)]
struct Shared {
    file: File,
    path: PathBuf,
    geometry: Geometry,
    block_device: bool,
    poisoned: AtomicBool,
}

/// How entries name the file.
#[derive(Clone, Copy, Debug)]
enum Target {
    Fixed(u32),
    Descriptor(RawFd),
}

/// One queue of a file or block device, on the ring of one reactor.
///
/// Dropping it waits for what is in flight: until then the kernel may write to the buffers.
pub struct UringDevice {
    shared: Arc<Shared>,
    owner: RingOwner,
    pool: RegisteredPool,
    means: Means,
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    vectors: Box<[Vectors]>,
    /// Completions that needed no kernel.
    ready: VecDeque<Completion>,
    /// Slots whose next entry found the ring full.
    stalled: VecDeque<u32>,
    stats: UringStats,
}

/// What a queue has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UringStats {
    /// Operations completed.
    pub completed: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Transfers that came back short and were continued.
    pub short: u64,
    /// Operations that the kernel asked to try again.
    pub retried: u64,
    /// Reads and writes in registered buffers.
    pub registered: u64,
}

impl UringDevice {
    /// Opens a device that one reactor has to itself. See [`OpenDevice`] for several.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(
        path: &Path,
        ring: &Ring,
        pool: &BufferPool,
        options: UringOptions,
    ) -> Result<Self, OpenError> {
        Ok(OpenDevice::open(path, options)?.queue(ring, pool))
    }

    fn new(shared: Arc<Shared>, ring: &Ring, pool: &BufferPool, options: UringOptions) -> Self {
        let depth = shared.geometry.queue_depth_max;
        let target = match ring.register_file(shared.file.as_fd()) {
            Some(index) => Target::Fixed(index),
            None => Target::Descriptor(shared.file.as_raw_fd()),
        };
        let discard = match (shared.geometry.discards, shared.block_device) {
            (false, _) => DiscardMeans::Nothing,
            (true, true) => DiscardMeans::Command,
            (true, false) => DiscardMeans::Punch,
        };
        let volatile = shared.geometry.write_cache == WriteCache::Volatile;
        let means = Means { target, volatile, zero_range: shared.block_device, discard };
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        tracing::debug!(device = %shared.path.display(), geometry = ?shared.geometry, ?options, "queue made");
        Self {
            owner: ring.owner(),
            pool: ring.register_pool(pool),
            means,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            vectors: vec![[empty; WRITE_PIECES_MAX]; depth as usize].into_boxed_slice(),
            ready: VecDeque::with_capacity(depth as usize),
            stalled: VecDeque::with_capacity(depth as usize),
            stats: UringStats::default(),
            shared,
        }
    }

    /// Whether a write or flush has failed, here or in another queue of the device.
    pub fn is_poisoned(&self) -> bool {
        self.shared.poisoned.load(Ordering::Acquire)
    }

    /// Counters.
    pub fn stats(&self) -> UringStats {
        self.stats
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// What the operation completes with before the kernel sees it.
    fn verdict(&self, op: &DiskOp) -> Option<Result<(), DiskError>> {
        let changes = matches!(op, DiskOp::Write { .. } | DiskOp::Flush | DiskOp::WriteZeroes { .. });
        if changes && self.is_poisoned() {
            return Some(Err(DiskError::Poisoned));
        }
        match op {
            // Nothing is lost at a power cut that completed before.
            DiskOp::Flush if !self.means.volatile => Some(Ok(())),
            DiskOp::Flush => None,
            _ if !self.is_valid(op) => Some(Err(DiskError::Invalid)),
            DiskOp::Discard { .. } if self.means.discard == DiscardMeans::Nothing => Some(Ok(())),
            _ => None,
        }
    }

    fn is_valid(&self, op: &DiskOp) -> bool {
        let geometry = &self.shared.geometry;
        let aligned = |bytes: &[u8]| {
            let alignment = geometry.dma_alignment as usize;
            (bytes.as_ptr() as usize).is_multiple_of(alignment) && bytes.len().is_multiple_of(alignment)
        };
        let fits = match op {
            DiskOp::Read { buffer, .. } => aligned(buffer),
            DiskOp::Write { data, .. } => data.iter().all(|piece| aligned(piece)),
            DiskOp::Discard { .. } | DiskOp::WriteZeroes { .. } | DiskOp::Flush => true,
        };
        let Some((lba, count)) = range(op) else { return false };
        let transfers = matches!(op, DiskOp::Read { .. } | DiskOp::Write { .. });
        let end_fits = lba.checked_add(count).is_some_and(|end| end.0 <= geometry.blocks.0);
        fits && end_fits && count > BlockCount(0) && (!transfers || count <= geometry.transfer_blocks_max)
    }

    /// Queues the next entry of a slot. False: the ring is full.
    fn push(&mut self, index: u32) -> bool {
        let at = index as usize;
        let slot = self.slots[at].as_mut().expect("only slots in use are pushed");
        let fixed = match &slot.op {
            DiskOp::Read { buffer, .. } => self.pool.index(buffer.slab(), buffer),
            DiskOp::Write { data, .. } if data.len() == 1 => self.pool.index(data[0].slab(), &data[0]),
            _ => None,
        };
        self.stats.registered += u64::from(fixed.is_some());
        let entry = slot.entry(&self.means, fixed, &mut self.vectors[at]);
        // SAFETY: the entry names the slot's buffers, which the slot owns until its completion was taken (also in
        // `drop`); the vectors in their boxed slice, which changes only in `push` when no entry of this slot is
        // queued; or zeroes that are never freed.
        unsafe { self.owner.push(entry, index.into()) }.is_ok()
    }

    fn push_or_stall(&mut self, index: u32) {
        if !self.push(index) {
            self.stalled.push_back(index);
        }
    }

    fn push_stalled(&mut self) {
        while let Some(index) = self.stalled.pop_front() {
            if !self.push(index) {
                self.stalled.push_front(index);
                return;
            }
        }
    }

    /// Takes in how one entry ended. True: its operation has ended too, and is in `ready`.
    fn advance(&mut self, index: u32, result: i32) -> bool {
        let at = index as usize;
        let outcome = match u32::try_from(result) {
            Ok(moved) => self.progress(at, moved),
            Err(_) => self.failure(at, -result),
        };
        let Some(result) = outcome else {
            self.push_or_stall(index);
            return false;
        };
        let slot = self.slots[at].take().expect("a completion belongs to a slot in use");
        self.free.push(index);
        if let Err(error) = result {
            self.report(&slot, error);
        }
        self.stats.completed += 1;
        self.ready.push_back(Completion { ticket: slot.ticket, result, op: slot.op });
        true
    }

    /// An entry did what it was asked, perhaps not all of it. `None`: there is more to do.
    fn progress(&mut self, at: usize, moved: u32) -> Option<Result<(), DiskError>> {
        let volatile = self.means.volatile;
        let slot = self.slots[at].as_mut().expect("a completion belongs to a slot in use");
        match (slot.step, &slot.op) {
            (Step::Range, DiskOp::WriteZeroes { fua: true, .. }) if volatile => {
                slot.step = Step::Sync;
                return None;
            }
            (Step::Range | Step::Sync, _) => return Some(Ok(())),
            (Step::Transfer, _) => {}
        }
        let left = slot.len() - slot.done;
        // Nothing moved: the end of a file that was cut short behind our back.
        if moved == 0 || u64::from(moved) > left {
            return Some(Err(DiskError::Io { errno: 0 }));
        }
        slot.done += u64::from(moved);
        if slot.done == slot.len() {
            return Some(Ok(()));
        }
        // What is left must be aligned as the whole was; writing zeroes goes on in pieces by design.
        if !slot.done.is_multiple_of(u64::from(self.shared.geometry.logical_block)) {
            return Some(Err(DiskError::Io { errno: 0 }));
        }
        self.stats.short += u64::from(!matches!(slot.op, DiskOp::WriteZeroes { .. }));
        None
    }

    /// An entry failed. `None`: it is tried again, by the same means or by others.
    fn failure(&mut self, at: usize, errno: i32) -> Option<Result<(), DiskError>> {
        let punch = self.shared.block_device && self.means.discard == DiscardMeans::Command;
        let slot = self.slots[at].as_mut().expect("a completion belongs to a slot in use");
        let unknown = matches!(errno, libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS | libc::EINVAL);
        match &slot.op {
            DiskOp::Discard { .. } if unknown && punch => {
                // A kernel without the command. What the blocks read as is undefined, so nothing is a discard too.
                self.means.discard = DiscardMeans::Nothing;
                tracing::info!(device = %self.shared.path.display(), errno, "this kernel cannot discard here");
                return Some(Ok(()));
            }
            DiskOp::WriteZeroes { .. } if unknown && slot.step == Step::Range => {
                self.means.zero_range = false;
                slot.step = Step::Transfer;
                return None;
            }
            _ => {}
        }
        if matches!(errno, libc::EAGAIN | libc::EINTR) && slot.retries < RETRIES_MAX {
            slot.retries += 1;
            self.stats.retried += 1;
            return None;
        }
        Some(Err(disk_error(&slot.op, errno)))
    }

    fn report(&mut self, slot: &Slot, error: DiskError) {
        self.stats.failed += 1;
        if slot.changes_data() && !self.shared.poisoned.swap(true, Ordering::AcqRel) {
            tracing::error!(
                device = %self.shared.path.display(), %error, range = ?range(&slot.op),
                "a write or flush failed: nothing is written to this device any more"
            );
        }
    }
}

impl BlockDevice for UringDevice {
    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn submit(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        if self.in_flight() >= self.shared.geometry.queue_depth_max {
            return Err(QueueFull(op));
        }
        if let Some(result) = self.verdict(&op) {
            self.ready.push_back(Completion { ticket, result, op });
            // The kernel has nothing to wake the reactor with.
            self.owner.ring().nudge();
            return Ok(());
        }
        let index = self.free.pop().expect("fewer in flight than slots");
        self.slots[index as usize] = Some(Slot::new(op, ticket, &self.means));
        // Not past those that wait for room already.
        if self.stalled.is_empty() && self.push(index) {
            return Ok(());
        }
        let slot = self.slots[index as usize].take().expect("put there above");
        self.free.push(index);
        Err(QueueFull(slot.op))
    }

    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32 {
        self.push_stalled();
        let ring = self.owner.ring();
        ring.submit().expect("the kernel takes calls for a ring that it made");
        ring.reap();
        while (self.ready.len() as u64) < u64::from(budget) {
            let Some(completion) = self.owner.take() else { break };
            let index = u32::try_from(completion.user).expect("user data is the slot's index");
            self.advance(index, completion.result);
        }
        let count = self.ready.len().min(budget as usize);
        done.extend(self.ready.drain(..count));
        if !self.ready.is_empty() {
            self.owner.ring().nudge();
        }
        count as u32
    }

    fn in_flight(&self) -> u32 {
        let waiting = self.slots.len() - self.free.len() + self.ready.len();
        u32::try_from(waiting).expect("bounded by the queue's depth")
    }
}

impl Drop for UringDevice {
    fn drop(&mut self) {
        if let Err(error) = self.owner.quiesce() {
            // The kernel may still write to the buffers: better lost than freed.
            tracing::error!(device = %self.shared.path.display(), %error, "buffers in flight are lost");
            Box::leak(Box::new((std::mem::take(&mut self.slots), std::mem::take(&mut self.vectors))));
        }
        if let Target::Fixed(index) = self.means.target {
            self.owner.ring().unregister_file(index);
        }
    }
}

const _: () = assert!(BLOCK_SIZE as usize <= 4096, "buffers of a pool are aligned to 4 KiB");

#[cfg(test)]
mod tests;
