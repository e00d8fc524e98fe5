//! The log: open record, records in flight, segments.
//!
//! Every record names its own segment and those to come. A record may only be placed in a segment that a durable
//! record or anchor names: so whatever was in flight at a crash, every surviving record is found at the mount, also
//! those above a gap.

use super::Store;
use super::alloc::Run;
use super::api::{StoreEvent, SubmitError};
use super::codec::BLOCK;
use super::io::Purpose;
use super::layout::{Range, SEGMENTS_NAMED_MAX, Segment};
use super::record::{ENTRIES_LEN_MAX, ENTRY_LEN, Entry, EntryBytes, RUN_LEN, Record, Touched};
use arrayvec::ArrayVec;
use loligo_config::id::{ObjectVersion, PgId};
use loligo_config::limits::OP_BLOCKS_MAX;
use loligo_config::units::Lba;
use loligo_reactor::dma::{Buffer, SharedBuffer};
use loligo_reactor::env::{BlockDevice, DiskError, DiskOp, Instant, Ticket, WRITE_PIECES_MAX, WriteList};
use loligo_reactor::planted::{self, Bug};
use std::collections::VecDeque;

/// Records in flight. More would not be faster: each carries every op of one poll.
const RECORDS_IN_FLIGHT_MAX: usize = 64;
/// Versions remembered for the echo.
const RECENT_MAX: usize = 128;
/// Segments allocated ahead.
const UPCOMING_MAX: usize = SEGMENTS_NAMED_MAX - 1;

/// Data of a record that is not behind it.
type Scattered = Vec<(Run, SharedBuffer)>;

/// A record on its way to the device.
#[derive(Debug, Default)]
struct Flight {
    position: u64,
    mark: u64,
    /// The last segment that it names.
    named: u64,
    /// Device writes not completed yet.
    parts: u32,
    tickets: Vec<Ticket>,
    touched: Vec<(PgId, ObjectVersion)>,
    /// Where its data goes.
    data: Vec<Run>,
    submitted: Instant,
    completed: Instant,
}

/// The record that the ops of this poll share.
#[derive(Debug)]
struct OpenRecord {
    flight: Flight,
    lba: u64,
    inline: u32,
    entries: u16,
    head: Buffer,
    pieces: ArrayVec<SharedBuffer, { WRITE_PIECES_MAX - 1 }>,
    scattered: Scattered,
}

/// A superseded run of blocks.
#[derive(Debug)]
struct Freed {
    /// The record that superseded it.
    position: u64,
    /// Reads that began before this number may be reading it.
    reads: u64,
    run: Run,
}

#[derive(Debug)]
pub(super) struct Log {
    pub generation: u64,
    pub ranges: Vec<Range>,
    /// The next position.
    pub next: u64,
    /// The first position that is not in the checkpoint.
    pub start: u64,
    /// Every position up to this one is durable.
    pub durable: u64,
    /// The highest mark that a durable record carries.
    recorded: u64,
    /// The last segment that something durable names.
    pub named: u64,
    pub current: Segment,
    /// Blocks of `current` used.
    pub offset: u32,
    pub upcoming: VecDeque<Segment>,
    segment_blocks: u32,
    open: Option<OpenRecord>,
    in_flight: VecDeque<Flight>,
    spare: Vec<Flight>,
    entry_bytes: Vec<u8>,
    record_bytes: Vec<u8>,
    record: Record,
    recent: VecDeque<Touched>,
    /// Blocks that belong to the log, to be freed when a checkpoint covers the position.
    pub blocks: VecDeque<(u64, Run)>,
    pub block_count: u64,
    /// Blocks of data in the log since the last checkpoint began: a mount reads them too.
    pub logged_data: u64,
    freed: VecDeque<Freed>,
    pub freed_count: u64,
    /// An op was refused that the superseded blocks may have room for: a record shall carry the mark, however few
    /// they are.
    pub mark_wanted: bool,
}

