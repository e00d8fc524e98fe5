//! The command line: every command, its options and its examples.

use crate::output::Format;
use clap::{Args, Parser, Subcommand, ValueEnum};
use loligo_config::file::PollMode;
use loligo_config::id::ClusterId;
use loligo_config::pool::FailureDomain;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// A distributed block store for people who wait on every commit
#[derive(Debug, Parser)]
#[command(
    name = "loligo",
    version,
    max_term_width = 110,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "Examples:
  loligo demo                                     try everything on this machine, in under two minutes
  loligo dev start --dir /var/tmp/dev             a cluster of three OSDs on files, until `loligo dev stop`
  loligo pool create rbd --failure-domain osd     a pool of three copies on that one host
  loligo rbd create rbd/disk --size 4G            a disk in it
  loligo nbd rbd/disk --listen 127.0.0.1:10809    serve it to QEMU, the kernel, nbdcopy, fio
  loligo status                                   how the cluster is"
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// What every command takes.
#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Host file [default: ./loligo-dev/loligo.toml, then /etc/loligo/loligo.toml]
    #[arg(long, global = true, value_name = "PATH", env = "LOLIGO_CONF", hide_env_values = true)]
    pub conf: Option<PathBuf>,
    /// Where a mon listens; instead of the host file's. May be given several times
    #[arg(
        long,
        global = true,
        value_name = "ADDR",
        env = "LOLIGO_MON",
        hide_env_values = true,
        value_delimiter = ','
    )]
    pub mon: Vec<SocketAddr>,
    /// How long to try to reach the cluster before giving up
    #[arg(long, global = true, value_name = "TIME", default_value = "10s", value_parser = humantime::parse_duration)]
    pub timeout: Duration,
    /// How to print
    #[arg(long, short = 'f', global = true, value_enum, default_value_t = Format::Plain)]
    pub format: Format,
    /// How a daemon writes its log
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text, hide_short_help = true)]
    pub log_format: LogFormat,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Every noun.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// How the cluster is
    #[command(after_help = "Examples:\n  loligo status\n  loligo status -w\n  loligo status --format json")]
    Status {
        /// Go on and print a line whenever something changes
        #[arg(long, short)]
        watch: bool,
    },
    /// Whether something needs attention
    #[command(after_help = "Examples:\n  loligo health\n  loligo health detail")]
    Health {
        /// Also what exactly
        #[arg(value_enum)]
        detail: Option<Detail>,
    },
    /// OSDs: see them, make them, run them
    #[command(subcommand, arg_required_else_help = true)]
    Osd(OsdCommand),
    /// The keeper of the cluster map
    #[command(subcommand, arg_required_else_help = true)]
    Mon(MonCommand),
    /// Pools
    #[command(subcommand, arg_required_else_help = true)]
    Pool(PoolCommand),
    /// Images
    #[command(subcommand, arg_required_else_help = true)]
    Rbd(RbdCommand),
    /// Serve images over NBD, in the foreground
    Nbd(NbdArgs),
    /// A whole cluster on this host, on files, for development
    #[command(subcommand, arg_required_else_help = true)]
    Dev(DevCommand),
    /// Try everything: make a cluster, write, verify, measure, kill it, verify again, clean up
    Demo(DemoArgs),
}

/// The word after `health`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Detail {
    /// Every check with its details.
    Detail,
}

/// `loligo osd …`
#[derive(Debug, Subcommand)]
pub enum OsdCommand {
    /// The failure-domain tree with its OSDs
    #[command(after_help = "Example:\n  loligo osd tree")]
    Tree,
    /// Space and PGs of each OSD
    #[command(after_help = "Example:\n  loligo osd df --format json")]
    Df,
    /// Make a device or file ready for an OSD. What is on it is lost
    Mkfs(MkfsArgs),
    /// Run an OSD, in the foreground
    Run(OsdRunArgs),
}

/// `loligo osd mkfs`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  loligo osd mkfs --device /var/lib/loligo/osd.0 --size 100G
  loligo osd mkfs --id 1 --device /dev/nvme1n1

An id belongs to the device that it was first given to, for ever. A device that is made again, with --force, is a new device:
its old data and its old id are gone, and it gets another id.")]
pub struct MkfsArgs {
    /// The OSD's number [default: the lowest that is free, reserved at the mon]
    #[arg(long)]
    pub id: Option<u32>,
    /// The device, or a file on ext4 or xfs
    #[arg(long, value_name = "PATH")]
    pub device: PathBuf,
    /// Make the file with this size if there is none, such as 100G
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub size: Option<u64>,
    /// The cluster it is for, when the mon cannot be asked; nobody checks then that the id is free
    #[arg(long, value_name = "UUID", value_parser = cluster_id, requires = "id")]
    pub cluster: Option<ClusterId>,
    /// Do not write the file fully: quick, and the first write to each place will be slow
    #[arg(long)]
    pub sparse: bool,
    /// Also when the device holds something, which is lost
    #[arg(long)]
    pub force: bool,
    /// Parts that reactors can serve independently [default: the host file's number of cores for this --id, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub shards: Option<u16>,
}

