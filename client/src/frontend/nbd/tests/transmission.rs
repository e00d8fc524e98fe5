use super::super::protocol::command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, REQ_ONE};
use super::*;

const MIB: usize = 1 << 20;
const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;
const ESHUTDOWN: u32 = 108;

#[test]
fn writes_and_simple_reads_go_byte_by_byte() {
    let mut wire = Wire::ready(MIB, false);
    let data = pattern(3000, 9);
    assert_eq!(wire.error_of(0, command::WRITE, 4095, 3000, &data), 0);
    assert_eq!(wire.ask(0, command::READ, 4095, 3000, &[]), [simple(0), data].concat());
    assert_eq!(wire.ask(0, command::READ, 7095, 1, &[]), [simple(0), vec![0]].concat());
    assert_eq!(wire.image.log, ["write 4095+3000 fua=false", "read 4095+3000", "read 7095+1"]);
}

#[test]
fn requests_become_the_images_requests() {
    let mut wire = Wire::ready(MIB, false);
    assert_eq!(wire.error_of(FUA, command::WRITE, 0, 4, b"abcd"), 0);
    assert_eq!(wire.error_of(0, command::FLUSH, 0, 0, &[]), 0);
    assert_eq!(wire.error_of(FUA, command::TRIM, 4096, 8192, &[]), 0);
    assert_eq!(wire.error_of(FUA | FAST_ZERO, command::WRITE_ZEROES, 1, 9999, &[]), 0);
    assert_eq!(wire.error_of(0, command::CACHE, 0, 4096, &[]), 0);
    assert_eq!(wire.image.log, ["write 0+4 fua=true", "flush", "discard 4096+8192", "zero 1+9999"]);
}

#[test]
fn zeroes_that_must_be_stored_are_written_in_parts() {
    let mut wire = Wire::ready(20 * MIB, false);
    assert_eq!(wire.error_of(NO_HOLE, command::WRITE_ZEROES, 4096, (19 * MIB) as u32, &[]), 0);
    assert_eq!(wire.image.log.len(), 20);
    assert_eq!(wire.image.log[0], format!("write 4096+{} fua=false", MIB - 4096));
    assert!(wire.image.allocated[1..][..19 * 256].iter().all(|allocated| *allocated));
    assert_eq!(wire.error_of(NO_HOLE | FAST_ZERO, command::WRITE_ZEROES, 0, 4096, &[]), ENOTSUP);
}

#[test]
fn structured_reads_tell_data_from_holes() {
    let mut wire = Wire::ready(MIB, true);
    let data = pattern(4096, 3);
    wire.ask(0, command::WRITE, 4096, 4096, &data);
    let at = |offset: u64| offset.to_be_bytes();
    let hole = |offset: u64, len: u32, done| chunk(done, 2, &[&at(offset), &len.to_be_bytes()]);
    let reply = wire.ask(0, command::READ, 0, 16384, &[]);
    assert_eq!(
        reply,
        [hole(0, 4096, false), chunk(false, 1, &[&at(4096), &data]), hole(8192, 8192, true)].concat()
    );
    assert_eq!(wire.ask(0, command::READ, 65536, 100_000, &[]), hole(65536, 100_000, true));
    let reply = wire.ask(0, command::READ, 4000, 200, &[]);
    assert_eq!(reply, [hole(4000, 96, false), chunk(true, 1, &[&at(4096), &data[..104]])].concat());
    let reply = wire.ask(DF, command::READ, 0, 8192, &[]);
    assert_eq!(reply, chunk(true, 1, &[&at(0), &[0; 4096], &data]));
    assert_eq!(wire.ask(0, command::READ, 0, 0, &[]), chunk(true, 0, &[]));
}

/// Puts the chunks of a structured read together.
fn assemble(mut reply: &[u8], offset: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0xaa; len];
    loop {
        let flags = u16::from_be_bytes(reply[4..6].try_into().unwrap());
        let kind = u16::from_be_bytes(reply[6..8].try_into().unwrap());
        let size = u32::from_be_bytes(reply[16..20].try_into().unwrap()) as usize;
        let at = (u64::from_be_bytes(reply[20..28].try_into().unwrap()) - offset) as usize;
        match kind {
            1 => data[at..at + size - 8].copy_from_slice(&reply[28..20 + size]),
            2 => data[at..][..u32::from_be_bytes(reply[28..32].try_into().unwrap()) as usize].fill(0),
            other => panic!("chunk {other}"),
        }
        reply = &reply[20 + size..];
        if flags == 1 {
            assert!(reply.is_empty());
            return data;
        }
    }
}

