//! `loligo osd mkfs`

use super::device::{Source, drive};
use crate::args::{Global, MkfsArgs};
use crate::cluster;
use crate::output::{self, Failure, Outcome, Progress, bytes, string};
use loligo_config::file::{Backend, Cores, HostFile};
use loligo_config::id::{ClusterId, DeviceId, OsdId};
use loligo_osd::store::Superblock;
use loligo_osd::store::format::{Contents, FormatOptions, Mkfs, Probe, ProbeError};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::BlockDevice;
use serde_json::{Value, json};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Buffers for mkfs: zeroes and a few blocks.
const POOL_LEN_MAX: usize = 64 << 20;

/// Formats a device as the command says.
///
/// # Errors
/// When the device cannot be used or holds something, or the mon does not give the id.
pub fn run(global: &Global, args: &MkfsArgs) -> Outcome {
    let host = cluster::host_file(global)?;
    let of_host = args.id.map_or(1, |id| shards(host.as_ref(), OsdId(id)));
    let shards = args.shards.unwrap_or(of_host);
    let made = make_file(args)?;
    let result = format(args, shards, |device| match (args.cluster, args.id) {
        (Some(cluster), Some(id)) => Ok(Place { cluster, osd: OsdId(id) }),
        _ => ask_mon(global, args.id, device),
    });
    if let (Err(_), Some(path)) = (&result, &made) {
        let _ = std::fs::remove_file(path); // It was not there before.
    }
    let (Place { cluster, osd }, device) = result?;
    let value = json!({ "osd": osd.0, "cluster": cluster.to_string(), "device": device.to_string(), "shards": shards });
    output::show(global.format, &value, |_| {
        format!("{osd} of cluster {cluster} is ready on {}", args.device.display())
    });
    Ok(())
}

/// As many shards as the host file gives the OSD reactors.
pub fn shards(host: Option<&HostFile>, osd: OsdId) -> u16 {
    let cores = host.and_then(|host| host.osd(osd).map(|section| host.cores(section)));
    match cores {
        Some(Cores::Pinned(cores)) => u16::try_from(cores.len()).unwrap_or(1),
        Some(Cores::Auto) | None => 1,
    }
}

/// Makes the file if it is not there and a size was given; returns its path if so.
fn make_file(args: &MkfsArgs) -> Outcome<Option<PathBuf>> {
    let path = &args.device;
    let failed = |error: std::io::Error| {
        Failure::new(format!("cannot make {}: {error}", path.display()), "choose another --device")
    };
    match (std::fs::metadata(path), args.size) {
        (Ok(about), Some(size)) if about.is_file() && about.len() != size => Err(Failure::new(
            format!(
                "{} is there already and has {}, not {}",
                path.display(),
                bytes(about.len()),
                bytes(size)
            ),
            "leave --size out to use it as it is, or remove it first",
        )),
        (Ok(_), _) => Ok(None),
        (Err(error), Some(size)) if error.kind() == std::io::ErrorKind::NotFound => {
            let file = File::create_new(path).map_err(failed)?;
            if let Err(error) = file.set_len(size) {
                let _ = std::fs::remove_file(path); // It was not there before.
                return Err(failed(error));
            }
            Ok(Some(path.clone()))
        }
        (Err(error), None) if error.kind() == std::io::ErrorKind::NotFound => Err(Failure::new(
            format!("there is no device {}", path.display()),
            "give its path, or --size SIZE to make a file of that size",
        )),
        (Err(error), _) => Err(failed(error)),
    }
}

/// Which OSD of which cluster a device is for.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    cluster: ClusterId,
    osd: OsdId,
}

/// What the mon answers to `osd new`.
///
/// # Errors
/// When it names no place.
pub fn place_of(answer: &Value) -> Outcome<Place> {
    let cluster = uuid::Uuid::parse_str(string(answer, "cluster")).ok();
    let osd = answer.get("id").and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
    let place = cluster.zip(osd).map(|(cluster, osd)| Place { cluster: ClusterId(cluster), osd: OsdId(osd) });
    let missing = || Failure::new("the mon's answer names no cluster and OSD", "is it of the same version?");
    place.ok_or_else(missing)
}

fn ask_mon(global: &Global, id: Option<u32>, device: DeviceId) -> Outcome<Place> {
    let request = json!({ "prefix": "osd new", "id": id, "device": device.to_string() });
    place_of(&cluster::connect(global)?.command(request)?)
}

/// Looks at the device, asks whose it is to be when it can be used, and writes it.
///
/// # Errors
/// When the device cannot be used or holds something. It is unchanged then, unless it failed.
pub fn format(
    args: &MkfsArgs,
    shards: u16,
    place: impl FnOnce(DeviceId) -> Outcome<Place>,
) -> Outcome<(Place, DeviceId)> {
    let ring = cluster::ring(128)?;
    let pool = BufferPool::new(POOL_LEN_MAX);
    let source = Source::open(&args.device, Backend::Uring)?;
    let about =
        |what: String, advice: &str| Failure::new(format!("{}: {what}", args.device.display()), advice);
    let device = source.queue(&ring, &pool);
    let blocks = device.geometry().blocks.0;
    if blocks < Superblock::blocks_min(shards) {
        let least = bytes(Superblock::blocks_min(shards) * 4096);
        let what =
            format!("too small: it has {}, {shards} shard(s) need at least {least}", bytes(blocks * 4096));
        return Err(about(what, "use a larger device, or a larger --size"));
    }
    let mut probe = Probe::new(device, pool.clone());
    let found = match drive(&ring, false, |now| probe.poll(now)) {
        Ok(probed) => Some(
            Contents::Loligo { cluster: probed.superblock.cluster, osd: probed.superblock.osd }.to_string(),
        ),
        Err(ProbeError::Contents(Contents::Empty)) => None,
        Err(error @ ProbeError::Device { .. }) => return Err(about(error.to_string(), "use another device")),
        Err(ProbeError::Contents(contents)) => Some(contents.to_string()),
        Err(error) => Some(error.to_string()),
    };
    if let Some(found) = found.filter(|_| !args.force) {
        return Err(about(found, "nothing was changed; add --force to overwrite it"));
    }
    let id = DeviceId(uuid::Uuid::new_v4());
    let place = place(id)?;
    let options = FormatOptions {
        cluster: place.cluster,
        osd: place.osd,
        device: id,
        shards,
        write_fully: !args.sparse,
        force: args.force,
    };
    write(&source, &ring, pool, options, &args.device)?;
    if args.sparse && output::shows_progress() {
        eprintln!("loligo: {} is sparse: the first write to each place will be slow", args.device.display());
    }
    Ok((place, id))
}

fn write(
    source: &Source,
    ring: &loligo_reactor::os::ring::Ring,
    pool: BufferPool,
    options: FormatOptions,
    path: &Path,
) -> Outcome {
    let mut mkfs = Mkfs::new(source.queue(ring, &pool), options, pool);
    let mut progress = Progress::new(&format!("writing {}", path.display()), true);
    let result = drive(ring, false, |now| {
        let at = mkfs.poll(now);
        progress.set(at.written * 4096, at.total * 4096);
        at.done
    });
    drop(progress);
    result.map(drop).map_err(|error| Failure::new(format!("{}: {error}", path.display()), ""))
}
