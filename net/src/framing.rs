//! Bytes and frames: takes a byte stream apart, sans-I/O.
//!
//! A header is staged: first its 64 common bytes, then, once these name a length that its kind can have, the rest.
//! Only when the header's checksum is right is a buffer taken for the data, which then goes straight to its place.
//!
//! ```text
//!   Common ──64 bytes──▶ Head ──checksum, lengths──▶ Data ──checksum of each piece──▶ ready
//!      ▲                  │ no data                                                    │
//!      └──────────────────┴────────────────────────────────────────────────────────────┘
//! ```
//!
//! Before [`FrameReader::trust`] one handshake frame is taken and nothing behind it: a peer that has not proven who
//! it is costs one small buffer.

use crate::wire::{DecodeError, Plan, checksum};
use loligo_config::limits;
use loligo_reactor::dma::{Buffer, BufferPool, SharedBuffer};
use loligo_reactor::env::{CloseReason, Frame};
use loligo_reactor::planted::{self, Bug};
use std::collections::VecDeque;

const COMMON_LEN: usize = 64;
/// Complete frames that wait for `next_frame`. More bytes are not taken until some have been fetched.
pub const READY_FRAMES_MAX: usize = 32;
/// Missing data from which on it is worth a receive of its own. Guessed: four blocks.
pub const DIRECT_LEN_MIN: usize = 16 << 10;
/// Smallest buffer for data, so that it starts at the alignment that devices need.
const DATA_BUFFER_LEN_MIN: usize = 4096;

const _: () = assert!(crate::wire::HANDSHAKE_HEAD_LEN_MAX + COMMON_LEN <= limits::PREAUTH_BYTES_MAX);

/// Takes the bytes of one connection and gives its frames.
#[derive(Debug)]
pub struct FrameReader {
    pool: BufferPool,
    trusted: bool,
    /// Frames taken before `trust`: at most one.
    untrusted_frames: u32,
    common: [u8; COMMON_LEN],
    state: State,
    ready: VecDeque<Frame>,
}

#[derive(Debug)]
enum State {
    /// Staging the common part.
    Common { filled: usize },
    /// The common part is there, the rest of the header not all.
    Head { plan: Plan, head: Buffer, filled: usize },
    /// The header is right; there was no buffer for the data yet.
    Starved { plan: Plan, head: SharedBuffer },
    /// The data is not all there.
    Data(Data),
    /// The data's buffer is with the caller.
    Lent(Lent),
    /// The peer broke the protocol; everything else is refused for the same reason.
    Broken(CloseReason),
}

#[derive(Debug)]
struct Data {
    lent: Lent,
    buffer: Buffer,
}

/// What is known of the data without its buffer.
#[derive(Debug)]
struct Lent {
    plan: Plan,
    head: SharedBuffer,
    /// Bytes of data that are there.
    filled: usize,
    /// Pieces whose checksum was found right.
    verified: usize,
}

impl FrameReader {
    /// A reader for a new connection, with the limits for peers that have not proven who they are.
    pub fn new(pool: BufferPool) -> Self {
        Self {
            pool,
            trusted: false,
            untrusted_frames: 0,
            common: [0; COMMON_LEN],
            state: State::Common { filled: 0 },
            ready: VecDeque::new(),
        }
    }

    /// The peer has proven who it is: all messages are taken from now on. Bytes that `feed` left may be fed again.
    pub fn trust(&mut self) {
        self.trusted = true;
    }

