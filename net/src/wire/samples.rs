//! Messages of every kind with arbitrary contents, for tests.

use super::handshake::{Hello, Identity, Ping, Refuse, RefuseReason, Role, Welcome};
use super::mon::{Boot, BootReply, BootStatus, Command, CommandReply, Failure, Map, Report, Subscribe};
use super::op::{Guard, Notify, OpKind, OpReply, OpRequest, OpStatus, ReplicaLeg, Residence};
use super::peering::{
    PeerActivate, PeerFetch, PeerInfo, PeerPush, PeerPushAck, PeerPushDone, PeerQuery, PushKind,
};
use super::replica::{RepAck, RepStatus, RepWrite};
use super::{Body, Kind, Message};
use loligo_config::id::{
    ClusterId, CoreId, Epoch, ImageId, Incarnation, ObjectId, ObjectKind, ObjectVersion, OpId, OsdId, PgId,
    PoolId, SessionId,
};
use loligo_config::map::AuthMode;
use loligo_reactor::dma::BufferPool;

/// Numbers that look random and are the same for the same seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Draw(pub u64);

impl Draw {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub fn u32(&mut self) -> u32 {
        self.next() as u32
    }

    pub fn flag(&mut self) -> bool {
        self.next() & 1 == 1
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    fn epoch(&mut self) -> Epoch {
        Epoch(self.u32())
    }

    fn pg(&mut self) -> PgId {
        PgId { pool: PoolId(self.u32()), index: self.u32() }
    }

    fn version(&mut self) -> ObjectVersion {
        ObjectVersion { interval: self.epoch(), stream: self.u32(), sequence: self.next() }
    }

    fn op(&mut self) -> OpId {
        OpId { session: SessionId(self.next()), number: self.next() }
    }

    fn object(&mut self) -> ObjectId {
        let kind = self.one_of(&[ObjectKind::Data, ObjectKind::ImageHeader, ObjectKind::Directory]);
        ObjectId { pool: PoolId(self.u32()), kind, image: ImageId(self.next()), index: self.next() }
    }

    fn role(&mut self) -> Role {
        match self.below(3) {
            0 => Role::Osd(OsdId(self.u32())),
            1 => Role::Mon,
            _ => Role::Client(SessionId(self.next())),
        }
    }

    fn identity(&mut self) -> Identity {
        let mut id = [0; 16];
        id.copy_from_slice(&self.bytes(16));
        let cluster = self.flag().then_some(ClusterId(uuid::Uuid::from_bytes(id)));
        Identity { cluster, role: self.role(), incarnation: Incarnation(self.next()) }
    }

    fn data(&mut self, pool: &BufferPool, len: usize) -> Body {
        Body::of(pool.copy_of(&self.bytes(len)).unwrap())
    }

    /// A message of this kind, and data of up to `len_max` bytes that fits it.
    pub fn message(&mut self, kind: Kind, pool: &BufferPool, len_max: u32) -> (Message, Body) {
        let len = (self.u32() % (len_max + 1)).min(kind.data_len_max());
        match kind {
            Kind::Hello | Kind::Welcome | Kind::Refuse | Kind::Ping | Kind::Pong => {
                (self.handshake(kind), Body::NONE)
            }
            Kind::Op => self.op_request(pool, len),
            Kind::OpReply => self.op_reply(pool, len),
            Kind::RepWrite => self.rep_write(pool, len / 4096),
            Kind::PeerPush => self.peer_push(pool, len / 4096),
            Kind::Map | Kind::CommandReply | Kind::Boot | Kind::Report | Kind::Command => {
                (self.control(kind), self.data(pool, len as usize))
            }
            Kind::Notify | Kind::RepAck | Kind::Subscribe | Kind::BootReply | Kind::Failure => {
                (self.control(kind), Body::NONE)
            }
            _ => (self.peering(kind), Body::NONE),
        }
    }

    fn handshake(&mut self, kind: Kind) -> Message {
        match kind {
            Kind::Hello => Message::Hello(Hello {
                version: self.next() as u16,
                version_min: self.next() as u16,
                features: self.next(),
                features_required: self.next(),
                identity: self.identity(),
                expected: self.role(),
                core: CoreId(self.next() as u16),
                auth: AuthMode::None,
                nonce: self.next(),
            }),
            Kind::Welcome => Message::Welcome(Welcome {
                version: self.next() as u16,
                features: self.next(),
                identity: self.identity(),
                core: CoreId(self.next() as u16),
                session: SessionId(self.next()),
                credits: self.u32(),
                auth: AuthMode::None,
                nonce_echo: self.next(),
                nonce: self.next(),
            }),
            Kind::Refuse => {
                use RefuseReason as R;
                let all =
                    [R::Version, R::Feature, R::Cluster, R::Identity, R::Auth, R::Busy, R::Fenced, R::Stale];
                Message::Refuse(Refuse { reason: self.one_of(&all), epoch: self.epoch() })
            }
            Kind::Ping => Message::Ping(Ping { number: self.next() }),
            _ => Message::Pong(Ping { number: self.next() }),
        }
    }

    fn op_request(&mut self, pool: &BufferPool, len: u32) -> (Message, Body) {
        use OpKind as K;
        let kinds = [
            K::Read,
            K::Write,
            K::Discard,
            K::WriteZeroes,
            K::Remove,
            K::Extents,
            K::Watch,
            K::Unwatch,
            K::List,
            K::Watchers,
        ];
        let request = OpRequest {
            pg: self.pg(),
            object: self.object(),
            kind: self.one_of(&kinds),
            offset: self.u32(),
            len,
            op: self.op(),
            lowest_outstanding: self.next(),
            snap_seq: self.next(),
            guard: if self.flag() { Guard::Any } else { Guard::Version(self.version()) },
            attempt: u8::from(self.flag()),
            client_queue_ns: self.u32(),
        };
        let body = match request.kind {
            OpKind::Write => Body { within_block: request.offset % 4096, ..self.data(pool, len as usize) },
            _ => Body::NONE,
        };
        (Message::Op(request), body)
    }

    fn op_reply(&mut self, pool: &BufferPool, len: u32) -> (Message, Body) {
        use OpStatus as S;
        let statuses = [
            S::Done,
            S::StaleEpoch,
            S::NotPrimary,
            S::NotActive,
            S::Busy,
            S::VersionMismatch,
            S::NoSpace,
            S::Invalid,
            S::Damaged,
            S::MediaError,
            S::Fenced,
            S::SessionExpired,
            S::StaleSnap,
        ];
        let reply = OpReply {
            op: self.op(),
            status: self.one_of(&statuses),
            version: self.version(),
            offset: self.u32(),
            len,
            core: CoreId(self.next() as u16),
            copies: self.next() as u8,
            residence: Residence {
                primary_ns: self.u32(),
                submit_ns: self.u32(),
                own_ns: self.u32(),
                device_ns: self.u32(),
                replicas: std::array::from_fn(|_| ReplicaLeg {
                    osd: OsdId(self.u32()),
                    leg_ns: self.u32(),
                    residence_ns: self.u32(),
                    device_ns: self.u32(),
                }),
            },
        };
        let within_block = if self.flag() { reply.offset % 4096 } else { 0 };
        let body = Body { within_block, ..self.data(pool, len as usize) };
        (Message::OpReply(reply), body)
    }

    fn rep_write(&mut self, pool: &BufferPool, count: u32) -> (Message, Body) {
        let write = RepWrite {
            pg: self.pg(),
            interval: self.epoch(),
            version: self.version(),
            previous: self.version(),
            committed: self.version(),
            object: self.object(),
            kind: self.one_of(&[OpKind::Write, OpKind::Discard, OpKind::Remove]),
            block: self.u32(),
            count,
            op: self.op(),
            lowest_outstanding: self.next(),
            snap_seq: self.next(),
        };
        let len = if write.kind == OpKind::Write { count as usize * 4096 } else { 0 };
        (Message::RepWrite(write), self.data(pool, len))
    }

    fn peer_push(&mut self, pool: &BufferPool, count: u32) -> (Message, Body) {
        let push = PeerPush {
            pg: self.pg(),
            interval: self.epoch(),
            number: self.u32(),
            kind: self.one_of(&[PushKind::Data, PushKind::Free, PushKind::Result]),
            version: self.version(),
            previous: self.version(),
            object: self.object(),
            block: self.u32(),
            count,
            op: self.op(),
            lowest_outstanding: self.next(),
            snap_seq: self.next(),
        };
        let len = if push.kind == PushKind::Data { count as usize * 4096 } else { 0 };
        (Message::PeerPush(push), self.data(pool, len))
    }

    fn control(&mut self, kind: Kind) -> Message {
        let (osd, incarnation) = (OsdId(self.u32()), Incarnation(self.next()));
        match kind {
            Kind::Subscribe => Message::Subscribe(Subscribe { have: self.epoch() }),
            Kind::Map => Message::Map(Map { epoch: self.epoch() }),
            Kind::Boot => Message::Boot(Boot { osd, incarnation }),
            Kind::Report => Message::Report(Report { osd, incarnation, epoch: self.epoch() }),
            Kind::Failure => Message::Failure(Failure { osd, incarnation, silent_ms: self.u32() }),
            Kind::Command => Message::Command(Command { number: self.next() }),
            Kind::CommandReply => {
                Message::CommandReply(CommandReply { number: self.next(), epoch: self.epoch() })
            }
            Kind::Notify => {
                Message::Notify(Notify { pg: self.pg(), object: self.object(), version: self.version() })
            }
            Kind::RepAck => {
                use RepStatus as S;
                let all = [S::Durable, S::StaleInterval, S::Gap, S::Failed, S::Busy, S::Damaged, S::NotReady];
                Message::RepAck(RepAck {
                    pg: self.pg(),
                    interval: self.epoch(),
                    version: self.version(),
                    status: self.one_of(&all),
                    residence_ns: self.u32(),
                    device_ns: self.u32(),
                    space_credit: self.next(),
                })
            }
            _ => {
                use BootStatus as S;
                let all = [S::Taken, S::OtherDevice, S::OtherId, S::Running, S::OldMon, S::Invalid];
                Message::BootReply(BootReply { status: self.one_of(&all), epoch: self.epoch() })
            }
        }
    }

    fn peering(&mut self, kind: Kind) -> Message {
        let (pg, interval) = (self.pg(), self.epoch());
        match kind {
            Kind::PeerQuery => Message::PeerQuery(PeerQuery { pg, interval }),
            Kind::PeerInfo => Message::PeerInfo(PeerInfo {
                pg,
                interval,
                activated: self.epoch(),
                last: self.version(),
                committed: self.version(),
                incomplete: self.flag(),
                space_credit: self.next(),
            }),
            Kind::PeerFetch => Message::PeerFetch(PeerFetch { pg, interval, since: self.version() }),
            Kind::PeerPushAck => {
                Message::PeerPushAck(PeerPushAck { pg, interval, number: self.u32(), stored: self.flag() })
            }
            Kind::PeerPushDone => Message::PeerPushDone(PeerPushDone {
                pg,
                interval,
                count: self.u32(),
                last: self.version(),
                incomplete: self.flag(),
            }),
            Kind::PeerActivate => Message::PeerActivate(PeerActivate { pg, interval, last: self.version() }),
            _ => Message::PeerActivated(PeerActivate { pg, interval, last: self.version() }),
        }
    }
}
