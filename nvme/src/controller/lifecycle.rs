//! The controller's life as a state machine: reset, enable, faults, shutdown (NVMe Base 2.0 §3.5, §3.6).
//!
//! ```text
//!            begin                RDY=0                  RDY=1              configured
//!   New ──────────────▶ Stopping ───────▶ Starting ────────────▶ Configuring ─────────▶ Live
//!                        ▲    │            │   │ CFS, too late,      │ refused,           │  │
//!                        │    │            │   │ tries left          │ tries left         │  │ close
//!                        ├────┼────────────┼───┴─────────────────────┘                    │  ▼
//!                        └────┼────────────┼── fault: timeout, CFS, asked for ◀───────────┘ ShuttingDown
//!                             │ RDY stuck  │ no tries left                                    │ SHST=10b or too late
//!                             ▼            ▼                                                  ▼
//!                           Failed ◀── registers read as all ones, in every state           Closing ──RDY=0──▶ Closed
//! ```
//! It takes one event and the time, and answers with at most one action; it sees neither registers nor memory. Entering
//! `Failed` and `Closed` asks for the device to be cut off from memory.

use crate::spec::registers::Csts;
use loligo_reactor::env::Instant;
use std::time::Duration;

/// Resets in a row that do not lead to `Live`, after which the controller is failed.
pub const RESETS_MAX: u32 = 3;
/// Longest time for a shutdown. The controller's own figure (RTD3E) is often missing; Linux waits this long by default.
pub const SHUTDOWN_MAX: Duration = Duration::from_secs(5);

/// Why a controller is given up, or was reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// All ones: unplugged, or its link is down.
    #[error("the device is gone (its registers read as all ones)")]
    Gone,
    /// The system wants it back.
    #[error("the system wants the device back (it is being unplugged or rebound)")]
    WantedBack,
    /// CSTS.CFS.
    #[error("the controller reports a fatal error (CSTS.CFS)")]
    Fatal,
    /// A command was neither completed nor aborted in time.
    #[error("a command was neither completed nor aborted in time")]
    CommandTimeout,
    /// CSTS.RDY did not follow CC.EN.
    #[error("the controller did not become ready, or not idle, within its own limit (CAP.TO)")]
    NotReady,
    /// It refused what it must not refuse, or its facts make no sense.
    #[error("the controller refused or answered nonsense while it was set up")]
    Setup,
    /// It is another device than before, or has another size.
    #[error("the controller came back from a reset as another one")]
    Changed,
    /// Somebody asked for a reset.
    #[error("a reset was asked for")]
    Asked,
}

/// Where the controller is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing is known about it.
    New,
    /// CC.EN is 0, and CSTS.RDY is waited for to follow. Until then it may still write to memory.
    Stopping {
        /// When it must have.
        deadline: Instant,
    },
    /// CC.EN is 1, and CSTS.RDY is waited for.
    Starting {
        /// When it must have.
        deadline: Instant,
    },
    /// It is asked what it is, and given its features.
    Configuring,
    /// I/O queues can be made and used.
    Live,
    /// It saves what it caches.
    ShuttingDown {
        /// When it must be done.
        deadline: Instant,
    },
    /// After a shutdown, CSTS.RDY is waited for to go.
    Closing {
        /// When it must have.
        deadline: Instant,
    },
    /// Idle for good.
    Closed,
    /// Given up for good.
    Failed(Fault),
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Bring it up.
    Begin,
    /// Its status was read.
    Status(Csts),
    /// It is set up.
    Configured,
    /// Something went wrong that a reset may mend.
    Fault(Fault),
    /// Something went wrong that nothing mends.
    Fail(Fault),
    /// Shut it down.
    Close,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write CC with EN = 0.
    Disable,
    /// Write the admin queue's registers, then CC with EN = 1. It has stopped: its memory is the host's again.
    Enable,
    /// Begin to set it up.
    Configure,
    /// I/O queues may be made.
    Announce,
    /// Write CC with SHN = 01b.
    ShutDown,
    /// Cut it off from memory.
    Isolate,
}

/// The state machine.
#[derive(Clone, Copy, Debug)]
pub struct Lifecycle {
    phase: Phase,
    timeout: Duration,
    /// Resets since it was last live.
    resets: u32,
}

impl Lifecycle {
    /// A controller with this limit for changes of CSTS.RDY (CAP.TO).
    pub fn new(timeout: Duration) -> Self {
        Self { phase: Phase::New, timeout, resets: 0 }
    }

    /// Where it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether it waits for a change of CSTS, so that the register is worth a look in every turn.
    pub fn watches_status(&self) -> bool {
        matches!(
            self.phase,
            Phase::Stopping { .. }
                | Phase::Starting { .. }
                | Phase::ShuttingDown { .. }
                | Phase::Closing { .. }
        )
    }

