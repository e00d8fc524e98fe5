use super::*;
use crate::store::{MapStore, Memory};
use loligo_config::id::{DeviceId, PgId, PoolId};
use loligo_net::wire::mon::{PgReport, PgState};
use serde_json::{Value, json};
use uuid::Uuid;

const MS: u64 = 1_000_000;

/// A mon without a network: what is applied is committed as the poller does.
struct Bench {
    core: Core,
    store: Memory,
    now: Instant,
    connections: u64,
}

impl Bench {
    fn new() -> Self {
        Self::on(Memory::default())
    }

    fn on(mut store: Memory) -> Self {
        let settings = MonSettings::new(ClusterId(Uuid::from_u128(1)));
        let fresh = || (ClusterMap::new(settings.new_cluster, AuthMode::None, 0), Extra::default());
        let (map, extra) = store.load().unwrap().unwrap_or_else(fresh);
        let now = Instant(1000 * MS);
        Self { core: Core::new(settings, now, 7, map, extra), store, now, connections: 0 }
    }

    /// Sets the time forward, tick by tick, committing what is due.
    fn pass(&mut self, milliseconds: u64) -> Vec<Action> {
        let mut out = Vec::new();
        for _ in 0..milliseconds {
            self.now = Instant(self.now.0 + MS);
            self.core.tick(self.now, 7);
            self.commit(&mut out);
        }
        out
    }

    fn commit(&mut self, out: &mut Vec<Action>) {
        if let Some(commit) = self.core.draft(self.now) {
            self.store.commit(&commit.map, &commit.extra).unwrap();
            self.core.committed(out);
        }
        self.core.answer_fences(self.now, out);
    }

    /// Applies an event and what follows from it within the time for batching.
    fn event(&mut self, event: Event<'_>) -> Vec<Action> {
        let mut out = Vec::new();
        self.core.apply(self.now, 7, event, &mut out);
        self.commit(&mut out);
        out.extend(self.pass(21));
        out
    }

    fn apply(&mut self, event: Event<'_>) {
        self.core.apply(self.now, 7, event, &mut Vec::new());
    }

    fn connect(&mut self, osd: u32, incarnation: u64) -> ConnectionId {
        self.connections += 1;
        let connection = ConnectionId(self.connections);
        self.apply(Event::Connected { connection, osd: OsdId(osd), incarnation: Incarnation(incarnation) });
        connection
    }

    fn boot_event(
        connection: ConnectionId,
        osd: u32,
        incarnation: u64,
        info: Option<BootInfo>,
    ) -> Event<'static> {
        Event::Boot { connection, osd: OsdId(osd), incarnation: Incarnation(incarnation), info }
    }

    /// Connects and boots; gives the answer too.
    fn boot_as(&mut self, osd: u32, incarnation: u64, info: BootInfo) -> (ConnectionId, BootStatus) {
        let connection = self.connect(osd, incarnation);
        let out = self.event(Self::boot_event(connection, osd, incarnation, Some(info)));
        let status = out.iter().find_map(|action| match action {
            Action::BootReply { connection: to, status, .. } if *to == connection => Some(*status),
            _ => None,
        });
        (connection, status.expect("every boot is answered"))
    }

    fn boot(&mut self, osd: u32, incarnation: u64) -> ConnectionId {
        let (connection, status) = self.boot_as(osd, incarnation, info(osd));
        assert_eq!(status, BootStatus::Taken);
        connection
    }

    fn command(&mut self, request: Value) -> Result<Value, Value> {
        let text = request.to_string();
        let out =
            self.event(Event::Command { connection: ConnectionId(999), number: 5, request: text.as_bytes() });
        let answer = out.into_iter().find_map(|action| match action {
            Action::CommandReply { number: 5, epoch, answer, .. } => Some((epoch, answer)),
            _ => None,
        });
        let (epoch, mut answer) = answer.expect("every command is answered");
        assert_eq!(epoch, self.core.map().epoch, "the answer names the epoch with its effect");
        match answer.get_mut("error") {
            Some(error) => Err(error.take()),
            None => Ok(answer["ok"].take()),
        }
    }

    fn refusal(&mut self, request: Value, code: &str) -> String {
        let (epoch, extra) = (self.core.map().epoch, self.core.extra().clone());
        let error = self.command(request.clone()).expect_err(&request.to_string());
        assert_eq!(error["name"], code, "{error}");
        assert!(error["code"].as_i64().is_some_and(|code| code < 0), "{error}");
        assert_eq!((self.core.map().epoch, self.core.extra()), (epoch, &extra), "a refusal changes nothing");
        error["message"].as_str().unwrap().to_owned()
    }

    fn epoch(&self) -> u32 {
        self.core.map().epoch.0
    }

    fn interval(&self, index: u32) -> (u32, Vec<u32>) {
        let interval = self.core.map().interval(pg(index)).unwrap();
        (interval.since.0, interval.acting.iter().map(|osd| osd.0).collect())
    }

    fn is_up(&self, osd: u32) -> bool {
        self.core.map().is_up(OsdId(osd))
    }

    /// Three OSDs on three hosts and one pool with 16 PGs.
    fn with_pool() -> (Self, [ConnectionId; 3]) {
        let mut bench = Self::new();
        let connections = [0, 1, 2].map(|osd| bench.boot(osd, 100 + u64::from(osd)));
        bench.command(json!({ "prefix": "pool create", "pool": "rbd", "pg_count": 16 })).unwrap();
        (bench, connections)
    }
}

