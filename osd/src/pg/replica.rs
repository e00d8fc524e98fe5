//! Writes on a replica: in order, in the promised interval, acknowledged when durable.

use super::phase::Phase;
use super::replication::{nanos, previous_is_older};
use super::{Actions, Context, Payload, Pg, PgAction, PgStore, blocks, ticket};
use crate::store::api::{Change, SubmitError, Transaction};
use loligo_config::id::{Epoch, ObjectVersion, OsdId};
use loligo_config::limits::{OP_BLOCKS_MAX, PG_WRITES_IN_FLIGHT_MAX};
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::Message;
use loligo_net::wire::op::OpKind;
use loligo_net::wire::replica::{RepAck, RepStatus, RepWrite};
use loligo_reactor::env::Instant;
use loligo_reactor::planted::{self, Bug};
use std::collections::VecDeque;

/// What this member has submitted for others and not yet acknowledged.
#[derive(Debug, Default)]
pub struct ReplicaLog {
    writes: VecDeque<Pending>,
    front: u64,
    pushes: VecDeque<(OsdId, u32)>,
    front_push: u64,
    /// Writes that the store did not take yet, each the next after the one before. Sent back, they would come again
    /// after a while; here they go when there is room.
    held: VecDeque<Held>,
}

#[derive(Debug)]
struct Held {
    write: RepWrite,
    payload: Option<Payload>,
    arrived: Instant,
}

#[derive(Debug)]
struct Pending {
    interval: Epoch,
    version: ObjectVersion,
    arrived: Instant,
}

impl ReplicaLog {
    /// Whether no replicated write waits or is on its way to the disk.
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty() && self.held.is_empty()
    }

    /// Forgets what waits for room.
    pub fn drop_held(&mut self) {
        self.held.clear();
    }

    /// Acknowledges nothing of what is on its way: it belongs to an interval that is over.
    pub fn forget(&mut self) {
        self.front += self.writes.len() as u64;
        self.writes.clear();
        self.front_push += self.pushes.len() as u64;
        self.pushes.clear();
        self.drop_held();
    }

    fn next_write(&self) -> u64 {
        self.front + self.writes.len() as u64
    }

    fn write_committed(&mut self, number: u64) -> Option<Pending> {
        if self.writes.is_empty() || number != self.front & ticket::NUMBER_MASK {
            return None;
        }
        self.front += 1;
        self.writes.pop_front()
    }

    /// Notes a push that is being submitted; its number for the ticket.
    pub fn next_push(&mut self, from: OsdId, push: u32) -> u64 {
        self.pushes.push_back((from, push));
        self.front_push + self.pushes.len() as u64 - 1
    }

    /// The push noted last was not taken.
    pub fn undo_push(&mut self) {
        self.pushes.pop_back();
    }

    /// Whose push is durable now; nobody's if it was forgotten.
    pub fn push_committed(&mut self, number: u64) -> Option<(OsdId, u32)> {
        if self.pushes.is_empty() || number != self.front_push & ticket::NUMBER_MASK {
            return None;
        }
        self.front_push += 1;
        self.pushes.pop_front()
    }
}

