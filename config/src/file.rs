//! The host file.
