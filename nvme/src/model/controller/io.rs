//! I/O commands: data in and out of memory by PRPs, and the media's answers.

use super::state::{State, Working};
use crate::spec::PAGE_LEN;
use crate::spec::command::{Command, DEALLOCATE, FUA, io};
use crate::spec::status::Status;
use loligo_config::units::{BLOCK_SIZE, BlockCount, Lba};
use loligo_reactor::env::{BlockDevice, Completions, DiskError, DiskOp, Ticket, WriteList};

const BLOCK: usize = BLOCK_SIZE as usize;
const INVALID_OPCODE: Status = Status::new(0, 0x01);
const INVALID_FIELD: Status = Status::new(0, 0x02);
const DATA_TRANSFER_ERROR: Status = Status::new(0, 0x04);
const INTERNAL_ERROR: Status = Status::new(0, 0x06);
const INVALID_NAMESPACE: Status = Status::new(0, 0x0b);
const LBA_OUT_OF_RANGE: Status = Status::new(0, 0x80);
const UNRECOVERED_READ: Status = Status::new(2, 0x81);
const COMPARE_FAILURE: Status = Status::new(2, 0x85);

impl State {
    /// Gives a command to the media, or fails it at once.
    pub(super) fn begin(&mut self, mut working: Working) {
        let command = working.command;
        let index = (command.nsid as usize).wrapping_sub(1);
        let op = if index < self.media.len() {
            self.disk_op(index, &command, &mut working.expected)
        } else {
            Err(INVALID_NAMESPACE)
        };
        match op {
            Ok(op) => {
                self.tickets += 1;
                let ticket = Ticket(self.tickets);
                let taken = self.media[index].device.submit(op, ticket);
                assert!(taken.is_ok(), "the media take more than all queues hold");
                self.working.insert(ticket, working);
            }
            Err(status) => self.complete(&working, status, 0),
        }
    }

    fn disk_op(&mut self, index: usize, command: &Command, expected: &mut Vec<u8>) -> Result<DiskOp, Status> {
        let optional = [io::COMPARE, io::WRITE_ZEROES, io::DATASET_MANAGEMENT].contains(&command.opcode);
        if optional && !self.options.optional_commands {
            return Err(INVALID_OPCODE);
        }
        match command.opcode {
            io::FLUSH => return Ok(DiskOp::Flush),
            io::DATASET_MANAGEMENT => return self.deallocate(index, command),
            io::READ | io::WRITE | io::COMPARE | io::WRITE_ZEROES => {}
            _ => return Err(INVALID_OPCODE),
        }
        let (lba, count) = self.blocks(index, command.range().first, command.range().count.into())?;
        let fua = command.cdw12 & FUA != 0;
        let limit = if self.options.mdts == 0 { u64::MAX } else { 1 << self.options.mdts };
        if count.0 > limit && command.opcode != io::WRITE_ZEROES {
            return Err(INVALID_FIELD);
        }
        match command.opcode {
            io::WRITE_ZEROES => Ok(DiskOp::WriteZeroes { lba, count, fua }),
            io::WRITE => {
                let mut data = WriteList::new();
                let bytes = self.gather(command, count)?;
                data.push(self.pool.copy_of(&bytes).expect("the model's pool is large"));
                Ok(DiskOp::Write { lba, data, fua })
            }
            opcode => {
                if opcode == io::COMPARE {
                    *expected = self.gather(command, count)?;
                }
                let buffer =
                    self.pool.alloc_zeroed(count.0 as usize * BLOCK).expect("the model's pool is large");
                Ok(DiskOp::Read { lba, buffer })
            }
        }
    }

