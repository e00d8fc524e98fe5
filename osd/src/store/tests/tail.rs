//! The tail rule, case by case, and what survives a restart.

use super::harness::{Harness, What, object, pg};
use super::oracle::PgModel;
use crate::store::api::{OpLookup, ReadError, StoreEvent};
use crate::store::codec::BLOCK;
use loligo_config::id::{Epoch, ObjectVersion, OpId, SessionId};
use loligo_reactor::env::{Instant, Ticket};
use std::collections::VecDeque;

fn harness() -> Harness {
    let mut harness = Harness::new(4000, 1);
    harness.media.borrow_mut().chaos = false;
    for index in 0..3 {
        harness.make_pg(pg(index));
        harness.commit();
    }
    harness
}

/// Writes one block in a record of its own, without waiting.
fn write_alone(harness: &mut Harness, index: u32, block: u32) {
    harness.write(pg(index), object(u64::from(index)), block, 1);
    harness.store().close_record();
}

/// Address of the record at a position.
fn record_lba(harness: &mut Harness, position: u64) -> u64 {
    let blocks = &harness.store().log.blocks;
    blocks.iter().find(|(at, run)| *at == position && run.count == 1).expect("it is in the log").1.lba
}

fn rot(harness: &Harness, lba: u64) {
    harness.media.borrow_mut().set(lba, &[0x55; BLOCK]);
}

fn version(sequence: u64) -> ObjectVersion {
    ObjectVersion { interval: Epoch(1), stream: 0, sequence }
}

fn restart(harness: &mut Harness) {
    harness.power_cut();
    harness.mount();
}

/// Reads one block straight from the store.
fn read(harness: &mut Harness, index: u32, block: u32) -> Result<u64, ReadError> {
    let store = harness.store.as_mut().unwrap();
    store.read(object(u64::from(index)), pg(index), block, 1, Ticket(1 << 40)).unwrap();
    let mut events = VecDeque::new();
    for _ in 0..1000 {
        store.poll(Instant(1 << 40), &mut events);
        if let Some(StoreEvent::Read { result, .. }) = events.pop_front() {
            let data = result?.data.map(|data| u64::from_le_bytes(data[..8].try_into().unwrap()));
            return Ok(data.unwrap_or(0));
        }
    }
    panic!("no answer");
}

#[test]
fn a_gap_above_every_mark_is_the_torn_tail() {
    let mut harness = harness();
    write_alone(&mut harness, 0, 0);
    harness.commit();
    let torn = harness.store().log.next;
    write_alone(&mut harness, 0, 1);
    write_alone(&mut harness, 1, 1);
    harness.commit();
    let lba = record_lba(&mut harness, torn);
    harness.power_cut();
    rot(&harness, lba);
    harness.mount();
    let status = harness.store().pg(pg(0)).unwrap();
    assert_eq!((status.last, status.incomplete), (version(1), false));
    let status = harness.store().pg(pg(1)).unwrap();
    assert_eq!(
        (status.last, status.incomplete),
        (ObjectVersion::NONE, false),
        "what is above the gap is cut too"
    );
    assert_eq!(read(&mut harness, 0, 1), Ok(0));
}

#[test]
fn torn_data_is_a_torn_record() {
    let mut harness = harness();
    write_alone(&mut harness, 0, 0);
    harness.commit();
    let torn = harness.store().log.next;
    write_alone(&mut harness, 0, 1);
    harness.commit();
    let lba = record_lba(&mut harness, torn);
    harness.power_cut();
    rot(&harness, lba + 1);
    harness.mount();
    assert_eq!(harness.store().pg(pg(0)).unwrap().last, version(1));
}

/// Two writes of one block in flight at once: no mark says yet that the first is durable, so a mount looks at its data.
/// Whatever is written to free blocks by then, it must still be there, or both would be cut as a torn tail.
#[test]
fn data_of_a_record_that_no_mark_covers_is_not_written_over() {
    let mut harness = harness();
    write_alone(&mut harness, 0, 0);
    write_alone(&mut harness, 0, 0);
    harness.commit();
    for _ in 0..10 {
        // Time for the store to free what it may.
        harness.poll();
    }
    let mut free = Vec::new();
    while harness.store().alloc.alloc_low(1, &mut free) {}
    assert!(!free.is_empty());
    harness.power_cut();
    for lba in free.iter().flat_map(|run| run.lba..run.end()) {
        rot(&harness, lba);
    }
    harness.mount();
    harness.verify();
}

