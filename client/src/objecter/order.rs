//! Which ops of one object must wait for each other.
//!
//! A write that may have been sent and lost is sent again later: were a newer write to the same blocks on its way at the
//! same time, the older could land after the newer one was acknowledged (RELIABILITY section 2.1). So a write waits
//! until every earlier write to a block of its own has come to its end. Block layers above do not submit
//! overlapping writes at once, so nobody waits in practice.

use super::op::Op;
use loligo_config::id::ObjectId;
use loligo_reactor::planted::{self, Bug};
use slab::Slab;
use std::collections::BTreeMap;

/// The writes of every object that have not ended, oldest first.
#[derive(Debug, Default)]
pub(super) struct Order {
    objects: BTreeMap<ObjectId, Vec<usize>>,
    /// Empty lists, used again so that a write does not allocate.
    spare: Vec<Vec<usize>>,
}

/// Lists kept for use again: more writes than that are rarely out at once.
const SPARE_MAX: usize = 256;

impl Order {
    /// Enters a write; returns how many earlier ones it must wait for.
    pub(super) fn enter<O>(&mut self, slot: usize, ops: &Slab<Op<O>>) -> u32 {
        let request = &ops[slot].request;
        if !request.kind.is_write() || planted::active(Bug::WriteOvertakesWrite) {
            return 0;
        }
        let spare = &mut self.spare;
        let earlier = self.objects.entry(request.object).or_insert_with(|| spare.pop().unwrap_or_default());
        let conflicts = earlier.iter().filter(|other| ops[**other].request.conflicts_with(request)).count();
        earlier.push(slot);
        u32::try_from(conflicts).expect("fewer than 2^32 ops are outstanding")
    }

    /// Takes a write that has ended (still in `ops`) out, and puts into `freed` those that waited for nothing else.
    pub(super) fn leave<O>(&mut self, slot: usize, ops: &mut Slab<Op<O>>, freed: &mut Vec<usize>) {
        let object = ops[slot].request.object;
        let Some(queue) = self.objects.get_mut(&object) else { return };
        let Some(at) = queue.iter().position(|other| *other == slot) else { return };
        queue.remove(at);
        for &later in &queue[at..] {
            if !ops[slot].request.conflicts_with(&ops[later].request) {
                continue;
            }
            let op = &mut ops[later];
            assert!(op.blocked_by > 0, "a later overlapping write counts every earlier one");
            op.blocked_by -= 1;
            if op.blocked_by == 0 {
                freed.push(later);
            }
        }
        if queue.is_empty()
            && let Some(list) = self.objects.remove(&object)
            && self.spare.len() < SPARE_MAX
        {
            self.spare.push(list);
        }
    }
}
