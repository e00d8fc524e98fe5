//! CRC-32C, the checksum of headers, data pieces and stored blocks.

use loligo_config::units::BLOCK_SIZE;

/// The CRC-32C of a block of zeroes.
pub const ZERO_BLOCK_CRC: u32 = 0x98F9_4189;

/// The CRC-32C (Castagnoli, as iSCSI uses it) of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// In how many pieces `data_len` bytes are cut whose first byte is `within_block` bytes into its block.
pub fn piece_count(data_len: usize, within_block: u32) -> usize {
    if data_len == 0 {
        return 0;
    }
    data_len.saturating_add(within_block as usize).div_ceil(BLOCK_SIZE as usize)
}

/// Where piece `index` ends in the data. The last piece ends with the data.
pub(crate) fn piece_end(index: usize, data_len: usize, within_block: u32) -> usize {
    ((index + 1) * BLOCK_SIZE as usize).saturating_sub(within_block as usize).min(data_len)
}

/// The pieces of `data`, cut at the block boundaries of its object. `within_block` is below 4096.
pub fn pieces(data: &[u8], within_block: u32) -> impl Iterator<Item = &[u8]> {
    let first = (BLOCK_SIZE.saturating_sub(within_block) as usize).min(data.len());
    let (head, rest) = data.split_at(first);
    std::iter::once(head).filter(|piece| !piece.is_empty()).chain(rest.chunks(BLOCK_SIZE as usize))
}

/// Writes the checksum of every piece into `out`, four bytes each, little-endian.
pub fn write_checksums(data: &[u8], within_block: u32, out: &mut [u8]) {
    for (piece, slot) in pieces(data, within_block).zip(out.chunks_exact_mut(4)) {
        slot.copy_from_slice(&crc32c(piece).to_le_bytes());
    }
}

/// The checksums in a list of four little-endian bytes each.
pub fn read_checksums(list: &[u8]) -> impl ExactSizeIterator<Item = u32> {
    list.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_polynomial_is_castagnoli() {
        // RFC 3720 appendix B.4.
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0; 4096]), ZERO_BLOCK_CRC);
    }

    #[test]
    fn pieces_end_at_block_boundaries_of_the_object() {
        let data = [7; 10_000];
        let lens = |len, within| pieces(&data[..len], within).map(<[u8]>::len).collect::<Vec<_>>();
        assert_eq!(lens(0, 0), []);
        assert_eq!(lens(0, 100), []);
        assert_eq!(lens(100, 0), [100]);
        assert_eq!(lens(100, 4000), [96, 4]);
        assert_eq!(lens(96, 4000), [96]);
        assert_eq!(lens(8192, 0), [4096, 4096]);
        assert_eq!(lens(8192, 1), [4095, 4096, 1]);
        for (len, within) in [(0, 0), (0, 9), (1, 4095), (2, 4095), (4096, 0), (4096, 1), (9000, 4095)] {
            let lens = lens(len, within);
            assert_eq!(piece_count(len, within), lens.len(), "{len} at {within}");
            let mut end = 0;
            for (index, piece) in lens.iter().enumerate() {
                end += piece;
                assert_eq!(piece_end(index, len, within), end, "{len} at {within}");
            }
        }
    }

    #[test]
    fn the_list_of_checksums_reads_back() {
        let data: Vec<u8> = (0..9000u32).map(|i| i as u8).collect();
        let mut list = [0; 12];
        write_checksums(&data, 5, &mut list);
        let expected: Vec<u32> = pieces(&data, 5).map(crc32c).collect();
        assert_eq!(read_checksums(&list).collect::<Vec<_>>(), expected);
    }
}
