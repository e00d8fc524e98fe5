//! Whole clusters of real processes: what a user would try, and what goes wrong in a machine room.
#![allow(clippy::disallowed_methods, reason = "real processes live in real time")]

mod idle;
mod kill;
mod misuse;
mod outage;
mod stages;
mod thin;
