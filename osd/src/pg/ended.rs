//! Writes that were answered and left nothing in the log: they changed nothing, or were refused for good.
//!
//! The op-id table does not know them. A copy of such an op may still be on its way over a connection that its client
//! has given up, and must not take effect after the answer: somebody else may have written to its blocks since.
//! Memory is enough: a copy is on a connection of this process, and ends with it.

use loligo_config::id::{ObjectVersion, OpId, SessionId};
use loligo_config::limits::{PG_SESSIONS_MAX, SESSION_RESULTS_MAX};
use loligo_net::wire::op::OpStatus;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
struct Session {
    /// Everything below has ended, by the client's own word.
    lowest: u64,
    answers: BTreeMap<u64, (OpStatus, ObjectVersion)>,
}

/// What is known of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Nothing.
    New,
    /// It was answered like this.
    Answered(OpStatus, ObjectVersion),
    /// Its client has the end of it.
    Over,
}

/// The answers, by session: as many as a client may have outstanding.
#[derive(Debug, Default)]
pub struct Ended {
    sessions: BTreeMap<SessionId, Session>,
}

impl Ended {
    /// Notes that an op was answered.
    pub fn record(&mut self, op: OpId, status: OpStatus, version: ObjectVersion) {
        let session = self.sessions.entry(op.session).or_default();
        session.answers.insert(op.number, (status, version));
        if session.answers.len() > SESSION_RESULTS_MAX
            && let Some((number, _)) = session.answers.pop_first()
        {
            session.lowest = session.lowest.max(number + 1);
        }
        if self.sessions.len() > PG_SESSIONS_MAX {
            self.sessions.pop_first();
        }
    }

    /// What became of an op that has arrived; it tells which ones before it have ended.
    pub fn lookup(&mut self, op: OpId, lowest_outstanding: u64) -> Lookup {
        let Some(session) = self.sessions.get_mut(&op.session) else { return Lookup::New };
        if lowest_outstanding > session.lowest {
            session.lowest = lowest_outstanding;
            session.answers = session.answers.split_off(&lowest_outstanding);
        }
        if op.number < session.lowest {
            return Lookup::Over;
        }
        let answer = session.answers.get(&op.number);
        answer.map_or(Lookup::New, |(status, version)| Lookup::Answered(*status, *version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(session: u64, number: u64) -> OpId {
        OpId { session: SessionId(session), number }
    }

    #[test]
    fn an_answer_is_known_until_its_client_has_it_and_refused_from_then_on() {
        let mut ended = Ended::default();
        assert_eq!(ended.lookup(op(1, 5), 5), Lookup::New);
        ended.record(op(1, 5), OpStatus::Done, ObjectVersion::NONE);
        assert_eq!(ended.lookup(op(1, 5), 5), Lookup::Answered(OpStatus::Done, ObjectVersion::NONE));
        assert_eq!(ended.lookup(op(2, 5), 5), Lookup::New, "another session");
        assert_eq!(ended.lookup(op(1, 7), 5), Lookup::New);
        assert_eq!(ended.lookup(op(1, 8), 6), Lookup::New);
        assert_eq!(ended.lookup(op(1, 5), 5), Lookup::Over);
    }

    #[test]
    fn memory_is_bounded() {
        let mut ended = Ended::default();
        for number in 1..=SESSION_RESULTS_MAX as u64 + 10 {
            ended.record(op(1, number), OpStatus::NoSpace, ObjectVersion::NONE);
        }
        assert_eq!(ended.sessions[&SessionId(1)].answers.len(), SESSION_RESULTS_MAX);
        assert_eq!(ended.lookup(op(1, 10), 1), Lookup::Over, "left out, and so refused");
        for session in 2..=PG_SESSIONS_MAX as u64 + 10 {
            ended.record(op(session, 1), OpStatus::NoSpace, ObjectVersion::NONE);
        }
        assert_eq!(ended.sessions.len(), PG_SESSIONS_MAX);
    }
}
