//! The objecter against a script: every message and every loss by hand.

use super::*;
use crate::testing::{Scripted, Sent, map_with, mon_address};
use loligo_config::id::{ImageId, ObjectKind, ObjectVersion, PoolId};
use loligo_config::map::BlocklistEntry;
use loligo_net::wire::op::{Notify, OpStatus};
use loligo_reactor::env::CloseReason;

struct Bench {
    objecter: Objecter<u32>,
    wire: Scripted,
    now: Instant,
}

fn object(index: u64) -> ObjectId {
    ObjectId { pool: PoolId(1), kind: ObjectKind::Data, image: ImageId(7), index }
}

impl Bench {
    /// Nothing connected yet.
    fn cold(osds: u32, pgs: u32) -> Self {
        Self::with(osds, pgs, None)
    }

    fn with(osds: u32, pgs: u32, op_timeout: Option<Duration>) -> Self {
        let wire = Scripted::new(map_with(osds, pgs));
        let settings = ObjecterSettings { mons: vec![mon_address()], pool: wire.pool.clone(), op_timeout };
        Self { objecter: Objecter::new(settings), wire, now: Instant(1_000) }
    }

    /// Session and map are there.
    fn warm(osds: u32, pgs: u32) -> Self {
        let mut bench = Self::cold(osds, pgs);
        bench.settle();
        bench
    }

    fn poll(&mut self) {
        self.objecter.poll(self.now, &mut self.wire);
    }

    fn feed(&mut self, event: WireEvent) {
        self.objecter.handle(self.now, event, &mut self.wire);
    }

    /// Everything goes well until nothing moves, but ops are left unanswered.
    fn connect_all(&mut self) {
        loop {
            self.poll();
            if let Some(event) = self.wire.next_up() {
                self.feed(event);
                continue;
            }
            let control = |sent: &Sent| !matches!(sent.message, Message::Op(_));
            let Some(at) = self.wire.sent.iter().position(control) else { return };
            let sent = self.wire.sent.remove(at).unwrap();
            for event in self.wire.answer(&sent) {
                self.feed(event);
            }
        }
    }

    /// Everything goes well until nothing moves.
    fn settle(&mut self) {
        loop {
            self.connect_all();
            let Some(sent) = self.wire.sent.pop_front() else { return };
            for event in self.wire.answer(&sent) {
                self.feed(event);
            }
        }
    }

    fn write(&mut self, owner: u32, index: u64, offset: u32, byte: u8) {
        let mut op = ObjectOp::new(object(index), OpKind::Write, offset, 4096);
        op.data = Some(self.wire.pool.copy_of(&[byte; 4096]).unwrap());
        self.objecter.submit(self.now, op, owner);
    }

    fn read(&mut self, owner: u32, index: u64) {
        self.objecter.submit(self.now, ObjectOp::new(object(index), OpKind::Read, 0, 4096), owner);
    }

    /// The ops on their way, oldest first.
    fn take_ops(&mut self) -> Vec<(Sent, OpRequest)> {
        self.connect_all();
        let ops = self.wire.sent.drain(..).map(|sent| match sent.message {
            Message::Op(request) => (sent, request),
            other => panic!("only ops are left, not {other:?}"),
        });
        ops.collect()
    }

    fn answer(&mut self, sent: &Sent) {
        for event in self.wire.answer(sent) {
            self.feed(event);
        }
    }

    fn refuse(&mut self, op: &(Sent, OpRequest), status: OpStatus) {
        let event = self.wire.reply(op.0.connection, &op.1, status, ObjectVersion::NONE, None);
        self.feed(event);
    }

    fn done(&mut self) -> Vec<(u32, Result<(), IoError>)> {
        std::iter::from_fn(|| self.objecter.next_done())
            .map(|done| (done.owner, done.result.map(|_| ())))
            .collect()
    }

    fn new_map(&mut self, change: impl FnOnce(&mut ClusterMap)) {
        change(&mut self.wire.map);
        self.wire.map.epoch = self.wire.map.epoch.next();
        let mon = self.wire.mon().unwrap();
        let event = self.wire.map_event(mon);
        self.feed(event);
    }

    fn wait(&mut self, millis: u64) {
        self.now = self.now.after(Duration::from_millis(millis));
    }
}

