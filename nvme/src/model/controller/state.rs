//! Registers, queues and rounds.

use super::mischief::{Mischief, Misuse};
use crate::model::device::{Latency, Memory, Model, ModelOptions, Prng};
use crate::queue::DmaMap;
use crate::spec::command::{COMMAND_LEN, Command, io};
use crate::spec::completion::{COMPLETION_LEN, CompletionEntry};
use crate::spec::registers::{self, Cc};
use crate::spec::status::Status;
use loligo_config::units::BlockCount;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Ticket, WriteCache};
use std::collections::BTreeMap;

/// What kind of controller it is.
#[derive(Clone, Debug)]
pub struct SoftOptions {
    /// For latencies, orders and losses.
    pub seed: u64,
    /// Its namespaces, numbered from 1.
    pub namespaces: Vec<NamespaceOptions>,
    /// MDTS: largest transfer as a power of two of pages; 0 for no limit.
    pub mdts: u8,
    /// I/O queue pairs that it grants at most.
    pub queue_pairs_max: u16,
    /// Entries of a queue at most.
    pub queue_entries_max: u32,
    /// Whether there is a volatile write cache, and whether it is on.
    pub write_cache: WriteCache,
    /// Whether it offers shadow doorbells.
    pub shadow_doorbells: bool,
    /// Whether it has Write Zeroes, Dataset Management and Compare.
    pub optional_commands: bool,
    /// AWUPF, 0-based as on the wire.
    pub awupf: u16,
    /// CAP.DSTRD.
    pub doorbell_stride: u8,
    /// How many steps the media take.
    pub latency: Latency,
}

/// One namespace.
#[derive(Clone, Copy, Debug)]
pub struct NamespaceOptions {
    /// Its size in 4 KiB blocks.
    pub blocks: BlockCount,
    /// Its logical block: 2^9 or 2^12 bytes.
    pub lba_shift: u8,
}

impl Default for SoftOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            namespaces: vec![NamespaceOptions { blocks: BlockCount(4096), lba_shift: 12 }],
            mdts: 7,
            queue_pairs_max: 16,
            queue_entries_max: 1024,
            write_cache: WriteCache::Volatile,
            shadow_doorbells: false,
            optional_commands: true,
            awupf: 0,
            doorbell_stride: 0,
            latency: Latency::Polls { min: 1, max: 3 },
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Sq {
    base: u64,
    entries: u32,
    head: u32,
    tail: u32,
    cq: u16,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Cq {
    base: u64,
    entries: u32,
    head: u32,
    tail: u32,
    phase: bool,
}

#[derive(Debug)]
pub(super) struct Media {
    pub(super) device: Model<Memory>,
    pub(super) options: NamespaceOptions,
}

/// A command that the media work on, or that is lost.
#[derive(Clone, Debug)]
pub(super) struct Working {
    pub(super) sq: u16,
    pub(super) command: Command,
    pub(super) mischief: Option<Mischief>,
    /// For Compare: what was sent.
    pub(super) expected: Vec<u8>,
}

#[derive(Debug)]
struct Injected {
    mischief: Mischief,
    from: u64,
    until: u64,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) options: SoftOptions,
    pub(super) dma: DmaMap,
    pub(super) next_iova: u64,
    pub(super) on_bus: bool,
    pub(super) gone: bool,
    pub(super) wanted_back: bool,
    pub(super) fatal: bool,
    pub(super) aborts: bool,
    pub(super) misuse: Misuse,
    cc: u32,
    aqa: u32,
    pub(super) asq: u64,
    pub(super) acq: u64,
    /// CSTS.RDY.
    pub(super) ready: bool,
    shut_down: bool,
    pub(super) steps_to_idle: u64,
    pub(super) steps_to_ready: u64,
    wait: u64,
    pub(super) sqs: BTreeMap<u16, Sq>,
    pub(super) cqs: BTreeMap<u16, Cq>,
    pub(super) shadow: Option<(u64, u64)>,
    pub(super) media: Vec<Media>,
    pub(super) pool: BufferPool,
    pub(super) working: BTreeMap<Ticket, Working>,
    pub(super) tickets: u64,
    lost: Vec<Working>,
    after_reset: Vec<CompletionEntry>,
    injected: Vec<Injected>,
    pub(super) io_commands: u64,
    pub(super) doorbell_writes: u64,
    prng: Prng,
}

