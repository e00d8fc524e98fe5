//! One block that cannot be read, for every block that a mount reads, and what that costs.

use super::device::{Kind, Media};
use super::harness::{Harness, What, object, pg};
use crate::store::api::{ReadError, StoreEvent};
use crate::store::mount::MountError;
use loligo_config::id::{Epoch, PgId};
use loligo_reactor::env::{DiskError, Instant, Ticket};
use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

/// A store with everything in it, stopped; and where its parts are.
struct Prepared {
    harness: Harness,
    superblocks: Vec<u64>,
    claims: Vec<u64>,
    anchors: Vec<u64>,
    root: Vec<u64>,
    map: Vec<u64>,
    pages: Vec<u64>,
    /// Records that a later record's mark covers, and those above every mark.
    marked: Vec<u64>,
    tail: Vec<u64>,
    data: Vec<u64>,
}

fn prepared() -> Prepared {
    let mut harness = Harness::new(1560, 1);
    harness.media.borrow_mut().chaos = false;
    for index in 0..2 {
        harness.make_pg(pg(index));
    }
    for at in 0..50u32 {
        harness.write(pg(at % 2), object(u64::from(at % 2) * 100 + u64::from(at % 5)), at, 2);
        harness.commit();
    }
    harness.keep_map(Epoch(3));
    harness.checkpoint();
    harness.settle();
    for at in 0..12u32 {
        harness.write(pg(at % 2), object(u64::from(at % 2) * 100), at, 1);
        harness.commit();
    }
    let store = harness.store();
    let (superblock, shard) = (store.superblock, store.shard);
    let recorded = store.log.next - 2;
    let records = |marked: bool| {
        let all = store.log.blocks.iter().filter(|(position, _)| *position > store.log.start);
        let all = all.filter(|(position, _)| (*position <= recorded) == marked);
        all.flat_map(|(_, run)| run.lba..run.end()).collect()
    };
    let (marked, tail) = (records(true), records(false));
    let root = store.checkpoint.root.to_vec();
    let map = store.checkpoint.map_pages.to_vec();
    let pages = store.checkpoint.pages().filter(|lba| !root.contains(lba) && !map.contains(lba)).collect();
    let anchor = store.checkpoint.anchor.lba(&superblock, shard);
    let data = store.state.index.fragments().flat_map(|one| one.runs()).flat_map(|run| run.lba..run.end());
    Prepared {
        superblocks: vec![0, 1],
        claims: (0..superblock.chunks).map(|chunk| superblock.claim_lba(chunk)).collect(),
        anchors: vec![anchor, anchor + 1],
        root,
        map,
        pages,
        marked,
        tail,
        data: data.collect(),
        harness: {
            harness.stop();
            harness.media.borrow_mut().settle(true);
            harness
        },
    }
}

/// Mounts with one block unreadable, on a copy of the device.
fn mount_without(prepared: &mut Prepared, lba: u64) -> Result<Harness, MountError> {
    let harness = &mut prepared.harness;
    harness.moments = Some(Vec::new());
    harness.media.borrow_mut().changes += 1;
    harness.note_moment();
    let moment = harness.moments.take().and_then(|mut all| all.pop()).expect("just noted");
    let media: Rc<RefCell<Media>> = moment.crash.media(&Vec::new());
    media.borrow_mut().unreadable = vec![lba];
    let mut copy = Harness::after(&moment, media, &harness.pool);
    copy.try_mount().map(|()| copy)
}

fn incomplete(harness: &mut Harness) -> BTreeSet<PgId> {
    harness.store().pgs().filter(|(_, status)| status.incomplete).map(|(id, _)| id).collect()
}

#[test]
fn fixed_blocks_have_copies_or_can_be_done_without() {
    let mut prepared = prepared();
    let fixed = [&prepared.superblocks[..], &prepared.claims, &prepared.anchors, &prepared.map].concat();
    for lba in fixed {
        let map = prepared.map.contains(&lba);
        let mut harness = mount_without(&mut prepared, lba).unwrap();
        if map {
            // The mon has it.
            assert_eq!(harness.store().kept_map(), None);
            harness.oracle.maps = vec![Epoch(0)];
        }
        harness.verify();
        harness.write(pg(0), object(0), 3, 1);
        harness.commit();
        harness.store().audit().unwrap();
        harness.media.borrow_mut().unreadable.clear();
        harness.power_cut();
        harness.mount();
        if map {
            harness.oracle.maps = vec![Epoch(3)];
        }
        harness.verify();
    }
}