fn pg(index: u32) -> PgId {
    PgId { pool: PoolId(1), index }
}

fn info(osd: u32) -> BootInfo {
    BootInfo {
        device: DeviceId(Uuid::from_u128(u128::from(osd) + 1000)),
        addresses: vec![SocketAddr::from(([127, 0, 0, 1], 7410 + u16::try_from(osd).unwrap()))],
        capacity: 1 << 40,
        host: format!("host{osd}"),
        rack: "default".into(),
        device_class: "ssd".into(),
        newest_map: Epoch(0),
    }
}

#[test]
fn a_first_boot_registers_the_osd() {
    let mut bench = Bench::new();
    bench.boot(0, 100);
    let osd = &bench.core.map().osds[&OsdId(0)];
    assert!(osd.up && osd.is_in);
    assert_eq!(osd.weight, 65_536, "1 TiB");
    assert_eq!(osd.incarnation, Incarnation(100));
    assert_eq!(bench.epoch(), 2);
}

#[test]
fn a_boot_is_answered_after_its_map_is_durable() {
    let mut bench = Bench::new();
    let connection = bench.connect(0, 100);
    let mut out = Vec::new();
    bench.core.apply(bench.now, 7, Bench::boot_event(connection, 0, 100, Some(info(0))), &mut out);
    bench.commit(&mut out);
    assert!(out.is_empty(), "others may boot in the next moment: {out:?}");
    let out = bench.pass(20);
    let reply = Action::BootReply { connection, status: BootStatus::Taken, epoch: Epoch(2) };
    assert_eq!(out, [Action::Publish, reply]);
}

#[test]
fn a_restart_begins_new_intervals() {
    let (mut bench, connections) = Bench::with_pool();
    let (since, acting) = bench.interval(0);
    bench.apply(Event::Lost { connection: connections[1] });
    bench.boot(1, 200);
    assert_eq!(bench.core.map().osds[&OsdId(1)].incarnation, Incarnation(200));
    assert_eq!(bench.interval(0), (bench.epoch(), acting));
    assert!(bench.epoch() > since);
}

#[test]
fn a_lost_connection_is_down_after_a_while_and_comes_back_with_a_new_interval() {
    let (mut bench, connections) = Bench::with_pool();
    let before = bench.interval(0);
    bench.event(Event::Lost { connection: connections[2] });
    bench.pass(470);
    assert!(bench.is_up(2));
    bench.pass(40);
    assert!(!bench.is_up(2));
    assert!(!bench.core.map().pg_serves(pg(0)));
    assert_eq!(bench.interval(0), before, "a member that is down keeps its place and the interval");
    bench.boot(2, 102);
    assert!(bench.core.map().pg_serves(pg(0)));
    assert_eq!(bench.interval(0), (bench.epoch(), before.1), "it may have missed writes");
}

#[test]
fn a_short_hiccup_changes_nothing() {
    let (mut bench, connections) = Bench::with_pool();
    let epoch = bench.epoch();
    bench.event(Event::Lost { connection: connections[2] });
    bench.pass(300);
    bench.boot(2, 102);
    bench.pass(2000);
    assert_eq!(bench.epoch(), epoch);
    assert!(bench.is_up(2));
}

#[test]
fn two_connections_are_lost_only_together() {
    let (mut bench, connections) = Bench::with_pool();
    let second = bench.connect(2, 102);
    bench.event(Event::Lost { connection: connections[2] });
    bench.pass(2000);
    assert!(bench.is_up(2));
    bench.event(Event::Lost { connection: second });
    bench.pass(600);
    assert!(!bench.is_up(2));
}

#[test]
fn a_peers_word_counts_when_the_mon_has_lost_the_osd_too() {
    let (mut bench, connections) = Bench::with_pool();
    let failure = |incarnation| Event::Failure {
        reporter: OsdId(0),
        osd: OsdId(2),
        incarnation: Incarnation(incarnation),
    };
    bench.event(failure(102));
    assert!(bench.is_up(2), "it is connected here");
    bench.apply(Event::Lost { connection: connections[2] });
    bench.event(failure(101));
    assert!(bench.is_up(2), "another start of it");
    bench.event(Event::Failure { reporter: OsdId(2), osd: OsdId(2), incarnation: Incarnation(102) });
    bench.event(Event::Failure { reporter: OsdId(9), osd: OsdId(2), incarnation: Incarnation(102) });
    assert!(bench.is_up(2), "nobody and itself are no peers");
    bench.event(failure(102));
    assert!(!bench.is_up(2), "well before the time is up");
}

