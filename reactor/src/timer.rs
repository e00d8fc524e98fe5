//! Deadlines of one component, by key. Sans-I/O: the owner asks for the next deadline and for what has expired.
//!
//! A heap of slots that know their place in it, so that setting and cancelling take logarithmic time, and a sorted list
//! of keys. Memory grows to the most timers ever set at once and is used again.

use crate::env::Instant;

/// Timers with keys of type `K`; a key has at most one deadline.
#[derive(Clone, Debug)]
pub struct Timers<K> {
    slots: Vec<Slot<K>>,
    free: Vec<u32>,
    /// Slots as a binary heap, the earliest first.
    heap: Vec<u32>,
    /// Keys in order, with their slots.
    keys: Vec<(K, u32)>,
    /// For timers of one deadline: first set, first expired.
    sequence: u64,
}

#[derive(Clone, Copy, Debug)]
struct Slot<K> {
    key: K,
    deadline: Instant,
    sequence: u64,
    place: u32,
}

impl<K: Copy + Ord> Timers<K> {
    /// None yet.
    pub fn new() -> Self {
        Self::with_capacity(0)
    }

    /// None yet, with memory for `capacity`.
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            slots: Vec::with_capacity(capacity),
            free: Vec::with_capacity(capacity),
            heap: Vec::with_capacity(capacity),
            keys: Vec::with_capacity(capacity),
            sequence: 0,
        }
    }

    /// Sets the key's timer, in place of the one that it may have.
    pub fn set(&mut self, key: K, deadline: Instant) {
        self.sequence += 1;
        let sequence = self.sequence;
        let at = match self.find(key) {
            Ok(at) => at,
            Err(at) => {
                let slot = self.new_slot(Slot { key, deadline, sequence, place: 0 });
                self.keys.insert(at, (key, slot));
                at
            }
        };
        let index = self.keys[at].1 as usize;
        let slot = &mut self.slots[index];
        (slot.deadline, slot.sequence) = (deadline, sequence);
        let place = slot.place as usize;
        let place = self.sift_up(place);
        self.sift_down(place);
    }

    /// Takes the key's timer away. False: it had none.
    pub fn cancel(&mut self, key: K) -> bool {
        let Ok(at) = self.find(key) else { return false };
        self.remove(at);
        true
    }

    /// The deadline of a key.
    pub fn deadline(&self, key: K) -> Option<Instant> {
        let at = self.find(key).ok()?;
        Some(self.slots[self.keys[at].1 as usize].deadline)
    }

    /// The earliest deadline.
    pub fn next_deadline(&self) -> Option<Instant> {
        let first = *self.heap.first()?;
        Some(self.slots[first as usize].deadline)
    }

    /// Takes out one timer whose deadline is not after `now`: the earliest, and of equal ones the one set first.
    pub fn pop_expired(&mut self, now: Instant) -> Option<K> {
        let first = *self.heap.first()?;
        let slot = self.slots[first as usize];
        if slot.deadline > now {
            return None;
        }
        let at = self.find(slot.key).expect("every timer has its key in the list");
        self.remove(at);
        Some(slot.key)
    }

    /// How many are set.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether none is set.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    fn find(&self, key: K) -> Result<usize, usize> {
        self.keys.binary_search_by(|(known, _)| known.cmp(&key))
    }

    fn new_slot(&mut self, mut slot: Slot<K>) -> u32 {
        slot.place = u32::try_from(self.heap.len()).expect("fewer than 2^32 timers");
        let index = match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = slot;
                index
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        };
        self.heap.push(index);
        index
    }

    fn remove(&mut self, at: usize) {
        let (_, index) = self.keys.remove(at);
        let place = self.slots[index as usize].place as usize;
        self.heap.swap_remove(place);
        self.free.push(index);
        if place < self.heap.len() {
            self.settle(place);
            let place = self.sift_up(place);
            self.sift_down(place);
        }
    }

    fn order(&self, place: usize) -> (Instant, u64) {
        let slot = &self.slots[self.heap[place] as usize];
        (slot.deadline, slot.sequence)
    }

    fn settle(&mut self, place: usize) {
        let index = self.heap[place] as usize;
        self.slots[index].place = place as u32;
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.heap.swap(one, other);
        self.settle(one);
        self.settle(other);
    }

    fn sift_up(&mut self, mut place: usize) -> usize {
        while place > 0 {
            let parent = (place - 1) / 2;
            if self.order(parent) <= self.order(place) {
                break;
            }
            self.swap(parent, place);
            place = parent;
        }
        place
    }

    fn sift_down(&mut self, mut place: usize) {
        loop {
            let children = (2 * place + 1)..(2 * place + 3).min(self.heap.len());
            let Some(least) = children.min_by_key(|child| self.order(*child)) else { return };
            if self.order(place) <= self.order(least) {
                return;
            }
            self.swap(place, least);
            place = least;
        }
    }
}

impl<K: Copy + Ord> Default for Timers<K> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn they_expire_in_order_and_not_early() {
        let mut timers = Timers::new();
        timers.set('b', Instant(20));
        timers.set('a', Instant(20));
        timers.set('c', Instant(10));
        assert_eq!(timers.next_deadline(), Some(Instant(10)));
        assert_eq!(timers.pop_expired(Instant(9)), None);
        assert_eq!(timers.pop_expired(Instant(10)), Some('c'));
        assert_eq!(timers.pop_expired(Instant(10)), None);
        timers.set('b', Instant(30));
        assert_eq!(timers.deadline('b'), Some(Instant(30)));
        assert!(timers.cancel('a'));
        assert!(!timers.cancel('a'));
        assert_eq!(timers.pop_expired(Instant(u64::MAX)), Some('b'));
        assert!(timers.is_empty());
        assert_eq!(timers.next_deadline(), None);
    }

    #[test]
    fn memory_is_used_again() {
        let mut timers = Timers::with_capacity(16);
        let capacities = |timers: &Timers<u64>| {
            (timers.slots.capacity(), timers.free.capacity(), timers.heap.capacity(), timers.keys.capacity())
        };
        let before = capacities(&timers);
        for round in 0..1000 {
            (0..16).for_each(|key| timers.set(round * 7 + key, Instant(key ^ 5)));
            assert!(timers.cancel(round * 7 + 3));
            while timers.pop_expired(Instant(100)).is_some() {}
        }
        assert_eq!(capacities(&timers), before);
    }

    proptest! {
        #[test]
        fn they_behave_as_a_sorted_map(steps in prop::collection::vec((0u8..4, 0u8..12, 0u64..50), 1..200)) {
            let mut timers = Timers::new();
            let mut model: BTreeMap<u8, (u64, usize)> = BTreeMap::new();
            for (at, (kind, key, time)) in steps.into_iter().enumerate() {
                match kind {
                    0 | 1 => {
                        timers.set(key, Instant(time));
                        model.insert(key, (time, at));
                    }
                    2 => prop_assert_eq!(timers.cancel(key), model.remove(&key).is_some()),
                    _ => {
                        let first = model.iter().min_by_key(|(_, order)| **order).map(|(key, order)| (*key, order.0));
                        let expired = first.filter(|(_, deadline)| *deadline <= time).map(|(key, _)| key);
                        prop_assert_eq!(timers.pop_expired(Instant(time)), expired);
                        expired.map(|key| model.remove(&key));
                    }
                }
                prop_assert_eq!(timers.len(), model.len());
                prop_assert_eq!(timers.next_deadline().map(|next| next.0), model.values().map(|v| v.0).min());
            }
        }
    }
}
