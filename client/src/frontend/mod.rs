//! Protocols that serve images to programs that are not ours.

pub mod nbd;
