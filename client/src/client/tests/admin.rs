//! Operations on whole images: what they do, and what is left when they are broken off after any number of ops.

use super::*;
use crate::error::InvalidImage;
use crate::image::directory::directory_object;
use loligo_config::id::{ObjectKind, PoolId};
use loligo_config::units::{ByteLen, ByteOffset};

const KIB: u64 = 1024;

fn data_objects(cluster: &Scripted) -> usize {
    cluster.store.objects.keys().filter(|object| object.kind == ObjectKind::Data).count()
}

fn headers(cluster: &Scripted) -> usize {
    cluster.store.objects.keys().filter(|object| object.kind == ObjectKind::ImageHeader).count()
}

fn fill(host: &mut Host, cluster: &mut Scripted, image: &str, size: u64) {
    let handle = host.open(cluster, image).unwrap();
    let data = cluster.pool.copy_of(&vec![0xaa; size as usize]).unwrap();
    host.io(cluster, handle, ImageIo::Write { offset: ByteOffset(0), data, fua: false }).unwrap();
}

fn read(host: &mut Host, cluster: &mut Scripted, image: &str, size: u64) -> Vec<u8> {
    let handle = host.open(cluster, image).unwrap();
    let io = ImageIo::Read { offset: ByteOffset(0), len: ByteLen(size) };
    host.io(cluster, handle, io).unwrap().data.unwrap().to_vec()
}

#[test]
fn images_are_made_listed_renamed_measured_and_removed() {
    let (mut cluster, host) = (cluster(), &mut None);
    let host: &mut Host = host.insert(Host::new(&mut cluster));
    let Ok(AdminReply::Created(header)) = host.create(&mut cluster, "b", 64 * KIB, 12) else {
        panic!("created")
    };
    assert_eq!((header.size, header.objects(), header.created), (64 * KIB, 16, 1_800_000_000));
    host.create(&mut cluster, "a", 10, 22).unwrap();
    let twice = host.create(&mut cluster, "a", 10, 22).unwrap_err();
    assert_eq!(twice, name("a").exists());
    assert_eq!(host.names(&mut cluster), ["a", "b"]);

    assert_eq!(host.rename(&mut cluster, "b", "a").unwrap_err(), name("a").exists());
    assert_eq!(host.rename(&mut cluster, "x", "y").unwrap_err(), name("x").not_found());
    assert_eq!(host.rename(&mut cluster, "b", "c").unwrap(), AdminReply::Renamed);
    assert_eq!(host.names(&mut cluster), ["a", "c"]);
    let info = host.run(&mut cluster, |context| operations::info(context, name("c"))).unwrap();
    assert!(matches!(info, AdminReply::Info(info) if info.id == header.id && info.name == "c"));

    fill(host, &mut cluster, "c", 6 * KIB);
    let usage = host.run(&mut cluster, |context| operations::usage(context, name("c"), Ticket(1))).unwrap();
    let expected = crate::event::Usage { provisioned: 64 * KIB, used: 8 * KIB };
    assert_eq!(usage, AdminReply::Usage(expected));

    assert_eq!(host.remove(&mut cluster, "c").unwrap(), AdminReply::Removed);
    assert_eq!(host.remove(&mut cluster, "c").unwrap_err(), name("c").not_found());
    assert_eq!(
        (host.names(&mut cluster), data_objects(&cluster), headers(&cluster)),
        (vec!["a".to_owned()], 0, 1)
    );
}

