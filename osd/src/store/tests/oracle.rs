//! What a store must hold, worked out from what it was asked and what it answered, without its code.
//!
//! The promise: after a crash the state is what some prefix of the transactions in flight makes of everything acked,
//! each of them wholly or not at all, in the order of submission.

use super::device::Rng;
use crate::store::api::{LogKind, OpLookup, PgMeta};
use loligo_config::id::*;
use loligo_reactor::env::Ticket;
use std::collections::{BTreeMap, VecDeque};

/// Entries of a PG's log that are compared.
pub const LOG_COMPARED: u64 = 30;

/// Contents of every object of a PG, and its version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PgModel {
    pub last: ObjectVersion,
    pub meta: PgMeta,
    pub objects: BTreeMap<ObjectId, (ObjectVersion, BTreeMap<u32, u64>)>,
    /// The newest entries of its log.
    pub log: VecDeque<Logged>,
    /// The results of its ops per session, with the lowest number that is still asked for.
    pub results: BTreeMap<SessionId, (u64, BTreeMap<u64, ObjectVersion>)>,
}

/// One entry of a PG's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logged {
    pub version: ObjectVersion,
    pub previous: ObjectVersion,
    pub op: OpId,
    pub kind: LogKind,
    pub range: (ObjectId, u32, u32),
}

pub type Model = BTreeMap<PgId, PgModel>;

/// What a transaction does to the model.
#[derive(Clone, Debug)]
pub struct Step {
    pub pg: PgId,
    pub version: ObjectVersion,
    pub op: OpId,
    pub lowest: u64,
    pub what: What,
}

#[derive(Clone, Debug)]
pub enum What {
    Write(ObjectId, u32, Vec<u64>),
    Free(ObjectId, u32, u32),
    Remove(ObjectId),
    Result,
    Meta(PgMeta),
    RemovePg,
}

fn logged(step: &Step) -> (LogKind, (ObjectId, u32, u32)) {
    match &step.what {
        What::Write(object, block, stamps) => (LogKind::Write, (*object, *block, stamps.len() as u32)),
        What::Free(object, block, count) => (LogKind::Free, (*object, *block, *count)),
        What::Remove(object) => (LogKind::Remove, (*object, 0, u32::MAX)),
        _ => (LogKind::Result, (ObjectId::default(), 0, 0)),
    }
}

pub fn apply(model: &mut Model, step: &Step) {
    if matches!(step.what, What::RemovePg) {
        model.remove(&step.pg);
        return;
    }
    let state = model.entry(step.pg).or_default();
    match &step.what {
        What::Write(object, block, stamps) => {
            let entry = state.objects.entry(*object).or_default();
            entry.0 = step.version;
            entry.1.extend((*block..).zip(stamps.iter().copied()));
        }
        What::Free(object, block, count) => {
            if let Some(entry) = state.objects.get_mut(object) {
                entry.0 = step.version;
                entry.1.retain(|at, _| *at < *block || *at >= block + count);
            }
        }
        What::Remove(object) => {
            state.objects.remove(object);
        }
        What::Result | What::RemovePg => (),
        What::Meta(meta) => {
            state.meta = *meta;
            return;
        }
    }
    let (kind, range) = logged(step);
    let previous = std::mem::replace(&mut state.last, step.version);
    state.log.push_back(Logged { version: step.version, previous, op: step.op, kind, range });
    if state.log.len() as u64 > LOG_COMPARED {
        state.log.pop_front();
    }
    let session = state.results.entry(step.op.session).or_default();
    session.0 = session.0.max(step.lowest);
    session.1.insert(step.op.number, step.version);
    session.1 = session.1.split_off(&session.0);
}

impl PgModel {
    /// What the op-id table must say.
    pub fn lookup(&self, op: OpId) -> OpLookup {
        match self.results.get(&op.session) {
            Some((lowest, _)) if op.number < *lowest => OpLookup::Forgotten,
            Some((_, results)) => {
                results.get(&op.number).map_or(OpLookup::New, |version| OpLookup::Applied(*version))
            }
            None => OpLookup::New,
        }
    }

    fn shows(&self, seen: &PgModel) -> bool {
        self.last == seen.last
            && self.meta == seen.meta
            && self.objects == seen.objects
            && self.log == seen.log
    }
}

