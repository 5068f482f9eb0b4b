//! Telling the API server what a verb could not, and letting go of an attachment. Must never detach what a newer sandbox
//! of this node lives with, and never take a key out of the pool before its endpoint is gone.

use std::net::IpAddr;

use crate::agent::actions::addresses::NodeAddresses;
use crate::agent::actions::{ActionContext, ActionError, ActionOutcome, bound, interface, list, sandbox};
use crate::agent::plan::shown;
use crate::agent::snapshot::is_bound_to;
use crate::alloc::Family;
use crate::cluster::cilium::pool;
use crate::cluster::objects::{StickyIP, StickyKey};
use crate::cluster::protocol::ADOPTED;
use crate::cluster::protocol::bind;
use crate::cluster::protocol::bind::{BindError, Binder, StickyRead};
use crate::cluster::protocol::detach;
use crate::cluster::protocol::step::Refusal;
use crate::cluster::protocol::view::StickyView;
use crate::cni::Attachment;
use crate::policy::handover::Attached;
use crate::store::{Claimant, Disk, PendingUpdate, Record, StickyBinding, Store, Told};

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Tells the API server what a note says, and takes the note away.
    pub(crate) async fn send_update(
        &self,
        name: &str,
        note: &PendingUpdate,
    ) -> Result<ActionOutcome, ActionError> {
        let outcome = match note.what {
            Told::Attached => self.send_attached(note).await?,
            Told::Ended => self.send_detached(note).await?,
        };
        if let ActionOutcome::Done(_) | ActionOutcome::NotNeeded(_) = outcome {
            self.store()?.lock()?.remove_pending_update(name, note)?;
            self.metrics.notes.inc();
        }
        Ok(outcome)
    }

    async fn send_attached(&self, note: &PendingUpdate) -> Result<ActionOutcome, ActionError> {
        let Some(key) = key_of(note) else {
            return Ok(ActionOutcome::NotNeeded("the note names no StickyIP".into()));
        };
        self.attach(&key, &sandbox(&note.container)?).await
    }

    async fn send_detached(&self, note: &PendingUpdate) -> Result<ActionOutcome, ActionError> {
        let store = self.store()?;
        let mut containers = vec![note.container.as_str()];
        containers.extend(note.attachment_id.as_deref());
        let key = match key_of(note) {
            Some(key) => Some(key),
            None => self.find(&containers).await?,
        };
        let Some(key) = key else {
            return Ok(ActionOutcome::NotNeeded("nothing is attached to this sandbox".into()));
        };
        self.detach_containers(&store, &key, &containers).await
    }

    /// The StickyIP that is attached to one of these containers of this node, by a live look.
    async fn find(&self, containers: &[&str]) -> Result<Option<StickyKey>, ActionError> {
        let api_writer = self.api_writer();
        for container in containers {
            if let Some(found) = detach::find(&api_writer, &self.settings.node, container).await? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Hides and detaches a StickyIP that is attached to one of these containers of this node.
    pub(crate) async fn detach_containers(
        &self,
        store: &Store<D>,
        key: &StickyKey,
        containers: &[&str],
    ) -> Result<ActionOutcome, ActionError> {
        let Some(_lock) = self.pool_lock(store, key)? else {
            return Ok(ActionOutcome::Postponed("others are at its pool keys".into()));
        };
        // Whoever prepares a pod attaches and decides in this turn.
        let mut ended = Vec::new();
        for container in containers {
            if !store.lock()?.awaits_add(container, &interface()?)? {
                ended.push(*container);
            }
        }
        let containers = ended.as_slice();
        let mut api_writer = self.api_writer();
        let Some(object) = bind::read_sticky(&api_writer, key).await? else {
            self.clear_attachment(store, key, containers)?;
            return Ok(ActionOutcome::NotNeeded("the StickyIP does not exist any more".into()));
        };
        let view = StickyView::from(&object);
        let attached = view.attached.as_ref().is_some_and(|attached| {
            attached.node == self.settings.node && containers.contains(&attached.container_id.as_str())
        });
        if !attached {
            self.clear_attachment(store, key, containers)?;
            return Ok(ActionOutcome::NotNeeded("another sandbox is attached, or none".into()));
        }
        // A newer sandbox of the pod may live under the old one's name: the API server was away when it came.
        let living = store.lock()?.find_by_claimant(&bound(key)?)?;
        if let Some(living) = living.filter(|living| living.record.is_attached(store.now())) {
            let container = living.record.attachment.container.as_str();
            if !containers.contains(&container) {
                return Ok(ActionOutcome::NotNeeded(format!("the newer sandbox {container} lives with it")));
            }
            if containers.first() != Some(&container) {
                return Ok(ActionOutcome::NotNeeded(format!("the sandbox {container} lives with it")));
            }
        }
        if let Some(later) = self.postponed_by_cilium(&view.addresses).await? {
            return Ok(later);
        }
        let left =
            detach::detach(&mut api_writer, &self.settings.node, &self.options.shape, key, containers).await;
        if left.is_ok() || api_writer.count() > 0 {
            self.clear_attachment(store, key, containers)?;
        }
        Ok(match left? {
            Some(_) => ActionOutcome::Done(format!("{} is with nobody now", list(&view.addresses))),
            None => ActionOutcome::NotNeeded("another sandbox is attached, or none".into()),
        })
    }

    /// What the API server does not know as attached any more speaks for nobody.
    fn clear_attachment(
        &self,
        store: &Store<D>,
        key: &StickyKey,
        containers: &[&str],
    ) -> Result<(), ActionError> {
        let mut locked = store.lock()?;
        locked.clear_attachment(&bound(key)?, containers)?;
        Ok(locked.commit()?)
    }

    /// Attaches a sandbox of this node that lives, and shows it.
    pub(crate) async fn attach(
        &self,
        key: &StickyKey,
        attachment: &Attachment,
    ) -> Result<ActionOutcome, ActionError> {
        let store = self.store()?;
        let living = |store: &Store<D>| -> Result<Option<Record>, ActionError> {
            let found = store.lock()?.find_by_attachment(attachment)?.map(|stored| stored.record);
            Ok(found.filter(|record| is_bound_to(record, key)))
        };
        let Some(record) = living(&store)? else {
            return Ok(ActionOutcome::NotNeeded("the sandbox has ended meanwhile".into()));
        };
        let Some(pod) = record.pod.clone() else {
            return Ok(ActionOutcome::NeedsAttention(format!("the record of {attachment} names no pod")));
        };
        let Some(_lock) = self.try_claimant_lock(&store, &Claimant::new(&pod, &interface()?))? else {
            return Ok(ActionOutcome::Postponed("an ADD of this pod is on its way".into()));
        };
        let mut api_writer = self.api_writer();
        let Some(object) = bind::read_sticky(&api_writer, key).await? else {
            if record.binding.as_ref().is_some_and(|binding| binding.container.starts_with(ADOPTED)) {
                return Ok(ActionOutcome::Postponed(
                    "it is granted, and the controller has yet to bind it".into(),
                ));
            }
            return Ok(ActionOutcome::NeedsAttention(format!(
                "pod {pod} lives with {} and its StickyIP {key} does not exist; delete the pod, or create the StickyIP anew",
                list(&record.addresses)
            )));
        };
        // It was made for another pod of the workload meanwhile: whoever is attached to it must live with its addresses.
        if !matches_addresses(&record.addresses, &object.spec.addresses) {
            return Ok(ActionOutcome::NeedsAttention(format!(
                "pod {pod} lives with {}, and its StickyIP {key} has {}",
                list(&record.addresses),
                list(&object.spec.addresses)
            )));
        }
        let status = object.status.as_ref().and_then(|status| status.attachment.as_ref());
        // The API server's uid of a static pod is not the runtime's.
        let uid = match status.filter(|old| old.node == self.settings.node && old.pod_name == pod.name()) {
            Some(old) => old.pod_uid.clone(),
            None => pod.uid().unwrap_or_default().to_owned(),
        };
        let asker = Attached {
            node: self.settings.node.clone(),
            pod_uid: uid,
            container_id: attachment.container.as_str().to_owned(),
        };
        let netns_is_there = |path: &std::path::Path| self.may_exist(path);
        let mut here = NodeAddresses {
            store: &store,
            node: &self.settings.node,
            key: key.clone(),
            pod: pod.clone(),
            attachment: attachment.clone(),
            sets: &self.node_ranges(self.index.cilium_node()),
            barred: Some(Default::default()),
            netns_is_there: &netns_is_there,
            reserved: Vec::new(),
        };
        let walker = self.walker(&object, asker, pod.name());
        match walker.bind(&mut api_writer, &mut here, StickyRead::found(object)).await {
            Ok(StickyIP { spec, .. }) => {
                self.record_container(&store, attachment, key)?;
                self.publish(key).await?;
                Ok(ActionOutcome::Done(format!("{} is with pod {pod}", list(&spec.addresses))))
            }
            Err(BindError::Refused(why @ (Refusal::Handover { .. } | Refusal::Conflict { .. }))) => {
                Ok(ActionOutcome::NeedsAttention(format!(
                    "pod {pod} lives with {}, and {why}",
                    list(&record.addresses)
                )))
            }
            Err(BindError::Waited { what, .. }) => Ok(ActionOutcome::NeedsAttention(format!(
                "pod {pod} lives with {}, which waits for {what}",
                list(&record.addresses)
            ))),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes down under which container id the API server knows the sandbox now.
    fn record_container(
        &self,
        store: &Store<D>,
        attachment: &Attachment,
        key: &StickyKey,
    ) -> Result<(), ActionError> {
        let mut locked = store.lock()?;
        let Some(stored) = locked.find_by_attachment(attachment)? else { return Ok(()) };
        let container = attachment.container.as_str();
        if stored.record.binding.as_ref().is_some_and(|binding| binding.container == container) {
            return Ok(());
        }
        let binding = StickyBinding {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            container: container.to_owned(),
        };
        let record = Record { binding: Some(binding), ..stored.record.clone() };
        locked.put(&record, Some(&stored))?;
        Ok(locked.commit()?)
    }

    /// A walk to what a StickyIP has already.
    fn walker(&self, object: &StickyIP, asker: Attached, pod: &str) -> Binder {
        Binder {
            asker,
            pod: pod.to_owned(),
            key: crate::agent::index::key_of(object),
            claimant: object.spec.claimant,
            workload: object.spec.workload.clone(),
            retention: object.spec.retention,
            pinned: Vec::new(),
            patience: std::time::Duration::ZERO,
        }
    }

    /// Has the CiliumNode show a StickyIP that is attached here, by a live look.
    pub(crate) async fn publish(&self, key: &StickyKey) -> Result<ActionOutcome, ActionError> {
        let store = self.store()?;
        let Some(_lock) = self.pool_lock(&store, key)? else {
            return Ok(ActionOutcome::Postponed("others are at its pool keys".into()));
        };
        let mut api_writer = self.api_writer();
        let object = bind::read_sticky(&api_writer, key).await?;
        let here = object.filter(|object| {
            let attachment = object.status.as_ref().and_then(|status| status.attachment.as_ref());
            attachment.is_some_and(|attachment| attachment.node == self.settings.node)
        });
        let Some(shown) = here.as_ref().and_then(shown) else {
            return Ok(ActionOutcome::NotNeeded("it is not attached here any more".into()));
        };
        if self.options.shape.is_silent_about(&shown.addresses) {
            return Ok(ActionOutcome::NotNeeded("the CiliumNode says nothing of it".into()));
        }
        let before = api_writer.count();
        pool::publish(&mut api_writer, &self.settings.node, &self.options.shape, &shown, None).await?;
        if api_writer.count() == before {
            return Ok(ActionOutcome::NotNeeded("it stands there".into()));
        }
        crate::agent::metrics::AgentMetrics::count(&self.metrics.pool_writes, "put");
        Ok(ActionOutcome::Done(format!("{} is shown for {}", list(&shown.addresses), shown.owner)))
    }
}

/// Whether a sandbox with these addresses lives with those of a StickyIP. It may have others beside, of range sets that the StickyIP
/// does not serve, and lack one whose family its node does not have.
fn matches_addresses(has: &[IpAddr], bound: &[IpAddr]) -> bool {
    let serves = |address: &IpAddr| has.iter().any(|own| Family::of(*own) == Family::of(*address));
    bound.iter().any(|address| has.contains(address))
        && bound.iter().all(|address| has.contains(address) || !serves(address))
}

fn key_of(note: &PendingUpdate) -> Option<StickyKey> {
    Some(StickyKey { namespace: note.namespace.clone()?, name: note.name.clone()? })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_sandbox_lives_with_a_stickyip_whatever_else_it_has() {
        let lives = |has: &[&str], bound: &[&str]| {
            let parsed = |all: &[&str]| all.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
            super::matches_addresses(&parsed(has), &parsed(bound))
        };
        assert!(lives(&["10.0.0.1"], &["10.0.0.1"]));
        assert!(lives(&["10.0.0.1", "fd00::5"], &["10.0.0.1"]), "its second family is not the StickyIP's");
        assert!(lives(&["10.0.0.1", "10.1.0.1"], &["10.0.0.1"]), "nor its second range set");
        assert!(lives(&["10.0.0.1"], &["10.0.0.1", "fd00::5"]), "its node has one family");
        assert!(!lives(&["10.0.0.1"], &["10.0.0.2"]));
        assert!(!lives(&["10.0.0.1", "fd00::5"], &["10.0.0.1", "fd00::6"]));
        assert!(!lives(&["10.0.0.1"], &["fd00::5"]));
        assert!(!lives(&[], &["10.0.0.1"]));
    }
}
