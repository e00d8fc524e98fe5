//! What the log describes: objects and PGs. Submitting and replaying an entry change it in the same way.

use super::alloc::Run;
use super::index::Index;
use super::pgs::Pg;
use super::record::{Entry, EntryKind};
use loligo_config::id::{ObjectId, PgId};
use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct State {
    pub index: Index,
    pub pgs: BTreeMap<PgId, Pg>,
    /// No fewer pages than the PGs changed since the last checkpoint began take in the next.
    pub pg_pages: u64,
    entries: u64,
}

/// What a change left behind.
#[derive(Debug, Default)]
pub(super) struct Leftovers {
    /// Data that nothing refers to any more.
    pub freed: Vec<Run>,
    /// Checkpoint pages that the running checkpoint does not need any more.
    pub dropped: Vec<u64>,
    /// PGs removed.
    pub removed: Vec<Pg>,
}

impl State {
    pub fn new(buckets: u32) -> Self {
        Self { index: Index::new(buckets), pgs: BTreeMap::new(), pg_pages: 0, entries: 0 }
    }

    /// Makes an entry's change. Its PG exists, unless it makes it.
    pub fn apply(&mut self, entry: &Entry, left: &mut Leftovers) {
        let (object, pg) = (entry.object, entry.pg);
        let before = self.weight(object);
        match entry.kind {
            EntryKind::Write => {
                let (runs, checksums) = (&entry.runs, &entry.checksums);
                let freed = &mut left.freed;
                self.index.write(object, pg, entry.version, entry.block, runs, checksums, freed);
            }
            EntryKind::Free => {
                self.index.free(object, entry.version, (entry.block, entry.count), &mut left.freed);
            }
            EntryKind::Remove => self.index.remove(object, &mut left.freed),
            EntryKind::Result | EntryKind::Meta => (),
            EntryKind::RemovePg => return self.remove_pg(pg, left),
        }
        let after = self.weight(object);
        let state = self.pgs.entry(pg).or_default();
        if !state.is_dirty() {
            self.pg_pages += state.pages_max();
        }
        self.entries += 1;
        self.pg_pages += u64::from(self.entries.is_multiple_of(16));
        state.apply(entry, &mut left.dropped);
        if !matches!(entry.kind, EntryKind::Result | EntryKind::Meta) {
            // Wrapping: in a replay the counts start from nothing and are made afresh at its end.
            state.status.objects = state.status.objects.wrapping_add(after.0).wrapping_sub(before.0);
            state.status.blocks = state.status.blocks.wrapping_add(after.1).wrapping_sub(before.1);
        }
    }

    fn weight(&self, object: ObjectId) -> (u64, u64) {
        self.index.object(object).map_or((0, 0), |object| (1, u64::from(object.blocks)))
    }

    fn remove_pg(&mut self, pg: PgId, left: &mut Leftovers) {
        let of_pg = self.index.objects().filter(|(_, object)| object.pg == pg);
        let objects: Vec<_> = of_pg.map(|(id, _)| *id).collect();
        objects.iter().for_each(|object| self.index.remove(*object, &mut left.freed));
        left.removed.extend(self.pgs.remove(&pg));
    }

    /// Counts the objects and blocks of every PG afresh.
    pub fn recount(&mut self) {
        for pg in self.pgs.values_mut() {
            (pg.status.objects, pg.status.blocks) = (0, 0);
        }
        for (_, object) in self.index.objects() {
            if let Some(pg) = self.pgs.get_mut(&object.pg) {
                pg.status.objects += 1;
                pg.status.blocks += u64::from(object.blocks);
            }
        }
    }

    /// Starts a checkpoint of what is here now: the buckets and PGs that it has to write.
    pub fn begin_checkpoint(&mut self) -> (Vec<u32>, Vec<PgId>) {
        self.pg_pages = 0;
        let buckets = self.index.begin_checkpoint();
        let dirty = self.pgs.iter_mut().filter_map(|(id, pg)| pg.begin_checkpoint().then_some(*id));
        (buckets, dirty.collect())
    }
}
