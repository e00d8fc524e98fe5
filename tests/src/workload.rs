//! The checking client: stamped writes, discards and reads at a queue depth, often several at once on one block, and
//! every read is checked.

use crate::check::{History, Outcome};
use crate::nbd::{Command, Connection, Reply};
use crate::random::Random;
use crate::stamp::{self, BLOCK, Stamp};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

/// Requests in flight.
pub const QUEUE_DEPTH: usize = 16;
/// Blocks of one request at most.
const RUN_MAX: u64 = 8;
/// Blocks that half of the requests go to, so that they meet.
const HOT_BLOCKS: u64 = 16;

/// One request in flight.
struct Pending {
    command: Command,
    blocks: Range<u64>,
}

/// How a time of writing went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Requests acknowledged.
    pub acked: u64,
    /// The connection broke, or an answer did not come in time: the writes without an answer stay open in the history.
    pub broken: bool,
}

/// What was written and may be read, over the life of one image.
pub struct Writer {
    seed: u64,
    blocks: u64,
    random: Random,
    next_number: u64,
    begin: Instant,
    /// What each block may hold.
    pub history: History,
}

impl Writer {
    /// For the first `blocks` blocks of an image.
    pub fn new(seed: u64, blocks: u64) -> Self {
        let (random, begin) = (Random::new(seed), Instant::now());
        Self { seed, blocks, random, next_number: 1, begin, history: History::new() }
    }

    /// Writes and reads until `end`, then waits for the answers.
    ///
    /// # Errors
    /// A read that no order of the writes explains, an error for a request, or an answer that nothing asked for.
    pub fn write_until(&mut self, connection: &mut Connection, end: Instant) -> Result<Written> {
        let mut pending: BTreeMap<u64, Pending> = BTreeMap::new();
        let mut acked = 0;
        while Instant::now() < end || !pending.is_empty() {
            if Instant::now() < end && pending.len() < QUEUE_DEPTH {
                let (cookie, request, data) = self.draw();
                let (blocks, command) = (request.blocks.clone(), request.command);
                let (offset, len) = (blocks.start * BLOCK as u64, (blocks.end - blocks.start) * BLOCK as u64);
                pending.insert(cookie, request);
                if connection.send(command, cookie, offset, len as u32, &data).is_err() {
                    return Ok(self.broken(&pending, acked));
                }
                continue;
            }
            let Ok(reply) = connection.receive() else { return Ok(self.broken(&pending, acked)) };
            let request = pending.remove(&reply.cookie);
            let request = request.with_context(|| format!("an answer to cookie {} twice", reply.cookie))?;
            self.answered(request, &reply)?;
            acked += 1;
        }
        Ok(Written { acked, broken: false })
    }

    fn broken(&mut self, pending: &BTreeMap<u64, Pending>, acked: u64) -> Written {
        let now = self.now();
        for cookie in pending.keys() {
            self.history.abandon(now, *cookie);
        }
        Written { acked, broken: true }
    }

    fn answered(&mut self, request: Pending, reply: &Reply) -> Result<()> {
        let Pending { command, blocks } = request;
        ensure!(reply.error == 0, "{command:?} of blocks {blocks:?} failed with NBD error {}", reply.error);
        let now = self.now();
        if command != Command::Read {
            return Ok(self.history.end_write(now, reply.cookie, Outcome::Acked)?);
        }
        for (index, block) in blocks.zip(reply.data.chunks_exact(BLOCK)) {
            let value = stamp::read(block, index, self.seed).map_err(anyhow::Error::msg)?;
            self.history.end_read(now, reply.cookie, index, value)?;
        }
        Ok(())
    }

    /// The next request, its data, and its number, which is its cookie.
    fn draw(&mut self) -> (u64, Pending, Vec<u8>) {
        let count = if self.random.one_in(3) { 1 + self.random.below(RUN_MAX) } else { 1 };
        let range = if self.random.one_in(2) { HOT_BLOCKS.min(self.blocks) } else { self.blocks };
        let first = self.random.below(range - count + 1);
        let blocks = first..first + count;
        let command = match self.random.below(16) {
            0..4 => Command::Read,
            4 => Command::Trim,
            5 => Command::WriteZeroes,
            _ => Command::Write,
        };
        let cookie = self.next_number;
        self.next_number += 1;
        let now = self.now();
        let mut data = Vec::new();
        for index in blocks.clone() {
            let stamp = if command == Command::Write { Stamp::Write(cookie) } else { Stamp::Zero };
            if command == Command::Read {
                self.history.begin_read(now, cookie, index);
            } else {
                self.history.begin_write(now, cookie, index, stamp);
            }
            if command == Command::Write {
                data.resize(data.len() + BLOCK, 0);
                let at = data.len() - BLOCK;
                stamp::fill(&mut data[at..], index, cookie, self.seed);
            }
        }
        (cookie, Pending { command, blocks }, data)
    }

    /// Nothing that was sent so far is on its way any more.
    pub fn settle(&mut self) {
        let now = self.now();
        self.history.settle(now);
    }

    /// Reads every block and checks it.
    ///
    /// # Errors
    /// The first block that holds what it must not.
    pub fn verify(&mut self, connection: &mut Connection) -> Result<()> {
        let step = 256;
        for first in (0..self.blocks).step_by(step) {
            let count = (self.blocks - first).min(step as u64);
            let data = connection.read(first * BLOCK as u64, (count as usize * BLOCK) as u32)?;
            let now = self.now();
            for (index, block) in (first..).zip(data.chunks_exact(BLOCK)) {
                let value = stamp::read(block, index, self.seed).map_err(anyhow::Error::msg)?;
                self.history.observe(now, index, value)?;
            }
        }
        Ok(())
    }

    /// Opens a connection with the patience that a restart of everything may take.
    ///
    /// # Errors
    /// When there is no server.
    pub fn connect(socket: &Path, export: &str) -> Result<Connection> {
        Connection::open(socket, export, Duration::from_secs(60))
    }

    /// Nanoseconds since the start, for reports.
    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_nanos()).expect("no run takes 500 years")
    }
}
