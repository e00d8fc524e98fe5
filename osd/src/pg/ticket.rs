//! Tickets that a PG gives to its store: `[63..40] slot of the PG, [39..37] kind, [36..0] number`.

use loligo_reactor::env::Ticket;

const KIND_SHIFT: u32 = 37;
const SLOT_SHIFT: u32 = 40;
/// Numbers wrap here: more operations than are ever in flight at once.
pub const NUMBER_MASK: u64 = (1 << KIND_SHIFT) - 1;

/// What a ticket stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A write of this primary.
    Write,
    /// A replicated write.
    Replica,
    /// A promise or an activation.
    Meta,
    /// A pushed write of the tail.
    Push,
    /// A read for a client, or of the edge blocks of a write.
    Read,
    /// A read of a block of the tail.
    TailRead,
}

/// The ticket with these parts.
pub fn join(slot: u32, kind: Kind, number: u64) -> Ticket {
    let kind = match kind {
        Kind::Write => 0,
        Kind::Replica => 1,
        Kind::Meta => 2,
        Kind::Push => 3,
        Kind::Read => 4,
        Kind::TailRead => 5,
    };
    Ticket((u64::from(slot) << SLOT_SHIFT) | (kind << KIND_SHIFT) | (number & NUMBER_MASK))
}

/// The PG's slot in a ticket.
pub fn slot(ticket: Ticket) -> u32 {
    u32::try_from(ticket.0 >> SLOT_SHIFT).expect("24 bits")
}

/// Kind and number in a ticket.
///
/// # Panics
/// If it was not made by [`join`].
pub fn split(ticket: Ticket) -> (Kind, u64) {
    let kind = match (ticket.0 >> KIND_SHIFT) & 7 {
        0 => Kind::Write,
        1 => Kind::Replica,
        2 => Kind::Meta,
        3 => Kind::Push,
        4 => Kind::Read,
        5 => Kind::TailRead,
        other => panic!("no ticket of a PG has kind {other}"),
    };
    (kind, ticket.0 & NUMBER_MASK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_come_apart_as_they_were_joined() {
        for kind in [Kind::Write, Kind::Replica, Kind::Meta, Kind::Push, Kind::Read, Kind::TailRead] {
            let ticket = join(0xab_cdef, kind, NUMBER_MASK);
            assert_eq!(slot(ticket), 0xab_cdef);
            assert_eq!(split(ticket), (kind, NUMBER_MASK));
        }
    }
}