/// `loligo osd run`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  loligo osd run --id 0                                         as the host file says
  loligo osd run --id 0 --device osd.0 --listen 127.0.0.1:7410 --mon 127.0.0.1:7400")]
pub struct OsdRunArgs {
    /// The OSD's number
    #[arg(long)]
    pub id: u32,
    /// Its device; instead of the host file's
    #[arg(long, value_name = "PATH")]
    pub device: Option<PathBuf>,
    /// Where to listen; instead of the host file's
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// What reactors do when there is nothing to do
    #[arg(long, value_name = "MODE", value_parser = poll_mode)]
    pub poll: Option<PollMode>,
    /// Cores to pin reactors to, such as 2,3 [default: as many reactors as the device was made for, not pinned]
    #[arg(long, value_name = "CORES", value_delimiter = ',')]
    pub cores: Vec<u16>,
    /// Memory that buffers are cut to: they take at most half of it, at least 32 MiB for each reactor, such as 1GiB.
    /// The index of what is stored comes on top and is not limited
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory_target: Option<u64>,
    /// Listen beyond loopback although nobody proves who they are
    #[arg(long)]
    pub insecure_listen: bool,
    /// Put a volatile write cache before the file, so that a kill is a power cut: for tests
    #[arg(long, hide_short_help = true)]
    pub volatile_cache: bool,
}

/// `loligo mon …`
#[derive(Debug, Subcommand)]
pub enum MonCommand {
    /// Run a mon, in the foreground. Its first start makes a new cluster
    #[command(after_help = "Example:\n  loligo mon run --listen 127.0.0.1:7400 --data /var/lib/loligo/mon")]
    Run(MonRunArgs),
}

/// `loligo mon run`
#[derive(Debug, Args)]
pub struct MonRunArgs {
    /// Where to listen; instead of the host file's
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// The folder of its store; instead of the host file's
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Listen beyond loopback although nobody proves who they are
    #[arg(long)]
    pub insecure_listen: bool,
}

/// `loligo pool …`
#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// Make a pool
    #[command(after_help = "Examples:
  loligo pool create rbd
  loligo pool create rbd --size 3 --min-size 2 --pg-count 64 --failure-domain osd")]
    Create(PoolCreateArgs),
    /// List pools
    #[command(after_help = "Examples:\n  loligo pool ls\n  loligo pool ls detail")]
    Ls {
        /// Also how they are set up
        #[arg(value_enum)]
        detail: Option<Detail>,
    },
    /// Show one setting of a pool, or all
    #[command(after_help = "Examples:\n  loligo pool get rbd size\n  loligo pool get rbd all")]
    Get {
        /// The pool
        pool: String,
        /// The setting: size, min_size, pg_count (or pg_num), failure_domain, device_class, or all
        #[arg(default_value = "all")]
        key: String,
    },
    /// Change a setting of a pool
    #[command(after_help = "Example:\n  loligo pool set rbd min_size 2")]
    Set {
        /// The pool
        pool: String,
        /// The setting
        key: String,
        /// Its new value
        value: String,
    },
    /// Remove a pool with everything in it
    #[command(after_help = "Example:\n  loligo pool rm rbd rbd --yes-i-really-really-mean-it")]
    Rm {
        /// The pool
        pool: String,
        /// The same name again
        again: Option<String>,
        /// That all images in it will be lost is what you want
        #[arg(long)]
        yes_i_really_really_mean_it: bool,
    },
}

/// `loligo pool create`
#[derive(Debug, Args)]
pub struct PoolCreateArgs {
    /// The pool's name
    pub pool: String,
    /// Copies of all data
    #[arg(long, default_value_t = 3)]
    pub size: u8,
    /// Copies with which it still serves [default: more than half of size]
    #[arg(long)]
    pub min_size: Option<u8>,
    /// Placement groups [default: chosen from the number of OSDs]
    #[arg(long, visible_alias = "pg-num")]
    pub pg_count: Option<u32>,
    /// Where two copies may not be together
    #[arg(long, value_parser = failure_domain, default_value = "host", value_name = "osd|host|rack")]
    pub failure_domain: FailureDomain,
    /// Only OSDs of this class, such as nvme
    #[arg(long, value_name = "CLASS")]
    pub device_class: Option<String>,
}

