//! Load generators and the machine's floor.
//!
//! [`load`] drives an image at a fixed queue depth and records latencies; [`floor`] measures what the same machine
//! needs for the parts that nobody can avoid: a durable write per copy and a round trip.
#![forbid(unsafe_code)]

pub mod floor;
pub mod load;
