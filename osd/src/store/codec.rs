//! Little-endian fields, CRC-32C, and the header that every block of ours begins with.
//!
//! ```text
//!  0  magic "LOLI"          4  CRC-32C of bytes 8..4096
//!  8  kind u16             10  format u16              12  OSD u32
//! 16  cluster [16]         32  device [16]
//! 48  shard u16            50  zero [6]                56  own address u64
//! 64  payload
//! ```
//!
//! A block that was misdirected, left over from another device, shard or format, or torn, fails [`open`]: the header
//! binds the contents to the one place where they are right.

use loligo_config::id::{
    ClusterId, DeviceId, Epoch, ImageId, ObjectId, ObjectKind, ObjectVersion, OpId, OsdId, PgId, PoolId,
    SessionId, ShardId,
};
use loligo_config::units::BLOCK_SIZE;
use loligo_reactor::planted::{self, Bug};

/// Bytes of a block, to index memory.
pub(super) const BLOCK: usize = BLOCK_SIZE as usize;
/// The version of everything on the device.
pub const FORMAT: u16 = 0;
/// Where the payload of a block begins.
pub(super) const HEAD: usize = 64;
pub(super) const MAGIC: [u8; 4] = *b"LOLI";

/// CRC-32C (Castagnoli), as over the wire.
pub fn crc32c(bytes: &[u8]) -> u32 {
    // The library widens every checksum to 64 bits; this algorithm has 32.
    (crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) & 0xffff_ffff) as u32
}

/// What a block of ours holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum BlockKind {
    Superblock = 1,
    Claim = 2,
    Anchor = 3,
    Record = 4,
    Page = 5,
}

/// To whom a block belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster.
    pub cluster: ClusterId,
    /// The OSD.
    pub osd: OsdId,
    /// The device, drawn at mkfs.
    pub device: DeviceId,
    /// The shard; `ShardId(u16::MAX)` for blocks of the whole device.
    pub shard: ShardId,
}

/// The shard field of blocks that belong to the whole device.
pub(super) const NO_SHARD: ShardId = ShardId(u16::MAX);

/// Fills the header of a block whose payload is complete.
pub(super) fn seal(block: &mut [u8], kind: BlockKind, identity: &Identity, lba: u64) {
    assert_eq!(block.len(), BLOCK);
    block[..4].copy_from_slice(&MAGIC);
    block[8..10].copy_from_slice(&(kind as u16).to_le_bytes());
    block[10..12].copy_from_slice(&FORMAT.to_le_bytes());
    block[12..16].copy_from_slice(&identity.osd.0.to_le_bytes());
    block[16..32].copy_from_slice(identity.cluster.0.as_bytes());
    block[32..48].copy_from_slice(identity.device.0.as_bytes());
    block[48..50].copy_from_slice(&identity.shard.0.to_le_bytes());
    block[50..56].fill(0);
    block[56..64].copy_from_slice(&lba.to_le_bytes());
    let crc = crc32c(&block[8..]);
    block[4..8].copy_from_slice(&crc.to_le_bytes());
}

/// The payload of a block that is what it should be, or `None`.
pub(super) fn open<'a>(block: &'a [u8], kind: BlockKind, identity: &Identity, lba: u64) -> Option<Take<'a>> {
    let (found, payload) = identify(block, kind, lba)?;
    (found == *identity).then_some(payload)
}

/// As [`open`] for a block whose owner is not known yet.
pub(super) fn identify(block: &[u8], kind: BlockKind, lba: u64) -> Option<(Identity, Take<'_>)> {
    // The cheap tests come first: while a log is searched most blocks are data.
    if block.len() != BLOCK || block[..4] != MAGIC {
        return None;
    }
    let mut head = Take(&block[4..]);
    let crc = head.u32()?;
    if head.u16()? != kind as u16 || head.u16()? != FORMAT {
        return None;
    }
    let osd = OsdId(head.u32()?);
    let cluster = ClusterId(uuid::Uuid::from_bytes(head.array()?));
    let device = DeviceId(uuid::Uuid::from_bytes(head.array()?));
    let shard = ShardId(head.u16()?);
    head.bytes(6)?;
    let is_unchecked = kind == BlockKind::Record && planted::active(Bug::RecordUnchecked);
    if head.u64()? != lba || (crc32c(&block[8..]) != crc && !is_unchecked) {
        return None;
    }
    Some((Identity { cluster, osd, device, shard }, head))
}

/// Reads fields off bytes that may hold anything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Take<'a>(pub &'a [u8]);

impl<'a> Take<'a> {
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u48(&mut self) -> Option<u64> {
        let [a, b, c, d, e, f] = self.array()?;
        Some(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]))
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn version(&mut self) -> Option<ObjectVersion> {
        Some(ObjectVersion { interval: Epoch(self.u32()?), stream: self.u32()?, sequence: self.u64()? })
    }

    pub fn pg(&mut self) -> Option<PgId> {
        Some(PgId { pool: PoolId(self.u32()?), index: self.u32()? })
    }

    pub fn object(&mut self) -> Option<ObjectId> {
        Some(ObjectId {
            pool: PoolId(self.u32()?),
            kind: ObjectKind::from_u32(self.u32()?)?,
            image: ImageId(self.u64()?),
            index: self.u64()?,
        })
    }

    pub fn op(&mut self) -> Option<OpId> {
        Some(OpId { session: SessionId(self.u64()?), number: self.u64()? })
    }
}

/// Appends fields.
pub(super) trait Put {
    fn put(&mut self, bytes: &[u8]);

    fn u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    fn u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    fn u48(&mut self, value: u64) {
        assert!(value < 1 << 48, "block addresses have 48 bits");
        self.put(&value.to_le_bytes()[..6]);
    }

    fn u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    fn version(&mut self, version: ObjectVersion) {
        self.u32(version.interval.0);
        self.u32(version.stream);
        self.u64(version.sequence);
    }

    fn pg(&mut self, pg: PgId) {
        self.u32(pg.pool.0);
        self.u32(pg.index);
    }

    fn object(&mut self, object: ObjectId) {
        self.u32(object.pool.0);
        self.u32(object.kind as u32);
        self.u64(object.image.0);
        self.u64(object.index);
    }

    fn op(&mut self, op: OpId) {
        self.u64(op.session.0);
        self.u64(op.number);
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(shard: u16) -> Identity {
        let cluster = ClusterId(uuid::Uuid::from_u128(1));
        Identity { cluster, osd: OsdId(2), device: DeviceId(uuid::Uuid::from_u128(3)), shard: ShardId(shard) }
    }

    #[test]
    fn the_checksum_is_castagnoli() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_block_opens_only_where_it_belongs() {
        let mut block = vec![0; BLOCK];
        block[64] = 9;
        seal(&mut block, BlockKind::Claim, &identity(1), 77);
        assert_eq!(open(&block, BlockKind::Claim, &identity(1), 77).unwrap().u8(), Some(9));
        assert!(open(&block, BlockKind::Claim, &identity(2), 77).is_none());
        assert!(open(&block, BlockKind::Claim, &identity(1), 78).is_none());
        assert!(open(&block, BlockKind::Page, &identity(1), 77).is_none());
        for at in [0, 5, 8, 20, 40, 60, 100, 4095] {
            let mut bad = block.clone();
            bad[at] ^= 1;
            assert!(open(&bad, BlockKind::Claim, &identity(1), 77).is_none(), "byte {at}");
        }
        assert!(open(&block[..100], BlockKind::Claim, &identity(1), 77).is_none());
    }
}
