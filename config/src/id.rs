//! Identifiers. Every id is a newtype; no bare integer with a meaning crosses a module border.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(/// An OSD: one daemon and one device. Printed as `osd.N`.
    OsdId(u32), "osd.");
id!(/// A pool. Ids are never reused.
    PoolId(u32), "");
id!(/// A version of the cluster map. 0 is "no map yet"; the first map has epoch 1.
    Epoch(u32), "e");
id!(/// A client session, assigned by the mon, strictly increasing over the life of the cluster, so
    /// that a PG that dropped the results of old sessions can refuse them by number (DESIGN section 5).
    /// 0 is "no session".
    SessionId(u64), "session.");
id!(/// One start of one OSD process: drawn at random at every start, never 0.
    Incarnation(u64), "");
id!(/// A reactor's place in its process, counted from 0.
    CoreId(u16), "core.");
id!(/// A shard of an OSD, counted from 0 (DESIGN section 2).
    ShardId(u16), "shard.");
id!(/// An image. Drawn at random by its creator, never 0; printed in hexadecimal as `rbd info` does.
    ImageId(u64), "");

impl Epoch {
    /// The epoch after this one.
    ///
    /// # Panics
    /// After 2^32 - 1 epochs.
    pub fn next(self) -> Self {
        Epoch(self.0.checked_add(1).expect("a cluster does not live through 2^32 maps"))
    }
}

/// The cluster's identity: every message peer and every device proves it (RELIABILITY F27).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClusterId(pub uuid::Uuid);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The identity of one formatted device, drawn at mkfs: a wiped disk with an old OSD id is a new device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceId(pub uuid::Uuid);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A placement group: pool and index, printed as Ceph does (`2.1f`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PgId {
    /// The pool.
    pub pool: PoolId,
    /// 0 ≤ index < the pool's `pg_count`.
    pub index: u32,
}

impl fmt::Display for PgId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:x}", self.pool.0, self.index)
    }
}

/// What an object holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum ObjectKind {
    /// A piece of an image's data; `index` is its number in the image.
    #[default]
    Data = 0,
    /// An image's header (DESIGN section 7); `index` is 0.
    ImageHeader = 1,
    /// The pool's directory of image names; `image` and `index` are 0.
    Directory = 2,
}

impl ObjectKind {
    /// The kind with this number, as stored on disk and sent over the wire.
    pub fn from_u32(value: u32) -> Option<Self> {
        match value {
            0 => Some(Self::Data),
            1 => Some(Self::ImageHeader),
            2 => Some(Self::Directory),
            _ => None,
        }
    }
}

/// An object of a pool. Fixed size, so that it needs no allocation on the wire, in the index or on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectId {
    /// The pool that holds it.
    pub pool: PoolId,
    /// What it holds.
    pub kind: ObjectKind,
    /// The image it belongs to; 0 for the directory.
    pub image: ImageId,
    /// Its number among the objects of its kind and image.
    pub index: u64,
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pool, image, index) = (self.pool.0, self.image.0, self.index);
        match self.kind {
            ObjectKind::Data => write!(f, "{pool}/rbd_data.{image:x}.{index:016x}"),
            ObjectKind::ImageHeader => write!(f, "{pool}/rbd_header.{image:x}"),
            ObjectKind::Directory => write!(f, "{pool}/rbd_directory"),
        }
    }
}

/// The version of one write in its PG: ordered by interval, then stream, then sequence (DESIGN section 3).
///
/// The primary's own stream is 0; fan-out leases get others. Sequences of a stream rise by one, without holes,
/// and go on rising over intervals. The zero value means "never written".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectVersion {
    /// First epoch of the interval in which the version was assigned.
    pub interval: Epoch,
    /// The stream within the interval; 0 is the primary's.
    pub stream: u32,
    /// Position in the PG's history, from 1.
    pub sequence: u64,
}

impl ObjectVersion {
    /// "Never written".
    pub const NONE: Self = Self { interval: Epoch(0), stream: 0, sequence: 0 };

    /// Whether this names a write at all.
    pub fn is_some(self) -> bool {
        self != Self::NONE
    }
}

impl fmt::Display for ObjectVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}'{}", self.interval.0, self.sequence)?;
        if self.stream != 0 {
            write!(f, "@{}", self.stream)?;
        }
        Ok(())
    }
}

/// One operation of one session: the key under which results are kept, so that a resent op never applies twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OpId {
    /// The client's session.
    pub session: SessionId,
    /// Strictly increasing in the session, from 1.
    pub number: u64,
}

impl fmt::Display for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.session.0, self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_in_the_words_of_the_field() {
        assert_eq!(OsdId(3).to_string(), "osd.3");
        assert_eq!(PgId { pool: PoolId(2), index: 31 }.to_string(), "2.1f");
        let object =
            ObjectId { pool: PoolId(2), kind: ObjectKind::Data, image: ImageId(0x1049_f465_13bd), index: 5 };
        assert_eq!(object.to_string(), "2/rbd_data.1049f46513bd.0000000000000005");
    }

    #[test]
    fn versions_order_by_interval_before_sequence() {
        let old = ObjectVersion { interval: Epoch(4), stream: 0, sequence: 90 };
        let new = ObjectVersion { interval: Epoch(5), stream: 0, sequence: 89 };
        assert!(old < new);
        assert!(ObjectVersion::NONE < old);
    }

    #[test]
    fn unknown_object_kinds_are_refused() {
        assert_eq!(ObjectKind::from_u32(2), Some(ObjectKind::Directory));
        assert_eq!(ObjectKind::from_u32(3), None);
    }
}
