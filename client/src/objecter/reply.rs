//! What comes back: replies, notifications, the ends of connections. All of it is untrusted input: what does not fit
//! the op closes the connection, and the op is sent again.

use super::link::LinkState;
use super::mon::MonLink;
use super::op::Op;
use super::pg::HoldReason;
use super::watch::{Notice, REFUSED_PAUSE, WatchState};
use super::wire::{LinkDown, Wire};
use super::{ObjectOp, Objecter, OpOutcome, Origin, Session};
use crate::error::IoError;
use loligo_config::id::SessionId;
use loligo_config::limits::OBJECT_ORDER_MAX;
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::Message;
use loligo_net::wire::handshake::Identity;
use loligo_net::wire::list::{read_list, read_sessions};
use loligo_net::wire::op::{Notify, OpKind, OpReply, OpStatus};
use loligo_reactor::dma::SharedBuffer;
use loligo_reactor::env::{ConnectionId, Instant};
use loligo_reactor::planted::{self, Bug};

/// Bytes of one entry of an `Extents` reply.
const EXTENT_LEN: usize = 8;
/// Blocks of the largest object.
const OBJECT_BLOCKS_MAX: u64 = (1 << OBJECT_ORDER_MAX) / BLOCK_SIZE as u64;
/// Times that data is sent again after it arrived damaged. A bad cable damages once; three times in a row is a
/// fault in this host.
const DAMAGED_MAX: u32 = 3;

impl<O: Copy> Objecter<O> {
    pub(super) fn mon_up<W: Wire>(
        &mut self,
        connection: ConnectionId,
        peer: Identity,
        _credits: u32,
        wire: &mut W,
    ) {
        let session = wire.session();
        let known = self.map.as_ref().map(|map| map.cluster);
        let same = match self.session {
            Session::None => session != SessionId(0),
            Session::Live(have) | Session::Ending(have) => session == have,
            Session::Fenced => false,
        };
        let Some(cluster) =
            peer.cluster.filter(|cluster| same && known.is_none_or(|known| known == *cluster))
        else {
            wire.close(connection);
            let reason =
                LinkDown::Closed(loligo_reactor::env::CloseReason::Protocol("no session or cluster"));
            self.mon.down(self.now, reason);
            return;
        };
        wire.set_cluster(cluster);
        if self.session == Session::None {
            self.session = Session::Live(session);
        }
        self.mon.up();
    }

    pub(super) fn handle_message<W: Wire>(
        &mut self,
        connection: ConnectionId,
        message: Message,
        data: Option<SharedBuffer>,
        arrived: Instant,
        wire: &mut W,
    ) {
        if self.mon.is(connection) {
            match message {
                Message::Map(_) => self.take_map(data.as_deref().unwrap_or_default(), wire),
                Message::CommandReply(reply) => {
                    let have = self.epoch();
                    self.mon.answer(reply.number, reply.epoch, data.as_deref(), have);
                }
                _ => {}
            }
            return;
        }
        let Some(&link) = self.links_by_connection.get(&connection) else { return };
        let sane = match message {
            Message::OpReply(reply) => self.handle_reply(link, reply, data, arrived),
            Message::Notify(notify) => {
                self.handle_notify(link, notify);
                true
            }
            _ => false,
        };
        if !sane {
            tracing::warn!(osd = self.links[link].osd.0, "an OSD's answer does not fit what it was asked");
            wire.close(connection);
            self.link_down(link);
        }
    }

    /// Returns whether the reply made sense. Replies to ops that have ended, or that are out somewhere else by now,
    /// do; nothing follows from them.
    fn handle_reply(
        &mut self,
        link: usize,
        reply: OpReply,
        data: Option<SharedBuffer>,
        arrived: Instant,
    ) -> bool {
        if self.session() != Some(reply.op.session) {
            return true;
        }
        let Some(&slot) = self.numbers.get(&reply.op.number) else { return true };
        if self.ops[slot].link != Some(link) {
            return true;
        }
        let op = &mut self.ops[slot];
        if reply.status == OpStatus::Done && !fits(&op.request, data.as_deref()) {
            return false;
        }
        op.timing.arrived = arrived;
        op.timing.residence = reply.residence;
        op.timing.copies = reply.copies;
        self.links[link].proven();
        let pg = op.pg;
        if let Some(queue) = pg.and_then(|pg| self.pgs.get_mut(&pg))
            && queue.target.is_some_and(|target| target.osd == self.links[link].osd)
        {
            queue.core = reply.core;
        }
        match reply.status {
            OpStatus::Done => {
                let wants_data = returns_data(op.request.kind);
                self.succeed(slot, OpOutcome { version: reply.version, data: data.filter(|_| wants_data) });
            }
            // Not the PG is busy, its table of watchers is full: others need not wait for that.
            OpStatus::Busy if matches!(op.origin, Origin::Watch(_)) => {
                self.finish(slot, Err(IoError::Timeout))
            }
            OpStatus::StaleEpoch | OpStatus::NotPrimary | OpStatus::NotActive => {
                self.again_later(slot, HoldReason::NotServing);
            }
            OpStatus::Busy => self.again_later(slot, HoldReason::Busy),
            OpStatus::Damaged => {
                op.damaged += 1;
                if op.damaged > DAMAGED_MAX {
                    self.finish(slot, Err(IoError::Damaged));
                } else {
                    self.again_later(slot, HoldReason::NotServing);
                }
            }
            OpStatus::VersionMismatch | OpStatus::StaleSnap => self.finish(slot, Err(IoError::Conflict)),
            OpStatus::NoSpace => self.finish(slot, Err(IoError::NoSpace)),
            OpStatus::Invalid => self.finish(slot, Err(IoError::Invalid)),
            OpStatus::MediaError => self.finish(slot, Err(IoError::Media)),
            OpStatus::Fenced => self.fence(),
            OpStatus::SessionExpired => self.session_expired(slot),
        }
        true
    }

