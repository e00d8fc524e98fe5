//! Files and buffers that are registered with a ring, which saves the kernel the look-up and the pinning of pages per
//! operation. Everything works unregistered too: a refusal is counted and nothing else.

use super::ring::{Ring, RingInner};
use crate::dma::BufferPool;
use std::cell::{Cell, RefCell};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::{Rc, Weak};

/// Files that one ring registers: all connections and devices of a reactor. The kernel keeps 8 bytes for each.
const FILES_MAX: u32 = 4096 + 64;
/// Slabs that one ring registers (of 2 MiB at least, so 1 GiB and more).
const SLABS_MAX: u32 = 512;
/// Bytes of normal pages that one ring pins. Registration makes a slab resident as a whole, which an idle process of
/// at most 64 MiB cannot afford for every slab; huge pages are resident anyhow and not limited. Guessed: the block
/// slabs that a loaded reactor uses most.
const PINNED_NORMAL_MAX: usize = 8 << 20;

#[derive(Default)]
pub(super) struct Registry {
    files: Table,
    slabs: Table,
    pools: Vec<Weak<PoolInner>>,
    pinned_normal: usize,
    pub(super) files_refused: u64,
    pub(super) slabs_refused: u64,
}

/// A sparse table in the kernel, made at its first use.
#[derive(Default)]
struct Table {
    state: TableState,
    free: Vec<u32>,
    next: u32,
    len: u32,
}

#[derive(Default, PartialEq, Eq)]
enum TableState {
    #[default]
    Unmade,
    Made,
    Refused,
}

impl Table {
    fn make(&mut self, len: u32, register: impl FnOnce(u32) -> bool) {
        if self.state == TableState::Unmade {
            self.len = len;
            self.state = if register(len) { TableState::Made } else { TableState::Refused };
        }
    }

    fn take(&mut self) -> Option<u32> {
        if self.state != TableState::Made {
            return None;
        }
        if let Some(index) = self.free.pop() {
            return Some(index);
        }
        (self.next < self.len).then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    fn give_back(&mut self, index: u32) {
        self.free.push(index);
    }
}

fn files_max() -> u32 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes an `rlimit` into the one that `limit` is.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    // The kernel refuses a table that is longer than the limit on open files.
    let open_max = if result == 0 { limit.rlim_cur } else { 0 };
    u32::try_from(open_max).unwrap_or(u32::MAX).min(FILES_MAX)
}

impl Ring {
    /// Registers an open file and returns its index for `types::Fixed`, or `None` when the kernel refuses; then the
    /// descriptor itself works as well. The kernel keeps its own reference to the file until
    /// [`Ring::unregister_file`] or the end of the ring: closing the descriptor does not close the file.
    pub fn register_file(&self, file: BorrowedFd<'_>) -> Option<u32> {
        let inner = self.inner();
        let uring = inner.uring.borrow();
        let mut registry = inner.registry.borrow_mut();
        registry
            .files
            .make(files_max(), |len| len > 0 && uring.submitter().register_files_sparse(len).is_ok());
        let Some(index) = registry.files.take() else {
            registry.files_refused += 1;
            return None;
        };
        if uring.submitter().register_files_update(index, &[file.as_raw_fd()]).is_err() {
            registry.files.give_back(index);
            registry.files_refused += 1;
            return None;
        }
        Some(index)
    }

    /// Ends a registration. Operations in flight keep the file.
    pub fn unregister_file(&self, index: u32) {
        let inner = self.inner();
        let uring = inner.uring.borrow();
        let result = uring.submitter().register_files_update(index, &[-1]);
        debug_assert!(result.is_ok(), "taking an index out of the table: {result:?}");
        inner.registry.borrow_mut().files.give_back(index);
    }

    /// The registrations of a pool's slabs with this ring; one set for all who ask with the same pool.
    pub fn register_pool(&self, pool: &BufferPool) -> RegisteredPool {
        let inner = self.inner();
        let mut registry = inner.registry.borrow_mut();
        registry.pools.retain(|known| known.strong_count() > 0);
        let known = registry.pools.iter().filter_map(Weak::upgrade).find(|known| known.pool.is_same(pool));
        let pool = known.unwrap_or_else(|| {
            let made = Rc::new(PoolInner {
                ring: Rc::downgrade(inner),
                pool: pool.clone(),
                slabs: RefCell::new(Vec::new()),
                hits: Cell::new(0),
            });
            registry.pools.push(Rc::downgrade(&made));
            made
        });
        RegisteredPool { inner: pool }
    }
}

