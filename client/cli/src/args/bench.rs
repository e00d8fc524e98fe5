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
    /// Durable 4 KiB writes, and reads, at queue depth 1
    Qd1(Qd1Args),
    /// The five tests that storage systems are usually compared by
    Profile(ProfileArgs),
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

/// `loligo bench qd1`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  loligo bench qd1 rbd/fresh
  loligo bench qd1 rbd/fresh --overwrite --record before --recordings bench/recordings
  loligo bench qd1 rbd/fresh --overwrite --against before --recordings bench/recordings")]
pub struct Qd1Args {
    #[command(flatten)]
    pub load: RoundsArgs,
}

/// `loligo bench profile`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  loligo bench profile rbd/fresh
  loligo bench profile rbd/fresh --overwrite --seconds 60 --ramp 10 --rounds 10 --record release-1")]
pub struct ProfileArgs {
    #[command(flatten)]
    pub load: RoundsArgs,
}

/// Tests in rounds, and what becomes of their figures.
#[derive(Debug, Args)]
pub struct RoundsArgs {
    /// The image
    #[arg(value_name = "POOL/IMAGE")]
    pub image: String,
    /// Times that every test is run, one test after the other
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Seconds of each test in each round
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Seconds before that, which do not count
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..=600))]
    pub ramp: u64,
    /// Overwrite an image that holds data
    #[arg(long)]
    pub overwrite: bool,
    /// What this client's reactor does when there is nothing to do
    #[arg(long, value_name = "MODE", value_parser = poll_mode, default_value = "adaptive")]
    pub poll: PollMode,
    /// Keep the figures under this name
    #[arg(long, value_name = "NAME", value_parser = recording_name)]
    pub record: Option<String>,
    /// Hold the figures against the recording of this name
    #[arg(long, value_name = "NAME", value_parser = recording_name)]
    pub against: Option<String>,
    /// Where recordings are [default: the folder `recordings` beside the host file]
    #[arg(long, value_name = "DIR")]
    pub recordings: Option<PathBuf>,
}

/// A file's name without surprises.
fn recording_name(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    match text.starts_with('.') || text.is_empty() || !text.chars().all(allowed) {
        true => Err("write letters, digits, '.', '-' and '_', and no '.' first".to_owned()),
        false => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_stay_in_their_folder() {
        for text in ["", "../x", "a/b", ".hidden", "a b"] {
            assert!(recording_name(text).is_err(), "{text}");
        }
        assert_eq!(recording_name("v1.2-park_3"), Ok("v1.2-park_3".to_owned()));
    }
}
