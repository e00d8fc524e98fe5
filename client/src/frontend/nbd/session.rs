//! One connection, sans-I/O: bytes from the client and completions of its I/O go in, [`Action`]s come out.
//!
//! ```text
//!  ClientFlags ──► Option ──► OptionData ──► Option …        (handshake)
//!                    │            │
//!                    ▼            ▼
//!               SkipOption     Waiting ──► Option | Request   (the server opens an export or lists them)
//!
//!  Request ──► Payload | SkipPayload ──► Request …           (transmission)
//!     │
//!     ▼
//!  Draining ──► Closed                                       (orderly end; everything else ends in Closed at once)
//! ```
//!
//! Bounded by construction: an option is at most [`OPTION_LEN_MAX`], a request at most [`PAYLOAD_LEN_MAX`]; what does
//! not fit into [`REQUESTS_MAX`] requests and [`IN_FLIGHT_BYTES_MAX`] is not taken from the stream until something
//! completes.

use super::options::{Handshake, Waiting};
use super::protocol::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, Fields, GREETING_MAGIC, OPTION_HEADER_LEN, OPTION_LEN_MAX,
    OPTION_MAGIC, REQUEST_LEN, Request, Writer, option, reply,
};
use super::transmission::{Next, Payload, Transmission};
use crate::event::ImageIo;
use loligo_reactor::dma::{BufferPool, PoolExhausted, SharedBuffer};

#[cfg(doc)]
use super::protocol::PAYLOAD_LEN_MAX;

/// Requests of one connection that are not yet answered; more stay in the stream. Above what QEMU (16), fio and the
/// kernel (128) keep in flight.
pub const REQUESTS_MAX: usize = 256;
/// Bytes of reads and writes of one connection that are not yet answered: two of the largest requests.
pub const IN_FLIGHT_BYTES_MAX: u64 = 64 << 20;
/// Bytes of one buffer when many small replies go out together.
const REPLY_BUFFER_LEN: usize = 64 << 10;

/// What a session asks its server to do.
#[derive(Debug)]
pub enum Action {
    /// Send these bytes, in order.
    Send(SharedBuffer),
    /// Open the export of this name (empty: the default one); answer with [`Session::opened`].
    Open {
        /// Its name.
        name: String,
    },
    /// Say which exports there are; answer with [`Session::listed`].
    List,
    /// Submit to the open export; answer with [`Session::completed`].
    Io {
        /// Names the I/O in the answer.
        key: IoKey,
        /// What to do.
        io: ImageIo,
    },
    /// Close the connection after what was sent before. Nothing comes from this session any more.
    Close(Ending),
}

/// Names one I/O of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoKey {
    pub(super) slot: u32,
    pub(super) part: u32,
}

/// Why a session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ending {
    /// The client said so, or the server was told to stop.
    #[error("the client has disconnected")]
    Orderly,
    /// The client asked for an export that cannot be served, with the option that has no error reply.
    #[error("the client asked for an export that cannot be served")]
    NoExport,
    /// What the client sent is not the protocol.
    #[error("the client broke the protocol: {0}")]
    Protocol(&'static str),
    /// No memory for a reply.
    #[error("no buffer for a reply")]
    NoBuffer,
}

/// An open export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Bytes.
    pub size: u64,
    /// Bytes of one object: how much one block status request looks at.
    pub object_len: u64,
    /// Whether writing is refused.
    pub read_only: bool,
}

/// Why an export cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenRefused {
    /// There is none of this name.
    Unknown,
    /// Something else, in words.
    Failed(String),
}

#[derive(Debug)]
enum State {
    ClientFlags,
    Option,
    OptionData { option: u32, len: usize },
    SkipOption { option: u32, left: u32 },
    Waiting(Waiting),
    Request,
    Payload(Payload),
    SkipPayload { left: u64 },
    Draining,
    Closed,
}

/// One connection.
#[derive(Debug)]
pub struct Session {
    pool: BufferPool,
    state: State,
    /// Bytes of a header or an option that is not complete yet.
    partial: Vec<u8>,
    pub(super) handshake: Handshake,
    pub(super) transmission: Transmission,
}

