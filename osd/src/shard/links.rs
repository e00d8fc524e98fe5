//! What the shards of one OSD say to each other, and which PG is whose.
//!
//! The first shard talks with the mon. It says which shard gets a new PG, then makes the map the newest one, which
//! the others find at their next poll; so no shard sees a map before the owners of its PGs are known.
//!
//! The table is behind a lock that is taken when a map comes and when an op has come to the wrong core, never for an
//! op that came to the right one.

use crate::pg::{Payload, Requester};
use loligo_config::id::{Epoch, OsdId, PgId};
use loligo_config::map::ClusterMap;
use loligo_net::wire::mon::{Failure, OsdReport};
use loligo_net::wire::op::{Notify, OpReply, OpRequest};
use loligo_reactor::dma::{BufferPool, PoolExhausted};
use loligo_reactor::env::{ConnectionId, Instant, QueueFull};
use loligo_reactor::mailbox::{Receiver, Sender, mailbox};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Messages that wait for one shard; beyond it ops are answered `Busy`. Guessed.
const MAILBOX_CAPACITY: usize = 1024;
/// What a full mailbox did not take is tried again this often, also by a parked reactor. Guessed.
pub const OUTBOX_RETRY: Duration = Duration::from_micros(200);

/// Data on its way to another shard, copied: buffers belong to one reactor.
#[derive(Debug)]
pub struct Copied {
    data: Vec<u8>,
    checksums: Option<Vec<u8>>,
}

impl Copied {
    /// Copies the data and the checksums that came with it, so that the other shard checks what this one received.
    pub fn of(payload: &Payload) -> Self {
        let checksums = payload.checksums.as_ref().map(|checksums| checksums.to_vec());
        Self { data: payload.data.to_vec(), checksums }
    }

    /// The payload again, in buffers of the receiving reactor.
    ///
    /// # Errors
    /// When the pool has no memory now.
    pub fn into_payload(self, pool: &BufferPool) -> Result<Payload, PoolExhausted> {
        let checksums = self.checksums.map(|checksums| pool.copy_of(&checksums)).transpose()?;
        Ok(Payload { data: pool.copy_of(&self.data)?, checksums })
    }
}

/// From one shard to another.
#[derive(Debug)]
pub enum ShardMessage {
    /// There is something new in what all shards share: a map, or a shard that has mounted.
    Look,
    /// An op that arrived at the wrong core.
    Op {
        /// The op.
        request: OpRequest,
        /// The client's epoch.
        epoch: Epoch,
        /// Its data.
        data: Option<Copied>,
        /// Who waits for it.
        from: Requester,
        /// When it arrived.
        arrived: Instant,
    },
    /// The answer to one.
    Reply {
        /// The client's connection.
        to: ConnectionId,
        /// The answer.
        reply: OpReply,
        /// Its data.
        data: Option<Copied>,
        /// When the op arrived.
        arrived: Instant,
    },
    /// An op whose reply goes elsewhere, since it was sent again.
    Superseded(ConnectionId),
    /// For a watcher.
    Notify {
        /// The client's connection.
        to: ConnectionId,
        /// The change.
        notify: Notify,
    },
    /// A client's connection is gone.
    Gone(Requester),
    /// To the shard that talks with the mon.
    Report {
        /// Which shard.
        shard: u16,
        /// Its part.
        report: OsdReport,
    },
    /// To the shard that talks with the mon: a peer does not answer.
    Failure(Failure),
}

#[derive(Debug, Default)]
struct Table {
    owners: BTreeMap<PgId, u16>,
    map: Option<Arc<ClusterMap>>,
}

/// What all shards of an OSD share.
#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    /// The epoch of the table's map, for a look at it without the lock.
    epoch: AtomicU32,
    /// Shards that have mounted.
    mounted: AtomicUsize,
    /// The newest interval that a PG of any shard has promised.
    promised: AtomicU32,
    /// By shard: the epoch of the map that it goes by.
    taken: Box<[AtomicU32]>,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        // A shard that panicked has ended the process, or a test that does not care.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One shard's links to the others of its OSD. Made for all at once, then moved to their threads.