#[test]
fn a_write_goes_to_its_primary_and_ends_once() {
    let mut bench = Bench::warm(3, 8);
    bench.write(1, 0, 0, 7);
    let ops = bench.take_ops();
    let [op] = &ops[..] else { panic!("one op is sent") };
    assert_eq!((op.1.op.number, op.1.lowest_outstanding, op.1.attempt), (1, 1, 0));
    let primary = bench.wire.map.primary(op.1.pg).unwrap();
    assert_eq!(bench.wire.connections[&op.0.connection].0, Role::Osd(primary));
    bench.answer(&op.0);
    bench.answer_again(op);
    assert_eq!(bench.done(), [(1, Ok(()))], "a second reply to the same op is nothing");
    assert_eq!(bench.wire.store.applied, 1);
    assert!(!bench.objecter.is_waiting());
    assert_eq!(bench.objecter.next_deadline(), Some(bench.now), "polled once more after events");
    bench.poll();
    assert_eq!(bench.objecter.next_deadline(), None);
}

impl Bench {
    fn answer_again(&mut self, op: &(Sent, OpRequest)) {
        self.refuse(op, OpStatus::Done);
    }
}

#[test]
fn a_lost_reply_is_asked_for_again_and_nothing_applies_twice() {
    let mut bench = Bench::warm(1, 1);
    bench.write(1, 0, 0, 7);
    let first = bench.take_ops().remove(0);
    let lost = bench.wire.answer(&first.0);
    drop(lost);
    let down = bench.wire.cut(first.0.connection);
    bench.feed(down);
    bench.wait(10);
    let again = bench.take_ops().remove(0);
    assert_eq!(again.1.attempt, 1);
    assert_eq!(again.1.op, first.1.op, "with the same id");
    assert_ne!(again.0.connection, first.0.connection);
    bench.answer(&again.0);
    assert_eq!(bench.done(), [(1, Ok(()))]);
    assert_eq!(bench.wire.store.applied, 1);
}

#[test]
fn an_older_write_never_passes_a_newer_one_to_the_same_block() {
    let mut bench = Bench::warm(1, 1);
    bench.write(1, 0, 0, 1);
    bench.write(2, 0, 0, 2);
    bench.write(3, 0, 4096, 3);
    bench.read(4, 0);
    let ops = bench.take_ops();
    let kinds: Vec<_> = ops.iter().map(|op| (op.1.kind, op.1.offset)).collect();
    let expected = [(OpKind::Write, 0), (OpKind::Write, 4096), (OpKind::Read, 0)];
    assert_eq!(kinds, expected, "the second write to the block waits, nothing else does");
    let down = bench.wire.cut(ops[0].0.connection);
    bench.feed(down);
    bench.wait(10);
    bench.settle();
    let mut done = bench.done();
    done.sort_by_key(|(owner, _)| *owner);
    assert_eq!(done, [(1, Ok(())), (2, Ok(())), (3, Ok(())), (4, Ok(()))]);
    assert_eq!(bench.wire.store.objects[&object(0)].blocks[&0][0], 2, "the newer write is the last");
    assert_eq!(bench.wire.store.applied, 3);
}

#[test]
fn credits_are_honoured_and_returned() {
    let mut bench = Bench::cold(1, 1);
    bench.wire.credits = 2;
    bench.settle();
    (0..5).for_each(|owner| bench.read(owner, u64::from(owner)));
    let ops = bench.take_ops();
    assert_eq!(ops.len(), 2);
    bench.answer(&ops[0].0);
    assert_eq!(bench.take_ops().len(), 1);
    bench.answer(&ops[1].0);
    bench.wire.refuse_sends = true;
    assert_eq!(bench.take_ops().len(), 0, "a full send queue holds ops back too");
    let retry = bench.objecter.next_deadline().unwrap();
    assert!(retry > bench.now, "encoding the op again and again would burn a core while nothing moves");
    bench.wire.refuse_sends = false;
    bench.now = retry;
    assert_eq!(bench.take_ops().len(), 1);
}

