//! Requests against a flat array of bytes.

use super::*;
use loligo_config::units::{ByteLen, ByteOffset};
use loligo_reactor::env::QueueFull;
use proptest::prelude::*;

const SIZE: u64 = 40 << 10;

#[derive(Clone, Debug)]
enum Step {
    Read { offset: u64, len: u64 },
    Write { offset: u64, len: u64, byte: u8 },
    Discard { offset: u64, len: u64 },
    WriteZeroes { offset: u64, len: u64 },
    Extents { offset: u64, len: u64 },
    Flush,
    Resize { size: u64 },
    LoseOsds,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..SIZE, prop_oneof![0..SIZE, Just(4096), Just(512)]);
    prop_oneof![
        4 => range().prop_map(|(offset, len)| Step::Read { offset, len }),
        6 => (range(), 1..=255_u8).prop_map(|((offset, len), byte)| Step::Write { offset, len, byte }),
        2 => range().prop_map(|(offset, len)| Step::Discard { offset, len }),
        2 => range().prop_map(|(offset, len)| Step::WriteZeroes { offset, len }),
        2 => range().prop_map(|(offset, len)| Step::Extents { offset, len }),
        1 => Just(Step::Flush),
        2 => (0..=SIZE).prop_map(|size| Step::Resize { size }),
        1 => Just(Step::LoseOsds),
    ]
}

/// An image and what it must hold.
struct Checked {
    cluster: Scripted,
    host: Host,
    image: ImageHandle,
    bytes: Vec<u8>,
}

impl Checked {
    fn new(size: u64, order: u8) -> Self {
        let mut cluster = cluster();
        let mut host = Host::new(&mut cluster);
        host.create(&mut cluster, "disk", size, order).unwrap();
        let image = host.open(&mut cluster, "disk").unwrap();
        Self { cluster, host, image, bytes: vec![0; size as usize] }
    }

    fn io(&mut self, io: ImageIo) -> Result<IoDone, IoError> {
        self.host.io(&mut self.cluster, self.image, io)
    }

    fn range(&mut self, offset: u64, len: u64) -> Option<&mut [u8]> {
        self.bytes.get_mut(offset as usize..(offset + len) as usize)
    }

    fn check_range(&mut self, offset: u64, len: u64, result: &Result<IoDone, IoError>) {
        match self.range(offset, len) {
            Some(_) => assert!(result.is_ok(), "{result:?}"),
            None => assert_eq!(result.as_ref().unwrap_err(), &IoError::Invalid),
        }
    }

    fn write(&mut self, offset: u64, len: u64, byte: u8) {
        let data = self.cluster.pool.copy_of(&vec![byte; len as usize]).unwrap();
        let result = self.io(ImageIo::Write { offset: ByteOffset(offset), data, fua: true });
        self.check_range(offset, len, &result);
        if let Some(bytes) = self.range(offset, len) {
            bytes.fill(byte);
        }
    }

    fn read(&mut self, offset: u64, len: u64) {
        let result = self.io(ImageIo::Read { offset: ByteOffset(offset), len: ByteLen(len) });
        self.check_range(offset, len, &result);
        if let Ok(done) = result {
            let data = done.data.as_deref().unwrap_or_default();
            assert!(data == self.range(offset, len).unwrap(), "what was written is read");
        }
    }

    fn zero(&mut self, io: ImageIo, offset: u64, len: u64, whole_only: bool) {
        let result = self.io(io);
        self.check_range(offset, len, &result);
        let (mut from, mut to) = (offset as usize, (offset + len) as usize);
        if whole_only {
            (from, to) = (from.next_multiple_of(4096), to / 4096 * 4096);
        }
        if result.is_ok() && from < to {
            self.bytes[from..to].fill(0);
        }
    }

    fn extents(&mut self, offset: u64, len: u64) {
        let result = self.io(ImageIo::Extents { offset: ByteOffset(offset), len: ByteLen(len) });
        self.check_range(offset, len, &result);
        let Ok(done) = result else { return };
        let mut at = offset;
        let mut before = None;
        for extent in done.extents {
            assert_eq!(extent.offset.0, at, "no hole");
            assert_ne!(before, Some(extent.allocated), "neighbours differ");
            before = Some(extent.allocated);
            at += extent.len.0;
            let bytes = &self.bytes[extent.offset.0 as usize..at as usize];
            assert!(extent.allocated || bytes.iter().all(|byte| *byte == 0), "what is not allocated is zero");
        }
        assert_eq!(at, offset + len, "the whole range");
    }

