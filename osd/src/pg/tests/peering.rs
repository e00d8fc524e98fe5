//! A new interval: crashes at every step, and histories that cannot be chosen from.

use super::cluster::{Cluster, is_done, object, request, write};
use crate::pg::PgEvent;
use crate::pg::phase::PhaseKind;
use loligo_config::id::{Epoch, OsdId};
use loligo_net::wire::op::OpKind;

/// One step of a fair schedule; false when nothing moved.
fn turn(cluster: &mut Cluster, at: usize) -> bool {
    let node = at % 3;
    match at / 3 % 4 {
        0 => cluster.take_map(node),
        1 => cluster.commit(node),
        2 => cluster.deliver(node, (node + 1) % 3),
        _ => cluster.deliver(node, (node + 2) % 3),
    }
}

/// Members with different tails: the second has all of it, the third a part.
fn with_tails() -> Cluster {
    let mut cluster = Cluster::new(3);
    cluster.settle();
    cluster.run(write(1, 1, object(0), 0, 8192), Some(&[1; 8192]));
    for number in 2..6u64 {
        let op = write(1, number, object(number % 2), 0, 4096);
        cluster.submit(0, op, Some(&[number as u8; 4096]));
    }
    cluster.submit(0, request(1, 6, OpKind::Discard, object(0), 4096, 4096), None);
    while cluster.deliver(0, 1) {}
    while cluster.commit(1) {}
    (0..2).for_each(|_| {
        cluster.deliver(0, 2);
    });
    (0..2).for_each(|_| {
        cluster.commit(2);
    });
    cluster.kill(0, 1);
    cluster
}

#[test]
fn the_newest_tail_is_made_durable_everywhere() {
    let mut cluster = with_tails();
    cluster.settle();
    assert_eq!(cluster.phase(0), Some(PhaseKind::Active));
    cluster.assert_members_equal();
    assert_eq!(cluster.nodes[2].store.now.last.sequence, 6);
    assert_eq!(cluster.bytes(0, object(0), 2)[4096], 0, "the discard is part of the tail");
}

/// Any member dies after any number of steps of peering; afterwards all is well again.
#[test]
fn a_crash_at_any_step_of_peering_is_survived() {
    for victim in 0..3 {
        for steps in 0..120 {
            let mut cluster = with_tails();
            cluster.restart(0);
            for (a, b) in cluster.cut.clone() {
                cluster.connect(a, b);
            }
            (0..steps).for_each(|at| {
                turn(&mut cluster, at);
            });
            cluster.kill(victim, steps % 3);
            cluster.settle();
            cluster.assert_members_equal();
            assert_eq!(cluster.nodes[0].store.now.last.sequence, 6, "victim {victim}, step {steps}");
            assert!(is_done(&cluster.run(write(1, 9, object(3), 0, 4096), Some(&[9; 4096]))));
        }
    }
}

/// A connection closes after any number of steps of peering.
#[test]
fn a_lost_connection_at_any_step_of_peering_is_survived() {
    for pair in [(0, 1), (0, 2), (1, 2)] {
        for steps in 0..120 {
            let mut cluster = with_tails();
            cluster.restart(0);
            for (a, b) in cluster.cut.clone() {
                cluster.connect(a, b);
            }
            (0..steps).for_each(|at| {
                turn(&mut cluster, at);
            });
            cluster.disconnect(pair.0, pair.1);
            cluster.settle();
            assert_eq!(cluster.phase(0), Some(PhaseKind::Active));
            cluster.assert_members_equal();
        }
    }
}

#[test]
fn a_down_member_stops_service_until_it_is_back() {
    let mut cluster = Cluster::new(3);
    cluster.settle();
    cluster.kill(1, 0);
    (0..3).for_each(|node| {
        cluster.take_map(node);
    });
    assert_eq!(cluster.phase(0), Some(PhaseKind::Down));
    assert_eq!(cluster.phase(2), Some(PhaseKind::Down));
    cluster.settle();
    assert_eq!(cluster.phase(0), Some(PhaseKind::Active));
}

#[test]
fn a_broken_history_is_reported_and_not_guessed() {
    let mut cluster = with_tails();
    cluster.nodes[2].store.incomplete = true;
    cluster.settle();
    assert_eq!(cluster.phase(0), Some(PhaseKind::Incomplete));
    let mut cluster = with_tails();
    cluster.nodes[1].store.log_start = 1000;
    cluster.settle();
    assert_eq!(cluster.phase(0), Some(PhaseKind::Incomplete), "the log does not reach back");
}

