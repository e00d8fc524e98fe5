//! Resizing: "grow after shrink reads zero", whoever breaks off where.
//!
//! A shrink writes the header first: the new size, and a `trim` that says up to where there may be data. Then the data
//! beyond the size is freed, then the trim is taken out. An image with a trim does not grow: whoever wants to
//! resize it finishes the trim first, under its own name. Data first and the header last would be wrong: an opener that
//! still sees the old size may write again behind the freeing.
//!
//! Two clients may trim at once, the second having taken over from the first that it believed dead. The first must not
//! free what was written after the second has ended and the image has grown. So an object is freed in three steps:
//! its version is read, then the header is read and must still carry the own trim, then the object is freed under
//! the condition that it still has that version. A version read before the header showed the own trim is from before
//! any growth; anything written since has another one.

use super::access::{Found, ImageName};
use super::admin::{PARALLEL, probe};
use super::header::{ImageHeader, ImageState, Trim, check_size, data_object};
use super::objects::Objects;
use super::task::{TaskContext, for_each};
use crate::error::{ImageError, IoError};
use crate::event::AdminReply;
use crate::objecter::ObjectOp;
use loligo_config::id::{ObjectVersion, PoolId};
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::op::OpKind;
use loligo_reactor::env::Ticket;
use std::cell::{Cell, RefCell};

/// Gives the image another size.
pub(crate) async fn resize(
    context: TaskContext,
    name: ImageName,
    size: u64,
    ticket: Ticket,
) -> Result<AdminReply, ImageError> {
    let found = context.find(&name).await?;
    check_size(size, found.header.order)?;
    let attempt = context.next_number();
    let owner = context.session();
    let begin = |header: &mut ImageHeader| {
        if header.state == ImageState::Removing {
            return Err(name.removing());
        }
        if header.trim.is_some_and(|trim| (trim.owner, trim.attempt) == (owner, attempt)) {
            return Ok(false);
        }
        if header.trim.is_none() && size >= header.size {
            let grows = size > header.size;
            header.size = size;
            return Ok(grows);
        }
        let end = header.trim.map_or(header.size, |trim| trim.end.max(header.size));
        header.size = header.size.min(size);
        header.trim = Some(Trim { end, owner, attempt });
        Ok(true)
    };
    let changed = context.change_header(found.pool, found.header.id, begin).await?;
    let header = changed.ok_or_else(|| name.not_found())?;
    let Some(trim) = header.trim else { return Ok(AdminReply::Resized) };
    let trimming = Found { header, ..found };
    Trimming { context: &context, name: &name, found: &trimming, trim, ticket }.run().await?;
    let finish = |header: &mut ImageHeader| {
        if header.trim.is_none() && header.size == size {
            // The answer to an earlier try was lost.
            return Ok(false);
        }
        if header.trim != Some(trim) {
            return Err(ImageError::TakenOver);
        }
        header.trim = None;
        header.size = size;
        Ok(true)
    };
    context
        .change_header(trimming.pool, trimming.header.id, finish)
        .await?
        .ok_or_else(|| name.not_found())?;
    Ok(AdminReply::Resized)
}

struct Trimming<'a> {
    context: &'a TaskContext,
    name: &'a ImageName,
    found: &'a Found,
    trim: Trim,
    ticket: Ticket,
}

