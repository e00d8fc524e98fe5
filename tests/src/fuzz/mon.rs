//! What a mon is sent: admin commands in JSON, boots and reports in postcard; and what its store holds beside the map.

use super::{Input, Target, chunk, map};
use loligo_config::id::*;
use loligo_mon::core::{Action, Event};
use loligo_mon::store::Extra;
use loligo_mon::{Core, MonSettings};
use loligo_net::wire::mon::{BootInfo, OsdReport, PgReport, PgState};
use loligo_reactor::env::{ConnectionId, Instant};
use std::time::Duration;

/// A mon's state machine and what peers and operators send it.
pub const CORE: Target =
    Target { name: "mon_core", run: core, seeds: core_seeds, words: WORDS, len_max: 8 << 10 };
/// What the store holds beside the map.
pub const EXTRA: Target =
    Target { name: "mon_extra", run: extra, seeds: extra_seeds, words: &[], len_max: 4 << 10 };

const COMMAND: u8 = 0;
const BOOT: u8 = 1;
const REPORT: u8 = 2;
const FAILURE: u8 = 3;
const CONNECTED: u8 = 4;
const LOST: u8 = 5;
const WAIT: u8 = 6;
const STEP_COUNT: u8 = 7;
const STEPS_MAX: usize = 64;

const WORDS: &[&[u8]] = &[
    b"\"prefix\"",
    b"\"pool create\"",
    b"\"pool set\"",
    b"\"pool rm\"",
    b"\"osd new\"",
    b"\"blocklist add\"",
    b"\"pool\"",
    b"\"size\"",
    b"\"min_size\"",
    b"\"pg_count\"",
    b"\"failure_domain\"",
    b"\"device_class\"",
    b"\"var\"",
    b"\"val\"",
    b"\"session\"",
    b"\"device\"",
    b"\"id\"",
    b"\"osd\"",
    b"\"host\"",
    b"null",
    b"true",
    b"[",
    b"{",
    b"-1",
    b"1e400",
    b"18446744073709551616",
    b"65536",
    b"400000",
    b"\"\\ud800\"",
    b"\"rbd\"",
    b"\"new\"",
];

fn core(input: &[u8]) {
    let mut input = Input(input);
    let settings = MonSettings::new(ClusterId(uuid::Uuid::from_u128(1)));
    let (map, extra) = (map::sample(), Extra { session_limit: SessionId(100), ..Extra::default() });
    let mut now = Instant(1);
    let mut core = Core::new(settings, now, 1_700_000_000, map, extra);
    let mut out = Vec::new();
    let mut asked = 0;
    for number in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        step(&mut core, &mut input, &mut now, number as u64, &mut asked, &mut out);
        commit(&mut core, now, &mut out);
    }
    for _ in 0..4 {
        now = now.after(Duration::from_secs(10));
        core.tick(now, 1_700_000_100);
        commit(&mut core, now, &mut out);
    }
    let mut numbers: Vec<_> = out.iter().filter_map(number_of).collect();
    let count = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    // A fence is answered when the OSDs that are up have it: these here may never say so.
    assert!(numbers.len() == count && count <= asked, "no command is answered twice");
    check_answers(&out);
}

fn step(
    core: &mut Core,
    input: &mut Input<'_>,
    now: &mut Instant,
    number: u64,
    asked: &mut usize,
    out: &mut Vec<Action>,
) {
    let step = input.u8();
    let connection = ConnectionId(u64::from(step / STEP_COUNT) % 8);
    let osd = |input: &mut Input<'_>| (OsdId(u32::from(input.u8())), Incarnation(u64::from(input.u8())));
    let event = match step % STEP_COUNT {
        COMMAND => {
            *asked += 1;
            Event::Command { connection, number, request: input.chunk() }
        }
        BOOT => {
            let (osd, incarnation) = osd(input);
            let info = round_trip::<BootInfo>(input.chunk());
            Event::Boot { connection, osd, incarnation, info }
        }
        REPORT => {
            let (osd, incarnation) = osd(input);
            let Some(report) = round_trip::<OsdReport>(input.chunk()) else { return };
            let epoch = Epoch(u32::from(incarnation.0 as u8));
            Event::Report { osd, incarnation, epoch, report }
        }
        FAILURE => {
            let (osd, incarnation) = osd(input);
            Event::Failure { reporter: OsdId(u32::from(input.u8() % 4)), osd, incarnation }
        }
        CONNECTED => {
            let (osd, incarnation) = osd(input);
            Event::Connected { connection, osd, incarnation }
        }
        LOST => Event::Lost { connection },
        WAIT => {
            *now = now.after(Duration::from_millis(u64::from(input.u16())));
            return core.tick(*now, 1_700_000_001);
        }
        _ => unreachable!("the remainder is less than STEP_COUNT"),
    };
    core.apply(*now, 1_700_000_001, event, out);
}