/// `pool/image`, or `--pool POOL --image IMAGE`.
#[derive(Clone, Debug, Args)]
pub struct ImageArgs {
    /// The image, as POOL/IMAGE
    #[arg(value_name = "POOL/IMAGE", required_unless_present = "image")]
    pub spec: Option<String>,
    /// Its pool, when POOL/IMAGE has none
    #[arg(long, short)]
    pub pool: Option<String>,
    /// The image
    #[arg(long)]
    pub image: Option<String>,
}

/// `loligo rbd …`
#[derive(Debug, Subcommand)]
pub enum RbdCommand {
    /// Make an image
    #[command(after_help = "Examples:
  loligo rbd create rbd/disk --size 4G
  loligo rbd create --pool rbd --image disk --size 1T --object-size 1M")]
    Create {
        #[command(flatten)]
        image: ImageArgs,
        /// Its size, such as 4G; a number alone is in MiB
        #[arg(long, short, value_parser = size_mib)]
        size: u64,
        /// Size of its objects: a power of two from 4K to 32M
        #[arg(long, value_name = "SIZE", value_parser = object_order, default_value = "4M")]
        object_size: u8,
    },
    /// List the images of a pool
    #[command(after_help = "Examples:\n  loligo rbd ls rbd\n  loligo rbd ls -l --pool rbd")]
    Ls {
        /// The pool
        #[arg(value_name = "POOL")]
        spec: Option<String>,
        /// The pool
        #[arg(long, short)]
        pool: Option<String>,
        /// Also their sizes
        #[arg(long, short)]
        long: bool,
    },
    /// What an image is
    #[command(after_help = "Example:\n  loligo rbd info rbd/disk")]
    Info {
        #[command(flatten)]
        image: ImageArgs,
    },
    /// What an image takes, or all images of a pool
    #[command(after_help = "Examples:\n  loligo rbd du rbd/disk\n  loligo rbd du --pool rbd")]
    Du {
        /// The image as POOL/IMAGE, or a pool
        #[arg(value_name = "POOL[/IMAGE]")]
        spec: Option<String>,
        /// The pool
        #[arg(long, short)]
        pool: Option<String>,
        /// The image
        #[arg(long)]
        image: Option<String>,
    },
    /// Change an image's size
    #[command(after_help = "Examples:
  loligo rbd resize rbd/disk --size 8G
  loligo rbd resize rbd/disk --size 1G --allow-shrink")]
    Resize {
        #[command(flatten)]
        image: ImageArgs,
        /// Its new size, such as 8G; a number alone is in MiB
        #[arg(long, short, value_parser = size_mib)]
        size: u64,
        /// Also when it becomes smaller and what lies beyond is lost
        #[arg(long)]
        allow_shrink: bool,
    },
    /// Remove an image
    #[command(visible_alias = "remove", after_help = "Example:\n  loligo rbd rm rbd/disk")]
    Rm {
        #[command(flatten)]
        image: ImageArgs,
        /// Also when somebody has it open, who loses it then
        #[arg(long)]
        force: bool,
    },
    /// Give an image another name
    #[command(visible_alias = "mv", after_help = "Example:\n  loligo rbd rename rbd/disk rbd/database")]
    Rename {
        /// The image, as POOL/IMAGE
        #[arg(value_name = "POOL/IMAGE")]
        from: String,
        /// Its new name, as POOL/IMAGE or IMAGE
        #[arg(value_name = "NEW-NAME")]
        to: String,
        /// Its pool, when POOL/IMAGE has none
        #[arg(long, short)]
        pool: Option<String>,
    },
    /// Measure an image. A write test overwrites what is in it
    Bench(BenchArgs),
}

/// `loligo rbd bench`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  loligo rbd bench rbd/disk --io-type write --io-size 4K --io-threads 1 --io-total 64M --io-pattern rand
  loligo rbd bench rbd/disk --io-type readwrite --rw-mix-read 70 --io-threads 32 --format json")]
pub struct BenchArgs {
    #[command(flatten)]
    pub image: ImageArgs,
    /// What to do
    #[arg(long, value_enum)]
    pub io_type: BenchType,
    /// Bytes of one request, from 1 to 16M
    #[arg(long, value_name = "SIZE", value_parser = io_size, default_value = "4K")]
    pub io_size: u64,
    /// Requests in flight
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub io_threads: u32,
    /// Bytes in all
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "1G")]
    pub io_total: u64,
    /// Where
    #[arg(long, value_enum, default_value_t = BenchPattern::Seq)]
    pub io_pattern: BenchPattern,
    /// Of a hundred requests of `readwrite`, how many read
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub rw_mix_read: u32,
    /// What this client's reactor does when there is nothing to do
    #[arg(long, value_name = "MODE", value_parser = poll_mode, default_value = "adaptive")]
    pub poll: PollMode,
}

