use super::*;

const FLAGS: u16 = 0b1101_0110_1101; // has flags, flush, fua, trim, write zeroes, multi-conn, cache, fast zero
const FLAGS_DF: u16 = FLAGS | 1 << 7;

fn begun() -> Wire {
    let mut wire = Wire::new(1 << 20);
    wire.give(&3u32.to_be_bytes());
    wire.take();
    wire
}

fn block_size() -> Vec<u8> {
    [&3u16.to_be_bytes()[..], &1u32.to_be_bytes(), &4096u32.to_be_bytes(), &(32u32 << 20).to_be_bytes()]
        .concat()
}

fn export_info(flags: u16) -> Vec<u8> {
    [&0u16.to_be_bytes()[..], &(1u64 << 20).to_be_bytes(), &flags.to_be_bytes()].concat()
}

#[test]
fn the_greeting_is_fixed_newstyle_without_zeroes() {
    let mut wire = Wire::new(1 << 20);
    assert_eq!(wire.take(), b"NBDMAGICIHAVEOPT\x00\x03");
    assert!(wire.session.in_handshake());
}

#[test]
fn unknown_client_flags_end_the_connection() {
    let mut wire = Wire::new(1 << 20);
    wire.give(&4u32.to_be_bytes());
    assert!(matches!(wire.ending, Some(Ending::Protocol(_))));
}

#[test]
fn export_name_answers_with_and_without_padding() {
    for (client_flags, padding) in [(3u32, 0), (1, 124), (0, 124), (2, 0)] {
        let mut wire = Wire::new(1 << 20);
        wire.take();
        wire.give(&client_flags.to_be_bytes());
        wire.give(&option(1, b"rbd/disk"));
        let expected = [&(1u64 << 20).to_be_bytes()[..], &FLAGS.to_be_bytes(), &vec![0; padding]].concat();
        assert_eq!(wire.take(), expected);
        assert!(!wire.session.in_handshake());
    }
}

#[test]
fn export_name_has_no_error_reply() {
    let mut wire = begun();
    wire.give(&option(1, b"rbd/none"));
    assert_eq!(wire.ending, Some(Ending::NoExport));
    assert!(wire.take().is_empty());
}

#[test]
fn an_old_client_may_choose_an_export_and_nothing_else() {
    let mut wire = Wire::new(1 << 20);
    wire.give(&0u32.to_be_bytes());
    wire.give(&option(3, &[]));
    assert!(matches!(wire.ending, Some(Ending::Protocol(_))));
}

#[test]
fn go_tells_size_flags_and_blocks_and_begins() {
    let mut wire = begun();
    wire.give(&option(7, &info_request("rbd/disk", &[])));
    let expected =
        [option_reply(7, 3, &export_info(FLAGS)), option_reply(7, 3, &block_size()), option_reply(7, 1, &[])];
    assert_eq!(wire.take(), expected.concat());
    assert!(!wire.session.in_handshake());
}

#[test]
fn info_tells_the_same_with_the_name_and_goes_on() {
    let mut wire = begun();
    wire.give(&option(8, &[]));
    assert_eq!(wire.take(), option_reply(8, 1, &[]));
    wire.give(&option(6, &info_request("rbd/disk", &[1, 3, 77])));
    let name = [&1u16.to_be_bytes()[..], b"rbd/disk"].concat();
    let expected = [
        option_reply(6, 3, &export_info(FLAGS_DF)),
        option_reply(6, 3, &block_size()),
        option_reply(6, 3, &name),
        option_reply(6, 1, &[]),
    ];
    assert_eq!(wire.take(), expected.concat());
    assert!(wire.session.in_handshake());
}

#[test]
fn a_read_only_export_says_so() {
    let mut wire = begun();
    wire.read_only = true;
    wire.give(&option(7, &info_request("rbd/disk", &[])));
    assert_eq!(wire.take()[..32], option_reply(7, 3, &export_info(FLAGS | 2))[..]);
}

#[test]
fn an_unknown_or_broken_export_is_refused_and_haggling_goes_on() {
    let mut wire = begun();
    for number in [6, 7] {
        wire.give(&option(number, &info_request("rbd/none", &[])));
        assert_eq!(wire.take(), option_reply(number, 0x8000_0006, b"no such export"));
        wire.give(&option(number, &info_request("rbd/broken", &[])));
        assert_eq!(wire.take(), option_reply(number, 0x8000_0004, b"it is broken"));
    }
    wire.give(&option(7, &info_request("rbd/disk", &[])));
    assert!(!wire.session.in_handshake());
}

#[test]
fn list_names_every_export() {
    let mut wire = begun();
    wire.give(&option(3, &[]));
    let expected = [
        option_reply(3, 2, &text("rbd/disk")),
        option_reply(3, 2, &text("rbd/other")),
        option_reply(3, 1, &[]),
    ];
    assert_eq!(wire.take(), expected.concat());
    wire.give(&option(3, b"x"));
    assert_eq!(wire.take(), option_reply(3, 0x8000_0003, b"this option carries no data"));
}

#[test]
fn abort_is_acknowledged_before_the_end() {
    let mut wire = begun();
    wire.give(&option(2, &[]));
    assert_eq!(wire.take(), option_reply(2, 1, &[]));
    assert_eq!(wire.ending, Some(Ending::Orderly));
}

