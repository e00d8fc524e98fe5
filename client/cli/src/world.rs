//! The real world: which clock, which disk, which network. Only the executable knows.

use loligo_config::id::CoreId;
use loligo_net::transport::tcp::{OwnedSocket, TcpOptions, TcpTransport};
use loligo_net::wire::{self, Message};
use loligo_nvme::model::{File, Model};
use loligo_nvme::uring::UringDevice;
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{
    BlockDevice, Clock, Completions, ConnectionId, DiskOp, Frame, Geometry, Instant, QueueFull, SendRefused,
    Ticket, Transport, TransportEvent, World,
};
use loligo_reactor::mailbox::{Receiver, Sender};
use loligo_reactor::os::ring::Ring;
use loligo_reactor::os::{OsClock, OsEntropy};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;

/// The real world.
#[derive(Clone, Copy, Debug)]
pub struct Os;

impl World for Os {
    type Clock = OsClock;
    type Entropy = OsEntropy;
    type Device = Device;
    type Transport = Network;
}

/// Now, for the code at the edges.
pub fn now() -> Instant {
    OsClock.now()
}

/// A device of either back end.
#[expect(
    clippy::large_enum_variant,
    reason = "one per reactor, and the large one is the one on the data path"
)]
pub enum Device {
    /// A file or block device of the kernel's.
    Uring(UringDevice),
    /// A volatile cache before a file.
    Model(Box<Model<File>>),
}

impl BlockDevice for Device {
    fn geometry(&self) -> &Geometry {
        match self {
            Self::Uring(device) => device.geometry(),
            Self::Model(device) => device.geometry(),
        }
    }

    fn submit(&mut self, op: DiskOp, ticket: Ticket) -> Result<(), QueueFull<DiskOp>> {
        match self {
            Self::Uring(device) => device.submit(op, ticket),
            Self::Model(device) => device.submit(op, ticket),
        }
    }

    fn poll(&mut self, budget: u32, done: &mut Completions) -> u32 {
        match self {
            Self::Uring(device) => device.poll(budget, done),
            Self::Model(device) => device.poll(budget, done),
        }
    }

    fn in_flight(&self) -> u32 {
        match self {
            Self::Uring(device) => device.in_flight(),
            Self::Model(device) => device.in_flight(),
        }
    }
}

/// TCP for one reactor. In a process with several, the first one listens for all: it reads the first message of a
/// connection, which names a core, and hands the connection to that core's reactor.
pub struct Network {
    tcp: TcpTransport,
    /// Where connections for other cores go, by core; empty when there is only this one.
    others: Vec<Sender<OwnedSocket>>,
    own: CoreId,
    incoming: Option<Receiver<OwnedSocket>>,
    /// Accepted, and the first message has not come.
    silent: BTreeSet<ConnectionId>,
    /// Accepted, and not told yet: it may turn out to be another core's.
    raw: VecDeque<TransportEvent>,
}

impl Network {
    /// A transport on this reactor's ring.
    pub fn new(ring: &Ring, pool: &BufferPool, options: TcpOptions) -> Self {
        Self {
            tcp: TcpTransport::new(ring, pool, options),
            others: Vec::new(),
            own: CoreId(0),
            incoming: None,
            silent: BTreeSet::new(),
            raw: VecDeque::new(),
        }
    }

    /// Accepts connections on this address and returns the address in use.
    ///
    /// # Errors
    /// As the system refuses it.
    pub fn listen(&mut self, address: SocketAddr) -> io::Result<SocketAddr> {
        self.tcp.listen(address)
    }

    /// Shares the port with the reactors of the same process.
    pub fn share(&mut self, own: CoreId, others: Vec<Sender<OwnedSocket>>, incoming: Receiver<OwnedSocket>) {
        self.own = own;
        self.others = if others.len() > 1 { others } else { Vec::new() };
        self.incoming = Some(incoming);
    }

    /// Gives a connection to the core that its first message names. Returns the frame when it is to stay.
    fn hand_over(&mut self, connection: ConnectionId, frame: &Frame) -> bool {
        let core = match wire::decode(frame).map(|received| received.envelope.message) {
            Ok(Message::Hello(hello)) => hello.core,
            _ => return false, // Whoever it is for, it is wrong: refused here.
        };
        if core == self.own {
            return false;
        }
        let Some(other) = self.others.get(usize::from(core.0)) else { return false };
        let Some(mut socket) = self.tcp.hand_over(connection) else { return false };
        socket.put_back(frame);
        // A full mailbox drops the connection: the peer tries again.
        let _ = other.send(socket);
        true
    }

    fn pass_on(&mut self, event: TransportEvent, inbox: &mut VecDeque<TransportEvent>) {
        match event {
            TransportEvent::Frame { connection, frame } if self.silent.remove(&connection) => {
                if self.hand_over(connection, &frame) {
                    // For the messenger it ends here; it never got past its handshake.
                    let reason = loligo_reactor::env::CloseReason::Local;
                    inbox.push_back(TransportEvent::Closed { connection, reason });
                } else {
                    inbox.push_back(TransportEvent::Frame { connection, frame });
                }
            }
            event => {
                match &event {
                    TransportEvent::Accepted { connection, .. } => {
                        self.silent.insert(*connection);
                    }
                    TransportEvent::Closed { connection, .. } => {
                        self.silent.remove(connection);
                    }
                    TransportEvent::Connected { .. } | TransportEvent::Frame { .. } => {}
                }
                inbox.push_back(event);
            }
        }
    }
}

impl Transport for Network {
    fn connect(&mut self, to: SocketAddr) -> ConnectionId {
        self.tcp.connect(to)
    }

    fn send(&mut self, connection: ConnectionId, frame: Frame) -> Result<(), SendRefused> {
        self.tcp.send(connection, frame)
    }

    fn close(&mut self, connection: ConnectionId) {
        self.tcp.close(connection);
    }

    fn trust(&mut self, connection: ConnectionId) {
        self.tcp.trust(connection);
    }

    fn poll(&mut self, budget: u32, inbox: &mut VecDeque<TransportEvent>) -> u32 {
        while let Some(socket) = self.incoming.as_ref().and_then(Receiver::receive) {
            self.tcp.adopt(socket);
        }
        if self.others.is_empty() {
            return self.tcp.poll(budget, inbox);
        }
        let mut raw = std::mem::take(&mut self.raw);
        let count = self.tcp.poll(budget, &mut raw);
        for event in raw.drain(..) {
            self.pass_on(event, inbox);
        }
        self.raw = raw;
        count
    }
}
