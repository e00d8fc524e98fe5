//! What a controller and its namespaces are, read from the device and checked.

use crate::spec::identify::{IdentifyController, IdentifyNamespace};
use loligo_config::units::{BLOCK_SIZE, BlockCount};
use loligo_reactor::env::WriteCache;

const BLOCK_SHIFT: u32 = BLOCK_SIZE.trailing_zeros();
/// Largest transfer of one command, whatever the controller allows: what one page of PRP entries describes.
pub const TRANSFER_LEN_MAX: u32 = 2 << 20;
/// Namespaces that are looked at. Guessed: a drive for this use has one.
pub const NAMESPACES_MAX: usize = 64;

/// A controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerFacts {
    /// What it says about itself.
    pub identity: IdentifyController,
    /// Its version register.
    pub version: (u16, u8, u8),
    /// I/O queue pairs that it has granted.
    pub queue_pairs: u16,
    /// Most entries of a queue.
    pub queue_entries_max: u32,
    /// Largest transfer of one command, in bytes: at most [`TRANSFER_LEN_MAX`].
    pub transfer_len_max: u32,
    /// Largest Write Zeroes of one command, in bytes.
    pub zeroes_len_max: u64,
    /// Whether acknowledged writes can be lost; unknown counts as yes.
    pub write_cache: WriteCache,
    /// Its namespaces that can be used, by number.
    pub namespaces: Vec<NamespaceFacts>,
    /// Its other namespaces, and why they cannot.
    pub unusable: Vec<(u32, Unusable)>,
}

/// A namespace that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceFacts {
    /// Its number.
    pub nsid: u32,
    /// What it says about itself.
    pub identity: IdentifyNamespace,
    /// Whole 4 KiB blocks.
    pub blocks: BlockCount,
    /// A 4 KiB block is 2^n logical blocks.
    pub lba_per_block_shift: u32,
    /// 4 KiB blocks that are written all or nothing across a power failure; 0 if not even one is.
    pub atomic_blocks: BlockCount,
}

/// Why a namespace cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// It names a format that it does not have.
    #[error("its identify data make no sense")]
    Malformed,
    /// Neither 512 to 4096 bytes.
    #[error("its logical blocks are of 2^{shift} bytes, and 512 to 4096 are supported")]
    BlockSize {
        /// LBADS.
        shift: u8,
    },
    /// Blocks with metadata or protection information.
    #[error("it has {len} bytes of metadata with each block: format it without (`nvme format --lbaf`)")]
    Metadata {
        /// MS.
        len: u16,
    },
    /// Write protected.
    #[error("it is write protected")]
    WriteProtected,
    /// Shorter than a block, or longer than numbers go.
    #[error("it has {blocks} logical blocks")]
    Size {
        /// NSZE.
        blocks: u64,
    },
    /// The controller refused to describe it.
    #[error("the controller does not describe it")]
    Refused,
}

impl NamespaceFacts {
    /// Checks what the controller says about a namespace.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn new(nsid: u32, data: &[u8], controller: &IdentifyController) -> Result<Self, Unusable> {
        let identity = IdentifyNamespace::parse(data).ok_or(Unusable::Malformed)?;
        let shift = identity.lba_shift;
        if !(9..=BLOCK_SHIFT as u8).contains(&shift) {
            return Err(Unusable::BlockSize { shift });
        }
        if identity.metadata_len != 0 || identity.protection != 0 {
            return Err(Unusable::Metadata { len: identity.metadata_len });
        }
        if identity.write_protected {
            return Err(Unusable::WriteProtected);
        }
        let lba_per_block_shift = BLOCK_SHIFT - u32::from(shift);
        let blocks = identity.blocks >> lba_per_block_shift;
        // Byte offsets of the whole namespace fit into 64 bits.
        if blocks == 0 || blocks > u64::MAX >> BLOCK_SHIFT {
            return Err(Unusable::Size { blocks: identity.blocks });
        }
        let atomic_blocks = atomic_blocks(&identity, controller, lba_per_block_shift);
        Ok(Self { nsid, identity, blocks: BlockCount(blocks), lba_per_block_shift, atomic_blocks })
    }

    /// Bytes of its logical block.
    pub fn logical_block(&self) -> u32 {
        1 << self.identity.lba_shift
    }
}

