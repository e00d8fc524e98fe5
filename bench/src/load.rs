//! A fixed number of requests in flight on one image.
//!
//! Every write carries other bytes than the one before, since an identical rewrite can be had for less, and latencies
//! are the client's own: from `submit` to completion, without the load generator's work between requests.

use crate::legs::Legs;
use hdrhistogram::Histogram;
use loligo_client::blocking::Blocking;
use loligo_client::{IO_LEN_MAX, ImageHandle, ImageIo, IoDone, IoError};
use loligo_config::units::{ByteLen, ByteOffset};
use loligo_reactor::dma::PoolExhausted;
use loligo_reactor::env::{Clock, Instant, QueueFull, Ticket, World};
use loligo_reactor::poller::Turn;
use loligo_reactor::random::Random;
use serde::Serialize;
use std::time::Duration;

/// Longest latency that is told apart, in nanoseconds: ten minutes.
const LATENCY_NS_MAX: u64 = 600_000_000_000;

/// What requests do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoType {
    /// Read.
    Read,
    /// Write, durably.
    Write,
    /// Both; of a hundred, so many read.
    Mixed {
        /// 0 to 100.
        read_percent: u32,
    },
}

/// Where requests go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Anywhere in the image, at multiples of the request's length.
    Random,
    /// One behind the other, from the start and round again.
    Sequential,
}

/// A load.
#[derive(Clone, Copy, Debug)]
pub struct LoadSettings {
    /// What.
    pub io: IoType,
    /// Where.
    pub pattern: Pattern,
    /// Bytes of one request.
    pub io_len: u64,
    /// Requests in flight.
    pub depth: u32,
    /// Stop after so many bytes.
    pub bytes_max: Option<u64>,
    /// Stop after so long.
    pub time_max: Option<Duration>,
    /// For positions and data.
    pub seed: u64,
}

/// Why a load did not run to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// A request failed.
    #[error("{kind} of {len} bytes at {offset}: {error}")]
    Io {
        /// `read` or `write`.
        kind: &'static str,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Why.
        error: IoError,
    },
    /// The image is smaller than one request.
    #[error(
        "the image has {size} bytes, less than one request of {io_len}: choose a smaller request or another image"
    )]
    TooSmall {
        /// The image's size.
        size: u64,
        /// A request's length.
        io_len: u64,
    },
    /// Requests of this length cannot be made.
    #[error("a request has 1 to {IO_LEN_MAX} bytes")]
    Length,
    /// The client's buffers are too few for this load.
    #[error(transparent)]
    Memory(#[from] PoolExhausted),
}

/// How far a load is.
#[derive(Clone, Copy, Debug)]
pub struct Tick {
    /// Since its start.
    pub elapsed: Duration,
    /// Requests done.
    pub ops: u64,
    /// Bytes done.
    pub bytes: u64,
}

/// What a load measured.
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// From the first submission to the last completion.
    pub elapsed: Duration,
    /// Requests done.
    pub ops: u64,
    /// Bytes done.
    pub bytes: u64,
    /// Latencies of reads, in nanoseconds.
    pub reads: Histogram<u64>,
    /// Latencies of writes, in nanoseconds.
    pub writes: Histogram<u64>,
    /// Fewest copies that were durable at the acknowledgement of a write; `None` without writes.
    pub copies_min: Option<u8>,
    /// Object operations that were sent again.
    pub resends: u64,
    /// Where the time of writes went.
    pub legs: Legs,
}

/// The usual figures of a set of latencies, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// How many.
    pub count: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 99 of 100 are at most this.
    pub p99_us: f64,
    /// 999 of 1000 are at most this.
    pub p99_9_us: f64,
    /// The longest.
    pub max_us: f64,
}

impl Latency {
    /// From a histogram of nanoseconds.
    pub fn of(histogram: &Histogram<u64>) -> Self {
        let us = |nanos: u64| nanos as f64 / 1000.0;
        Self {
            count: histogram.len(),
            mean_us: histogram.mean() / 1000.0,
            p50_us: us(histogram.value_at_quantile(0.5)),
            p99_us: us(histogram.value_at_quantile(0.99)),
            p99_9_us: us(histogram.value_at_quantile(0.999)),
            max_us: us(histogram.max()),
        }
    }
}

/// An empty histogram of nanoseconds, with three digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("the bounds are valid")
}

#[derive(Clone, Copy, Debug)]
struct Request {
    write: bool,
    offset: u64,
}

struct Load<'a, W: World, L> {
    blocking: &'a mut Blocking<W, L>,
    image: ImageHandle,
    settings: LoadSettings,
    slots: u64,
    random: Random,
    /// Incompressible bytes; each write gets its own mark on every block.
    pattern: Vec<u8>,
    issued: u64,
    requests: Vec<Option<Request>>,
    begun: Instant,
    report: LoadReport,
}

