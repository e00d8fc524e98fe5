//! Each line marked BITE uses one thing that osd, client, net and mon reach only through the seams.
#![allow(unused)]

type Planted = Result<(), Box<dyn std::error::Error>>;

fn time(at: Option<std::time::SystemTime>) { // BITE
    std::time::Instant::now(); // BITE
    std::time::SystemTime::now(); // BITE
}

fn threads() {
    std::thread::spawn(|| ()); // BITE
    std::thread::scope(|_| ()); // BITE
    let _ = std::thread::Builder::new().spawn(|| ()); // BITE
    std::thread::sleep(std::time::Duration::ZERO); // BITE
    std::thread::park(); // BITE
    std::thread::park_timeout(std::time::Duration::ZERO); // BITE
    std::thread::yield_now(); // BITE
    std::process::Command::new("date"); // BITE
}

fn network(at: std::net::SocketAddr) -> Planted {
    std::net::TcpListener::bind(at)?; // BITE
    std::net::TcpStream::connect(at)?; // BITE
    std::net::TcpStream::connect_timeout(&at, std::time::Duration::ZERO)?; // BITE
    std::net::UdpSocket::bind(at)?; // BITE
    std::net::ToSocketAddrs::to_socket_addrs("host:1")?; // BITE
    std::os::unix::net::UnixListener::bind("/tmp/a")?; // BITE
    std::os::unix::net::UnixStream::connect("/tmp/a")?; // BITE
    std::os::unix::net::UnixStream::pair()?; // BITE
    Ok(())
}

fn files() -> Planted {
    std::fs::File::open("a")?; // BITE
    std::fs::File::create("a")?; // BITE
    std::fs::OpenOptions::new().open("a")?; // BITE
    std::fs::read("a")?; // BITE
    std::fs::read_to_string("a")?; // BITE
    std::fs::write("a", "b")?; // BITE
    std::fs::metadata("a")?; // BITE
    std::fs::symlink_metadata("a")?; // BITE
    std::fs::remove_file("a")?; // BITE
    std::fs::remove_dir_all("a")?; // BITE
    std::fs::create_dir("a")?; // BITE
    std::fs::create_dir_all("a")?; // BITE
    std::fs::read_dir("a")?; // BITE
    std::fs::rename("a", "b")?; // BITE
    std::fs::copy("a", "b")?; // BITE
    std::fs::canonicalize("a")?; // BITE
    Ok(())
}

fn randomness() {
    std::hash::RandomState::new(); // BITE
    let map: std::collections::HashMap<u8, u8> = Default::default(); // BITE
    let set: std::collections::HashSet<u8> = Default::default(); // BITE
}
