//! The admin commands: JSON in, JSON out.
//!
//! A request is an object with a `prefix` that names the verb and the verb's arguments; the answer is `{"ok": …}`, shaped
//! as Ceph's `--format json` where Ceph has the verb, or
//! `{"error": {"code": -22, "name": "EINVAL", "message": "what happened and what to do"}}`. An argument that a verb does
//! not have is refused, so that a misspelt one is not silently ignored.
//!
//! | prefix | arguments | answer |
//! | --- | --- | --- |
//! | `status` | | as `ceph -s` |
//! | `health` | | as `ceph health detail` |
//! | `osd tree` | | as `ceph osd tree` |
//! | `osd df` | | as `ceph osd df` |
//! | `osd dump` | | as `ceph osd dump` |
//! | `osd new` | `device` (UUID), `id` (wanted) | `{"id", "cluster"}`; again for the same device: the same |
//! | `osd check` | `id`, `device` (UUID) | `{"id", "cluster"}`, or why a new start of this OSD would be refused |
//! | `pg dump` | `pool` (only this one) | `{"pg_stats": […]}` with state, acting set, interval, objects |
//! | `pool create` | `pool`, `size` (3), `min_size` (one less), `pg_count`, `failure_domain` (host), `device_class` | the pool |
//! | `pool ls` | `detail` (true: all settings) | names, or pools |
//! | `pool get` | `pool`, `var` (all when not given) | `{"pool", "pool_id", var: value}` |
//! | `pool set` | `pool`, `var`, `val` | the pool |
//! | `pool rm` | `pool`, `pool2` (the name again), `yes_i_really_really_mean_it` | `{"pool", "pool_id"}` |
//! | `blocklist add` | `session` | `{"session", "since"}`, when every OSD that is up and serves PGs goes by it |
//! | `blocklist rm` | `session`, `yes_i_really_mean_it` | `{"session"}` |
//! | `blocklist ls` | | `[{"session", "since"}]` |
//! | `mon dump` | | as `ceph mon dump` |

mod blocklist;
mod osd;
mod pool;

use crate::answer;
use crate::core::Core;
use loligo_config::id::{Epoch, OsdId};
use serde_json::{Map, Value, json};

/// Errno-like codes, as Ceph's commands answer them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of errno(3)")]
pub enum Code {
    EPERM = 1,
    ENOENT = 2,
    EBUSY = 16,
    EEXIST = 17,
    EINVAL = 22,
    ENOSPC = 28,
    EOPNOTSUPP = 95,
    ETIMEDOUT = 110,
    ESTALE = 116,
}

/// Why a command was refused. Nothing was changed, unless the message says so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CommandError {
    /// For programs.
    pub code: Code,
    /// For people: what happened and what to do.
    pub message: String,
}

impl CommandError {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::EINVAL, message)
    }

    /// The answer that carries it.
    pub fn to_json(&self) -> Value {
        let (code, name) = (-(self.code as i32), format!("{:?}", self.code));
        json!({ "error": { "code": code, "name": name, "message": self.message } })
    }
}

type Answer = Result<Value, CommandError>;

/// One verb.
struct Verb {
    prefix: &'static str,
    arguments: &'static [&'static str],
    run: fn(&mut Core, &Arguments) -> Answer,
}

impl Verb {
    fn changes_something(&self) -> bool {
        CHANGING.contains(&self.prefix)
    }
}

/// The verbs that make a new map, or something else durable.
const CHANGING: [&str; 6] =
    ["osd new", "pool create", "pool set", "pool rm", "blocklist add", "blocklist rm"];

