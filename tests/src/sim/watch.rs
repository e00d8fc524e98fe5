//! What must hold all the time, and what must hold once everything has healed.

use super::cluster::Cluster;
use super::disk::SimDisk;
use super::trace::Level;
use super::workload::Failure;
use loligo_config::id::{Epoch, ObjectId, ObjectVersion, OsdId, PgId};
use loligo_config::map::ClusterMap;
use loligo_osd::pg::phase::PhaseKind;
use loligo_osd::store::Store;
use loligo_osd::store::api::{PgMeta, ReadError, StoreEvent};
use loligo_reactor::env::{BlockDevice, Instant, Ticket};
use std::collections::{BTreeMap, VecDeque};

/// Blocks of an object in all: objects have at most 32 MiB.
const OBJECT_BLOCKS: u32 = 8192;
/// Blocks of one read of the comparison.
const READ_BLOCKS: u32 = 256;
/// Polls until a store must be quiet.
const QUIET_POLLS: u32 = 100_000;

/// Which OSD was seen serving as a PG's primary in which interval.
pub(super) type Primaries = BTreeMap<(PgId, Epoch), OsdId>;

impl Cluster {
    /// The mon's map never goes back, over all its processes: it is durable before anybody hears of it.
    pub(super) fn see_mon(&mut self) -> Result<(), Failure> {
        let Some(mon) = self.mon.process() else { return Ok(()) };
        let epoch = mon.map().epoch;
        if epoch < self.mon_epoch {
            return Err(Failure::new(format!("the mon goes back from map {} to {epoch}", self.mon_epoch)));
        }
        if epoch > self.mon_epoch {
            self.mon_epoch = epoch;
            self.trace.mix(u64::from(epoch.0));
            self.trace.note(Level::Faults, || {
                let map = self.mon.process().map(|mon| map_in_words(mon.map())).unwrap_or_default();
                format!("mon has map {epoch}: {map}")
            });
        }
        Ok(())
    }

    /// An OSD's map never goes back while it runs, and no two members of a PG serve as its primary in one interval.
    pub(super) fn see_osd(&mut self, osd: u32, core: u16) -> Result<(), Failure> {
        let polls = self.polls;
        let Self { osds, osd_epochs, primaries, .. } = self;
        let index = usize::from(core);
        let mut shards = osds[osd as usize].running_shards();
        let Some(shard) = shards.find(|shard| usize::from(shard.links().index()) == index) else {
            return Ok(());
        };
        let Some(map) = shard.map() else { return Ok(()) };
        let before = osd_epochs.insert((osd, core), map.epoch).unwrap_or_default();
        if map.epoch < before {
            return Err(Failure::new(format!("osd.{osd} goes back from map {before} to {}", map.epoch)));
        }
        if !polls.is_multiple_of(8) {
            return Ok(());
        }
        for pg in shard.pgs().filter(|pg| pg.phase().kind() == PhaseKind::Active) {
            let Some(interval) = map.interval(pg.id()) else { continue };
            let own = OsdId(osd);
            let first = *primaries.entry((pg.id(), interval.since)).or_insert(own);
            if first != own {
                let (pg, since) = (pg.id(), interval.since);
                return Err(Failure::new(format!(
                    "{first} and {own} both serve pg {pg} in interval {since}"
                )));
            }
        }
        Ok(())
    }

    /// What is not active and clean yet, in words.
    pub fn unclean(&self) -> Vec<String> {
        let Some(mon) = self.mon.process() else { return vec!["the mon does not run".into()] };
        let map = mon.map();
        let mut list = Vec::new();
        for (osd, machine) in (0..).zip(&self.osds) {
            if !machine.serves() {
                list.push(format!("osd.{osd} does not serve"));
            } else if !map.is_up(OsdId(osd)) {
                list.push(format!("osd.{osd} is not up in map {}", map.epoch));
            }
        }
        for (id, interval) in &map.intervals {
            let size = map.pools.get(&id.pool).map_or(0, |pool| usize::from(pool.size));
            let size = size.min(self.osds.len());
            if interval.acting.len() < size {
                list.push(format!("pg {id} has {} of {size} members", interval.acting.len()));
            }
            for (at, osd) in interval.acting.iter().enumerate() {
                let wanted = if at == 0 { PhaseKind::Active } else { PhaseKind::Following };
                let Some(machine) = self.osds.get(osd.0 as usize) else { continue };
                let pgs = machine.running_shards().flat_map(|shard| shard.pgs());
                let found = pgs.filter(|pg| pg.id() == *id).map(|pg| pg.phase().kind()).next();
                if found != Some(wanted) {
                    list.push(format!("pg {id} on {osd} is {found:?}, not {wanted:?}"));
                }
            }
        }
        for (number, client) in self.clients.iter().enumerate() {
            list.extend(
                client.waits_for().into_iter().map(|what| format!("client.{number} waits for {what}")),
            );
        }
        if !self.admin.is_at_rest() {
            list.push(format!("the administrator waits for {}", self.admin.waits_for().unwrap_or_default()));
        }
        list
    }

