use super::*;
use crate::pool::FailureDomain;
use proptest::prelude::*;
use uuid::Uuid;

fn osd(id: u32) -> Osd {
    Osd {
        id: OsdId(id),
        device: DeviceId(Uuid::from_u128(u128::from(id) + 100)),
        incarnation: Incarnation(7),
        up: true,
        is_in: true,
        addresses: vec!["127.0.0.1:7410".parse().unwrap()],
        weight: 65_536,
        host: format!("host{id}"),
        rack: "default".into(),
        device_class: "ssd".into(),
        capacity: 1 << 40,
    }
}

fn map() -> ClusterMap {
    let mut map = ClusterMap::new(ClusterId(Uuid::from_u128(1)), AuthMode::None, 1_700_000_000);
    map.epoch = Epoch(9);
    map.osds = (0..3).map(|id| (OsdId(id), osd(id))).collect();
    let pool = Pool {
        id: PoolId(1),
        name: "rbd".into(),
        size: 3,
        min_size: 2,
        pg_count: 4,
        failure_domain: FailureDomain::Host,
        device_class: Some("ssd".into()),
        created: Epoch(4),
    };
    for pg in ClusterMap::pgs_of(&pool) {
        map.intervals.insert(pg, Interval { since: Epoch(5), acting: vec![OsdId(2), OsdId(0), OsdId(1)] });
    }
    map.overrides.insert(PgId { pool: PoolId(1), index: 3 }, vec![OsdId(1)]);
    map.pools.insert(pool.id, pool);
    map.next_pool = PoolId(2);
    map.next_session = SessionId(1001);
    map.blocklist = [3, 17].map(|id| BlocklistEntry { session: SessionId(id), since: Epoch(6) }).to_vec();
    map
}

fn pg(index: u32) -> PgId {
    PgId { pool: PoolId(1), index }
}

#[test]
fn a_map_survives_its_encoding() {
    let map = map();
    let bytes = map.encode();
    assert_eq!(&bytes[..8], b"LGMP\x01\x00\x00\x00");
    assert_eq!(ClusterMap::decode(&bytes), Ok(map));
}

#[test]
fn lookups_answer_for_known_and_unknown_pgs() {
    let mut map = map();
    assert_eq!(map.acting(pg(0)), [OsdId(2), OsdId(0), OsdId(1)]);
    assert_eq!(map.primary(pg(0)), Some(OsdId(2)));
    assert!(map.pg_serves(pg(0)));
    assert!(map.acting(pg(4)).is_empty());
    assert_eq!(map.primary(pg(4)), None);
    assert!(!map.pg_serves(pg(4)));
    map.osds.get_mut(&OsdId(1)).unwrap().up = false;
    assert!(!map.pg_serves(pg(0)), "every member must be up");
    map.intervals.get_mut(&pg(0)).unwrap().acting.pop();
    assert!(map.pg_serves(pg(0)), "two members are min_size");
    map.intervals.get_mut(&pg(0)).unwrap().acting.pop();
    assert!(!map.pg_serves(pg(0)), "one member is below min_size");
    assert!(map.is_fenced(SessionId(17)));
    assert!(!map.is_fenced(SessionId(16)));
    assert_eq!(map.pool_by_name("rbd").map(|pool| pool.id), Some(PoolId(1)));
    assert_eq!(map.pool_by_name("rbx"), None);
}

#[test]
fn names_are_plain() {
    for good in ["a", "rbd", "node-1.example_x", "9", &"x".repeat(128)] {
        assert_eq!(check_name(good), Ok(()), "{good}");
    }
    assert_eq!(check_name(""), Err(NameError::Empty));
    assert_eq!(check_name(&"x".repeat(129)), Err(NameError::TooLong));
    for wrong in [".hidden", "-x", "a b", "a/b", "é", "a\n"] {
        assert_eq!(check_name(wrong), Err(NameError::Character), "{wrong}");
    }
}