#[test]
fn a_pg_that_is_not_active_is_probed_with_one_op() {
    let mut bench = Bench::warm(1, 1);
    (0..3).for_each(|owner| bench.read(owner, u64::from(owner)));
    let ops = bench.take_ops();
    ops.iter().for_each(|op| bench.refuse(op, OpStatus::NotActive));
    assert_eq!(bench.take_ops().len(), 0, "a pause first");
    let wake = bench.objecter.next_deadline().unwrap();
    assert!(wake > bench.now && wake <= bench.now.after(Duration::from_millis(2)));
    bench.now = wake;
    let probe = bench.take_ops();
    assert_eq!(probe.len(), 1);
    assert_eq!(probe[0].1.attempt, 1);
    bench.refuse(&probe[0], OpStatus::NotActive);
    bench.wait(1);
    assert_eq!(bench.take_ops().len(), 0, "a longer pause");
    bench.wait(1);
    let probe = bench.take_ops();
    bench.answer(&probe[0].0);
    bench.settle();
    let mut done = bench.done();
    done.sort_by_key(|(owner, _)| *owner);
    assert_eq!(done, [(0, Ok(())), (1, Ok(())), (2, Ok(()))]);
}

/// A full queue empties within a device write: a client that stays away for long adds that to its latency.
#[test]
fn a_busy_pg_is_tried_again_at_once_and_then_more_slowly() {
    let mut bench = Bench::warm(1, 1);
    bench.read(1, 1);
    let mut op = bench.take_ops().remove(0);
    let mut pauses = Vec::new();
    for _ in 0..10 {
        bench.refuse(&op, OpStatus::Busy);
        assert_eq!(bench.take_ops().len(), 0);
        let wake = bench.objecter.next_deadline().unwrap();
        pauses.push(wake.since(bench.now));
        bench.now = wake;
        op = bench.take_ops().remove(0);
    }
    assert!(pauses[0] < Duration::from_micros(100), "{pauses:?}");
    assert!(pauses.is_sorted_by(|a, b| *b <= *a * 2), "{pauses:?}");
    assert!(pauses[9] <= Duration::from_millis(10), "{pauses:?}");
}

#[test]
fn a_new_map_ends_the_pause_and_moves_ops_to_the_new_primary() {
    let mut bench = Bench::warm(2, 1);
    bench.write(1, 0, 0, 1);
    let old = bench.take_ops().remove(0);
    bench.refuse(&old, OpStatus::NotPrimary);
    assert_eq!(bench.take_ops().len(), 0);
    bench.new_map(|map| {
        let interval = map.intervals.get_mut(&PgId { pool: PoolId(1), index: 0 }).unwrap();
        *interval = loligo_config::map::Interval { since: Epoch(2), acting: vec![OsdId(1)] };
    });
    let new = bench.take_ops().remove(0);
    assert_eq!(bench.wire.connections[&new.0.connection].0, Role::Osd(OsdId(1)));
    assert_eq!((new.1.op, new.1.attempt), (old.1.op, 1));
    bench.refuse(&old, OpStatus::NoSpace);
    assert_eq!(bench.done(), [], "the old primary's word counts no more");
    bench.answer(&new.0);
    assert_eq!(bench.done(), [(1, Ok(()))]);
}

#[test]
fn a_new_interval_with_the_same_primary_sends_again() {
    let mut bench = Bench::warm(1, 1);
    bench.write(1, 0, 0, 1);
    let first = bench.take_ops().remove(0);
    bench.new_map(|map| map.intervals.values_mut().for_each(|interval| interval.since = Epoch(2)));
    let again = bench.take_ops().remove(0);
    assert_eq!((again.0.connection, again.1.attempt), (first.0.connection, 1));
    bench.new_map(|_| {});
    assert_eq!(bench.take_ops().len(), 0, "a map that changes nothing here sends nothing");
    bench.answer(&first.0);
    assert_eq!(bench.done(), [(1, Ok(()))]);
    assert_eq!(bench.wire.store.applied, 1);
}

