//! A cluster for tests: one process that plays the mon and the OSDs on a `BTreeMap`, behind a scripted [`Wire`].

use crate::objecter::{LinkDown, Refused, Wire, WireEvent};
use loligo_config::id::{
    ClusterId, CoreId, DeviceId, Epoch, Incarnation, ObjectId, ObjectVersion, OpId, OsdId, PgId, PoolId,
    SessionId,
};
use loligo_config::map::{AuthMode, ClusterMap, Interval, Osd};
use loligo_config::placement;
use loligo_config::pool::{FailureDomain, Pool};
use loligo_net::wire::Message;
use loligo_net::wire::handshake::{Identity, Role};
use loligo_net::wire::list::{ObjectEntry, list_head};
use loligo_net::wire::mon::{CommandReply, Map};
use loligo_net::wire::op::{Guard, Notify, OpKind, OpReply, OpRequest, OpStatus, Residence};
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::{CloseReason, ConnectionId, Instant};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

pub(crate) const BLOCK: usize = 4096;
pub(crate) const POOL: &str = "rbd";

pub(crate) fn cluster_id() -> ClusterId {
    ClusterId(uuid::Uuid::from_u128(0x1010))
}

pub(crate) fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

pub(crate) fn mon_address() -> SocketAddr {
    address(6789)
}

/// A map with OSDs 0 to `osds - 1` of two cores, and one pool; PG i's primary is OSD i modulo `osds`.
pub(crate) fn map_with(osds: u32, pgs: u32) -> ClusterMap {
    let mut map = ClusterMap::new(cluster_id(), AuthMode::None, 0);
    for id in 0..osds {
        let at = address(7000 + u16::try_from(id).unwrap());
        let osd = Osd {
            id: OsdId(id),
            device: DeviceId(uuid::Uuid::from_u128(100 + u128::from(id))),
            incarnation: Incarnation(1),
            up: true,
            is_in: true,
            addresses: vec![at, at],
            weight: 65536,
            host: format!("host{id}"),
            rack: "rack".into(),
            device_class: "ssd".into(),
            capacity: 1 << 30,
        };
        map.osds.insert(OsdId(id), osd);
    }
    let pool = Pool {
        id: PoolId(1),
        name: POOL.into(),
        size: 1,
        min_size: 1,
        pg_count: pgs,
        failure_domain: FailureDomain::Osd,
        device_class: None,
        created: Epoch(1),
    };
    map.pools.insert(PoolId(1), pool);
    map.next_pool = PoolId(2);
    for index in 0..pgs {
        let interval = Interval { since: Epoch(1), acting: vec![OsdId(index % osds)] };
        map.intervals.insert(PgId { pool: PoolId(1), index }, interval);
    }
    map
}

/// One stored object.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stored {
    pub(crate) version: ObjectVersion,
    pub(crate) blocks: BTreeMap<u32, Vec<u8>>,
}

/// What all OSDs together hold.
#[derive(Debug, Default)]
pub(crate) struct Store {
    pub(crate) objects: BTreeMap<ObjectId, Stored>,
    results: BTreeMap<OpId, ObjectVersion>,
    sequence: u64,
    /// Writes applied, each once.
    pub(crate) applied: u64,
}

impl Store {
    /// Applies an op; `None` data where there is none.
    pub(crate) fn apply(
        &mut self,
        request: &OpRequest,
        data: Option<&[u8]>,
    ) -> (OpStatus, ObjectVersion, Vec<u8>) {
        let version = self.objects.get(&request.object).map_or(ObjectVersion::NONE, |object| object.version);
        if let Some(version) = self.results.get(&request.op) {
            assert!(request.attempt > 0, "an op that was applied is sent again with the mark");
            return (OpStatus::Done, *version, Vec::new());
        }
        if let Guard::Version(wanted) = request.guard
            && wanted != version
        {
            return (OpStatus::VersionMismatch, version, Vec::new());
        }
        if request.kind.is_write() {
            return (OpStatus::Done, self.write(request, data.unwrap_or_default()), Vec::new());
        }
        let object = self.objects.get(&request.object).cloned().unwrap_or_default();
        let bytes = match request.kind {
            OpKind::Read => read(&object, request.offset, request.len),
            OpKind::Extents => extents(&object, request.offset, request.len),
            _ => Vec::new(),
        };
        (OpStatus::Done, version, bytes)
    }