impl State {
    pub(super) fn new(options: SoftOptions) -> Self {
        let media = options.namespaces.iter().enumerate().map(|(index, namespace)| Media {
            device: Model::new(
                Memory::noisy(namespace.blocks, options.seed),
                ModelOptions {
                    seed: options.seed ^ (index as u64 + 1),
                    write_cache: options.write_cache,
                    tears_blocks: namespace.lba_shift < 12,
                    latency: options.latency.clone(),
                    queue_depth_max: 1 << 16,
                    poisons: false,
                    ..ModelOptions::default()
                },
            ),
            options: *namespace,
        });
        Self {
            media: media.collect(),
            prng: Prng::new(options.seed),
            options,
            dma: DmaMap::default(),
            next_iova: 1 << 32,
            on_bus: false,
            gone: false,
            wanted_back: false,
            fatal: false,
            aborts: true,
            misuse: Misuse::default(),
            cc: 0,
            aqa: 0,
            asq: 0,
            acq: 0,
            ready: false,
            shut_down: false,
            steps_to_idle: 2,
            steps_to_ready: 2,
            wait: 0,
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            shadow: None,
            pool: BufferPool::new(256 << 20),
            working: BTreeMap::new(),
            tickets: 0,
            lost: Vec::new(),
            after_reset: Vec::new(),
            injected: Vec::new(),
            io_commands: 0,
            doorbell_writes: 0,
        }
    }

    pub(super) fn inject(&mut self, mischief: Mischief, after: u64, times: u64) {
        let from = self.io_commands + after;
        self.injected.push(Injected { mischief, from, until: from.saturating_add(times) });
    }

    fn mischief(&self) -> Option<Mischief> {
        let hit = |injected: &&Injected| (injected.from..injected.until).contains(&self.io_commands);
        self.injected.iter().find(hit).map(|injected| injected.mischief)
    }

    pub(super) fn stride(&self) -> u32 {
        4 << self.options.doorbell_stride
    }

    fn cap(&self) -> u64 {
        let entries = u64::from(self.options.queue_entries_max - 1);
        entries | 1 << 16 | 4 << 24 | u64::from(self.options.doorbell_stride) << 32 | 1 << 37
    }

    pub(super) fn read32(&mut self, offset: u32) -> u32 {
        if self.gone {
            return registers::ALL_ONES;
        }
        match offset {
            registers::CAP => self.cap() as u32,
            0x04 => (self.cap() >> 32) as u32,
            registers::VS => 0x0002_0000,
            registers::CC => self.cc,
            registers::CSTS => {
                u32::from(self.ready) | u32::from(self.fatal) << 1 | u32::from(self.shut_down) << 3
            }
            _ => {
                self.misuse.registers += 1;
                0
            }
        }
    }

    pub(super) fn write32(&mut self, offset: u32, value: u32) {
        if self.gone {
            return;
        }
        match offset {
            registers::CC => self.configure(value),
            registers::AQA => self.aqa = value,
            offset if offset >= registers::DOORBELLS => self.doorbell(offset, value),
            _ => self.misuse.registers += 1,
        }
    }

    fn configure(&mut self, value: u32) {
        let (was, is) = (Cc(self.cc).is_enabled(), Cc(value).is_enabled());
        self.cc = value;
        if was && !is {
            self.wait = self.steps_to_idle;
            self.write_while_stopping();
        } else if is && !was {
            // Only an idle controller may be enabled (NVMe Base 2.0 §3.5.1).
            self.misuse.registers += u64::from(self.ready);
            self.wait = self.steps_to_ready;
        }
        if is && Cc(value).is_shutting_down() {
            self.media.iter_mut().for_each(|media| io_free(media.device.sync_all()));
            self.shut_down = true;
        }
    }

    fn doorbell(&mut self, offset: u32, value: u32) {
        self.doorbell_writes += 1;
        let index = (offset - registers::DOORBELLS) / self.stride();
        let (queue, is_cq) = ((index / 2) as u16, index % 2 == 1);
        let known = match (is_cq, self.sqs.get_mut(&queue), self.cqs.get_mut(&queue)) {
            (false, Some(sq), _) if value < sq.entries => {
                sq.tail = value;
                true
            }
            (true, _, Some(cq)) if value < cq.entries => {
                cq.head = value;
                true
            }
            _ => false,
        };
        // While it stops, queues of other threads may still ring.
        self.misuse.doorbells += u64::from(!known && self.ready && self.is_enabled());
    }

    /// CC.EN.
    pub(super) fn is_enabled(&self) -> bool {
        Cc(self.cc).is_enabled()
    }

