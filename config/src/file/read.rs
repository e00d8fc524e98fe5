//! Reading a host file: the document's tables are walked key by key, each with the line it is on.

use super::error::{FileError, Problem, nearest};
use super::{
    AuthSection, Backend, Cidr, ClusterSection, Cores, HeartbeatSection, HostFile, HostSection,
    MEMORY_TARGET_MIN, MonSection, NetworkSection, OsdSection, PollMode, ReactorSection,
};
use crate::id::{ClusterId, CoreId, OsdId};
use crate::limits::{OSDS_MAX, SHARDS_MAX};
use crate::map::{AuthMode, check_name};
use crate::units::ByteLen;
use bytesize::ByteSize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub(super) const RACK_DEFAULT: &str = "default";
const CLASS_DEFAULT: &str = "ssd";
/// A host file above this is not one: the whole file is parsed before anything is looked at.
const FILE_LEN_MAX: usize = 1 << 20;

const POLL_MODES: [(&str, PollMode); 3] =
    [("busy", PollMode::Busy), ("adaptive", PollMode::Adaptive), ("park", PollMode::Park)];
const BACKENDS: [(&str, Backend); 2] = [("uring", Backend::Uring), ("model", Backend::Model)];
const AUTH_MODES: [(&str, AuthMode); 1] = [("none", AuthMode::None)];

const ADDRESS: &str = "an address with port, such as \"127.0.0.1:7400\" or \"[::1]:7400\"";
const NAME: &str =
    "a name of 1 to 128 letters, digits, `-`, `_` and `.`, which begins with a letter or digit";
const SIZE: &str = "a size of at least 64MiB, such as \"1GiB\"";
const DURATION: &str = "a time of 1ms to 1h, such as \"500ms\" or \"3s\"";
const CORES: &str = "\"auto\" or a list of 1 to 64 different core numbers, such as [2, 3]";
const NETWORK: &str = "a network, such as \"10.0.0.0/24\"";
const PATH: &str = "a path, such as \"/dev/nvme0n1\"";

pub(super) fn host_file(file: &str, text: &str) -> Result<HostFile, FileError> {
    let source = Source { file, text };
    if text.len() > FILE_LEN_MAX {
        let message = format!("{} bytes are too many for a host file; allowed: up to 1 MiB", text.len());
        return Err(source.error(0, String::new(), Problem::Syntax { message }));
    }
    let document = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        source.error(at, String::new(), Problem::Syntax { message: error.message().to_owned() })
    })?;
    let root = Table { source, path: "", at: 0, table: document.get_ref() };
    root.check_keys(&["cluster", "host", "mon", "reactor", "osd", "network", "auth", "heartbeat"])?;
    let file = HostFile {
        cluster: cluster(&root.required_table("cluster")?)?,
        host: host(&root.required_table("host")?)?,
        mon: root.table("mon")?.as_ref().map(mon).transpose()?,
        reactor: root.table("reactor")?.as_ref().map_or(Ok(ReactorSection::default()), reactor)?,
        osds: osds(&root)?,
        network: root.table("network")?.as_ref().map_or(Ok(NetworkSection::default()), network)?,
        auth: root.table("auth")?.as_ref().map_or(Ok(AuthSection::default()), auth)?,
        heartbeat: root.table("heartbeat")?.as_ref().map_or(Ok(HeartbeatSection::default()), heartbeat)?,
    };
    check_together(&root, &file)?;
    Ok(file)
}

fn cluster(table: &Table<'_>) -> Result<ClusterSection, FileError> {
    table.check_keys(&["id", "mons"])?;
    let id = table.parsed::<uuid::Uuid>("id", "a UUID, as `loligo status` prints it")?;
    let allowed = format!("a list of 1 to 16 mons, each {ADDRESS}");
    let Some(entry) = table.entry("mons") else { return Err(table.missing("mons", &allowed)) };
    let list = entry.value.as_array().filter(|list| (1..=16).contains(&list.len()));
    let mut mons = Vec::new();
    for element in list.ok_or_else(|| entry.invalid(&allowed))? {
        let element = Entry { value: element.get_ref(), at: element.span().start, ..entry.clone() };
        mons.push(element.parse::<SocketAddr>(ADDRESS)?);
    }
    Ok(ClusterSection { id: id.map(ClusterId), mons })
}

