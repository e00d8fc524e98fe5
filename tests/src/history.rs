//! What a block may hold (RELIABILITY sections 2.1 and 2.3), for workloads with one write of a block at a time.

use crate::stamp::Stamp;
use std::collections::BTreeMap;

/// The writes of every block that still matter.
#[derive(Clone, Debug, Default)]
pub struct History {
    blocks: BTreeMap<u64, Block>,
    acked: u64,
}

#[derive(Clone, Debug)]
struct Block {
    /// The value that is there if no write after it took effect: the newest acked one, or the one last read.
    settled: Stamp,
    /// Writes after it without an answer: each may have taken effect, at any time, or never.
    open: Vec<Stamp>,
}

impl History {
    /// A write begins.
    pub fn begin(&mut self, block: u64, value: Stamp) {
        let entry = self.blocks.entry(block).or_insert(Block { settled: Stamp::Zero, open: Vec::new() });
        entry.open.push(value);
    }

    /// A write was acknowledged: it and nothing before it may be read from now on.
    ///
    /// # Panics
    /// If it never began.
    pub fn ack(&mut self, block: u64, value: Stamp) {
        let entry = self.blocks.get_mut(&block).expect("an acked write has begun");
        let at = entry.open.iter().position(|open| *open == value).expect("an acked write is open");
        entry.open.drain(..=at);
        entry.settled = value;
        self.acked += 1;
    }

    /// The block was read while no write of it was running: the value must be allowed, and is the only one allowed
    /// from now on.
    ///
    /// # Errors
    /// In words, when it is not allowed.
    pub fn observe(&mut self, block: u64, value: Stamp) -> Result<(), String> {
        let Some(entry) = self.blocks.get_mut(&block) else {
            return match value {
                Stamp::Zero => Ok(()),
                Stamp::Write(number) => {
                    Err(format!("block {block} was never written and holds write {number}"))
                }
            };
        };
        if value != entry.settled && !entry.open.contains(&value) {
            let (settled, open) = (entry.settled, &entry.open);
            return Err(format!("block {block} holds {value:?}; allowed: {settled:?} or one of {open:?}"));
        }
        entry.settled = value;
        entry.open.clear();
        Ok(())
    }

    /// Acknowledged block writes so far.
    pub fn acked(&self) -> u64 {
        self.acked
    }

    /// Blocks with writes whose fate is not known.
    pub fn open_blocks(&self) -> usize {
        self.blocks.values().filter(|block| !block.open.is_empty()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acked_write_must_be_there_and_an_open_one_may() {
        let mut history = History::default();
        history.begin(1, Stamp::Write(1));
        history.ack(1, Stamp::Write(1));
        history.begin(1, Stamp::Write(2));
        let mut lost = history.clone();
        assert!(lost.observe(1, Stamp::Zero).unwrap_err().contains("allowed: Write(1)"));
        assert!(history.observe(1, Stamp::Write(2)).is_ok());
        assert!(history.observe(1, Stamp::Write(1)).is_err(), "what was read once stays");
    }

    #[test]
    fn a_value_out_of_nowhere_is_refused() {
        let mut history = History::default();
        assert!(history.observe(9, Stamp::Zero).is_ok());
        assert!(history.observe(9, Stamp::Write(3)).is_err());
    }
}
