//! The transmission phase: requests, the I/O they are cut into, and their replies.
//!
//! A read or write is cut at multiples of [`PART_LEN`] of the image, so that no buffer is larger than one operation of
//! the cluster, and a long write is on its way before its last byte has arrived. The parts take effect
//! independently, which is legal: a request of several blocks is not one atomic action.

use super::protocol::{
    BLOCK_LEN_PREFERRED, CHUNK_HEADER_LEN, CONTEXT_ALLOCATION_ID, PAYLOAD_LEN_MAX, Request, SIMPLE_REPLY_LEN,
    STATE_HOLE, STATE_ZERO, Writer, chunk, command, command_flag as flag, error,
};
use super::session::{Action, Export, IN_FLIGHT_BYTES_MAX, IoKey, REQUESTS_MAX};
use crate::event::{Extent, ImageIo, IoDone};
use arrayvec::ArrayVec;
use loligo_config::limits::OP_DATA_LEN_MAX;
use loligo_config::units::{ByteLen, ByteOffset};
use loligo_reactor::dma::{Buffer, BufferPool, SharedBuffer};

/// Bytes of one I/O of a read or write: what one operation of the cluster carries.
pub(super) const PART_LEN: u64 = OP_DATA_LEN_MAX as u64;
/// Zero writes in flight for one request that must store its zeroes.
const ZERO_PARTS_MAX: u32 = 8;
/// Reads up to this many bytes go out in one buffer with their header: copying them costs less than a second send.
const INLINE_READ_LEN_MAX: u32 = 16 << 10;
/// Runs of zero and non-zero blocks that one read reply tells apart; the rest goes out as data.
const RUNS_MAX: usize = 60;
/// Objects that one block status request looks at: its answer may be shorter than what was asked for, and the client
/// asks again. Bounds the operations that one request of 28 bytes causes.
const STATUS_OBJECTS_MAX: u64 = 64;
/// Extents in one block status reply, for the same reason.
const STATUS_EXTENTS_MAX: usize = 500;
const HEADS_LEN: usize = 2048;
const _: () = assert!(HEADS_LEN >= RUNS_MAX * (CHUNK_HEADER_LEN + 12));
const _: () = assert!(2 * HEADS_LEN >= CHUNK_HEADER_LEN + 4 + STATUS_EXTENTS_MAX * 8);

/// What follows a request in the stream.
#[derive(Debug)]
pub(super) enum Next {
    /// No room: the request was not taken.
    Later,
    /// The next request.
    Request,
    /// Its payload.
    Payload(Payload),
    /// So many bytes that mean nothing, since the request was refused.
    Skip(u64),
    /// Nothing: the client has disconnected.
    Disconnect,
}

/// A write whose data is arriving.
#[derive(Debug)]
pub(super) struct Payload {
    slot: u32,
    offset: u64,
    end: u64,
    fua: bool,
    /// The part that is being filled, and how far.
    part: Option<(Buffer, usize)>,
}

impl Payload {
    pub fn is_complete(&self) -> bool {
        self.offset == self.end && self.part.is_none()
    }
}

/// One request that is not answered yet. Slots are recycled with their memory.
#[derive(Debug, Default)]
struct Pending {
    busy: bool,
    command: u16,
    flags: u16,
    cookie: u64,
    offset: u64,
    len: u32,
    /// Where the reply's header will be: taken with the request, so that a reply never lacks memory.
    head: Option<Buffer>,
    /// Up to where I/O was submitted.
    submitted: u64,
    /// I/O in flight.
    parts: u32,
    /// The first error, or 0.
    error: u32,
    /// What was read, by part.
    data: Vec<Option<SharedBuffer>>,
    extents: Vec<Extent>,
}

impl Pending {
    fn end(&self) -> u64 {
        self.offset + u64::from(self.len)
    }

    /// What it counts for while it is in flight.
    fn bytes(&self) -> u64 {
        match self.command {
            command::READ | command::WRITE => u64::from(self.len),
            _ => 0,
        }
    }
}

/// The state of the phase.
#[derive(Debug)]
pub(super) struct Transmission {
    pool: BufferPool,
    export: Export,
    structured: bool,
    context: bool,
    slots: Vec<Pending>,
    free: Vec<u32>,
    in_flight: u32,
    in_flight_bytes: u64,
    zeroes: Option<SharedBuffer>,
}

/// The end of the part that begins at `offset`.
fn part_end(offset: u64, end: u64) -> u64 {
    (offset - offset % PART_LEN).saturating_add(PART_LEN).min(end)
}