#[test]
fn what_was_cut_stays_cut_for_ever() {
    for crashes in 0..4 {
        let mut harness = harness();
        let first = harness.store().log.next;
        write_alone(&mut harness, 0, 0);
        write_alone(&mut harness, 1, 0);
        write_alone(&mut harness, 1, 1);
        harness.commit();
        let lba = record_lba(&mut harness, first);
        harness.power_cut();
        rot(&harness, lba);
        harness.mount();
        // The oracle starts again from what is there: nothing of the three.
        harness.oracle.acked.values_mut().chain(harness.oracle.current.values_mut()).for_each(|pg| {
            *pg = PgModel { meta: pg.meta, ..PgModel::default() };
        });
        for _ in 0..crashes {
            restart(&mut harness);
            harness.verify();
        }
        // The same position and place again: the two stale records behind it must not come back.
        assert_eq!(harness.store().log.next, first);
        write_alone(&mut harness, 2, 0);
        harness.commit();
        for _ in 0..3 {
            restart(&mut harness);
            harness.verify();
            assert_eq!(harness.store().pg(pg(1)).unwrap().last, ObjectVersion::NONE);
        }
        assert_eq!(harness.store().pg(pg(2)).unwrap().last, version(1));
    }
}

#[test]
fn a_gap_below_a_mark_is_corruption_of_the_pgs_in_it() {
    let mut harness = harness();
    let lost = harness.store().log.next;
    for block in 0..3 {
        for index in 0..3 {
            write_alone(&mut harness, index, block);
            harness.commit();
        }
    }
    let lba = record_lba(&mut harness, lost + 1);
    harness.power_cut();
    rot(&harness, lba);
    for round in 0..3 {
        harness.mount();
        for index in [0, 2] {
            let status = harness.store().pg(pg(index)).unwrap();
            assert_eq!((status.last, status.incomplete), (version(3), false), "round {round}");
            for block in 0..3 {
                assert_ne!(read(&mut harness, index, block), Ok(0));
            }
        }
        let status = harness.store().pg(pg(1)).unwrap();
        assert_eq!((status.last, status.incomplete), (version(3), true));
        // Nothing is submitted before the finding is durable.
        harness.settle();
        assert_eq!(harness.store().checkpoints(), u64::from(round == 0));
        harness.store().audit().unwrap();
        harness.power_cut();
    }
}

#[test]
fn a_lost_promise_makes_its_pg_incomplete_although_no_version_is_missing() {
    let mut harness = harness();
    let lost = harness.store().log.next;
    harness.make_pg(pg(1));
    harness.commit();
    write_alone(&mut harness, 0, 0);
    harness.commit();
    let lba = record_lba(&mut harness, lost);
    harness.power_cut();
    rot(&harness, lba);
    harness.mount();
    assert!(harness.store().pg(pg(1)).unwrap().incomplete);
    assert!(!harness.store().pg(pg(0)).unwrap().incomplete);
}

#[test]
fn a_loss_that_no_echo_tells_of_makes_every_pg_incomplete() {
    let mut harness = harness();
    let lost = harness.store().log.next;
    write_alone(&mut harness, 0, 0);
    harness.commit();
    let lba = record_lba(&mut harness, lost);
    // The mount records that everything so far is durable; then the last record rots.
    restart(&mut harness);
    harness.power_cut();
    rot(&harness, lba);
    harness.mount();
    assert!((0..3).all(|index| harness.store().pg(pg(index)).unwrap().incomplete));
}

#[test]
fn rotten_data_is_found_by_the_read_and_nothing_else_suffers() {
    let mut harness = harness();
    harness.write(pg(0), object(0), 0, 4);
    harness.commit();
    write_alone(&mut harness, 0, 9);
    harness.commit();
    let lba = harness.store().state.index.stored(object(0), 2, 1).next().unwrap().lba;
    restart(&mut harness);
    rot(&harness, lba);
    assert_eq!(read(&mut harness, 0, 2), Err(ReadError::Corrupt { block: 2 }));
    assert_ne!(read(&mut harness, 0, 1), Ok(0));
    // Writing the block again heals it.
    harness.write(pg(0), object(0), 2, 1);
    harness.commit();
    assert_ne!(read(&mut harness, 0, 2), Ok(0));
    harness.media.borrow_mut().unreadable.push(lba);
}