    fn write(&mut self, request: &OpRequest, data: &[u8]) -> ObjectVersion {
        let exists = self.objects.contains_key(&request.object);
        if request.kind != OpKind::Write && !exists {
            return ObjectVersion::NONE;
        }
        self.applied += 1;
        self.sequence += 1;
        let version = ObjectVersion { interval: Epoch(1), stream: 0, sequence: self.sequence };
        self.results.insert(request.op, version);
        if request.kind == OpKind::Remove {
            self.objects.remove(&request.object);
            return version;
        }
        let object = self.objects.entry(request.object).or_default();
        object.version = version;
        let (start, end) = (request.offset as usize, (request.offset + request.len) as usize);
        for at in start..end {
            let block = u32::try_from(at / BLOCK).unwrap();
            let is_whole = at / BLOCK * BLOCK >= start && (at / BLOCK + 1) * BLOCK <= end;
            match request.kind {
                OpKind::Write => {
                    object.blocks.entry(block).or_insert_with(|| vec![0; BLOCK])[at % BLOCK] =
                        data[at - start];
                }
                _ if is_whole => drop(object.blocks.remove(&block)),
                OpKind::WriteZeroes => {
                    if let Some(bytes) = object.blocks.get_mut(&block) {
                        bytes[at % BLOCK] = 0;
                    }
                }
                _ => {}
            }
        }
        version
    }
}

fn read(object: &Stored, offset: u32, len: u32) -> Vec<u8> {
    let byte = |at: usize| {
        object.blocks.get(&u32::try_from(at / BLOCK).unwrap()).map_or(0, |bytes| bytes[at % BLOCK])
    };
    (offset as usize..(offset + len) as usize).map(byte).collect()
}

fn extents(object: &Stored, offset: u32, len: u32) -> Vec<u8> {
    let range = offset / BLOCK as u32..(offset + len).div_ceil(BLOCK as u32);
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for (&block, _) in object.blocks.range(range) {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == block => *count += 1,
            _ => runs.push((block, 1)),
        }
    }
    runs.iter().flat_map(|(block, count)| [block.to_le_bytes(), count.to_le_bytes()].concat()).collect()
}

/// A message that the client sent.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) connection: ConnectionId,
    pub(crate) message: Message,
    pub(crate) data: Option<SharedBuffer>,
}

/// The network and the cluster behind it.
#[derive(Debug)]
pub(crate) struct Scripted {
    pub(crate) pool: BufferPool,
    pub(crate) map: ClusterMap,
    pub(crate) store: Store,
    pub(crate) session: SessionId,
    next_session: u64,
    next_connection: u64,
    /// Connections that exist, and to whom.
    pub(crate) connections: BTreeMap<ConnectionId, (Role, CoreId)>,
    pub(crate) dialing: VecDeque<ConnectionId>,
    pub(crate) sent: VecDeque<Sent>,
    pub(crate) closed: Vec<ConnectionId>,
    watchers: BTreeMap<ObjectId, Vec<(ConnectionId, SessionId)>>,
    pub(crate) epoch: Epoch,
    /// OSDs and mons that cannot be reached now.
    pub(crate) unreachable: Vec<Role>,
    pub(crate) credits: u32,
    pub(crate) refuse_sends: bool,
}

