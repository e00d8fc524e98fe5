//! The tail: the newest writes, from a member that has them to one that has not.
//!
//! Log entries go in order, with the data that their blocks have now. A write whose blocks a later write of the tail
//! has replaced goes as its result alone. Until the last one is durable the receiver does not serve, so nobody sees
//! the states between.

use super::phase::Phase;
use super::replication::previous_is_older;
use super::{Actions, BlockRange, Context, Payload, Pg, PgAction, PgStore, blocks, ticket};
use crate::store::api::{Change, LogEntry, LogKind, ReadData, ReadError, SubmitError, Transaction};
use loligo_config::id::{ObjectId, ObjectVersion, OsdId, PgId};
use loligo_config::limits::OP_BLOCKS_MAX;
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::Message;
use loligo_net::wire::peering::{PeerFetch, PeerPush, PeerPushAck, PeerPushDone, PushKind};
use loligo_reactor::env::Instant;
use loligo_reactor::planted::{self, Bug};
use std::collections::{BTreeMap, VecDeque};

/// Pushes read, sent and not yet acknowledged: at most 16 MiB of data. Guessed; it hides one round trip and one
/// device write.
const WINDOW: usize = 16;
/// Later ranges that are remembered per object to find replaced writes; more only means sending some data twice.
const LATER_RANGES_MAX: usize = 32;

/// The `count` of a push of kind `Free` that removes the object.
pub const COUNT_WHOLE_OBJECT: u32 = u32::MAX;

/// In the tickets of reads: `[36..24] generation of the sender, [23..0] number of the entry`, so that a read of an
/// earlier sender is never taken for this one's. Longer tails are not sent.
const ENTRY_BITS: u32 = 24;
const GENERATION_MASK: u64 = 0x1fff;

/// Sends one tail.
#[derive(Debug)]
pub struct Sender {
    generation: u64,
    to: OsdId,
    entries: Vec<(LogEntry, PushKind)>,
    last: ObjectVersion,
    next: usize,
    window: VecDeque<Slot>,
    is_done_sent: bool,
}

#[derive(Debug)]
struct Slot {
    number: usize,
    state: SlotState,
}

#[derive(Debug)]
enum SlotState {
    Reading,
    Ready(Option<Payload>),
    Sent,
    Acked,
}

/// Decides what each entry is sent as.
fn plan(log: &[LogEntry]) -> Vec<(LogEntry, PushKind)> {
    let mut later: BTreeMap<ObjectId, Vec<BlockRange>> = BTreeMap::new();
    let mut planned: Vec<_> = log
        .iter()
        .rev()
        .map(|entry| {
            let range = BlockRange { object: entry.object, block: entry.block, count: entry.count };
            let ranges = later.entry(entry.object).or_default();
            let kind = match entry.kind {
                LogKind::Write if ranges.iter().any(|newer| newer.covers(range)) => PushKind::Result,
                LogKind::Write
                    if planted::active(Bug::TailWithoutOverlapped)
                        && ranges.iter().any(|newer| newer.overlaps(range)) =>
                {
                    PushKind::Result
                }
                LogKind::Free if planted::active(Bug::TailWithoutDiscards) => PushKind::Result,
                LogKind::Write => PushKind::Data,
                LogKind::Free | LogKind::Remove => PushKind::Free,
                LogKind::Result => PushKind::Result,
            };
            // A free never replaces an earlier write: that write may be what makes the object.
            match entry.kind {
                LogKind::Remove => *ranges = vec![BlockRange::whole(entry.object)],
                LogKind::Write if kind == PushKind::Data && ranges.len() < LATER_RANGES_MAX => {
                    ranges.push(range)
                }
                _ => {}
            }
            (*entry, kind)
        })
        .collect();
    planned.reverse();
    planned
}

impl Sender {
    /// A tail for `to`, which has everything up to `since`, up to `last`. `None`: the kept log does not reach back
    /// to `since`, or does not contain it.
    fn new<S: PgStore>(
        store: &S,
        pg: PgId,
        to: OsdId,
        since: ObjectVersion,
        last: ObjectVersion,
    ) -> Option<Self> {
        let mut log = Vec::new();
        if !store.entries_since(pg, since, &mut log) || log.len() >= 1 << ENTRY_BITS {
            return None;
        }
        let mut previous = since;
        for entry in &log {
            if entry.previous != previous || !previous_is_older(entry.previous, entry.version) {
                return None;
            }
            previous = entry.version;
        }
        if previous != last {
            return None;
        }
        let entries = plan(&log);
        Some(Self { generation: 0, to, entries, last, next: 0, window: VecDeque::new(), is_done_sent: false })
    }

