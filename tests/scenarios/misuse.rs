//! Things done wrong: each a clear error, no panic, nothing changed.

use anyhow::{Result, ensure};
use loligo_tests::nbd::Command as Nbd;
use loligo_tests::process::{Cluster, ClusterOptions, executable, wait_for};
use loligo_tests::random::Random;
use loligo_tests::workload::Writer;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// Runs a command that must fail within ten seconds, and returns what it said.
fn refused(arguments: &[String]) -> Result<String> {
    let mut child = Command::new(executable()?)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let waited = wait_for("the command to end", Duration::from_secs(20), || Ok(child.try_wait()?.is_some()));
    if waited.is_err() {
        child.kill()?;
    }
    let Output { status, stdout, stderr } = child.wait_with_output()?;
    let said = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    waited.map_err(|error| error.context(format!("loligo {arguments:?} said: {said}")))?;
    ensure!(!status.success(), "loligo {arguments:?} must fail; it said: {said}");
    ensure!(status.code().is_some(), "loligo {arguments:?} ended with {status}: {said}");
    ensure!(!said.contains("panicked"), "loligo {arguments:?} panicked: {said}");
    Ok(said)
}

fn strings(arguments: &[&str]) -> Vec<String> {
    arguments.iter().map(|argument| argument.to_string()).collect()
}

fn says(said: &str, words: &[&str]) -> Result<()> {
    for word in words {
        ensure!(said.to_lowercase().contains(word), "{word:?} is missing in: {said}");
    }
    Ok(())
}

fn digest(path: &Path) -> Result<u32> {
    let mut file = std::fs::File::open(path)?;
    let mut crc = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(crc.finalize() as u32),
            len => crc.update(&buffer[..len]),
        }
    }
}

#[test]
fn wrong_devices_ids_and_ports_are_refused_and_untouched() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::default())?;
    let other = Cluster::start(ClusterOptions { osds: 1, ..ClusterOptions::default() })?;
    let free = "127.0.0.1:0";

    let second = refused(&cluster.osd_arguments(0, &cluster.device(0), free))?;
    says(&second, &["in use"])?;

    cluster.kill_osd(2)?;
    let before = digest(&cluster.device(2))?;
    says(&refused(&cluster.osd_arguments(1, &cluster.device(2), free))?, &["osd.2", "osd.1"])?;
    says(
        &refused(&cluster.osd_arguments(2, &cluster.device(2), cluster.osd_address(0)))?,
        &["in use", cluster.osd_address(0)],
    )?;
    let device = cluster.device(2).display().to_string();
    says(
        &refused(&strings(&[
            "osd",
            "mkfs",
            "--id",
            "2",
            "--device",
            &device,
            "--mon",
            cluster.mon_address(),
        ]))?,
        &["--force"],
    )?;
    says(
        &refused(&other.osd_arguments(2, &cluster.device(2), free))?,
        &["another cluster", "nothing was changed"],
    )?;
    ensure!(digest(&cluster.device(2))? == before, "a refused command changed the device");

    cluster.start_osd(2)?;
    cluster.wait_until_up(Duration::from_secs(20))?;
    cluster.check()
}

