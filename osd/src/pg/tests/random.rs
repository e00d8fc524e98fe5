//! Random schedules with kills, cut connections, lost replies and double deliveries, from seeds.

use super::cluster::{Cluster, object, request};
use crate::pg::{Payload, PgEvent};
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::op::{OpKind, OpReply, OpRequest, OpStatus};
use loligo_reactor::random::Random as SplitMix;
use std::time::Duration;

/// Contents are checked in cells of 512 bytes, each filled with the number of the op that wrote it.
const CELL: usize = 512;
const BLOCKS: u32 = 4;
const CELLS: usize = BLOCKS as usize * BLOCK_SIZE as usize / CELL;

/// Bounds by remainder: the seeds of named tests mean the schedules that they were found with.
pub struct Random(SplitMix);

impl Random {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.next_u64() % bound
    }

    fn chance(&mut self, per_thousand: u64) -> bool {
        self.below(1000) < per_thousand
    }
}

/// One client with one object of its own: one change at a time, resent until it is answered, and reads beside it.
struct Client {
    session: u64,
    next: u64,
    pending: Option<OpRequest>,
    reads: Vec<(OpRequest, Vec<[u64; CELLS]>)>,
    /// What is certainly there.
    acked: [u64; CELLS],
    /// What the pending change makes of it.
    wanted: [u64; CELLS],
    done: u64,
}

impl Client {
    fn new(session: u64) -> Self {
        Self {
            session,
            next: 1,
            pending: None,
            reads: Vec::new(),
            acked: [0; CELLS],
            wanted: [0; CELLS],
            done: 0,
        }
    }

    fn request(&mut self, kind: OpKind, offset: u32, len: u32) -> OpRequest {
        let number = self.next;
        self.next += 1;
        let mut request = request(self.session, number, kind, object(self.session), offset, len);
        let reads = self.reads.iter().map(|(read, _)| read);
        let lowest = reads.chain(&self.pending).map(|op| op.op.number).min();
        request.lowest_outstanding = lowest.unwrap_or(number).min(number);
        request
    }

    fn begin_change(&mut self, random: &mut Random) {
        let start = random.below(CELLS as u64) as usize;
        let count = 1 + random.below((CELLS - start).min(12) as u64) as usize;
        let kind = match random.below(20) {
            0 => OpKind::Remove,
            1 | 2 => OpKind::Discard,
            3 | 4 => OpKind::WriteZeroes,
            _ => OpKind::Write,
        };
        // Mostly whole blocks, as real clients write.
        let (start, count) =
            if random.chance(600) { (start / 8 * 8, count.div_ceil(8) * 8) } else { (start, count) };
        let count = count.min(CELLS - start);
        let request = self.request(kind, (start * CELL) as u32, (count * CELL) as u32);
        self.wanted = self.acked;
        let number = request.op.number;
        match kind {
            OpKind::Write => self.wanted[start..start + count].fill(number),
            OpKind::WriteZeroes => self.wanted[start..start + count].fill(0),
            OpKind::Discard => {
                let (first, last) = (start.div_ceil(8) * 8, (start + count) / 8 * 8);
                if first < last {
                    self.wanted[first..last].fill(0);
                }
            }
            _ => self.wanted.fill(0),
        }
        self.pending = Some(request);
        self.reads.iter_mut().for_each(|(_, states)| states.push(self.wanted));
    }

    fn begin_read(&mut self, random: &mut Random) -> OpRequest {
        let start = random.below(CELLS as u64) as usize;
        let count = 1 + random.below((CELLS - start) as u64) as usize;
        let read = self.request(OpKind::Read, (start * CELL) as u32, (count * CELL) as u32);
        // Each cell is as it was at the beginning, or as a change made it that was under way since.
        let mut states = vec![self.acked];
        states.extend(self.pending.map(|_| self.wanted));
        self.reads.push((read, states));
        read
    }

    fn data(&self, request: &OpRequest) -> Option<Vec<u8>> {
        (request.kind == OpKind::Write).then(|| {
            let cell = request.op.number.to_le_bytes().repeat(CELL / 8);
            cell.repeat(request.len as usize / CELL)
        })
    }

    fn on_reply(&mut self, reply: &OpReply, payload: Option<&Payload>) {
        if reply.status != OpStatus::Done {
            assert!(
                matches!(
                    reply.status,
                    OpStatus::NotActive | OpStatus::NotPrimary | OpStatus::StaleEpoch | OpStatus::Busy
                ) || self.pending.is_none_or(|pending| pending.op != reply.op),
                "{reply:?}"
            );
            return;
        }
        if self.pending.is_some_and(|pending| pending.op == reply.op) {
            assert_eq!(reply.copies, 3, "every copy is durable at an ack");
            self.acked = self.wanted;
            self.pending = None;
            self.done += 1;
        } else if let Some(at) = self.reads.iter().position(|(read, _)| read.op == reply.op) {
            let (read, states) = self.reads.swap_remove(at);
            self.check(&read, &states, &payload.expect("a read brings data").data);
            self.done += 1;
        }
    }

    fn check(&mut self, read: &OpRequest, states: &[[u64; CELLS]], data: &[u8]) {
        let first = read.offset as usize / CELL;
        for (at, cell) in data.chunks(CELL).enumerate() {
            let value = u64::from_le_bytes(cell[..8].try_into().unwrap());
            assert!(cell.chunks(8).all(|bytes| bytes == value.to_le_bytes()), "a cell is one write's");
            let at = first + at;
            let is_allowed = states.iter().any(|state| state[at] == value);
            assert!(is_allowed, "session {} cell {at}: read {value}, acked {}", self.session, self.acked[at]);
            if self.pending.is_some() && value == self.wanted[at] {
                // What was read once stays.
                self.acked[at] = value;
            }
        }
    }
}

