//! Tests of the state machines with a fake store and a scripted network.
