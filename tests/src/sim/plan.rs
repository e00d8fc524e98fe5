//! The fault planner: a list of timed faults as data, so that it can be printed, replayed in part and shrunk.

use super::disk::{Damage, FailKind};
use super::options::one_of;
use super::world::{MILLISECOND, Machine, SECOND};
use crate::random::Random;
use serde::{Deserialize, Serialize};

pub use super::options::Options;

/// One thing that goes wrong. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// SIGKILL; a new process after a while.
    Kill(Machine, u64),
    /// The machine has no power for a while.
    PowerCut(Machine, u64),
    /// No machine but the clients' has power; each comes back at a time of its own.
    PowerCutAll(u64),
    /// The process does not run for a while.
    Pause(Machine, u64),
    /// Every wake-up of the process takes as long as the first number, for the time of the second.
    SlowProcess(Machine, u64, u64),
    /// Nothing passes between the two, and nobody is told.
    Partition(Machine, Machine, u64),
    /// Nothing passes from the first to the second, and nobody is told.
    OneWay(Machine, Machine, u64),
    /// The machine is alone.
    Isolate(Machine, u64),
    /// All connections between the two break and none can be made.
    Cut(Machine, Machine, u64),
    /// All connections between the two break; what was on its way comes late, in part.
    Reset(Machine, Machine, u64),
    /// The link is slow: its delay, for a time.
    SlowLink(Machine, Machine, u64, u64),
    /// The disk takes so many times as long, for a time.
    SlowDisk(u32, u64, u64),
    /// The disk completes nothing for a time.
    HungDisk(u32, u64),
    /// The disk fails after so many operations; once (0) or for a time.
    FailedDisk(u32, FailKind, u32, u64),
    /// The mon's disk fails a commit, which is kept or not.
    FailedCommit(bool),
    /// The wall clock jumps by so many seconds.
    ClockJump(Machine, i64),
    /// The clock runs faster or slower, in millionths.
    ClockDrift(Machine, i64),
    /// Data is damaged on a disk.
    Damage(u32, Damage),
    /// The OSD ends and starts again on an empty disk.
    NewDisk(u32, u64),
}

/// The kinds of faults, for counting and for drawing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[expect(missing_docs, reason = "see `Fault`")]
pub enum FaultKind {
    Kill,
    PowerCut,
    PowerCutAll,
    Pause,
    SlowProcess,
    Partition,
    OneWay,
    Isolate,
    Cut,
    Reset,
    SlowLink,
    SlowDisk,
    HungDisk,
    FailedWrite,
    FailedFlush,
    FailedRead,
    FailedCommit,
    ClockJump,
    ClockDrift,
    BitRot,
    LostWrite,
    MisdirectedWrite,
    UnreadableBlocks,
    NewDisk,
}

use FaultKind as K;

/// What the product promises to survive without loss. Later work switches rows on: what damages one copy needs peers that
/// repair it. The last column says what is missing.
pub const PROMISED: [(FaultKind, bool, &str); 24] = [
    (K::Kill, true, ""),
    (K::PowerCut, true, ""),
    (K::PowerCutAll, true, ""),
    (K::Pause, true, ""),
    (K::SlowProcess, true, ""),
    (K::Partition, true, ""),
    (K::OneWay, true, ""),
    (K::Isolate, true, ""),
    (K::Cut, true, ""),
    (K::Reset, true, ""),
    (K::SlowLink, true, ""),
    (K::SlowDisk, true, ""),
    (K::HungDisk, true, ""),
    (K::FailedWrite, true, ""),
    (K::FailedFlush, true, ""),
    (K::FailedRead, false, "a read is not repaired from a peer"),
    (K::FailedCommit, true, ""),
    (K::ClockJump, true, ""),
    (K::ClockDrift, true, ""),
    (K::BitRot, false, "a damaged block is not repaired from a peer"),
    (K::LostWrite, false, "a stale copy is not repaired from a peer"),
    (K::MisdirectedWrite, false, "a damaged block is not repaired from a peer"),
    (K::UnreadableBlocks, false, "a damaged block is not repaired from a peer"),
    (K::NewDisk, false, "an empty OSD is not filled from its peers"),
];