/// AWUPF, or the namespace's own NAWUPF, in 4 KiB blocks; never across a boundary (NVM 1.0 §2.1.4.3).
fn atomic_blocks(namespace: &IdentifyNamespace, controller: &IdentifyController, shift: u32) -> BlockCount {
    let unit = namespace.atomic_power_fail_blocks.unwrap_or(controller.atomic_power_fail_blocks);
    let whole = u64::from(unit >> shift);
    let Some(boundary) = namespace.atomic_boundary_blocks else {
        return BlockCount(whole);
    };
    // A 4 KiB block crosses no boundary that lies on multiples of it. More than one block might.
    let aligned = (boundary | namespace.atomic_boundary_offset).is_multiple_of(1 << shift);
    BlockCount(if aligned { whole.min(1) } else { 0 })
}

/// Largest transfer of one command: MDTS within what one PRP list describes.
pub fn transfer_len_max(identity: &IdentifyController, page_shift_min: u32) -> u32 {
    identity.transfer_len_max(page_shift_min).unwrap_or(TRANSFER_LEN_MAX).clamp(BLOCK_SIZE, TRANSFER_LEN_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(lba_shift: u8) -> Vec<u8> {
        let mut data = vec![0; 4096];
        data[..8].copy_from_slice(&80u64.to_le_bytes());
        data[130] = lba_shift;
        data
    }

    #[test]
    fn sizes_are_in_blocks_of_4_kib() {
        let controller = IdentifyController { atomic_power_fail_blocks: 1, ..Default::default() };
        let facts = NamespaceFacts::new(1, &namespace(9), &controller).unwrap();
        assert_eq!(
            (facts.blocks, facts.lba_per_block_shift, facts.logical_block()),
            (BlockCount(10), 3, 512)
        );
        assert_eq!(facts.atomic_blocks, BlockCount(0), "512 bytes are atomic, 4 KiB are not");
        let facts = NamespaceFacts::new(1, &namespace(12), &controller).unwrap();
        assert_eq!(
            (facts.blocks, facts.lba_per_block_shift, facts.logical_block()),
            (BlockCount(80), 0, 4096)
        );
        assert_eq!(facts.atomic_blocks, BlockCount(1));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let controller = IdentifyController::default();
        let refusal = |data: Vec<u8>| NamespaceFacts::new(1, &data, &controller).unwrap_err();
        assert_eq!(refusal(namespace(8)), Unusable::BlockSize { shift: 8 });
        assert_eq!(refusal(namespace(13)), Unusable::BlockSize { shift: 13 });
        let mut data = namespace(12);
        data[128] = 8;
        assert_eq!(refusal(data), Unusable::Metadata { len: 8 });
        let mut data = namespace(12);
        data[26] = 3;
        assert_eq!(refusal(data), Unusable::Malformed);
        let mut data = namespace(9);
        data[..8].copy_from_slice(&7u64.to_le_bytes());
        assert_eq!(refusal(data), Unusable::Size { blocks: 7 });
        let mut data = namespace(12);
        data[..8].fill(0xff);
        assert!(matches!(refusal(data), Unusable::Size { .. }));
        let mut data = namespace(9);
        data[99] = 1;
        assert_eq!(refusal(data), Unusable::WriteProtected);
    }

    #[test]
    fn atomicity_obeys_boundaries() {
        let controller = IdentifyController { atomic_power_fail_blocks: 32, ..Default::default() };
        let atomic = |unit, boundary, offset| {
            let identity = IdentifyNamespace {
                atomic_power_fail_blocks: unit,
                atomic_boundary_blocks: boundary,
                atomic_boundary_offset: offset,
                ..Default::default()
            };
            atomic_blocks(&identity, &controller, 3).0
        };
        assert_eq!(atomic(None, None, 0), 4);
        assert_eq!(atomic(Some(8), None, 0), 1);
        assert_eq!(atomic(Some(7), None, 0), 0);
        assert_eq!(atomic(None, Some(16), 0), 1);
        assert_eq!(atomic(None, Some(16), 4), 0);
        assert_eq!(atomic(None, Some(12), 0), 0);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_facts_or_a_refusal(data: Vec<u8>, identity: Vec<u8>) {
            let controller = IdentifyController::parse(&identity);
            if let Ok(facts) = NamespaceFacts::new(1, &data, &controller) {
                proptest::prop_assert!(facts.blocks.to_bytes().is_some());
            }
            let len = transfer_len_max(&controller, 12);
            proptest::prop_assert!((4096..=TRANSFER_LEN_MAX).contains(&len));
        }
    }
}
