//! `loligo dev …`: a whole cluster on files in one folder, as background processes.

use crate::args::{DevCommand, DevStartArgs, Global, MkfsArgs};
use crate::cluster::{self, Connection, Target};
use crate::daemon;
use crate::osd;
use crate::output::{self, Align, Failure, Outcome, Table};
use crate::process::{self, Identity, PidFile, Tie};
use loligo_config::file::{Backend, HostFile, MonSection, OsdSection, PollMode};
use loligo_config::id::{ClusterId, OsdId};
use loligo_config::units::ByteLen;
use serde_json::{Value, json};
use std::fmt;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Memory that an OSD of a development cluster aims to stay below.
const MEMORY_TARGET: ByteLen = ByteLen(256 << 20);
/// OSDs of a new cluster.
const OSDS: u32 = 3;
/// Bytes of each one's file.
const OSD_LEN: u64 = 1 << 30;
/// Where ports are looked for: registered ones of no well-known service, below the range of connections, which begins at
/// 32768 on Linux (`net.ipv4.ip_local_port_range`).
const FREE_PORTS: Range<u16> = 20_000..32_000;
/// How long the cluster may take until all OSDs are up.
const UP_MAX: Duration = Duration::from_secs(30);

/// `loligo dev …`
///
/// # Errors
/// When the cluster cannot be made, started or stopped.
pub fn run(global: &Global, command: DevCommand) -> Outcome {
    match command {
        DevCommand::Start(args) => start(global, &args),
        DevCommand::Stop { dir, remove } => stop(global, &dir.dir, remove),
        DevCommand::Status { dir } => status(global, &dir.dir),
    }
}

/// A development cluster's folder.
pub struct Folder {
    path: PathBuf,
    host: HostFile,
}

/// What a new cluster is like.
pub struct Shape {
    /// How many OSDs.
    pub osds: u32,
    /// Bytes of each OSD's file.
    pub size: u64,
    /// The mon's port; `None`: any free ones.
    pub port: Option<u16>,
    /// What reactors do when idle.
    pub poll: PollMode,
    /// Whether files are not written fully.
    pub sparse: bool,
    /// Whether files get a volatile cache before them.
    pub volatile_cache: bool,
}

impl Folder {
    fn conf(path: &Path) -> PathBuf {
        path.join("loligo.toml")
    }

    /// A cluster that was made before.
    ///
    /// # Errors
    /// When there is none, or its host file is wrong.
    pub fn open(path: &Path) -> Outcome<Self> {
        if !Self::conf(path).exists() {
            return Err(Failure::new(
                format!("there is no development cluster in {}", path.display()),
                "make one with `loligo dev start`, or name its folder with --dir",
            ));
        }
        let host = cluster::read_host_file(&Self::conf(path))?;
        let path = path.canonicalize().map_err(Failure::plain)?;
        Ok(Self { path, host })
    }

