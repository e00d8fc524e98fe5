//! What the store keeps of each PG besides its objects: meta, last version, op-id table, the tail of its log.

use super::api::{LogEntry, LogKind, OpLookup, PgMeta, PgStatus};
use super::codec::{Put, Take};
use super::record::{Entry, EntryKind};
use loligo_config::id::{Epoch, ObjectVersion, OpId, PgId, SessionId};
use loligo_config::limits::{PG_SESSIONS_MAX, SESSION_RESULTS_MAX};
use loligo_reactor::planted::{self, Bug};
use std::collections::{BTreeMap, VecDeque};

/// Entries of its log that a PG keeps at least, once it has had so many: a member that was away for less catches up
/// by log. At 100 bytes each, 100 PGs take 40 MiB at most.
pub(super) const PG_LOG_MAX: usize = 4096;
/// Entries of one checkpointed log page.
pub(super) const LOG_PAGE_ENTRIES: usize = 40;
const LOG_ENTRY_LEN: usize = 97;
const _: () = assert!(LOG_PAGE_ENTRIES * LOG_ENTRY_LEN <= super::page::PAGE_DATA);

#[derive(Debug, Default)]
struct Session {
    lowest: u64,
    /// Ascending by number.
    results: VecDeque<(u64, ObjectVersion)>,
}

/// The results of a PG's ops.
#[derive(Debug, Default)]
pub(super) struct OpTable {
    sessions: BTreeMap<SessionId, Session>,
    /// Sessions up to this one that are not in the table were dropped.
    expired: SessionId,
    results: u64,
}

impl OpTable {
    pub fn lookup(&self, op: OpId) -> OpLookup {
        if op.session == SessionId(0) || planted::active(Bug::OpTableIgnored) {
            return OpLookup::New;
        }
        let Some(session) = self.sessions.get(&op.session) else {
            return if op.session <= self.expired { OpLookup::SessionExpired } else { OpLookup::New };
        };
        if op.number < session.lowest {
            return OpLookup::Forgotten;
        }
        match session.results.binary_search_by_key(&op.number, |(number, _)| *number) {
            Ok(at) => OpLookup::Applied(session.results[at].1),
            Err(_) => OpLookup::New,
        }
    }

    pub fn record(&mut self, op: OpId, lowest: u64, version: ObjectVersion) {
        if op.session == SessionId(0) {
            return;
        }
        if !self.sessions.contains_key(&op.session) && op.session <= self.expired {
            return;
        }
        let session = self.sessions.entry(op.session).or_default();
        let before = session.results.len();
        if let Err(at) = session.results.binary_search_by_key(&op.number, |(number, _)| *number) {
            session.results.insert(at, (op.number, version));
        }
        session.lowest = session.lowest.max(lowest);
        if session.results.len() > SESSION_RESULTS_MAX {
            session.lowest = session.lowest.max(session.results[0].0 + 1);
        }
        while session.results.front().is_some_and(|(number, _)| *number < session.lowest) {
            session.results.pop_front();
        }
        self.results = self.results + session.results.len() as u64 - before as u64;
        while self.sessions.len() > PG_SESSIONS_MAX {
            let (session, dropped) = self.sessions.pop_first().expect("there are too many");
            self.expired = self.expired.max(session);
            self.results -= dropped.results.len() as u64;
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.u64(self.expired.0);
        out.u32(self.sessions.len() as u32);
        for (id, session) in &self.sessions {
            out.u64(id.0);
            out.u64(session.lowest);
            out.u32(session.results.len() as u32);
            for (number, version) in &session.results {
                out.u64(*number);
                out.version(*version);
            }
        }
    }

    fn take(take: &mut Take<'_>) -> Option<Self> {
        let mut table = Self { expired: SessionId(take.u64()?), ..Self::default() };
        for _ in 0..take.u32()? {
            let id = SessionId(take.u64()?);
            let mut session = Session { lowest: take.u64()?, results: VecDeque::new() };
            for _ in 0..take.u32()? {
                session.results.push_back((take.u64()?, take.version()?));
            }
            if !session.results.iter().is_sorted_by(|a, b| a.0 < b.0) {
                return None;
            }
            table.results += session.results.len() as u64;
            table.sessions.insert(id, session);
        }
        Some(table)
    }
}

/// A checkpointed page of a PG's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LogPage {
    pub lba: u64,
}

/// A PG's state as a checkpoint writes it.
#[derive(Debug, Default)]
pub(super) struct PgSnapshot {
    /// Everything but the log.
    pub head: Vec<u8>,
    /// Pages that are on the device already.
    pub pages: Vec<LogPage>,
    /// Full pages to write.
    pub full: Vec<Vec<u8>>,
    /// Addresses of the full pages written so far.
    pub written: Vec<u64>,
    /// Entries that do not fill a page yet.
    pub tail: Vec<u8>,
}

