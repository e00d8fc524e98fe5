//! The reactor's buffers as the controller sees them: addresses, and lists of pages (PRPs, NVMe Base 2.0 §4.1.1).

use crate::bus::{Bus, BusError};
use crate::queue::{DmaRange, Region};
use crate::spec::PAGE_LEN;
use loligo_reactor::dma::{Buffer, BufferPool, SharedBuffer};

/// The slabs of a pool that the controller can reach. One is mapped when a buffer of it is used first.
pub(super) struct PoolMap {
    /// Keeps the slabs in place as long as they are mapped.
    pool: BufferPool,
    slabs: Vec<Option<Mapped>>,
}

#[derive(Clone, Copy)]
struct Mapped {
    base: usize,
    len: usize,
    iova: u64,
}

impl PoolMap {
    pub(super) fn new(pool: &BufferPool) -> Self {
        Self { pool: pool.clone(), slabs: Vec::new() }
    }

    pub(super) fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// Whether a buffer lies in this pool.
    pub(super) fn owns(&self, slab: usize, bytes: &[u8]) -> bool {
        let (base, len) = match self.slabs.get(slab) {
            Some(Some(mapped)) => (mapped.base, mapped.len),
            _ => match self.pool.slab_info(slab) {
                Some(info) => (info.base as usize, info.len),
                None => return false,
            },
        };
        let start = (bytes.as_ptr() as usize).wrapping_sub(base);
        start <= len && bytes.len() <= len - start
    }

    /// The controller's address of bytes that [`PoolMap::owns`].
    pub(super) fn iova<B: Bus>(&mut self, bus: &B, slab: usize, bytes: &[u8]) -> Result<u64, BusError> {
        let mapped = match self.slabs.get(slab) {
            Some(Some(mapped)) => *mapped,
            _ => self.map(bus, slab)?,
        };
        let offset = (bytes.as_ptr() as usize).wrapping_sub(mapped.base);
        assert!(offset <= mapped.len, "a buffer lies in the slab that it names");
        Ok(mapped.iova + offset as u64)
    }

    #[allow(unsafe_code)]
    fn map<B: Bus>(&mut self, bus: &B, slab: usize) -> Result<Mapped, BusError> {
        let info = self.pool.slab_info(slab).expect("a buffer names a slab of its pool");
        let range = DmaRange { base: info.base, len: info.len };
        // SAFETY: slabs are never unmapped before their pool, which `self` keeps until `unmap` or for ever. A buffer
        // that the device may write is owned by the operation in flight, and nobody has a reference to its bytes.
        let iova = unsafe { bus.map(range)? };
        let mapped = Mapped { base: info.base as usize, len: info.len, iova };
        if self.slabs.len() <= slab {
            self.slabs.resize(slab + 1, None);
        }
        self.slabs[slab] = Some(mapped);
        Ok(mapped)
    }

    /// Ends all mappings. Nothing is in flight.
    pub(super) fn unmap<B: Bus>(&mut self, bus: &B) {
        for mapped in self.slabs.drain(..).flatten() {
            bus.unmap(mapped.iova, mapped.len);
        }
    }
}

/// Whether the controller can be given these pieces as pages: each begins on one and is whole ones.
pub(super) fn is_paged(pieces: &[SharedBuffer]) -> bool {
    pieces.iter().all(|piece| is_page_aligned(piece))
}

/// Whether bytes begin on a page and are whole ones.
pub(super) fn is_page_aligned(bytes: &[u8]) -> bool {
    (bytes.as_ptr() as usize).is_multiple_of(PAGE_LEN) && bytes.len().is_multiple_of(PAGE_LEN)
}

/// A copy of pieces in one buffer of this pool; `None` when the pool is exhausted.
pub(super) fn gather(pool: &BufferPool, pieces: &[SharedBuffer]) -> Option<Buffer> {
    let mut whole = pool.alloc(pieces.iter().map(|piece| piece.len()).sum()).ok()?;
    let mut at = 0;
    for piece in pieces {
        whole[at..at + piece.len()].copy_from_slice(piece);
        at += piece.len();
    }
    Some(whole)
}

/// Builds the two PRP entries of a command page by page; from the third page on in a list in memory.
pub(super) struct PrpList<'list> {
    memory: &'list Region,
    offset: usize,
    first: u64,
    second: u64,
    count: usize,
}

impl<'list> PrpList<'list> {
    /// With room for a list at `offset`.
    pub(super) fn new(memory: &'list Region, offset: usize) -> Self {
        Self { memory, offset, first: 0, second: 0, count: 0 }
    }

    /// Adds a page.
    pub(super) fn push(&mut self, page: u64) {
        match self.count {
            0 => self.first = page,
            1 => self.second = page,
            count => {
                if count == 2 {
                    self.memory.write_u64(self.offset, self.second);
                    self.second = self.memory.iova(self.offset);
                }
                self.memory.write_u64(self.offset + 8 * (count - 1), page);
            }
        }
        self.count += 1;
    }

    /// Adds the pages of a run that the controller sees in one piece.
    pub(super) fn push_run(&mut self, iova: u64, pages: usize) {
        for page in 0..pages {
            self.push(iova + (page * PAGE_LEN) as u64);
        }
    }

    /// PRP entries 1 and 2.
    pub(super) fn entries(&self) -> (u64, u64) {
        (self.first, self.second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_two_and_many_pages() {
        let memory = Region::new(8192).unwrap();
        let mut list = PrpList::new(&memory, 4096);
        list.push(0x1000);
        assert_eq!(list.entries(), (0x1000, 0));
        list.push(0x5000);
        assert_eq!(list.entries(), (0x1000, 0x5000));
        list.push_run(0x9000, 2);
        assert_eq!(list.entries(), (0x1000, memory.iova(4096)));
        assert_eq!([0, 8, 16].map(|at| memory.read_u64(4096 + at)), [0x5000, 0x9000, 0xa000]);
    }

    #[test]
    fn pieces_off_their_pages_are_gathered() {
        let pool = BufferPool::new(8 << 20);
        let whole = pool.copy_of(&[7; 8192]).unwrap();
        assert!(is_paged(&[whole.slice(4096..8192), whole.clone()]));
        let odd = [whole.slice(512..4608)];
        assert!(!is_paged(&odd) && !is_paged(&[whole.slice(0..512)]));
        let copy = gather(&pool, &odd).unwrap();
        assert!(is_page_aligned(&copy) && copy.iter().all(|byte| *byte == 7));
        let map = PoolMap::new(&pool);
        assert!(map.owns(copy.slab(), &copy));
        assert!(!PoolMap::new(&BufferPool::new(8 << 20)).owns(copy.slab(), &copy));
    }
}