    /// Makes the folder of a new one: host file, folders, no devices yet.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn make(path: &Path, shape: &Shape) -> Outcome<Self> {
        let failed = |error: std::io::Error| {
            Failure::new(
                format!("cannot make {}: {error}", path.display()),
                "choose another folder with --dir",
            )
        };
        for name in ["", "mon", "log", "run"] {
            std::fs::create_dir_all(path.join(name)).map_err(failed)?;
        }
        let path = path.canonicalize().map_err(failed)?;
        let host = host_file(&path, shape)?;
        // Last, under its name in one step: a folder with a host file is a complete one.
        let new = path.join("loligo.toml.new");
        std::fs::write(&new, host.to_toml())
            .and_then(|()| std::fs::rename(&new, Self::conf(&path)))
            .map_err(failed)?;
        Ok(Self { path, host })
    }

    /// Where its mon listens.
    pub fn mons(&self) -> Vec<SocketAddr> {
        self.host.cluster.mons.clone()
    }

    /// How to reach it.
    pub fn target(&self) -> Target {
        Target { mons: self.mons(), cluster: self.host.cluster.id }
    }

    /// Its OSDs' ids.
    pub fn osds(&self) -> Vec<OsdId> {
        self.host.osds.iter().map(|osd| osd.id).collect()
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The log of a daemon.
    pub fn log(&self, name: &str) -> PathBuf {
        self.path.join("log").join(format!("{name}.log"))
    }

    /// The pid file of a daemon.
    fn pid_file(&self, name: &str) -> PidFile {
        PidFile(self.path.join("run").join(format!("{name}.pid")))
    }

    /// Its daemons, in the order in which they are started.
    fn names(&self) -> Vec<String> {
        let osds = self.host.osds.iter().map(|osd| osd.id.to_string());
        std::iter::once("mon".to_owned()).chain(osds).collect()
    }

    /// The command line of the mon.
    pub fn mon_arguments(&self) -> Vec<String> {
        self.arguments(&["mon", "run"])
    }

    /// The command line of an OSD.
    pub fn osd_arguments(&self, osd: OsdId) -> Vec<String> {
        self.arguments(&["osd", "run", "--id", &osd.0.to_string()])
    }

    fn arguments(&self, words: &[&str]) -> Vec<String> {
        let conf = Self::conf(&self.path).display().to_string();
        words.iter().copied().chain(["--conf", &conf]).map(str::to_owned).collect()
    }

    /// Where this cluster is not what was asked for: the option, what it has, what was asked. What was not asked for
    /// may be anything.
    ///
    /// # Errors
    /// When a device cannot be looked at.
    fn differences(&self, asked: &DevStartArgs) -> Outcome<Vec<Difference>> {
        let mut found = Vec::new();
        let mut compare = |option, has: String, asked: Option<String>| {
            let difference =
                asked.filter(|asked| *asked != has).map(|asked| Difference { option, has, asked });
            // OSDs differ alike.
            found.extend(difference.filter(|difference| !found.contains(difference)));
        };
        let host = &self.host;
        compare("--osds", host.osds.len().to_string(), asked.osds.map(|osds| osds.to_string()));
        let port = host.cluster.mons.first().map(SocketAddr::port).unwrap_or_default();
        compare("--port", port.to_string(), asked.port.map(|port| port.to_string()));
        let poll = asked.poll.map(|poll| poll.as_str().to_owned());
        compare("--poll", host.reactor.poll.as_str().to_owned(), poll);
        let cached = host.osds.iter().all(|osd| osd.backend == Backend::Model);
        compare("--volatile-cache", yes(cached), asked.volatile_cache.then(|| yes(true)));
        for section in &host.osds {
            let about = match std::fs::metadata(&section.device) {
                Ok(about) => about,
                // An interrupted start: it is made as it is asked for now.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => {
                    return Err(Failure::new(format!("{}: {error}", section.device.display()), ""));
                }
            };
            compare("--size", exact(about.len()), asked.size.map(exact));
            // Blocks of 512 bytes, whatever the file system's are.
            let sparse = about.blocks().saturating_mul(512) < about.len();
            compare("--sparse", yes(sparse), asked.sparse.then(|| yes(true)));
        }
        Ok(found)
    }

    /// Refuses to start a cluster that is not the one asked for.
    fn check(&self, path: &Path, asked: &DevStartArgs) -> Outcome {
        let differences = self.differences(asked)?;
        if differences.is_empty() {
            return Ok(());
        }
        let differences: Vec<String> = differences.iter().map(Difference::to_string).collect();
        Err(Failure::usage(
            format!("the cluster in {} was made differently: {}", path.display(), differences.join(", ")),
            format!(
                "leave these options out to start it as it is, name another folder with --dir, or remove it with all its \
                 data: loligo dev stop --dir {} --remove",
                path.display()
            ),
        ))
    }

    /// Makes the devices that are not there yet.
    ///
    /// # Errors
    /// When a device cannot be made.
    pub fn make_devices(&self, cluster: &mut Connection, shape: &Shape) -> Outcome {
        for section in &self.host.osds {
            let ready = section.device.with_extension("new");
            if section.device.exists() {
                continue;
            }
            // Under another name until it is complete, so that an interrupted start leaves no half of a device.
            let _ = std::fs::remove_file(&ready);
            let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", ready.display()), "");
            std::fs::File::create_new(&ready).and_then(|file| file.set_len(shape.size)).map_err(failed)?;
            let args = MkfsArgs {
                id: Some(section.id.0),
                device: ready.clone(),
                size: None,
                cluster: None,
                sparse: shape.sparse,
                force: false,
                shards: None,
            };
            osd::format(&args, osd::shards(Some(&self.host), section.id), |device| {
                let request =
                    json!({ "prefix": "osd new", "id": section.id.0, "device": device.to_string() });
                let answer = cluster.command(request)?;
                osd::place_of(&answer)
            })?;
            std::fs::rename(&ready, &section.device).map_err(failed)?;
        }
        Ok(())
    }

    /// Waits until the map says that all OSDs are up and all their PGs serve.
    ///
    /// # Errors
    /// When it does not within the time, or `check` finds that a daemon has ended.
    pub fn wait_until_up(&self, cluster: &mut Connection, mut check: impl FnMut() -> Outcome) -> Outcome {
        let end = crate::world::now().after(UP_MAX);
        loop {
            check()?;
            let status = cluster.command(json!({ "prefix": "status" }))?;
            let up = output::number(&status["osdmap"], "num_up_osds");
            if up == self.host.osds.len() as u64 {
                return Ok(());
            }
            if crate::world::now() >= end {
                return Err(Failure::new(
                    format!("only {up} of {} OSDs are up after {UP_MAX:?}", self.host.osds.len()),
                    format!("look into {}", self.path.join("log").display()),
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// An option that a cluster was not made with.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    option: &'static str,
    has: String,
    asked: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, not {}", self.option, self.has, self.asked)
    }
}

fn yes(is: bool) -> String {
    if is { "on" } else { "off" }.to_owned()
}

/// Bytes as `--size` takes them, not rounded.
fn exact(len: u64) -> String {
    let units = [("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];
    match units.into_iter().find(|(_, factor)| len.is_multiple_of(*factor)) {
        Some((unit, factor)) => format!("{}{unit}", len / factor),
        None => len.to_string(),
    }
}

fn host_file(path: &Path, shape: &Shape) -> Outcome<HostFile> {
    let ports = ports(shape)?;
    let (mon, osds) = ports.split_first().expect("a port for the mon and one for each OSD");
    let mut host = HostFile::new(&daemon::host_name(), vec![*mon]);
    // Its mon makes the cluster under this id, and no device or client of another one is taken for this one's.
    host.cluster.id = Some(ClusterId(uuid::Uuid::new_v4()));
    host.mon = Some(MonSection { listen: *mon, data: path.join("mon") });
    host.reactor.poll = shape.poll;
    host.reactor.memory_target = MEMORY_TARGET;
    let section = |(id, listen): (u32, &SocketAddr)| OsdSection {
        id: OsdId(id),
        device: path.join(format!("osd.{id}")),
        listen: *listen,
        device_class: "ssd".to_owned(),
        cores: None,
        poll: None,
        memory_target: None,
        device_timeout: None,
        backend: if shape.volatile_cache { Backend::Model } else { Backend::Uring },
    };
    host.osds = (0..).zip(osds).map(section).collect();
    Ok(host)
}

fn ports(shape: &Shape) -> Outcome<Vec<SocketAddr>> {
    let count = shape.osds + 1;
    if let Some(first) = shape.port {
        let last = u32::from(first) + count - 1;
        let ports = u32::from(first)..=last;
        let ports: Option<Vec<u16>> = ports.map(|port| u16::try_from(port).ok()).collect();
        let ports = ports.ok_or_else(|| {
            Failure::usage(format!("there are no ports {first} to {last}"), "choose a smaller --port")
        })?;
        return Ok(ports.into_iter().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port))).collect());
    }
    free_ports(count).ok_or_else(|| {
        let what = format!("no {count} ports in a row are free from {} on", FREE_PORTS.start);
        Failure::new(what, "name the first one with --port")
    })
}

/// Ports in a row of which nobody listens on any. Below those that the kernel gives to connections, since a daemon that
/// is started again needs its own; where the search begins differs from process to process, so that clusters made
/// at once do not meet.
fn free_ports(count: u32) -> Option<Vec<SocketAddr>> {
    let all: Vec<SocketAddr> = FREE_PORTS.map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port))).collect();
    let count = usize::try_from(count).ok().filter(|count| *count <= all.len())?;
    let rows = all.len() / count;
    let first = std::process::id() as usize % rows;
    let row = |at| &all[(first + at) % rows * count..][..count];
    let is_free = |row: &&[SocketAddr]| row.iter().all(|address| TcpListener::bind(address).is_ok());
    (0..rows).map(row).find(is_free).map(<[SocketAddr]>::to_vec)
}

