//! An NBD session against a client's byte stream, over an image in memory.

use super::{Input, Target, with_pool};
use loligo_client::frontend::nbd::protocol::{
    GREETING_MAGIC, OPTION_LEN_MAX, OPTION_MAGIC, PAYLOAD_LEN_MAX, REQUEST_MAGIC, command, option,
};
use loligo_client::frontend::nbd::session::{
    Action, Ending, Export, IN_FLIGHT_BYTES_MAX, IoKey, OpenRefused, REQUESTS_MAX, Session,
};
use loligo_client::{Extent, ImageIo, IoDone};
use loligo_config::units::{ByteLen, ByteOffset};
use loligo_reactor::dma::BufferPool;
use std::collections::VecDeque;

/// A client's bytes in pieces; completions late, early, and failing.
pub const TARGET: Target = Target { name: "nbd_session", run, seeds, words: WORDS, len_max: 8 << 10 };

const WORDS: &[&[u8]] = &[
    b"IHAVEOPT",
    b"\x25\x60\x95\x13",
    b"\0\0\0\x01",
    b"\0\0\0\x02",
    b"\0\0\0\x03",
    b"\0\0\0\x06",
    b"\0\0\0\x07",
    b"\0\0\0\x08",
    b"\0\0\0\x09",
    b"\0\0\0\x0a",
    b"pool/image",
    b"base:allocation",
    b"base:",
    b"\x02\0\0\0",
    b"\0\x10\0\0",
];
const POOL: usize = 160 << 20;
/// Larger than an option may be, smaller than what a request may ask for.
const IMAGE_LEN: u64 = 3 << 20;

struct Run {
    session: Session,
    pool: BufferPool,
    /// I/O that is not answered yet.
    in_flight: VecDeque<(IoKey, ImageIo)>,
    /// `Open` and `List` that wait.
    asked: VecDeque<Action>,
    sent: Vec<u8>,
    sent_len: usize,
    ending: Option<Ending>,
    read_only: bool,
    hold: bool,
    errno: i32,
}

fn run(input: &[u8]) {
    let mut input = Input(input);
    let flags = input.u8();
    let step = 1 + usize::from(input.u8());
    with_pool(POOL, |pool| {
        let mut out = Vec::new();
        let session = Session::new(pool.clone(), &mut out);
        let mut run = Run {
            session,
            pool: pool.clone(),
            in_flight: VecDeque::new(),
            asked: VecDeque::new(),
            sent: Vec::new(),
            sent_len: 0,
            ending: None,
            read_only: flags & 1 != 0,
            hold: flags & 2 != 0,
            errno: if flags & 4 != 0 { 5 } else { 0 },
        };
        run.take(out);
        assert_eq!(run.sent[..8], GREETING_MAGIC.to_be_bytes());
        run.receive(input.0, step * step);
        run.finish();
    });
}

impl Run {
    fn receive(&mut self, bytes: &[u8], step: usize) {
        let (mut at, mut idle, mut turns) = (0, 0, 0usize);
        while at < bytes.len() && idle < 2 {
            turns += 1;
            assert!(turns <= 4 * bytes.len() + 1024, "every turn takes a byte or answers something");
            let piece = &bytes[at..bytes.len().min(at + step)];
            let mut out = Vec::new();
            let taken = self.session.receive(piece, &mut out);
            assert!(taken <= piece.len());
            at += taken;
            self.take(out);
            let answered = self.answer(if self.hold && taken > 0 { 0 } else { 1 });
            idle = if taken == 0 && !answered { idle + 1 } else { 0 };
        }
        // With nothing to answer and memory in the pool a session takes everything that comes.
        assert!(at == bytes.len() || self.session.is_closed(), "{} bytes are stuck", bytes.len() - at);
    }

    fn take(&mut self, actions: Vec<Action>) {
        for action in actions {
            assert!(self.ending.is_none(), "nothing comes after the end");
            match action {
                Action::Send(bytes) => {
                    self.sent_len += bytes.len();
                    if self.sent.len() < 1 << 16 {
                        self.sent.extend_from_slice(&bytes[..bytes.len().min(1 << 12)]);
                    }
                }
                Action::Close(ending) => self.ending = Some(ending),
                Action::Io { key, io } => {
                    check_io(&io, self.read_only);
                    self.in_flight.push_back((key, io));
                }
                Action::Open { .. } | Action::List => self.asked.push_back(action),
            }
        }
        let bytes: u64 = self.in_flight.iter().map(|(_, io)| data_len(io)).sum();
        assert!(bytes <= IN_FLIGHT_BYTES_MAX, "{bytes} bytes in flight");
        assert!(self.in_flight.len() <= REQUESTS_MAX * 64);
        assert!(self.asked.len() <= 1, "a session asks one thing at a time");
    }

    /// Answers what is asked, and one I/O beyond `keep`. Whether there was something.
    fn answer(&mut self, least: usize) -> bool {
        if let Some(asked) = self.asked.pop_front() {
            let mut out = Vec::new();
            match asked {
                Action::Open { name } => {
                    let object_len = 1 << 20;
                    let export = Export { size: IMAGE_LEN, object_len, read_only: self.read_only };
                    let result = match name.as_str() {
                        "pool/image" | "" => Ok(export),
                        "pool/broken" => Err(OpenRefused::Failed("it is broken: \u{e4}".repeat(999))),
                        _ => Err(OpenRefused::Unknown),
                    };
                    self.session.opened(result, &mut out);
                }
                _ => self.session.listed(Ok(vec!["pool/image".into(), "x".repeat(5000)]), &mut out),
            }
            self.take(out);
            return true;
        }
        if least == 0 {
            return false;
        }
        let Some((key, io)) = self.in_flight.pop_front() else { return false };
        let result = if self.errno != 0 { Err(self.errno) } else { Ok(self.done(io)) };
        let mut out = Vec::new();
        self.session.completed(key, result, &mut out);
        self.take(out);
        true
    }

