//! Bytes and frames.
