//! Writes down what made a workload, while it is there: once it is gone nobody can say. Must never take an owner out of the
//! record because the workload is gone, nor write what watches have shown in part.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use super::index::{Kind, key_of};
use super::queue::Key;
use super::workloads::Workloads;
use super::world::{Done, Duty, World};
use crate::cluster::objects::{ClaimantKind, StickyIP, WorkloadRef};
use crate::policy::chain::comes_again;
use crate::policy::facts::Owner;

/// After a write or a discovery that failed.
const AFTER_FAILURE: Duration = Duration::from_secs(5);

/// The duty. It remembers nothing: watches do.
pub struct Owners<'a> {
    workloads: &'a Workloads,
}

impl<'a> Owners<'a> {
    /// A duty that reads what these watches see.
    #[must_use]
    pub fn new(workloads: &'a Workloads) -> Self {
        Self { workloads }
    }
}

/// Whether somebody may ask for the address of this StickyIP again after its workload was made anew.
#[must_use]
pub fn may_come_again(sticky: &StickyIP) -> bool {
    let claimant = sticky.spec.claimant;
    let named_by_workload = match claimant.kind {
        ClaimantKind::Pod => claimant.ordinal.is_some(),
        ClaimantKind::Slot | ClaimantKind::VirtualMachine => true,
    };
    comes_again(named_by_workload, &sticky.spec.workload.kind)
}

impl Duty for Owners<'_> {
    const NAME: &'static str = "owners";
    const WAKES: &'static [Kind] = &[Kind::StickyIP];
    const CALM: Duration = Duration::from_millis(50);

    async fn round(&mut self, world: &World, due: Vec<Key>) -> Done {
        let (mut todo, mut unlisted) = (Vec::new(), BTreeMap::<(String, String), (Owner, Vec<Key>)>::new());
        {
            let index = world.index();
            for key in due {
                let Some(sticky) = index.stickies.get(&key.name).filter(|sticky| may_come_again(sticky))
                else {
                    continue;
                };
                let namespace = sticky.metadata.namespace.as_deref().unwrap_or_default();
                match self.workloads.owners(namespace, &(&sticky.spec.workload).into()) {
                    Ok(Some(owners)) => {
                        let owners: Vec<WorkloadRef> = owners.iter().map(Into::into).collect();
                        if owners != sticky.spec.owners && sticky.metadata.deletion_timestamp.is_none() {
                            todo.push((sticky.clone(), owners));
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
        let mut done = Done::default();
        for (owner, keys) in unlisted.into_values() {
            if !self.workloads.begin_to_watch(world, &owner).await {
                done.failures += 1;
                done.again.extend(keys.into_iter().map(|key| (key, AFTER_FAILURE)));
            } else if self.workloads.is_hidden(&owner) {
                done.again.extend(keys.into_iter().map(|key| (key, Duration::ZERO)));
            }
        }
        for (sticky, owners) in todo {
            let key = key_of(&sticky);
            let patch = json!({"spec": {"owners": owners}});
            match world.hands.patch_sticky("the owners", &sticky, patch).await {
                Ok(Some(_)) => tracing::debug!(sticky = %key, ?owners, "owners written"),
                // Somebody wrote it: the watch tells of that.
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(sticky = %key, %error, "cannot write the owners; trying again");
                    done.failures += 1;
                    done.again.push((Key::new(Kind::StickyIP, key.to_string()), AFTER_FAILURE));
                }
            }
        }
        done
    }
}
