//! Maps.
