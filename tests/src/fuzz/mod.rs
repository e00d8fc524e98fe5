//! Fuzz targets for every decoder of bytes that others wrote: network, disk, configuration, command line.
//!
//! A target is a function of bytes that panics when something is wrong. libFuzzer runs it from `tests/fuzz`, and the
//! `fuzz-smoke` executable runs its kept corpus and a few seconds of mutations on a stable compiler: see
//! `tests/docs/fuzzing.md`. Inputs that a checksum would refuse at the door carry a flag that has it computed anew
//! after the mutation, so that what lies behind the checksum is reached.
//!
//! Besides not panicking: what is decoded, encoded and decoded again is equal; lengths that input claims take no
//! more memory than was agreed; everything ends within a number of steps.

mod config;
mod disk;
mod handshake;
mod image;
mod map;
mod mon;
pub mod mutate;
mod nbd;
mod wire;

use std::cell::RefCell;
use std::collections::VecDeque;

use loligo_reactor::dma::BufferPool;

/// One target.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name: of its file in `tests/fuzz/fuzz_targets` and of its folder in `tests/fuzz/corpus`.
    pub name: &'static str,
    /// Runs one input.
    ///
    /// # Panics
    /// When it found something.
    pub run: fn(&[u8]),
    /// Valid inputs to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words of the format, for the mutator.
    pub words: &'static [&'static [u8]],
    /// Longest input that is worth trying.
    pub len_max: usize,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    wire::STREAM,
    wire::FRAME,
    handshake::TARGET,
    disk::TARGET,
    map::TARGET,
    mon::CORE,
    mon::EXTRA,
    nbd::TARGET,
    image::TARGET,
    config::TARGET,
];

/// The target of this name.
///
/// # Panics
/// When there is none: the caller names one of its own files.
pub fn target(name: &str) -> &'static Target {
    TARGETS.iter().find(|target| target.name == name).expect("a target of this name")
}

/// Takes an input apart. What is missing at the end reads as zero, so that every input means something.
#[derive(Clone, Copy, Debug)]
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// At most `len` bytes.
    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// As many bytes as the 16 bits before them say, or as there are.
    fn chunk(&mut self) -> &'a [u8] {
        let len = usize::from(self.u16());
        self.bytes(len)
    }
}

/// A chunk as [`Input::chunk`] reads it, for seeds.
fn chunk(bytes: &[u8]) -> Vec<u8> {
    let len = u16::try_from(bytes.len()).expect("seeds are short");
    [&len.to_le_bytes()[..], bytes].concat()
}

/// Runs with a pool that lives as long as its thread: a pool of one's own per input would cost more than the input.
fn with_pool<T>(limit: usize, run: impl FnOnce(&BufferPool) -> T) -> T {
    thread_local!(static POOLS: RefCell<VecDeque<(usize, BufferPool)>> = const { RefCell::new(VecDeque::new()) });
    let pool = POOLS.with_borrow_mut(|pools| {
        if let Some((_, pool)) = pools.iter().find(|(its, _)| *its == limit) {
            return pool.clone();
        }
        let pool = BufferPool::new(limit);
        pools.push_back((limit, pool.clone()));
        pool
    });
    run(&pool)
}
