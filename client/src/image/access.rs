//! Reading and changing headers and directories: whole documents, by compare-and-set.

use super::directory::{Directory, directory_object};
use super::document::{self, Document, DocumentError, TooLarge};
use super::header::{Features, ImageHeader, ImageState, header_object};
use super::task::TaskContext;
use crate::error::{ImageError, IoError};
use crate::objecter::ObjectOp;
use loligo_config::id::{ImageId, ObjectId, ObjectVersion, PoolId};
use loligo_config::units::BLOCK_SIZE;
use loligo_net::wire::op::OpKind;

/// Tries of one compare-and-set. Each failure means that another client succeeded, so with fewer clients than this at
/// work on one document nobody ever gives up.
const CONFLICTS_MAX: u32 = 64;

/// The name of one image.
#[derive(Clone, Debug)]
pub(crate) struct ImageName {
    pub(crate) pool: String,
    pub(crate) image: String,
}

impl ImageName {
    pub(crate) fn not_found(&self) -> ImageError {
        ImageError::NotFound { pool: self.pool.clone(), image: self.image.clone() }
    }

    pub(crate) fn exists(&self) -> ImageError {
        ImageError::Exists { pool: self.pool.clone(), image: self.image.clone() }
    }

    pub(crate) fn removing(&self) -> ImageError {
        ImageError::Removing { pool: self.pool.clone(), image: self.image.clone() }
    }
}

fn corrupt(object: ObjectId, source: DocumentError) -> ImageError {
    ImageError::Corrupt { object: object.to_string(), source }
}

impl TaskContext {
    async fn read(&self, object: ObjectId, len: usize) -> Result<(Vec<u8>, ObjectVersion), IoError> {
        let len = u32::try_from(len).map_err(|_| IoError::Invalid)?;
        let outcome = self.op(ObjectOp::new(object, OpKind::Read, 0, len)).await?;
        Ok((outcome.data.as_deref().unwrap_or_default().to_vec(), outcome.version))
    }

    /// The document in an object and the object's version; `None`: there is no such object.
    pub(crate) async fn read_document<D: Document>(
        &self,
        object: ObjectId,
    ) -> Result<Option<(D, ObjectVersion)>, ImageError> {
        for _ in 0..CONFLICTS_MAX {
            let (head, version) = self.read(object, BLOCK_SIZE as usize).await?;
            if !version.is_some() {
                return Ok(None);
            }
            let total = document::total_len(&head, D::KIND).map_err(|error| corrupt(object, error))?;
            let bytes = if total <= head.len() {
                head
            } else {
                let (bytes, again) = self.read(object, total.next_multiple_of(BLOCK_SIZE as usize)).await?;
                if again != version {
                    continue;
                }
                bytes
            };
            let decoded = document::decode(&bytes).map_err(|error| corrupt(object, error))?;
            return Ok(Some((decoded, version)));
        }
        Err(ImageError::Busy { what: "the image or directory" })
    }

    /// Replaces a document if its object still has this version (`NONE`: if there is none).
    pub(crate) async fn write_document<D: Document>(
        &self,
        object: ObjectId,
        document: &D,
        version: ObjectVersion,
    ) -> Result<ObjectVersion, WriteError> {
        let bytes = document::encode(document)?;
        let data = self.buffer(&bytes).await;
        let len = u32::try_from(bytes.len()).map_err(|_| WriteError::TooLarge)?;
        let mut op = ObjectOp::new(object, OpKind::Write, 0, len).guarded(version);
        op.data = Some(data);
        Ok(self.op(op).await?.version)
    }

