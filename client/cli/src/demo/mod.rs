//! `loligo demo`: the whole path on this machine, from nothing to nothing, in under two minutes.

mod crash;
mod measure;
mod nbd_client;

use crate::args::{DemoArgs, Global};
use crate::cluster::{self, Connection};
use crate::dev::{Folder, Shape};
use crate::output::{self, Failure, Outcome};
use crate::process::{self, Tie};
use loligo_client::{CreateOptions, ImageHandle};
use loligo_config::id::OsdId;
use loligo_nvme::uring::{OpenDevice, UringOptions};
use loligo_reactor::env::{Entropy, Instant};
use loligo_reactor::os::OsEntropy;
use loligo_reactor::random::Random;
use nbd_client::NbdClient;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

/// Bytes of each OSD's file.
const OSD_LEN: u64 = 256 << 20;
/// Bytes of the image.
const IMAGE_LEN: u64 = 64 << 20;
/// Bytes that are written and read back through the library and through NBD.
const VERIFY_LEN: usize = 16 << 20;
/// How long things may take that should take a moment.
const PATIENCE: Duration = Duration::from_secs(30);
const POOL: &str = "rbd";
const IMAGE: &str = "demo";

/// A cluster whose daemons are children of this process.
pub struct Stage {
    folder: Folder,
    options: DemoArgs,
    mon: Option<Child>,
    osds: Vec<(OsdId, Child)>,
    nbd: Option<Child>,
    begun: Instant,
}

/// Runs the demo.
///
/// # Errors
/// When a step fails; everything is cleaned up then, too.
pub fn run(global: &Global, args: &DemoArgs) -> Outcome {
    let path = temporary_folder(&args.dir)?;
    remove_on_signal(&path, args.keep)?;
    let result = play(global, args, &path);
    if args.keep {
        eprintln!("loligo: everything is left in {}", path.display());
    } else if let Err(error) = std::fs::remove_dir_all(&path) {
        eprintln!("loligo: cannot remove {}: {error}", path.display());
    }
    result
}

fn play(global: &Global, args: &DemoArgs, path: &Path) -> Outcome {
    let mut stage = Stage::set(args, path)?;
    let mut cluster = stage.connect()?;
    let pool = json!({ "prefix": "pool create", "pool": POOL, "size": 3, "min_size": 2, "pg_count": 32, "failure_domain": "osd" });
    cluster.command(pool)?;
    cluster.create(POOL, IMAGE, CreateOptions { size: IMAGE_LEN, order: 22 })?;
    let image = cluster.open(POOL, IMAGE)?;
    stage.step("pool rbd (3 copies, min_size 2) and image rbd/demo made");
    verify_library(&stage, &mut cluster, image)?;
    verify_nbd(&mut stage, &mut cluster, image)?;
    let measured = measure::run(&stage, &mut cluster, image)?;
    cluster.close(image);
    drop(cluster);
    let crash = crash::run(&mut stage)?;
    stage.end();
    let value = json!({ "measured": measured.value, "crash": crash.to_json() });
    output::show(global.format, &value, |_| format!("{}{crash}", measured.text));
    Ok(())
}

/// A folder beside the user's files, where direct I/O works; else in /var/tmp.
fn temporary_folder(wanted: &Path) -> Outcome<PathBuf> {
    let mut refused = String::new();
    for parent in [wanted, Path::new("/var/tmp")] {
        let path = parent.join(format!("loligo-demo-{:08x}", OsEntropy::new().next_u64() as u32));
        match std::fs::create_dir(&path).map_err(Failure::plain).and_then(|()| direct_io_works(&path)) {
            Ok(()) => return path.canonicalize().map_err(Failure::plain),
            Err(failure) => refused = failure.what,
        }
        let _ = std::fs::remove_dir_all(&path); // Perhaps it could not even be made.
    }
    Err(Failure::new(
        format!("the demo finds no place for its files: {refused}"),
        "name a folder on ext4 or xfs with --dir",
    ))
}

fn direct_io_works(folder: &Path) -> Outcome {
    let path = folder.join("probe");
    let made = std::fs::write(&path, vec![0; 8192]).map_err(Failure::plain);
    let opened = made.and_then(|()| OpenDevice::open(&path, UringOptions::default()).map_err(Failure::plain));
    let _ = std::fs::remove_file(&path); // Not there if it could not be written.
    opened.map(drop)
}

/// Ctrl-C leaves nothing behind: daemons die with this process, and the folder goes first.
fn remove_on_signal(path: &Path, keep: bool) -> Outcome {
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(Failure::plain)?;
    let path = path.to_owned();
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            if !keep {
                let _ = std::fs::remove_dir_all(&path); // What is left of it is in a temporary name.
            }
            std::process::exit(130);
        }
    });
    Ok(())
}

impl Stage {
    fn set(args: &DemoArgs, path: &Path) -> Outcome<Self> {
        let shape = Shape {
            osds: 3,
            size: OSD_LEN,
            port: None,
            poll: args.poll,
            sparse: false,
            volatile_cache: false,
        };
        let folder = Folder::make(path, &shape)?;
        let mut stage = Self {
            folder,
            options: args.clone(),
            mon: None,
            osds: Vec::new(),
            nbd: None,
            begun: crate::world::now(),
        };
        stage.mon = Some(stage.start("mon", &stage.folder.mon_arguments())?);
        let mut cluster = stage.connect()?;
        stage.folder.make_devices(&mut cluster, &shape)?;
        stage.start_osds()?;
        stage.wait_until_up(&mut cluster)?;
        stage.step("a mon and three OSD processes run on files");
        Ok(stage)
    }

