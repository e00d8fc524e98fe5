//! What a seed draws: how large the cluster is, what its disks and network are like, what its clients do.

use super::disk::DiskOptions;
use super::world::{MICROSECOND, MILLISECOND, SECOND};
use crate::random::Random;
use loligo_net::transport::memory::LinkProfile;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// What the caller sets instead of the seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overrides {
    /// OSDs.
    pub osds: Option<u32>,
    /// Clients.
    pub clients: Option<u32>,
    /// Shards of each OSD.
    pub shards: Option<u16>,
    /// Requests of all clients together per simulated second.
    pub ops_per_second: Option<u64>,
    /// Damage beyond what the redundancy repairs.
    pub damage: bool,
}

/// As `cargo sim` takes them, each with a space before it.
impl fmt::Display for Overrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { osds, clients, shards, ops_per_second, damage } = *self;
        let numbers = [
            ("osds", osds.map(u64::from)),
            ("shards", shards.map(u64::from)),
            ("clients", clients.map(u64::from)),
            ("ops-per-second", ops_per_second),
        ];
        for (name, value) in numbers {
            if let Some(value) = value {
                write!(f, " --{name} {value}")?;
            }
        }
        f.write_str(if damage { " --damage" } else { "" })
    }
}

/// A pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolOptions {
    /// Copies.
    pub size: u8,
    /// Copies that must be up.
    pub min_size: u8,
    /// PGs.
    pub pg_count: u32,
}

/// An image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageOptions {
    /// Which pool it is in.
    pub pool: u32,
    /// Blocks of 4 KiB.
    pub blocks: u64,
    /// Objects have 2^order bytes.
    pub order: u8,
}

/// What clients do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadOptions {
    /// Requests per simulated second, all clients together, while nothing holds them up.
    pub ops_per_second: u64,
    /// Requests of one client at once.
    pub depth: u32,
    /// Of a hundred requests so many are reads.
    pub reads: u64,
    /// Of a hundred so many free or zero blocks.
    pub frees: u64,
    /// Of a hundred so many are of less than a block.
    pub small: u64,
    /// Blocks of one request at most.
    pub blocks_max: u64,
    /// Of a hundred requests so many go to the first blocks of an image.
    pub hot: u64,
    /// Seconds after which a client gives a request up; 0: never.
    pub timeout_seconds: u64,
}

/// The network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetOptions {
    /// The least delay, in nanoseconds.
    pub delay: u64,
    /// More by chance, in nanoseconds.
    pub jitter: u64,
    /// Of a million frames so many are lost and sent again.
    pub lost_per_million: u32,
    /// Of a million frames so many are damaged.
    pub damaged_per_million: u32,
    /// Frames that one side of a connection may have on their way.
    pub send_queue: usize,
}

impl NetOptions {
    /// As the network takes it, without loss and damage if `healed`.
    pub fn profile(&self, healed: bool) -> LinkProfile {
        let faults = if healed { 0 } else { 1 };
        LinkProfile {
            delay: Duration::from_nanos(self.delay),
            jitter: Duration::from_nanos(self.jitter),
            lost_per_million: self.lost_per_million * faults,
            damaged_per_million: self.damaged_per_million * faults,
            bytes_per_second: 0,
        }
    }
}

/// Everything that a seed draws but the faults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// The seed.
    pub seed: u64,
    /// OSDs, each on a machine of its own.
    pub osds: u32,
    /// Shards of each OSD.
    pub shards: u16,
    /// Clients.
    pub clients: u32,
    /// Pools.
    pub pools: Vec<PoolOptions>,
    /// Images, open at every client.
    pub images: Vec<ImageOptions>,
    /// What clients do.
    pub load: LoadOptions,
    /// Every OSD's disk.
    pub disk: DiskOptions,
    /// The network.
    pub net: NetOptions,
    /// Buffers of one shard, in bytes.
    pub pool_len: usize,
    /// What one wake-up of a process takes at most, in nanoseconds.
    pub wake_max: u64,
    /// Whether the clocks of the machines run at different speeds, in millionths.
    pub drift_ppm: i64,
    /// Whether the administrator is busy.
    pub admin: bool,
    /// Rounds of faults, each followed by a time to heal and a check of everything.
    pub rounds: u32,
    /// Simulated time of one round's faults, in nanoseconds.
    pub round_time: u64,
    /// Damage beyond what the redundancy repairs.
    pub damage: bool,
}

/// The numbers that tell streams of chance apart.
const OPTION_STREAM: u64 = 0x6f70;

