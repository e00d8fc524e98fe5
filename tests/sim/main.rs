//! The simulated cluster: seeds that once showed something, and a few fresh ones. `cargo sim SEED` replays one.

use loligo_tests::sim::run::{Order, catch_panics, run};
use loligo_tests::sim::workload::name_of;

/// Runs a seed; a failure says what went wrong and with which options.
fn passes(seed: u64) {
    println!("SEED={seed}");
    let outcome = run(&Order { seed, ..Order::default() });
    if let Some(failure) = &outcome.failure {
        println!("{:#?}", outcome.options);
        outcome.plan.events.iter().for_each(|event| println!("{event}"));
        if let Some((register, events)) = &failure.register {
            println!("{}\n{}", name_of(*register), events.join("\n"));
        }
        panic!("SEED={seed}: {}; replay: cargo sim {seed}", failure.what);
    }
}

/// An OSD with several shards that has no PG wanted to be polled without end until its first report.
#[test]
fn an_osd_without_pgs_parks() {
    catch_panics();
    passes(1);
}

#[test]
fn the_same_seed_is_the_same_run() {
    catch_panics();
    for seed in 20..24 {
        let order = Order { seed, ..Order::default() };
        let (first, second) = (run(&order), run(&order));
        assert_eq!(first.hash, second.hash, "SEED={seed}");
        assert_eq!(first.failure, second.failure, "SEED={seed}");
    }
}

/// Seeds that nobody has seen before come with every day.
#[test]
fn a_few_fresh_seeds_pass() {
    catch_panics();
    for seed in 100..110 {
        passes(seed);
    }
}
