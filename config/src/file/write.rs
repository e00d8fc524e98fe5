//! Writing a host file, so that `loligo dev` can make one. What is written reads back equal.

use super::{Cores, HostFile, OsdSection};
use bytesize::ByteSize;
use std::fmt::{Display, Write};

impl HostFile {
    /// The file's text.
    pub fn to_toml(&self) -> String {
        let mut out = Out::default();
        out.section("[cluster]");
        if let Some(id) = self.cluster.id {
            out.string("id", id);
        }
        let mons: Vec<String> = self.cluster.mons.iter().map(quoted).collect();
        out.raw("mons", format!("[{}]", mons.join(", ")));
        out.section("[host]");
        out.string("name", &self.host.name);
        out.string("rack", &self.host.rack);
        if let Some(mon) = &self.mon {
            out.section("[mon]");
            out.string("listen", mon.listen);
            out.string("data", mon.data.display());
        }
        out.section("[reactor]");
        out.raw("cores", cores(&self.reactor.cores));
        out.string("poll", self.reactor.poll.as_str());
        out.string("memory_target", size(self.reactor.memory_target.0));
        out.section("[heartbeat]");
        out.string("interval", humantime::format_duration(self.heartbeat.interval));
        out.string("grace", humantime::format_duration(self.heartbeat.grace));
        out.section("[auth]");
        out.string("mode", "none");
        out.raw("allow_insecure", self.auth.allow_insecure);
        if self.network.public.is_some() || self.network.cluster.is_some() {
            out.section("[network]");
            let networks = [("public", self.network.public), ("cluster", self.network.cluster)];
            for (key, network) in networks {
                if let Some(network) = network {
                    out.string(key, network);
                }
            }
        }
        self.osds.iter().for_each(|osd| out.osd(osd));
        out.text
    }
}

#[derive(Default)]
struct Out {
    text: String,
}

impl Out {
    fn section(&mut self, header: &str) {
        let gap = if self.text.is_empty() { "" } else { "\n" };
        let _ = writeln!(self.text, "{gap}{header}");
    }

    fn raw(&mut self, key: &str, value: impl Display) {
        let _ = writeln!(self.text, "{key} = {value}");
    }

    fn string(&mut self, key: &str, value: impl Display) {
        self.raw(key, quoted(value));
    }

    fn osd(&mut self, osd: &OsdSection) {
        self.section("[[osd]]");
        self.raw("id", osd.id.0);
        self.string("device", osd.device.display());
        self.string("listen", osd.listen);
        self.string("device_class", &osd.device_class);
        self.string("backend", osd.backend.as_str());
        if let Some(own) = &osd.cores {
            self.raw("cores", cores(own));
        }
        if let Some(poll) = osd.poll {
            self.string("poll", poll.as_str());
        }
        if let Some(target) = osd.memory_target {
            self.string("memory_target", size(target.0));
        }
        if let Some(limit) = osd.device_timeout {
            self.string("device_timeout", humantime::format_duration(limit));
        }
    }
}

fn quoted(value: impl Display) -> String {
    toml::Value::String(value.to_string()).to_string()
}

fn cores(cores: &Cores) -> String {
    match cores {
        Cores::Auto => quoted("auto"),
        Cores::Pinned(list) => {
            let list: Vec<String> = list.iter().map(|core| core.0.to_string()).collect();
            format!("[{}]", list.join(", "))
        }
    }
}

/// Binary units where they are exact, else plain bytes: a rounded size would not read back equal.
fn size(bytes: u64) -> String {
    let text = ByteSize::b(bytes).to_string();
    match text.parse::<ByteSize>() {
        Ok(back) if back.as_u64() == bytes => text,
        _ => bytes.to_string(),
    }
}
