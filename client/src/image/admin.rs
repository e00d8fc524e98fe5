//! What is done to images as a whole. Every operation is safe to break off at any point; `docs/images.md` says what is
//! left then, and what finishes it.

use super::access::{ImageName, WriteError};
use super::directory::DirectoryEntry;
use super::header::{
    CreateOptions, ImageHeader, ImageState, check_new_name, check_order, check_size, data_object,
    header_object,
};
use super::objects::{OBJECTS_AT_ONCE, Objects, PGS_AT_ONCE};
use super::task::{TaskContext, for_each};
use crate::error::{ImageError, IoError};
use crate::event::{AdminReply, ListEntry, Usage};
use crate::objecter::ObjectOp;
use loligo_config::id::{ImageId, ObjectId, ObjectVersion, PoolId};
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::list::read_sessions;
use loligo_net::wire::op::OpKind;
use loligo_reactor::env::Ticket;
use std::cell::Cell;

/// Objects that one operation works on at once.
pub(super) const PARALLEL: usize = 32;
/// Objects between two reports of progress.
const REPORT_EVERY: u64 = 64;
/// Tries to find an unused id; the first is as good as certain.
const ID_TRIES: u32 = 8;

/// The object's version, `NONE` if it does not exist: answered from the index, without touching a disk.
pub(super) async fn probe(context: &TaskContext, object: ObjectId) -> Result<ObjectVersion, IoError> {
    let outcome = context.op(ObjectOp::new(object, OpKind::Extents, 0, BLOCK_SIZE)).await?;
    Ok(outcome.version)
}

/// Header first, then the name: a name never leads nowhere. Broken off in between, a header of one block is left that
/// nobody finds.
pub(crate) async fn create(
    context: TaskContext,
    name: ImageName,
    options: CreateOptions,
) -> Result<AdminReply, ImageError> {
    check_new_name(&name.image)?;
    check_order(options.order)?;
    check_size(options.size, options.order)?;
    let pool = context.pool(&name.pool).await?;
    check_free(context.directory(pool).await?.images.get(&name.image), &name)?;
    let (header, version) = create_header(&context, pool, &name, options).await?;
    let entered = context
        .change_directory(pool, |directory| {
            let entry = directory.images.get(&name.image);
            if entry.is_some_and(|entry| entry.id == header.id) {
                return Ok(false);
            }
            check_free(entry, &name)?;
            directory.images.insert(name.image.clone(), DirectoryEntry { id: header.id, removing: false });
            Ok(true)
        })
        .await;
    if let Err(error) = entered {
        // The name went to somebody else, so the header is of no use. Whether this works changes nothing.
        let remove = ObjectOp::new(header_object(pool, header.id), OpKind::Remove, 0, 0).guarded(version);
        let _ = context.op(remove).await;
        return Err(error);
    }
    Ok(AdminReply::Created(Box::new(header)))
}

fn check_free(entry: Option<&DirectoryEntry>, name: &ImageName) -> Result<(), ImageError> {
    match entry {
        None => Ok(()),
        Some(entry) if entry.removing => Err(name.removing()),
        Some(_) => Err(name.exists()),
    }
}

async fn create_header(
    context: &TaskContext,
    pool: PoolId,
    name: &ImageName,
    options: CreateOptions,
) -> Result<(ImageHeader, ObjectVersion), ImageError> {
    for _ in 0..ID_TRIES {
        let id = context.new_image_id()?;
        let header = ImageHeader::new(&name.image, id, options, context.unix_seconds());
        match context.write_document(header_object(pool, id), &header, ObjectVersion::NONE).await {
            Ok(version) => return Ok((header, version)),
            Err(WriteError::Io(IoError::Conflict | IoError::MaybeApplied)) => {}
            Err(WriteError::Io(error)) => return Err(error.into()),
            Err(WriteError::TooLarge) => return Err(ImageError::Io(IoError::Invalid)),
        }
    }
    Err(ImageError::Busy { what: "the new image's header" })
}

/// The name is marked first, so that nobody opens the image any more; then the header, which tells its openers; then
/// data, header and name go. Broken off anywhere, the marked name is left, and another removal goes on.
///
/// An image that another session has open is left alone, unless `force` is set.
pub(crate) async fn remove(
    context: TaskContext,
    name: ImageName,
    force: bool,
    ticket: Ticket,
) -> Result<AdminReply, ImageError> {
    let pool = context.pool(&name.pool).await?;
    if !force {
        check_unwatched(&context, pool, &name).await?;
    }
    let id = mark_removing(&context, pool, &name).await?;
    let marked = context
        .change_header(pool, id, |header| {
            let is_new = header.state != ImageState::Removing;
            header.state = ImageState::Removing;
            Ok(is_new)
        })
        .await?;
    if let Some(header) = marked {
        remove_data(&context, pool, &header, ticket).await?;
        context.op(ObjectOp::new(header_object(pool, id), OpKind::Remove, 0, 0)).await?;
    }
    context
        .change_directory(pool, |directory| {
            let is_there = directory.images.get(&name.image).is_some_and(|entry| entry.id == id);
            if is_there {
                directory.images.remove(&name.image);
            }
            Ok(is_there)
        })
        .await?;
    Ok(AdminReply::Removed)
}