fn start(global: &Global, args: &DevStartArgs) -> Outcome {
    let shape = Shape {
        osds: args.osds.unwrap_or(OSDS),
        size: args.size.unwrap_or(OSD_LEN),
        port: args.port,
        poll: args.poll.unwrap_or_default(),
        sparse: args.sparse,
        volatile_cache: args.volatile_cache,
    };
    let path = &args.dir.dir;
    let folder = if Folder::conf(path).exists() {
        let folder = Folder::open(path)?;
        folder.check(path, args)?;
        folder
    } else {
        Folder::make(path, &shape)?
    };
    launch(&folder, "mon", &folder.mon_arguments())?;
    let target = folder.target();
    let mut cluster = cluster::connect_with(target, global.timeout, Some(UP_MAX), PollMode::Adaptive)
        .map_err(|failure| with_log(failure, &folder, "mon"))?;
    folder.make_devices(&mut cluster, &shape)?;
    for osd in folder.osds() {
        launch(&folder, &osd.to_string(), &folder.osd_arguments(osd))?;
    }
    folder.wait_until_up(&mut cluster, || all_run(&folder))?;
    let conf = Folder::conf(folder.path()).display().to_string();
    let mon = folder.mons().iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",");
    let value = json!({ "dir": folder.path().display().to_string(), "conf": conf, "mon": mon, "osds": folder.osds().len() });
    output::show(global.format, &value, |_| {
        let set = if path == Path::new("loligo-dev") {
            String::new()
        } else {
            format!("\nfor other commands: export LOLIGO_CONF={conf}")
        };
        format!("{} OSDs are up; the mon listens on {mon}{set}", folder.osds().len())
    });
    Ok(())
}

