//! Messages between processes.
//!
//! Reading order: [`wire`] (the messages and their layout; `docs/wire-protocol.md` has the picture),
//! [`framing`] (bytes ↔ frames, sans-I/O), [`messenger`] (handshake, identity, liveness: what osd, mon and client
//! use), [`transport`] (TCP on io_uring).
#![deny(unsafe_code)]

pub mod framing;
pub mod messenger;
pub mod transport;
pub mod wire;
