//! The conformance body on every kind of controller, and what goes beyond it.

use super::*;
use crate::conformance::{BLOCKS_MIN, check};
use crate::model::controller::NamespaceOptions;
use crate::model::device::Latency;
use loligo_config::units::BlockCount;
use loligo_reactor::env::WriteCache;

fn namespaces(shifts: &[u8]) -> Vec<NamespaceOptions> {
    let blocks = BlockCount(2 * BLOCKS_MIN);
    shifts.iter().map(|&lba_shift| NamespaceOptions { blocks, lba_shift }).collect()
}

fn conforms(soft: SoftOptions, options: ControllerOptions) {
    let bench = Bench::with(soft, options);
    for namespace in &bench.controller().facts().namespaces {
        let mut device = bench.device(namespace.nsid);
        check(&mut device, &bench.pool, &mut |_| bench.turn());
        assert_eq!(device.stats().unknown, 0);
        assert_eq!(device.stats().resets, 0);
    }
    assert_eq!(bench.controller().resets(), 0);
}

#[test]
fn with_both_block_sizes_and_caches() {
    for write_cache in [WriteCache::Volatile, WriteCache::None] {
        for seed in 0..4 {
            let namespaces = namespaces(&[12, 9]);
            conforms(SoftOptions { seed, namespaces, write_cache, ..Default::default() }, Default::default());
        }
    }
}

#[test]
fn with_every_transfer_limit() {
    for mdts in 0..=9 {
        let namespaces = namespaces(&[9]);
        conforms(SoftOptions { mdts, namespaces, ..Default::default() }, Default::default());
    }
}

#[test]
fn with_small_queues_and_wide_doorbells() {
    for (entries, doorbell_stride) in [(2, 0), (3, 1), (9, 4), (65536, 0)] {
        let namespaces = namespaces(&[12]);
        let soft =
            SoftOptions { queue_entries_max: entries, doorbell_stride, namespaces, ..Default::default() };
        conforms(soft, ControllerOptions { queue_depth: 2000, ..Default::default() });
    }
}

#[test]
fn without_optional_commands() {
    let namespaces = namespaces(&[12, 9]);
    conforms(SoftOptions { optional_commands: false, namespaces, ..Default::default() }, Default::default());
}

#[test]
fn with_shadow_doorbells() {
    let namespaces = namespaces(&[12]);
    let soft = SoftOptions { shadow_doorbells: true, namespaces, ..Default::default() };
    conforms(soft.clone(), Default::default());
    // They spare registers: one submission doorbell, and those of the admin queue.
    let mut bench = Bench::new(soft);
    let mut device = bench.device(1);
    bench.write(&mut device, 0, 1).unwrap();
    let before = bench.soft.doorbells();
    for lba in 1..100 {
        bench.write(&mut device, lba, 1).unwrap();
    }
    assert!(bench.soft.doorbells() - before < 10, "{} doorbells", bench.soft.doorbells() - before);
}

#[test]
fn several_queues_of_several_namespaces_at_once() {
    let soft = SoftOptions { namespaces: namespaces(&[12, 9, 12]), ..Default::default() };
    let mut bench = Bench::new(soft);
    let mut devices: Vec<_> = (0..9).map(|at| bench.device(at % 3 + 1)).collect();
    for (at, device) in devices.iter_mut().enumerate() {
        for block in 0..16 {
            let op = bench.write_op(at as u64 * 16 + block, at as u8 + 1, 1, false);
            bench.submit(device, op);
        }
    }
    for device in &mut devices {
        assert!(bench.finish(device).iter().all(|end| end.result.is_ok()));
    }
    // What one queue has written the others of its namespace read; other namespaces have their own.
    for at in 0..9u64 {
        let reader = &mut devices[((at + 3) % 9) as usize];
        assert_eq!(bench.read(reader, at * 16 + 15), Ok(at as u8 + 1));
    }
}

