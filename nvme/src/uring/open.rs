//! Opening a file or block device: the lock, and what it is.

use super::system::{DeviceNumber, Queue, file_system, lock_holder};
use super::{Shared, UringDevice};
use loligo_config::units::{BLOCK_SIZE, BlockCount, ByteLen};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{Geometry, WriteCache};
use loligo_reactor::os::ring::Ring;
use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Largest read or write in 4 KiB blocks: 16 MiB, the largest buffer of a pool.
const TRANSFER_BLOCKS_MAX: u64 = 4096;

/// Choices of the operator.
#[derive(Clone, Copy, Debug)]
pub struct UringOptions {
    /// Operations in flight in each queue.
    pub queue_depth: u32,
    /// Whether discards of a file (or of a device whose kernel has no discard command) free its space. Off by default:
    /// allocating again costs a durable write 60 to 120 µs (DESIGN section 4).
    pub punch_holes: bool,
}

impl Default for UringOptions {
    fn default() -> Self {
        Self { queue_depth: 256, punch_holes: false }
    }
}

/// Why a device could not be opened. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process (or another part of this one) has it.
    #[error("device {} is in use by {}: stop that one first, or give this one a device of its own",
            path.display(), holder(*.pid))]
    InUse {
        /// The device.
        path: PathBuf,
        /// The other process, if it could be found out.
        pid: Option<u32>,
    },
    /// Its file system cannot read and write past the page cache.
    #[error("device {} is on a file system ({file_system}) without O_DIRECT: put it on ext4 or xfs, or use a block \
             device", path.display())]
    NoDirectIo {
        /// The device.
        path: PathBuf,
        /// The file system's type.
        file_system: String,
    },
    /// It asks for an alignment that 4 KiB blocks do not have.
    #[error("device {} needs reads and writes aligned to {alignment} bytes; Loligo's are aligned to {BLOCK_SIZE}",
            path.display())]
    Alignment {
        /// The device.
        path: PathBuf,
        /// What it needs, in bytes.
        alignment: u32,
    },
    /// It is a directory, a socket or the like.
    #[error("{} is neither a file nor a block device", path.display())]
    NotADevice {
        /// The path.
        path: PathBuf,
    },
    /// It holds not one block.
    #[error("device {} is too small: it has {} bytes", path.display(), len.0)]
    TooSmall {
        /// The device.
        path: PathBuf,
        /// Its size.
        len: ByteLen,
    },
    /// The system refused.
    #[error("device {}: {doing}: {source}", path.display())]
    System {
        /// The device.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

fn holder(pid: Option<u32>) -> String {
    match pid {
        Some(pid) if pid == std::process::id() => format!("another part of this process (pid {pid})"),
        Some(pid) => format!("another process (pid {pid})"),
        None => "another process, or mounted".to_owned(),
    }
}

/// A device that is open and locked. It makes queues, one for each reactor that uses a share of it, and may be sent
/// to them. The lock lasts until it and all its queues are dropped.
#[derive(Clone, Debug)]
pub struct OpenDevice {
    pub(super) shared: Arc<Shared>,
    options: UringOptions,
}

impl OpenDevice {
    /// Opens and locks a file or block device, and reads what it is.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: &Path, options: UringOptions) -> Result<Self, OpenError> {
        let opening = Opening { path };
        let metadata = std::fs::metadata(path).map_err(|error| opening.system("looking it up", error))?;
        let block_device = metadata.file_type().is_block_device();
        if !block_device && !metadata.is_file() {
            return Err(OpenError::NotADevice { path: path.to_owned() });
        }
        let file = opening.open(&metadata)?;
        // Of what was opened: the path may name something else by now.
        let metadata = file.metadata().map_err(|error| opening.system("looking at it", error))?;
        opening.lock(&file, &metadata)?;
        let geometry = opening.geometry(&file, &metadata, &options)?;
        let shared =
            Shared { file, path: path.to_owned(), geometry, block_device, poisoned: AtomicBool::new(false) };
        Ok(Self { shared: Arc::new(shared), options })
    }

    /// A queue of this device on a ring. A failed write or flush in one poisons all.
    pub fn queue(&self, ring: &Ring, pool: &BufferPool) -> UringDevice {
        UringDevice::new(Arc::clone(&self.shared), ring, pool, self.options)
    }

    /// What the device is.
    pub fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }
}

struct Opening<'path> {
    path: &'path Path,
}

