//! What an open image has done so far.

use crate::error::IoError;
use crate::event::{ImageIo, Waterfall};
use hdrhistogram::Histogram;

/// Latencies are kept from 1 µs to 10 minutes with three digits.
const LATENCY_NS_MIN: u64 = 1_000;
const LATENCY_NS_MAX: u64 = 600_000_000_000;
const LATENCY_DIGITS: u8 = 3;

/// Counters and latencies of one kind of request.
#[derive(Clone, Debug)]
pub struct KindStats {
    /// Requests that succeeded.
    pub ops: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// From `submit` to completion, in nanoseconds, of those that succeeded.
    pub latency_ns: Histogram<u64>,
    /// Where the time of the newest one went.
    pub last: Waterfall,
}

impl Default for KindStats {
    fn default() -> Self {
        let latency_ns = Histogram::new_with_bounds(LATENCY_NS_MIN, LATENCY_NS_MAX, LATENCY_DIGITS)
            .expect("the bounds are constant and in order");
        Self { ops: 0, bytes: 0, errors: 0, latency_ns, last: Waterfall::default() }
    }
}

/// Counters and latencies of one open image.
#[derive(Clone, Debug, Default)]
pub struct ImageStats {
    /// Reads.
    pub read: KindStats,
    /// Writes.
    pub write: KindStats,
    /// Discards, write-zeroes, flushes, extents.
    pub other: KindStats,
    /// Object operations that were sent again.
    pub resends: u64,
}

impl ImageStats {
    pub(crate) fn record(&mut self, io: &ImageIo, len: u64, outcome: Result<&Waterfall, IoError>) {
        let kind = match io {
            ImageIo::Read { .. } => &mut self.read,
            ImageIo::Write { .. } => &mut self.write,
            _ => &mut self.other,
        };
        let Ok(waterfall) = outcome else {
            kind.errors += 1;
            return;
        };
        kind.ops += 1;
        kind.bytes = kind.bytes.saturating_add(len);
        kind.latency_ns.saturating_record(waterfall.total_ns);
        kind.last = *waterfall;
        self.resends += u64::from(waterfall.resends);
    }
}
