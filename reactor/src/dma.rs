//! Buffers that devices and the network read and write: aligned, pooled, lent by ownership.
//!
//! A [`Buffer`] has one owner who may change it; [`Buffer::freeze`] makes it a [`SharedBuffer`], which is
//! read-only, cheap to clone and to slice, and goes back to its pool with the last clone. Both are `!Send`: a pool
//! belongs to one reactor. Memory comes in slabs of 2 MiB from the system's huge pages when there are any, else from
//! normal pages, and is mapped when first needed, so that an idle process stays small.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::rc::Rc;

const CLASS_SHIFT_MIN: u32 = 9;
const CLASS_COUNT: usize = 16; // 512 bytes to 16 MiB
const SLAB_LEN: usize = 2 << 20;

/// Largest buffer in bytes: 16 MiB.
pub const BUFFER_LEN_MAX: usize = 1 << (CLASS_SHIFT_MIN as usize + CLASS_COUNT - 1);

/// The pool may not grow further, or the system has no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no buffer of {len} bytes: the pool's {limit} bytes are in use")]
pub struct PoolExhausted {
    /// Bytes asked for.
    pub len: usize,
    /// The pool's limit in bytes.
    pub limit: usize,
}

/// A pool of buffers, owned by one reactor. Clones are handles to the same pool.
#[derive(Clone, Debug)]
pub struct BufferPool {
    inner: Rc<PoolInner>,
}

/// Where one slab of a pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabInfo {
    /// Its first byte.
    pub base: *const u8,
    /// Its length in bytes.
    pub len: usize,
    /// Whether it is in huge pages.
    pub huge: bool,
}

#[derive(Debug)]
struct PoolInner {
    limit: usize,
    state: RefCell<PoolState>,
}

#[derive(Debug)]
struct PoolState {
    mapped: usize,
    slabs: Vec<Slab>,
    free: [Vec<NonNull<Slot>>; CLASS_COUNT],
}

#[derive(Debug)]
struct Slab {
    base: NonNull<u8>,
    len: usize,
    huge: bool,
    /// The size class of all its buffers, and how many of them are in use.
    class: usize,
    used: u32,
}

/// Where one buffer's memory is; allocated once and recycled with it.
#[derive(Debug)]
struct Slot {
    base: NonNull<u8>,
    class: usize,
    slab: usize,
    references: Cell<u32>,
}

fn class_of(len: usize) -> Option<usize> {
    let shift = len.max(1).next_power_of_two().trailing_zeros().max(CLASS_SHIFT_MIN);
    let class = (shift - CLASS_SHIFT_MIN) as usize;
    (class < CLASS_COUNT).then_some(class)
}

fn class_len(class: usize) -> usize {
    1 << (CLASS_SHIFT_MIN as usize + class)
}

impl BufferPool {
    /// A pool that maps at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        let free = std::array::from_fn(|_| Vec::new());
        let state = PoolState { mapped: 0, slabs: Vec::new(), free };
        Self { inner: Rc::new(PoolInner { limit, state: RefCell::new(state) }) }
    }

    /// A buffer of `len` bytes, aligned to the smaller of 4 KiB and its size class (a power of two from 512). What
    /// it holds is whatever its last user left there.
    ///
    /// # Errors
    /// When the pool's limit is reached, the system has no memory, or `len` is above [`BUFFER_LEN_MAX`].
    pub fn alloc(&self, len: usize) -> Result<Buffer, PoolExhausted> {
        let exhausted = PoolExhausted { len, limit: self.inner.limit };
        let class = class_of(len).ok_or(exhausted)?;
        let mut state = self.inner.state.borrow_mut();
        if state.free[class].is_empty() {
            let more = state.grow(class, self.inner.limit);
            more.or_else(|| state.repurpose(class)).ok_or(exhausted)?;
        }
        let slot = state.free[class].pop().expect("the class has just grown");
        // SAFETY: slots live as long as their pool, which `pool` below keeps alive, and a slot in the free list has
        // no other user.
        let entry = unsafe { slot.as_ref() };
        entry.references.set(1);
        state.slabs[entry.slab].used += 1;
        Ok(Buffer { raw: Raw { slot, pool: Rc::clone(&self.inner) }, len })
    }

    /// A buffer of `len` zeroes. Errors as [`BufferPool::alloc`].
    pub fn alloc_zeroed(&self, len: usize) -> Result<Buffer, PoolExhausted> {
        let mut buffer = self.alloc(len)?;
        buffer.fill(0);
        Ok(buffer)
    }

    /// A frozen buffer that holds a copy of `bytes`. Errors as [`BufferPool::alloc`].
    pub fn copy_of(&self, bytes: &[u8]) -> Result<SharedBuffer, PoolExhausted> {
        let mut buffer = self.alloc(bytes.len())?;
        buffer.copy_from_slice(bytes);
        Ok(buffer.freeze())
    }

    /// Bytes mapped so far.
    pub fn mapped(&self) -> usize {
        self.inner.state.borrow().mapped
    }

    /// Whether all memory mapped so far is in huge pages.
    pub fn is_huge(&self) -> bool {
        self.inner.state.borrow().slabs.iter().all(|slab| slab.huge)
    }

    /// Whether `other` is a handle to the same pool.
    pub fn is_same(&self, other: &BufferPool) -> bool {
        Rc::ptr_eq(&self.inner, &other.inner)
    }

    /// One slab, by its index.
    pub fn slab_info(&self, index: usize) -> Option<SlabInfo> {
        let state = self.inner.state.borrow();
        let slab = state.slabs.get(index)?;
        Some(SlabInfo { base: slab.base.as_ptr().cast_const(), len: slab.len, huge: slab.huge })
    }

    /// Address and length of every slab, in the order of their indices (see [`SharedBuffer::slab`]); slabs are never
    /// unmapped before the pool is.
    pub fn slabs(&self) -> Vec<(*const u8, usize)> {
        let state = self.inner.state.borrow();
        state.slabs.iter().map(|slab| (slab.base.as_ptr().cast_const(), slab.len)).collect()
    }
}

