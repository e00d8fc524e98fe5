//! Writes and reads of an active PG, one rule each.

use super::cluster::{Cluster, is_done, object, request, write};
use crate::pg::phase::PhaseKind;
use crate::pg::{Payload, PgEvent, PgStore, Requester};
use crate::store::api::SubmitError;
use loligo_config::id::{Epoch, ImageId, ObjectId, ObjectKind, ObjectVersion, SessionId};
use loligo_config::limits::PG_WRITES_IN_FLIGHT_MAX;
use loligo_net::wire::Message;
use loligo_net::wire::list::{LIST_ENTRIES_MAX, read_list, read_sessions};
use loligo_net::wire::op::{Guard, OpKind, OpRequest, OpStatus};
use loligo_net::wire::replica::RepStatus;
use loligo_reactor::env::{ConnectionId, DiskError};
use std::time::Duration;

pub fn active() -> Cluster {
    let mut cluster = Cluster::new(3);
    cluster.settle();
    assert_eq!(cluster.phase(0), Some(PhaseKind::Active));
    assert_eq!(cluster.phase(1), Some(PhaseKind::Following));
    cluster
}

pub const BLOCK: u32 = 4096;

#[test]
fn a_write_is_acked_when_every_copy_is_durable() {
    let mut cluster = active();
    cluster.submit(0, write(1, 1, object(0), 0, BLOCK), Some(&[7; 4096]));
    assert_eq!(cluster.nodes[0].store.in_flight(), 1, "submitted in the step that sent it");
    cluster.deliver(0, 1);
    cluster.deliver(0, 2);
    (0..3).for_each(|node| {
        cluster.commit(node);
    });
    assert!(cluster.replies.is_empty());
    cluster.deliver(1, 0);
    assert!(cluster.replies.is_empty(), "one copy is missing");
    cluster.deliver(2, 0);
    let (_, reply, _) = cluster.replies.pop_front().unwrap();
    assert!(is_done(&reply));
    assert_eq!(reply.copies, 3);
    assert_eq!(reply.version.sequence, 1);
    let legs: Vec<_> = reply.residence.legs().map(|leg| (leg.osd.0, leg.device_ns)).collect();
    assert_eq!(legs, [(1, 1000), (2, 1000)], "each replica's leg");
}

#[test]
fn the_stages_of_a_write_add_up() {
    let mut cluster = active();
    let begin = cluster.now;
    let at = |nanos: u64| begin.after(Duration::from_nanos(nanos));
    cluster.submit(0, write(1, 1, object(0), 0, BLOCK), Some(&[7; 4096]));
    cluster.deliver(0, 1);
    cluster.now = at(10_000);
    cluster.commit(0);
    cluster.now = at(20_000);
    cluster.commit(1);
    cluster.now = at(25_000);
    cluster.deliver(1, 0);
    // The other one's connection breaks: its leg goes on from the first sending.
    cluster.disconnect(0, 2);
    cluster.now = at(40_000);
    cluster.connect(0, 2);
    cluster.deliver(0, 2);
    cluster.now = at(90_000);
    cluster.commit(2);
    while cluster.deliver(2, 0) {}
    let (_, reply, _) = cluster.replies.pop_front().unwrap();
    let residence = reply.residence;
    assert_eq!((residence.submit_ns, residence.own_ns), (300, 9_700));
    let legs: Vec<_> = residence.legs().map(|leg| (leg.osd.0, leg.leg_ns, leg.residence_ns)).collect();
    assert_eq!(legs, [(1, 24_700, 20_000), (2, 89_700, 50_000)]);
    assert_eq!(residence.submit_ns + residence.copies_ns(), 90_000);
}

#[test]
fn an_op_delivered_twice_is_applied_once_and_answered() {
    let mut cluster = active();
    let op = write(1, 1, object(0), 0, BLOCK);
    cluster.submit(0, op, Some(&[7; 4096]));
    cluster.submit(0, op, Some(&[7; 4096]));
    cluster.settle();
    assert_eq!(cluster.replies.len(), 1, "joined");
    let first = cluster.replies.pop_back().unwrap().1;
    // The reply was lost: the op-id table answers.
    let again = cluster.run(OpRequest { attempt: 1, ..op }, Some(&[9; 4096]));
    assert_eq!((again.status, again.version), (OpStatus::Done, first.version));
    assert_eq!(cluster.bytes(0, object(0), 1)[0], 7);
    cluster.assert_members_equal();
}

