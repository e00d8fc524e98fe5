//! Transports.

pub mod memory;
