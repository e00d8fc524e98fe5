//! `loligo pool …`

use super::Detail;
use super::value::failure_domain;
use clap::{Args, Subcommand};
use loligo_config::pool::FailureDomain;

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
