//! The operations in flight of one queue: what the kernel is asked for each, and how far it is.

use super::Target;
use io_uring::squeue::Entry;
use io_uring::{opcode, types};
use loligo_config::units::{BLOCK_SIZE, BlockCount, Lba};
use loligo_reactor::env::{DiskError, DiskOp, Ticket, WRITE_PIECES_MAX, WriteList};

/// Vectors of one entry. They must not move while the entry is queued, so they live in a boxed slice of their own.
pub(super) type Vectors = [libc::iovec; WRITE_PIECES_MAX];

/// One operation in flight.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) op: DiskOp,
    pub(super) ticket: Ticket,
    /// Bytes transferred so far.
    pub(super) done: u64,
    pub(super) step: Step,
    /// Times that the kernel asked to try again.
    pub(super) retries: u8,
}

/// Where an operation of more than one entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Reading or writing.
    Transfer,
    /// A command about a range, without data.
    Range,
    /// Making durable what a range command did.
    Sync,
}

/// How a queue asks for its operations; changes when the kernel turns out not to know one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Means {
    pub(super) target: Target,
    /// Whether durable needs `RWF_DSYNC`.
    pub(super) volatile: bool,
    /// Whether a range is zeroed by command rather than by writing zeroes.
    pub(super) zero_range: bool,
    pub(super) discard: DiscardMeans,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiscardMeans {
    /// The block layer's command (kernel 6.12).
    Command,
    /// `fallocate`.
    Punch,
    /// Nothing: a discard completes at once.
    Nothing,
}

/// What is written where zeroes are wanted. 64 KiB, repeated.
#[repr(align(4096))]
struct Zeroes([u8; ZEROES_LEN]);
const ZEROES_LEN: usize = 64 << 10;
static ZEROES: Zeroes = Zeroes([0; ZEROES_LEN]);

/// `BLOCK_URING_CMD_DISCARD`: `_IO(0x12, 0)`, linux/blkdev.h.
const COMMAND_DISCARD: u32 = 0x1200;

/// A registered buffer's index, found by the queue.
pub(super) type Fixed = Option<u16>;

fn bytes(count: BlockCount) -> u64 {
    count.to_bytes().expect("checked against the device's size at submission").0
}

fn first_byte(lba: Lba) -> u64 {
    lba.to_bytes().expect("checked against the device's size at submission").0
}

fn piece_len(len: u64) -> u32 {
    u32::try_from(len).expect("a transfer is at most transfer_blocks_max")
}

/// First block and number of blocks; `None` for a flush, and for lengths that are not whole blocks.
pub(super) fn range(op: &DiskOp) -> Option<(Lba, BlockCount)> {
    let blocks = |len: usize| {
        let len = u64::try_from(len).ok()?;
        let block = u64::from(BLOCK_SIZE);
        len.is_multiple_of(block).then_some(BlockCount(len / block))
    };
    match op {
        DiskOp::Read { lba, buffer } => Some((*lba, blocks(buffer.len())?)),
        DiskOp::Write { lba, data, .. } => Some((*lba, blocks(data.iter().map(|piece| piece.len()).sum())?)),
        DiskOp::Discard { lba, count } | DiskOp::WriteZeroes { lba, count, .. } => Some((*lba, *count)),
        DiskOp::Flush => None,
    }
}

impl Slot {
    /// Bytes to transfer in all.
    pub(super) fn len(&self) -> u64 {
        range(&self.op).map_or(0, |(_, count)| bytes(count))
    }

    /// The first step of an operation.
    pub(super) fn new(op: DiskOp, ticket: Ticket, means: &Means) -> Self {
        let ranged = match op {
            DiskOp::WriteZeroes { .. } => means.zero_range,
            DiskOp::Discard { .. } => true,
            DiskOp::Read { .. } | DiskOp::Write { .. } | DiskOp::Flush => false,
        };
        let step = match op {
            DiskOp::Flush => Step::Sync,
            _ if ranged => Step::Range,
            _ => Step::Transfer,
        };
        Self { op, ticket, done: 0, step, retries: 0 }
    }

    /// Whether a failure of it poisons the device.
    pub(super) fn changes_data(&self) -> bool {
        matches!(self.op, DiskOp::Write { .. } | DiskOp::Flush | DiskOp::WriteZeroes { .. })
    }

