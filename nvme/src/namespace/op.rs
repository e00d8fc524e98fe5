//! Operations and the commands that they are cut into.

use super::memory::{PoolMap, PrpList};
use crate::bus::{Bus, BusError};
use crate::queue::Region;
use crate::spec::PAGE_LEN;
use crate::spec::command::{Command, LbaRange, deallocate_range};
use loligo_config::units::{BLOCK_SIZE, BlockCount, Lba};
use loligo_reactor::dma::{Buffer, SharedBuffer};
use loligo_reactor::env::{DiskError, DiskOp, Instant, Ticket};

const BLOCK: usize = BLOCK_SIZE as usize;
const _: () = assert!(BLOCK == PAGE_LEN, "a block is a page, which spares all arithmetic between them");

/// What the controller is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Read,
    Write {
        fua: bool,
    },
    Compare,
    /// By the controller's own command.
    Zero {
        fua: bool,
    },
    /// By writing a page of zeroes again and again.
    WriteZeroes {
        fua: bool,
    },
    Deallocate,
    Flush,
}

impl Verb {
    /// Whether a failure of it poisons the device.
    pub(super) fn changes_data(self) -> bool {
        !matches!(self, Self::Read | Self::Compare | Self::Deallocate)
    }

    /// Whether its success leaves data in a cache, if there is a volatile one.
    pub(super) fn may_stay_cached(self) -> bool {
        matches!(
            self,
            Self::Write { fua: false } | Self::Zero { fua: false } | Self::WriteZeroes { fua: false }
        )
    }
}

/// One operation of the caller, without the caller's own part of it (`DiskOp`), which is large and moved once.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) ticket: Ticket,
    pub(super) verb: Verb,
    pub(super) lba: u64,
    /// Its length; 1 for a flush, which is a single command.
    pub(super) blocks: u64,
    /// Blocks that commands were made for.
    pub(super) sent: u64,
    /// Commands in flight or to be sent again.
    pub(super) outstanding: u32,
    pub(super) error: Option<DiskError>,
    /// How it has ended, once it has.
    pub(super) result: Option<Result<(), DiskError>>,
    /// A copy that the controller works on, where it cannot reach the caller's own buffers.
    pub(super) bounce: Option<Bounce>,
    /// Sweeps since it was submitted.
    pub(super) sweeps: u16,
    /// For a flush: what it covers.
    pub(super) covers: u64,
}

impl Op {
    pub(super) fn new(ticket: Ticket, verb: Verb, lba: u64, blocks: u64) -> Self {
        Self {
            ticket,
            verb,
            lba,
            blocks,
            sent: 0,
            outstanding: 0,
            error: None,
            result: None,
            bounce: None,
            sweeps: 0,
            covers: 0,
        }
    }

    /// Whether all that it needs was asked for and answered.
    pub(super) fn is_complete(&self) -> bool {
        self.result.is_none() && self.outstanding == 0 && self.sent == self.blocks
    }
}

#[derive(Debug)]
pub(super) enum Bounce {
    Into(Buffer),
    From(SharedBuffer),
}

/// A part of an operation: one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) op: u32,
    /// First block, counted from the operation's own.
    pub(super) first: u64,
    pub(super) blocks: u32,
    /// Times that the controller asked to send it again.
    pub(super) attempts: u8,
    pub(super) not_before: Instant,
}

/// How a namespace is addressed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) nsid: u32,
    pub(super) lba_per_block_shift: u32,
    /// Most blocks of one command, by what it is.
    pub(super) transfer_blocks_max: u32,
    pub(super) zero_blocks_max: u32,
}

/// Most blocks of one deallocate. Guessed: 256 MiB keep a drive busy long enough.
pub(super) const DEALLOCATE_BLOCKS_MAX: u32 = 1 << 16;

impl Target {
    pub(super) fn blocks_max(&self, verb: Verb) -> u32 {
        match verb {
            Verb::Read | Verb::Write { .. } | Verb::Compare | Verb::WriteZeroes { .. } => {
                self.transfer_blocks_max
            }
            Verb::Zero { .. } => self.zero_blocks_max,
            Verb::Deallocate => DEALLOCATE_BLOCKS_MAX,
            Verb::Flush => 1,
        }
    }

    fn range(&self, lba: u64, blocks: u32) -> LbaRange {
        let shift = self.lba_per_block_shift;
        LbaRange { first: lba << shift, count: blocks << shift }
    }
}

