//! A store in memory with the promises of the real one: transactions become durable in order, and a crash keeps the
//! durable ones and any number of those after them.

use crate::pg::{BlockRange, PgStore};
use crate::store::api::{
    Change, LogEntry, LogKind, OpLookup, PgMeta, PgStatus, ReadData, ReadError, SubmitError, Transaction,
};
use loligo_config::id::{ObjectId, ObjectVersion, OpId, PgId, SessionId};
use loligo_config::units::BLOCK_SIZE;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::Ticket;
use std::collections::{BTreeMap, VecDeque};

const BLOCK: usize = BLOCK_SIZE as usize;

/// What a member has in the end: contents, versions and op results.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    pub blocks: BTreeMap<(ObjectId, u32), Vec<u8>>,
    pub objects: BTreeMap<ObjectId, ObjectVersion>,
    pub ops: BTreeMap<OpId, ObjectVersion>,
    pub lowest: BTreeMap<SessionId, u64>,
    pub last: ObjectVersion,
    pub meta: PgMeta,
    exists: bool,
}

impl Contents {
    fn apply(&mut self, tx: &Transaction) {
        self.exists = true;
        match &tx.change {
            Change::Meta(meta) => {
                self.meta = *meta;
                return;
            }
            Change::RemovePg => unreachable!("no test removes the PG"),
            Change::Write { object, block, data, .. } => {
                for (index, bytes) in (0..).zip(data.chunks(BLOCK)) {
                    self.blocks.insert((*object, block + index), bytes.to_vec());
                }
                self.objects.insert(*object, tx.version);
            }
            Change::Free { object, block, count } => {
                let range = (*object, *block)..(*object, block.saturating_add(*count));
                let freed: Vec<_> = self.blocks.range(range).map(|(key, _)| *key).collect();
                freed.iter().for_each(|key| drop(self.blocks.remove(key)));
                self.objects.insert(*object, tx.version);
            }
            Change::Remove { object } => {
                self.blocks.retain(|(other, _), _| other != object);
                self.objects.remove(object);
            }
            Change::Result => {}
        }
        assert!(tx.version > self.last, "versions rise");
        self.last = tx.version;
        if tx.op.number != 0 {
            let before = self.ops.insert(tx.op, tx.version);
            assert_eq!(before, None, "op {} applied twice", tx.op);
            self.lowest.insert(tx.op.session, tx.lowest_outstanding);
        }
    }
}

#[derive(Debug)]
pub struct FakeStore {
    pool: BufferPool,
    pub now: Contents,
    log: Vec<Transaction>,
    /// How many of `log` are durable.
    durable: usize,
    tickets: VecDeque<Ticket>,
    reads: VecDeque<(Ticket, BlockRange)>,
    pub refuse_next: Option<SubmitError>,
    /// Refuses everything as busy.
    pub is_busy: bool,
    pub incomplete: bool,
    pub credit: u64,
    /// The log before this entry was dropped.
    pub log_start: usize,
}

impl FakeStore {
    pub fn new(pool: &BufferPool) -> Self {
        Self {
            pool: pool.clone(),
            now: Contents::default(),
            log: Vec::new(),
            durable: 0,
            tickets: VecDeque::new(),
            reads: VecDeque::new(),
            refuse_next: None,
            is_busy: false,
            incomplete: false,
            credit: 1 << 20,
            log_start: 0,
        }
    }

    /// The oldest transaction in flight becomes durable.
    pub fn commit_next(&mut self) -> Option<Ticket> {
        let ticket = self.tickets.pop_front()?;
        self.durable += 1;
        Some(ticket)
    }

    /// The read at this place among those under way ends.
    pub fn read_next(&mut self, at: usize) -> Option<(Ticket, ReadData)> {
        let at = at.checked_rem(self.reads.len())?;
        let (ticket, range) = self.reads.remove(at)?;
        Some((ticket, self.data(range)))
    }

    pub fn data(&self, range: BlockRange) -> ReadData {
        let version = self.now.objects.get(&range.object).copied().unwrap_or_default();
        let mut any = false;
        let mut buffer = self.pool.alloc_zeroed(range.count as usize * BLOCK).unwrap();
        for (index, chunk) in (0..).zip(buffer.chunks_mut(BLOCK)) {
            if let Some(bytes) = self.now.blocks.get(&(range.object, range.block + index)) {
                chunk.copy_from_slice(bytes);
                any = true;
            }
        }
        if !any {
            return ReadData { data: None, checksums: None, version };
        }
        let checksums = crate::pg::blocks::checksums_of(&self.pool, &buffer).unwrap();
        ReadData { data: Some(buffer.freeze()), checksums: Some(checksums), version }
    }

