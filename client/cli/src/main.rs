//! `loligo`: the one executable. It alone knows every role and picks the back ends.
//!
//! Reading order: [`args`] (every command), [`cluster`] (finding the cluster), [`world`] (the real world), then one file
//! per noun.
#![allow(clippy::disallowed_methods, reason = "the executable may sleep, start threads and read the time")]
#![deny(unsafe_code)]

mod args;
mod bench;
mod cluster;
mod daemon;
mod demo;
mod dev;
mod mon;
mod nbd;
mod osd;
mod output;
mod pool;
mod process;
mod rbd;
mod status;
mod world;

use args::{Cli, Command, MonCommand};
use clap::Parser;
use clap::error::ErrorKind;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            let _ = error.print(); // Nobody to tell if it cannot be printed.
            return ExitCode::from(if asked { 0 } else { 2 });
        }
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(failure.code)
        }
    }
}

fn run(cli: Cli) -> output::Outcome {
    let global = &cli.global;
    match cli.command {
        Command::Status { watch } => status::status(global, watch),
        Command::Health { detail } => status::health(global, detail),
        Command::Osd(command) => osd::run(global, command),
        Command::Mon(MonCommand::Run(args)) => mon::run(global, &args),
        Command::Pool(command) => pool::run(global, command),
        Command::Rbd(command) => rbd::run(global, command),
        Command::Nbd(args) => nbd::run(global, &args),
        Command::Bench(command) => bench::run(global, command),
        Command::Dev(command) => dev::run(global, command),
        Command::Demo(args) => demo::run(global, &args),
    }
}
