//! What is printed: numbers and tables in the looks of Ceph's tools, JSON, errors in two lines.

use clap::ValueEnum;
use serde_json::Value;
use std::fmt;
use std::io::{IsTerminal, Write};

/// How to print.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people.
    #[default]
    Plain,
    /// JSON in one line.
    Json,
    /// JSON over several lines.
    JsonPretty,
}

/// What went wrong, and what to do about it: one line each.
#[derive(Debug)]
pub struct Failure {
    /// What happened.
    pub what: String,
    /// What to do; empty when `what` says it.
    pub advice: String,
    /// The process's exit code.
    pub code: u8,
}

/// The result of every command.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// An error with exit code 1.
    pub fn new(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { what: what.into(), advice: advice.into(), code: 1 }
    }

    /// Wrong usage: exit code 2.
    pub fn usage(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { code: 2, ..Self::new(what, advice) }
    }

    /// An error whose text says what happened and, behind a colon, what to do.
    pub fn plain(error: impl fmt::Display) -> Self {
        let text = error.to_string().replace('\n', " ");
        Self::new(text, "")
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "loligo: {}", self.what)?;
        if !self.advice.is_empty() {
            write!(f, "\n        {}", self.advice)?;
        }
        Ok(())
    }
}

macro_rules! plain_failure {
    ($($error:ty),* $(,)?) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::plain(error)
            }
        })*
    };
}

plain_failure!(
    loligo_client::ImageError,
    loligo_client::IoError,
    loligo_client::CommandError,
    loligo_client::ConnectError,
    loligo_config::file::FileError,
);

/// Prints a line to standard output. A reader that has gone away (`| head`) ends the process quietly.
pub fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
        std::process::exit(0);
    }
}

/// Prints text that ends with its own newline.
pub fn text(text: &str) {
    line(text.strip_suffix('\n').unwrap_or(text));
}

/// Prints JSON as `format` says, or what `plain` makes.
pub fn show(format: Format, value: &Value, plain: impl FnOnce(&Value) -> String) {
    match format {
        Format::Plain => {
            let printed = plain(value);
            if !printed.is_empty() {
                text(&printed);
            }
        }
        Format::Json => line(&value.to_string()),
        Format::JsonPretty => line(&format!("{value:#}")),
    }
}

/// Whether progress may be shown.
pub fn shows_progress() -> bool {
    std::io::stderr().is_terminal()
}

/// A bar that appears when what it shows takes longer than two seconds, on a terminal only.
pub struct Progress {
    bar: indicatif::ProgressBar,
    begun: loligo_reactor::env::Instant,
    bytes: bool,
    visible: bool,
}

impl Progress {
    /// Of bytes, or of things.
    pub fn new(what: &str, bytes: bool) -> Self {
        let bar = indicatif::ProgressBar::hidden();
        bar.set_message(what.to_owned());
        Self { bar, begun: crate::world::now(), bytes, visible: false }
    }

    /// `done` of `total`.
    pub fn set(&mut self, done: u64, total: u64) {
        let waited = crate::world::now().since(self.begun).as_secs() >= 2;
        if !self.visible && waited && shows_progress() {
            self.visible = true;
            self.bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
            let template = match self.bytes {
                true => "{msg} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec} eta {eta}",
                false => "{msg} [{bar:40}] {pos}/{len} eta {eta}",
            };
            if let Ok(style) = indicatif::ProgressStyle::with_template(template) {
                self.bar.set_style(style.progress_chars("=> "));
            }
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Bytes as Ceph prints them: `0 B`, `652 KiB`, `6.5 MiB`, `2.1 GiB`: two digits or as many as the whole number has.
pub fn bytes(count: u64) -> String {
    scaled(count, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// Things as Ceph prints them: `44`, `1.2k`.
pub fn count(count: u64) -> String {
    scaled(count, 1000.0, &["", "k", "M", "G", "T"]).trim_end().to_owned()
}

fn scaled(count: u64, base: f64, units: &[&str]) -> String {
    let mut value = count as f64;
    let mut unit = 0;
    while value >= base && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let space = if units[unit].len() > 1 || units[unit] == "B" { " " } else { "" };
    let number = if unit == 0 || value >= 10.0 || value.fract() < 0.05 {
        // Halves to the even side, as C prints them.
        format!("{value:.0}")
    } else {
        format!("{value:.1}")
    };
    format!("{number}{space}{}", units[unit])
}

/// A moment as `rbd info` prints it: `Mon Nov 30 21:27:42 2026`, in local time.
pub fn moment(unix_seconds: u64) -> String {
    let seconds = i64::try_from(unix_seconds).unwrap_or(i64::MAX);
    match jiff::Timestamp::from_second(seconds) {
        Ok(stamp) => {
            let local = stamp.to_zoned(jiff::tz::TimeZone::system());
            local.strftime("%a %b %e %H:%M:%S %Y").to_string()
        }
        Err(_) => unix_seconds.to_string(),
    }
}

/// How cells of a column are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// To the left.
    Left,
    /// To the right.
    Right,
}

/// Columns set apart by two spaces, as Ceph's tools do; headings follow their column's cells.
pub struct Table {
    align: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// With these headings.
    pub fn new(columns: &[(&str, Align)]) -> Self {
        let heading = columns.iter().map(|(name, _)| (*name).to_owned()).collect();
        Self { align: columns.iter().map(|(_, align)| *align).collect(), rows: vec![heading] }
    }

    /// Appends a row.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.align.len(), "a cell for every column");
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.align.len()).map(width).collect();
        for row in &self.rows {
            let cells = row.iter().zip(&self.align).zip(&widths).map(|((cell, align), width)| match align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }
}

/// A string in JSON; empty when it is none.
pub fn string<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// A whole number in JSON; 0 when it is none.
pub fn number(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or_default()
}

/// A number in JSON; 0 when it is none.
pub fn real(value: &Value, key: &str) -> f64 {
    value.get(key).and_then(Value::as_f64).unwrap_or_default()
}

/// A list in JSON; empty when it is none.
pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_look_as_ceph_prints_them() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (652 << 10, "652 KiB"),
            (6_846_265, "6.5 MiB"),
            (914_681_856, "872 MiB"),
            (2_306_543_616, "2.1 GiB"),
            (3 << 30, "3 GiB"),
            (1_572_864, "1.5 MiB"),
            (21_495_808, "20 MiB"),
        ];
        for (count, expected) in cases {
            assert_eq!(bytes(count), expected);
        }
        assert_eq!(count(44), "44");
        assert_eq!(count(1_200), "1.2k");
    }

    #[test]
    fn tables_line_up_and_do_not_trail() {
        let mut table = Table::new(&[("NAME", Align::Left), ("SIZE", Align::Right)]);
        table.row(vec!["a".into(), "10 MiB".into()]);
        table.row(vec!["longer".into(), "1 B".into()]);
        assert_eq!(table.to_string(), "NAME      SIZE\na       10 MiB\nlonger     1 B\n");
    }

    #[test]
    fn failures_take_one_line_for_what_and_one_for_what_to_do() {
        let failure = Failure::new("no mon answers", "start one");
        assert_eq!(failure.to_string(), "loligo: no mon answers\n        start one");
        assert_eq!((failure.code, Failure::usage("a", "b").code), (1, 2));
    }
}
