use super::*;
use crate::id::*;
use crate::map::{AuthMode, Interval};
use proptest::prelude::*;
use std::collections::BTreeSet;
use uuid::Uuid;

fn osd(id: u32, host: u32, rack: u32, weight: u32) -> Osd {
    Osd {
        id: OsdId(id),
        device: DeviceId(Uuid::from_u128(u128::from(id) + 1)),
        incarnation: Incarnation(1),
        up: true,
        is_in: true,
        addresses: vec!["127.0.0.1:1".parse().unwrap()],
        weight,
        host: format!("host{host}"),
        rack: format!("rack{rack}"),
        device_class: "ssd".into(),
        capacity: 1 << 40,
    }
}

fn pool(id: u32, size: u8, pg_count: u32, failure_domain: FailureDomain) -> Pool {
    Pool {
        id: PoolId(id),
        name: format!("pool{id}"),
        size,
        min_size: 1,
        pg_count,
        failure_domain,
        device_class: None,
        created: Epoch(1),
    }
}

fn map(osds: impl IntoIterator<Item = Osd>) -> ClusterMap {
    let mut map = ClusterMap::new(ClusterId(Uuid::from_u128(1)), AuthMode::None, 0);
    map.osds = osds.into_iter().map(|osd| (osd.id, osd)).collect();
    map
}

/// 4 hosts with 3 equal OSDs each.
fn twelve() -> ClusterMap {
    map((0..12).map(|id| osd(id, id / 3, 0, 65_536)))
}

fn loads(sets: &[Vec<OsdId>]) -> BTreeMap<OsdId, usize> {
    let mut loads = BTreeMap::new();
    sets.iter().flatten().for_each(|osd| *loads.entry(*osd).or_insert(0) += 1);
    loads
}

/// The largest distance from the mean, as a part of it.
fn worst(loads: impl IntoIterator<Item = usize>) -> f64 {
    let loads: Vec<f64> = loads.into_iter().map(|load| load as f64).collect();
    let mean = loads.iter().sum::<f64>() / loads.len() as f64;
    loads.iter().map(|load| (load - mean).abs() / mean).fold(0.0, f64::max)
}

/// Copies that are on another OSD than before.
fn moved(before: &[Vec<OsdId>], after: &[Vec<OsdId>]) -> usize {
    let new = |(old, new): (&Vec<OsdId>, &Vec<OsdId>)| new.iter().filter(|osd| !old.contains(osd)).count();
    before.iter().zip(after).map(new).sum()
}

#[test]
fn twelve_equal_osds_get_equal_loads() {
    let (map, mut off, mut off_primaries) = (twelve(), 0.0_f64, 0.0_f64);
    for id in 1..=100 {
        let sets = place_pool(&map, &pool(id, 3, 400, FailureDomain::Host));
        assert!(sets.iter().all(|set| set.len() == 3));
        let loads = loads(&sets);
        assert_eq!(loads.len(), 12);
        off = off.max(worst(loads.into_values()));
        let mut primaries = BTreeMap::new();
        sets.iter().for_each(|set| *primaries.entry(set[0]).or_insert(0) += 1);
        off_primaries = off_primaries.max(worst(primaries.into_values()));
    }
    println!("worst of 100 pools: {:.1} %, primaries {:.1} %", off * 100.0, off_primaries * 100.0);
    assert!(off <= 0.15, "{off}");
    assert!(off_primaries <= 0.25, "{off_primaries}");
}

/// Records acting sets as the mon does.
fn record(map: &mut ClusterMap, pool: &Pool, sets: &[Vec<OsdId>]) {
    for (pg, acting) in ClusterMap::pgs_of(pool).zip(sets) {
        map.intervals.insert(pg, Interval { since: Epoch(1), acting: acting.clone() });
    }
}

/// Places 100 pools on `from` and moves each to `to`. Returns the worst movement, in units of the ideal.
fn movement(from: &ClusterMap, to: &ClusterMap, what: &str) -> f64 {
    let changed = |map: &ClusterMap, other: &ClusterMap| {
        map.osds
            .values()
            .filter(|osd| osd.is_in)
            .find(|osd| other.osds.get(&osd.id).is_none_or(|osd| !osd.is_in))
            .map(|osd| osd.id)
    };
    let (mut sum, mut worst_ratio, mut off) = (0.0, 0.0_f64, 0.0_f64);
    for id in 1..=100 {
        let pool = pool(id, 3, 400, FailureDomain::Host);
        let before = place_pool(from, &pool);
        let mut to = to.clone();
        record(&mut to, &pool, &before);
        let after = place_pool(&to, &pool);
        // The ideal is what a new OSD should have, or what one that leaves has.
        let ideal = match changed(from, &to) {
            Some(gone) => loads(&before)[&gone] as f64,
            None => 1200.0 / to.osds.len() as f64,
        };
        let ratio = moved(&before, &after) as f64 / ideal;
        (sum, worst_ratio) = (sum + ratio, worst_ratio.max(ratio));
        off = off.max(worst(loads(&after).into_values()));
    }
    println!(
        "{what}: mean {:.2}, worst {worst_ratio:.2} of the ideal; then {:.1} % off",
        sum / 100.0,
        off * 100.0
    );
    assert!(off <= 0.15, "{off}");
    worst_ratio
}

