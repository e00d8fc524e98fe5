//! Admin commands.

use super::state::{State, Working};
use crate::spec::PAGE_LEN;
use crate::spec::command::{Command, admin};
use crate::spec::feature::{FeatureId, QueueCounts};
use crate::spec::identify;
use crate::spec::log::{LOG_ERRORS, LOG_HEALTH};
use crate::spec::status::Status;
use loligo_reactor::env::WriteCache;

const INVALID_OPCODE: Status = Status::new(0, 0x01);
const INVALID_FIELD: Status = Status::new(0, 0x02);
const DATA_TRANSFER_ERROR: Status = Status::new(0, 0x04);
const INVALID_NAMESPACE: Status = Status::new(0, 0x0b);
const CQ_INVALID: Status = Status::new(1, 0x00);
const INVALID_QUEUE: Status = Status::new(1, 0x01);
const INVALID_QUEUE_SIZE: Status = Status::new(1, 0x02);
const INVALID_LOG: Status = Status::new(1, 0x09);

fn put<const N: usize>(page: &mut [u8], at: usize, bytes: [u8; N]) {
    page[at..at + N].copy_from_slice(&bytes);
}

fn put_text(page: &mut [u8], at: usize, len: usize, text: &str) {
    page[at..at + len].fill(b' ');
    page[at..at + text.len()].copy_from_slice(text.as_bytes());
}

impl State {
    /// Carries out an admin command at once.
    pub(super) fn admin(&mut self, command: Command) {
        let (status, result) = match self.answer(&command) {
            Ok(result) => (Status::SUCCESS, result),
            Err(status) => (status, 0),
        };
        self.complete(&Working { sq: 0, command, mischief: None, expected: Vec::new() }, status, result);
    }

    fn answer(&mut self, command: &Command) -> Result<u32, Status> {
        let queue = command.cdw10 as u16;
        match command.opcode {
            admin::IDENTIFY => self.identify(command),
            admin::SET_FEATURES => self.set_feature(command),
            admin::GET_FEATURES if command.cdw10 as u8 == FeatureId::VolatileWriteCache as u8 => {
                Ok(u32::from(self.options.write_cache == WriteCache::Volatile))
            }
            admin::CREATE_CQ => self.make_cq(command),
            admin::CREATE_SQ => self.make_sq(command),
            admin::DELETE_SQ => {
                self.sqs.remove(&queue).filter(|_| queue != 0).map(|_| 0).ok_or(INVALID_QUEUE)
            }
            admin::DELETE_CQ => {
                self.cqs.remove(&queue).filter(|_| queue != 0).map(|_| 0).ok_or(INVALID_QUEUE)
            }
            admin::ABORT => Ok(u32::from(!self.abort(queue, (command.cdw10 >> 16) as u16))),
            admin::GET_LOG_PAGE => self.log_page(command),
            admin::DOORBELL_BUFFER_CONFIG if self.options.shadow_doorbells => {
                self.shadow = Some((command.prp1, command.prp2));
                Ok(0)
            }
            _ => Err(INVALID_OPCODE),
        }
    }

    fn reply(&mut self, command: &Command, page: &[u8]) -> Result<u32, Status> {
        if self.write(command.prp1, page) { Ok(0) } else { Err(DATA_TRANSFER_ERROR) }
    }

    fn identify(&mut self, command: &Command) -> Result<u32, Status> {
        let mut page = vec![0; PAGE_LEN];
        match command.cdw10 as u8 {
            identify::CNS_CONTROLLER => self.describe(&mut page),
            identify::CNS_NAMESPACE_LIST => {
                for index in 0..self.media.len().min(1024) {
                    put(&mut page, 4 * index, (index as u32 + 1).to_le_bytes());
                }
            }
            identify::CNS_NAMESPACE => self.describe_namespace(command.nsid, &mut page)?,
            // WZSL: 2^6 pages.
            identify::CNS_COMMAND_SET_CONTROLLER => page[1] = 6,
            _ => return Err(INVALID_FIELD),
        }
        self.reply(command, &page)
    }