    /// Changes the directory. `change` says whether there is something to write; it is called again when another
    /// client was faster or an answer was lost, so it must find its own effect and be content.
    pub(crate) async fn change_directory(
        &self,
        pool: PoolId,
        mut change: impl FnMut(&mut Directory) -> Result<bool, ImageError>,
    ) -> Result<(), ImageError> {
        let object = directory_object(pool);
        for _ in 0..CONFLICTS_MAX {
            let (mut directory, version) = self.directory_at(pool).await?;
            if !change(&mut directory)? {
                return Ok(());
            }
            match self.write_document(object, &directory, version).await {
                Ok(_) => return Ok(()),
                Err(WriteError::Io(IoError::Conflict | IoError::MaybeApplied)) => {}
                Err(WriteError::Io(error)) => return Err(error.into()),
                Err(WriteError::TooLarge) => return Err(ImageError::DirectoryFull),
            }
        }
        Err(ImageError::Busy { what: "the directory of the pool" })
    }

    async fn directory_at(&self, pool: PoolId) -> Result<(Directory, ObjectVersion), ImageError> {
        let found = self.read_document(directory_object(pool)).await?;
        Ok(found.unwrap_or((Directory::default(), ObjectVersion::NONE)))
    }

    /// The pool's directory.
    pub(crate) async fn directory(&self, pool: PoolId) -> Result<Directory, ImageError> {
        Ok(self.directory_at(pool).await?.0)
    }

    /// An image's header; `None`: there is none.
    pub(crate) async fn header(
        &self,
        pool: PoolId,
        image: ImageId,
    ) -> Result<Option<(ImageHeader, ObjectVersion)>, ImageError> {
        self.read_document(header_object(pool, image)).await
    }

    /// Changes a header; as `change_directory`. Returns the header as it is afterwards, `None` when there is none.
    pub(crate) async fn change_header(
        &self,
        pool: PoolId,
        image: ImageId,
        mut change: impl FnMut(&mut ImageHeader) -> Result<bool, ImageError>,
    ) -> Result<Option<ImageHeader>, ImageError> {
        for _ in 0..CONFLICTS_MAX {
            let Some((mut header, version)) = self.header(pool, image).await? else { return Ok(None) };
            if !change(&mut header)? {
                return Ok(Some(header));
            }
            header.modified = self.unix_seconds();
            match self.write_document(header_object(pool, image), &header, version).await {
                Ok(_) => return Ok(Some(header)),
                Err(WriteError::Io(IoError::Conflict | IoError::MaybeApplied)) => {}
                Err(WriteError::Io(error)) => return Err(error.into()),
                Err(WriteError::TooLarge) => return Err(ImageError::Io(IoError::Invalid)),
            }
        }
        Err(ImageError::Busy { what: "the image's header" })
    }

    /// Finds an image that is not being removed, and its header with the directory's name.
    pub(crate) async fn find(&self, name: &ImageName) -> Result<Found, ImageError> {
        let pool = self.pool(&name.pool).await?;
        let directory = self.directory(pool).await?;
        let entry = directory.images.get(&name.image).ok_or_else(|| name.not_found())?;
        if entry.removing {
            return Err(name.removing());
        }
        let Some((mut header, version)) = self.header(pool, entry.id).await? else {
            // Removed between the two reads.
            return Err(name.not_found());
        };
        if header.state == ImageState::Removing {
            return Err(name.removing());
        }
        let unknown = header.features.0 & !Features::SUPPORTED.0;
        if unknown != 0 {
            return Err(ImageError::Unsupported { features: unknown });
        }
        header.name.clone_from(&name.image);
        Ok(Found { pool, header, version })
    }
}

/// An image that was found.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) pool: PoolId,
    pub(crate) header: ImageHeader,
    pub(crate) version: ObjectVersion,
}

impl Found {
    /// Where its data is.
    pub(crate) fn data_pool(&self) -> PoolId {
        self.header.data_pool.unwrap_or(self.pool)
    }
}

/// Why a document was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WriteError {
    #[error(transparent)]
    Io(#[from] IoError),
    #[error("the document is too large")]
    TooLarge,
}

impl From<TooLarge> for WriteError {
    fn from(_: TooLarge) -> Self {
        Self::TooLarge
    }
}
