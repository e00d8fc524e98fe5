//! The states of a PG and which may follow which (`docs/peering.md` has the picture with the messages).
//!
//! ```text
//!   from \ on    new interval, all up   new interval,   all answers in            tail complete   recorded
//!                primary | replica      one down        (choice made)                             everywhere
//!   any          Querying| Waiting      Down            -                         -               -
//!   Querying                                            Fetching (I am behind)
//!                                                       Pushing  (others are)
//!                                                       Activating (nobody is)
//!                                                       Incomplete (cannot choose)
//!   Fetching                                                                      Pushing | Activating | Incomplete
//!   Pushing                                                                       Activating | Incomplete
//!   Activating                                                                                    Active
//!   Active                                                                                        -
//!   Waiting                                                                                       Following
//!   Querying, Fetching, Pushing, Activating --(a connection closes, no progress)--> Querying
//!   Incomplete --(a member comes back, after a while)--> Querying
//!   Active --(a replica refuses for good)--> Querying        any --(the device fails)--> Failed
//!   any --(not a member any more)--> Idle
//! ```

use super::PerMember;
use loligo_config::id::ObjectVersion;
use loligo_net::wire::mon::PgState;
use loligo_net::wire::peering::PeerInfo;
use loligo_reactor::env::Instant;

/// The state of a PG on one member.
#[derive(Debug)]
pub enum Phase {
    /// No map yet, or not a member.
    Idle,
    /// A member of the acting set is down: nobody serves.
    Down,
    /// Replica: waits for the primary to query, push and activate.
    Waiting,
    /// Replica: takes writes of this interval.
    Following,
    /// Primary: waits for the answer of every member.
    Querying(Round),
    /// Primary: has not the newest writes and gets them.
    Fetching(Fetch),
    /// Primary: brings the other members up to the newest write, one after the other.
    Pushing(Push),
    /// Primary: waits until every member has recorded the interval.
    Activating(Activation),
    /// Primary: serves.
    Active,
    /// It cannot choose a history: a member's is broken, or the kept logs do not meet. The members are asked again when one
    /// comes back, and at this time.
    Incomplete {
        /// When.
        retry_at: Instant,
    },
    /// The device failed.
    Failed,
}

/// The answers of one round of peering.
#[derive(Debug)]
pub struct Round {
    /// By member, in the order of the acting set.
    pub infos: PerMember<Option<PeerInfo>>,
    /// When the last progress was made, or the last question sent.
    pub progress: Instant,
}

/// A tail on its way to the primary.
#[derive(Debug)]
pub struct Fetch {
    /// The round.
    pub round: Round,
    /// The member that sends it.
    pub source: usize,
    /// The newest write there: what the PG will have.
    pub last: ObjectVersion,
    /// Whether the source has sent everything.
    pub is_sent: bool,
}

/// A tail on its way to other members.
#[derive(Debug)]
pub struct Push {
    /// The round; a member's `last` rises when it has everything.
    pub round: Round,
    /// What the PG will have.
    pub last: ObjectVersion,
}

/// The record of the interval on every member.
#[derive(Debug)]
pub struct Activation {
    /// The round.
    pub round: Round,
    /// What the PG has.
    pub last: ObjectVersion,
    /// Members that have not recorded it, a bit each; this one is bit 0 and the last to do so.
    pub missing: u8,
}

/// A state without what it carries, for the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the variant of `Phase` with its name")]
pub enum PhaseKind {
    Idle,
    Down,
    Waiting,
    Following,
    Querying,
    Fetching,
    Pushing,
    Activating,
    Active,
    Incomplete,
    Failed,
}

impl PhaseKind {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Idle,
        Self::Down,
        Self::Waiting,
        Self::Following,
        Self::Querying,
        Self::Fetching,
        Self::Pushing,
        Self::Activating,
        Self::Active,
        Self::Incomplete,
        Self::Failed,
    ];

    /// Whether `next` may follow: the table at the top of the file.
    pub fn may_become(self, next: Self) -> bool {
        use PhaseKind as K;
        match (self, next) {
            // A failed device stays failed until the process starts again.
            (K::Failed, next) => next == K::Failed,
            (_, K::Idle | K::Down | K::Waiting | K::Querying | K::Failed) => true,
            (K::Querying, K::Fetching | K::Pushing | K::Activating | K::Incomplete) => true,
            (K::Fetching, K::Pushing | K::Activating | K::Incomplete) => true,
            (K::Pushing, K::Activating | K::Incomplete) => true,
            (K::Activating, K::Active) | (K::Waiting, K::Following) => true,
            _ => false,
        }
    }
}

impl Phase {
    /// Which it is.
    pub fn kind(&self) -> PhaseKind {
        match self {
            Self::Idle => PhaseKind::Idle,
            Self::Down => PhaseKind::Down,
            Self::Waiting => PhaseKind::Waiting,
            Self::Following => PhaseKind::Following,
            Self::Querying(_) => PhaseKind::Querying,
            Self::Fetching(_) => PhaseKind::Fetching,
            Self::Pushing(_) => PhaseKind::Pushing,
            Self::Activating(_) => PhaseKind::Activating,
            Self::Active => PhaseKind::Active,
            Self::Incomplete { .. } => PhaseKind::Incomplete,
            Self::Failed => PhaseKind::Failed,
        }
    }

    /// Whether the primary works on making the PG active.
    pub fn is_peering(&self) -> bool {
        matches!(self, Self::Querying(_) | Self::Fetching(_) | Self::Pushing(_) | Self::Activating(_))
    }

    /// What the mon is told.
    pub fn reported(&self) -> Option<PgState> {
        Some(match self {
            Self::Idle => return None,
            Self::Down | Self::Failed => PgState::Down,
            Self::Active => PgState::Active,
            Self::Incomplete { .. } => PgState::Incomplete,
            _ => PgState::Peering,
        })
    }

    /// The round of a peering state.
    pub fn round_mut(&mut self) -> Option<&mut Round> {
        match self {
            Self::Querying(round) => Some(round),
            Self::Fetching(fetch) => Some(&mut fetch.round),
            Self::Pushing(push) => Some(&mut push.round),
            Self::Activating(activation) => Some(&mut activation.round),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Service begins in one way alone: after activation, which follows a choice.
    #[test]
    fn only_activation_leads_to_service() {
        for from in PhaseKind::ALL {
            assert_eq!(from.may_become(PhaseKind::Active), from == PhaseKind::Activating, "{from:?}");
            assert_eq!(from.may_become(PhaseKind::Following), from == PhaseKind::Waiting, "{from:?}");
        }
    }

    #[test]
    fn an_incomplete_pg_needs_a_new_round() {
        for next in [PhaseKind::Fetching, PhaseKind::Pushing, PhaseKind::Activating, PhaseKind::Active] {
            assert!(!PhaseKind::Incomplete.may_become(next));
        }
        assert!(PhaseKind::Incomplete.may_become(PhaseKind::Querying));
    }

    #[test]
    fn nothing_follows_a_failed_device() {
        for next in PhaseKind::ALL {
            assert_eq!(PhaseKind::Failed.may_become(next), next == PhaseKind::Failed);
        }
    }
}