impl Scripted {
    pub(crate) fn new(map: ClusterMap) -> Self {
        Self {
            pool: BufferPool::new(256 << 20),
            map,
            store: Store::default(),
            session: SessionId(0),
            next_session: 1,
            next_connection: 0,
            connections: BTreeMap::new(),
            dialing: VecDeque::new(),
            sent: VecDeque::new(),
            closed: Vec::new(),
            watchers: BTreeMap::new(),
            epoch: Epoch(0),
            unreachable: Vec::new(),
            credits: 16,
            refuse_sends: false,
        }
    }

    /// The next connection attempt succeeds or fails.
    pub(crate) fn next_up(&mut self) -> Option<WireEvent> {
        let connection = self.dialing.pop_front()?;
        let (role, _) = self.connections[&connection];
        if self.unreachable.contains(&role) {
            self.connections.remove(&connection);
            let reason = LinkDown::Closed(CloseReason::Unreachable(111));
            return Some(WireEvent::Down { connection, reason });
        }
        if role == Role::Mon && self.session == SessionId(0) {
            self.session = SessionId(self.next_session);
            self.next_session += 1;
        }
        let peer = Identity { cluster: Some(cluster_id()), role, incarnation: Incarnation(1) };
        Some(WireEvent::Up { connection, peer, credits: self.credits })
    }

    /// A connection is lost from outside.
    pub(crate) fn cut(&mut self, connection: ConnectionId) -> WireEvent {
        self.connections.remove(&connection);
        self.sent.retain(|sent| sent.connection != connection);
        WireEvent::Down { connection, reason: LinkDown::Closed(CloseReason::Peer) }
    }

    pub(crate) fn map_event(&self, connection: ConnectionId) -> WireEvent {
        let data = self.pool.copy_of(&self.map.encode()).unwrap();
        self.message(connection, Message::Map(Map { epoch: self.map.epoch }), Some(data))
    }

    pub(crate) fn message(
        &self,
        connection: ConnectionId,
        message: Message,
        data: Option<SharedBuffer>,
    ) -> WireEvent {
        WireEvent::Message { connection, message, data, arrived: Instant(0) }
    }

    pub(crate) fn mon(&self) -> Option<ConnectionId> {
        self.connections.iter().find(|(_, (role, _))| *role == Role::Mon).map(|(connection, _)| *connection)
    }

