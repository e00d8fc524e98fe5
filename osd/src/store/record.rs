//! The log's records: one block that names what the data behind it, or elsewhere, is.
//!
//! Payload: position, durable-through mark, generation, number of entries, blocks of data behind the record, the
//! segments (its own first), the echo, the entries. The echo repeats which PG versions the records just before made:
//! when one of them is found corrupt, exactly the PGs that it touched are known to be incomplete.

use super::alloc::Run;
use super::api::{Change, PgMeta, Transaction};
use super::codec::{BLOCK, BlockKind, HEAD, Identity, Put, Take, open, seal};
use super::layout::{NUMBER_END, SEGMENTS_NAMED_MAX, Segment, fill};
use loligo_config::id::{Epoch, ObjectId, ObjectVersion, OpId, PgId};
use loligo_config::limits::OP_BLOCKS_MAX;

const FIXED_LEN: usize = 8 * 3 + 2 + 4 + 2 + 2 + 8;
const SEGMENT_LEN: usize = 20;
const ECHO_LEN: usize = 24 + 8;
/// Room for entries, and for the echo when they leave some.
pub(super) const ENTRIES_LEN_MAX: usize = BLOCK - HEAD - FIXED_LEN - SEGMENT_LEN * SEGMENTS_NAMED_MAX;
/// Length of an entry aside from its runs and checksums.
pub(super) const ENTRY_LEN: usize = 1 + 8 + 16 + 16 + 16 + 8 + 8 + 24 + 4 + 4 + 2;
pub(super) const RUN_LEN: usize = 6 + 2;
/// Blocks of the largest object, 32 MiB.
pub(super) const OBJECT_BLOCKS_MAX: u32 = 8192;

// The worst op fits into a record of its own: every block of its data in a run of its own.
const _: () = assert!(ENTRY_LEN + OP_BLOCKS_MAX * (RUN_LEN + 4) <= ENTRIES_LEN_MAX);

/// What a record's entry does. 6 to 8 are kept for prepare, commit and rollback (erasure coding).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum EntryKind {
    Write = 0,
    Free = 1,
    Remove = 2,
    Result = 3,
    Meta = 4,
    RemovePg = 5,
}

impl EntryKind {
    fn from_u8(value: u8) -> Option<Self> {
        const ALL: [EntryKind; 6] = [
            EntryKind::Write,
            EntryKind::Free,
            EntryKind::Remove,
            EntryKind::Result,
            EntryKind::Meta,
            EntryKind::RemovePg,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == value)
    }
}

/// One change of one PG as the log has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub kind: EntryKind,
    pub pg: PgId,
    pub version: ObjectVersion,
    pub previous: ObjectVersion,
    pub op: OpId,
    pub lowest_outstanding: u64,
    pub snap_seq: u64,
    pub object: ObjectId,
    pub block: u32,
    pub count: u32,
    pub meta: PgMeta,
    pub runs: Vec<Run>,
    pub checksums: Vec<u32>,
}

impl Default for Entry {
    fn default() -> Self {
        Self {
            kind: EntryKind::Result,
            pg: PgId::default(),
            version: ObjectVersion::NONE,
            previous: ObjectVersion::NONE,
            op: OpId::default(),
            lowest_outstanding: 0,
            snap_seq: 0,
            object: ObjectId::default(),
            block: 0,
            count: 0,
            meta: PgMeta::default(),
            runs: Vec::new(),
            checksums: Vec::new(),
        }
    }
}