/// Maps an errno to the few that the protocol knows.
fn wire_error(errno: i32) -> u32 {
    match errno {
        1 => error::EPERM,
        12 => error::ENOMEM,
        22 => error::EINVAL,
        28 => error::ENOSPC,
        95 => error::ENOTSUP,
        108 => error::ESHUTDOWN,
        _ => error::EIO,
    }
}

impl Transmission {
    pub fn new(pool: BufferPool) -> Self {
        Self {
            pool,
            export: Export { size: 0, object_len: PART_LEN, read_only: true },
            structured: false,
            context: false,
            slots: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            in_flight_bytes: 0,
            zeroes: None,
        }
    }

    pub fn begin(&mut self, export: Export, structured: bool, context: bool) {
        self.export = export;
        self.structured = structured;
        self.context = context;
    }

    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    pub fn resized(&mut self, size: u64) {
        self.export.size = size;
    }

    /// Takes one request.
    pub fn request(&mut self, request: &Request, out: &mut Vec<Action>) -> Next {
        if request.command == command::DISC {
            return Next::Disconnect;
        }
        let has_payload = request.command == command::WRITE;
        let refused = self.refusal(request);
        let counted = match request.command {
            command::READ | command::WRITE if refused == 0 => u64::from(request.len),
            _ => 0,
        };
        if !self.has_room(counted) {
            return Next::Later;
        }
        let Some(slot) = self.take_slot(request, refused == 0) else { return Next::Later };
        if refused != 0 {
            self.pending(slot).error = refused;
            self.reply(slot, out);
            let payload = if has_payload { u64::from(request.len) } else { 0 };
            return if payload == 0 { Next::Request } else { Next::Skip(payload) };
        }
        if has_payload && request.len > 0 {
            return Next::Payload(Payload {
                slot,
                offset: request.offset,
                end: request.offset + u64::from(request.len),
                fua: request.flags & flag::FUA != 0,
                part: None,
            });
        }
        self.start(slot, out);
        Next::Request
    }

    fn has_room(&self, counted: u64) -> bool {
        let bytes = self.in_flight_bytes.saturating_add(counted);
        (self.in_flight as usize) < REQUESTS_MAX
            && (self.in_flight_bytes == 0 || bytes <= IN_FLIGHT_BYTES_MAX)
    }

