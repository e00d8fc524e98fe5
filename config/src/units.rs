//! Units. Conversions are named and checked.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The store's and the wire's unit of data, checksums and atomicity: 4 KiB (RELIABILITY section 2.1).
pub const BLOCK_SIZE: u32 = 4096;
const BLOCK_SHIFT: u32 = BLOCK_SIZE.trailing_zeros();

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

unit!(/// The address of a 4 KiB block on a device, as the `BlockDevice` seam counts them. A back end whose
      /// device has other logical blocks converts.
      Lba(u64));
unit!(/// A number of 4 KiB blocks.
      BlockCount(u64));
unit!(/// A position in bytes, within an image, an object or a device.
      ByteOffset(u64));
unit!(/// A length in bytes.
      ByteLen(u64));

impl Lba {
    /// The block `count` further on; `None` past the end of 64 bits.
    pub fn checked_add(self, count: BlockCount) -> Option<Lba> {
        self.0.checked_add(count.0).map(Lba)
    }

    /// The block's first byte on the device; `None` past the end of 64 bits.
    pub fn to_bytes(self) -> Option<ByteOffset> {
        self.0.checked_mul(u64::from(BLOCK_SIZE)).map(ByteOffset)
    }
}

impl BlockCount {
    /// The length in bytes; `None` past the end of 64 bits.
    pub fn to_bytes(self) -> Option<ByteLen> {
        self.0.checked_mul(u64::from(BLOCK_SIZE)).map(ByteLen)
    }
}

impl ByteOffset {
    /// The block that holds this byte, counted from the same origin.
    pub fn block_index(self) -> u64 {
        self.0 >> BLOCK_SHIFT
    }

    /// How far into its block this byte is.
    pub fn within_block(self) -> u32 {
        (self.0 & u64::from(BLOCK_SIZE - 1)) as u32
    }

    /// The position `len` further on; `None` past the end of 64 bits.
    pub fn checked_add(self, len: ByteLen) -> Option<ByteOffset> {
        self.0.checked_add(len.0).map(ByteOffset)
    }
}

impl ByteLen {
    /// The whole blocks that it takes to hold this many bytes.
    pub fn blocks_up(self) -> BlockCount {
        BlockCount(self.0.div_ceil(u64::from(BLOCK_SIZE)))
    }

    /// The whole blocks that fit into this many bytes.
    pub fn blocks_down(self) -> BlockCount {
        BlockCount(self.0 >> BLOCK_SHIFT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_round_as_named_and_refuse_overflow() {
        assert_eq!(ByteLen(4097).blocks_up(), BlockCount(2));
        assert_eq!(ByteLen(4097).blocks_down(), BlockCount(1));
        assert_eq!(ByteOffset(8191).block_index(), 1);
        assert_eq!(ByteOffset(8191).within_block(), 4095);
        assert_eq!(Lba(1 << 52).to_bytes(), None);
        assert_eq!(Lba(u64::MAX).checked_add(BlockCount(1)), None);
        assert_eq!(ByteOffset(u64::MAX).checked_add(ByteLen(1)), None);
    }
}
