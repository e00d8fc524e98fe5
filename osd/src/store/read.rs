//! Reads: addresses are captured when a read is asked for, every block is checked when it arrives.
//!
//! Blocks are captured with the index as it is, later writes do not disturb them: a freed block is not used again
//! while a read that began before is under way. A read of blocks that are still being written waits for that write.

use super::Store;
use super::api::{ReadData, ReadError, StoreEvent};
use super::codec::{BLOCK, crc32c};
use super::index::{LOST, Stored};
use super::io::{Purpose, read_error};
use loligo_config::id::{ObjectId, ObjectVersion, PgId};
use loligo_config::units::Lba;
use loligo_reactor::dma::{Buffer, BufferPool};
use loligo_reactor::env::{BlockDevice, Completion, DiskError, DiskOp, Instant, Ticket};
use loligo_reactor::planted::{self, Bug};
use slab::Slab;
use std::collections::BTreeSet;

/// Reads under way. Guessed: twice what a device queue holds.
const READS_MAX: usize = 512;
/// Device reads of one read at most: its part number has 16 bits in a ticket, and the worst case is a run per block.
const PARTS_MAX: usize = 1 << 16;
/// Blocks between two runs that are read along with them instead of reading twice: a record block between the data
/// of two single writes is the common case. Guessed.
const GAP_MAX: u64 = 8;
/// CRC-32C of a block of zeroes.
pub(super) const ZERO_CRC: u32 = 0x98f9_4189;

#[derive(Debug, Default)]
pub(super) struct Reads {
    active: Slab<Read>,
    waiting: Vec<usize>,
    sequences: BTreeSet<u64>,
    next: u64,
}

/// One device read.
#[derive(Debug)]
struct Group {
    lba: u64,
    blocks: u32,
    /// Where the pieces are: block of the result, block of the group, count.
    pieces: Vec<(u32, u32, u32)>,
}

#[derive(Debug)]
struct Read {
    ticket: Ticket,
    sequence: u64,
    version: ObjectVersion,
    block: u32,
    /// Starts when every position of the log up to this one is written: it may need blocks of several.
    after: u64,
    groups: Vec<Group>,
    /// Single blocks of groups that could not be read as a whole; their part numbers follow those of `groups`.
    again: Vec<Group>,
    outstanding: usize,
    /// `None` while the only device read fills it.
    data: Option<Buffer>,
    /// The buffer of the only device read before it starts.
    direct: bool,
    checksums: Buffer,
    started: Instant,
    error: Option<ReadError>,
}

impl Reads {
    /// Reads that began before this number may have captured any address freed now.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The first read still under way, or the next one.
    pub fn oldest(&self) -> u64 {
        self.sequences.first().copied().unwrap_or(self.next)
    }

    pub fn in_flight(&self) -> usize {
        self.active.len()
    }
}

/// Joins runs that lie close together into device reads.
fn group(pieces: impl Iterator<Item = Stored>, block: u32, transfer_max: u32) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for piece in pieces {
        let (mut lba, mut at, mut left) = (piece.lba, piece.block - block, piece.count);
        while left > 0 {
            let near = groups.last_mut().and_then(|group| {
                let gap = lba.checked_sub(group.lba + u64::from(group.blocks))?;
                let blocks = u64::from(group.blocks) + gap + u64::from(left);
                (gap <= GAP_MAX && blocks <= u64::from(transfer_max)).then_some((group, gap as u32))
            });
            let count = left.min(transfer_max);
            if let Some((group, gap)) = near {
                group.pieces.push((at, group.blocks + gap, count));
                group.blocks += gap + count;
            } else {
                groups.push(Group { lba, blocks: count, pieces: vec![(at, 0, count)] });
            }
            (lba, at, left) = (lba + u64::from(count), at + count, left - count);
        }
    }
    groups
}

fn buffer(pool: &BufferPool, blocks: u32) -> Result<Buffer, ReadError> {
    pool.alloc(blocks as usize * BLOCK).map_err(|_| ReadError::Busy)
}