#[test]
fn tls_and_unknown_options_are_refused_cleanly() {
    let mut wire = begun();
    wire.give(&option(5, &[]));
    assert_eq!(wire.take(), option_reply(5, 0x8000_0001, b"TLS is not supported"));
    for number in [0, 4, 11, 12, u32::MAX] {
        wire.give(&option(number, b"some data"));
        assert_eq!(wire.take(), option_reply(number, 0x8000_0001, b"unknown option"));
    }
    wire.give(&option(2, &[]));
    assert_eq!(wire.ending, Some(Ending::Orderly));
}

#[test]
fn meta_contexts_need_structured_replies() {
    let mut wire = begun();
    for number in [9, 10] {
        wire.give(&option(number, &context_request("rbd/disk", &[])));
        assert_eq!(
            wire.take(),
            option_reply(number, 0x8000_0003, b"structured replies must be chosen first")
        );
    }
}

#[test]
fn meta_contexts_match_by_their_rules() {
    let mut wire = begun();
    wire.give(&option(8, &[]));
    wire.take();
    let found = |number: u32, id: u32| {
        let data = [&id.to_be_bytes()[..], b"base:allocation"].concat();
        [option_reply(number, 4, &data), option_reply(number, 1, &[])].concat()
    };
    for (queries, listed, set) in [
        (&[][..], true, false),
        (&["base:"], true, false),
        (&["base:allocation"], true, true),
        (&["qemu:dirty-bitmap:x", "base:allocation"], true, true),
        (&["base:allocations"], false, false),
        (&["qemu:"], false, false),
    ] {
        wire.give(&option(9, &context_request("rbd/disk", queries)));
        assert_eq!(wire.take() == found(9, 0), listed, "list {queries:?}");
        wire.give(&option(10, &context_request("rbd/disk", queries)));
        let reply = wire.take();
        assert_eq!(reply == found(10, 1), set, "set {queries:?}");
        assert!(set || reply == option_reply(10, 1, &[]));
    }
    wire.give(&option(10, &context_request("rbd/none", &["base:allocation"])));
    assert_eq!(wire.take(), option_reply(10, 0x8000_0006, b"no such export"));
}

#[test]
fn a_context_counts_for_its_export_and_until_the_next_choice() {
    let chosen = |then: &[Vec<u8>]| {
        let mut wire = begun();
        wire.give(&option(8, &[]));
        wire.give(&option(10, &context_request("rbd/disk", &["base:allocation"])));
        then.iter().for_each(|bytes| wire.give(bytes));
        wire.take();
        let reply = wire.ask(0, command::BLOCK_STATUS, 0, 4096, &[]);
        u16::from_be_bytes(reply[6..8].try_into().unwrap()) == 5
    };
    assert!(chosen(&[option(7, &info_request("rbd/disk", &[]))]));
    assert!(!chosen(&[option(7, &info_request("rbd/other", &[]))]));
    let none = option(10, &context_request("rbd/disk", &[]));
    assert!(!chosen(&[none, option(7, &info_request("rbd/disk", &[]))]));
}

#[test]
fn malformed_options_are_invalid_and_not_fatal() {
    let mut wire = begun();
    wire.give(&option(8, &[]));
    wire.take();
    let long = "x".repeat(4097);
    let short_count = [text("rbd/disk"), vec![0, 2, 0, 1]].concat();
    let huge_count = [text("rbd/disk"), vec![255, 255, 255, 255]].concat();
    let huge_name = [&u32::MAX.to_be_bytes()[..], b"rbd"].concat();
    let trailing = [info_request("rbd/disk", &[]), vec![0]].concat();
    for number in [6, 7] {
        for data in [&[][..], &short_count, &huge_name, &trailing, &info_request(&long, &[])] {
            wire.give(&option(number, data));
            assert_eq!(wire.take(), option_reply(number, 0x8000_0003, b"malformed request"), "{data:?}");
        }
    }
    for number in [9, 10] {
        for data in [&[][..], &huge_count, &huge_name, &context_request("rbd/disk", &[&long])] {
            wire.give(&option(number, data));
            assert_eq!(wire.take(), option_reply(number, 0x8000_0003, b"malformed request"), "{data:?}");
        }
    }
}

#[test]
fn too_long_options_are_skipped() {
    let mut wire = begun();
    wire.give(&option(7, &vec![7; 12 << 10]));
    assert_eq!(wire.take(), option_reply(7, 0x8000_0003, b"malformed request"));
    wire.give(&option(7, &vec![7; (12 << 10) + 1]));
    assert_eq!(wire.take(), option_reply(7, 0x8000_0009, b"the option is too long"));
    wire.give(&option(3, &[]));
    assert!(!wire.take().is_empty());
}

#[test]
fn an_export_name_that_is_too_long_or_no_text_ends_the_connection() {
    for name in [&vec![b'x'; 4097][..], &vec![b'x'; 20_000], &[0xff, 0xfe]] {
        let mut wire = begun();
        wire.give(&option(1, name));
        assert!(matches!(wire.ending, Some(Ending::Protocol(_))));
    }
}

#[test]
fn a_wrong_option_magic_ends_the_connection() {
    let mut wire = begun();
    wire.give(b"GET / HTTP/1.1\r\n");
    assert_eq!(wire.ending, Some(Ending::Protocol("wrong option magic")));
    wire.give(b"Host: anything");
    assert_eq!(wire.waiting_input(), 0, "what comes later is dropped");
}
