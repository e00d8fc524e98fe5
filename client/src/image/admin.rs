//! What is done to images as a whole. Every operation is safe to break off at any point; `docs/images.md` says what is
//! left then, and what finishes it.

use super::access::{Found, ImageName, WriteError};
use super::directory::DirectoryEntry;
use super::header::{
    CreateOptions, ImageHeader, ImageState, check_name, check_order, check_size, data_object, header_object,
    objects_of,
};
use super::task::{TaskContext, for_each};
use crate::error::{ImageError, IoError};
use crate::event::{AdminReply, ListEntry, Usage};
use crate::objecter::{ObjectOp, extent_entries};
use loligo_config::id::{ImageId, ObjectId, ObjectVersion, PoolId};
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::op::OpKind;
use loligo_reactor::env::Ticket;

/// Objects that one operation works on at once.
pub(super) const PARALLEL: usize = 32;
/// Objects between two reports of progress.
pub(super) const REPORT_EVERY: u64 = 64;
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
    check_name(&name.image)?;
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
pub(crate) async fn remove(
    context: TaskContext,
    name: ImageName,
    ticket: Ticket,
) -> Result<AdminReply, ImageError> {
    let pool = context.pool(&name.pool).await?;
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

async fn remove_data(
    context: &TaskContext,
    pool: PoolId,
    header: &ImageHeader,
    ticket: Ticket,
) -> Result<(), ImageError> {
    let end = header.trim.map_or(header.size, |trim| trim.end.max(header.size));
    let total = objects_of(end, header.order);
    let data_pool = header.data_pool.unwrap_or(pool);
    let mut outcome = Ok(());
    let mut done = 0;
    let remove_one = |index| {
        let object = data_object(data_pool, header.id, index);
        async move {
            if probe(context, object).await?.is_some() {
                context.op(ObjectOp::new(object, OpKind::Remove, 0, 0)).await?;
            }
            Ok::<(), IoError>(())
        }
    };
    for_each(0..total, PARALLEL, remove_one, |result| {
        done += 1;
        if done % REPORT_EVERY == 0 || done == total {
            context.report(ticket, done, total);
        }
        if outcome.is_ok() {
            outcome = result;
        }
    })
    .await;
    Ok(outcome?)
}

/// One write of the directory takes the old name out and puts the new one in; the name in the header, which nobody
/// relies on, follows.
pub(crate) async fn rename(
    context: TaskContext,
    from: ImageName,
    to: String,
) -> Result<AdminReply, ImageError> {
    check_name(&to)?;
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

/// What an image takes: asked of every object, from the index alone.
pub(crate) async fn usage(
    context: TaskContext,
    name: ImageName,
    ticket: Ticket,
) -> Result<AdminReply, ImageError> {
    let found = context.find(&name).await?;
    let Found { ref header, .. } = found;
    let data_pool = found.data_pool();
    let total = header.objects();
    let mut usage = Usage { provisioned: header.size, used: 0 };
    let mut outcome = Ok(());
    let mut done = 0;
    let len = u32::try_from(header.object_size()).expect("an object is at most 32 MiB");
    let measure_one = |index| {
        let op = ObjectOp::new(data_object(data_pool, header.id, index), OpKind::Extents, 0, len);
        let context = &context;
        async move {
            let extents = context.op(op).await?.data;
            let blocks =
                extent_entries(extents.as_deref().unwrap_or_default()).map(|(_, count)| u64::from(count));
            Ok::<u64, IoError>(blocks.sum::<u64>() * u64::from(BLOCK_SIZE))
        }
    };
    for_each(0..total, PARALLEL, measure_one, |result| {
        done += 1;
        if done % REPORT_EVERY == 0 || done == total {
            context.report(ticket, done, total);
        }
        match result {
            Ok(bytes) => usage.used += bytes,
            Err(error) => outcome = Err(error),
        }
    })
    .await;
    outcome?;
    Ok(AdminReply::Usage(usage))
}
