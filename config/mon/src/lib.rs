//! The mon: keeps the cluster map, serves it to OSDs and clients, and takes the admin commands (DESIGN section 6).
//!
//! It is not on the I/O path: without it I/O goes on as long as no membership change is needed.
//!
//! Reading order: [`core`] (the state machine: who is up, which interval is whose; sans-I/O), [`command`] (the admin
//! commands as JSON), `answer` (what `status`, `osd tree` and the like print), [`store`] (what must survive the
//! process: every map before anybody hears of it), [`mon`] (the poller that connects them to a messenger).
//! `config/docs/map.md` has the rules and why they are so.
//!
//! ```text
//!   messenger ──event──▶ Core ──draft of the next map──▶ MapStore ──durable──▶ Core ──actions──▶ messenger
//! ```
#![forbid(unsafe_code)]

mod answer;
pub mod command;
pub mod core;
pub mod mon;
pub mod store;

pub use crate::core::{Core, MonSettings};
pub use crate::mon::{Mon, StartError};
pub use crate::store::{Embedded, MapStore, Memory, StoreError};