/// What a client of the store knows.
#[derive(Clone, Debug)]
pub struct Oracle {
    /// Everything acked.
    pub acked: Model,
    /// Everything submitted.
    pub current: Model,
    /// Submitted and not acked, in order.
    pub pending: VecDeque<(Ticket, Step)>,
    /// The newest map known to be durable, and those given since; 0 stands for none.
    pub maps: Vec<Epoch>,
    pub committed: u64,
}

impl Default for Oracle {
    fn default() -> Self {
        Self {
            acked: Model::new(),
            current: Model::new(),
            pending: VecDeque::new(),
            maps: vec![Epoch(0)],
            committed: 0,
        }
    }
}

/// What was seen of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub model: Model,
    /// 0: none.
    pub map: Epoch,
    /// What the op-id table said of each op that it was asked about.
    pub lookups: Vec<(PgId, OpId, OpLookup)>,
}

/// The contents of a kept map: they differ in length too.
pub fn map_bytes(epoch: Epoch) -> Vec<u8> {
    let mut rng = Rng(u64::from(epoch.0));
    let len = 3000 + rng.below(7000);
    (0..len).map(|_| rng.next() as u8).collect()
}

impl Oracle {
    pub fn submitted(&mut self, ticket: Ticket, step: Step) {
        apply(&mut self.current, &step);
        self.pending.push_back((ticket, step));
    }

    pub fn committed(&mut self, ticket: Ticket) {
        let (expected, step) = self.pending.pop_front().expect("something was pending");
        assert_eq!(ticket, expected, "commits come in order");
        apply(&mut self.acked, &step);
        self.committed += 1;
    }

    /// The newest map that was given is durable.
    pub fn map_durable(&mut self) {
        self.maps.drain(..self.maps.len() - 1);
    }

    /// Every op whose result may be known.
    pub fn ops(&self) -> Vec<(PgId, OpId)> {
        let mut ops: Vec<_> = self.pending.iter().map(|(_, step)| (step.pg, step.op)).collect();
        for (pg, state) in &self.acked {
            for (session, (lowest, results)) in &state.results {
                let numbers = results.keys().copied().chain(lowest.checked_sub(1));
                ops.extend(numbers.map(|number| (*pg, OpId { session: *session, number })));
            }
        }
        ops.retain(|(_, op)| *op != OpId::default());
        ops
    }

    /// Takes what was seen after a crash for the state; `Err` if no legal crash leaves it.
    pub fn resolve(&mut self, seen: &Seen) -> Result<(), String> {
        let mut model = self.acked.clone();
        let mut steps = self.pending.iter();
        while !explains(&model, seen) {
            let Some((_, step)) = steps.next() else {
                return Err(self.unexplained(seen));
            };
            apply(&mut model, step);
        }
        if !self.maps.contains(&seen.map) {
            return Err(format!("found the map of {}, expected one of {:?}", seen.map, self.maps));
        }
        self.maps = vec![seen.map];
        self.pending.clear();
        self.acked.clone_from(&model);
        self.current = model;
        Ok(())
    }

    fn unexplained(&self, seen: &Seen) -> String {
        let pending: Vec<_> = self.pending.iter().map(|(_, step)| step).collect();
        let brief = |model: &Model| {
            let pgs =
                model.iter().map(|(id, pg)| format!("{id}: {:?} {:?} {:?}", pg.last, pg.meta, pg.objects));
            pgs.collect::<Vec<_>>().join("\n  ")
        };
        format!(
            "no prefix of what was in flight makes this of what was acked\nseen:\n  {}\nacked:\n  {}\n\
             pending: {pending:?}\nlookups: {:?}",
            brief(&seen.model),
            brief(&self.acked),
            seen.lookups,
        )
    }
}

fn explains(model: &Model, seen: &Seen) -> bool {
    let ops = seen.lookups.iter();
    model.len() == seen.model.len()
        && model.iter().zip(&seen.model).all(|((id, pg), (seen_id, seen))| id == seen_id && pg.shows(seen))
        && ops
            .into_iter()
            .all(|(pg, op, found)| model.get(pg).map_or(OpLookup::New, |pg| pg.lookup(*op)) == *found)
}
