//! What a model keeps its durable bytes on.
#![allow(clippy::disallowed_methods, reason = "a back end: the file behind the model")]

use super::prng::{mix, noise};
use loligo_config::units::{BLOCK_SIZE, BlockCount, ByteOffset};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const BLOCK_LEN: usize = BLOCK_SIZE as usize;

/// The medium below the cache. What is written here has survived the power cut.
pub trait Backing {
    /// Its size.
    fn blocks(&self) -> BlockCount;

    /// Fills `into` from `offset` on. Both are multiples of 512 bytes and within the size.
    ///
    /// # Errors
    /// As the system reports them.
    fn read_at(&self, offset: ByteOffset, into: &mut [u8]) -> io::Result<()>;

    /// Writes `data` from `offset` on. Both are multiples of 512 bytes and within the size.
    ///
    /// # Errors
    /// As the system reports them.
    fn write_at(&mut self, offset: ByteOffset, data: &[u8]) -> io::Result<()>;

    /// Makes what was written survive a power cut of the machine itself, where the backing promises that.
    ///
    /// # Errors
    /// As the system reports them.
    fn sync(&mut self) -> io::Result<()>;
}

type Block = [u8; BLOCK_LEN];

/// A medium in memory. Only written blocks take space; clones share blocks until one is written.
#[derive(Clone, Debug)]
pub struct Memory {
    blocks: BlockCount,
    written: BTreeMap<u64, Arc<Block>>,
    /// Blocks never written read as noise from this seed, or as zero.
    noise: Option<u64>,
}

impl Memory {
    /// A medium of zeroes.
    pub fn new(blocks: BlockCount) -> Self {
        Self { blocks, written: BTreeMap::new(), noise: None }
    }

    /// A medium full of noise, as a used disk may be.
    pub fn noisy(blocks: BlockCount, seed: u64) -> Self {
        Self { noise: Some(seed), ..Self::new(blocks) }
    }

    fn fresh(&self, index: u64) -> Block {
        let mut block = [0; BLOCK_LEN];
        if let Some(seed) = self.noise {
            noise(seed ^ mix(index.wrapping_add(1)), &mut block);
        }
        block
    }
}