/// The mon knows better than the device itself whether it may be used: it is asked before anything is written.
#[test]
fn devices_that_the_mon_would_refuse_are_untouched() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::default())?;
    let free = "127.0.0.1:0";
    let unchanged = |device: &Path, arguments: &[String], words: &[&str]| {
        let before = digest(device)?;
        says(&refused(arguments)?, words)?;
        ensure!(digest(device)? == before, "a refused OSD changed {}", device.display());
        Ok(())
    };

    let copy = cluster.folder().join("copy");
    std::fs::copy(cluster.device(0), &copy)?;
    unchanged(&copy, &cluster.osd_arguments(0, &copy, free), &["running already", "nothing was changed"])?;

    // Made without the mon's knowledge for an id that another device has.
    let id = cluster.json(&["status"])?["fsid"].as_str().unwrap_or_default().to_owned();
    let made = cluster.folder().join("made");
    let path = made.display().to_string();
    let mkfs = |osd: &str| {
        cluster.run(&[
            "osd",
            "mkfs",
            "--id",
            osd,
            "--cluster",
            &id,
            "--device",
            &path,
            "--size",
            "64M",
            "--force",
        ])
    };
    mkfs("1")?;
    unchanged(&made, &cluster.osd_arguments(1, &made, free), &["another device", "nothing was changed"])?;

    cluster.kill_osd(2)?;
    let wiped = cluster.device(2);
    let kept = cluster.folder().join("kept");
    std::fs::copy(&wiped, &kept)?;
    std::fs::File::options().write(true).open(&wiped)?.write_all(&vec![0; 8 << 20])?;
    unchanged(&wiped, &cluster.osd_arguments(2, &wiped, free), &["mkfs"])?;
    std::fs::copy(&kept, &wiped)?;
    cluster.start_osd(2)?;
    cluster.wait_until_up(Duration::from_secs(20))?;
    cluster.check()
}

/// A mon that cannot be reached is spoken of once, and once more when it is there; a final refusal is not waited out.
#[test]
fn daemons_and_clients_say_what_keeps_them_from_their_mon() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions { osds: 1, ..ClusterOptions::default() })?;
    let mon = cluster.mon_address().to_owned();
    cluster.kill_mon()?;
    let log = |cluster: &mut Cluster| cluster.daemons().map(|daemon| daemon.log_text()).collect::<String>();
    wait_for("the OSD to miss its mon", Duration::from_secs(20), || {
        let text = log(&mut cluster);
        Ok(text.contains("no mon answers at") && text.contains(&mon))
    })?;
    cluster.start_mon()?;
    wait_for("the OSD to find its mon", Duration::from_secs(20), || {
        Ok(log(&mut cluster).contains("a mon answers now"))
    })?;
    ensure!(log(&mut cluster).matches("no mon answers").count() == 1, "it is said once");

    let conf = cluster.folder().join("other.toml");
    let other = "07106c78-6ae2-4c16-aaca-30e396ace972";
    let text = format!("[cluster]\nid = \"{other}\"\nmons = [\"{mon}\"]\n[host]\nname = \"h\"\n");
    std::fs::write(&conf, text)?;
    let begun = std::time::Instant::now();
    let conf = conf.display().to_string();
    says(&refused(&strings(&["status", "--conf", &conf, "--timeout", "60s"]))?, &["another cluster"])?;
    ensure!(begun.elapsed() < Duration::from_secs(10), "a final refusal was waited out");
    cluster.check()
}

#[test]
fn too_small_and_unsuitable_devices_are_refused() -> Result<()> {
    let cluster = Cluster::start(ClusterOptions { osds: 1, ..ClusterOptions::default() })?;
    let small = cluster.folder().join("small").display().to_string();
    let mkfs = |device: &str, size: &str| {
        strings(&[
            "osd",
            "mkfs",
            "--id",
            "7",
            "--device",
            device,
            "--size",
            size,
            "--mon",
            cluster.mon_address(),
        ])
    };
    says(&refused(&mkfs(&small, "64K"))?, &["too small"])?;
    ensure!(!Path::new(&small).exists(), "nothing half-done stays behind");
    // procfs knows no direct I/O, on every kernel.
    says(
        &refused(&strings(&[
            "osd",
            "mkfs",
            "--id",
            "7",
            "--device",
            "/proc/version",
            "--mon",
            cluster.mon_address(),
        ]))?,
        &["/proc/version", "o_direct"],
    )?;
    says(
        &refused(&cluster.osd_arguments(7, Path::new("/nonexistent/device"), "127.0.0.1:0"))?,
        &["/nonexistent/device"],
    )?;
    let foreign = cluster.folder().join("foreign");
    std::fs::write(&foreign, vec![0x5a; 64 << 20])?;
    says(&refused(&cluster.osd_arguments(7, &foreign, "127.0.0.1:0"))?, &["not a loligo device"])?;
    Ok(())
}

