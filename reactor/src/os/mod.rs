//! The real world.
//!
//! [`ring`] (one io_uring per reactor), [`Reactor`] (the loop: spin, yield, park), clock and entropy, [`cpu`] (cores
//! and pinning), [`spawn`] (pinned threads).
#![allow(clippy::disallowed_methods, reason = "the real world behind the seams: clocks, randomness, threads")]
#![allow(unsafe_code)]

mod clock;
pub mod cpu;
mod entropy;
mod reactor;
mod registered;
pub mod ring;
mod spin;
mod stats;

pub use clock::{OsClock, thread_cpu_time};
pub use entropy::OsEntropy;
pub use reactor::{Reactor, ReactorError, ReactorSettings, Spawned, StopFlag, spawn};
pub use registered::RegisteredPool;
pub use stats::{ReactorStats, Stall};

#[cfg(test)]
mod tests;