/// The registrations of one pool's slabs with one ring. Slabs are registered when they are first asked for.
#[derive(Clone)]
pub struct RegisteredPool {
    inner: Rc<PoolInner>,
}

struct PoolInner {
    ring: Weak<RingInner>,
    /// Keeps the slabs mapped as long as they are registered.
    pool: BufferPool,
    slabs: RefCell<Vec<SlabState>>,
    hits: Cell<u64>,
}

#[derive(Clone, Copy)]
enum SlabState {
    Unknown,
    Registered { index: u16, base: usize, len: usize },
    Refused,
}

impl RegisteredPool {
    /// The index for `ReadFixed` and `WriteFixed` of the slab that holds `bytes`, or `None` when it is not registered
    /// or `bytes` are from another pool; then the plain operations work as well. `slab` is the buffer's own word for
    /// it (see [`crate::dma::Buffer::slab`]).
    pub fn index(&self, slab: usize, bytes: &[u8]) -> Option<u16> {
        let inner = &self.inner;
        let mut slabs = inner.slabs.borrow_mut();
        if slabs.len() <= slab {
            inner.pool.slab_info(slab)?;
            slabs.resize(slab + 1, SlabState::Unknown);
        }
        if let SlabState::Unknown = slabs[slab] {
            slabs[slab] = inner.register(slab);
        }
        let SlabState::Registered { index, base, len } = slabs[slab] else { return None };
        let start = (bytes.as_ptr() as usize).checked_sub(base)?;
        if start.checked_add(bytes.len())? > len {
            return None;
        }
        inner.hits.set(inner.hits.get() + 1);
        Some(index)
    }

    /// Times that a registered index was found.
    pub fn hits(&self) -> u64 {
        self.inner.hits.get()
    }

    /// The pool.
    pub fn pool(&self) -> &BufferPool {
        &self.inner.pool
    }
}

impl PoolInner {
    fn register(&self, slab: usize) -> SlabState {
        let (Some(ring), Some(info)) = (self.ring.upgrade(), self.pool.slab_info(slab)) else {
            return SlabState::Refused;
        };
        let uring = ring.uring.borrow();
        let mut registry = ring.registry.borrow_mut();
        let within_budget = info.huge || registry.pinned_normal + info.len <= PINNED_NORMAL_MAX;
        registry.slabs.make(SLABS_MAX, |len| uring.submitter().register_buffers_sparse(len).is_ok());
        let index = if within_budget { registry.slabs.take() } else { None };
        let Some(index) = index else {
            registry.slabs_refused += 1;
            return SlabState::Refused;
        };
        let vector = libc::iovec { iov_base: info.base.cast_mut().cast(), iov_len: info.len };
        // SAFETY: the slab stays mapped as long as its pool, which `self` keeps until `drop` has taken the
        // registration back.
        if unsafe { uring.submitter().register_buffers_update(index, &[vector], None) }.is_err() {
            registry.slabs.give_back(index);
            registry.slabs_refused += 1;
            return SlabState::Refused;
        }
        if !info.huge {
            registry.pinned_normal += info.len;
        }
        let index = u16::try_from(index).expect("the table is shorter than 2^16");
        SlabState::Registered { index, base: info.base as usize, len: info.len }
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        // With the ring its registrations are gone too.
        let Some(ring) = self.ring.upgrade() else { return };
        let uring = ring.uring.borrow();
        let mut registry = ring.registry.borrow_mut();
        for (slab, state) in self.slabs.get_mut().iter().enumerate() {
            let SlabState::Registered { index, .. } = *state else { continue };
            let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            // SAFETY: an empty entry names no memory.
            let result = unsafe { uring.submitter().register_buffers_update(index.into(), &[empty], None) };
            if result.is_ok() {
                registry.slabs.give_back(index.into());
            }
            if let Some(info) = self.pool.slab_info(slab).filter(|info| !info.huge) {
                registry.pinned_normal = registry.pinned_normal.saturating_sub(info.len);
            }
        }
    }
}
