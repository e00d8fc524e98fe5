//! Checkers, workloads and the harness of every cross-crate test.
//!
//! Reading order: [`process`] (real daemons as children), [`nbd`] (a small NBD client, written apart from the
//! server), [`stamp`] (blocks that name the write that made them), [`check`] (whether what was read is legal),
//! [`workload`] (the checking client), [`cycles`] (kill, restart, check, again), [`sim`] (the whole cluster in one
//! deterministic simulation), [`fuzz`] (bytes from strangers).
//!
//! This package runs real processes, so it uses the real clock and sleeps; `sim` does not.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "real processes live in real time")]

pub mod check;
pub mod cycles;
pub mod fuzz;
pub mod nbd;
pub mod process;
pub use loligo_reactor::random;
pub mod sim;
pub mod stamp;
pub mod workload;
