//! nbdinfo, nbdcopy, qemu-img and fio.

use super::run;
use anyhow::{Context, Result, ensure};
use loligo_tests::process::{Cluster, ClusterOptions};
use loligo_tests::random::Random;
use std::path::Path;

fn cluster() -> Result<Cluster> {
    let cluster = Cluster::start(ClusterOptions { size: "1G".into(), ..ClusterOptions::default() })?;
    cluster.run(&["pool", "create", "pool", "--size", "3", "--pg-count", "16", "--failure-domain", "osd"])?;
    Ok(cluster)
}

fn random_file(path: &Path, len: usize) -> Result<()> {
    let mut random = Random::new(77);
    let words: Vec<u8> = (0..len / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect();
    std::fs::write(path, words).context("write the random file")
}

fn used_bytes(cluster: &Cluster, image: &str) -> Result<u64> {
    let usage = cluster.json(&["rbd", "du", image])?;
    usage["images"][0]["used_size"].as_u64().with_context(|| format!("no used_size in {usage}"))
}

#[test]
fn nbdinfo_sees_sizes_flags_and_all_exports() -> Result<()> {
    let cluster = cluster()?;
    cluster.run(&["rbd", "create", "pool/one", "--size", "64M"])?;
    cluster.run(&["rbd", "create", "pool/two", "--size", "1G", "--object-size", "1M"])?;
    let server = cluster.serve_nbd(&["pool/one", "pool/two"])?;
    let info: serde_json::Value =
        serde_json::from_str(&run("nbdinfo", &["--json", &server.uri("pool/two")])?)?;
    let export = &info["exports"][0];
    ensure!(export["export-size"].as_u64() == Some(1 << 30), "size: {info}");
    ensure!(export["block_size_minimum"].as_u64() == Some(1), "minimum block size: {info}");
    ensure!(export["block_size_preferred"].as_u64() == Some(4096), "preferred block size: {info}");
    let expected = ["can_flush", "can_fua", "can_trim", "can_zero", "can_cache", "can_multi_conn"];
    for flag in expected {
        ensure!(export[flag].as_bool() == Some(true), "{flag} must be advertised: {info}");
    }
    ensure!(export["is_read_only"].as_bool() == Some(false), "{info}");
    ensure!(export["contexts"].to_string().contains("base:allocation"), "{info}");
    let list = run("nbdinfo", &["--list", "--json", &server.uri("")])?;
    ensure!(list.contains("pool/one") && list.contains("pool/two"), "{list}");
    Ok(())
}

#[test]
fn nbdcopy_brings_a_random_image_in_and_out() -> Result<()> {
    let mut cluster = cluster()?;
    cluster.run(&["rbd", "create", "pool/copy", "--size", "256M"])?;
    let server = cluster.serve_nbd(&["pool/copy"])?;
    let (original, back) = (cluster.folder().join("original"), cluster.folder().join("back"));
    random_file(&original, 256 << 20)?;
    run("nbdcopy", &[&original.display().to_string(), &server.uri("pool/copy")])?;
    run("nbdcopy", &[&server.uri("pool/copy"), &back.display().to_string()])?;
    run("cmp", &[&original.display().to_string(), &back.display().to_string()])?;
    cluster.check()
}

#[test]
fn qemu_img_keeps_a_sparse_image_sparse() -> Result<()> {
    let mut cluster = cluster()?;
    cluster.run(&["rbd", "create", "pool/sparse", "--size", "256M"])?;
    let server = cluster.serve_nbd(&["pool/sparse"])?;
    let path = |name: &str| cluster.folder().join(name).display().to_string();
    let (raw, qcow, back) = (path("raw"), path("in.qcow2"), path("out.qcow2"));
    sparse_file(Path::new(&raw), 256 << 20)?;
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &raw, &qcow])?;
    let uri = server.uri("pool/sparse");
    run("qemu-img", &["convert", "-n", "-f", "qcow2", "-O", "raw", &qcow, &uri])?;
    run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", &qcow, &uri])?;
    let used = used_bytes(&cluster, "pool/sparse")?;
    ensure!((8 << 20..32 << 20).contains(&used), "16 MiB of data take {used} bytes in the cluster");
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, &back])?;
    run("qemu-img", &["compare", "-f", "qcow2", "-F", "qcow2", &qcow, &back])?;
    let size = std::fs::metadata(&back)?.len();
    ensure!(size < 32 << 20, "the copy that came out takes {size} bytes: the holes were lost");
    cluster.check()
}

/// 16 pieces of 1 MiB of data, with holes between them.
fn sparse_file(path: &Path, len: u64) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path)?;
    file.set_len(len)?;
    let mut random = Random::new(78);
    for piece in 0..16 {
        let data: Vec<u8> = (0..1 << 17).flat_map(|_| random.next_u64().to_le_bytes()).collect();
        file.write_all_at(&data, piece * (len / 16) + (1 << 16))?;
    }
    Ok(())
}

#[test]
fn fio_verifies_random_writes_at_queue_depth_32() -> Result<()> {
    let mut cluster = cluster()?;
    cluster.run(&["rbd", "create", "pool/fio", "--size", "64M"])?;
    let server = cluster.serve_nbd(&["pool/fio"])?;
    let uri = format!("--uri={}", server.uri("pool/fio"));
    let fixed =
        ["--name=verify", "--ioengine=nbd", "--rw=randwrite", "--bs=4k", "--iodepth=32", "--size=64M"];
    let check = [
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--do_verify=1",
        "--randrepeat=0",
        "--output-format=json",
    ];
    let text = run("fio", &[&fixed[..], &check[..], &[&uri]].concat())?;
    // The engine greets the server on standard output, before the report.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: serde_json::Value =
        serde_json::from_str(json).with_context(|| format!("fio printed: {text}"))?;
    let job = &report["jobs"][0];
    ensure!(job["error"].as_u64() == Some(0), "fio found errors: {text}");
    let (written, read) = (job["write"]["total_ios"].as_u64(), job["read"]["total_ios"].as_u64());
    ensure!(written == Some(16384) && read >= Some(16384), "{written:?} writes, {read:?} reads");
    cluster.check()
}
