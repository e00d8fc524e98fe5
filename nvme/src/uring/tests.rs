use super::*;
use crate::conformance;
use loligo_config::units::Lba;
use loligo_reactor::env::WriteList;
use loligo_reactor::os::ring::RingFlags;
use std::fs;
use std::os::unix::fs::FileExt;
use tempfile::TempDir;

const LEN: u64 = 8 << 20;

/// On a file system with O_DIRECT, which the folder of the build is and `/tmp` often is not.
fn folder() -> TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

fn device_file(folder: &TempDir, len: u64) -> PathBuf {
    let path = folder.path().join("device");
    fs::write(&path, vec![0x5a; len as usize]).unwrap();
    path
}

fn options() -> UringOptions {
    UringOptions { queue_depth: 64, ..UringOptions::default() }
}

/// Without a deadline: whatever completes must end the wait.
fn turn(ring: &Ring) -> impl FnMut(&mut UringDevice) {
    let ring = ring.clone();
    move |_| ring.wait(None).unwrap()
}

fn complete(device: &mut UringDevice, op: DiskOp) -> Completion {
    device.submit(op, Ticket(1)).unwrap();
    let ring = device.owner.ring().clone();
    let mut done = Completions::new();
    while device.poll(1, &mut done) == 0 {
        turn(&ring)(device);
    }
    done.pop_front().unwrap()
}

fn write(pool: &BufferPool, lba: u64, bytes: &[u8]) -> DiskOp {
    let mut data = WriteList::new();
    data.push(pool.copy_of(bytes).unwrap());
    DiskOp::Write { lba: Lba(lba), data, fua: true }
}

#[test]
fn files_conform_on_every_kind_of_ring() {
    for flags in [RingFlags::Deferred, RingFlags::Cooperative, RingFlags::Plain] {
        let Ok(ring) = Ring::with_flags(32, flags) else { continue };
        let folder = folder();
        let path = device_file(&folder, LEN + 1000);
        let pool = BufferPool::new(64 << 20);
        let mut device = UringDevice::open(&path, &ring, &pool, options()).unwrap();
        assert_eq!(device.geometry().blocks, BlockCount(LEN / 4096), "the odd end is not used");
        assert_eq!(device.geometry().write_cache, WriteCache::Volatile, "a file on a file system");
        conformance::check(&mut device, &pool, &mut turn(&ring));
        assert!(device.stats().registered > 0, "buffers of the first slabs are registered");
        assert_eq!(device.stats().failed, 0);
        drop(device);
        assert_eq!(fs::metadata(&path).unwrap().len(), LEN + 1000, "the length stays");
    }
}

#[test]
fn discards_free_space_only_when_asked() {
    use std::os::unix::fs::MetadataExt;
    let folder = folder();
    let path = device_file(&folder, LEN);
    let ring = Ring::new(32).unwrap();
    let pool = BufferPool::new(64 << 20);
    for punch_holes in [false, true] {
        let before = fs::metadata(&path).unwrap().blocks();
        let options = UringOptions { punch_holes, ..options() };
        let mut device = UringDevice::open(&path, &ring, &pool, options).unwrap();
        assert_eq!(device.geometry().discards, punch_holes);
        let end = complete(&mut device, DiskOp::Discard { lba: Lba(512), count: BlockCount(512) });
        assert_eq!(end.result, Ok(()));
        let freed = before - fs::metadata(&path).unwrap().blocks();
        assert_eq!(freed, if punch_holes { 4096 } else { 0 }, "sectors of 512 bytes");
        if punch_holes {
            conformance::check(&mut device, &pool, &mut turn(&ring));
        }
    }
}

#[test]
fn a_second_opener_is_told_who_has_it() {
    let folder = folder();
    let path = device_file(&folder, LEN);
    let ring = Ring::new(32).unwrap();
    let pool = BufferPool::new(8 << 20);
    let first = OpenDevice::open(&path, options()).unwrap();
    let queue = first.queue(&ring, &pool);
    drop(first);
    let error = UringDevice::open(&path, &ring, &pool, options()).err().unwrap();
    let OpenError::InUse { pid, .. } = &error else { panic!("{error}") };
    assert_eq!(*pid, Some(std::process::id()));
    assert!(error.to_string().contains("in use by"), "{error}");
    drop(queue);
    UringDevice::open(&path, &ring, &pool, options()).unwrap();
}

