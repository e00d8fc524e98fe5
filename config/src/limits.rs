//! Every bound that sizes a table, a queue or a message, with its source.

/// Data of one op on the wire and of one transaction in the store, in bytes: 1 MiB. Larger image requests are
/// split, which is legal because a multi-block request is not one atomic action (RELIABILITY section 2.1).
/// Chosen so that the 256 block checksums of an op fit into one 4 KiB record block.
pub const OP_DATA_LEN_MAX: u32 = 1 << 20;
/// The same in 4 KiB blocks.
pub const OP_BLOCKS_MAX: usize = (OP_DATA_LEN_MAX / crate::units::BLOCK_SIZE) as usize;

/// Data of one control message (map, admin command and answer), in bytes: 16 MiB. A map of 10,000 OSDs and
/// 100,000 PGs takes about 3 MiB.
pub const CONTROL_DATA_LEN_MAX: u32 = 16 << 20;

/// Bytes kept for one connection before its peer has proven who it is (RELIABILITY section 4.1).
pub const PREAUTH_BYTES_MAX: usize = 16 << 10;
/// Time for the handshake, in milliseconds. Guessed: ten lost packets on a bad link.
pub const HANDSHAKE_MS_MAX: u64 = 5_000;
/// Connections of one process that have not finished their handshake.
pub const PREAUTH_CONNECTIONS_MAX: usize = 256;
/// The same from one source: an IPv4 address, or a /64 of IPv6. A host with a score of OSDs that all start at once stays
/// below it, since a handshake takes one round trip. Guessed.
pub const PREAUTH_SOURCE_MAX: usize = 64;
/// Connections of one process in all.
pub const CONNECTIONS_MAX: usize = 4096;

/// Bytes of a device that each PG on it needs: a quarter of them is kept back so that one op of the largest size, with
/// its bookkeeping, fits whenever its primary sends it. On a device with more PGs large writes are refused.
pub const PG_DEVICE_BYTES_MIN: u64 = 4 * (OP_DATA_LEN_MAX as u64 + 8 * crate::units::BLOCK_SIZE as u64);

/// Ops that one client may have in flight on one connection (credits). 128 × 1 MiB bounds the buffers.
pub const CONNECTION_OPS_MAX: u32 = 128;
/// Writes that one PG keeps in flight to its replicas; more wait at the primary.
pub const PG_WRITES_IN_FLIGHT_MAX: usize = 128;
/// Sessions whose op results one PG keeps; the lowest are dropped first and refused from then on.
pub const PG_SESSIONS_MAX: usize = 1024;
/// Op results that one PG keeps for one session: more than a client may have outstanding.
pub const SESSION_RESULTS_MAX: usize = 1024;

/// PGs of one pool. Ceph's own default cap is of this order.
pub const POOL_PG_COUNT_MAX: u32 = 65_536;
/// PGs of a cluster: 10,000 OSDs with 100 each and three copies are 333,334 PGs of 22 bytes, which fits into one
/// control message.
pub const CLUSTER_PG_COUNT_MAX: u64 = 400_000;
/// Pools of a cluster. Guessed.
pub const POOLS_MAX: usize = 1024;
/// Sessions on the blocklist. Guessed; an entry takes at most 15 bytes in the map.
pub const BLOCKLIST_MAX: usize = 65_536;
/// Copies of an object.
pub const POOL_SIZE_MAX: u8 = 8;
/// OSDs of a cluster.
pub const OSDS_MAX: usize = 10_000;
/// Shards of one OSD: one per reactor at most.
pub const SHARDS_MAX: usize = 64;

/// Object order of an image: 2^12 (4 KiB) to 2^25 (32 MiB), default 2^22 (4 MiB), as Ceph allows.
pub const OBJECT_ORDER_MIN: u8 = 12;
/// See [`OBJECT_ORDER_MIN`].
pub const OBJECT_ORDER_MAX: u8 = 25;
/// See [`OBJECT_ORDER_MIN`].
pub const OBJECT_ORDER_DEFAULT: u8 = 22;
/// Length of an image or pool name in bytes.
pub const NAME_LEN_MAX: usize = 128;
