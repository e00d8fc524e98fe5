//! Block devices behind the `BlockDevice` seam.
//!
//! - [`uring`] serves files and block devices through the kernel.
//! - The user-space NVMe driver, from the ground up: [`spec`] (the words), [`bus`] (what it needs of the machine),
//!   [`queue`] (rings in shared memory), [`controller`] (its life, and what all queues share), [`namespace`] (one queue
//!   pair as a block device), and on hardware [`vfio`] with [`mmio`].
//! - [`model`] has devices in software: one with a volatile cache that loses at a power cut what was not flushed, and an
//!   NVMe controller for the driver.
//! - [`conformance`] holds the checks that every block device must pass.
#![deny(unsafe_code)]

pub mod bus;
pub mod conformance;
pub mod controller;
pub mod mmio;
pub mod model;
pub mod namespace;
pub mod queue;
pub mod spec;
pub mod uring;
pub mod vfio;