    /// Ends all OSDs and looks at their stores: every block has one owner, and all copies are equal.
    ///
    /// # Errors
    /// The first difference.
    pub fn audit(&mut self) -> Result<(), Failure> {
        let Some(map) = self.mon.process().map(|mon| mon.map().clone()) else {
            return Err(Failure::new("the mon does not run"));
        };
        let mut stores: BTreeMap<OsdId, Vec<Store<SimDisk>>> = BTreeMap::new();
        for osd in 0..self.options.osds {
            stores.insert(OsdId(osd), self.osds[osd as usize].into_stores());
        }
        for (osd, shards) in &mut stores {
            for store in shards {
                quiesce(store).map_err(|what| Failure::new(format!("{osd}: {what}")))?;
                let audit = store.audit();
                audit.map_err(|error| Failure::new(format!("{osd} shard {}: {error}", store.shard())))?;
            }
        }
        for (pg, interval) in &map.intervals {
            let mut first: Option<(OsdId, Copy)> = None;
            for osd in &interval.acting {
                let shards = stores.get_mut(osd).into_iter().flatten();
                let mut holders = shards.filter(|store| store.pg(*pg).is_some());
                let (Some(store), None) = (holders.next(), holders.next()) else {
                    return Err(Failure::new(format!("pg {pg} is not in exactly one shard of {osd}")));
                };
                let copy =
                    copy_of(store, *pg).map_err(|what| Failure::new(format!("pg {pg} on {osd}: {what}")))?;
                match &first {
                    None => first = Some((*osd, copy)),
                    Some((other, known)) if *known != copy => {
                        return Err(Failure::new(known.difference(&copy, *pg, *other, *osd)));
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }
}

fn map_in_words(map: &ClusterMap) -> String {
    let up = |osd: &loligo_config::map::Osd| format!("{}{}", if osd.up { "" } else { "!" }, osd.id);
    let osds: Vec<_> = map.osds.values().map(up).collect();
    let new = map.intervals.values().filter(|interval| interval.since == map.epoch).count();
    format!("{}, {new} new intervals of {}", osds.join(" "), map.intervals.len())
}

/// Lets a store finish what it has in flight.
fn quiesce(store: &mut Store<SimDisk>) -> Result<(), String> {
    let mut events = VecDeque::new();
    for _ in 0..QUIET_POLLS {
        store.poll(Instant(u64::MAX / 4), &mut events);
        events.clear();
        if store.is_quiet() {
            return Ok(());
        }
    }
    Err("the store does not come to rest".into())
}

/// What one member has of a PG.
#[derive(Debug, PartialEq)]
struct Copy {
    meta: PgMeta,
    last: ObjectVersion,
    durable: ObjectVersion,
    objects: Vec<Object>,
}

#[derive(Debug, PartialEq)]
struct Object {
    id: ObjectId,
    version: ObjectVersion,
    extents: Vec<(u32, u32)>,
    digest: u64,
}

impl Copy {
    fn difference(&self, other: &Self, pg: PgId, a: OsdId, b: OsdId) -> String {
        if (self.last, self.durable, self.meta) != (other.last, other.durable, other.meta) {
            let words = |copy: &Self| format!("last {} durable {} {:?}", copy.last, copy.durable, copy.meta);
            return format!("pg {pg} differs: {a} has {}, {b} has {}", words(self), words(other));
        }
        let pairs = self.objects.iter().zip(&other.objects);
        match pairs.into_iter().find(|(a, b)| a != b) {
            Some((one, two)) => format!("pg {pg} differs: {a} has {one:?}, {b} has {two:?}"),
            None => {
                let (one, two) = (self.objects.len(), other.objects.len());
                format!("pg {pg} differs: {a} has {one} objects, {b} has {two}")
            }
        }
    }
}

fn copy_of(store: &mut Store<SimDisk>, pg: PgId) -> Result<Copy, String> {
    let status = store.pg(pg).ok_or("it is gone")?;
    let list: Vec<_> = store.objects(pg, ObjectId::default()).collect();
    let mut objects = Vec::new();
    for (id, version) in list {
        let extents: Vec<_> = store.extents(id, 0, OBJECT_BLOCKS).collect();
        let mut digest = 0;
        for (first, count) in &extents {
            let mut block = *first;
            while block < first + count {
                let step = READ_BLOCKS.min(first + count - block);
                let sum = read(store, id, pg, block, step).map_err(|error| format!("{id}: {error}"))?;
                digest = digest_add(digest, sum);
                block += step;
            }
        }
        objects.push(Object { id, version, extents, digest });
    }
    Ok(Copy { meta: status.meta, last: status.last, durable: status.durable, objects })
}

fn digest_add(digest: u64, sum: u32) -> u64 {
    digest.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(sum)
}

/// The checksum of some blocks of an object.
fn read<D: BlockDevice>(
    store: &mut Store<D>,
    object: ObjectId,
    pg: PgId,
    block: u32,
    count: u32,
) -> Result<u32, ReadError> {
    store.read(object, pg, block, count, Ticket(1))?;
    let mut events = VecDeque::new();
    for _ in 0..QUIET_POLLS {
        store.poll(Instant(u64::MAX / 4), &mut events);
        while let Some(event) = events.pop_front() {
            if let StoreEvent::Read { result, .. } = event {
                let data = result?.data;
                return Ok(data.as_deref().map_or(0, loligo_osd::store::crc32c));
            }
        }
    }
    Err(ReadError::Busy)
}
