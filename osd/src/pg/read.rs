//! Reads on the primary: never of a version that is not durable on every member.

use super::blocks::{self, Span};
use super::op::{OpEnd, OpState};
use super::replication::nanos;
use super::{Actions, BlockRange, Context, Payload, Pg, PgStore, ticket};
use crate::store::api::{ReadData, ReadError};
use loligo_net::wire::op::{OpKind, OpStatus, Residence};
use loligo_reactor::dma::SharedBuffer;
use loligo_reactor::env::Ticket;

/// Bytes of one entry of an `Extents` reply.
const EXTENT_LEN: usize = 8;

impl Pg {
    /// `[36..16] generation, [15..1] place in the table, [0] whether it is the tail edge`.
    pub(super) fn read_ticket(&self, index: usize, generation: u32, is_tail: bool) -> Ticket {
        let number = (u64::from(generation) << 16) | ((index as u64) << 1) | u64::from(is_tail);
        ticket::join(self.slot, ticket::Kind::Read, number)
    }

    pub(super) fn start_read<S: PgStore>(&mut self, cx: &mut Context<'_, S>, index: usize) {
        let op = &self.ops.ops[index];
        let span = Span { offset: op.request.offset, len: op.request.len };
        let range = BlockRange { object: op.request.object, block: span.first_block(), count: span.blocks() };
        let ticket = self.read_ticket(index, op.generation, false);
        match cx.store.read(range, self.id, ticket) {
            Ok(()) => {
                let op = &mut self.ops.ops[index];
                (op.state, op.started) = (OpState::Reading, cx.now);
            }
            Err(_) => self.stall(index),
        }
    }

    pub(super) fn on_op_read<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        number: u64,
        result: Result<ReadData, ReadError>,
        device_ns: u32,
        out: &mut Actions,
    ) {
        let index = ((number >> 1) & 0x7fff) as usize;
        // The op may have been given back since: a new interval, a failed edge read.
        let Some(op) = self.ops.ops.get(index) else { return };
        if u64::from(op.generation) != number >> 16 {
            return;
        }
        let data = match result {
            Ok(data) => data,
            Err(ReadError::Busy) => return self.read_again(index),
            Err(ReadError::Corrupt { .. } | ReadError::Device { .. }) => {
                return self.finish_refused(cx, index, OpStatus::MediaError, out);
            }
        };
        match &op.state {
            OpState::Merging(_) => self.on_edge_read(cx, index, number & 1 == 1, &data, out),
            OpState::Reading => {
                // A write may have come between the start of the read and the look into the index.
                match self.replication.newest_overlap(op.range, data.version) {
                    None => self.reply_read(cx, index, data, device_ns, out),
                    Some(until) => {
                        self.ops.ops[index].state = OpState::Held { data, until, device_ns };
                        self.ops.held.push(index);
                    }
                }
            }
            OpState::Waiting | OpState::Merged { .. } | OpState::Held { .. } => {}
        }
    }

    /// There was no memory for what a read brought: it is done again when there is.
    fn read_again(&mut self, index: usize) {
        if matches!(self.ops.ops[index].state, OpState::Merging(_)) {
            self.ops.end_merge(index);
        }
        self.ops.forget_reads(index);
        self.stall(index);
    }

    /// Replies to reads whose version has become durable everywhere.
    pub(super) fn release_held_reads<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        let committed = self.replication.committed();
        let mut at = 0;
        while let Some(index) = self.ops.held.get(at).copied() {
            match &self.ops.ops[index].state {
                OpState::Held { data, until, device_ns } if *until <= committed => {
                    let (data, device_ns) = (data.clone(), *device_ns);
                    self.ops.held.swap_remove(at);
                    self.reply_read(cx, index, data, device_ns, out);
                }
                _ => at += 1,
            }
        }
    }

    fn reply_read<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        index: usize,
        data: ReadData,
        device_ns: u32,
        out: &mut Actions,
    ) {
        let request = self.ops.ops[index].request;
        let span = Span { offset: request.offset, len: request.len };
        let ReadData { data, checksums, version } = data;
        let stored = match (data, checksums) {
            (Some(data), Some(checksums)) => Ok((data, checksums)),
            (Some(data), None) => blocks::checksums_of(cx.pool, &data).map(|list| (data, list)),
            (None, _) => blocks::zeroes(cx.pool, span.blocks()),
        };
        let trimmed = stored.and_then(|(data, checksums)| blocks::trim(cx.pool, span, &data, &checksums));
        let Ok((data, checksums)) = trimmed else { return self.read_again(index) };
        self.counters.reads += 1;
        self.counters.bytes_read += u64::from(span.len);
        let op = self.ops.take(index);
        let payload = Some(Payload { data, checksums: Some(checksums) });
        let residence = Residence {
            submit_ns: nanos(op.started.since(op.arrived)),
            own_ns: nanos(cx.now.since(op.started)),
            device_ns,
            ..Residence::NONE
        };
        self.reply(&request, op.from, op.arrived, OpEnd { version, residence, payload, ..OpEnd::DONE }, out);
    }

    /// Which blocks are allocated: known without a device read.
    pub(super) fn reply_extents<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        index: usize,
        out: &mut Actions,
    ) {
        let request = self.ops.ops[index].request;
        debug_assert!(request.kind == OpKind::Extents, "only called for this kind");
        let span = Span { offset: request.offset, len: request.len };
        let range = BlockRange { object: request.object, block: span.first_block(), count: span.blocks() };
        let Some(list) = extents_of(cx, range) else { return self.stall(index) };
        let version = cx.store.object_version(request.object);
        let op = self.ops.take(index);
        let payload = list.map(|data| Payload { data, checksums: None });
        self.reply(&request, op.from, op.arrived, OpEnd { version, payload, ..OpEnd::DONE }, out);
    }
}

/// The list of runs; `Some(None)` when there is none, `None` without a buffer.
fn extents_of<S: PgStore>(cx: &Context<'_, S>, range: BlockRange) -> Option<Option<SharedBuffer>> {
    let mut runs = 0usize;
    cx.store.extents(range, &mut |_, _| runs += 1);
    if runs == 0 {
        return Some(None);
    }
    let mut list = cx.pool.alloc(runs * EXTENT_LEN).ok()?;
    let mut entries = list.chunks_exact_mut(EXTENT_LEN);
    cx.store.extents(range, &mut |block, count| {
        if let Some(entry) = entries.next() {
            entry[..4].copy_from_slice(&block.to_le_bytes());
            entry[4..].copy_from_slice(&count.to_le_bytes());
        }
    });
    Some(Some(list.freeze()))
}
