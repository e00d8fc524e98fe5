//! Real daemons as children: a mon, OSDs on files, NBD servers, each killed by its own process handle only.

use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// The executable under test: `$LOLIGO_BIN`, else the one built beside this test.
///
/// # Errors
/// When there is none, with the command that builds it.
pub fn executable() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("LOLIGO_BIN") {
        return Ok(PathBuf::from(path));
    }
    let own = std::env::current_exe()?;
    let folders = own.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("loligo")).find(|path| path.is_file());
    found.context(
        "no loligo executable beside this test: build it with `cargo build -p loligo`, or set LOLIGO_BIN",
    )
}

/// One child that ends with its handle.
pub struct Daemon {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Daemon {
    fn start(name: &str, folder: &Path, arguments: &[String]) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let output = File::options().create(true).append(true).open(&log)?;
        let child = Command::new(executable()?)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// That it still runs and nothing in it panicked; its log otherwise.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => {}
            Some(status) => bail!("{} ended with {status}:\n{}", self.name, self.log_text()),
        }
        ensure!(!self.log_text().contains("panicked"), "{} panicked:\n{}", self.name, self.log_text());
        Ok(())
    }

    /// What it has written to its log.
    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Resident memory in bytes, and CPU time used so far.
    pub fn usage(&self) -> Result<(u64, Duration)> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
        let kib: u64 = line.split_whitespace().nth(1).context("no number in VmRSS")?.parse()?;
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        let (_, fields) = stat.rsplit_once(") ").context("odd /proc/PID/stat")?;
        let fields: Vec<&str> = fields.split(' ').collect();
        let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
        Ok((kib * 1024, Duration::from_millis(ticks * 10)))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Errors mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An address of the loopback network that no other test has and that the kernel gives to nobody: each process has an
/// IPv4 address made of its id, and the ports are below those that connections get. A port asked of the kernel would be
/// free only until some connection gets it, and daemons are restarted at their addresses.
///
/// # Errors
/// When a process has taken all ports.
pub fn own_address() -> Result<SocketAddrV4> {
    static NEXT: AtomicU16 = AtomicU16::new(7000);
    let port = NEXT.fetch_add(1, Ordering::Relaxed);
    ensure!(port < 32_000, "one process has asked for too many addresses");
    // Process ids have 22 bits at most; 127.0.0.1 itself is left to others.
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ok(SocketAddrV4::new(Ipv4Addr::new(127, 64 | high, middle, low), port))
}

/// How the OSDs of a cluster are made.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// How many.
    pub osds: usize,
    /// Bytes of each device, as the command line takes them (`256M`).
    pub size: String,
    /// Devices with a volatile cache in the process's memory: SIGKILL becomes a power cut.
    pub volatile_cache: bool,
    /// Shards of each OSD, each served by a reactor of its own.
    pub shards: u16,
    /// One reactor pinned to each of these cores, as many as there are shards; none: not pinned.
    pub cores: Vec<u16>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self { osds: 3, size: "256M".into(), volatile_cache: false, shards: 1, cores: Vec::new() }
    }
}

/// A mon and its OSDs in a temporary folder on the disk that holds the build.
pub struct Cluster {
    folder: tempfile::TempDir,
    options: ClusterOptions,
    mon_address: String,
    osd_addresses: Vec<String>,
    mon: Option<Daemon>,
    osds: Vec<Option<Daemon>>,
}

impl Cluster {
    /// Formats the devices, starts everything and waits until all OSDs are up.
    pub fn start(options: ClusterOptions) -> Result<Self> {
        // Not in /tmp, which may be a tmpfs without direct I/O.
        let beside = executable()?.parent().context("the executable has a folder")?.to_owned();
        let folder = tempfile::Builder::new().prefix("cluster-").tempdir_in(beside)?;
        let mon_address = own_address()?.to_string();
        let addresses = (0..options.osds).map(|_| Ok(own_address()?.to_string()));
        let osd_addresses = addresses.collect::<Result<Vec<_>>>()?;
        let osds = (0..options.osds).map(|_| None).collect();
        let mut cluster = Self { folder, options, mon_address, osd_addresses, mon: None, osds };
        cluster.start_mon()?;
        for id in 0..cluster.osds.len() {
            cluster.format_osd(id)?;
            cluster.start_osd(id)?;
        }
        cluster.wait_until_up(Duration::from_secs(30))?;
        Ok(cluster)
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where the mon listens.
    pub fn mon_address(&self) -> &str {
        &self.mon_address
    }

    /// Where an OSD listens.
    pub fn osd_address(&self, id: usize) -> &str {
        &self.osd_addresses[id]
    }

    /// How many OSDs.
    pub fn osd_count(&self) -> usize {
        self.osds.len()
    }

    /// The device of an OSD.
    pub fn device(&self, id: usize) -> PathBuf {
        self.folder.path().join(format!("osd.{id}"))
    }

    /// Starts the mon.
    pub fn start_mon(&mut self) -> Result<()> {
        let data = self.folder.path().join("mon").display().to_string();
        let arguments = ["mon", "run", "--listen", &self.mon_address, "--data", &data].map(String::from);
        self.mon = Some(Daemon::start("mon", self.folder.path(), &arguments)?);
        Ok(())
    }

    fn format_osd(&self, id: usize) -> Result<()> {
        let device = self.device(id).display().to_string();
        let (id, shards) = (id.to_string(), self.options.shards.to_string());
        let size = &self.options.size;
        self.run(&["osd", "mkfs", "--id", &id, "--device", &device, "--size", size, "--shards", &shards])?;
        Ok(())
    }

    /// The arguments that run an OSD on a device.
    pub fn osd_arguments(&self, id: usize, device: &Path, listen: &str) -> Vec<String> {
        let device = device.display().to_string();
        let fixed = ["osd", "run", "--mon", &self.mon_address, "--listen", listen, "--device", &device];
        let mut arguments: Vec<String> = fixed.map(String::from).to_vec();
        arguments.extend(["--id".into(), id.to_string()]);
        if self.options.volatile_cache {
            arguments.push("--volatile-cache".into());
        }
        if !self.options.cores.is_empty() {
            let cores: Vec<_> = self.options.cores.iter().map(u16::to_string).collect();
            arguments.extend(["--cores".into(), cores.join(",")]);
        }
        arguments
    }

    /// Starts an OSD that was formatted before.
    pub fn start_osd(&mut self, id: usize) -> Result<()> {
        let arguments = self.osd_arguments(id, &self.device(id), &self.osd_addresses[id]);
        self.osds[id] = Some(Daemon::start(&format!("osd.{id}"), self.folder.path(), &arguments)?);
        Ok(())
    }

    /// SIGKILL to one OSD.
    pub fn kill_osd(&mut self, id: usize) -> Result<()> {
        self.osds[id].take().context("the OSD runs")?.kill()
    }

    /// SIGKILL to the mon.
    pub fn kill_mon(&mut self) -> Result<()> {
        self.mon.take().context("the mon runs")?.kill()
    }

    /// The daemons that run.
    pub fn daemons(&mut self) -> impl Iterator<Item = &mut Daemon> {
        self.mon.iter_mut().chain(self.osds.iter_mut().flatten())
    }

    /// That nothing ended by itself and nobody panicked.
    pub fn check(&mut self) -> Result<()> {
        for daemon in self.daemons() {
            daemon.check()?;
            ensure!(
                !daemon.log_text().contains("panicked"),
                "{} panicked:\n{}",
                daemon.name,
                daemon.log_text()
            );
        }
        Ok(())
    }

    /// A command's raw result.
    pub fn command(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(executable()?);
        command.args(arguments).env("LOLIGO_MON", &self.mon_address).current_dir(self.folder.path());
        command.stdin(Stdio::null()).output().with_context(|| format!("run loligo {arguments:?}"))
    }

    /// A command's output; an error when it fails.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command(arguments)?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "loligo {arguments:?} ended with {}:\n{out}{err}", output.status);
        Ok(out.into_owned())
    }