    pub(super) fn step(&mut self) {
        if self.gone || self.fatal && self.is_enabled() {
            return;
        }
        self.work();
        let enabled = self.is_enabled();
        if enabled != self.ready {
            return self.change();
        }
        if enabled {
            self.read_shadows();
            self.fetch();
        }
    }

    /// CSTS.RDY follows CC.EN, and the media come to rest before.
    fn change(&mut self) {
        if self.wait == u64::MAX || !self.working.is_empty() {
            return;
        }
        self.wait = self.wait.saturating_sub(1);
        if self.wait > 0 {
            return;
        }
        if self.ready {
            self.forget();
        } else {
            let (sq, cq) = (self.aqa & 0xfff, self.aqa >> 16 & 0xfff);
            self.sqs.insert(0, Sq { base: self.asq, entries: sq + 1, head: 0, tail: 0, cq: 0 });
            self.cqs.insert(0, Cq { base: self.acq, entries: cq + 1, head: 0, tail: 0, phase: true });
            self.ready = true;
        }
    }

    fn forget(&mut self) {
        (self.ready, self.fatal, self.shut_down, self.shadow) = (false, false, false, None);
        self.sqs.clear();
        self.cqs.clear();
        self.lost.clear();
    }

    pub(super) fn power_cut(&mut self) {
        for media in &mut self.media {
            io_free(media.device.power_cut(&mut self.prng));
        }
        self.working.clear();
        self.forget();
        self.after_reset.clear();
        (self.cc, self.on_bus) = (0, false);
    }

    /// Takes the doorbells that were left in memory.
    fn read_shadows(&mut self) {
        let Some((shadow, events)) = self.shadow else { return };
        let stride = u64::from(self.stride());
        let queues: Vec<u16> = self.sqs.keys().copied().filter(|queue| *queue != 0).collect();
        for queue in queues {
            let at = u64::from(queue) * 2 * stride;
            let mut word = [0; 4];
            if self.read(shadow + at, &mut word) {
                let tail = u32::from_le_bytes(word);
                if let Some(sq) = self.sqs.get_mut(&queue).filter(|sq| tail < sq.entries) {
                    sq.tail = tail;
                }
            }
            if self.read(shadow + at + stride, &mut word) {
                let head = u32::from_le_bytes(word);
                if let Some(cq) = self.cqs.get_mut(&queue).filter(|cq| head < cq.entries) {
                    cq.head = head;
                }
            }
            // "No need to ring until much later": every step looks here anyhow.
            let far = self.sqs[&queue].tail.wrapping_add(self.sqs[&queue].entries - 1);
            self.write(events + at, &far.to_le_bytes());
        }
    }

    fn fetch(&mut self) {
        let queues: Vec<u16> = self.sqs.keys().copied().collect();
        for queue in queues {
            while let Some(sq) = self.sqs.get_mut(&queue).filter(|sq| sq.head != sq.tail) {
                let at = sq.base + u64::from(sq.head) * COMMAND_LEN as u64;
                sq.head = (sq.head + 1) % sq.entries;
                let mut bytes = [0; COMMAND_LEN];
                if !self.read(at, &mut bytes) {
                    break;
                }
                let command: Command = zerocopy::transmute!(bytes);
                if queue == 0 {
                    self.admin(command);
                } else {
                    let mischief = self.mischief();
                    self.io_commands += 1;
                    self.take(queue, command, mischief);
                }
                if self.gone || self.fatal {
                    return;
                }
            }
        }
    }

    fn take(&mut self, sq: u16, command: Command, mischief: Option<Mischief>) {
        let same = |working: &&Working| working.sq == sq && working.command.cid == command.cid;
        let in_flight = self.working.values().chain(&self.lost).find(same).is_some();
        self.misuse.ids += u64::from(in_flight);
        let working = Working { sq, command, mischief, expected: Vec::new() };
        match mischief {
            Some(Mischief::Fail(status)) => self.complete(&working, status, 0),
            Some(Mischief::Lose | Mischief::WriteWhileStopping) => self.lost.push(working),
            Some(Mischief::CompleteAfterReset) => {
                self.after_reset.push(CompletionEntry {
                    cid: command.cid,
                    sq_id: sq,
                    ..CompletionEntry::default()
                });
                self.lost.push(working);
            }
            Some(Mischief::Fatal) => self.fatal = true,
            Some(Mischief::Unplug) => self.gone = true,
            _ => self.begin(working),
        }
    }

