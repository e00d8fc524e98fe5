//! Whether one build is faster than another: pure statistics over rounds.
//!
//! A machine has moods: what is measured within one round depends on the minute, so the unit is the round, and of
//! each round one number per figure, its median (or another quantile). Two sets of rounds are told apart by the
//! Mann-Whitney test, which asks only which values are larger and does not care about outliers, with its exact
//! distribution; the ratio's interval is that of Hodges and Lehmann over the logarithms, the same test turned around, so
//! that verdict and interval never contradict each other. Several figures at once share the rate of false alarms (Bonferroni).

use serde::Serialize;

/// False alarms in all figures of one comparison together: one comparison in twenty of equal builds.
pub const FALSE_ALARMS_MAX: f64 = 0.05;
/// Rounds of each side that a comparison of one figure needs at least: with fewer not even a complete separation is
/// rarer than one in twenty (two of 20 orders at three rounds each, two of 70 at four).
pub const ROUNDS_MIN: usize = 4;

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Latencies, CPU time.
    Lower,
    /// Throughput.
    Higher,
}

/// What a comparison found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The difference is larger than chance makes it, in the good direction.
    Better,
    /// It may be chance.
    Same,
    /// It is larger than chance makes it, in the bad direction.
    Worse,
}

/// Why rounds cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// Too few rounds to tell a difference from chance.
    #[error("{have} rounds cannot be told from chance: measure at least {ROUNDS_MIN} on each side")]
    TooFewRounds {
        /// The smaller side's.
        have: usize,
    },
    /// Something that is no measurement.
    #[error("a round's figure is not a number above zero")]
    NotPositive,
}

/// One figure of two builds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// New ÷ old: the middle of all ratios of a new round to an old one.
    pub ratio: f64,
    /// The ratio lies above this ...
    pub ratio_low: f64,
    /// ... and below this, at the confidence that the number of figures asks for; 0 and infinite when the rounds are
    /// too few for that confidence.
    pub ratio_high: f64,
    /// What it means.
    pub verdict: Verdict,
}

/// Compares the rounds of one figure, one of `figures` that are compared together.
///
/// # Errors
/// See [`CompareError`].
pub fn compare(old: &[f64], new: &[f64], better: Better, figures: usize) -> Result<Comparison, CompareError> {
    let have = old.len().min(new.len());
    if have < ROUNDS_MIN {
        return Err(CompareError::TooFewRounds { have });
    }
    if !old.iter().chain(new).all(|value| value.is_finite() && *value > 0.0) {
        return Err(CompareError::NotPositive);
    }
    let mut ratios: Vec<f64> = old.iter().flat_map(|old| new.iter().map(move |new| new / old)).collect();
    ratios.sort_by(f64::total_cmp);
    let alpha = FALSE_ALARMS_MAX / figures.max(1) as f64;
    let (ratio_low, ratio_high) = match cut(old.len(), new.len(), alpha) {
        // The interval leaves so many of the ratios outside at each end.
        Some(cut) => (ratios[cut], ratios[ratios.len() - 1 - cut]),
        None => (0.0, f64::INFINITY),
    };
    let verdict = match better {
        _ if ratio_low <= 1.0 && ratio_high >= 1.0 => Verdict::Same,
        Better::Lower if ratio_high < 1.0 => Verdict::Better,
        Better::Higher if ratio_low > 1.0 => Verdict::Better,
        Better::Lower | Better::Higher => Verdict::Worse,
    };
    Ok(Comparison { ratio: middle(&ratios), ratio_low, ratio_high, verdict })
}

/// The median; `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    (!sorted.is_empty()).then(|| middle(&sorted))
}

fn middle(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { f64::midpoint(sorted[half - 1], sorted[half]) }
}

/// The largest `cut` so that Mann and Whitney's U is at most `cut` with a chance of no more than `alpha / 2`; `None`
/// when even U = 0 is likelier.
fn cut(old: usize, new: usize, alpha: f64) -> Option<usize> {
    let chances = u_distribution(old, new);
    let mut sum = 0.0;
    let within = chances.iter().take_while(|chance| {
        sum += **chance;
        sum <= alpha / 2.0
    });
    within.count().checked_sub(1)
}

