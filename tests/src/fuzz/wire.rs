//! Frames of the wire: as a stream in pieces, and one by one.

use super::{Input, Target, chunk, with_pool};
use loligo_config::id::{ClusterId, CoreId, Epoch, Incarnation, OsdId, SessionId};
use loligo_config::map::AuthMode;
use loligo_net::framing::{FrameReader, READY_FRAMES_MAX};
use loligo_net::wire::handshake::{Hello, Identity, PROTOCOL_VERSION, Role, Welcome};
use loligo_net::wire::{self, Body, Checksums, Kind, Message, checksum};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{CloseReason, Frame};

/// A byte stream in random pieces.
pub const STREAM: Target =
    Target { name: "wire_stream", run: stream, seeds: stream_seeds, words: &[b"LOLI"], len_max: 16 << 10 };
/// A header and data that never were in a stream.
pub const FRAME: Target =
    Target { name: "wire_frame", run: frame, seeds: frame_seeds, words: &[b"LOLI"], len_max: 16 << 10 };

const UNIT: usize = 64;
/// Bytes of the common part, which every header has.
const HEAD_LEN_MIN: usize = UNIT;
/// Memory that a stranger's frame may take: one slab of each of a few small size classes.
const UNTRUSTED_POOL_MAX: usize = 8 << 20;
const POOL: usize = 64 << 20;

/// The peer is trusted; checksums are made right; large data is received in place.
const TRUSTED: u8 = 1;
const SEAL: u8 = 2;
const DIRECT: u8 = 4;

fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes")
}

/// Makes the checksums of a header right, and those of its data where the lengths allow it.
pub(super) fn seal(head: &mut [u8], data: &[u8]) {
    if head.len() < HEAD_LEN_MIN {
        return;
    }
    let within_block = u32::from_le_bytes(field(head, 24));
    if !data.is_empty() && within_block < 4096 {
        let count = checksum::piece_count(data.len(), within_block);
        if let Some(list_at) = head.len().checked_sub((4 * count).next_multiple_of(UNIT))
            && list_at >= HEAD_LEN_MIN
        {
            checksum::write_checksums(data, within_block, &mut head[list_at..list_at + 4 * count]);
        }
    }
    let crc = checksum::crc32c(&head[8..]);
    head[4..8].copy_from_slice(&crc.to_le_bytes());
}

/// Seals every frame of a stream that can be made out.
fn seal_stream(mut bytes: &mut [u8]) {
    while bytes.len() >= HEAD_LEN_MIN && bytes[..4] == *b"LOLI" {
        let head_len = usize::from(u16::from_le_bytes(field(bytes, 8))) * UNIT;
        let data_len = u32::from_le_bytes(field(bytes, 20)) as usize;
        if head_len < HEAD_LEN_MIN || head_len > bytes.len() {
            return;
        }
        let (head, rest) = bytes.split_at_mut(head_len);
        let (data, rest) = rest.split_at_mut(data_len.min(rest.len()));
        seal(head, data);
        bytes = rest;
    }
}

fn stream(input: &[u8]) {
    let mut input = Input(input);
    let (flags, step) = (input.u8(), usize::from(input.u8()));
    let mut bytes = input.0.to_vec();
    if flags & SEAL != 0 {
        seal_stream(&mut bytes);
    }
    let limit = if flags & TRUSTED != 0 { POOL } else { UNTRUSTED_POOL_MAX };
    with_pool(limit, |pool| {
        let whole = read(&bytes, bytes.len().max(1), flags & !DIRECT, pool);
        let pieces = read(&bytes, 1 + step * step / 4, flags, pool);
        assert_eq!(whole, pieces, "the cuts of a stream make no difference");
    });
}

/// What a reader made of the bytes: frames, and how it ended.
type Reading = (Vec<(Vec<u8>, Vec<u8>)>, Option<CloseReason>);

