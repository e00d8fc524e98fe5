//! The cluster map.

use super::{Input, Target};
use loligo_config::id::*;
use loligo_config::map::{AuthMode, BlocklistEntry, ClusterMap, Interval, Osd};
use loligo_config::pool::{FailureDomain, Pool};
use xxhash_rust::xxh3::xxh3_64;

/// A map as it comes from a mon or a disk.
pub const TARGET: Target =
    Target { name: "cluster_map", run, seeds, words: &[b"LGMP", b"host", b"default"], len_max: 8 << 10 };

const HEAD_LEN: usize = 24;

/// The first byte says whether length and checksum are made right.
fn run(input: &[u8]) {
    let mut input = Input(input);
    let sealed = input.u8() & 1 == 0;
    let mut bytes = input.0.to_vec();
    if sealed && bytes.len() >= HEAD_LEN {
        let body = &bytes[HEAD_LEN..];
        let (len, check) = (body.len() as u64, xxh3_64(body));
        bytes[8..16].copy_from_slice(&len.to_le_bytes());
        bytes[16..24].copy_from_slice(&check.to_le_bytes());
    }
    let Ok(map) = ClusterMap::decode(&bytes) else { return };
    map.check().expect("a decoded map holds every rule");
    let again = ClusterMap::decode(&map.encode()).expect("an encoded map can be read");
    assert_eq!(again, map);
    use_everything(&map);
}

/// What everybody does with a map.
fn use_everything(map: &ClusterMap) {
    for pg in map.intervals.keys().take(64) {
        let acting = map.acting(*pg);
        assert!(acting.iter().all(|osd| map.osds.contains_key(osd)));
        assert!(map.primary(*pg).is_none_or(|primary| acting.contains(&primary)));
        map.pg_serves(*pg);
    }
    for pool in map.pools.values() {
        assert!(map.pool_by_name(&pool.name).is_some());
        assert!(ClusterMap::pgs_of(pool).take(1000).all(|pg| map.intervals.contains_key(&pg)));
    }
    for entry in &map.blocklist {
        assert!(map.is_fenced(entry.session));
    }
}

/// Three OSDs, a pool, a fenced session.
pub(super) fn sample() -> ClusterMap {
    let mut map = ClusterMap::new(ClusterId(uuid::Uuid::from_u128(1)), AuthMode::None, 1_700_000_000);
    map.epoch = Epoch(9);
    map.next_session = SessionId(100);
    for id in 0..3 {
        let osd = Osd {
            id: OsdId(id),
            device: DeviceId(uuid::Uuid::from_u128(u128::from(id) + 2)),
            incarnation: Incarnation(u64::from(id) + 1),
            up: true,
            is_in: true,
            addresses: vec!["127.0.0.1:7000".parse().expect("an address")],
            weight: 65_536,
            host: format!("host{id}"),
            rack: "default".into(),
            device_class: "ssd".into(),
            capacity: 1 << 40,
        };
        map.osds.insert(osd.id, osd);
    }
    let pool = Pool {
        id: PoolId(1),
        name: "rbd".into(),
        size: 3,
        min_size: 2,
        pg_count: 4,
        failure_domain: FailureDomain::Host,
        device_class: None,
        created: Epoch(3),
    };
    for pg in ClusterMap::pgs_of(&pool).collect::<Vec<_>>() {
        let acting = (0..3).map(|at| OsdId((pg.index + at) % 3)).collect();
        map.intervals.insert(pg, Interval { since: Epoch(4), acting });
    }
    map.next_pool = PoolId(2);
    map.overrides.insert(PgId { pool: PoolId(1), index: 0 }, vec![OsdId(2), OsdId(1), OsdId(0)]);
    map.pools.insert(pool.id, pool);
    map.blocklist.push(BlocklistEntry { session: SessionId(7), since: Epoch(5) });
    map
}

fn seeds() -> Vec<Vec<u8>> {
    let empty = ClusterMap::new(ClusterId(uuid::Uuid::from_u128(1)), AuthMode::None, 1);
    [sample(), empty].iter().map(|map| [&[0][..], &map.encode()].concat()).collect()
}