#[test]
fn a_mass_restart_shares_one_epoch() {
    let mut bench = Bench::new();
    for osd in 0..12 {
        bench.boot(osd, 100);
    }
    bench.command(json!({ "prefix": "pool create", "pool": "rbd", "pg_count": 64 })).unwrap();
    let epoch = bench.epoch();
    for osd in 0..12 {
        let connection = bench.connect(osd, 200);
        bench.apply(Bench::boot_event(connection, osd, 200, Some(info(osd))));
    }
    // The old processes are gone, their connections close now.
    let out = bench.pass(30);
    assert_eq!(bench.epoch(), epoch, "the old processes still hold their connections: {out:?}");
    for connection in 1..=12 {
        bench.apply(Event::Lost { connection: ConnectionId(connection) });
    }
    for osd in 0..12 {
        let connection = bench.connect(osd, 300);
        bench.apply(Bench::boot_event(connection, osd, 300, Some(info(osd))));
    }
    bench.pass(30);
    assert_eq!(bench.epoch(), epoch + 1);
    assert!(bench.core.map().intervals.values().all(|interval| interval.since.0 == epoch + 1));
}

#[test]
fn starts_that_were_replaced_are_ignored() {
    let (mut bench, connections) = Bench::with_pool();
    bench.event(Event::Lost { connection: connections[0] });
    bench.boot(0, 200);
    let epoch = bench.epoch();
    let (_, status) = bench.boot_as(0, 100, info(0));
    assert_eq!(status, BootStatus::Running);
    let report = OsdReport { used: 77, ..OsdReport::default() };
    bench.event(Event::Report { osd: OsdId(0), incarnation: Incarnation(100), epoch: Epoch(0), report });
    assert_eq!(bench.core.usage().report(OsdId(0)), None);
    bench.pass(2000);
    assert_eq!(bench.epoch(), epoch, "the end of the old connection is not the end of the new start");
    assert!(bench.is_up(0));
}

#[test]
fn wrong_boots_are_refused() {
    let (mut bench, connections) = Bench::with_pool();
    let epoch = bench.epoch();
    assert_eq!(bench.boot_as(0, 500, info(0)).1, BootStatus::Running);
    assert_eq!(bench.boot_as(7, 500, info(0)).1, BootStatus::OtherId);
    bench.event(Event::Lost { connection: connections[0] });
    assert_eq!(bench.boot_as(0, 500, info(8)).1, BootStatus::OtherDevice);
    let newer = BootInfo { newest_map: Epoch(epoch + 1), ..info(0) };
    assert_eq!(bench.boot_as(0, 500, newer).1, BootStatus::OldMon);
    let invalid = [
        BootInfo { capacity: 0, ..info(9) },
        BootInfo { addresses: vec![], ..info(9) },
        BootInfo { addresses: vec!["0.0.0.0:1".parse().unwrap()], ..info(9) },
        BootInfo { addresses: vec!["127.0.0.1:1".parse().unwrap(); 65], ..info(9) },
        BootInfo { host: "a b".into(), ..info(9) },
        BootInfo { device: DeviceId(Uuid::nil()), ..info(9) },
    ];
    for info in invalid {
        assert_eq!(bench.boot_as(9, 500, info).1, BootStatus::Invalid);
    }
    assert_eq!(bench.boot_as(10_000, 500, info(9)).1, BootStatus::Invalid);
    let connection = bench.connect(9, 500);
    let out = bench.event(Bench::boot_event(connection, 9, 500, None));
    assert_eq!(out, [Action::BootReply { connection, status: BootStatus::Invalid, epoch: Epoch(epoch) }]);
    assert_eq!(bench.epoch(), epoch);
}

#[test]
fn after_a_start_of_the_mon_the_osds_have_time_to_come_back() {
    let (bench, _) = Bench::with_pool();
    let mut bench = Bench::on(bench.store.clone());
    bench.connect(0, 100);
    bench.event(Event::Failure { reporter: OsdId(0), osd: OsdId(2), incarnation: Incarnation(102) });
    bench.boot(1, 101);
    bench.pass(4800);
    assert!((0..3).all(|osd| bench.is_up(osd)));
    bench.pass(300);
    assert!(bench.is_up(0), "connected");
    assert!(bench.is_up(1), "booted");
    assert!(!bench.is_up(2));
}

#[test]
fn pgs_that_serve_keep_their_members_and_others_are_filled() {
    let mut bench = Bench::new();
    bench.boot(0, 100);
    bench.command(json!({ "prefix": "pool create", "pool": "rbd", "pg_count": 16 })).unwrap();
    assert_eq!(bench.interval(0).1, [0]);
    assert!(!bench.core.map().pg_serves(pg(0)));
    for osd in 1..3 {
        let connection = bench.connect(osd, 100);
        bench.apply(Bench::boot_event(connection, osd, 100, Some(info(osd))));
    }
    bench.pass(30);
    let before: Vec<_> = (0..16).map(|index| bench.interval(index)).collect();
    assert!(before.iter().all(|(since, acting)| acting.len() == 3 && *since == bench.epoch()));
    let primaries = |osd: u32| before.iter().filter(|(_, acting)| acting[0] == osd).count();
    assert!((0..3).all(|osd| primaries(osd) > 2), "the first OSD is not primary of everything");
    bench.boot(3, 100);
    let after: Vec<_> = (0..16).map(|index| bench.interval(index)).collect();
    assert_eq!(after, before, "data does not follow by itself");
}