/// Runs a load to its end, calling `tick` about once a second.
///
/// # Errors
/// See [`LoadError`]. Requests in flight are waited for.
pub fn run<W: World, L: Turn>(
    blocking: &mut Blocking<W, L>,
    image: ImageHandle,
    settings: LoadSettings,
    tick: &mut dyn FnMut(Tick),
) -> Result<LoadReport, LoadError> {
    let size = blocking.client().image_info(image).map_or(0, |header| header.size);
    if settings.io_len == 0 || settings.io_len > IO_LEN_MAX {
        return Err(LoadError::Length);
    }
    let slots = size / settings.io_len;
    if slots == 0 {
        return Err(LoadError::TooSmall { size, io_len: settings.io_len });
    }
    let mut random = Random::new(settings.seed);
    let mut pattern = vec![0; settings.io_len as usize];
    random.fill(&mut pattern);
    let begun = blocking.client().clock().now();
    let report = LoadReport {
        elapsed: Duration::ZERO,
        ops: 0,
        bytes: 0,
        reads: histogram(),
        writes: histogram(),
        copies_min: None,
        legs: Legs::default(),
        resends: 0,
    };
    let requests = vec![None; settings.depth.max(1) as usize];
    let load = Load { blocking, image, settings, slots, random, pattern, issued: 0, requests, begun, report };
    load.run(tick)
}

impl<W: World, L: Turn> Load<'_, W, L> {
    fn run(mut self, tick: &mut dyn FnMut(Tick)) -> Result<LoadReport, LoadError> {
        let mut next_tick = self.begun.after(Duration::from_secs(1));
        let mut failed = None;
        for slot in 0..self.requests.len() {
            if !self.is_over(self.begun)
                && let Err(error) = self.issue(slot)
            {
                failed = Some(error);
                break;
            }
        }
        while self.blocking.outstanding() > 0 {
            let (_, ticket, result) = self.blocking.wait_any();
            let slot = ticket.0 as usize;
            let now = self.blocking.client().clock().now();
            let mut ended = self.finish(slot, result);
            if ended.is_ok() && failed.is_none() && !self.is_over(now) {
                ended = self.issue(slot);
            }
            failed = failed.or(ended.err());
            if now >= next_tick {
                next_tick = next_tick.after(Duration::from_secs(1));
                tick(Tick { elapsed: now.since(self.begun), ops: self.report.ops, bytes: self.report.bytes });
            }
        }
        self.report.elapsed = self.blocking.client().clock().now().since(self.begun);
        failed.map_or(Ok(self.report), Err)
    }

    fn is_over(&self, now: Instant) -> bool {
        let by_bytes = self
            .settings
            .bytes_max
            .is_some_and(|max| self.issued.saturating_mul(self.settings.io_len) >= max);
        by_bytes || self.settings.time_max.is_some_and(|max| now.since(self.begun) >= max)
    }

    fn issue(&mut self, slot: usize) -> Result<(), LoadError> {
        let position = match self.settings.pattern {
            Pattern::Random => self.random.below(self.slots),
            Pattern::Sequential => self.issued % self.slots,
        };
        let offset = position * self.settings.io_len;
        let write = match self.settings.io {
            IoType::Read => false,
            IoType::Write => true,
            IoType::Mixed { read_percent } => self.random.below(100) >= u64::from(read_percent),
        };
        self.issued += 1;
        let mut io = match write {
            true => self.write(offset)?,
            false => ImageIo::Read { offset: ByteOffset(offset), len: ByteLen(self.settings.io_len) },
        };
        self.requests[slot] = Some(Request { write, offset });
        while let Err(QueueFull(back)) = self.blocking.submit(self.image, io, Ticket(slot as u64)) {
            io = back;
            if let Some((_, ticket, result)) = self.blocking.poll_any() {
                self.finish(ticket.0 as usize, result)?;
            }
        }
        Ok(())
    }

    fn write(&mut self, offset: u64) -> Result<ImageIo, PoolExhausted> {
        let mut buffer = self.blocking.client().pool().alloc(self.pattern.len())?;
        buffer.copy_from_slice(&self.pattern);
        let mark = self.random.next_u64().to_le_bytes();
        for block in buffer.chunks_mut(4096) {
            let len = block.len().min(mark.len());
            block[..len].copy_from_slice(&mark[..len]);
        }
        Ok(ImageIo::Write { offset: ByteOffset(offset), data: buffer.freeze(), fua: false })
    }

    fn finish(&mut self, slot: usize, result: Result<IoDone, IoError>) -> Result<(), LoadError> {
        let Request { write, offset } = self.requests[slot].take().expect("a completion for every request");
        let len = self.settings.io_len;
        let kind = if write { "write" } else { "read" };
        let done = result.map_err(|error| LoadError::Io { kind, offset, len, error })?;
        let report = &mut self.report;
        report.ops += 1;
        report.bytes += len;
        report.resends += u64::from(done.waterfall.resends);
        let latencies = if write { &mut report.writes } else { &mut report.reads };
        latencies.saturating_record(done.waterfall.total_ns.max(1));
        if write {
            report.legs.add(&done.waterfall);
            let copies = done.waterfall.copies;
            report.copies_min = Some(report.copies_min.map_or(copies, |least| least.min(copies)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_repeat_with_their_seed_and_stay_below_the_bound() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            (0..100).map(|_| random.below(7)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!((0..7).all(|number| draw(3).contains(&number)));
        assert!(draw(3).iter().all(|number| *number < 7));
    }

    #[test]
    fn latencies_come_out_in_microseconds() {
        let mut latencies = histogram();
        (1..=1000).for_each(|at| latencies.saturating_record(at * 1000));
        let figures = Latency::of(&latencies);
        assert_eq!(figures.count, 1000);
        assert!((figures.p50_us - 500.0).abs() < 2.0, "{figures:?}");
        assert!((figures.p99_us - 990.0).abs() < 2.0, "{figures:?}");
        assert!((figures.max_us - 1000.0).abs() < 2.0, "{figures:?}");
    }
}
