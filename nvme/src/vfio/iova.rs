//! Addresses for the device: chosen within what the IOMMU can translate, around what the platform has reserved.

use std::collections::BTreeMap;

/// Not used, so that a zero address in a command is always an error.
const LOWEST: u64 = 1 << 16;
const PAGE_LEN: u64 = 4096;
const HUGE_PAGE_LEN: u64 = 2 << 20;

/// Free ranges of addresses: the start and the length of each.
#[derive(Debug)]
pub struct IovaSpace {
    free: BTreeMap<u64, u64>,
}

impl IovaSpace {
    /// The ranges that can be used, each from its first to its last address.
    pub fn new(usable: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut space = Self { free: BTreeMap::new() };
        for (first, last) in usable {
            let first = first.max(LOWEST).next_multiple_of(PAGE_LEN);
            let end = last.saturating_add(1) / PAGE_LEN * PAGE_LEN;
            if end > first {
                space.free.insert(first, end - first);
            }
        }
        space
    }

    /// Takes `len` bytes, rounded up to pages; aligned to 2 MiB if it is that long, so that the IOMMU can use large
    /// pages. The lowest place that fits, since some IOMMUs translate few bits.
    pub fn take(&mut self, len: usize) -> Option<u64> {
        let len = (len as u64).checked_next_multiple_of(PAGE_LEN).filter(|len| *len > 0)?;
        let align = if len >= HUGE_PAGE_LEN { HUGE_PAGE_LEN } else { PAGE_LEN };
        let fits = |(&start, &room): (&u64, &u64)| {
            let at = start.checked_next_multiple_of(align)?;
            (at - start <= room && room - (at - start) >= len).then_some((start, room, at))
        };
        let (start, room, at) = self.free.iter().find_map(fits)?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        let rest = room - (at - start) - len;
        if rest > 0 {
            self.free.insert(at + len, rest);
        }
        Some(at)
    }

    /// Gives back what `take` gave for this length.
    pub fn give_back(&mut self, at: u64, len: usize) {
        let mut len = (len as u64).next_multiple_of(PAGE_LEN);
        let mut start = at;
        if let Some(behind) = self.free.remove(&(at + len)) {
            len += behind;
        }
        if let Some((&before, &room)) = self.free.range(..at).next_back()
            && before + room == at
        {
            self.free.remove(&before);
            (start, len) = (before, len + room);
        }
        let last = self.free.insert(start, len);
        assert!(last.is_none(), "an address is given back once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reserved_ranges_are_left_alone() {
        // As under a virtual IOMMU: the range of message interrupts is cut out.
        let mut space = IovaSpace::new([(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)]);
        assert_eq!(space.take(1), Some(LOWEST));
        assert_eq!(space.take(4096), Some(LOWEST + 4096));
        assert_eq!(space.take(2 << 20), Some(2 << 20));
        assert_eq!(space.take(0xfec0_0000), Some(0xff00_0000), "beyond the hole, aligned");
        assert_eq!(space.take(1 << 39), None);
        assert_eq!(space.take(0), None);
    }

    #[test]
    fn odd_and_empty_ranges() {
        assert_eq!(IovaSpace::new([(0, 100), (5, 3), (0x2_0001, 0x2_1fff)]).take(4096), Some(0x2_1000));
        assert_eq!(IovaSpace::new([(0, u64::MAX)]).take(1 << 40), Some(2 << 20));
        assert_eq!(IovaSpace::new([]).take(1), None);
    }

    proptest! {
        #[test]
        fn what_is_taken_never_overlaps_and_comes_back(steps in prop::collection::vec((1usize..8 << 20, 0usize..4), 1..200)) {
            let mut space = IovaSpace::new([(0, 0xff_ffff), (0x200_0000, 0x3ff_ffff)]);
            let whole = space.free.clone();
            let mut taken: BTreeMap<u64, usize> = BTreeMap::new();
            for (len, action) in steps {
                if action > 0 {
                    if let Some(at) = space.take(len) {
                        let end = at + len as u64;
                        prop_assert!(end <= 0x100_0000 || at >= 0x200_0000 && end <= 0x400_0000);
                        prop_assert!(taken.iter().all(|(other, room)| end <= *other || other + *room as u64 <= at));
                        taken.insert(at, len);
                    }
                } else if let Some((at, len)) = taken.pop_first() {
                    space.give_back(at, len);
                }
            }
            for (at, len) in taken {
                space.give_back(at, len);
            }
            prop_assert_eq!(space.free, whole);
        }
    }
}
