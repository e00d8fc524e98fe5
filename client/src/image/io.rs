//! One request to an image: cut into object operations, and put together again.
//!
//! A request is cut at object borders, and reads and writes at `OP_DATA_LEN_MAX` too, always at a block border of the object, so
//! that no block is written by two of its operations. At most [`PIECES_IN_FLIGHT_MAX`] of them are out at once.

use super::header::{ImageHeader, data_object};
use crate::error::IoError;
use crate::event::{Extent, ImageIo, IoDone, Waterfall};
use crate::objecter::{ObjectOp, OpOutcome, OpTiming, extent_entries};
use loligo_config::id::PoolId;
use loligo_config::limits::OP_DATA_LEN_MAX;
use loligo_config::units::{BLOCK_SIZE, ByteLen, ByteOffset};
use loligo_net::wire::op::OpKind;
use loligo_reactor::dma::{Buffer, BufferPool, PoolExhausted, SharedBuffer};
use loligo_reactor::env::{Instant, Ticket};
use loligo_reactor::planted::{self, Bug};

/// Object operations of one request that are out at once: enough for the longest read and write, and a bound for a
/// discard of a whole image.
pub(crate) const PIECES_IN_FLIGHT_MAX: u32 = 32;

/// Where the bytes of a read gather.
#[derive(Debug)]
enum Gather {
    Nothing,
    /// One operation brings all: its buffer is handed on without a copy.
    Whole(Option<SharedBuffer>),
    /// Several do: they are joined here.
    Joined(Buffer),
    /// Allocated runs of the image, as first byte and one past the last.
    Runs(Vec<(u64, u64)>),
}

/// A request that has not ended.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) io: ImageIo,
    pub(crate) ticket: Ticket,
    pub(crate) submitted: Instant,
    pub(crate) len: u64,
    start: u64,
    end: u64,
    /// The next byte that no operation was made for.
    cursor: u64,
    in_flight: u32,
    error: Option<IoError>,
    gather: Gather,
    last: OpTiming,
    resends: u32,
}

/// First byte and length of a request; `None` for `Flush`.
pub(crate) fn range_of(io: &ImageIo) -> Option<(u64, u64)> {
    match io {
        ImageIo::Write { offset, data, .. } => Some((offset.0, data.len() as u64)),
        ImageIo::Read { offset, len }
        | ImageIo::Discard { offset, len }
        | ImageIo::WriteZeroes { offset, len }
        | ImageIo::Extents { offset, len } => Some((offset.0, len.0)),
        ImageIo::Flush => None,
    }
}

/// Length of the piece that begins at byte `at` of an image.
///
/// Zeroes for parts of blocks are written, and so bounded as writes are: they get a piece of their own, apart from the
/// whole blocks, which are only freed.
fn piece_len(at: u64, end: u64, order: u8, kind: OpKind) -> u64 {
    let (object_size, block) = (1_u64 << order, u64::from(BLOCK_SIZE));
    let left = (object_size - at % object_size).min(end - at);
    let within = at % block;
    match kind {
        OpKind::Read | OpKind::Write => left.min(u64::from(OP_DATA_LEN_MAX) - within),
        OpKind::WriteZeroes if within != 0 => left.min(block - within),
        OpKind::WriteZeroes if left > block => left - left % block,
        _ => left,
    }
}

impl Request {
    /// A request whose range was checked against the image.
    ///
    /// # Errors
    /// When there is no buffer to join a read in; the request comes back.
    pub(crate) fn new(
        io: ImageIo,
        ticket: Ticket,
        now: Instant,
        order: u8,
        pool: &BufferPool,
    ) -> Result<Self, (ImageIo, PoolExhausted)> {
        let (start, len) = range_of(&io).unwrap_or((0, 0));
        let end = start + len;
        let gather = match &io {
            ImageIo::Read { .. } if piece_len(start, end, order, OpKind::Read) == len => Gather::Whole(None),
            ImageIo::Read { .. } => match pool.alloc(usize::try_from(len).unwrap_or(usize::MAX)) {
                Ok(buffer) => Gather::Joined(buffer),
                Err(error) => return Err((io, error)),
            },
            ImageIo::Extents { .. } => Gather::Runs(Vec::new()),
            _ => Gather::Nothing,
        };
        Ok(Self {
            io,
            ticket,
            submitted: now,
            len,
            start,
            end,
            cursor: start,
            in_flight: 0,
            error: None,
            gather,
            last: OpTiming::default(),
            resends: 0,
        })
    }

    fn kind(&self) -> OpKind {
        match self.io {
            ImageIo::Read { .. } => OpKind::Read,
            ImageIo::Write { .. } => OpKind::Write,
            ImageIo::Discard { .. } => OpKind::Discard,
            ImageIo::WriteZeroes { .. } => OpKind::WriteZeroes,
            ImageIo::Extents { .. } | ImageIo::Flush => OpKind::Extents,
        }
    }

    /// The next operation to send and the byte of the image at which it begins.
    pub(crate) fn next_piece(&mut self, pool: PoolId, header: &ImageHeader) -> Option<(u64, ObjectOp)> {
        if self.cursor == self.end || self.error.is_some() || self.in_flight == PIECES_IN_FLIGHT_MAX {
            return None;
        }
        let at = self.cursor;
        let len = piece_len(at, self.end, header.order, self.kind());
        let object = data_object(pool, header.id, at >> header.order);
        let offset = u32::try_from(at % header.object_size()).expect("an object is at most 32 MiB");
        let op_len = u32::try_from(len).expect("a piece is no longer than an object");
        let mut op = ObjectOp::new(object, self.kind(), offset, op_len);
        op.snap_seq = header.snap_seq;
        if let ImageIo::Write { data, .. } = &self.io {
            let from = if planted::active(Bug::PieceShifted) { 0 } else { (at - self.start) as usize };
            op.data = Some(data.slice(from..from + len as usize));
        }
        self.cursor += len;
        self.in_flight += 1;
        Some((at, op))
    }

