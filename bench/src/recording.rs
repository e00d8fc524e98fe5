//! What a benchmark measured, as a file that lives beside the code: JSON, with the figures of every round and the
//! latencies of all rounds in buckets.

use crate::compare::{self, Better, CompareError, Comparison};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The version that this program writes and reads.
pub const VERSION: u32 = 1;

/// A run of a benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recording {
    /// Of this format.
    pub version: u32,
    /// What it is called.
    pub name: String,
    /// What was measured how, in words: figures of different conditions are not compared.
    pub conditions: BTreeMap<String, String>,
    /// Where: for readers, not compared.
    pub host: BTreeMap<String, String>,
    /// What each test measured, by the test's name.
    pub tests: BTreeMap<String, Test>,
}

/// One test of a recording.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Test {
    /// One per round, in their order.
    pub rounds: Vec<Round>,
    /// Latencies of all rounds: nanoseconds at most, and how many.
    pub latency_ns: Vec<(u64, u64)>,
}

/// One round of one test.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Median latency, in microseconds.
    pub p50_us: f64,
    /// 99 of 100 are at most this, in microseconds.
    pub p99_us: f64,
    /// 999 of 1000 are at most this, in microseconds.
    pub p99_9_us: f64,
    /// Operations in a second.
    pub iops: f64,
    /// CPU time of all OSDs for one operation, in microseconds; `None` where their processes are not known.
    pub cpu_us_per_op: Option<f64>,
}

/// A figure of two recordings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The test.
    pub test: String,
    /// The figure.
    pub figure: &'static str,
    /// Its median over the rounds, in the old recording.
    pub old: f64,
    /// In the new one.
    pub new: f64,
    /// What it means.
    #[serde(flatten)]
    pub comparison: Comparison,
}

