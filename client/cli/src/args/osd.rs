//! `loligo osd …`: see OSDs, make them, run them.

use super::value::{cluster_id, poll_mode, size};
use clap::{Args, Subcommand};
use loligo_config::file::PollMode;
use loligo_config::id::ClusterId;
use std::net::SocketAddr;
use std::path::PathBuf;

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
