//! Unit tests that notice bugs which the simulated cluster does not show.
//!
//! The test binaries are built once, with all bugs in them; each test runs in a process of its own with the bug in its
//! environment. It must pass without the bug first: a test that always fails would notice everything.

use super::Fate;
use crate::process::wait_for;
use anyhow::{Context, Result, ensure};
use loligo_reactor::planted::{Bug, VARIABLE};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A test that runs longer hangs; with a bug that is a way to notice it.
const TEST_MAX: Duration = Duration::from_secs(120);

const CLIENT: &str = "loligo-client";
const MON: &str = "loligo-mon";
const NET: &str = "loligo-net";
const OSD: &str = "loligo-osd";
/// The packages of all tests. Always built together, since what is built apart has other features.
const PACKAGES: [&str; 4] = [CLIENT, MON, NET, OSD];

/// A unit test.
#[derive(Clone, Copy, Debug)]
pub(super) struct Test {
    package: &'static str,
    /// With its path in the package.
    name: &'static str,
}

/// The test that notices the bug. `None`: seeds of the simulated cluster do.
pub(super) fn test_of(bug: Bug) -> Option<Test> {
    let (package, name) = match bug {
        Bug::WriteOvertakesWrite => {
            (CLIENT, "objecter::tests::an_older_write_never_passes_a_newer_one_to_the_same_block")
        }
        Bug::FrameDataUnchecked => (NET, "framing::tests::damage_at_any_byte_closes"),
        Bug::FrameSequenceUnchecked => {
            (NET, "messenger::tests::faults::handshake_messages_come_once_and_first")
        }
        Bug::ReplyToOldConnection | Bug::ReplyToLateCopy => {
            (OSD, "pg::tests::writes::a_late_copy_does_not_take_the_reply_along")
        }
        Bug::LateCopyApplied => (
            OSD,
            "pg::tests::writes::an_op_that_changed_nothing_takes_no_effect_when_a_copy_of_it_arrives_late",
        ),
        Bug::GapCountsAsCopy | Bug::GapUnchecked => {
            (OSD, "pg::tests::writes::a_write_with_a_hole_before_it_is_refused_and_that_is_no_copy")
        }
        Bug::IntervalUnchecked => {
            (OSD, "pg::tests::writes::a_replica_refuses_an_interval_older_than_its_promise")
        }
        Bug::OldQueryAnswered => {
            (OSD, "pg::tests::peering::a_query_of_an_older_interval_is_no_promise_for_the_newer_one")
        }
        Bug::TailWithoutDiscards => {
            (OSD, "pg::tail::tests::removal_replaces_writes_and_is_itself_never_dropped")
        }
        Bug::TailWithoutOverlapped => (OSD, "pg::tail::tests::a_replaced_write_is_sent_as_its_result"),
        Bug::ReuseBeforeRecord | Bug::ReuseBeforeMark => {
            (OSD, "store::tests::tail::data_of_a_record_that_no_mark_covers_is_not_written_over")
        }
        Bug::ReuseUnderRead => (OSD, "store::tests::model::acked_transactions_survive_every_crash"),
        Bug::ReuseUnderDiscard => {
            (OSD, "store::tests::space::discards_follow_deletes_and_never_hit_live_blocks")
        }
        Bug::ReadOvertakesWrite => (OSD, "store::tests::faults::any_failing_operation_loses_nothing"),
        Bug::BlockUnchecked => {
            (OSD, "store::tests::tail::rotten_data_is_found_by_the_read_and_nothing_else_suffers")
        }
        Bug::CheckpointNotExact => (OSD, "store::index::tests::a_checkpoint_sees_buckets_as_they_were"),
        Bug::MountWithoutFlush => (OSD, "store::tests::shards::two_shards_crash_together"),
        Bug::OldGenerationAccepted => (OSD, "store::tests::tail::what_was_cut_stays_cut_for_ever"),
        Bug::RecordUnchecked => (OSD, "store::tests::nth::while_chunks_are_taken_and_given_back"),
        Bug::CutBelowMark => (OSD, "store::tests::tail::a_gap_below_a_mark_is_corruption_of_the_pgs_in_it"),
        Bug::TornTailAccepted => (OSD, "store::tests::tail::torn_data_is_a_torn_record"),
        Bug::TornScatteredAccepted => (OSD, "store::tests::nth::on_a_full_device"),
        _ => return None,
    };
    Some(Test { package, name })
}

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Passes,
    Fails,
    Hangs,
}