fn with_log(failure: Failure, folder: &Folder, name: &str) -> Failure {
    let tail = process::log_tail(&folder.log(name));
    Failure { advice: format!("{name} says: {tail} (whole log: {})", folder.log(name).display()), ..failure }
}

/// Starts a daemon unless it runs.
fn launch(folder: &Folder, name: &str, arguments: &[String]) -> Outcome {
    let file = folder.pid_file(name);
    if file.running().is_some() {
        return Ok(());
    }
    let child = process::start(arguments, &folder.log(name), Tie::None)?;
    match Identity::of(child.id()) {
        Some(identity) => file.write(identity),
        None => Err(with_log(Failure::new(format!("{name} ended at once"), ""), folder, name)),
    }
}

fn all_run(folder: &Folder) -> Outcome {
    match folder.names().iter().find(|name| folder.pid_file(name).running().is_none()) {
        Some(name) => Err(with_log(Failure::new(format!("{name} has ended"), ""), folder, name)),
        None => Ok(()),
    }
}

fn stop(global: &Global, path: &Path, remove: bool) -> Outcome {
    let folder = Folder::open(path)?;
    let mut stopped = Vec::new();
    // OSDs before the mon, which then sees them go in order.
    for name in folder.names().iter().rev() {
        let file = folder.pid_file(name);
        if let Some(identity) = file.running() {
            identity.stop();
            stopped.push(name.clone());
        }
        file.remove();
    }
    if remove {
        remove_folder(&folder)?;
    }
    output::show(global.format, &json!({ "stopped": stopped, "removed": remove }), |_| match stopped.len() {
        0 => "nothing was running".to_owned(),
        count => format!("{count} processes stopped"),
    });
    Ok(())
}

/// Removes what this command has made, and the folder if nothing else is in it.
fn remove_folder(folder: &Folder) -> Outcome {
    let failed =
        |error: std::io::Error| Failure::new(format!("cannot remove {}: {error}", folder.path.display()), "");
    for name in ["mon", "log", "run"] {
        let path = folder.path.join(name);
        if path.exists() {
            std::fs::remove_dir_all(path).map_err(failed)?;
        }
    }
    for section in &folder.host.osds {
        for path in [section.device.clone(), section.device.with_extension("new")] {
            if path.exists() {
                std::fs::remove_file(path).map_err(failed)?;
            }
        }
    }
    std::fs::remove_file(Folder::conf(&folder.path)).map_err(failed)?;
    let _ = std::fs::remove_dir(&folder.path); // Not if somebody else's files are in it.
    Ok(())
}