    /// Takes one event.
    pub fn step(&mut self, now: Instant, event: Event) -> Option<Action> {
        match (self.phase, event) {
            (Phase::Failed(_) | Phase::Closed, _) => None,
            (_, Event::Fail(fault)) => Some(self.fail(fault)),
            (_, Event::Status(csts)) if csts.is_gone() => Some(self.fail(Fault::Gone)),
            (Phase::New, Event::Begin) => Some(self.disable(now)),
            (_, Event::Status(csts)) => self.status(now, csts),
            (Phase::Configuring, Event::Configured) => {
                (self.phase, self.resets) = (Phase::Live, 0);
                Some(Action::Announce)
            }
            (Phase::Starting { .. } | Phase::Configuring | Phase::Live, Event::Fault(fault)) => {
                Some(self.reset(now, fault))
            }
            (Phase::Live, Event::Close) => {
                self.phase = Phase::ShuttingDown { deadline: now.after(SHUTDOWN_MAX) };
                Some(Action::ShutDown)
            }
            (
                Phase::New | Phase::Stopping { .. } | Phase::Starting { .. } | Phase::Configuring,
                Event::Close,
            ) => Some(self.close(now)),
            // A reset is under way anyhow, or nobody needs it any more.
            (_, Event::Begin | Event::Configured | Event::Fault(_) | Event::Close) => None,
        }
    }

    fn status(&mut self, now: Instant, csts: Csts) -> Option<Action> {
        match self.phase {
            Phase::Stopping { .. } if !csts.is_ready() => {
                self.phase = Phase::Starting { deadline: now.after(self.timeout) };
                Some(Action::Enable)
            }
            Phase::Stopping { deadline } => (now >= deadline).then(|| self.fail(Fault::NotReady)),
            Phase::Starting { .. } if csts.is_fatal() => Some(self.reset(now, Fault::Fatal)),
            Phase::Starting { .. } if csts.is_ready() => {
                self.phase = Phase::Configuring;
                Some(Action::Configure)
            }
            Phase::Starting { deadline } => (now >= deadline).then(|| self.reset(now, Fault::NotReady)),
            Phase::Configuring | Phase::Live if csts.is_fatal() => Some(self.reset(now, Fault::Fatal)),
            // Not ready though nobody has disabled it: it has reset itself.
            Phase::Configuring | Phase::Live if !csts.is_ready() => Some(self.reset(now, Fault::NotReady)),
            Phase::ShuttingDown { deadline } => {
                (csts.shutdown_complete() || now >= deadline).then(|| self.close(now))
            }
            Phase::Closing { deadline } if !csts.is_ready() || now >= deadline => {
                self.phase = Phase::Closed;
                Some(Action::Isolate)
            }
            Phase::Closing { .. }
            | Phase::New
            | Phase::Configuring
            | Phase::Live
            | Phase::Closed
            | Phase::Failed(_) => None,
        }
    }

    fn disable(&mut self, now: Instant) -> Action {
        self.phase = Phase::Stopping { deadline: now.after(self.timeout) };
        Action::Disable
    }

    fn close(&mut self, now: Instant) -> Action {
        self.phase = Phase::Closing { deadline: now.after(self.timeout) };
        Action::Disable
    }

    fn reset(&mut self, now: Instant, fault: Fault) -> Action {
        if self.resets == RESETS_MAX {
            return self.fail(fault);
        }
        self.resets += 1;
        self.disable(now)
    }

