//! `loligo nbd`: serves images in the foreground.

use crate::args::{Global, NbdArgs};
use crate::cluster::{self, ImageSpec, Parts};
use crate::daemon;
use crate::output::{self, Failure, Format, Outcome};
use loligo_client::Client;
use loligo_client::ImageError;
use loligo_client::blocking::Blocking;
use loligo_client::frontend::nbd::{ExportName, Exports, Server, ServerSettings};
use loligo_config::file::PollMode;
use loligo_net::transport::stream::{StreamOptions, StreamServer};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::os::ring::Ring;
use loligo_reactor::os::{Reactor, StopFlag};
use loligo_reactor::poller::{Poller, Turn};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// Time for a client's handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Time that connections get to finish when the server is told to stop.
const DRAIN_MAX: Duration = Duration::from_secs(5);

/// Serves until told to stop.
///
/// # Errors
/// When the cluster cannot be reached, an image is not there, or nothing can be listened on.
pub fn run(global: &Global, args: &NbdArgs) -> Outcome {
    let stop = daemon::begin(global.log_format)?;
    let host = cluster::host_file(global)?;
    if let Some(address) = args.listen {
        daemon::check_listen(address, args.insecure_listen, host.as_ref())?;
    }
    let specs = args.images.iter().map(|text| ImageSpec::parse(text, None)).collect::<Outcome<Vec<_>>>()?;
    let target = cluster::target(global, host.as_ref())?;
    let mode = args.poll.or(host.as_ref().map(|host| host.reactor.poll)).unwrap_or(PollMode::Adaptive);
    let Parts { ring, pool, client } = cluster::client(target, None)?;
    let core = match mode {
        PollMode::Busy => loligo_reactor::os::cpu::allowed_cores().map_err(Failure::plain)?.last().copied(),
        PollMode::Adaptive | PollMode::Park => None,
    };
    let reactor = cluster::reactor(&ring, "nbd", mode, core)?;
    let mut blocking = Blocking::new(client, reactor);
    blocking.connect(global.timeout)?;
    for spec in &specs {
        let image = blocking.open(&spec.pool, &spec.image)?;
        blocking.close(image);
    }
    for pool in &args.pool {
        blocking.list(pool).map_err(|error: ImageError| Failure::plain(error))?;
    }
    let (client, mut reactor) = blocking.into_parts();
    let (streams, places) = listen(args, &ring, &pool)?;
    let exports = exports(args, &specs);
    ready(global.format, args, &specs, &places);
    let settings = ServerSettings { exports, read_only: args.read_only, handshake: HANDSHAKE_MAX };
    serve(Server::new(settings, streams, client, pool), &mut reactor, &stop);
    Ok(())
}

fn exports(args: &NbdArgs, specs: &[ImageSpec]) -> Exports {
    if !args.pool.is_empty() {
        return Exports::Pools(args.pool.clone());
    }
    let name = |spec: &ImageSpec| ExportName { pool: spec.pool.clone(), image: spec.image.clone() };
    Exports::Only(specs.iter().map(name).collect())
}

fn serve(mut server: Server<StreamServer, Client<crate::world::Os>>, reactor: &mut Reactor, stop: &StopFlag) {
    reactor.run(&mut [&mut server], stop);
    server.stop();
    let end = crate::world::now().after(DRAIN_MAX);
    while server.connections() > 0 && crate::world::now() < end {
        let mut deadline = Deadline(end);
        reactor.turn(&mut [&mut server, &mut deadline]);
    }
}

/// Wakes the loop at a given time.
struct Deadline(loligo_reactor::env::Instant);

impl Poller for Deadline {
    fn name(&self) -> &'static str {
        "deadline"
    }

    fn poll(&mut self, _: loligo_reactor::env::Instant) -> loligo_reactor::poller::Activity {
        loligo_reactor::poller::Activity::Idle
    }

    fn next_deadline(&self) -> Option<loligo_reactor::env::Instant> {
        Some(self.0)
    }

    fn expecting(&self) -> bool {
        false
    }
}

/// Where clients connect: the beginnings and ends of URIs, around the export's name.
type Place = (String, String);

fn listen(args: &NbdArgs, ring: &Ring, pool: &BufferPool) -> Outcome<(StreamServer, Vec<Place>)> {
    let mut streams = StreamServer::new(ring, pool, StreamOptions::default());
    let mut places = Vec::new();
    if let Some(address) = args.listen {
        daemon::wait_for_port(address)?;
        let address =
            streams.listen_tcp(address).map_err(|error| daemon::cannot_listen(&error.to_string()))?;
        places.push((format!("nbd://{address}/"), String::new()));
    }
    if let Some(path) = &args.socket {
        streams
            .listen_unix(path)
            .map_err(|error| Failure::new(error.to_string(), "choose another path with --socket"))?;
        let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        places.push(("nbd+unix:///".to_owned(), format!("?socket={}", escaped(&path))));
    }
    Ok((streams, places))
}

/// A path in a URI's query.
fn escaped(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~:@,+".contains(&byte);
    let bytes = path.as_os_str().as_bytes().iter();
    bytes
        .map(|&byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// Says where the images are, once they can be used.
fn ready(format: Format, args: &NbdArgs, specs: &[ImageSpec], places: &[Place]) {
    let mut names: Vec<String> = specs.iter().map(ImageSpec::to_string).collect();
    names.extend(args.pool.iter().map(|pool| format!("{pool}/IMAGE")));
    let uris =
        |name: &String| places.iter().map(|(begin, end)| format!("{begin}{name}{end}")).collect::<Vec<_>>();
    let all: Vec<String> = names.iter().flat_map(uris).collect();
    let value: Value = json!({ "ready": true, "uris": all });
    output::show(format, &value, |_| all.iter().map(|uri| format!("serving {uri}\n")).collect());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_escaped_for_uris() {
        assert_eq!(escaped(Path::new("/run/loligo-1.sock")), "/run/loligo-1.sock");
        assert_eq!(escaped(Path::new("/a b/%?&#")), "/a%20b/%25%3F%26%23");
    }
}
