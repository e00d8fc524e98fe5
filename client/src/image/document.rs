//! How a header or a directory is stored in its object: padded to whole blocks, and able to say what it is.
//!
//! ```text
//!  0        8        10     12     16     20     24                 32
//!  +--------+--------+------+------+------+------+------------------+-----------+---------+
//!  | magic  | format | kind | len  | crc  | 0    | 0                | postcard  | zeroes  |
//!  +--------+--------+------+------+------+------+------------------+-----------+---------+
//! ```
//!
//! All little-endian; `len` counts the postcard bytes; `crc` is the CRC-32C of the whole head, with zero in its own
//! place, and the postcard bytes. One write op carries the whole, so it is replaced as one.

use crc_fast::{CrcAlgorithm, Digest};
use loligo_config::limits::OP_DATA_LEN_MAX;
use loligo_config::units::BLOCK_SIZE;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes before the postcard part.
pub const HEAD_LEN: usize = 32;
/// The format version that this program writes, and the only one that it reads: 0 carries no promise.
pub const FORMAT: u16 = 0;
/// Largest document with its head, in bytes: one op.
pub const DOCUMENT_LEN_MAX: usize = OP_DATA_LEN_MAX as usize;

const MAGIC: [u8; 8] = *b"LOLIGODC";
const CRC_AT: std::ops::Range<usize> = 16..20;

/// What a document is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum DocumentKind {
    /// An image's header.
    Header = 1,
    /// A pool's directory of images.
    Directory = 2,
}

/// A value that is stored as a document.
pub trait Document: Serialize + DeserializeOwned {
    /// What it is.
    const KIND: DocumentKind;

    /// Whether its values are in range: what was read is checked before it is used.
    fn is_valid(&self) -> bool;
}

/// Why bytes are not a document of the expected kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// Not a document at all.
    #[error("there is something else in its place")]
    Foreign,
    /// A newer format.
    #[error("it has format {0}, this program knows format {FORMAT}: use a newer one")]
    Format(u16),
    /// Another kind of document.
    #[error("it is of another kind ({0})")]
    Kind(u16),
    /// Its length is out of range.
    #[error("its length is out of range")]
    Length,
    /// Its checksum is wrong.
    #[error("its checksum is wrong")]
    Checksum,
    /// Its contents make no sense.
    #[error("its contents make no sense")]
    Contents,
}

/// The document does not fit into one op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the document does not fit into {DOCUMENT_LEN_MAX} bytes")]
pub struct TooLarge;

/// The document in whole blocks.
///
/// # Errors
/// When it does not fit into one op.
pub fn encode<D: Document>(document: &D) -> Result<Vec<u8>, TooLarge> {
    let mut bytes = vec![0; HEAD_LEN];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&FORMAT.to_le_bytes());
    bytes[10..12].copy_from_slice(&(D::KIND as u16).to_le_bytes());
    let mut bytes = postcard::to_extend(document, bytes).map_err(|_| TooLarge)?;
    if bytes.len() > DOCUMENT_LEN_MAX {
        return Err(TooLarge);
    }
    let len = u32::try_from(bytes.len() - HEAD_LEN).map_err(|_| TooLarge)?;
    bytes[12..16].copy_from_slice(&len.to_le_bytes());
    let crc = checksum(&bytes);
    bytes[CRC_AT].copy_from_slice(&crc.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(BLOCK_SIZE as usize), 0);
    Ok(bytes)
}

