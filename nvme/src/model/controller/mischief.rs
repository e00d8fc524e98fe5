//! How a controller misbehaves, and how its driver may.

use crate::spec::status::Status;

/// What happens to an I/O command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mischief {
    /// It fails with this status and does nothing.
    Fail(Status),
    /// It is never completed, until it is aborted where that works.
    Lose,
    /// As `Lose`, and its completion comes after the next reset, in the new queue.
    CompleteAfterReset,
    /// A read is never completed, and its data are written when the controller is already asked to stop.
    WriteWhileStopping,
    /// Its completion names another command that does not exist.
    WrongId,
    /// Its completion names another queue.
    WrongQueue,
    /// It is completed twice.
    Twice,
    /// A completion for nothing comes before its own.
    Extra,
    /// Its completion has the phase of the last round, so that nobody sees it.
    OldPhase,
    /// The controller reports a fatal status instead.
    Fatal,
    /// The controller is unplugged instead.
    Unplug,
}

/// What a driver has done wrong, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Misuse {
    /// Accesses to memory that is not mapped: on hardware, faults of the IOMMU.
    pub dma: u64,
    /// Doorbells of queues that do not exist, or values past their ends.
    pub doorbells: u64,
    /// Registers that do not exist, or at the wrong time.
    pub registers: u64,
    /// Mappings ended that were none.
    pub unmaps: u64,
    /// Commands with an id that is in flight already.
    pub ids: u64,
    /// Completions without room: the driver has more in flight than its queue holds.
    pub overflows: u64,
}
