//! The driver on emulated NVMe controllers: a guest with VFIO and a virtual IOMMU.
//!
//! The tests here boot a guest with the program that `LOLIGO_VM_RUN` names (`tests/run` finds it) and run this same
//! binary in it, where the functions of `inside` do the work. Every guest fails when its kernel has logged an access to
//! memory that was not mapped: the emulated controller completes such a command with success.
#![allow(clippy::disallowed_methods, reason = "it boots a machine, in a process of its own")]

mod inside;

use std::process::{Command, Output};

/// Names the program that boots a guest: `PROGRAM [options] -- COMMAND`.
const VM_RUN: &str = "LOLIGO_VM_RUN";
/// Says that there is none on this machine, so that a missing one is a choice and not an accident.
const NO_VM: &str = "LOLIGO_NO_VM";

/// Runs one of the ignored tests of `inside` in a guest with these options. `None`: there is no program for guests.
fn boot(options: &[&str], test: &str) -> Option<Output> {
    if std::env::var_os(NO_VM).is_some() {
        eprintln!("skipped: {NO_VM} is set");
        return None;
    }
    let Some(vm_run) = std::env::var_os(VM_RUN) else {
        panic!(
            "set {VM_RUN} to the program that boots a guest, or {NO_VM}=1 to go without one (`tests/run` does)"
        )
    };
    let program = std::env::current_exe().expect("this program has a path");
    let folder = program.parent().expect("it lies in a folder");
    let output = Command::new(vm_run)
        .args(options)
        .args(["--timeout", "300", "--share"])
        .arg(folder)
        .arg("--")
        .arg(&program)
        .args(["--ignored", "--exact", "--nocapture", "--test-threads", "1", test])
        .output();
    Some(output.expect("the program for guests can be run"))
}

fn passes(options: &[&str], test: &str) {
    let Some(output) = boot(options, test) else { return };
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "the guest ended with {}:\n{out}\n{err}", output.status);
    assert!(out.contains("1 passed"), "{test} has not run:\n{out}\n{err}");
}

/// 512 and 4096 byte blocks, two namespaces each, small MDTS, few queues, write cache on and off.
const KINDS: &[&str] = &[
    "--vfio",
    "--hugepages",
    "128",
    "--nvme-ns",
    "2",
    "--nvme-size",
    "64M",
    "--nvme-props",
    "1:mdts=3,max_ioqpairs=2",
    "--ns-props",
    "1:logical_block_size=4096,physical_block_size=4096",
    "--ns-props",
    "1:write-cache=off",
    "--ns-props",
    "2:logical_block_size=4096,physical_block_size=4096",
];

#[test]
fn controllers_of_all_kinds_conform() {
    passes(KINDS, "inside::conformance");
}

#[test]
fn resets_under_load_and_dirty_deaths_lose_nothing() {
    passes(KINDS, "inside::resets_and_deaths");
}

#[test]
fn normal_pages_and_narrow_addresses_do() {
    passes(&["--vfio", "--aw-bits", "39", "--nvme", "1", "--nvme-size", "64M"], "inside::conformance");
}