    fn deallocate(&mut self, index: usize, command: &Command) -> Result<DiskOp, Status> {
        let mut range = [0; 16];
        if !self.read(command.prp1, &mut range) {
            return Err(DATA_TRANSFER_ERROR);
        }
        if command.cdw11 & DEALLOCATE == 0 || command.cdw10 & 0xff != 0 {
            return Err(INVALID_FIELD);
        }
        let [low, first] = [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|byte| range[at + byte])));
        let (lba, count) = self.blocks(index, first, low >> 32)?;
        Ok(DiskOp::Discard { lba, count })
    }

    /// Logical blocks as 4 KiB blocks.
    fn blocks(&self, index: usize, first: u64, count: u64) -> Result<(Lba, BlockCount), Status> {
        let options = self.media[index].options;
        let shift = 12 - u32::from(options.lba_shift);
        let end = first.checked_add(count).ok_or(LBA_OUT_OF_RANGE)?;
        if end > options.blocks.0 << shift {
            return Err(LBA_OUT_OF_RANGE);
        }
        if (first | count) & ((1 << shift) - 1) != 0 {
            return Err(INVALID_FIELD);
        }
        Ok((Lba(first >> shift), BlockCount(count >> shift)))
    }

    /// The pages that a command names, for `count` of them (NVMe Base 2.0 §4.1.1).
    fn pages(&mut self, command: &Command, count: usize) -> Option<Vec<u64>> {
        let mut pages = vec![command.prp1];
        match count {
            0 | 1 => {}
            2 => pages.push(command.prp2),
            _ => {
                // No list of ours crosses its page, so none is chained.
                let within = PAGE_LEN - (command.prp2 as usize & (PAGE_LEN - 1));
                let mut list = vec![0; (count - 1) * 8];
                if list.len() > within || !self.read(command.prp2, &mut list) {
                    return None;
                }
                let entries = list.chunks_exact(8);
                pages.extend(entries.map(|entry| u64::from_le_bytes(std::array::from_fn(|at| entry[at]))));
            }
        }
        // Page offsets are for the first entry only, and our driver has none at all.
        pages.iter().all(|page| page.is_multiple_of(PAGE_LEN as u64)).then_some(pages)
    }

    fn gather(&mut self, command: &Command, count: BlockCount) -> Result<Vec<u8>, Status> {
        let mut bytes = vec![0; count.0 as usize * BLOCK];
        let pages = self.pages(command, count.0 as usize).ok_or(INVALID_FIELD)?;
        for (page, chunk) in pages.into_iter().zip(bytes.chunks_exact_mut(PAGE_LEN)) {
            if !self.read(page, chunk) {
                return Err(DATA_TRANSFER_ERROR);
            }
        }
        Ok(bytes)
    }

    /// Writes data to the pages of a command.
    pub(super) fn scatter(&mut self, command: &Command, bytes: &[u8]) -> bool {
        let Some(pages) = self.pages(command, bytes.len().div_ceil(PAGE_LEN)) else { return false };
        let mut done = true;
        for (page, chunk) in pages.into_iter().zip(bytes.chunks(PAGE_LEN)) {
            done &= self.write(page, chunk);
        }
        done
    }

    /// Lets the media work, and answers what they have done.
    pub(super) fn work(&mut self) {
        let mut done = Completions::new();
        for media in &mut self.media {
            media.device.poll(u32::MAX, &mut done);
        }
        let stopping = !self.is_enabled();
        for end in done {
            let Some(working) = self.working.remove(&end.ticket) else { continue };
            // Once it is to stop it answers nothing; what it has begun is done or not.
            if stopping {
                continue;
            }
            let status = match (end.result, &end.op) {
                (Ok(()), DiskOp::Read { buffer, .. }) => self.read_done(&working, buffer),
                (Ok(()), _) => Status::SUCCESS,
                (Err(DiskError::Media { .. }), _) => UNRECOVERED_READ,
                (Err(DiskError::Invalid), _) => INVALID_FIELD,
                (Err(_), _) => INTERNAL_ERROR,
            };
            self.complete(&working, status, 0);
        }
    }

    fn read_done(&mut self, working: &Working, bytes: &[u8]) -> Status {
        if working.command.opcode == io::COMPARE {
            return if working.expected == bytes { Status::SUCCESS } else { COMPARE_FAILURE };
        }
        if self.scatter(&working.command, bytes) { Status::SUCCESS } else { DATA_TRANSFER_ERROR }
    }
}
