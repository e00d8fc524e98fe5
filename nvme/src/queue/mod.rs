//! Queues in memory that the controller shares: rings of commands and completions, and volatile access to their bytes.

mod memory;
mod ring;

pub use memory::{DmaMap, DmaRange, Region};
pub use ring::{CompletionRing, Doorbell, SubmissionRing};