fn status(global: &Global, path: &Path) -> Outcome {
    let folder = Folder::open(path)?;
    let mut daemons = Vec::new();
    for name in folder.names() {
        let running = folder.pid_file(&name).running();
        daemons.push(json!({
            "name": name,
            "running": running.is_some(),
            "pid": running.map(|identity| identity.pid),
            "log": folder.log(&name).display().to_string(),
        }));
    }
    output::show(
        global.format,
        &json!({ "dir": folder.path.display().to_string(), "daemons": daemons }),
        plain_status,
    );
    Ok(())
}

fn plain_status(value: &Value) -> String {
    let columns =
        [("NAME", Align::Left), ("STATE", Align::Left), ("PID", Align::Right), ("LOG", Align::Left)];
    let mut table = Table::new(&columns);
    for daemon in output::list(value, "daemons") {
        let running = daemon["running"].as_bool().unwrap_or_default();
        table.row(vec![
            output::string(daemon, "name").to_owned(),
            if running { "running" } else { "stopped" }.to_owned(),
            daemon["pid"].as_u64().map(|pid| pid.to_string()).unwrap_or_default(),
            output::string(daemon, "log").to_owned(),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    #[test]
    fn free_ports_are_in_a_row_and_leave_out_those_that_are_taken() {
        let first = free_ports(4).unwrap();
        assert!(first.windows(2).all(|pair| pair[1].port() == pair[0].port() + 1), "{first:?}");
        let _taken = TcpListener::bind(first[2]).unwrap();
        let second = free_ports(4).unwrap();
        assert!(second.iter().all(|address| !first.contains(address)), "{second:?}");
        assert_eq!(free_ports(20_000), None, "more than there are");
    }

    fn shape(port: Option<u16>) -> Shape {
        Shape { osds: 3, size: 1 << 30, port, poll: PollMode::Park, sparse: true, volatile_cache: true }
    }

    #[test]
    fn the_host_file_reads_back_as_it_was_made() {
        let host = host_file(Path::new("/var/tmp/dev"), &shape(Some(7400))).unwrap();
        let again = HostFile::parse("loligo.toml", &host.to_toml()).unwrap();
        assert_eq!(again, host);
        assert_eq!(host.osds[2].listen.port(), 7403);
        assert_eq!(host.osds[2].backend, Backend::Model);
    }

    #[test]
    fn a_cluster_is_not_started_as_another_than_it_was_made() {
        let path = std::env::temp_dir().join(format!("loligo-dev-test-{}", std::process::id()));
        let folder = Folder::make(&path, &shape(Some(7400))).unwrap();
        for section in &folder.host.osds {
            std::fs::File::create_new(&section.device).and_then(|file| file.set_len(1 << 30)).unwrap();
        }
        let asked = |words: &[&str]| {
            let words = ["loligo", "dev", "start"].iter().chain(words);
            let Command::Dev(DevCommand::Start(args)) = Cli::try_parse_from(words).unwrap().command else {
                panic!("another command")
            };
            folder.check(&path, &args).map_err(|failure| failure.to_string())
        };
        assert_eq!(asked(&[]), Ok(()));
        let same = ["--osds", "3", "--size", "1G", "--poll", "park", "--port", "7400"];
        assert_eq!(asked(&same), Ok(()));
        assert_eq!(asked(&["--sparse", "--volatile-cache"]), Ok(()));
        let told =
            asked(&["--osds", "5", "--poll", "busy", "--size", "1025M", "--port", "7000"]).unwrap_err();
        for part in [
            "--osds is 3, not 5",
            "--poll is park, not busy",
            "--size is 1G, not 1025M",
            "--port is 7400, not 7000",
        ] {
            assert!(told.contains(part), "{part:?} is missing: {told}");
        }
        assert_eq!(told.matches("--size").count(), 1, "once for all OSDs: {told}");
        assert!(told.contains("dev stop --dir") && told.contains("--remove"), "{told}");
        remove_folder(&folder).unwrap();
    }

    #[test]
    fn ports_differ_and_exist() {
        let free = ports(&shape(None)).unwrap();
        assert!((0..4).all(|at| !free[..at].contains(&free[at])));
        assert_eq!(ports(&shape(Some(65_534))).unwrap_err().code, 2);
    }
}