/// The whole length in bytes, head included, of the document that begins with `head`.
///
/// # Errors
/// When it is no document of this kind and format.
pub fn total_len(head: &[u8], kind: DocumentKind) -> Result<usize, DocumentError> {
    let head: &[u8; HEAD_LEN] = head.first_chunk().ok_or(DocumentError::Length)?;
    if head[..8] != MAGIC {
        return Err(DocumentError::Foreign);
    }
    let format = u16::from_le_bytes([head[8], head[9]]);
    if format != FORMAT {
        return Err(DocumentError::Format(format));
    }
    let found = u16::from_le_bytes([head[10], head[11]]);
    if found != kind as u16 {
        return Err(DocumentError::Kind(found));
    }
    let len = u32::from_le_bytes([head[12], head[13], head[14], head[15]]) as usize;
    if len > DOCUMENT_LEN_MAX - HEAD_LEN {
        return Err(DocumentError::Length);
    }
    Ok(HEAD_LEN + len)
}

/// The document in `bytes`; what follows it is not looked at.
///
/// # Errors
/// When it is none, is damaged or holds values out of range.
pub fn decode<D: Document>(bytes: &[u8]) -> Result<D, DocumentError> {
    let total = total_len(bytes, D::KIND)?;
    let bytes = bytes.get(..total).ok_or(DocumentError::Length)?;
    let stored = bytes.get(CRC_AT).and_then(|crc| crc.try_into().ok()).map(u32::from_le_bytes);
    if stored != Some(checksum(bytes)) {
        return Err(DocumentError::Checksum);
    }
    let (document, rest) =
        postcard::take_from_bytes::<D>(&bytes[HEAD_LEN..]).map_err(|_| DocumentError::Contents)?;
    if !rest.is_empty() || !document.is_valid() {
        return Err(DocumentError::Contents);
    }
    Ok(document)
}

fn checksum(bytes: &[u8]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(&bytes[..CRC_AT.start]);
    digest.update(&[0; 4]);
    digest.update(&bytes[CRC_AT.end..]);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::directory::{Directory, DirectoryEntry};
    use crate::image::header::{CreateOptions, Features, ImageHeader};
    use loligo_config::id::ImageId;

    fn directory() -> Directory {
        let mut directory = Directory::default();
        directory.images.insert("vm".into(), DirectoryEntry { id: ImageId(5), removing: false });
        directory
    }

    #[test]
    fn a_directory_has_these_bytes() {
        let bytes = encode(&directory()).unwrap();
        assert_eq!(bytes.len(), 4096);
        assert_eq!(&bytes[..16], b"LOLIGODC\0\0\x02\0\x06\0\0\0");
        assert_eq!(bytes[20..32], [0; 12]);
        assert_eq!(&bytes[32..38], b"\x01\x02vm\x05\0");
        assert!(bytes[38..].iter().all(|byte| *byte == 0));
        assert_eq!(decode::<Directory>(&bytes), Ok(directory()));
        assert_eq!(decode::<ImageHeader>(&bytes), Err(DocumentError::Kind(2)));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let bytes = encode(&directory()).unwrap();
        for bit in 0..38 * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(decode::<Directory>(&damaged).is_err(), "bit {bit}");
        }
        for len in 0..38 {
            assert!(decode::<Directory>(&bytes[..len]).is_err());
        }
    }

    #[test]
    fn headers_keep_everything_and_bad_values_are_refused() {
        let header = ImageHeader::new("vm", ImageId(7), CreateOptions { size: 1 << 30, order: 22 }, 99);
        assert_eq!(decode(&encode(&header).unwrap()), Ok(header.clone()));
        let bad = ImageHeader { order: 40, ..header.clone() };
        assert_eq!(decode::<ImageHeader>(&encode(&bad).unwrap()), Err(DocumentError::Contents));
        assert_eq!(header.block_name_prefix(), "rbd_data.7");
        let names: Vec<_> = Features(0b11101).names().collect();
        assert_eq!(names, ["layering", "exclusive-lock", "object-map", "fast-diff"]);
    }

    #[test]
    fn what_does_not_fit_into_one_op_is_refused() {
        let mut directory = Directory::default();
        for number in 0..20_000 {
            directory
                .images
                .insert(format!("{number:060}"), DirectoryEntry { id: ImageId(1), removing: false });
        }
        assert_eq!(encode(&directory), Err(TooLarge));
    }
}
