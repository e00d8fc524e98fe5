//! What members have promised each other, seen by looking into their stores. Some of it no client can notice while every
//! member is needed for everything: it shows only when a member is lost for good, and must hold before.

use super::cluster::Cluster;
use super::workload::Failure;
use loligo_config::id::{ObjectVersion, OpId, OsdId, PgId, SessionId};
use loligo_net::wire::op::OpReply;
use loligo_osd::pg::phase::PhaseKind;
use loligo_osd::store::api::{OpLookup, PgStatus};
use std::collections::BTreeMap;

impl Cluster {
    /// A write that was answered is durable on every member.
    pub(super) fn see_acks(&mut self, osd: u32) -> Result<(), Failure> {
        for reply in self.trace.take_acks() {
            let Some((pg, acting)) = self.applied_in(osd, &reply) else { continue };
            for member in acting {
                let durable = self.status(member, pg).map(|status| status.durable);
                if let Some(durable) = durable.filter(|durable| *durable < reply.version) {
                    let (op, version) = (reply.op, reply.version);
                    return Err(Failure::new(format!(
                        "an answered write is not durable everywhere: {op:?} of pg {pg} is {version}, and {member} has \
                         {durable}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// The PG that has applied the op with this version, and its acting set.
    fn applied_in(&self, osd: u32, reply: &OpReply) -> Option<(PgId, Vec<OsdId>)> {
        self.osds[osd as usize].running_shards().find_map(|shard| {
            let applied =
                |pg: PgId| shard.store().op_lookup(pg, reply.op) == OpLookup::Applied(reply.version);
            let pg = shard.pgs().find(|pg| pg.acting().first() == Some(&OsdId(osd)) && applied(pg.id()))?;
            Some((pg.id(), pg.acting().to_vec()))
        })
    }

    /// What a member that runs has of a PG.
    fn status(&self, member: OsdId, pg: PgId) -> Option<PgStatus> {
        self.osds.get(member.0 as usize)?.running_shards().find_map(|shard| shard.store().pg(pg))
    }

    /// When a primary has all answers of an interval, every member has stored its promise.
    pub(super) fn see_promises(&mut self, osd: u32) -> Result<(), Failure> {
        for shard in self.osds[osd as usize].running_shards() {
            let answered =
                |kind| matches!(kind, PhaseKind::Fetching | PhaseKind::Pushing | PhaseKind::Activating);
            for pg in shard.pgs().filter(|pg| answered(pg.phase().kind())) {
                let Some(since) = shard.map().and_then(|map| map.interval(pg.id())).map(|found| found.since)
                else {
                    continue;
                };
                for member in pg.acting() {
                    let promised = self.status(*member, pg.id()).map(|status| status.meta.promised);
                    if let Some(promised) = promised.filter(|promised| *promised < since) {
                        let pg = pg.id();
                        return Err(Failure::new(format!(
                            "a promise is not stored: {member} has answered for interval {since} of pg {pg}, and has \
                             stored {promised}"
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    /// Every op is in a PG's log once.
    pub(super) fn see_logs(&self) -> Result<(), Failure> {
        for osd in &self.osds {
            for shard in osd.running_shards() {
                for (pg, _) in shard.store().pgs() {
                    let Some(entries) = shard.store().entries_since(pg, ObjectVersion::NONE) else {
                        continue;
                    };
                    let mut seen: BTreeMap<OpId, ObjectVersion> = BTreeMap::new();
                    for entry in entries.filter(|entry| entry.op.session != SessionId(0)) {
                        if let Some(first) = seen.insert(entry.op, entry.version) {
                            let (machine, op, again) = (osd.machine(), entry.op, entry.version);
                            return Err(Failure::new(format!(
                                "an op was applied twice: {op:?} of pg {pg} on {machine} is {first} and {again}"
                            )));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