impl Session {
    /// A new connection: the greeting is sent first.
    pub fn new(pool: BufferPool, out: &mut Vec<Action>) -> Self {
        let mut session = Self {
            transmission: Transmission::new(pool.clone()),
            pool,
            state: State::ClientFlags,
            partial: Vec::new(),
            handshake: Handshake::default(),
        };
        let mut greeting = [0; 18];
        Writer::new(&mut greeting)
            .u64(GREETING_MAGIC)
            .u64(OPTION_MAGIC)
            .u16(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        session.send_bytes(&greeting, out);
        session
    }

    /// Whether no export was chosen yet, so that the handshake's deadline applies.
    pub fn in_handshake(&self) -> bool {
        match self.state {
            State::ClientFlags | State::Option | State::OptionData { .. } => true,
            State::SkipOption { .. } | State::Waiting(_) => true,
            State::Request | State::Payload(_) | State::SkipPayload { .. } => false,
            State::Draining | State::Closed => false,
        }
    }

    /// Whether a request is in flight, so that somebody waits for its latency.
    pub fn is_waiting_for_io(&self) -> bool {
        self.transmission.in_flight() > 0
    }

    /// Whether the session has asked to be closed.
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    /// Takes bytes from the client and returns how many: fewer than there are while the session waits for its server
    /// or has too much in flight. Offer the rest again after the next answer.
    pub fn receive(&mut self, bytes: &[u8], out: &mut Vec<Action>) -> usize {
        let mut taken = 0;
        while let Some(rest) = bytes.get(taken..).filter(|rest| !rest.is_empty()) {
            let before = taken;
            taken += self.step(rest, out);
            if taken == before {
                break;
            }
        }
        taken
    }

    /// One state's worth of bytes; 0 when the session cannot go on now.
    fn step(&mut self, bytes: &[u8], out: &mut Vec<Action>) -> usize {
        match &mut self.state {
            State::ClientFlags => self.collect(bytes, 4, out, Self::client_flags),
            State::Option => self.collect(bytes, OPTION_HEADER_LEN, out, Self::option_header),
            State::OptionData { len, .. } => {
                let len = *len;
                self.collect(bytes, len, out, Self::option_data)
            }
            State::SkipOption { left, .. } => {
                let skipped = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= u32::try_from(skipped).expect("no more than what is left");
                if *left == 0 {
                    self.option_skipped(out);
                }
                skipped
            }
            State::Request => self.request(bytes, out),
            State::Payload(payload) => {
                let taken = self.transmission.payload(payload, bytes, out);
                if payload.is_complete() {
                    self.state = State::Request;
                }
                taken
            }
            State::SkipPayload { left } => {
                let skipped = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= skipped as u64;
                if *left == 0 {
                    self.state = State::Request;
                }
                skipped
            }
            State::Waiting(_) => 0,
            // Nothing more is expected: what still comes is dropped, so that the peer is not held up.
            State::Draining | State::Closed => bytes.len(),
        }
    }

    /// Gathers `need` bytes, over several calls if they come in pieces, and hands them to `then`.
    fn collect(
        &mut self,
        bytes: &[u8],
        need: usize,
        out: &mut Vec<Action>,
        then: fn(&mut Self, &[u8], &mut Vec<Action>),
    ) -> usize {
        let missing = need.saturating_sub(self.partial.len());
        let (part, _) = bytes.split_at(missing.min(bytes.len()));
        if self.partial.is_empty() && part.len() == need {
            then(self, part, out);
            return part.len();
        }
        self.partial.extend_from_slice(part);
        if self.partial.len() == need {
            let whole = std::mem::take(&mut self.partial);
            then(self, &whole, out);
            self.partial = whole;
            self.partial.clear();
        }
        part.len()
    }

    fn client_flags(&mut self, bytes: &[u8], out: &mut Vec<Action>) {
        let flags = Fields(bytes).u32().unwrap_or(u32::MAX);
        let fixed = u32::from(FLAG_FIXED_NEWSTYLE);
        let no_zeroes = u32::from(FLAG_NO_ZEROES);
        if flags & !(fixed | no_zeroes) != 0 {
            return self.close(Ending::Protocol("unknown client flags"), out);
        }
        self.handshake.fixed_newstyle = flags & fixed != 0;
        self.handshake.no_zeroes = flags & no_zeroes != 0;
        self.state = State::Option;
    }

    fn option_header(&mut self, bytes: &[u8], out: &mut Vec<Action>) {
        let mut fields = Fields(bytes);
        let (Some(magic), Some(option), Some(len)) = (fields.u64(), fields.u32(), fields.u32()) else {
            return self.close(Ending::Protocol("short option"), out);
        };
        if magic != OPTION_MAGIC {
            return self.close(Ending::Protocol("wrong option magic"), out);
        }
        // Without fixed newstyle a client understands no reply, so anything but this one is a dead end.
        if !self.handshake.fixed_newstyle && option != option::EXPORT_NAME {
            return self.close(Ending::Protocol("an option that needs fixed newstyle"), out);
        }
        if len > OPTION_LEN_MAX {
            if option == option::EXPORT_NAME {
                return self.close(Ending::Protocol("export name too long"), out);
            }
            self.state = State::SkipOption { option, left: len };
            return;
        }
        self.state = State::OptionData { option, len: len as usize };
        if len == 0 {
            self.option_data(&[], out);
        }
    }

    fn option_skipped(&mut self, out: &mut Vec<Action>) {
        if let State::SkipOption { option, .. } = self.state {
            self.state = State::Option;
            self.option_reply(option, reply::ERR_TOO_BIG, b"the option is too long", out);
        }
    }

    fn option_data(&mut self, data: &[u8], out: &mut Vec<Action>) {
        if let State::OptionData { option, .. } = self.state {
            self.state = State::Option;
            self.option(option, data, out);
        }
    }

    /// Continues after the answer of the server.
    pub(super) fn wait_for(&mut self, waiting: Waiting, action: Action, out: &mut Vec<Action>) {
        self.state = State::Waiting(waiting);
        out.push(action);
    }

    /// The handshake is over: requests follow.
    pub(super) fn begin_transmission(&mut self) {
        if !self.is_closed() {
            self.state = State::Request;
        }
    }

    /// The answer to [`Action::Open`].
    pub fn opened(&mut self, result: Result<Export, OpenRefused>, out: &mut Vec<Action>) {
        if let Some(waiting) = self.answered() {
            self.export_opened(waiting, result, out);
        }
    }

    /// The answer to [`Action::List`].
    pub fn listed(&mut self, names: Result<Vec<String>, String>, out: &mut Vec<Action>) {
        if self.answered().is_some() {
            self.exports_listed(names, out);
        }
    }

    /// What the session waited for; `None` if it ended meanwhile.
    fn answered(&mut self) -> Option<Waiting> {
        match std::mem::replace(&mut self.state, State::Option) {
            State::Waiting(waiting) => Some(waiting),
            other => {
                self.state = other;
                None
            }
        }
    }

    /// The answer to [`Action::Io`]: the bytes of a read, the extents of a block status, or an errno.
    pub fn completed(
        &mut self,
        key: IoKey,
        result: Result<crate::event::IoDone, i32>,
        out: &mut Vec<Action>,
    ) {
        let before = out.len();
        self.transmission.completed(key, result, out);
        if self.is_closed() {
            // The stream ends behind what was sent before: nobody is there for a reply.
            out.truncate(before);
        }
        self.finish_if_drained(out);
    }

    /// The export has another size now.
    pub fn resized(&mut self, size: u64) {
        self.transmission.resized(size);
    }

    /// Takes no more requests; closes when those in flight are answered.
    pub fn shut_down(&mut self, out: &mut Vec<Action>) {
        match self.state {
            State::Closed | State::Draining => {}
            // What was received of a write so far may have been submitted; the rest never comes.
            State::Payload(_) => self.close(Ending::Orderly, out),
            _ => {
                self.state = State::Draining;
                self.finish_if_drained(out);
            }
        }
    }

    fn finish_if_drained(&mut self, out: &mut Vec<Action>) {
        if matches!(self.state, State::Draining) && self.transmission.in_flight() == 0 {
            self.close(Ending::Orderly, out);
        }
    }

    fn request(&mut self, bytes: &[u8], out: &mut Vec<Action>) -> usize {
        let missing = REQUEST_LEN - self.partial.len();
        let (part, _) = bytes.split_at(missing.min(bytes.len()));
        let mut raw = [0; REQUEST_LEN];
        let have = self.partial.len() + part.len();
        raw[..self.partial.len()].copy_from_slice(&self.partial);
        raw[self.partial.len()..have].copy_from_slice(part);
        if have < REQUEST_LEN {
            self.partial.extend_from_slice(part);
            return part.len();
        }
        let Some(request) = Request::decode(&raw) else {
            self.close(Ending::Protocol("wrong request magic"), out);
            return part.len();
        };
        match self.transmission.request(&request, out) {
            // The request stays in the stream until there is room for it.
            Next::Later => return 0,
            Next::Request => {}
            Next::Payload(payload) => self.state = State::Payload(payload),
            Next::Skip(left) => self.state = State::SkipPayload { left },
            Next::Disconnect => {
                self.state = State::Draining;
                self.finish_if_drained(out);
            }
        }
        self.partial.clear();
        part.len()
    }

    /// Sends one option reply.
    pub(super) fn option_reply(&mut self, option: u32, kind: u32, data: &[u8], out: &mut Vec<Action>) {
        let mut bytes = Vec::with_capacity(20 + data.len());
        append_option_reply(&mut bytes, option, kind, data);
        self.send_bytes(&bytes, out);
    }

    /// Sends bytes of the handshake.
    pub(super) fn send_bytes(&mut self, bytes: &[u8], out: &mut Vec<Action>) {
        let sent: Result<(), PoolExhausted> = bytes.chunks(REPLY_BUFFER_LEN).try_for_each(|part| {
            out.push(Action::Send(self.pool.copy_of(part)?));
            Ok(())
        });
        if sent.is_err() {
            self.close(Ending::NoBuffer, out);
        }
    }

    /// Ends the session.
    pub(super) fn close(&mut self, ending: Ending, out: &mut Vec<Action>) {
        if !self.is_closed() {
            self.state = State::Closed;
            out.push(Action::Close(ending));
        }
    }
}

/// Appends one option reply: magic, option, reply type, length, data.
pub(super) fn append_option_reply(bytes: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    let len = u32::try_from(data.len()).expect("replies are short");
    bytes.extend_from_slice(&super::protocol::OPTION_REPLY_MAGIC.to_be_bytes());
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes.extend_from_slice(data);
}
