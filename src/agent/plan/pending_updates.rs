//! Which pending updates to send. Must never read anything itself.

use super::action::Action;
use super::input::PlanInput;
use crate::store::{PendingUpdate, PendingUpdateKind};

/// Updates of sandboxes that took the place of another come first: once they are sent, the update of the old
/// sandbox detaches nothing.
pub(super) fn send(input: &PlanInput<'_>, actions: &mut Vec<Action>) {
    let mut updates: Vec<&(String, PendingUpdate)> = input.store.pending_updates.iter().collect();
    updates.sort_by_key(|(_, update)| update.kind != PendingUpdateKind::Attached);
    actions.extend(updates.into_iter().cloned().map(|(name, update)| Action::SendUpdate { name, update }));
}