    /// Who receives it.
    pub fn to(&self) -> OsdId {
        self.to
    }

    fn push_of(&self, pg: PgId, interval: loligo_config::id::Epoch, number: usize) -> PeerPush {
        let (entry, kind) = self.entries[number];
        let count = if entry.kind == LogKind::Remove { COUNT_WHOLE_OBJECT } else { entry.count };
        PeerPush {
            pg,
            interval,
            number: u32::try_from(number).expect("a kept log has fewer than 2^32 entries"),
            kind,
            version: entry.version,
            previous: entry.previous,
            object: entry.object,
            block: entry.block,
            count: if kind == PushKind::Result { 0 } else { count },
            op: entry.op,
            lowest_outstanding: entry.lowest_outstanding,
            snap_seq: entry.snap_seq,
        }
    }
}

impl Pg {
    /// Another member (the primary) wants the tail of this one.
    pub(super) fn on_fetch<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        fetch: PeerFetch,
        out: &mut Actions,
    ) {
        let is_current = fetch.interval == self.since() && self.member.promised() == fetch.interval;
        if !is_current || self.is_primary() || self.acting().first() != Some(&from) {
            return;
        }
        let last = cx.store.status(self.id).unwrap_or_default().durable;
        if self.begin_tail(cx, from, fetch.since, last, out).is_none() {
            self.send_push_done(from, 0, last, true, out);
        }
    }

    /// Begins to send a tail; `None` when it cannot be given.
    pub(super) fn begin_tail<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        to: OsdId,
        since: ObjectVersion,
        last: ObjectVersion,
        out: &mut Actions,
    ) -> Option<()> {
        let mut sender = Sender::new(&*cx.store, self.id, to, since, last)?;
        self.tails_sent += 1;
        sender.generation = self.tails_sent & GENERATION_MASK;
        self.tail = Some(sender);
        self.advance_tail(cx, out);
        Some(())
    }

    fn send_push_done(
        &self,
        to: OsdId,
        count: usize,
        last: ObjectVersion,
        incomplete: bool,
        out: &mut Actions,
    ) {
        let count = u32::try_from(count).expect("a kept log has fewer than 2^32 entries");
        let done = PeerPushDone { pg: self.id, interval: self.since(), count, last, incomplete };
        out.push_back(PgAction::Send { to, message: Message::PeerPushDone(done), payload: None });
    }

    /// Reads and sends as far as the window allows.
    pub(super) fn advance_tail<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        let (id, interval, slot) = (self.id, self.since(), self.slot);
        let Some(tail) = &mut self.tail else { return };
        while tail.window.len() < WINDOW && tail.next < tail.entries.len() {
            let (entry, kind) = tail.entries[tail.next];
            let mut state = SlotState::Ready(None);
            if kind == PushKind::Data {
                let range = BlockRange { object: entry.object, block: entry.block, count: entry.count };
                let number = (tail.generation << ENTRY_BITS) | tail.next as u64;
                if cx.store.read(range, id, ticket::join(slot, ticket::Kind::TailRead, number)).is_err() {
                    self.is_stalled = true;
                    break;
                }
                state = SlotState::Reading;
            }
            tail.window.push_back(Slot { number: tail.next, state });
            tail.next += 1;
        }
        for at in 0..tail.window.len() {
            let number = tail.window[at].number;
            match &mut tail.window[at].state {
                SlotState::Reading => break,
                SlotState::Ready(payload) => {
                    let payload = payload.take();
                    tail.window[at].state = SlotState::Sent;
                    let message = Message::PeerPush(tail.push_of(id, interval, number));
                    out.push_back(PgAction::Send { to: tail.to, message, payload });
                }
                SlotState::Sent | SlotState::Acked => {}
            }
        }
        let is_all_sent =
            tail.next == tail.entries.len() && tail.window.iter().all(|slot| slot.state.is_sent());
        if is_all_sent && !tail.is_done_sent {
            tail.is_done_sent = true;
            let (to, count, last) = (tail.to, tail.entries.len(), tail.last);
            self.send_push_done(to, count, last, false, out);
        }
    }

    pub(super) fn on_tail_read<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        number: u64,
        result: Result<ReadData, ReadError>,
        out: &mut Actions,
    ) {
        let Some(tail) = &mut self.tail else { return };
        if number >> ENTRY_BITS != tail.generation {
            return;
        }
        let number = number & ((1 << ENTRY_BITS) - 1);
        let is_it =
            |slot: &&mut Slot| slot.number as u64 == number && matches!(slot.state, SlotState::Reading);
        let Some(slot) = tail.window.iter_mut().find(is_it) else { return };
        let count = tail.entries[slot.number].0.count;
        let blocks = match result {
            Ok(ReadData { data: Some(data), checksums: Some(checksums), .. }) => Some((data, checksums)),
            Ok(_) => blocks::zeroes(cx.pool, count).ok(),
            Err(ReadError::Busy) => None,
            Err(ReadError::Corrupt { .. } | ReadError::Device { .. }) => {
                return self.tail_unreadable(cx.now, out);
            }
        };
        match blocks {
            Some((data, checksums)) => {
                slot.state = SlotState::Ready(Some(Payload { data, checksums: Some(checksums) }));
                self.advance_tail(cx, out);
            }
            // No memory: the receiver sees no progress, and a new round begins.
            None => self.tail = None,
        }
    }

    /// The only copy of a block of the tail cannot be read.
    fn tail_unreadable(&mut self, now: Instant, out: &mut Actions) {
        let Some(tail) = self.tail.take() else { return };
        if self.is_primary() {
            self.give_up_choosing(now);
        } else {
            self.send_push_done(tail.to, tail.entries.len(), tail.last, true, out);
        }
    }

    pub(super) fn on_push_ack<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        ack: PeerPushAck,
        out: &mut Actions,
    ) {
        let interval = self.since();
        let Some(tail) = &mut self.tail else { return };
        if tail.to != from || ack.interval != interval {
            return;
        }
        if !ack.stored {
            // No room there: what was sent is forgotten, and the round begins anew after a while.
            self.tail = None;
            return;
        }
        let number = ack.number as usize;
        if let Some(slot) = tail.window.iter_mut().find(|slot| slot.number == number && slot.state.is_sent())
        {
            slot.state = SlotState::Acked;
        }
        while tail.window.front().is_some_and(|slot| matches!(slot.state, SlotState::Acked)) {
            tail.window.pop_front();
        }
        if let Some(round) = self.phase.round_mut() {
            round.progress = cx.now;
        }
        let is_complete = tail.is_done_sent && tail.window.is_empty();
        if is_complete {
            self.tail = None;
            self.push_complete(cx, from, out);
        } else {
            self.advance_tail(cx, out);
        }
    }

    // ------------------------------------------------------------------------------------ receiving

    /// Whether `from` may push to this member now.
    fn takes_pushes_from(&self, from: OsdId) -> bool {
        match &self.phase {
            Phase::Fetching(fetch) => self.acting().get(fetch.source) == Some(&from),
            Phase::Waiting | Phase::Following => self.acting().first() == Some(&from),
            _ => false,
        }
    }

    pub(super) fn on_push<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        push: PeerPush,
        payload: Option<Payload>,
        out: &mut Actions,
    ) {
        let is_current = push.interval == self.since() && self.member.promised() == push.interval;
        if !is_current || !self.takes_pushes_from(from) {
            return;
        }
        if let Some(round) = self.phase.round_mut() {
            round.progress = cx.now;
        }
        // The primary agrees anew: what it sent before comes as part of the tail.
        self.replica.drop_held();
        let status = cx.store.status(self.id).unwrap_or_default();
        if push.version <= status.last {
            // Sent again. If it is still on its way to the disk, its commit brings the ack.
            if push.version <= status.durable {
                self.ack_push(from, push.number, true, out);
            }
            return;
        }
        if push.previous != status.last || !previous_is_older(push.previous, push.version) {
            return;
        }
        let Some(change) = change_of(cx, &push, payload) else {
            return self.ack_push(from, push.number, false, out);
        };
        let transaction = Transaction {
            pg: self.id,
            version: push.version,
            previous: push.previous,
            op: push.op,
            lowest_outstanding: push.lowest_outstanding,
            snap_seq: push.snap_seq,
            change,
        };
        let number = self.replica.next_push(from, push.number);
        match cx.store.submit(transaction, ticket::join(self.slot, ticket::Kind::Push, number)) {
            Ok(()) => {}
            Err(SubmitError::Failed(_)) => self.phase = Phase::Failed,
            Err(_) => {
                self.replica.undo_push();
                self.ack_push(from, push.number, false, out);
            }
        }
    }

    fn ack_push(&self, to: OsdId, number: u32, stored: bool, out: &mut Actions) {
        let ack = PeerPushAck { pg: self.id, interval: self.since(), number, stored };
        out.push_back(PgAction::Send { to, message: Message::PeerPushAck(ack), payload: None });
    }

    pub(super) fn on_push_commit<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        number: u64,
        out: &mut Actions,
    ) {
        if let Some((from, push)) = self.replica.push_committed(number) {
            self.ack_push(from, push, true, out);
            self.finish_fetch(cx, out);
        }
    }

    pub(super) fn on_push_done<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        done: PeerPushDone,
        out: &mut Actions,
    ) {
        let since = self.since();
        let source = self.member_index(from);
        let Phase::Fetching(fetch) = &mut self.phase else { return };
        if done.interval != since || source != Some(fetch.source) {
            return;
        }
        if done.incomplete {
            return self.give_up_choosing(cx.now);
        }
        fetch.is_sent = done.last == fetch.last;
        self.finish_fetch(cx, out);
    }
}

