//! `loligo rbd …`, with the options of `rbd`.

use super::value::{io_size, object_order, poll_mode, size, size_mib};
use clap::{Args, Subcommand, ValueEnum};
use loligo_config::file::PollMode;

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
