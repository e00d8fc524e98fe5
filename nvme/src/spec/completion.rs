//! Completion queue entries (NVMe Base 2.0 §3.3.3.2).

use super::status::Status;

/// Bytes of a completion queue entry.
pub const COMPLETION_LEN: usize = 16;

/// One completion, copied out of the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompletionEntry {
    /// Dword 0: specific to the command.
    pub result: u32,
    /// SQHD: how far the controller has read the submission queue.
    pub sq_head: u16,
    /// SQID: the submission queue of the command.
    pub sq_id: u16,
    /// CID: the command.
    pub cid: u16,
    /// The phase tag.
    pub phase: bool,
    /// How it went.
    pub status: Status,
}

impl CompletionEntry {
    /// From the entry's two words.
    pub fn from_words([low, high]: [u64; 2]) -> Self {
        Self {
            result: low as u32,
            sq_head: high as u16,
            sq_id: (high >> 16) as u16,
            cid: (high >> 32) as u16,
            phase: phase(high),
            status: Status((high >> 49) as u16),
        }
    }

    /// The entry's two words.
    pub fn words(&self) -> [u64; 2] {
        let status = u64::from(self.status.0 & 0x7fff) << 49 | u64::from(self.phase) << 48;
        let ids = u64::from(self.cid) << 32 | u64::from(self.sq_id) << 16 | u64::from(self.sq_head);
        [self.result.into(), status | ids]
    }
}

/// The phase tag in the second word of an entry.
pub fn phase(high: u64) -> bool {
    high >> 48 & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_laid_out_as_specified() {
        let entry = CompletionEntry {
            result: 0x0102_0304,
            sq_head: 0x1122,
            sq_id: 0x3344,
            cid: 0x5566,
            phase: true,
            status: Status::new(2, 0x81),
        };
        let [low, high] = entry.words();
        assert_eq!(low.to_le_bytes(), [4, 3, 2, 1, 0, 0, 0, 0]);
        // Status field: phase, SC << 1, SCT << 9.
        assert_eq!(high.to_le_bytes(), [0x22, 0x11, 0x44, 0x33, 0x66, 0x55, 0x03, 0x05]);
        assert_eq!(CompletionEntry::from_words(entry.words()), entry);
    }

    proptest::proptest! {
        #[test]
        fn any_two_words_are_an_entry(low: u32, high: u64) {
            let entry = CompletionEntry::from_words([low.into(), high]);
            proptest::prop_assert_eq!(entry.words(), [u64::from(low), high]);
        }
    }
}
