//! Measured numbers for the design page. Ignored: they are no pass or fail.

use super::harness::{Harness, What, object, pg};

/// `cargo test --release -p loligo-osd -- --ignored --nocapture store::tests::numbers`.
#[test]
#[ignore = "measures"]
#[expect(clippy::disallowed_methods, reason = "this measures real time")]
fn mount_time_and_memory() {
    for (objects, blocks, stride) in [(100_000u64, 1u32, 0u32), (2_000, 256, 0), (1_000, 1, 37)] {
        let mut harness = Harness::new(4 << 20, 1);
        harness.media.borrow_mut().chaos = false;
        harness.make_pg(pg(0));
        let empty = harness.store().memory();
        for at in 0..objects {
            let repeat = if stride > 0 { 100 } else { 1 };
            for step in 0..repeat {
                let stamps = vec![7; blocks as usize];
                let what = What::Write(object(at), step * stride % 4096, stamps);
                harness.submit_wait(pg(0), what).unwrap();
                if at % 16 == 0 {
                    harness.commit();
                }
            }
        }
        harness.commit();
        harness.checkpoint();
        let (count, extents, stored) = harness.store().counts();
        let memory = harness.store().memory() - empty;
        harness.stop();
        let begin = std::time::Instant::now();
        harness.mount();
        let mount = begin.elapsed();
        println!(
            "{count} objects, {extents} extents, {stored} blocks: {memory} bytes ({} per object, {} per extent), mount {mount:?}",
            memory / count,
            memory / extents,
        );
    }
}