#[derive(Debug)]
pub struct ShardLinks {
    /// This shard, counted from 0.
    index: u16,
    shared: Arc<Shared>,
    senders: Vec<Sender<ShardMessage>>,
    receiver: Receiver<ShardMessage>,
    /// By shard, in order: what its mailbox did not take.
    outbox: Vec<VecDeque<ShardMessage>>,
}

impl ShardLinks {
    /// The links of `shards` shards, in order.
    ///
    /// # Panics
    /// If there are none, or more than 65,535.
    pub fn new(shards: usize) -> Vec<ShardLinks> {
        Self::with_capacity(shards, MAILBOX_CAPACITY)
    }

    /// As [`ShardLinks::new`], with mailboxes of this many messages.
    pub(super) fn with_capacity(shards: usize, capacity: usize) -> Vec<ShardLinks> {
        assert!(shards > 0, "an OSD has a shard");
        let taken = (0..shards).map(|_| AtomicU32::new(0)).collect();
        let shared = Arc::new(Shared { taken, ..Shared::default() });
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..shards).map(|_| mailbox(capacity)).unzip();
        let links = receivers.into_iter().enumerate().map(|(index, receiver)| ShardLinks {
            index: u16::try_from(index).expect("few shards"),
            shared: Arc::clone(&shared),
            senders: senders.clone(),
            receiver,
            outbox: (0..shards).map(|_| VecDeque::new()).collect(),
        });
        links.collect()
    }

    /// The links of an OSD with one shard.
    pub fn single() -> ShardLinks {
        Self::new(1).pop().expect("one was asked for")
    }

    /// Which shard this is.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Whether it is the only one.
    pub fn is_single(&self) -> bool {
        self.senders.len() == 1
    }

    /// Where messages arrive: attach the reactor's waker to it.
    pub fn receiver(&self) -> &Receiver<ShardMessage> {
        &self.receiver
    }

    /// The other shards.
    pub fn others(&self) -> impl Iterator<Item = u16> + use<> {
        let own = self.index;
        (0..u16::try_from(self.senders.len()).expect("few shards")).filter(move |shard| *shard != own)
    }

    /// Sends to one shard now, or not at all. False: it does not keep up, and the message is gone.
    #[must_use]
    pub fn offer(&self, shard: u16, message: ShardMessage) -> bool {
        self.refused(shard, message).is_none()
    }

    /// Sends to one shard, later if its mailbox is full: for what nobody would ask for again. Such messages are
    /// bounded by the ops and connections of the other shard.
    pub fn send(&mut self, shard: u16, message: ShardMessage) {
        if let Some(message) = self.refused(shard, message) {
            self.outbox[usize::from(shard)].push_back(message);
        }
    }

    /// Sends, or returns the message.
    fn refused(&self, shard: u16, message: ShardMessage) -> Option<ShardMessage> {
        let shard = usize::from(shard);
        match self.senders.get(shard).filter(|_| self.outbox[shard].is_empty()) {
            Some(sender) => sender.send(message).err().map(|QueueFull(message)| message),
            None => Some(message),
        }
    }

    /// Sends what had to wait; whether something went out.
    pub fn flush(&mut self) -> bool {
        let mut moved = false;
        for (sender, waiting) in self.senders.iter().zip(&mut self.outbox) {
            while let Some(message) = waiting.pop_front() {
                if let Err(QueueFull(message)) = sender.send(message) {
                    waiting.push_front(message);
                    break;
                }
                moved = true;
            }
        }
        moved
    }

    /// Whether messages wait for room: nothing wakes this reactor when there is some.
    pub fn is_blocked(&self) -> bool {
        self.outbox.iter().any(|waiting| !waiting.is_empty())
    }

    // ------------------------------------------------------------------------------- what shards share

    /// This shard has mounted, with these PGs and the interval that each has promised.
    pub fn register(&self, pgs: impl Iterator<Item = (PgId, Epoch)>) {
        let promised = |(pg, promised): (PgId, Epoch)| {
            self.shared.promised.fetch_max(promised.0, Ordering::AcqRel);
            (pg, self.index)
        };
        self.shared.table().owners.extend(pgs.map(promised));
        self.shared.mounted.fetch_add(1, Ordering::AcqRel);
        self.make_look(0);
    }

    /// Whether all shards have mounted. Before, nobody knows which PGs are new, and the OSD must not be up: ops
    /// and peers of the others would wait.
    pub fn is_complete(&self) -> bool {
        self.shared.mounted.load(Ordering::Acquire) >= self.senders.len()
    }

    /// The newest interval that a PG of this OSD has promised: known when all shards have mounted.
    pub fn promised(&self) -> Epoch {
        Epoch(self.shared.promised.load(Ordering::Acquire))
    }

    /// This shard goes by the map of that epoch.
    pub fn note_taken(&self, epoch: Epoch) {
        self.shared.taken[usize::from(self.index)].store(epoch.0, Ordering::Release);
        self.make_look(0);
    }

    /// The newest map that every shard goes by.
    pub fn taken_by_all(&self) -> Epoch {
        let taken = self.shared.taken.iter().map(|taken| taken.load(Ordering::Acquire));
        Epoch(taken.min().expect("an OSD has a shard"))
    }

    /// A mailbox that is full needs no message: its shard is awake, and looks after it has read.
    fn make_look(&self, shard: u16) {
        if shard != self.index
            && let Some(sender) = self.senders.get(usize::from(shard))
        {
            let _ = sender.send(ShardMessage::Look);
        }
    }

    /// Makes a map the newest one for all shards. Each PG that is new to `osd` becomes the least loaded shard's.
    ///
    /// # Panics
    /// Before all shards have mounted.
    pub fn publish(&self, map: &Arc<ClusterMap>, osd: OsdId) {
        assert!(self.is_complete(), "new PGs are known when all shards have mounted");
        let mut table = self.shared.table();
        let is_gone = |pg: &PgId| !map.pools.contains_key(&pg.pool) && pg.pool < map.next_pool;
        table.owners.retain(|pg, _| !is_gone(pg));
        table.assign(map, osd, self.senders.len());
        table.map = Some(Arc::clone(map));
        self.shared.epoch.store(map.epoch.0, Ordering::Release);
        drop(table);
        self.others().for_each(|shard| self.make_look(shard));
    }

    /// The newest map, if it is newer than that.
    pub fn newer_map(&self, than: Epoch) -> Option<Arc<ClusterMap>> {
        if self.shared.epoch.load(Ordering::Acquire) <= than.0 {
            return None;
        }
        self.shared.table().map.clone()
    }

    /// Whose the PG is.
    pub fn owner(&self, pg: PgId) -> Option<u16> {
        self.shared.table().owners.get(&pg).copied()
    }
}

