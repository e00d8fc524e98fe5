//! What is wrong with a host file, said so that it can be repaired without looking anything up.

use std::fmt;

/// The first thing that is wrong with a host file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    /// The file, as it was named to `parse`.
    pub file: String,
    /// The line, counted from 1.
    pub line: u32,
    /// The key with its section, such as `osd.memory_target`; empty when the text is not TOML at all.
    pub key: String,
    /// What is wrong.
    pub problem: Problem,
}

/// What is wrong with a key or its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The text is not TOML.
    Syntax {
        /// What the TOML parser says.
        message: String,
    },
    /// There is no such key here.
    UnknownKey {
        /// The keys there are.
        allowed: Vec<&'static str>,
        /// The one that looks most like it.
        nearest: Option<&'static str>,
    },
    /// The key must be there.
    Missing {
        /// What it would hold.
        allowed: String,
    },
    /// The value is none of the words that are allowed.
    UnknownWord {
        /// The value.
        found: String,
        /// The words there are.
        allowed: Vec<&'static str>,
        /// The one that looks most like it.
        nearest: Option<&'static str>,
    },
    /// The value has the wrong type or form, or is out of range.
    Value {
        /// The value, shortened.
        found: String,
        /// What is allowed.
        allowed: String,
    },
    /// The value contradicts another one.
    Conflict {
        /// How, and what to do.
        message: String,
    },
}

impl std::error::Error for FileError {}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: ", self.file, self.line)?;
        let key = &self.key;
        match &self.problem {
            Problem::Syntax { message } => write!(f, "not valid TOML: {message}"),
            Problem::UnknownKey { allowed, nearest } => {
                write!(f, "unknown key `{key}`")?;
                nearest_and_allowed(f, *nearest, allowed)
            }
            Problem::Missing { allowed } => write!(f, "the key `{key}` is missing; it holds {allowed}"),
            Problem::UnknownWord { found, allowed, nearest } => {
                write!(f, "`{key}` cannot be \"{found}\"")?;
                nearest_and_allowed(f, *nearest, allowed)
            }
            Problem::Value { found, allowed } => {
                write!(f, "`{key}` cannot be {found}; allowed: {allowed}")
            }
            Problem::Conflict { message } => write!(f, "`{key}`: {message}"),
        }
    }
}

fn nearest_and_allowed(
    f: &mut fmt::Formatter<'_>,
    nearest: Option<&'static str>,
    allowed: &[&'static str],
) -> fmt::Result {
    if let Some(nearest) = nearest {
        write!(f, "; did you mean `{nearest}`?")?;
    }
    write!(f, " (allowed: {})", allowed.join(", "))
}

/// The word that looks most like `found`, unless none does. 0.7 of Jaro-Winkler lets two swapped or missing letters
/// pass and keeps `cores` from being offered for `color`; tried on the keys of this file.
pub(super) fn nearest(found: &str, allowed: &[&'static str]) -> Option<&'static str> {
    // The comparison is quadratic: a long word is no slip of the finger.
    if found.len() > 64 {
        return None;
    }
    let found = found.to_lowercase();
    let scored = allowed.iter().map(|word| (strsim::jaro_winkler(&found, word), *word));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 >= 0.7).then_some(best.1)
}