fn host(table: &Table<'_>) -> Result<HostSection, FileError> {
    table.check_keys(&["name", "rack"])?;
    let name = table.name("name")?.ok_or_else(|| table.missing("name", NAME))?;
    let rack = table.name("rack")?.unwrap_or_else(|| RACK_DEFAULT.to_owned());
    Ok(HostSection { name, rack })
}

fn mon(table: &Table<'_>) -> Result<MonSection, FileError> {
    table.check_keys(&["listen", "data"])?;
    let listen = table.parsed("listen", ADDRESS)?.ok_or_else(|| table.missing("listen", ADDRESS))?;
    let data = table.path("data")?.ok_or_else(|| table.missing("data", PATH))?;
    Ok(MonSection { listen, data })
}

fn reactor(table: &Table<'_>) -> Result<ReactorSection, FileError> {
    table.check_keys(&["cores", "poll", "memory_target"])?;
    let default = ReactorSection::default();
    Ok(ReactorSection {
        cores: table.cores("cores")?.unwrap_or(default.cores),
        poll: table.word("poll", &POLL_MODES)?.unwrap_or(default.poll),
        memory_target: table.memory_target()?.unwrap_or(default.memory_target),
    })
}

fn network(table: &Table<'_>) -> Result<NetworkSection, FileError> {
    table.check_keys(&["public", "cluster"])?;
    let public = table.parsed::<Cidr>("public", NETWORK)?;
    Ok(NetworkSection { public, cluster: table.parsed("cluster", NETWORK)? })
}

fn auth(table: &Table<'_>) -> Result<AuthSection, FileError> {
    table.check_keys(&["mode", "allow_insecure"])?;
    let mode = table.word("mode", &AUTH_MODES)?.unwrap_or_default();
    Ok(AuthSection { mode, allow_insecure: table.boolean("allow_insecure")?.unwrap_or(false) })
}

fn heartbeat(table: &Table<'_>) -> Result<HeartbeatSection, FileError> {
    table.check_keys(&["interval", "grace"])?;
    let default = HeartbeatSection::default();
    let interval = table.duration("interval")?.unwrap_or(default.interval);
    let grace = table.duration("grace")?.unwrap_or(default.grace);
    if grace < interval.saturating_mul(2) {
        let message = "the grace must be at least twice the interval: one lost heartbeat is no failure";
        return Err(table.conflict("grace", message));
    }
    Ok(HeartbeatSection { interval, grace })
}

fn osds(root: &Table<'_>) -> Result<Vec<OsdSection>, FileError> {
    let Some(entry) = root.entry("osd") else { return Ok(Vec::new()) };
    let allowed = "sections with the header [[osd]], in double brackets, one for each OSD";
    let list = entry.value.as_array().ok_or_else(|| entry.invalid(allowed))?;
    let mut osds = Vec::new();
    let mut seen = Seen::default();
    for element in list {
        let table = element.get_ref().as_table().ok_or_else(|| {
            Entry { value: element.get_ref(), at: element.span().start, ..entry.clone() }.invalid(allowed)
        })?;
        let table = Table { source: root.source, path: "osd", at: element.span().start, table };
        let osd = osd(&table)?;
        seen.check(&table, &osd)?;
        osds.push(osd);
    }
    Ok(osds)
}

