//! Three members of one PG over a scripted network, with clients that check what they read.

use super::store::FakeStore;
use crate::pg::phase::PhaseKind;
use crate::pg::{
    Actions, BlockRange, Context, Payload, PerMember, Pg, PgAction, PgEvent, PgStore, Requester, View,
};
use loligo_config::id::{Epoch, ObjectId, ObjectVersion, OpId, OsdId, PgId, SessionId};
use loligo_net::wire::Message;
use loligo_net::wire::op::{Guard, OpKind, OpReply, OpRequest, OpStatus};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{ConnectionId, Instant};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

pub struct Node {
    pub pg: Option<Pg>,
    pub store: FakeStore,
    /// Maps on their way to it.
    pub maps: VecDeque<View>,
}

pub type Letter = (Message, Option<Payload>);

pub struct Cluster {
    pub nodes: Vec<Node>,
    pub channels: BTreeMap<(usize, usize), VecDeque<Letter>>,
    /// Pairs without a connection.
    pub cut: BTreeSet<(usize, usize)>,
    pub view: View,
    pub epoch: Epoch,
    pub now: Instant,
    pub replies: VecDeque<(Requester, OpReply, Option<Payload>)>,
    /// What the last reply of `run` brought.
    pub last_data: Option<Payload>,
    pub notifies: usize,
    pub fenced: Vec<SessionId>,
    pub pool: BufferPool,
}

/// What it takes to hand a step's copies to the transport.
pub const SENDING: Duration = Duration::from_nanos(300);

pub const PG: PgId = PgId { pool: loligo_config::id::PoolId(1), index: 0 };