/// First block and number of blocks; `None` for lengths that are not whole blocks.
pub(super) fn extent(op: &DiskOp) -> Option<(Lba, BlockCount)> {
    let blocks = |len: usize| len.is_multiple_of(BLOCK).then_some(BlockCount((len / BLOCK) as u64));
    match op {
        DiskOp::Read { lba, buffer } => Some((*lba, blocks(buffer.len())?)),
        DiskOp::Write { lba, data, .. } => Some((*lba, blocks(data.iter().map(|piece| piece.len()).sum())?)),
        DiskOp::Discard { lba, count } | DiskOp::WriteZeroes { lba, count, .. } => Some((*lba, *count)),
        DiskOp::Flush => Some((Lba(0), BlockCount(1))),
    }
}

/// The parts of a queue pair's memory that one command needs.
pub(super) struct Scratch<'queue> {
    pub(super) memory: &'queue Region,
    /// This command's list.
    pub(super) list: usize,
    /// A page of zeroes.
    pub(super) zeroes: usize,
}

impl Op {
    /// The command for a piece, without its id.
    pub(super) fn command<B: Bus>(
        &self,
        body: &DiskOp,
        piece: &Piece,
        target: &Target,
        scratch: &Scratch<'_>,
        map: &mut PoolMap,
        bus: &B,
    ) -> Result<Command, BusError> {
        let range = target.range(self.lba + piece.first, piece.blocks);
        let mut command = match self.verb {
            Verb::Read => Command::read(target.nsid, range),
            Verb::Write { fua } | Verb::WriteZeroes { fua } => Command::write(target.nsid, range, fua),
            Verb::Compare => Command::compare(target.nsid, range),
            Verb::Zero { fua } => return Ok(Command::write_zeroes(target.nsid, range, fua)),
            Verb::Flush => return Ok(Command::flush(target.nsid)),
            Verb::Deallocate => {
                for (index, word) in deallocate_range(range).into_iter().enumerate() {
                    scratch.memory.write_u64(scratch.list + 8 * index, word);
                }
                return Ok(Command::deallocate(target.nsid, scratch.memory.iova(scratch.list)));
            }
        };
        let mut list = PrpList::new(scratch.memory, scratch.list);
        self.pages(body, piece, scratch, &mut list, map, bus)?;
        (command.prp1, command.prp2) = list.entries();
        Ok(command)
    }

    fn pages<B: Bus>(
        &self,
        body: &DiskOp,
        piece: &Piece,
        scratch: &Scratch<'_>,
        list: &mut PrpList<'_>,
        map: &mut PoolMap,
        bus: &B,
    ) -> Result<(), BusError> {
        let (skip, len) = (piece.first as usize * BLOCK, piece.blocks as usize * BLOCK);
        match (&self.bounce, body) {
            _ if matches!(self.verb, Verb::WriteZeroes { .. }) => {
                let page = scratch.memory.iova(scratch.zeroes);
                (0..piece.blocks).for_each(|_| list.push(page));
            }
            (Some(Bounce::Into(buffer)), _) | (None, DiskOp::Read { buffer, .. }) => {
                let iova = map.iova(bus, buffer.slab(), buffer)?;
                list.push_run(iova + skip as u64, len / BLOCK);
            }
            (Some(Bounce::From(buffer)), _) => {
                let iova = map.iova(bus, buffer.slab(), buffer)?;
                list.push_run(iova + skip as u64, len / BLOCK);
            }
            (None, DiskOp::Write { data, .. }) => gather_pages(data, skip, len, list, map, bus)?,
            (None, _) => {}
        }
        Ok(())
    }
}

/// The pages of `len` bytes from `skip` on of pieces that lie one behind the other.
fn gather_pages<B: Bus>(
    pieces: &[SharedBuffer],
    mut skip: usize,
    mut len: usize,
    list: &mut PrpList<'_>,
    map: &mut PoolMap,
    bus: &B,
) -> Result<(), BusError> {
    for piece in pieces {
        if skip >= piece.len() {
            skip -= piece.len();
            continue;
        }
        let take = (piece.len() - skip).min(len);
        let iova = map.iova(bus, piece.slab(), piece)?;
        list.push_run(iova + skip as u64, take / BLOCK);
        (skip, len) = (0, len - take);
        if len == 0 {
            break;
        }
    }
    Ok(())
}
