//! R=3, SIGKILL under a checking writer. `kill-cycles` is the long form.

use loligo_tests::cycles::{CycleOptions, Summary, run};

fn cycles(volatile_cache: bool, seed: u64) -> Summary {
    let options = CycleOptions { seed, cycles: 12, volatile_cache };
    run(&options, |_, _| ()).unwrap_or_else(|error| panic!("{error:?}"))
}

#[test]
fn killed_processes_lose_no_acked_write() {
    let summary = cycles(false, 11);
    assert!(summary.acked > 100, "the writer must have been busy: {summary:?}");
}

#[test]
fn power_cuts_lose_no_acked_write() {
    let summary = cycles(true, 12);
    assert!(summary.acked > 100, "the writer must have been busy: {summary:?}");
}
