//! The command line: every command, its options and its examples, one file per noun.

mod bench;
mod dev;
mod mon;
mod nbd;
mod osd;
mod pool;
mod rbd;
mod value;

pub use bench::{BenchCommand, FloorArgs, RoundsArgs};
pub use dev::{DemoArgs, DevCommand, DevStartArgs};
pub use mon::{MonCommand, MonRunArgs};
pub use nbd::NbdArgs;
pub use osd::{MkfsArgs, OsdCommand, OsdRunArgs};
pub use pool::{PoolCommand, PoolCreateArgs};
pub use rbd::{BenchArgs, BenchPattern, BenchType, ImageArgs, RbdCommand};

use crate::output::Format;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
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
    /// Measure: this machine's floor, and images against it
    #[command(subcommand, arg_required_else_help = true)]
    Bench(BenchCommand),
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
}