/// As the mon's poller does: what is drafted must be a map that everybody accepts.
fn commit(core: &mut Core, now: Instant, out: &mut Vec<Action>) {
    let before = core.map().epoch;
    let Some(commit) = core.draft(now) else { return };
    commit.map.check().expect("a mon drafts valid maps only");
    assert!(commit.map.epoch >= before && commit.map.epoch.0 <= before.0 + 1, "epochs rise one by one");
    let stored = postcard::to_stdvec(&commit.extra).expect("memory");
    assert_eq!(postcard::from_bytes::<Extra>(&stored).as_ref(), Ok(&commit.extra));
    core.committed(out);
    assert_eq!(core.map(), &commit.map);
}

fn number_of(action: &Action) -> Option<u64> {
    match action {
        Action::CommandReply { number, .. } => Some(*number),
        _ => None,
    }
}

fn check_answers(out: &[Action]) {
    for action in out {
        if let Action::CommandReply { answer, .. } = action {
            let object = answer.as_object().expect("an answer is an object");
            assert!(object.contains_key("ok") != object.contains_key("error"), "{answer}");
            if let Some(error) = object.get("error") {
                assert!(error["code"].as_i64().is_some_and(|code| code < 0), "{answer}");
                assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{answer}");
            }
        }
    }
}

fn round_trip<T>(bytes: &[u8]) -> Option<T>
where
    T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let value: T = postcard::from_bytes(bytes).ok()?;
    let again = postcard::to_stdvec(&value).expect("memory");
    assert_eq!(postcard::from_bytes::<T>(&again).as_ref(), Ok(&value));
    Some(value)
}

fn core_seeds() -> Vec<Vec<u8>> {
    let command = |text: &str| [&[COMMAND][..], &chunk(text.as_bytes())].concat();
    let mut seeds: Vec<Vec<u8>> =
        ["status", "health", "osd tree", "osd df", "osd dump", "pg dump", "blocklist ls", "mon dump", "help"]
            .iter()
            .map(|prefix| command(&format!("{{\"prefix\": \"{prefix}\"}}")))
            .collect();
    let steps = [
        r#"{"prefix": "pool create", "pool": "new", "size": 2, "min_size": 1, "pg_count": 8, "failure_domain": "osd", "device_class": "ssd"}"#,
        r#"{"prefix": "pool ls", "detail": true}"#,
        r#"{"prefix": "pool get", "pool": "rbd", "var": "size"}"#,
        r#"{"prefix": "pool set", "pool": "rbd", "var": "min_size", "val": "1"}"#,
        r#"{"prefix": "pool rm", "pool": "rbd", "pool2": "rbd", "yes_i_really_really_mean_it": true}"#,
        r#"{"prefix": "blocklist add", "session": 9}"#,
        r#"{"prefix": "blocklist rm", "session": 7, "yes_i_really_mean_it": true}"#,
        r#"{"prefix": "osd new", "device": "00000000-0000-0000-0000-000000000009", "id": 5}"#,
    ];
    seeds.extend(steps.iter().map(|step| command(step)));
    seeds.push(steps.iter().flat_map(|step| command(step)).collect());
    let info = BootInfo {
        device: DeviceId(uuid::Uuid::from_u128(2)),
        addresses: vec!["127.0.0.1:7001".parse().expect("an address")],
        capacity: 1 << 40,
        host: "host0".into(),
        rack: "default".into(),
        device_class: "ssd".into(),
        newest_map: Epoch(1),
    };
    let report = OsdReport {
        used: 5,
        pgs: vec![PgReport {
            pg: PgId { pool: PoolId(1), index: 1 },
            state: PgState::Active,
            objects: 1,
            bytes: 2,
        }],
        problems: vec!["slow".into()],
        ..OsdReport::default()
    };
    let (info, report) =
        (postcard::to_stdvec(&info).expect("memory"), postcard::to_stdvec(&report).expect("memory"));
    let boot = |osd, incarnation| [&[BOOT, osd, incarnation][..], &chunk(&info)].concat();
    let mut life = vec![CONNECTED, 0, 9];
    life.extend(boot(0, 9));
    life.extend([REPORT, 0, 9]);
    life.extend(chunk(&report));
    life.extend([FAILURE, 1, 2, 0, LOST, WAIT, 0, 16]);
    life.extend(boot(0, 10));
    seeds.push(life);
    seeds
}

fn extra(input: &[u8]) {
    round_trip::<Extra>(input);
}

fn extra_seeds() -> Vec<Vec<u8>> {
    let mut extra = Extra { session_limit: SessionId(1000), ..Extra::default() };
    extra.reserved.insert(OsdId(3), DeviceId(uuid::Uuid::from_u128(9)));
    vec![postcard::to_stdvec(&extra).expect("memory")]
}
