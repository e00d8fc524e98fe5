use super::*;
use crate::wire::samples::Draw;
use crate::wire::{self, Body, Envelope, Kind, Message, handshake, mon};
use loligo_config::id::Epoch;
use proptest::prelude::*;

fn pool() -> BufferPool {
    BufferPool::new(256 << 20)
}

fn bytes_of(frame: &Frame) -> Vec<u8> {
    let data: &[u8] = frame.data.as_deref().unwrap_or_default();
    [&frame.head[..], data].concat()
}

fn sample(pool: &BufferPool, kind: Kind, draw: &mut Draw, len_max: u32) -> Frame {
    let (message, body) = draw.message(kind, pool, len_max);
    wire::encode(pool, &Envelope { epoch: Epoch(draw.u32()), message }, body).unwrap()
}

fn control(pool: &BufferPool, len: usize) -> Frame {
    let message = Message::Map(mon::Map { epoch: Epoch(1) });
    let data = pool.copy_of(&Draw(len as u64).bytes(len)).unwrap();
    wire::encode(pool, &Envelope { epoch: Epoch(1), message }, Body::of(data)).unwrap()
}

fn trusted(pool: &BufferPool) -> FrameReader {
    let mut reader = FrameReader::new(pool.clone());
    reader.trust();
    reader
}

/// Feeds everything in pieces of the given lengths (over and over), through `direct` where that is offered.
fn read_all(
    reader: &mut FrameReader,
    stream: &[u8],
    lens: &[usize],
    direct: bool,
) -> Result<Vec<Frame>, CloseReason> {
    let (mut frames, mut at) = (Vec::new(), 0);
    for len in lens.iter().cycle() {
        let end = (at + len).min(stream.len());
        if let Some((mut buffer, filled)) = direct.then(|| reader.direct()).flatten() {
            let end = end.min(at + buffer.len() - filled);
            buffer[filled..filled + end - at].copy_from_slice(&stream[at..end]);
            reader.direct_done(buffer, filled + end - at)?;
            at = end;
        } else {
            at += reader.feed(&stream[at..end])?;
        }
        frames.extend(std::iter::from_fn(|| reader.next_frame()));
        if at == stream.len() {
            break;
        }
    }
    Ok(frames)
}

#[test]
fn data_starts_at_a_block_boundary_in_memory() {
    let pool = pool();
    let mut reader = trusted(&pool);
    for len in [1, 100, 4096, 70_000] {
        let frame = control(&pool, len);
        assert_eq!(reader.feed(&bytes_of(&frame)), Ok(bytes_of(&frame).len()));
        let data = reader.next_frame().unwrap().data.unwrap();
        assert_eq!(data.as_ptr() as usize % 4096, 0);
        assert_eq!(data[..], frame.data.unwrap()[..]);
    }
}

#[test]
fn before_trust_one_handshake_frame_is_taken_and_nothing_behind_it() {
    let pool = pool();
    let mut draw = Draw(1);
    let welcome = bytes_of(&sample(&pool, Kind::Welcome, &mut draw, 0));
    let map = bytes_of(&control(&pool, 50_000));
    let stream = [&welcome[..], &map].concat();
    let mut reader = FrameReader::new(pool.clone());
    assert_eq!(reader.feed(&stream), Ok(welcome.len()));
    assert_eq!(reader.feed(&map), Ok(0));
    assert_eq!(wire::kind_of(&reader.next_frame().unwrap()), Some(Kind::Welcome));
    assert_eq!(reader.feed(&map), Ok(0), "also after the frame was fetched");
    reader.trust();
    assert_eq!(reader.feed(&map), Ok(map.len()));
    assert_eq!(wire::kind_of(&reader.next_frame().unwrap()), Some(Kind::Map));
}

#[test]
fn before_trust_other_messages_close() {
    let pool = pool();
    for kind in Kind::ALL.iter().filter(|kind| !kind.is_handshake()) {
        let frame = sample(&pool, *kind, &mut Draw(3), 5000);
        let mut reader = FrameReader::new(pool.clone());
        let closed = reader.feed(&bytes_of(&frame));
        assert_eq!(closed, Err(CloseReason::Protocol("a message before the handshake")), "{kind:?}");
        assert_eq!(reader.feed(&[0]), closed, "it stays closed");
        assert!(reader.next_frame().is_none());
    }
}

#[test]
fn an_exhausted_pool_is_back_pressure_and_not_an_error() {
    let big = pool();
    let first = bytes_of(&control(&big, 1 << 20));
    let small = BufferPool::new(4 << 20); // one slab for headers, one for two buffers of 1 MiB
    let mut reader = trusted(&small);
    let stream = [&first[..], &first, &first].concat();
    let taken = reader.feed(&stream).unwrap();
    assert!(taken >= 2 * first.len() && taken < stream.len(), "{taken}");
    assert_eq!(reader.feed(&stream[taken..]), Ok(0));
    drop(reader.next_frame().unwrap());
    assert_eq!(reader.feed(&stream[taken..]), Ok(stream.len() - taken));
    assert!(reader.next_frame().is_some());
    assert!(reader.next_frame().is_some());
    assert!(reader.next_frame().is_none());
}