fn read(bytes: &[u8], step: usize, flags: u8, pool: &BufferPool) -> Reading {
    let mut reader = FrameReader::new(pool.clone());
    let trusted = flags & TRUSTED != 0;
    if trusted {
        reader.trust();
    }
    let mut reading = Reading::default();
    let (mut at, mut turns) = (0, 0);
    while at < bytes.len() && reading.1.is_none() {
        turns += 1;
        assert!(turns <= 2 * bytes.len() + 16, "every turn takes a byte or gives a frame");
        if flags & DIRECT != 0
            && let Some((mut buffer, filled)) = reader.direct()
        {
            let count = (buffer.len() - filled).min(step).min(bytes.len() - at);
            buffer[filled..filled + count].copy_from_slice(&bytes[at..at + count]);
            at += count;
            reading.1 = reader.direct_done(buffer, filled + count).err();
            fetch(&mut reader, &mut reading, trusted);
            continue;
        }
        let piece = &bytes[at..bytes.len().min(at + step)];
        let taken = match reader.feed(piece) {
            Ok(taken) => taken,
            Err(reason) => {
                assert_eq!(reader.feed(b"more"), Err(reason), "a broken stream stays broken");
                reading.1 = Some(reason);
                0
            }
        };
        at += taken;
        let frames = fetch(&mut reader, &mut reading, trusted);
        if taken < piece.len() && frames == 0 && reading.1.is_none() {
            assert!(!trusted && reading.0.len() == 1, "only a stranger's second frame has to wait");
            break;
        }
    }
    reading
}

fn fetch(reader: &mut FrameReader, reading: &mut Reading, trusted: bool) -> usize {
    let mut count = 0;
    while let Some(frame) = reader.next_frame() {
        count += 1;
        assert!(count <= READY_FRAMES_MAX, "waiting frames are bounded");
        assert_eq!(wire::check(&frame), Ok(()), "what a reader gives is right");
        let kind = wire::kind_of(&frame).expect("a frame has a kind");
        check_message(&frame, kind);
        if !trusted {
            assert!(kind.is_handshake(), "strangers only introduce themselves");
            assert!(frame.head.len() <= wire::HANDSHAKE_HEAD_LEN_MAX);
            assert!(reading.0.is_empty(), "one frame before trust");
        }
        let data = frame.data.as_deref().unwrap_or_default().to_vec();
        reading.0.push((frame.head.to_vec(), data));
    }
    count
}

/// A frame with right checksums is a message, and encodes to itself.
fn check_message(frame: &Frame, kind: Kind) {
    let received = match wire::decode(frame) {
        Ok(received) => received,
        Err(error) => {
            assert_eq!(
                error,
                wire::DecodeError::UnknownAuth,
                "the only message that a right frame may refuse"
            );
            return;
        }
    };
    assert_eq!(received.envelope.message.kind(), kind);
    let len = received.data.as_ref().map_or(0, |data| data.len());
    assert!(len <= kind.data_len_max() as usize);
    let body = Body {
        data: received.data.clone(),
        within_block: received.within_block,
        checksums: Checksums::Given(received.checksums.clone()),
    };
    let again =
        with_pool(POOL, |pool| wire::encode_numbered(pool, &received.envelope, body, received.sequence));
    let again = again.expect("what was decoded can be encoded");
    if kind.is_handshake() {
        // A newer peer may say more than this program understands; what is understood stays.
        let message = wire::decode(&again).expect("an encoded message").envelope;
        assert_eq!(message, received.envelope);
    } else {
        assert_eq!(&again.head[..], &frame.head[..], "one message has one encoding");
    }
}

fn stream_seeds() -> Vec<Vec<u8>> {
    let frames = sample_frames();
    let mut seeds = Vec::new();
    for (head, data) in &frames {
        let trusted = if head[10] < 4 { 0 } else { TRUSTED };
        seeds.push([&[trusted | SEAL, 9][..], head, data].concat());
    }
    let all: Vec<u8> = frames.iter().skip(3).flat_map(|(head, data)| [&head[..], data].concat()).collect();
    seeds.push([&[TRUSTED | SEAL, 40][..], &all].concat());
    let large = with_pool(POOL, |pool| {
        let body = Body::of(pool.copy_of(&[7; 40_000]).expect("room"));
        let message = Message::Report(wire::mon::Report {
            osd: Default::default(),
            incarnation: Default::default(),
            epoch: Default::default(),
        });
        let envelope = wire::Envelope { epoch: Epoch(1), message };
        let frame = wire::encode(pool, &envelope, body).expect("a valid message");
        [&frame.head[..], frame.data.as_deref().unwrap_or_default()].concat()
    });
    seeds.push([&[TRUSTED | DIRECT, 255][..], &large[..12 << 10]].concat());
    seeds
}