impl Options {
    /// What `seed` draws.
    pub fn draw(seed: u64, overrides: &Overrides) -> Self {
        let mut random = Random::new(stream(seed, OPTION_STREAM));
        let random = &mut random;
        let osds = overrides.osds.unwrap_or(3 + one_of(random, &[0, 0, 0, 1, 2])).clamp(2, 16);
        let shards = overrides.shards.unwrap_or(one_of(random, &[1, 1, 1, 2, 2, 3]));
        let clients = overrides.clients.unwrap_or(1 + random.below(4) as u32).clamp(1, 64);
        let pools: Vec<_> = (0..1 + u32::from(random.one_in(3))).map(|_| draw_pool(random, osds)).collect();
        let images = (0..1 + random.below(3)).map(|_| draw_image(random, pools.len() as u64)).collect();
        let load = draw_load(random, overrides);
        let disk = draw_disk(random, shards);
        let net = draw_net(random);
        Self {
            seed,
            osds,
            shards,
            clients,
            pools,
            images,
            load,
            disk,
            net,
            pool_len: one_of(random, &[32 << 20, 64 << 20, 64 << 20]),
            wake_max: one_of(
                random,
                &[5 * MICROSECOND, 20 * MICROSECOND, 20 * MICROSECOND, 200 * MICROSECOND],
            ),
            drift_ppm: one_of(random, &[0, 20, 200]),
            admin: !random.one_in(3),
            rounds: 1 + random.below(3) as u32,
            round_time: SECOND * one_of(random, &[10, 20, 30]),
            damage: overrides.damage,
        }
    }

    /// The seed of one stream of chance of this run.
    pub fn stream(&self, which: u64) -> u64 {
        stream(self.seed, which)
    }
}

/// The seed of one stream of chance.
pub fn stream(seed: u64, which: u64) -> u64 {
    Random::new(seed ^ which.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)).next_u64()
}

/// One of several values.
pub fn one_of<T: Copy>(random: &mut Random, values: &[T]) -> T {
    values[random.below(values.len() as u64) as usize]
}

fn draw_pool(random: &mut Random, osds: u32) -> PoolOptions {
    let size = if random.one_in(4) { 2 } else { 3 }.min(osds as u8);
    let min_size = size - random.below(2) as u8;
    PoolOptions { size, min_size, pg_count: one_of(random, &[1, 2, 4, 8, 16]) }
}

fn draw_image(random: &mut Random, pools: u64) -> ImageOptions {
    ImageOptions {
        pool: random.below(pools) as u32,
        blocks: one_of(random, &[32, 64, 200, 512, 1500]),
        order: one_of(random, &[12, 14, 16, 18, 22]),
    }
}

fn draw_load(random: &mut Random, overrides: &Overrides) -> LoadOptions {
    let rate = one_of(random, &[100, 200, 300, 600]);
    LoadOptions {
        ops_per_second: overrides.ops_per_second.unwrap_or(rate).max(1),
        depth: one_of(random, &[1, 4, 8, 32]),
        reads: one_of(random, &[20, 45, 70]),
        frees: one_of(random, &[0, 3, 10]),
        small: one_of(random, &[0, 5, 15]),
        blocks_max: one_of(random, &[1, 8, 16, 64, 300]),
        hot: one_of(random, &[0, 40, 80]),
        timeout_seconds: one_of(random, &[0, 0, 0, 5]),
    }
}

fn draw_disk(random: &mut Random, shards: u16) -> DiskOptions {
    // The smallest ones fill up: they hold little more than six chunks of 1 MiB for a shard.
    let blocks = one_of(random, &[1_900, 2_600, 8_192, 16_384, 16_384, 65_536]);
    DiskOptions {
        blocks: blocks * u64::from(shards),
        volatile: !random.one_in(3),
        tears: !random.one_in(3),
        discards: random.one_in(2),
        queue_depth: one_of(random, &[4, 16, 64, 128]),
        transfer_blocks: one_of(random, &[64, 256, 512]),
        latency: one_of(random, &[10 * MICROSECOND, 40 * MICROSECOND, 100 * MICROSECOND, MILLISECOND]),
    }
}

fn draw_net(random: &mut Random) -> NetOptions {
    NetOptions {
        delay: one_of(random, &[5 * MICROSECOND, 20 * MICROSECOND, 100 * MICROSECOND]),
        jitter: one_of(random, &[0, 5 * MICROSECOND, 50 * MICROSECOND, 2 * MILLISECOND]),
        lost_per_million: one_of(random, &[0, 0, 100, 10_000]),
        damaged_per_million: one_of(random, &[0, 0, 20, 500]),
        send_queue: one_of(random, &[8, 64, 1024]),
    }
}