#[test]
fn garbage_at_every_port_disturbs_nobody() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::default())?;
    let image = cluster.make_image("16M")?;
    let server = cluster.serve_nbd(&[&image])?;
    let mut random = Random::new(3);
    let mut addresses = vec![cluster.mon_address().to_owned()];
    addresses.extend((0..3).map(|id| cluster.osd_address(id).to_owned()));
    addresses.push(server.address.clone());
    for address in &addresses {
        for len in [1usize, 64, 4096, 300_000] {
            let mut stream = TcpStream::connect(address)?;
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            let garbage: Vec<u8> = (0..len).map(|_| random.next_u64() as u8).collect();
            // The daemon may close before it has taken everything.
            let _ = stream.write_all(&garbage);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            ensure!(answer.len() < 4096, "garbage got {} bytes back", answer.len());
        }
    }
    let mut stream = std::os::unix::net::UnixStream::connect(&server.socket)?;
    let _ = stream.write_all(&[0xff; 100_000]);
    drop(stream);
    let mut connection = Writer::connect(&server.socket, &image)?;
    connection.write(8192, &[9; 4096])?;
    ensure!(connection.read(8192, 4096)? == [9; 4096], "the image works as before");
    cluster.check()
}

#[test]
fn a_client_of_another_cluster_gets_nothing() -> Result<()> {
    let cluster = Cluster::start(ClusterOptions { osds: 1, ..ClusterOptions::default() })?;
    let conf = cluster.folder().join("other.toml");
    let other = "07106c78-6ae2-4c16-aaca-30e396ace972";
    let mon = cluster.mon_address();
    std::fs::write(
        &conf,
        format!("[cluster]\nid = \"{other}\"\nmons = [\"{mon}\"]\n[host]\nname = \"h\"\n"),
    )?;
    let said = refused(&strings(&["status", "--conf", &conf.display().to_string(), "--timeout", "3s"]))?;
    says(&said, &["another cluster", mon])?;
    says(&refused(&strings(&["rbd", "ls", "nopool", "--mon", mon]))?, &["nopool"])?;
    says(&refused(&strings(&["status", "--mon", "127.0.0.1:1", "--timeout", "2s"]))?, &["127.0.0.1:1"])
}

#[test]
fn an_image_that_is_open_elsewhere_is_removed_by_force_alone() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::default())?;
    let image = cluster.make_image("16M")?;
    let server = cluster.serve_nbd(&[&image])?;
    let mut connection = Writer::connect(&server.socket, &image)?;
    connection.write(0, &[7; 4096])?;
    let rm = strings(&["rbd", "rm", &image, "--mon", cluster.mon_address()]);
    says(&refused(&rm)?, &["in use by session", "--force"])?;
    ensure!(connection.read(0, 4096)? == [7; 4096], "the image is as before");

    cluster.run(&["rbd", "resize", &image, "--size", "8M", "--allow-shrink"])?;
    wait_for("the server to hear of the new size", Duration::from_secs(10), || {
        connection.send(Nbd::Write, 1, 12 << 20, 4096, &[1; 4096])?;
        Ok(connection.receive()?.error != 0)
    })?;
    ensure!(connection.read(0, 4096)? == [7; 4096], "what was kept is there");

    cluster.run(&["rbd", "rm", &image, "--force"])?;
    ensure!(cluster.run(&["rbd", "ls", "pool"])?.trim().is_empty(), "the image is gone");
    cluster.check()
}