#[test]
fn min_size_cannot_rise_above_the_members_of_a_pg_that_may_hold_data() {
    let mut bench = Bench::new();
    bench.boot(0, 100);
    let create = json!({ "prefix": "pool create", "pool": "rbd", "size": 3, "min_size": 1, "pg_count": 16 });
    bench.command(create).unwrap();
    bench.boot(1, 100);
    bench.boot(2, 100);
    let before: Vec<_> = (0..16).map(|index| bench.interval(index)).collect();
    let set = json!({ "prefix": "pool set", "pool": "rbd", "var": "min_size", "val": 2 });
    let error = bench.command(set).unwrap_err();
    assert_eq!(error["name"], "EOPNOTSUPP", "{error}");
    let after: Vec<_> = (0..16).map(|index| bench.interval(index)).collect();
    assert_eq!(after, before, "the only copies stay where they are");
}

#[test]
fn pools_are_made_changed_and_removed() {
    let (mut bench, _) = Bench::with_pool();
    let pool = bench.command(json!({ "prefix": "pool get", "pool": "rbd" })).unwrap();
    let expected = json!({
        "pool": "rbd", "pool_id": 1, "size": 3, "min_size": 2, "pg_count": 16, "failure_domain": "host",
        "device_class": null,
    });
    assert_eq!(pool, expected);
    assert_eq!(
        bench.command(json!({ "prefix": "pool get", "pool": "rbd", "var": "all" })).unwrap(),
        expected
    );
    let size = bench.command(json!({ "prefix": "pool get", "pool": "rbd", "var": "size" })).unwrap();
    assert_eq!(size, json!({ "pool": "rbd", "pool_id": 1, "size": 3 }));
    let set = json!({ "prefix": "pool set", "pool": "rbd", "var": "min_size", "val": "1" });
    assert_eq!(bench.command(set).unwrap()["min_size"], 1);
    let made = json!({ "prefix": "pool create", "pool": "b", "size": 2, "failure_domain": "osd", "device_class": "ssd" });
    let made = bench.command(made).unwrap();
    assert_eq!((&made["pg_count"], &made["min_size"]), (&json!(256), &json!(1)), "suggested for three OSDs");
    assert_eq!(bench.command(json!({ "prefix": "pool ls" })).unwrap(), json!(["rbd", "b"]));
    let detail = bench.command(json!({ "prefix": "pool ls", "detail": true })).unwrap();
    assert_eq!(detail[1]["pool_name"], "b");
    let rm = json!({
        "prefix": "pool rm", "pool": "b", "pool2": "b", "yes_i_really_really_mean_it": true,
    });
    bench.command(rm).unwrap();
    assert_eq!(bench.core.map().intervals.len(), 16);
    let again = bench.command(json!({ "prefix": "pool create", "pool": "b" })).unwrap();
    assert_eq!(again["pool_id"], 3, "ids are never reused");
}

