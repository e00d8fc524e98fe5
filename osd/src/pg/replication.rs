//! Writes on the primary: version, own device write and replicas in one step; the reply when all are durable.

use super::op::OpEnd;
use super::phase::Phase;
use super::shortage::Shortage;
use super::{Actions, BlockRange, Context, Payload, PerMember, Pg, PgAction, PgStore, Requester, ticket};
use crate::store::api::{Change, SubmitError, Transaction, WRITE_OVERHEAD};
use arrayvec::ArrayVec;
use loligo_config::id::{Epoch, ObjectKind, ObjectVersion, OsdId};
use loligo_config::limits::{PG_WRITES_IN_FLIGHT_MAX, POOL_SIZE_MAX};
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::Message;
use loligo_net::wire::op::{OpKind, OpRequest, OpStatus, ReplicaLeg, Residence};
use loligo_net::wire::peering::PeerQuery;
use loligo_net::wire::replica::{RepAck, RepStatus, RepWrite};
use loligo_reactor::env::Instant;
use loligo_reactor::planted::{self, Bug};
use std::collections::VecDeque;
use std::time::Duration;

/// Blocks granted by each member, in the order of the acting set; this one's own entry is not used.
pub type Credits = PerMember<u64>;

/// How long after a refusal for want of room a write is sent again. Guessed: some device writes.
const RESEND_SOON: Duration = Duration::from_millis(5);
/// How long without an ack until a write is sent again over a connection that lives. Guessed; connections lose
/// nothing, so this covers what no other rule does.
const RESEND_LATE: Duration = Duration::from_secs(1);
/// Whether there is space for a write on every member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// There is.
    Now,
    /// Perhaps when writes in flight are durable, or when the others have been asked.
    Later,
    /// There is none.
    None,
}

/// All members of an acting set of this size, a bit each.
pub fn mask_of(members: usize) -> u8 {
    assert!(members <= usize::from(POOL_SIZE_MAX), "one bit per member");
    u8::try_from((1u16 << members) - 1).expect("at most eight members")
}

/// Whether `version` may follow `previous` in the history of a PG.
pub fn previous_is_older(previous: ObjectVersion, version: ObjectVersion) -> bool {
    previous < version && version.sequence == previous.sequence.wrapping_add(1)
}

/// A write that has a version and is not yet durable on every member.
#[derive(Debug)]
pub struct InFlight {
    /// What replicas are sent.
    pub message: RepWrite,
    /// Its data.
    pub payload: Option<Payload>,
    /// The op.
    pub request: OpRequest,
    /// Who waits for it.
    pub from: Option<Requester>,
    /// When it arrived.
    pub arrived: Instant,
    /// The end of the submit stage, see [`Pg::note_sent`].
    submitted: Instant,
    /// When it was last sent to a replica.
    sent: Instant,
    /// Members on which it is not durable yet, a bit each.
    missing: u8,
    residence: Residence,
}

impl InFlight {
    fn is_everywhere(&self) -> bool {
        self.missing == 0
            || (planted::active(Bug::AckBeforeSecondCopy) && self.missing & 1 == 0)
            || (planted::active(Bug::AckBeforeOwnCopy) && self.missing == 1)
    }

    fn range(&self) -> BlockRange {
        BlockRange { object: self.message.object, block: self.message.block, count: self.message.count }
    }
}

/// The writes of one interval.
#[derive(Debug, Default)]
pub struct Replication {
    in_flight: VecDeque<InFlight>,
    /// Number, in tickets, of the first in flight.
    front: u64,
    last: ObjectVersion,
    committed: ObjectVersion,
    credits: Credits,
    blocks_in_flight: u64,
    resend_at: ArrayVec<Option<Instant>, { POOL_SIZE_MAX as usize }>,
    shortage: Shortage,
    /// Of the newest writes in flight, those whose submit stage has not ended.
    unsent: usize,
}

