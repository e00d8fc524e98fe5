//! Sockets on the reactor's io_uring. `docs/transport.md` has the reasons and the measurements.
//!
//! [`tcp`] moves our frames, [`stream`] bytes of foreign protocols. Both stand on one set of sockets (`socket`,
//! `listener`), which stands on the ring (`ring`: all that is unsafe). [`memory`] connects endpoints within one thread,
//! for tests and simulations.
#![allow(clippy::disallowed_methods, reason = "a back end: the sockets behind the seam")]

mod listener;
pub mod memory;
mod ring;
mod socket;
pub mod stream;
pub mod tcp;
#[cfg(test)]
mod tests;
