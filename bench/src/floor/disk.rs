//! Durable 4 KiB writes, and what a flush of one costs, through the same back end as an OSD's.
#![allow(clippy::disallowed_methods, reason = "a measurement of the real world")]

use super::{FloorError, Waiting, nanos};
use crate::load::histogram;
use hdrhistogram::Histogram;
use loligo_config::units::{BLOCK_SIZE, Lba};
use loligo_nvme::uring::{OpenDevice, UringDevice, UringOptions};
use loligo_reactor::dma::{BufferPool, PoolExhausted};
use loligo_reactor::env::{BlockDevice, Clock, Completions, DiskOp, Geometry, Ticket, WriteList};
use loligo_reactor::os::OsClock;
use loligo_reactor::os::ring::Ring;
use loligo_reactor::random::Random;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of each writer's file: more than a drive's own read-ahead or a file system's extent tricks would hide.
const FILE_LEN: u64 = 64 << 20;
/// Bytes of the buffers that writers share.
const POOL_LEN: usize = 16 << 20;
/// How long a parked wait lasts at most; completions end it earlier.
const NAP: Duration = Duration::from_secs(1);

/// Where to write.
#[derive(Clone, Copy, Debug)]
pub enum Place<'path> {
    /// A folder: every writer gets a file of its own in it, removed afterwards.
    Folder(&'path Path),
    /// A device or a file as it is: every writer gets a share of it. **What it holds is overwritten.**
    Device(&'path Path),
}

/// Writers that share one disk, each with a region of its own.
pub struct Disk {
    ring: Ring,
    pool: BufferPool,
    writers: Vec<Writer>,
    random: Random,
    /// Removed at the end; declared after the writers, which have them open.
    _files: Files,
}

struct Writer {
    device: UringDevice,
    first: u64,
    blocks: u64,
}

/// Files that go away with this.
struct Files(Vec<PathBuf>);

impl Drop for Files {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = std::fs::remove_file(path); // It may not have been made.
        }
    }
}

impl Disk {
    /// Prepares a place for so many writers.
    ///
    /// # Errors
    /// When files cannot be made there, or it cannot be opened as a device.
    pub fn prepare(place: Place<'_>, writers: usize) -> Result<Self, FloorError> {
        let ring = Ring::new(64).map_err(FloorError::Ring)?;
        let pool = BufferPool::new(POOL_LEN);
        let mut files = Files(Vec::new());
        let writers = match place {
            Place::Folder(folder) => in_folder(folder, writers, &mut files, &ring, &pool)?,
            Place::Device(path) => on_device(path, writers, &ring, &pool)?,
        };
        Ok(Self { ring, pool, writers, random: Random::new(2), _files: files })
    }

    /// What the disk is, as an OSD would see it.
    pub fn geometry(&self) -> Option<&Geometry> {
        self.writers.first().map(|writer| writer.device.geometry())
    }

    /// Durable writes by the first `count` writers at once, for `time`: the time until the last of them is durable, in
    /// nanoseconds.
    ///
    /// # Errors
    /// When a write fails.
    pub fn durable_writes(
        &mut self,
        count: usize,
        waiting: Waiting,
        time: Duration,
    ) -> Result<Histogram<u64>, FloorError> {
        let mut latencies = histogram();
        let end = OsClock.now().after(time);
        while OsClock.now() < end {
            let writes = self.random_writes(count, true)?;
            let begun = OsClock.now();
            self.run(writes, waiting)?;
            latencies.saturating_record(nanos(OsClock.now().since(begun)));
        }
        Ok(latencies)
    }

    /// A write into the device's cache and a flush behind it, for `time`: what the flush takes, in nanoseconds.
    ///
    /// # Errors
    /// When a write or a flush fails.
    pub fn flushes(&mut self, waiting: Waiting, time: Duration) -> Result<Histogram<u64>, FloorError> {
        let mut latencies = histogram();
        let end = OsClock.now().after(time);
        while OsClock.now() < end {
            let write = self.random_writes(1, false)?;
            self.run(write, waiting)?;
            let begun = OsClock.now();
            self.run(vec![DiskOp::Flush], waiting)?;
            latencies.saturating_record(nanos(OsClock.now().since(begun)));
        }
        Ok(latencies)
    }

