//! Devices in software.
//!
//! [`device`] is a block device with a volatile cache, behind the `BlockDevice` seam itself. Its names are exported
//! here, since everybody means it by "the model".

pub mod device;

pub use device::*;
