//! Images: what they are ([`header`], [`directory`], both stored as a [`document`]), what is done to them as a
//! whole (`admin`), and their I/O (`io`). `docs/images.md` has the formats and the crash order of every operation.

pub mod directory;
pub mod document;
pub mod header;