/// What a mount found, to go on from.
#[derive(Debug)]
pub(super) struct LogStart {
    pub generation: u64,
    pub ranges: Vec<Range>,
    pub next: u64,
    pub start: u64,
    pub current: Segment,
    pub offset: u32,
    pub upcoming: VecDeque<Segment>,
    pub blocks: VecDeque<(u64, Run)>,
    pub segment_blocks: u32,
}

impl Log {
    pub fn new(from: LogStart) -> Self {
        let named = from.upcoming.back().map_or(from.current.ordinal, |segment| segment.ordinal);
        Self {
            generation: from.generation,
            ranges: from.ranges,
            next: from.next,
            start: from.start,
            durable: from.next - 1,
            recorded: from.next - 1,
            named,
            current: from.current,
            offset: from.offset,
            upcoming: from.upcoming,
            segment_blocks: from.segment_blocks,
            open: None,
            in_flight: VecDeque::with_capacity(RECORDS_IN_FLIGHT_MAX),
            spare: Vec::with_capacity(RECORDS_IN_FLIGHT_MAX),
            entry_bytes: Vec::with_capacity(BLOCK),
            record_bytes: Vec::with_capacity(BLOCK),
            record: Record::default(),
            recent: VecDeque::with_capacity(RECENT_MAX + 64),
            block_count: from.blocks.iter().map(|(_, run)| u64::from(run.count)).sum(),
            blocks: from.blocks,
            logged_data: 0,
            freed: VecDeque::new(),
            freed_count: 0,
            mark_wanted: false,
        }
    }

    /// Blocks of the segments that are not used yet.
    pub fn remaining(&self) -> u64 {
        let upcoming: u64 = self.upcoming.iter().map(|segment| u64::from(segment.len)).sum();
        u64::from(self.current.len - self.offset) + upcoming
    }

    /// Blocks that a record may take of the current segment. The last block of the last segment is only for a
    /// record that names another, or the log could never go on.
    fn usable(&self) -> u32 {
        (self.current.len - self.offset).saturating_sub(u32::from(self.upcoming.is_empty()))
    }

    fn next_usable(&self) -> u32 {
        match self.upcoming.front() {
            Some(next) if next.ordinal <= self.named => next.len - u32::from(self.upcoming.len() == 1),
            _ => 0,
        }
    }

    /// The segments that a record or anchor written now names.
    pub fn segments(&self) -> impl Iterator<Item = Segment> + '_ {
        std::iter::once(self.current).chain(self.upcoming.iter().copied())
    }

    /// The position of the last record in flight that writes one of these blocks; 0 if none does.
    pub fn position_writing(&self, lba: u64, count: u32) -> u64 {
        let end = lba + u64::from(count);
        let open = self.open.as_ref().map(|open| &open.flight);
        let all = open.into_iter().chain(self.in_flight.iter().rev());
        let mut writing = all.filter(|flight| flight.data.iter().any(|run| run.lba < end && lba < run.end()));
        writing.next().map_or(0, |flight| flight.position)
    }

    pub fn tickets_in_flight(&self) -> usize {
        let open = self.open.as_ref().map_or(0, |open| open.flight.tickets.len());
        open + self.in_flight.iter().map(|flight| flight.tickets.len()).sum::<usize>()
    }

    pub fn is_idle(&self) -> bool {
        self.open.is_none() && self.in_flight.is_empty()
    }

    /// Blocks of the open record and the data behind it.
    pub fn open_blocks(&self) -> u32 {
        self.open.as_ref().map_or(0, |open| 1 + open.inline)
    }

    pub fn open_lba(&self) -> Option<u64> {
        self.open.as_ref().map(|open| open.lba)
    }

    pub fn has_open(&self) -> bool {
        self.open.is_some()
    }

    pub fn freed_runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.freed.iter().map(|freed| freed.run)
    }

    /// Whether superseded blocks wait for one more record to carry the mark.
    pub fn wants_mark(&self) -> bool {
        self.freed
            .front()
            .is_some_and(|freed| freed.position <= self.durable && freed.position > self.recorded)
    }
}

impl OpenRecord {
    fn inline_fits(&self, count: u32, segment_end: u64, transfer_max: u32) -> bool {
        let blocks = 1 + self.inline + count;
        !self.pieces.is_full() && self.lba + u64::from(blocks) <= segment_end && blocks <= transfer_max
    }
}

