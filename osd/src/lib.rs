//! The storage daemon.
//!
//! Reading order: [`store`] (one log and index per shard; `docs/on-disk-format.md`), [`pg`] (replication and
//! peering as state machines; `docs/peering.md`), [`shard`] (one reactor's part of an OSD: it binds store, PGs and
//! connections), [`map_client`] (maps, boots, reports).
#![forbid(unsafe_code)]

pub mod map_client;
pub mod pg;
pub mod shard;
pub mod store;