fn osd(table: &Table<'_>) -> Result<OsdSection, FileError> {
    let keys = [
        "id",
        "device",
        "listen",
        "device_class",
        "cores",
        "poll",
        "memory_target",
        "device_timeout",
        "backend",
    ];
    table.check_keys(&keys)?;
    Ok(OsdSection {
        id: table.osd_id()?,
        device: table.path("device")?.ok_or_else(|| table.missing("device", PATH))?,
        listen: table.parsed("listen", ADDRESS)?.ok_or_else(|| table.missing("listen", ADDRESS))?,
        device_class: table.name("device_class")?.unwrap_or_else(|| CLASS_DEFAULT.to_owned()),
        cores: table.cores("cores")?,
        poll: table.word("poll", &POLL_MODES)?,
        memory_target: table.memory_target()?,
        device_timeout: table.duration("device_timeout")?,
        backend: table.word("backend", &BACKENDS)?.unwrap_or_default(),
    })
}

/// What two OSDs of one host must not share.
#[derive(Default)]
struct Seen {
    ids: BTreeMap<OsdId, u32>,
    devices: BTreeMap<PathBuf, u32>,
    addresses: BTreeMap<SocketAddr, u32>,
}

impl Seen {
    fn check(&mut self, table: &Table<'_>, osd: &OsdSection) -> Result<(), FileError> {
        let line = |key| table.source.line(table.entry(key).map_or(table.at, |entry| entry.at));
        let used = |key, before: u32, what: &str| {
            Err(table
                .conflict(key, &format!("the OSD of line {before} has this {what} already; choose another")))
        };
        if let Some(before) = self.ids.insert(osd.id, line("id")) {
            return used("id", before, "id");
        }
        if let Some(before) = self.devices.insert(osd.device.clone(), line("device")) {
            return used("device", before, "device");
        }
        // Port 0 asks the system for a free one.
        if osd.listen.port() != 0
            && let Some(before) = self.addresses.insert(osd.listen, line("listen"))
        {
            return used("listen", before, "address");
        }
        Ok(())
    }
}

/// Rules over several sections.
fn check_together(root: &Table<'_>, file: &HostFile) -> Result<(), FileError> {
    if let (Some(mon), Some(table)) = (&file.mon, root.table("mon")?) {
        check_listen(&table, file, mon.listen)?;
    }
    let sections = root.entry("osd").and_then(|entry| entry.value.as_array());
    for (osd, element) in file.osds.iter().zip(sections.into_iter().flatten()) {
        let Some(table) = element.get_ref().as_table() else { continue };
        let table = Table { source: root.source, path: "osd", at: element.span().start, table };
        check_listen(&table, file, osd.listen)?;
        if file.mon.as_ref().is_some_and(|mon| mon.listen == osd.listen && mon.listen.port() != 0) {
            return Err(table.conflict("listen", "the mon has this address already; choose another"));
        }
    }
    Ok(())
}

fn check_listen(table: &Table<'_>, file: &HostFile, listen: SocketAddr) -> Result<(), FileError> {
    if !listen.ip().is_loopback() && file.auth.mode == AuthMode::None && !file.auth.allow_insecure {
        let message = format!(
            "{listen} can be reached from other machines and `auth.mode` is \"none\": everybody there could read and \
             write all data; listen on 127.0.0.1, or set `allow_insecure = true` in [auth] on a trusted network"
        );
        return Err(table.conflict("listen", &message));
    }
    let networks = [file.network.public, file.network.cluster];
    let mut networks = networks.iter().flatten().peekable();
    if networks.peek().is_some() && !networks.any(|network| network.contains(listen.ip())) {
        let message =
            format!("{listen} is in neither of the networks of [network]; choose an address that is");
        return Err(table.conflict("listen", &message));
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Source<'a> {
    file: &'a str,
    text: &'a str,
}

impl Source<'_> {
    fn line(&self, at: usize) -> u32 {
        let before = self.text.bytes().take(at).filter(|byte| *byte == b'\n').count();
        u32::try_from(before).unwrap_or(u32::MAX).saturating_add(1)
    }

    fn error(&self, at: usize, key: String, problem: Problem) -> FileError {
        FileError { file: self.file.to_owned(), line: self.line(at), key, problem }
    }
}

