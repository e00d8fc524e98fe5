//! Sessions against an image in memory, byte by byte.

mod handshake;
mod property;
mod server;
mod transmission;

use super::protocol::{OPTION_MAGIC, REQUEST_MAGIC, command};
use super::session::{Action, Ending, Export, OpenRefused, Session};
use crate::event::{Extent, ImageIo, IoDone};
use loligo_config::units::{ByteLen, ByteOffset};
use loligo_reactor::dma::BufferPool;
use std::collections::VecDeque;

const BLOCK: u64 = 4096;

/// An image in memory, with its allocation in blocks.
pub(super) struct Memory {
    pub bytes: Vec<u8>,
    pub allocated: Vec<bool>,
    pub fail: Option<i32>,
    /// Every request so far, in words.
    pub log: Vec<String>,
}

impl Memory {
    pub fn new(size: usize) -> Self {
        let blocks = size.div_ceil(BLOCK as usize);
        Self { bytes: vec![0; size], allocated: vec![false; blocks], fail: None, log: Vec::new() }
    }

    fn mark(&mut self, offset: u64, len: u64, allocated: bool) {
        for block in offset / BLOCK..(offset + len).div_ceil(BLOCK) {
            self.allocated[block as usize] = allocated;
        }
    }

    pub fn run(&mut self, io: ImageIo, pool: &BufferPool) -> Result<IoDone, i32> {
        self.log.push(match &io {
            ImageIo::Read { offset, len } => format!("read {offset}+{len}"),
            ImageIo::Write { offset, data, fua } => format!("write {offset}+{} fua={fua}", data.len()),
            ImageIo::Discard { offset, len } => format!("discard {offset}+{len}"),
            ImageIo::WriteZeroes { offset, len } => format!("zero {offset}+{len}"),
            ImageIo::Flush => "flush".to_owned(),
            ImageIo::Extents { offset, len } => format!("extents {offset}+{len}"),
        });
        if let Some(errno) = self.fail {
            return Err(errno);
        }
        let mut done = IoDone { data: None, extents: Vec::new(), waterfall: Default::default() };
        match io {
            ImageIo::Read { offset, len } => {
                done.data = Some(pool.copy_of(&self.bytes[offset.0 as usize..][..len.0 as usize]).unwrap());
            }
            ImageIo::Write { offset, data, .. } => {
                self.bytes[offset.0 as usize..][..data.len()].copy_from_slice(&data);
                self.mark(offset.0, data.len() as u64, true);
            }
            ImageIo::WriteZeroes { offset, len } | ImageIo::Discard { offset, len } => {
                self.bytes[offset.0 as usize..][..len.0 as usize].fill(0);
                self.mark(offset.0, len.0, false);
            }
            ImageIo::Flush => {}
            ImageIo::Extents { offset, len } => done.extents = self.extents(offset.0, len.0),
        }
        Ok(done)
    }

    fn extents(&self, offset: u64, len: u64) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let next = ((at / BLOCK + 1) * BLOCK).min(end);
            let allocated = self.allocated[(at / BLOCK) as usize];
            match extents.last_mut() {
                Some(last) if last.allocated == allocated => last.len.0 += next - at,
                _ => extents.push(Extent { offset: ByteOffset(at), len: ByteLen(next - at), allocated }),
            }
            at = next;
        }
        extents
    }
}

/// A client on one side and an image on the other, with a session between them.
pub(super) struct Wire {
    pub session: Session,
    pub image: Memory,
    pub pool: BufferPool,
    pub sent: Vec<u8>,
    pub ending: Option<Ending>,
    /// I/O is kept back while this is set.
    pub hold: bool,
    pub held: VecDeque<Action>,
    pub names: Vec<String>,
    pub read_only: bool,
    input: VecDeque<u8>,
}

impl Wire {
    pub fn new(size: usize) -> Self {
        let pool = BufferPool::new(256 << 20);
        let mut out = Vec::new();
        let session = Session::new(pool.clone(), &mut out);
        let mut wire = Self {
            session,
            image: Memory::new(size),
            pool,
            sent: Vec::new(),
            ending: None,
            hold: false,
            held: VecDeque::new(),
            names: vec!["rbd/disk".to_owned(), "rbd/other".to_owned()],
            read_only: false,
            input: VecDeque::new(),
        };
        wire.run(out);
        wire
    }