#[test]
fn long_unaligned_requests_are_cut_and_put_together_again() {
    for structured in [false, true] {
        let mut wire = Wire::ready(40 * MIB, structured);
        let data = pattern(32 * MIB, 5);
        assert_eq!(wire.error_of(0, command::WRITE, 12345, data.len() as u32, &data), 0);
        assert_eq!(wire.image.log.len(), 33);
        assert!(wire.image.bytes[12345..][..data.len()] == data);
        let reply = wire.ask(0, command::READ, 12345, data.len() as u32, &[]);
        match structured {
            false => assert!(reply == [simple(0), data].concat()),
            true => assert!(assemble(&reply, 12345, data.len()) == data),
        }
    }
}

#[test]
fn more_runs_than_fit_into_one_reply_go_out_as_data() {
    let mut wire = Wire::ready(2 * MIB, true);
    for block in (0..500).step_by(2) {
        wire.image.bytes[block * 4096] = block as u8 | 1;
    }
    let reply = wire.ask(0, command::READ, 100, 500 * 4096, &[]);
    assert!(assemble(&reply, 100, 500 * 4096) == wire.image.bytes[100..][..500 * 4096]);
}

#[test]
fn block_status_tells_what_is_allocated() {
    let mut wire = Wire::ready(MIB, true);
    wire.ask(0, command::WRITE, 8192, 4096, &pattern(4096, 1));
    let extent = |len: u32, flags: u32| [len.to_be_bytes(), flags.to_be_bytes()].concat();
    let id = 1u32.to_be_bytes();
    let reply = wire.ask(0, command::BLOCK_STATUS, 100, 20000, &[]);
    assert_eq!(reply, chunk(true, 5, &[&id, &extent(8092, 3), &extent(4096, 0), &extent(7812, 3)]));
    let reply = wire.ask(REQ_ONE, command::BLOCK_STATUS, 100, 20000, &[]);
    assert_eq!(reply, chunk(true, 5, &[&id, &extent(8092, 3)]));
    let invalid = chunk(true, 0x8001, &[&EINVAL.to_be_bytes(), &[0, 0]]);
    assert_eq!(wire.ask(0, command::BLOCK_STATUS, 0, 0, &[]), invalid);
    assert_eq!(wire.ask(0, command::BLOCK_STATUS, MIB as u64, 1, &[]), invalid);
}

#[test]
fn block_status_looks_at_a_bounded_range() {
    let mut wire = Wire::ready(300 * MIB, true);
    wire.ask(0, command::BLOCK_STATUS, 4096, (299 * MIB) as u32, &[]);
    assert_eq!(wire.image.log, [format!("extents 4096+{}", 256 * MIB - 4096)]);
}

#[test]
fn requests_at_and_after_the_end_are_refused_by_kind() {
    let mut wire = Wire::ready(MIB, false);
    let size = MIB as u64;
    assert_eq!(wire.error_of(0, command::WRITE, size - 4, 4, b"last"), 0);
    for (offset, len) in [(size - 3, 4), (size, 4), (u64::MAX, 4), (u64::MAX - 3, 4)] {
        assert_eq!(wire.error_of(0, command::WRITE, offset, len, b"late"), ENOSPC);
        assert_eq!(wire.error_of(0, command::WRITE_ZEROES, offset, len, &[]), ENOSPC);
        for kind in [command::READ, command::TRIM, command::CACHE] {
            assert_eq!(wire.error_of(0, kind, offset, len, &[]), EINVAL);
        }
    }
    for kind in [command::TRIM, command::CACHE, command::READ] {
        assert_eq!(wire.error_of(0, kind, 0, u32::MAX, &[]), EINVAL);
        assert_eq!(wire.error_of(0, kind, size, 0, &[]), 0, "nothing at the very end is fine");
    }
    assert_eq!(wire.error_of(0, command::WRITE_ZEROES, 0, u32::MAX, &[]), ENOSPC);
    assert_eq!(wire.error_of(0, command::WRITE, size, 0, &[]), 0);
}

