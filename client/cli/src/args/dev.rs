//! `loligo dev …` and `loligo demo`: clusters on this machine's files.

use super::value::{poll_mode, size};
use clap::{Args, Subcommand};
use loligo_config::file::PollMode;
use std::path::PathBuf;

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
