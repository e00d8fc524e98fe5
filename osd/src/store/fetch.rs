//! Reads at a mount: many at once, and chains of checkpoint pages.

use super::codec::{BLOCK, Identity};
use super::page::{self, Tag};
use loligo_config::units::Lba;
use loligo_reactor::dma::{Buffer, BufferPool};
use loligo_reactor::env::{BlockDevice, Completions, DiskError, DiskOp, QueueFull, Ticket};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Reads in flight: enough for a device's parallelism, few enough for its queue.
const DEPTH: usize = 64;

/// A read that has ended.
#[derive(Debug)]
pub(super) struct Fetched {
    pub tag: u64,
    pub lba: u64,
    pub count: u32,
    pub result: Result<Buffer, DiskError>,
}

#[derive(Debug)]
pub(super) struct Fetch<D> {
    pub device: D,
    queue: VecDeque<(u64, u32, u64)>,
    in_flight: BTreeMap<u64, u64>,
    next: u64,
    done: Completions,
}

impl<D: BlockDevice> Fetch<D> {
    pub fn new(device: D) -> Self {
        Self { device, queue: VecDeque::new(), in_flight: BTreeMap::new(), next: 0, done: Completions::new() }
    }

    /// Reads blocks as one operation.
    pub fn read(&mut self, lba: u64, count: u32, tag: u64) {
        self.queue.push_back((lba, count, tag));
    }

    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.in_flight.is_empty() && self.done.is_empty()
    }

    /// Moves things on and returns one read that has ended, if there is one.
    pub fn poll(&mut self, pool: &BufferPool) -> Option<Fetched> {
        self.feed(pool);
        if self.done.is_empty() {
            self.device.poll(DEPTH as u32, &mut self.done);
        }
        let completion = self.done.pop_front()?;
        let tag = self.in_flight.remove(&completion.ticket.0).expect("a read that was asked for");
        let DiskOp::Read { lba, buffer } = completion.op else { panic!("a read comes back as a read") };
        let count = (buffer.len() / BLOCK) as u32;
        Some(Fetched { tag, lba: lba.0, count, result: completion.result.map(|()| buffer) })
    }

    fn feed(&mut self, pool: &BufferPool) {
        while self.in_flight.len() < DEPTH {
            let Some((lba, count, tag)) = self.queue.front().copied() else { return };
            let Ok(buffer) = pool.alloc(count as usize * BLOCK) else { return };
            let op = DiskOp::Read { lba: Lba(lba), buffer };
            if let Err(QueueFull(_)) = self.device.submit(op, Ticket(self.next)) {
                return;
            }
            self.in_flight.insert(self.next, tag);
            self.next += 1;
            self.queue.pop_front();
        }
    }
}

/// A stream being read.
#[derive(Debug)]
pub(super) struct Chain {
    pub tag: Tag,
    pub bytes: Vec<u8>,
    pub lbas: Vec<u64>,
}

/// Streams being read, all at once.
#[derive(Debug, Default)]
pub(super) struct Chains {
    reading: BTreeMap<u64, Chain>,
    /// Every page that came: no page is in two streams, nor twice in one.
    seen: BTreeSet<u64>,
    next: u64,
}

/// How a stream ended: the key it was asked for with, and the stream, or nothing if a page of it is unreadable.
pub(super) type ChainEnd = (Tag, u64, Option<Chain>);

impl Chains {
    /// Reads the stream that begins at `lba`. The key comes back with it.
    pub fn read<D: BlockDevice>(&mut self, fetch: &mut Fetch<D>, tag: Tag, lba: u64) -> u64 {
        let id = self.next;
        self.next += 1;
        self.reading.insert(id, Chain { tag, bytes: Vec::new(), lbas: vec![lba] });
        fetch.read(lba, 1, id);
        id
    }

    /// Takes a page; returns the stream if it has ended. `newest` is the checkpoint's number, `blocks` the device's.
    pub fn page<D: BlockDevice>(
        &mut self,
        fetch: &mut Fetch<D>,
        fetched: Fetched,
        identity: &Identity,
        newest: u64,
        blocks: u64,
    ) -> Option<ChainEnd> {
        let id = fetched.tag;
        let chain = self.reading.get_mut(&id)?;
        let tag = chain.tag;
        let page =
            fetched.result.as_ref().ok().and_then(|block| page::decode(block, identity, fetched.lba, tag));
        // A loop, or streams that run into one another, would take memory without end.
        let first_time = self.seen.insert(fetched.lba);
        let Some(page) = page.filter(|page| first_time && page.checkpoint <= newest && page.next < blocks)
        else {
            self.reading.remove(&id);
            return Some((tag, id, None));
        };
        chain.bytes.extend_from_slice(page.data);
        if page.next == 0 {
            let chain = self.reading.remove(&id);
            return Some((tag, id, chain));
        }
        chain.lbas.push(page.next);
        fetch.read(page.next, 1, id);
        None
    }
}