#[derive(Debug, Default)]
pub(super) struct Pg {
    pub status: PgStatus,
    pub ops: OpTable,
    log: VecDeque<LogEntry>,
    /// The pages that hold the first entries of the log, [`LOG_PAGE_ENTRIES`] each.
    pages: VecDeque<LogPage>,
    /// Full pages being written by the running checkpoint; they come behind `pages`.
    writing: usize,
    /// Changed since the last checkpoint began.
    dirty: bool,
    pending: bool,
    captured: Option<PgSnapshot>,
}

impl Pg {
    /// Call before any change.
    pub fn touch(&mut self, dropped: &mut Vec<u64>) {
        if self.pending {
            let snapshot = self.snapshot(dropped);
            self.captured = Some(snapshot);
            self.pending = false;
        }
        self.dirty = true;
    }

    pub fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// No fewer pages than it takes in a checkpoint as it is now.
    pub fn pages_max(&self) -> u64 {
        let unpaged = self.log.len() - (self.pages.len() * LOG_PAGE_ENTRIES).min(self.log.len());
        let bytes = self.ops.results * 24 + self.ops.sessions.len() as u64 * 20 + self.pages.len() as u64 * 8;
        3 + bytes / super::page::PAGE_DATA as u64 + (unpaged / LOG_PAGE_ENTRIES) as u64 * 2
    }

    pub fn begin_checkpoint(&mut self) -> bool {
        let dirty = self.dirty;
        (self.dirty, self.pending) = (false, dirty);
        dirty
    }

    /// The state as it was when the checkpoint began; pages that it no longer needs go to `dropped`.
    pub fn take_snapshot(&mut self, dropped: &mut Vec<u64>) -> Option<PgSnapshot> {
        if self.pending {
            self.pending = false;
            return Some(self.snapshot(dropped));
        }
        self.captured.take()
    }

    fn snapshot(&mut self, dropped: &mut Vec<u64>) -> PgSnapshot {
        // Whole pages leave, so that what is on the device stays as it is.
        while self.log.len() >= PG_LOG_MAX + LOG_PAGE_ENTRIES && !self.pages.is_empty() {
            dropped.extend(self.pages.pop_front().map(|page| page.lba));
            self.log.drain(..LOG_PAGE_ENTRIES);
        }
        let mut snapshot =
            PgSnapshot { pages: self.pages.iter().copied().collect(), ..PgSnapshot::default() };
        let (head, status) = (&mut snapshot.head, &self.status);
        head.u32(status.meta.promised.0);
        head.u32(status.meta.activated.0);
        head.version(status.last);
        head.u8(u8::from(status.incomplete));
        let none = OpTable::default();
        let ops = if planted::active(Bug::OpTableNotStored) { &none } else { &self.ops };
        ops.put(head);
        let rest: Vec<_> = self.log.iter().skip(self.pages.len() * LOG_PAGE_ENTRIES).collect();
        for page in rest.chunks(LOG_PAGE_ENTRIES) {
            let mut bytes = Vec::with_capacity(page.len() * LOG_ENTRY_LEN);
            page.iter().for_each(|entry| put_log_entry(entry, &mut bytes));
            if page.len() == LOG_PAGE_ENTRIES {
                snapshot.full.push(bytes);
            } else {
                snapshot.tail = bytes;
            }
        }
        self.writing = snapshot.full.len();
        snapshot
    }

    /// The addresses of the full pages that the snapshot had; they are written. False if the log was cleared since.
    pub fn pages_written(&mut self, lbas: &[u64]) -> bool {
        if self.writing != lbas.len() {
            return false;
        }
        self.writing = 0;
        self.pages.extend(lbas.iter().map(|lba| LogPage { lba: *lba }));
        true
    }

    pub fn page_lbas(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.iter().map(|page| page.lba)
    }

    /// Drops the log, since it has a hole.
    pub fn clear_log(&mut self, dropped: &mut Vec<u64>) {
        dropped.extend(self.pages.drain(..).map(|page| page.lba));
        self.log.clear();
        self.writing = usize::MAX;
    }

