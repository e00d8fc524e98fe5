//! What a sender keeps for resending, sans-I/O.

use loligo_reactor::env::QueueFull;

/// A bounded window of things in flight, numbered without holes, for resending after a reconnect.
///
/// ```text
///      acknowledged │ lowest_outstanding …  some acknowledged  … │ next_number
///                   └───────────────── at most `capacity` ───────┘
/// ```
///
/// The *span* from the lowest outstanding to the next number is bounded, not only the number of things: the other
/// side keeps results for the whole span (`limits::SESSION_RESULTS_MAX`), and one stuck op must not let it grow. Its
/// memory is taken at the start and never grows.
#[derive(Debug)]
pub struct Window<T> {
    /// Number `n` lies at `n % slots.len()`.
    slots: Box<[Option<T>]>,
    lowest: u64,
    next: u64,
    outstanding: usize,
    credits: usize,
}

impl<T> Window<T> {
    /// An empty window for numbers from `first` on, that spans at most `capacity` of them. Credits are not limited at
    /// first.
    ///
    /// # Panics
    /// If `capacity` is 0.
    pub fn new(first: u64, capacity: usize) -> Self {
        assert!(capacity > 0, "a window holds something");
        let slots = std::iter::repeat_with(|| None).take(capacity).collect();
        Self { slots, lowest: first, next: first, outstanding: 0, credits: capacity }
    }

    /// How many things the other side takes at once. Lowering it takes nothing back.
    pub fn set_credits(&mut self, credits: usize) {
        self.credits = credits;
    }

    /// Whether [`Window::push`] would take something.
    pub fn has_room(&self) -> bool {
        self.outstanding < self.credits && self.span() < self.slots.len()
    }

    /// Puts something in flight and returns its number.
    ///
    /// # Errors
    /// Gives it back when the credits are used up or the window spans its capacity.
    ///
    /// # Panics
    /// After 2^64 numbers.
    pub fn push(&mut self, item: T) -> Result<u64, QueueFull<T>> {
        if !self.has_room() {
            return Err(QueueFull(item));
        }
        let number = self.next;
        self.next = number.checked_add(1).expect("a window does not live through 2^64 numbers");
        let slot = self.slot(number);
        let before = self.slots[slot].replace(item);
        assert!(before.is_none(), "a slot within the span is free before its number is given");
        self.outstanding += 1;
        Ok(number)
    }

    /// Ends the flight of `number`. `None` if it is not in flight: a duplicate, or a number never given.
    pub fn acknowledge(&mut self, number: u64) -> Option<T> {
        if !(self.lowest..self.next).contains(&number) {
            return None;
        }
        let slot = self.slot(number);
        let item = self.slots[slot].take()?;
        self.outstanding -= 1;
        while self.lowest < self.next && self.slots[self.slot(self.lowest)].is_none() {
            self.lowest += 1;
        }
        Some(item)
    }

    /// What is in flight under this number.
    pub fn get(&self, number: u64) -> Option<&T> {
        if !(self.lowest..self.next).contains(&number) {
            return None;
        }
        self.slots[self.slot(number)].as_ref()
    }

    /// What is in flight under this number.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        if !(self.lowest..self.next).contains(&number) {
            return None;
        }
        let slot = self.slot(number);
        self.slots[slot].as_mut()
    }

    /// Everything in flight in the order of its numbers: what to send again.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        (self.lowest..self.next).filter_map(|number| Some((number, self.slots[self.slot(number)].as_ref()?)))
    }

    /// The lowest number in flight; with nothing in flight the next one to be given. Everything below is done.
    pub fn lowest_outstanding(&self) -> u64 {
        self.lowest
    }

    /// The number that the next thing gets.
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// How many things are in flight.
    pub fn len(&self) -> usize {
        self.outstanding
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.outstanding == 0
    }

    fn span(&self) -> usize {
        usize::try_from(self.next - self.lowest).expect("the span is at most the capacity")
    }

    fn slot(&self, number: u64) -> usize {
        let len = u64::try_from(self.slots.len()).expect("a length in memory fits 64 bits");
        usize::try_from(number % len).expect("less than a length in memory")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_stuck_number_bounds_the_span() {
        let mut window = Window::new(1, 3);
        assert_eq!([window.push('a'), window.push('b'), window.push('c')].map(Result::unwrap), [1, 2, 3]);
        assert_eq!(window.push('d').unwrap_err().0, 'd');
        assert_eq!(window.acknowledge(2), Some('b'));
        assert_eq!(window.acknowledge(3), Some('c'));
        assert_eq!(window.acknowledge(3), None);
        assert_eq!(window.len(), 1);
        assert!(window.push('d').is_err(), "the span is full though one slot is used");
        assert_eq!(window.lowest_outstanding(), 1);
        assert_eq!(window.acknowledge(1), Some('a'));
        assert_eq!(window.lowest_outstanding(), 4);
        assert_eq!(window.push('d').unwrap(), 4);
        assert_eq!((window.acknowledge(0), window.acknowledge(5)), (None, None));
    }

    #[test]
    fn credits_bound_what_is_in_flight() {
        let mut window = Window::new(7, 8);
        window.set_credits(2);
        assert_eq!([window.push(()), window.push(())].map(Result::unwrap), [7, 8]);
        assert!(window.push(()).is_err());
        window.set_credits(1);
        window.acknowledge(8);
        assert!(!window.has_room());
        window.acknowledge(7);
        assert!(window.has_room());
    }

    proptest! {
        #[test]
        fn it_is_an_ordered_map_with_bounds(
            first in 0u64..5, capacity in 1usize..9, credits in 0usize..10,
            steps in prop::collection::vec((any::<bool>(), 0u64..40), 0..200),
        ) {
            let mut window = Window::new(first, capacity);
            window.set_credits(credits);
            let mut model = BTreeMap::new();
            let mut next = first;
            for (push, number) in steps {
                if push {
                    let lowest = model.keys().next().copied().unwrap_or(next);
                    let room = model.len() < credits && next - lowest < capacity as u64;
                    prop_assert_eq!(window.has_room(), room);
                    prop_assert_eq!(window.push(next * 10).ok(), room.then_some(next));
                    if room {
                        model.insert(next, next * 10);
                        next += 1;
                    }
                } else {
                    prop_assert_eq!(window.get(number).copied(), model.get(&number).copied());
                    prop_assert_eq!(window.get_mut(number).copied(), model.get(&number).copied());
                    prop_assert_eq!(window.acknowledge(number), model.remove(&number));
                }
                prop_assert_eq!(window.lowest_outstanding(), model.keys().next().copied().unwrap_or(next));
                prop_assert_eq!(window.next_number(), next);
                prop_assert_eq!((window.len(), window.is_empty()), (model.len(), model.is_empty()));
                let listed: Vec<_> = window.iter().map(|(number, item)| (number, *item)).collect();
                prop_assert_eq!(listed, model.iter().map(|(n, i)| (*n, *i)).collect::<Vec<_>>());
            }
        }
    }
}
