//! Many writes at once to a cluster that has not the room for all.

use super::*;
use loligo_net::wire::op::OpReply;

const OP_BLOCKS: u32 = 256;

impl Bed {
    /// Large writes to as many objects as there are, from one moment on.
    fn flood(&mut self, objects: u64) -> BTreeMap<u64, OpRequest> {
        let mut sent = BTreeMap::new();
        for index in 0..objects {
            let object = ObjectId { pool: POOL, index: 1000 + index, ..ObjectId::default() };
            let base = self.request(0, OpKind::Write);
            let pg = object_to_pg(&self.mon.map.pools[&POOL], &object);
            let len = OP_BLOCKS * BLOCK as u32;
            let request = OpRequest { pg, object, offset: 0, len, lowest_outstanding: 1, ..base };
            sent.insert(request.op.number, request);
        }
        sent
    }

    fn send_large(&mut self, request: OpRequest) {
        let primary = self.mon.map.primary(request.pg).unwrap();
        let Some((connection, true)) = self.client.links.get(&(primary, 0)).copied() else { return };
        let body = match request.kind {
            OpKind::Write => Body::of(self.pool.copy_of(&vec![7; request.len as usize]).unwrap()),
            _ => Body::NONE,
        };
        self.client.net.set_epoch(self.mon.map.epoch);
        let _ = self.client.net.send(connection, Message::Op(request), body);
    }

    /// Sends the ops again and again until each has an answer that is one.
    fn drive(&mut self, left: BTreeMap<u64, OpRequest>) -> BTreeMap<u64, OpReply> {
        let (answers, left) = self.drive_for(60_000, left);
        let spaces: Vec<_> = self.shards().map(|shard| shard.store().space()).collect();
        assert!(left.is_empty(), "{} without an answer; {spaces:?}", left.len());
        answers
    }

    /// The same for some turns: the answers, and what has none.
    fn drive_for(
        &mut self,
        turns: u32,
        mut left: BTreeMap<u64, OpRequest>,
    ) -> (BTreeMap<u64, OpReply>, BTreeMap<u64, OpRequest>) {
        let mut answers = BTreeMap::new();
        for turn in 0..turns {
            // A client does not repeat itself, but after a kill nobody knows who has what.
            if turn % 1000 == 0 {
                let again: Vec<_> = left.values().copied().collect();
                again.into_iter().for_each(|request| self.send_large(request));
            }
            let mut events = VecDeque::new();
            self.clock.0.set(self.clock.0.get() + 20_000 + self.random.below(100_000));
            let now = self.clock.now();
            self.hub.set_now(now);
            self.mon.poll(now, &self.pool);
            self.poll_osds(now);
            self.client.net.poll(now, &mut events);
            for event in events {
                let MessengerEvent::Message { received, .. } = event else { continue };
                let Message::OpReply(reply) = received.envelope.message else { continue };
                if matches!(reply.status, OpStatus::Done | OpStatus::NoSpace) {
                    left.remove(&reply.op.number);
                    answers.insert(reply.op.number, reply);
                }
            }
            if left.is_empty() {
                break;
            }
        }
        (answers, left)
    }
}

#[test]
fn writes_of_many_primaries_at_once_do_not_block_a_full_cluster() {
    for seed in 0..12 {
        fill_and_delete(seed);
    }
}

fn fill_and_delete(seed: u64) {
    let mut bed = Bed::new(77 + seed, 1);
    bed.until("active", Bed::all_active);
    for _ in 0..2000 {
        bed.turn();
    }
    let sent = bed.flood(150);
    let (mut answers, left) = bed.drive_for(if seed.is_multiple_of(2) { 0 } else { 700 }, sent.clone());
    if !seed.is_multiple_of(2) {
        assert!(left.len() > 20, "in the middle of it");
        (0..3).for_each(|osd| bed.kill(osd));
        (0..3).for_each(|osd| bed.start(osd));
        bed.until("active again", Bed::all_active);
        bed.until("connections", |bed| {
            bed.client.links.len() == 3 && bed.client.links.values().all(|(_, is_up)| *is_up)
        });
    }
    answers.extend(bed.drive(left));
    let done = answers.values().filter(|reply| reply.status == OpStatus::Done).count();
    assert!(done > 10 && done < 150, "{done} writes fit");
    // What fits can be deleted again.
    let mut removals = BTreeMap::new();
    for request in sent.values() {
        let base = bed.request(0, OpKind::Remove);
        let remove = OpRequest {
            pg: request.pg,
            object: request.object,
            offset: 0,
            len: 0,
            lowest_outstanding: 1,
            ..base
        };
        removals.insert(remove.op.number, remove);
    }
    bed.drive(removals);
}
