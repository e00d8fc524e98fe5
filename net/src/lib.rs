//! Messages between processes.
//!
//! Reading order: [`wire`] (the messages and their layout; `docs/wire-protocol.md` has the picture),
//! [`framing`] (bytes ↔ frames, sans-I/O), [`messenger`] (handshake, identity, liveness: what osd, mon and client
//! use), [`session`] (what a sender keeps for resending), [`outage`] (when to speak of a missing mon), [`transport`]
//! (TCP on io_uring, in memory).
#![deny(unsafe_code)]

pub mod framing;
pub mod messenger;
pub mod outage;
pub mod session;
pub mod transport;
pub mod wire;