#[test]
fn older_maps_and_other_clusters_maps_are_refused() {
    let mut bench = Bench::warm(1, 1);
    bench.new_map(|_| {});
    let mon = bench.wire.mon().unwrap();
    bench.wire.map.epoch = Epoch(1);
    let old = bench.wire.map_event(mon);
    bench.feed(old);
    assert_eq!(bench.objecter.map().unwrap().epoch, Epoch(2));
    bench.wire.map.epoch = Epoch(9);
    bench.wire.map.cluster = loligo_config::id::ClusterId(uuid::Uuid::from_u128(5));
    let other = bench.wire.map_event(mon);
    bench.feed(other);
    assert_eq!(bench.objecter.map().unwrap().epoch, Epoch(2));
    let garbage = bench.wire.pool.copy_of(b"no map").unwrap();
    let message = Message::Map(loligo_net::wire::mon::Map { epoch: Epoch(99) });
    let event = bench.wire.message(mon, message, Some(garbage));
    bench.feed(event);
    assert_eq!(bench.objecter.map().unwrap().epoch, Epoch(2));
}

#[test]
fn a_fenced_session_fails_everything_for_ever() {
    let mut bench = Bench::warm(1, 1);
    bench.write(1, 0, 0, 1);
    bench.write(2, 0, 0, 2);
    assert_eq!(bench.take_ops().len(), 1);
    let session = bench.wire.session;
    bench.new_map(|map| {
        map.next_session = SessionId(2);
        map.blocklist.push(BlocklistEntry { session, since: Epoch(2) });
    });
    assert_eq!(bench.done(), [(1, Err(IoError::Fenced)), (2, Err(IoError::Fenced))]);
    bench.read(3, 0);
    assert_eq!(bench.done(), [(3, Err(IoError::Fenced))]);
    bench.wait(10_000);
    assert_eq!(bench.take_ops().len(), 0);
}

#[test]
fn definite_errors_end_the_op() {
    let expected = [
        (OpStatus::NoSpace, IoError::NoSpace),
        (OpStatus::Invalid, IoError::Invalid),
        (OpStatus::MediaError, IoError::Media),
        (OpStatus::VersionMismatch, IoError::Conflict),
        (OpStatus::Fenced, IoError::Fenced),
    ];
    for (status, error) in expected {
        let mut bench = Bench::warm(1, 1);
        bench.read(1, 0);
        let op = bench.take_ops().remove(0);
        bench.refuse(&op, status);
        assert_eq!(bench.done(), [(1, Err(error))]);
    }
}

#[test]
fn an_expired_session_is_renewed_unless_the_op_may_have_been_applied() {
    let mut bench = Bench::warm(1, 1);
    bench.write(1, 0, 0, 1);
    bench.write(2, 1, 0, 2);
    let ops = bench.take_ops();
    let down = bench.wire.cut(ops[0].0.connection);
    bench.feed(down);
    bench.wait(10);
    bench.write(3, 2, 0, 3);
    let ops = bench.take_ops();
    assert_eq!(ops.len(), 3);
    ops.iter().for_each(|op| bench.refuse(op, OpStatus::SessionExpired));
    assert_eq!(bench.done(), [(1, Err(IoError::MaybeApplied)), (2, Err(IoError::MaybeApplied))]);
    bench.settle();
    assert_eq!(bench.wire.session, SessionId(2), "a new session for what was not applied");
    assert_eq!(bench.done(), [(3, Ok(()))]);
    assert_eq!(bench.wire.store.applied, 1);
}

/// A write that may have been applied in a PG that is down keeps its session for as long as that lasts.
#[test]
fn a_pg_that_is_down_keeps_no_other_from_going_on_when_the_session_ends() {
    let mut bench = Bench::warm(1, 4);
    let of_pg = |bench: &Bench, wanted: u32| {
        let pools = bench.objecter.map().unwrap();
        let pg =
            |index: &u64| super::map::pg_of(pools, &ObjectOp::new(object(*index), OpKind::Read, 0, 4096));
        (0..).find(|index| pg(index).unwrap().index == wanted).unwrap()
    };
    let (down, other, third) = (of_pg(&bench, 0), of_pg(&bench, 1), of_pg(&bench, 2));
    bench.write(1, down, 0, 1);
    bench.read(2, down);
    let stuck = bench.take_ops();
    stuck.iter().for_each(|op| bench.refuse(op, OpStatus::NotActive));
    bench.write(3, other, 0, 2);
    let expired = bench.take_ops();
    assert_eq!(expired.len(), 1);
    bench.refuse(&expired[0], OpStatus::SessionExpired);
    // The PG that dropped the session waits, one that did not goes on.
    for round in 0..20 {
        bench.write(100 + round, third, 0, 1);
        bench.wait(60);
        for op in bench.take_ops() {
            match op.1.pg.index {
                0 => bench.refuse(&op, OpStatus::NotActive),
                2 => bench.answer(&op.0),
                other => panic!("an op goes to PG {other}"),
            }
        }
    }
    let done = bench.done();
    assert!(done.len() >= 10 && done.iter().all(|(owner, _)| *owner >= 100), "{done:?}");
    // It is back: the session ends, everything goes on in the next one.
    bench.wait(60);
    bench.settle();
    let mut done = bench.done();
    done.sort_by_key(|(owner, _)| *owner);
    assert_eq!(done[..3], [(1, Ok(())), (2, Ok(())), (3, Ok(()))]);
    assert_eq!(bench.wire.session, SessionId(2));
}

