//! An image's header: everything that is not data (DESIGN section 7).

use super::document::{Document, DocumentKind};
use crate::error::InvalidImage;
use loligo_config::id::{ImageId, ObjectId, ObjectKind, PoolId, SessionId};
use loligo_config::limits::{NAME_LEN_MAX, OBJECT_ORDER_MAX, OBJECT_ORDER_MIN};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most objects of one image: 4 PiB of 4 KiB objects, 32 EiB and so any size of 32 MiB ones. Their numbers fit 40 bits
/// in every listing and counter.
pub const OBJECTS_MAX: u64 = 1 << 40;

/// Features of an image, one bit each, numbered as Ceph does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Features(pub u64);

const FEATURE_NAMES: [(u64, &str); 8] = [
    (1 << 0, "layering"),
    (1 << 1, "striping"),
    (1 << 2, "exclusive-lock"),
    (1 << 3, "object-map"),
    (1 << 4, "fast-diff"),
    (1 << 5, "deep-flatten"),
    (1 << 6, "journaling"),
    (1 << 7, "data-pool"),
];

impl Features {
    /// Copy-on-write clones: every image may become a parent or a child.
    pub const LAYERING: Features = Features(1 << 0);
    /// What this program can handle. An image with another feature is not opened.
    pub const SUPPORTED: Features = Features(1 << 0);

    /// The names of the features, as `rbd info` prints them; unknown bits have none.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        FEATURE_NAMES.iter().filter(move |(bit, _)| self.0 & bit != 0).map(|(_, name)| *name)
    }
}

/// A snapshot of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its number, rising within the image.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// The image's size when it was taken.
    pub size: u64,
    /// Seconds since 1970.
    pub created: u64,
    /// Whether it may not be removed.
    pub protected: bool,
}

/// The snapshot that an image is a clone of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    /// The parent's pool.
    pub pool: PoolId,
    /// The parent image.
    pub image: ImageId,
    /// The parent's snapshot.
    pub snapshot: u64,
    /// Bytes from the image's start that may still come from the parent.
    pub overlap: u64,
}

/// Who holds the exclusive lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// The holder.
    pub owner: SessionId,
}

/// Data beyond the size that is still to be freed after a shrink. While it is there the image does not grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trim {
    /// Up to where there may be data: the largest size before.
    pub end: u64,
    /// Who frees it, and its how many-th attempt: another one that takes over writes its own.
    pub owner: SessionId,
    /// See `owner`.
    pub attempt: u64,
}

/// In which part of its life an image is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageState {
    /// In use.
    #[default]
    Ready,
    /// Its removal has begun; it never becomes ready again.
    Removing,
}

/// The header of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageHeader {
    /// The name when the header was last written. The directory's is the true one.
    pub name: String,
    /// The image.
    pub id: ImageId,
    /// Size in bytes.
    pub size: u64,
    /// Objects have 2^order bytes: 12 to 25.
    pub order: u8,
    /// Features.
    pub features: Features,
    /// In which part of its life it is.
    pub state: ImageState,
    /// Seconds since 1970.
    pub created: u64,
    /// Seconds since 1970.
    pub accessed: u64,
    /// Seconds since 1970 of the last change of the header.
    pub modified: u64,
    /// The newest snapshot's number; 0 when there was none.
    pub snap_seq: u64,
    /// Snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// For a clone.
    pub parent: Option<Parent>,
    /// Where the data is, if not in the header's pool.
    pub data_pool: Option<PoolId>,
    /// Whether an object map is kept.
    pub object_map: bool,
    /// The exclusive lock.
    pub lock: Option<Lock>,
    /// An unfinished shrink.
    pub trim: Option<Trim>,
    /// The user's own keys and values.
    pub metadata: BTreeMap<String, String>,
}

/// What a new image is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Size in bytes.
    pub size: u64,
    /// Objects have 2^order bytes: 12 to 25.
    pub order: u8,
}

impl ImageHeader {
    /// The header of a new image.
    pub fn new(name: &str, id: ImageId, options: CreateOptions, now: u64) -> Self {
        Self {
            name: name.to_owned(),
            id,
            size: options.size,
            order: options.order,
            features: Features::LAYERING,
            state: ImageState::Ready,
            created: now,
            accessed: now,
            modified: now,
            snap_seq: 0,
            snapshots: Vec::new(),
            parent: None,
            data_pool: None,
            object_map: false,
            lock: None,
            trim: None,
            metadata: BTreeMap::new(),
        }
    }

    /// Bytes of one object.
    pub fn object_size(&self) -> u64 {
        1 << self.order
    }

    /// Objects that the size takes.
    pub fn objects(&self) -> u64 {
        objects_of(self.size, self.order)
    }

    /// The prefix of the data objects' names, as `rbd info` prints it.
    pub fn block_name_prefix(&self) -> String {
        format!("rbd_data.{:x}", self.id.0)
    }
}

impl Document for ImageHeader {
    const KIND: DocumentKind = DocumentKind::Header;

    fn is_valid(&self) -> bool {
        check_order(self.order).is_ok()
            && check_size(self.size, self.order).is_ok()
            && self.id.0 != 0
            && self.trim.is_none_or(|trim| trim.end >= self.size && check_size(trim.end, self.order).is_ok())
    }
}

/// Objects that `size` bytes take.
pub fn objects_of(size: u64, order: u8) -> u64 {
    size.div_ceil(1 << order)
}

/// The object that holds an image's header.
pub fn header_object(pool: PoolId, image: ImageId) -> ObjectId {
    ObjectId { pool, kind: ObjectKind::ImageHeader, image, index: 0 }
}

/// One of an image's data objects.
pub fn data_object(pool: PoolId, image: ImageId, index: u64) -> ObjectId {
    ObjectId { pool, kind: ObjectKind::Data, image, index }
}

/// Whether an image that is there may have this name.
///
/// # Errors
/// `InvalidImage::Name`.
pub fn check_name(name: &str) -> Result<(), InvalidImage> {
    let fits = (1..=NAME_LEN_MAX).contains(&name.len());
    let clean = !name.chars().any(|c| c == '/' || c == '@' || c.is_control());
    if fits && clean { Ok(()) } else { Err(InvalidImage::Name) }
}

/// Whether a new image may have this name: one that also reads well in a shell, a URI and a table.
///
/// # Errors
/// `InvalidImage::Name`.
pub fn check_new_name(name: &str) -> Result<(), InvalidImage> {
    check_name(name)?;
    let odd = name.starts_with('-') || name.chars().any(char::is_whitespace);
    if odd { Err(InvalidImage::Name) } else { Ok(()) }
}

/// Whether an image may have this object order.
///
/// # Errors
/// `InvalidImage::Order`.
pub fn check_order(order: u8) -> Result<(), InvalidImage> {
    if (OBJECT_ORDER_MIN..=OBJECT_ORDER_MAX).contains(&order) { Ok(()) } else { Err(InvalidImage::Order) }
}

/// Whether an image may have this size. The order must be valid.
///
/// # Errors
/// `InvalidImage::Size`.
pub fn check_size(size: u64, order: u8) -> Result<(), InvalidImage> {
    let fits = i64::try_from(size).is_ok() && objects_of(size, order) <= OBJECTS_MAX;
    if fits { Ok(()) } else { Err(InvalidImage::Size) }
}