    fn done(&self, io: ImageIo) -> IoDone {
        let mut done = IoDone { data: None, extents: Vec::new(), waterfall: Default::default() };
        match io {
            ImageIo::Read { len, .. } => {
                let mut data = self.pool.alloc_zeroed(len.0 as usize).expect("room for a read");
                if len.0 > 5000 {
                    data[5000] = 1;
                }
                done.data = Some(data.freeze());
            }
            ImageIo::Extents { offset, len } => {
                let half = len.0 / 2;
                let extent = |offset, len, allocated| Extent {
                    offset: ByteOffset(offset),
                    len: ByteLen(len),
                    allocated,
                };
                done.extents.push(extent(offset.0, half, true));
                done.extents.push(extent(offset.0 + half, len.0 - half, false));
            }
            _ => {}
        }
        done
    }

    /// The client is gone, or the server stops: everything in flight is answered, then the session is over.
    fn finish(&mut self) {
        let mut out = Vec::new();
        self.session.shut_down(&mut out);
        self.take(out);
        let mut turns = 0;
        while self.answer(1) {
            turns += 1;
            assert!(turns < 100_000, "what is in flight ends");
        }
        assert!(self.ending.is_some() && self.session.is_closed(), "a session that was shut down ends");
        assert!(self.sent_len < 256 << 20, "{} bytes sent", self.sent_len);
    }
}

fn data_len(io: &ImageIo) -> u64 {
    match io {
        ImageIo::Read { len, .. } => len.0,
        ImageIo::Write { data, .. } => data.len() as u64,
        _ => 0,
    }
}

/// What reaches the image lies within it.
fn check_io(io: &ImageIo, read_only: bool) {
    let (offset, len, writes) = match io {
        ImageIo::Read { offset, len } | ImageIo::Extents { offset, len } => (offset.0, len.0, false),
        ImageIo::Write { offset, data, .. } => (offset.0, data.len() as u64, true),
        ImageIo::Discard { offset, len } | ImageIo::WriteZeroes { offset, len } => (offset.0, len.0, true),
        ImageIo::Flush => return,
    };
    assert!(offset.checked_add(len).is_some_and(|end| end <= IMAGE_LEN), "{io:?}");
    assert!(len > 0 && data_len(io) <= u64::from(PAYLOAD_LEN_MAX), "{io:?}");
    assert!(!(writes && read_only), "{io:?}");
}

fn seed_option(number: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).expect("short");
    assert!(len <= OPTION_LEN_MAX);
    [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn request(flags: u16, kind: u16, offset: u64, len: u32) -> Vec<u8> {
    let head = [&REQUEST_MAGIC.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes()].concat();
    [&head[..], &9u64.to_be_bytes(), &offset.to_be_bytes(), &len.to_be_bytes()].concat()
}

fn seeds() -> Vec<Vec<u8>> {
    let flags = 3u32.to_be_bytes().to_vec();
    let name = text("pool/image");
    let go = seed_option(option::GO, &[&name[..], &[0, 1, 0, 1]].concat());
    let context = [&name[..], &1u32.to_be_bytes(), &text("base:allocation")].concat();
    let haggle: Vec<u8> = [
        flags.clone(),
        seed_option(option::LIST, &[]),
        seed_option(option::STRUCTURED_REPLY, &[]),
        seed_option(option::LIST_META_CONTEXT, &context),
        seed_option(option::SET_META_CONTEXT, &context),
        seed_option(option::INFO, &[&name[..], &[0, 0]].concat()),
        seed_option(option::STARTTLS, &[]),
        seed_option(99, b"what"),
    ]
    .concat();
    let requests: Vec<u8> = [
        request(0, command::READ, 0, 9000),
        request(0, command::WRITE, 4096, 16),
        vec![7; 16],
        request(1, command::TRIM, 0, 8192),
        request(2, command::WRITE_ZEROES, 4096, 2 << 20),
        request(0, command::WRITE_ZEROES, 0, 4096),
        request(0, command::BLOCK_STATUS, 0, 3 << 20),
        request(0, command::FLUSH, 0, 0),
        request(0, command::CACHE, 0, 4096),
        request(0, command::READ, (3 << 20) - 1, 2),
        request(0, command::READ, 0, 3 << 20),
        request(0, command::DISC, 0, 0),
    ]
    .concat();
    let mut seeds = vec![
        [&[0, 15][..], &haggle, &seed_option(option::ABORT, &[])].concat(),
        [&[0, 3][..], &haggle, &go, &requests].concat(),
        [&[0, 200][..], &flags, &go, &requests].concat(),
        [&[0, 200][..], &flags, &seed_option(option::EXPORT_NAME, b"pool/image"), &requests].concat(),
        [&[0, 200][..], &flags, &seed_option(option::GO, &[&text("pool/broken")[..], &[0, 0]].concat())]
            .concat(),
    ];
    for mode in [1, 2, 4, 6] {
        seeds.push([&[mode, 60][..], &haggle, &go, &requests].concat());
    }
    seeds
}
