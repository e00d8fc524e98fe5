//! Where the time of writes went: the acknowledgements carry what every leg took.

use crate::load::histogram;
use hdrhistogram::Histogram;
use loligo_client::Waterfall;
use serde::Serialize;

/// The legs of many writes.
#[derive(Clone, Debug)]
pub struct Legs {
    /// One for every field of [`MeanLegs`], in its order.
    legs: [Leg; 8],
}

#[derive(Clone, Debug)]
struct Leg {
    /// Exact, where the histogram's mean is rounded.
    sum_ns: u64,
    times: Histogram<u64>,
}

impl Default for Legs {
    fn default() -> Self {
        Self { legs: std::array::from_fn(|_| Leg { sum_ns: 0, times: histogram() }) }
    }
}

/// Means (or medians, which need not add up), in microseconds. Client, network and primary one after the other make the latency; what the primary does is
/// part of its time, and its own device works beside the replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MeanLegs {
    /// In the client: before sending and after the acknowledgement.
    pub client_us: f64,
    /// From client to primary and back, with wake-ups.
    pub network_us: f64,
    /// In the primary, from the request's arrival to the acknowledgement's departure.
    pub primary_us: f64,
    /// Of that: until its own write and the copies for the replicas were on their way.
    pub primary_submit_us: f64,
    /// Of that: its own device's write.
    pub primary_device_us: f64,
    /// Of that: the slowest replica's round trip.
    pub replica_round_trip_us: f64,
    /// Of the round trip: that replica's time.
    pub replica_us: f64,
    /// Of that replica's time: its device's write.
    pub replica_device_us: f64,
}

impl Legs {
    /// Adds one write.
    pub fn add(&mut self, waterfall: &Waterfall) {
        let residence = waterfall.residence;
        let slowest = residence.slowest().copied().unwrap_or_default();
        let sending_ns = waterfall.queue_ns.saturating_add(waterfall.encode_ns);
        let times = [
            sending_ns.saturating_add(waterfall.completion_ns),
            waterfall.network_ns(),
            residence.primary_ns.into(),
            residence.submit_ns.into(),
            residence.device_ns.into(),
            slowest.leg_ns.into(),
            slowest.residence_ns.into(),
            slowest.device_ns.into(),
        ];
        for (leg, ns) in self.legs.iter_mut().zip(times) {
            leg.sum_ns = leg.sum_ns.saturating_add(ns);
            leg.times.saturating_record(ns);
        }
    }

    /// The means; `None` without a write.
    pub fn mean(&self) -> Option<MeanLegs> {
        self.each(|leg| leg.sum_ns as f64 / leg.times.len() as f64)
    }

    /// Each leg's median, which the odd slow write does not move; `None` without a write.
    pub fn median(&self) -> Option<MeanLegs> {
        self.each(|leg| leg.times.value_at_quantile(0.5) as f64)
    }

    fn each(&self, nanos: impl Fn(&Leg) -> f64) -> Option<MeanLegs> {
        if self.legs[0].times.is_empty() {
            return None;
        }
        let [client, network, primary, submit, device, replica, residence, replica_device] =
            self.legs.each_ref().map(|leg| nanos(leg) / 1000.0);
        Some(MeanLegs {
            client_us: client,
            network_us: network,
            primary_us: primary,
            primary_submit_us: submit,
            primary_device_us: device,
            replica_round_trip_us: replica,
            replica_us: residence,
            replica_device_us: replica_device,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_net::wire::op::Residence;

    #[test]
    fn legs_are_means_and_add_up() {
        let one = |scale: u32| Waterfall {
            total_ns: 100_000 * u64::from(scale),
            queue_ns: 5_000 * u64::from(scale),
            round_trip_ns: 90_000 * u64::from(scale),
            completion_ns: 5_000 * u64::from(scale),
            residence: Residence {
                primary_ns: 60_000 * scale,
                device_ns: 20_000 * scale,
                ..Residence::default()
            },
            ..Waterfall::default()
        };
        let mut legs = Legs::default();
        assert_eq!(legs.mean(), None);
        legs.add(&one(1));
        legs.add(&one(3));
        let mean = legs.mean().unwrap();
        assert_eq!((mean.client_us, mean.network_us, mean.primary_us), (20.0, 60.0, 120.0));
        assert_eq!(mean.client_us + mean.network_us + mean.primary_us, 200.0, "the mean latency");
        assert_eq!(mean.primary_device_us, 40.0);
        legs.add(&one(3));
        legs.add(&one(1000));
        let median = legs.median().unwrap();
        assert!((median.primary_us - 180.0).abs() < 0.2, "one slow write does not move it: {median:?}");
    }
}