    /// In transmission on `rbd/disk`, with everything that was sent so far forgotten.
    pub fn ready(size: usize, structured: bool) -> Self {
        let mut wire = Self::new(size);
        wire.give(&3u32.to_be_bytes());
        if structured {
            wire.give(&option(8, &[]));
            wire.give(&option(10, &context_request("rbd/disk", &["base:allocation"])));
        }
        wire.give(&option(7, &info_request("rbd/disk", &[])));
        assert!(!wire.session.in_handshake());
        wire.sent.clear();
        wire
    }

    pub fn give(&mut self, bytes: &[u8]) {
        self.input.extend(bytes);
        self.pump();
    }

    pub fn pump(&mut self) {
        loop {
            let bytes: Vec<u8> = self.input.iter().copied().collect();
            let mut out = Vec::new();
            let taken = self.session.receive(&bytes, &mut out);
            self.input.drain(..taken);
            let asked = !out.is_empty();
            self.run(out);
            if !asked && taken == 0 {
                return;
            }
        }
    }

    pub fn waiting_input(&self) -> usize {
        self.input.len()
    }

    /// Lets what was held back complete.
    pub fn release(&mut self) {
        self.hold = false;
        while let Some(action) = self.held.pop_front() {
            self.run(vec![action]);
        }
        self.pump();
    }

    fn run(&mut self, actions: Vec<Action>) {
        let mut queue: VecDeque<Action> = actions.into();
        while let Some(action) = queue.pop_front() {
            let mut out = Vec::new();
            match action {
                Action::Send(bytes) => self.sent.extend_from_slice(&bytes),
                Action::Close(ending) => self.ending = Some(ending),
                Action::List => self.session.listed(Ok(self.names.clone()), &mut out),
                Action::Open { name } => {
                    let size = self.image.bytes.len() as u64;
                    let export = Export { size, object_len: 4 << 20, read_only: self.read_only };
                    let result = match name.as_str() {
                        "rbd/disk" | "rbd/other" => Ok(export),
                        "rbd/broken" => Err(OpenRefused::Failed("it is broken".to_owned())),
                        _ => Err(OpenRefused::Unknown),
                    };
                    self.session.opened(result, &mut out);
                }
                Action::Io { .. } if self.hold => self.held.push_back(action),
                Action::Io { key, io } => {
                    let result = self.image.run(io, &self.pool);
                    self.session.completed(key, result, &mut out);
                }
            }
            queue.extend(out);
        }
    }

    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.sent)
    }

    /// Sends one request and returns what came back.
    pub fn ask(&mut self, flags: u16, kind: u16, offset: u64, len: u32, payload: &[u8]) -> Vec<u8> {
        self.give(&request(flags, kind, offset, len, payload));
        self.take()
    }

    /// The error in the simple reply to one request.
    pub fn error_of(&mut self, flags: u16, kind: u16, offset: u64, len: u32, payload: &[u8]) -> u32 {
        let reply = self.ask(flags, kind, offset, len, payload);
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        assert_eq!(reply[8..16], COOKIE.to_be_bytes());
        u32::from_be_bytes(reply[4..8].try_into().unwrap())
    }
}

pub(super) const COOKIE: u64 = 0x0102_0304_0506_0708;

pub(super) fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u32;
    [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

pub(super) fn option_reply(number: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u32;
    let magic = 0x0003_e889_0455_65a9u64;
    [&magic.to_be_bytes()[..], &number.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

pub(super) fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

pub(super) fn info_request(name: &str, kinds: &[u16]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((kinds.len() as u16).to_be_bytes());
    kinds.iter().for_each(|kind| data.extend(kind.to_be_bytes()));
    data
}

pub(super) fn context_request(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend(text(query)));
    data
}

pub(super) fn request(flags: u16, kind: u16, offset: u64, len: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(COOKIE.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes.extend(payload);
    bytes
}

pub(super) fn write(offset: u64, data: &[u8]) -> Vec<u8> {
    request(0, command::WRITE, offset, data.len() as u32, data)
}

pub(super) fn simple(error: u32) -> Vec<u8> {
    [&0x6744_6698u32.to_be_bytes()[..], &error.to_be_bytes(), &COOKIE.to_be_bytes()].concat()
}

pub(super) fn chunk(done: bool, kind: u16, parts: &[&[u8]]) -> Vec<u8> {
    let data = parts.concat();
    let mut bytes = 0x668e_33efu32.to_be_bytes().to_vec();
    bytes.extend(u16::from(done).to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(COOKIE.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

pub(super) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed | 1).collect()
}