/// Repaired in place, or what was read wrongly once is read well now: nobody has to restart anything.
#[test]
fn an_incomplete_pg_is_looked_at_again_when_a_member_may_answer_differently() {
    let mut cluster = with_tails();
    cluster.nodes[2].store.incomplete = true;
    cluster.settle();
    assert_eq!(cluster.phase(0), Some(PhaseKind::Incomplete));
    cluster.nodes[2].store.incomplete = false;
    let epoch = cluster.epoch;
    cluster.disconnect(0, 2);
    cluster.settle();
    assert_eq!(cluster.phase(0), Some(PhaseKind::Active), "the member came back");
    assert_eq!(cluster.epoch, epoch, "in the same interval");

    let mut cluster = with_tails();
    cluster.nodes[2].store.incomplete = true;
    cluster.settle();
    cluster.nodes[2].store.incomplete = false;
    cluster.settle();
    cluster.settle();
    assert_eq!(cluster.phase(0), Some(PhaseKind::Active), "asked again after a while");
}

/// The primary is in the newer interval when the answer to its old question arrives: it must not pass for an answer to
/// the new one, or a member that has promised nothing could still take writes of the interval before.
#[test]
fn a_query_of_an_older_interval_is_no_promise_for_the_newer_one() {
    let mut cluster = Cluster::new(3);
    cluster.settle();
    cluster.new_interval();
    cluster.take_map(0);
    cluster.new_interval();
    (0..2).for_each(|_| {
        cluster.take_map(1);
    });
    assert!(cluster.deliver(0, 1), "the query of the interval that member 1 has left");
    cluster.take_map(0);
    while cluster.deliver(1, 0) {}
    (0..2).for_each(|_| {
        cluster.take_map(2);
    });
    while cluster.deliver(0, 2) || cluster.commit(2) || cluster.commit(0) || cluster.deliver(2, 0) {}
    assert_eq!(cluster.nodes[1].store.now.meta.promised, Epoch(1), "member 1 has not promised");
    assert_eq!(cluster.phase(0), Some(PhaseKind::Querying), "its answer is waited for");
    cluster.settle();
    assert_eq!(cluster.phase(0), Some(PhaseKind::Active));
    cluster.assert_members_equal();
}

/// A mon that was restored from an old copy may say so; nobody goes back, and nothing is served.
#[test]
fn an_interval_older_than_the_promise_is_not_recorded() {
    let mut cluster = Cluster::new(3);
    cluster.settle();
    cluster.new_interval();
    cluster.settle();
    cluster.view.since = Epoch(1);
    cluster.publish();
    for at in 0..600 {
        turn(&mut cluster, at);
    }
    for node in &cluster.nodes {
        assert_eq!((node.store.now.meta.promised, node.store.in_flight()), (Epoch(2), 0));
    }
    assert_eq!(cluster.phase(0), Some(PhaseKind::Querying));
}

#[test]
fn messages_without_sense_change_nothing() {
    let mut cluster = Cluster::new(3);
    cluster.settle();
    cluster.run(write(1, 1, object(0), 0, 4096), Some(&[1; 4096]));
    // Everything that was ever sent while a member rejoins, to every member, from everybody, in every state.
    let mut seen = Vec::new();
    cluster.kill(2, 0);
    cluster.restart(2);
    for (a, b) in cluster.cut.clone() {
        cluster.connect(a, b);
    }
    for at in 0..600 {
        seen.extend(cluster.channels.values().flatten().cloned());
        seen.truncate(400);
        turn(&mut cluster, at);
    }
    cluster.settle();
    for (message, payload) in seen {
        for to in 0..3 {
            for from in 0..4 {
                let (message, payload, arrived) = (message, payload.clone(), cluster.now);
                cluster.step(to, PgEvent::Peer { from: OsdId(from), message, payload, arrived });
            }
        }
    }
    cluster.channels.clear();
    cluster.settle();
    assert_eq!(cluster.phase(0), Some(PhaseKind::Active));
    assert!(is_done(&cluster.run(write(1, 2, object(0), 0, 4096), Some(&[2; 4096]))));
    cluster.assert_members_equal();
}