impl<D: BlockDevice> Store<D> {
    /// Finds a place for an entry and its data, and puts both into the open record.
    pub(super) fn place(
        &mut self,
        entry: &mut Entry,
        data: Option<&SharedBuffer>,
    ) -> Result<(), SubmitError> {
        let count = if data.is_some() { entry.count } else { 0 };
        if self.log.open.is_some() && !self.fits_open(entry, count) {
            self.close_record();
        }
        if self.log.open.is_none() {
            self.open_record(count)?;
        }
        let open = self.log.open.as_mut().expect("just opened");
        if let Some(data) = data {
            let end = self.log.current.end() - u64::from(self.log.upcoming.is_empty());
            if open.inline_fits(count, end, self.transfer_max) {
                entry.runs.push(Run { lba: open.lba + 1 + u64::from(open.inline), count });
                open.inline += count;
                open.pieces.push(data.clone());
            } else if self.alloc.alloc_scattered(count, OP_BLOCKS_MAX, &mut entry.runs) {
                let mut at = 0;
                for run in &entry.runs {
                    let len = run.count as usize * BLOCK;
                    open.scattered.push((*run, data.slice(at..at + len)));
                    at += len;
                }
            } else {
                return Err(self.cancel_open());
            }
            open.flight.data.extend_from_slice(&entry.runs);
        }
        entry.put(&mut self.log.entry_bytes);
        open.entries += 1;
        assert!(self.log.entry_bytes.len() <= ENTRIES_LEN_MAX, "the entry was found to fit");
        Ok(())
    }

    /// No space for scattered data. A record that nothing is in yet is given up.
    fn cancel_open(&mut self) -> SubmitError {
        let open = self.log.open.take_if(|open| open.entries == 0);
        self.log.spare.extend(open.map(|open| open.flight));
        self.out_of_space()
    }

    fn fits_open(&self, entry: &Entry, count: u32) -> bool {
        let Some(open) = &self.log.open else { return false };
        let room = ENTRIES_LEN_MAX - self.log.entry_bytes.len();
        if count == 0 {
            return entry.len() <= room;
        }
        let end = self.log.current.end() - u64::from(self.log.upcoming.is_empty());
        if open.inline_fits(count, end, self.transfer_max) {
            return entry.len() + RUN_LEN <= room;
        }
        !open.scattered.is_empty() && ENTRY_LEN + count as usize * (RUN_LEN + 4) <= room
    }

    /// Allocates segments ahead, as long as the next checkpoint keeps its space.
    fn replenish(&mut self) {
        while self.log.upcoming.len() < UPCOMING_MAX {
            let ahead: u64 = self.log.upcoming.iter().map(|segment| u64::from(segment.len)).sum();
            let want = self.log.segment_blocks;
            if self.log.upcoming.len() >= 2 && ahead >= u64::from(want) {
                return;
            }
            let room = self.alloc.free().saturating_sub(self.checkpoint_cost());
            let want = want.min(u32::try_from(room).unwrap_or(u32::MAX));
            if want == 0 {
                return;
            }
            let Some(run) = self.alloc.alloc_run(want, 1) else { return };
            let last = self.log.upcoming.back().unwrap_or(&self.log.current);
            let segment = Segment { ordinal: last.ordinal + 1, lba: run.lba, len: run.count };
            self.log.upcoming.push_back(segment);
        }
    }