    fn random_writes(&mut self, count: usize, fua: bool) -> Result<Vec<DiskOp>, PoolExhausted> {
        let Self { writers, pool, random, .. } = self;
        let write = |writer: &Writer| {
            let mut buffer = pool.alloc(BLOCK_SIZE as usize)?;
            random.fill(&mut buffer);
            let mut data = WriteList::new();
            data.push(buffer.freeze());
            Ok(DiskOp::Write { lba: Lba(writer.first + random.below(writer.blocks)), data, fua })
        };
        writers.iter().take(count).map(write).collect()
    }

    /// One operation per writer, from the first on.
    fn run(&mut self, ops: Vec<DiskOp>, waiting: Waiting) -> Result<(), FloorError> {
        for (writer, op) in self.writers.iter_mut().zip(ops) {
            writer.device.submit(op, Ticket(0)).expect("nothing else is in the queue");
        }
        let mut done = Completions::new();
        loop {
            for writer in &mut self.writers {
                writer.device.poll(1, &mut done);
            }
            if self.writers.iter().all(|writer| writer.device.in_flight() == 0) {
                break;
            }
            self.turn(waiting).map_err(FloorError::Ring)?;
        }
        done.into_iter().try_for_each(|completion| completion.result).map_err(FloorError::from)
    }

    fn turn(&self, waiting: Waiting) -> io::Result<()> {
        self.ring.submit()?;
        if self.ring.reap() > 0 {
            return Ok(());
        }
        match waiting {
            Waiting::Spinning => std::thread::yield_now(),
            Waiting::Parked => self.ring.wait(Some(OsClock.now().after(NAP)))?,
        }
        Ok(())
    }
}

fn in_folder(
    folder: &Path,
    writers: usize,
    files: &mut Files,
    ring: &Ring,
    pool: &BufferPool,
) -> Result<Vec<Writer>, FloorError> {
    let mut made = Vec::new();
    for index in 0..writers {
        // Of this process alone, so that two floors in one folder do not meet.
        let path = folder.join(format!("loligo-floor.{}.{index}", std::process::id()));
        files.0.push(path.clone());
        write_fully(&path).map_err(|source| FloorError::File { path: path.clone(), source })?;
        let device = UringDevice::open(&path, ring, pool, UringOptions::default())?;
        made.push(Writer { device, first: 0, blocks: FILE_LEN / u64::from(BLOCK_SIZE) });
    }
    Ok(made)
}

fn on_device(path: &Path, writers: usize, ring: &Ring, pool: &BufferPool) -> Result<Vec<Writer>, FloorError> {
    let device = OpenDevice::open(path, UringOptions::default())?;
    let blocks = device.geometry().blocks.0;
    let share = blocks / (writers as u64).max(1);
    if share == 0 {
        return Err(FloorError::TooSmall { path: path.to_owned(), blocks, writers });
    }
    let writer = |index| Writer { device: device.queue(ring, pool), first: index * share, blocks: share };
    Ok((0..writers as u64).map(writer).collect())
}

fn write_fully(path: &Path) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut random = Random::new(1);
    let mut piece = vec![0; 1 << 20];
    for _ in 0..FILE_LEN / piece.len() as u64 {
        random.fill(&mut piece[..4096]);
        file.write_all(&piece)?;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a file system with O_DIRECT, which the folder of the build is and `/tmp` often is not.
    fn folder() -> tempfile::TempDir {
        let program = std::env::current_exe().unwrap();
        tempfile::tempdir_in(program.parent().unwrap()).unwrap()
    }

    #[test]
    fn writers_in_a_folder_leave_nothing_behind() {
        let folder = folder();
        let mut disk = Disk::prepare(Place::Folder(folder.path()), 3).unwrap();
        let short = Duration::from_millis(30);
        for waiting in Waiting::ALL {
            assert!(!disk.durable_writes(3, waiting, short).unwrap().is_empty(), "{waiting:?}");
        }
        assert!(!disk.flushes(Waiting::Parked, short).unwrap().is_empty());
        drop(disk);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn writers_of_a_device_share_it_and_too_many_are_refused() {
        let folder = folder();
        let path = folder.path().join("device");
        File::create(&path).unwrap().set_len(3 * 4096).unwrap();
        let mut disk = Disk::prepare(Place::Device(&path), 3).unwrap();
        disk.durable_writes(3, Waiting::Spinning, Duration::from_millis(30)).unwrap();
        drop(disk);
        let content = std::fs::read(&path).unwrap();
        assert!(
            content.chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)),
            "every share is written"
        );
        assert!(matches!(
            Disk::prepare(Place::Device(&path), 4),
            Err(FloorError::TooSmall { blocks: 3, .. })
        ));
    }
}
