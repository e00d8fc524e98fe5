//! The image that is measured: opened, allowed to be overwritten, written fully.

use crate::args::Global;
use crate::cluster::{self, Connection, ImageSpec};
use crate::output::{self, Failure, Outcome, Progress, bytes};
use loligo_bench::load::{self, IoType, LoadError, LoadReport, LoadSettings, Pattern, Tick};
use loligo_client::ImageHandle;
use loligo_config::file::PollMode;
use loligo_reactor::env::Entropy;
use loligo_reactor::os::OsEntropy;
use std::time::Duration;

/// Bytes of one request that fills.
const FILL_LEN: u64 = 1 << 20;

/// A load: what, where, how large, how many at once.
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

impl Shape {
    /// For a time, or once over the image's `size` bytes; `tick` hears of it now and then.
    ///
    /// # Errors
    /// When a request fails.
    pub fn run(
        self,
        cluster: &mut Connection,
        image: ImageHandle,
        size: u64,
        time: Option<Duration>,
        tick: &mut dyn FnMut(Tick),
    ) -> Result<LoadReport, LoadError> {
        let settings = LoadSettings {
            io: self.io,
            pattern: self.pattern,
            io_len: self.io_len,
            depth: self.depth,
            bytes_max: time.is_none().then_some(size),
            time_max: time,
            seed: OsEntropy::new().next_u64(),
        };
        load::run(cluster, image, settings, tick)
    }
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
        let Self { cluster, image, size } = self;
        let mut progress = Progress::new("writing the image fully", true);
        let report = shape.run(cluster, *image, *size, None, &mut |tick| progress.set(tick.bytes, *size));
        report.map(drop).map_err(failed)
    }

    /// A load for a time.
    ///
    /// # Errors
    /// When a request fails.
    pub fn load(&mut self, shape: Shape, time: Duration) -> Outcome<LoadReport> {
        let Self { cluster, image, size } = self;
        shape.run(cluster, *image, *size, Some(time), &mut |_| {}).map_err(failed)
    }

    /// Closes the image.
    pub fn close(mut self) {
        self.cluster.close(self.image);
    }
}

fn failed(error: LoadError) -> Failure {
    Failure::new(error.to_string(), "`loligo status` says how the cluster is")
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