pub fn object(index: u64) -> ObjectId {
    ObjectId { pool: PG.pool, index, ..ObjectId::default() }
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

impl Cluster {
    pub fn new(members: usize) -> Self {
        let pool = BufferPool::new(1 << 30);
        let node = |index: usize| Node {
            pg: Some(Pg::new(PG, OsdId(index as u32), 7, None)),
            store: FakeStore::new(&pool),
            maps: VecDeque::new(),
        };
        let nodes = (0..members).map(node).collect();
        let acting: PerMember<OsdId> = (0..members as u32).map(OsdId).collect();
        let mut cluster = Self {
            nodes,
            channels: BTreeMap::new(),
            cut: BTreeSet::new(),
            view: View { since: Epoch(1), acting, complete: true },
            epoch: Epoch(1),
            now: Instant(1_000_000_000),
            replies: VecDeque::new(),
            last_data: None,
            notifies: 0,
            fenced: Vec::new(),
            pool,
        };
        cluster.publish();
        cluster
    }

    /// The map goes to everybody who lives.
    pub fn publish(&mut self) {
        for node in &mut self.nodes {
            if node.pg.is_some() {
                node.maps.push_back(self.view.clone());
            }
        }
    }

    pub fn step(&mut self, node: usize, event: PgEvent) {
        let Node { pg: Some(pg), store, .. } = &mut self.nodes[node] else { return };
        let mut out = Actions::new();
        let mut cx = Context { now: self.now, store, pool: &self.pool, fenced: &self.fenced };
        pg.step(&mut cx, event, &mut out);
        // As a shard does, which reads its clock again for it.
        pg.note_sent(self.now.after(SENDING));
        for action in out {
            match action {
                PgAction::Send { to, message, payload } => {
                    let to = to.0 as usize;
                    if !self.cut.contains(&pair(node, to)) && self.nodes[to].pg.is_some() {
                        self.channels.entry((node, to)).or_default().push_back((message, payload));
                    }
                }
                PgAction::Reply { to, reply, payload, .. } => self.replies.push_back((to, reply, payload)),
                PgAction::Notify { .. } => self.notifies += 1,
                PgAction::Superseded { .. } => {}
            }
        }
    }

    pub fn deliver(&mut self, from: usize, to: usize) -> bool {
        let Some((message, payload)) = self.channels.get_mut(&(from, to)).and_then(VecDeque::pop_front)
        else {
            return false;
        };
        let arrived = self.now;
        self.step(to, PgEvent::Peer { from: OsdId(from as u32), message, payload, arrived });
        true
    }

    pub fn take_map(&mut self, node: usize) -> bool {
        match self.nodes[node].maps.pop_front() {
            Some(view) => {
                self.step(node, PgEvent::Map(Some(view)));
                true
            }
            None => false,
        }
    }

    pub fn commit(&mut self, node: usize) -> bool {
        match self.nodes[node].store.commit_next() {
            Some(ticket) => {
                self.step(node, PgEvent::Committed { ticket, device_ns: 1000 });
                true
            }
            None => false,
        }
    }

    pub fn finish_read(&mut self, node: usize, at: usize) -> bool {
        match self.nodes[node].store.read_next(at) {
            Some((ticket, data)) => {
                self.step(node, PgEvent::Read { ticket, result: Ok(data), device_ns: 500 });
                true
            }
            None => false,
        }
    }

    /// As a shard does when its store moves.
    pub fn make_room(&mut self, node: usize) -> bool {
        let wants_room = self.nodes[node].pg.as_ref().is_some_and(Pg::wants_room);
        if wants_room {
            self.step(node, PgEvent::Room);
        }
        wants_room && !self.nodes[node].pg.as_ref().is_some_and(Pg::wants_room)
    }

    pub fn disconnect(&mut self, a: usize, b: usize) {
        if self.cut.insert(pair(a, b)) {
            self.channels.remove(&(a, b));
            self.channels.remove(&(b, a));
            self.step(a, PgEvent::PeerDown(OsdId(b as u32)));
            self.step(b, PgEvent::PeerDown(OsdId(a as u32)));
        }
    }

    pub fn connect(&mut self, a: usize, b: usize) {
        if self.nodes[a].pg.is_some() && self.nodes[b].pg.is_some() && self.cut.remove(&pair(a, b)) {
            self.step(a, PgEvent::PeerUp(OsdId(b as u32)));
            self.step(b, PgEvent::PeerUp(OsdId(a as u32)));
        }
    }

    /// A new interval in which everybody is up, as after a restart that nobody here saw; the map is on its way.
    pub fn new_interval(&mut self) {
        self.epoch = self.epoch.next();
        self.view.since = self.epoch;
        self.publish();
    }

    /// kill -9: of what was in flight, `kept` transactions reached the disk. The map follows.
    pub fn kill(&mut self, node: usize, kept: usize) {
        if self.nodes[node].pg.take().is_none() {
            return;
        }
        self.nodes[node].store.crash(kept);
        self.nodes[node].maps.clear();
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            self.disconnect(node, other);
        }
        self.epoch = self.epoch.next();
        self.view.complete = false;
        self.publish();
    }

    pub fn restart(&mut self, node: usize) {
        if self.nodes[node].pg.is_some() {
            return;
        }
        let status = self.nodes[node].store.status(PG);
        self.nodes[node].pg = Some(Pg::new(PG, OsdId(node as u32), 7, status));
        self.epoch = self.epoch.next();
        self.view.since = self.epoch;
        self.view.complete = self.nodes.iter().all(|node| node.pg.is_some());
        self.publish();
    }

    pub fn phase(&self, node: usize) -> Option<PhaseKind> {
        self.nodes[node].pg.as_ref().map(|pg| pg.phase().kind())
    }

    /// Everything lives and moves until nothing is left to do.
    pub fn settle(&mut self) {
        let count = self.nodes.len();
        for node in 0..count {
            self.restart(node);
        }
        for (a, b) in self.cut.clone() {
            self.connect(a, b);
        }
        let mut idle_ticks = 0;
        for _ in 0..100_000 {
            let mut moved = false;
            for node in 0..count {
                moved |= self.take_map(node);
                moved |= self.commit(node);
                moved |= self.finish_read(node, 0);
                for other in 0..count {
                    moved |= self.deliver(node, other);
                }
            }
            for node in 0..count {
                moved |= self.make_room(node);
            }
            if !moved {
                idle_ticks += 1;
                self.now = self.now.after(Duration::from_millis(100));
                (0..count).for_each(|node| self.step(node, PgEvent::Tick));
            }
            if idle_ticks > 30 {
                return;
            }
        }
        panic!("the cluster does not come to rest");
    }

    pub fn submit(&mut self, node: usize, request: OpRequest, data: Option<&[u8]>) {
        let payload = data.map(|data| Payload { data: self.pool.copy_of(data).unwrap(), checksums: None });
        let from = Requester { core: 0, connection: ConnectionId(request.op.session.0) };
        let event = PgEvent::Op { request, epoch: self.epoch, payload, from, arrived: self.now };
        self.step(node, event);
    }

    /// A write to the first node, driven to its end.
    pub fn run(&mut self, request: OpRequest, data: Option<&[u8]>) -> OpReply {
        self.submit(0, request, data);
        self.settle();
        let (_, reply, payload) = self.replies.pop_back().expect("a settled op has its reply");
        self.last_data = payload;
        reply
    }

    pub fn assert_members_equal(&self) {
        let first = &self.nodes[0].store.now;
        for node in &self.nodes[1..] {
            assert!(node.store.now.blocks.keys().eq(first.blocks.keys()), "members have the same blocks");
            for (key, block) in &node.store.now.blocks {
                assert!(*block == first.blocks[key], "members have the same data in {key:?}");
            }
            assert_eq!(node.store.now.objects, first.objects, "members have the same object versions");
            assert_eq!(node.store.now.ops, first.ops, "members have the same op results");
            assert_eq!(node.store.now.last, first.last);
            assert_eq!(node.store.now.meta, first.meta);
        }
        for node in &self.nodes {
            let mut ops = BTreeSet::new();
            for tx in node.store.writes().filter(|tx| tx.op.number != 0) {
                assert!(ops.insert(tx.op), "op {} applied twice", tx.op);
            }
        }
    }

    pub fn bytes(&self, node: usize, object: ObjectId, blocks: u32) -> Vec<u8> {
        let data = self.nodes[node].store.data(BlockRange { object, block: 0, count: blocks });
        data.data.map_or_else(|| vec![0; blocks as usize * 4096], |data| data.to_vec())
    }
}

pub fn request(
    session: u64,
    number: u64,
    kind: OpKind,
    object: ObjectId,
    offset: u32,
    len: u32,
) -> OpRequest {
    OpRequest {
        pg: PG,
        object,
        kind,
        offset,
        len,
        op: OpId { session: SessionId(session), number },
        lowest_outstanding: number,
        snap_seq: 0,
        guard: Guard::Any,
        attempt: 0,
        client_queue_ns: 0,
    }
}

pub fn write(session: u64, number: u64, object: ObjectId, offset: u32, len: u32) -> OpRequest {
    request(session, number, OpKind::Write, object, offset, len)
}

pub fn is_done(reply: &OpReply) -> bool {
    reply.status == OpStatus::Done && (reply.version == ObjectVersion::NONE || reply.copies > 0)
}
