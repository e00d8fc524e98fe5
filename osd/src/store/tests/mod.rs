//! Tests of the whole store on a device with a volatile cache that is cut at any point.

mod device;
mod exhaustive;
mod faults;
mod harness;
mod images;
mod media;
mod mkfs;
mod model;
mod nth;
mod oracle;
mod shards;
mod space;
mod tail;