impl Entry {
    /// Makes this the entry of a transaction, keeping its allocations; `None` if lengths or ranges do not fit.
    pub fn set(&mut self, tx: &Transaction) -> Option<()> {
        self.runs.clear();
        self.checksums.clear();
        (self.pg, self.version, self.previous) = (tx.pg, tx.version, tx.previous);
        (self.op, self.lowest_outstanding, self.snap_seq) = (tx.op, tx.lowest_outstanding, tx.snap_seq);
        (self.object, self.block, self.count, self.meta) = (ObjectId::default(), 0, 0, PgMeta::default());
        self.kind = match &tx.change {
            Change::Write { object, block, data, checksums } => {
                let count = u32::try_from(data.len() / BLOCK).ok()?;
                let whole = count > 0 && count as usize <= OP_BLOCKS_MAX && data.len() % BLOCK == 0;
                if !whole || checksums.len() != count as usize * 4 {
                    return None;
                }
                (self.object, self.block, self.count) = (*object, *block, count);
                let mut take = Take(checksums);
                self.checksums.extend((0..count).map_while(|_| take.u32()));
                EntryKind::Write
            }
            Change::Free { object, block, count } => {
                (self.object, self.block, self.count) = (*object, *block, *count);
                if *count == 0 {
                    return None;
                }
                EntryKind::Free
            }
            Change::Remove { object } => {
                self.object = *object;
                EntryKind::Remove
            }
            Change::Result => EntryKind::Result,
            Change::Meta(meta) => {
                self.meta = *meta;
                EntryKind::Meta
            }
            Change::RemovePg => EntryKind::RemovePg,
        };
        self.in_range().then_some(())
    }

    fn in_range(&self) -> bool {
        let end = self.block.checked_add(self.count);
        let versioned = !matches!(self.kind, EntryKind::Meta | EntryKind::RemovePg);
        end.is_some_and(|end| end <= OBJECT_BLOCKS_MAX) && (!versioned || self.version > self.previous)
    }

    /// Bytes that it takes in a record.
    pub fn len(&self) -> usize {
        ENTRY_LEN + self.runs.len() * RUN_LEN + self.checksums.len() * 4
    }

    pub fn put(&self, out: &mut Vec<u8>) {
        out.u8(self.kind as u8);
        out.pg(self.pg);
        out.version(self.version);
        out.version(self.previous);
        out.op(self.op);
        out.u64(self.lowest_outstanding);
        out.u64(self.snap_seq);
        if self.kind == EntryKind::Meta {
            out.u32(self.meta.promised.0);
            out.u32(self.meta.activated.0);
            out.put(&[0; 16]);
        } else {
            out.object(self.object);
        }
        out.u32(self.block);
        out.u32(self.count);
        out.u16(self.runs.len() as u16);
        for run in &self.runs {
            out.u48(run.lba);
            out.u16(run.count as u16);
        }
        self.checksums.iter().for_each(|checksum| out.u32(*checksum));
    }

    fn take(take: &mut Take<'_>) -> Option<Self> {
        let kind = EntryKind::from_u8(take.u8()?)?;
        let mut entry = Self {
            kind,
            pg: take.pg()?,
            version: take.version()?,
            previous: take.version()?,
            op: take.op()?,
            lowest_outstanding: take.u64()?,
            snap_seq: take.u64()?,
            ..Self::default()
        };
        if kind == EntryKind::Meta {
            entry.meta = PgMeta { promised: Epoch(take.u32()?), activated: Epoch(take.u32()?) };
            take.bytes(16)?;
        } else {
            entry.object = take.object()?;
        }
        (entry.block, entry.count) = (take.u32()?, take.u32()?);
        for _ in 0..take.u16()? {
            entry.runs.push(Run { lba: take.u48()?, count: u32::from(take.u16()?) });
        }
        let written = entry.runs.iter().map(|run| u64::from(run.count)).sum::<u64>();
        let expected = if kind == EntryKind::Write { u64::from(entry.count) } else { 0 };
        if written != expected || entry.runs.iter().any(|run| run.count == 0) || !entry.in_range() {
            return None;
        }
        for _ in 0..written {
            entry.checksums.push(take.u32()?);
        }
        Some(entry)
    }
}

/// The entries of a record that is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct EntryBytes<'a> {
    pub count: u16,
    pub bytes: &'a [u8],
}

/// A PG's version as one record made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Touched {
    pub position: u64,
    pub pg: PgId,
    pub version: ObjectVersion,
}

/// A record, aside from its entries while it is written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub position: u64,
    /// Every position up to this one was durable when this record was submitted.
    pub mark: u64,
    pub generation: u64,
    /// Blocks of data right behind the record.
    pub inline: u32,
    pub segments: Vec<Segment>,
    /// The echo is complete from this position up to the one before this record.
    pub echo_from: u64,
    pub echo: Vec<Touched>,
    pub entries: Vec<Entry>,
}