#[test]
fn wrong_values_are_refused_with_what_is_allowed() -> Result<()> {
    let cluster = Cluster::start(ClusterOptions { osds: 1, ..ClusterOptions::default() })?;
    let mon = cluster.mon_address();
    cluster.run(&["pool", "create", "rbd", "--size", "1", "--failure-domain", "osd"])?;
    cluster.run(&["rbd", "create", "rbd/disk", "--size", "8M"])?;
    let bench = |size: &str| {
        strings(&["rbd", "bench", "rbd/disk", "--io-type", "write", "--io-size", size, "--mon", mon])
    };
    says(&refused(&bench("0"))?, &["1 byte to 16m"])?;
    says(&refused(&bench("32M"))?, &["1 byte to 16m"])?;
    let said = refused(&strings(&["pool", "set", "rbd", "min_size", "9", "--mon", mon]))?;
    says(&said, &["`min_size`", "from 1 to 1"])?;
    says(&refused(&strings(&["nbd", "rbd/disk", "--mon", mon]))?, &["--listen", "--socket"])?;
    ensure!(cluster.run(&["pool", "get", "rbd", "pg_num"])?.starts_with("pg_num: "), "Ceph's word is known");
    for name in ["rbd/a b", "rbd/a\tb", "rbd/-a", "rbd/a@b"] {
        let create = strings(&["rbd", "create", "--size", "1M", "--mon", mon, "--", name]);
        says(&refused(&create)?, &["invalid image name"])?;
    }
    says(&refused(&strings(&["pool", "create", "a b", "--mon", mon]))?, &["letters, digits"])?;
    let too_many =
        strings(&["rbd", "create", "rbd/big", "--size", "5000P", "--object-size", "4K", "--mon", mon]);
    says(&refused(&too_many)?, &["2^40 objects", "--object-size"])?;

    // The advice can be followed: without --id there is always one.
    let device = cluster.folder().join("new").display().to_string();
    let mkfs = ["osd", "mkfs", "--device", &device, "--size", "64M"];
    let taken = refused(&strings(&[&mkfs[..], &["--id", "0", "--mon", mon]].concat()))?;
    says(&taken, &["osd.0 belongs to another device", "leave --id out"])?;
    let made = cluster.json(&mkfs)?;
    ensure!(made["osd"] == 1, "the lowest free id, not {}", made["osd"]);
    let again = [&mkfs[..], &["--force"]].concat();
    ensure!(cluster.json(&again)?["osd"] == 2, "a device that is made again is another one");
    Ok(())
}

/// A full cluster says ENOSPC, keeps what it has, lets people delete, and survives a restart.
#[test]
fn a_full_cluster_refuses_writes_and_recovers_by_deleting() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions { size: "96M".into(), ..ClusterOptions::default() })?;
    let image = cluster.make_image("256M")?;
    let server = cluster.serve_nbd(&[&image])?;
    let mut connection = Writer::connect(&server.socket, &image)?;
    let chunk = vec![7; 1 << 20];
    let mut written = 0;
    let error = loop {
        ensure!(written < 256, "256 MiB cannot fit on 96 MiB devices");
        connection.send(Nbd::Write, 1, written << 20, 1 << 20, &chunk)?;
        match connection.receive()?.error {
            0 => written += 1,
            error => break error,
        }
    };
    ensure!(error == 28, "a full cluster answers ENOSPC, not {error}");
    ensure!(written >= 16, "only {written} MiB of 96 MiB could be used");
    for id in 0..3 {
        cluster.kill_osd(id)?;
        cluster.start_osd(id)?;
    }
    ensure!(connection.read(0, 1 << 20)? == chunk, "what was acked is still there after a restart");
    connection.call(Nbd::Trim, 0, u32::try_from(written << 20)?, &[])?;
    wait_for("space to be free again", Duration::from_secs(20), || {
        connection.send(Nbd::Write, 2, 0, 1 << 20, &chunk)?;
        Ok(connection.receive()?.error == 0)
    })?;
    cluster.check()
}
