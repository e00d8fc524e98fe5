//! Programs that we did not write, against `loligo nbd`.
#![allow(clippy::disallowed_methods, reason = "real processes live in real time")]

mod guest;
mod nbd_tools;

use anyhow::{Context, Result, ensure};
use std::process::Command;

/// Runs a program that must be installed (`tests/run` sees to it) and succeed; returns its standard output.
fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output().with_context(|| {
        format!("run {program}: is it installed? `tests/run` installs what the tests need")
    })?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{program} {arguments:?} ended with {}:\n{out}{err}", output.status);
    Ok(out.into_owned())
}
