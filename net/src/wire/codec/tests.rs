use super::*;
use crate::wire::op::{Guard, OpKind, OpRequest};
use crate::wire::samples::Draw;
use crate::wire::{mon, replica};
use loligo_config::id::{ImageId, ObjectId, ObjectKind, ObjectVersion, OpId, PgId, PoolId, SessionId};
use proptest::prelude::*;

fn pool() -> BufferPool {
    BufferPool::new(256 << 20)
}

fn bytes_of(frame: &Frame) -> Vec<u8> {
    let data: &[u8] = frame.data.as_deref().unwrap_or_default();
    [&frame.head[..], data].concat()
}

/// A frame from bytes; the header ends where its own length says, or with the bytes.
fn frame_of(pool: &BufferPool, bytes: &[u8], head_len: usize) -> Frame {
    let (head, data) = bytes.split_at(head_len.min(bytes.len()));
    let data = (!data.is_empty()).then(|| pool.copy_of(data).unwrap());
    Frame { head: pool.copy_of(head).unwrap(), data }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn write_op(offset: u32, len: u32) -> OpRequest {
    OpRequest {
        pg: PgId { pool: PoolId(2), index: 31 },
        object: ObjectId { pool: PoolId(2), kind: ObjectKind::Data, image: ImageId(0xABCD), index: 5 },
        kind: OpKind::Write,
        offset,
        len,
        op: OpId { session: SessionId(7), number: 9 },
        lowest_outstanding: 8,
        snap_seq: 3,
        guard: Guard::Version(ObjectVersion { interval: Epoch(4), stream: 1, sequence: 90 }),
        attempt: 3,
        client_queue_ns: 1000,
    }
}

#[test]
fn a_write_lies_in_the_header_as_documented() {
    let pool = pool();
    let data = pool.copy_of(&[0; 4100]).unwrap();
    let envelope = Envelope { epoch: Epoch(0x0102_0304), message: Message::Op(write_op(8190, 4100)) };
    let body = Body { within_block: 4094, ..Body::of(data) };
    let frame = encode_numbered(&pool, &envelope, body, 0x1122).unwrap();
    let head = &frame.head[..];
    assert_eq!(head.len(), 256);
    assert_eq!(&head[..4], b"LOLI");
    assert_eq!(head[4..8], crc32c(&head[8..]).to_le_bytes());
    assert_eq!(head[8..16], [4, 0, 16, 0, 2, 0, 0, 0], "four units, kind 16, version 2, no flags");
    assert_eq!(head[16..28], [4, 3, 2, 1, 4, 16, 0, 0, 0xFE, 0x0F, 0, 0], "epoch, data length, within block");
    assert_eq!(head[28..64], [&[0; 4][..], &[0x22, 0x11], &[0; 30]].concat(), "sequence");
    assert_eq!(head[64..72], [2, 0, 0, 0, 31, 0, 0, 0], "PG");
    let object = [&[2, 0, 0, 0, 0, 0, 0, 0, 0xCD, 0xAB][..], &[0; 6], &[5], &[0; 7]].concat();
    assert_eq!(head[72..96], object);
    assert_eq!(head[96..100], [2, 0, 1, 3], "kind, guard, attempt");
    assert_eq!(head[100..112], [0xFE, 0x1F, 0, 0, 4, 16, 0, 0, 0xE8, 3, 0, 0], "offset, length, queue time");
    let numbers = |list: &[u64]| list.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    assert_eq!(head[112..144], numbers(&[7, 9, 8, 3]), "session, number, lowest outstanding, snapshot");
    assert_eq!(head[144..160], [&[4, 0, 0, 0, 1, 0, 0, 0][..], &numbers(&[90])].concat(), "guard version");
    assert_eq!(head[160..192], [0; 32]);
    let checksums = [crc32c(&[0; 2]), crc32c(&[0; 4096]), crc32c(&[0; 2])].map(u32::to_le_bytes).concat();
    assert_eq!(head[192..204], checksums);
    assert_eq!(head[204..], [0; 52]);
}

/// One frame of each kind, pinned: a change of the format must be meant, and then change the protocol version.
#[test]
fn the_bytes_of_every_kind_are_pinned() {
    let pool = pool();
    let mut lines = String::new();
    for kind in Kind::ALL {
        let mut draw = Draw(*kind as u64);
        let (message, body) = draw.message(*kind, &pool, 40);
        let envelope = Envelope { epoch: Epoch(draw.u32()), message };
        let frame = encode_numbered(&pool, &envelope, body, draw.next()).unwrap();
        lines += &format!("{kind:?} {}\n", hex(&bytes_of(&frame)));
    }
    let pinned = include_str!("frames.txt");
    for (line, pinned) in lines.lines().zip(pinned.lines()) {
        assert_eq!(line, pinned);
    }
    assert_eq!(lines.lines().count(), pinned.lines().count());
}

#[test]
fn kinds_keep_their_numbers() {
    for kind in Kind::ALL {
        assert_eq!(Kind::from_u16(*kind as u16), Some(*kind));
        assert_eq!(kind.body_len() % 64, 0);
    }
    for number in [0, 6, 15, 19, 34, 56, 72, u16::MAX] {
        assert_eq!(Kind::from_u16(number), None);
    }
}

#[test]
fn lengths_are_checked_against_the_kind() {
    let pool = pool();
    let encode_with = |message, len: usize, within_block| {
        let data = pool.alloc_zeroed(len).unwrap().freeze();
        let body = Body { within_block, ..Body::of(data) };
        encode(&pool, &Envelope { epoch: Epoch(1), message }, body).map(|frame| check(&frame).unwrap())
    };
    let max = limits::OP_DATA_LEN_MAX;
    assert_eq!(encode_with(Message::Op(write_op(0, max)), max as usize, 0), Ok(()));
    assert_eq!(encode_with(Message::Op(write_op(4095, max)), max as usize, 4095), Ok(()));
    let too_long = max as usize + 1;
    let refused = encode_with(Message::Op(write_op(0, max + 1)), too_long, 0);
    assert_eq!(refused, Err(EncodeError::TooLong { len: too_long }));
    for (len, within) in [(99, 0), (101, 0), (0, 0), (100, 1)] {
        let refused = encode_with(Message::Op(write_op(4096, 100)), len, within);
        assert_eq!(refused, Err(EncodeError::Mismatch), "{len} at {within}");
    }
    let read = OpRequest { kind: OpKind::Read, ..write_op(0, 4096) };
    assert_eq!(encode_with(Message::Op(read), 4096, 0), Err(EncodeError::Mismatch));
    assert_eq!(encode_with(Message::Op(read), 0, 0), Ok(()));
    let map = Message::Map(mon::Map { epoch: Epoch(1) });
    assert_eq!(encode_with(map, limits::CONTROL_DATA_LEN_MAX as usize, 0), Ok(()));
    assert_eq!(encode_with(map, 10, 5), Err(EncodeError::Mismatch));
    let subscribe = Message::Subscribe(mon::Subscribe { have: Epoch(1) });
    assert_eq!(encode_with(subscribe, 1, 0), Err(EncodeError::TooLong { len: 1 }));
    let command = Message::Command(mon::Command { number: 1 });
    let too_long = REQUEST_DATA_LEN_MAX as usize + 1;
    assert_eq!(encode_with(command, too_long, 0), Err(EncodeError::TooLong { len: too_long }));
}

#[test]
fn given_checksums_travel_unchanged_and_must_be_as_many_as_pieces() {
    let pool = pool();
    let data = pool.copy_of(&[9; 8192]).unwrap();
    let write = replica::RepWrite {
        pg: PgId::default(),
        interval: Epoch(1),
        version: ObjectVersion::NONE,
        previous: ObjectVersion::NONE,
        committed: ObjectVersion::NONE,
        object: ObjectId::default(),
        kind: OpKind::Write,
        block: 0,
        count: 2,
        op: OpId::default(),
        lowest_outstanding: 0,
        snap_seq: 0,
    };
    let envelope = Envelope { epoch: Epoch(1), message: Message::RepWrite(write) };
    let given = |list: &[u8]| Body::with_checksums(data.clone(), pool.copy_of(list).unwrap());
    assert_eq!(encode(&pool, &envelope, given(&[0; 4])).unwrap_err(), EncodeError::Mismatch);
    assert_eq!(encode(&pool, &envelope, given(&[0; 12])).unwrap_err(), EncodeError::Mismatch);
    let wrong = encode(&pool, &envelope, given(&[1; 8])).unwrap();
    assert_eq!(&decode(&wrong).unwrap().checksums[..], [1; 8]);
    assert_eq!(check(&wrong), Err(CloseReason::Protocol("data checksum mismatch")));
    let right = [crc32c(&[9; 4096]).to_le_bytes(); 2].concat();
    assert_eq!(check(&encode(&pool, &envelope, given(&right)).unwrap()), Ok(()));
}

/// Changes bytes of a valid header and seals it again, so that only the meaning is wrong.
fn resealed(pool: &BufferPool, frame: &Frame, at: usize, bytes: &[u8]) -> Frame {
    let mut head = pool.alloc(frame.head.len()).unwrap();
    head.copy_from_slice(&frame.head);
    head[at..at + bytes.len()].copy_from_slice(bytes);
    seal(&mut head);
    Frame { head: head.freeze(), data: frame.data.clone() }
}

fn sample(pool: &BufferPool, kind: Kind, seed: u64, len_max: u32) -> Frame {
    let mut draw = Draw(seed);
    let (message, body) = draw.message(kind, pool, len_max);
    encode_numbered(pool, &Envelope { epoch: Epoch(draw.u32()), message }, body, draw.next()).unwrap()
}

#[test]
fn sealed_lies_are_refused() {
    let pool = pool();
    let frame = encode(
        &pool,
        &Envelope { epoch: Epoch(1), message: Message::Op(write_op(0, 4096)) },
        Body::of(pool.copy_of(&[5; 4096]).unwrap()),
    )
    .unwrap();
    let refusal = |at, bytes: &[u8]| {
        let frame = resealed(&pool, &frame, at, bytes);
        let error = decode(&frame).unwrap_err();
        assert_eq!(check(&frame), Err(error.into()));
        error
    };
    assert_eq!(refusal(0, b"HTTP"), DecodeError::Magic);
    assert_eq!(refusal(8, &[3, 0]), DecodeError::Length, "header length");
    assert_eq!(refusal(8, &[0xFF, 0xFF]), DecodeError::Length, "header length");
    assert_eq!(refusal(10, &[200, 0]), DecodeError::Kind);
    assert_eq!(refusal(12, &[1, 0]), DecodeError::Version);
    assert_eq!(refusal(14, &[1, 0]), DecodeError::Reserved, "flags");
    assert_eq!(refusal(20, &[0, 16, 0x10, 0]), DecodeError::Length, "data longer than an op may have");
    assert_eq!(refusal(24, &[1]), DecodeError::Length, "within block: another number of pieces than data");
    assert_eq!(refusal(40, &[1]), DecodeError::Reserved);
    assert_eq!(refusal(76, &[9]), DecodeError::Value("object kind"));
    assert_eq!(refusal(96, &[99]), DecodeError::Value("op kind"));
    assert_eq!(refusal(96, &[1]), DecodeError::Length, "a read with data");
    assert_eq!(refusal(98, &[2]), DecodeError::Value("guard"));
    assert_eq!(refusal(98, &[0]), DecodeError::Reserved, "a guard's version without a guard");
    assert_eq!(refusal(104, &[0, 8]), DecodeError::Length, "length of the op and of its data");
    assert_eq!(refusal(170, &[1]), DecodeError::Reserved);
    assert_eq!(refusal(200, &[1]), DecodeError::Reserved, "behind the checksums");
    let ack = sample(&pool, Kind::PeerPushAck, 1, 0);
    assert_eq!(decode(&resealed(&pool, &ack, 127, &[1])).unwrap_err(), DecodeError::Reserved);
}

#[test]
fn a_newer_peers_handshake_can_be_read() {
    let pool = pool();
    let hello = sample(&pool, Kind::Hello, 7, 0);
    let message = decode(&hello).unwrap().envelope.message;
    // Flags, reserved bytes and a longer body belong to versions to come.
    for (at, bytes) in [(14, [1u8, 0]), (50, [3, 3]), (64 + 100, [9, 9])] {
        let frame = resealed(&pool, &hello, at, &bytes);
        assert_eq!(check(&frame), Ok(()));
        assert_eq!(decode(&frame).unwrap().envelope.message, message);
    }
    let mut head = pool.alloc_zeroed(HANDSHAKE_HEAD_LEN_MAX).unwrap();
    head[..192].copy_from_slice(&hello.head);
    head[8] = (HANDSHAKE_HEAD_LEN_MAX / 64) as u8;
    head[500] = 1;
    seal(&mut head);
    let longer = Frame { head: head.freeze(), data: None };
    assert_eq!(check(&longer), Ok(()));
    assert_eq!(decode(&longer).unwrap().envelope.message, message);
    let longest = resealed(&pool, &longer, 8, &[(HANDSHAKE_HEAD_LEN_MAX / 64 + 1) as u8]);
    assert_eq!(decode(&longest).unwrap_err(), DecodeError::Length);
    let unknown = resealed(&pool, &hello, 64 + 4, &[1, 0]);
    assert_eq!(check(&unknown), Ok(()), "it was not damaged");
    assert_eq!(decode(&unknown).unwrap_err(), DecodeError::UnknownAuth);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn encode_decode_encode_is_equal(kind in prop::sample::select(Kind::ALL), seed in any::<u64>()) {
        let pool = pool();
        let mut draw = Draw(seed);
        let (message, body) = draw.message(kind, &pool, 20_000);
        let (data, within_block) = (body.data.clone().filter(|data| !data.is_empty()), body.within_block);
        let envelope = Envelope { epoch: Epoch(draw.u32()), message };
        let sequence = draw.next();
        let frame = encode_numbered(&pool, &envelope, body, sequence).unwrap();
        prop_assert_eq!(frame.head.len() % 64, 0);
        prop_assert_eq!(check(&frame), Ok(()));
        let received = decode(&frame).unwrap();
        prop_assert_eq!(received.envelope, envelope);
        prop_assert_eq!(received.sequence, sequence);
        prop_assert_eq!(received.data.as_deref(), data.as_deref());
        let again = Body {
            data: received.data.clone(),
            within_block: received.within_block,
            checksums: Checksums::Given(received.checksums),
        };
        prop_assert_eq!(received.within_block, if data.is_some() { within_block } else { 0 });
        let again = encode_numbered(&pool, &received.envelope, again, received.sequence).unwrap();
        prop_assert_eq!(bytes_of(&again), bytes_of(&frame));
    }

    /// Any damage is found, and nothing panics on it.
    #[test]
    fn damaged_frames_are_refused(
        kind in prop::sample::select(Kind::ALL), seed in any::<u64>(), at in any::<prop::sample::Index>(),
        mask in 1u8.., cut in any::<bool>(),
    ) {
        let pool = pool();
        let frame = sample(&pool, kind, seed, 9000);
        let mut bytes = bytes_of(&frame);
        let at = at.index(bytes.len());
        if cut {
            bytes.truncate(at);
        } else {
            bytes[at] ^= mask;
        }
        let damaged = frame_of(&pool, &bytes, frame.head.len());
        prop_assert!(check(&damaged).is_err());
        let _ = decode(&damaged);
    }

    /// What decodes after a change under a right checksum encodes to the same bytes: nothing is lost or made up.
    #[test]
    fn sealed_changes_are_refused_or_canonical(
        kind in prop::sample::select(Kind::ALL), seed in any::<u64>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let pool = pool();
        let mut frame = sample(&pool, kind, seed, 5000);
        for (at, byte) in changes {
            frame = resealed(&pool, &frame, at.index(frame.head.len()), &[byte]);
        }
        let _ = check(&frame);
        if let Ok(received) = decode(&frame) {
            let message = received.envelope.message;
            if !message.kind().is_handshake() {
                let body = Body {
                    data: received.data,
                    within_block: received.within_block,
                    checksums: Checksums::Given(received.checksums),
                };
                let again = encode_numbered(&pool, &received.envelope, body, received.sequence).unwrap();
                prop_assert_eq!(&again.head[..], &frame.head[..]);
            }
        }
    }

    #[test]
    fn random_bytes_are_no_frame(seed in any::<u64>(), len in 0usize..3000, split in 0usize..3000) {
        let pool = pool();
        let mut bytes = Draw(seed).bytes(len);
        // Half of them get past the first look.
        if seed % 2 == 0 && len >= 16 {
            bytes[..4].copy_from_slice(b"LOLI");
            bytes[8..14].copy_from_slice(&[3, 0, (seed >> 8) as u8 % 72, 0, 1, 0]);
        }
        let frame = frame_of(&pool, &bytes, split);
        prop_assert!(check(&frame).is_err());
        let _ = decode(&frame);
    }
}