/// Calls `each` with the block's index, the start within it and the part of `0..len` that falls into it.
fn by_block(offset: ByteOffset, len: usize, mut each: impl FnMut(u64, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    let mut within = offset.within_block() as usize;
    let mut index = offset.block_index();
    while done < len {
        let step = (BLOCK_LEN - within).min(len - done);
        each(index, within, done..done + step);
        done += step;
        within = 0;
        index += 1;
    }
}

impl Backing for Memory {
    fn blocks(&self) -> BlockCount {
        self.blocks
    }

    fn read_at(&self, offset: ByteOffset, into: &mut [u8]) -> io::Result<()> {
        let len = into.len();
        by_block(offset, len, |index, within, part| {
            let target = &mut into[part];
            match self.written.get(&index) {
                Some(block) => target.copy_from_slice(&block[within..within + target.len()]),
                None if self.noise.is_none() => target.fill(0),
                None => target.copy_from_slice(&self.fresh(index)[within..within + target.len()]),
            }
        });
        Ok(())
    }

    fn write_at(&mut self, offset: ByteOffset, data: &[u8]) -> io::Result<()> {
        by_block(offset, data.len(), |index, within, part| {
            let fresh = self.fresh(index);
            let block = self.written.entry(index).or_insert_with(|| Arc::new(fresh));
            let source = &data[part];
            Arc::make_mut(block)[within..within + source.len()].copy_from_slice(source);
        });
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why a file cannot back a model.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system refuses it.
    #[error("cannot open {path}: {source}")]
    Open {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Another process, or this one, uses it already.
    #[error("{path} is in use: another process holds its lock")]
    InUse {
        /// Which file.
        path: PathBuf,
    },
    /// A model can only wrap a normal file.
    #[error("{path} is not a regular file: the volatile-cache model wraps files only")]
    NotAFile {
        /// Which file.
        path: PathBuf,
    },
    /// There is not one whole block in it.
    #[error("{path} is too small: {len} bytes are less than one block of {BLOCK_SIZE}")]
    TooSmall {
        /// Which file.
        path: PathBuf,
        /// Its length in bytes.
        len: u64,
    },
}

/// Whether a [`File`] calls the system's sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncMode {
    /// Durable means durable: also when the machine's own power fails.
    Real,
    /// Durable means handed to the kernel: survives the death of the process, which is what stands for a power cut
    /// in tests, and costs no device sync.
    ProcessOnly,
}

/// A medium in a normal file, through the page cache. Whatever the model has not written to it dies with the
/// process, so that SIGKILL is a power cut.
///
/// Clones are handles to the same open file under the same lock, which ends with the last: one for the model of each
/// reactor that uses a share of the device. Each model has a cache of its own, so a flush covers its own writes only.
#[derive(Clone, Debug)]
pub struct File {
    file: Arc<fs::File>,
    blocks: BlockCount,
    sync: SyncMode,
}

impl File {
    /// Opens an existing file and locks it for this opener alone, until dropped.
    ///
    /// # Errors
    /// When it cannot be opened, is in use, is not a regular file or has less than one block.
    pub fn open(path: &Path, sync: SyncMode) -> Result<Self, FileError> {
        let path = path.to_path_buf();
        // Asked before opening: opening a FIFO would block.
        let about = match fs::metadata(&path) {
            Ok(about) => about,
            Err(source) => return Err(FileError::Open { path, source }),
        };
        if !about.is_file() {
            return Err(FileError::NotAFile { path });
        }
        let file = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(source) => return Err(FileError::Open { path, source }),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(FileError::InUse { path }),
            Err(TryLockError::Error(source)) => return Err(FileError::Open { path, source }),
        }
        let len = match file.metadata() {
            Ok(about) => about.len(),
            Err(source) => return Err(FileError::Open { path, source }),
        };
        let blocks = BlockCount(len / u64::from(BLOCK_SIZE));
        if blocks.0 == 0 {
            return Err(FileError::TooSmall { path, len });
        }
        Ok(Self { file: Arc::new(file), blocks, sync })
    }
}

impl Backing for File {
    fn blocks(&self) -> BlockCount {
        self.blocks
    }

    fn read_at(&self, offset: ByteOffset, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset.0)
    }

    fn write_at(&mut self, offset: ByteOffset, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset.0)
    }

    fn sync(&mut self) -> io::Result<()> {
        match self.sync {
            SyncMode::Real => self.file.sync_data(),
            SyncMode::ProcessOnly => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_sectors_and_shares_until_written() {
        let mut first = Memory::noisy(BlockCount(4), 7);
        let mut before = [0; 4096];
        first.read_at(ByteOffset(4096), &mut before).unwrap();
        assert_ne!(before, [0; 4096]);
        let second = first.clone();
        first.write_at(ByteOffset(4096 + 3584), &[9; 1024]).unwrap();
        let mut after = [0; 8192];
        first.read_at(ByteOffset(4096), &mut after).unwrap();
        assert_eq!(after[..3584], before[..3584]);
        assert_eq!(after[3584..4608], [9; 1024]);
        let mut old = [0; 4096];
        second.read_at(ByteOffset(4096), &mut old).unwrap();
        assert_eq!(old, before);
    }

    #[test]
    fn a_file_has_one_opener_and_at_least_one_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        assert!(matches!(File::open(&path, SyncMode::Real), Err(FileError::Open { .. })));
        fs::write(&path, [0; 4095]).unwrap();
        assert!(matches!(File::open(&path, SyncMode::Real), Err(FileError::TooSmall { len: 4095, .. })));
        fs::write(&path, [0; 8193]).unwrap();
        let mut file = File::open(&path, SyncMode::Real).unwrap();
        assert_eq!(file.blocks(), BlockCount(2));
        let refused = File::open(&path, SyncMode::Real).unwrap_err();
        assert!(matches!(refused, FileError::InUse { .. }), "{refused}");
        file.write_at(ByteOffset(512), &[3; 512]).unwrap();
        file.sync().unwrap();
        let handle = file.clone();
        drop(file);
        assert!(File::open(&path, SyncMode::Real).is_err(), "the clone keeps the lock");
        drop(handle);
        assert_eq!(fs::read(&path).unwrap()[512..1024], [3; 512]);
        assert!(File::open(&path, SyncMode::ProcessOnly).is_ok());
        assert!(matches!(File::open(folder.path(), SyncMode::Real), Err(FileError::NotAFile { .. })));
    }
}