    fn succeed(&mut self, slot: usize, outcome: OpOutcome) {
        let op = &self.ops[slot];
        if let Origin::Watch(number) = op.origin
            && let (Some(link), Some(pg)) = (op.link, op.pg)
            && let Some(target) = self.pgs.get(&pg).and_then(|queue| queue.target)
            && let Some(watch) = self.watches.get_mut(&number)
        {
            watch.state = WatchState::Armed { link, pg, target };
        }
        if let Some(queue) = op.pg.and_then(|pg| self.pgs.get_mut(&pg)) {
            queue.pause = None;
        }
        self.finish(slot, Ok(outcome));
    }

    /// The op is to be sent again after a while or a new map. A primary whose interval has ended gives ops back that
    /// it may have applied.
    fn again_later(&mut self, slot: usize, reason: HoldReason) {
        let op = &mut self.ops[slot];
        op.maybe_applied = true;
        let Some(link) = op.link.take() else { return };
        self.links[link].return_credit();
        if let Some(queue) = op.pg.and_then(|pg| self.pgs.get_mut(&pg)) {
            queue.hold(self.now, reason);
        }
        if planted::active(Bug::ResendForgotten) {
            return;
        }
        self.enqueue(slot);
    }

    /// The PG has dropped this session's results. An op that cannot have been applied goes on in a new session.
    fn session_expired(&mut self, slot: usize) {
        let op = &mut self.ops[slot];
        if op.maybe_applied && op.request.kind.is_write() {
            self.begin_new_session();
            self.finish(slot, Err(IoError::MaybeApplied));
            return;
        }
        if let Some(link) = op.link.take() {
            self.links[link].return_credit();
        }
        if let Some(queue) = op.pg.and_then(|pg| self.pgs.get_mut(&pg)) {
            queue.returned(slot);
            queue.is_expired = true;
        }
        self.take_number(slot);
        self.enqueue(slot);
        self.begin_new_session();
    }

    /// The op begins anew: it gets another number when it is sent again.
    fn take_number(&mut self, slot: usize) {
        let op = &mut self.ops[slot];
        let number = std::mem::take(&mut op.number);
        op.timing.sends = 0;
        op.maybe_applied = false;
        self.numbers.remove(&number);
        if let Some(queue) = op.pg.and_then(|pg| self.pgs.get_mut(&pg)) {
            queue.forget(number);
        }
    }

    fn begin_new_session(&mut self) {
        if let Session::Live(session) = self.session {
            self.session = Session::Ending(session);
        }
    }

    /// When no op of the old session is left, a mon is asked for a new one. What was not applied for certain, or may be
    /// done twice, goes on in that. What is left may wait for a PG that is down, and for long: while nothing else is out,
    /// the other PGs go on in the old session, so that only the one that dropped it has to wait too.
    pub(super) fn renew_session<W: Wire>(&mut self, wire: &mut W) {
        let Session::Ending(_) = self.session else { return };
        let is_free = |op: &Op<O>| op.link.is_none() && !(op.maybe_applied && op.request.kind.is_write());
        for slot in self.slots_where(|op| op.number != 0 && is_free(op)) {
            if let Some(queue) = self.ops[slot].pg.and_then(|pg| self.pgs.get_mut(&pg)) {
                queue.ready.retain(|other| *other != slot);
            }
            self.take_number(slot);
            self.enqueue(slot);
        }
        self.is_renewal_stuck = self.numbers.values().all(|slot| self.ops[*slot].link.is_none());
        if !self.numbers.is_empty() {
            return;
        }
        self.is_renewal_stuck = false;
        self.pgs.values_mut().for_each(|queue| queue.is_expired = false);
        for link in 0..self.links.len() {
            if let Some(connection) = self.links[link].connection() {
                wire.close(connection);
                self.link_down(link);
                self.links[link].reset();
            }
        }
        if let Some(connection) = self.mon.connection() {
            wire.close(connection);
        }
        wire.forget_session();
        self.session = Session::None;
        self.mon.restart();
        self.dirty = true;
    }