    fn fail(&mut self, fault: Fault) -> Action {
        self.phase = Phase::Failed(fault);
        Action::Isolate
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RDY: Event = Event::Status(Csts(1));
    const IDLE: Event = Event::Status(Csts(0));
    const CFS: Event = Event::Status(Csts(3));
    const GONE: Event = Event::Status(Csts(u32::MAX));
    const DONE: Event = Event::Status(Csts(9));

    fn at(seconds: u64) -> Instant {
        Instant(seconds * 1_000_000_000)
    }

    fn live() -> Lifecycle {
        let mut life = Lifecycle::new(Duration::from_secs(2));
        for event in [Event::Begin, IDLE, RDY, Event::Configured] {
            assert!(life.step(at(0), event).is_some(), "{event:?}");
        }
        life
    }

    #[test]
    fn bring_up_takes_four_steps() {
        let mut life = Lifecycle::new(Duration::from_secs(2));
        let steps = [
            (Event::Begin, Some(Action::Disable)),
            (RDY, None),
            (IDLE, Some(Action::Enable)),
            (IDLE, None),
            (RDY, Some(Action::Configure)),
            (RDY, None),
            (Event::Configured, Some(Action::Announce)),
            (RDY, None),
        ];
        for (event, action) in steps {
            assert_eq!(life.step(at(1), event), action, "{event:?}");
        }
        assert_eq!(life.phase(), Phase::Live);
    }

    #[test]
    fn every_pair_of_state_and_event() {
        let phases = [
            Phase::New,
            Phase::Stopping { deadline: at(9) },
            Phase::Starting { deadline: at(9) },
            Phase::Configuring,
            Phase::Live,
            Phase::ShuttingDown { deadline: at(9) },
            Phase::Closing { deadline: at(9) },
            Phase::Closed,
            Phase::Failed(Fault::Gone),
        ];
        let events = [
            Event::Begin,
            IDLE,
            RDY,
            CFS,
            GONE,
            DONE,
            Event::Configured,
            Event::Fault(Fault::CommandTimeout),
            Event::Close,
        ];
        use Action::*;
        let expected = [
            [Some(Disable), None, None, None, Some(Isolate), None, None, None, Some(Disable)],
            [None, Some(Enable), None, None, Some(Isolate), None, None, None, Some(Disable)],
            [
                None,
                None,
                Some(Configure),
                Some(Disable),
                Some(Isolate),
                Some(Configure),
                None,
                Some(Disable),
                Some(Disable),
            ],
            [
                None,
                Some(Disable),
                None,
                Some(Disable),
                Some(Isolate),
                None,
                Some(Announce),
                Some(Disable),
                Some(Disable),
            ],
            [
                None,
                Some(Disable),
                None,
                Some(Disable),
                Some(Isolate),
                None,
                None,
                Some(Disable),
                Some(ShutDown),
            ],
            [None, None, None, None, Some(Isolate), Some(Disable), None, None, None],
            [None, Some(Isolate), None, None, Some(Isolate), None, None, None, None],
            [None; 9],
            [None; 9],
        ];
        for (phase, row) in phases.into_iter().zip(expected) {
            for (event, action) in events.into_iter().zip(row) {
                let mut life = Lifecycle { phase, timeout: Duration::from_secs(2), resets: 0 };
                assert_eq!(life.step(at(1), event), action, "{phase:?} and {event:?}");
            }
        }
    }

    #[test]
    fn limits_of_time_hold() {
        let mut life = live();
        assert_eq!(life.step(at(10), Event::Fault(Fault::CommandTimeout)), Some(Action::Disable));
        assert_eq!(life.step(at(11), RDY), None);
        assert_eq!(life.step(at(12), RDY), Some(Action::Isolate));
        assert_eq!(life.phase(), Phase::Failed(Fault::NotReady));

        let mut life = live();
        assert_eq!(life.step(at(10), Event::Close), Some(Action::ShutDown));
        assert_eq!(life.step(at(14), RDY), None);
        assert_eq!(life.step(at(15), RDY), Some(Action::Disable));
        assert_eq!(life.step(at(17), RDY), Some(Action::Isolate));
        assert_eq!(life.phase(), Phase::Closed);
    }

    #[test]
    fn resets_in_vain_end() {
        let mut life = live();
        for _ in 0..RESETS_MAX {
            assert_eq!(life.step(at(1), CFS), Some(Action::Disable));
            assert_eq!(life.step(at(1), IDLE), Some(Action::Enable));
        }
        assert_eq!(life.step(at(1), CFS), Some(Action::Isolate));
        assert_eq!(life.phase(), Phase::Failed(Fault::Fatal));
        // Successful ones are counted anew each time.
        let mut life = live();
        for _ in 0..1000 {
            for event in [Event::Fault(Fault::Asked), IDLE, RDY, Event::Configured] {
                assert!(life.step(at(1), event).is_some());
            }
        }
        assert_eq!(life.phase(), Phase::Live);
    }

    proptest! {
        /// Whatever happens, the device is never enabled before it was seen idle, and every path that waits ends.
        #[test]
        fn it_is_never_enabled_while_it_may_still_write(events in prop::collection::vec(0usize..9, 1..60)) {
            let all = [Event::Begin, IDLE, RDY, CFS, GONE, DONE, Event::Configured, Event::Fault(Fault::Fatal),
                Event::Close];
            let mut life = Lifecycle::new(Duration::from_secs(2));
            let mut now = 0;
            for event in events {
                now += 1;
                let before = life.phase();
                let action = life.step(at(now), all[event]);
                if action == Some(Action::Enable) {
                    let idle = matches!(all[event], Event::Status(csts) if !csts.is_ready());
                    let stopping = matches!(before, Phase::Stopping { .. });
                    prop_assert!(stopping && idle);
                }
                prop_assert_eq!(
                    action == Some(Action::Isolate),
                    !matches!(before, Phase::Failed(_) | Phase::Closed)
                        && matches!(life.phase(), Phase::Failed(_) | Phase::Closed)
                );
            }
            for _ in 0..2 * (RESETS_MAX + 2) {
                now += 10;
                life.step(at(now), RDY);
                life.step(at(now), Event::Fault(Fault::Fatal));
            }
            let waits = life.watches_status();
            prop_assert!(!waits, "still waiting: {:?}", life.phase());
        }
    }
}
