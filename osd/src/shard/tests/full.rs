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

/// Whatever the size of the devices and the number of PGs on them: a full cluster says so, serves what it has, takes
/// deletes, and goes on afterwards.
#[test]
fn a_full_cluster_of_any_size_works_on_after_deletes() {
    for (blocks, pg_count) in sizes() {
        for seed in 0..2 {
            println!("blocks={blocks} pg_count={pg_count} SEED={seed}");
            fill_twice(blocks, pg_count, seed);
        }
    }
}

/// Blocks of each device and PGs: the smallest device that mkfs takes, and some above.
fn sizes() -> Vec<(u64, u32)> {
    let least = crate::store::Superblock::blocks_min(1);
    vec![
        (least, 1),
        (least, 4),
        (least, 24),
        (4096, 4),
        (4096, 64),
        (12_000, 8),
        (12_000, 100),
        (30_000, 100),
    ]
}

impl Bed {
    /// Blocks of ops that are taken: where there are too many PGs for the device, only small ones.
    fn op_sizes(&self) -> Vec<u32> {
        let window = self.shards().map(|shard| shard.store().space().window).min().unwrap();
        let largest = u32::try_from(window.saturating_sub(crate::store::api::WRITE_OVERHEAD)).unwrap();
        let largest = largest.min(OP_BLOCKS);
        let smaller = [1, 4, 16, 64].into_iter().filter(|size| *size < largest);
        smaller.chain([largest]).collect()
    }
}

fn fill_twice(blocks: u64, pg_count: u32, seed: u64) {
    let mut bed = Bed::sized(seed * 1000 + blocks, 1, blocks, pg_count);
    bed.until("active", Bed::all_active);
    bed.until("connections", |bed| {
        bed.client.links.len() == 3 && bed.client.links.values().all(|(_, is_up)| *is_up)
    });
    let mut done_before = 0;
    for round in 0..2 {
        let sizes = bed.op_sizes();
        let mean = sizes.iter().sum::<u32>() / sizes.len() as u32;
        let mut writes = bed.flood((blocks * 5 / 4 / u64::from(mean)).max(100));
        for (at, request) in writes.values_mut().enumerate() {
            request.len = sizes[(at + round) % sizes.len()] * BLOCK as u32;
        }
        let answers = bed.drive(writes.clone());
        let is_done = |request: &&OpRequest| answers[&request.op.number].status == OpStatus::Done;
        let stored: Vec<OpRequest> = writes.values().filter(is_done).copied().collect();
        let sum: u64 = stored.iter().map(|request| u64::from(request.len) / BLOCK as u64).sum();
        assert!(stored.len() < writes.len(), "it was filled");
        assert!(sum > blocks / 8, "{sum} of {blocks} blocks were to be had");
        assert!(round == 0 || sum * 2 >= done_before, "{sum} blocks after deletes, {done_before} before");
        done_before = sum;
        if seed == 1 {
            (0..3).for_each(|osd| bed.kill(osd));
            (0..3).for_each(|osd| bed.start(osd));
            bed.until("active again", Bed::all_active);
            bed.until("connections", |bed| {
                bed.client.links.len() == 3 && bed.client.links.values().all(|(_, is_up)| *is_up)
            });
        }
        for kind in [OpKind::Read, if round == 0 { OpKind::Discard } else { OpKind::Remove }] {
            let mut ops = BTreeMap::new();
            for request in &stored {
                let base = bed.request(0, kind);
                let len = if kind == OpKind::Remove { 0 } else { request.len };
                let op = OpRequest {
                    kind,
                    len,
                    op: base.op,
                    lowest_outstanding: base.lowest_outstanding,
                    ..*request
                };
                ops.insert(op.op.number, op);
            }
            let answers = bed.drive(ops);
            assert!(
                answers.values().all(|reply| reply.status == OpStatus::Done),
                "{kind:?} of a full cluster"
            );
        }
        // Somebody may have been told a moment ago that there is none.
        for _ in 0..20_000 {
            bed.turn();
        }
    }
    bed.assert_replicas_equal();
}
