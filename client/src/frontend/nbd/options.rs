//! The handshake: option haggling ("Option types" of the protocol).

use super::protocol::{
    BLOCK_LEN_MIN, BLOCK_LEN_PREFERRED, CONTEXT_ALLOCATION, CONTEXT_ALLOCATION_ID, Fields, PAYLOAD_LEN_MAX,
    STRING_LEN_MAX, info, option, reply, transmission_flag as flag,
};
use super::session::{Action, Ending, Export, OpenRefused, Session, append_option_reply};

/// What was agreed so far.
#[derive(Debug, Default)]
pub(super) struct Handshake {
    /// The client understands option replies.
    pub fixed_newstyle: bool,
    /// The client wants no padding after `EXPORT_NAME`.
    pub no_zeroes: bool,
    /// Reads are answered in chunks.
    pub structured: bool,
    /// The export for which `base:allocation` was chosen. It counts for that name alone.
    pub context: Option<String>,
}

/// What to do with the server's answer.
#[derive(Debug)]
pub(super) enum Waiting {
    /// For `EXPORT_NAME`.
    ExportName { name: String },
    /// For `INFO` and `GO`.
    Info { option: u32, name: String, wants_name: bool },
    /// For `LIST_META_CONTEXT` and `SET_META_CONTEXT`; `matched`: `base:allocation` is among what was asked for.
    Context { option: u32, name: String, matched: bool },
    /// For `LIST`.
    List,
}

/// What `INFO` and `GO` carry.
struct InfoRequest {
    name: String,
    wants_name: bool,
}

/// What the meta context options carry.
struct ContextRequest {
    name: String,
    queries: Vec<String>,
}

