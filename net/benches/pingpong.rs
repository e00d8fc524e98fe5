//! Round trips of one frame at a time over loopback, between two threads: our transport on reactors that spin with
//! yield or park, beside bare sockets that do the same; both threads on one core, or on a core each. `cargo bench -p loligo-net --bench pingpong [-- rounds]`.
#![allow(
    clippy::disallowed_methods,
    reason = "a bench is a program of its own: it starts threads and reads the clock"
)]

use loligo_config::file::PollMode;
use loligo_config::id::Epoch;
use loligo_net::transport::tcp::{TcpOptions, TcpTransport};
use loligo_net::wire::handshake::Ping;
use loligo_net::wire::{self, Body, Envelope, Message, mon};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{ConnectionId, Frame, Instant, Transport, TransportEvent};
use loligo_reactor::os::ring::Ring;
use loligo_reactor::os::{Reactor, ReactorSettings, StopFlag, cpu, spawn, thread_cpu_time};
use loligo_reactor::poller::{Activity, Poller, Turn};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant as StdInstant};

const ROUNDS: usize = 20_000;
const WARM_UP: usize = 1_000;
const LOCAL: &str = "127.0.0.1:0";

/// Measured by the asking side; its own CPU time and system calls.
struct Measured {
    nanos: Vec<u64>,
    cpu: Duration,
    enters: f64,
}

fn main() {
    // `cargo bench` passes flags of its own.
    let rounds = std::env::args().filter_map(|word| word.parse().ok()).next().unwrap_or(ROUNDS);
    println!("{rounds} rounds each, times of one round trip in µs, CPU of the asking thread");
    println!("{:<52} {:>8} {:>8} {:>8} {:>8} {:>10}", "", "p50", "p99", "mean", "CPU", "enters");
    for (len, label) in [(64, "64 B"), (4096, "4 KiB + header")] {
        for cores in [[0, 0], [0, 1]] {
            for spins in [true, false] {
                let how = if spins { "spin+yield" } else { "park" };
                let how = format!("{label}, cores {}+{}, {how}", cores[0], cores[1]);
                report(&format!("{how}, bare socket"), sockets(len, spins, cores, rounds));
                report(&format!("{how}, transport"), transport(len, spins, cores, rounds));
            }
        }
    }
}

fn report(label: &str, measured: Measured) {
    let Measured { mut nanos, cpu, enters } = measured;
    let count = nanos.len();
    let mean = nanos.iter().sum::<u64>() as f64 / count as f64 / 1e3;
    nanos.sort_unstable();
    let at = |part: f64| nanos[(count as f64 * part) as usize] as f64 / 1e3;
    let cpu = cpu.as_nanos() as f64 / count as f64 / 1e3;
    println!("{label:<52} {:>8.1} {:>8.1} {mean:>8.1} {cpu:>8.1} {enters:>10.2}", at(0.5), at(0.99));
}

// ------------------------------------------------------------------------------------------- bare sockets