    /// Takes bytes in the order of the stream and returns how many. The rest is to be fed again
    /// - at once, when [`FrameReader::next_frame`] gave a frame since;
    /// - after [`FrameReader::trust`]: a peer's first frame waits for it alone;
    /// - later, when the pool is exhausted: back-pressure.
    ///
    /// # Errors
    /// The peer broke the protocol, or bytes were damaged: the connection must be closed. Frames that were complete
    /// before can still be fetched.
    ///
    /// # Panics
    /// If the buffer that `direct` gave has not come back.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<usize, CloseReason> {
        let mut rest = bytes;
        loop {
            match self.step(&mut rest) {
                Ok(true) => {}
                Ok(false) => return Ok(bytes.len() - rest.len()),
                Err(reason) => {
                    self.state = State::Broken(reason);
                    return Err(reason);
                }
            }
        }
    }

    /// The next complete frame. Its checksums are right; its header is consistent with its data.
    pub fn next_frame(&mut self) -> Option<Frame> {
        self.ready.pop_front()
    }

    /// In the middle of data with [`DIRECT_LEN_MIN`] or more bytes missing: the buffer and how much of it is filled.
    /// Receive into `buffer[filled..]` and give it back with [`FrameReader::direct_done`]; no byte of the stream may
    /// go elsewhere in the meantime.
    pub fn direct(&mut self) -> Option<(Buffer, usize)> {
        match std::mem::replace(&mut self.state, State::Common { filled: 0 }) {
            State::Data(Data { lent, buffer }) if buffer.len() - lent.filled >= DIRECT_LEN_MIN => {
                let filled = lent.filled;
                self.state = State::Lent(lent);
                Some((buffer, filled))
            }
            other => {
                self.state = other;
                None
            }
        }
    }

    /// The buffer comes back with `filled` bytes of data in it.
    ///
    /// # Errors
    /// A piece was damaged: the connection must be closed.
    ///
    /// # Panics
    /// If no buffer was given out, `filled` is less than before or more than the buffer's length, or it is another
    /// buffer by its length.
    pub fn direct_done(&mut self, buffer: Buffer, filled: usize) -> Result<(), CloseReason> {
        let State::Lent(mut lent) = std::mem::replace(&mut self.state, State::Common { filled: 0 }) else {
            panic!("no buffer was given out");
        };
        assert_eq!(buffer.len(), lent.plan.data_len as usize, "another buffer came back");
        assert!(filled >= lent.filled, "received bytes do not go away");
        assert!(filled <= buffer.len(), "the buffer holds no more than its length");
        lent.filled = filled;
        let advanced = self.advance(Data { lent, buffer });
        advanced.map_err(|error| {
            let reason = error.into();
            self.state = State::Broken(reason);
            reason
        })
    }

    /// Takes what one state can take. `false`: nothing can be done now.
    fn step(&mut self, rest: &mut &[u8]) -> Result<bool, CloseReason> {
        match std::mem::replace(&mut self.state, State::Common { filled: 0 }) {
            State::Common { filled } => self.step_common(filled, rest),
            State::Head { plan, mut head, mut filled } => {
                take(&mut head[..plan.head_len], &mut filled, rest);
                if filled < plan.head_len {
                    self.state = State::Head { plan, head, filled };
                    return Ok(false);
                }
                plan.verify_head(&head)?;
                self.begin_data(plan, head.freeze());
                Ok(true)
            }
            State::Starved { plan, head } => {
                self.begin_data(plan, head);
                Ok(!matches!(self.state, State::Starved { .. }))
            }
            State::Data(Data { mut lent, mut buffer }) => {
                take(&mut buffer, &mut lent.filled, rest);
                self.advance(Data { lent, buffer })?;
                Ok(!matches!(self.state, State::Data(_)))
            }
            State::Lent(_) => panic!("the data's buffer has not come back"),
            State::Broken(reason) => Err(reason),
        }
    }

    fn step_common(&mut self, mut filled: usize, rest: &mut &[u8]) -> Result<bool, CloseReason> {
        let may_take =
            if self.trusted { self.ready.len() < READY_FRAMES_MAX } else { self.untrusted_frames == 0 };
        if may_take {
            take(&mut self.common, &mut filled, rest);
        }
        self.state = State::Common { filled };
        if filled < COMMON_LEN {
            return Ok(false);
        }
        let plan = Plan::read(&self.common)?;
        if !self.trusted && !plan.kind.is_handshake() {
            return Err(CloseReason::Protocol("a message before the handshake"));
        }
        let Ok(mut head) = self.pool.alloc(plan.head_len) else {
            return Ok(false);
        };
        head[..COMMON_LEN].copy_from_slice(&self.common);
        self.state = State::Head { plan, head, filled: COMMON_LEN };
        Ok(true)
    }

    /// After a right header: takes a buffer for the data, if there is data.
    fn begin_data(&mut self, plan: Plan, head: SharedBuffer) {
        let len = plan.data_len as usize;
        if len == 0 {
            self.finish(Frame { head, data: None });
            return;
        }
        match self.pool.alloc(len.max(DATA_BUFFER_LEN_MIN)) {
            Ok(mut buffer) => {
                buffer.truncate(len);
                self.state = State::Data(Data { lent: Lent { plan, head, filled: 0, verified: 0 }, buffer });
            }
            Err(_) => self.state = State::Starved { plan, head },
        }
    }

    /// Verifies the pieces that have become complete, each once.
    fn advance(&mut self, mut data: Data) -> Result<(), DecodeError> {
        let Data { lent, buffer } = &mut data;
        let plan = lent.plan;
        let mut start = match lent.verified {
            0 => 0,
            verified => checksum::piece_end(verified - 1, buffer.len(), plan.within_block),
        };
        while lent.verified < plan.pieces() {
            let end = checksum::piece_end(lent.verified, buffer.len(), plan.within_block);
            if end > lent.filled {
                break;
            }
            let is_right =
                plan.checksum(&lent.head, lent.verified) == Some(checksum::crc32c(&buffer[start..end]));
            if !is_right && !planted::active(Bug::FrameDataUnchecked) {
                return Err(DecodeError::DataChecksum);
            }
            lent.verified += 1;
            start = end;
        }
        if lent.filled < buffer.len() {
            self.state = State::Data(data);
        } else {
            let Data { lent, buffer } = data;
            self.finish(Frame { head: lent.head, data: Some(buffer.freeze()) });
        }
        Ok(())
    }

    fn finish(&mut self, frame: Frame) {
        if !self.trusted {
            self.untrusted_frames += 1;
        }
        self.ready.push_back(frame);
        self.state = State::Common { filled: 0 };
    }
}

/// Moves bytes from the front of `rest` to `place[filled..]`, as many as there are and fit.
fn take(place: &mut [u8], filled: &mut usize, rest: &mut &[u8]) {
    let count = rest.len().min(place.len() - *filled);
    let (taken, left) = rest.split_at(count);
    place[*filled..*filled + count].copy_from_slice(taken);
    *filled += count;
    *rest = left;
}

#[cfg(test)]
mod tests;
