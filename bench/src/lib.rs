//! Load generators, the machine's floor, and what follows from both.
//!
//! [`load`] drives an image at a fixed queue depth and records latencies; [`floor`] measures what the same machine
//! needs for the parts that nobody can avoid: a durable write per copy and a round trip; [`legs`] says where the time of
//! writes went, and [`gap`] which of it is above the floor; [`recording`] keeps what was measured, and [`compare`] tells two
//! builds apart.
#![forbid(unsafe_code)]

pub mod compare;
pub mod floor;
pub mod gap;
pub mod legs;
pub mod load;
pub mod recording;