const VERBS: [Verb; 18] = [
    Verb { prefix: "status", arguments: &[], run: |core, _| Ok(answer::status(core)) },
    Verb { prefix: "health", arguments: &[], run: |core, _| Ok(answer::health(core)) },
    Verb { prefix: "osd tree", arguments: &[], run: |core, _| Ok(answer::osd_tree(core)) },
    Verb { prefix: "osd df", arguments: &[], run: |core, _| Ok(answer::osd_df(core)) },
    Verb { prefix: "osd dump", arguments: &[], run: |core, _| Ok(answer::osd_dump(core)) },
    Verb { prefix: "osd new", arguments: &["device", "id"], run: osd::new },
    Verb { prefix: "osd check", arguments: &["id", "device"], run: osd::check },
    Verb { prefix: "pg dump", arguments: &["pool"], run: pool::pg_dump },
    Verb { prefix: "pool create", arguments: &pool::CREATE_ARGUMENTS, run: pool::create },
    Verb { prefix: "pool ls", arguments: &["detail"], run: pool::ls },
    Verb { prefix: "pool get", arguments: &["pool", "var"], run: pool::get },
    Verb { prefix: "pool set", arguments: &["pool", "var", "val"], run: pool::set },
    Verb { prefix: "pool rm", arguments: &["pool", "pool2", "yes_i_really_really_mean_it"], run: pool::rm },
    Verb { prefix: "blocklist add", arguments: &["session"], run: blocklist::add },
    Verb { prefix: "blocklist rm", arguments: &["session", "yes_i_really_mean_it"], run: blocklist::rm },
    Verb { prefix: "blocklist ls", arguments: &[], run: blocklist::ls },
    Verb { prefix: "mon dump", arguments: &[], run: |core, _| Ok(answer::mon_dump(core)) },
    Verb { prefix: "help", arguments: &[], run: |_, _| Ok(help()) },
];

fn help() -> Value {
    VERBS.iter().map(|verb| json!({ "prefix": verb.prefix, "arguments": verb.arguments })).collect()
}

/// Carries out a command on the core's draft. Total: any bytes give an answer.
pub(crate) fn execute(core: &mut Core, request: &[u8]) -> Answer {
    // serde_json bounds the depth of nesting by itself.
    let Ok(Value::Object(values)) = serde_json::from_slice(request) else {
        return Err(CommandError::invalid("a command is a JSON object such as {\"prefix\": \"status\"}"));
    };
    let prefix = values.get("prefix").and_then(Value::as_str).unwrap_or_default();
    let Some(verb) = VERBS.iter().find(|verb| verb.prefix == prefix) else {
        let verbs = VERBS.map(|verb| verb.prefix).join(", ");
        return Err(CommandError::invalid(format!("there is no command {prefix:?}; there are: {verbs}")));
    };
    let known = |key: &str| key == "prefix" || key == "format" || verb.arguments.contains(&key);
    if let Some(key) = values.keys().find(|key| !known(key)) {
        let arguments = if verb.arguments.is_empty() { "none".to_owned() } else { verb.arguments.join(", ") };
        let message = format!("`{prefix}` has no argument {key:?}; it has: {arguments}");
        return Err(CommandError::invalid(message));
    }
    if let Some((osd, epoch)) = core.outdated().filter(|_| verb.changes_something()) {
        return Err(CommandError::new(Code::ESTALE, outdated(core.map().epoch, osd, epoch)));
    }
    (verb.run)(core, &Arguments { values })
}

/// What is wrong with a mon that is behind an OSD, and what to do.
pub(crate) fn outdated(own: Epoch, osd: OsdId, epoch: Epoch) -> String {
    format!(
        "this mon's map is of epoch {own}, {osd} has seen epoch {epoch}: its store is an old copy. It changes nothing, so \
         that no epoch is used twice; stop it and start it with the newest store"
    )
}

/// The arguments of one command.
struct Arguments {
    values: Map<String, Value>,
}

impl Arguments {
    /// `null` counts as not given.
    fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    fn text(&self, key: &str) -> Result<Option<&str>, CommandError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let wrong = || CommandError::invalid(format!("`{key}` must be a text, not {value}"));
        value.as_str().map(Some).ok_or_else(wrong)
    }

    fn required_text(&self, key: &str) -> Result<&str, CommandError> {
        self.text(key)?.ok_or_else(|| CommandError::invalid(format!("the argument `{key}` is missing")))
    }

    /// A whole number from `min` to `max`, also as a text.
    fn number(&self, key: &str, min: u64, max: u64) -> Result<Option<u64>, CommandError> {
        self.number_called(key, key, min, max)
    }

    /// The same of what people know under another name.
    fn number_called(&self, key: &str, name: &str, min: u64, max: u64) -> Result<Option<u64>, CommandError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let number = value.as_u64().or_else(|| value.as_str().and_then(|text| text.parse().ok()));
        let number = number.filter(|number| (min..=max).contains(number));
        let wrong = || {
            CommandError::invalid(format!("`{name}` must be a whole number from {min} to {max}, not {value}"))
        };
        number.map(Some).ok_or_else(wrong)
    }

    fn flag(&self, key: &str) -> Result<bool, CommandError> {
        let Some(value) = self.value(key) else { return Ok(false) };
        value
            .as_bool()
            .ok_or_else(|| CommandError::invalid(format!("`{key}` must be true or false, not {value}")))
    }
}