fn frame(input: &[u8]) {
    let mut input = Input(input);
    let flags = input.u8();
    let (head, data) = (input.chunk(), input.0);
    let mut head = head.to_vec();
    if flags & SEAL != 0 {
        seal(&mut head, data);
    }
    with_pool(POOL, |pool| {
        let (Ok(head), Ok(data)) = (pool.copy_of(&head), pool.copy_of(data)) else { return };
        let frame = Frame { head, data: Some(data) };
        let checked = wire::check(&frame);
        let decoded = wire::decode(&frame);
        if checked.is_ok() {
            match wire::kind_of(&frame) {
                // The checksums may be right for a body that no message has: only `decode` sees that.
                Some(kind) if decoded.is_ok() => check_message(&frame, kind),
                Some(_) => {}
                None => panic!("a checked frame has a kind"),
            }
        }
        if let Ok(received) = decoded {
            let len = received.data.as_ref().map_or(0, |data| data.len());
            assert_eq!(received.checksums.len(), 4 * checksum::piece_count(len, received.within_block));
        }
    });
}

fn frame_seeds() -> Vec<Vec<u8>> {
    sample_frames().iter().map(|(head, data)| [&[SEAL][..], &chunk(head), data].concat()).collect()
}

/// A frame of every kind with a body that can be read: zeroes, but where an enum does not begin with zero.
pub(super) fn sample_frames() -> Vec<(Vec<u8>, Vec<u8>)> {
    let sample = |kind: &Kind| {
        let introduction = match kind {
            Kind::Hello => Some(Message::Hello(sample_hello())),
            Kind::Welcome => Some(Message::Welcome(sample_welcome())),
            _ => None,
        };
        let head = introduction.map(sample_head).or_else(|| search(*kind));
        (head.expect("one enum at most does not begin with zero"), Vec::new())
    };
    Kind::ALL.iter().map(sample).collect()
}

fn sample_hello() -> Hello {
    let identity = Identity { cluster: None, role: Role::Client(SessionId(0)), incarnation: Incarnation(0) };
    let (version, expected, auth) = (PROTOCOL_VERSION, Role::Mon, AuthMode::None);
    let (features, features_required) = (0, 0);
    let (core, nonce) = (CoreId(0), 1);
    Hello {
        version,
        version_min: version,
        features,
        features_required,
        identity,
        expected,
        core,
        auth,
        nonce,
    }
}

fn sample_welcome() -> Welcome {
    let cluster = Some(ClusterId(uuid::Uuid::from_u128(1)));
    let identity = Identity { cluster, role: Role::Osd(OsdId(1)), incarnation: Incarnation(1) };
    let (version, features, core) = (PROTOCOL_VERSION, 0, CoreId(0));
    let (session, credits, auth) = (SessionId(7), 1, AuthMode::None);
    Welcome { version, features, identity, core, session, credits, auth, nonce_echo: 1, nonce: 2 }
}

fn sample_head(message: Message) -> Vec<u8> {
    let envelope = wire::Envelope { epoch: Epoch(1), message };
    let frame = with_pool(POOL, |pool| wire::encode_numbered(pool, &envelope, Body::NONE, 1));
    frame.expect("a valid message").head.to_vec()
}

fn search(kind: Kind) -> Option<Vec<u8>> {
    let lens = (2usize..6).map(|units| units * UNIT);
    // A place before the body means none.
    let places = |len| (UNIT - 1..len).flat_map(move |at| [(len, at, 1), (len, at, 2)]);
    lens.flat_map(places).find_map(|(len, at, value)| readable(kind, len, at, value))
}

/// A header of this kind with a value at one place of its body, if it can be read.
fn readable(kind: Kind, len: usize, at: usize, value: u8) -> Option<Vec<u8>> {
    let mut head = vec![0; len];
    head[at] = value;
    head[..4].copy_from_slice(b"LOLI");
    head[8] = (len / UNIT) as u8;
    head[10..12].copy_from_slice(&(kind as u16).to_le_bytes());
    head[12..14].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    head[32] = 1;
    head[UNIT - 1] = 0;
    seal(&mut head, &[]);
    with_pool(POOL, |pool| {
        let frame = Frame { head: pool.copy_of(&head).expect("room"), data: None };
        (wire::check(&frame).is_ok() && wire::decode(&frame).is_ok()).then_some(head)
    })
}
