//! Loading a checkpoint: what its streams hold.

use super::{Mount, MountError, PgLogs};
use crate::store::api::LogEntry;
use crate::store::checkpoint::{Checkpoint, Pages, TABLE_ENTRIES};
use crate::store::codec::Take;
use crate::store::fetch::{Chain, Fetch};
use crate::store::page::Tag;
use crate::store::pgs::{LOG_PAGE_ENTRIES, Pg, decode_log};
use crate::store::state::State;
use loligo_config::id::{Epoch, ObjectVersion, PgId};
use loligo_reactor::env::BlockDevice;

impl<D: BlockDevice> Mount<D> {
    /// A stream of the checkpoint has been read.
    pub(super) fn stream(
        &mut self,
        fetch: &mut Fetch<D>,
        tag: Tag,
        id: u64,
        chain: Option<Chain>,
    ) -> Result<(), MountError> {
        let done = match (tag, chain) {
            (Tag::Root, Some(chain)) => {
                self.parse_root(&chain).ok_or_else(|| self.damaged_error("checkpoint's root"))?;
                Some(())
            }
            (Tag::Root, None) => return Err(self.damaged_error("checkpoint's root")),
            (Tag::Table(table), Some(chain)) => self.parse_table(table, &chain),
            (Tag::Bucket(bucket), Some(chain)) => self.parse_bucket(bucket, chain),
            (Tag::Pg, chain) => {
                let asked = self.pg_chains.remove(&id);
                self.parse_pg(fetch, asked, chain);
                Some(())
            }
            (Tag::PgLog, chain) => {
                self.parse_pg_log(id, chain);
                Some(())
            }
            (Tag::Map, Some(chain)) => self.parse_map(chain),
            // The map comes from the mon again.
            (Tag::Map, None) => Some(()),
            (Tag::Table(_) | Tag::Bucket(_), None) => None,
        };
        if done.is_none() {
            tracing::error!(shard = self.shard.0, ?tag, "a checkpoint page is damaged");
            self.damaged = true;
            self.rewrite(tag);
        }
        Ok(())
    }

    /// Makes the next checkpoint write a damaged part anew, or every later mount would find the damage again.
    pub(super) fn rewrite(&mut self, tag: Tag) {
        let buckets = match tag {
            Tag::Bucket(bucket) => bucket as usize..bucket as usize + 1,
            Tag::Table(table) => table as usize * TABLE_ENTRIES..(table as usize + 1) * TABLE_ENTRIES,
            _ => return,
        };
        let count = self.checkpoint().buckets.len();
        for bucket in buckets.start..buckets.end.min(count) {
            self.state.index.touch(bucket);
        }
    }

    pub(super) fn checkpoint(&mut self) -> &mut Checkpoint {
        self.checkpoint.as_mut().expect("the root has been read")
    }

    pub(super) fn set_buckets(&mut self, buckets: u32) {
        let shards = u64::from(self.superblock.shards);
        let share = self.superblock.chunks * self.superblock.chunk_blocks / shards;
        // 64 MiB of log at most: read in a tenth of a second at a mount.
        let trigger = (share / 16).clamp(96, 16_384);
        self.state = State::new(buckets);
        self.checkpoint = Some(Checkpoint::new(self.anchor.clone(), buckets, trigger));
    }

    pub(super) fn parse_root(&mut self, chain: &Chain) -> Option<()> {
        let mut take = Take(&chain.bytes);
        self.map_lba = take.u64()?;
        let buckets = take.u32()?;
        if !buckets.is_power_of_two() || u64::from(buckets) > self.superblock.blocks {
            return None;
        }
        self.set_buckets(buckets);
        for table in 0..(buckets as usize).div_ceil(TABLE_ENTRIES) {
            let lba = take.u64()?;
            self.checkpoint().tables[table] = lba;
        }
        while !take.0.is_empty() {
            self.pg_starts.push((take.pg()?, take.u64()?));
        }
        self.checkpoint().root = chain.lbas.clone().into();
        Some(())
    }

    pub(super) fn parse_table(&mut self, table: u32, chain: &Chain) -> Option<()> {
        let mut take = Take(&chain.bytes);
        let from = table as usize * TABLE_ENTRIES;
        let checkpoint = self.checkpoint();
        for pages in checkpoint.buckets[from..].iter_mut().take(TABLE_ENTRIES) {
            let lba = take.u64()?;
            // The rest of the bucket's pages is known when it has been read.
            *pages = if lba == 0 { Pages::default() } else { [lba].into() };
        }
        Some(())
    }

    pub(super) fn parse_bucket(&mut self, bucket: u32, chain: Chain) -> Option<()> {
        self.state.index.load_bucket(bucket, &chain.bytes)?;
        self.checkpoint().buckets[bucket as usize] = chain.lbas.into();
        Some(())
    }

