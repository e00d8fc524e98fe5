//! The real world: the ring, the loop that runs pollers, clock, entropy, cores and threads.
#![allow(unsafe_code)]

mod clock;
mod registered;
pub mod ring;

pub use clock::OsClock;
pub use registered::RegisteredPool;
