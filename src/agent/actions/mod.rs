//! Performs one action at a time, each in the file of its name, after a live read or under the store's lock.
//! Every write to the API server is observed, and every write of a file goes through the [`Disk`], so that a
//! test can end the agent at each of them.
//!
//! Must never act on what the watches show alone, and never wait for a pod.

mod adopt;
mod attach;
mod cilium;
mod claim_answer;
mod context;
mod decide_running;
mod detach;
mod detach_sandbox;
mod end_attachment;
mod finish_adoption;
mod grant;
mod keep_mac;
mod live;
mod namespaces;
mod outcome;
mod prepare;
mod publish;
mod record_blocks;
mod record_mac;
mod record_unowned;
mod reevaluate;
mod refill;
mod release_record;
mod remove_barriers;
mod report_use;
mod restore_unowned;
mod seed;
mod send_update;
mod unowned;
mod unpublish;
mod waiting_pod;
mod withdraw;

pub(crate) use context::{ActionContext, open_store};
use context::{bound, interface, own_claimant, sandbox};
pub(crate) use namespaces::NamespaceReads;
pub(crate) use outcome::{ActionError, ActionOutcome, Performed};
use outcome::{done, needs_attention, not_needed, postponed};

use crate::agent::plan::Action;
use crate::store::Disk;

/// Errors: why it did not complete. What it has written by then is continued or undone when it is planned
/// again.
pub async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, action: &Action) -> Performed {
    let performed = match action {
        Action::SendUpdate { name, update } => send_update::perform(context, name, update).await,
        Action::Seed => seed::perform(context).await,
        Action::Prepare { pod, uid } => prepare::perform(context, pod, uid).await,
        Action::DecideRunning { pod, uid } => decide_running::perform(context, pod, uid).await,
        Action::Withdraw { uid } => withdraw::perform(context, uid).await,
        Action::Reevaluate { pod, uid, .. } => reevaluate::perform(context, pod, uid).await,
        Action::Grant { address, .. } => grant::perform(context, *address).await,
        Action::ReportUse { address } => report_use::perform(context, *address).await,
        Action::FinishAdoption { address } => finish_adoption::perform(context, *address).await,
        Action::Publish { key } => publish::perform(context, key).await,
        Action::Unpublish { address } => unpublish::perform(context, *address).await,
        Action::RemoveBarriers => remove_barriers::perform(context).await,
        Action::Attach { key, attachment } => attach::perform(context, key, attachment).await,
        Action::Detach { key, id } => detach::perform(context, key, id).await,
        Action::RecordMac { key } => record_mac::perform(context, key).await,
        Action::EndAttachment { record } => end_attachment::perform(context, record).await,
        Action::ReleaseRecord { record } => release_record::perform(context, record).await,
        Action::RecordUnowned { addresses } => record_unowned::perform(context, addresses),
        Action::Refill { demand } => refill::perform(context, demand).await,
        Action::RestoreUnowned { addresses } => restore_unowned::perform(context, addresses).await,
        Action::RecordBlocks { blocks } => record_blocks::perform(context, blocks),
    };
    match performed {
        Err(ActionError::Postponed(reason)) => Ok(ActionOutcome::Postponed(reason)),
        performed => performed,
    }
}