#[test]
fn replies_that_do_not_fit_close_the_connection_and_the_op_goes_on() {
    let mut bench = Bench::warm(1, 1);
    for len in [0, 1, 4095, 4097] {
        bench.read(len, 0);
        let op = bench.take_ops().remove(0);
        let data = (len > 0).then(|| bench.wire.pool.copy_of(&vec![1; len as usize]).unwrap());
        let event = bench.wire.reply(op.0.connection, &op.1, OpStatus::Done, ObjectVersion::NONE, data);
        bench.feed(event);
        assert!(bench.wire.closed.contains(&op.0.connection));
        assert_eq!(bench.done(), []);
        bench.wait(1000);
        bench.settle();
        assert_eq!(bench.done(), [(len, Ok(()))]);
    }
    let extents = ObjectOp::new(object(0), OpKind::Extents, 0, 4096);
    bench.objecter.submit(bench.now, extents, 1);
    let op = bench.take_ops().remove(0);
    let overlapping = [[0, 0, 0, 0], [2, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]].concat();
    let data = bench.wire.pool.copy_of(&overlapping).unwrap();
    let event = bench.wire.reply(op.0.connection, &op.1, OpStatus::Done, ObjectVersion::NONE, Some(data));
    bench.feed(event);
    assert!(bench.wire.closed.contains(&op.0.connection));
}

#[test]
fn replies_to_unknown_ops_and_sessions_are_nothing() {
    let mut bench = Bench::warm(1, 1);
    bench.read(1, 0);
    let op = bench.take_ops().remove(0);
    for (session, number) in [(op.1.op.session, 99), (SessionId(77), op.1.op.number)] {
        let request = OpRequest { op: OpId { session, number }, ..op.1 };
        let event = bench.wire.reply(op.0.connection, &request, OpStatus::NoSpace, ObjectVersion::NONE, None);
        bench.feed(event);
    }
    assert_eq!(bench.done(), []);
    bench.answer(&op.0);
    assert_eq!(bench.done(), [(1, Ok(()))]);
}

#[test]
fn the_hinted_core_is_used_from_then_on() {
    let mut bench = Bench::warm(1, 1);
    bench.read(1, 0);
    let op = bench.take_ops().remove(0);
    let data = bench.wire.pool.copy_of(&[0; 4096]).unwrap();
    let mut event = bench.wire.reply(op.0.connection, &op.1, OpStatus::Done, ObjectVersion::NONE, Some(data));
    if let WireEvent::Message { message: Message::OpReply(reply), .. } = &mut event {
        reply.core = CoreId(1);
    }
    bench.feed(event);
    bench.read(2, 0);
    let op = bench.take_ops().remove(0);
    assert_eq!(bench.wire.connections[&op.0.connection], (Role::Osd(OsdId(0)), CoreId(1)));
    let data = bench.wire.pool.copy_of(&[0; 4096]).unwrap();
    let mut event = bench.wire.reply(op.0.connection, &op.1, OpStatus::Done, ObjectVersion::NONE, Some(data));
    if let WireEvent::Message { message: Message::OpReply(reply), .. } = &mut event {
        reply.core = CoreId(9);
    }
    bench.feed(event);
    bench.read(3, 0);
    let op = bench.take_ops().remove(0);
    assert_eq!(
        bench.wire.connections[&op.0.connection].1,
        CoreId(0),
        "a core that the map does not have is not"
    );
}

