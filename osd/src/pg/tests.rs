//! Tests of the state machines with a store in memory and a scripted network.

mod cluster;
mod peering;
mod random;
mod store;
mod waiting;
mod writes;
