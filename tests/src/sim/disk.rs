//! Disks that lie as real ones do: a volatile cache that a power cut empties in part, late and reordered completions,
//! failures. A [`Media`] is one device with its queues; it stays when processes die. A [`SimDisk`] is one queue.
//!
//! A written block has several *versions* until it is settled: the durable one below, and newer ones that are being
//! written or sit in the cache. Reads see the newest that has completed. A power cut keeps any of them, for every 512-byte
//! sector on its own where the device may tear blocks.

mod media;
mod queue;

pub use media::{Damage, DiskOptions, DiskStats, FailKind, Failure, Media};
pub use queue::SimDisk;

/// A disk, shared by its queues and the world that breaks it.
pub type SharedMedia = std::rc::Rc<std::cell::RefCell<Media>>;
