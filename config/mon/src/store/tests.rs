#![allow(clippy::disallowed_methods, reason = "the store is tested on a real file")]
use super::*;
use loligo_config::id::{ClusterId, Epoch};
use loligo_config::map::AuthMode;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

fn map(epoch: u32) -> ClusterMap {
    let mut map = ClusterMap::new(ClusterId(Uuid::from_u128(1)), AuthMode::None, 0);
    map.epoch = Epoch(epoch);
    map
}

fn extra(limit: u64) -> Extra {
    Extra {
        session_limit: SessionId(limit),
        reserved: BTreeMap::from([(OsdId(3), DeviceId(Uuid::from_u128(u128::from(limit))))]),
    }
}

fn open(path: &Path) -> Result<Embedded, StoreError> {
    Embedded::open(path)
}

#[test]
fn what_was_committed_is_there_after_reopening() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mon.redb");
    let mut store = open(&path).unwrap();
    assert!(store.load().unwrap().is_none());
    store.commit(&map(1), &extra(1)).unwrap();
    store.commit(&map(2), &extra(1001)).unwrap();
    store.commit(&map(2), &extra(2001)).unwrap();
    drop(store);
    assert_eq!(open(&path).unwrap().load().unwrap(), Some((map(2), extra(2001))));
}

#[test]
fn old_maps_are_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(&folder.path().join("mon.redb")).unwrap();
    for epoch in 1..=130 {
        store.commit(&map(epoch), &extra(1)).unwrap();
    }
    assert_eq!(store.map_count().unwrap(), 100);
    assert_eq!(store.load().unwrap().map(|(map, _)| map.epoch), Some(Epoch(130)));
}

#[test]
fn a_second_process_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mon.redb");
    let _first = open(&path).unwrap();
    let error = open(&path).err().unwrap();
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    assert!(error.to_string().contains("only one mon"));
}

#[test]
fn foreign_files_are_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mon.redb");
    std::fs::write(&path, "a letter to my aunt").unwrap();
    assert!(matches!(open(&path).err().unwrap(), StoreError::Foreign { .. }));
    assert_eq!(std::fs::read(&path).unwrap(), b"a letter to my aunt");
    let error = open(folder.path()).err().unwrap();
    assert!(matches!(error, StoreError::Io { .. }), "{error}");
    let error = open(&folder.path().join("no/such/folder")).err().unwrap();
    assert!(matches!(error, StoreError::Io { .. }), "{error}");
}

/// Whatever is damaged, the store says so or gives the map that was committed; it never gives another one.
#[test]
fn damage_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mon.redb");
    let mut store = open(&path).unwrap();
    for epoch in 1..=3 {
        store.commit(&map(epoch), &extra(1)).unwrap();
    }
    drop(store);
    let whole = std::fs::read(&path).unwrap();
    let mut noticed = 0;
    for at in (16..whole.len()).step_by(whole.len() / 100) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        std::fs::write(&path, &bytes).unwrap();
        match open(&path).and_then(|mut store| store.load()) {
            Ok(kept) => assert_eq!(kept, Some((map(3), extra(1))), "byte {at}"),
            Err(StoreError::Damaged { .. } | StoreError::Map { .. } | StoreError::Io { .. }) => noticed += 1,
            Err(error) => panic!("byte {at}: {error}"),
        }
    }
    assert!(noticed > 0);
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    assert!(open(&path).and_then(|mut store| store.load()).is_err());
}

/// A file in memory that remembers every step.
#[derive(Clone, Debug, Default)]
struct Recorder {
    state: Arc<Mutex<Recorded>>,
}

#[derive(Clone, Debug, Default)]
struct Recorded {
    bytes: Vec<u8>,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
enum Step {
    Write(usize, Vec<u8>),
    Len(usize),
    Sync,
}

fn apply(bytes: &mut Vec<u8>, step: &Step) {
    match step {
        Step::Write(at, data) => {
            if bytes.len() < at + data.len() {
                bytes.resize(at + data.len(), 0);
            }
            bytes[*at..at + data.len()].copy_from_slice(data);
        }
        Step::Len(len) => bytes.resize(*len, 0),
        Step::Sync => {}
    }
}

impl Recorder {
    fn step(&self, step: Step) {
        let mut state = self.state.lock().unwrap();
        apply(&mut state.bytes, &step);
        state.steps.push(step);
    }
}

impl redb::StorageBackend for Recorder {
    fn len(&self) -> Result<u64, io::Error> {
        Ok(self.state.lock().unwrap().bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), io::Error> {
        let at = usize::try_from(offset).map_err(io::Error::other)?;
        let state = self.state.lock().unwrap();
        let found = state.bytes.get(at..at + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(found);
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<(), io::Error> {
        self.step(Step::Len(usize::try_from(len).map_err(io::Error::other)?));
        Ok(())
    }

    fn sync_data(&self) -> Result<(), io::Error> {
        self.step(Step::Sync);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), io::Error> {
        self.step(Step::Write(usize::try_from(offset).map_err(io::Error::other)?, data.to_vec()));
        Ok(())
    }
}

fn reopened(bytes: Vec<u8>) -> (ClusterMap, Extra) {
    let state = Arc::new(Mutex::new(Recorded { bytes, steps: Vec::new() }));
    let mut store = Embedded::on_backend(Recorder { state }).expect("a crash leaves a store that opens");
    store.load().expect("a crash leaves a store that loads").expect("the first commit was there before")
}

/// The mon dies between any two steps of any commit: what is there is the commit under way or the one before it, and
/// what was reported durable stays. First as a kill, which keeps all steps so far; then as a power cut, which keeps any
/// of those since the last sync.
#[test]
fn a_crash_at_any_step_loses_no_commit() {
    let recorder = Recorder::default();
    let mut store = Embedded::on_backend(recorder.clone()).unwrap();
    store.commit(&map(1), &extra(1)).unwrap();
    let base = recorder.state.lock().unwrap().clone();
    let mut ends = Vec::new();
    for epoch in 2..=6 {
        store.commit(&map(epoch), &extra(u64::from(epoch))).unwrap();
        ends.push((recorder.state.lock().unwrap().steps.len(), epoch));
    }
    let steps = recorder.state.lock().unwrap().steps.clone();
    let (first, last) = (base.steps.len(), ends.last().unwrap().0);
    let (mut synced, mut unsynced, mut random) = (base.bytes.clone(), Vec::new(), 0x9e37_79b9_7f4a_7c15_u64);
    for at in first..=last {
        let durable = ends.iter().filter(|(end, _)| *end <= at).map(|(_, epoch)| *epoch).max().unwrap_or(1);
        let check = |bytes: Vec<u8>, what: &str| {
            let (map, extra) = reopened(bytes);
            let found = map.epoch.0;
            assert!(
                found == durable || found == durable + 1,
                "{what} at step {at}: {found}, durable {durable}"
            );
            assert_eq!(extra.session_limit.0, u64::from(found), "map and extra belong together");
        };
        let mut killed = base.bytes.clone();
        steps[first..at].iter().for_each(|step| apply(&mut killed, step));
        check(killed, "kill");
        for _ in 0..4 {
            let mut cut = synced.clone();
            for step in &unsynced {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                if random & 1 == 0 {
                    apply(&mut cut, step);
                }
            }
            check(cut, "power cut");
        }
        match steps.get(at).filter(|_| at < last) {
            Some(Step::Sync) => unsynced.drain(..).for_each(|step| apply(&mut synced, &step)),
            Some(step) => unsynced.push(step.clone()),
            None => {}
        }
    }
    assert!(last - first >= 15, "commits have steps");
}