#[test]
fn values_out_of_range_are_refused_with_what_is_allowed() {
    let mut cluster = cluster();
    let mut host = Host::new(&mut cluster);
    let refused = |result: Result<AdminReply, ImageError>| match result.unwrap_err() {
        ImageError::Invalid(what) => what,
        other => panic!("invalid, not {other:?}"),
    };
    assert_eq!(refused(host.create(&mut cluster, "", 1, 22)), InvalidImage::Name);
    assert_eq!(refused(host.create(&mut cluster, "a/b", 1, 22)), InvalidImage::Name);
    assert_eq!(refused(host.create(&mut cluster, &"x".repeat(129), 1, 22)), InvalidImage::Name);
    assert_eq!(refused(host.create(&mut cluster, "a", 1, 11)), InvalidImage::Order);
    assert_eq!(refused(host.create(&mut cluster, "a", 1, 26)), InvalidImage::Order);
    assert_eq!(refused(host.create(&mut cluster, "a", 1 << 63, 25)), InvalidImage::Size);
    assert_eq!(refused(host.create(&mut cluster, "a", (1 << 52) + 1, 12)), InvalidImage::Size);
    let elsewhere = ImageName { pool: "none".into(), image: "a".into() };
    let no_pool = host.run(&mut cluster, |context| operations::info(context, elsewhere)).unwrap_err();
    assert_eq!(no_pool, ImageError::NoPool { pool: "none".into() });
    assert_eq!(cluster.store.objects.len(), 0, "nothing was changed");
}

#[test]
fn a_creation_broken_off_anywhere_leaves_all_or_a_name_that_can_be_used() {
    for limit in 0.. {
        let mut cluster = cluster();
        let mut host = Host::new(&mut cluster);
        let options = CreateOptions { size: 64 * KIB, order: 12 };
        let ended =
            host.run_limited(&mut cluster, limit, |context| operations::create(context, name("a"), options));
        let mut other = Host::new(&mut cluster);
        let names = other.names(&mut cluster);
        if names.is_empty() {
            other.create(&mut cluster, "a", 64 * KIB, 12).unwrap();
        }
        other.open(&mut cluster, "a").unwrap();
        if ended.is_some() {
            assert!(limit >= 3, "directory, header, directory again");
            return;
        }
    }
}

#[test]
fn a_removal_broken_off_anywhere_is_finished_by_the_next() {
    for limit in 0.. {
        let mut cluster = cluster();
        let mut host = Host::new(&mut cluster);
        host.create(&mut cluster, "a", 64 * KIB, 12).unwrap();
        fill(&mut host, &mut cluster, "a", 64 * KIB);
        let ended = host.run_limited(&mut cluster, limit, |context| {
            operations::remove(context, name("a"), false, Ticket(1))
        });
        let mut other = Host::new(&mut cluster);
        match other.open(&mut cluster, "a") {
            Ok(_) => assert_eq!(data_objects(&cluster), 16, "what can be opened is whole"),
            Err(error) => assert!([name("a").removing(), name("a").not_found()].contains(&error)),
        }
        if !other.names(&mut cluster).is_empty() {
            other.remove(&mut cluster, "a").unwrap();
        }
        assert_eq!((other.names(&mut cluster).len(), data_objects(&cluster), headers(&cluster)), (0, 0, 0));
        if ended.is_some() {
            return;
        }
    }
}

#[test]
fn growing_after_a_shrink_broken_off_anywhere_reads_zero() {
    let shrunk = 10 * KIB + 100;
    for limit in 0.. {
        let mut cluster = cluster();
        let mut host = Host::new(&mut cluster);
        host.create(&mut cluster, "a", 64 * KIB, 14).unwrap();
        fill(&mut host, &mut cluster, "a", 64 * KIB);
        let ended = host.run_limited(&mut cluster, limit, |context| {
            resize::resize(context, name("a"), shrunk, Ticket(1))
        });
        let mut other = Host::new(&mut cluster);
        let info = other.run(&mut cluster, |context| operations::info(context, name("a"))).unwrap();
        let AdminReply::Info(info) = info else { panic!("a header") };
        let size = info.size;
        assert!([64 * KIB, shrunk].contains(&size));
        other.resize(&mut cluster, "a", 80 * KIB).unwrap();
        let bytes = read(&mut other, &mut cluster, "a", 80 * KIB);
        assert!(bytes[..size as usize].iter().all(|byte| *byte == 0xaa), "what was kept is there");
        assert!(bytes[size as usize..].iter().all(|byte| *byte == 0), "what is new is zero");
        if ended.is_some() {
            return;
        }
    }
}

