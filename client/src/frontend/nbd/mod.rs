//! NBD, the Network Block Device protocol: what QEMU, `nbdcopy`, fio and the Linux kernel speak.
//!
//! Reading order: [`protocol`] (numbers and layouts), [`session`] (one connection, sans-I/O: bytes and completions in,
//! actions out), its parts `options` (handshake) and `transmission` (requests), [`server`] (binds sessions to
//! [`Streams`](loligo_reactor::env::Streams) and to images).
//!
//! Source of every rule here: the NBD project's `doc/proto.md`, cited by its section names.

mod exports;
mod options;
pub mod protocol;
pub mod server;
pub mod session;
mod source;
mod transmission;

#[cfg(test)]
mod tests;

pub use exports::{ExportName, Exports};
pub use server::{Images, Server, ServerSettings};