fn read_all(socket: &mut TcpStream, mut place: &mut [u8]) -> bool {
    while !place.is_empty() {
        match socket.read(place) {
            Ok(0) => return false,
            Ok(count) => place = &mut place[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(_) => return false,
        }
    }
    true
}

fn sockets(len: usize, spins: bool, cores: [usize; 2], rounds: usize) -> Measured {
    // What the transport's frame has on the wire.
    let len = if len == 64 { 64 } else { len + 128 };
    let listener = TcpListener::bind(LOCAL).unwrap();
    let address = listener.local_addr().unwrap();
    cpu::pin(cores[0]).unwrap();
    let server = std::thread::spawn(move || {
        cpu::pin(cores[1]).unwrap();
        let (mut socket, _) = listener.accept().unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_nonblocking(spins).unwrap();
        let mut bytes = vec![0; len];
        while read_all(&mut socket, &mut bytes) {
            socket.write_all(&bytes).unwrap();
        }
    });
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_nodelay(true).unwrap();
    socket.set_nonblocking(spins).unwrap();
    let mut bytes = vec![0; len];
    let mut nanos = Vec::with_capacity(rounds);
    let mut cpu = thread_cpu_time();
    for round in 0..WARM_UP + rounds {
        if round == WARM_UP {
            cpu = thread_cpu_time();
        }
        let begin = StdInstant::now();
        socket.write_all(&bytes).unwrap();
        assert!(read_all(&mut socket, &mut bytes));
        if round >= WARM_UP {
            nanos.push(u64::try_from(begin.elapsed().as_nanos()).unwrap());
        }
    }
    let cpu = thread_cpu_time() - cpu;
    drop(socket);
    server.join().unwrap();
    Measured { nanos, cpu, enters: f64::NAN }
}

// ---------------------------------------------------------------------------------------------- transport

fn reactor(name: &str, spins: bool, core: usize, ring: &Ring) -> Reactor {
    Reactor::new(settings(name, spins, core), ring.clone()).unwrap().with_spin_max(Duration::from_secs(1))
}

fn settings(name: &str, spins: bool, core: usize) -> ReactorSettings {
    let mode = if spins { PollMode::Adaptive } else { PollMode::Park };
    ReactorSettings { core: Some(core), mode, name: name.to_owned() }
}

/// Sends back every frame.
struct Echo {
    tcp: TcpTransport,
    events: VecDeque<TransportEvent>,
}

impl Poller for Echo {
    fn name(&self) -> &'static str {
        "echo"
    }

    fn poll(&mut self, _: Instant) -> Activity {
        let count = self.tcp.poll(64, &mut self.events);
        while let Some(event) = self.events.pop_front() {
            match event {
                TransportEvent::Accepted { connection, .. } => self.tcp.trust(connection),
                TransportEvent::Frame { connection, frame } => self.tcp.send(connection, frame).unwrap(),
                TransportEvent::Connected { .. } | TransportEvent::Closed { .. } => {}
            }
        }
        Activity::from_busy(count > 0)
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn expecting(&self) -> bool {
        true
    }
}

/// Sends a frame, waits for it, and again.
struct Asker {
    tcp: TcpTransport,
    events: VecDeque<TransportEvent>,
    connection: ConnectionId,
    frame: Frame,
    begin: StdInstant,
    round: usize,
    rounds: usize,
    nanos: Vec<u64>,
    cpu: Duration,
    ring: Ring,
    enters: u64,
}

impl Asker {
    fn ask(&mut self) {
        if self.round == WARM_UP {
            self.cpu = thread_cpu_time();
            self.enters = self.ring.stats().enters;
        }
        self.begin = StdInstant::now();
        self.tcp.send(self.connection, self.frame.clone()).unwrap();
    }

    fn done(&self) -> bool {
        self.round == WARM_UP + self.rounds
    }
}

impl Poller for Asker {
    fn name(&self) -> &'static str {
        "asker"
    }

    fn poll(&mut self, _: Instant) -> Activity {
        let count = self.tcp.poll(64, &mut self.events);
        while let Some(event) = self.events.pop_front() {
            match event {
                TransportEvent::Connected { connection } => {
                    self.tcp.trust(connection);
                    self.ask();
                }
                TransportEvent::Frame { .. } => {
                    if self.round >= WARM_UP {
                        self.nanos.push(u64::try_from(self.begin.elapsed().as_nanos()).unwrap());
                    }
                    self.round += 1;
                    if !self.done() {
                        self.ask();
                    }
                }
                TransportEvent::Accepted { .. } => {}
                TransportEvent::Closed { reason, .. } => panic!("{reason}"),
            }
        }
        Activity::from_busy(count > 0)
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn expecting(&self) -> bool {
        true
    }
}

fn serve(spins: bool, core: usize, stop: StopFlag, address: &mpsc::Sender<SocketAddr>) {
    let (ring, pool) = (Ring::new(256).unwrap(), BufferPool::new(64 << 20));
    let mut tcp = TcpTransport::new(&ring, &pool, TcpOptions::default());
    address.send(tcp.listen(LOCAL.parse().unwrap()).unwrap()).unwrap();
    let mut echo = Echo { tcp, events: VecDeque::new() };
    reactor("echo", spins, core, &ring).run(&mut [&mut echo], &stop);
}

fn frame(pool: &BufferPool, len: usize) -> Frame {
    let epoch = Epoch(1);
    let (message, body) = if len == 64 {
        (Message::Ping(Ping { number: 1 }), Body::NONE)
    } else {
        (Message::Map(mon::Map { epoch }), Body::of(pool.alloc_zeroed(len).unwrap().freeze()))
    };
    wire::encode(pool, &Envelope { epoch, message }, body).unwrap()
}

fn transport(len: usize, spins: bool, cores: [usize; 2], rounds: usize) -> Measured {
    let stop = StopFlag::new();
    let (sender, address) = mpsc::channel();
    let server_stop = stop.clone();
    let server =
        spawn(&settings("echo", spins, cores[1]), move || serve(spins, cores[1], server_stop, &sender))
            .unwrap();
    let (ring, pool) = (Ring::new(256).unwrap(), BufferPool::new(64 << 20));
    let mut tcp = TcpTransport::new(&ring, &pool, TcpOptions::default());
    let connection = tcp.connect(address.recv().unwrap());
    let mut asker = Asker {
        tcp,
        events: VecDeque::new(),
        connection,
        frame: frame(&pool, len),
        begin: StdInstant::now(),
        round: 0,
        rounds,
        nanos: Vec::with_capacity(rounds),
        cpu: Duration::ZERO,
        ring: ring.clone(),
        enters: 0,
    };
    let mut reactor = reactor("asker", spins, cores[0], &ring);
    while !asker.done() {
        reactor.turn(&mut [&mut asker]);
    }
    let cpu = thread_cpu_time() - asker.cpu;
    let enters = (ring.stats().enters - asker.enters) as f64 / rounds as f64;
    stop.stop();
    server.join().unwrap();
    Measured { nanos: asker.nanos, cpu, enters }
}
