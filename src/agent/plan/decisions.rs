//! Which decisions to prepare for pods that wait for their ADD, which to make for the next sandbox of running
//! pods, and which to withdraw or to make again. Must never read anything itself.

use super::action::Action;
use super::debounce::{Debounce, LONG, SHORT};
use super::input::PlanInput;
use crate::agent::index::{NodePod, attachment_of};
use crate::policy::selection::rules::StickyReason;
use crate::store::Decision;

pub(super) fn prepare(input: &PlanInput<'_>, actions: &mut Vec<Action>) {
    let PlanInput { index, store, .. } = input;
    for (name, pod) in index.pods.iter() {
        let uid = &pod.runtime_uid;
        if !pod.is_waiting || pod.is_ending || pod.facts.host_network || uid.is_empty() {
            continue;
        }
        let decided = store.decisions.iter().any(|decision| decision.uid == *uid);
        let has_sandbox = store.has_sandbox(uid);
        let mut attachments = index.stickies.values().filter_map(attachment_of);
        let attached = attachments.find(|attached| attached.pod_uid == pod.facts.uid);
        // Attached by the agent, which ended before the decision was on the disk: continue. By the plugin:
        // its ADD runs.
        let by_plugin = attached.is_some_and(|found| found.attachment_id.prepared_uid() != Some(uid));
        if !decided && !has_sandbox && !by_plugin {
            actions.push(Action::Prepare { pod: name.clone(), uid: uid.clone() });
        }
    }
}

/// Running pods that are not sticky and started without a decision: the agent was away. Their next sandbox
/// must not depend on the API server. Sticky ones have a record, or the controller adopts them.
pub(super) fn decide_running(input: &PlanInput<'_>, actions: &mut Vec<Action>) {
    let PlanInput { options, index, store, .. } = input;
    for (name, pod) in index.pods.iter() {
        let uid = &pod.runtime_uid;
        if pod.is_waiting || pod.is_ending || pod.facts.host_network || uid.is_empty() {
            continue;
        }
        let decided = store.decisions.iter().any(|decision| decision.uid == *uid);
        // The selector's choice may be overruled by the namespace, which is read then.
        let may_be_plain = options
            .rules
            .judge(&pod.facts)
            .is_ok_and(|verdict| !verdict.sticky || matches!(verdict.reason, StickyReason::Selected));
        if !decided && may_be_plain && !store.has_bound_sandbox(uid) {
            actions.push(Action::DecideRunning { pod: name.clone(), uid: uid.clone() });
        }
    }
}

pub(super) fn withdraw(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    for decision in &store.decisions {
        let pod = index.pod_of(&decision.uid);
        let due = match &decision.sticky {
            // Its DEL still reads it.
            None => {
                actions.extend(pod.and_then(|pod| reevaluate(input, debounce, decision, pod)));
                pod.is_none()
            }
            Some(_) if decision.at.boot() != store.now.boot() => true,
            // A pod that has ended, or that the kubelet rejected, may exist for days.
            Some(_) if pod.is_none_or(|pod| pod.is_ending) => true,
            Some(sticky) => {
                let key = format!("{}/{}", sticky.namespace, sticky.name);
                let attached = index.stickies.get(&key).and_then(attachment_of);
                let is_attached = attached.is_some_and(|found| found.attachment_id == sticky.attachment_id);
                // The watch may lag behind what was attached a moment ago.
                !is_attached
                    && debounce.stable_for(format!("decided {}", decision.uid), String::new(), SHORT, *now)
            }
        };
        if due {
            actions.push(Action::Withdraw { uid: decision.uid.clone() });
        }
    }
}

/// A pod that was not sticky when it was decided about, and whose ADD has not come: if it says otherwise by
/// now, or if its namespace might. Namespaces are not watched, so they are read now and then, as long as the
/// pod waits.
fn reevaluate(
    input: &PlanInput<'_>,
    debounce: &mut Debounce,
    decision: &Decision,
    pod: &NodePod,
) -> Option<Action> {
    let PlanInput { options, store, now, .. } = input;
    let uid = &decision.uid;
    if !pod.is_waiting || pod.is_ending || store.has_sandbox(uid) {
        return None;
    }
    let (due, said) = match options.rules.judge(&pod.facts) {
        Ok(verdict) => {
            let said = verdict.reason.to_string();
            let by_namespace = decision.reason == StickyReason::NamespaceAnnotation.to_string();
            let due = match verdict.reason {
                StickyReason::Selected if !by_namespace => true,
                StickyReason::NothingAsksForIt | StickyReason::Selected => {
                    debounce.stable_for(format!("plain {uid}"), said.clone(), LONG, *now)
                }
                _ => verdict.sticky,
            };
            (due, said)
        }
        // Its ADD must say so.
        Err(error) => (true, error.to_string()),
    };
    let name = format!("{}/{}", pod.facts.namespace, pod.facts.name);
    due.then(|| Action::Reevaluate { pod: name, uid: uid.clone(), said })
}
