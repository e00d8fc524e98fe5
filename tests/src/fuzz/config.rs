//! The host file.

use super::Target;
use loligo_config::file::HostFile;

/// A host file's text.
pub const TARGET: Target = Target { name: "host_file", run, seeds, words: WORDS, len_max: 4 << 10 };

const WORDS: &[&[u8]] = &[
    b"[cluster]",
    b"[host]",
    b"[mon]",
    b"[reactor]",
    b"[[osd]]",
    b"[network]",
    b"[auth]",
    b"[heartbeat]",
    b"mons",
    b"id",
    b"name",
    b"rack",
    b"listen",
    b"data",
    b"cores",
    b"poll",
    b"memory_target",
    b"device",
    b"device_class",
    b"backend",
    b"public",
    b"cluster",
    b"mode",
    b"allow_insecure",
    b"interval",
    b"grace",
    b"\"127.0.0.1:6789\"",
    b"\"[::1]:1\"",
    b"\"1 GiB\"",
    b"\"18446744073709551615 EiB\"",
    b"\"3s\"",
    b"\"99999999999999years\"",
    b"\"0-3\"",
    b"[0, 1]",
    b"\n",
    b" = ",
    b"\"",
    b"'''",
    b"\\u0000",
    b"-9223372036854775808",
    b"1e308",
    b"true",
];

fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match HostFile::parse("fuzz.toml", text) {
        Ok(file) => {
            let again = HostFile::parse("written.toml", &file.to_toml());
            assert_eq!(again.as_ref(), Ok(&file), "what is written reads back equal");
            for osd in &file.osds {
                assert_eq!(file.osd(osd.id).map(|found| found.id), Some(osd.id));
                let _ = (file.cores(osd), file.poll_mode(osd), file.memory_target(osd));
            }
        }
        Err(error) => assert!(!error.to_string().is_empty(), "an error says what is wrong"),
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let full = "[cluster]\nid = \"00000000-0000-0000-0000-000000000001\"\nmons = [\"127.0.0.1:6789\"]\n\n\
        [host]\nname = \"a\"\nrack = \"r1\"\n\n[mon]\nlisten = \"127.0.0.1:6789\"\ndata = \"/var/lib/mon\"\n\n\
        [reactor]\ncores = [0, 1]\npoll = \"busy\"\nmemory_target = \"4 GiB\"\n\n\
        [[osd]]\nid = 3\ndevice = \"/dev/nvme0n1\"\nlisten = \"127.0.0.1:7000\"\ndevice_class = \"nvme\"\n\
        cores = [2]\npoll = \"park\"\nmemory_target = \"1 GiB\"\nbackend = \"model\"\n\n\
        [network]\npublic = \"127.0.0.0/8\"\ncluster = \"127.0.0.0/8\"\n\n\
        [auth]\nmode = \"none\"\nallow_insecure = true\n\n[heartbeat]\ninterval = \"1s\"\ngrace = \"3s\"\n";
    let small = HostFile::new("host", vec!["127.0.0.1:6789".parse().expect("an address")]).to_toml();
    vec![full.as_bytes().to_vec(), small.into_bytes()]
}
