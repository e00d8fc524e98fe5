//! An OSD that says it is there.

use super::{Action, Change, Core};
use loligo_config::id::{DeviceId, Incarnation, OsdId};
use loligo_config::limits::{OSDS_MAX, SHARDS_MAX};
use loligo_config::map::{ClusterMap, Osd, check_name};
use loligo_net::wire::mon::{BootInfo, BootStatus};
use loligo_reactor::env::ConnectionId;

/// Placement weights count 1/65536 TiB.
const WEIGHT_UNIT_BYTES: u64 = (1 << 40) / 65_536;

impl Core {
    pub(super) fn on_boot(
        &mut self,
        connection: ConnectionId,
        osd: OsdId,
        incarnation: Incarnation,
        info: Option<BootInfo>,
        out: &mut Vec<Action>,
    ) {
        let verdict = match info.filter(|info| is_valid(osd, incarnation, info)) {
            Some(info) => self.judge(osd, incarnation, &info).map(|()| info),
            None => Err(BootStatus::Invalid),
        };
        let reply = |status, epoch| Action::BootReply { connection, status, epoch };
        let info = match verdict {
            Ok(info) => info,
            Err(status) => return out.push(reply(status, self.map.epoch)),
        };
        self.osds.booted(connection, osd, incarnation);
        let entry = entry(self.newest(), osd, incarnation, &info);
        if self.newest().osds.get(&osd) == Some(&entry) {
            // The same start, up and unchanged: its connection was lost for a moment. Nothing to record.
            return match self.draft {
                Some(_) => self.waiting.push(reply(BootStatus::Taken, self.map.epoch)),
                None => out.push(reply(BootStatus::Taken, self.map.epoch)),
            };
        }
        self.extra_draft.reserved.remove(&osd);
        self.change(false, Change::Boot(Box::new(entry)));
        self.waiting.push(reply(BootStatus::Taken, self.map.epoch));
    }

    fn judge(&mut self, osd: OsdId, incarnation: Incarnation, info: &BootInfo) -> Result<(), BootStatus> {
        // An old copy of the store need not know this start, or this OSD; a device that belongs elsewhere it does know.
        let device = self.judge_device(osd, info.device);
        if device.is_ok() {
            self.saw(osd, info.newest_map);
        }
        if self.outdated().is_some() {
            return Err(BootStatus::OldMon);
        }
        device?;
        let map = self.newest();
        if self.osds.is_retired(osd, incarnation) {
            // A start that another one has replaced: it has missed its own death, and must not come back.
            return Err(BootStatus::Running);
        }
        let current = map.osds.get(&osd).map(|entry| entry.incarnation);
        if current != Some(incarnation) && self.osds.is_connected(osd, current) {
            return Err(BootStatus::Running);
        }
        if !map.osds.contains_key(&osd) && map.osds.len() >= OSDS_MAX {
            return Err(BootStatus::Invalid);
        }
        Ok(())
    }

    /// Whether the device and the OSD id belong together, as far as anything is known of either.
    fn judge_device(&self, osd: OsdId, device: DeviceId) -> Result<(), BootStatus> {
        let map = self.newest();
        let elsewhere = map.osds.values().any(|other| other.device == device && other.id != osd);
        let mut reserved = self.extra_draft.reserved.iter();
        if elsewhere || reserved.any(|(id, known)| *known == device && *id != osd) {
            return Err(BootStatus::OtherId);
        }
        let known = map.osds.get(&osd).map(|entry| entry.device);
        let owner = known.or_else(|| self.extra_draft.reserved.get(&osd).copied());
        if owner.is_some_and(|owner| owner != device) {
            return Err(BootStatus::OtherDevice);
        }
        Ok(())
    }

    /// Whether a new start of this OSD on this device would be taken now: asked before its device is touched.
    pub(crate) fn may_boot(&self, osd: OsdId, device: DeviceId) -> Result<(), BootStatus> {
        self.judge_device(osd, device)?;
        let current = self.newest().osds.get(&osd).map(|entry| entry.incarnation);
        if self.osds.is_connected(osd, current) { Err(BootStatus::Running) } else { Ok(()) }
    }
}

fn is_valid(osd: OsdId, incarnation: Incarnation, info: &BootInfo) -> bool {
    let reachable = |address: &std::net::SocketAddr| address.port() != 0 && !address.ip().is_unspecified();
    usize::try_from(osd.0).is_ok_and(|osd| osd < OSDS_MAX)
        && incarnation.0 != 0
        && !info.device.0.is_nil()
        && info.capacity > 0
        && (1..=SHARDS_MAX).contains(&info.addresses.len())
        && info.addresses.iter().all(reachable)
        && [&info.host, &info.rack, &info.device_class].into_iter().all(|name| check_name(name).is_ok())
}

/// What the map says of the OSD from now on. An operator's weight and `in` stay.
fn entry(map: &ClusterMap, osd: OsdId, incarnation: Incarnation, info: &BootInfo) -> Osd {
    let known = map.osds.get(&osd);
    let by_capacity = u32::try_from(info.capacity / WEIGHT_UNIT_BYTES).unwrap_or(u32::MAX).max(1);
    let weight =
        known.filter(|known| known.capacity == info.capacity).map_or(by_capacity, |known| known.weight);
    Osd {
        id: osd,
        device: info.device,
        incarnation,
        up: true,
        is_in: known.is_none_or(|known| known.is_in),
        addresses: info.addresses.clone(),
        weight,
        host: info.host.clone(),
        rack: info.rack.clone(),
        device_class: info.device_class.clone(),
        capacity: info.capacity,
    }
}