#[test]
fn the_op_table_survives_a_restart_of_all_members() {
    let mut cluster = active();
    let op = write(1, 1, object(0), 0, BLOCK);
    let first = cluster.run(op, Some(&[7; 4096]));
    (0..3).for_each(|node| cluster.kill(node, 0));
    cluster.settle();
    let again = cluster.run(OpRequest { attempt: 1, ..op }, Some(&[9; 4096]));
    assert_eq!((again.status, again.version), (OpStatus::Done, first.version));
    let old = OpRequest { lowest_outstanding: 5, ..write(1, 5, object(0), 0, BLOCK) };
    assert_eq!(cluster.run(old, Some(&[8; 4096])).status, OpStatus::Done);
    let late = cluster.run(write(1, 2, object(0), 0, BLOCK), Some(&[1; 4096]));
    assert_eq!(late.status, OpStatus::Invalid, "a delayed duplicate below what the session waits for");
    assert_eq!(cluster.bytes(2, object(0), 1)[0], 8);
}

#[test]
fn an_op_that_changed_nothing_takes_no_effect_when_a_copy_of_it_arrives_late() {
    let mut cluster = active();
    let missing = object(0);
    let nothing =
        |number, kind| OpRequest { lowest_outstanding: 1, ..request(1, number, kind, missing, 0, BLOCK) };
    let guarded = OpRequest { guard: Guard::Version(ObjectVersion::NONE), ..nothing(4, OpKind::Write) };
    let ops = [nothing(1, OpKind::Discard), nothing(2, OpKind::Remove), nothing(3, OpKind::WriteZeroes)];
    for op in ops {
        assert!(is_done(&cluster.run(op, None)));
    }
    let written = cluster.run(write(2, 1, missing, 0, BLOCK), Some(&[7; 4096]));
    assert_eq!(cluster.run(guarded, Some(&[9; 4096])).status, OpStatus::VersionMismatch);
    // The client had sent each twice: over a connection that it gave up, and over the one that answered.
    for op in ops {
        assert!(is_done(&cluster.run(op, None)));
        assert_eq!(cluster.bytes(0, missing, 1), [7; 4096], "{:?}", op.kind);
    }
    assert!(is_done(&cluster.run(request(2, 2, OpKind::Remove, missing, 0, 0), None)));
    let late = cluster.run(guarded, Some(&[9; 4096]));
    assert_eq!((late.status, late.version), (OpStatus::VersionMismatch, written.version));
    assert_eq!(cluster.nodes[0].store.object_version(missing), ObjectVersion::NONE);
    // Once the client has said that it has their ends, they are refused.
    cluster.run(OpRequest { lowest_outstanding: 5, ..write(1, 5, object(1), 0, BLOCK) }, Some(&[1; 4096]));
    assert_eq!(cluster.run(ops[0], None).status, OpStatus::Invalid);
    cluster.assert_members_equal();
}

/// What was on its way over a connection that is gone may arrive after the same op came over the next one.
#[test]
fn a_late_copy_does_not_take_the_reply_along() {
    for first in [0, 120, 254] {
        late_copies_from(first);
    }
}

/// The number of the sending may pass 255: a PG that is down for long is asked often.
fn late_copies_from(first: u8) {
    let mut cluster = active();
    let op = write(1, 1, object(0), 0, BLOCK);
    let mut send = |attempt: u8, connection: u64| {
        let request = OpRequest { attempt: first.wrapping_add(attempt), ..op };
        let from = Requester { core: 0, connection: ConnectionId(connection) };
        let data = cluster.pool.copy_of(&[1; 4096]).unwrap();
        let payload = Some(Payload { data, checksums: None });
        let (epoch, arrived) = (cluster.epoch, cluster.now);
        cluster.step(0, PgEvent::Op { request, epoch, payload, from, arrived });
    };
    send(1, 8);
    send(0, 7);
    send(2, 9);
    send(1, 8);
    cluster.settle();
    let (to, reply, _) = cluster.replies.pop_back().expect("the write is answered");
    assert!(is_done(&reply));
    assert_eq!(to.connection, ConnectionId(9), "where the client waits");
    assert_eq!(cluster.replies.len(), 0, "once");
}

