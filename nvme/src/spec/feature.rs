//! Features (NVMe Base 2.0 §5.27.1).

/// The features that the driver reads or sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FeatureId {
    /// Volatile Write Cache (§5.27.1.4): bit 0 of the value, WCE.
    VolatileWriteCache = 0x06,
    /// Number of Queues (§5.27.1.5).
    NumberOfQueues = 0x07,
}

/// I/O queues, as Number of Queues asks for and grants them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCounts {
    /// Submission queues: 1 to 65,535.
    pub submission: u32,
    /// Completion queues.
    pub completion: u32,
}

impl QueueCounts {
    /// As many queue pairs.
    pub fn pairs(count: u16) -> Self {
        let count = u32::from(count.max(1));
        Self { submission: count, completion: count }
    }

    /// Dword 11 of the request: both numbers 0-based.
    pub fn to_dword(self) -> u32 {
        (self.completion - 1) << 16 | (self.submission - 1)
    }

    /// Dword 0 of the completion.
    pub fn from_dword(value: u32) -> Self {
        Self { submission: (value & 0xffff) + 1, completion: (value >> 16) + 1 }
    }

    /// Queue pairs that this allows.
    pub fn pair_count(self) -> u16 {
        u16::try_from(self.submission.min(self.completion)).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_counts_are_zero_based() {
        assert_eq!(QueueCounts::pairs(4).to_dword(), 0x0003_0003);
        assert_eq!(QueueCounts::from_dword(0x0001_0007), QueueCounts { submission: 8, completion: 2 });
        assert_eq!(QueueCounts::from_dword(0x0001_0007).pair_count(), 2);
        assert_eq!(QueueCounts::from_dword(u32::MAX).pair_count(), u16::MAX);
        assert_eq!(QueueCounts::pairs(0).to_dword(), 0);
    }
}
