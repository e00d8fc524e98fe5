//! The model's own randomness: a small generator from one seed, so that a run can be repeated.

use loligo_reactor::env::Entropy;

/// SplitMix64 (Steele, Lea, Flood 2014): one word of state, every seed is good. Not for secrets.
#[derive(Clone, Debug)]
pub struct Prng(u64);

impl Prng {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
}

impl Entropy for Prng {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }
}

/// A number below `bound`, nearly even: the bias is at most `bound` / 2^64.
pub(super) fn below(entropy: &mut impl Entropy, bound: u64) -> u64 {
    assert!(bound > 0, "there is no number below 0");
    let wide = u128::from(entropy.next_u64()) * u128::from(bound);
    u64::try_from(wide >> 64).expect("a product of two 64-bit numbers, shifted by 64, has 64 bits")
}

/// A hash of one word: the same mixing steps.
pub(super) fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Fills `bytes` with what a disk might hold that nobody has written: noise, the same for the same seed.
pub(super) fn noise(seed: u64, bytes: &mut [u8]) {
    let mut prng = Prng::new(seed);
    for chunk in bytes.chunks_mut(8) {
        let word = prng.next_u64().to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}