#[test]
fn unacked_writes_are_resent_over_a_new_connection() {
    let mut cluster = active();
    cluster.submit(0, write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    cluster.submit(0, write(1, 2, object(1), 0, BLOCK), Some(&[2; 4096]));
    cluster.deliver(0, 1);
    cluster.commit(1);
    // The second write and the ack of the first are lost.
    cluster.disconnect(0, 1);
    cluster.connect(0, 1);
    cluster.settle();
    assert_eq!(cluster.replies.len(), 2);
    assert!(cluster.replies.iter().all(|(_, reply, _)| is_done(reply)));
    assert!(cluster.nodes[0].pg.as_ref().unwrap().counters().resent >= 2);
    cluster.assert_members_equal();
}

#[test]
fn a_busy_replica_gets_the_write_again() {
    let mut cluster = active();
    cluster.nodes[2].store.refuse_next = Some(SubmitError::Busy);
    let reply = cluster.run(write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    assert!(is_done(&reply));
    cluster.assert_members_equal();
}

#[test]
fn parts_of_blocks_are_merged_in_order() {
    let mut cluster = active();
    cluster.run(write(1, 1, object(0), 0, 2 * BLOCK), Some(&[1; 8192]));
    cluster.submit(0, write(2, 1, object(0), 4000, 200), Some(&[2; 200]));
    cluster.submit(0, write(3, 1, object(0), 4100, 10), Some(&[3; 10]));
    cluster.submit(0, request(4, 1, OpKind::WriteZeroes, object(0), 0, 10), None);
    cluster.settle();
    let mut want = vec![1; 8192];
    want[4000..4200].fill(2);
    want[4100..4110].fill(3);
    want[..10].fill(0);
    assert_eq!(cluster.bytes(1, object(0), 2), want);
    cluster.assert_members_equal();
}

#[test]
fn a_read_waits_for_the_write_in_flight() {
    let mut cluster = active();
    cluster.submit(0, write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    cluster.submit(0, request(2, 1, OpKind::Read, object(0), 10, 20), None);
    cluster.submit(0, request(2, 2, OpKind::Read, object(0), BLOCK, 20), None);
    cluster.finish_read(0, 0);
    let (_, reply, payload) = cluster.replies.pop_front().unwrap();
    assert_eq!(reply.op.number, 2, "another block: not touched by the write");
    assert_eq!(&payload.unwrap().data[..], [0; 20]);
    cluster.settle();
    let (_, reply, payload) = cluster.replies.pop_back().unwrap();
    assert_eq!((reply.op.session, reply.op.number), (SessionId(2), 1));
    assert_eq!(&payload.unwrap().data[..], [1; 20]);
}

#[test]
fn guards_compare_with_the_last_version() {
    let mut cluster = active();
    let guarded = |number, version| OpRequest {
        guard: Guard::Version(version),
        ..write(1, number, object(0), 0, BLOCK)
    };
    let first = cluster.run(guarded(1, ObjectVersion::NONE), Some(&[1; 4096]));
    assert!(is_done(&first));
    let refused = cluster.run(guarded(2, ObjectVersion::NONE), Some(&[2; 4096]));
    assert_eq!((refused.status, refused.version), (OpStatus::VersionMismatch, first.version));
    // Two at once: the second sees the first's version, in flight before it.
    cluster.submit(0, guarded(3, first.version), Some(&[3; 4096]));
    cluster.submit(0, guarded(4, first.version), Some(&[4; 4096]));
    cluster.settle();
    let statuses: Vec<_> = cluster.replies.drain(..).map(|(_, reply, _)| reply.status).collect();
    assert_eq!(statuses, [OpStatus::Done, OpStatus::VersionMismatch]);
    assert_eq!(cluster.bytes(0, object(0), 1)[0], 3);
}

#[test]
fn removal_and_discard_reach_every_member() {
    let mut cluster = active();
    cluster.run(write(1, 1, object(0), 0, 2 * BLOCK), Some(&[1; 8192]));
    cluster.run(request(1, 2, OpKind::Discard, object(0), 100, 2 * BLOCK - 100), None);
    let bytes = cluster.bytes(1, object(0), 2);
    assert!(bytes[..4096].iter().all(|byte| *byte == 1), "parts of blocks stay");
    assert!(bytes[4096..].iter().all(|byte| *byte == 0));
    assert!(is_done(&cluster.run(request(1, 3, OpKind::Remove, object(0), 0, 0), None)));
    assert_eq!(cluster.nodes[2].store.object_version(object(0)), ObjectVersion::NONE);
    assert_eq!(cluster.run(request(1, 4, OpKind::Discard, object(0), 0, BLOCK), None).status, OpStatus::Done);
    cluster.assert_members_equal();
}

#[test]
fn ops_that_may_not_be_served_are_refused() {
    let mut cluster = active();
    let data = Some(&[1u8; 4096][..]);
    cluster.fenced = vec![SessionId(9)];
    assert_eq!(cluster.run(write(9, 1, object(0), 0, BLOCK), data).status, OpStatus::Fenced);
    for bad in [
        write(1, 1, object(0), 0, 100),
        write(1, 1, object(0), (32 << 20) - 100, BLOCK),
        request(1, 1, OpKind::Read, object(0), 0, 0),
        request(1, 1, OpKind::Read, object(0), 0, (1 << 20) + 1),
        request(1, 1, OpKind::Discard, object(0), u32::MAX, 2),
        OpRequest { pg: Default::default(), ..write(1, 1, object(0), 0, BLOCK) },
    ] {
        assert_eq!(cluster.run(bad, data).status, OpStatus::Invalid, "{bad:?}");
    }
    cluster.submit(1, write(1, 1, object(0), 0, BLOCK), data);
    assert_eq!(cluster.replies.pop_front().unwrap().1.status, OpStatus::NotPrimary);
    cluster.epoch = Epoch(0);
    cluster.submit(0, write(1, 1, object(0), 0, BLOCK), data);
    assert_eq!(cluster.replies.pop_front().unwrap().1.status, OpStatus::StaleEpoch);
    cluster.epoch = Epoch(1);
    cluster.kill(2, 0);
    cluster.take_map(0);
    cluster.submit(0, write(1, 1, object(0), 0, BLOCK), data);
    assert_eq!(cluster.replies.pop_front().unwrap().1.status, OpStatus::NotActive);
    assert_eq!(cluster.nodes[0].store.writes().count(), 0, "nothing was applied");
}

#[test]
fn a_queued_op_of_a_session_fenced_meanwhile_is_refused() {
    let mut cluster = active();
    cluster.run(write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    cluster.submit(0, write(9, 1, object(0), 0, 100), Some(&[2; 100]));
    cluster.fenced = vec![SessionId(9)];
    cluster.settle();
    assert_eq!(cluster.replies.pop_back().unwrap().1.status, OpStatus::Fenced);
    assert_eq!(cluster.bytes(0, object(0), 1)[0], 1);
}

#[test]
fn want_of_space_on_any_member_refuses_before_a_version_is_assigned() {
    let mut cluster = active();
    cluster.nodes[1].store.credit = 8;
    // The first write's ack tells of the credit.
    assert!(is_done(&cluster.run(write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]))));
    assert_eq!(cluster.run(write(1, 2, object(0), 0, BLOCK), Some(&[2; 4096])).status, OpStatus::NoSpace);
    assert!(is_done(&cluster.run(request(1, 3, OpKind::Discard, object(0), 0, BLOCK), None)), "frees go on");
    cluster.nodes[1].store.credit = 1 << 20;
    cluster.run(write(1, 4, object(0), 0, BLOCK), Some(&[2; 4096]));
    assert!(
        is_done(&cluster.run(write(1, 5, object(0), 0, BLOCK), Some(&[2; 4096]))),
        "credit was asked for"
    );
    cluster.assert_members_equal();
}

/// The removal of an image begins with its name and its header, and it has to end with free space.
#[test]
fn a_full_pool_takes_the_headers_that_it_has_and_no_new_ones() {
    let mut cluster = active();
    let header = |image: u64| ObjectId { kind: ObjectKind::ImageHeader, image: ImageId(image), ..object(0) };
    assert!(is_done(&cluster.run(write(1, 1, header(1), 0, BLOCK), Some(&[1; 4096]))));
    cluster.nodes.iter_mut().for_each(|node| node.store.credit = 0);
    cluster.disconnect(0, 1);
    cluster.connect(0, 1);
    cluster.settle();
    // Two at once: the second has to wait for the first.
    cluster.submit(0, write(1, 2, header(1), 0, BLOCK), Some(&[2; 4096]));
    assert!(is_done(&cluster.run(write(1, 3, header(1), 0, BLOCK), Some(&[3; 4096]))));
    assert_eq!(cluster.bytes(2, header(1), 1)[0], 3);
    let status = |cluster: &mut Cluster, op| cluster.run(op, Some(&[4; 4096])).status;
    assert_eq!(status(&mut cluster, write(1, 4, header(2), 0, BLOCK)), OpStatus::NoSpace, "a new image");
    assert_eq!(status(&mut cluster, write(1, 5, header(1), BLOCK, BLOCK)), OpStatus::NoSpace, "a longer one");
    assert_eq!(status(&mut cluster, write(1, 6, object(0), 0, BLOCK)), OpStatus::NoSpace, "data");
    cluster.assert_members_equal();
}

#[test]
fn what_is_in_flight_is_bounded() {
    let mut cluster = active();
    let count = PG_WRITES_IN_FLIGHT_MAX as u64 + crate::pg::op::OPS_HELD_MAX as u64 + 10;
    for number in 1..=count {
        let op = OpRequest { lowest_outstanding: 1, ..write(1, number, object(number), 0, BLOCK) };
        cluster.submit(0, op, Some(&[1; 4096]));
    }
    assert_eq!(cluster.nodes[0].store.in_flight(), PG_WRITES_IN_FLIGHT_MAX);
    let busy = cluster.replies.iter().filter(|(_, reply, _)| reply.status == OpStatus::Busy).count();
    assert_eq!(busy, 10);
    cluster.settle();
    let done = cluster.replies.iter().filter(|(_, reply, _)| is_done(reply)).count();
    assert_eq!(done as u64, count - 10);
    cluster.assert_members_equal();
}

#[test]
fn watchers_hear_of_every_change() {
    let mut cluster = active();
    cluster.run(request(5, 1, OpKind::Watch, object(0), 0, 0), None);
    cluster.run(write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    assert_eq!(cluster.notifies, 1);
    cluster.run(write(1, 2, object(1), 0, BLOCK), Some(&[1; 4096]));
    assert_eq!(cluster.notifies, 1);
    cluster.kill(1, 0);
    cluster.settle();
    assert_eq!(cluster.notifies, 2, "after a new interval everybody is told");
    cluster.run(request(5, 2, OpKind::Unwatch, object(0), 0, 0), None);
    cluster.run(write(1, 3, object(0), 0, BLOCK), Some(&[1; 4096]));
    assert_eq!(cluster.notifies, 2);
}

#[test]
fn a_pg_lists_the_objects_of_one_image_in_pages() {
    let mut cluster = active();
    let other = ObjectId { image: ImageId(9), ..object(0) };
    cluster.run(write(1, 1, other, 0, BLOCK), Some(&[1; 4096]));
    for (number, index) in [(2, 0), (3, 5), (4, 1 << 39)] {
        cluster.run(write(1, number, object(index), 0, 2 * BLOCK), Some(&[1; 8192]));
    }
    let mut list = |number, from| {
        let reply = cluster.run(request(7, number, OpKind::List, object(from), 0, 0), None);
        assert_eq!(reply.status, OpStatus::Done);
        let data = cluster.last_data.take().unwrap();
        read_list(&data.data, from).unwrap()
    };
    let (next, entries) = list(1, 0);
    assert_eq!(next, None);
    let seen: Vec<_> =
        entries.iter().map(|entry| (entry.index, entry.blocks, entry.version.sequence)).collect();
    assert_eq!(seen, [(0, 2, 2), (5, 2, 3), (1 << 39, 2, 4)]);
    assert_eq!(list(2, 6).1.len(), 1, "from an object on");
    assert_eq!(list(3, (1 << 39) + 1), (None, Vec::new()));

    let count = LIST_ENTRIES_MAX as u64 + 10;
    for index in 0..count {
        cluster.run(write(1, 10 + index, object(100 + index), 0, BLOCK), Some(&[1; 4096]));
    }
    let mut list = |number, from| {
        cluster.run(request(7, number, OpKind::List, object(from), 0, 0), None);
        read_list(&cluster.last_data.take().unwrap().data, from).unwrap()
    };
    let (next, first) = list(4, 100);
    assert_eq!((first.len(), next), (LIST_ENTRIES_MAX, Some(100 + LIST_ENTRIES_MAX as u64)));
    let (next, rest) = list(5, next.unwrap());
    assert_eq!((rest.len(), next), (11, None), "with the one far out");
}

#[test]
fn a_pg_names_the_sessions_that_watch_an_object() {
    let mut cluster = active();
    let watchers = |cluster: &mut Cluster, number| {
        let reply = cluster.run(request(9, number, OpKind::Watchers, object(0), 0, 0), None);
        assert_eq!(reply.status, OpStatus::Done);
        cluster.last_data.take().map(|payload| read_sessions(&payload.data).unwrap()).unwrap_or_default()
    };
    assert_eq!(watchers(&mut cluster, 1), []);
    cluster.run(request(5, 1, OpKind::Watch, object(0), 0, 0), None);
    cluster.run(request(6, 1, OpKind::Watch, object(0), 0, 0), None);
    cluster.run(request(4, 1, OpKind::Watch, object(1), 0, 0), None);
    assert_eq!(watchers(&mut cluster, 2), [SessionId(5), SessionId(6)]);
    cluster.run(request(5, 2, OpKind::Unwatch, object(0), 0, 0), None);
    assert_eq!(watchers(&mut cluster, 3), [SessionId(6)]);
}

#[test]
fn a_replica_refuses_an_interval_older_than_its_promise() {
    let mut cluster = active();
    cluster.submit(0, write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    let (message, payload) = cluster.channels[&(0, 1)].front().unwrap().clone();
    cluster.kill(2, 0);
    cluster.settle();
    let before = cluster.nodes[1].store.writes().count();
    let from = loligo_config::id::OsdId(0);
    let arrived = cluster.now;
    cluster.step(1, PgEvent::Peer { from, message, payload, arrived });
    let ack = cluster.channels[&(1, 0)].back().unwrap().0;
    assert!(matches!(ack, Message::RepAck(ack) if ack.status == RepStatus::StaleInterval), "{ack:?}");
    assert_eq!(cluster.nodes[1].store.writes().count(), before);
}

#[test]
fn a_write_with_a_hole_before_it_is_refused_and_that_is_no_copy() {
    let mut cluster = active();
    for number in [1, 2] {
        let data = [number as u8; 4096];
        cluster.submit(0, write(1, number, object(0), (number as u32 - 1) * BLOCK, BLOCK), Some(&data));
    }
    let sent: Vec<_> = cluster.channels.get_mut(&(0, 1)).unwrap().drain(..).collect();
    let [first, second] = <[_; 2]>::try_from(sent).unwrap();
    let before = cluster.nodes[1].store.writes().count();
    let arrived = cluster.now;
    let from = loligo_config::id::OsdId(0);
    cluster.step(1, PgEvent::Peer { from, message: second.0, payload: second.1, arrived });
    let ack = cluster.channels[&(1, 0)].back().unwrap().0;
    assert!(matches!(ack, Message::RepAck(ack) if ack.status == RepStatus::Gap), "{ack:?}");
    assert_eq!(cluster.nodes[1].store.writes().count(), before, "nothing of it is stored");
    cluster.step(1, PgEvent::Peer { from, message: first.0, payload: first.1, arrived });
    while cluster.deliver(0, 2) {}
    for node in [0, 1, 2] {
        while cluster.commit(node) {}
    }
    while cluster.deliver(1, 0) || cluster.deliver(2, 0) {}
    let answered: Vec<_> = cluster.replies.drain(..).map(|(_, reply, ..)| reply.op.number).collect();
    assert_eq!(answered, [1], "the second one is not on every member");
    cluster.settle();
    assert!(is_done(&cluster.replies.pop_front().unwrap().1));
    cluster.assert_members_equal();
}

#[test]
fn a_failed_device_ends_service_for_good() {
    let mut cluster = active();
    cluster.submit(0, write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    let ticket = cluster.nodes[0].store.commit_next().unwrap();
    cluster.step(0, PgEvent::Failed { ticket, error: DiskError::Poisoned });
    assert_eq!(cluster.replies.pop_front().unwrap().1.status, OpStatus::NotActive);
    assert_eq!(cluster.phase(0), Some(PhaseKind::Failed));
    cluster.submit(0, write(1, 1, object(0), 0, BLOCK), Some(&[1; 4096]));
    assert_eq!(cluster.replies.pop_front().unwrap().1.status, OpStatus::NotActive);
}