struct Run {
    cluster: Cluster,
    clients: Vec<Client>,
    random: Random,
    /// Kills and cuts per 10,000 steps: drawn, so that some runs are calm and some wild.
    kill_rate: u64,
    cut_rate: u64,
    /// How often a store begins or ceases to refuse everything, per 1000 steps.
    busy_rate: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let clients = (1..=4).map(Client::new).collect();
        let mut random = Random(SplitMix::new(seed));
        let kill_rate = [2, 5, 20][random.below(3) as usize];
        let cut_rate = [0, 10, 60][random.below(3) as usize];
        let busy_rate = [0, 5, 50][random.below(3) as usize];
        Self { cluster: Cluster::new(3), clients, random, kill_rate, cut_rate, busy_rate }
    }

    fn client_action(&mut self) {
        let at = self.random.below(self.clients.len() as u64) as usize;
        let client = &mut self.clients[at];
        let request = match self.random.below(4) {
            0 if client.reads.len() < 3 => client.begin_read(&mut self.random),
            1 => match client.pending {
                // Sent again, as after a timeout.
                Some(pending) => OpRequest { attempt: 1, ..pending },
                None => return,
            },
            2 if !client.reads.is_empty() => client.reads[0].0,
            _ if client.pending.is_none() => {
                client.begin_change(&mut self.random);
                client.pending.expect("just begun")
            }
            _ => return,
        };
        let data = client.data(&request);
        let node = if self.random.chance(50) { 1 } else { 0 };
        self.cluster.submit(node, request, data.as_deref());
        if self.random.chance(50) {
            self.cluster.submit(node, request, data.as_deref());
        }
    }

    fn take_replies(&mut self, lose: bool) {
        while let Some((to, reply, payload)) = self.cluster.replies.pop_front() {
            if lose && self.random.chance(50) {
                continue;
            }
            let client = &mut self.clients[to.connection.0 as usize - 1];
            client.on_reply(&reply, payload.as_ref());
        }
    }

    fn act(&mut self) {
        let node = self.random.below(3) as usize;
        let other = (node + 1 + self.random.below(2) as usize) % 3;
        if self.random.below(10_000) < self.kill_rate {
            self.kill_some(node);
        }
        if self.random.below(10_000) < self.cut_rate {
            self.cluster.disconnect(node, other);
        }
        if self.busy_rate > 0 && self.random.chance(self.busy_rate) {
            let is_busy = self.random.chance(300);
            self.cluster.nodes[node].store.is_busy = is_busy;
        }
        if self.random.chance(200) {
            self.cluster.make_room(node);
        }
        match self.random.below(100) {
            0..40 => {
                self.cluster.deliver(node, other);
            }
            40..60 => {
                self.cluster.commit(node);
            }
            60..70 => {
                let at = self.random.below(8) as usize;
                self.cluster.finish_read(node, at);
            }
            70..84 => self.client_action(),
            84..89 => {
                self.cluster.take_map(node);
            }
            89..97 => {
                self.cluster.now = self.cluster.now.after(Duration::from_millis(2));
                self.cluster.step(node, PgEvent::Tick);
            }
            97 | 98 => self.cluster.connect(node, other),
            _ => self.cluster.restart(node),
        }
        self.take_replies(true);
    }

    /// One node, or a power cut of all.
    fn kill_some(&mut self, node: usize) {
        let is_all = self.random.chance(250);
        for node in (0..3).filter(|other| is_all || *other == node) {
            let in_flight = self.cluster.nodes[node].store.in_flight() as u64;
            let kept = self.random.below(1 + in_flight) as usize;
            self.cluster.kill(node, kept);
        }
    }

    /// Everything is healed: every op ends, every member has the same.
    fn finish(&mut self) -> u64 {
        self.cluster.nodes.iter_mut().for_each(|node| node.store.is_busy = false);
        self.cluster.settle();
        self.take_replies(false);
        for at in 0..self.clients.len() {
            let reads = self.clients[at].reads.iter().map(|(read, _)| *read);
            for op in reads.chain(self.clients[at].pending).collect::<Vec<_>>() {
                let data = self.clients[at].data(&op);
                self.cluster.submit(0, OpRequest { attempt: 1, ..op }, data.as_deref());
            }
        }
        self.cluster.settle();
        self.take_replies(false);
        self.cluster.assert_members_equal();
        for client in &mut self.clients {
            assert!(client.pending.is_none(), "every op ends once all is well");
            assert!(client.reads.is_empty(), "every read ends once all is well");
            let whole = request(client.session, u64::MAX, OpKind::Read, object(client.session), 0, 0);
            let bytes = self.cluster.bytes(0, object(client.session), BLOCKS);
            let states = [client.acked];
            client.check(&whole, &states, &bytes);
        }
        self.clients.iter().map(|client| client.done).sum()
    }
}

fn run(seed: u64, steps: usize) -> u64 {
    let mut run = Run::new(seed);
    for _ in 0..steps {
        run.act();
    }
    run.finish()
}

#[test]
fn acked_writes_survive_random_crashes_and_apply_once() {
    let mut done = 0;
    for seed in 0..200 {
        println!("SEED={seed}");
        done += run(seed, 10_000);
    }
    assert!(done > 15_000, "the schedules let ops through: {done}");
}

/// A read begun for one tail ended during the next, and its blocks were sent as those of another write.
#[test]
fn a_late_read_of_an_earlier_tail_is_not_sent() {
    run(3657, 10_000);
}