impl Session {
    /// One complete option.
    pub(super) fn option(&mut self, option: u32, data: &[u8], out: &mut Vec<Action>) {
        match option {
            option::EXPORT_NAME => self.export_name(data, out),
            option::ABORT => {
                self.option_reply(option, reply::ACK, &[], out);
                self.close(Ending::Orderly, out);
            }
            option::LIST if data.is_empty() => self.wait_for(Waiting::List, Action::List, out),
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.handshake.structured = true;
                self.option_reply(option, reply::ACK, &[], out);
            }
            option::LIST | option::STRUCTURED_REPLY => {
                self.invalid(option, b"this option carries no data", out)
            }
            option::INFO | option::GO => self.info(option, data, out),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.context(option, data, out),
            option::STARTTLS => self.option_reply(option, reply::ERR_UNSUP, b"TLS is not supported", out),
            _ => self.option_reply(option, reply::ERR_UNSUP, b"unknown option", out),
        }
    }

    fn invalid(&mut self, option: u32, why: &[u8], out: &mut Vec<Action>) {
        self.option_reply(option, reply::ERR_INVALID, why, out);
    }

    fn export_name(&mut self, data: &[u8], out: &mut Vec<Action>) {
        match std::str::from_utf8(data) {
            Ok(name) if name.len() <= STRING_LEN_MAX => {
                let name = name.to_owned();
                self.wait_for(Waiting::ExportName { name: name.clone() }, Action::Open { name }, out);
            }
            _ => self.close(Ending::Protocol("the export name is not a string"), out),
        }
    }

    fn info(&mut self, option: u32, data: &[u8], out: &mut Vec<Action>) {
        let Some(InfoRequest { name, wants_name }) = parse_info(data) else {
            return self.invalid(option, b"malformed request", out);
        };
        self.wait_for(Waiting::Info { option, name: name.clone(), wants_name }, Action::Open { name }, out);
    }

    fn context(&mut self, option: u32, data: &[u8], out: &mut Vec<Action>) {
        if option == option::SET_META_CONTEXT {
            self.handshake.context = None; // Also when this one fails: the last choice replaces all before.
        }
        if !self.handshake.structured {
            return self.invalid(option, b"structured replies must be chosen first", out);
        }
        let Some(ContextRequest { name, queries }) = parse_context(data) else {
            return self.invalid(option, b"malformed request", out);
        };
        let listing = option == option::LIST_META_CONTEXT;
        let matched = listing && queries.is_empty()
            || queries.iter().any(|query| query == CONTEXT_ALLOCATION || listing && query == "base:");
        self.wait_for(Waiting::Context { option, name: name.clone(), matched }, Action::Open { name }, out);
    }

    /// Continues an option that needed an export.
    pub(super) fn export_opened(
        &mut self,
        waiting: Waiting,
        result: Result<Export, OpenRefused>,
        out: &mut Vec<Action>,
    ) {
        let export = match (result, &waiting) {
            (Ok(export), _) => export,
            (Err(_), Waiting::ExportName { .. }) => return self.close(Ending::NoExport, out),
            (Err(why), Waiting::Info { option, .. } | Waiting::Context { option, .. }) => {
                return self.refuse_export(*option, why, out);
            }
            (Err(_), Waiting::List) => return self.close(Ending::Protocol("an export for a list"), out),
        };
        match waiting {
            Waiting::ExportName { name } => self.answer_export_name(&name, export, out),
            Waiting::Info { option, name, wants_name } => {
                self.answer_info(option, &name, wants_name, export, out);
            }
            Waiting::Context { option, name, matched } => self.answer_context(option, name, matched, out),
            Waiting::List => {}
        }
    }

    fn refuse_export(&mut self, option: u32, why: OpenRefused, out: &mut Vec<Action>) {
        match why {
            OpenRefused::Unknown => {
                self.option_reply(option, reply::ERR_UNKNOWN, b"no such export", out);
            }
            OpenRefused::Failed(text) => {
                let end = text.floor_char_boundary(STRING_LEN_MAX);
                self.option_reply(option, reply::ERR_PLATFORM, &text.as_bytes()[..end], out);
            }
        }
    }

    fn enter(&mut self, name: &str, export: Export) {
        let context = self.handshake.context.as_deref() == Some(name);
        self.transmission.begin(export, self.handshake.structured, context);
        self.begin_transmission();
    }

    fn answer_export_name(&mut self, name: &str, export: Export, out: &mut Vec<Action>) {
        let mut bytes = [0; 8 + 2 + 124];
        bytes[..8].copy_from_slice(&export.size.to_be_bytes());
        bytes[8..10].copy_from_slice(&self.export_flags(export).to_be_bytes());
        let len = if self.handshake.no_zeroes { 10 } else { bytes.len() };
        self.send_bytes(&bytes[..len], out);
        self.enter(name, export);
    }

    fn answer_info(
        &mut self,
        option: u32,
        name: &str,
        wants_name: bool,
        export: Export,
        out: &mut Vec<Action>,
    ) {
        let mut replies = Vec::with_capacity(128 + name.len());
        let mut add =
            |parts: &[&[u8]]| append_option_reply(&mut replies, option, reply::INFO, &parts.concat());
        let flags = self.export_flags(export).to_be_bytes();
        add(&[&info::EXPORT.to_be_bytes(), &export.size.to_be_bytes(), &flags]);
        add(&[
            &info::BLOCK_SIZE.to_be_bytes(),
            &BLOCK_LEN_MIN.to_be_bytes(),
            &BLOCK_LEN_PREFERRED.to_be_bytes(),
            &PAYLOAD_LEN_MAX.to_be_bytes(),
        ]);
        if wants_name {
            add(&[&info::NAME.to_be_bytes(), name.as_bytes()]);
        }
        append_option_reply(&mut replies, option, reply::ACK, &[]);
        self.send_bytes(&replies, out);
        if option == option::GO {
            self.enter(name, export);
        }
    }

    fn answer_context(&mut self, option: u32, name: String, matched: bool, out: &mut Vec<Action>) {
        let mut replies = Vec::new();
        if matched {
            // The number has no meaning in a list ("NBD_OPT_LIST_META_CONTEXT"); 0 as other servers send.
            let setting = option == option::SET_META_CONTEXT;
            let id = if setting { CONTEXT_ALLOCATION_ID } else { 0 };
            let data = [&id.to_be_bytes()[..], CONTEXT_ALLOCATION.as_bytes()].concat();
            append_option_reply(&mut replies, option, reply::META_CONTEXT, &data);
            if setting {
                self.handshake.context = Some(name);
            }
        }
        append_option_reply(&mut replies, option, reply::ACK, &[]);
        self.send_bytes(&replies, out);
    }

    /// Continues `LIST`.
    pub(super) fn exports_listed(&mut self, names: Result<Vec<String>, String>, out: &mut Vec<Action>) {
        let mut replies = Vec::new();
        match names {
            Ok(names) => {
                for name in names.iter().filter(|name| name.len() <= STRING_LEN_MAX) {
                    let len = u32::try_from(name.len()).expect("at most STRING_LEN_MAX");
                    let data = [&len.to_be_bytes()[..], name.as_bytes()].concat();
                    append_option_reply(&mut replies, option::LIST, reply::SERVER, &data);
                }
                append_option_reply(&mut replies, option::LIST, reply::ACK, &[]);
            }
            Err(why) => {
                let end = why.floor_char_boundary(STRING_LEN_MAX);
                append_option_reply(&mut replies, option::LIST, reply::ERR_PLATFORM, &why.as_bytes()[..end]);
            }
        }
        self.send_bytes(&replies, out);
    }

    /// What an export can do. Multi-conn is true: a write is durable on every member of its acting set before its
    /// reply and nothing is cached, so a flush on one connection has nothing left to do for the others.
    fn export_flags(&self, export: Export) -> u16 {
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_TRIM;
        flags |= flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO | flag::SEND_CACHE | flag::CAN_MULTI_CONN;
        if self.handshake.structured {
            flags |= flag::SEND_DF;
        }
        if export.read_only {
            flags |= flag::READ_ONLY;
        }
        flags
    }
}

fn string(fields: &mut Fields<'_>) -> Option<String> {
    fields.string().filter(|text| text.len() <= STRING_LEN_MAX).map(str::to_owned)
}

fn parse_info(data: &[u8]) -> Option<InfoRequest> {
    let mut fields = Fields(data);
    let name = string(&mut fields)?;
    let count = fields.u16()?;
    let mut wants_name = false;
    for _ in 0..count {
        wants_name |= fields.u16()? == info::NAME;
    }
    fields.0.is_empty().then_some(InfoRequest { name, wants_name })
}

fn parse_context(data: &[u8]) -> Option<ContextRequest> {
    let mut fields = Fields(data);
    let name = string(&mut fields)?;
    let count = fields.u32()?;
    let mut queries = Vec::new(); // Grows with the data that is there, not with the number that was claimed.
    for _ in 0..count {
        queries.push(string(&mut fields)?);
    }
    fields.0.is_empty().then_some(ContextRequest { name, queries })
}