#[test]
fn the_window_of_a_pg_is_bounded_by_its_oldest_op() {
    let mut bench = Bench::cold(1, 1);
    bench.wire.credits = 128;
    bench.settle();
    bench.read(0, 0);
    let stuck = bench.take_ops().remove(0);
    let limit = u32::try_from(loligo_config::limits::SESSION_RESULTS_MAX).unwrap();
    (1..limit + 10).for_each(|owner| bench.read(owner, 1));
    bench.settle();
    assert_eq!(bench.done().len(), limit as usize - 1);
    bench.answer(&stuck.0);
    bench.settle();
    assert_eq!(bench.done().len(), 11);
}

#[test]
fn without_a_mon_everybody_waits_and_the_next_one_is_tried() {
    let mut bench = Bench::cold(1, 1);
    bench.wire.unreachable.push(Role::Mon);
    bench.read(1, 0);
    for _ in 0..5 {
        bench.wait(2000);
        bench.connect_all();
    }
    assert!(matches!(bench.objecter.connect_problem(), Some(ConnectError::NoMon { .. })));
    assert!(bench.objecter.next_deadline().is_some_and(|at| at > bench.now));
    bench.wire.unreachable.clear();
    bench.wait(2000);
    bench.settle();
    assert_eq!(bench.done(), [(1, Ok(()))]);
}

#[test]
fn a_lost_mon_keeps_the_session_and_io_goes_on() {
    let mut bench = Bench::warm(1, 1);
    let mon = bench.wire.mon().unwrap();
    let down = bench.wire.cut(mon);
    bench.feed(down);
    bench.wire.unreachable.push(Role::Mon);
    bench.read(1, 0);
    bench.settle();
    assert_eq!(bench.done(), [(1, Ok(()))]);
    bench.wire.unreachable.clear();
    bench.wait(2000);
    bench.settle();
    assert_eq!(bench.wire.session, SessionId(1));
}

#[test]
fn commands_wait_for_their_map_and_are_not_repeated_when_that_could_harm() {
    let mut bench = Bench::warm(1, 1);
    bench.objecter.command(&serde_json::json!({"prefix": "status"}), Ticket(1));
    bench.objecter.command(&serde_json::json!({"prefix": "pool create", "name": "x"}), Ticket(2));
    bench.poll();
    assert_eq!(bench.wire.sent.drain(..).count(), 2);
    let mon = bench.wire.mon().unwrap();
    let down = bench.wire.cut(mon);
    bench.feed(down);
    assert_eq!(bench.objecter.next_answer(), Some((Ticket(2), Err(CommandError::MaybeApplied))));
    bench.wait(100);
    bench.settle();
    let (ticket, result) = bench.objecter.next_answer().unwrap();
    assert_eq!((ticket, result.unwrap()["done"].as_bool()), (Ticket(1), Some(true)));

    bench.objecter.command(&serde_json::json!({"prefix": "pool create", "name": "y"}), Ticket(3));
    bench.poll();
    let sent = bench.wire.sent.pop_front().unwrap();
    bench.wire.map.epoch = Epoch(2);
    bench.answer(&sent);
    assert_eq!(bench.objecter.next_answer(), None, "its map has not come");
    let event = bench.wire.map_event(sent.connection);
    bench.feed(event);
    assert!(bench.objecter.next_answer().is_some());
}

#[test]
fn a_time_limit_tells_whether_the_op_was_sent_and_keeps_order() {
    let mut bench = Bench::with(1, 1, Some(Duration::from_millis(100)));
    bench.read(1, 0);
    bench.wait(100);
    bench.poll();
    assert_eq!(bench.done(), [(1, Err(IoError::Timeout))], "not sent: nothing was changed");
    bench.settle();
    bench.write(2, 0, 0, 2);
    let old = bench.take_ops().remove(0);
    bench.wait(100);
    bench.poll();
    assert_eq!(bench.done(), [(2, Err(IoError::MaybeApplied))]);
    bench.write(3, 0, 0, 3);
    assert_eq!(bench.take_ops().len(), 0, "the newer write waits for the end of the older one");
    bench.answer(&old.0);
    bench.settle();
    assert_eq!(bench.done(), [(3, Ok(()))]);
    assert_eq!(bench.wire.store.objects[&object(0)].blocks[&0][0], 3);
}