impl PoolState {
    fn grow(&mut self, class: usize, limit: usize) -> Option<()> {
        let len = class_len(class).max(SLAB_LEN);
        if self.mapped.checked_add(len)? > limit {
            return None;
        }
        let slab = Slab::map(len, class)?;
        if !slab.huge && self.slabs.is_empty() {
            tracing::debug!("no huge pages to be had (see vm.nr_hugepages): buffers are in normal pages");
        }
        self.mapped += len;
        self.slabs.push(slab);
        self.cut(self.slabs.len() - 1, class);
        Some(())
    }

    /// Gives a slab that is free as a whole to a class that may not grow: what a burst of large buffers has mapped
    /// must serve small ones later, or the pool would stay exhausted for them.
    fn repurpose(&mut self, class: usize) -> Option<()> {
        let index = self.slabs.iter().position(|slab| slab.used == 0 && slab.len >= class_len(class))?;
        let old = self.slabs[index].class;
        self.free[old].retain(|slot| {
            // SAFETY: slots in a free list are alive until they are taken out of it for good, which is done below.
            let keep = unsafe { slot.as_ref() }.slab != index;
            if !keep {
                // SAFETY: made by `Box::leak`; no buffer refers to it, since none of its slab is in use, and it
                // leaves the only list that does.
                drop(unsafe { Box::from_raw(slot.as_ptr()) });
            }
            keep
        });
        self.slabs[index].class = class;
        self.cut(index, class);
        Some(())
    }

    /// Makes the slots of a slab.
    fn cut(&mut self, index: usize, class: usize) {
        let slab = &self.slabs[index];
        let free = &mut self.free[class];
        // Room for all slots of the class, so that giving a buffer back never allocates.
        let slots: usize = self
            .slabs
            .iter()
            .filter(|slab| slab.class == class)
            .map(|slab| slab.len / class_len(class))
            .sum();
        free.reserve(slots - free.len());
        // Backwards, since the last is used first: the lowest addresses, so that few pages become resident.
        for at in (0..slab.len).step_by(class_len(class)).rev() {
            // SAFETY: `at` is within the slab's mapping.
            let base = unsafe { slab.base.add(at) };
            let slot = Box::new(Slot { base, class, slab: index, references: Cell::new(0) });
            free.push(NonNull::from(Box::leak(slot)));
        }
    }
}

impl Slab {
    fn map(len: usize, class: usize) -> Option<Self> {
        Self::map_with(len, class, libc::MAP_HUGETLB).or_else(|| Self::map_with(len, class, 0))
    }

    fn map_with(len: usize, class: usize, extra: libc::c_int) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        Some(Slab { base: NonNull::new(base.cast())?, len, huge: extra != 0, class, used: 0 })
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        for slot in state.free.iter().flatten() {
            // SAFETY: every buffer holds an `Rc` of the pool, so with the pool gone all slots are back in the free
            // lists, each exactly once; they were made by `Box::leak`.
            drop(unsafe { Box::from_raw(slot.as_ptr()) });
        }
        for slab in &state.slabs {
            // SAFETY: the mapping was made by `Slab::map_with` with this length, and no buffer refers to it any more.
            unsafe { libc::munmap(slab.base.as_ptr().cast(), slab.len) };
        }
    }
}

