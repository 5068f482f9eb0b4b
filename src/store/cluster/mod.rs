//! What a node remembers on behalf of the cluster: reservations, decisions, pending updates, snapshots,
//! drafts, the last known blocks. Must never be preferred to what the API server says.

pub(crate) mod decision;
pub(crate) mod detached_snapshot;
pub(crate) mod draft;
pub(crate) mod known_blocks;
pub(crate) mod pending_update;
pub(crate) mod reservation;
pub(crate) mod unowned;
