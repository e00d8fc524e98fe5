//! The simulated cluster: seeds that once showed something, and a few fresh ones. `cargo sim SEED` replays one.

use loligo_tests::sim::options::Overrides;
use loligo_tests::sim::run::{Order, catch_panics, run};
use loligo_tests::sim::workload::name_of;

/// Runs a seed as it is drawn.
fn passes(seed: u64) {
    passes_with(seed, Overrides::default());
}

/// Three OSDs, four clients, and as many requests as they can be given: what is measured and soaked.
fn busy() -> Overrides {
    Overrides { osds: Some(3), clients: Some(4), ops_per_second: Some(850), ..Overrides::default() }
}

/// Runs a seed; a failure says what went wrong and with which options.
fn passes_with(seed: u64, overrides: Overrides) {
    println!("SEED={seed}");
    let outcome = run(&Order { seed, overrides, ..Order::default() });
    if let Some(failure) = &outcome.failure {
        println!("{:#?}", outcome.options);
        outcome.plan.events.iter().for_each(|event| println!("{event}"));
        if let Some((register, events)) = &failure.register {
            println!("{}\n{}", name_of(*register), events.join("\n"));
        }
        panic!("SEED={seed}: {}; replay: cargo sim {seed}{overrides}", failure.what);
    }
}

/// An OSD with several shards that has no PG wanted to be polled without end until its first report.
#[test]
fn an_osd_without_pgs_parks() {
    catch_panics();
    passes(1);
}

/// A client offered the same op to a full send queue in every poll, and time stood still.
#[test]
fn a_full_send_queue_is_left_alone_for_a_while() {
    catch_panics();
    passes(1002);
    passes(1012);
}

/// A watch that was given up after the client's time limit was never armed again, so a new size was never seen.
#[test]
fn an_image_that_grows_in_an_outage_is_seen_to_have_grown() {
    catch_panics();
    passes(20_001);
    passes(20_041);
}

/// A member refused a query of an older interval by naming the newest, and that passed for its promise.
#[test]
fn a_refused_query_is_no_promise() {
    catch_panics();
    passes(90_211);
}

/// A copy of a write from a connection that was gone came after the next connection's, and took the reply along.
#[test]
fn a_late_copy_leaves_the_reply_to_its_client() {
    catch_panics();
    passes_with(400_129, busy());
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

/// A few of the bugs of `cargo sim --mutants`.
#[cfg(feature = "planted")]
#[test]
fn planted_bugs_are_noticed() {
    use loligo_reactor::planted::Bug;
    use loligo_tests::sim::mutants::hunt;
    catch_panics();
    let bugs = [
        Bug::AckBeforeSecondCopy,
        Bug::DiscardTakesNeighbour,
        Bug::PieceShifted,
        Bug::CommitBeforeDurable,
        Bug::MapNotDurable,
        Bug::ExtentTailMisplaced,
    ];
    for bug in bugs {
        let fate = hunt(bug, 1, 12);
        assert!(fate.killed_by.is_some(), "no check notices {bug:?} in {} seeds", fate.seeds);
    }
}
