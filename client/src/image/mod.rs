//! Images: what they are ([`header`], [`directory`], both stored as a [`document`]), what is done to them as a
//! whole (`admin`), and their I/O (`io`). `docs/images.md` has the formats and the crash order of every operation.

mod access;
pub(crate) mod admin;
pub mod directory;
pub mod document;
pub mod header;
pub(crate) mod io;
mod objects;
pub(crate) mod resize;
pub mod stats;
pub(crate) mod task;

pub(crate) use access::{Found, ImageName};
