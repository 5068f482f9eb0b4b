//! Records the owners of a workload while it exists: once it is gone they cannot be read. Must never take an
//! owner out of the record because the workload is gone, nor write what watches have shown in part.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use crate::cluster::events;
use crate::cluster::objects::{ClaimantKind, StickyIP, WorkloadRef};
use crate::controller::duties::recycling::workloads::Workloads;
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::objects::sticky_key_of;
use crate::controller::{context::Context, duties::record_event, index::Kind, queue::Key};
use crate::policy::lifetime::owners::can_return;
use crate::policy::selection::facts::{Owner, PodFacts};

const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(5);

/// It remembers nothing: watches do.
pub(crate) struct OwnerRecords<'a> {
    pub(crate) workloads: &'a Workloads,
}

/// Whether a pod may ask for the address of this StickyIP again after its workload was created again.
pub(crate) fn may_return(sticky: &StickyIP) -> bool {
    let claimant = sticky.spec.claimant;
    let named_by_workload = match claimant.kind {
        ClaimantKind::Pod => claimant.ordinal.is_some(),
        ClaimantKind::Slot | ClaimantKind::VirtualMachine => true,
    };
    can_return(named_by_workload, &sticky.spec.workload.kind)
}

/// The uid of the workload that replaced the recorded one, by the pod that has the address: from then on the
/// address is the new workload's, and is not released with the old one.
fn successor<'a>(sticky: &StickyIP, pod: &'a PodFacts) -> Option<&'a str> {
    let recorded = &sticky.spec.workload;
    let owner = pod.owners.first()?;
    let same = owner.kind == recorded.kind && owner.name == recorded.name && !owner.uid.is_empty();
    (same && !recorded.uid.is_empty() && owner.uid != recorded.uid).then_some(owner.uid.as_str())
}

async fn record_inherited(context: &Context, sticky: &StickyIP, by: &str) {
    let WorkloadRef { kind, name, uid, .. } = &sticky.spec.workload;
    let message = format!(
        "{kind} {name} was created again, and its pod came before the address was released: it belongs to \
         the new one now (uid {by}, before {uid})"
    );
    record_event(context, events::sticky_ip(sticky), "Inherited", message).await;
}

impl Duty for OwnerRecords<'_> {
    const NAME: &'static str = "owners";
    const TRIGGERS: &'static [Kind] = &[Kind::StickyIP];
    const BATCH_DELAY: Duration = Duration::from_millis(50);

    async fn round(&mut self, context: &Context, due: Vec<Key>) -> RoundResult {
        let (mut todo, mut unlisted) = (Vec::new(), BTreeMap::<(String, String), (Owner, Vec<Key>)>::new());
        {
            let index = context.index();
            for key in due {
                let Some(sticky) = index.stickies.get(&key.name).filter(|sticky| may_return(sticky)) else {
                    continue;
                };
                let namespace = sticky.metadata.namespace.as_deref().unwrap_or_default();
                match self.workloads.owners(namespace, &(&sticky.spec.workload).into()) {
                    Ok(Some(owners)) => {
                        let owners: Vec<WorkloadRef> = owners.iter().map(Into::into).collect();
                        let uid = index.pod_of(sticky).and_then(|pod| successor(sticky, &pod.facts));
                        let patch = match uid {
                            Some(uid) => json!({"spec": {"owners": owners, "workload": {"uid": uid}}}),
                            None => json!({"spec": {"owners": owners}}),
                        };
                        let is_recorded = owners == sticky.spec.owners && uid.is_none();
                        if !is_recorded && sticky.metadata.deletion_timestamp.is_none() {
                            todo.push((sticky.clone(), patch, uid.map(str::to_owned)));
                        }
                    }
                    Ok(None) => {}
                    Err(owner) => {
                        let kind = (owner.group().to_owned(), owner.kind.clone());
                        unlisted.entry(kind).or_insert((owner, Vec::new())).1.push(key);
                    }
                }
            }
        }
        let mut done = RoundResult::default();
        for (owner, keys) in unlisted.into_values() {
            if !self.workloads.start_watching(context, &owner).await {
                done.failures += 1;
                done.again.extend(keys.into_iter().map(|key| (key, RETRY_AFTER_FAILURE)));
            } else if self.workloads.is_hidden(&owner) {
                done.again.extend(keys.into_iter().map(|key| (key, Duration::ZERO)));
            }
        }
        for (sticky, patch, successor) in todo {
            let key = sticky_key_of(&sticky);
            let written = patch.to_string();
            match context.writer.patch_sticky("the owners", &sticky, patch).await {
                Ok(Some(_)) => {
                    tracing::debug!(sticky = %key, written, "owners written");
                    if let Some(uid) = successor {
                        record_inherited(context, &sticky, &uid).await;
                    }
                }
                // It changed: the watch shows that.
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(sticky = %key, %error, "cannot write the owners; trying again");
                    done.retry(Key::new(Kind::StickyIP, key.to_string()), RETRY_AFTER_FAILURE);
                }
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recreated_workload_takes_over_with_its_first_pod_and_no_other_does() {
        let sticky = |uid: &str| -> StickyIP {
            serde_json::from_value(json!({
                "metadata": {"name": "db-0", "namespace": "db"},
                "spec": {"addresses": ["10.0.0.1"], "claimant": {"kind": "Pod", "ordinal": 0},
                         "workload": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": uid}}}))
            .unwrap()
        };
        let of = |kind: &str, uid: &str| PodFacts {
            owners: vec![Owner { kind: kind.into(), name: "db".into(), uid: uid.into(), ..Owner::default() }],
            ..PodFacts::default()
        };
        assert_eq!(successor(&sticky("old"), &of("StatefulSet", "new")), Some("new"));
        assert_eq!(successor(&sticky("old"), &of("StatefulSet", "old")), None);
        assert_eq!(successor(&sticky("old"), &of("Operator", "new")), None);
        assert_eq!(successor(&sticky("old"), &of("StatefulSet", "")), None);
        assert_eq!(successor(&sticky(""), &of("StatefulSet", "new")), None, "it was never looked up");
        assert_eq!(successor(&sticky("old"), &PodFacts::default()), None);
    }
}
