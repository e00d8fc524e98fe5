//! R=3, SIGKILL under a checking writer. `kill-cycles` is the long form.

use loligo_tests::cycles::{CycleOptions, Summary, run};

fn cycles(options: CycleOptions) -> Summary {
    run(&options, |_, _| ()).unwrap_or_else(|error| panic!("{error:?}"))
}

#[test]
fn killed_processes_lose_no_acked_write() {
    let summary = cycles(CycleOptions { seed: 11, ..CycleOptions::default() });
    assert!(summary.acked > 100, "the writer must have been busy: {summary:?}");
}

#[test]
fn power_cuts_lose_no_acked_write() {
    let summary = cycles(CycleOptions { seed: 12, volatile_cache: true, ..CycleOptions::default() });
    assert!(summary.acked > 100, "the writer must have been busy: {summary:?}");
}

#[test]
fn osds_with_two_reactors_lose_no_acked_write() {
    for (seed, volatile_cache, cores) in [(13, false, vec![]), (14, true, vec![]), (15, false, vec![0, 1])] {
        let summary = cycles(CycleOptions { seed, cycles: 6, volatile_cache, shards: 2, cores });
        assert!(summary.acked > 100, "the writer must have been busy: {summary:?}");
    }
}
