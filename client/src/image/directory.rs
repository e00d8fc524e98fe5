//! A pool's directory: which image has which name.

use super::document::{Document, DocumentKind};
use super::header::check_name;
use loligo_config::id::{ImageId, ObjectId, ObjectKind, PoolId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the directory knows of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryEntry {
    /// The image.
    pub id: ImageId,
    /// Its removal has begun: it is only there so that the removal can be finished.
    pub removing: bool,
}

/// The directory of one pool. As large as one op at most: about 35,000 images with names of 20 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory {
    /// The images by name.
    pub images: BTreeMap<String, DirectoryEntry>,
}

impl Document for Directory {
    const KIND: DocumentKind = DocumentKind::Directory;

    fn is_valid(&self) -> bool {
        self.images.iter().all(|(name, entry)| check_name(name).is_ok() && entry.id.0 != 0)
    }
}

/// The object that holds a pool's directory.
pub fn directory_object(pool: PoolId) -> ObjectId {
    ObjectId { pool, kind: ObjectKind::Directory, image: ImageId(0), index: 0 }
}
