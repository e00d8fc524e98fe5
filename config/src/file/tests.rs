use super::*;
use proptest::prelude::*;

const DEV: &str = include_str!("../../examples/dev.toml");
const THREE_HOSTS: &str = include_str!("../../examples/three-hosts.toml");

const BASE: &str = "[cluster]\nmons = [\"127.0.0.1:7400\"]\n[host]\nname = \"a\"\n";
const OSD: &str = "[[osd]]\nid = 0\ndevice = \"/d\"\nlisten = \"127.0.0.1:1\"\n";

fn parse(text: &str) -> Result<HostFile, FileError> {
    HostFile::parse("host.toml", text)
}

/// The message for `text` after the file and line, which are checked.
fn message(text: &str, line: u32) -> String {
    let error = parse(text).expect_err("the text is wrong");
    let message = error.to_string();
    let prefix = format!("host.toml:{line}: ");
    message.strip_prefix(&prefix).unwrap_or_else(|| panic!("{message} is not at line {line}")).to_owned()
}

fn in_osd(line: &str) -> String {
    format!("{BASE}{OSD}{line}\n")
}

#[test]
fn samples_are_valid_and_mean_what_they_say() {
    let dev = parse(DEV).unwrap();
    assert_eq!(dev.osds.len(), 3);
    assert_eq!(dev.host.rack, "default");
    assert_eq!(dev.reactor.memory_target, ByteLen(256 << 20));
    assert_eq!(dev.osds[2].backend, Backend::Model);
    let three = parse(THREE_HOSTS).unwrap();
    let (fast, slow) = (&three.osds[0], &three.osds[2]);
    assert_eq!(three.poll_mode(fast), PollMode::Busy);
    assert_eq!(three.cores(fast), &Cores::Pinned(vec![CoreId(2), CoreId(3)]));
    assert_eq!(three.memory_target(fast), ByteLen(2 << 30));
    assert_eq!(fast.device_timeout, Some(Duration::from_secs(10)));
    assert_eq!(three.poll_mode(slow), PollMode::Park);
    assert_eq!(three.cores(slow), &Cores::Auto);
    assert_eq!(three.memory_target(slow), ByteLen(1 << 30));
}

#[test]
fn what_is_written_reads_back_equal() {
    for text in [DEV, THREE_HOSTS, BASE] {
        let file = parse(text).unwrap();
        assert_eq!(parse(&file.to_toml()).unwrap(), file);
    }
    let mut file = HostFile::new("a", vec!["[::1]:7400".parse().unwrap()]);
    file.reactor.memory_target = ByteLen((1 << 30) + 1);
    file.heartbeat.interval = Duration::from_micros(1_400_001);
    file.mon =
        Some(MonSection { listen: "127.0.0.1:9".parse().unwrap(), data: "/a \"b\"\\\n'\u{7}é".into() });
    assert_eq!(parse(&file.to_toml()).unwrap(), file);
}

#[test]
fn a_file_that_is_no_toml_says_where() {
    assert!(message("[cluster]\nmons = [\n\"a\" = 3", 3).starts_with("not valid TOML: "));
    assert!(message("a = 1\na = 2\n", 2).contains("duplicate key"));
}

#[test]
fn every_section_refuses_unknown_keys_with_the_nearest() {
    let cases = [
        (format!("{BASE}[reacter]\n"), 5, "unknown key `reacter`; did you mean `reactor`?"),
        (
            "[cluster]\nmon = []\n[host]\nname = \"a\"\n".into(),
            2,
            "unknown key `cluster.mon`; did you mean `mons`?",
        ),
        (format!("{BASE}rak = \"r\"\n"), 5, "unknown key `host.rak`; did you mean `rack`?"),
        (format!("{BASE}[mon]\nlissen = 1\n"), 6, "unknown key `mon.lissen`; did you mean `listen`?"),
        (
            format!("{BASE}[reactor]\nmemory_targt = \"1GiB\"\n"),
            6,
            "unknown key `reactor.memory_targt`; did you mean `memory_target`? (allowed: cores, poll, memory_target)",
        ),
        (
            in_osd("Device-Class = \"nvme\""),
            9,
            "unknown key `osd.Device-Class`; did you mean `device_class`?",
        ),
        (format!("{BASE}[network]\npublik = 1\n"), 6, "unknown key `network.publik`; did you mean `public`?"),
        (format!("{BASE}[auth]\nmod = 1\n"), 6, "unknown key `auth.mod`; did you mean `mode`?"),
        (
            format!("{BASE}[heartbeat]\ngrase = 1\n"),
            6,
            "unknown key `heartbeat.grase`; did you mean `grace`?",
        ),
        (format!("{BASE}zzz = 1\n"), 5, "unknown key `host.zzz` (allowed: name, rack)"),
    ];
    for (text, line, expected) in cases {
        let message = message(&text, line);
        assert!(message.starts_with(expected), "{message}");
        assert!(message.contains("(allowed: "), "{message}");
    }
}

