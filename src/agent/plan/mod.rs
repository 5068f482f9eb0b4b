//! What to do next: a function from what the watches show, what the store shows, what looked wrong before,
//! and the time. One file per question. Must never read anything itself, and never be the only reason for a
//! write: every action reads again before it writes.

mod action;
mod attachments;
mod claims;
pub mod debounce;
mod decisions;
mod demand;
mod input;
mod mac;
mod pending_updates;
mod pool;
mod records;

pub use action::Action;
pub use demand::PodDemand;
pub use input::contains;
pub(crate) use input::{PlanInput, PlanOptions};
pub(crate) use pool::{count_pool, families_of};

use debounce::Debounce;

/// Everything that is to be done, the most urgent first. Nothing that depends on the watches before all of
/// them are synced.
pub fn plan(input: &PlanInput<'_>, debounce: &mut Debounce) -> Vec<Action> {
    let mut actions = Vec::new();
    claims::seed(input, &mut actions);
    pending_updates::send(input, &mut actions);
    if input.index.is_synced() {
        claims::grant(input, debounce, &mut actions);
        pool::refill_now(input, &mut actions);
        decisions::prepare(input, &mut actions);
        decisions::withdraw(input, debounce, &mut actions);
        pool::refill_later(input, debounce, &mut actions);
        pool::publish(input, debounce, &mut actions);
        attachments::attach_and_detach(input, debounce, &mut actions);
        records::end_and_release(input, debounce, &mut actions);
        mac::record(input, debounce, &mut actions);
        decisions::decide_running(input, &mut actions);
    }
    debounce.end_round();
    actions
}

#[cfg(test)]
mod tests;
