//! Both transports over real loopback sockets. One thread plays all parts: what is passive needs no other.

mod stream;
mod tcp;

use loligo_reactor::dma::BufferPool;
use loligo_reactor::os::ring::Ring;

/// Turns of the ring until something is given up: far more than loopback takes.
const TURNS_MAX: u32 = 20_000;

struct World {
    ring: Ring,
    pool: BufferPool,
}

impl World {
    fn new() -> Self {
        Self { ring: Ring::new(256).unwrap(), pool: BufferPool::new(128 << 20) }
    }

    fn turn(&self) {
        self.ring.submit().unwrap();
        self.ring.reap();
        // Loopback work may be done by a kernel thread on this core.
        std::thread::yield_now();
    }
}

/// Bytes that differ from place to place.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed).collect()
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