    /// The entry for what is left to do.
    pub(super) fn entry(&mut self, means: &Means, fixed: Fixed, vectors: &mut Vectors) -> Entry {
        if self.step == Step::Sync {
            return flush(means.target);
        }
        let sync = |fua: bool| if fua && means.volatile { libc::RWF_DSYNC } else { 0 };
        match &mut self.op {
            DiskOp::Read { lba, buffer } => {
                let offset = first_byte(*lba) + self.done;
                read(means.target, &mut buffer[self.done as usize..], offset, fixed)
            }
            DiskOp::Write { lba, data, fua } => {
                let offset = first_byte(*lba) + self.done;
                write(means.target, data, self.done, offset, sync(*fua), fixed, vectors)
            }
            DiskOp::Flush => flush(means.target),
            DiskOp::Discard { lba, count } => discard(means, first_byte(*lba), bytes(*count)),
            DiskOp::WriteZeroes { lba, count, fua } => {
                let (offset, left) = (first_byte(*lba) + self.done, bytes(*count) - self.done);
                if self.step == Step::Range {
                    let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                    return fallocate(means.target, mode, offset, left);
                }
                let used = zero_vectors(left, vectors);
                writev(means.target, &vectors[..used], offset, sync(*fua))
            }
        }
    }
}

macro_rules! build {
    ($target:expr, |$fd:ident| $entry:expr) => {
        match $target {
            Target::Fixed(index) => {
                let $fd = types::Fixed(index);
                $entry
            }
            Target::Descriptor(descriptor) => {
                let $fd = types::Fd(descriptor);
                $entry
            }
        }
    };
}

fn read(target: Target, left: &mut [u8], offset: u64, fixed: Fixed) -> Entry {
    let (address, len) = (left.as_mut_ptr(), piece_len(left.len() as u64));
    match fixed {
        Some(index) => {
            build!(target, |fd| opcode::ReadFixed::new(fd, address, len, index).offset(offset).build())
        }
        None => build!(target, |fd| opcode::Read::new(fd, address, len).offset(offset).build()),
    }
}

fn write(
    target: Target,
    data: &WriteList,
    done: u64,
    offset: u64,
    sync: i32,
    fixed: Fixed,
    vectors: &mut Vectors,
) -> Entry {
    if let (Some(index), [piece]) = (fixed, data.as_slice()) {
        let left = &piece[done as usize..];
        let (address, len) = (left.as_ptr(), piece_len(left.len() as u64));
        return build!(target, |fd| {
            opcode::WriteFixed::new(fd, address, len, index).offset(offset).rw_flags(sync).build()
        });
    }
    let mut skip = done as usize;
    let mut used = 0;
    for piece in data {
        let left = &piece[skip.min(piece.len())..];
        skip -= piece.len() - left.len();
        if !left.is_empty() {
            vectors[used] = libc::iovec { iov_base: left.as_ptr().cast_mut().cast(), iov_len: left.len() };
            used += 1;
        }
    }
    writev(target, &vectors[..used], offset, sync)
}

fn zero_vectors(left: u64, vectors: &mut Vectors) -> usize {
    let mut left = usize::try_from(left).unwrap_or(usize::MAX);
    let mut used = 0;
    for vector in vectors.iter_mut() {
        if left == 0 {
            break;
        }
        let len = left.min(ZEROES_LEN);
        *vector = libc::iovec { iov_base: ZEROES.0.as_ptr().cast_mut().cast(), iov_len: len };
        left -= len;
        used += 1;
    }
    used
}

fn writev(target: Target, vectors: &[libc::iovec], offset: u64, sync: i32) -> Entry {
    let (address, count) = (vectors.as_ptr(), vectors.len() as u32);
    build!(target, |fd| opcode::Writev::new(fd, address, count).offset(offset).rw_flags(sync).build())
}

fn flush(target: Target) -> Entry {
    build!(target, |fd| opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build())
}

fn fallocate(target: Target, mode: i32, offset: u64, len: u64) -> Entry {
    build!(target, |fd| opcode::Fallocate::new(fd, len).mode(mode).offset(offset).build())
}

fn discard(means: &Means, offset: u64, len: u64) -> Entry {
    if means.discard == DiscardMeans::Punch {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        return fallocate(means.target, mode, offset, len);
    }
    // The start is in `addr`, the length in `addr3`, which is where the command's own bytes begin.
    let mut command = [0; 16];
    command[..8].copy_from_slice(&len.to_ne_bytes());
    build!(means.target, |fd| {
        opcode::UringCmd16::new(fd, COMMAND_DISCARD).addr(Some(offset)).cmd(command).build()
    })
}

/// What an error number of an operation means to the caller.
pub(super) fn disk_error(op: &DiskOp, errno: i32) -> DiskError {
    let read = matches!(op, DiskOp::Read { .. });
    match errno {
        // EILSEQ: a failed integrity check; ENODATA: an unrecoverable sector; EREMOTEIO: the target's own failure
        // (block/blk-core.c, blk_errors).
        libc::EIO | libc::EILSEQ | libc::ENODATA | libc::EREMOTEIO if read => DiskError::Media { errno },
        libc::ENODEV | libc::ENXIO => DiskError::Gone,
        libc::ETIMEDOUT => DiskError::Timeout,
        libc::EINVAL => DiskError::Invalid,
        _ => DiskError::Io { errno },
    }
}