    pub(super) fn parse_pg(&mut self, fetch: &mut Fetch<D>, asked: Option<PgId>, chain: Option<Chain>) {
        let Some(id) = asked else { return };
        let decoded = chain.and_then(|chain| {
            let (found, pg, tail) = Pg::decode(&chain.bytes)?;
            (found == id).then_some((pg, tail, chain.lbas))
        });
        let Some((pg, tail, lbas)) = decoded else {
            tracing::error!(shard = self.shard.0, pg = %id, "the PG's state is damaged");
            let mut pg = Pg::default();
            pg.status.incomplete = true;
            pg.touch(&mut Vec::new());
            self.state.pgs.insert(id, pg);
            return;
        };
        self.checkpoint().pgs.insert(id, lbas.into());
        let pages: Vec<u64> = pg.page_lbas().collect();
        for (at, lba) in pages.iter().enumerate() {
            let chain = self.chains.read(fetch, Tag::PgLog, *lba);
            self.log_chains.insert(chain, (id, at));
        }
        self.pg_logs.insert(id, PgLogs { pages: vec![None; pages.len()], tail });
        self.state.pgs.insert(id, pg);
    }

    pub(super) fn parse_pg_log(&mut self, chain_id: u64, chain: Option<Chain>) {
        let Some((id, at)) = self.log_chains.remove(&chain_id) else { return };
        let entries = chain.and_then(|chain| decode_log(&chain.bytes));
        if let Some(logs) = self.pg_logs.get_mut(&id) {
            logs.pages[at] = entries.filter(|entries| entries.len() == LOG_PAGE_ENTRIES);
        }
    }

    /// Puts the PG logs together. One with an unreadable page, or that is no chain up to the PG's last version, starts
    /// anew: peers are then brought up by version.
    pub(super) fn join_pg_logs(&mut self) {
        for (id, logs) in std::mem::take(&mut self.pg_logs) {
            let Some(pg) = self.state.pgs.get_mut(&id) else { continue };
            let entries = logs.pages.iter().flatten().flatten().chain(&logs.tail);
            if logs.pages.iter().any(Option::is_none) || !is_chain(entries, pg.status.last) {
                let mut dropped = Vec::new();
                pg.touch(&mut dropped);
                pg.clear_log(&mut dropped);
                self.checkpoint.as_mut().expect("loaded").drop_next.append(&mut dropped);
                continue;
            }
            pg.load_log(logs.pages.into_iter().flatten().flatten().chain(logs.tail));
        }
    }

    pub(super) fn parse_map(&mut self, chain: Chain) -> Option<()> {
        let mut take = Take(&chain.bytes);
        let epoch = Epoch(take.u32()?);
        let map = take.0.to_vec();
        let checkpoint = self.checkpoint();
        checkpoint.map = Some((epoch, map));
        checkpoint.map_pages = chain.lbas.into();
        Some(())
    }
}

/// Whether each entry follows the one before it, and the last one made this version.
fn is_chain<'a>(entries: impl Iterator<Item = &'a LogEntry>, last: ObjectVersion) -> bool {
    let mut before: Option<ObjectVersion> = None;
    for entry in entries {
        let follows = before.is_none_or(|before| entry.previous == before);
        if !follows || entry.version <= entry.previous {
            return false;
        }
        before = Some(entry.version);
    }
    before.is_none_or(|before| before == last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::api::LogKind;
    use loligo_config::id::{ObjectId, OpId};

    fn version(sequence: u64) -> ObjectVersion {
        ObjectVersion { interval: Epoch(u32::from(sequence > 0)), stream: 0, sequence }
    }

    fn entry(previous: u64, made: u64) -> LogEntry {
        LogEntry {
            version: version(made),
            previous: version(previous),
            object: ObjectId::default(),
            block: 0,
            count: 1,
            kind: LogKind::Write,
            op: OpId::default(),
            lowest_outstanding: 0,
            snap_seq: 0,
        }
    }

    #[test]
    fn a_log_that_is_no_chain_to_the_last_version_is_not_taken() {
        let chain = |entries: &[LogEntry]| is_chain(entries.iter(), version(5));
        assert!(chain(&[]));
        assert!(chain(&[entry(2, 4), entry(4, 5)]));
        assert!(!chain(&[entry(2, 4)]), "it ends too early");
        assert!(!chain(&[entry(2, 4), entry(4, 5), entry(5, 9)]), "it ends too late");
        assert!(!chain(&[entry(2, 3), entry(4, 5)]), "it has a hole");
        assert!(!chain(&[entry(9, 4), entry(4, 5)]), "it goes back");
    }
}
