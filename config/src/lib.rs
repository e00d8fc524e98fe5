//! The vocabulary of the cluster: pure data, no I/O.
//!
//! Reading order: [`id`] and [`units`] (newtypes), [`pool`] and [`map`] (the cluster map and its
//! epochs), [`placement`] (object → PG → acting set), [`file`] (the host file in TOML),
//! [`limits`] (every bound that sizes a table or a queue).
#![forbid(unsafe_code)]

pub mod file;
pub mod id;
pub mod limits;
pub mod map;
pub mod placement;
pub mod pool;
pub mod units;
