//! The floor: what the machine itself needs for a replicated durable write, measured beside it (DESIGN section 1).
//!
//! A durable write of 4 KiB by as many writers at once as there are copies on the disk, and a round trip over loopback
//! TCP, each both ways of waiting: spinning and sleeping.
#![allow(clippy::disallowed_methods, reason = "a measurement of the real world")]

use crate::load::histogram;
use hdrhistogram::Histogram;
use loligo_config::units::{BLOCK_SIZE, Lba};
use loligo_nvme::uring::{OpenError, UringDevice, UringOptions};
use loligo_reactor::dma::{BufferPool, PoolExhausted};
use loligo_reactor::env::{BlockDevice, Clock, Completions, DiskError, DiskOp, Ticket, WriteList};
use loligo_reactor::os::OsClock;
use loligo_reactor::os::ring::Ring;
use loligo_reactor::random::Random;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of each writer's file: more than a drive's own read-ahead or a file system's extent tricks would hide.
const FILE_LEN: u64 = 64 << 20;
/// A round trip carries what a write does: data one way, a short answer back.
const REQUEST_LEN: usize = 4096;
const REPLY_LEN: usize = 128;

/// Why the floor could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum FloorError {
    /// A file could not be made or used.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file could not be opened as a device.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A write failed.
    #[error("a write failed: {0}")]
    Write(#[from] DiskError),
    /// No memory.
    #[error(transparent)]
    Memory(#[from] PoolExhausted),
    /// The loopback network failed.
    #[error("loopback: {0}")]
    Network(#[source] io::Error),
}

/// How a waiting thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// It asks again and again, yielding in between.
    Spinning,
    /// It sleeps until it is woken.
    Sleeping,
}

/// Durable 4 KiB writes by `writers` at once in `folder`, for `time`: the latency until the last of them is durable,
/// in nanoseconds. The files are removed afterwards.
///
/// # Errors
/// See [`FloorError`].
pub fn durable_writes(folder: &Path, writers: usize, time: Duration) -> Result<Histogram<u64>, FloorError> {
    let files: Vec<PathBuf> = (0..writers).map(|index| folder.join(format!("floor.{index}"))).collect();
    let result = files
        .iter()
        .try_for_each(|path| {
            write_fully(path).map_err(|source| FloorError::File { path: path.clone(), source })
        })
        .and_then(|()| measure_writes(&files, time));
    for path in &files {
        let _ = std::fs::remove_file(path); // It may not be there; the folder is temporary anyway.
    }
    result
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

fn measure_writes(files: &[PathBuf], time: Duration) -> Result<Histogram<u64>, FloorError> {
    let pool = BufferPool::new(16 << 20);
    let ring =
        Ring::new(64).map_err(|source| FloorError::File { path: PathBuf::from("io_uring"), source })?;
    let mut devices = Vec::new();
    for path in files {
        devices.push(UringDevice::open(path, &ring, &pool, UringOptions::default())?);
    }
    let mut random = Random::new(2);
    let mut latencies = histogram();
    let end = OsClock.now().after(time);
    while OsClock.now() < end {
        let writes =
            devices.iter().map(|_| random_write(&pool, &mut random)).collect::<Result<Vec<_>, _>>()?;
        let begun = OsClock.now();
        write_together(&ring, &mut devices, writes)?;
        latencies.saturating_record(nanos(OsClock.now().since(begun)));
    }
    Ok(latencies)
}

fn random_write(pool: &BufferPool, random: &mut Random) -> Result<DiskOp, PoolExhausted> {
    let mut buffer = pool.alloc(BLOCK_SIZE as usize)?;
    random.fill(&mut buffer);
    let mut data = WriteList::new();
    data.push(buffer.freeze());
    Ok(DiskOp::Write { lba: Lba(random.below(FILE_LEN / u64::from(BLOCK_SIZE))), data, fua: true })
}

fn write_together(ring: &Ring, devices: &mut [UringDevice], writes: Vec<DiskOp>) -> Result<(), FloorError> {
    for (device, write) in devices.iter_mut().zip(writes) {
        device.submit(write, Ticket(0)).expect("nothing else is in the queue");
    }
    let mut done = Completions::new();
    while devices.iter().any(|device| device.in_flight() > 0) {
        for device in devices.iter_mut() {
            device.poll(1, &mut done);
        }
        // Calls into the kernel only for what was queued or has completed.
        let turned = ring.submit();
        turned.map_err(|source| FloorError::File { path: PathBuf::from("io_uring"), source })?;
        ring.reap();
        std::thread::yield_now();
    }
    done.into_iter().try_for_each(|completion| completion.result).map_err(FloorError::from)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).max(1)
}

/// Round trips over loopback TCP between two threads, for `time`, in nanoseconds.
///
/// # Errors
/// See [`FloorError`].
pub fn round_trips(waiting: Waiting, time: Duration) -> Result<Histogram<u64>, FloorError> {
    let listener =
        TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).map_err(FloorError::Network)?;
    let address = listener.local_addr().map_err(FloorError::Network)?;
    let mut near = TcpStream::connect(address).map_err(FloorError::Network)?;
    let (far, _) = listener.accept().map_err(FloorError::Network)?;
    prepare(&near, waiting).and_then(|()| prepare(&far, waiting)).map_err(FloorError::Network)?;
    // The two threads are the measurement.
    #[allow(
        clippy::disallowed_methods,
        reason = "not part of the product: two ends that wait for each other"
    )]
    let echo = std::thread::spawn(move || echo(far, waiting));
    let measured = measure_round_trips(&mut near, waiting, time).map_err(FloorError::Network);
    drop(near); // The other end sees it and ends.
    let _ = echo.join();
    measured
}

fn prepare(stream: &TcpStream, waiting: Waiting) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(waiting == Waiting::Spinning)
}

fn echo(mut stream: TcpStream, waiting: Waiting) {
    let mut request = [0; REQUEST_LEN];
    while receive(&mut stream, &mut request, waiting).is_ok() {
        if send(&mut stream, &request[..REPLY_LEN]).is_err() {
            return;
        }
    }
}

fn measure_round_trips(
    stream: &mut TcpStream,
    waiting: Waiting,
    time: Duration,
) -> io::Result<Histogram<u64>> {
    let mut latencies = histogram();
    let request = [7; REQUEST_LEN];
    let mut reply = [0; REPLY_LEN];
    let end = OsClock.now().after(time);
    while OsClock.now() < end {
        let begun = OsClock.now();
        send(stream, &request)?;
        receive(stream, &mut reply, waiting)?;
        latencies.saturating_record(nanos(OsClock.now().since(begun)));
    }
    Ok(latencies)
}

fn send(stream: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn receive(stream: &mut TcpStream, bytes: &mut [u8], waiting: Waiting) -> io::Result<()> {
    if waiting == Waiting::Sleeping {
        return stream.read_exact(bytes);
    }
    let mut filled = 0;
    while filled < bytes.len() {
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_waiting_give_round_trips() {
        for waiting in [Waiting::Spinning, Waiting::Sleeping] {
            let latencies = round_trips(waiting, Duration::from_millis(50)).unwrap();
            assert!(latencies.len() > 10, "{waiting:?}: {}", latencies.len());
            assert!(latencies.min() > 1000, "{waiting:?}: no round trip takes {} ns", latencies.min());
        }
    }
}