impl Opening<'_> {
    fn system(&self, doing: &'static str, source: io::Error) -> OpenError {
        OpenError::System { path: self.path.to_owned(), doing, source }
    }

    fn no_direct_io(&self, metadata: &Metadata) -> OpenError {
        let file_system =
            file_system(DeviceNumber::of(metadata.dev())).unwrap_or_else(|| "unknown".to_owned());
        OpenError::NoDirectIo { path: self.path.to_owned(), file_system }
    }

    fn open(&self, metadata: &Metadata) -> Result<File, OpenError> {
        // O_EXCL without O_CREAT: the kernel lets nobody else in who asks for the same, a mount included
        // (open(2), block devices only).
        let exclusive = if metadata.file_type().is_block_device() { libc::O_EXCL } else { 0 };
        let flags = libc::O_DIRECT | libc::O_NOCTTY | exclusive;
        let result = OpenOptions::new().read(true).write(true).custom_flags(flags).open(self.path);
        result.map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => self.no_direct_io(metadata),
            Some(libc::EBUSY) => self.in_use(metadata),
            _ => self.system("opening it", error),
        })
    }

    fn in_use(&self, metadata: &Metadata) -> OpenError {
        let pid = lock_holder(DeviceNumber::of(metadata.dev()), metadata.ino());
        OpenError::InUse { path: self.path.to_owned(), pid }
    }

    fn lock(&self, file: &File, metadata: &Metadata) -> Result<(), OpenError> {
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => self.in_use(metadata),
            TryLockError::Error(error) => self.system("locking it", error),
        })
    }

    fn geometry(
        &self,
        file: &File,
        metadata: &Metadata,
        options: &UringOptions,
    ) -> Result<Geometry, OpenError> {
        let block_device = metadata.file_type().is_block_device();
        let number = if block_device { metadata.rdev() } else { metadata.dev() };
        let queue = Queue::of(DeviceNumber::of(number));
        let len = if block_device {
            device_len(file).map_err(|error| self.system("reading its size", error))?
        } else {
            ByteLen(metadata.len())
        };
        if len.blocks_down() == BlockCount(0) {
            return Err(OpenError::TooSmall { path: self.path.to_owned(), len });
        }
        let (memory, offset) = match direct_io_alignment(file) {
            Some((_, 0)) => return Err(self.no_direct_io(metadata)),
            Some(alignment) => alignment,
            None => (
                queue.dma_alignment.unwrap_or(BLOCK_SIZE).max(512),
                queue.logical_block.unwrap_or(BLOCK_SIZE),
            ),
        };
        let alignment = memory.max(offset);
        if alignment > BLOCK_SIZE {
            return Err(OpenError::Alignment { path: self.path.to_owned(), alignment });
        }
        let safe = block_device && queue.volatile == Some(false);
        Ok(Geometry {
            blocks: len.blocks_down(),
            logical_block: offset,
            dma_alignment: memory,
            atomic_blocks: BlockCount(queue.keeps_blocks_whole().into()),
            transfer_blocks_max: BlockCount(TRANSFER_BLOCKS_MAX),
            queue_depth_max: options.queue_depth.max(1),
            // A file on a file system: its metadata must be durable too, whatever the disk under it.
            write_cache: if safe { WriteCache::None } else { WriteCache::Volatile },
            discards: options.punch_holes || (block_device && queue.discard_max > 0),
        })
    }
}

fn device_len(file: &File) -> io::Result<ByteLen> {
    let mut len = 0u64;
    // _IOR(0x12, 114, size_t), linux/fs.h.
    const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
    // SAFETY: this request writes eight bytes, which `len` has.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(ByteLen(len))
}

/// Alignment of memory and of offsets that O_DIRECT needs (statx, kernel 6.1), in bytes; 0: there is no O_DIRECT.
/// `None`: not told.
fn direct_io_alignment(file: &File) -> Option<(u32, u32)> {
    let mut answer = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is an empty, terminated string, and the kernel writes a `statx` into the one that `answer` has
    // room for.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            answer.as_mut_ptr(),
        )
    };
    // SAFETY: zeroes are a valid `statx`, and so is what the kernel writes over them.
    let answer = unsafe { answer.assume_init() };
    let told = result == 0 && answer.stx_mask & libc::STATX_DIOALIGN != 0;
    told.then_some((answer.stx_dio_mem_align, answer.stx_dio_offset_align))
}
