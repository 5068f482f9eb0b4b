//! Which decisions to prepare for pods that wait for their ADD, and which to withdraw or to make again. Must
//! never look at anything itself.

use super::action::Action;
use super::debounce::{Debounce, LONG, SHORT};
use super::input::PlanInput;
use crate::agent::index::NodePod;
use crate::agent::snapshot::uid_of;
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
        let lives = store.attached().any(|held| uid_of(&held.record) == Some(uid));
        let attached = index.stickies.iter().find_map(|(_, sticky)| {
            let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
            (attachment.pod_uid == pod.facts.uid).then_some(attachment.container_id.as_str())
        });
        // Attached by us, and ended before the decision was on the disk: go on. By the plugin: its business.
        let by_plugin = attached.is_some_and(|container| container != Decision::attachment_id(uid));
        if !decided && !lives && !by_plugin {
            actions.push(Action::Prepare { pod: name.clone(), uid: uid.clone() });
        }
    }
}

pub(super) fn withdraw(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    for decision in &store.decisions {
        let pod = index.pod_of(&decision.uid);
        let due = match &decision.sticky {
            // Its DEL still asks for it.
            None => {
                actions.extend(pod.and_then(|pod| reevaluate(input, debounce, decision, pod)));
                pod.is_none()
            }
            Some(_) if decision.at.boot() != store.now.boot() => true,
            // A pod that has ended, or that the kubelet turned away, may stand there for days.
            Some(_) if pod.is_none_or(|pod| pod.is_ending) => true,
            Some(sticky) => {
                let key = format!("{}/{}", sticky.namespace, sticky.name);
                let attachment =
                    index.stickies.get(&key).and_then(|found| found.status.as_ref()?.attachment.as_ref());
                let stands = attachment.is_some_and(|found| found.container_id == sticky.attachment_id);
                // The watch may lag behind what was attached a moment ago.
                !stands
                    && debounce.stable_for(format!("decided {}", decision.uid), String::new(), SHORT, *now)
            }
        };
        if due {
            actions.push(Action::Withdraw { uid: decision.uid.clone() });
        }
    }
}

/// A pod that was not sticky when it was decided about, and whose ADD has not come: if it says otherwise by
/// now, or if its namespace might. Nobody tells of namespaces, so those are asked for now and then, as long
/// as the pod waits.
fn reevaluate(
    input: &PlanInput<'_>,
    debounce: &mut Debounce,
    decision: &Decision,
    pod: &NodePod,
) -> Option<Action> {
    let PlanInput { options, store, now, .. } = input;
    let uid = &decision.uid;
    let lives = store.attached().any(|held| uid_of(&held.record) == Some(uid));
    if !pod.is_waiting || pod.is_ending || lives {
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