impl Table {
    /// PGs whose primary the OSD is count apart: their shard has the clients' connections and all reads.
    fn assign(&mut self, map: &ClusterMap, osd: OsdId, shards: usize) {
        let here = |is_primary: bool| {
            let members = map.intervals.iter().map(|(pg, interval)| (pg, &interval.acting));
            let members = members.filter(move |(_, acting)| acting.contains(&osd));
            members.filter(move |(_, acting)| (acting.first() == Some(&osd)) == is_primary).map(|(pg, _)| *pg)
        };
        // All PGs, and the primaries among them, by shard.
        let mut load = vec![(0u32, 0u32); shards];
        for is_primary in [true, false] {
            for owner in here(is_primary).filter_map(|pg| self.owners.get(&pg)) {
                let (all, primaries) = &mut load[usize::from(*owner)];
                *all += 1;
                *primaries += u32::from(is_primary);
            }
        }
        for is_primary in [true, false] {
            for pg in here(is_primary) {
                self.owners.entry(pg).or_insert_with(|| {
                    let key = |(all, primaries)| if is_primary { (primaries, all) } else { (all, primaries) };
                    let least = (0u16..).zip(&load).min_by_key(|(_, load)| key(**load));
                    let (shard, _) = least.expect("an OSD has a shard");
                    let (all, primaries) = &mut load[usize::from(shard)];
                    *all += 1;
                    *primaries += u32::from(is_primary);
                    shard
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_config::id::{ClusterId, PoolId};
    use loligo_config::map::{AuthMode, Interval};

    fn pg(pool: u32, index: u32) -> PgId {
        PgId { pool: PoolId(pool), index }
    }

    /// A map with PGs 0 to 3 of the first pool, on OSD 7.
    fn map(epoch: u32) -> Arc<ClusterMap> {
        let mut map = ClusterMap::new(ClusterId(uuid::Uuid::from_u128(1)), AuthMode::None, 0);
        map.epoch = Epoch(epoch);
        for index in 0..4 {
            let interval = Interval { since: Epoch(1), acting: vec![OsdId(7)] };
            map.intervals.insert(pg(1, index), interval);
        }
        Arc::new(map)
    }

    #[test]
    fn new_pgs_go_to_the_least_loaded_shard_and_stay() {
        let links = ShardLinks::new(2);
        links[0].register([(pg(1, 0), Epoch(3)), (pg(1, 1), Epoch(2))].into_iter());
        assert!(!links[0].is_complete(), "the other shard may have more");
        links[1].register(std::iter::empty());
        assert!(links[0].is_complete());
        assert_eq!(links[1].promised(), Epoch(3));
        links[0].publish(&map(5), OsdId(7));
        let owners = |links: &ShardLinks| (0..4).map(|index| links.owner(pg(1, index))).collect::<Vec<_>>();
        assert_eq!(owners(&links[1]), [Some(0), Some(0), Some(1), Some(1)]);
        links[0].publish(&map(6), OsdId(7));
        assert_eq!(owners(&links[1]), [Some(0), Some(0), Some(1), Some(1)]);
        let mut without = ClusterMap { next_pool: PoolId(2), ..(*map(7)).clone() };
        without.intervals.clear();
        links[0].publish(&Arc::new(without), OsdId(7));
        assert_eq!(owners(&links[1]), [None; 4], "the pool is gone");
    }

    #[test]
    fn a_map_is_taken_when_every_shard_goes_by_it() {
        let links = ShardLinks::new(2);
        links[1].note_taken(Epoch(5));
        assert_eq!(links[0].taken_by_all(), Epoch(0));
        links[0].note_taken(Epoch(6));
        assert_eq!(links[0].taken_by_all(), Epoch(5));
    }

    #[test]
    fn pgs_and_primaries_among_them_are_spread_evenly() {
        let mut map = (*map(5)).clone();
        // Every other one is a primary.
        for index in 0..8 {
            let acting = if index % 2 == 0 { vec![OsdId(7), OsdId(1)] } else { vec![OsdId(1), OsdId(7)] };
            map.intervals.insert(pg(1, index), Interval { since: Epoch(1), acting });
        }
        let links = ShardLinks::new(2);
        links.iter().for_each(|links| links.register(std::iter::empty()));
        links[0].publish(&Arc::new(map), OsdId(7));
        let on_first = |step: usize| {
            (0..8).step_by(step).filter(|index| links[0].owner(pg(1, *index)) == Some(0)).count()
        };
        assert_eq!((on_first(1), on_first(2)), (4, 2));
    }

    #[test]
    fn a_full_mailbox_keeps_no_shard_from_the_newest_map() {
        let mut links = ShardLinks::with_capacity(2, 1);
        links.iter().for_each(|links| links.register(std::iter::empty()));
        let other = links.pop().unwrap();
        while other.receiver().receive().is_some() {}
        assert!(links[0].offer(1, ShardMessage::Superseded(ConnectionId(4))));
        links[0].publish(&map(5), OsdId(7));
        links[0].publish(&map(6), OsdId(7));
        assert_eq!(other.newer_map(Epoch(5)).unwrap().epoch, Epoch(6));
        assert!(other.newer_map(Epoch(6)).is_none());
    }

    #[test]
    fn what_a_full_mailbox_does_not_take_follows_in_order() {
        let mut links = ShardLinks::with_capacity(3, 1);
        assert_eq!(links[1].others().collect::<Vec<_>>(), [0, 2]);
        for number in 1..=3 {
            links[1].send(2, ShardMessage::Superseded(ConnectionId(number)));
        }
        assert!(links[1].is_blocked());
        for number in 1..=3 {
            let Some(ShardMessage::Superseded(connection)) = links[2].receiver().receive() else {
                panic!("number {number} is lost")
            };
            assert_eq!(connection, ConnectionId(number));
            assert!(!links[1].offer(2, ShardMessage::Look) || number == 3, "it must not overtake");
            links[1].flush();
        }
        assert!(!links[1].is_blocked());
        assert!(links[0].receiver().receive().is_none());
    }
}
