//! Object → PG → ordered OSD set.
//!
//! A PG's members are found by a weighted race ([`draw`], straw2 style): every OSD that may hold the pool draws
//! `-log2(u) / weight` from a hash of (PG, OSD); the lowest draws win, of one failure domain only the lowest. The race is
//! flat over the OSDs: the lowest draw of a host is distributed as the draw of a host with the sum of the weights,
//! so this is straw2 down the tree root → rack → host → osd, with one advantage over drawing level by level: an OSD
//! that comes, goes or changes weight moves only the copies that it wins or loses itself, while a changed host weight
//! would move copies between hosts *and* within them (1.5 times the ideal for one disk more in a host of three).
//!
//! Hashing alone spreads 100 PGs per OSD with a deviation of about 9 %, so that one OSD in ten is more than 15 % off.
//! [`balance`] therefore moves the few copies that are too many to where they would have gone with almost equal luck.
//! Evening out afresh at every change would move other copies each time (up to 1.4 times the ideal): so what the map
//! records stays where it is as long as it may. The race fills what is empty, the balance what is uneven.
//!
//! All of it is integer arithmetic, so that every machine computes the same; and yet only the mon computes it:
//! it records the result in the map's intervals, and OSDs and clients read those. `docs/map.md` has the measurements.

mod balance;
mod draw;
#[cfg(test)]
mod tests;

use crate::id::{ObjectId, OsdId, PgId};
use crate::limits::POOL_PG_COUNT_MAX;
use crate::map::{ClusterMap, Osd};
use crate::pool::{FailureDomain, Pool};
use draw::Draw;
use std::collections::BTreeMap;
use xxhash_rust::xxh3::xxh3_64;

/// PGs of one OSD that make the load even and cost little: what Ceph aims at.
const PGS_PER_OSD: u64 = 100;
/// PGs that one core should be primary of, so that no core of an OSD idles while its neighbour is full. Guessed.
const PGS_PER_CORE: u64 = 16;
/// Losers of a race that are kept as places to move a copy to.
const ALTERNATES: usize = 16;

/// The PG of an object.
pub fn object_to_pg(pool: &Pool, object: &ObjectId) -> PgId {
    let hash = xxh3_64(&object_key(object));
    PgId { pool: pool.id, index: stable_mod(hash, pool.pg_count) }
}

/// The fixed 24 bytes that are hashed, little-endian: pool, kind, image, index. They never change: a different
/// encoding would be a different place for every object.
fn object_key(object: &ObjectId) -> [u8; 24] {
    let mut key = [0; 24];
    key[..4].copy_from_slice(&object.pool.0.to_le_bytes());
    key[4..8].copy_from_slice(&(object.kind as u32).to_le_bytes());
    key[8..16].copy_from_slice(&object.image.0.to_le_bytes());
    key[16..].copy_from_slice(&object.index.to_le_bytes());
    key
}

/// `hash` modulo `count`, so that with a growing count an object either stays or goes to a child of its PG (Ceph's
/// `ceph_stable_mod`): the low bits choose among the next power of two of PGs, and those that are not there yet are
/// still part of their parent, which has the highest bit off.
fn stable_mod(hash: u64, count: u32) -> u32 {
    let count = u64::from(count.max(1));
    let mask = count.next_power_of_two() - 1;
    let index = if hash & mask < count { hash & mask } else { hash & (mask >> 1) };
    u32::try_from(index).expect("the index is below a count of 32 bits")
}

/// A good `pg_count` for a pool of `size` copies on `osds` OSDs with `cores` reactors in all: about a hundred PGs for
/// each OSD, enough for each core to be primary of some, and a power of two, so that all PGs are of equal size.
pub fn suggested_pg_count(osds: usize, size: u8, cores: usize) -> u32 {
    let (osds, cores) = (osds.max(1) as u64, cores.max(1) as u64);
    let by_disks = osds.saturating_mul(PGS_PER_OSD) / u64::from(size.max(1));
    let wanted = by_disks.max(cores.saturating_mul(PGS_PER_CORE)).clamp(1, u64::from(POOL_PG_COUNT_MAX));
    u32::try_from(wanted.next_power_of_two()).unwrap_or(POOL_PG_COUNT_MAX).min(POOL_PG_COUNT_MAX)
}

/// The acting set that this map's OSDs give the PG, primary first: what [`place_pool`] computes, for one PG.
/// Empty when there is no such PG. As costly as the whole pool: who only asks reads [`ClusterMap::acting`].
pub fn acting_set(map: &ClusterMap, pg: PgId) -> Vec<OsdId> {
    let Some(pool) = map.pools.get(&pg.pool).filter(|pool| pg.index < pool.pg_count) else {
        return Vec::new();
    };
    let mut sets = place_pool(map, pool);
    usize::try_from(pg.index).map(|index| sets.swap_remove(index)).unwrap_or_default()
}

