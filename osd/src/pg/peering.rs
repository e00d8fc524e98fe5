//! A new interval: the members agree on the newest writes before the PG serves (`docs/peering.md`).
//!
//! Every member is needed in this form: nothing was acknowledged that is not on all of them, and the newest log
//! among them holds everything that any of them has.

use super::phase::{Activation, Fetch, Phase, Push, Round};
use super::replication::Credits;
use super::{Actions, Context, Pg, PgAction, PgStore, RETRY_INTERVAL, View, ticket};
use crate::store::api::{Change, PgMeta, PgStatus, SubmitError, Transaction};
use loligo_config::id::{Epoch, ObjectVersion, OpId, OsdId};
use loligo_net::wire::Message;
use loligo_net::wire::peering::{PeerActivate, PeerFetch, PeerInfo, PeerQuery};
use loligo_reactor::env::Instant;
use loligo_reactor::planted::{self, Bug};
use std::time::Duration;

/// Intervals of [`RETRY_INTERVAL`] without progress after which a round begins anew. Guessed.
const ROUNDS_WITHOUT_PROGRESS: u32 = 5;
/// How long until the members of an incomplete PG are asked again. Guessed: what changes an answer is mostly a restart,
/// and that is an event.
const INCOMPLETE_RETRY: Duration = Duration::from_secs(5);

/// What this member has promised and recorded, as far as it is durable, and what is on its way.
#[derive(Debug)]
pub struct Member {
    durable: PgMeta,
    pending: Option<(u64, PgMeta)>,
    next_number: u64,
    /// The primary (or this member itself, as primary) waits for a `PeerInfo`.
    answer_due: bool,
    /// The primary waits for a `PeerActivated`.
    activation_due: bool,
}

impl Member {
    /// As mounted: everything that the store has then is durable.
    pub fn new(status: PgStatus) -> Self {
        Self { durable: status.meta, pending: None, next_number: 0, answer_due: false, activation_due: false }
    }

    /// The newest interval durably promised.
    pub fn promised(&self) -> Epoch {
        self.durable.promised
    }

    /// The newest interval durably recorded as activated.
    pub fn activated(&self) -> Epoch {
        self.durable.activated
    }

    /// Replication from intervals older than this is refused, as soon as a promise is on its way.
    pub fn refuses_below(&self) -> Epoch {
        self.pending.map_or(self.durable.promised, |(_, meta)| meta.promised.max(self.durable.promised))
    }

    /// Whether an answer is owed.
    pub fn is_waiting(&self) -> bool {
        self.answer_due || self.activation_due
    }

    fn forget_questions(&mut self) {
        self.answer_due = false;
        self.activation_due = false;
    }
}

impl Pg {
    pub(super) fn set_phase(&mut self, next: Phase) {
        let (from, to) = (self.phase.kind(), next.kind());
        assert!(from.may_become(to), "{}: {from:?} cannot become {to:?}", self.id);
        self.phase = next;
    }

