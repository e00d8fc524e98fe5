//! Ops and replicated writes that find no room: they wait, in order, and nobody has to ask again.

use super::cluster::{Cluster, is_done, object, request, write};
use super::writes::{BLOCK, active};
use crate::pg::shortage::FULL_AFTER;
use crate::pg::{PgEvent, Requester};
use loligo_net::wire::Message;
use loligo_net::wire::op::{OpKind, OpRequest, OpStatus};
use loligo_reactor::env::ConnectionId;

fn assert_all_done(cluster: &Cluster, count: usize) {
    let statuses: Vec<_> = cluster.replies.iter().map(|(_, reply, _)| reply.status).collect();
    assert_eq!(statuses, vec![OpStatus::Done; count]);
    assert_eq!(cluster.nodes[0].pg.as_ref().unwrap().counters().busy, 0);
}

#[test]
fn ops_wait_for_a_busy_store_and_keep_their_order() {
    let mut cluster = active();
    cluster.run(write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    cluster.replies.clear();
    cluster.nodes[0].store.is_busy = true;
    cluster.submit(0, write(1, 2, object(0), 0, BLOCK), Some(&[2; 4096]));
    cluster.submit(0, write(2, 1, object(0), 10, 10), Some(&[3; 10]));
    cluster.submit(0, request(3, 1, OpKind::Read, object(0), 0, BLOCK), None);
    cluster.submit(0, request(4, 1, OpKind::Read, object(1), 0, BLOCK), None);
    cluster.submit(0, request(5, 1, OpKind::Discard, object(2), 0, BLOCK), None);
    cluster.settle();
    assert_eq!(cluster.replies.len(), 1, "only the discard of nothing needs no room");
    cluster.replies.clear();
    cluster.nodes[0].store.is_busy = false;
    cluster.settle();
    assert_all_done(&cluster, 4);
    let read = cluster.replies.iter().find(|(_, reply, _)| reply.op.session.0 == 3).unwrap();
    let data = &read.2.as_ref().unwrap().data;
    assert_eq!(data[..30], [[2; 10], [3; 10], [2; 10]].concat()[..]);
    cluster.assert_members_equal();
}

/// A write of a part of a block has read the rest when it finds no room.
#[test]
fn a_merged_write_waits_with_what_it_has_read() {
    let mut cluster = active();
    cluster.run(write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    cluster.replies.clear();
    cluster.submit(0, write(1, 2, object(0), 10, 10), Some(&[2; 10]));
    cluster.nodes[0].store.is_busy = true;
    assert!(cluster.finish_read(0, 0));
    cluster.submit(0, write(2, 1, object(0), 15, 10), Some(&[3; 10]));
    cluster.settle();
    assert!(cluster.replies.is_empty());
    cluster.nodes[0].store.is_busy = false;
    cluster.settle();
    assert_all_done(&cluster, 2);
    assert_eq!(cluster.bytes(2, object(0), 1)[5..30], [&[1; 5][..], &[2; 5], &[3; 10], &[1; 5]].concat());
    cluster.assert_members_equal();
}

#[test]
fn a_replica_keeps_what_its_store_does_not_take() {
    let mut cluster = active();
    cluster.nodes[1].store.is_busy = true;
    for number in 1..=3 {
        let op = OpRequest { lowest_outstanding: 1, ..write(1, number, object(number), 0, BLOCK) };
        cluster.submit(0, op, Some(&[1; 4096]));
        cluster.deliver(0, 1);
    }
    assert!(cluster.channels.get(&(1, 0)).is_none_or(|channel| channel.is_empty()), "nothing is sent back");
    cluster.nodes[1].store.is_busy = false;
    cluster.make_room(1);
    assert_eq!(cluster.nodes[1].store.in_flight(), 3);
    cluster.settle();
    assert_all_done(&cluster, 3);
    assert_eq!(cluster.nodes[0].pg.as_ref().unwrap().counters().resent, 0);
    cluster.assert_members_equal();
}

/// The primary begins anew while a replica keeps writes: they come again with the tail, and once.
#[test]
fn what_a_replica_keeps_is_applied_once_when_the_members_agree_anew() {
    let mut cluster = active();
    cluster.nodes[1].store.is_busy = true;
    for number in 1..=3 {
        let op = OpRequest { lowest_outstanding: 1, ..write(1, number, object(0), 0, BLOCK) };
        cluster.submit(0, op, Some(&[number as u8; 4096]));
        cluster.deliver(0, 1);
    }
    // A replica that has lost its state makes the primary ask everybody.
    cluster.kill(2, 0);
    cluster.settle();
    cluster.nodes[1].store.is_busy = false;
    cluster.settle();
    cluster.run(write(1, 9, object(1), 0, BLOCK), Some(&[9; 4096]));
    cluster.assert_members_equal();
}

#[test]
fn what_waits_ends_with_its_connection_or_the_interval() {
    let mut cluster = active();
    cluster.nodes[0].store.is_busy = true;
    cluster.submit(0, write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    cluster.submit(0, write(2, 1, object(0), 0, BLOCK), Some(&[2; 4096]));
    let from = crate::pg::Requester { core: 0, connection: loligo_reactor::env::ConnectionId(1) };
    cluster.step(0, PgEvent::RequesterGone(from));
    cluster.nodes[0].store.is_busy = false;
    cluster.settle();
    assert_all_done(&cluster, 1);
    assert_eq!(cluster.nodes[0].store.writes().count(), 1, "the first was given up");
    cluster.replies.clear();
    cluster.nodes[0].store.is_busy = true;
    cluster.submit(0, write(2, 2, object(0), 0, BLOCK), Some(&[3; 4096]));
    cluster.kill(1, 0);
    cluster.take_map(0);
    assert_eq!(cluster.replies.pop_front().unwrap().1.status, OpStatus::NotActive);
    cluster.nodes[0].store.is_busy = false;
    cluster.settle();
    assert_eq!(cluster.nodes[0].store.writes().count(), 1);
}

#[test]
fn a_large_write_that_waits_for_room_is_not_passed_by_small_ones() {
    let mut cluster = active();
    cluster.nodes[1].store.credit = 40;
    cluster.run(write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    cluster.replies.clear();
    cluster.submit(0, write(1, 2, object(1), 0, BLOCK), Some(&[1; 4096]));
    cluster.submit(0, write(2, 1, object(2), 0, 30 * BLOCK), Some(&[2; 30 * 4096]));
    cluster.submit(0, write(3, 1, object(3), 0, BLOCK), Some(&[3; 4096]));
    assert_eq!(
        cluster.nodes[0].store.in_flight(),
        1,
        "the small one would fit, but came after the large one"
    );
    cluster.settle();
    assert_all_done(&cluster, 3);
    let order: Vec<_> = cluster.nodes[0].store.writes().map(|tx| tx.op.session.0).collect();
    assert_eq!(order, [1, 1, 2, 3]);
}

/// What the primary knows of others' space is old: before it refuses, it asks, and gives them time to find some.
#[test]
fn a_write_waits_for_space_before_it_is_refused() {
    let mut cluster = active();
    cluster.nodes[1].store.credit = 0;
    cluster.run(write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    cluster.replies.clear();
    cluster.submit(0, write(1, 2, object(1), 0, BLOCK), Some(&[1; 4096]));
    assert!(matches!(cluster.channels[&(0, 1)].back(), Some((Message::PeerQuery(_), None))), "asked at once");
    cluster.nodes[1].store.credit = 100;
    cluster.deliver(0, 1);
    cluster.deliver(1, 0);
    assert_eq!(cluster.nodes[0].store.in_flight(), 1, "goes on with the answer");
    cluster.settle();
    assert_all_done(&cluster, 1);
    // Really none: refused after a while, and the next one at once.
    cluster.nodes[1].store.credit = 0;
    cluster.run(write(1, 3, object(0), 0, BLOCK), Some(&[1; 4096]));
    cluster.replies.clear();
    cluster.submit(0, write(1, 4, object(1), 0, BLOCK), Some(&[1; 4096]));
    cluster.step(0, PgEvent::Tick);
    assert!(cluster.replies.is_empty());
    cluster.now = cluster.now.after(FULL_AFTER);
    cluster.step(0, PgEvent::Tick);
    cluster.submit(0, write(1, 5, object(1), 0, BLOCK), Some(&[1; 4096]));
    let statuses: Vec<_> = cluster.replies.drain(..).map(|(_, reply, _)| reply.status).collect();
    assert_eq!(statuses, [OpStatus::NoSpace; 2]);
    assert!(is_done(&cluster.run(request(1, 6, OpKind::Discard, object(0), 0, BLOCK), None)), "frees go on");
}

/// Who waited for space is gone: nobody goes on asking for it, and who comes next has its own time to wait.
#[test]
fn nothing_is_left_of_a_wait_for_space_when_its_client_or_the_interval_is_gone() {
    let short_of_space = || {
        let mut cluster = active();
        cluster.nodes[1].store.credit = 0;
        cluster.run(write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
        cluster.replies.clear();
        cluster.submit(0, write(1, 2, object(1), 0, BLOCK), Some(&[1; 4096]));
        assert!(cluster.nodes[0].pg.as_ref().unwrap().wants_tick(), "it asks while somebody waits");
        cluster
    };
    let rests = |cluster: &Cluster| !cluster.nodes[0].pg.as_ref().unwrap().wants_tick();

    let mut cluster = short_of_space();
    cluster.step(0, PgEvent::RequesterGone(Requester { core: 0, connection: ConnectionId(1) }));
    assert!(rests(&cluster));
    cluster.now = cluster.now.after(FULL_AFTER);
    cluster.submit(0, write(2, 1, object(1), 0, BLOCK), Some(&[1; 4096]));
    assert!(cluster.replies.is_empty(), "it waits as the first did, and is not refused at once");

    // The pool is removed at a moment when the next question is due.
    let mut cluster = short_of_space();
    cluster.now = cluster.now.after(FULL_AFTER / 2);
    cluster.step(0, PgEvent::Map(None));
    assert_eq!(cluster.replies.pop_front().unwrap().1.status, OpStatus::NotActive);
    assert!(rests(&cluster));
}