/// A reference to a slot; counts.
#[derive(Debug)]
struct Raw {
    slot: NonNull<Slot>,
    pool: Rc<PoolInner>,
}

impl Raw {
    fn slot(&self) -> &Slot {
        // SAFETY: slots live as long as their pool, which `self.pool` keeps alive; they are only ever shared.
        unsafe { self.slot.as_ref() }
    }
}

impl Clone for Raw {
    fn clone(&self) -> Self {
        let references = &self.slot().references;
        references.set(references.get().checked_add(1).expect("fewer than 2^32 clones of a buffer"));
        Self { slot: self.slot, pool: Rc::clone(&self.pool) }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let left = self.slot().references.get() - 1;
        self.slot().references.set(left);
        if left == 0 {
            let (class, slab) = (self.slot().class, self.slot().slab);
            let mut state = self.pool.state.borrow_mut();
            state.slabs[slab].used -= 1;
            state.free[class].push(self.slot);
        }
    }
}

/// A buffer with one owner.
#[derive(Debug)]
pub struct Buffer {
    raw: Raw,
    len: usize,
}

impl Buffer {
    /// Bytes that it could hold.
    pub fn capacity(&self) -> usize {
        class_len(self.raw.slot().class)
    }

    /// Shortens it to `len` bytes.
    ///
    /// # Panics
    /// If it is shorter than that.
    pub fn truncate(&mut self, len: usize) {
        assert!(len <= self.len, "a buffer of {} bytes cannot be cut to {len}", self.len);
        self.len = len;
    }

    /// Makes it read-only and shareable.
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer { start: 0, len: self.len, raw: self.raw }
    }

    /// The index of its slab in [`BufferPool::slabs`].
    pub fn slab(&self) -> usize {
        self.raw.slot().slab
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot's memory is mapped and initialised (by the kernel at first) for its class's length, which
        // `len` does not exceed, and only this owner can change it.
        unsafe { std::slice::from_raw_parts(self.raw.slot().base.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; a `Buffer` is the only reference to its slot, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.raw.slot().base.as_ptr(), self.len) }
    }
}

/// A read-only view of a buffer; clones share the memory.
#[derive(Clone, Debug)]
pub struct SharedBuffer {
    raw: Raw,
    start: usize,
    len: usize,
}

impl SharedBuffer {
    /// A view of a part of this view.
    ///
    /// # Panics
    /// If the range does not lie within it.
    pub fn slice(&self, range: Range<usize>) -> SharedBuffer {
        assert!(range.start <= range.end, "{range:?} is no range");
        assert!(range.end <= self.len, "{range:?} is beyond {} bytes", self.len);
        SharedBuffer { raw: self.raw.clone(), start: self.start + range.start, len: range.end - range.start }
    }

    /// The buffer itself if this is the only view of it and starts at its beginning, else this view again.
    pub fn try_unique(self) -> Result<Buffer, SharedBuffer> {
        if self.start == 0 && self.raw.slot().references.get() == 1 {
            return Ok(Buffer { len: self.len, raw: self.raw });
        }
        Err(self)
    }

