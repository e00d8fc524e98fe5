//! One polling loop per core, and the seams to the world.
//!
//! Reading order: [`env`] (the traits that the real and the simulated world implement), [`poller`]
//! (what runs on a reactor), [`dma`] (buffers that devices and the network read and write),
//! [`mailbox`] (messages between cores), [`timer`] (deadlines of a component), [`random`] (randomness that a seed repeats), [`planted`] (mistakes on purpose, in test builds), [`os`] (the real world: loop, ring, clock, entropy, threads).
#![deny(unsafe_code)]

pub mod dma;
pub mod env;
pub mod mailbox;
pub mod os;
pub mod planted;
pub mod poller;
pub mod random;
pub mod timer;
