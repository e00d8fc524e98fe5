//! One shard.