#[test]
fn wrong_commands_say_what_to_do() {
    let (mut bench, _) = Bench::with_pool();
    let cases = [
        (json!("status"), "EINVAL", "{\"prefix\": \"status\"}"),
        (json!({ "prefix": "pool creat" }), "EINVAL", "pool create"),
        (json!({ "prefix": "status", "x": 1 }), "EINVAL", "it has: none"),
        (json!({ "prefix": "pool create" }), "EINVAL", "`pool` is missing"),
        (json!({ "prefix": "pool create", "pool": "a b" }), "EINVAL", "letters, digits"),
        (json!({ "prefix": "pool create", "pool": "a", "sise": 3 }), "EINVAL", "no argument \"sise\""),
        (json!({ "prefix": "pool create", "pool": "rbd" }), "EEXIST", "already"),
        (json!({ "prefix": "pool create", "pool": "a", "size": 0 }), "EINVAL", "from 1 to 8"),
        (json!({ "prefix": "pool create", "pool": "a", "size": 9 }), "EINVAL", "from 1 to 8"),
        (json!({ "prefix": "pool create", "pool": "a", "size": 3, "min_size": 4 }), "EINVAL", "from 1 to 3"),
        (json!({ "prefix": "pool create", "pool": "a", "pg_count": 65_537 }), "EINVAL", "from 1 to 65536"),
        (json!({ "prefix": "pool create", "pool": "a", "pg_count": -1 }), "EINVAL", "from 1 to 65536"),
        (
            json!({ "prefix": "pool create", "pool": "a", "failure_domain": "room" }),
            "EINVAL",
            "osd, host or rack",
        ),
        (json!({ "prefix": "pool create", "pool": "a", "device_class": "hdd" }), "ENOENT", "there are: ssd"),
        (json!({ "prefix": "pool get", "pool": "x" }), "ENOENT", "loligo pool ls"),
        (json!({ "prefix": "pool get", "pool": "rbd", "var": "x" }), "EINVAL", "they have: size"),
        (
            json!({ "prefix": "pool set", "pool": "rbd", "var": "size", "val": 2 }),
            "EOPNOTSUPP",
            "make a pool",
        ),
        (json!({ "prefix": "pool set", "pool": "rbd", "var": "pg_count", "val": 2 }), "EOPNOTSUPP", "split"),
        (
            json!({ "prefix": "pool set", "pool": "rbd", "var": "min_size", "val": 4 }),
            "EINVAL",
            "from 1 to 3",
        ),
        (json!({ "prefix": "pool set", "pool": "rbd", "var": "min_size" }), "EINVAL", "`val` is missing"),
        (json!({ "prefix": "pool set", "pool": "rbd", "var": "x", "val": 4 }), "EINVAL", "they have: size"),
        (json!({ "prefix": "pool rm", "pool": "rbd" }), "EPERM", "name it twice"),
        (
            json!({ "prefix": "pool rm", "pool": "rbd", "pool2": "rbd" }),
            "EPERM",
            "--yes-i-really-really-mean-it",
        ),
        (
            json!({ "prefix": "pool rm", "pool": "rbd", "pool2": "rbx", "yes_i_really_really_mean_it": true }),
            "EPERM",
            "name it twice",
        ),
        (json!({ "prefix": "osd new", "device": "x" }), "EINVAL", "UUID"),
        (
            json!({ "prefix": "osd new", "device": Uuid::from_u128(5).to_string(), "id": 0 }),
            "EEXIST",
            "leave --id out",
        ),
        (
            json!({ "prefix": "osd new", "device": Uuid::from_u128(1000).to_string(), "id": 1 }),
            "EEXIST",
            "osd.0 already",
        ),
        (json!({ "prefix": "blocklist add" }), "EINVAL", "`session` is missing"),
        (json!({ "prefix": "blocklist add", "session": 99 }), "ENOENT", "never assigned"),
        (json!({ "prefix": "blocklist rm", "session": 99 }), "ENOENT", "not on the blocklist"),
    ];
    for (request, code, words) in cases {
        let message = bench.refusal(request.clone(), code);
        assert!(message.contains(words), "{request}: {message}, expected {words}");
    }
    for garbage in [&b""[..], b"{", b"\xff", b"[1]", b"null"] {
        let out = bench.event(Event::Command { connection: ConnectionId(9), number: 1, request: garbage });
        assert!(
            matches!(&out[..], [Action::CommandReply { answer, .. }] if answer["error"]["name"] == "EINVAL")
        );
    }
}

#[test]
fn ids_are_reserved_for_devices_durably() {
    let mut bench = Bench::new();
    let new = |device: u128| json!({ "prefix": "osd new", "device": Uuid::from_u128(device).to_string() });
    let answer = bench.command(new(1005)).unwrap();
    assert_eq!(answer, json!({ "id": 0, "cluster": Uuid::from_u128(1).to_string() }));
    assert_eq!(bench.command(new(1005)).unwrap()["id"], 0, "asked again: the same");
    assert_eq!(bench.command(new(1006)).unwrap()["id"], 1);
    let mut wanted = new(1007);
    wanted["id"] = json!(5);
    assert_eq!(bench.command(wanted).unwrap()["id"], 5);
    let mut bench = Bench::on(bench.store.clone());
    assert_eq!(bench.epoch(), 1, "a reservation needs no epoch");
    assert_eq!(bench.command(new(1008)).unwrap()["id"], 2);
    assert_eq!(bench.boot_as(0, 100, info(6)).1, BootStatus::OtherId);
    assert_eq!(bench.boot_as(0, 100, info(9)).1, BootStatus::OtherDevice);
    assert_eq!(bench.boot_as(0, 100, info(5)).1, BootStatus::Taken);
    assert!(!bench.core.extra().reserved.contains_key(&OsdId(0)));
    assert_eq!(bench.command(new(1005)).unwrap()["id"], 0, "known by its map entry now");
}

#[test]
fn sessions_are_never_handed_out_twice() {
    let mut bench = Bench::new();
    let first = bench.core.reserve_sessions(1000);
    assert_eq!(first, 1..1001);
    bench.commit(&mut Vec::new());
    let mut bench = Bench::on(bench.store.clone());
    assert_eq!(bench.core.reserve_sessions(1000), 1001..2001);
    // Killed before the reservation was durable: nobody was given any of them.
    let mut bench = Bench::on(bench.store.clone());
    assert_eq!(bench.core.reserve_sessions(1000), 1001..2001);
}

