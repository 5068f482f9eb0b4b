//! What a node remembers on behalf of the cluster: reservations, decisions, pending updates, snapshots, drafts.
//! Must never be taken for the truth where the API server can be asked.

pub(crate) mod decision;
pub(crate) mod detached_snapshot;
pub(crate) mod draft;
pub(crate) mod pending_update;
pub(crate) mod reservation;
pub(crate) mod unowned;