impl Pg {
    pub(super) fn on_rep_write<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        write: RepWrite,
        payload: Option<Payload>,
        arrived: Instant,
        out: &mut Actions,
    ) {
        let status = match self.take_rep_write(cx, from, &write, payload, arrived) {
            Ok(true) if !planted::active(Bug::ReplicaAcksEarly) => return,
            Ok(_) => RepStatus::Durable,
            Err(status) => status,
        };
        let ack = self.rep_ack(cx, &write, status, arrived);
        out.push_back(PgAction::Send { to: from, message: Message::RepAck(ack), payload: None });
    }

    fn rep_ack<S: PgStore>(
        &self,
        cx: &Context<'_, S>,
        write: &RepWrite,
        status: RepStatus,
        arrived: Instant,
    ) -> RepAck {
        RepAck {
            pg: self.id,
            interval: write.interval,
            version: write.version,
            status,
            residence_ns: nanos(cx.now.since(arrived)),
            device_ns: 0,
            space_credit: cx.store.grant(),
        }
    }

    /// True: the ack follows its commit. False: it is durable already.
    fn take_rep_write<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        write: &RepWrite,
        payload: Option<Payload>,
        arrived: Instant,
    ) -> Result<bool, RepStatus> {
        let is_old = write.interval < self.member.refuses_below() || write.interval < self.since();
        if is_old && !planted::active(Bug::IntervalUnchecked) {
            return Err(RepStatus::StaleInterval);
        }
        if matches!(self.phase, Phase::Failed) {
            return Err(RepStatus::Failed);
        }
        let is_current = write.interval == self.since() || planted::active(Bug::IntervalUnchecked);
        let is_from_primary = self.acting().first() == Some(&from) && is_current;
        if !matches!(self.phase, Phase::Following) || !is_from_primary {
            return Err(RepStatus::NotReady);
        }
        self.replication.note_committed(write.committed);
        let status = cx.store.status(self.id).unwrap_or_default();
        if write.version <= status.last {
            return Ok(write.version > status.durable);
        }
        let held = &mut self.replica.held;
        while held.front().is_some_and(|held| held.write.version <= status.last) {
            held.pop_front();
        }
        let last = held.back().map_or(status.last, |held| held.write.version);
        if write.version <= last {
            return Ok(true);
        }
        let is_next = write.previous == last && previous_is_older(write.previous, write.version);
        let is_next = is_next || planted::active(Bug::GapUnchecked);
        if !is_next || write.version.interval != write.interval {
            return Err(RepStatus::Gap);
        }
        let previous = if planted::active(Bug::GapUnchecked) { last } else { write.previous };
        let held = Held { write: RepWrite { previous, ..*write }, payload, arrived };
        if self.replica.held.is_empty() {
            match self.submit_replica(cx, &held) {
                Err(RepStatus::Busy) => {}
                result => return result.map(|()| true),
            }
        }
        self.hold(held)
    }

    /// Keeps a write that follows what this member has until its store takes it.
    fn hold(&mut self, held: Held) -> Result<bool, RepStatus> {
        if self.replica.held.len() >= PG_WRITES_IN_FLIGHT_MAX {
            return Err(RepStatus::Busy);
        }
        self.counters.stalled += 1;
        self.is_stalled = true;
        self.replica.held.push_back(held);
        Ok(true)
    }

    /// Submits writes that waited for room, in order.
    pub(super) fn submit_held<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        while let Some(held) = self.replica.held.pop_front() {
            let last = cx.store.status(self.id).unwrap_or_default().last;
            if held.write.version <= last {
                continue;
            }
            let is_next = held.write.previous == last;
            match if is_next { self.submit_replica(cx, &held) } else { Err(RepStatus::Gap) } {
                Ok(()) => {}
                Err(RepStatus::Busy) => {
                    self.is_stalled = true;
                    return self.replica.held.push_front(held);
                }
                Err(status) => {
                    self.replica.drop_held();
                    let ack = self.rep_ack(cx, &held.write, status, held.arrived);
                    let to = self.acting().first().copied();
                    let message = Message::RepAck(ack);
                    out.extend(to.map(|to| PgAction::Send { to, message, payload: None }));
                }
            }
        }
    }

    /// `Busy`: there is no room now, or no memory.
    fn submit_replica<S: PgStore>(&mut self, cx: &mut Context<'_, S>, held: &Held) -> Result<(), RepStatus> {
        let Held { write, payload, arrived } = held;
        let transaction = Transaction {
            pg: self.id,
            version: write.version,
            previous: write.previous,
            op: write.op,
            lowest_outstanding: write.lowest_outstanding,
            snap_seq: write.snap_seq,
            change: change_of(cx, write, payload.clone())?,
        };
        let number = self.replica.next_write();
        match cx.store.submit(transaction, ticket::join(self.slot, ticket::Kind::Replica, number)) {
            Ok(()) => {
                let (interval, version) = (write.interval, write.version);
                self.replica.writes.push_back(Pending { interval, version, arrived: *arrived });
                Ok(())
            }
            Err(SubmitError::Busy | SubmitError::NoSpace) => Err(RepStatus::Busy),
            Err(SubmitError::NotNext { .. }) => Err(RepStatus::Gap),
            Err(SubmitError::Invalid) => Err(RepStatus::Damaged),
            Err(SubmitError::Failed(_)) => {
                self.phase = Phase::Failed;
                Err(RepStatus::Failed)
            }
        }
    }

    pub(super) fn on_replica_commit<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        number: u64,
        device_ns: u32,
        out: &mut Actions,
    ) {
        let Some(Pending { interval, version, arrived }) = self.replica.write_committed(number) else {
            return;
        };
        let Some(to) = self.acting().first().copied() else { return };
        let ack = RepAck {
            pg: self.id,
            interval,
            version,
            status: RepStatus::Durable,
            residence_ns: nanos(cx.now.since(arrived)),
            device_ns,
            space_credit: cx.store.grant(),
        };
        out.push_back(PgAction::Send { to, message: Message::RepAck(ack), payload: None });
    }
}

/// What a write changes. `Damaged` when its data does not fit its header, `Busy` without memory.
fn change_of<S>(
    cx: &Context<'_, S>,
    write: &RepWrite,
    payload: Option<Payload>,
) -> Result<Change, RepStatus> {
    let object = write.object;
    match write.kind {
        OpKind::Remove => Ok(Change::Remove { object }),
        OpKind::Discard => Ok(Change::Free { object, block: write.block, count: write.count }),
        OpKind::Write => {
            let Payload { data, checksums } = payload.ok_or(RepStatus::Damaged)?;
            let count = usize::try_from(write.count).ok().filter(|count| (1..=OP_BLOCKS_MAX).contains(count));
            let count = count.ok_or(RepStatus::Damaged)?;
            if data.len() != count * BLOCK_SIZE as usize {
                return Err(RepStatus::Damaged);
            }
            let checksums = match checksums {
                Some(checksums) if checksums.len() == count * 4 => checksums,
                _ => blocks::checksums_of(cx.pool, &data).map_err(|_| RepStatus::Busy)?,
            };
            Ok(Change::Write { object, block: write.block, data, checksums })
        }
        _ => Err(RepStatus::Damaged),
    }
}
