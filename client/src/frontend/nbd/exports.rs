//! Which images a server has, under which names.

/// Which images are served. An export's name is `pool/image`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exports {
    /// These. When it is exactly one, the empty name means it too.
    Only(Vec<ExportName>),
    /// Every image of these pools.
    Pools(Vec<String>),
}

/// An image by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExportName {
    /// Its pool.
    pub pool: String,
    /// The image.
    pub image: String,
}

impl ExportName {
    pub(super) fn parse(name: &str) -> Option<Self> {
        let (pool, image) = name.split_once('/')?;
        Some(Self { pool: pool.to_owned(), image: image.to_owned() })
    }
}

impl std::fmt::Display for ExportName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.pool, self.image)
    }
}

impl Exports {
    pub(super) fn find(&self, name: &str) -> Option<ExportName> {
        match self {
            Self::Only(names) => match names.as_slice() {
                [only] if name.is_empty() => Some(only.clone()),
                names => names.iter().find(|export| export.to_string() == name).cloned(),
            },
            Self::Pools(pools) => ExportName::parse(name).filter(|export| pools.contains(&export.pool)),
        }
    }
}