#[test]
fn watches_are_armed_again_after_a_lost_connection_and_a_new_interval() {
    let mut bench = Bench::warm(1, 1);
    let watch = bench.objecter.watch(object(0));
    bench.settle();
    assert_eq!(bench.objecter.next_notice().map(|notice| notice.watch), Some(watch), "once when armed");
    bench.write(1, 0, 0, 1);
    bench.settle();
    let notice = bench.objecter.next_notice().unwrap();
    assert_eq!(notice.version, bench.wire.store.objects[&object(0)].version);
    let osd = *bench.wire.connections.iter().find(|(_, (role, _))| *role != Role::Mon).unwrap().0;
    let down = bench.wire.cut(osd);
    bench.feed(down);
    bench.wait(10);
    bench.settle();
    assert_eq!(bench.objecter.next_notice(), Some(notice), "armed again, with the version at hand");
    bench.new_map(|map| map.intervals.values_mut().for_each(|interval| interval.since = Epoch(2)));
    bench.settle();
    assert_eq!(bench.objecter.next_notice(), Some(notice));
    let elsewhere = Notify { pg: PgId::default(), object: object(5), version: notice.version };
    let osd = *bench.wire.connections.iter().find(|(_, (role, _))| *role != Role::Mon).unwrap().0;
    let event = bench.wire.message(osd, Message::Notify(elsewhere), None);
    bench.feed(event);
    bench.objecter.unwatch(bench.now, watch);
    bench.write(2, 0, 0, 2);
    bench.settle();
    assert_eq!(bench.objecter.next_notice(), None);
}

/// Simulation, seeds 20001 and 20041: an image that grew during an outage kept its old size at those who had it open.
#[test]
fn a_watch_that_takes_longer_than_the_time_limit_is_armed_all_the_same() {
    let mut bench = Bench::with(1, 1, Some(Duration::from_millis(100)));
    bench.settle();
    let watch = bench.objecter.watch(object(0));
    let op = bench.take_ops().remove(0);
    bench.wait(300);
    bench.poll();
    bench.answer(&op.0);
    bench.settle();
    assert_eq!(bench.objecter.next_notice().map(|notice| notice.watch), Some(watch));
    bench.write(1, 0, 0, 1);
    bench.settle();
    assert_eq!(bench.objecter.next_notice().map(|notice| notice.watch), Some(watch), "a change is told");
}

#[test]
fn an_osd_that_cannot_be_reached_is_tried_again_with_growing_pauses() {
    let mut bench = Bench::warm(1, 1);
    bench.wire.unreachable.push(Role::Osd(OsdId(0)));
    bench.read(1, 0);
    let mut tries = 0;
    for _ in 0..1000 {
        bench.wait(1);
        bench.poll();
        while let Some(event) = bench.wire.next_up() {
            tries += 1;
            bench.feed(event);
        }
    }
    assert!((5..=12).contains(&tries), "{tries} tries in a second");
    bench.wire.unreachable.clear();
    bench.wait(250);
    bench.settle();
    assert_eq!(bench.done(), [(1, Ok(()))]);
    let reason = LinkDown::Closed(CloseReason::Peer);
    bench.feed(WireEvent::Down { connection: ConnectionId(999), reason });
}

#[test]
fn a_full_table_of_watchers_holds_up_nobody_else() {
    let mut bench = Bench::warm(1, 1);
    bench.objecter.watch(object(0));
    bench.poll();
    bench.read(1, 0);
    let ops = bench.take_ops();
    assert_eq!((ops[0].1.kind, ops.len()), (OpKind::Watch, 2));
    assert!(bench.objecter.is_expecting());
    bench.refuse(&ops[0], OpStatus::Busy);
    bench.read(2, 0);
    bench.answer(&ops[1].0);
    bench.settle();
    assert_eq!(bench.done(), [(1, Ok(())), (2, Ok(()))]);
    assert!(!bench.objecter.is_expecting());
    assert_eq!(bench.objecter.next_deadline(), Some(bench.now.after(Duration::from_secs(1))));
    bench.wait(1000);
    bench.settle();
    assert!(bench.objecter.next_notice().is_some(), "armed in the end");
}