impl Fault {
    /// Its kind.
    pub fn kind(self) -> FaultKind {
        match self {
            Self::Kill(..) => K::Kill,
            Self::PowerCut(..) => K::PowerCut,
            Self::PowerCutAll(..) => K::PowerCutAll,
            Self::Pause(..) => K::Pause,
            Self::SlowProcess(..) => K::SlowProcess,
            Self::Partition(..) => K::Partition,
            Self::OneWay(..) => K::OneWay,
            Self::Isolate(..) => K::Isolate,
            Self::Cut(..) => K::Cut,
            Self::Reset(..) => K::Reset,
            Self::SlowLink(..) => K::SlowLink,
            Self::SlowDisk(..) => K::SlowDisk,
            Self::HungDisk(..) => K::HungDisk,
            Self::FailedDisk(_, FailKind::Read, ..) => K::FailedRead,
            Self::FailedDisk(_, FailKind::Write, ..) => K::FailedWrite,
            Self::FailedDisk(_, FailKind::Flush, ..) => K::FailedFlush,
            Self::FailedCommit(_) => K::FailedCommit,
            Self::ClockJump(..) => K::ClockJump,
            Self::ClockDrift(..) => K::ClockDrift,
            Self::Damage(_, Damage::Rot(_)) => K::BitRot,
            Self::Damage(_, Damage::LostWrite) => K::LostWrite,
            Self::Damage(_, Damage::Misdirected) => K::MisdirectedWrite,
            Self::Damage(_, Damage::Unreadable(_)) => K::UnreadableBlocks,
            Self::NewDisk(..) => K::NewDisk,
        }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = |nanos: u64| nanos / MILLISECOND;
        match *self {
            Self::Kill(who, down) => write!(f, "kill {who}, start it after {} ms", ms(down)),
            Self::PowerCut(who, down) => write!(f, "{who} loses its power for {} ms", ms(down)),
            Self::PowerCutAll(down) => write!(f, "mon and OSDs lose their power for up to {} ms", ms(down)),
            Self::Pause(who, time) => write!(f, "pause {who} for {} ms", ms(time)),
            Self::SlowProcess(who, wake, time) => {
                write!(f, "{who} takes {} us a wake-up for {} ms", wake / 1000, ms(time))
            }
            Self::Partition(a, b, time) => write!(f, "partition {a} | {b} for {} ms", ms(time)),
            Self::OneWay(a, b, time) => write!(f, "nothing from {a} reaches {b} for {} ms", ms(time)),
            Self::Isolate(who, time) => write!(f, "nothing reaches or leaves {who} for {} ms", ms(time)),
            Self::Cut(a, b, time) => write!(f, "cut {a} -x- {b} for {} ms", ms(time)),
            Self::Reset(a, b, late) => write!(f, "reset {a} -x- {b}, rest within {} ms", ms(late)),
            Self::SlowLink(a, b, delay, time) => {
                write!(f, "{a} - {b} takes {} ms more, for {} ms", ms(delay), ms(time))
            }
            Self::SlowDisk(osd, factor, time) => {
                write!(f, "osd.{osd}'s disk {factor} x slower for {} ms", ms(time))
            }
            Self::HungDisk(osd, time) => write!(f, "osd.{osd}'s disk hangs for {} ms", ms(time)),
            Self::FailedDisk(osd, kind, after, time) => {
                write!(f, "osd.{osd}'s disk fails a {kind:?} after {after} more, for {} ms", ms(time))
            }
            Self::FailedCommit(kept) => write!(f, "the mon's next commit fails, kept: {kept}"),
            Self::ClockJump(who, seconds) => write!(f, "the wall clock of {who} jumps by {seconds} s"),
            Self::ClockDrift(who, ppm) => write!(f, "the clock of {who} drifts by {ppm} ppm"),
            Self::Damage(osd, damage) => write!(f, "osd.{osd}'s disk: {damage:?}"),
            Self::NewDisk(osd, down) => write!(f, "osd.{osd} gets an empty disk, down for {} ms", ms(down)),
        }
    }
}

/// A fault and when it strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Its number in the seed's whole plan.
    pub number: u32,
    /// Which round.
    pub round: u32,
    /// Nanoseconds after the round's begin.
    pub at: u64,
    /// What.
    pub fault: Fault,
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = self.at as f64 / 1e9;
        write!(f, "#{:<3} round {} at {seconds:>7.3} s: {}", self.number, self.round, self.fault)
    }
}

/// The faults of a run, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Them.
    pub events: Vec<Event>,
}

const PLAN_STREAM: u64 = 0x706c;

impl Plan {
    /// What a seed draws, swarm style: some kinds, at some rate.
    pub fn draw(options: &Options) -> Self {
        let mut random = Random::new(options.stream(PLAN_STREAM));
        let random = &mut random;
        let allowed = PROMISED.iter().filter(|(_, promised, _)| *promised || options.damage);
        let mut kinds: Vec<FaultKind> =
            allowed.map(|(kind, ..)| *kind).filter(|_| random.one_in(2)).collect();
        if options.damage {
            kinds.push(one_of(random, &[K::BitRot, K::LostWrite, K::MisdirectedWrite, K::UnreadableBlocks]));
            kinds.retain(|kind| *kind != K::NewDisk);
        }
        if kinds.is_empty() {
            return Self::default();
        }
        let pause = MILLISECOND * one_of(random, &[300, 1000, 3000, 8000]);
        let mut events = Vec::new();
        for round in 0..options.rounds {
            let mut at = random.below(pause);
            while at < options.round_time {
                let kind = one_of(random, &kinds);
                let fault = draw(random, kind, options);
                // Now and then the same again and again: a process that dies while it starts, a link that flaps.
                let times = if random.one_in(12) { 2 + random.below(5) } else { 1 };
                for _ in 0..times {
                    events.push(Event { number: events.len() as u32, round, at, fault });
                    if times > 1 {
                        at += random.below(200 * MILLISECOND);
                    }
                }
                // Now and then two at once, or nearly.
                at += if random.one_in(6) { random.below(50 * MILLISECOND) } else { random.below(2 * pause) };
            }
        }
        Self { events }
    }