#[test]
fn what_cannot_be_a_device_is_refused_clearly() {
    let folder = folder();
    let open = |path: &Path| OpenDevice::open(path, options()).unwrap_err();
    let error = open(folder.path());
    assert!(matches!(error, OpenError::NotADevice { .. }), "{error}");
    let small = device_file(&folder, 4095);
    let error = open(&small);
    assert!(matches!(error, OpenError::TooSmall { .. }), "{error}");
    assert!(error.to_string().contains("4095 bytes"), "{error}");
    let error = open(&folder.path().join("missing"));
    assert!(
        matches!(&error, OpenError::System { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    );
    // proc has files, and no O_DIRECT.
    let error = open(Path::new("/proc/self/comm"));
    assert!(matches!(&error, OpenError::NoDirectIo { file_system, .. } if file_system == "proc"), "{error}");
    assert!(error.to_string().contains("/proc/self/comm"), "{error}");
}

#[test]
fn a_failed_write_poisons_all_queues_but_reads_go_on() {
    let folder = folder();
    let path = device_file(&folder, LEN);
    let ring = Ring::new(32).unwrap();
    let pool = BufferPool::new(8 << 20);
    let device = OpenDevice::open(&path, options()).unwrap();
    let (mut one, mut other) = (device.queue(&ring, &pool), device.queue(&ring, &pool));
    let op = write(&pool, 5, &[7; 4096]);
    one.submit(op, Ticket(9)).unwrap();
    // The kernel's answer is replaced: no file fails on demand.
    while one.owner.in_flight() > 0 {
        ring.wait(None).unwrap();
    }
    let index = one.owner.take().unwrap().user as u32;
    assert!(one.advance(index, -libc::EIO));
    let mut done = Completions::new();
    one.poll(8, &mut done);
    assert_eq!(done.pop_front().unwrap().result, Err(DiskError::Io { errno: libc::EIO }));
    for queue in [&mut one, &mut other] {
        assert!(queue.is_poisoned());
        let zeroes = DiskOp::WriteZeroes { lba: Lba(1), count: BlockCount(1), fua: false };
        for op in [write(&pool, 6, &[8; 4096]), DiskOp::Flush, zeroes] {
            assert_eq!(complete(queue, op).result, Err(DiskError::Poisoned));
        }
        let end = complete(queue, DiskOp::Read { lba: Lba(5), buffer: pool.alloc(4096).unwrap() });
        assert_eq!(end.result, Ok(()));
    }
    let mut byte = [0];
    fs::File::open(&path).unwrap().read_exact_at(&mut byte, 6 * 4096).unwrap();
    assert_eq!(byte, [0x5a], "nothing was written after the failure");
}

#[test]
fn a_real_failure_of_the_kernel_is_an_error() {
    let folder = folder();
    let path = device_file(&folder, LEN);
    let ring = Ring::new(32).unwrap();
    let pool = BufferPool::new(8 << 20);
    let mut device = UringDevice::open(&path, &ring, &pool, options()).unwrap();
    // The file is cut short under the device: reads beyond find nothing, reads across come back short.
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(LEN / 2).unwrap();
    for lba in [LEN / 4096 - 1, LEN / 8192 - 1] {
        let count = if lba == LEN / 4096 - 1 { 1 } else { 2 };
        let buffer = pool.alloc(count * 4096).unwrap();
        let end = complete(&mut device, DiskOp::Read { lba: Lba(lba), buffer });
        assert_eq!(end.result, Err(DiskError::Io { errno: 0 }), "block {lba}");
    }
    assert!(!device.is_poisoned(), "reads poison nothing");
}

#[test]
fn short_transfers_are_continued_with_the_right_bytes() {
    let folder = folder();
    let path = device_file(&folder, LEN);
    let ring = Ring::new(32).unwrap();
    let pool = BufferPool::new(16 << 20);
    let mut device = UringDevice::open(&path, &ring, &pool, options()).unwrap();
    let bytes: Vec<u8> = (0..5 * 4096u32).map(|at| (at / 4096 + 1) as u8).collect();
    let mut data = WriteList::new();
    for piece in bytes.chunks(2 * 4096) {
        data.push(pool.copy_of(piece).unwrap());
    }
    device.submit(DiskOp::Write { lba: Lba(0), data, fua: false }, Ticket(1)).unwrap();
    let settle = |device: &mut UringDevice| {
        while device.owner.in_flight() > 0 {
            ring.wait(None).unwrap();
        }
        device.owner.take().unwrap()
    };
    let first = settle(&mut device);
    assert_eq!(first.result, 5 * 4096);
    // Pretend that only three blocks were moved: the rest is written again.
    fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&[0; 5 * 4096], 0).unwrap();
    assert!(!device.advance(first.user as u32, 3 * 4096));
    let second = settle(&mut device);
    assert_eq!(second.result, 2 * 4096);
    assert!(device.advance(second.user as u32, second.result));
    assert_eq!(device.poll(8, &mut Completions::new()), 1);
    let end = complete(&mut device, DiskOp::Read { lba: Lba(0), buffer: pool.alloc(5 * 4096).unwrap() });
    let DiskOp::Read { buffer, .. } = end.op else { panic!("a read comes back as a read") };
    assert!(buffer[..3 * 4096].iter().all(|byte| *byte == 0));
    assert_eq!(buffer[3 * 4096..], bytes[3 * 4096..]);
    assert_eq!(device.stats().short, 1);
}

#[test]
fn try_again_is_bounded() {
    let folder = folder();
    let path = device_file(&folder, LEN);
    let ring = Ring::new(32).unwrap();
    let pool = BufferPool::new(8 << 20);
    let mut device = UringDevice::open(&path, &ring, &pool, options()).unwrap();
    device.submit(DiskOp::Read { lba: Lba(0), buffer: pool.alloc(4096).unwrap() }, Ticket(1)).unwrap();
    for _ in 0..RETRIES_MAX {
        while device.owner.in_flight() > 0 {
            ring.wait(None).unwrap();
        }
        let index = device.owner.take().unwrap().user as u32;
        assert!(!device.advance(index, -libc::EAGAIN));
    }
    while device.owner.in_flight() > 0 {
        ring.wait(None).unwrap();
    }
    let index = device.owner.take().unwrap().user as u32;
    assert!(device.advance(index, -libc::EAGAIN));
    assert_eq!(device.stats().retried, u64::from(RETRIES_MAX));
}

#[test]
fn dropping_waits_for_what_is_in_flight() {
    let folder = folder();
    let path = device_file(&folder, LEN);
    let ring = Ring::new(8).unwrap();
    let pool = BufferPool::new(64 << 20);
    for _ in 0..20 {
        let mut device = UringDevice::open(&path, &ring, &pool, options()).unwrap();
        for at in 0..32 {
            let op = DiskOp::Read { lba: Lba(at), buffer: pool.alloc(1 << 20).unwrap() };
            device.submit(op, Ticket(at)).unwrap();
        }
        let owner_left = device.owner.in_flight();
        assert!(owner_left > 0);
        drop(device);
        // All buffers are back, and nothing of the kernel's arrives in them any more.
        let mut again: Vec<_> = (0..32).map(|_| pool.alloc(1 << 20).unwrap()).collect();
        again.iter_mut().for_each(|buffer| buffer.fill(0));
        std::hint::black_box(&again);
        assert!(again.iter().all(|buffer| buffer.iter().all(|byte| *byte == 0)));
    }
}

#[test]
fn errors_mean_what_the_caller_does_next() {
    let pool = BufferPool::new(8 << 20);
    let read = DiskOp::Read { lba: Lba(0), buffer: pool.alloc(4096).unwrap() };
    let written = write(&pool, 0, &[0; 4096]);
    let table = [
        (&read, libc::EIO, DiskError::Media { errno: libc::EIO }),
        (&read, libc::ENODATA, DiskError::Media { errno: libc::ENODATA }),
        (&written, libc::EIO, DiskError::Io { errno: libc::EIO }),
        (&written, libc::ENOSPC, DiskError::Io { errno: libc::ENOSPC }),
        (&written, libc::ENODEV, DiskError::Gone),
        (&read, libc::ENXIO, DiskError::Gone),
        (&read, libc::ETIMEDOUT, DiskError::Timeout),
        (&written, libc::EINVAL, DiskError::Invalid),
    ];
    for (op, errno, meaning) in table {
        assert_eq!(disk_error(op, errno), meaning, "errno {errno}");
    }
}

/// A file as a block device; needs the right to make one.
struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    fn new(file: &Path) -> Option<Self> {
        let output =
            std::process::Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let path = String::from_utf8(output.stdout).ok()?.trim().into();
        output.status.success().then_some(Self { path })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let result = std::process::Command::new("losetup").arg("--detach").arg(&self.path).status();
        assert!(result.is_ok_and(|status| status.success()), "{} stays behind", self.path.display());
    }
}