    /// The index of its slab in [`BufferPool::slabs`].
    pub fn slab(&self) -> usize {
        self.raw.slot().slab
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the view lies within the slot's memory; nobody can change it while it is shared, since the only
        // way back to a mutable `Buffer` needs the last reference.
        unsafe { std::slice::from_raw_parts(self.raw.slot().base.as_ptr().add(self.start), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_recycled() {
        let pool = BufferPool::new(8 << 20);
        let mut first = pool.alloc(5000).unwrap();
        assert_eq!(first.as_ptr() as usize % 4096, 0);
        assert_eq!((first.len(), first.capacity()), (5000, 8192));
        first[4999] = 7;
        let address = first.as_ptr();
        let shared = first.freeze();
        let part = shared.slice(4999..5000);
        assert_eq!(*part, [7]);
        drop(shared);
        assert_ne!(pool.alloc(8192).unwrap().as_ptr(), address, "still in use by a slice");
        drop(part);
        assert_eq!(pool.alloc(8192).unwrap().as_ptr(), address);
    }

    #[test]
    fn the_limit_holds_and_a_returned_buffer_serves_again() {
        let pool = BufferPool::new(2 << 20);
        let all: Vec<_> = (0..2).map(|_| pool.alloc(1 << 20).unwrap()).collect();
        assert_eq!(pool.alloc(1 << 20).unwrap_err(), PoolExhausted { len: 1 << 20, limit: 2 << 20 });
        drop(all);
        assert!(pool.alloc(1 << 20).is_ok());
        assert!(pool.alloc(BUFFER_LEN_MAX + 1).is_err());
    }

    #[test]
    fn only_the_last_view_becomes_a_buffer_again() {
        let pool = BufferPool::new(8 << 20);
        let shared = pool.copy_of(b"loligo").unwrap();
        let other = shared.clone();
        let shared = shared.try_unique().unwrap_err();
        drop(other);
        assert_eq!(&shared.try_unique().unwrap()[..], b"loligo");
    }

    #[test]
    fn every_size_is_aligned_apart_from_the_others_and_given_back() {
        let pool = BufferPool::new(256 << 20);
        let sizes = (0..=24).flat_map(|shift| [(1usize << shift) - 1, 1 << shift, (1 << shift) + 1]);
        let mut buffers = Vec::new();
        for len in sizes.filter(|len| *len <= BUFFER_LEN_MAX) {
            let buffer = pool.alloc(len).unwrap();
            assert!(buffer.capacity() >= len.max(512) && buffer.capacity() < 2 * len.max(512));
            let alignment = buffer.capacity().min(4096);
            assert_eq!(buffer.as_ptr() as usize % alignment, 0, "{len} bytes");
            buffers.push(buffer);
        }
        for (at, buffer) in buffers.iter_mut().enumerate() {
            buffer.fill(at as u8);
        }
        for (at, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|byte| *byte == at as u8), "buffer {at} was overwritten");
        }
        let mapped = pool.mapped();
        let lens: Vec<_> = buffers.drain(..).map(|buffer| buffer.len()).collect();
        let again: Vec<_> = lens.into_iter().map(|len| pool.alloc(len).unwrap()).collect();
        assert_eq!(pool.mapped(), mapped, "no more than before");
        drop(again);
    }

    #[test]
    fn what_large_buffers_have_mapped_serves_small_ones_later() {
        let pool = BufferPool::new(8 << 20);
        let large: Vec<_> = (0..8).map(|_| pool.alloc(1 << 20).unwrap()).collect();
        assert!(pool.alloc(4096).is_err(), "all in use");
        drop(large);
        let small: Vec<_> = (0..2048).map(|_| pool.alloc(4096).unwrap()).collect();
        let addresses: std::collections::BTreeSet<_> = small.iter().map(|buffer| buffer.as_ptr()).collect();
        assert_eq!((addresses.len(), pool.mapped()), (2048, 8 << 20));
        assert!(pool.alloc(4096).is_err());
        assert!(pool.alloc(1 << 20).is_err());
        let kept = small.into_iter().next().unwrap();
        assert_eq!(
            (0..4).filter(|_| pool.alloc(2 << 20).is_ok()).count(),
            4,
            "one at a time: three slabs are free"
        );
        assert_eq!(pool.slab_info(kept.slab()).map(|slab| slab.len), Some(2 << 20));
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the system says what is resident")]
    fn mapped_memory_is_not_resident_before_it_is_used() {
        let resident = || {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
        };
        let pool = BufferPool::new(256 << 20);
        let before = resident();
        let buffers: Vec<_> = (0..64).map(|_| pool.alloc(2 << 20).unwrap()).collect();
        // Other tests run beside this one: a wide margin.
        assert!(pool.is_huge() || resident() < before + (64 << 20), "of {} bytes", pool.mapped());
        drop(buffers);
    }

    proptest::proptest! {
        #[test]
        fn buffers_never_overlap(steps in proptest::collection::vec((0usize..40_000, 0usize..8), 1..200)) {
            let pool = BufferPool::new(4 << 20);
            let mut held: Vec<(Buffer, u8)> = Vec::new();
            for (at, (len, action)) in steps.into_iter().enumerate() {
                if action < 5 {
                    if let Ok(mut buffer) = pool.alloc(len) {
                        buffer.fill(at as u8);
                        held.push((buffer, at as u8));
                    }
                } else if !held.is_empty() {
                    held.swap_remove(len % held.len());
                }
            }
            for (buffer, mark) in &held {
                proptest::prop_assert!(buffer.iter().all(|byte| byte == mark));
            }
        }
    }
}