    fn handle_notify(&mut self, link: usize, notify: Notify) {
        for (&number, watch) in &self.watches {
            let here = matches!(watch.state, WatchState::Armed { link: armed, .. } if armed == link);
            if here && watch.object == notify.object {
                self.notices.push_back(Notice { watch: number, version: notify.version });
            }
        }
    }

    pub(super) fn watch_ended(&mut self, number: u64, result: Result<OpOutcome, IoError>) {
        let Some(watch) = self.watches.get_mut(&number) else { return };
        match result {
            Ok(outcome) => self.notices.push_back(Notice { watch: number, version: outcome.version }),
            // Refused, or out of time: arm it again later. Other errors would only come again.
            Err(IoError::MaybeApplied | IoError::Timeout) => {
                watch.state = WatchState::Idle { until: self.now.after(REFUSED_PAUSE) };
            }
            Err(_) => {
                self.watches.remove(&number);
            }
        }
    }

    /// Arms watches that are not, or whose connection or primary has changed.
    pub(super) fn arm_watches(&mut self) {
        if self.session().is_none() || self.map.is_none() {
            return;
        }
        let mut idle = Vec::new();
        for (&number, watch) in &mut self.watches {
            if let WatchState::Armed { link, pg, target } = watch.state {
                let up = matches!(self.links[link].state, LinkState::Up { .. });
                let same = self.pgs.get(&pg).is_some_and(|queue| queue.target == Some(target));
                if !up || !same {
                    watch.state = WatchState::Idle { until: Instant(0) };
                }
            }
            if watch.deadline().is_some_and(|until| until <= self.now) {
                watch.state = WatchState::Arming;
                idle.push((number, watch.object));
            }
        }
        for (number, object) in idle {
            self.submit_from(self.now, ObjectOp::new(object, OpKind::Watch, 0, 0), Origin::Watch(number));
        }
    }

    pub(super) fn handle_down(&mut self, connection: ConnectionId, reason: LinkDown) {
        if MonLink::is_fence(reason)
            && (self.mon.is(connection) || self.links_by_connection.contains_key(&connection))
        {
            self.fence();
        }
        if self.mon.is(connection) {
            self.mon.down(self.now, reason);
        } else if let Some(&link) = self.links_by_connection.get(&connection) {
            self.link_down(link);
        }
    }

    /// The link is lost: its ops are sent again.
    pub(super) fn link_down(&mut self, link: usize) {
        let Some(connection) = self.links[link].connection() else { return };
        self.links_by_connection.remove(&connection);
        for slot in self.slots_where(|op| op.link == Some(link)) {
            self.take_back(slot);
        }
        self.links[link].down(self.now);
        self.dirty = true;
    }

    pub(super) fn slots_where(&self, which: impl Fn(&Op<O>) -> bool) -> Vec<usize> {
        self.ops.iter().filter(|(_, op)| which(op)).map(|(slot, _)| slot).collect()
    }

    /// The session is fenced: every op fails, for ever.
    pub(super) fn fence(&mut self) {
        self.session = Session::Fenced;
        self.watches.clear();
        for slot in self.slots_where(|_| true) {
            self.finish(slot, Err(IoError::Fenced));
        }
        self.mon.fail_all();
    }
}

fn returns_data(kind: OpKind) -> bool {
    matches!(kind, OpKind::Read | OpKind::Extents | OpKind::List | OpKind::Watchers)
}

/// Whether the data of a reply is what the op asked for.
fn fits(request: &ObjectOp, data: Option<&[u8]>) -> bool {
    let data = data.unwrap_or_default();
    match request.kind {
        OpKind::Read => data.len() == request.len as usize,
        OpKind::Extents => are_extents(data),
        OpKind::List => read_list(data, request.object.index).is_some(),
        OpKind::Watchers => read_sessions(data).is_some(),
        _ => data.is_empty(),
    }
}

/// Whether the bytes are entries in order, apart from each other, of blocks that an object can have. Runs may reach
/// beyond the range asked for: who uses them cuts them.
fn are_extents(data: &[u8]) -> bool {
    let mut end = 0;
    for (block, count) in extent_entries(data) {
        let first = u64::from(block);
        if first < end || count == 0 {
            return false;
        }
        end = first + u64::from(count);
    }
    end <= OBJECT_BLOCKS_MAX && data.len().is_multiple_of(EXTENT_LEN)
}

/// The entries of an `Extents` reply: first block and number of blocks. A torn last entry is left out.
pub(crate) fn extent_entries(data: &[u8]) -> impl Iterator<Item = (u32, u32)> {
    data.chunks_exact(EXTENT_LEN).filter_map(|entry| {
        let (block, count) = entry.split_at_checked(4)?;
        Some((u32::from_le_bytes(block.try_into().ok()?), u32::from_le_bytes(count.try_into().ok()?)))
    })
}
