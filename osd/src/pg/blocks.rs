//! Block checksums and the merging of parts of blocks.

use loligo_config::units::BLOCK_SIZE;
use loligo_reactor::dma::{Buffer, BufferPool, PoolExhausted, SharedBuffer};
use std::ops::Range;

const BLOCK: usize = BLOCK_SIZE as usize;

/// CRC-32C (Castagnoli), as on the wire and on disk.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// A byte range of an object, split into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub offset: u32,
    /// Bytes; at least 1.
    pub len: u32,
}

impl Span {
    /// The byte after the last one.
    pub fn end(self) -> u32 {
        self.offset + self.len
    }

    /// The first block that it touches.
    pub fn first_block(self) -> u32 {
        self.offset / BLOCK_SIZE
    }

    /// How many blocks it touches.
    pub fn blocks(self) -> u32 {
        self.end().div_ceil(BLOCK_SIZE) - self.first_block()
    }

    /// Where it begins in its first block.
    pub fn within_block(self) -> usize {
        (self.offset % BLOCK_SIZE) as usize
    }

    /// Whether the first block is only partly in it, from its beginning on or at its end.
    pub fn has_partial_head(self) -> bool {
        self.within_block() != 0 || (self.blocks() == 1 && !self.end().is_multiple_of(BLOCK_SIZE))
    }

    /// Whether the last block, another one than the first, is only partly in it.
    pub fn has_partial_tail(self) -> bool {
        self.blocks() > 1 && !self.end().is_multiple_of(BLOCK_SIZE)
    }

    /// Whether it consists of whole blocks.
    pub fn is_whole_blocks(self) -> bool {
        !self.has_partial_head() && !self.has_partial_tail()
    }

    /// First block and count of the whole blocks in it.
    pub fn inner_blocks(self) -> (u32, u32) {
        let first = self.offset.div_ceil(BLOCK_SIZE);
        (first, (self.end() / BLOCK_SIZE).saturating_sub(first))
    }
}

/// Computes the checksums of whole blocks, as the store wants them.
///
/// # Errors
/// No buffer.
pub fn checksums_of(pool: &BufferPool, data: &[u8]) -> Result<SharedBuffer, PoolExhausted> {
    let mut list = pool.alloc(data.len().div_ceil(BLOCK) * 4)?;
    for (block, checksum) in data.chunks(BLOCK).zip(list.chunks_exact_mut(4)) {
        checksum.copy_from_slice(&crc32c(block).to_le_bytes());
    }
    Ok(list.freeze())
}

/// Zeroed blocks with their checksums.
///
/// # Errors
/// No buffer.
pub fn zeroes(pool: &BufferPool, blocks: u32) -> Result<(SharedBuffer, SharedBuffer), PoolExhausted> {
    let data = pool.alloc_zeroed(blocks as usize * BLOCK)?;
    let one = crc32c(&data[..BLOCK]).to_le_bytes();
    let mut list = pool.alloc(blocks as usize * 4)?;
    for checksum in list.chunks_exact_mut(4) {
        checksum.copy_from_slice(&one);
    }
    Ok((data.freeze(), list.freeze()))
}

/// A write that is not whole blocks, with the old contents of its first and last block on their way.
#[derive(Debug)]
pub struct Merge {
    span: Span,
    buffer: Buffer,
    /// Edge reads still to come.
    pub pending: u8,
}

impl Merge {
    /// Begins to merge: the new data, or zeroes, in a fresh buffer.
    ///
    /// # Errors
    /// No buffer.
    pub fn new(pool: &BufferPool, span: Span, data: Option<&[u8]>) -> Result<Self, PoolExhausted> {
        let mut buffer = pool.alloc_zeroed(span.blocks() as usize * BLOCK)?;
        if let Some(data) = data {
            let start = span.within_block();
            buffer[start..start + data.len()].copy_from_slice(data);
        }
        Ok(Self { span, buffer, pending: 0 })
    }

    /// Puts in what the edge block held outside the written range. `None`: zeroes.
    pub fn fill_edge(&mut self, is_tail: bool, old: Option<&[u8]>) {
        self.pending -= 1;
        let Some(old) = old else { return };
        let blocks = self.span.blocks() as usize;
        let base = if is_tail { (blocks - 1) * BLOCK } else { 0 };
        let start = self.span.within_block();
        let end = start + self.span.len as usize;
        for part in [base..start.clamp(base, base + BLOCK), end.clamp(base, base + BLOCK)..base + BLOCK] {
            let from: Range<usize> = part.start - base..part.end - base;
            self.buffer[part].copy_from_slice(&old[from]);
        }
    }