#[test]
fn sessions_are_fenced_and_freed() {
    let mut bench = Bench::new();
    bench.core.reserve_sessions(1000);
    bench.pass(1);
    for session in [17, 3] {
        bench.command(json!({ "prefix": "blocklist add", "session": session })).unwrap();
    }
    assert!(bench.core.map().is_fenced(SessionId(3)) && bench.core.map().is_fenced(SessionId(17)));
    assert_eq!(bench.core.map().check(), Ok(()));
    let epoch = bench.epoch();
    let again = bench.command(json!({ "prefix": "blocklist add", "session": 3 })).unwrap();
    assert_eq!((again, bench.epoch()), (json!({ "session": 3, "since": 3 }), epoch));
    let list = bench.command(json!({ "prefix": "blocklist ls" })).unwrap();
    assert_eq!(list, json!([{ "session": 3, "since": 3 }, { "session": 17, "since": 2 }]));
    assert!(bench.refusal(json!({ "prefix": "blocklist rm", "session": 3 }), "EPERM").contains("overwrite"));
    bench.command(json!({ "prefix": "blocklist rm", "session": 3, "yes_i_really_mean_it": true })).unwrap();
    assert!(!bench.core.map().is_fenced(SessionId(3)));
}

#[test]
fn small_devices_are_not_given_more_pgs_than_they_have_room_for() {
    let mut bench = Bench::new();
    for osd in 0..3 {
        let small = BootInfo { capacity: 64 << 20, ..info(osd) };
        assert_eq!(bench.boot_as(osd, 100, small).1, BootStatus::Taken);
    }
    let create = json!({ "prefix": "pool create", "pool": "small", "failure_domain": "osd" });
    assert_eq!(bench.command(create).unwrap()["pg_count"], 8);
}

/// Who takes a lock over writes as soon as the old owner is fenced: on no OSD may that one still be served.
#[test]
fn a_fence_is_answered_when_every_osd_that_serves_goes_by_it() {
    let (mut bench, connections) = Bench::with_pool();
    bench.core.reserve_sessions(1000);
    bench.pass(1);
    let fence = json!({ "prefix": "blocklist add", "session": 3 }).to_string();
    let send = |bench: &mut Bench, number| {
        let request = fence.as_bytes();
        bench.event(Event::Command { connection: ConnectionId(999), number, request })
    };
    let answers = |out: &[Action]| -> Vec<(u64, Value)> {
        let reply = |action: &Action| match action {
            Action::CommandReply { number, answer, .. } => Some((*number, answer.clone())),
            _ => None,
        };
        out.iter().filter_map(reply).collect()
    };
    let out = send(&mut bench, 1);
    let since = bench.core.map().epoch;
    assert!(bench.core.map().is_fenced(SessionId(3)));
    assert_eq!(answers(&out), []);
    let says = |bench: &mut Bench, osd: u32, epoch| {
        let incarnation = Incarnation(100 + u64::from(osd));
        bench.event(Event::Report { osd: OsdId(osd), incarnation, epoch, report: OsdReport::default() })
    };
    assert_eq!(answers(&says(&mut bench, 0, since)), []);
    assert_eq!(answers(&says(&mut bench, 1, Epoch(since.0 - 1))), [], "it has an older map");
    assert_eq!(answers(&says(&mut bench, 1, since)), []);
    let ok = json!({ "ok": { "session": 3, "since": since.0 } });
    assert_eq!(answers(&says(&mut bench, 2, since)), [(1, ok.clone())]);
    // Again: everybody has it.
    assert_eq!(answers(&send(&mut bench, 2)), [(2, ok.clone())]);
    // A new start of an OSD has to say it anew; one that does not is named.
    bench.event(Event::Lost { connection: connections[1] });
    bench.boot(1, 200);
    assert_eq!(answers(&send(&mut bench, 3)), []);
    let late = answers(&bench.pass(5000));
    assert_eq!((late.len(), late[0].0, &late[0].1["error"]["name"]), (1, 3, &json!("ETIMEDOUT")));
    let message = late[0].1["error"]["message"].as_str().unwrap();
    assert!(message.contains("osd.1 did not") && !message.contains("osd.2"), "{message}");
    assert!(bench.core.map().is_fenced(SessionId(3)), "the fence stays");
    // One that is down serves nothing.
    assert_eq!(answers(&send(&mut bench, 4)), []);
    let link = ConnectionId(bench.connections);
    bench.event(Event::Lost { connection: link });
    assert_eq!(answers(&bench.pass(600)), [(4, ok)]);
}

/// OSDs that are cut off from the mon are down for it, and may go on to serve clients that are cut off with them.
#[test]
fn a_fence_waits_for_a_pg_whose_members_are_all_down() {
    let (mut bench, connections) = Bench::with_pool();
    bench.core.reserve_sessions(1000);
    bench.pass(1);
    for connection in connections {
        bench.apply(Event::Lost { connection });
    }
    bench.pass(600);
    assert!((0..3).all(|osd| !bench.is_up(osd)));
    let fence = json!({ "prefix": "blocklist add", "session": 3 }).to_string();
    let fence = |number| Event::Command { connection: ConnectionId(999), number, request: fence.as_bytes() };
    let answer = |out: Vec<Action>| {
        out.into_iter().find_map(|action| match action {
            Action::CommandReply { answer, .. } => Some(answer),
            _ => None,
        })
    };
    assert_eq!(answer(bench.event(fence(1))), None);
    let late = answer(bench.pass(5000)).expect("it is answered when the time is up");
    assert_eq!(late["error"]["name"], "ETIMEDOUT", "{late}");
    assert!(late["error"]["message"].as_str().unwrap().contains("osd.0, osd.1, osd.2 did not"), "{late}");
    // One that is back and goes by the fence refuses what the others would need it for.
    bench.boot(1, 101);
    assert_eq!(answer(bench.event(fence(2))), None, "it has not said so yet");
    let (epoch, report) = (bench.core.map().epoch, OsdReport::default());
    let out = bench.event(Event::Report { osd: OsdId(1), incarnation: Incarnation(101), epoch, report });
    assert_eq!(answer(out).expect("confirmed")["ok"]["session"], 3);
}

