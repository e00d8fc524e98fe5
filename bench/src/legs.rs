//! Where the time of writes went, on average: the acknowledgements carry what every leg took.

use loligo_client::Waterfall;
use serde::Serialize;

/// Sums over many writes, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Legs {
    count: u64,
    client: u64,
    network: u64,
    primary: u64,
    submit: u64,
    device: u64,
    replica: u64,
    replica_residence: u64,
    replica_device: u64,
}

/// Means, in microseconds. Client, network and primary one after the other make the latency; what the primary does is
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
        let add = |sum: &mut u64, ns: u64| *sum = sum.saturating_add(ns);
        self.count += 1;
        add(&mut self.client, waterfall.queue_ns.saturating_add(waterfall.completion_ns));
        add(&mut self.network, waterfall.network_ns());
        add(&mut self.primary, residence.primary_ns.into());
        add(&mut self.submit, residence.submit_ns.into());
        add(&mut self.device, residence.device_ns.into());
        add(&mut self.replica, residence.replica_ns.into());
        add(&mut self.replica_residence, residence.replica_residence_ns.into());
        add(&mut self.replica_device, residence.replica_device_ns.into());
    }

    /// The means; `None` without a write.
    pub fn mean(&self) -> Option<MeanLegs> {
        let mean = |sum: u64| sum as f64 / self.count as f64 / 1000.0;
        (self.count > 0).then(|| MeanLegs {
            client_us: mean(self.client),
            network_us: mean(self.network),
            primary_us: mean(self.primary),
            primary_submit_us: mean(self.submit),
            primary_device_us: mean(self.device),
            replica_round_trip_us: mean(self.replica),
            replica_us: mean(self.replica_residence),
            replica_device_us: mean(self.replica_device),
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
    }
}
