//! The store as PGs see it.

use crate::pg::{BlockRange, PgStore};
use crate::store::Store;
use crate::store::api::{LogEntry, OpLookup, PgStatus, ReadError, SubmitError, Transaction};
use loligo_config::id::{ObjectId, ObjectVersion, OpId, PgId};
use loligo_reactor::env::{BlockDevice, Ticket};

impl<D: BlockDevice> PgStore for Store<D> {
    fn status(&self, pg: PgId) -> Option<PgStatus> {
        self.pg(pg)
    }

    fn submit(&mut self, transaction: Transaction, ticket: Ticket) -> Result<(), SubmitError> {
        Store::submit(self, transaction, ticket)
    }

    fn read(&mut self, range: BlockRange, pg: PgId, ticket: Ticket) -> Result<(), ReadError> {
        Store::read(self, range.object, pg, range.block, range.count, ticket)
    }

    fn object_version(&self, object: ObjectId) -> ObjectVersion {
        Store::object_version(self, object)
    }

    fn op_lookup(&self, pg: PgId, op: OpId) -> OpLookup {
        Store::op_lookup(self, pg, op)
    }

    fn extents(&self, range: BlockRange, each: &mut dyn FnMut(u32, u32)) {
        for (block, count) in Store::extents(self, range.object, range.block, range.count) {
            each(block, count);
        }
    }

    fn objects(&self, from: ObjectId, each: &mut dyn FnMut(ObjectId, PgId, ObjectVersion, u32) -> bool) {
        for (object, pg, version, blocks) in Store::all_objects(self, from) {
            if !each(object, pg, version, blocks) {
                return;
            }
        }
    }

    fn entries_since(&self, pg: PgId, since: ObjectVersion, out: &mut Vec<LogEntry>) -> bool {
        match Store::entries_since(self, pg, since) {
            Some(entries) => {
                out.extend(entries);
                true
            }
            None => false,
        }
    }

    fn credit(&self) -> u64 {
        self.space().credit
    }

    fn grant(&self) -> u64 {
        let space = self.space();
        space.credit.min(space.window)
    }
}
