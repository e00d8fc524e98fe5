//! The pages of a checkpoint. A stream of bytes is cut into pages that are chained by address, so that it needs no
//! contiguous space.
//!
//! Payload: the next page's address (0: the last), the checkpoint's number, the stream's tag, the length, the data.

use super::codec::{BLOCK, BlockKind, HEAD, Identity, open, seal};

/// Data bytes of one page.
pub(super) const PAGE_DATA: usize = BLOCK - HEAD - 32;

/// What a stream holds; part of every page, so that a page of another stream does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    Root,
    Bucket(u32),
    Table(u32),
    Pg,
    PgLog,
    Map,
}

impl Tag {
    fn to_u64(self) -> u64 {
        let (kind, number) = match self {
            Tag::Root => (1, 0),
            Tag::Bucket(number) => (2, number),
            Tag::Table(number) => (3, number),
            Tag::Pg => (4, 0),
            Tag::PgLog => (5, 0),
            Tag::Map => (6, 0),
        };
        kind << 32 | u64::from(number)
    }
}

/// Pages that so many bytes take: at least one.
pub(super) fn pages_for(len: usize) -> usize {
    len.div_ceil(PAGE_DATA).max(1)
}

/// Fills one page's block.
pub(super) fn encode(
    block: &mut [u8],
    identity: &Identity,
    lba: u64,
    next: u64,
    checkpoint: u64,
    tag: Tag,
    data: &[u8],
) {
    assert!(data.len() <= PAGE_DATA);
    block[HEAD..HEAD + 8].copy_from_slice(&next.to_le_bytes());
    block[HEAD + 8..HEAD + 16].copy_from_slice(&checkpoint.to_le_bytes());
    block[HEAD + 16..HEAD + 24].copy_from_slice(&tag.to_u64().to_le_bytes());
    block[HEAD + 24..HEAD + 32].copy_from_slice(&(data.len() as u64).to_le_bytes());
    block[HEAD + 32..HEAD + 32 + data.len()].copy_from_slice(data);
    block[HEAD + 32 + data.len()..].fill(0);
    seal(block, BlockKind::Page, identity, lba);
}

/// A page read back.
#[derive(Debug)]
pub(super) struct Page<'a> {
    pub next: u64,
    pub checkpoint: u64,
    pub data: &'a [u8],
}

pub(super) fn decode<'a>(block: &'a [u8], identity: &Identity, lba: u64, tag: Tag) -> Option<Page<'a>> {
    let mut take = open(block, BlockKind::Page, identity, lba)?;
    let (next, checkpoint, found, len) = (take.u64()?, take.u64()?, take.u64()?, take.u64()?);
    let data = take.bytes(usize::try_from(len).ok()?)?;
    (found == tag.to_u64()).then_some(Page { next, checkpoint, data })
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_config::id::{ClusterId, DeviceId, OsdId, ShardId};

    #[test]
    fn a_page_of_another_stream_does_not_pass() {
        let id = uuid::Uuid::from_u128(1);
        let identity =
            Identity { cluster: ClusterId(id), osd: OsdId(0), device: DeviceId(id), shard: ShardId(0) };
        let mut block = vec![9; BLOCK];
        encode(&mut block, &identity, 5, 6, 7, Tag::Bucket(3), b"squid");
        let page = decode(&block, &identity, 5, Tag::Bucket(3)).unwrap();
        assert_eq!((page.next, page.checkpoint, page.data), (6, 7, &b"squid"[..]));
        assert!(decode(&block, &identity, 5, Tag::Bucket(4)).is_none());
        assert!(decode(&block, &identity, 5, Tag::Root).is_none());
        assert_eq!((pages_for(0), pages_for(PAGE_DATA), pages_for(PAGE_DATA + 1)), (1, 1, 2));
    }
}
