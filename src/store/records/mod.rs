//! The files of one network: a record per address, the index by attachment, bitmaps, the mark that all
//! claims are reserved, and what keeps them consistent. Must never be changed without the lock of the store.

pub(crate) mod bitmaps;
pub(crate) mod change;
pub(crate) mod import;
pub(crate) mod list;
pub(crate) mod reconcile;
pub(crate) mod record;
pub(crate) mod seed;
pub(crate) mod state;
pub(crate) mod verify;