#[test]
fn the_first_wrong_line_is_reported() {
    assert!(message(&format!("{BASE}[reactor]\nzeta = 1\nalpha = 1\n"), 6).contains("reactor.zeta"));
}

#[test]
fn wrong_values_say_what_is_allowed() {
    let cases = [
        (
            in_osd("poll = \"adaptiv\""),
            9,
            "`osd.poll` cannot be \"adaptiv\"; did you mean `adaptive`? (allowed: busy, adaptive, park)",
        ),
        (in_osd("poll = 3"), 9, "`osd.poll` cannot be 3; allowed: \"busy\", \"adaptive\", \"park\""),
        (
            in_osd("backend = \"ring\""),
            9,
            "`osd.backend` cannot be \"ring\"; did you mean `uring`? (allowed: uring, model)",
        ),
        (in_osd("cores = []"), 9, "`osd.cores` cannot be a list of 0; allowed: \"auto\" or a list"),
        (
            in_osd("cores = [\n1,\n1]"),
            11,
            "`osd.cores` cannot be 1; allowed: \"auto\" or a list of 1 to 64 different",
        ),
        (in_osd("cores = [-1]"), 9, "`osd.cores` cannot be -1"),
        (
            in_osd("memory_target = \"12 bananas\""),
            9,
            "`osd.memory_target` cannot be \"12 bananas\"; allowed: a size",
        ),
        (
            in_osd("memory_target = \"1MiB\""),
            9,
            "`osd.memory_target` cannot be \"1MiB\"; allowed: a size of at least 64MiB",
        ),
        (in_osd("memory_target = 1.5"), 9, "`osd.memory_target` cannot be 1.5"),
        (in_osd("device_class = \"a b\""), 9, "`osd.device_class` cannot be \"a b\"; allowed: a name"),
        (
            format!("{BASE}[[osd]]\nid = 10000\n"),
            6,
            "`osd.id` cannot be 10000; allowed: a whole number from 0 to 9999",
        ),
        (format!("{BASE}[[osd]]\nid = -1\n"), 6, "`osd.id` cannot be -1"),
        (
            format!("{BASE}[[osd]]\nid = 1\ndevice = \"\"\n"),
            7,
            "`osd.device` cannot be \"\"; allowed: a path",
        ),
        (
            format!("{BASE}[osd]\nid = 1\n"),
            5,
            "`osd` cannot be a table; allowed: sections with the header [[osd]]",
        ),
        (
            format!("{BASE}[mon]\nlisten = \"localhost\"\n"),
            6,
            "`mon.listen` cannot be \"localhost\"; allowed: an address with port",
        ),
        (format!("{BASE}[auth]\nmode = \"non\"\n"), 6, "`auth.mode` cannot be \"non\"; did you mean `none`?"),
        (
            format!("{BASE}[auth]\nallow_insecure = 1\n"),
            6,
            "`auth.allow_insecure` cannot be 1; allowed: true or false",
        ),
        (
            format!("{BASE}[heartbeat]\ninterval = \"5\"\n"),
            6,
            "`heartbeat.interval` cannot be \"5\"; allowed: a time",
        ),
        (format!("{BASE}[heartbeat]\ninterval = \"2h\"\n"), 6, "`heartbeat.interval` cannot be \"2h\""),
        (
            format!("{BASE}[network]\npublic = \"10.0.0.0\"\n"),
            6,
            "`network.public` cannot be \"10.0.0.0\"; allowed: a network",
        ),
        ("[cluster]\nid = \"x\"\n".into(), 2, "`cluster.id` cannot be \"x\"; allowed: a UUID"),
        (
            "[cluster]\nmons = []\n".into(),
            2,
            "`cluster.mons` cannot be a list of 0; allowed: a list of 1 to 16 mons",
        ),
        (
            "[cluster]\nmons = [\n\"127.0.0.1:1\",\n\"x\"]\n".into(),
            4,
            "`cluster.mons` cannot be \"x\"; allowed: an address",
        ),
        ("cluster = 3\n".into(), 1, "`cluster` cannot be 3; allowed: a section with the header [cluster]"),
        (
            "[cluster]\nmons = [\"127.0.0.1:1\"]\n[host]\nname = \"\"\n".into(),
            4,
            "`host.name` cannot be \"\"; allowed: a name",
        ),
    ];
    for (text, line, expected) in cases {
        let message = message(&text, line);
        assert!(message.starts_with(expected), "{message}\nexpected {expected}");
    }
}

