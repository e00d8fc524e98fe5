//! Devices in software.
//!
//! - [`device`]: a block device with a volatile cache, behind the `BlockDevice` seam itself. Its names are exported
//!   here, since everybody means it by "the model".
//! - [`controller`]: an NVMe controller with registers, queues and DMA, for the driver to run on. Its namespaces are
//!   such devices.

pub mod controller;
pub mod device;

pub use device::*;