    /// The cluster's honest answers to a message.
    pub(crate) fn answer(&mut self, sent: &Sent) -> Vec<WireEvent> {
        match sent.message {
            Message::Subscribe(_) => vec![self.map_event(sent.connection)],
            Message::Command(command) => {
                let data = self.pool.copy_of(br#"{"ok": {"done": true}}"#).unwrap();
                let reply = CommandReply { number: command.number, epoch: self.map.epoch };
                vec![self.message(sent.connection, Message::CommandReply(reply), Some(data))]
            }
            Message::Op(request) => self.serve(sent.connection, &request, sent.data.as_deref()),
            other => panic!("a client does not send {other:?}"),
        }
    }

    fn serve(
        &mut self,
        connection: ConnectionId,
        request: &OpRequest,
        data: Option<&[u8]>,
    ) -> Vec<WireEvent> {
        assert!(request.lowest_outstanding <= request.op.number, "an op is outstanding itself");
        assert_eq!(
            data.map_or(0, <[u8]>::len),
            if request.kind == OpKind::Write { request.len as usize } else { 0 }
        );
        assert!(u64::from(request.offset) + u64::from(request.len) <= 32 << 20, "within an object");
        if request.kind == OpKind::WriteZeroes && request.len > 1 << 20 {
            let is_whole = request.offset.is_multiple_of(4096) && request.len.is_multiple_of(4096);
            assert!(is_whole, "an OSD refuses to write more than 1 MiB of parts of blocks");
        }
        let before = self.store.applied;
        let (status, version, bytes) = match request.kind {
            OpKind::List => (OpStatus::Done, ObjectVersion::NONE, self.list(request)),
            OpKind::Watchers => (OpStatus::Done, ObjectVersion::NONE, self.sessions(request.object)),
            _ => self.store.apply(request, data),
        };
        if request.kind == OpKind::Watch {
            self.watchers.entry(request.object).or_default().push((connection, request.op.session));
        }
        let bytes = (!bytes.is_empty()).then(|| self.pool.copy_of(&bytes).unwrap());
        let mut events = vec![self.reply(connection, request, status, version, bytes)];
        if self.store.applied > before {
            for (watcher, _) in self.watchers.get(&request.object).into_iter().flatten() {
                let notify = Notify { pg: request.pg, object: request.object, version };
                events.push(self.message(*watcher, Message::Notify(notify), None));
            }
        }
        events
    }

    /// Pages of two objects at most.
    fn list(&self, request: &OpRequest) -> Vec<u8> {
        let from = request.object;
        let pool = &self.map.pools[&from.pool];
        let all = self.store.objects.range(from..ObjectId { index: u64::MAX, ..from });
        let mut mine = all.filter(|(object, _)| placement::object_to_pg(pool, object) == request.pg);
        let page: Vec<_> = mine.by_ref().take(2).collect();
        let mut bytes = list_head(mine.next().map(|(object, _)| object.index)).to_vec();
        for (object, stored) in page {
            let blocks = u32::try_from(stored.blocks.len()).unwrap();
            bytes.extend(ObjectEntry { index: object.index, version: stored.version, blocks }.to_bytes());
        }
        bytes
    }

    /// Those of hosts that were replaced, too: for the cluster they live on.
    fn sessions(&self, object: ObjectId) -> Vec<u8> {
        let watchers = self.watchers.get(&object).into_iter().flatten();
        watchers.flat_map(|(_, session)| session.0.to_le_bytes()).collect()
    }

    pub(crate) fn reply(
        &self,
        connection: ConnectionId,
        request: &OpRequest,
        status: OpStatus,
        version: ObjectVersion,
        data: Option<SharedBuffer>,
    ) -> WireEvent {
        let reply = OpReply {
            op: request.op,
            status,
            version,
            offset: request.offset,
            len: data.as_ref().map_or(0, |data| u32::try_from(data.len()).unwrap()),
            core: CoreId(0),
            copies: 1,
            residence: Residence::default(),
        };
        self.message(connection, Message::OpReply(reply), data)
    }
}

impl Wire for Scripted {
    fn connect(&mut self, to: SocketAddr, expected: Role, core: CoreId) -> ConnectionId {
        assert!(to.port() >= 6789, "to where somebody listens");
        self.next_connection += 1;
        let connection = ConnectionId(self.next_connection);
        self.connections.insert(connection, (expected, core));
        self.dialing.push_back(connection);
        connection
    }

    fn send(
        &mut self,
        connection: ConnectionId,
        message: Message,
        data: Option<SharedBuffer>,
        within_block: u32,
    ) -> Result<(), Refused> {
        if self.refuse_sends {
            return Err(Refused::Full);
        }
        if !self.connections.contains_key(&connection) || self.dialing.contains(&connection) {
            return Err(Refused::Closed);
        }
        if let Message::Op(request) = message {
            assert_eq!(within_block, request.offset % 4096, "the data starts where the op does");
            assert_eq!(request.op.session, self.session, "ops carry the session");
        }
        self.sent.push_back(Sent { connection, message, data });
        Ok(())
    }

    fn now(&self) -> Instant {
        Instant(0)
    }

    fn close(&mut self, connection: ConnectionId) {
        self.connections.remove(&connection);
        self.dialing.retain(|other| *other != connection);
        self.closed.push(connection);
    }

    fn set_cluster(&mut self, cluster: ClusterId) {
        assert_eq!(cluster, cluster_id());
    }

    fn set_epoch(&mut self, epoch: Epoch) {
        assert!(epoch > self.epoch, "epochs only rise");
        self.epoch = epoch;
    }

    fn session(&self) -> SessionId {
        self.session
    }

    fn forget_session(&mut self) {
        self.session = SessionId(0);
    }
}
