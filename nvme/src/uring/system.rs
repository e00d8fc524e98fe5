//! What the system says about a file or a block device: read from the kernel, never assumed. Everything in `/sys` and
//! `/proc` is input: what is missing or does not parse is "unknown", and unknown is the careful answer.

use std::fs;
use std::path::{Path, PathBuf};

/// The numbers of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceNumber {
    pub(super) major: u32,
    pub(super) minor: u32,
}

impl DeviceNumber {
    pub(super) fn of(raw: u64) -> Self {
        Self { major: libc::major(raw), minor: libc::minor(raw) }
    }

    /// The folder `queue` of the disk, also for a partition; `None` for file systems without one disk under them.
    fn queue(self) -> Option<PathBuf> {
        let device = fs::canonicalize(format!("/sys/dev/block/{}:{}", self.major, self.minor)).ok()?;
        let disk = if device.join("partition").exists() { device.parent()?.to_path_buf() } else { device };
        let queue = disk.join("queue");
        queue.is_dir().then_some(queue)
    }
}

/// What the kernel knows of a disk's request queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Queue {
    /// Whether acknowledged writes may be lost; `None`: unknown.
    pub(super) volatile: Option<bool>,
    pub(super) logical_block: Option<u32>,
    pub(super) physical_block: Option<u32>,
    pub(super) dma_alignment: Option<u32>,
    /// Smallest and largest write that is atomic across a power cut, in bytes.
    pub(super) atomic_min: u64,
    pub(super) atomic_max: u64,
    pub(super) discard_max: u64,
}

impl Queue {
    /// Of the disk with this number, or of the disk that the file system with this number lies on.
    pub(super) fn of(number: DeviceNumber) -> Self {
        number.queue().map(|folder| Self::read(&folder)).unwrap_or_default()
    }

    fn read(folder: &Path) -> Self {
        let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let number = |name: &str| text(name).and_then(|text| text.trim().parse::<u64>().ok());
        let small = |name: &str| number(name).and_then(|number| u32::try_from(number).ok());
        Self {
            volatile: text("write_cache").and_then(|text| match text.trim() {
                "write back" => Some(true),
                "write through" => Some(false),
                _ => None,
            }),
            logical_block: small("logical_block_size"),
            physical_block: small("physical_block_size"),
            // The file holds a mask.
            dma_alignment: small("dma_alignment").and_then(|mask| mask.checked_add(1)),
            atomic_min: number("atomic_write_unit_min_bytes").unwrap_or(0),
            atomic_max: number("atomic_write_unit_max_bytes").unwrap_or(0),
            discard_max: number("discard_max_bytes").unwrap_or(0),
        }
    }

    /// Whether a power cut leaves an aligned 4 KiB block old or new and never mixed: by the device's word on atomic
    /// writes, or because a physical block is that large.
    pub(super) fn keeps_blocks_whole(&self) -> bool {
        let block = u64::from(loligo_config::units::BLOCK_SIZE);
        let by_word = self.atomic_min > 0 && self.atomic_min <= block && self.atomic_max >= block;
        by_word || self.physical_block.is_some_and(|physical| u64::from(physical) >= block)
    }
}

/// The type of the file system with this number, from `/proc/self/mountinfo`.
pub(super) fn file_system(number: DeviceNumber) -> Option<String> {
    file_system_in(&fs::read_to_string("/proc/self/mountinfo").ok()?, number)
}

fn file_system_in(mounts: &str, number: DeviceNumber) -> Option<String> {
    let wanted = format!("{}:{}", number.major, number.minor);
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&wanted))?;
    // The optional fields before " - " vary in number; the type is the first after it.
    let (_, after) = line.split_once(" - ")?;
    after.split(' ').next().map(str::to_owned)
}

/// Who holds the `flock` on this inode, from `/proc/locks`.
pub(super) fn lock_holder(number: DeviceNumber, inode: u64) -> Option<u32> {
    lock_holder_in(&fs::read_to_string("/proc/locks").ok()?, number, inode)
}

fn lock_holder_in(locks: &str, number: DeviceNumber, inode: u64) -> Option<u32> {
    let wanted = format!("{:02x}:{:02x}:{inode}", number.major, number.minor);
    locks.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        if words.next()? != "FLOCK" {
            return None;
        }
        let pid = words.nth(2)?.parse().ok()?;
        (words.next()? == wanted).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBER: DeviceNumber = DeviceNumber { major: 254, minor: 0 };

    #[test]
    fn the_file_system_is_found_whatever_optional_fields_there_are() {
        let mounts = "21 1 0:20 / /proc rw - proc proc rw\n\
                      24 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw\n";
        assert_eq!(file_system_in(mounts, NUMBER).as_deref(), Some("ext4"));
        assert_eq!(file_system_in(mounts, DeviceNumber { major: 0, minor: 20 }).as_deref(), Some("proc"));
        assert_eq!(file_system_in(mounts, DeviceNumber { major: 9, minor: 9 }), None);
        assert_eq!(file_system_in("1 2 254:0 garbage\n\n", NUMBER), None);
    }

    #[test]
    fn the_holder_of_a_lock_is_found() {
        let locks = "1: POSIX  ADVISORY  WRITE 100 fe:00:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 4711 fe:00:77 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 4712 fe:00:77 0 EOF\n";
        assert_eq!(lock_holder_in(locks, NUMBER, 77), Some(4711));
        assert_eq!(lock_holder_in(locks, NUMBER, 78), None);
        assert_eq!(lock_holder_in("garbage\n1: FLOCK\n", NUMBER, 77), None);
    }

    #[test]
    fn a_queue_is_read_and_what_does_not_parse_is_unknown() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(Queue::read(folder.path()), Queue::default());
        put("write_cache", "write through\n");
        put("dma_alignment", "3\n");
        put("physical_block_size", "512\n");
        put("logical_block_size", "-1\n");
        let queue = Queue::read(folder.path());
        assert_eq!((queue.volatile, queue.dma_alignment, queue.logical_block), (Some(false), Some(4), None));
        assert!(!queue.keeps_blocks_whole());
        put("atomic_write_unit_min_bytes", "512\n");
        put("atomic_write_unit_max_bytes", "16384\n");
        assert!(Queue::read(folder.path()).keeps_blocks_whole());
        put("write_cache", "something new\n");
        assert_eq!(Queue::read(folder.path()).volatile, None);
    }
}
