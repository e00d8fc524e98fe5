//! The system's randomness.

use crate::env::Entropy;

const WORDS: usize = 32;

/// `getrandom`, a few words at a time.
#[derive(Debug)]
pub struct OsEntropy {
    words: [u64; WORDS],
    left: usize,
}

impl OsEntropy {
    /// An empty buffer; the system is asked at the first use.
    pub fn new() -> Self {
        Self { words: [0; WORDS], left: 0 }
    }

    fn refill(&mut self) {
        let len = std::mem::size_of_val(&self.words);
        // Reads of at most 256 bytes are never cut short by a signal once the system has booted (getrandom(2)).
        // SAFETY: the kernel writes `len` bytes into `words`, which are as many, and any bytes are valid words.
        let got = unsafe { libc::getrandom(self.words.as_mut_ptr().cast(), len, 0) };
        assert_eq!(
            usize::try_from(got),
            Ok(len),
            "the system has randomness: {}",
            std::io::Error::last_os_error()
        );
        self.left = WORDS;
    }
}

impl Default for OsEntropy {
    fn default() -> Self {
        Self::new()
    }
}

impl Entropy for OsEntropy {
    fn next_u64(&mut self) -> u64 {
        if self.left == 0 {
            self.refill();
        }
        self.left -= 1;
        // Not to be found in memory after it was used: ids and challenges come from here.
        std::mem::take(&mut self.words[self.left])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn words_do_not_repeat() {
        let mut entropy = OsEntropy::new();
        let words: BTreeSet<_> = (0..1000).map(|_| entropy.next_u64()).collect();
        assert_eq!(words.len(), 1000);
        let other = OsEntropy::new().next_u64();
        assert!(!words.contains(&other));
    }
}