impl SlotState {
    fn is_sent(&self) -> bool {
        matches!(self, Self::Sent | Self::Acked)
    }
}

/// What a push changes; `None` when its data does not fit its header.
fn change_of<S>(cx: &Context<'_, S>, push: &PeerPush, payload: Option<Payload>) -> Option<Change> {
    let object = push.object;
    match push.kind {
        PushKind::Result => Some(Change::Result),
        PushKind::Free if push.count == COUNT_WHOLE_OBJECT => Some(Change::Remove { object }),
        PushKind::Free => Some(Change::Free { object, block: push.block, count: push.count }),
        PushKind::Data => {
            let Payload { data, checksums } = payload?;
            let count =
                usize::try_from(push.count).ok().filter(|count| (1..=OP_BLOCKS_MAX).contains(count))?;
            if data.len() != count * BLOCK_SIZE as usize {
                return None;
            }
            let checksums = match checksums {
                Some(checksums) if checksums.len() == count * 4 => checksums,
                _ => blocks::checksums_of(cx.pool, &data).ok()?,
            };
            Some(Change::Write { object, block: push.block, data, checksums })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_config::id::{Epoch, OpId};

    fn entry(sequence: u64, kind: LogKind, index: u64, block: u32, count: u32) -> LogEntry {
        let version = |sequence| ObjectVersion { interval: Epoch(1), stream: 0, sequence };
        LogEntry {
            version: version(sequence),
            previous: version(sequence - 1),
            object: ObjectId { index, ..ObjectId::default() },
            block,
            count,
            kind,
            op: OpId::default(),
            lowest_outstanding: 0,
            snap_seq: 0,
        }
    }

    fn kinds(log: &[LogEntry]) -> Vec<PushKind> {
        plan(log).into_iter().map(|(_, kind)| kind).collect()
    }

    #[test]
    fn a_replaced_write_is_sent_as_its_result() {
        use {LogKind::Write, PushKind::*};
        let log = [entry(1, Write, 0, 2, 2), entry(2, Write, 1, 2, 2), entry(3, Write, 0, 0, 8)];
        assert_eq!(kinds(&log), [Result, Data, Data]);
        let partly = [entry(1, Write, 0, 2, 8), entry(2, Write, 0, 0, 8)];
        assert_eq!(kinds(&partly), [Data, Data]);
    }

    #[test]
    fn removal_replaces_writes_and_is_itself_never_dropped() {
        use PushKind::*;
        let log = [
            entry(1, LogKind::Write, 0, 0, 1),
            entry(2, LogKind::Remove, 0, 0, u32::MAX),
            entry(3, LogKind::Write, 0, 0, 1),
        ];
        assert_eq!(kinds(&log), [Result, Free, Data]);
        let freed = [entry(1, LogKind::Write, 0, 0, 1), entry(2, LogKind::Free, 0, 0, 1)];
        assert_eq!(kinds(&freed), [Data, Free]);
    }
}