#[test]
fn a_trim_that_was_taken_over_frees_nothing_that_is_new() {
    // The first client shrinks and stops after any number of ops; the second takes over, grows the image and writes; then
    // the first goes on.
    for limit in 0..40 {
        let mut cluster = cluster();
        let mut first = Host::new(&mut cluster);
        first.create(&mut cluster, "a", 64 * KIB, 14).unwrap();
        fill(&mut first, &mut cluster, "a", 64 * KIB);
        let begin = |context| resize::resize(context, name("a"), 20 * KIB, Ticket(1));
        if first.run_limited(&mut cluster, limit, begin).is_some() {
            return;
        }
        let connections = cluster.connections.clone();
        let (sent, session, epoch) = (std::mem::take(&mut cluster.sent), cluster.session, cluster.epoch);

        let mut second = Host::new(&mut cluster);
        second.resize(&mut cluster, "a", 64 * KIB).unwrap();
        fill(&mut second, &mut cluster, "a", 64 * KIB);

        cluster.connections = connections;
        cluster.dialing.clear();
        (cluster.sent, cluster.session, cluster.epoch) = (sent, session, epoch);
        let mut ended = None;
        while first.turn(&mut cluster, &mut usize::MAX.clone()) {
            for event in first.events() {
                if let ClientEvent::Admin { result, .. } = event {
                    ended = Some(result);
                }
            }
        }
        let mut third = Host::new(&mut cluster);
        let info = third.run(&mut cluster, |context| operations::info(context, name("a"))).unwrap();
        let AdminReply::Info(info) = info else { panic!("a header") };
        let bytes = read(&mut third, &mut cluster, "a", info.size);
        assert!(bytes.iter().all(|byte| *byte == 0xaa), "after {limit} ops: {ended:?}");
    }
    panic!("a shrink takes fewer ops");
}

#[test]
fn two_clients_that_race_for_a_name_end_with_one_image() {
    for limit in 0..6 {
        let mut cluster = cluster();
        let mut first = Host::new(&mut cluster);
        let options = CreateOptions { size: 4096, order: 12 };
        first.core.admin(Ticket(1), |context| operations::create(context, name("a"), options));
        first.core.admin(Ticket(1), |context| operations::create(context, name("a"), options));
        first.core.admin(Ticket(1), |context| operations::create(context, name("b"), options));
        let mut left = limit;
        while first.turn(&mut cluster, &mut left) {}
        first.settle(&mut cluster);
        let results = first.events().into_iter().filter_map(|event| match event {
            ClientEvent::Admin { result, .. } => Some(result.map(|_| ())),
            _ => None,
        });
        let (good, bad): (Vec<_>, Vec<_>) = results.partition(Result::is_ok);
        assert_eq!((good.len(), bad), (2, vec![Err(name("a").exists())]));
        assert_eq!(first.names(&mut cluster), ["a", "b"]);
        assert_eq!(headers(&cluster), 2, "the loser's header is gone");
    }
}

#[test]
fn openers_hear_of_a_new_size_and_of_the_end() {
    let mut cluster = cluster();
    let mut host = Host::new(&mut cluster);
    host.create(&mut cluster, "a", 64 * KIB, 12).unwrap();
    let image = host.open(&mut cluster, "a").unwrap();
    host.resize(&mut cluster, "a", 128 * KIB).unwrap();
    host.settle(&mut cluster);
    let resized =
        |event: &ClientEvent| matches!(event, ClientEvent::Resized { size, .. } if size.0 == 128 * KIB);
    assert_eq!(host.events().iter().filter(|event| resized(event)).count(), 1);
    let io = ImageIo::Read { offset: ByteOffset(100 * KIB), len: ByteLen(10) };
    assert!(host.io(&mut cluster, image, io.clone()).is_ok());
    host.rename(&mut cluster, "a", "b").unwrap();
    assert!(host.io(&mut cluster, image, io.clone()).is_ok(), "a handle outlives the name");
    host.lose_osds(&mut cluster);
    host.remove(&mut cluster, "b").unwrap();
    host.settle(&mut cluster);
    assert!(host.events().iter().any(|event| matches!(event, ClientEvent::Removed { .. })));
    assert_eq!(host.io(&mut cluster, image, io).unwrap_err(), IoError::Fenced);
}

