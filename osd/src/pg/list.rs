//! What a PG tells of an image as a whole: its objects here, and who watches one of them. Both are known without a
//! device read and change nothing.

use super::op::{Arrival, OpEnd};
use super::{Actions, Context, Payload, Pg, PgStore};
use loligo_config::id::{ObjectId, ObjectVersion};
use loligo_net::wire::list::{LIST_ENTRIES_MAX, LIST_HEAD_LEN, ObjectEntry, SESSION_LEN, list_head};
use loligo_net::wire::op::OpStatus;

/// Objects looked at for one page: those of the shard's other PGs are passed over, some 20 ns each.
const SCAN_MAX: usize = 8192;

impl Pg {
    /// The PG's objects of the image that `object` belongs to, from `object` on.
    pub(super) fn reply_list<S: PgStore>(&self, cx: &Context<'_, S>, arrival: &Arrival, out: &mut Actions) {
        let from = arrival.request.object;
        let mut count = 0;
        let next = self.scan(cx, from, &mut |_| count += 1);
        let Ok(mut data) = cx.pool.alloc(LIST_HEAD_LEN + count * ObjectEntry::LEN) else {
            return self.end_list(arrival, OpStatus::Busy, None, out);
        };
        let (head, rest) = data.split_at_mut(LIST_HEAD_LEN);
        head.copy_from_slice(&list_head(next));
        let mut places = rest.chunks_exact_mut(ObjectEntry::LEN);
        self.scan(cx, from, &mut |entry| {
            let place = places.next().expect("nothing changes between the two scans");
            place.copy_from_slice(&entry.to_bytes());
        });
        let payload = Payload { data: data.freeze(), checksums: None };
        self.end_list(arrival, OpStatus::Done, Some(payload), out);
    }

    /// Calls `each` for the objects of one page and returns where the next page begins, if there may be one.
    fn scan<S: PgStore>(
        &self,
        cx: &Context<'_, S>,
        from: ObjectId,
        each: &mut dyn FnMut(ObjectEntry),
    ) -> Option<u64> {
        let (mut looked, mut listed, mut next) = (0, 0, None);
        cx.store.objects(from, &mut |object, pg, version: ObjectVersion, blocks| {
            let is_same = (object.pool, object.kind, object.image) == (from.pool, from.kind, from.image);
            if !is_same {
                return false;
            }
            if looked == SCAN_MAX || listed == LIST_ENTRIES_MAX {
                next = Some(object.index);
                return false;
            }
            looked += 1;
            if pg == self.id {
                listed += 1;
                each(ObjectEntry { index: object.index, version, blocks });
            }
            true
        });
        next
    }

    /// The sessions that watch the object.
    pub(super) fn reply_watchers<S: PgStore>(
        &self,
        cx: &Context<'_, S>,
        arrival: &Arrival,
        out: &mut Actions,
    ) {
        let sessions = self.watches.sessions(arrival.request.object);
        if sessions.is_empty() {
            return self.end_list(arrival, OpStatus::Done, None, out);
        }
        let Ok(mut data) = cx.pool.alloc(sessions.len() * SESSION_LEN) else {
            return self.end_list(arrival, OpStatus::Busy, None, out);
        };
        for (place, session) in data.chunks_exact_mut(SESSION_LEN).zip(sessions) {
            place.copy_from_slice(&session.0.to_le_bytes());
        }
        let payload = Payload { data: data.freeze(), checksums: None };
        self.end_list(arrival, OpStatus::Done, Some(payload), out);
    }

    fn end_list(&self, arrival: &Arrival, status: OpStatus, payload: Option<Payload>, out: &mut Actions) {
        let end = OpEnd { status, payload, ..OpEnd::DONE };
        self.reply(&arrival.request, Some(arrival.from), arrival.arrived, end, out);
    }
}
