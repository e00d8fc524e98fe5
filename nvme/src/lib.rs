//! Block devices behind the `BlockDevice` seam.
//!
//! [`uring`] serves files and block devices through the kernel, [`model`] is a device in software with a volatile
//! cache that loses at a power cut what was not flushed. [`conformance`] holds the checks that every one must pass.
#![deny(unsafe_code)]

pub mod conformance;
pub mod model;
pub mod spec;
pub mod uring;