    /// The process dies: of what was not durable, the first `kept` reached the disk.
    pub fn crash(&mut self, kept: usize) {
        let keep = (self.durable + kept).min(self.log.len());
        self.log.truncate(keep);
        self.durable = keep;
        self.tickets.clear();
        self.reads.clear();
        self.now = Contents::default();
        for tx in &self.log {
            self.now.apply(tx);
        }
    }

    pub fn in_flight(&self) -> usize {
        self.tickets.len()
    }

    pub fn writes(&self) -> impl Iterator<Item = &Transaction> {
        self.log.iter().filter(|tx| tx.version.is_some())
    }

    fn durable_last(&self) -> ObjectVersion {
        let durable = self.log[..self.durable].iter().rev();
        durable.map(|tx| tx.version).find(|version| version.is_some()).unwrap_or_default()
    }
}

impl PgStore for FakeStore {
    fn status(&self, _pg: PgId) -> Option<PgStatus> {
        self.now.exists.then(|| PgStatus {
            meta: self.now.meta,
            last: self.now.last,
            durable: self.durable_last(),
            incomplete: self.incomplete,
            objects: self.now.objects.len() as u64,
            blocks: self.now.blocks.len() as u64,
        })
    }

    fn submit(&mut self, tx: Transaction, ticket: Ticket) -> Result<(), SubmitError> {
        if let Some(error) = self.refuse_next.take() {
            return Err(error);
        }
        if self.is_busy {
            return Err(SubmitError::Busy);
        }
        if !matches!(tx.change, Change::Meta(_)) {
            assert!(self.now.exists, "a PG is made by its promise");
            if tx.previous != self.now.last {
                return Err(SubmitError::NotNext { last: self.now.last });
            }
        }
        if let Change::Write { data, checksums, .. } = &tx.change {
            let wanted = crate::pg::blocks::checksums_of(&self.pool, data).unwrap();
            assert_eq!(&wanted[..], &checksums[..], "checksums fit the data");
        }
        self.now.apply(&tx);
        self.log.push(tx);
        self.tickets.push_back(ticket);
        Ok(())
    }

    fn read(&mut self, range: BlockRange, _pg: PgId, ticket: Ticket) -> Result<(), ReadError> {
        if self.is_busy {
            return Err(ReadError::Busy);
        }
        self.reads.push_back((ticket, range));
        Ok(())
    }

    fn object_version(&self, object: ObjectId) -> ObjectVersion {
        self.now.objects.get(&object).copied().unwrap_or_default()
    }

    fn op_lookup(&self, _pg: PgId, op: OpId) -> OpLookup {
        match self.now.ops.get(&op) {
            Some(version) => OpLookup::Applied(*version),
            None if self.now.lowest.get(&op.session).is_some_and(|lowest| op.number < *lowest) => {
                OpLookup::Forgotten
            }
            None => OpLookup::New,
        }
    }

    fn extents(&self, range: BlockRange, each: &mut dyn FnMut(u32, u32)) {
        let keys = (range.object, range.block)..(range.object, range.end());
        self.now.blocks.range(keys).for_each(|((_, block), _)| each(*block, 1));
    }

    fn objects(&self, from: ObjectId, each: &mut dyn FnMut(ObjectId, PgId, ObjectVersion, u32) -> bool) {
        for (object, version) in self.now.objects.range(from..) {
            let blocks = self.now.blocks.range((*object, 0)..=(*object, u32::MAX)).count();
            if !each(*object, super::cluster::PG, *version, u32::try_from(blocks).unwrap()) {
                return;
            }
        }
    }

    fn entries_since(&self, _pg: PgId, since: ObjectVersion, out: &mut Vec<LogEntry>) -> bool {
        let writes: Vec<_> = self.log.iter().filter(|tx| tx.version.is_some()).collect();
        let start = match writes.iter().position(|tx| tx.version == since) {
            Some(at) => at + 1,
            None if since == ObjectVersion::NONE => 0,
            None => return false,
        };
        if start < self.log_start {
            return false;
        }
        out.extend(writes[start..].iter().map(|tx| entry_of(tx)));
        true
    }

    fn credit(&self) -> u64 {
        self.credit
    }
}

fn entry_of(tx: &Transaction) -> LogEntry {
    let (kind, object, block, count) = match &tx.change {
        Change::Write { object, block, data, .. } => {
            (LogKind::Write, *object, *block, (data.len() / BLOCK) as u32)
        }
        Change::Free { object, block, count } => (LogKind::Free, *object, *block, *count),
        Change::Remove { object } => (LogKind::Remove, *object, 0, u32::MAX),
        _ => (LogKind::Result, ObjectId::default(), 0, 0),
    };
    LogEntry {
        version: tx.version,
        previous: tx.previous,
        object,
        block,
        count,
        kind,
        op: tx.op,
        lowest_outstanding: tx.lowest_outstanding,
        snap_seq: tx.snap_seq,
    }
}