impl Replication {
    /// Service begins, after `last`, which every member has.
    pub fn begin(&mut self, last: ObjectVersion, credits: Credits) {
        assert!(self.in_flight.is_empty(), "nothing is in flight before service begins");
        self.last = last;
        self.committed = last;
        self.resend_at = credits.iter().map(|_| None).collect();
        self.credits = credits;
        self.blocks_in_flight = 0;
        self.shortage.forget();
    }

    /// Nobody waits for space any more.
    pub fn rest(&mut self) {
        self.shortage.rest();
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Whether this many more writes may be in flight.
    pub fn has_room_for(&self, writes: usize) -> bool {
        self.in_flight.len() + writes <= PG_WRITES_IN_FLIGHT_MAX
    }

    /// The newest version in flight.
    pub fn last(&self) -> Option<ObjectVersion> {
        self.in_flight.back().map(|write| write.message.version)
    }

    /// Every version up to this one is known to be durable on every member.
    pub fn committed(&self) -> ObjectVersion {
        self.committed
    }

    /// Learns the watermark from the primary.
    pub fn note_committed(&mut self, committed: ObjectVersion) {
        self.committed = self.committed.max(committed);
    }

    /// What a member grants now.
    pub fn set_credit(&mut self, member: usize, credit: u64) {
        if let Some(granted) = self.credits.get_mut(member) {
            *granted = credit;
        }
    }

    /// Whether retries may be due.
    pub fn wants_tick(&self) -> bool {
        !self.in_flight.is_empty() || self.shortage.is_waiting()
    }

    /// Whether a write in flight shares blocks with `range`.
    pub fn overlaps(&self, range: BlockRange) -> bool {
        self.in_flight.iter().any(|write| write.range().overlaps(range))
    }

    /// The newest write in flight, up to `version`, that shares blocks with `range`.
    pub fn newest_overlap(&self, range: BlockRange, version: ObjectVersion) -> Option<ObjectVersion> {
        let overlaps = |write: &&InFlight| write.message.version <= version && write.range().overlaps(range);
        self.in_flight.iter().rev().find(overlaps).map(|write| write.message.version)
    }

    /// The writes in flight, oldest first.
    pub fn in_flight_mut(&mut self) -> impl Iterator<Item = &mut InFlight> {
        self.in_flight.iter_mut()
    }

    /// Gives up the oldest write in flight.
    pub fn abandon_next(&mut self) -> Option<InFlight> {
        let write = self.in_flight.pop_front()?;
        self.front += 1;
        Some(write)
    }

    /// Whether a write of so many blocks fits into what this member (`own`) has and the others grant, as far as is known.
    fn known_room(&self, own: u64, blocks: u64) -> Room {
        let needed = blocks + WRITE_OVERHEAD;
        let granted = self.credits.iter().skip(1).copied().min().unwrap_or(u64::MAX);
        // Its own store knows of what is in flight already.
        if own < needed || granted < needed {
            Room::None
        } else if granted - needed < self.blocks_in_flight {
            Room::Later
        } else {
            Room::Now
        }
    }

    fn by_version(&mut self, version: ObjectVersion) -> Option<&mut InFlight> {
        let first = self.in_flight.front()?.message.version;
        let index = usize::try_from(version.sequence.checked_sub(first.sequence)?).ok()?;
        self.in_flight.get_mut(index).filter(|write| write.message.version == version)
    }

    /// # Panics
    /// When versions in flight have a hole or are of another interval.
    pub fn check_invariants(&self, since: Epoch) {
        assert!(self.in_flight.len() <= PG_WRITES_IN_FLIGHT_MAX, "the bound on writes in flight holds");
        if let (Some(first), Some(last)) = (self.in_flight.front(), self.in_flight.back()) {
            let (first, last) = (first.message.version, last.message.version);
            assert!(first.interval == since, "writes in flight are of this interval");
            assert!(last.interval == since, "writes in flight are of this interval");
            assert!(last == self.last, "the newest write in flight is the newest version");
            assert!(
                last.sequence - first.sequence + 1 == self.in_flight.len() as u64,
                "versions in flight have no hole"
            );
            assert!(self.committed < first, "what is committed is not in flight");
        }
    }
}

impl Pg {
    /// Assigns a version and sends the write on its way, here and to every replica, or refuses the op.
    pub(super) fn submit_write<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        index: usize,
        change: Change,
        out: &mut Actions,
    ) {
        let data_blocks = data_blocks(&change);
        if data_blocks > 0 {
            let room = match is_renewal(cx, &change) {
                true => self.room_for_renewal(cx, data_blocks),
                false => self.room_for(cx, data_blocks),
            };
            match room {
                Room::Now => {}
                Room::Later => return self.ops.put_back(index),
                Room::None => return self.finish_refused(cx, index, OpStatus::NoSpace, out),
            }
        }
        let request = self.ops.ops[index].request;
        let previous = self.replication.last;
        let version = ObjectVersion { interval: self.since(), stream: 0, sequence: previous.sequence + 1 };
        let (message, payload) = self.rep_write(&request, version, &change);
        let transaction = Transaction {
            pg: self.id,
            version,
            previous,
            op: request.op,
            lowest_outstanding: request.lowest_outstanding,
            snap_seq: request.snap_seq,
            change,
        };
        let number = self.replication.front + self.replication.in_flight.len() as u64;
        let submitted = cx.store.submit(transaction, ticket::join(self.slot, ticket::Kind::Write, number));
        if submitted.is_err() && planted::active(Bug::VersionWithoutWrite) {
            self.replication.last = version;
        }
        match submitted {
            Ok(()) => {}
            Err(SubmitError::Busy) => return self.stall(index),
            Err(SubmitError::NoSpace) => return self.finish_refused(cx, index, OpStatus::NoSpace, out),
            Err(SubmitError::Invalid) => return self.finish_refused(cx, index, OpStatus::Invalid, out),
            Err(SubmitError::Failed(error)) => return self.on_failed(error, out),
            Err(SubmitError::NotNext { last }) => {
                panic!("{}: {version} follows {previous} here, but {last} in the store", self.id)
            }
        }
        let members = self.acting().len();
        for to in &self.acting()[1..] {
            let (message, payload) = (Message::RepWrite(message), payload.clone());
            out.push_back(PgAction::Send { to: *to, message, payload });
        }
        let op = self.ops.take(index);
        self.replication.unsent += 1;
        self.replication.last = version;
        self.replication.blocks_in_flight += if data_blocks > 0 { data_blocks + WRITE_OVERHEAD } else { 0 };
        self.replication.in_flight.push_back(InFlight {
            message,
            payload,
            request,
            from: op.from,
            arrived: op.arrived,
            submitted: cx.now,
            sent: cx.now,
            missing: mask_of(members),
            residence: Residence::NONE,
        });
    }

