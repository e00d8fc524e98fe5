//! The store: one log and index per shard (DESIGN section 4, `docs/on-disk-format.md`).
//!
//! [`api`] is what PGs see.

pub mod api;
