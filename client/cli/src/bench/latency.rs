//! How latencies stand in tables.

use crate::output::Align;
use loligo_bench::load::Latency;

/// The columns of one latency.
pub const COLUMNS: [(&str, Align); 6] = [
    ("COUNT", Align::Right),
    ("MEAN us", Align::Right),
    ("P50 us", Align::Right),
    ("P99 us", Align::Right),
    ("P99.9 us", Align::Right),
    ("MAX us", Align::Right),
];

/// What stands in them, with `figure` for the microseconds.
pub fn cells(latency: &Latency, figure: impl Fn(f64) -> String) -> [String; 6] {
    let Latency { count, mean_us, p50_us, p99_us, p99_9_us, max_us, .. } = latency;
    [
        count.to_string(),
        figure(*mean_us),
        figure(*p50_us),
        figure(*p99_us),
        figure(*p99_9_us),
        figure(*max_us),
    ]
}
