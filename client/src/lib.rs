//! Image access: what `librbd` is to Ceph.
//!
//! Reading order: [`event`] (what goes in and comes out), `client` ([`Client`]: ties the others to a messenger),
//! [`objecter`] (maps, op resend, ordering), [`image`] (headers, directories, I/O), [`blocking`] (for the command
//! line and tests), [`frontend`] (protocols that serve images to others).
#![deny(unsafe_code)]

pub mod blocking;
mod client;
pub mod error;
pub mod event;
pub mod frontend;
pub mod image;
pub mod objecter;
#[cfg(test)]
mod testing;

pub use client::{Client, ClientSettings};
pub use error::{CommandError, ConnectError, ImageError, InvalidImage, IoError};
pub use event::{
    AdminReply, ClientEvent, Extent, IO_LEN_MAX, ImageHandle, ImageIo, IoDone, ListEntry, Progress, Usage,
    Waterfall,
};
pub use image::header::{CreateOptions, ImageHeader};
pub use image::stats::{ImageStats, KindStats};
