//! `loligo bench …`: the machine's floor, an image's figures.

mod floor;
pub mod latency;
mod processes;
mod rounds;
pub mod target;

use crate::args::{BenchCommand, Global};
use crate::output::Outcome;

/// `loligo bench …`
///
/// # Errors
/// When something cannot be measured, or would overwrite data that nobody gave up.
pub fn run(global: &Global, command: BenchCommand) -> Outcome {
    match command {
        BenchCommand::Floor(args) => floor::run(global, &args),
        BenchCommand::Qd1(args) => rounds::run(global, &args.load, &rounds::QD1),
        BenchCommand::Profile(args) => rounds::run(global, &args.load, &rounds::PROFILE),
    }
}