    fn describe(&self, page: &mut [u8]) {
        let options = &self.options;
        put_text(page, 4, 20, &format!("SOFT-{}", options.seed));
        put_text(page, 24, 40, "Loligo software controller");
        put_text(page, 64, 8, "1");
        page[77] = options.mdts;
        put(page, 80, 0x0002_0000u32.to_le_bytes());
        // CRDT1: 100 ms.
        put(page, 128, 1u16.to_le_bytes());
        put(page, 256, (u16::from(options.shadow_doorbells) << 8).to_le_bytes());
        page[258] = 3;
        put(page, 266, 343u16.to_le_bytes());
        put(page, 268, 353u16.to_le_bytes());
        page[512] = 0x66;
        page[513] = 0x44;
        put(page, 516, (self.media.len() as u32).to_le_bytes());
        put(page, 520, if options.optional_commands { 0b1101u16 } else { 0 }.to_le_bytes());
        page[525] = u8::from(options.write_cache == WriteCache::Volatile);
        put(page, 528, options.awupf.to_le_bytes());
    }

    fn describe_namespace(&self, nsid: u32, page: &mut [u8]) -> Result<(), Status> {
        let media = self.media.get((nsid as usize).wrapping_sub(1)).ok_or(INVALID_NAMESPACE)?;
        let shift = media.options.lba_shift;
        let blocks = media.options.blocks.0 << (12 - shift);
        for at in [0, 8, 16] {
            put(page, at, blocks.to_le_bytes());
        }
        put(page, 104, u128::from(nsid).to_le_bytes());
        page[130] = shift;
        Ok(())
    }

    fn set_feature(&mut self, command: &Command) -> Result<u32, Status> {
        if command.cdw10 as u8 != FeatureId::NumberOfQueues as u8 {
            return Err(INVALID_FIELD);
        }
        let asked = QueueCounts::from_dword(command.cdw11).pair_count();
        Ok(QueueCounts::pairs(asked.min(self.options.queue_pairs_max)).to_dword())
    }

    fn checked_size(&self, command: &Command) -> Result<(u16, u32), Status> {
        let (queue, entries) = (command.cdw10 as u16, (command.cdw10 >> 16) + 1);
        if queue == 0 || queue > self.options.queue_pairs_max {
            return Err(INVALID_QUEUE);
        }
        if entries < 2 || entries > self.options.queue_entries_max {
            return Err(INVALID_QUEUE_SIZE);
        }
        let contiguous = command.cdw11 & 1 == 1 && command.prp1.is_multiple_of(PAGE_LEN as u64);
        if contiguous { Ok((queue, entries)) } else { Err(INVALID_FIELD) }
    }

    fn make_cq(&mut self, command: &Command) -> Result<u32, Status> {
        let (queue, entries) = self.checked_size(command)?;
        if self.cqs.contains_key(&queue) {
            return Err(INVALID_QUEUE);
        }
        self.create_cq(queue, entries, command.prp1);
        Ok(0)
    }

    fn make_sq(&mut self, command: &Command) -> Result<u32, Status> {
        let (queue, entries) = self.checked_size(command)?;
        let cq = (command.cdw11 >> 16) as u16;
        if self.sqs.contains_key(&queue) {
            return Err(INVALID_QUEUE);
        }
        if !self.cqs.contains_key(&cq) {
            return Err(CQ_INVALID);
        }
        self.create_sq(queue, entries, command.prp1, cq);
        Ok(0)
    }

    fn log_page(&mut self, command: &Command) -> Result<u32, Status> {
        let mut page = vec![0; ((command.cdw10 >> 16) as usize + 1) * 4];
        match command.cdw10 as u8 {
            LOG_HEALTH if page.len() >= 512 => {
                put(&mut page, 1, 311u16.to_le_bytes());
                (page[3], page[4], page[5]) = (100, 10, 1);
                put(&mut page, 176, 1u128.to_le_bytes());
            }
            LOG_ERRORS if page.len() >= 64 => {
                put(&mut page, 0, 1u64.to_le_bytes());
                put(&mut page, 8, 1u16.to_le_bytes());
                put(&mut page, 12, (UNRECOVERED.0 << 1).to_le_bytes());
                put(&mut page, 24, 1u32.to_le_bytes());
            }
            _ => return Err(INVALID_LOG),
        }
        self.reply(command, &page)
    }
}

const UNRECOVERED: Status = Status::new(2, 0x81);
