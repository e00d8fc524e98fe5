//! Blocks that name the write that made them.
//!
//! Every 4 KiB block carries its own number, the number of the write, the seed of the run and a checksum; the rest is
//! derived from these, so that a mix of two writes, a block at a wrong place or one of another run is noticed.

use crate::random::Random;

/// Bytes of a block.
pub const BLOCK: usize = 4096;
const MAGIC: u64 = 0x4c4f_4c49_474f_5354;

/// Which write a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stamp {
    /// Never written, or discarded: all zeroes.
    Zero,
    /// The write with this number, from 1.
    Write(u64),
}

impl std::fmt::Display for Stamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Zero => f.pad("zeroes"),
            Self::Write(number) => write!(f, "write {number}"),
        }
    }
}

/// Words at the begin of a block: the magic number, its own number, the write's, the seed.
const HEAD: usize = 4;

/// Fills `block`, or a sector of one, as write `number` of block `index` in the run `seed`.
///
/// # Panics
/// If it is not made of whole words, or of too few.
pub fn fill(block: &mut [u8], index: u64, number: u64, seed: u64) {
    assert!(block.len() > HEAD * 8 && block.len().is_multiple_of(8), "a stamp fills a block or a sector");
    for (word, value) in block.chunks_exact_mut(8).zip(words(index, number, seed)) {
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// What a block is made of: its head, and then words in even steps from one that the head determines. No two writes have
/// a word in common at the same place but by chance, and it costs an addition a word.
fn words(index: u64, number: u64, seed: u64) -> impl Iterator<Item = u64> {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let first = Random::new(seed ^ index.rotate_left(20) ^ number.rotate_left(40)).next_u64();
    let rest = (0u64..).map(move |at| first.wrapping_add(at.wrapping_mul(STEP)));
    [MAGIC, index, number, seed].into_iter().chain(rest)
}

/// Reads which write block `index` holds.
///
/// # Errors
/// In words, when it is not exactly one write of this block and run.
pub fn read(block: &[u8], index: u64, seed: u64) -> Result<Stamp, String> {
    if block.iter().all(|byte| *byte == 0) {
        return Ok(Stamp::Zero);
    }
    let word = |at: usize| u64::from_le_bytes(block[at * 8..at * 8 + 8].try_into().expect("eight bytes"));
    if word(0) != MAGIC || word(3) != seed {
        return Err(format!("block {index} holds bytes that this run never wrote"));
    }
    if word(1) != index {
        return Err(format!("block {index} holds a write of block {}", word(1)));
    }
    let number = word(2);
    let found = block.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    match found.zip(words(index, number, seed)).position(|(found, expected)| found != expected) {
        None => Ok(Stamp::Write(number)),
        Some(at) => {
            let at = at * 8;
            Err(format!("block {index} is write {number} mixed with something else from byte {at} on"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_read_back_and_nothing_else_passes() {
        let mut block = vec![0; BLOCK];
        assert_eq!(read(&block, 7, 1), Ok(Stamp::Zero));
        fill(&mut block, 7, 42, 1);
        assert_eq!(read(&block, 7, 1), Ok(Stamp::Write(42)));
        assert!(read(&block, 8, 1).unwrap_err().contains("a write of block 7"));
        assert!(read(&block, 7, 2).is_err());
        let mut torn = block.clone();
        let mut newer = vec![0; BLOCK];
        fill(&mut newer, 7, 43, 1);
        torn[512..].copy_from_slice(&newer[512..]);
        assert!(read(&torn, 7, 1).unwrap_err().contains("mixed"));
        block[4095] ^= 1;
        assert!(read(&block, 7, 1).is_err());
    }
}
