//! The data of `List` and `Watchers` replies: little-endian, no object data.

use loligo_config::id::{Epoch, ObjectVersion, SessionId};

/// Entries of one `List` reply at most: 32 KiB. The cursor leads on.
pub const LIST_ENTRIES_MAX: usize = 1024;
/// Bytes of a list's head: where to go on.
pub const LIST_HEAD_LEN: usize = 8;
/// Bytes of one session in a `Watchers` reply.
pub const SESSION_LEN: usize = 8;
/// The cursor of the last page.
const END: u64 = u64::MAX;

/// An object of the image that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectEntry {
    /// Its number in the image.
    pub index: u64,
    /// Its last version.
    pub version: ObjectVersion,
    /// Blocks of 4 KiB allocated in it.
    pub blocks: u32,
}

impl ObjectEntry {
    /// Bytes of one entry: index 8, version 16 (interval 4, stream 4, sequence 8), blocks 4, zero 4.
    pub const LEN: usize = 32;

    /// Its bytes.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.index.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.version.interval.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.version.stream.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.version.sequence.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.blocks.to_le_bytes());
        bytes
    }

    /// From its bytes.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let version = ObjectVersion { interval: Epoch(word(8)), stream: word(12), sequence: long(16) };
        Self { index: long(0), version, blocks: word(24) }
    }
}

/// The head of a list: the index to ask from next, `None` when there is nothing behind this page.
pub fn list_head(next: Option<u64>) -> [u8; LIST_HEAD_LEN] {
    next.unwrap_or(END).to_le_bytes()
}

/// A `List` reply, checked: entries ascend from `from` on, and the cursor is behind them. `None`: it is not one.
pub fn read_list(data: &[u8], from: u64) -> Option<(Option<u64>, Vec<ObjectEntry>)> {
    let (head, rest) = data.split_first_chunk::<LIST_HEAD_LEN>()?;
    let (entries, torn) = rest.as_chunks::<{ ObjectEntry::LEN }>();
    if !torn.is_empty() || entries.len() > LIST_ENTRIES_MAX {
        return None;
    }
    let next = Some(u64::from_le_bytes(*head)).filter(|next| *next != END);
    let entries: Vec<ObjectEntry> = entries.iter().map(ObjectEntry::from_bytes).collect();
    let is_sorted = entries.is_sorted_by(|a, b| a.index < b.index);
    let begins = entries.first().is_none_or(|first| first.index >= from);
    let last = entries.last().map_or(from, |last| last.index);
    // A cursor that does not move would be followed for ever.
    let moves = next.is_none_or(|next| next > last);
    (is_sorted && begins && moves).then_some((next, entries))
}

/// A `Watchers` reply. `None`: it is not one.
pub fn read_sessions(data: &[u8]) -> Option<Vec<SessionId>> {
    let (sessions, torn) = data.as_chunks::<SESSION_LEN>();
    torn.is_empty().then(|| sessions.iter().map(|bytes| SessionId(u64::from_le_bytes(*bytes))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u64) -> ObjectEntry {
        let version = ObjectVersion { interval: Epoch(2), stream: 3, sequence: 4 };
        ObjectEntry { index, version, blocks: 5 }
    }

    fn page(next: Option<u64>, entries: &[ObjectEntry]) -> Vec<u8> {
        let entries: Vec<u8> = entries.iter().flat_map(|entry| entry.to_bytes()).collect();
        [&list_head(next)[..], &entries].concat()
    }

    #[test]
    fn a_page_reads_back() {
        let entries = [entry(7), entry(9)];
        assert_eq!(read_list(&page(Some(10), &entries), 7), Some((Some(10), entries.to_vec())));
        assert_eq!(read_list(&page(None, &[]), 7), Some((None, Vec::new())));
        let bytes = entry(0x0102).to_bytes();
        assert_eq!(bytes[..16], [2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!(bytes[16..], [4, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(read_sessions(&[1, 0, 0, 0, 0, 0, 0, 0]), Some(vec![SessionId(1)]));
    }

    #[test]
    fn what_is_no_page_is_refused() {
        for (bytes, why) in [
            (vec![0; 7], "no head"),
            (page(None, &[entry(9), entry(7)]), "out of order"),
            (page(None, &[entry(6)]), "before what was asked for"),
            (page(Some(9), &[entry(9)]), "a cursor that does not move"),
            (page(Some(7), &[]), "the same on an empty page"),
            (page(None, &[entry(9)])[..39].to_vec(), "torn"),
            (page(None, &vec![entry(9); LIST_ENTRIES_MAX + 1]), "too long"),
        ] {
            assert_eq!(read_list(&bytes, 7), None, "{why}");
        }
        assert_eq!(read_sessions(&[0; 9]), None);
    }
}