impl<D: BlockDevice> Store<D> {
    /// Begins to read blocks of an object, as every transaction submitted so far leaves them. `Read` follows.
    ///
    /// # Errors
    /// `Busy`: too many reads are under way, or there is no buffer for this one.
    ///
    /// # Panics
    /// If `count` is 0 or the range ends beyond the largest object: the caller checks its client's requests.
    pub fn read(
        &mut self,
        object: ObjectId,
        pg: PgId,
        block: u32,
        count: u32,
        ticket: Ticket,
    ) -> Result<(), ReadError> {
        assert!(count > 0, "a read has blocks");
        assert!(block.checked_add(count).is_some_and(|end| end <= super::OBJECT_BLOCKS_MAX));
        if self.reads.active.len() >= READS_MAX {
            return Err(ReadError::Busy);
        }
        let known = self.state.index.object(object).filter(|object| object.pg == pg);
        let version = known.map_or(ObjectVersion::NONE, |object| object.version);
        let stored = || self.state.index.stored(object, block, count).filter(|_| known.is_some());
        if stored().next().is_none() {
            let result = Ok(ReadData { data: None, checksums: None, version });
            self.events.push_back(StoreEvent::Read { ticket, result, device_ns: 0 });
            return Ok(());
        }
        if let Some(lost) = stored().find(|piece| piece.lba == LOST) {
            let result = Err(ReadError::Corrupt { block: lost.block });
            self.events.push_back(StoreEvent::Read { ticket, result, device_ns: 0 });
            return Ok(());
        }
        let groups = group(stored(), block, self.transfer_max);
        assert!(groups.len() <= PARTS_MAX);
        let checksums = self.capture_checksums(object, block, count)?;
        // One device read that is the result as it is: no hole, no gap.
        let in_place = |one: &Group| one.pieces.iter().all(|(at, from, _)| at == from);
        let filled: u32 = stored().map(|piece| piece.count).sum();
        let whole = matches!(&groups[..], [one] if in_place(one) && one.blocks == count && filled == count);
        let data = if whole { None } else { Some(buffer(&self.pool, count)?) };
        let after =
            stored().map(|piece| self.log.position_writing(piece.lba, piece.count)).max().unwrap_or(0);
        let sequence = self.reads.next;
        self.reads.next += 1;
        self.reads.sequences.insert(sequence);
        let (outstanding, started) = (groups.len(), self.now);
        let id = self.reads.active.insert(Read {
            ticket,
            sequence,
            version,
            block,
            after,
            groups,
            again: Vec::new(),
            outstanding,
            data,
            direct: whole,
            checksums,
            started,
            error: None,
        });
        self.reads.waiting.push(id);
        self.start_reads();
        Ok(())
    }

    fn capture_checksums(&self, object: ObjectId, block: u32, count: u32) -> Result<Buffer, ReadError> {
        let mut out = self.pool.alloc(count as usize * 4).map_err(|_| ReadError::Busy)?;
        out.chunks_exact_mut(4).for_each(|slot| slot.copy_from_slice(&ZERO_CRC.to_le_bytes()));
        for (piece, checksums) in self.state.index.pieces(object, block, count) {
            let at = (piece.block - block) as usize * 4;
            for (slot, checksum) in out[at..].chunks_exact_mut(4).zip(checksums) {
                slot.copy_from_slice(&checksum.to_le_bytes());
            }
        }
        Ok(out)
    }

    /// Starts the reads whose blocks are written by now, as far as there are buffers.
    pub(super) fn start_reads(&mut self) -> bool {
        let mut waiting = std::mem::take(&mut self.reads.waiting);
        let before = waiting.len();
        waiting.retain(|id| !self.start_read(*id));
        let started = waiting.len() < before;
        self.reads.waiting = waiting;
        started
    }

    fn start_read(&mut self, id: usize) -> bool {
        let read = &mut self.reads.active[id];
        if read.after > self.log.durable && !planted::active(Bug::ReadOvertakesWrite) {
            if let Some(error) = self.failed {
                // The write that it waits for will never end.
                read.error = Some(read_error(read.block, error));
                self.end_read(id);
                return true;
            }
            return false;
        }
        let buffers: Result<Vec<_>, _> =
            read.groups.iter().map(|group| buffer(&self.pool, group.blocks)).collect();
        let Ok(buffers) = buffers else { return false };
        read.started = self.now;
        for (part, (group, buffer)) in (0u64..).zip(read.groups.iter().zip(buffers)) {
            let ticket = Purpose::Read.ticket((id as u64) << 16 | part);
            self.io.send(DiskOp::Read { lba: Lba(group.lba), buffer }, ticket);
        }
        true
    }

