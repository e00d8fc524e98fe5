//! The image that is measured: opened, allowed to be overwritten, written fully.

use crate::args::Global;
use crate::cluster::{self, Connection, ImageSpec};
use crate::output::{self, Failure, Outcome, Progress, bytes};
use loligo_bench::load::{self, IoType, LoadReport, LoadSettings, Pattern};
use loligo_client::ImageHandle;
use loligo_config::file::PollMode;
use loligo_reactor::env::Entropy;
use loligo_reactor::os::OsEntropy;
use std::time::Duration;

/// Bytes of one request that fills.
const FILL_LEN: u64 = 1 << 20;

/// One load's kind: what, where, how large, how many at once.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// What.
    pub io: IoType,
    /// Where.
    pub pattern: Pattern,
    /// Bytes of one request.
    pub io_len: u64,
    /// Requests in flight.
    pub depth: u32,
}

/// An open image that may be overwritten.
pub struct Target {
    cluster: Connection,
    image: ImageHandle,
    size: u64,
}

impl Target {
    /// Opens an image for measuring. One that holds data is refused unless `overwrite`.
    ///
    /// # Errors
    /// When the cluster cannot be reached, or the image is not to be overwritten.
    pub fn open(global: &Global, spec: &ImageSpec, poll: PollMode, overwrite: bool) -> Outcome<Self> {
        let host = cluster::host_file(global)?;
        let target = cluster::target(global, host.as_ref())?;
        let mut cluster = cluster::connect_with(target, global.timeout, None, poll)?;
        if !overwrite {
            refuse_data(&mut cluster, spec)?;
        }
        let size = cluster.info(&spec.pool, &spec.image)?.size;
        let image = cluster.open(&spec.pool, &spec.image)?;
        Ok(Self { cluster, image, size })
    }

    /// Writes the whole image once: overwriting is what a database does, and what is read must be there.
    ///
    /// # Errors
    /// When a request fails.
    pub fn fill(&mut self) -> Outcome {
        let io_len = FILL_LEN.min(self.size);
        let shape = Shape { io: IoType::Write, pattern: Pattern::Sequential, io_len, depth: 8 };
        self.load(shape, None).map(drop)
    }

    /// A load for a time, or once over the image.
    ///
    /// # Errors
    /// When a request fails.
    pub fn load(&mut self, shape: Shape, time: Option<Duration>) -> Outcome<LoadReport> {
        let settings = LoadSettings {
            io: shape.io,
            pattern: shape.pattern,
            io_len: shape.io_len,
            depth: shape.depth,
            bytes_max: time.is_none().then_some(self.size),
            time_max: time,
            seed: OsEntropy::new().next_u64(),
        };
        let mut progress = Progress::new("writing the image fully", true);
        let size = self.size;
        let report = load::run(&mut self.cluster, self.image, settings, &mut |tick| {
            if time.is_none() {
                progress.set(tick.bytes, size);
            }
        });
        report.map_err(|error| Failure::new(error.to_string(), "`loligo status` says how the cluster is"))
    }

    /// Closes the image.
    pub fn close(mut self) {
        self.cluster.close(self.image);
    }
}

fn refuse_data(cluster: &mut Connection, spec: &ImageSpec) -> Outcome {
    let mut progress = output::Progress::new(&format!("looking for data in {spec}"), false);
    let usage = cluster.du(&spec.pool, &spec.image, &mut |at| progress.set(at.done, at.total))?;
    if usage.used == 0 {
        return Ok(());
    }
    Err(Failure::new(
        format!("{spec} holds {} of data, and measuring overwrites it", bytes(usage.used)),
        "name a fresh image, or add --overwrite if its data is not needed any more",
    ))
}
