//! The store of a mon that is alone: one crash-safe file, kept by redb.
#![allow(clippy::disallowed_methods, reason = "the file behind the seam `MapStore`")]

use super::{Extra, MapStore, StoreError};
use loligo_config::map::ClusterMap;
use redb::{
    Database, DatabaseError, Durability, ReadableDatabase, ReadableTable, StorageError, TableDefinition,
};
use std::fmt::Display;
use std::io::Read;
use std::path::Path;

const MAPS: TableDefinition<'_, u32, &[u8]> = TableDefinition::new("maps");
const EXTRA: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("extra");
const EXTRA_KEY: &str = "extra";
/// Maps that are kept, newest last, for people who want to see what happened. Guessed.
const MAPS_KEPT: u32 = 100;
/// Memory for redb's pages: what is in it is one map and its predecessors.
const CACHE_BYTES: usize = 4 << 20;
/// How a redb file begins (redb's `docs/design.md`).
const REDB_MAGIC: &[u8] = b"redb";

/// One redb file.
#[derive(Debug)]
pub struct Embedded {
    path: String,
    database: Database,
}

/// What the file holds, not yet looked at.
struct Raw {
    map: Vec<u8>,
    extra: Vec<u8>,
}

impl Embedded {
    /// Opens the file or makes it. Every page is checked, since redb itself trusts a file that was closed cleanly.
    ///
    /// # Errors
    /// When another process has it, it is something else, or damaged. A foreign file is not changed.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let name = path.display().to_string();
        check_magic(path, &name)?;
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
        let database = builder.create(path).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { path: name.clone() },
            DatabaseError::Storage(StorageError::Io(error)) => io(&name, error),
            error => StoreError::Damaged { path: name.clone(), detail: error.to_string() },
        })?;
        // The name of a new file is durable only with its folder.
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::File::open(folder)
                .and_then(|folder| folder.sync_all())
                .map_err(|error| io(&name, error))?;
        }
        Ok(Self { path: name, database })
    }

    /// On a backend that a test watches.
    #[cfg(test)]
    pub(super) fn on_backend(backend: impl redb::StorageBackend) -> Result<Self, DatabaseError> {
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
        Ok(Self { path: "backend".to_owned(), database: builder.create_with_backend(backend)? })
    }

    fn read(&self) -> Result<Option<Raw>, redb::Error> {
        let transaction = self.database.begin_read()?;
        let maps = match transaction.open_table(MAPS) {
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            maps => maps?,
        };
        let Some((_, map)) = maps.last()? else { return Ok(None) };
        let extra = transaction.open_table(EXTRA)?.get(EXTRA_KEY)?.map(|extra| extra.value().to_vec());
        Ok(Some(Raw { map: map.value().to_vec(), extra: extra.unwrap_or_default() }))
    }

    fn write(&self, map: &ClusterMap, extra: &[u8]) -> Result<(), redb::Error> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        {
            let mut maps = transaction.open_table(MAPS)?;
            maps.insert(map.epoch.0, map.encode().as_slice())?;
            maps.retain(|epoch, _| epoch > map.epoch.0.saturating_sub(MAPS_KEPT))?;
            transaction.open_table(EXTRA)?.insert(EXTRA_KEY, extra)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// How many maps are kept.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn map_count(&self) -> Result<u64, StoreError> {
        let count = || -> Result<u64, redb::Error> {
            use redb::ReadableTableMetadata;
            Ok(self.database.begin_read()?.open_table(MAPS)?.len()?)
        };
        count().map_err(|error| io(&self.path, error))
    }
}

fn io(path: &str, error: impl Display) -> StoreError {
    StoreError::Io { path: path.to_owned(), detail: error.to_string() }
}

/// redb would take a foreign file for a damaged one. An empty file is a new store.
fn check_magic(path: &Path, name: &str) -> Result<(), StoreError> {
    let mut head = Vec::new();
    match std::fs::File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        file => file.and_then(|file| file.take(REDB_MAGIC.len() as u64).read_to_end(&mut head)),
    }
    .map_err(|error| io(name, error))?;
    if head.is_empty() || head == REDB_MAGIC {
        Ok(())
    } else {
        Err(StoreError::Foreign { path: name.to_owned() })
    }
}

impl MapStore for Embedded {
    fn load(&mut self) -> Result<Option<(ClusterMap, Extra)>, StoreError> {
        let damaged = |detail: String| StoreError::Damaged { path: self.path.clone(), detail };
        let Some(Raw { map, extra }) = self.read().map_err(|error| damaged(error.to_string()))? else {
            return Ok(None);
        };
        let map = ClusterMap::decode(&map);
        let map = map.map_err(|source| StoreError::Map { path: self.path.clone(), source })?;
        let extra = postcard::from_bytes(&extra).map_err(|error| damaged(error.to_string()))?;
        Ok(Some((map, extra)))
    }

    fn commit(&mut self, map: &ClusterMap, extra: &Extra) -> Result<(), StoreError> {
        let extra = postcard::to_stdvec(extra).expect("memory is the only thing that postcard could lack");
        self.write(map, &extra).map_err(|error| io(&self.path, error))
    }
}
