//! A store without a file, for tests and the simulator. Clones are handles to the same store.

use super::{Extra, MapStore, StoreError};
use loligo_config::map::{ClusterMap, MapError};
use std::cell::RefCell;
use std::rc::Rc;

/// Keeps the newest map in memory, encoded as a file would.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    kept: Rc<RefCell<Option<Kept>>>,
}

#[derive(Debug)]
struct Kept {
    map: Vec<u8>,
    extra: Extra,
}

impl MapStore for Memory {
    fn load(&mut self) -> Result<Option<(ClusterMap, Extra)>, StoreError> {
        let path = "memory".to_owned();
        let wrong = |source: MapError| StoreError::Map { path, source };
        let kept = self.kept.borrow();
        let Some(Kept { map, extra }) = kept.as_ref() else { return Ok(None) };
        Ok(Some((ClusterMap::decode(map).map_err(wrong)?, extra.clone())))
    }

    fn commit(&mut self, map: &ClusterMap, extra: &Extra) -> Result<(), StoreError> {
        *self.kept.borrow_mut() = Some(Kept { map: map.encode(), extra: extra.clone() });
        Ok(())
    }
}
