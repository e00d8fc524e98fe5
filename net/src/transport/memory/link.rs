//! What one direction between two processes does to frames.

use loligo_reactor::env::Instant;
use loligo_reactor::random::Random;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// The first retransmission of a lost segment, as Linux does it (RTO_MIN); every further one waits twice as long.
const RETRANSMIT_AFTER: Duration = Duration::from_millis(200);
/// Losses of one frame in a row at most.
const LOSSES_MAX: u32 = 6;
const MILLION: u64 = 1_000_000;

/// How one direction behaves. The default is a wire without delay, loss or limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkProfile {
    /// The least delay.
    pub delay: Duration,
    /// More delay by chance: most frames get less than this, few get many times as much.
    pub jitter: Duration,
    /// Of a million frames so many are lost. TCP sends them again: they come late, and hold up those behind them.
    pub lost_per_million: u32,
    /// Of a million frames so many arrive with a flipped bit that TCP's checksum did not notice.
    pub damaged_per_million: u32,
    /// Bytes per second; 0: no limit.
    pub bytes_per_second: u64,
}

/// What links have done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Frames sent.
    pub frames: u64,
    /// Frames lost and sent again.
    pub lost: u64,
    /// Frames damaged.
    pub damaged: u64,
    /// Connections reset.
    pub reset: u64,
}

/// A time up to `max`.
pub(super) fn time_up_to(random: &mut Random, max: Duration) -> Duration {
    let nanos = u64::try_from(max.as_nanos()).unwrap_or(u64::MAX - 1);
    Duration::from_nanos(random.below(nanos + 1))
}

/// All directions.
#[derive(Debug)]
pub(super) struct Links {
    pub random: Random,
    pub stats: LinkStats,
    pub default: LinkProfile,
    special: BTreeMap<(SocketAddr, SocketAddr), LinkProfile>,
    /// When the last frame of a direction with limited bandwidth has left.
    free_at: BTreeMap<(SocketAddr, SocketAddr), Instant>,
}

impl Links {
    pub fn new() -> Self {
        Self {
            random: Random::new(0),
            stats: LinkStats::default(),
            default: LinkProfile::default(),
            special: BTreeMap::new(),
            free_at: BTreeMap::new(),
        }
    }

    pub fn set(&mut self, from: SocketAddr, to: SocketAddr, profile: Option<LinkProfile>) {
        self.free_at.remove(&(from, to));
        match profile {
            Some(profile) => self.special.insert((from, to), profile),
            None => self.special.remove(&(from, to)),
        };
    }

    fn profile(&self, from: SocketAddr, to: SocketAddr) -> LinkProfile {
        if self.special.is_empty() {
            return self.default;
        }
        self.special.get(&(from, to)).copied().unwrap_or(self.default)
    }

    /// When `len` bytes that leave now arrive, unless something before them is later.
    pub fn arrival(&mut self, now: Instant, from: SocketAddr, to: SocketAddr, len: usize) -> Instant {
        let profile = self.profile(from, to);
        let mut at = now;
        let takes = (len as u64).saturating_mul(1_000_000_000).checked_div(profile.bytes_per_second);
        if let Some(takes) = takes {
            let free = self.free_at.entry((from, to)).or_default();
            at = at.max(*free).after(Duration::from_nanos(takes));
            *free = at;
        }
        at = at.after(profile.delay);
        if !profile.jitter.is_zero() {
            at = at.after(self.jitter(profile.jitter));
        }
        if profile.lost_per_million > 0 {
            let mut wait = RETRANSMIT_AFTER;
            for _ in 0..LOSSES_MAX {
                if self.random.below(MILLION) >= u64::from(profile.lost_per_million) {
                    break;
                }
                self.stats.lost += 1;
                at = at.after(wait);
                wait *= 2;
            }
        }
        at
    }

    /// Geometric in steps of the mean, even within a step: near an exponential distribution, in whole numbers, so that
    /// it is the same on every machine.
    fn jitter(&mut self, mean: Duration) -> Duration {
        let nanos = u64::try_from(mean.as_nanos()).unwrap_or(u64::MAX >> 8).min(u64::MAX >> 8);
        let steps = u64::from(self.random.next_u64().leading_zeros());
        Duration::from_nanos(nanos * steps + self.random.below(nanos + 1))
    }

    /// Whether a frame that leaves now is damaged.
    pub fn damages(&mut self, from: SocketAddr, to: SocketAddr) -> bool {
        let profile = self.profile(from, to);
        profile.damaged_per_million > 0 && self.random.below(MILLION) < u64::from(profile.damaged_per_million)
    }
}