#[test]
fn complete_frames_are_not_piled_up() {
    let pool = pool();
    let ping = Message::Ping(handshake::Ping { number: 1 });
    let frame = wire::encode(&pool, &Envelope { epoch: Epoch(1), message: ping }, Body::NONE).unwrap();
    let stream = bytes_of(&frame).repeat(READY_FRAMES_MAX + 5);
    let mut reader = trusted(&pool);
    assert_eq!(reader.feed(&stream), Ok(READY_FRAMES_MAX * 128));
    assert_eq!(std::iter::from_fn(|| reader.next_frame()).count(), READY_FRAMES_MAX);
    assert_eq!(reader.feed(&stream[READY_FRAMES_MAX * 128..]), Ok(5 * 128));
}

#[test]
fn nothing_is_allocated_for_a_length_that_was_not_verified() {
    let pool = pool();
    let empty = BufferPool::new(64 << 20);
    let frame = control(&pool, 16 << 20);
    let mut damaged = bytes_of(&frame);
    damaged[4] ^= 1; // the header's checksum
    let mut reader = trusted(&empty);
    let closed = reader.feed(&damaged);
    assert_eq!(closed, Err(CloseReason::Protocol("header checksum mismatch")));
    assert_eq!(empty.mapped(), 2 << 20, "one slab for headers");
    // A length beyond what the kind may have is refused before even the header is staged.
    let untouched = BufferPool::new(64 << 20);
    let mut reader = trusted(&untouched);
    let mut longer = bytes_of(&frame);
    longer[20..24].copy_from_slice(&(limits::CONTROL_DATA_LEN_MAX + 1).to_le_bytes());
    assert_eq!(reader.feed(&longer), Err(CloseReason::Protocol("wrong length")));
    assert_eq!(untouched.mapped(), 0);
}

#[test]
#[should_panic(expected = "has not come back")]
fn feeding_while_the_buffer_is_lent_is_a_bug() {
    let pool = pool();
    let mut reader = trusted(&pool);
    let stream = bytes_of(&control(&pool, 100_000));
    reader.feed(&stream[..5000]).unwrap();
    let _lent = reader.direct().unwrap();
    let _ = reader.feed(&stream[5000..]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn any_split_gives_the_same_frames(
        kinds in prop::collection::vec(prop::sample::select(Kind::ALL), 1..12), seed in any::<u64>(),
        lens in prop::collection::vec(1usize..30_000, 1..8), small in any::<bool>(), direct in any::<bool>(),
    ) {
        let pool = pool();
        let mut draw = Draw(seed);
        let sent: Vec<_> = kinds.iter().map(|kind| sample(&pool, *kind, &mut draw, 60_000)).collect();
        let stream: Vec<u8> = sent.iter().flat_map(bytes_of).collect();
        let lens: Vec<_> = lens.into_iter().map(|len| if small { len % 300 + 1 } else { len }).collect();
        let frames = read_all(&mut trusted(&pool), &stream, &lens, direct).unwrap();
        prop_assert_eq!(frames.len(), sent.len());
        for (frame, sent) in frames.iter().zip(&sent) {
            prop_assert_eq!(wire::check(frame), Ok(()));
            prop_assert_eq!(bytes_of(frame), bytes_of(sent));
            prop_assert_eq!(frame.data.is_some(), sent.data.is_some());
        }
    }

    /// A flipped bit anywhere ends the connection, at the latest when the frame with it is complete, and no frame
    /// before it is lost.
    #[test]
    fn damage_at_any_byte_closes(
        kinds in prop::collection::vec(prop::sample::select(Kind::ALL), 1..5), seed in any::<u64>(),
        at in any::<prop::sample::Index>(), bit in 0u32..8, len in 1usize..20_000, direct in any::<bool>(),
    ) {
        let pool = pool();
        let mut draw = Draw(seed);
        let sent: Vec<_> = kinds.iter().map(|kind| bytes_of(&sample(&pool, *kind, &mut draw, 40_000))).collect();
        let mut stream = sent.concat();
        let at = at.index(stream.len());
        stream[at] ^= 1 << bit;
        // A handshake header that says that it is longer is complete only with what good frames follow.
        let ping = bytes_of(&sample(&pool, Kind::Ping, &mut draw, 0));
        let follow = wire::HANDSHAKE_HEAD_LEN_MAX.div_ceil(ping.len());
        stream.extend(ping.repeat(follow));
        let mut reader = trusted(&pool);
        let result = read_all(&mut reader, &stream, &[len], direct);
        prop_assert!(matches!(result, Err(CloseReason::Protocol(_))), "{:?}", result.map(|frames| frames.len()));
        prop_assert!(matches!(reader.feed(&[1]), Err(CloseReason::Protocol(_))));
    }

    /// Whatever an unknown peer sends costs no more than one small header.
    #[test]
    fn garbage_before_trust_costs_little(seed in any::<u64>(), len in 0usize..5000, chunk in 1usize..700) {
        let pool = BufferPool::new(2 << 20);
        let mut draw = Draw(seed);
        let mut bytes = draw.bytes(len);
        if draw.flag() && len > 24 {
            bytes[..4].copy_from_slice(b"LOLI");
            bytes[8..14].copy_from_slice(&[draw.below(20) as u8, 0, draw.below(5) as u8, 0, 1, 0]);
        }
        let mut reader = FrameReader::new(pool.clone());
        let mut taken = 0;
        for chunk in bytes.chunks(chunk) {
            match reader.feed(chunk) {
                Ok(count) => taken += count,
                Err(_) => break,
            }
            prop_assert!(reader.next_frame().is_none());
        }
        prop_assert!(taken <= wire::HANDSHAKE_HEAD_LEN_MAX);
        prop_assert!(reader.direct().is_none());
        drop(reader);
        prop_assert!(pool.mapped() <= 2 << 20);
    }
}