#[test]
fn lengths_of_four_gigabytes_pass_where_they_carry_no_data() {
    let mut wire = Wire::ready(MIB, true);
    wire.session.resized(1 << 40);
    wire.hold = true;
    for kind in [command::TRIM, command::WRITE_ZEROES] {
        wire.give(&request(0, kind, (1 << 40) - u64::from(u32::MAX), u32::MAX, &[]));
    }
    let words: Vec<_> = wire.held.iter().map(|action| format!("{action:?}")).collect();
    assert_eq!(words.len(), 2);
    assert!(
        words.iter().all(|word| word.contains("4294967295") && word.contains("1095216660481")),
        "{words:?}"
    );
    assert_eq!(wire.session.transmission.in_flight(), 2);
}

#[test]
fn a_read_or_write_that_is_too_long_is_refused_and_its_payload_skipped() {
    let mut wire = Wire::ready(40 * MIB, false);
    let len = 32 * MIB + 1;
    assert_eq!(wire.error_of(0, command::READ, 0, len as u32, &[]), EINVAL);
    assert_eq!(wire.error_of(0, command::WRITE, 0, len as u32, &vec![1; len]), EINVAL);
    assert_eq!(wire.error_of(0, command::FLUSH, 0, 0, &[]), 0, "the stream is in step again");
    assert_eq!(wire.image.log, ["flush"]);
}

#[test]
fn unknown_commands_and_flags_are_invalid() {
    let mut wire = Wire::ready(MIB, false);
    for kind in [command::BLOCK_STATUS, 8, 9, u16::MAX] {
        assert_eq!(wire.error_of(0, kind, 0, 4096, &[]), EINVAL);
    }
    assert_eq!(wire.error_of(DF, command::READ, 0, 4096, &[]), EINVAL, "not without structured replies");
    assert_eq!(wire.error_of(1 << 5, command::WRITE, 0, 4, b"data"), EINVAL);
    assert_eq!(wire.error_of(NO_HOLE, command::TRIM, 0, 4, &[]), EINVAL);
    assert_eq!(wire.error_of(0, command::FLUSH, 0, 0, &[]), 0);
    assert_eq!(wire.image.log, ["flush"]);
}

#[test]
fn a_read_only_export_refuses_every_change() {
    let mut wire = Wire::new(MIB);
    wire.read_only = true;
    wire.give(&3u32.to_be_bytes());
    wire.give(&option(7, &info_request("rbd/disk", &[])));
    wire.take();
    assert_eq!(wire.error_of(0, command::WRITE, 0, 4, b"data"), EPERM);
    assert_eq!(wire.error_of(0, command::TRIM, 0, 4096, &[]), EPERM);
    assert_eq!(wire.error_of(0, command::WRITE_ZEROES, 0, 4096, &[]), EPERM);
    assert_eq!(wire.error_of(0, command::FLUSH, 0, 0, &[]), 0);
    assert_eq!(wire.image.log, ["flush"]);
}

#[test]
fn errors_are_mapped_to_the_protocols_few() {
    for structured in [false, true] {
        let mut wire = Wire::ready(MIB, structured);
        for (errno, expected) in
            [(28, ENOSPC), (108, ESHUTDOWN), (22, EINVAL), (5, EIO), (110, EIO), (16, EIO)]
        {
            wire.image.fail = Some(errno);
            assert_eq!(wire.error_of(0, command::WRITE, 0, 4, b"data"), expected);
            let reply = wire.ask(0, command::READ, 0, 4096, &[]);
            let chunked = chunk(true, 0x8001, &[&expected.to_be_bytes(), &[0, 0]]);
            assert_eq!(reply, if structured { chunked } else { simple(expected) });
        }
    }
}

#[test]
fn a_failed_part_fails_the_request_after_its_last_byte() {
    let mut wire = Wire::ready(4 * MIB, false);
    wire.image.fail = Some(28);
    let data = vec![1; 3 * MIB];
    let bytes = request(0, command::WRITE, 0, data.len() as u32, &data);
    wire.give(&bytes[..2 * MIB]);
    assert!(wire.take().is_empty(), "no reply before the payload is complete");
    wire.give(&bytes[2 * MIB..]);
    assert_eq!(wire.take(), simple(ENOSPC));
}