/// The test binaries of the packages, with the folders that they expect to run in.
pub(super) struct Suites {
    binaries: BTreeMap<&'static str, (PathBuf, PathBuf)>,
}

impl Suites {
    /// Builds what the bugs need: nothing when seeds notice all of them.
    pub(super) fn build(bugs: &[Bug]) -> Result<Self> {
        let mut suites = Self { binaries: BTreeMap::new() };
        if bugs.iter().all(|bug| test_of(*bug).is_none()) {
            return Ok(suites);
        }
        eprintln!("building the unit tests of {}", PACKAGES.join(", "));
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        let arguments =
            "test --quiet --locked --profile testing --lib --no-run --message-format json-render-diagnostics";
        command.args(arguments.split(' '));
        command.args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")]);
        for package in PACKAGES {
            command.args(["--package", package, "--features", &format!("{package}/planted")]);
        }
        let output = command.stderr(Stdio::inherit()).output().context("cargo cannot be run")?;
        ensure!(output.status.success(), "the unit tests cannot be built: cargo {arguments}");
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            suites.add(&serde_json::from_str(line).with_context(|| format!("cargo wrote {line}"))?);
        }
        for package in PACKAGES {
            ensure!(suites.binaries.contains_key(package), "cargo names no test binary of {package}");
        }
        Ok(suites)
    }

    /// Takes note of a test binary when that is what cargo's message is about.
    fn add(&mut self, message: &serde_json::Value) {
        let (executable, manifest) = (message["executable"].as_str(), message["manifest_path"].as_str());
        let (Some(executable), Some(manifest)) = (executable, manifest) else { return };
        let name = message["target"]["name"].as_str().unwrap_or_default();
        let package = PACKAGES.into_iter().find(|package| package.replace('-', "_") == name);
        let folder = Path::new(manifest).parent();
        if let (Some(package), Some(folder)) = (package, folder) {
            self.binaries.insert(package, (executable.into(), folder.to_owned()));
        }
    }

    /// Runs the test without and with the bug.
    pub(super) fn hunt(&self, bug: Bug, test: &Test) -> Fate {
        let Test { package, name } = test;
        let mut fate = Fate::new(bug);
        let judged = self.run(test, None).and_then(|without| Ok((without, self.run(test, Some(bug))?)));
        match judged {
            Ok((Ending::Passes, Ending::Passes)) => {
                fate.notes.push(format!("{package} {name} passes with it"))
            }
            Ok((Ending::Passes, Ending::Fails)) => fate.killed_by = Some(format!("{package} {name}")),
            Ok((Ending::Passes, Ending::Hangs)) => fate.killed_by = Some(format!("{package} {name} hangs")),
            Ok((Ending::Fails | Ending::Hangs, _)) => {
                fate.notes.push(format!("{package} {name} does not pass without it"));
            }
            Err(error) => fate.notes.push(format!("{error:#}")),
        }
        fate
    }

    fn run(&self, test: &Test, bug: Option<Bug>) -> Result<Ending> {
        let Test { package, name } = test;
        let (executable, folder) = &self.binaries[package];
        let mut output = tempfile::NamedTempFile::new()?;
        let mut command = Command::new(executable);
        command.args(["--exact", name, "--test-threads", "1"]).current_dir(folder).env_remove(VARIABLE);
        // What fails on purpose is no regression to be kept in the source.
        command.env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true");
        if let Some(bug) = bug {
            command.env(VARIABLE, format!("{bug:?}"));
        }
        let mut child =
            command.stdin(Stdio::null()).stdout(output.reopen()?).stderr(Stdio::null()).spawn()?;
        let ended = wait_for("the test to end", TEST_MAX, || Ok(child.try_wait()?.is_some()));
        if ended.is_err() {
            child.kill()?;
        }
        let status = child.wait()?;
        let mut text = String::new();
        std::io::Read::read_to_string(&mut output, &mut text)?;
        let is_one = text.lines().any(|line| line == "running 1 test");
        ensure!(is_one, "{package} has no test {name}: correct `mutants::suites::test_of`");
        Ok(match (ended.is_err(), status.success()) {
            (true, _) => Ending::Hangs,
            (false, true) => Ending::Passes,
            (false, false) => Ending::Fails,
        })
    }
}