    /// Opens a record where it and `count` blocks of data are contiguous, or at least the record itself fits.
    fn open_record(&mut self, count: u32) -> Result<(), SubmitError> {
        if self.log.in_flight.len() >= RECORDS_IN_FLIGHT_MAX {
            return Err(SubmitError::Busy);
        }
        let Ok(head) = self.pool.alloc(BLOCK) else { return Err(SubmitError::Busy) };
        self.replenish();
        let blocks = count + 1;
        let inline = blocks <= self.transfer_max;
        if !(inline && self.log.usable() >= blocks) {
            if inline && self.log.next_usable() >= blocks {
                self.advance_segment();
            } else if self.log.usable() == 0 {
                if self.log.next_usable() == 0 {
                    return Err(self.out_of_space());
                }
                self.advance_segment();
            }
        }
        let mut flight = self.log.spare.pop().unwrap_or_default();
        flight.tickets.clear();
        flight.touched.clear();
        flight.data.clear();
        flight.position = self.log.next;
        let lba = self.log.current.lba + u64::from(self.log.offset);
        let (pieces, scattered) = (ArrayVec::new(), Vec::new());
        self.log.entry_bytes.clear();
        self.log.open = Some(OpenRecord { flight, lba, inline: 0, entries: 0, head, pieces, scattered });
        Ok(())
    }

    /// Goes on in the next segment; what is left of this one stays with the log until the next checkpoint.
    fn advance_segment(&mut self) {
        let log = &mut self.log;
        let left = Run { lba: log.current.lba + u64::from(log.offset), count: log.current.len - log.offset };
        if left.count > 0 {
            log.blocks.push_back((log.next, left));
            log.block_count += u64::from(left.count);
        }
        log.current = log.upcoming.pop_front().expect("the caller has looked");
        log.offset = 0;
        self.replenish();
    }

    /// Notes what the entry just placed changed.
    pub(super) fn note(&mut self, entry: &Entry, freed: &mut Vec<Run>, ticket: Option<Ticket>) {
        let reads = self.reads.next();
        let log = &mut self.log;
        let flight = &mut log.open.as_mut().expect("placed in the open record").flight;
        flight.tickets.extend(ticket);
        // Metas have no version, but a lost promise has to be noticed as well.
        flight.touched.push((entry.pg, entry.version));
        let position = flight.position;
        for run in freed.drain(..) {
            log.freed_count += u64::from(run.count);
            log.freed.push_back(Freed { position, reads, run });
        }
    }

    /// A record without entries: it only carries the mark. A log without room for it gets some from a checkpoint,
    /// which makes the mark needless.
    pub(super) fn write_mark(&mut self) {
        if self.log.open.is_some() {
            return;
        }
        match self.open_record(0) {
            Ok(()) => self.close_record(),
            Err(_) => self.checkpoint.wanted |= self.log.mark_wanted,
        }
    }

    /// A checkpoint holds every record up to this one: none of them is looked at again, so what they superseded is
    /// free.
    pub(super) fn checkpointed(&mut self, position: u64) {
        self.log.recorded = self.log.recorded.max(position);
    }

    /// Hands the open record to the device.
    pub(super) fn close_record(&mut self) {
        let Some(mut open) = self.log.open.take() else { return };
        let log = &mut self.log;
        log.mark_wanted = false;
        let position = open.flight.position;
        assert_eq!(position, log.next, "positions have no holes");
        log.record.segments.clear();
        log.record.segments.push(log.current);
        log.record.segments.extend(log.upcoming.iter().copied());
        (log.record.position, log.record.mark) = (position, log.durable);
        (log.record.generation, log.record.inline) = (log.generation, open.inline);
        open.flight.mark = log.durable;
        open.flight.named = log.record.segments.last().expect("its own at least").ordinal;
        open.flight.submitted = self.now;
        let (recent, out) = (log.recent.iter().copied(), &mut log.record_bytes);
        let entries = EntryBytes { count: open.entries, bytes: &log.entry_bytes };
        log.record.encode(entries, recent, out, &mut open.head, &self.identity, open.lba);
        let touched = open.flight.touched.iter();
        log.recent.extend(touched.map(|(pg, version)| Touched { position, pg: *pg, version: *version }));
        log.recent.drain(..log.recent.len().saturating_sub(RECENT_MAX));
        log.next += 1;
        log.offset += 1 + open.inline;
        log.logged_data += u64::from(open.inline);
        log.blocks.push_back((position, Run { lba: open.lba, count: 1 }));
        log.block_count += 1;
        let mut data = WriteList::new();
        data.push(open.head.freeze());
        data.extend(open.pieces);
        let fua = self.volatile && !planted::active(Bug::RecordWithoutFua);
        let ticket = Purpose::Record.ticket(position);
        open.flight.parts = 1;
        self.io.send(DiskOp::Write { lba: Lba(open.lba), data, fua }, ticket);
        for (run, piece) in open.scattered {
            for (lba, part) in
                (run.lba..).step_by(self.transfer_max as usize).zip(pieces(piece, self.transfer_max))
            {
                let data = WriteList::from_iter([part]);
                open.flight.parts += 1;
                self.io.send(DiskOp::Write { lba: Lba(lba), data, fua }, ticket);
            }
        }
        if planted::active(Bug::CommitBeforeDurable) {
            let tickets = open.flight.tickets.drain(..);
            self.events.extend(tickets.map(|ticket| StoreEvent::Committed { ticket, device_ns: 0 }));
        }
        self.log.in_flight.push_back(open.flight);
    }

