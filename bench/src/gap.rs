//! What a replicated durable write takes above the machine's floor, and where (DESIGN section 1): pure arithmetic.
//!
//!     client ── network ── primary ─┬─ submit ── its own device ──────────────────┐
//!                                   └─ submit ── network ── replica ── its device ─┴─ finish ── network ── client

use crate::legs::MeanLegs;
use serde::Serialize;

/// The floor of one write, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ideal {
    /// A block there and a short answer back.
    pub round_trip_us: f64,
    /// A durable write, with as many writers at once as copies share the device.
    pub device_us: f64,
}

/// One part of a write against its floor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Part {
    /// In words.
    pub what: &'static str,
    /// What it takes.
    pub actual_us: f64,
    /// What it must take.
    pub ideal_us: f64,
    /// The difference; below zero when it is faster than the floor was just then.
    pub gap_us: f64,
}

/// A write against its floor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gaps {
    /// One-way messages behind each other.
    pub hops: u32,
    /// `hops × round trip / 2 + device write`.
    pub ideal_us: f64,
    /// The write's latency.
    pub actual_us: f64,
    /// The software's: actual − ideal.
    pub residual_us: f64,
    /// Of it, for each hop.
    pub residual_per_hop_us: f64,
    /// The parts on the path that the write waits for, in the order in which they happen.
    pub parts: Vec<Part>,
}

impl Gaps {
    /// Of a write of `copies` copies that took `actual_us`, of which `legs` tells the parts.
    pub fn of(ideal: Ideal, actual_us: f64, copies: u8, legs: &MeanLegs) -> Self {
        // To the primary and back, and as long as there are replicas, from there to them and back.
        let hops = if copies > 1 { 4 } else { 2 };
        let ideal_us = f64::from(hops) * ideal.round_trip_us / 2.0 + ideal.device_us;
        let residual_us = actual_us - ideal_us;
        Self {
            hops,
            ideal_us,
            actual_us,
            residual_us,
            residual_per_hop_us: residual_us / f64::from(hops),
            parts: parts(ideal, legs),
        }
    }

    /// The part furthest above its floor, unless none is.
    pub fn largest(&self) -> Option<&Part> {
        let above = self.parts.iter().filter(|part| part.gap_us > 0.0);
        above.max_by(|one, other| one.gap_us.total_cmp(&other.gap_us))
    }
}

fn parts(ideal: Ideal, legs: &MeanLegs) -> Vec<Part> {
    let part = |what, actual_us: f64, ideal_us: f64| Part {
        what,
        actual_us,
        ideal_us,
        gap_us: actual_us - ideal_us,
    };
    let mut parts = vec![
        part("client, before sending and after the answer", legs.client_us, 0.0),
        part("network between client and primary, with wake-ups", legs.network_us, ideal.round_trip_us),
        part("primary, until its write and the copies are on their way", legs.primary_submit_us, 0.0),
    ];
    // The write waits for the slower of the two ways.
    if legs.replica_round_trip_us >= legs.primary_device_us {
        let network = legs.replica_round_trip_us - legs.replica_us;
        let replica = legs.replica_us - legs.replica_device_us;
        parts.extend([
            part("network between primary and replica, with wake-ups", network, ideal.round_trip_us),
            part("replica, besides its device", replica, 0.0),
            part("replica's device write", legs.replica_device_us, ideal.device_us),
        ]);
    } else {
        parts.push(part("primary's device write", legs.primary_device_us, ideal.device_us));
    }
    let waited = legs.replica_round_trip_us.max(legs.primary_device_us);
    let finish = legs.primary_us - legs.primary_submit_us - waited;
    parts.push(part("primary, from the last copy's answer to its own", finish, 0.0));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDEAL: Ideal = Ideal { round_trip_us: 10.0, device_us: 90.0 };

    fn legs() -> MeanLegs {
        MeanLegs {
            client_us: 5.0,
            network_us: 30.0,
            primary_us: 170.0,
            primary_submit_us: 10.0,
            primary_device_us: 95.0,
            replica_round_trip_us: 150.0,
            replica_us: 110.0,
            replica_device_us: 100.0,
        }
    }

    #[test]
    fn parts_add_up_to_the_write_and_gaps_to_the_residual() {
        let gaps = Gaps::of(IDEAL, 205.0, 3, &legs());
        assert_eq!((gaps.hops, gaps.ideal_us, gaps.residual_us), (4, 110.0, 95.0));
        assert_eq!(gaps.residual_per_hop_us, 23.75);
        let sum = |figure: fn(&Part) -> f64| gaps.parts.iter().map(figure).sum::<f64>();
        assert_eq!(sum(|part| part.actual_us), 205.0);
        assert_eq!(sum(|part| part.gap_us), 95.0);
        assert_eq!(gaps.largest().unwrap().what, "network between primary and replica, with wake-ups");
    }

    #[test]
    fn one_copy_waits_for_the_primarys_device_alone() {
        let alone = MeanLegs {
            primary_us: 120.0,
            primary_device_us: 100.0,
            replica_round_trip_us: 0.0,
            replica_us: 0.0,
            replica_device_us: 0.0,
            ..legs()
        };
        let gaps = Gaps::of(IDEAL, 155.0, 1, &alone);
        assert_eq!((gaps.hops, gaps.ideal_us, gaps.residual_us), (2, 100.0, 55.0));
        assert_eq!(gaps.parts.iter().map(|part| part.actual_us).sum::<f64>(), 155.0);
        assert_eq!(gaps.largest().unwrap().gap_us, 20.0);
    }

    #[test]
    fn nothing_above_the_floor_is_no_largest_gap() {
        let legs =
            MeanLegs { network_us: 9.0, primary_device_us: 90.0, primary_us: 90.0, ..MeanLegs::default() };
        assert_eq!(Gaps::of(IDEAL, 99.0, 1, &legs).largest(), None);
    }
}