#[test]
fn queue_counts_are_negotiated_and_queues_given_back() {
    let mut bench = Bench::new(SoftOptions { queue_pairs_max: 2, ..Default::default() });
    assert_eq!(bench.controller().facts().queue_pairs, 2);
    for round in 0..5 {
        let (mut first, mut second) = (bench.device(1), bench.device(1));
        let third = bench.controller().queue(1, &bench.pool, bench.clock.clone());
        assert!(matches!(third, Err(ControllerError::NoQueue { granted: 2 })));
        bench.write(&mut first, 1, round).unwrap();
        assert_eq!(bench.read(&mut second, 1), Ok(round));
        drop((first, second));
        let health = bench.controller().health(&bench.clock, &mut || bench.soft.step()).unwrap();
        assert_eq!(health.temperature_celsius(), Some(38));
        for _ in 0..20 {
            bench.controller().drive(&bench.clock);
            bench.turn();
        }
    }
    assert!(matches!(
        bench.controller().queue(7, &bench.pool, bench.clock.clone()),
        Err(ControllerError::Namespace { nsid: 7, reason: None })
    ));
}

/// What a queue's predecessor of the same number has left in the shadow doorbells is not the new queue's.
#[test]
fn a_queue_number_is_used_again_with_shadow_doorbells() {
    let mut bench =
        Bench::new(SoftOptions { shadow_doorbells: true, queue_pairs_max: 1, ..Default::default() });
    for round in 1..5 {
        let mut device = bench.device(1);
        for lba in 0..u64::from(round) * 7 {
            bench.write(&mut device, lba, round).unwrap();
        }
        assert_eq!(device.stats().commands, u64::from(round) * 7);
        assert_eq!(device.stats().unknown, 0);
        drop(device);
        for _ in 0..20 {
            bench.controller().drive(&bench.clock);
            bench.turn();
        }
    }
    assert_eq!(bench.controller().resets(), 0);
}

#[test]
fn facts_are_read() {
    let soft =
        SoftOptions { awupf: 15, mdts: 5, namespaces: namespaces(&[9]), seed: 7, ..Default::default() };
    let bench = Bench::new(soft);
    let facts = bench.controller().facts();
    assert_eq!((&facts.identity.serial[..], facts.version), ("SOFT-7", (2, 0, 0)));
    assert_eq!((facts.transfer_len_max, facts.zeroes_len_max), (128 << 10, 256 << 10));
    let device = bench.device(1);
    let geometry = device.geometry();
    assert_eq!(
        (geometry.blocks.0, geometry.logical_block, geometry.atomic_blocks.0),
        (2 * BLOCKS_MIN, 512, 2)
    );
    assert_eq!(geometry.write_cache, WriteCache::Volatile);
    let errors = bench.controller().errors(4, &bench.clock, &mut || bench.soft.step()).unwrap();
    assert_eq!(errors.len(), 1);
    assert_eq!(errors[0].status.verdict(), Verdict::Media);
}

#[test]
fn compare_tells_equal_from_different() {
    let mut bench = Bench::new(SoftOptions::default());
    let mut device = bench.device(1);
    bench.write(&mut device, 5, 9).unwrap();
    for (fill, result) in [(9, Ok(())), (8, Err(DiskError::Media { errno: libc::EILSEQ }))] {
        let op = bench.write_op(5, fill, 1, false);
        device.submit_compare(op, Ticket(1)).unwrap();
        assert_eq!(bench.finish(&mut device)[0].result, result);
    }
    assert_eq!(bench.read(&mut device, 5), Ok(9), "nothing was written, and nothing poisoned");
    assert_eq!(bench.write(&mut device, 5, 8), Ok(()));
}