    pub(super) fn record_completed(&mut self, position: u64) {
        let log = &mut self.log;
        let Some(at) = position.checked_sub(log.durable + 1) else { return };
        let flight = log.in_flight.get_mut(at as usize).expect("a completed record was in flight");
        flight.parts -= 1;
        flight.completed = self.now;
        if planted::active(Bug::CommitOutOfOrder) && flight.parts == 0 {
            let tickets = flight.tickets.drain(..);
            self.events.extend(tickets.map(|ticket| StoreEvent::Committed { ticket, device_ns: 0 }));
        }
        while log.in_flight.front().is_some_and(|flight| flight.parts == 0) {
            let mut flight = log.in_flight.pop_front().expect("just seen");
            log.durable = flight.position;
            log.recorded = log.recorded.max(flight.mark);
            log.named = log.named.max(flight.named);
            for (pg, version) in flight.touched.drain(..) {
                if let Some(pg) = self.state.pgs.get_mut(&pg).filter(|_| version.is_some()) {
                    pg.status.durable = version;
                }
            }
            let nanos = flight.completed.since(flight.submitted).as_nanos();
            let device_ns = u32::try_from(nanos).unwrap_or(u32::MAX);
            let events = flight.tickets.drain(..).map(|ticket| StoreEvent::Committed { ticket, device_ns });
            self.events.extend(events);
            log.spare.push(flight);
        }
    }

    /// Gives superseded blocks back to the allocator: those that a later durable record's mark covers, and that no
    /// read may be reading. Durable alone is not enough: a torn tail is recognised by reading the data of every
    /// record above the highest surviving mark, so that data must still be there.
    pub(super) fn release_freed(&mut self) -> bool {
        let oldest_read = self.reads.oldest();
        let mut released = false;
        while let Some(freed) = self.log.freed.front() {
            let is_recorded = freed.position <= self.log.recorded
                || planted::active(Bug::ReuseBeforeRecord)
                || (planted::active(Bug::ReuseBeforeMark) && freed.position <= self.log.durable);
            let is_read = freed.reads > oldest_read && !planted::active(Bug::ReuseUnderRead);
            if !is_recorded || is_read {
                break;
            }
            let run = freed.run;
            self.log.freed.pop_front();
            self.log.freed_count -= u64::from(run.count);
            self.release_data(run);
            released = true;
        }
        released
    }

    /// Every transaction in flight fails.
    pub(super) fn fail_log(&mut self, error: DiskError) {
        let open = self.log.open.take().map(|open| open.flight);
        let mut tickets: Vec<Ticket> = Vec::new();
        self.log.in_flight.iter_mut().for_each(|flight| tickets.append(&mut flight.tickets));
        tickets.extend(open.into_iter().flat_map(|flight| flight.tickets));
        self.events.extend(tickets.into_iter().map(|ticket| StoreEvent::Failed { ticket, error }));
    }
}

/// Cuts data into writes of at most `blocks`.
fn pieces(data: SharedBuffer, blocks: u32) -> impl Iterator<Item = SharedBuffer> {
    let step = blocks as usize * BLOCK;
    (0..data.len()).step_by(step).map(move |at| data.slice(at..(at + step).min(data.len())))
}