/// A faulty OSD must not stop all changes by naming an epoch that nobody made.
#[test]
fn an_epoch_is_believed_only_of_a_start_or_a_device_that_is_known() {
    let (mut bench, connections) = Bench::with_pool();
    bench.apply(Event::Lost { connection: connections[0] });
    let epoch = Epoch(u32::MAX);
    for (osd, incarnation) in [(0, 99), (0, 0), (7, 100)] {
        let (osd, incarnation) = (OsdId(osd), Incarnation(incarnation));
        bench.event(Event::Seen { osd, incarnation, epoch });
        bench.event(Event::Report { osd, incarnation, epoch, report: OsdReport::default() });
    }
    let newer = |device| BootInfo { newest_map: epoch, ..info(device) };
    assert_eq!(bench.boot_as(0, 500, newer(8)).1, BootStatus::OtherDevice);
    assert_eq!(bench.boot_as(7, 500, newer(0)).1, BootStatus::OtherId);
    assert_eq!(bench.core.outdated(), None);
    bench.boot(0, 100);
    let create = json!({ "prefix": "pool create", "pool": "new", "failure_domain": "osd" });
    bench.command(create.clone()).expect("changes go on");
    // The start that the map names is believed.
    bench.event(Event::Seen { osd: OsdId(0), incarnation: Incarnation(100), epoch });
    assert_eq!(bench.core.outdated(), Some((OsdId(0), epoch)));
    bench.refusal(create, "ESTALE");
}

/// Restored from an old backup: an epoch that it made would be used twice.
#[test]
fn a_mon_that_is_behind_an_osd_makes_no_epoch() {
    let (bench, _) = Bench::with_pool();
    let backup = bench.store.clone();
    let epoch = bench.epoch();
    for by_boot in [true, false] {
        let mut bench = Bench::on(backup.clone());
        let newest_map = Epoch(epoch + 5);
        if by_boot {
            let (_, status) = bench.boot_as(0, 500, BootInfo { newest_map, ..info(0) });
            assert_eq!(status, BootStatus::OldMon);
        } else {
            bench.event(Event::Seen { osd: OsdId(0), incarnation: Incarnation(100), epoch: newest_map });
        }
        assert_eq!(bench.boot_as(1, 500, info(1)).1, BootStatus::OldMon, "nobody else either");
        let create = json!({ "prefix": "pool create", "pool": "new", "failure_domain": "osd" });
        assert!(bench.refusal(create, "ESTALE").contains("old copy"));
        bench.pass(10_000);
        assert_eq!(bench.epoch(), epoch, "nor does it mark anybody down");
        let health = bench.command(json!({ "prefix": "health" })).unwrap();
        assert_eq!(health["status"], "HEALTH_ERR");
        assert!(health["checks"]["MON_OUTDATED"].is_object(), "{health}");
    }
}

#[test]
fn everything_is_there_after_a_restart() {
    let (bench, _) = Bench::with_pool();
    let again = Bench::on(bench.store.clone());
    assert_eq!(again.core.map(), bench.core.map());
    assert_eq!(again.core.extra(), bench.core.extra());
}

fn report(state: PgState, writes: u64) -> OsdReport {
    let pgs = (0..16).map(|index| PgReport { pg: pg(index), state, objects: 2, bytes: 8192 }).collect();
    OsdReport {
        used: 3 << 30,
        data: 1 << 30,
        capacity: 1 << 40,
        writes,
        bytes_written: writes * 4096,
        pgs,
        ..OsdReport::default()
    }
}