#[test]
fn block_devices_conform() {
    let folder = folder();
    let Some(device) = LoopDevice::new(&device_file(&folder, LEN)) else {
        eprintln!("skipped: no right to make a loop device");
        return;
    };
    let ring = Ring::new(32).unwrap();
    let pool = BufferPool::new(64 << 20);
    let mut queue = UringDevice::open(&device.path, &ring, &pool, options()).unwrap();
    let geometry = queue.geometry().clone();
    assert_eq!(geometry.blocks, BlockCount(LEN / 4096));
    assert!(geometry.logical_block <= 4096 && geometry.dma_alignment <= 4096, "{geometry:?}");
    assert!(queue.means.zero_range);
    conformance::check(&mut queue, &pool, &mut turn(&ring));
    assert_eq!((queue.stats().failed, queue.means.zero_range), (0, true), "zeroed by command");
    assert_eq!(queue.means.discard, DiscardMeans::Command, "this kernel discards: {geometry:?}");

    let error = UringDevice::open(&device.path, &ring, &pool, options()).err().unwrap();
    let OpenError::InUse { pid, .. } = &error else { panic!("{error}") };
    assert_eq!(*pid, Some(std::process::id()), "{error}");
    drop(queue);
    UringDevice::open(&device.path, &ring, &pool, options()).unwrap();
}