    /// Only the events with these numbers.
    pub fn only(&self, numbers: &[u32]) -> Self {
        Self { events: self.events.iter().filter(|event| numbers.contains(&event.number)).copied().collect() }
    }

    /// The numbers of its events.
    pub fn numbers(&self) -> Vec<u32> {
        self.events.iter().map(|event| event.number).collect()
    }
}

/// A time that is short or long, on every scale.
fn time(random: &mut Random, longest: u64) -> u64 {
    let scale = 1 << random.below(10);
    longest / scale + random.below(longest / scale + 1)
}

fn draw(random: &mut Random, kind: FaultKind, options: &Options) -> Fault {
    let osd = random.below(options.osds.into()) as u32;
    let who = draw_machine(random, options);
    let (a, b) = draw_pair(random, options);
    let down = time(random, 4 * SECOND);
    match kind {
        K::Kill => Fault::Kill(who, down),
        K::PowerCut => Fault::PowerCut(who, down),
        K::PowerCutAll => Fault::PowerCutAll(down),
        // Long enough, now and then, for everybody to give it up.
        K::Pause => Fault::Pause(who, time(random, 8 * SECOND)),
        K::SlowProcess => Fault::SlowProcess(who, time(random, 20 * MILLISECOND), time(random, 4 * SECOND)),
        K::Partition => Fault::Partition(a, b, time(random, 6 * SECOND)),
        K::OneWay => Fault::OneWay(a, b, time(random, 6 * SECOND)),
        K::Isolate => Fault::Isolate(who, time(random, 6 * SECOND)),
        K::Cut => Fault::Cut(a, b, time(random, 6 * SECOND)),
        K::Reset => Fault::Reset(a, b, time(random, 3 * SECOND)),
        K::SlowLink => Fault::SlowLink(a, b, time(random, SECOND / 2), time(random, 6 * SECOND)),
        K::SlowDisk => Fault::SlowDisk(osd, one_of(random, &[10, 100, 1000]), time(random, 4 * SECOND)),
        K::HungDisk => Fault::HungDisk(osd, time(random, 4 * SECOND)),
        K::FailedWrite => failed_disk(random, osd, FailKind::Write),
        K::FailedFlush => failed_disk(random, osd, FailKind::Flush),
        K::FailedRead => failed_disk(random, osd, FailKind::Read),
        K::FailedCommit => Fault::FailedCommit(random.one_in(2)),
        K::ClockJump => {
            let seconds = time(random, 1_000_000) as i64;
            Fault::ClockJump(who, if random.one_in(2) { -seconds } else { seconds })
        }
        K::ClockDrift => Fault::ClockDrift(who, random.below(401) as i64 - 200),
        K::BitRot => Fault::Damage(osd, Damage::Rot(1 + random.below(20) as u32)),
        K::LostWrite => Fault::Damage(osd, Damage::LostWrite),
        K::MisdirectedWrite => Fault::Damage(osd, Damage::Misdirected),
        K::UnreadableBlocks => Fault::Damage(osd, Damage::Unreadable(1 + random.below(20) as u32)),
        K::NewDisk => Fault::NewDisk(osd, down),
    }
}

fn failed_disk(random: &mut Random, osd: u32, kind: FailKind) -> Fault {
    let lasts = if random.one_in(2) { 0 } else { time(random, 3 * SECOND) };
    Fault::FailedDisk(osd, kind, random.below(40) as u32, lasts)
}

fn draw_machine(random: &mut Random, options: &Options) -> Machine {
    match random.below(10) {
        0 | 1 => Machine::Mon,
        2 => Machine::Client(random.below(options.clients.into()) as u32),
        _ => Machine::Osd(random.below(options.osds.into()) as u32),
    }
}

/// Two that talk to each other.
fn draw_pair(random: &mut Random, options: &Options) -> (Machine, Machine) {
    let osd = Machine::Osd(random.below(options.osds.into()) as u32);
    let other = match random.below(8) {
        0 | 1 => Machine::Mon,
        2 | 3 => Machine::Client(random.below(options.clients.into()) as u32),
        _ => Machine::Osd(random.below(options.osds.into()) as u32),
    };
    let other = if other == osd { Machine::Mon } else { other };
    if random.one_in(2) { (osd, other) } else { (other, osd) }
}
