//! The whole cluster in one thread, from one seed (`docs/simulation.md`).
//!
//! The mon, the OSDs with their stores, and the clients are the product's own; clock, network, disks and randomness are
//! here. Reading order: [`world`] (the types, who is where), [`clock`], [`disk`], then the processes: [`mon`], [`osd`],
//! [`client`], [`admin`]; [`workload`] (what clients do and whether what they see is right), [`cluster`] (the event loop),
//! [`options`] and [`plan`] (what a seed draws), [`faults`] (how faults strike), [`watch`] and `promises` (what must hold), [`run`]
//! (one run from its begin to its end), [`shrink`], [`trace`].
#![deny(clippy::disallowed_methods)]

pub mod admin;
pub mod client;
pub mod clock;
pub mod cluster;
pub mod disk;
pub mod faults;
pub mod mon;
#[cfg(feature = "planted")]
pub mod mutants;
pub mod options;
pub mod osd;
pub mod plan;
mod promises;
pub mod run;
pub mod shrink;
pub mod trace;
pub mod watch;
pub mod workload;
pub mod world;