    /// Whether a step has begun writes whose copies are still to be handed to the transport.
    pub fn has_unsent(&self) -> bool {
        self.replication.unsent > 0
    }

    /// Everything that the last step asked for is on its way: here the submit stage of its writes ends. The time must be
    /// read after that; the time of the step is the one at which its event came in.
    pub fn note_sent(&mut self, now: Instant) {
        let unsent = std::mem::take(&mut self.replication.unsent);
        for write in self.replication.in_flight.iter_mut().rev().take(unsent) {
            write.submitted = now;
            write.residence.submit_ns = nanos(now.since(write.arrived));
        }
    }

    fn rep_write(
        &self,
        request: &OpRequest,
        version: ObjectVersion,
        change: &Change,
    ) -> (RepWrite, Option<Payload>) {
        let (kind, block, count, payload) = match change {
            Change::Write { block, data, checksums, .. } => {
                let payload = Payload { data: data.clone(), checksums: Some(checksums.clone()) };
                (OpKind::Write, *block, blocks_of(data.len()), Some(payload))
            }
            Change::Free { block, count, .. } => (OpKind::Discard, *block, *count, None),
            _ => (OpKind::Remove, 0, u32::MAX, None),
        };
        let message = RepWrite {
            pg: self.id,
            interval: self.since(),
            version,
            previous: self.replication.last,
            committed: self.replication.committed,
            object: request.object,
            kind,
            block,
            count,
            op: request.op,
            lowest_outstanding: request.lowest_outstanding,
            snap_seq: request.snap_seq,
        };
        (message, payload)
    }

