//! Bounded messages between reactors.