/// The chance of each value of U, the number of pairs in which the first side is larger, when both sides are alike.
///
/// The largest value belongs to one side or the other, in proportion to their sizes, which gives the chances of `m` and
/// `n` values from those of one fewer.
fn u_distribution(old: usize, new: usize) -> Vec<f64> {
    // Chances for (m, n) with the current m and every n up to `new`.
    let mut row: Vec<Vec<f64>> = vec![vec![1.0]; new + 1];
    for m in 1..=old {
        let mut next: Vec<Vec<f64>> = vec![vec![1.0]];
        for n in 1..=new {
            let share = m as f64 / (m + n) as f64;
            let mut chances = vec![0.0; m * n + 1];
            // The largest is of the first side: larger than all n of the other.
            row[n].iter().enumerate().for_each(|(u, chance)| chances[u + n] += share * chance);
            next[n - 1].iter().enumerate().for_each(|(u, chance)| chances[u] += (1.0 - share) * chance);
            next.push(chances);
        }
        row = next;
    }
    row.pop().expect("one entry for every n from 0 on")
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_reactor::random::Random;
    use proptest::prelude::*;

    /// A round's median latency on a machine with moods: 200 µs, 5 % noise, and one round in ten disturbed.
    fn round(random: &mut Random, base: f64) -> f64 {
        // Twelve uniform numbers make a normal one.
        let normal = (0..12).map(|_| random.below(1 << 20) as f64 / f64::from(1 << 20)).sum::<f64>() - 6.0;
        let disturbed = if random.one_in(10) { 1.0 + random.below(100) as f64 / 25.0 } else { 1.0 };
        base * (1.0 + 0.05 * normal).max(0.5) * disturbed
    }

    fn rounds(random: &mut Random, base: f64, count: usize) -> Vec<f64> {
        (0..count).map(|_| round(random, base)).collect()
    }

    #[test]
    fn equal_builds_are_the_same_in_nineteen_of_twenty_comparisons_of_all_figures() {
        for (count, figures) in [(5, 1), (10, 1), (10, 8), (15, 25)] {
            let mut random = Random::new(count as u64);
            let tries = 4000;
            let alarms = (0..tries).filter(|_| {
                (0..figures).any(|_| {
                    let (old, new) = (rounds(&mut random, 200.0, count), rounds(&mut random, 200.0, count));
                    compare(&old, &new, Better::Lower, figures).unwrap().verdict != Verdict::Same
                })
            });
            let rate = alarms.count() as f64 / f64::from(tries);
            // Three standard deviations of what 4000 tries can show.
            assert!(rate <= FALSE_ALARMS_MAX + 0.0104, "{count} rounds, {figures} figures: {rate}");
        }
    }

    #[test]
    fn twenty_microseconds_more_on_two_hundred_are_found() {
        let mut random = Random::new(3);
        let tries = 500;
        let found = (0..tries).filter(|_| {
            let (old, new) = (rounds(&mut random, 200.0, 15), rounds(&mut random, 220.0, 15));
            compare(&old, &new, Better::Lower, 1).unwrap().verdict == Verdict::Worse
        });
        let found = found.count();
        assert!(found * 10 >= tries * 9, "{found} of {tries}");
    }

    #[test]
    fn the_distribution_is_that_of_the_tables() {
        // Mann and Whitney (1947), table I: three against three, 20 orders.
        let chances = u_distribution(3, 3);
        let orders: Vec<f64> = chances.iter().map(|chance| (chance * 20.0).round()).collect();
        assert_eq!(orders, [1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 2.0, 1.0, 1.0]);
        // The tables' critical values at 5 %, both sides: 0 for 4 and 4, 2 for 5 and 5, 23 for 10 and 10.
        assert_eq!([4, 5, 10].map(|n| cut(n, n, 0.05)), [Some(0), Some(2), Some(23)]);
        assert_eq!(cut(3, 3, 0.05), None);
    }

    #[test]
    fn what_cannot_be_compared_is_said() {
        let few = compare(&[1.0; 3], &[1.0; 9], Better::Lower, 1);
        assert_eq!(few, Err(CompareError::TooFewRounds { have: 3 }));
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let odd = [1.0, 1.0, 1.0, 1.0, value];
            assert_eq!(compare(&odd, &[1.0; 5], Better::Lower, 1), Err(CompareError::NotPositive));
        }
        let many = compare(&[1.0; 4], &[9.0; 4], Better::Lower, 100).unwrap();
        assert_eq!(
            (many.verdict, many.ratio_low),
            (Verdict::Same, 0.0),
            "too few rounds for so many figures"
        );
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0, 10.0]), Some(2.5));
    }

    proptest! {
        #[test]
        fn a_comparison_turned_around_is_its_mirror(
            old in prop::collection::vec(1.0..1000.0f64, 4..12),
            new in prop::collection::vec(1.0..1000.0f64, 4..12),
        ) {
            let there = compare(&old, &new, Better::Lower, 1).unwrap();
            let back = compare(&new, &old, Better::Lower, 1).unwrap();
            prop_assert!((there.ratio_low * back.ratio_high - 1.0).abs() < 1e-9);
            prop_assert!(there.ratio_low <= there.ratio && there.ratio <= there.ratio_high);
            let mirrored = match there.verdict {
                Verdict::Better => Verdict::Worse,
                Verdict::Same => Verdict::Same,
                Verdict::Worse => Verdict::Better,
            };
            prop_assert_eq!(back.verdict, mirrored);
            let throughput = compare(&old, &new, Better::Higher, 1).unwrap();
            prop_assert_eq!(throughput.verdict, mirrored);
        }

        #[test]
        fn the_unit_does_not_matter(
            old in prop::collection::vec(1.0..1000.0f64, 4..12),
            new in prop::collection::vec(1.0..1000.0f64, 4..12),
        ) {
            // A power of two, so that nothing is rounded.
            let scaled = |values: &[f64]| values.iter().map(|value| value * 1024.0).collect::<Vec<_>>();
            prop_assert_eq!(
                compare(&old, &new, Better::Lower, 3),
                compare(&scaled(&old), &scaled(&new), Better::Lower, 3)
            );
        }
    }
}
