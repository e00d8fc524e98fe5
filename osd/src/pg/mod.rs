//! Placement groups.
