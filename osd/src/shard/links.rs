//! What the shards of one OSD say to each other, and which PG is whose.
//!
//! The table of PGs is behind a lock that is taken when a map comes and when an op has come to the wrong core, never
//! for an op that came to the right one.

use crate::pg::Requester;
use loligo_config::id::{Epoch, PgId};
use loligo_config::map::ClusterMap;
use loligo_net::wire::mon::{Failure, OsdReport};
use loligo_net::wire::op::{Notify, OpReply, OpRequest};
use loligo_reactor::env::{ConnectionId, Instant};
use loligo_reactor::mailbox::{Receiver, Sender, mailbox};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Messages that wait for one shard; beyond it ops are answered `Busy`. Guessed.
const MAILBOX_CAPACITY: usize = 1024;

/// From one shard to another. Data is copied: buffers belong to one reactor.
#[derive(Debug)]
pub enum ShardMessage {
    /// A new map.
    Map(Arc<ClusterMap>),
    /// An op that arrived at the wrong core.
    Op {
        /// The op.
        request: OpRequest,
        /// The client's epoch.
        epoch: Epoch,
        /// Its data.
        data: Option<Vec<u8>>,
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
        data: Option<Vec<u8>>,
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
    shards: usize,
    registered: usize,
    owners: BTreeMap<PgId, u16>,
    load: Vec<u32>,
}

/// One shard's links to the others of its OSD. Made for all at once, then moved to their threads.
#[derive(Debug)]
pub struct ShardLinks {
    /// This shard, counted from 0.
    index: u16,
    table: Arc<Mutex<Table>>,
    senders: Vec<Sender<ShardMessage>>,
    receiver: Receiver<ShardMessage>,
}

impl ShardLinks {
    /// The links of `shards` shards, in order.
    ///
    /// # Panics
    /// If there are none, or more than 65,535.
    pub fn new(shards: usize) -> Vec<ShardLinks> {
        assert!(shards > 0, "an OSD has a shard");
        let table = Table { shards, load: vec![0; shards], ..Table::default() };
        let table = Arc::new(Mutex::new(table));
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..shards).map(|_| mailbox(MAILBOX_CAPACITY)).unzip();
        let links = receivers.into_iter().enumerate().map(|(index, receiver)| ShardLinks {
            index: u16::try_from(index).expect("few shards"),
            table: Arc::clone(&table),
            senders: senders.clone(),
            receiver,
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

    /// Sends to one shard. False: its mailbox is full, and the message is gone.
    #[must_use]
    pub fn send(&self, shard: u16, message: ShardMessage) -> bool {
        self.senders.get(usize::from(shard)).is_some_and(|sender| sender.send(message).is_ok())
    }

    /// The other shards.
    pub fn others(&self) -> impl Iterator<Item = u16> + use<> {
        let own = self.index;
        (0..u16::try_from(self.senders.len()).expect("few shards")).filter(move |shard| *shard != own)
    }

    fn with<R>(&self, use_table: impl FnOnce(&mut Table) -> R) -> R {
        // A shard that panicked has ended the process, or a test that does not care.
        use_table(&mut self.table.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// This shard has mounted, with these PGs.
    pub fn register(&self, pgs: impl Iterator<Item = PgId>) {
        self.with(|table| {
            table.registered += 1;
            for pg in pgs {
                table.owners.insert(pg, self.index);
                table.load[usize::from(self.index)] += 1;
            }
        });
    }

    /// Whose the PG is.
    pub fn owner(&self, pg: PgId) -> Option<u16> {
        self.with(|table| table.owners.get(&pg).copied())
    }

    /// Whether the PG is this shard's; a new one becomes the least loaded shard's. Until all shards have mounted,
    /// nobody knows which PGs are new.
    pub fn is_mine(&self, pg: PgId) -> bool {
        self.with(|table| {
            if let Some(owner) = table.owners.get(&pg) {
                return *owner == self.index;
            }
            if table.registered < table.shards {
                return false;
            }
            let least =
                (0u16..).zip(&table.load).min_by_key(|(_, load)| **load).map_or(0, |(shard, _)| shard);
            table.owners.insert(pg, least);
            table.load[usize::from(least)] += 1;
            least == self.index
        })
    }

    /// The PG is no more.
    pub fn forget(&self, pg: PgId) {
        self.with(|table| {
            if let Some(owner) = table.owners.remove(&pg) {
                table.load[usize::from(owner)] -= 1;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_config::id::PoolId;

    fn pg(index: u32) -> PgId {
        PgId { pool: PoolId(1), index }
    }

    #[test]
    fn new_pgs_go_to_the_least_loaded_shard_and_stay() {
        let links = ShardLinks::new(2);
        links[0].register([pg(0), pg(1)].into_iter());
        assert!(!links[0].is_mine(pg(2)), "shard 1 may have it");
        links[1].register(std::iter::empty());
        assert!(!links[0].is_mine(pg(2)));
        assert!(links[1].is_mine(pg(2)));
        assert!(links[0].is_mine(pg(0)));
        links[0].forget(pg(0));
        assert_eq!(links[0].owner(pg(0)), None);
    }

    #[test]
    fn messages_reach_their_shard() {
        let links = ShardLinks::new(3);
        assert_eq!(links[1].others().collect::<Vec<_>>(), [0, 2]);
        assert!(links[1].send(2, ShardMessage::Superseded(ConnectionId(4))));
        assert!(matches!(links[2].receiver().receive(), Some(ShardMessage::Superseded(ConnectionId(4)))));
        assert!(links[0].receiver().receive().is_none());
    }
}