#[test]
fn foreign_and_unaligned_buffers_are_copied() {
    let mut bench = Bench::new(SoftOptions::default());
    let mut device = bench.device(1);
    let other = BufferPool::new(8 << 20);
    let whole = other.copy_of(&[5; 3 * BLOCK]).unwrap();
    let own = bench.pool.copy_of(&[6; 3 * BLOCK]).unwrap();
    for (lba, piece, fill) in [(0, whole.slice(0..BLOCK), 5), (1, own.slice(512..512 + BLOCK), 6)] {
        let mut data = WriteList::new();
        data.push(piece);
        let op = DiskOp::Write { lba: Lba(lba), data, fua: true };
        assert_eq!(bench.one(&mut device, op).result, Ok(()));
        assert_eq!(bench.read(&mut device, lba), Ok(fill));
    }
    let op = DiskOp::Read { lba: Lba(0), buffer: other.alloc(2 * BLOCK).unwrap() };
    let end = bench.one(&mut device, op);
    let DiskOp::Read { buffer, .. } = end.op else { panic!("a read comes back as a read") };
    assert!(buffer[..BLOCK] == [5; BLOCK] && buffer[BLOCK..] == [6; BLOCK]);
    assert_eq!(device.stats().bounced, 3);
}

/// A missing flush or FUA can only be seen here: on hardware and on files a cache rarely loses anything.
#[test]
fn what_was_durable_survives_a_power_cut() {
    for seed in 0..50 {
        let mut bench = Bench::new(SoftOptions {
            seed,
            latency: Latency::Polls { min: 1, max: 9 },
            ..Default::default()
        });
        let mut device = bench.device(1);
        bench.write(&mut device, 1, 11).unwrap();
        let op = bench.write_op(2, 22, 1, false);
        assert_eq!(bench.one(&mut device, op).result, Ok(()));
        assert_eq!(bench.one(&mut device, DiskOp::Flush).result, Ok(()));
        let op = DiskOp::WriteZeroes { lba: Lba(3), count: BlockCount(1), fua: true };
        assert_eq!(bench.one(&mut device, op).result, Ok(()));
        let lost = bench.write_op(4, 44, 1, false);
        assert_eq!(bench.one(&mut device, lost).result, Ok(()));
        bench.soft.power_cut();
        drop(device);
        bench.reopen();
        let mut device = bench.device(1);
        assert_eq!([1, 2, 3].map(|lba| bench.read(&mut device, lba)), [Ok(11), Ok(22), Ok(0)], "seed {seed}");
    }
}

#[test]
fn no_flush_is_sent_without_a_cache() {
    let mut bench = Bench::new(SoftOptions { write_cache: WriteCache::None, ..Default::default() });
    let mut device = bench.device(1);
    bench.write(&mut device, 1, 1).unwrap();
    let before = bench.soft.commands();
    assert_eq!(bench.one(&mut device, DiskOp::Flush).result, Ok(()));
    assert_eq!(bench.soft.commands(), before);
    bench.soft.with_media(0, |media| assert!(media.record().writes.iter().all(|write| !write.fua)));
}

#[test]
fn a_shut_down_saves_the_cache_and_ends_everything() {
    let mut bench = Bench::new(SoftOptions::default());
    let mut device = bench.device(1);
    let op = bench.write_op(1, 7, 1, false);
    assert_eq!(bench.one(&mut device, op).result, Ok(()));
    let clock = bench.clock.clone();
    bench.controller().close(&clock, &mut || bench.turn()).unwrap();
    assert!(!bench.soft.may_write());
    assert_eq!(bench.read(&mut device, 1), Err(DiskError::Gone));
    bench.soft.with_media(0, |media| assert_eq!(media.unflushed(), []));
}

#[test]
fn memory_is_given_back() {
    let mut bench = Bench::new(SoftOptions::default());
    let mut device = bench.device(1);
    bench.write(&mut device, 1, 7).unwrap();
    drop(device);
    let soft = bench.soft.clone();
    assert!(soft.mapped() > 0);
    drop(bench);
    assert_eq!((soft.mapped(), soft.may_write()), (0, false));
}