    pub(super) fn on_own_commit<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        number: u64,
        device_ns: u32,
        out: &mut Actions,
    ) {
        let index = number.wrapping_sub(self.replication.front) & ticket::NUMBER_MASK;
        let write = usize::try_from(index).ok().and_then(|index| self.replication.in_flight.get_mut(index));
        let Some(write) = write else { return };
        write.missing &= !1;
        write.residence.own_ns = nanos(cx.now.since(write.submitted));
        write.residence.device_ns = device_ns;
        self.retire_writes(cx, out);
    }

    pub(super) fn on_rep_ack<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        ack: RepAck,
        out: &mut Actions,
    ) {
        let Some(index) = self.member_index(from) else { return };
        if !matches!(self.phase, Phase::Active) || ack.interval != self.since() || index == 0 {
            return;
        }
        self.take_credit(index, ack.space_credit);
        let status = match ack.status {
            RepStatus::Gap if planted::active(Bug::GapCountsAsCopy) => RepStatus::Durable,
            status => status,
        };
        match status {
            RepStatus::Durable => {
                let Some(write) = self.replication.by_version(ack.version) else { return };
                if write.missing & (1 << index) != 0 {
                    write.missing &= !(1 << index);
                    write.residence.note_replica(ReplicaLeg {
                        osd: from,
                        leg_ns: nanos(cx.now.since(write.submitted)),
                        residence_ns: ack.residence_ns,
                        device_ns: ack.device_ns,
                    });
                }
                self.retire_writes(cx, out);
            }
            // It has not what this primary believes it has: agree anew.
            RepStatus::NotReady => self.begin_peering(cx, out),
            RepStatus::Gap if self.replication.is_front(ack.version) => self.begin_peering(cx, out),
            RepStatus::Gap | RepStatus::Busy | RepStatus::Damaged => {
                self.replication.resend_at[index].get_or_insert(cx.now.after(RESEND_SOON));
            }
            // A newer map is on its way that says so; until then nothing can be acknowledged.
            RepStatus::StaleInterval | RepStatus::Failed => {}
        }
    }

    /// Replies to everything that is durable on every member, in order.
    fn retire_writes<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        let copies = self.copies();
        let mut is_any = false;
        while self.replication.in_flight.front().is_some_and(InFlight::is_everywhere) {
            let Some(write) = self.replication.abandon_next() else { break };
            let version = write.message.version;
            self.replication.committed = version;
            if let Some(payload) = &write.payload {
                self.replication.blocks_in_flight -=
                    u64::from(blocks_of(payload.data.len())) + WRITE_OVERHEAD;
            }
            self.counters.writes += 1;
            self.counters.bytes_written += u64::from(write.request.len);
            let end = OpEnd { version, copies, residence: write.residence, ..OpEnd::DONE };
            self.reply(&write.request, write.from, write.arrived, end, out);
            self.watches.notify(self.id, write.message.object, version, out);
            is_any = true;
        }
        if is_any {
            self.ops.wake();
            self.release_held_reads(cx, out);
        }
    }

    /// Sends a member everything that it has not acknowledged, in order.
    pub(super) fn resend_writes(&mut self, now: Instant, index: usize, out: &mut Actions) {
        if index == 0 {
            return;
        }
        let Some(to) = self.acting().get(index).copied() else { return };
        self.replication.resend_at[index] = None;
        for write in &mut self.replication.in_flight {
            if write.missing & (1 << index) == 0 {
                continue;
            }
            write.sent = now;
            self.counters.resent += 1;
            let (message, payload) = (Message::RepWrite(write.message), write.payload.clone());
            out.push_back(PgAction::Send { to, message, payload });
        }
    }

    pub(super) fn retry_writes(&mut self, now: Instant, out: &mut Actions) {
        if !matches!(self.phase, Phase::Active) {
            return;
        }
        for index in 1..self.acting().len() {
            let is_due = self.replication.resend_at[index].is_some_and(|at| at <= now);
            let is_late = self.replication.in_flight.front().is_some_and(|write| {
                write.missing & (1 << index) != 0 && now.since(write.sent) >= RESEND_LATE
            });
            if is_due || is_late {
                self.resend_writes(now, index, out);
            }
        }
        if self.replication.shortage.is_waiting() {
            self.ask_for_credit(now, out);
            self.ops.wake();
        }
    }

    /// Whether there is space for a write of so many blocks; if it is not certain, the others are asked.
    pub(super) fn room_for<S: PgStore>(&mut self, cx: &Context<'_, S>, blocks: u64) -> Room {
        let needed = blocks + WRITE_OVERHEAD;
        let room = self.replication.known_room(cx.store.credit(), blocks);
        let shortage = &mut self.replication.shortage;
        match room {
            Room::None if shortage.refuses(needed, cx.now) => Room::None,
            Room::None => Room::Later,
            Room::Now | Room::Later => {
                shortage.end(needed);
                room
            }
        }
    }

    /// A full pool takes the new header and directory of an image that is being removed, or nothing could ever be
    /// removed: they replace blocks that come back. While this PG has no data in flight, what every member keeps back
    /// for it is there.
    fn room_for_renewal<S: PgStore>(&mut self, cx: &Context<'_, S>, blocks: u64) -> Room {
        match self.replication.known_room(cx.store.credit(), blocks) {
            Room::Now => Room::Now,
            Room::Later | Room::None if self.replication.blocks_in_flight == 0 => Room::Now,
            Room::Later | Room::None => Room::Later,
        }
    }

    /// A member's credit is asked for while a write waits for space: with nothing in flight no ack would bring it.
    pub(super) fn ask_for_credit(&mut self, now: Instant, out: &mut Actions) {
        if !self.replication.shortage.asks(now, super::RETRY_INTERVAL) {
            return;
        }
        let query = PeerQuery { pg: self.id, interval: self.since() };
        for to in self.acting().iter().skip(1) {
            out.push_back(PgAction::Send { to: *to, message: Message::PeerQuery(query), payload: None });
        }
    }

    pub(super) fn take_credit(&mut self, index: usize, credit: u64) {
        self.replication.set_credit(index, credit);
        if self.ops.is_room_taken() {
            self.ops.wake();
        }
    }
}

impl Replication {
    fn is_front(&self, version: ObjectVersion) -> bool {
        self.in_flight.front().is_some_and(|write| write.message.version == version)
    }
}

/// Whether a write replaces what an image's header or a directory has already: in the end it takes no space.
fn is_renewal<S: PgStore>(cx: &Context<'_, S>, change: &Change) -> bool {
    let Change::Write { object, block, data, .. } = change else { return false };
    if !matches!(object.kind, ObjectKind::ImageHeader | ObjectKind::Directory) {
        return false;
    }
    let (count, mut there) = (blocks_of(data.len()), 0);
    let range = BlockRange { object: *object, block: *block, count };
    cx.store.extents(range, &mut |_, run| there += run);
    there == count
}

fn data_blocks(change: &Change) -> u64 {
    match change {
        Change::Write { data, .. } => u64::from(blocks_of(data.len())),
        _ => 0,
    }
}

fn blocks_of(len: usize) -> u32 {
    u32::try_from(len / BLOCK_SIZE as usize).expect("data of one op is below 4 GiB")
}

/// Nanoseconds for a waterfall; long ones are cut at 4 s.
pub fn nanos(duration: Duration) -> u32 {
    u32::try_from(duration.as_nanos()).unwrap_or(u32::MAX)
}