    /// Takes a logged entry over: version, result and log. The chain has been checked.
    pub fn apply(&mut self, entry: &Entry, dropped: &mut Vec<u64>) {
        self.touch(dropped);
        let kind = match entry.kind {
            EntryKind::Meta => {
                self.status.meta = entry.meta;
                return;
            }
            EntryKind::RemovePg => return,
            EntryKind::Write => LogKind::Write,
            EntryKind::Free => LogKind::Free,
            EntryKind::Remove => LogKind::Remove,
            EntryKind::Result => LogKind::Result,
        };
        self.status.last = entry.version;
        self.ops.record(entry.op, entry.lowest_outstanding, entry.version);
        self.log.push_back(LogEntry {
            version: entry.version,
            previous: entry.previous,
            object: entry.object,
            block: entry.block,
            count: if kind == LogKind::Remove { u32::MAX } else { entry.count },
            kind,
            op: entry.op,
            lowest_outstanding: entry.lowest_outstanding,
            snap_seq: entry.snap_seq,
        });
        // Without checkpoints (or before the first) the log is trimmed here; pages leave whole.
        if self.pages.is_empty() && self.writing == 0 && self.log.len() > PG_LOG_MAX + 2 * LOG_PAGE_ENTRIES {
            self.log.pop_front();
        }
    }

    /// The entries after `version`, or `None` if the kept log does not reach back to it.
    pub fn entries_since(&self, version: ObjectVersion) -> Option<impl Iterator<Item = LogEntry> + '_> {
        let at = self.log.partition_point(|entry| entry.version <= version);
        let reaches = match self.log.get(at) {
            Some(entry) => entry.previous == version,
            None => version == self.status.last,
        };
        reaches.then(|| self.log.range(at..).copied())
    }

    /// The chained bytes of a snapshot with all its page addresses.
    pub fn encode(snapshot: &PgSnapshot, pg: PgId, new_pages: &[u64]) -> Vec<u8> {
        let mut out = Vec::with_capacity(snapshot.head.len() + snapshot.tail.len() + 64);
        out.pg(pg);
        out.put(&snapshot.head);
        out.u32((snapshot.pages.len() + new_pages.len()) as u32);
        snapshot.pages.iter().for_each(|page| out.u64(page.lba));
        new_pages.iter().for_each(|lba| out.u64(*lba));
        out.put(&snapshot.tail);
        out
    }

    /// A PG as [`Pg::encode`] wrote it, and the entries of its tail, which come behind those of its pages.
    pub fn decode(bytes: &[u8]) -> Option<(PgId, Self, Vec<LogEntry>)> {
        let mut take = Take(bytes);
        let id = take.pg()?;
        let mut pg = Self::default();
        pg.status.meta = PgMeta { promised: Epoch(take.u32()?), activated: Epoch(take.u32()?) };
        pg.status.last = take.version()?;
        pg.status.durable = pg.status.last;
        pg.status.incomplete = take.u8()? != 0;
        pg.ops = OpTable::take(&mut take)?;
        for _ in 0..take.u32()? {
            pg.pages.push_back(LogPage { lba: take.u64()? });
        }
        let tail = decode_log(take.0)?;
        Some((id, pg, tail))
    }

    /// Puts the entries read from the pages and the tail in.
    pub fn load_log(&mut self, entries: impl Iterator<Item = LogEntry>) {
        self.log.extend(entries);
    }

    pub fn memory(&self) -> u64 {
        (self.log.capacity() * size_of::<LogEntry>() + self.pages.capacity() * size_of::<LogPage>()) as u64
            + self.ops.results * 32
            + self.ops.sessions.len() as u64 * 64
            + size_of::<Self>() as u64
    }
}

fn put_log_entry(entry: &LogEntry, out: &mut Vec<u8>) {
    out.version(entry.version);
    out.version(entry.previous);
    out.object(entry.object);
    out.u32(entry.block);
    out.u32(entry.count);
    out.u8(match entry.kind {
        LogKind::Write => 0,
        LogKind::Free => 1,
        LogKind::Remove => 2,
        LogKind::Result => 3,
    });
    out.op(entry.op);
    out.u64(entry.lowest_outstanding);
    out.u64(entry.snap_seq);
}

/// Log entries as they are checkpointed.
pub(super) fn decode_log(bytes: &[u8]) -> Option<Vec<LogEntry>> {
    let mut take = Take(bytes);
    let mut entries = Vec::with_capacity(bytes.len() / LOG_ENTRY_LEN);
    while !take.0.is_empty() {
        entries.push(LogEntry {
            version: take.version()?,
            previous: take.version()?,
            object: take.object()?,
            block: take.u32()?,
            count: take.u32()?,
            kind: match take.u8()? {
                0 => LogKind::Write,
                1 => LogKind::Free,
                2 => LogKind::Remove,
                3 => LogKind::Result,
                _ => return None,
            },
            op: take.op()?,
            lowest_outstanding: take.u64()?,
            snap_seq: take.u64()?,
        });
    }
    Some(entries)
}