#[test]
fn every_rule_is_checked() {
    type Breaks = fn(&mut ClusterMap);
    let cases: [(&str, Breaks); 24] = [
        ("epoch", |map| map.epoch = Epoch(0)),
        ("cluster id", |map| map.cluster = ClusterId(Uuid::nil())),
        ("next session", |map| map.next_session = SessionId(0)),
        ("next pool", |map| map.next_pool = PoolId(1)),
        ("its id is invalid", |map| map.osds.get_mut(&OsdId(1)).unwrap().id = OsdId(2)),
        ("its device is another OSD's", |map| {
            map.osds.get_mut(&OsdId(1)).unwrap().device = DeviceId(Uuid::from_u128(100));
        }),
        ("incarnation", |map| map.osds.get_mut(&OsdId(1)).unwrap().incarnation = Incarnation(0)),
        ("no address", |map| map.osds.get_mut(&OsdId(1)).unwrap().addresses.clear()),
        ("cannot be connected", |map| {
            map.osds.get_mut(&OsdId(1)).unwrap().addresses[0] = "0.0.0.0:1".parse().unwrap();
        }),
        ("without a weight", |map| map.osds.get_mut(&OsdId(1)).unwrap().weight = 0),
        ("names are made of", |map| map.osds.get_mut(&OsdId(1)).unwrap().host = "a b".into()),
        ("its size", |map| map.pools.get_mut(&PoolId(1)).unwrap().size = 9),
        ("its min_size", |map| map.pools.get_mut(&PoolId(1)).unwrap().min_size = 4),
        ("its pg_count", |map| map.pools.get_mut(&PoolId(1)).unwrap().pg_count = 0),
        ("number of PGs", |map| map.pools.get_mut(&PoolId(1)).unwrap().pg_count = 5),
        ("in the future", |map| map.pools.get_mut(&PoolId(1)).unwrap().created = Epoch(10)),
        ("the name is empty", |map| map.pools.get_mut(&PoolId(1)).unwrap().name.clear()),
        ("outside the pool's life", |map| map.intervals.get_mut(&pg(0)).unwrap().since = Epoch(3)),
        ("does not exist", |map| map.intervals.get_mut(&pg(0)).unwrap().acting[0] = OsdId(3)),
        ("twice", |map| map.intervals.get_mut(&pg(0)).unwrap().acting[0] = OsdId(1)),
        ("no such PG", |map| drop(map.overrides.insert(pg(4), vec![]))),
        ("more members", |map| map.pools.get_mut(&PoolId(1)).unwrap().size = 2),
        ("out of order", |map| map.blocklist.reverse()),
        ("never assigned", |map| map.next_session = SessionId(17)),
    ];
    for (expected, breaks) in cases {
        let mut map = map();
        breaks(&mut map);
        let error = map.check().expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}, expected {expected}");
    }
}

#[test]
fn foreign_and_damaged_bytes_are_told_apart() {
    let bytes = map().encode();
    assert_eq!(ClusterMap::decode(b""), Err(MapError::NotAMap));
    assert_eq!(ClusterMap::decode(&bytes[..20]), Err(MapError::NotAMap));
    assert_eq!(ClusterMap::decode(&bytes[..bytes.len() - 1]), Err(MapError::Damaged));
    let mut newer = bytes.clone();
    newer[4] = 2;
    assert_eq!(ClusterMap::decode(&newer), Err(MapError::Version { found: 2 }));
    let mut foreign = bytes.clone();
    foreign[0] = b'X';
    assert_eq!(ClusterMap::decode(&foreign), Err(MapError::NotAMap));
    let mut longer = bytes;
    longer.push(0);
    assert_eq!(ClusterMap::decode(&longer), Err(MapError::Damaged));
}

proptest! {
    #[test]
    fn any_flipped_bit_is_noticed(at in any::<proptest::sample::Index>(), bit in 0u8..8) {
        let mut bytes = map().encode();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(ClusterMap::decode(&bytes).is_err());
    }

    /// The checksum is made right again, so that the body itself is what is read.
    #[test]
    fn no_mutated_body_panics(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<proptest::sample::Index>(),
        cuts in any::<bool>(),
    ) {
        let mut bytes = map().encode();
        for (at, value) in changes {
            let at = 24 + at.index(bytes.len() - 24);
            bytes[at] = value;
        }
        if cuts {
            bytes.truncate(24 + cut.index(bytes.len() - 24));
        }
        let (len, check) = ((bytes.len() - 24) as u64, xxhash_rust::xxh3::xxh3_64(&bytes[24..]));
        bytes[8..16].copy_from_slice(&len.to_le_bytes());
        bytes[16..24].copy_from_slice(&check.to_le_bytes());
        if let Ok(map) = ClusterMap::decode(&bytes) {
            prop_assert_eq!(ClusterMap::decode(&map.encode()), Ok(map));
        }
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(ClusterMap::decode(&bytes).is_err());
    }
}