/// One table, where it begins and how its keys are named in messages.
struct Table<'a> {
    source: Source<'a>,
    path: &'static str,
    at: usize,
    table: &'a DeTable<'a>,
}

/// One key with its value.
#[derive(Clone)]
struct Entry<'a> {
    source: Source<'a>,
    key: String,
    at: usize,
    value: &'a DeValue<'a>,
}

impl<'a> Table<'a> {
    fn named(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn check_keys(&self, allowed: &[&'static str]) -> Result<(), FileError> {
        let unknown = self.table.iter().filter(|(key, _)| !allowed.contains(&key.get_ref().as_ref()));
        // The table is sorted by key; the reader wants the first wrong line.
        let Some((key, _)) = unknown.min_by_key(|(key, _)| key.span().start) else { return Ok(()) };
        let word = key.get_ref().as_ref();
        let problem = Problem::UnknownKey { allowed: allowed.to_vec(), nearest: nearest(word, allowed) };
        Err(self.source.error(key.span().start, self.named(&shortened(word)), problem))
    }

    fn entry(&self, key: &str) -> Option<Entry<'a>> {
        let (_, value) = self.table.iter().find(|(found, _)| found.get_ref().as_ref() == key)?;
        Some(Entry {
            source: self.source,
            key: self.named(key),
            at: value.span().start,
            value: value.get_ref(),
        })
    }

    fn table(&self, key: &'static str) -> Result<Option<Table<'a>>, FileError> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        let wrong = || entry.invalid(&format!("a section with the header [{key}]"));
        let table = entry.value.as_table().ok_or_else(wrong)?;
        Ok(Some(Table { source: self.source, path: key, at: entry.at, table }))
    }

    fn required_table(&self, key: &'static str) -> Result<Table<'a>, FileError> {
        let missing = || self.missing(key, &format!("a section with the header [{key}]"));
        self.table(key)?.ok_or_else(missing)
    }

    fn missing(&self, key: &str, allowed: &str) -> FileError {
        self.source.error(self.at, self.named(key), Problem::Missing { allowed: allowed.to_owned() })
    }

    fn conflict(&self, key: &str, message: &str) -> FileError {
        let at = self.entry(key).map_or(self.at, |entry| entry.at);
        self.source.error(at, self.named(key), Problem::Conflict { message: message.to_owned() })
    }

    fn parsed<T: FromStr>(&self, key: &str, allowed: &str) -> Result<Option<T>, FileError> {
        self.entry(key).map(|entry| entry.parse(allowed)).transpose()
    }

    fn name(&self, key: &str) -> Result<Option<String>, FileError> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        match entry.value.as_str() {
            Some(name) if check_name(name).is_ok() => Ok(Some(name.to_owned())),
            _ => Err(entry.invalid(NAME)),
        }
    }

    fn path(&self, key: &str) -> Result<Option<PathBuf>, FileError> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        match entry.value.as_str() {
            Some(path) if !path.is_empty() && !path.contains('\0') => Ok(Some(PathBuf::from(path))),
            _ => Err(entry.invalid(PATH)),
        }
    }

