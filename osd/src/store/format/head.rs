//! The first blocks of a device: what is on it.

use super::Contents;
use crate::store::codec::{BLOCK, MAGIC};
use crate::store::layout::Superblock;
use loligo_config::units::Lba;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{DiskError, DiskOp};
use std::collections::VecDeque;

/// Blocks looked at to say what else is on a device: 72 KiB, where the superblocks of common file systems are.
const BLOCKS: u64 = 18;

/// The first blocks, read one by one: one that cannot be read must not hide the other copy of the superblock.
#[derive(Debug)]
pub(super) struct Head {
    bytes: Vec<u8>,
    missing: usize,
    /// The first block that could not be read.
    pub unreadable: Option<(u64, DiskError)>,
}

impl Head {
    /// For a device of so many blocks.
    pub fn new(blocks: u64) -> Self {
        let count = BLOCKS.min(blocks) as usize;
        Self { bytes: vec![0; count * BLOCK], missing: count, unreadable: None }
    }

    /// Queues its reads; false if there are no buffers for them.
    pub fn reads(&self, pool: &BufferPool, queue: &mut VecDeque<DiskOp>) -> bool {
        (0..self.missing as u64).all(|lba| {
            let buffer = pool.alloc(BLOCK).ok();
            queue.extend(buffer.map(|buffer| DiskOp::Read { lba: Lba(lba), buffer }));
            queue.back().is_some_and(|op| matches!(op, DiskOp::Read { lba: last, .. } if last.0 == lba))
        })
    }

    /// Takes a block that was read, or could not be; true when all have come.
    pub fn take(&mut self, lba: u64, block: Result<&[u8], DiskError>) -> bool {
        match block {
            Ok(block) => self.bytes[lba as usize * BLOCK..][..BLOCK].copy_from_slice(block),
            Err(error) => {
                self.unreadable.get_or_insert((lba, error));
            }
        }
        self.missing -= 1;
        self.missing == 0
    }

    /// What they say, as far as they could be read.
    pub fn contents(&self) -> Result<Superblock, Contents> {
        contents(&self.bytes)
    }
}

/// What the first blocks of a device say.
fn contents(head: &[u8]) -> Result<Superblock, Contents> {
    let copies = head.chunks_exact(BLOCK).zip(0u64..2);
    if let Some(found) = copies.filter_map(|(block, lba)| Superblock::decode(block, lba)).next() {
        return Ok(found);
    }
    if let Some(block) = head.chunks_exact(BLOCK).take(2).find(|block| block[..4] == MAGIC) {
        let found = u16::from_le_bytes([block[10], block[11]]);
        return Err(if found == crate::store::FORMAT {
            Contents::Damaged
        } else {
            Contents::OtherFormat { found }
        });
    }
    let has = |at: usize, magic: &[u8]| head.get(at..at + magic.len()) == Some(magic);
    // Places of the magic numbers as file(1) and libblkid know them.
    let foreign = [
        (1080, &b"\x53\xef"[..], "an ext2/3/4 file system"),
        (0, b"XFSB", "an XFS file system"),
        (65_600, b"_BHRfS_M", "a btrfs file system"),
        (512, b"EFI PART", "a GPT partition table"),
        (510, b"\x55\xaa", "an MBR partition table or boot sector"),
        (512, b"LABELONE", "an LVM physical volume"),
        (0, b"LUKS\xba\xbe", "a LUKS volume"),
        (4086, b"SWAPSPACE2", "swap space"),
        (0, b"bluestore block device", "a Ceph BlueStore device"),
        (0, b"QFI\xfb", "a qcow2 image"),
    ];
    if let Some((_, _, name)) = foreign.iter().find(|(at, magic, _)| has(*at, magic)) {
        return Err(Contents::Foreign(name));
    }
    // Claims are left when an mkfs over an older device did not end: it takes the superblocks away first.
    if head.chunks_exact(BLOCK).any(|block| block[..4] == MAGIC) {
        return Err(Contents::Damaged);
    }
    Err(if head.iter().all(|byte| *byte == 0) { Contents::Empty } else { Contents::Unknown })
}