/// The acting sets of all PGs of a pool, by index. A set has fewer members than the pool has copies when there are
/// fewer failure domains; never two of one domain. Only OSDs that are in count, up or not. What the map's intervals
/// and overrides say stays as far as it may.
pub fn place_pool(map: &ClusterMap, pool: &Pool) -> Vec<Vec<OsdId>> {
    let field = Field::new(map, pool);
    let races =
        ClusterMap::pgs_of(pool).map(|pg| field.race(pg, map.overrides.get(&pg), map.acting(pg))).collect();
    balance::balanced(&field, races)
}

/// One OSD that may hold copies of the pool.
struct Runner {
    osd: OsdId,
    weight: u32,
    /// Index of its failure domain.
    domain: usize,
}

/// All of them.
struct Field {
    size: usize,
    runners: Vec<Runner>,
    domain_count: usize,
}

/// One OSD in the race of one PG. Lower draws are better; ties go to the lower OSD id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Entrant {
    draw: Draw,
    /// Index of the OSD among the runners.
    runner: usize,
}

/// The result of one PG's race.
struct Race {
    /// Placed by hand: these stay first and where they are.
    fixed: usize,
    /// The winners, best first, behind those placed by hand.
    members: Vec<Entrant>,
    /// The best losers, best first.
    alternates: Vec<Entrant>,
}

impl Field {
    fn new(map: &ClusterMap, pool: &Pool) -> Self {
        let eligible = |osd: &&Osd| {
            osd.is_in
                && osd.weight > 0
                && pool.device_class.as_ref().is_none_or(|class| *class == osd.device_class)
        };
        let mut domains = BTreeMap::new();
        let mut runners = Vec::new();
        for osd in map.osds.values().filter(eligible) {
            let count = domains.len();
            let domain = *domains.entry(domain_of(osd, pool.failure_domain)).or_insert(count);
            runners.push(Runner { osd: osd.id, weight: osd.weight, domain });
        }
        Field { size: usize::from(pool.size), runners, domain_count: domains.len() }
    }

    /// The PG's members: those placed by hand, else those that the map records and that may stay, else the winners.
    fn race(&self, pg: PgId, by_hand: Option<&Vec<OsdId>>, recorded: &[OsdId]) -> Race {
        let runners = self.runners.iter().enumerate();
        let mut entrants: Vec<Entrant> = runners.map(|(at, runner)| self.enter(pg, at, runner)).collect();
        entrants.sort_unstable();
        let mut members = Vec::with_capacity(self.size);
        self.admit(&mut members, &entrants, by_hand.map_or(&[], Vec::as_slice));
        let fixed = members.len();
        self.admit(&mut members, &entrants, recorded);
        let mut alternates = Vec::with_capacity(ALTERNATES);
        for entrant in entrants {
            if self.fits(&members, &entrant) {
                members.push(entrant);
            } else if alternates.len() < ALTERNATES && !members.contains(&entrant) {
                alternates.push(entrant);
            }
        }
        Race { fixed, members, alternates }
    }

    /// Makes members of those of `osds` that may be, in this order.
    fn admit(&self, members: &mut Vec<Entrant>, entrants: &[Entrant], osds: &[OsdId]) {
        for osd in osds {
            let entrant = entrants.iter().find(|entrant| self.runners[entrant.runner].osd == *osd);
            if let Some(entrant) = entrant.filter(|entrant| self.fits(members, entrant)) {
                members.push(*entrant);
            }
        }
    }

    fn enter(&self, pg: PgId, at: usize, runner: &Runner) -> Entrant {
        Entrant { draw: Draw::new(pg, runner.osd, runner.weight), runner: at }
    }

    /// Whether there is a copy to place and no member is in the entrant's failure domain.
    fn fits(&self, members: &[Entrant], entrant: &Entrant) -> bool {
        let domain = |entrant: &Entrant| self.runners[entrant.runner].domain;
        members.len() < self.size && members.iter().all(|member| domain(member) != domain(entrant))
    }
}

/// A host or rack is its name; an OSD is a domain of its own.
fn domain_of(osd: &Osd, level: FailureDomain) -> (Option<&str>, OsdId) {
    match level {
        FailureDomain::Osd => (None, osd.id),
        FailureDomain::Host => (Some(&osd.host), OsdId(0)),
        FailureDomain::Rack => (Some(&osd.rack), OsdId(0)),
    }
}
