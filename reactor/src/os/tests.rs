use super::ring::Ring;
use super::*;
use crate::env::{Clock, Instant};
use crate::mailbox::{Receiver, mailbox};
use crate::poller::{Activity, Poller, Turn};
use loligo_config::file::PollMode;
use std::time::Duration;

fn settings(mode: PollMode, core: Option<usize>) -> ReactorSettings {
    ReactorSettings { core, mode, name: "test".to_owned() }
}

fn reactor(mode: PollMode) -> Reactor {
    Reactor::new(settings(mode, None), Ring::new(16).unwrap()).unwrap()
}

/// A poller that does as it is told.
#[derive(Default)]
struct Told {
    polls: u64,
    expecting: bool,
    deadline: Option<Instant>,
    busy: u64,
    blocks: Duration,
}

impl Poller for Told {
    fn name(&self) -> &'static str {
        "told"
    }

    fn poll(&mut self, now: Instant) -> Activity {
        self.polls += 1;
        while OsClock.now().since(now) < self.blocks {}
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.deadline = None;
            return Activity::Busy;
        }
        self.busy = self.busy.saturating_sub(1);
        Activity::from_busy(self.busy > 0)
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.deadline
    }

    fn expecting(&self) -> bool {
        self.expecting
    }
}

struct Receives {
    receiver: Receiver<u64>,
    stop: StopFlag,
    sum: u64,
    messages: u64,
    last: u64,
}

impl Poller for Receives {
    fn name(&self) -> &'static str {
        "receives"
    }

    fn poll(&mut self, _: Instant) -> Activity {
        let Some(message) = self.receiver.receive() else { return Activity::Idle };
        self.sum += message;
        self.messages += 1;
        if self.messages == self.last {
            self.stop.stop();
        }
        Activity::Busy
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn expecting(&self) -> bool {
        false
    }
}

#[test]
fn it_parks_until_the_deadline_and_uses_no_processor() {
    for mode in [PollMode::Adaptive, PollMode::Park] {
        let mut reactor = reactor(mode);
        let begin = OsClock.now();
        let deadline = begin.after(Duration::from_millis(100));
        let mut told = Told { deadline: Some(deadline), ..Told::default() };
        let cpu = thread_cpu_time();
        while told.deadline.is_some() {
            reactor.turn(&mut [&mut told]);
        }
        assert!(OsClock.now() >= deadline);
        assert!(told.polls < 10, "{} polls", told.polls);
        assert!(thread_cpu_time() - cpu < Duration::from_millis(10));
        let stats = reactor.stats();
        assert!(stats.parked_nanos > 90_000_000, "{stats:?}");
    }
}

#[test]
fn it_spins_for_an_answer_and_then_parks_all_the_same() {
    let mut reactor = reactor(PollMode::Adaptive);
    let deadline = OsClock.now().after(Duration::from_millis(50));
    let mut told = Told { expecting: true, deadline: Some(deadline), ..Told::default() };
    while told.deadline.is_some() {
        reactor.turn(&mut [&mut told]);
    }
    let stats = reactor.stats();
    assert!(stats.spun_nanos > 0 && stats.yields > 0, "{stats:?}");
    assert!(stats.spun_nanos + stats.yielded_nanos < 20_000_000, "the spin is bounded: {stats:?}");
    assert!(stats.parks > 0 && stats.spins_in_vain + stats.losses > 0, "{stats:?}");
}

#[test]
fn stalls_carry_the_name_of_the_poller() {
    let mut reactor = reactor(PollMode::Park);
    let mut quick = Told { busy: 2, ..Told::default() };
    let mut slow = Told { blocks: Duration::from_millis(6), busy: 2, ..Told::default() };
    reactor.turn(&mut [&mut quick, &mut slow]);
    let stats = reactor.stats();
    let stall = stats.stall_longest.unwrap();
    assert!(
        stats.stalls >= 1 && stall.poller == "told" && stall.time >= Duration::from_millis(6),
        "{stats:?}"
    );
    assert_eq!((stats.rounds, stats.busy_rounds, stats.loop_nanos.len()), (1, 1, 1));
    assert!(stats.busy_nanos >= 6_000_000);
}

#[test]
fn busy_mode_is_refused_without_a_core_of_its_own() {
    let error = Reactor::new(settings(PollMode::Busy, None), Ring::new(16).unwrap()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    assert!(error.to_string().contains("adaptive"), "{error}");
    let cores = cpu::allowed_cores().unwrap();
    if cores.len() < 2 {
        return;
    }
    let core = *cores.last().unwrap();
    let sharer = settings(PollMode::Adaptive, Some(core));
    let thread = spawn(&sharer.clone(), move || {
        let sharer = Reactor::new(sharer, Ring::new(16).unwrap()).unwrap();
        let error = Reactor::new(settings(PollMode::Busy, Some(core)), Ring::new(16).unwrap()).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ResourceBusy);
        assert!(error.to_string().contains("another core"), "{error}");
        drop(sharer);
        let mut alone = Reactor::new(settings(PollMode::Busy, Some(core)), Ring::new(16).unwrap()).unwrap();
        for _ in 0..100 {
            alone.turn(&mut []);
        }
        assert_eq!((alone.stats().parks, alone.stats().yields), (0, 0));
    });
    thread.unwrap().join().unwrap();
}

#[test]
fn messages_wake_parked_reactors_and_none_is_lost() {
    const MESSAGES: u64 = 20_000;
    for mode in [PollMode::Park, PollMode::Adaptive] {
        let (sender, receiver) = mailbox(64);
        let stop = StopFlag::new();
        let settings = settings(mode, None);
        let thread = spawn(&settings.clone(), move || {
            let ring = Ring::new(16).unwrap();
            receiver.attach(ring.waker());
            let mut reactor = Reactor::new(settings, ring).unwrap();
            let mut receives = Receives { receiver, stop: stop.clone(), sum: 0, messages: 0, last: MESSAGES };
            reactor.run(&mut [&mut receives], &stop);
            receives.sum
        })
        .unwrap();
        for message in 0..MESSAGES {
            let mut message = Some(message);
            while let Some(next) = message.take() {
                message = sender.send(next).err().map(|full| full.0);
            }
            // Now and then it gets time to park.
            if OsClock.now().0.is_multiple_of(16) {
                std::thread::yield_now();
            }
        }
        assert_eq!(thread.join().unwrap(), MESSAGES * (MESSAGES - 1) / 2);
    }
}

#[test]
fn a_stop_flag_ends_parked_reactors() {
    let stop = StopFlag::new();
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (stop, settings) = (stop.clone(), settings(PollMode::Park, None));
            spawn(&settings.clone(), move || {
                let mut reactor = Reactor::new(settings, Ring::new(16).unwrap()).unwrap();
                reactor.run(&mut [&mut Told::default()], &stop);
                reactor.stats().rounds
            })
            .unwrap()
        })
        .collect();
    stop.stop();
    for thread in threads {
        assert!(thread.join().unwrap() < 10);
    }
}

#[test]
fn a_thread_for_a_missing_core_is_refused() {
    let error = spawn(&settings(PollMode::Park, Some(1023)), || ()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{error}");
}