    /// Why a request is refused, or 0.
    fn refusal(&self, request: &Request) -> u32 {
        let allowed = match request.command {
            command::READ if self.structured => flag::DF,
            command::READ | command::FLUSH | command::CACHE => 0,
            command::WRITE | command::TRIM => flag::FUA,
            command::WRITE_ZEROES => flag::FUA | flag::NO_HOLE | flag::FAST_ZERO,
            command::BLOCK_STATUS if self.context => flag::REQ_ONE,
            _ => return error::EINVAL,
        };
        // FUA is legal on every command once it was advertised; where nothing is written it means nothing.
        if request.flags & !(allowed | flag::FUA) != 0 {
            return error::EINVAL;
        }
        let writes = matches!(request.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        if writes && self.export.read_only {
            return error::EPERM;
        }
        let moves_data = matches!(request.command, command::READ | command::WRITE);
        if moves_data && request.len > PAYLOAD_LEN_MAX {
            return error::EINVAL;
        }
        if request.command == command::BLOCK_STATUS && request.len == 0 {
            return error::EINVAL;
        }
        let end = request.offset.checked_add(u64::from(request.len));
        if request.command != command::FLUSH && end.is_none_or(|end| end > self.export.size) {
            let grows = matches!(request.command, command::WRITE | command::WRITE_ZEROES);
            return if grows { error::ENOSPC } else { error::EINVAL };
        }
        let slow = flag::NO_HOLE | flag::FAST_ZERO;
        if request.flags & slow == slow {
            return error::ENOTSUP; // Stored zeroes are written like any data, so not fast.
        }
        0
    }

    fn head_len(&self, request: &Request, accepted: bool) -> usize {
        match request.command {
            command::READ if accepted && request.len <= INLINE_READ_LEN_MAX => 512 + request.len as usize,
            command::READ if accepted && self.structured => HEADS_LEN,
            command::BLOCK_STATUS if accepted => 2 * HEADS_LEN,
            _ => 512,
        }
    }

    fn take_slot(&mut self, request: &Request, accepted: bool) -> Option<u32> {
        let stores_zeroes = request.command == command::WRITE_ZEROES && request.flags & flag::NO_HOLE != 0;
        if accepted && stores_zeroes && self.zeroes.is_none() {
            self.zeroes = Some(self.pool.alloc_zeroed(PART_LEN as usize).ok()?.freeze());
        }
        let head = self.pool.alloc(self.head_len(request, accepted)).ok()?;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Pending::default());
            u32::try_from(self.slots.len() - 1).expect("at most REQUESTS_MAX")
        });
        let pending = &mut self.slots[slot as usize];
        assert!(!pending.busy, "a free slot is not in use");
        *pending = Pending {
            busy: true,
            command: request.command,
            flags: request.flags,
            cookie: request.cookie,
            offset: request.offset,
            len: if accepted { request.len } else { 0 },
            head: Some(head),
            submitted: request.offset,
            parts: 0,
            error: 0,
            data: std::mem::take(&mut pending.data),
            extents: Vec::new(),
        };
        self.in_flight += 1;
        self.in_flight_bytes += self.slots[slot as usize].bytes();
        Some(slot)
    }

    fn pending(&mut self, slot: u32) -> &mut Pending {
        let pending = &mut self.slots[slot as usize];
        assert!(pending.busy, "the slot is in use");
        pending
    }

    /// Submits what a request without payload asks for.
    fn start(&mut self, slot: u32, out: &mut Vec<Action>) {
        let pending = self.pending(slot);
        let (offset, len) = (ByteOffset(pending.offset), ByteLen(u64::from(pending.len)));
        let io = match pending.command {
            command::FLUSH => ImageIo::Flush,
            _ if len.0 == 0 => return self.reply(slot, out),
            command::READ => return self.start_read(slot, out),
            command::TRIM => ImageIo::Discard { offset, len },
            command::WRITE_ZEROES if pending.flags & flag::NO_HOLE != 0 => {
                return self.store_zeroes(slot, out);
            }
            command::WRITE_ZEROES => ImageIo::WriteZeroes { offset, len },
            command::BLOCK_STATUS => ImageIo::Extents { offset, len: self.status_len(slot) },
            // CACHE is advice, and there is no cache.
            _ => return self.reply(slot, out),
        };
        self.submit(slot, 0, io, out);
    }

    fn submit(&mut self, slot: u32, part: u32, io: ImageIo, out: &mut Vec<Action>) {
        self.pending(slot).parts += 1;
        out.push(Action::Io { key: IoKey { slot, part }, io });
    }

    fn start_read(&mut self, slot: u32, out: &mut Vec<Action>) {
        let (mut at, end) = (self.pending(slot).offset, self.pending(slot).end());
        let mut part = 0;
        while at < end {
            let next = part_end(at, end);
            self.pending(slot).data.push(None);
            let io = ImageIo::Read { offset: ByteOffset(at), len: ByteLen(next - at) };
            self.submit(slot, part, io, out);
            at = next;
            part += 1;
        }
    }

    /// Writes zeroes as data, a few parts at a time, for a client that wants no holes.
    fn store_zeroes(&mut self, slot: u32, out: &mut Vec<Action>) {
        let zeroes = self.zeroes.clone().expect("taken with the request");
        loop {
            let pending = self.pending(slot);
            let (at, end) = (pending.submitted, pending.end());
            if at == end || pending.parts == ZERO_PARTS_MAX || pending.error != 0 {
                return;
            }
            let next = part_end(at, end);
            pending.submitted = next;
            let fua = pending.flags & flag::FUA != 0;
            let data = zeroes.slice(0..usize::try_from(next - at).expect("at most PART_LEN"));
            self.submit(slot, 0, ImageIo::Write { offset: ByteOffset(at), data, fua }, out);
        }
    }

    /// How much of a block status request is looked at.
    fn status_len(&mut self, slot: u32) -> ByteLen {
        let object = self.export.object_len.max(u64::from(BLOCK_LEN_PREFERRED));
        let (start, end) = (self.pending(slot).offset, self.pending(slot).end());
        let limit = (start - start % object).saturating_add(object.saturating_mul(STATUS_OBJECTS_MAX));
        ByteLen(limit.min(end) - start)
    }

    /// Takes payload bytes of a write and returns how many; 0 when there is no buffer.
    pub fn payload(&mut self, payload: &mut Payload, bytes: &[u8], out: &mut Vec<Action>) -> usize {
        let end = part_end(payload.offset, payload.end);
        let len = usize::try_from(end - payload.offset).expect("at most PART_LEN");
        let (mut buffer, filled) = match payload.part.take() {
            Some(part) => part,
            None => match self.pool.alloc(len) {
                Ok(buffer) => (buffer, 0),
                Err(_) => return 0,
            },
        };
        let taken = bytes.len().min(len - filled);
        buffer[filled..filled + taken].copy_from_slice(&bytes[..taken]);
        if filled + taken < len {
            payload.part = Some((buffer, filled + taken));
            return taken;
        }
        let offset = ByteOffset(payload.offset);
        payload.offset = end;
        self.pending(payload.slot).submitted = end;
        self.submit(payload.slot, 0, ImageIo::Write { offset, data: buffer.freeze(), fua: payload.fua }, out);
        taken
    }

    /// One I/O has ended.
    pub fn completed(&mut self, key: IoKey, result: Result<IoDone, i32>, out: &mut Vec<Action>) {
        let pending = self.pending(key.slot);
        pending.parts = pending.parts.checked_sub(1).expect("a completion for every submission");
        match result {
            Err(errno) if pending.error == 0 => pending.error = wire_error(errno),
            Err(_) => {}
            Ok(done) if pending.command == command::READ => {
                let expected = self.read_part_len(key);
                let pending = self.pending(key.slot);
                match done.data.filter(|data| data.len() as u64 == expected) {
                    Some(data) => pending.data[key.part as usize] = Some(data),
                    None => pending.error = error::EIO, // Never answer with bytes that are not there.
                }
            }
            Ok(done) => pending.extents = done.extents,
        }
        let pending = self.pending(key.slot);
        let stores = pending.command == command::WRITE_ZEROES && pending.flags & flag::NO_HOLE != 0;
        if stores {
            self.store_zeroes(key.slot, out);
        }
        let pending = self.pending(key.slot);
        let whole = match pending.command {
            // Even after an error the rest of the payload is still to come.
            command::WRITE => pending.submitted == pending.end(),
            _ => true,
        };
        if whole && pending.parts == 0 {
            self.reply(key.slot, out);
        }
    }

    fn read_part_len(&mut self, key: IoKey) -> u64 {
        let pending = self.pending(key.slot);
        let first = pending.offset - pending.offset % PART_LEN;
        let start = (first + u64::from(key.part) * PART_LEN).max(pending.offset);
        part_end(start, pending.end()) - start
    }

    /// Answers a request and frees its slot.
    fn reply(&mut self, slot: u32, out: &mut Vec<Action>) {
        let structured = self.structured;
        let pending = self.pending(slot);
        let mut head = pending.head.take().expect("taken with the request");
        let (cookie, error) = (pending.cookie, pending.error);
        let in_chunks = structured && matches!(pending.command, command::READ | command::BLOCK_STATUS);
        if in_chunks && error != 0 {
            let mut writer = Writer::new(&mut head);
            writer.chunk(chunk::FLAG_DONE, chunk::ERROR, cookie, 6).u32(error).u16(0);
            send(writer.len, head, out);
        } else if in_chunks && pending.command == command::BLOCK_STATUS {
            status_reply(pending, head, out);
        } else if in_chunks {
            read_chunks(pending, head, out);
        } else {
            let mut writer = Writer::new(&mut head);
            writer.simple_reply(error, cookie);
            debug_assert_eq!(writer.len, SIMPLE_REPLY_LEN);
            if error == 0 && pending.command == command::READ {
                read_simple(pending, head, out);
            } else {
                send(SIMPLE_REPLY_LEN, head, out);
            }
        }
        self.release(slot);
    }

    fn release(&mut self, slot: u32) {
        let pending = self.pending(slot);
        pending.data.clear();
        pending.extents = Vec::new();
        pending.busy = false;
        let bytes = pending.bytes();
        self.in_flight -= 1;
        self.in_flight_bytes -= bytes;
        self.free.push(slot);
    }
}