#[test]
fn adding_or_removing_an_osd_moves_little_more_than_its_share() {
    let before = twelve();
    let mut in_host = before.clone();
    in_host.osds.insert(OsdId(12), osd(12, 1, 0, 65_536));
    let mut new_host = before.clone();
    new_host.osds.insert(OsdId(12), osd(12, 4, 0, 65_536));
    let mut out = before.clone();
    out.osds.get_mut(&OsdId(4)).unwrap().is_in = false;
    assert!(movement(&before, &in_host, "one more in a host") <= 1.3);
    assert!(movement(&before, &new_host, "one more in a new host") <= 1.3);
    assert!(movement(&before, &out, "one out") <= 1.3);
}

/// OSDs go out and come back a hundred times: the loads stay even, and each step moves what it must.
#[test]
fn a_long_history_leaves_no_trace() {
    let mut map = twelve();
    let pool = pool(1, 3, 400, FailureDomain::Host);
    let mut sets = place_pool(&map, &pool);
    record(&mut map, &pool, &sets);
    assert_eq!(place_pool(&map, &pool), sets, "without a change nothing moves");
    // Two are out at any time from the second step on.
    for step in 0..100_u32 {
        for (turned, is_in) in [(step * 5 % 12, false), ((step + 10) * 5 % 12, true)] {
            map.osds.get_mut(&OsdId(turned)).unwrap().is_in = is_in;
            let after = place_pool(&map, &pool);
            let ideal = if is_in { 1200 / 11 } else { loads(&sets)[&OsdId(turned)] };
            let moved = moved(&sets, &after);
            assert!(moved * 10 <= ideal * 14, "step {step}: {moved} of {ideal}");
            record(&mut map, &pool, &after);
            sets = after;
        }
    }
    map.osds.values_mut().for_each(|osd| osd.is_in = true);
    assert!(worst(loads(&place_pool(&map, &pool)).into_values()) <= 0.15);
}

#[test]
fn weights_are_followed() {
    let map = map((0..12).map(|id| osd(id, id / 2, 0, if id % 2 == 0 { 65_536 } else { 131_072 })));
    let loads = loads(&place_pool(&map, &pool(3, 3, 512, FailureDomain::Host)));
    for (osd, load) in loads {
        let ideal = 1536.0 / 18.0 * if osd.0 % 2 == 0 { 1.0 } else { 2.0 };
        assert!((load as f64 - ideal).abs() <= ideal * 0.15, "{osd} has {load}, ideal {ideal}");
    }
}

#[test]
fn a_host_too_big_for_its_share_gets_one_copy_of_each_pg() {
    let map = map((0..6).map(|id| osd(id, id.min(2), 0, if id < 2 { 65_536 } else { 1 << 20 })));
    let sets = place_pool(&map, &pool(1, 2, 128, FailureDomain::Host));
    let on_big = |set: &Vec<OsdId>| set.iter().filter(|osd| osd.0 >= 2).count();
    assert!(sets.iter().all(|set| set.len() == 2 && on_big(set) <= 1));
    assert!(sets.iter().filter(|set| on_big(set) == 1).count() >= 115);
}

#[test]
fn fewer_domains_than_copies_give_fewer_members() {
    let map = twelve();
    let sets = place_pool(&map, &pool(1, 5, 16, FailureDomain::Host));
    assert!(sets.iter().all(|set| set.len() == 4));
    let sets = place_pool(&map, &pool(1, 3, 16, FailureDomain::Rack));
    assert!(sets.iter().all(|set| set.len() == 1));
    let nobody = ClusterMap::new(ClusterId(Uuid::from_u128(1)), AuthMode::None, 0);
    assert_eq!(place_pool(&nobody, &pool(1, 3, 2, FailureDomain::Osd)), vec![vec![]; 2]);
}