async fn mark_removing(context: &TaskContext, pool: PoolId, name: &ImageName) -> Result<ImageId, ImageError> {
    let mut id = None;
    context
        .change_directory(pool, |directory| {
            let entry = directory.images.get_mut(&name.image).ok_or_else(|| name.not_found())?;
            if *id.get_or_insert(entry.id) != entry.id {
                return Err(name.not_found());
            }
            Ok(!std::mem::replace(&mut entry.removing, true))
        })
        .await?;
    id.ok_or_else(|| name.not_found())
}

/// Refuses when somebody else has the image open. One whose removal has begun is closed for everybody already.
async fn check_unwatched(context: &TaskContext, pool: PoolId, name: &ImageName) -> Result<(), ImageError> {
    let directory = context.directory(pool).await?;
    let Some(entry) = directory.images.get(&name.image).filter(|entry| !entry.removing) else {
        return Ok(());
    };
    let op = ObjectOp::new(header_object(pool, entry.id), OpKind::Watchers, 0, 0);
    let data = context.op(op).await?.data;
    let mut sessions = read_sessions(data.as_deref().unwrap_or_default()).unwrap_or_default();
    sessions.retain(|session| *session != context.session());
    if sessions.is_empty() {
        return Ok(());
    }
    Err(ImageError::InUse { pool: name.pool.clone(), image: name.image.clone(), sessions })
}

async fn remove_data(
    context: &TaskContext,
    pool: PoolId,
    header: &ImageHeader,
    ticket: Ticket,
) -> Result<(), ImageError> {
    let data_pool = header.data_pool.unwrap_or(pool);
    let objects = Objects { context, pool: data_pool, image: header.id, first: 0 };
    let total = objects.count(|_, _| {}).await?.objects;
    let pgs = u64::from(objects.pgs().await?);
    let (done, mut outcome) = (Cell::new(0), Ok(()));
    let removed = || {
        done.set(done.get() + 1);
        if done.get() % REPORT_EVERY == 0 || done.get() == total {
            context.report(ticket, done.get(), total);
        }
    };
    let empty = |pg| remove_from_pg(objects, u32::try_from(pg).expect("PGs have 32 bits"), &removed);
    for_each(0..pgs, PGS_AT_ONCE, empty, |result| {
        if outcome.is_ok() {
            outcome = result;
        }
    })
    .await;
    outcome
}

/// Removes what one PG has of the image.
async fn remove_from_pg(objects: Objects<'_>, pg: u32, removed: &impl Fn()) -> Result<(), ImageError> {
    let mut from = Some(objects.first);
    while let Some(at) = from {
        let page = objects.page(pg, at).await?;
        from = page.next;
        let mut outcome = Ok(());
        let remove_one = |at: u64| {
            let object = data_object(objects.pool, objects.image, page.entries[at as usize].index);
            objects.context.op(ObjectOp::new(object, OpKind::Remove, 0, 0))
        };
        for_each(0..page.entries.len() as u64, OBJECTS_AT_ONCE, remove_one, |result| {
            removed();
            if outcome.is_ok() {
                outcome = result.map(drop);
            }
        })
        .await;
        outcome?;
    }
    Ok(())
}

/// One write of the directory takes the old name out and puts the new one in; the name in the header, which nobody
/// relies on, follows.
pub(crate) async fn rename(
    context: TaskContext,
    from: ImageName,
    to: String,
) -> Result<AdminReply, ImageError> {
    check_new_name(&to)?;
    let new_name = ImageName { pool: from.pool.clone(), image: to };
    let pool = context.pool(&from.pool).await?;
    let mut id = None;
    context
        .change_directory(pool, |directory| {
            let target = directory.images.get(&new_name.image).copied();
            if id.is_some() && target.map(|entry| entry.id) == id {
                return Ok(false);
            }
            let entry = *directory.images.get(&from.image).ok_or_else(|| from.not_found())?;
            if entry.removing {
                return Err(from.removing());
            }
            check_free(target.as_ref(), &new_name)?;
            id = Some(entry.id);
            directory.images.remove(&from.image);
            directory.images.insert(new_name.image.clone(), entry);
            Ok(true)
        })
        .await?;
    if let Some(id) = id {
        context
            .change_header(pool, id, |header| {
                let differs = header.name != new_name.image;
                header.name.clone_from(&new_name.image);
                Ok(differs)
            })
            .await?;
    }
    Ok(AdminReply::Renamed)
}

/// The images of a pool.
pub(crate) async fn list(context: TaskContext, pool: String) -> Result<AdminReply, ImageError> {
    let pool = context.pool(&pool).await?;
    let images = context.directory(pool).await?.images;
    let entry =
        |(name, entry): (String, DirectoryEntry)| ListEntry { name, id: entry.id, removing: entry.removing };
    Ok(AdminReply::List(images.into_iter().map(entry).collect()))
}

/// An image's header.
pub(crate) async fn info(context: TaskContext, name: ImageName) -> Result<AdminReply, ImageError> {
    Ok(AdminReply::Info(Box::new(context.find(&name).await?.header)))
}

/// What an image takes: counted by the PGs, from their indices alone. Progress counts PGs.
pub(crate) async fn usage(
    context: TaskContext,
    name: ImageName,
    ticket: Ticket,
) -> Result<AdminReply, ImageError> {
    let found = context.find(&name).await?;
    let objects = Objects { context: &context, pool: found.data_pool(), image: found.header.id, first: 0 };
    let total = objects.count(|done, pgs| context.report(ticket, done, pgs)).await?;
    let used = total.blocks.saturating_mul(u64::from(BLOCK_SIZE));
    Ok(AdminReply::Usage(Usage { provisioned: found.header.size, used }))
}
