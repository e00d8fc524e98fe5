//! Round trips over TCP between two threads on loopback, on two cores: what the kernel's network needs for a request and its answer.
#![allow(clippy::disallowed_methods, reason = "a measurement of the real world")]

use super::{FloorError, Waiting, nanos, pin, two_cores};
use crate::load::histogram;
use hdrhistogram::Histogram;
use loligo_reactor::env::Clock;
use loligo_reactor::os::OsClock;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Bytes there and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// There.
    pub request_len: usize,
    /// Back.
    pub reply_len: usize,
}

impl Exchange {
    /// What a write does: a block one way, a short answer back.
    pub const WRITE: Self = Self { request_len: 4096, reply_len: 128 };
    /// The smallest message both ways: what is left is the network's own time.
    pub const SHORT: Self = Self { request_len: 64, reply_len: 64 };
}

/// Round trips over loopback TCP between two threads, for `time`, in nanoseconds.
///
/// # Errors
/// When the network fails.
pub fn round_trips(
    exchange: Exchange,
    waiting: Waiting,
    time: Duration,
) -> Result<Histogram<u64>, FloorError> {
    let listener =
        TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).map_err(FloorError::Network)?;
    let address = listener.local_addr().map_err(FloorError::Network)?;
    let mut near = TcpStream::connect(address).map_err(FloorError::Network)?;
    let (far, _) = listener.accept().map_err(FloorError::Network)?;
    prepare(&near, waiting).and_then(|()| prepare(&far, waiting)).map_err(FloorError::Network)?;
    let cores = two_cores();
    // The two threads are the measurement.
    std::thread::scope(|scope| {
        scope.spawn(move || {
            pin(cores, 1);
            echo(far, exchange, waiting);
        });
        let near = scope.spawn(move || {
            pin(cores, 0);
            // At its end the stream is closed; the other end sees it and ends.
            measure(&mut near, exchange, waiting, time)
        });
        near.join().expect("measuring does not panic").map_err(FloorError::Network)
    })
}

/// Sets a stream up for one way of waiting: without Nagle's delay, and blocking only when it parks.
///
/// # Errors
/// As the system refuses it.
fn prepare(stream: &TcpStream, waiting: Waiting) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(waiting == Waiting::Spinning)
}

/// Answers every request until the other end goes away.
fn echo(mut stream: TcpStream, exchange: Exchange, waiting: Waiting) {
    let mut request = vec![0; exchange.request_len];
    let reply = vec![1; exchange.reply_len];
    while receive(&mut stream, &mut request, waiting).is_ok() {
        if send(&mut stream, &reply).is_err() {
            return;
        }
    }
}

/// Round trips to an end that runs [`echo`], for `time`, in nanoseconds.
///
/// # Errors
/// When the network fails or the other end goes away.
fn measure(
    stream: &mut TcpStream,
    exchange: Exchange,
    waiting: Waiting,
    time: Duration,
) -> io::Result<Histogram<u64>> {
    let mut latencies = histogram();
    let request = vec![7; exchange.request_len];
    let mut reply = vec![0; exchange.reply_len];
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
    if waiting == Waiting::Parked {
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
        for (exchange, waiting) in [Exchange::SHORT, Exchange::WRITE]
            .into_iter()
            .flat_map(|exchange| Waiting::ALL.map(|way| (exchange, way)))
        {
            let latencies = round_trips(exchange, waiting, Duration::from_millis(50)).unwrap();
            // How many is the machine's matter: other processes may have both cores.
            assert!(!latencies.is_empty(), "{exchange:?} {waiting:?}");
            assert!(latencies.min() > 1000, "{waiting:?}: no round trip takes {} ns", latencies.min());
        }
    }
}