#[test]
fn overrides_come_first_and_are_completed() {
    let mut map = twelve();
    let mut pool = pool(1, 3, 16, FailureDomain::Host);
    let pg = |index| PgId { pool: PoolId(1), index };
    map.osds.get_mut(&OsdId(8)).unwrap().is_in = false;
    // 1 and 2 share a host with 0; 8 is out; 99 does not exist.
    map.overrides.insert(pg(3), [0, 1, 8, 99, 11].map(OsdId).to_vec());
    let sets = place_pool(&map, &pool);
    assert_eq!(sets[3][..2], [OsdId(0), OsdId(11)]);
    assert_eq!(sets[3].len(), 3);
    map.pools.insert(pool.id, pool.clone());
    assert_eq!(acting_set(&map, pg(3)), sets[3]);
    assert!(acting_set(&map, pg(16)).is_empty());
    pool.device_class = Some("nvme".into());
    assert!(place_pool(&map, &pool).iter().all(Vec::is_empty));
}

/// The same on every machine and in every release: another place would move data.
#[test]
fn places_never_change() {
    let sets = place_pool(&twelve(), &pool(1, 3, 4, FailureDomain::Host));
    let ids: Vec<Vec<u32>> = sets.iter().map(|set| set.iter().map(|osd| osd.0).collect()).collect();
    assert_eq!(ids, [[4, 6, 11], [3, 11, 8], [0, 7, 10], [8, 2, 5]]);
    let object = ObjectId { pool: PoolId(1), kind: ObjectKind::Data, image: ImageId(0xabc), index: 5 };
    let pool = pool(1, 3, 1024, FailureDomain::Host);
    assert_eq!(object_to_pg(&pool, &object).index, 472);
}

#[test]
fn objects_spread_over_all_pgs() {
    let pool = pool(1, 3, 128, FailureDomain::Host);
    let mut counts = vec![0usize; 128];
    for index in 0..12_800 {
        let object = ObjectId { pool: pool.id, kind: ObjectKind::Data, image: ImageId(77), index };
        counts[object_to_pg(&pool, &object).index as usize] += 1;
    }
    assert!(worst(counts) < 0.4);
}

#[test]
fn suggestions_are_never_one_by_accident() {
    assert_eq!(suggested_pg_count(0, 0, 0), 128);
    assert_eq!(suggested_pg_count(3, 3, 3), 128);
    assert_eq!(suggested_pg_count(12, 3, 12), 512);
    assert_eq!(suggested_pg_count(3, 3, 96), 2048);
    assert_eq!(suggested_pg_count(usize::MAX, 1, usize::MAX), 65_536);
}

#[test]
fn a_large_pool_is_placed_in_time() {
    let map = map((0..200).map(|id| osd(id, id / 10, id / 50, 65_536)));
    let sets = place_pool(&map, &pool(1, 3, 8192, FailureDomain::Host));
    assert!(worst(loads(&sets).into_values()) <= 0.15);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn copies_are_never_together(
        osds in proptest::collection::vec((0u32..6, 0u32..3, 0u32..200_000, any::<bool>()), 0..24),
        size in 1u8..=8,
        pg_count in 1u32..80,
        level in 0usize..3,
        by_hand in proptest::collection::vec(0u32..30, 0..8),
    ) {
        let mut map = map(osds.iter().enumerate().map(|(id, (host, rack, weight, is_in))| {
            Osd { is_in: *is_in, ..osd(id as u32, *host, *rack, *weight) }
        }));
        let level = [FailureDomain::Osd, FailureDomain::Host, FailureDomain::Rack][level];
        let pool = pool(1, size, pg_count, level);
        map.overrides.insert(PgId { pool: pool.id, index: 0 }, by_hand.into_iter().map(OsdId).collect());
        let usable: Vec<&Osd> = map.osds.values().filter(|osd| osd.is_in && osd.weight > 0).collect();
        let domains: BTreeSet<_> = usable.iter().map(|osd| domain_of(osd, level)).collect();
        let sets = place_pool(&map, &pool);
        prop_assert_eq!(sets.len(), pg_count as usize);
        for set in &sets {
            prop_assert_eq!(set.len(), domains.len().min(usize::from(size)));
            let used: BTreeSet<_> = set.iter().map(|osd| domain_of(&map.osds[osd], level)).collect();
            prop_assert_eq!(used.len(), set.len());
            prop_assert!(set.iter().all(|osd| map.osds[osd].is_in && map.osds[osd].weight > 0));
        }
        prop_assert_eq!(place_pool(&map, &pool), sets);
    }

    #[test]
    fn a_split_keeps_children_with_parents(hash in any::<u64>(), count in 1u32..5000) {
        let (before, after) = (stable_mod(hash, count), stable_mod(hash, count + 1));
        prop_assert!(before < count);
        // The only object that moves goes to the new PG, and comes from the new PG's parent.
        if before != after {
            prop_assert_eq!(after, count);
            let parent = count & ((count + 1).next_power_of_two() / 2 - 1);
            prop_assert_eq!(before, parent);
        }
    }
}