impl Trimming<'_> {
    fn data_pool(&self) -> PoolId {
        self.found.data_pool()
    }

    async fn run(&self) -> Result<(), ImageError> {
        let header = &self.found.header;
        let first = header.size >> header.order;
        let objects = Objects { context: self.context, pool: self.data_pool(), image: header.id, first };
        let total = objects.count(|_, _| {}).await?.objects;
        let done = Cell::new(0);
        let pgs = u64::from(objects.pgs().await?);
        let mut outcome = Ok(());
        let trim = |pg| {
            self.trim_pg(objects, u32::try_from(pg).expect("PGs have 32 bits"), |freed| {
                done.set(done.get() + freed);
                self.context.report(self.ticket, done.get().min(total), total);
            })
        };
        // One PG after the other: every page of objects needs a look at the header.
        for_each(0..pgs, 1, trim, |result| {
            if outcome.is_ok() {
                outcome = result;
            }
        })
        .await;
        outcome
    }

    /// Frees what one PG has beyond the new size. What is not listed was not there, and comes back only by a writer
    /// who has not heard of the new size (`docs/images.md`, known limit).
    async fn trim_pg(&self, objects: Objects<'_>, pg: u32, freed: impl Fn(u64)) -> Result<(), ImageError> {
        let mut from = Some(objects.first);
        while let Some(at) = from {
            let page = objects.page(pg, at).await?;
            from = page.next;
            let count = page.entries.len() as u64;
            self.trim_objects(page.entries.iter().map(|entry| (entry.index, entry.version)).collect())
                .await?;
            freed(count);
        }
        Ok(())
    }

    /// Frees objects found with these versions, again as long as one was changed between the look and the freeing.
    async fn trim_objects(&self, mut found: Vec<(u64, ObjectVersion)>) -> Result<(), ImageError> {
        while !found.is_empty() {
            self.check_mine().await?;
            let left = self.free_all(&found).await?;
            found = self.probe_all(&left).await?;
        }
        Ok(())
    }

    async fn probe_all(&self, indices: &[u64]) -> Result<Vec<(u64, ObjectVersion)>, ImageError> {
        let mut found = Vec::new();
        let mut outcome = Ok(());
        let look = |at: u64| {
            let index = indices[at as usize];
            let object = data_object(self.data_pool(), self.found.header.id, index);
            async move { (index, probe(self.context, object).await) }
        };
        for_each(0..indices.len() as u64, PARALLEL, look, |(index, result)| match result {
            Ok(version) if version.is_some() => found.push((index, version)),
            Ok(_) => {}
            Err(error) => outcome = Err(error),
        })
        .await;
        outcome?;
        Ok(found)
    }

    /// The header still carries this trim: what was read of the objects before is from before any growth.
    async fn check_mine(&self) -> Result<(), ImageError> {
        let header = self.context.header(self.found.pool, self.found.header.id).await?;
        let (header, _) = header.ok_or_else(|| self.name.not_found())?;
        if header.state == ImageState::Removing {
            return Err(self.name.removing());
        }
        if header.trim == Some(self.trim) { Ok(()) } else { Err(ImageError::TakenOver) }
    }

    /// Returns the objects that were changed meanwhile.
    async fn free_all(&self, found: &[(u64, ObjectVersion)]) -> Result<Vec<u64>, ImageError> {
        let again = RefCell::new(Vec::new());
        let mut outcome = Ok(());
        let free = |at: u64| {
            let (index, version) = found[at as usize];
            async move { (index, self.free(index, version).await) }
        };
        for_each(0..found.len() as u64, PARALLEL, free, |(index, result)| match result {
            Ok(_) => {}
            Err(IoError::Conflict | IoError::MaybeApplied) => again.borrow_mut().push(index),
            Err(error) => outcome = Err(error),
        })
        .await;
        outcome?;
        Ok(again.into_inner())
    }

    /// The object that the new end lies in keeps its first part, exact to the byte. Parts of blocks are written and
    /// whole blocks freed, which are two ops.
    async fn free(&self, index: u64, version: ObjectVersion) -> Result<(), IoError> {
        let header = &self.found.header;
        let object = data_object(self.data_pool(), header.id, index);
        let kept = header.size % header.object_size();
        if index != header.size >> header.order || kept == 0 {
            self.context.op(ObjectOp::new(object, OpKind::Remove, 0, 0).guarded(version)).await?;
            return Ok(());
        }
        let offset = |at: u64| u32::try_from(at).expect("an object is at most 32 MiB");
        let whole = kept.next_multiple_of(u64::from(BLOCK_SIZE));
        let mut version = version;
        for (from, to) in [(kept, whole), (whole, header.object_size())] {
            if from < to {
                let op = ObjectOp::new(object, OpKind::WriteZeroes, offset(from), offset(to - from));
                version = self.context.op(op.guarded(version)).await?.version;
            }
        }
        Ok(())
    }
}
