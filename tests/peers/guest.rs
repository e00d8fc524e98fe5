//! The Linux kernel in a guest: nbd module, ext4 and xfs on an image.

use anyhow::{Context, Result, ensure};
use loligo_tests::process::executable;
use std::path::Path;
use std::process::Command;

/// Names the program that boots a guest: `PROGRAM [options] -- COMMAND`, as `tests/run` found it.
const VM_RUN: &str = "LOLIGO_VM_RUN";
/// Says that there is no such program on this machine, so that a missing one is a choice and not an accident.
const NO_VM: &str = "LOLIGO_NO_VM";

#[test]
fn kernel_file_systems_live_on_an_image() -> Result<()> {
    if std::env::var_os(NO_VM).is_some() {
        eprintln!("skipped: {NO_VM} is set");
        return Ok(());
    }
    let vm_run = std::env::var_os(VM_RUN).with_context(|| {
        format!("set {VM_RUN} to the program that boots a guest, or {NO_VM}=1 to go without one (`tests/run` does)")
    })?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/filesystems.sh");
    let executable = executable()?;
    let share = executable.parent().context("the executable has a folder")?;
    let output = Command::new(vm_run)
        .args(["--nvme", "0", "--mem", "3G", "--timeout", "330", "--modules", "nbd loop ext4 xfs"])
        .arg("--share")
        .arg(share)
        .arg("--share")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")))
        .arg("--")
        .arg("bash")
        .arg(&script)
        .arg(&executable)
        .output()?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "the guest ended with {}:\n{out}\n{err}", output.status);
    for system in ["ext4", "xfs"] {
        ensure!(
            out.contains(&format!("{system}: files are as written")),
            "{system} is missing in:\n{out}\n{err}"
        );
    }
    Ok(())
}