#[test]
fn disconnect_waits_for_what_is_in_flight() {
    let mut wire = Wire::ready(MIB, false);
    wire.hold = true;
    wire.give(&write(0, b"data"));
    wire.give(&request(0, command::DISC, 0, 0, &[]));
    assert_eq!((wire.ending, wire.take().len()), (None, 0));
    wire.release();
    assert_eq!(wire.ending, Some(Ending::Orderly));
    assert_eq!(wire.take(), simple(0));
    let mut idle = Wire::ready(MIB, false);
    idle.give(&request(0, command::DISC, 0, 0, &[]));
    assert_eq!(idle.ending, Some(Ending::Orderly));
}

#[test]
fn a_wrong_request_magic_ends_the_connection() {
    let mut wire = Wire::ready(MIB, false);
    wire.give(&[0x25; 28]);
    assert_eq!(wire.ending, Some(Ending::Protocol("wrong request magic")));
}

#[test]
fn nothing_is_sent_after_the_connection_was_given_up() {
    let mut wire = Wire::ready(MIB, false);
    wire.hold = true;
    wire.give(&request(0, command::READ, 0, 4096, &[]));
    wire.give(&[0; 28]);
    assert_eq!(wire.ending, Some(Ending::Protocol("wrong request magic")));
    wire.release();
    assert!(wire.take().is_empty(), "the read in flight has no reply any more");
}

#[test]
fn in_flight_bytes_are_bounded_by_leaving_requests_in_the_stream() {
    let mut wire = Wire::ready(64 * MIB, false);
    wire.hold = true;
    for _ in 0..4 {
        wire.give(&request(0, command::READ, 0, (32 * MIB) as u32, &[]));
    }
    assert_eq!(wire.session.transmission.in_flight(), 2);
    assert_eq!(wire.waiting_input(), 2 * 28);
    wire.release();
    assert_eq!(wire.waiting_input(), 0);
    assert_eq!(wire.take().len(), 4 * (16 + 32 * MIB));
}

#[test]
fn the_number_of_requests_is_bounded_too() {
    let mut wire = Wire::ready(MIB, false);
    wire.hold = true;
    let flushes = request(0, command::FLUSH, 0, 0, &[]).repeat(300);
    wire.give(&flushes);
    assert_eq!(wire.session.transmission.in_flight(), 256);
    wire.release();
    assert_eq!(wire.take(), simple(0).repeat(300));
}

#[test]
fn without_buffers_a_request_waits_instead_of_failing() {
    let mut wire = Wire::ready(4 * MIB, false);
    let mut hoard = Vec::new();
    for len in [16 * MIB, MIB, 512] {
        while let Ok(buffer) = wire.pool.alloc(len) {
            hoard.push(buffer);
        }
    }
    let data = pattern(MIB, 7);
    wire.give(&write(0, &data));
    assert!(wire.take().is_empty());
    assert!(wire.waiting_input() > 0);
    drop(hoard);
    wire.pump();
    assert_eq!(wire.take(), simple(0));
    assert!(wire.image.bytes[..MIB] == data);
}

#[test]
fn a_read_that_came_back_short_is_an_error_not_data() {
    let mut wire = Wire::ready(MIB, false);
    wire.hold = true;
    wire.give(&request(0, command::READ, 0, 4096, &[]));
    let Some(Action::Io { key, .. }) = wire.held.pop_front() else { panic!("a read is held") };
    let data = Some(wire.pool.alloc_zeroed(512).unwrap().freeze());
    let mut out = Vec::new();
    let done = IoDone { data, extents: Vec::new(), waterfall: Default::default() };
    wire.session.completed(key, Ok(done), &mut out);
    let [Action::Send(reply)] = out.as_slice() else { panic!("one reply") };
    assert_eq!(**reply, simple(EIO));
}

#[test]
fn shutting_down_answers_what_is_in_flight_and_closes() {
    let mut wire = Wire::ready(MIB, false);
    wire.hold = true;
    wire.give(&request(0, command::READ, 0, 512, &[]));
    let mut out = Vec::new();
    wire.session.shut_down(&mut out);
    assert!(out.is_empty());
    wire.release();
    assert_eq!(wire.ending, Some(Ending::Orderly));
    assert_eq!(wire.take().len(), 16 + 512);
}