#[test]
fn missing_keys_are_named_at_their_section() {
    let cases = [
        (String::new(), 1, "the key `cluster` is missing"),
        ("[cluster]\nmons = [\"127.0.0.1:1\"]\n".into(), 1, "the key `host` is missing"),
        ("\n[cluster]\n".into(), 2, "the key `cluster.mons` is missing; it holds a list"),
        (format!("{BASE}[mon]\ndata = \"/x\"\n"), 5, "the key `mon.listen` is missing; it holds an address"),
        (format!("{BASE}{OSD}[[osd]]\nid = 1\n"), 9, "the key `osd.device` is missing; it holds a path"),
    ];
    for (text, line, expected) in cases {
        let message = message(&text, line);
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn contradictions_are_refused() {
    let second = |id, device, port| {
        format!("{BASE}{OSD}[[osd]]\nid = {id}\ndevice = \"{device}\"\nlisten = \"127.0.0.1:{port}\"\n")
    };
    assert!(parse(&second(1, "/e", 2)).is_ok());
    assert!(message(&second(0, "/e", 2), 10).contains("the OSD of line 6 has this id already"));
    assert!(message(&second(1, "/d", 2), 11).contains("the OSD of line 7 has this device already"));
    assert!(message(&second(1, "/e", 1), 12).contains("the OSD of line 8 has this address already"));
    let mon = format!("{BASE}[mon]\nlisten = \"127.0.0.1:1\"\ndata = \"/x\"\n{OSD}");
    assert!(message(&mon, 11).contains("the mon has this address already"));
    let heartbeat = format!("{BASE}[heartbeat]\ninterval = \"1s\"\ngrace = \"1s\"\n");
    assert!(message(&heartbeat, 7).contains("at least twice the interval"));
}

#[test]
fn an_open_cluster_listens_beyond_loopback_only_when_told_to() {
    let file = |extra: &str| format!("{BASE}[mon]\nlisten = \"10.0.0.1:1\"\ndata = \"/x\"\n{extra}");
    assert!(message(&file(""), 6).contains("allow_insecure = true"));
    assert!(parse(&file("[auth]\nallow_insecure = true\n")).is_ok());
    let outside = "[auth]\nallow_insecure = true\n[network]\npublic = \"10.1.0.0/16\"\n";
    assert!(message(&file(outside), 6).contains("in neither of the networks"));
}

#[test]
fn hostile_values_stay_out_of_the_terminal() {
    let text = in_osd(&format!("poll = \"\\u001b[31m{}\"", "x".repeat(1000)));
    let message = message(&text, 9);
    assert!(!message.contains('\u{1b}'));
    assert!(message.len() < 400, "{message}");
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,200}") {
        let _ = parse(&text);
    }

    #[test]
    fn no_structured_text_panics(text in "([\\[\\]a-z=\"'.,{}0-9#\\n\\t \\\\_-]|osd|cluster|host|mons|cores){0,60}") {
        let _ = parse(&text);
    }

    #[test]
    fn no_mutated_sample_panics(
        which in 0usize..2,
        cuts in proptest::collection::vec((any::<proptest::sample::Index>(), 0usize..8, "\\PC{0,6}"), 1..6),
    ) {
        let mut text: Vec<char> = [DEV, THREE_HOSTS][which].chars().collect();
        for (at, remove, insert) in cuts {
            let at = at.index(text.len());
            let end = (at + remove).min(text.len());
            text.splice(at..end, insert.chars());
        }
        let text: String = text.into_iter().collect();
        if let Ok(file) = parse(&text) {
            prop_assert_eq!(parse(&file.to_toml()).unwrap(), file);
        }
    }
}
