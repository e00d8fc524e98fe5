//! The audit: whether every block has exactly one owner. For tests and simulation; it visits everything.

use super::Store;
use super::alloc::Run;
use loligo_reactor::env::BlockDevice;
use std::collections::BTreeMap;

/// What is wrong with a store's space.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    /// A block has two owners.
    #[error("block {lba} belongs to {first} and to {second}")]
    Shared {
        /// The block.
        lba: u64,
        /// One owner.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A block with an owner counts as free.
    #[error("block {lba} of {owner} counts as free")]
    Free {
        /// The block.
        lba: u64,
        /// Its owner.
        owner: &'static str,
    },
    /// A used block has no owner.
    #[error("block {lba} is used by nobody")]
    Leaked {
        /// The block.
        lba: u64,
    },
}

impl<D: BlockDevice> Store<D> {
    /// Compares the allocator with the index, the log, the checkpoint and what waits to be freed.
    ///
    /// # Errors
    /// The first block that is leaked, owned twice or free with an owner.
    pub fn audit(&self) -> Result<(), AuditError> {
        let mut owners: BTreeMap<u64, &'static str> = BTreeMap::new();
        for (run, owner) in self.owned() {
            for lba in run.lba..run.end() {
                if let Some(first) = owners.insert(lba, owner) {
                    return Err(AuditError::Shared { lba, first, second: owner });
                }
                if !self.alloc.is_used(lba) {
                    return Err(AuditError::Free { lba, owner });
                }
            }
        }
        match self.alloc.used_blocks().find(|lba| !owners.contains_key(lba)) {
            Some(lba) => Err(AuditError::Leaked { lba }),
            None => Ok(()),
        }
    }

    pub(super) fn owned(&self) -> impl Iterator<Item = (Run, &'static str)> + '_ {
        let data = self.state.index.fragments().flat_map(|fragment| fragment.runs());
        let pages = self.checkpoint.pages().map(|lba| Run { lba, count: 1 });
        let pg_logs = self.state.pgs.values().flat_map(|pg| pg.page_lbas()).map(|lba| Run { lba, count: 1 });
        let pages = pages.chain(pg_logs);
        let log = self.log.blocks.iter().map(|(_, run)| *run);
        let left = self.log.current.len - self.log.offset - self.log.open_blocks();
        let from = self.log.current.end() - u64::from(left);
        let current = Run { lba: from, count: left };
        let open = self.log.open_lba().map(|lba| Run { lba, count: 1 });
        let upcoming = self.log.upcoming.iter().map(|segment| Run { lba: segment.lba, count: segment.len });
        data.map(|run| (run, "the index"))
            .chain(pages.map(|run| (run, "the checkpoint")))
            .chain(log.chain(open).map(|run| (run, "the log")))
            .chain(upcoming.chain([current]).map(|run| (run, "the segments ahead")))
            .chain(self.log.freed_runs().map(|run| (run, "the superseded blocks")))
            .chain(self.discards.runs().map(|run| (run, "the discards")))
    }
}
