//! `loligo nbd`

use super::value::poll_mode;
use clap::Args;
use loligo_config::file::PollMode;
use std::net::SocketAddr;
use std::path::PathBuf;

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
