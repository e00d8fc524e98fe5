//! Fewer faults that show the same: halves of the plan are dropped, then quarters, down to single ones.

use super::run::{Order, Outcome, run};

/// The smallest failing run found with at most `tries` further runs; `None` when even the first try of all faults does
/// not fail. `go_on` may end it earlier.
pub fn shrink(
    order: &Order,
    failed: &Outcome,
    tries: u32,
    mut go_on: impl FnMut() -> bool,
) -> (Vec<u32>, Outcome) {
    let mut best = (failed.plan.numbers(), failed.clone());
    let mut left = tries;
    let mut size = best.0.len().div_ceil(2).max(1);
    while size > 0 && !best.0.is_empty() {
        let mut dropped = false;
        let mut at = 0;
        while at < best.0.len() {
            if left == 0 || !go_on() {
                return best;
            }
            left -= 1;
            let mut fewer = best.0.clone();
            fewer.drain(at..(at + size).min(fewer.len()));
            let outcome = run(&Order { only: Some(fewer.clone()), ..order.clone() });
            if outcome.failure.is_some() {
                best = (fewer, outcome);
                dropped = true;
            } else {
                at += size;
            }
        }
        if size == 1 && !dropped {
            break;
        }
        size = if size == 1 { 1 } else { size / 2 };
    }
    best
}