    fn start(&self, name: &str, arguments: &[String]) -> Outcome<Child> {
        process::start(arguments, &self.folder.log(name), Tie::DiesWithParent)
    }

    /// Starts all OSDs.
    pub fn start_osds(&mut self) -> Outcome {
        for osd in self.folder.osds() {
            let child = self.start(&osd.to_string(), &self.folder.osd_arguments(osd))?;
            self.osds.push((osd, child));
        }
        Ok(())
    }

    /// SIGKILL to all OSDs, and waits until they are gone.
    pub fn kill_osds(&mut self) -> Outcome {
        self.osds.iter_mut().try_for_each(|(_, child)| child.kill()).map_err(Failure::plain)?;
        self.osds.iter_mut().try_for_each(|(_, child)| child.wait().map(drop)).map_err(Failure::plain)?;
        self.osds.clear();
        Ok(())
    }

    /// Waits until all OSDs are up.
    pub fn wait_until_up(&mut self, cluster: &mut Connection) -> Outcome {
        let osds = &mut self.osds;
        let folder = &self.folder;
        folder.wait_until_up(cluster, || {
            for (osd, child) in osds.iter_mut() {
                if let Some(status) = child.try_wait().map_err(Failure::plain)? {
                    let tail = process::log_tail(&folder.log(&osd.to_string()));
                    return Err(Failure::new(format!("{osd} has ended ({status})"), tail));
                }
            }
            Ok(())
        })
    }

    /// A new client.
    pub fn connect(&self) -> Outcome<Connection> {
        let target = self.folder.target();
        cluster::connect_with(target, PATIENCE, None, self.options.poll).map_err(|failure| Failure {
            advice: format!("the mon says: {}", process::log_tail(&self.folder.log("mon"))),
            ..failure
        })
    }

    /// Where everything is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// How the demo was asked for.
    pub fn options(&self) -> &DemoArgs {
        &self.options
    }

    /// Says what was done.
    pub fn step(&self, what: &str) {
        let seconds = crate::world::now().since(self.begun).as_secs_f64();
        if output::shows_progress() {
            eprintln!("[{seconds:5.1} s] {what}");
        }
    }

    /// Ends all daemons.
    fn end(&mut self) {
        let osds = self.osds.iter_mut().map(|(_, child)| child);
        for child in self.nbd.iter_mut().chain(osds).chain(self.mon.iter_mut()) {
            // Errors mean that it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.end();
    }
}

fn random_bytes(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Random::new(OsEntropy::new().next_u64()).fill(&mut bytes);
    bytes
}

fn check(what: &str, found: &[u8], expected: &[u8]) -> Outcome {
    match found.iter().zip(expected).position(|(found, expected)| found != expected) {
        None if found.len() == expected.len() => Ok(()),
        at => Err(Failure::new(
            format!(
                "{what}: other bytes came back than were written, first at byte {}",
                at.unwrap_or(found.len())
            ),
            "this must never happen: keep everything (--keep) and report it",
        )),
    }
}

fn verify_library(stage: &Stage, cluster: &mut Connection, image: ImageHandle) -> Outcome {
    let data = random_bytes(VERIFY_LEN);
    cluster.write_at(image, 0, &data)?;
    let mut back = vec![0; data.len()];
    cluster.read_at(image, 0, &mut back)?;
    check("the library", &back, &data)?;
    stage.step("16 MiB written and verified through the library");
    Ok(())
}

fn verify_nbd(stage: &mut Stage, cluster: &mut Connection, image: ImageHandle) -> Outcome {
    let socket = stage.path().join("nbd.sock");
    let conf = stage.path().join("loligo.toml");
    let export = format!("{POOL}/{IMAGE}");
    let texts =
        ["nbd", &export, "--socket", &socket.display().to_string(), "--conf", &conf.display().to_string()];
    stage.nbd = Some(stage.start("nbd", &texts.map(str::to_owned))?);
    let end = crate::world::now().after(PATIENCE);
    let mut nbd = loop {
        match NbdClient::connect(&socket, &export) {
            Ok(nbd) => break nbd,
            Err(_) if crate::world::now() < end => std::thread::sleep(Duration::from_millis(20)),
            Err(error) => {
                let tail = process::log_tail(&stage.folder.log("nbd"));
                return Err(Failure::new(format!("the NBD server does not answer: {error}"), tail));
            }
        }
    };
    let failed = |error: std::io::Error| Failure::new(format!("NBD: {error}"), "");
    let mut library = vec![0; VERIFY_LEN];
    cluster.read_at(image, 0, &mut library)?;
    let mut seen = vec![0; VERIFY_LEN];
    nbd.read_at(0, &mut seen).map_err(failed)?;
    check("NBD, reading what the library wrote", &seen, &library)?;
    let data = random_bytes(VERIFY_LEN);
    nbd.write_at(VERIFY_LEN as u64 + 512, &data).map_err(failed)?;
    nbd.flush().map_err(failed)?;
    nbd.read_at(VERIFY_LEN as u64 + 512, &mut seen).map_err(failed)?;
    check("NBD", &seen, &data)?;
    cluster.read_at(image, VERIFY_LEN as u64 + 512, &mut library)?;
    check("the library, reading what NBD wrote", &library, &data)?;
    nbd.disconnect().map_err(failed)?;
    if let Some(mut child) = stage.nbd.take() {
        child.kill().and_then(|()| child.wait()).map_err(failed)?;
    }
    stage.step("16 MiB written and verified over NBD, each side seeing the other's writes");
    Ok(())
}