    fn run(&mut self, step: Step) {
        let range = |offset, len| (ByteOffset(offset), ByteLen(len));
        match step {
            Step::Read { offset, len } => self.read(offset, len),
            Step::Write { offset, len, byte } => self.write(offset, len, byte),
            Step::Discard { offset, len } => {
                let (at, count) = range(offset, len);
                self.zero(ImageIo::Discard { offset: at, len: count }, offset, len, true);
            }
            Step::WriteZeroes { offset, len } => {
                let (at, count) = range(offset, len);
                self.zero(ImageIo::WriteZeroes { offset: at, len: count }, offset, len, false);
            }
            Step::Extents { offset, len } => self.extents(offset, len),
            Step::Flush => assert!(self.io(ImageIo::Flush).is_ok()),
            Step::Resize { size } => {
                assert_eq!(self.host.resize(&mut self.cluster, "disk", size), Ok(AdminReply::Resized));
                self.host.settle(&mut self.cluster);
                assert_eq!(self.host.core.image_info(self.image).unwrap().size, size);
                self.bytes.resize(size as usize, 0);
            }
            Step::LoseOsds => self.host.lose_osds(&mut self.cluster),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn an_image_is_a_flat_array(order in 12..=14_u8, steps in prop::collection::vec(step(), 1..24)) {
        let mut image = Checked::new(SIZE, order);
        steps.into_iter().for_each(|step| image.run(step));
        image.read(0, image.bytes.len() as u64);
    }
}

#[test]
fn every_object_size_from_4_kib_to_32_mib_holds_unaligned_writes_across_borders() {
    for order in 12..=25 {
        let object = 1_u64 << order;
        let mut image = Checked::new(object * 2 + 100, order);
        image.write(object - 700, 1500, 1);
        image.write(object * 2 - 1, 101, 2);
        image.read(object - 5000.min(object), 9000.min(object + 100));
        image.read(object * 2 - 4, 104);
        image.write(object * 2, 101, 3);
        assert_eq!(image.host.core.image_info(image.image).unwrap().objects(), 3);
    }
}

#[test]
fn long_requests_are_cut_and_joined() {
    let mut image = Checked::new(24 << 20, 22);
    image.write(1000, 5 << 20, 9);
    image.read(0, 8 << 20);
    let io = ImageIo::WriteZeroes { offset: ByteOffset(5000), len: ByteLen(4 << 20) };
    image.zero(io, 5000, 4 << 20, false);
    image.read(0, 8 << 20);
    let long = ImageIo::Read { offset: ByteOffset(0), len: ByteLen(17 << 20) };
    assert_eq!(image.io(long).unwrap_err(), IoError::Invalid);
    let io = ImageIo::Discard { offset: ByteOffset(0), len: ByteLen(24 << 20) };
    image.zero(io, 0, 24 << 20, true);
    image.extents(0, 24 << 20);
}

#[test]
fn the_queue_is_bounded_and_a_closed_image_ends_its_requests_first() {
    let mut image = Checked::new(1 << 20, 20);
    let read = || ImageIo::Read { offset: ByteOffset(0), len: ByteLen(4096) };
    let (host, cluster) = (&mut image.host, &mut image.cluster);
    host.events();
    for number in 0..64 {
        host.core.submit(host.now, image.image, read(), Ticket(100 + number)).unwrap();
    }
    assert!(matches!(host.core.submit(host.now, image.image, read(), Ticket(1)), Err(QueueFull(_))));
    host.core.close(image.image, Ticket(7));
    assert!(host.core.is_waiting());
    assert!(host.events().is_empty(), "requests are still out");
    host.settle(cluster);
    let events = host.events();
    assert_eq!(events.len(), 65);
    assert!(matches!(events[64], ClientEvent::Closed { ticket: Ticket(7) }), "after the last request");
    host.core.submit(host.now, image.image, read(), Ticket(9)).unwrap();
    let events = host.events();
    assert!(matches!(events[..], [ClientEvent::Io { result: Err(IoError::Fenced), .. }]));
    assert!(!host.core.is_waiting());
}

#[test]
fn statistics_count_what_was_done() {
    let mut image = Checked::new(1 << 20, 20);
    image.write(0, 8192, 1);
    image.read(0, 4096);
    image.read(1 << 20, 1);
    let stats = image.host.core.stats(image.image).unwrap();
    assert_eq!((stats.write.ops, stats.write.bytes, stats.write.latency_ns.len()), (1, 8192, 1));
    assert_eq!((stats.read.ops, stats.read.bytes, stats.read.errors), (1, 4096, 1));
    assert_eq!(stats.write.last.copies, 1);
}
