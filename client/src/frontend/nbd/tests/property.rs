use super::*;
use proptest::prelude::*;

/// A whole conversation, well-formed.
fn conversation() -> Vec<u8> {
    let data = pattern(20_000, 1);
    [
        3u32.to_be_bytes().to_vec(),
        option(5, &[]),
        option(3, &[]),
        option(7, &vec![1; 13_000]),
        option(6, &info_request("rbd/none", &[1])),
        option(8, &[]),
        option(10, &context_request("rbd/disk", &["base:allocation"])),
        option(7, &info_request("rbd/disk", &[1, 3])),
        // Refused at once, so it comes before the others, whose replies may overtake none here.
        request(0, command::WRITE, 1 << 20, 700, &data[..700]),
        write(4000, &data),
        request(0, command::READ, 0, 65536, &[]),
        request(0, command::BLOCK_STATUS, 0, 1 << 20, &[]),
        request(2, command::WRITE_ZEROES, 5000, 9000, &[]),
        request(0, command::TRIM, 4096, 8192, &[]),
        request(0, command::READ, 4000, 20_000, &[]),
        request(0, command::FLUSH, 0, 0, &[]),
        request(0, command::DISC, 0, 0, &[]),
    ]
    .concat()
}

fn run(bytes: &[u8], cuts: &[usize]) -> (Vec<u8>, Option<Ending>, Vec<u8>) {
    let mut wire = Wire::new(1 << 20);
    let mut rest = bytes;
    for cut in cuts {
        let (part, after) = rest.split_at(cut % (rest.len() + 1));
        wire.give(part);
        rest = after;
    }
    wire.give(rest);
    (wire.take(), wire.ending, wire.image.bytes)
}

#[test]
fn one_byte_at_a_time_gives_the_same_replies() {
    let bytes = conversation();
    let whole = run(&bytes, &[]);
    assert_eq!(whole.1, Some(Ending::Orderly));
    let bytewise = run(&bytes, &vec![1; bytes.len()]);
    assert_eq!(bytewise.1, whole.1);
    let differ = whole.0.iter().zip(&bytewise.0).position(|(a, b)| a != b);
    assert_eq!((differ, bytewise.0.len()), (None, whole.0.len()));
    assert!(run(&bytes, &vec![1; bytes.len()]) == whole);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_split_gives_the_same_replies(cuts in prop::collection::vec(0..5000usize, 0..60)) {
        let bytes = conversation();
        prop_assert!(run(&bytes, &cuts) == run(&bytes, &[]));
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        run(&bytes, &[]);
    }

    #[test]
    fn random_options_never_panic(
        options in prop::collection::vec((0..13u32, prop::collection::vec(any::<u8>(), 0..60)), 0..20),
    ) {
        let mut bytes = 3u32.to_be_bytes().to_vec();
        options.iter().for_each(|(number, data)| bytes.extend(option(*number, data)));
        run(&bytes, &[]);
    }

    #[test]
    fn random_requests_are_each_answered(
        requests in prop::collection::vec(
            (0..64u16, 0..10u16, prop_oneof![0..1u64 << 21, any::<u64>()], prop_oneof![0..9000u32, any::<u32>()]),
            0..20,
        ),
        structured in any::<bool>(),
    ) {
        let mut wire = Wire::ready(1 << 20, structured);
        for (flags, kind, offset, len) in requests {
            if kind == command::DISC || kind == command::WRITE && len > 1 << 20 {
                continue;
            }
            let payload = if kind == command::WRITE { vec![1; len as usize] } else { Vec::new() };
            let reply = wire.ask(flags, kind, offset, len, &payload);
            prop_assert!(reply.len() >= 16);
            prop_assert_eq!(&reply[8..16], &COOKIE.to_be_bytes());
        }
        prop_assert_eq!(wire.session.transmission.in_flight(), 0);
    }

    #[test]
    fn a_damaged_conversation_never_panics(at in any::<prop::sample::Index>(), bit in 0..8u32) {
        let mut bytes = conversation();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        run(&bytes, &[]);
    }
}
