//! Which pending updates to send. Must never look at anything itself.

use super::action::Action;
use super::input::PlanInput;
use crate::store::{PendingUpdate, Told};

/// Notes of sandboxes that took another's place come first: what they say keeps an ended note from letting
/// go.
pub(super) fn send(input: &PlanInput<'_>, actions: &mut Vec<Action>) {
    let mut pending_updates: Vec<&(String, PendingUpdate)> = input.store.pending_updates.iter().collect();
    pending_updates.sort_by_key(|(_, note)| note.what != Told::Attached);
    actions
        .extend(pending_updates.into_iter().cloned().map(|(name, note)| Action::SendUpdate { name, note }));
}
