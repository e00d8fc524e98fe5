//! `loligo bench …`

use super::value::poll_mode;
use clap::{Args, Subcommand};
use loligo_config::file::PollMode;
use std::path::PathBuf;

/// `loligo bench …`
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// What this machine needs for a durable write and a round trip, and how far above it an image's writes are
    Floor(FloorArgs),
}

/// `loligo bench floor`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  loligo bench floor /var/tmp
  loligo bench floor /var/tmp --image rbd/fresh          also: ideal against actual, and the largest gap
  loligo bench floor /dev/nvme0n1 --overwrite            a device whose data is not needed any more")]
pub struct FloorArgs {
    /// A folder on the file system to measure (ext4, xfs), or a device
    #[arg(value_name = "DIR|DEVICE", default_value = ".")]
    pub place: PathBuf,
    /// Writers at once: as many as copies share the device
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub copies: u8,
    /// Seconds of each measurement
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: u64,
    /// An image whose writes are held against the floor
    #[arg(long, value_name = "POOL/IMAGE")]
    pub image: Option<String>,
    /// Overwrite a device or an image that holds data
    #[arg(long)]
    pub overwrite: bool,
    /// What this client's reactor does when there is nothing to do
    #[arg(long, value_name = "MODE", value_parser = poll_mode, default_value = "adaptive")]
    pub poll: PollMode,
}
