//! The Linux kernel in a guest: nbd module, ext4 and xfs on an image.

use anyhow::{Context, Result, ensure};
use loligo_tests::process::executable;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program that boots a guest: `$LOLIGO_VM_RUN`, else the one beside the repository.
fn vm_run() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("LOLIGO_VM_RUN") {
        return Some(PathBuf::from(path));
    }
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/vm/run");
    beside.is_file().then_some(beside)
}

#[test]
fn kernel_file_systems_live_on_an_image() -> Result<()> {
    let Some(vm_run) = vm_run() else {
        eprintln!("skipped: no program to boot a guest with; set LOLIGO_VM_RUN");
        return Ok(());
    };
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