/// What `rbd bench` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchType {
    /// Reads.
    Read,
    /// Durable writes.
    Write,
    /// Both.
    #[value(alias = "rw")]
    Readwrite,
}

/// Where `rbd bench` does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchPattern {
    /// Anywhere.
    Rand,
    /// One behind the other.
    Seq,
}

/// `loligo nbd`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  loligo nbd rbd/disk --listen 127.0.0.1:10809
  loligo nbd rbd/disk rbd/other --socket /run/loligo.sock
  loligo nbd --pool rbd --socket /run/loligo.sock       every image of the pool
then
  qemu-img convert image.qcow2 -n -O raw 'nbd+unix:///rbd/disk?socket=/run/loligo.sock'")]
#[command(group = clap::ArgGroup::new("listener").args(["listen", "socket"]).required(true).multiple(true))]
pub struct NbdArgs {
    /// The images, as POOL/IMAGE; export names are the same
    #[arg(value_name = "POOL/IMAGE", required_unless_present = "pool")]
    pub images: Vec<String>,
    /// Every image of this pool; may be given several times
    #[arg(long, short, conflicts_with = "images")]
    pub pool: Vec<String>,
    /// Listen on TCP
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// Listen on a Unix socket
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Refuse every change
    #[arg(long)]
    pub read_only: bool,
    /// What the reactor does when there is nothing to do
    #[arg(long, value_name = "MODE", value_parser = poll_mode)]
    pub poll: Option<PollMode>,
    /// Listen beyond loopback although nobody proves who they are
    #[arg(long)]
    pub insecure_listen: bool,
}

/// `loligo dev …`
#[derive(Debug, Subcommand)]
pub enum DevCommand {
    /// Make a cluster if there is none, and start it
    Start(DevStartArgs),
    /// Stop it
    #[command(after_help = "Examples:\n  loligo dev stop\n  loligo dev stop --dir /var/tmp/dev --remove")]
    Stop {
        #[command(flatten)]
        dir: DevDir,
        /// Also remove the folder with all data
        #[arg(long)]
        remove: bool,
    },
    /// Which of its processes run
    #[command(after_help = "Example:\n  loligo dev status")]
    Status {
        #[command(flatten)]
        dir: DevDir,
    },
}

/// Where a development cluster is.
#[derive(Clone, Debug, Args)]
pub struct DevDir {
    /// Its folder, on a file system with O_DIRECT (ext4, xfs)
    #[arg(long, value_name = "DIR", default_value = "loligo-dev")]
    pub dir: PathBuf,
}

/// `loligo dev start`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  loligo dev start
  loligo dev start --dir /var/tmp/dev --osds 5 --size 4G
then, in the same folder
  loligo status")]
pub struct DevStartArgs {
    #[command(flatten)]
    pub dir: DevDir,
    /// How many OSDs [default: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub osds: Option<u32>,
    /// Size of each OSD's file [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub size: Option<u64>,
    /// First port: the mon's; OSDs get the following ones [default: any that are free]
    #[arg(long)]
    pub port: Option<u16>,
    /// What reactors do when there is nothing to do
    #[arg(long, value_name = "MODE", value_parser = poll_mode)]
    pub poll: Option<PollMode>,
    /// Do not write the files fully
    #[arg(long)]
    pub sparse: bool,
    /// Put volatile write caches before the files, so that a kill is a power cut: for tests
    #[arg(long, hide_short_help = true)]
    pub volatile_cache: bool,
}

/// `loligo demo`
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:\n  loligo demo\n  loligo demo --format json")]
pub struct DemoArgs {
    /// Where its temporary folder is made, on a file system with O_DIRECT (ext4, xfs)
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// Seconds of each measurement
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: u64,
    /// What reactors do when there is nothing to do
    #[arg(long, value_name = "MODE", value_parser = poll_mode, default_value = "adaptive")]
    pub poll: PollMode,
    /// Leave the folder and what is in it
    #[arg(long)]
    pub keep: bool,
}

/// Bytes, as `4096`, `4K`, `4KiB`, `1G`: powers of 1024 as storage tools count, also for `4KB` and the like.
pub fn size(text: &str) -> Result<u64, String> {
    size_in(text, 1)
}

/// As [`size`]; a number alone counts MiB, as `rbd --size` does.
pub fn size_mib(text: &str) -> Result<u64, String> {
    size_in(text, 1 << 20)
}