impl Record {
    /// Fills a block. `recent` is what earlier records touched, oldest first; as much of it as fits is echoed.
    pub fn encode(
        &self,
        entries: EntryBytes<'_>,
        recent: impl DoubleEndedIterator<Item = Touched>,
        out: &mut Vec<u8>,
        block: &mut [u8],
        identity: &Identity,
        lba: u64,
    ) {
        assert!(entries.bytes.len() <= ENTRIES_LEN_MAX, "the entries fit");
        out.clear();
        out.u64(self.position);
        out.u64(self.mark);
        out.u64(self.generation);
        out.u16(entries.count);
        out.u32(self.inline);
        out.u16(self.segments.len() as u16);
        let echo_at = out.len();
        out.u16(0);
        out.u64(0);
        self.segments.iter().for_each(|segment| segment.put(out));
        let (count, from) = self.put_echo(ENTRIES_LEN_MAX - entries.bytes.len(), recent, out);
        out[echo_at..echo_at + 2].copy_from_slice(&count.to_le_bytes());
        out[echo_at + 2..echo_at + 10].copy_from_slice(&from.to_le_bytes());
        out.put(entries.bytes);
        fill(block, out);
        seal(block, BlockKind::Record, identity, lba);
    }

    fn put_echo(
        &self,
        room: usize,
        recent: impl DoubleEndedIterator<Item = Touched>,
        out: &mut Vec<u8>,
    ) -> (u16, u64) {
        let (mut count, mut from) = (0, self.position);
        for touched in recent.rev() {
            if (usize::from(count) + 1) * ECHO_LEN > room {
                // Part of that position may have been echoed: it does not count as complete.
                from = from.max(touched.position + 1);
                return (count, from);
            }
            out.u64(touched.position);
            out.pg(touched.pg);
            out.version(touched.version);
            from = touched.position;
            count += 1;
        }
        (count, from)
    }