    /// An operation that began at byte `at` has ended. Returns whether the request has, unless it has more pieces.
    pub(crate) fn piece_done(
        &mut self,
        at: u64,
        result: Result<OpOutcome, IoError>,
        timing: &OpTiming,
        order: u8,
    ) {
        assert!(self.in_flight > 0, "a piece ends once");
        self.in_flight -= 1;
        self.last = *timing;
        self.resends = self.resends.saturating_add(timing.sends.saturating_sub(1));
        match result {
            Ok(outcome) => self.gather_piece(at, outcome, order),
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }

    fn gather_piece(&mut self, at: u64, outcome: OpOutcome, order: u8) {
        match &mut self.gather {
            Gather::Nothing => {}
            Gather::Whole(data) => *data = outcome.data,
            Gather::Joined(buffer) => {
                let from = (at - self.start) as usize;
                let data = outcome.data.as_deref().unwrap_or_default();
                buffer[from..from + data.len()].copy_from_slice(data);
            }
            Gather::Runs(runs) => {
                let object = at >> order << order;
                for (block, count) in extent_entries(outcome.data.as_deref().unwrap_or_default()) {
                    let first = object + u64::from(block) * u64::from(BLOCK_SIZE);
                    let past = first + u64::from(count) * u64::from(BLOCK_SIZE);
                    runs.push((first.clamp(self.start, self.end), past.clamp(self.start, self.end)));
                }
            }
        }
    }

    /// Whether nothing is out any more and nothing is left to send.
    pub(crate) fn has_ended(&self) -> bool {
        self.in_flight == 0 && (self.cursor == self.end || self.error.is_some())
    }

    /// The answer of a request that has ended.
    pub(crate) fn finish(&mut self, now: Instant) -> Result<IoDone, IoError> {
        assert!(self.has_ended(), "an answer is given when every operation has ended");
        if let Some(error) = self.error {
            return Err(error);
        }
        let waterfall = self.waterfall(now);
        let mut done = IoDone { data: None, extents: Vec::new(), waterfall };
        match std::mem::replace(&mut self.gather, Gather::Nothing) {
            Gather::Nothing => {}
            Gather::Whole(data) => done.data = data,
            Gather::Joined(buffer) => done.data = Some(buffer.freeze()),
            Gather::Runs(runs) => done.extents = cover(self.start, self.end, runs),
        }
        Ok(done)
    }

    fn waterfall(&self, now: Instant) -> Waterfall {
        let nanos = |to: Instant, from: Instant| u64::try_from(to.since(from).as_nanos()).unwrap_or(u64::MAX);
        if self.last.sends == 0 {
            return Waterfall { total_ns: nanos(now, self.submitted), ..Waterfall::default() };
        }
        Waterfall {
            total_ns: nanos(now, self.submitted),
            queue_ns: nanos(self.last.turn, self.submitted),
            encode_ns: nanos(self.last.sent, self.last.turn),
            round_trip_ns: nanos(self.last.arrived, self.last.sent),
            completion_ns: nanos(now, self.last.arrived),
            residence: self.last.residence,
            copies: self.last.copies,
            resends: self.resends,
        }
    }
}

/// The runs of a range, in order and without holes; neighbours differ.
fn cover(start: u64, end: u64, mut allocated: Vec<(u64, u64)>) -> Vec<Extent> {
    allocated.sort_unstable();
    let mut extents: Vec<Extent> = Vec::new();
    let mut push = |from: u64, to: u64, is_allocated: bool| {
        if from >= to {
            return;
        }
        match extents.last_mut() {
            Some(last) if last.allocated == is_allocated => last.len.0 += to - from,
            _ => extents.push(Extent {
                offset: ByteOffset(from),
                len: ByteLen(to - from),
                allocated: is_allocated,
            }),
        }
    };
    let mut at = start;
    for (from, to) in allocated {
        push(at, from, false);
        push(from.max(at), to, true);
        at = at.max(to);
    }
    push(at, end, false);
    extents
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_at_objects_and_at_block_borders() {
        assert_eq!(piece_len(100, 10_000_000, 12, OpKind::Write), 3996);
        let first = piece_len(100, 10_000_000, 22, OpKind::Write);
        assert_eq!(first, (1 << 20) - 100);
        assert_eq!(piece_len(100 + first, 10_000_000, 22, OpKind::Write), 1 << 20);
        assert_eq!(piece_len(5 << 20, 100 << 20, 22, OpKind::Discard), 3 << 20);
        assert_eq!(piece_len(100, 9000, 22, OpKind::WriteZeroes), 3996);
        assert_eq!(piece_len(4096, 9000, 22, OpKind::WriteZeroes), 4096);
        assert_eq!(piece_len(8192, 9000, 22, OpKind::WriteZeroes), 808);
        assert_eq!(piece_len(100, 200, 22, OpKind::WriteZeroes), 100);
    }

    #[test]
    fn runs_cover_the_range_in_order() {
        let extents = cover(100, 9000, vec![(8192, 9000), (4096, 8192)]);
        let plain: Vec<_> = extents.iter().map(|e| (e.offset.0, e.len.0, e.allocated)).collect();
        assert_eq!(plain, [(100, 3996, false), (4096, 4904, true)]);
        assert_eq!(cover(5, 5, Vec::new()), []);
        assert_eq!(cover(5, 6, Vec::new()).len(), 1);
    }
}
