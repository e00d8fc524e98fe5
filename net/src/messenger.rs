//! Authenticated connections on top of a transport.
