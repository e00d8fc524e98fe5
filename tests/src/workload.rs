//! The checking writer: stamped writes at a queue depth, one at a time per block, and reads that check.

use crate::history::History;
use crate::nbd::{Command, Connection};
use crate::random::Random;
use crate::stamp::{self, BLOCK, Stamp};
use anyhow::{Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

/// Writes in flight.
pub const QUEUE_DEPTH: usize = 16;
/// Blocks of one write at most.
const RUN_MAX: u64 = 8;

/// One write in flight.
struct Pending {
    block: u64,
    values: Vec<Stamp>,
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
    /// What each block may hold.
    pub history: History,
}

impl Writer {
    /// For the first `blocks` blocks of an image.
    pub fn new(seed: u64, blocks: u64) -> Self {
        Self { seed, blocks, random: Random::new(seed), next_number: 1, history: History::default() }
    }

    /// Writes until `end`, then waits for the answers.
    pub fn write_until(&mut self, connection: &mut Connection, end: Instant) -> Result<Written> {
        let mut pending: BTreeMap<u64, Pending> = BTreeMap::new();
        let mut busy = BTreeSet::new();
        let mut acked = 0;
        let broken = |acked| Ok(Written { acked, broken: true });
        while Instant::now() < end || !pending.is_empty() {
            if Instant::now() < end && pending.len() < QUEUE_DEPTH {
                let Some((cookie, write, data)) = self.draw(&busy) else { continue };
                busy.extend(write.block..write.block + write.values.len() as u64);
                let (offset, len) = (write.block * BLOCK as u64, data.len() as u32);
                pending.insert(cookie, write);
                if connection.send(Command::Write, cookie, offset, len, &data).is_err() {
                    return broken(acked);
                }
                continue;
            }
            let Ok(reply) = connection.receive() else { return broken(acked) };
            let write = pending.remove(&reply.cookie);
            let write = write.ok_or_else(|| anyhow::anyhow!("an answer to cookie {} twice", reply.cookie))?;
            ensure!(reply.error == 0, "writing block {} failed with NBD error {}", write.block, reply.error);
            for (block, value) in (write.block..).zip(&write.values) {
                self.history.ack(block, *value);
                busy.remove(&block);
            }
            acked += 1;
        }
        Ok(Written { acked, broken: false })
    }

    /// A write of blocks that no other write in flight touches; `None` when the draw did touch one.
    fn draw(&mut self, busy: &BTreeSet<u64>) -> Option<(u64, Pending, Vec<u8>)> {
        let count = if self.random.one_in(3) { 1 + self.random.below(RUN_MAX) } else { 1 };
        let block = self.random.below(self.blocks - count + 1);
        if busy.range(block..block + count).next().is_some() {
            return None;
        }
        let mut data = vec![0; BLOCK * count as usize];
        let mut values = Vec::new();
        let cookie = self.next_number;
        for (at, chunk) in data.chunks_exact_mut(BLOCK).enumerate() {
            let (index, number) = (block + at as u64, self.next_number);
            self.next_number += 1;
            stamp::fill(chunk, index, number, self.seed);
            self.history.begin(index, Stamp::Write(number));
            values.push(Stamp::Write(number));
        }
        Some((cookie, Pending { block, values }, data))
    }

    /// Reads every block and checks it; what it finds is settled from then on.
    pub fn verify(&mut self, connection: &mut Connection) -> Result<()> {
        let step = 256;
        for first in (0..self.blocks).step_by(step) {
            let count = (self.blocks - first).min(step as u64);
            let data = connection.read(first * BLOCK as u64, (count as usize * BLOCK) as u32)?;
            for (index, block) in (first..).zip(data.chunks_exact(BLOCK)) {
                let value = stamp::read(block, index, self.seed).map_err(anyhow::Error::msg)?;
                self.history.observe(index, value).map_err(anyhow::Error::msg)?;
            }
        }
        Ok(())
    }

    /// Opens a connection with the patience that a restart of everything may take.
    pub fn connect(socket: &Path, export: &str) -> Result<Connection> {
        Connection::open(socket, export, Duration::from_secs(60))
    }
}