#[test]
fn one_copy_of_an_anchor_is_enough() {
    let mut harness = harness();
    write_alone(&mut harness, 0, 0);
    harness.commit();
    harness.checkpoint();
    write_alone(&mut harness, 0, 1);
    harness.commit();
    for copy in 0..2 {
        let store = harness.store();
        let lba = store.checkpoint.anchor.lba(&store.superblock, store.shard);
        harness.power_cut();
        rot(&harness, lba + copy);
        harness.mount();
        harness.verify();
    }
}

#[test]
fn a_damaged_checkpoint_page_makes_pgs_incomplete_and_the_rest_mounts() {
    let mut harness = harness();
    write_alone(&mut harness, 0, 0);
    write_alone(&mut harness, 1, 0);
    harness.commit();
    harness.checkpoint();
    let pages = harness.store().checkpoint.buckets.iter().find(|pages| !pages.is_empty()).unwrap().clone();
    let pg_page = harness.store().checkpoint.pgs[&pg(2)][0];
    harness.power_cut();
    rot(&harness, pages[0]);
    rot(&harness, pg_page);
    harness.mount();
    assert!((0..3).all(|index| harness.store().pg(pg(index)).unwrap().incomplete));
    harness.settle();
    harness.store().audit().unwrap();
    // Made anew, as a repair from peers does, they stay complete.
    for index in 0..3 {
        harness.submit_wait(pg(index), What::RemovePg).unwrap();
        harness.make_pg(pg(index));
    }
    harness.commit();
    for _ in 0..3 {
        restart(&mut harness);
        assert!((0..3).all(|index| !harness.store().pg(pg(index)).unwrap().incomplete));
        harness.checkpoint();
    }
}

#[test]
fn ops_and_log_entries_come_back_from_log_and_checkpoint() {
    for checkpoint in [false, true] {
        let mut harness = harness();
        for block in 0..200 {
            write_alone(&mut harness, 0, block % 50);
            harness.commit();
        }
        if checkpoint {
            harness.checkpoint();
        }
        for _ in 0..2 {
            restart(&mut harness);
            let last = OpId { session: SessionId(1 + 200 % 3), number: 200 };
            assert_eq!(harness.store().op_lookup(pg(0), last), OpLookup::Applied(version(200)));
            let old = OpId { session: SessionId(1 + 100 % 3), number: 100 };
            assert_eq!(harness.store().op_lookup(pg(0), old), OpLookup::Forgotten);
            let new = OpId { session: SessionId(1), number: 500 };
            assert_eq!(harness.store().op_lookup(pg(0), new), OpLookup::New);
            let entries: Vec<_> =
                harness.store().entries_since(pg(0), ObjectVersion::NONE).unwrap().collect();
            let versions: Vec<_> = entries.iter().map(|entry| entry.version.sequence).collect();
            assert_eq!(versions, (1..=200).collect::<Vec<_>>());
            assert_eq!(harness.store().entries_since(pg(0), version(200)).unwrap().count(), 0);
            assert!(harness.store().entries_since(pg(0), version(201)).is_none());
            harness.verify();
        }
    }
}

#[test]
fn the_kept_map_comes_back_and_never_goes_backwards() {
    let mut harness = harness();
    harness.store().keep_map(Epoch(5), &[9; 10_000]);
    harness.store().keep_map(Epoch(4), &[1; 10]);
    harness.settle();
    restart(&mut harness);
    assert_eq!(harness.store().kept_map(), Some((Epoch(5), &[9; 10_000][..])));
}

#[test]
fn one_poll_is_one_device_write_whatever_number_of_pgs() {
    let mut harness = harness();
    for index in 0..16 {
        harness.make_pg(pg(index));
    }
    harness.commit();
    harness.settle();
    let before = harness.media.borrow().writes;
    for index in 0..16 {
        harness.write(pg(index), object(u64::from(index)), 0, 1);
    }
    harness.commit();
    assert_eq!(harness.media.borrow().writes - before, 1);
    for block in 1..20 {
        write_alone(&mut harness, 0, block);
        harness.commit();
    }
    assert_eq!(harness.media.borrow().writes - before, 20);
    assert_eq!(harness.store().checkpoints(), 0);
    restart(&mut harness);
    harness.verify();
}

#[test]
fn a_transaction_that_does_not_follow_is_refused() {
    let mut harness = harness();
    write_alone(&mut harness, 0, 0);
    harness.oracle.current.get_mut(&pg(0)).unwrap().last = version(7);
    let result = harness.submit(pg(0), What::Result);
    assert_eq!(result, Err(crate::store::api::SubmitError::NotNext { last: version(1) }));
    let result = harness.submit(pg(9), What::Result);
    assert_eq!(result, Err(crate::store::api::SubmitError::Invalid));
}