fn size_in(text: &str, unit_alone: u64) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size: write a whole number and K, M, G, T or P, such as 4G");
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.trim().to_ascii_uppercase();
    let factor = match unit.strip_suffix("IB").or_else(|| unit.strip_suffix('B')).unwrap_or(&unit) {
        "" if unit == "B" => 1,
        "" if unit.is_empty() => unit_alone,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        "P" => 1 << 50,
        _ => return Err(wrong()),
    };
    number.checked_mul(factor).ok_or_else(|| format!("{text} is too large"))
}

/// What one request may have; the end of the image is checked against it where the image is known.
fn io_size(text: &str) -> Result<u64, String> {
    let max = loligo_client::IO_LEN_MAX;
    let len = size(text)?;
    let allowed = format!("a request has 1 byte to {}M", max >> 20);
    if (1..=max).contains(&len) { Ok(len) } else { Err(allowed) }
}

fn object_order(text: &str) -> Result<u8, String> {
    let len = size(text)?;
    let order = len.trailing_zeros() as u8; // At most 64.
    let range = loligo_config::limits::OBJECT_ORDER_MIN..=loligo_config::limits::OBJECT_ORDER_MAX;
    if !len.is_power_of_two() || !range.contains(&order) {
        return Err("objects have a power of two of bytes, from 4K to 32M".to_owned());
    }
    Ok(order)
}

fn poll_mode(text: &str) -> Result<PollMode, String> {
    let modes = [PollMode::Busy, PollMode::Adaptive, PollMode::Park];
    modes
        .into_iter()
        .find(|mode| mode.as_str() == text)
        .ok_or_else(|| "write busy, adaptive or park".to_owned())
}

fn failure_domain(text: &str) -> Result<FailureDomain, String> {
    match text {
        "osd" => Ok(FailureDomain::Osd),
        "host" => Ok(FailureDomain::Host),
        "rack" => Ok(FailureDomain::Rack),
        _ => Err("write osd, host or rack".to_owned()),
    }
}

fn cluster_id(text: &str) -> Result<ClusterId, String> {
    let uuid = uuid::Uuid::from_str(text);
    uuid.map(ClusterId).map_err(|_| "a cluster's id is a UUID: `loligo status` shows it".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_leaf_has_an_example() {
        fn check(command: &clap::Command, path: &str) {
            if command.has_subcommands() {
                for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
                    check(sub, &format!("{path} {}", sub.get_name()));
                }
            } else {
                let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("Example"), "`{path}` has no example");
                assert!(help.contains(path), "the example of `{path}` is of something else: {help}");
            }
        }
        check(&Cli::command(), "loligo");
    }

    #[test]
    fn sizes_are_powers_of_1024_and_refuse_what_they_do_not_know() {
        let cases = [
            ("0", 0),
            ("4096", 4096),
            ("4K", 4096),
            ("4k", 4096),
            ("4KiB", 4096),
            ("3 G", 3 << 30),
            ("7B", 7),
        ];
        for (text, bytes) in cases {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!(size_mib("100"), Ok(100 << 20));
        assert_eq!(size_mib("4G"), Ok(4 << 30));
        for text in ["", "G", "4X", "-1", "1.5G", "99999999999999999999", "16384P"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn requests_of_bench_have_a_length_that_a_client_takes() {
        assert_eq!(io_size("4K"), Ok(4096));
        assert_eq!(io_size("16M"), Ok(16 << 20));
        for text in ["0", "17M", "16777217"] {
            assert_eq!(io_size(text), Err("a request has 1 byte to 16M".to_owned()), "{text}");
        }
    }

    #[test]
    fn a_server_needs_a_listener() {
        let parse = |words: &[&str]| {
            let words = ["loligo", "nbd", "rbd/disk"].iter().chain(words);
            Cli::try_parse_from(words).map(drop).map_err(|error| error.to_string())
        };
        let told = parse(&[]).unwrap_err();
        assert!(told.contains("--listen") && told.contains("--socket"), "{told}");
        assert_eq!(parse(&["--listen", "127.0.0.1:1"]), Ok(()));
        assert_eq!(parse(&["--listen", "127.0.0.1:1", "--socket", "s"]), Ok(()));
    }

    #[test]
    fn object_sizes_are_powers_of_two_from_4k_to_32m() {
        assert_eq!(object_order("4K"), Ok(12));
        assert_eq!(object_order("32M"), Ok(25));
        for text in ["0", "2K", "64M", "3M"] {
            assert!(object_order(text).is_err(), "{text}");
        }
    }
}