/// Why two recordings cannot be compared, or one not be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// Not a recording.
    #[error("it is no recording: {0}")]
    Json(#[from] serde_json::Error),
    /// Of another program.
    #[error("it is a recording of format {0}, and this program knows {VERSION}: record it again")]
    Version(u32),
    /// They measured different things.
    #[error("{condition} differs: {old:?} there, {new:?} now")]
    Conditions {
        /// What of.
        condition: String,
        /// In the old one.
        old: String,
        /// In the new one.
        new: String,
    },
    /// The rounds do not suffice.
    #[error(transparent)]
    Compare(#[from] CompareError),
}

impl Test {
    /// Keeps the latencies of all rounds, to one part in a hundred: a finer histogram makes files of megabytes.
    pub fn set_latencies(&mut self, latencies: &Histogram<u64>) {
        let mut coarse = Histogram::<u64>::new(2).expect("two digits are valid");
        coarse.add(latencies).expect("it grows with what is added");
        self.latency_ns = coarse
            .iter_recorded()
            .map(|at| (at.value_iterated_to(), at.count_since_last_iteration()))
            .collect();
    }

    /// The values of a figure, one per round; empty unless every round has it.
    fn values(&self, figure: impl Fn(&Round) -> Option<f64>) -> Vec<f64> {
        self.rounds.iter().map(figure).collect::<Option<_>>().unwrap_or_default()
    }
}

/// How a figure is taken from a round; `None` where it was not measured.
type Figure = fn(&Round) -> Option<f64>;

/// What two recordings are compared by. Throughput at a fixed depth follows from the latency, and the tail of a round
/// is too uncertain: more figures would only blunt the comparison of each.
const FIGURES: [(&str, Figure); 2] =
    [("p50_us", |round| Some(round.p50_us)), ("cpu_us_per_op", |round| round.cpu_us_per_op)];

impl Recording {
    /// Reads one.
    ///
    /// # Errors
    /// When it is none, or of another format.
    pub fn parse(text: &str) -> Result<Self, RecordingError> {
        #[derive(Deserialize)]
        struct Header {
            version: u32,
        }
        let Header { version } = serde_json::from_str(text)?;
        if version != VERSION {
            return Err(RecordingError::Version(version));
        }
        Ok(serde_json::from_str(text)?)
    }

    /// As a file's content: in one line, since pretty lines of buckets are ten times as long.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings, numbers and lists are JSON") + "\n"
    }

    /// Holds this against an older recording: every figure that both have.
    ///
    /// # Errors
    /// When they measured different things, or with too few rounds.
    pub fn against(&self, old: &Recording) -> Result<Vec<Compared>, RecordingError> {
        self.check_conditions(old)?;
        let mut pairs = Vec::new();
        for (name, new) in &self.tests {
            let Some(old) = old.tests.get(name) else { continue };
            for (figure, value) in FIGURES {
                let (old, new) = (old.values(value), new.values(value));
                if !old.is_empty() && !new.is_empty() {
                    pairs.push((name, figure, old, new));
                }
            }
        }
        let count = pairs.len();
        let compared = |(test, figure, old, new): (&String, _, Vec<f64>, Vec<f64>)| {
            let comparison = compare::compare(&old, &new, Better::Lower, count)?;
            let middle = |values: &[f64]| compare::median(values).unwrap_or_default();
            Ok(Compared { test: test.clone(), figure, old: middle(&old), new: middle(&new), comparison })
        };
        pairs.into_iter().map(compared).collect()
    }

    fn check_conditions(&self, old: &Recording) -> Result<(), RecordingError> {
        let names = self.conditions.keys().chain(old.conditions.keys());
        let value = |of: &Recording, name: &String| of.conditions.get(name).cloned().unwrap_or_default();
        for condition in names {
            let (old, new) = (value(old, condition), value(self, condition));
            if old != new {
                return Err(RecordingError::Conditions { condition: condition.clone(), old, new });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Verdict;

    fn recording(p50: f64, cpu: Option<f64>) -> Recording {
        let round = |at: u32| Round {
            p50_us: p50 + f64::from(at),
            p99_us: 2.0 * p50,
            p99_9_us: 3.0 * p50,
            iops: 1e6 / p50,
            cpu_us_per_op: cpu,
        };
        let test = Test { rounds: (0..6).map(round).collect(), latency_ns: vec![(200_000, 6)] };
        Recording {
            version: VERSION,
            name: "base".to_owned(),
            conditions: BTreeMap::from([("poll_mode".to_owned(), "adaptive".to_owned())]),
            host: BTreeMap::new(),
            tests: BTreeMap::from([("qd1_write".to_owned(), test)]),
        }
    }

    #[test]
    fn a_recording_survives_its_file_and_compares_as_the_same_with_itself() {
        let base = recording(200.0, Some(50.0));
        let read = Recording::parse(&base.to_json()).unwrap();
        assert_eq!(read, base);
        let compared = read.against(&base).unwrap();
        let found: Vec<_> = compared.iter().map(|one| (one.figure, one.comparison.verdict)).collect();
        assert_eq!(found, [("p50_us", Verdict::Same), ("cpu_us_per_op", Verdict::Same)]);
    }

    #[test]
    fn a_slower_build_is_worse_and_what_only_one_side_has_is_left_out() {
        let compared = recording(220.0, None).against(&recording(200.0, Some(50.0))).unwrap();
        let [only] = compared.as_slice() else { panic!("{compared:?}") };
        assert_eq!((only.figure, only.comparison.verdict), ("p50_us", Verdict::Worse));
        assert!(only.comparison.ratio_low > 1.0 && only.comparison.ratio > 1.08, "{only:?}");
    }

    #[test]
    fn other_conditions_formats_and_texts_are_refused() {
        let base = recording(200.0, None);
        let mut parked = base.clone();
        parked.conditions.insert("poll_mode".to_owned(), "park".to_owned());
        let told = parked.against(&base).unwrap_err().to_string();
        assert_eq!(told, "poll_mode differs: \"adaptive\" there, \"park\" now");
        let newer = Recording { version: VERSION + 1, ..base };
        assert!(matches!(Recording::parse(&newer.to_json()), Err(RecordingError::Version(2))));
        assert!(matches!(Recording::parse("{}"), Err(RecordingError::Json(_))));
    }

    #[test]
    fn latencies_become_buckets_that_hold_every_operation() {
        let mut latencies = crate::load::histogram();
        (1..=1000).for_each(|at| latencies.saturating_record(at * 1000));
        let mut test = Test::default();
        test.set_latencies(&latencies);
        assert_eq!(test.latency_ns.iter().map(|(_, count)| count).sum::<u64>(), 1000);
        assert!(test.latency_ns.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