    /// Aborts a lost command. Whether there was one.
    pub(super) fn abort(&mut self, sq: u16, cid: u16) -> bool {
        let same = |working: &Working| working.sq == sq && working.command.cid == cid;
        let Some(index) = self.lost.iter().position(same).filter(|_| self.aborts) else { return false };
        let working = self.lost.swap_remove(index);
        self.complete(&Working { mischief: None, ..working }, Status::new(0, 0x07), 0);
        true
    }

    /// The data of reads that were held back, at the worst time that is allowed.
    fn write_while_stopping(&mut self) {
        for working in std::mem::take(&mut self.lost) {
            let read = working.command.opcode == io::READ;
            if let Some(media) = self.media.get(working.command.nsid as usize - 1)
                && working.mischief == Some(Mischief::WriteWhileStopping)
                && read
            {
                let len = (working.command.range().count as usize) << media.options.lba_shift;
                self.scatter(&working.command, &vec![0xee; len]);
            }
        }
    }

    /// Posts the end of a command, with its mischief.
    pub(super) fn complete(&mut self, working: &Working, status: Status, result: u32) {
        let entry = CompletionEntry {
            result,
            sq_id: working.sq,
            cid: working.command.cid,
            status,
            ..CompletionEntry::default()
        };
        match working.mischief {
            Some(Mischief::WrongId) => self.post(CompletionEntry { cid: entry.cid ^ 0x3ff, ..entry }, false),
            Some(Mischief::WrongQueue) => {
                self.post_to(working.sq, CompletionEntry { sq_id: 99, ..entry }, false);
            }
            Some(Mischief::Twice) => {
                self.post(entry, false);
                self.post(entry, false);
            }
            Some(Mischief::Extra) => {
                self.post(CompletionEntry { cid: 0xfffe, ..entry }, false);
                self.post(entry, false);
            }
            Some(Mischief::OldPhase) => self.post(entry, true),
            _ => self.post(entry, false),
        }
    }

    fn post(&mut self, entry: CompletionEntry, old_phase: bool) {
        self.post_to(entry.sq_id, entry, old_phase);
    }

    fn post_to(&mut self, queue: u16, entry: CompletionEntry, old_phase: bool) {
        // A command of a queue that was deleted meanwhile has no completion.
        let Some(sq) = self.sqs.get(&queue).copied() else { return };
        let Some(cq) = self.cqs.get_mut(&sq.cq) else { return };
        let next = (cq.tail + 1) % cq.entries;
        if next == cq.head {
            self.misuse.overflows += 1;
            return;
        }
        let (at, phase) = (cq.base + u64::from(cq.tail) * COMPLETION_LEN as u64, cq.phase != old_phase);
        cq.phase ^= next == 0;
        cq.tail = next;
        let entry = CompletionEntry { sq_head: sq.head as u16, phase, ..entry };
        let [low, high] = entry.words();
        self.write(at, &low.to_le_bytes());
        if self.on_bus && self.dma.write_word(at + 8, high).is_err() {
            self.misuse.dma += 1;
        }
    }

    /// Makes an I/O queue pair's completion queue.
    pub(super) fn create_cq(&mut self, queue: u16, entries: u32, base: u64) {
        self.cqs.insert(queue, Cq { base, entries, head: 0, tail: 0, phase: true });
    }

    /// Makes a submission queue; completions that come too late go to it.
    pub(super) fn create_sq(&mut self, queue: u16, entries: u32, base: u64, cq: u16) {
        self.sqs.insert(queue, Sq { base, entries, head: 0, tail: 0, cq });
        let late = std::mem::take(&mut self.after_reset);
        for entry in late {
            if entry.sq_id == queue {
                self.post(entry, false);
            } else {
                self.after_reset.push(entry);
            }
        }
    }

    /// DMA from memory; `false` when it is not mapped, or the device is off the bus.
    pub(super) fn read(&mut self, iova: u64, into: &mut [u8]) -> bool {
        let done = self.on_bus && self.dma.read(iova, into).is_ok();
        self.misuse.dma += u64::from(self.on_bus && !done);
        done
    }

    /// DMA to memory.
    pub(super) fn write(&mut self, iova: u64, from: &[u8]) -> bool {
        let done = self.on_bus && self.dma.write(iova, from).is_ok();
        self.misuse.dma += u64::from(self.on_bus && !done);
        done
    }
}

fn io_free<T>(result: std::io::Result<T>) {
    if let Err(error) = result {
        panic!("media in memory do not fail: {error}");
    }
}
