//! Tests of the whole store on a device with a volatile cache that is cut at any point.

mod device;
mod faults;
mod harness;
mod mkfs;
mod model;
mod space;
mod tail;