#[test]
fn an_image_that_others_have_open_is_removed_by_force_alone() {
    let mut cluster = cluster();
    let mut opener = Host::new(&mut cluster);
    opener.create(&mut cluster, "a", 64 * KIB, 12).unwrap();
    fill(&mut opener, &mut cluster, "a", 64 * KIB);
    let session = cluster.session;
    let mut other = Host::new(&mut cluster);
    let remove = |host: &mut Host, cluster: &mut Scripted, force| {
        host.run(cluster, |context| operations::remove(context, name("a"), force, Ticket(1)))
    };
    let refused = remove(&mut other, &mut cluster, false).unwrap_err();
    let ImageError::InUse { sessions, .. } = refused else { panic!("in use, not {refused:?}") };
    assert_eq!(sessions, [session]);
    assert_eq!(data_objects(&cluster), 16, "nothing was changed");
    assert_eq!(remove(&mut other, &mut cluster, true).unwrap(), AdminReply::Removed);
    assert_eq!(data_objects(&cluster), 0);
}

/// 64 TiB are 16 million objects; what was never written must not be asked for.
#[test]
fn a_thin_image_costs_what_is_in_it() {
    const TIB: u64 = 1 << 40;
    let mut cluster = cluster();
    let mut host = Host::new(&mut cluster);
    host.create(&mut cluster, "a", 64 * TIB, 22).unwrap();
    let handle = host.open(&mut cluster, "a").unwrap();
    for at in 0..10 {
        let data = cluster.pool.copy_of(&[7; 4096]).unwrap();
        let offset = ByteOffset(at * 5 * TIB + at * 4096);
        host.io(&mut cluster, handle, ImageIo::Write { offset, data, fua: false }).unwrap();
    }
    const OPS_MAX: usize = 100;
    let usage =
        host.run_limited(&mut cluster, OPS_MAX, |context| operations::usage(context, name("a"), Ticket(1)));
    let expected = crate::event::Usage { provisioned: 64 * TIB, used: 40 * KIB };
    assert_eq!(usage, Some(Ok(AdminReply::Usage(expected))));
    let shrunk = host
        .run_limited(&mut cluster, OPS_MAX, |context| resize::resize(context, name("a"), 5 * TIB, Ticket(1)));
    assert_eq!(shrunk, Some(Ok(AdminReply::Resized)));
    assert_eq!(data_objects(&cluster), 1);
    let removed = host.run_limited(&mut cluster, OPS_MAX, |context| {
        operations::remove(context, name("a"), true, Ticket(1))
    });
    assert_eq!(removed, Some(Ok(AdminReply::Removed)));
    assert_eq!(data_objects(&cluster), 0);
}

#[test]
fn damaged_documents_are_errors_and_never_overwritten() {
    let mut cluster = cluster();
    let mut host = Host::new(&mut cluster);
    host.create(&mut cluster, "a", 4096, 12).unwrap();
    let directory = directory_object(PoolId(1));
    for at in [0, 9, 11, 13, 17, 25, 33] {
        let block = cluster.store.objects.get_mut(&directory).unwrap().blocks.get_mut(&0).unwrap();
        block[at] ^= 1;
        let before = cluster.store.applied;
        assert!(matches!(host.create(&mut cluster, "b", 4096, 12), Err(ImageError::Corrupt { .. })));
        assert!(matches!(host.open(&mut cluster, "a"), Err(ImageError::Corrupt { .. })));
        assert_eq!(cluster.store.applied, before);
        let block = cluster.store.objects.get_mut(&directory).unwrap().blocks.get_mut(&0).unwrap();
        block[at] ^= 1;
    }
    host.open(&mut cluster, "a").unwrap();
}

#[test]
fn directories_larger_than_a_block_work() {
    let mut cluster = cluster();
    let mut host = Host::new(&mut cluster);
    for number in 0..60 {
        let long = format!("{number:0120}");
        host.create(&mut cluster, &long, 4096, 12).unwrap();
    }
    assert_eq!(host.names(&mut cluster).len(), 60);
    for number in 0..60 {
        host.remove(&mut cluster, &format!("{number:0120}")).unwrap();
    }
    assert_eq!(host.names(&mut cluster).len(), 0);
}
