//! Documents in objects: image headers and directories.

use super::{Input, Target};
use loligo_client::image::directory::{Directory, DirectoryEntry};
use loligo_client::image::document::{self, Document, HEAD_LEN, total_len};
use loligo_client::image::header::{
    CreateOptions, ImageHeader, Lock, Parent, Snapshot, Trim, check_name, check_order, check_size,
};
use loligo_config::id::{ImageId, PoolId, SessionId};

/// A document of either kind.
pub const TARGET: Target =
    Target { name: "image_document", run, seeds, words: &[b"LOLIGODC", b"vm"], len_max: 8 << 10 };

/// The first byte says whether length and checksum are made right.
fn run(input: &[u8]) {
    let mut input = Input(input);
    let sealed = input.u8() & 1 == 0;
    let mut bytes = input.0.to_vec();
    if sealed && bytes.len() >= HEAD_LEN {
        seal(&mut bytes);
    }
    if let Some(header) = read::<ImageHeader>(&bytes) {
        check_order(header.order).expect("a valid order");
        check_size(header.size, header.order).expect("a valid size");
        assert!(header.objects() <= 1 << 40);
        assert!(header.object_size() <= 32 << 20);
    }
    if let Some(directory) = read::<Directory>(&bytes) {
        assert!(directory.images.keys().all(|name| check_name(name).is_ok()));
    }
}

fn read<D: Document + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<D> {
    let found = document::decode::<D>(bytes).ok()?;
    assert!(found.is_valid());
    assert!(total_len(bytes, D::KIND).is_ok_and(|len| len <= bytes.len()));
    let again = document::encode(&found).expect("it came out of a document");
    assert_eq!(document::decode::<D>(&again).as_ref(), Ok(&found));
    Some(found)
}

/// The length counts all that follows; the checksum has zero in its own place.
fn seal(bytes: &mut [u8]) {
    let len = u32::try_from(bytes.len() - HEAD_LEN).unwrap_or(u32::MAX);
    bytes[12..16].copy_from_slice(&len.to_le_bytes());
    bytes[16..20].fill(0);
    let crc = loligo_net::wire::checksum::crc32c(bytes);
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
}

fn seeds() -> Vec<Vec<u8>> {
    let options = CreateOptions { size: 1 << 30, order: 22 };
    let mut header = ImageHeader::new("vm", ImageId(7), options, 1_700_000_000);
    let plain = document::encode(&header).expect("small");
    header.snapshots.push(Snapshot {
        id: 1,
        name: "before".into(),
        size: 1 << 20,
        created: 5,
        protected: true,
    });
    header.parent = Some(Parent { pool: PoolId(1), image: ImageId(5), snapshot: 2, overlap: 9 });
    header.data_pool = Some(PoolId(4));
    header.lock = Some(Lock { owner: SessionId(3) });
    header.trim = Some(Trim { end: 2 << 30, owner: SessionId(3), attempt: 1 });
    header.metadata.insert("key".into(), "value".into());
    let mut directory = Directory::default();
    directory.images.insert("vm".into(), DirectoryEntry { id: ImageId(5), removing: false });
    directory.images.insert("old".into(), DirectoryEntry { id: ImageId(6), removing: true });
    let documents =
        [plain, document::encode(&header).expect("small"), document::encode(&directory).expect("small")];
    // Without the padding: the length is made right for what there is.
    let whole = |bytes: &Vec<u8>| {
        let len = HEAD_LEN + u32::from_le_bytes(bytes[12..16].try_into().expect("four bytes")) as usize;
        [&[0][..], &bytes[..len]].concat()
    };
    documents.iter().map(whole).collect()
}
