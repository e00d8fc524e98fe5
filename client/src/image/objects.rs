//! The data objects of an image that exist. The PGs of its pool list them, so that what was never written costs
//! nothing, however large the image is.

use super::header::data_object;
use super::task::{TaskContext, for_each};
use crate::error::{ImageError, IoError};
use crate::objecter::ObjectOp;
use loligo_config::id::{ImageId, PoolId};
use loligo_net::wire::list::{ObjectEntry, read_list};
use loligo_net::wire::op::OpKind;

/// PGs that are worked on at once,
pub(super) const PGS_AT_ONCE: usize = 8;
/// and objects of each.
pub(super) const OBJECTS_AT_ONCE: usize = 8;

/// Which image's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Objects<'a> {
    pub(super) context: &'a TaskContext,
    /// Where its data is.
    pub(super) pool: PoolId,
    pub(super) image: ImageId,
    /// The first object that counts.
    pub(super) first: u64,
}

/// Some objects of one PG.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) entries: Vec<ObjectEntry>,
    /// Where the next page begins; `None`: this is the last.
    pub(super) next: Option<u64>,
}

/// How many there are, and what they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Total {
    pub(super) objects: u64,
    pub(super) blocks: u64,
}

impl Objects<'_> {
    /// PGs to ask.
    pub(super) async fn pgs(&self) -> Result<u32, ImageError> {
        self.context.pg_count(self.pool).await
    }

    /// One page of one PG, from an object on.
    pub(super) async fn page(&self, pg: u32, from: u64) -> Result<Page, ImageError> {
        let object = data_object(self.pool, self.image, from);
        let outcome = self.context.op(ObjectOp::new(object, OpKind::List, 0, 0).at_pg(pg)).await?;
        let read = read_list(outcome.data.as_deref().unwrap_or_default(), from);
        // The objecter has looked at it before.
        let (next, entries) = read.ok_or(ImageError::Io(IoError::Invalid))?;
        Ok(Page { entries, next })
    }

    async fn count_pg(&self, pg: u32) -> Result<Total, ImageError> {
        let mut total = Total::default();
        let mut from = Some(self.first);
        while let Some(at) = from {
            let page = self.page(pg, at).await?;
            total.objects += page.entries.len() as u64;
            total.blocks += page.entries.iter().map(|entry| u64::from(entry.blocks)).sum::<u64>();
            from = page.next;
        }
        Ok(total)
    }

    /// Counts them; `asked` is called after every PG with how many have answered, and of how many.
    pub(super) async fn count(&self, mut asked: impl FnMut(u64, u64)) -> Result<Total, ImageError> {
        let pgs = u64::from(self.pgs().await?);
        let (mut total, mut done, mut outcome) = (Total::default(), 0, Ok(()));
        let count = |pg| self.count_pg(u32::try_from(pg).expect("PGs are numbered with 32 bits"));
        for_each(0..pgs, PGS_AT_ONCE, count, |result| {
            done += 1;
            asked(done, pgs);
            match result {
                Ok(part) => {
                    total.objects += part.objects;
                    total.blocks += part.blocks;
                }
                Err(error) => outcome = Err(error),
            }
        })
        .await;
        outcome.map(|()| total)
    }
}
