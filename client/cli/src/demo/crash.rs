//! All OSDs are killed in the middle of writes: what was acknowledged must be there, what was not is old or new.
//!
//! The writing client is dropped with its OSDs, so that nobody repeats what it had not heard of yet; another client
//! reads afterwards.

use super::{IMAGE, POOL, Stage};
use crate::cluster::Connection;
use crate::output::{Failure, Outcome};
use loligo_client::{ImageHandle, ImageIo, IoDone, IoError};
use loligo_config::units::ByteOffset;
use loligo_reactor::env::{Entropy, Ticket};
use loligo_reactor::os::OsEntropy;
use loligo_reactor::random::Random;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

const BLOCK: usize = 4096;
/// Blocks that are written.
const BLOCKS: u64 = 4096;
/// Writes in flight.
const DEPTH: usize = 16;
/// Writing before the kill.
const WRITING: Duration = Duration::from_secs(2);

/// What is known of one block.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// The newest acknowledged write; 0: none of this run.
    acked: u64,
    /// A write that was sent and not acknowledged; 0: none.
    pending: u64,
}

/// What was there after the restart.
#[derive(Clone, Copy, Debug)]
pub struct Survived {
    acked: u64,
    unacked: u64,
}

impl Survived {
    /// For programs.
    pub fn to_json(self) -> Value {
        json!({
            "queue_depth": DEPTH,
            "acknowledged": self.acked,
            "acknowledged_lost": 0,
            "unacknowledged": self.unacked,
            "unacknowledged_mixed": 0,
        })
    }
}

impl fmt::Display for Survived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Three OSDs killed (SIGKILL) in the middle of writes at queue depth {DEPTH}: all {} acknowledged writes are \
             there; {} unacknowledged ones are old or new, none mixed.",
            self.acked, self.unacked
        )
    }
}

/// Writes, kills, restarts, verifies.
///
/// # Errors
/// When anything acknowledged is missing.
pub fn run(stage: &mut Stage) -> Outcome<Survived> {
    let mut cluster = stage.connect()?;
    let image = cluster.open(POOL, IMAGE)?;
    cluster.write_at(image, 0, &vec![0; BLOCKS as usize * BLOCK])?;
    let mut writer = Writer {
        random: Random::new(OsEntropy::new().next_u64()),
        blocks: BTreeMap::new(),
        written: 0,
        acked: 0,
    };
    writer.write_for(&mut cluster, image, WRITING)?;
    stage.kill_osds()?;
    // Acknowledgements that were on their way count.
    writer.hear(&mut cluster, Duration::from_millis(200))?;
    drop(cluster);
    stage.step(&format!("all OSDs killed with {} of {} writes acknowledged", writer.acked, writer.written));
    stage.start_osds()?;
    let mut cluster = stage.connect()?;
    stage.wait_until_up(&mut cluster)?;
    let unacked = writer.verify(&mut cluster)?;
    stage.step("all OSDs restarted, every block read back");
    Ok(Survived { acked: writer.acked, unacked })
}

struct Writer {
    random: Random,
    blocks: BTreeMap<u64, Known>,
    written: u64,
    acked: u64,
}

/// The content of one write: its number, its block, and bytes that follow from both.
fn content(block: u64, number: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    if number > 0 {
        Random::new(number ^ block.rotate_left(32)).fill(&mut bytes);
        bytes[..8].copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

impl Writer {
    fn write_for(&mut self, cluster: &mut Connection, image: ImageHandle, time: Duration) -> Outcome {
        for _ in 0..DEPTH {
            self.issue(cluster, image)?;
        }
        let end = crate::world::now().after(time);
        while crate::world::now() < end {
            let (_, ticket, result) = cluster.wait_any();
            self.ended(ticket, result)?;
            self.issue(cluster, image)?;
        }
        Ok(())
    }

    fn issue(&mut self, cluster: &mut Connection, image: ImageHandle) -> Outcome {
        let block = loop {
            let block = self.random.below(BLOCKS);
            // Two writes to one block at once would leave it open which is the newer.
            if self.blocks.get(&block).is_none_or(|known| known.pending == 0) {
                break block;
            }
        };
        self.written += 1;
        self.blocks.entry(block).or_default().pending = self.written;
        let data = cluster.client().pool().copy_of(&content(block, self.written)).map_err(Failure::plain)?;
        let offset = ByteOffset(block * BLOCK as u64);
        cluster
            .submit(image, ImageIo::Write { offset, data, fua: false }, Ticket(block))
            .map_err(|_| Failure::new("the client's queue is full", ""))
    }

    fn ended(&mut self, ticket: Ticket, result: Result<IoDone, IoError>) -> Outcome {
        result?;
        let known = self.blocks.entry(ticket.0).or_default();
        *known = Known { acked: known.pending, pending: 0 };
        self.acked += 1;
        Ok(())
    }

    fn hear(&mut self, cluster: &mut Connection, time: Duration) -> Outcome {
        let end = crate::world::now().after(time);
        while crate::world::now() < end && cluster.outstanding() > 0 {
            cluster.client_mut().set_alarm(Some(end));
            if let Some((_, ticket, result)) = cluster.poll_any() {
                self.ended(ticket, result)?;
            }
        }
        Ok(())
    }

    /// Reads every block twice; returns how many writes were not acknowledged.
    fn verify(&self, cluster: &mut Connection) -> Outcome<u64> {
        let image = cluster.open(POOL, IMAGE)?;
        let mut found = vec![0; BLOCKS as usize * BLOCK];
        cluster.read_at(image, 0, &mut found)?;
        let mut again = vec![0; found.len()];
        cluster.read_at(image, 0, &mut again)?;
        cluster.close(image);
        super::check("reading twice after the restart", &again, &found)?;
        let mut unacked = 0;
        for (block, found) in (0u64..).zip(found.chunks_exact(BLOCK)) {
            let known = self.blocks.get(&block).copied().unwrap_or_default();
            unacked += u64::from(known.pending != 0);
            let is = |number: u64| found == content(block, number);
            if !(is(known.acked) || known.pending != 0 && is(known.pending)) {
                return Err(Failure::new(
                    format!("block {block} holds neither acknowledged write {} nor a later one", known.acked),
                    "this must never happen: keep everything (--keep) and report it",
                ));
            }
        }
        Ok(unacked)
    }
}