    pub fn decode(block: &[u8], identity: &Identity, lba: u64) -> Option<Self> {
        let mut take = open(block, BlockKind::Record, identity, lba)?;
        let mut record =
            Self { position: take.u64()?, mark: take.u64()?, generation: take.u64()?, ..Self::default() };
        let entries = take.u16()?;
        record.inline = take.u32()?;
        let segments = usize::from(take.u16()?);
        let echo = take.u16()?;
        record.echo_from = take.u64()?;
        let numbers = [record.position, record.generation, record.echo_from];
        let possible = record.mark < record.position && numbers.iter().all(|number| *number < NUMBER_END);
        if segments > SEGMENTS_NAMED_MAX || !possible {
            return None;
        }
        for _ in 0..segments {
            record.segments.push(Segment::take(&mut take)?);
        }
        for _ in 0..echo {
            let position = take.u64()?;
            record.echo.push(Touched { position, pg: take.pg()?, version: take.version()? });
        }
        for _ in 0..entries {
            record.entries.push(Entry::take(&mut take)?);
        }
        Some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_config::id::{ClusterId, DeviceId, OsdId, PoolId, SessionId, ShardId};

    fn identity() -> Identity {
        let id = uuid::Uuid::from_u128(1);
        Identity { cluster: ClusterId(id), osd: OsdId(0), device: DeviceId(id), shard: ShardId(0) }
    }

    fn version(sequence: u64) -> ObjectVersion {
        ObjectVersion { interval: Epoch(3), stream: 0, sequence }
    }

    fn write(runs: Vec<Run>) -> Entry {
        let count: u32 = runs.iter().map(|run| run.count).sum();
        Entry {
            kind: EntryKind::Write,
            pg: PgId { pool: PoolId(1), index: 2 },
            version: version(8),
            previous: version(7),
            op: OpId { session: SessionId(5), number: 6 },
            lowest_outstanding: 4,
            snap_seq: 9,
            block: 17,
            count,
            checksums: (0..count).collect(),
            runs,
            ..Entry::default()
        }
    }

    fn round_trip(entries: Vec<Entry>, recent: &[Touched]) -> Record {
        let segments = vec![Segment { ordinal: 1, lba: 2, len: 3 }; SEGMENTS_NAMED_MAX];
        let record =
            Record { position: 100, mark: 98, generation: 2, inline: 5, segments, ..Record::default() };
        let mut bytes = Vec::new();
        entries.iter().for_each(|entry| entry.put(&mut bytes));
        let mut block = vec![0; BLOCK];
        let count = entries.len() as u16;
        let entries_now = EntryBytes { count, bytes: &bytes };
        record.encode(entries_now, recent.iter().copied(), &mut Vec::new(), &mut block, &identity(), 50);
        let found = Record::decode(&block, &identity(), 50).unwrap();
        assert_eq!(Record { echo: vec![], echo_from: 0, entries: vec![], ..found.clone() }, record);
        assert_eq!(found.entries, entries);
        found
    }

    #[test]
    fn the_largest_scattered_op_fits_with_some_echo() {
        let runs = (0..256).map(|at| Run { lba: (1 << 47) + at * 2, count: 1 }).collect();
        let recent: Vec<_> = (60..100)
            .map(|position| Touched { position, pg: PgId::default(), version: version(position) })
            .collect();
        let found = round_trip(vec![write(runs)], &recent);
        assert!(found.echo_from < 95 && found.echo_from > 60, "{}", found.echo_from);
        assert_eq!(found.echo.len() as u64, 100 - found.echo_from);
    }

    #[test]
    fn every_kind_comes_back() {
        let mut entries = vec![write(vec![Run { lba: 9, count: 3 }, Run { lba: 99, count: 1 }])];
        for kind in [EntryKind::Free, EntryKind::Remove, EntryKind::Result, EntryKind::RemovePg] {
            entries.push(Entry { kind, count: 4, runs: vec![], checksums: vec![], ..write(vec![]) });
        }
        let meta = PgMeta { promised: Epoch(5), activated: Epoch(4) };
        entries.push(Entry { kind: EntryKind::Meta, meta, ..Entry::default() });
        let touched = Touched { position: 99, pg: PgId::default(), version: version(1) };
        assert_eq!(round_trip(entries, &[touched]).echo_from, 99);
    }

    #[test]
    fn numbers_that_would_overflow_are_refused() {
        let good = Record { position: 100, mark: 98, generation: 2, ..Record::default() };
        let decoded = |record: &Record| {
            let mut block = vec![0; BLOCK];
            let none = EntryBytes { count: 0, bytes: &[] };
            record.encode(none, std::iter::empty(), &mut Vec::new(), &mut block, &identity(), 50);
            Record::decode(&block, &identity(), 50)
        };
        assert!(decoded(&good).is_some());
        for bad in [
            Record { position: u64::MAX, ..good.clone() },
            Record { position: NUMBER_END, mark: NUMBER_END - 1, ..good.clone() },
            Record { mark: 100, ..good.clone() },
            Record { generation: u64::MAX, ..good.clone() },
            Record { segments: vec![Segment { ordinal: u64::MAX, lba: 2, len: 3 }], ..good.clone() },
            Record { segments: vec![Segment { ordinal: 1, lba: u64::MAX, len: 3 }], ..good.clone() },
        ] {
            assert_eq!(decoded(&bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_position_echoed_in_part_does_not_count() {
        let touched = |position| Touched { position, pg: PgId::default(), version: version(1) };
        let recent: Vec<_> = [98; 200].into_iter().chain([99]).map(touched).collect();
        assert_eq!(round_trip(vec![], &recent).echo_from, 99);
    }

    #[test]
    fn impossible_entries_are_refused() {
        let mut bytes = Vec::new();
        Entry { count: 2, ..write(vec![Run { lba: 9, count: 3 }]) }.put(&mut bytes);
        assert_eq!(Entry::take(&mut Take(&bytes)), None);
        bytes.clear();
        Entry { block: OBJECT_BLOCKS_MAX, ..write(vec![Run { lba: 9, count: 1 }]) }.put(&mut bytes);
        assert_eq!(Entry::take(&mut Take(&bytes)), None);
        assert_eq!(Entry::take(&mut Take(&[9; 40])), None);
    }
}