#[test]
fn a_page_costs_pgs_their_completeness_and_the_root_the_mount() {
    let mut prepared = prepared();
    for lba in prepared.pages.clone() {
        let mut harness = mount_without(&mut prepared, lba).unwrap();
        let found = incomplete(&mut harness);
        // A page of a PG's log costs its log alone: peers are then brought up by version.
        let logs = pg_logs_were_cut(&mut harness);
        assert!(!found.is_empty() || logs, "page {lba}");
        harness.settle();
        harness.store().audit().unwrap();
    }
    for lba in prepared.root.clone() {
        let error = mount_without(&mut prepared, lba).err();
        assert!(matches!(error, Some(MountError::Damaged { .. })), "{error:?}");
    }
}

fn pg_logs_were_cut(harness: &mut Harness) -> bool {
    let all: Vec<_> = harness.store().pgs().map(|(id, _)| id).collect();
    let none = loligo_config::id::ObjectVersion::NONE;
    all.into_iter().any(|id| harness.store().entries_since(id, none).is_none())
}

#[test]
fn a_record_below_a_mark_costs_the_pg_in_it_and_one_above_is_the_tail() {
    let mut prepared = prepared();
    assert!(prepared.marked.len() > 8);
    for lba in prepared.marked.clone() {
        let mut harness = mount_without(&mut prepared, lba).unwrap();
        let suffers = incomplete(&mut harness);
        assert_eq!(suffers.len(), 1, "exactly the PG of the record at {lba}");
        for (id, status) in harness.store().pgs().filter(|(id, _)| !suffers.contains(id)).collect::<Vec<_>>()
        {
            assert_eq!(status.last, prepared.harness.oracle.acked[&id].last);
        }
        harness.settle();
        harness.store().audit().unwrap();
    }
    assert_eq!(prepared.tail.len(), 1);
    let lba = prepared.tail[0];
    let mut harness = mount_without(&mut prepared, lba).unwrap();
    assert!(incomplete(&mut harness).is_empty());
    let acked: u64 = prepared.harness.oracle.acked.values().map(|pg| pg.last.sequence).sum();
    let found: u64 = harness.store().pgs().map(|(_, status)| status.last.sequence).sum();
    assert_eq!(found, acked - 1);
}

#[test]
fn a_data_block_costs_the_reads_of_it_and_a_write_heals_it() {
    let mut prepared = prepared();
    for lba in prepared.data.clone() {
        let mut harness = mount_without(&mut prepared, lba).unwrap();
        if harness.store().pgs().map(|(_, status)| status.last.sequence).sum::<u64>()
            < prepared.harness.oracle.acked.values().map(|pg| pg.last.sequence).sum()
        {
            // The data of the last record: above every mark, it is the tail.
            continue;
        }
        assert!(incomplete(&mut harness).is_empty());
        let place = harness.store().state.index.fragments().find_map(|fragment| {
            let extent = fragment
                .extents
                .iter()
                .find(|one| (one.lba()..one.lba() + u64::from(one.count())).contains(&lba))?;
            let at = extent.block() + (lba - extent.lba()) as u32;
            Some((fragment.pg, fragment.object, fragment.number * 128 + at))
        });
        let (id, object, block) = place.expect("the block holds data");
        let media = DiskError::Media { errno: 61 };
        assert_eq!(read(&mut harness, id, object, block), Err(ReadError::Device { block, error: media }));
        assert_eq!(harness.store().failed(), None);
        let stamps = harness.stamps(1);
        harness.submit_wait(id, What::Write(object, block, stamps)).unwrap();
        harness.commit();
        harness.verify();
    }
}

fn read(
    harness: &mut Harness,
    id: PgId,
    object: loligo_config::id::ObjectId,
    block: u32,
) -> Result<(), ReadError> {
    assert_eq!(harness.media.borrow().kind, Kind::Any);
    let store = harness.store();
    store.read(object, id, block, 1, Ticket(1 << 40)).unwrap();
    let mut events = VecDeque::new();
    for _ in 0..1000 {
        store.poll(Instant(1 << 40), &mut events);
        if let Some(StoreEvent::Read { result, .. }) = events.pop_front() {
            return result.map(|_| ());
        }
    }
    panic!("no answer");
}