    pub(super) fn read_completed(&mut self, number: u64, completion: Completion) {
        let (id, part) = ((number >> 16) as usize, (number & 0xffff) as usize);
        let DiskOp::Read { buffer, .. } = completion.op else { panic!("a read comes back as a read") };
        let unreadable = matches!(completion.result, Err(DiskError::Media { .. }));
        let retried = unreadable && self.read_singly(id, part);
        let read = &mut self.reads.active[id];
        let group = read.groups.get(part).unwrap_or_else(|| &read.again[part - read.groups.len()]);
        let base = read.block;
        if let Err(error) = completion.result {
            let error = read_error(base + group.pieces[0].0, error);
            if !retried {
                read.error.get_or_insert(error);
            }
        } else {
            for (at, from, count) in &group.pieces {
                let (at, from, len) = (*at as usize, *from as usize * BLOCK, *count as usize);
                let bytes = &buffer[from..from + len * BLOCK];
                let sums = read.checksums[at * 4..(at + len) * 4].chunks_exact(4);
                let bad = bytes
                    .chunks_exact(BLOCK)
                    .zip(sums)
                    .position(|(block, sum)| crc32c(block).to_le_bytes() != sum);
                if let Some(bad) = bad.filter(|_| !planted::active(Bug::BlockUnchecked)) {
                    let error = ReadError::Corrupt { block: base + (at + bad) as u32 };
                    read.error = Some(match read.error {
                        Some(ReadError::Corrupt { block }) if block <= base + (at + bad) as u32 => {
                            ReadError::Corrupt { block }
                        }
                        _ => error,
                    });
                }
                if let Some(data) = &mut read.data {
                    data[at * BLOCK..(at + len) * BLOCK].copy_from_slice(bytes);
                }
            }
            if read.direct {
                read.data = Some(buffer);
            }
        }
        read.outstanding -= 1;
        if read.outstanding == 0 {
            self.end_read(id);
        }
    }

    /// Reads the blocks of a group again, one by one, since one of them is unreadable: it must not hide the others, least
    /// of all if it is one that was only read along. False if there are not enough buffers, or it is one block.
    fn read_singly(&mut self, id: usize, part: usize) -> bool {
        let read = &mut self.reads.active[id];
        let Some(group) = read.groups.get(part).filter(|group| group.blocks > 1) else { return false };
        let blocks = group.pieces.iter().flat_map(|(at, from, count)| {
            (0..*count).map(move |step| (at + step, group.lba + u64::from(from + step)))
        });
        let singles: Vec<_> =
            blocks.map(|(at, lba)| Group { lba, blocks: 1, pieces: vec![(at, 0, 1)] }).collect();
        let first = read.groups.len() + read.again.len();
        let buffers: Result<Vec<_>, _> = singles.iter().map(|_| buffer(&self.pool, 1)).collect();
        let Ok(buffers) = buffers else { return false };
        if first + singles.len() > PARTS_MAX {
            return false;
        }
        if read.direct {
            let count = read.checksums.len() / 4;
            let Ok(data) = buffer(&self.pool, count as u32) else { return false };
            (read.data, read.direct) = (Some(data), false);
        }
        read.outstanding += singles.len();
        for ((part, single), buffer) in (first as u64..).zip(&singles).zip(buffers) {
            let ticket = Purpose::Read.ticket((id as u64) << 16 | part);
            self.io.send(DiskOp::Read { lba: Lba(single.lba), buffer }, ticket);
        }
        read.again.extend(singles);
        true
    }

    fn end_read(&mut self, id: usize) {
        let mut read = self.reads.active.remove(id);
        self.reads.sequences.remove(&read.sequence);
        let result = match read.error {
            Some(error) => Err(error),
            None => {
                let mut data = read.data.take().expect("every part has come");
                if !read.direct {
                    zero_holes(&mut data, &read.groups);
                }
                let (data, checksums) = (Some(data.freeze()), Some(read.checksums.freeze()));
                Ok(ReadData { data, checksums, version: read.version })
            }
        };
        let device_ns = u32::try_from(self.now.since(read.started).as_nanos()).unwrap_or(u32::MAX);
        self.events.push_back(StoreEvent::Read { ticket: read.ticket, result, device_ns });
    }
}

fn zero_holes(data: &mut [u8], groups: &[Group]) {
    // Pieces are in the order of the object's blocks.
    let mut next = 0;
    for (at, _, count) in groups.iter().flat_map(|group| &group.pieces) {
        data[next..*at as usize * BLOCK].fill(0);
        next = (at + count) as usize * BLOCK;
    }
    data[next..].fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_zeroes_is_right() {
        assert_eq!(crc32c(&[0; BLOCK]), ZERO_CRC);
    }

    #[test]
    fn neighbours_are_read_together() {
        let version = ObjectVersion::NONE;
        let stored = |block, lba, count| Stored { block, lba, count, version };
        let pieces = [stored(10, 100, 1), stored(11, 102, 1), stored(13, 50, 2), stored(15, 52, 9)];
        let groups = group(pieces.into_iter(), 10, 8);
        let found: Vec<_> =
            groups.iter().map(|group| (group.lba, group.blocks, group.pieces.len())).collect();
        assert_eq!(found, [(100, 3, 2), (50, 2, 1), (52, 8, 1), (60, 1, 1)]);
    }
}