fn send(len: usize, mut head: Buffer, out: &mut Vec<Action>) {
    head.truncate(len);
    out.push(Action::Send(head.freeze()));
}

/// The data of a read: all parts are there.
fn parts(pending: &Pending) -> impl Iterator<Item = &SharedBuffer> {
    pending.data.iter().map(|part| part.as_ref().expect("a read without error has all its parts"))
}

fn read_simple(pending: &Pending, mut head: Buffer, out: &mut Vec<Action>) {
    if pending.len <= INLINE_READ_LEN_MAX {
        let mut writer = Writer::new(&mut head);
        writer.simple_reply(0, pending.cookie);
        for part in parts(pending) {
            writer.bytes(part);
        }
        let len = writer.len;
        return send(len, head, out);
    }
    send(SIMPLE_REPLY_LEN, head, out);
    out.extend(parts(pending).map(|part| Action::Send(part.clone())));
}

/// A run of bytes of a read that are all zero or go out as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    zero: bool,
    offset: u64,
    len: u64,
}

/// Cuts what was read into zero and other runs, at multiples of the block size in the image.
fn runs(pending: &Pending) -> ArrayVec<Run, RUNS_MAX> {
    let mut runs: ArrayVec<Run, RUNS_MAX> = ArrayVec::new();
    let mut offset = pending.offset;
    let block = u64::from(BLOCK_LEN_PREFERRED);
    let whole = pending.flags & flag::DF != 0;
    for part in parts(pending) {
        let mut rest: &[u8] = part;
        while !rest.is_empty() {
            let to_border = usize::try_from(block - offset % block).expect("at most a block");
            let (piece, after) = rest.split_at(to_border.min(rest.len()));
            let zero = !whole && is_zero(piece);
            let full = runs.is_full();
            match runs.last_mut() {
                Some(last) if last.zero == zero => last.len += piece.len() as u64,
                Some(last) if full => {
                    last.zero = false;
                    last.len += piece.len() as u64;
                }
                _ => runs.push(Run { zero, offset, len: piece.len() as u64 }),
            }
            offset += piece.len() as u64;
            rest = after;
        }
    }
    runs
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(64).all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Answers a read in chunks: data, and holes for what is zero.
fn read_chunks(pending: &Pending, mut head: Buffer, out: &mut Vec<Action>) {
    let cookie = pending.cookie;
    let runs = runs(pending);
    let mut writer = Writer::new(&mut head);
    if runs.is_empty() {
        writer.chunk(chunk::FLAG_DONE, chunk::NONE, cookie, 0);
        let len = writer.len;
        return send(len, head, out);
    }
    let inline = pending.len <= INLINE_READ_LEN_MAX;
    let mut borders: ArrayVec<usize, RUNS_MAX> = ArrayVec::new();
    for (index, run) in runs.iter().enumerate() {
        let flags = if index + 1 == runs.len() { chunk::FLAG_DONE } else { 0 };
        let len = u32::try_from(run.len).expect("at most PAYLOAD_LEN_MAX");
        if run.zero {
            writer.chunk(flags, chunk::OFFSET_HOLE, cookie, 12).u64(run.offset).u32(len);
        } else {
            writer.chunk(flags, chunk::OFFSET_DATA, cookie, 8 + len).u64(run.offset);
            if inline {
                pieces(pending, *run, |part, range| {
                    writer.bytes(&part[range]);
                });
            }
        }
        borders.push(writer.len);
    }
    let len = writer.len;
    if inline {
        return send(len, head, out);
    }
    head.truncate(len);
    let head = head.freeze();
    let mut start = 0;
    for (run, end) in runs.iter().zip(borders) {
        out.push(Action::Send(head.slice(start..end)));
        start = end;
        if !run.zero {
            pieces(pending, *run, |part, range| out.push(Action::Send(part.slice(range))));
        }
    }
}

/// Calls `with` for every piece of a part that belongs to the run, in order.
fn pieces(pending: &Pending, run: Run, mut with: impl FnMut(&SharedBuffer, std::ops::Range<usize>)) {
    let mut at = pending.offset;
    for part in parts(pending) {
        let end = at + part.len() as u64;
        let (from, to) = (run.offset.max(at), (run.offset + run.len).min(end));
        if from < to {
            let range = (from - at) as usize..(to - at) as usize; // Within `part`, so they fit.
            with(part, range);
        }
        at = end;
    }
}

/// Answers a block status request.
fn status_reply(pending: &Pending, mut head: Buffer, out: &mut Vec<Action>) {
    let most = if pending.flags & flag::REQ_ONE != 0 { 1 } else { STATUS_EXTENTS_MAX };
    let extents = pending.extents.iter().filter(|extent| extent.len.0 > 0).take(most);
    let count = extents.clone().count();
    let mut writer = Writer::new(&mut head);
    if count == 0 {
        // A reply must make progress; without an answer there is none.
        writer.chunk(chunk::FLAG_DONE, chunk::ERROR, pending.cookie, 6).u32(error::EIO).u16(0);
    } else {
        let len = u32::try_from(4 + 8 * count).expect("at most STATUS_EXTENTS_MAX");
        writer.chunk(chunk::FLAG_DONE, chunk::BLOCK_STATUS, pending.cookie, len).u32(CONTEXT_ALLOCATION_ID);
        for extent in extents {
            let len = u32::try_from(extent.len.0).expect("within a request");
            writer.u32(len).u32(if extent.allocated { 0 } else { STATE_HOLE | STATE_ZERO });
        }
    }
    let len = writer.len;
    send(len, head, out);
}