    pub(super) fn on_map<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        view: Option<View>,
        out: &mut Actions,
    ) {
        if view == self.view || matches!(self.phase, Phase::Failed) {
            self.view = view;
            return;
        }
        let was_primary = self.is_primary();
        self.abandon_ops(out);
        self.tail = None;
        self.replica.forget();
        self.member.forget_questions();
        self.view = view;
        let is_member = self.member_index(self.me).is_some();
        if was_primary && !self.is_primary() {
            let store = &*cx.store;
            self.watches.notify_all(self.id, |object| store.object_version(object), out);
            self.watches.clear();
        }
        match &self.view {
            Some(view) if is_member && !view.complete => self.set_phase(Phase::Down),
            Some(_) if self.is_primary() => self.begin_peering(cx, out),
            Some(_) if is_member => self.set_phase(Phase::Waiting),
            _ => self.set_phase(Phase::Idle),
        }
    }

    /// Begins a round: asks everybody, this member too.
    pub(super) fn begin_peering<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        self.abandon_ops(out);
        self.tail = None;
        let infos = self.acting().iter().map(|_| None).collect();
        self.set_phase(Phase::Querying(Round { infos, progress: cx.now }));
        self.member.answer_due = true;
        self.send_queries(cx, out);
        self.answer_query_when_drained(cx, out);
    }

    pub(super) fn send_queries<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        let query = Message::PeerQuery(PeerQuery { pg: self.id, interval: self.since() });
        let Phase::Querying(round) = &mut self.phase else { return };
        round.progress = cx.now;
        let members = self.view.as_ref().map_or(&[][..], |view| view.acting.as_slice());
        for (info, member) in round.infos.iter().zip(members) {
            if info.is_none() && *member != self.me {
                out.push_back(PgAction::Send { to: *member, message: query, payload: None });
            }
        }
    }

    // ------------------------------------------------------------------------------------ as a member

    pub(super) fn on_query<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        query: PeerQuery,
        out: &mut Actions,
    ) {
        if planted::active(Bug::OldQueryAnswered) && query.interval < self.since() {
            let info = PeerInfo { interval: self.since(), ..self.info(cx) };
            out.push_back(PgAction::Send { to: from, message: Message::PeerInfo(info), payload: None });
        }
        // A query of an older interval has no answer: its asker's map will say why, and every answer is a promise. One
        // from beyond this member's map is repeated until the map is here.
        if query.interval != self.since() || self.acting().first() != Some(&from) || self.is_primary() {
            return;
        }
        self.tail = None;
        self.member.answer_due = true;
        self.answer_query_when_drained(cx, out);
    }

    fn info<S: PgStore>(&self, cx: &Context<'_, S>) -> PeerInfo {
        let status = cx.store.status(self.id).unwrap_or_default();
        PeerInfo {
            pg: self.id,
            interval: self.member.promised(),
            activated: self.member.activated(),
            last: status.durable,
            committed: self.replication.committed(),
            incomplete: status.incomplete,
            space_credit: cx.store.grant(),
        }
    }

    /// Answers when the promise is durable and nothing that was appended before is still on its way: what the answer
    /// says is then final until the asker itself sends more.
    pub(super) fn answer_query_when_drained<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        out: &mut Actions,
    ) {
        if !self.member.answer_due || matches!(self.phase, Phase::Failed) {
            return;
        }
        if self.member.promised() != self.since() {
            let activated = self.member.activated();
            self.record(cx, PgMeta { promised: self.since(), activated });
            return;
        }
        let status = cx.store.status(self.id).unwrap_or_default();
        if status.last != status.durable {
            return;
        }
        self.member.answer_due = false;
        let info = self.info(cx);
        match self.acting().first().copied() {
            Some(primary) if primary == self.me => self.take_info(cx, 0, info, out),
            Some(to) => {
                out.push_back(PgAction::Send { to, message: Message::PeerInfo(info), payload: None });
            }
            None => {}
        }
    }

    /// Makes a promise or an activation durable; when the store has no room, it is tried again when it may have. In a map
    /// older than what is promised it does nothing, as primary too: a promise is never taken back.
    fn record<S: PgStore>(&mut self, cx: &mut Context<'_, S>, meta: PgMeta) {
        if self.member.pending.is_some() || meta.promised < self.member.promised() {
            return;
        }
        if planted::active(Bug::PromiseNotStored) && meta.activated != meta.promised {
            self.member.durable = meta;
            return;
        }
        let transaction = Transaction {
            pg: self.id,
            version: ObjectVersion::NONE,
            previous: cx.store.status(self.id).unwrap_or_default().last,
            op: OpId::default(),
            lowest_outstanding: 0,
            snap_seq: 0,
            change: Change::Meta(meta),
        };
        let number = self.member.next_number & ticket::NUMBER_MASK;
        match cx.store.submit(transaction, ticket::join(self.slot, ticket::Kind::Meta, number)) {
            Ok(()) => {
                self.member.pending = Some((number, meta));
                self.member.next_number += 1;
            }
            Err(SubmitError::Busy | SubmitError::NoSpace) => self.is_stalled = true,
            Err(SubmitError::Failed(_)) => self.phase = Phase::Failed,
            Err(error @ (SubmitError::NotNext { .. } | SubmitError::Invalid)) => {
                panic!("{}: the store refused what this member records: {error}", self.id)
            }
        }
    }

    pub(super) fn on_meta_commit<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        number: u64,
        out: &mut Actions,
    ) {
        let Some((_, meta)) = self.member.pending.take_if(|(pending, _)| *pending == number) else { return };
        assert!(meta.promised >= self.member.durable.promised, "{}: a promise is never taken back", self.id);
        self.member.durable = meta;
        self.finish_activation(cx, out);
    }

    pub(super) fn on_activate<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        activate: PeerActivate,
        out: &mut Actions,
    ) {
        let is_current = activate.interval == self.since() && self.member.promised() == activate.interval;
        if !is_current || self.is_primary() || self.acting().first() != Some(&from) {
            return;
        }
        let status = cx.store.status(self.id).unwrap_or_default();
        // Not what was agreed on: the primary sees no progress and asks everybody again.
        let is_agreed = status.durable == activate.last && status.last == activate.last;
        if (!is_agreed && !planted::active(Bug::TailSkipped)) || status.incomplete {
            return;
        }
        self.member.activation_due = true;
        self.finish_activation(cx, out);
    }

    /// Goes on with an activation on this member: record it, then say so.
    pub(super) fn finish_activation<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        if !self.member.activation_due || matches!(self.phase, Phase::Failed) {
            return;
        }
        let since = self.since();
        if self.member.activated() != since {
            return self.record(cx, PgMeta { promised: since, activated: since });
        }
        self.member.activation_due = false;
        if self.is_primary() {
            return self.become_active(cx, out);
        }
        if matches!(self.phase, Phase::Waiting) {
            self.set_phase(Phase::Following);
        }
        let last = cx.store.status(self.id).unwrap_or_default().durable;
        let message = Message::PeerActivated(PeerActivate { pg: self.id, interval: since, last });
        if let Some(to) = self.acting().first().copied() {
            out.push_back(PgAction::Send { to, message, payload: None });
        }
    }

    // ----------------------------------------------------------------------------------- as the primary

    pub(super) fn on_info<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        info: PeerInfo,
        out: &mut Actions,
    ) {
        let Some(index) = self.member_index(from) else { return };
        // A newer promise than this interval: a newer map is on its way here.
        if !self.is_primary() || info.interval != self.since() {
            return;
        }
        match &self.phase {
            Phase::Querying(_) => self.take_info(cx, index, info, out),
            Phase::Active => self.take_credit(index, info.space_credit),
            _ => {}
        }
    }

    fn take_info<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        index: usize,
        info: PeerInfo,
        out: &mut Actions,
    ) {
        let Phase::Querying(round) = &mut self.phase else { return };
        round.progress = cx.now;
        round.infos[index] = Some(info);
        if round.infos.iter().all(Option::is_some) {
            self.choose(cx, out);
        }
    }

    fn take_round(&mut self, now: Instant) -> Round {
        let round = self.phase.round_mut().expect("only called in a peering state");
        round.progress = now;
        Round { infos: std::mem::take(&mut round.infos), progress: now }
    }

    /// All answers are in: the newest history is the one to have.
    fn choose<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        let round = self.take_round(cx.now);
        let infos = || round.infos.iter().flatten();
        let Some(chosen) = infos().map(|info| (info.activated, info.last)).max() else { return };
        let newest = infos().map(|info| info.last).max();
        let shortest = infos().map(|info| (info.activated, info.last)).min().unwrap_or(chosen);
        let is_short = planted::active(Bug::ShortestChosen);
        let (chosen, newest) = if is_short { (shortest, Some(shortest.1)) } else { (chosen, newest) };
        if infos().any(|info| info.incomplete) || newest != Some(chosen.1) {
            return self.give_up_choosing(cx.now);
        }
        let own = round.infos[0].map_or(ObjectVersion::NONE, |info| info.last);
        let last = chosen.1;
        if own == last {
            return self.push_next(cx, Push { round, last }, out);
        }
        let source = infos().position(|info| info.last == last).expect("the maximum is one of them");
        let fetch = PeerFetch { pg: self.id, interval: self.since(), since: own };
        let to = self.acting()[source];
        out.push_back(PgAction::Send { to, message: Message::PeerFetch(fetch), payload: None });
        self.set_phase(Phase::Fetching(Fetch { round, source, last, is_sent: false }));
    }

    /// Whether everything that was fetched is durable here; then the others get it.
    pub(super) fn finish_fetch<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        let Phase::Fetching(fetch) = &self.phase else { return };
        let status = cx.store.status(self.id).unwrap_or_default();
        if !fetch.is_sent || status.durable != fetch.last || status.last != fetch.last {
            return;
        }
        let last = fetch.last;
        let mut round = self.take_round(cx.now);
        if let Some(info) = &mut round.infos[0] {
            info.last = last;
        }
        self.push_next(cx, Push { round, last }, out);
    }

    /// Begins to push to the next member that is behind; when none is, activates.
    fn push_next<S: PgStore>(&mut self, cx: &mut Context<'_, S>, push: Push, out: &mut Actions) {
        let is_skipped = planted::active(Bug::TailSkipped);
        let behind = |info: &Option<PeerInfo>| !is_skipped && info.is_some_and(|info| info.last != push.last);
        let Some(index) = push.round.infos.iter().position(behind) else {
            return self.begin_activation(cx, push, out);
        };
        let since = push.round.infos[index].map_or(ObjectVersion::NONE, |info| info.last);
        let (to, last) = (self.acting()[index], push.last);
        if matches!(self.phase, Phase::Pushing(_)) {
            self.phase = Phase::Pushing(push);
        } else {
            self.set_phase(Phase::Pushing(push));
        }
        // Either the kept log does not reach back, or the member has writes that the chosen log has not.
        if self.begin_tail(cx, to, since, last, out).is_none() {
            self.give_up_choosing(cx.now);
        }
    }

    /// No history can be chosen as things are.
    pub(super) fn give_up_choosing(&mut self, now: Instant) {
        self.set_phase(Phase::Incomplete { retry_at: now.after(INCOMPLETE_RETRY) });
    }

    /// The member `to` has everything.
    pub(super) fn push_complete<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        to: OsdId,
        out: &mut Actions,
    ) {
        let Some(index) = self.member_index(to) else { return };
        let Phase::Pushing(push) = &self.phase else { return };
        let last = push.last;
        let mut round = self.take_round(cx.now);
        if let Some(info) = &mut round.infos[index] {
            info.last = last;
        }
        self.push_next(cx, Push { round, last }, out);
    }

    fn begin_activation<S: PgStore>(&mut self, cx: &mut Context<'_, S>, push: Push, out: &mut Actions) {
        let Push { round, last } = push;
        let status = cx.store.status(self.id).unwrap_or_default();
        assert!(status.durable == last, "{}: activates with less than it chose", self.id);
        assert!(status.last == last, "{}: activates with more than it chose", self.id);
        let missing = super::replication::mask_of(self.acting().len());
        self.set_phase(Phase::Activating(Activation { round, last, missing }));
        self.send_activations(out);
        self.activate_self_last(cx, out);
    }

    fn send_activations(&self, out: &mut Actions) {
        let Phase::Activating(activation) = &self.phase else { return };
        let activate = PeerActivate { pg: self.id, interval: self.since(), last: activation.last };
        for (index, member) in self.acting().iter().enumerate().skip(1) {
            if activation.missing & (1 << index) != 0 {
                let message = Message::PeerActivate(activate);
                out.push_back(PgAction::Send { to: *member, message, payload: None });
            }
        }
    }

    pub(super) fn on_activated<S: PgStore>(
        &mut self,
        cx: &mut Context<'_, S>,
        from: OsdId,
        activated: PeerActivate,
        out: &mut Actions,
    ) {
        let Some(index) = self.member_index(from) else { return };
        let since = self.since();
        let Phase::Activating(activation) = &mut self.phase else { return };
        if activated.interval != since || activated.last != activation.last || index == 0 {
            return;
        }
        activation.missing &= !(1 << index);
        activation.round.progress = cx.now;
        self.activate_self_last(cx, out);
    }

    /// The primary records the interval after all others have.
    fn activate_self_last<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        let Phase::Activating(activation) = &self.phase else { return };
        if activation.missing == 1 {
            self.member.activation_due = true;
            self.finish_activation(cx, out);
        }
    }

    fn become_active<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        let Phase::Activating(activation) = &self.phase else { return };
        let last = activation.last;
        let credits: Credits =
            activation.round.infos.iter().map(|info| info.map_or(0, |info| info.space_credit)).collect();
        self.replication.begin(last, credits);
        self.set_phase(Phase::Active);
        let store = &*cx.store;
        self.watches.notify_all(self.id, |object| store.object_version(object), out);
    }

    /// A lost message, a store that had no room: ask again, and after a while begin anew.
    pub(super) fn retry_peering<S: PgStore>(&mut self, cx: &mut Context<'_, S>, out: &mut Actions) {
        self.finish_activation(cx, out);
        self.advance_tail(cx, out);
        if matches!(self.phase, Phase::Incomplete { retry_at } if retry_at <= cx.now) {
            self.begin_peering(cx, out);
        }
        let Some(round) = self.phase.round_mut() else { return };
        let idle = cx.now.since(round.progress);
        if idle < RETRY_INTERVAL {
            return;
        }
        if matches!(self.phase, Phase::Querying(_)) {
            self.send_queries(cx, out);
        } else if idle >= RETRY_INTERVAL * ROUNDS_WITHOUT_PROGRESS {
            self.begin_peering(cx, out);
        } else {
            self.send_activations(out);
        }
    }
}