    /// The merged blocks and their checksums; those of whole blocks as they came over the wire (`given`).
    ///
    /// # Errors
    /// No buffer.
    pub fn finish(
        self,
        pool: &BufferPool,
        given: Option<&[u8]>,
    ) -> Result<(SharedBuffer, SharedBuffer), PoolExhausted> {
        let blocks = self.span.blocks() as usize;
        let mut list = pool.alloc(blocks * 4)?;
        for index in 0..blocks {
            let is_edge = (index == 0 && self.span.has_partial_head())
                || (index == blocks - 1 && self.span.has_partial_tail());
            let at = index * 4..index * 4 + 4;
            match given {
                Some(given) if !is_edge => list[at.clone()].copy_from_slice(&given[at]),
                _ => {
                    let checksum = crc32c(&self.buffer[index * BLOCK..(index + 1) * BLOCK]);
                    list[at].copy_from_slice(&checksum.to_le_bytes());
                }
            }
        }
        Ok((self.buffer.freeze(), list.freeze()))
    }
}

/// A part of blocks that were read, with the checksums of its pieces: those of whole blocks as they are stored.
///
/// # Errors
/// No buffer.
pub fn trim(
    pool: &BufferPool,
    span: Span,
    data: &SharedBuffer,
    checksums: &SharedBuffer,
) -> Result<(SharedBuffer, SharedBuffer), PoolExhausted> {
    let start = span.within_block();
    let part = data.slice(start..start + span.len as usize);
    if span.is_whole_blocks() {
        return Ok((part, checksums.clone()));
    }
    let blocks = span.blocks() as usize;
    let mut list = pool.alloc(blocks * 4)?;
    list.copy_from_slice(&checksums[..blocks * 4]);
    if span.has_partial_head() {
        let len = (BLOCK - start).min(part.len());
        list[..4].copy_from_slice(&crc32c(&part[..len]).to_le_bytes());
    }
    if span.has_partial_tail() {
        let len = (span.end() % BLOCK_SIZE) as usize;
        let crc = crc32c(&part[part.len() - len..]);
        list[(blocks - 1) * 4..].copy_from_slice(&crc.to_le_bytes());
    }
    Ok((part, list.freeze()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> BufferPool {
        BufferPool::new(64 << 20)
    }

    #[test]
    fn the_checksum_is_castagnolis() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn spans_know_their_edges() {
        for (offset, len, blocks, head, tail, inner) in [
            (0, 4096, 1, false, false, (0, 1)),
            (0, 4095, 1, true, false, (0, 0)),
            (1, 4095, 1, true, false, (1, 0)),
            (4095, 2, 2, true, true, (1, 0)),
            (4096, 8192, 2, false, false, (1, 2)),
            (4000, 8288, 3, true, false, (1, 2)),
            (4096, 4097, 2, false, true, (1, 1)),
        ] {
            let span = Span { offset, len };
            assert_eq!(span.blocks(), blocks, "{span:?}");
            assert_eq!(span.has_partial_head(), head, "{span:?}");
            assert_eq!(span.has_partial_tail(), tail, "{span:?}");
            assert_eq!(span.inner_blocks(), inner, "{span:?}");
        }
    }

    /// Every start and end around block borders, against a plain byte array.
    #[test]
    fn merging_and_trimming_equal_a_byte_array() {
        let pool = pool();
        let old: Vec<u8> = (0..4 * BLOCK).map(|at| (at % 251) as u8).collect();
        let edges = [0, 1, 4095, 4096, 4097, 8191, 8192, 8193, 12_288, 16_383];
        for offset in edges {
            for end in edges.into_iter().chain([16_384]).filter(|end| *end > offset) {
                let span = Span { offset, len: end - offset };
                let new = vec![0xee; span.len as usize];
                let mut merge = Merge::new(&pool, span, Some(&new)).unwrap();
                let first = span.first_block() as usize * BLOCK;
                let last = (span.first_block() + span.blocks() - 1) as usize * BLOCK;
                if span.has_partial_head() {
                    merge.pending += 1;
                    merge.fill_edge(false, Some(&old[first..first + BLOCK]));
                }
                if span.has_partial_tail() {
                    merge.pending += 1;
                    merge.fill_edge(true, Some(&old[last..last + BLOCK]));
                }
                let (data, checksums) = merge.finish(&pool, None).unwrap();
                let mut want = old.clone();
                want[offset as usize..end as usize].fill(0xee);
                assert_eq!(&data[..], &want[first..last + BLOCK], "{span:?}");
                assert_eq!(&checksums[..], &checksums_of(&pool, &data).unwrap()[..]);

                let (part, pieces) = trim(&pool, span, &data, &checksums).unwrap();
                assert_eq!(&part[..], &new[..]);
                let first_len = (BLOCK - span.within_block()).min(part.len());
                assert_eq!(pieces[..4], crc32c(&part[..first_len]).to_le_bytes());
                assert_eq!(pieces.len(), span.blocks() as usize * 4);
            }
        }
    }
}
