//! The types of the simulated world, and where its processes are.

use super::clock::MachineClock;
use super::disk::SimDisk;
use super::trace::{Level, Trace};
use crate::random::Random;
use loligo_config::id::{ClusterId, CoreId, DeviceId, Incarnation, OsdId, SessionId};
use loligo_net::messenger::{Messenger, MessengerSettings};
use loligo_net::transport::memory::{MemoryHub, MemoryTransport};
use loligo_net::wire::handshake::{Identity, Role};
use loligo_net::wire::op::OpStatus;
use loligo_net::wire::{Envelope, Message, Received};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{ConnectionId, Frame, SendRefused, Transport, TransportEvent, World};
use std::collections::VecDeque;
use std::net::SocketAddr;

/// One nanosecond, and more of them.
pub const NANOSECOND: u64 = 1;
/// See [`NANOSECOND`].
pub const MICROSECOND: u64 = 1000 * NANOSECOND;
/// See [`NANOSECOND`].
pub const MILLISECOND: u64 = 1000 * MICROSECOND;
/// See [`NANOSECOND`].
pub const SECOND: u64 = 1000 * MILLISECOND;

/// The world that the product's components run in.
#[derive(Debug)]
pub struct SimWorld;

impl World for SimWorld {
    type Clock = MachineClock;
    type Entropy = Random;
    type Device = SimDisk;
    type Transport = SimTransport;
}

/// The cluster of every run.
pub fn cluster_id() -> ClusterId {
    ClusterId(uuid::Uuid::from_u128(0x1011_6000))
}

/// The identity of an OSD's device: another one every time that the disk is replaced.
pub fn device_id(osd: OsdId, replaced: u32) -> DeviceId {
    DeviceId(uuid::Uuid::from_u128((u128::from(osd.0) + 1) << 64 | (u128::from(replaced) + 1)))
}

/// A machine of the cluster: what loses its power, is partitioned off or paused as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Machine {
    /// The mon's.
    Mon,
    /// An OSD's.
    Osd(u32),
    /// A client's.
    Client(u32),
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mon => f.write_str("mon"),
            Self::Osd(osd) => write!(f, "osd.{osd}"),
            Self::Client(client) => write!(f, "client.{client}"),
        }
    }
}

impl Machine {
    /// Where its process is reached; an OSD has an address for each of its cores.
    pub fn address(self, core: u16) -> SocketAddr {
        let (net, host, port) = match self {
            Self::Mon => (0, 100, 6789),
            Self::Osd(osd) => (0, osd as u8 + 1, 6800 + core),
            Self::Client(client) => (1, client as u8 + 1, 5000),
        };
        SocketAddr::from(([10, 0, net, host], port))
    }
}

/// A process's network access, seen by the trace.
#[derive(Debug)]
pub struct SimTransport {
    inner: MemoryTransport,
    trace: Trace,
    name: String,
}

impl SimTransport {
    /// The process `name` begins to listen at `address`.
    pub fn new(hub: &MemoryHub, address: SocketAddr, trace: &Trace, name: String) -> Self {
        Self { inner: hub.endpoint(address), trace: trace.clone(), name }
    }

    fn describe(frame: &Frame) -> String {
        match loligo_net::wire::decode(frame) {
            Ok(received) => format!("{:?}", received.envelope.message),
            Err(error) => format!("a damaged frame ({error})"),
        }
    }
}

fn digest(frame: &Frame) -> u64 {
    let data = frame.data.as_ref().map_or(0, |data| data.len() as u64);
    u64::from(loligo_osd::store::crc32c(&frame.head)) << 32 | data
}

impl Transport for SimTransport {
    fn connect(&mut self, to: SocketAddr) -> ConnectionId {
        let connection = self.inner.connect(to);
        self.trace.note(Level::Net, || format!("{} connects to {to} (#{})", self.name, connection.0));
        connection
    }

    fn send(&mut self, connection: ConnectionId, frame: Frame) -> Result<(), SendRefused> {
        self.trace.mix(digest(&frame));
        if let Ok(Received { envelope: Envelope { message: Message::OpReply(reply), .. }, .. }) =
            loligo_net::wire::decode(&frame)
            && reply.status == OpStatus::Done
            && reply.copies > 0
        {
            self.trace.ack(reply);
        }
        if self.trace.wants(Level::Net) {
            let what = Self::describe(&frame);
            self.trace.note(Level::Net, || format!("{} sends #{} {what}", self.name, connection.0));
        }
        self.inner.send(connection, frame)
    }

    fn close(&mut self, connection: ConnectionId) {
        self.inner.close(connection);
    }

    fn trust(&mut self, connection: ConnectionId) {
        self.inner.trust(connection);
    }

    fn poll(&mut self, budget: u32, inbox: &mut VecDeque<TransportEvent>) -> u32 {
        let before = inbox.len();
        let count = self.inner.poll(budget, inbox);
        if count > 0 {
            self.trace.mix(u64::from(count));
        }
        if self.trace.wants(Level::Net) {
            for event in inbox.iter().skip(before) {
                self.trace.note(Level::Net, || match event {
                    TransportEvent::Frame { connection, frame } => {
                        format!("{} gets #{} {}", self.name, connection.0, Self::describe(frame))
                    }
                    other => format!("{} gets {other:?}", self.name),
                });
            }
        }
        count
    }
}

/// What a process is on the network.
#[derive(Clone, Copy, Debug)]
pub struct Station {
    /// Its machine.
    pub machine: Machine,
    /// Which of its cores.
    pub core: u16,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// Its cluster, if it knows that.
    pub cluster: Option<ClusterId>,
}

impl Station {
    /// A messenger as the executable makes it.
    pub fn messenger(
        self,
        transport: SimTransport,
        pool: &BufferPool,
        seed: u64,
    ) -> Messenger<SimTransport, Random> {
        let role = match self.machine {
            Machine::Mon => Role::Mon,
            Machine::Osd(osd) => Role::Osd(OsdId(osd)),
            Machine::Client(_) => Role::Client(SessionId(0)),
        };
        let identity = Identity { cluster: self.cluster, role, incarnation: self.incarnation };
        let settings =
            MessengerSettings { core: CoreId(self.core), ..MessengerSettings::new(identity, pool.clone()) };
        Messenger::new(settings, transport, Random::new(seed))
    }
}
