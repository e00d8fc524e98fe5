//! A small deterministic mutator, for runs without libFuzzer. It sees no coverage: it keeps known bugs from coming
//! back and finds what lies near valid inputs.

use super::Target;
use crate::random::Random;

/// Values at which lengths, counts and offsets go wrong.
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    63,
    64,
    127,
    128,
    255,
    4095,
    4096,
    65_535,
    65_536,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    u64::MAX,
];

/// A few changes of `input`, and sometimes a piece of `other` in it.
pub fn mutate(target: &Target, input: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random.below(4) {
        change(target, &mut bytes, other, random);
    }
    bytes.truncate(target.len_max);
    bytes
}

fn change(target: &Target, bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(bytes.len() as u64 + 1) as usize;
    let here = bytes.len() - at;
    match random.below(9) {
        0 if here > 0 => bytes[at] ^= 1 << random.below(8),
        1 if here > 0 => bytes[at] = random.below(256) as u8,
        2 | 3 if here > 0 => {
            let edge = EDGES[random.below(EDGES.len() as u64) as usize];
            let edge = edge.wrapping_add(random.below(3)).wrapping_sub(1);
            let len = here.min(1 << random.below(4));
            let (little, big) = (edge.to_le_bytes(), edge.to_be_bytes());
            let value = if random.below(2) == 0 { &little[..len] } else { &big[8 - len..] };
            bytes[at..at + len].copy_from_slice(value);
        }
        4 if here > 0 => {
            let len = 1 + random.below(here.min(64) as u64) as usize;
            bytes.drain(at..at + len);
        }
        5 => {
            let len = 1 + random.below(16) as usize;
            let byte = random.below(256) as u8;
            bytes.splice(at..at, std::iter::repeat_n(byte, len));
        }
        6 if !target.words.is_empty() => {
            let word = target.words[random.below(target.words.len() as u64) as usize];
            let replaced = if random.below(2) == 0 { here.min(word.len()) } else { 0 };
            bytes.splice(at..at + replaced, word.iter().copied());
        }
        7 if here > 0 => {
            let len = 1 + random.below(here.min(256) as u64) as usize;
            let copy = bytes[at..at + len].to_vec();
            let to = random.below(bytes.len() as u64 + 1) as usize;
            bytes.splice(to..to, copy);
        }
        _ if !other.is_empty() => {
            let from = random.below(other.len() as u64) as usize;
            let len = 1 + random.below((other.len() - from).min(512) as u64) as usize;
            let replaced = if random.below(2) == 0 { here.min(len) } else { 0 };
            bytes.splice(at..at + replaced, other[from..from + len].iter().copied());
        }
        _ => bytes.push(random.below(256) as u8),
    }
}
