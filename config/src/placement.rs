//! Object → PG → ordered OSD set.