#[test]
fn status_adds_up_what_the_osds_report() {
    let (mut bench, connections) = Bench::with_pool();
    let status = bench.command(json!({ "prefix": "status" })).unwrap();
    assert_eq!(status["pgmap"]["pgs_by_state"], json!([{ "state_name": "unknown", "count": 16 }]));
    for writes in [1000, 1500] {
        for osd in 0..3 {
            let report = report(PgState::Active, writes);
            let incarnation = Incarnation(100 + u64::from(osd));
            bench.apply(Event::Report { osd: OsdId(osd), incarnation, epoch: Epoch(0), report });
        }
        bench.pass(1000);
    }
    let status = bench.command(json!({ "prefix": "status" })).unwrap();
    let pgmap = &status["pgmap"];
    assert_eq!(pgmap["pgs_by_state"], json!([{ "state_name": "active+clean", "count": 16 }]));
    assert_eq!(pgmap["num_objects"], 32, "each PG is counted by its primary alone");
    assert_eq!(pgmap["data_bytes"], 16 * 8192);
    assert_eq!(pgmap["bytes_used"], 9u64 << 30);
    assert_eq!(pgmap["bytes_total"], 3u64 << 40);
    assert_eq!(pgmap["write_op_per_sec"], 1500);
    assert_eq!(pgmap["write_bytes_sec"], 1500 * 4096);
    assert_eq!(status["osdmap"]["num_up_osds"], 3);
    assert_eq!(status["health"]["checks"]["POOL_PG_COUNT"]["severity"], "HEALTH_WARN", "16 of 128");
    bench.pass(6000);
    let status = bench.command(json!({ "prefix": "status" })).unwrap();
    assert_eq!(status["pgmap"]["write_op_per_sec"], 0, "old reports say nothing of now");
    bench.event(Event::Lost { connection: connections[1] });
    bench.pass(600);
    let status = bench.command(json!({ "prefix": "status" })).unwrap();
    assert_eq!(status["pgmap"]["pgs_by_state"], json!([{ "state_name": "down", "count": 16 }]));
    let df = bench.command(json!({ "prefix": "osd df" })).unwrap();
    assert_eq!(df["nodes"][0]["pgs"], 16);
    assert_eq!(df["nodes"][1]["status"], "down");
    assert_eq!(df["summary"]["total_kb_used"], 9u64 << 20);
    bench.boot(1, 101);
    let status = bench.command(json!({ "prefix": "status" })).unwrap();
    assert_eq!(status["pgmap"]["pgs_by_state"], json!([{ "state_name": "peering", "count": 16 }]));
}

#[test]
fn health_names_what_to_run() {
    let (mut bench, connections) = Bench::with_pool();
    let create = json!({ "prefix": "pool create", "pool": "big", "size": 4, "min_size": 4 });
    bench.command(create).unwrap();
    let problem = OsdReport { problems: vec!["device failed: x".into()], ..OsdReport::default() };
    bench.event(Event::Report {
        osd: OsdId(0),
        incarnation: Incarnation(100),
        epoch: Epoch(0),
        report: problem,
    });
    bench.event(Event::Lost { connection: connections[1] });
    bench.pass(600);
    let health = bench.command(json!({ "prefix": "health" })).unwrap();
    assert_eq!(health["status"], "HEALTH_ERR");
    let checks = &health["checks"];
    let says = |code: &str, words: &str| {
        let text = checks[code]["detail"].to_string();
        assert!(text.contains(words), "{code}: {text}, expected {words}");
    };
    says("OSD_DOWN", "loligo osd run --id 1");
    says("OSD_PROBLEM", "osd.0: device failed: x");
    says("PG_AVAILABILITY", "is down, waiting for osd.1");
    says("PG_AVAILABILITY", "more");
    says("POOL_PG_COUNT", "loligo pool create NEW --pg-count 128");
    says("POOL_UNPLACEABLE", "it needs 4 hosts, there are 3");
    says("AUTH_NONE", "loopback");
    assert_eq!(checks["AUTH_NONE"]["muted"], true);
    assert_eq!(health["mutes"][0]["code"], "AUTH_NONE");
}

#[test]
fn a_new_cluster_is_healthy() {
    let mut bench = Bench::new();
    let health = bench.command(json!({ "prefix": "health" })).unwrap();
    assert_eq!(health["status"], "HEALTH_OK", "{health}");
    let dump = bench.command(json!({ "prefix": "osd dump" })).unwrap();
    assert_eq!((&dump["epoch"], &dump["max_osd"]), (&json!(1), &json!(0)));
    assert_eq!(bench.command(json!({ "prefix": "osd df" })).unwrap()["nodes"], json!([]));
    assert_eq!(bench.command(json!({ "prefix": "mon dump" })).unwrap()["mons"][0]["name"], "a");
}

#[test]
fn the_tree_has_racks_only_when_they_are_named() {
    let mut bench = Bench::new();
    for osd in 0..4 {
        let rack = if osd < 2 { "default" } else { "r1" };
        let info = BootInfo { rack: rack.into(), host: format!("host{}", osd / 2), ..info(osd) };
        assert_eq!(bench.boot_as(osd, 100, info).1, BootStatus::Taken);
    }
    let tree = bench.command(json!({ "prefix": "osd tree" })).unwrap();
    let nodes = tree["nodes"].as_array().unwrap();
    let lines: Vec<String> = nodes
        .iter()
        .map(|node| format!("{} {} {}", node["depth"], node["type"], node["name"]).replace('"', ""))
        .collect();
    let expected = [
        "0 root default",
        "1 host host0",
        "2 osd osd.0",
        "2 osd osd.1",
        "1 rack r1",
        "2 host host1",
        "3 osd osd.2",
        "3 osd osd.3",
    ];
    assert_eq!(lines, expected);
    for node in nodes.iter().filter(|node| node["type"] != "osd") {
        for child in node["children"].as_array().unwrap() {
            assert!(nodes.iter().any(|node| node["id"] == *child), "{child} is missing");
        }
    }
    let dump = bench.command(json!({ "prefix": "pg dump" })).unwrap();
    assert_eq!(dump, json!({ "pg_stats": [] }));
}