    fn boolean(&self, key: &str) -> Result<Option<bool>, FileError> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        entry.value.as_bool().map(Some).ok_or_else(|| entry.invalid("true or false"))
    }

    fn word<T: Copy>(&self, key: &str, words: &[(&'static str, T)]) -> Result<Option<T>, FileError> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        let allowed: Vec<&'static str> = words.iter().map(|(word, _)| *word).collect();
        let Some(found) = entry.value.as_str() else {
            return Err(entry.invalid(&format!("\"{}\"", allowed.join("\", \""))));
        };
        if let Some((_, value)) = words.iter().find(|(word, _)| *word == found) {
            return Ok(Some(*value));
        }
        let nearest = nearest(found, &allowed);
        Err(entry.error(Problem::UnknownWord { found: shortened(found), allowed, nearest }))
    }

    fn osd_id(&self) -> Result<OsdId, FileError> {
        let allowed = format!("a whole number from 0 to {}, as `loligo osd mkfs` gave it", OSDS_MAX - 1);
        let entry = self.entry("id").ok_or_else(|| self.missing("id", &allowed))?;
        let id = integer(entry.value).and_then(|id| u32::try_from(id).ok());
        let id = id.filter(|id| usize::try_from(*id).is_ok_and(|id| id < OSDS_MAX));
        id.map(OsdId).ok_or_else(|| entry.invalid(&allowed))
    }

    fn memory_target(&self) -> Result<Option<ByteLen>, FileError> {
        let Some(entry) = self.entry("memory_target") else { return Ok(None) };
        let bytes = match entry.value {
            DeValue::Integer(_) => integer(entry.value),
            _ => Some(entry.parse::<ByteSize>(SIZE)?.as_u64()),
        };
        let bytes = bytes.filter(|bytes| *bytes >= MEMORY_TARGET_MIN.0);
        bytes.map(|bytes| Some(ByteLen(bytes))).ok_or_else(|| entry.invalid(SIZE))
    }

    fn duration(&self, key: &str) -> Result<Option<Duration>, FileError> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        let range = Duration::from_millis(1)..=Duration::from_secs(3600);
        let duration = entry.value.as_str().and_then(|text| humantime::parse_duration(text).ok());
        match duration.filter(|duration| range.contains(duration)) {
            Some(duration) => Ok(Some(duration)),
            None => Err(entry.invalid(DURATION)),
        }
    }

    fn cores(&self, key: &str) -> Result<Option<Cores>, FileError> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        if entry.value.as_str() == Some("auto") {
            return Ok(Some(Cores::Auto));
        }
        let list = entry.value.as_array().filter(|list| (1..=SHARDS_MAX).contains(&list.len()));
        let list = list.ok_or_else(|| entry.invalid(CORES))?;
        let mut cores = Vec::new();
        for element in list {
            let core = integer(element.get_ref()).and_then(|core| u16::try_from(core).ok()).map(CoreId);
            match core {
                Some(core) if !cores.contains(&core) => cores.push(core),
                _ => return Err(entry.at_element(element).invalid(CORES)),
            }
        }
        Ok(Some(Cores::Pinned(cores)))
    }
}

impl<'a> Entry<'a> {
    fn at_element(&self, element: &'a Spanned<DeValue<'a>>) -> Entry<'a> {
        Entry { value: element.get_ref(), at: element.span().start, ..self.clone() }
    }

    fn error(&self, problem: Problem) -> FileError {
        self.source.error(self.at, self.key.clone(), problem)
    }

    fn invalid(&self, allowed: &str) -> FileError {
        self.error(Problem::Value { found: described(self.value), allowed: allowed.to_owned() })
    }

    fn parse<T: FromStr>(&self, allowed: &str) -> Result<T, FileError> {
        let parsed = self.value.as_str().and_then(|text| text.parse().ok());
        parsed.ok_or_else(|| self.invalid(allowed))
    }
}

fn integer(value: &DeValue<'_>) -> Option<u64> {
    let integer = value.as_integer()?;
    u64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

fn described(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("\"{}\"", shortened(text)),
        DeValue::Integer(number) => shortened(&number.to_string()),
        DeValue::Float(number) => shortened(&number.to_string()),
        DeValue::Boolean(value) => value.to_string(),
        DeValue::Datetime(time) => time.to_string(),
        DeValue::Array(list) => format!("a list of {}", list.len()),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

/// At most 64 characters, none of which disturbs a terminal.
fn shortened(text: &str) -> String {
    let mut out: String = text.chars().take(64).flat_map(char::escape_debug).collect();
    if text.chars().count() > 64 {
        out.push('…');
    }
    out
}
