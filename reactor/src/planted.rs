//! Planted bugs: mistakes that a test build can make on purpose, to see whether the checkers notice.
//!
//! The code that makes a mistake stands where the mistake would be, as one line that asks [`active`]. Without the cargo
//! feature `planted` that is a constant `false`, and the line is not in the program. With it, [`choose`] picks one bug
//! for the calling thread; a thread that has chosen none takes the one that the environment variable
//! [`VARIABLE`] names, so that the suites of other packages can be run with a bug too.

macro_rules! bugs {
    ($($(#[doc = $doc:literal])+ $bug:ident,)+) => {
        /// A mistake that would lose, corrupt, double or stall something.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Bug {
            $($(#[doc = $doc])+ $bug,)+
        }

        #[cfg(feature = "planted")]
        impl Bug {
            /// All of them, in the order of the path of a write.
            pub const ALL: &'static [Self] = &[$(Self::$bug,)+];

            /// What it does, in a line.
            pub fn description(self) -> &'static str {
                match self {
                    $(Self::$bug => concat!($($doc),+).trim_ascii(),)+
                }
            }
        }
    };
}

bugs! {
    /// The client sends an op again under a new op id.
    ResendWithNewId,
    /// The client does not send an op again that a primary gave back.
    ResendForgotten,
    /// The client does not wait for an earlier write to the same blocks.
    WriteOvertakesWrite,
    /// The client never gets the credit of an op back.
    CreditLeak,
    /// Every piece of a request that is cut carries the data of the first one.
    PieceShifted,
    /// The checksums of received data are not looked at.
    FrameDataUnchecked,
    /// A frame that is missing or comes twice goes unnoticed.
    FrameSequenceUnchecked,
    /// The mon publishes a map that it has not made durable.
    MapNotDurable,
    /// A restarted mon hands out the sessions of the one before.
    SessionsReused,
    /// The reply to an op from another core goes to the connection of this core that has the same number.
    ForwardedReplyMisrouted,
    /// Answers to a primary go to the first connection that it ever opened.
    PeerAnsweredOnOldConnection,
    /// The reply to an op that was sent again goes to where it came from first.
    ReplyToOldConnection,
    /// A late copy of an op, from a connection that is gone, takes the reply along.
    ReplyToLateCopy,
    /// An op that was applied before is applied again.
    OpTableIgnored,
    /// A checkpoint leaves out the table of op ids.
    OpTableNotStored,
    /// A late copy of an op that has ended is applied.
    LateCopyApplied,
    /// A discard takes the block behind it along.
    DiscardTakesNeighbour,
    /// Zeroes are not written to the last block of a range.
    WriteZeroesShort,
    /// A write that the store refuses has taken a version.
    VersionWithoutWrite,
    /// The primary answers a write when its own copy is durable.
    AckBeforeSecondCopy,
    /// The primary answers a write when the replicas have it.
    AckBeforeOwnCopy,
    /// The refusal of a replica for a gap counts as a copy.
    GapCountsAsCopy,
    /// A replica acknowledges a write when it is submitted.
    ReplicaAcksEarly,
    /// A replica takes writes of an older interval.
    IntervalUnchecked,
    /// A replica takes a write that does not follow its last one.
    GapUnchecked,
    /// A member answers a peering query before its promise is stored.
    PromiseNotStored,
    /// A member answers a query of an older interval with what it has not promised yet.
    OldQueryAnswered,
    /// The primary chooses the shortest history.
    ShortestChosen,
    /// The members do not agree on the tail before they serve.
    TailSkipped,
    /// A tail leaves out its discards.
    TailWithoutDiscards,
    /// A tail leaves out writes of which a later one replaces a part.
    TailWithoutOverlapped,
    /// A commit is told when its record is sent to the device.
    CommitBeforeDurable,
    /// A commit is told while earlier positions of the log are not durable.
    CommitOutOfOrder,
    /// A log record goes to a device with a volatile cache without FUA.
    RecordWithoutFua,
    /// A superseded block is used again before the record that superseded it is durable.
    ReuseBeforeRecord,
    /// A superseded block is used again as soon as the record is durable, before a mark says so.
    ReuseBeforeMark,
    /// A superseded block is used again while a read that has its address is under way.
    ReuseUnderRead,
    /// A discarded block is used again while the discard is under way.
    ReuseUnderDiscard,
    /// Overwriting the middle of an extent misplaces what is behind it.
    ExtentTailMisplaced,
    /// A read of blocks that are being written does not wait for the write.
    ReadOvertakesWrite,
    /// The checksum of a block is not looked at when it is read.
    BlockUnchecked,
    /// A checkpoint's anchor is written before its pages are flushed.
    CheckpointWithoutFlush,
    /// A checkpoint's anchor goes to a volatile cache without FUA.
    AnchorWithoutFua,
    /// A checkpoint claims to hold one record more than it does.
    CheckpointCoversTooMuch,
    /// A checkpoint frees the block of a record that it does not hold.
    CheckpointFreesLiveRecord,
    /// A checkpoint writes buckets as they are and not as they were when it began.
    CheckpointNotExact,
    /// A mount does not flush the volatile cache after the replay.
    MountWithoutFlush,
    /// A mount takes records that an earlier mount has cut off.
    OldGenerationAccepted,
    /// The checksum of a log record is not looked at.
    RecordUnchecked,
    /// A mount cuts the log at the first gap, also below a durable mark.
    CutBelowMark,
    /// A mount takes a record of the tail whose data is torn.
    TornTailAccepted,
    /// A mount takes a record of the tail whose scattered data is torn.
    TornScatteredAccepted,
}

/// The environment variable that names the bug of every thread that has not chosen one.
#[cfg(feature = "planted")]
pub const VARIABLE: &str = "LOLIGO_PLANTED";

/// Whether the mistake is to be made.
#[cfg(not(feature = "planted"))]
#[inline(always)]
pub const fn active(_: Bug) -> bool {
    false
}

#[cfg(feature = "planted")]
pub use chosen::{active, choose};

#[cfg(feature = "planted")]
mod chosen {
    use super::{Bug, VARIABLE};
    use std::cell::Cell;

    impl Bug {
        /// By name, as `Debug` prints it.
        pub fn by_name(name: &str) -> Option<Self> {
            Self::ALL.iter().find(|bug| format!("{bug:?}") == name).copied()
        }
    }

    thread_local! {
        static CHOSEN: Cell<Option<Bug>> = Cell::new(named());
    }

    fn named() -> Option<Bug> {
        let name = std::env::var(VARIABLE).ok()?;
        Some(Bug::by_name(&name).unwrap_or_else(|| panic!("{VARIABLE} names no planted bug: {name}")))
    }

    /// The bug of this thread from now on.
    pub fn choose(bug: Option<Bug>) {
        CHOSEN.set(bug);
    }

    /// Whether the mistake is to be made.
    pub fn active(bug: Bug) -> bool {
        CHOSEN.get() == Some(bug)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn one_bug_is_active_at_a_time_and_names_are_found() {
            choose(Some(Bug::CutBelowMark));
            let active: Vec<_> = Bug::ALL.iter().filter(|bug| active(**bug)).collect();
            assert_eq!(active, [&Bug::CutBelowMark]);
            choose(None);
            assert!(!super::active(Bug::CutBelowMark));
            for bug in Bug::ALL {
                assert_eq!(Bug::by_name(&format!("{bug:?}")), Some(*bug));
                assert!(bug.description().ends_with('.'), "{bug:?}");
            }
        }
    }
}
