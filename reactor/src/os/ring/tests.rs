use super::*;
use crate::dma::BufferPool;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

fn nop(owner: &RingOwner, user: u64) -> Result<(), QueueFull<Entry>> {
    // SAFETY: a no-op names no memory.
    unsafe { owner.push(opcode::Nop::new().build(), user) }
}

fn each_kind(test: impl Fn(Ring)) {
    for flags in [RingFlags::Deferred, RingFlags::Cooperative, RingFlags::Plain] {
        match Ring::with_flags(8, flags) {
            Ok(ring) => test(ring),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{flags:?}"),
        }
    }
}

#[test]
fn completions_go_to_their_owners() {
    each_kind(|ring| {
        let (one, other) = (ring.owner(), ring.owner());
        nop(&one, 1).unwrap();
        nop(&other, 2).unwrap();
        nop(&one, USER_MASK - 1).unwrap();
        ring.wait(None).unwrap();
        assert_eq!((one.in_flight(), other.in_flight()), (0, 0));
        assert_eq!(one.take().unwrap().user, 1);
        assert_eq!(one.take().unwrap().user, USER_MASK - 1);
        assert_eq!(one.take(), None);
        assert_eq!(other.take(), Some(RingCompletion { user: 2, result: 0, flags: 0 }));
    });
}

#[test]
fn a_full_submission_queue_is_submitted_and_flight_is_bounded() {
    each_kind(|ring| {
        let owner = ring.owner();
        let bound = ring.inner.completions_max as u64;
        for user in 0..bound {
            nop(&owner, user).unwrap();
        }
        assert!(nop(&owner, bound).is_err());
        ring.submit().unwrap();
        ring.reap();
        for user in 0..bound {
            assert_eq!(owner.take().unwrap().user, user);
        }
        nop(&owner, bound).unwrap();
    });
}

#[test]
fn nothing_to_do_is_no_system_call() {
    each_kind(|ring| {
        for _ in 0..10 {
            ring.submit().unwrap();
            ring.reap();
        }
        assert_eq!(ring.stats().enters, 0);
    });
}

#[test]
fn waiting_ends_at_the_deadline_at_a_wake_up_and_for_what_was_not_taken() {
    each_kind(|ring| {
        let begin = boot_time();
        ring.wait(Some(begin.after(Duration::from_millis(5)))).unwrap();
        assert!(boot_time().since(begin) >= Duration::from_millis(5));

        ring.waker().wake();
        ring.wait(None).unwrap();
        ring.nudge();
        ring.wait(None).unwrap();
        let waker = ring.waker();
        let parked = std::thread::scope(|scope| {
            scope.spawn(move || {
                while !waker.bell().is_parked() {
                    std::hint::spin_loop();
                }
                waker.wake();
            });
            ring.wait(None)
        });
        parked.unwrap();

        let owner = ring.owner();
        nop(&owner, 1).unwrap();
        ring.wait(None).unwrap();
        ring.wait(None).unwrap();
        assert!(owner.take().is_some());
    });
}

#[test]
fn a_dropped_owner_leaves_no_trace() {
    each_kind(|ring| {
        let owner = ring.owner();
        let id = owner.queue.id;
        nop(&owner, 1).unwrap();
        drop(owner);
        let next = ring.owner();
        assert_ne!(next.queue.id, id, "its completion is still to come");
        nop(&next, 2).unwrap();
        ring.wait(None).unwrap();
        ring.wait(Some(Instant(0))).unwrap();
        assert_eq!(next.take().unwrap().user, 2);
        assert_eq!(ring.owner().queue.id, id);
    });
}

#[test]
fn cancelled_entries_complete_and_quiesce_waits_for_them() {
    each_kind(|ring| {
        let (reader, _writer) = std::io::pipe().unwrap();
        let owner = ring.owner();
        let entry = opcode::PollAdd::new(types::Fd(reader.as_raw_fd()), libc::POLLIN as u32).build();
        // SAFETY: a poll names no memory.
        unsafe { owner.push(entry.clone(), 5) }.unwrap();
        owner.cancel(5).unwrap();
        while owner.in_flight() > 0 {
            ring.submit().unwrap();
            ring.reap();
        }
        assert_eq!(owner.take().unwrap().result, -libc::ECANCELED);
        assert_eq!(owner.take(), None);
        // SAFETY: as before.
        unsafe { owner.push(entry, 6) }.unwrap();
        owner.cancel(6).unwrap();
        owner.quiesce().unwrap();
        assert_eq!(owner.in_flight(), 0);
    });
}

#[test]
fn registered_files_and_buffers_work() {
    each_kind(|ring| {
        let file = File::open("/proc/self/maps").unwrap();
        let index = ring.register_file(file.as_fd()).expect("this kernel registers files");
        let pool = BufferPool::new(8 << 20);
        let registered = ring.register_pool(&pool);
        let mut buffer = pool.alloc(4096).unwrap();
        let slab = registered.index(buffer.slab(), &buffer).expect("this kernel registers buffers");
        assert_eq!(ring.register_pool(&pool).index(buffer.slab(), &buffer), Some(slab));
        let foreign = BufferPool::new(8 << 20).alloc(4096).unwrap();
        assert_eq!(registered.index(foreign.slab(), &foreign), None, "of another pool");
        let entry = opcode::ReadFixed::new(types::Fixed(index), buffer.as_mut_ptr(), 16, slab).build();
        let owner = ring.owner();
        // SAFETY: the buffer outlives the wait for the completion below.
        unsafe { owner.push(entry, 0) }.unwrap();
        while owner.in_flight() > 0 {
            ring.wait(None).unwrap();
        }
        assert_eq!(owner.take().unwrap().result, 16);
        ring.unregister_file(index);
        assert_eq!(ring.register_file(file.as_fd()), Some(index));
    });
}
