//! Counters and histograms of one shard: cheap enough for every op.

/// Buckets by powers of two of a nanosecond: up to 2^39 ns, nine minutes.
const BUCKETS: usize = 40;

/// Times in buckets that double.
#[derive(Clone, Copy, Debug)]
pub struct Histogram {
    buckets: [u64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: [0; BUCKETS] }
    }
}

impl Histogram {
    /// Counts one time, in nanoseconds.
    pub fn record(&mut self, nanos: u64) {
        let bucket = (64 - nanos.leading_zeros()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)] += 1;
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// An upper bound in nanoseconds of the time that `part` per thousand stay below; 0 when nothing was counted.
    pub fn quantile(&self, part: u32) -> u64 {
        let wanted = (self.count() * u64::from(part)).div_ceil(1000);
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted && seen > 0 {
                return 1 << bucket;
            }
        }
        0
    }
}

/// Sums since the start of the shard.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShardCounters {
    /// Client ops that came here.
    pub ops: u64,
    /// Ops that came to the wrong core.
    pub forwarded: u64,
    /// Ops answered `Busy` because their connection had too many in flight.
    pub over_credit: u64,
    /// Ops refused because they named a session that is not their connection's.
    pub foreign_session: u64,
    /// Messages to peers dropped because there was no connection; whoever waits asks again.
    pub unsent: u64,
    /// From arrival to reply, writes.
    pub write_residence: Histogram,
    /// From arrival to reply, reads and the rest.
    pub read_residence: Histogram,
    /// Device time of commits.
    pub device_write: Histogram,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_bound_what_was_counted() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(500), 0);
        for _ in 0..99 {
            histogram.record(100);
        }
        histogram.record(1_000_000);
        assert_eq!(histogram.quantile(500), 128);
        assert_eq!(histogram.quantile(990), 128);
        assert_eq!(histogram.quantile(1000), 1 << 20);
        histogram.record(u64::MAX);
        assert_eq!(histogram.count(), 101);
    }
}
