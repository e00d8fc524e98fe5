//! `loligo mon …`

use clap::{Args, Subcommand};
use std::net::SocketAddr;
use std::path::PathBuf;

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