    /// A command's output as JSON.
    pub fn json(&self, arguments: &[&str]) -> Result<serde_json::Value> {
        let arguments = [arguments, &["--format", "json"]].concat();
        let text = self.run(&arguments)?;
        serde_json::from_str(&text).with_context(|| format!("loligo {arguments:?} printed no JSON: {text}"))
    }

    /// Waits until the mon says that every OSD is up.
    ///
    /// # Errors
    /// When it takes longer than `patience`, or a daemon has ended.
    pub fn wait_until_up(&mut self, patience: Duration) -> Result<()> {
        let count = self.osds.len() as u64;
        wait_for("all OSDs up", patience, || {
            self.check()?;
            let status = self.json(&["status"])?;
            Ok(status["osdmap"]["num_up_osds"].as_u64() == Some(count))
        })
    }

    /// Waits until every PG is served by all its members, and the mon knows it.
    ///
    /// # Errors
    /// With the states of the PGs, when it takes longer than `patience`.
    pub fn wait_until_clean(&self, patience: Duration) -> Result<()> {
        let mut last = serde_json::Value::Null;
        let result = wait_for("all PGs active+clean", patience, || {
            let status = self.json(&["status"])?;
            last = status["pgmap"].clone();
            let states = last["pgs_by_state"].as_array().context("no states of PGs")?;
            Ok(states.iter().all(|state| state["state_name"] == "active+clean"))
        });
        result.with_context(|| format!("the mon says {last}"))
    }

    /// A pool of three copies over OSDs of one host, and an image in it: `pool/image`.
    pub fn make_image(&self, size: &str) -> Result<String> {
        self.run(&["pool", "create", "pool", "--size", "3", "--pg-count", "16", "--failure-domain", "osd"])?;
        self.run(&["rbd", "create", "pool/image", "--size", size])?;
        Ok("pool/image".into())
    }

    /// An NBD server for images on a Unix socket and a TCP port, once it answers.
    pub fn serve_nbd(&self, images: &[&str]) -> Result<NbdServer> {
        let address = own_address()?;
        let socket = self.folder.path().join(format!("nbd-{}.sock", address.port()));
        let path = socket.display().to_string();
        let mut arguments: Vec<String> = vec!["nbd".into()];
        arguments.extend(images.iter().map(|image| image.to_string()));
        let address = address.to_string();
        arguments.extend(["--socket".into(), path, "--listen".into(), address.clone()]);
        arguments.extend(["--mon".into(), self.mon_address.clone()]);
        let mut daemon = Daemon::start("nbd", self.folder.path(), &arguments)?;
        wait_for("the NBD server", Duration::from_secs(30), || {
            daemon.check()?;
            Ok(std::os::unix::net::UnixStream::connect(&socket).is_ok())
        })?;
        Ok(NbdServer { daemon, socket, address })
    }
}

/// A running NBD server.
pub struct NbdServer {
    /// The process.
    pub daemon: Daemon,
    /// Its socket.
    pub socket: PathBuf,
    /// Where it listens on TCP.
    pub address: String,
}

impl NbdServer {
    /// The URI of an export.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }
}

/// Asks every 20 ms until it is so.
///
/// # Errors
/// The question's own, and after `patience`.
pub fn wait_for(what: &str, patience: Duration, mut so: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + patience;
    while !so().with_context(|| format!("while waiting for {what}"))? {
        ensure!(Instant::now() < end, "{what}: not within {patience:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
