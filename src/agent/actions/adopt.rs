//! Granting an address of this node to the StickyIP of the pod that has it already: the only case in which an
//! unowned address becomes a StickyIP's.
//!
//! Must never grant what another pod has, or what this one has released: the pod is read live, by its uid,
//! and the node's own evidence names it (the store's record under the lock, or Cilium's endpoint where Cilium
//! picks the addresses). Record and pool entry are written, and Cilium has seen the entry's owner, before the
//! claim is granted. If the process ends in between, the next `Grant` continues; if the claim is gone by
//! then, the record is released like every other that is not claimed.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;

use super::claim_answer::{ClaimAnswer, refuse};
use super::{ActionContext, ActionError, Performed, bound, live, postponed, sandbox};
use crate::agent::snapshot::is_bound_to;
use crate::cluster::api::client::ApiError;
use crate::cluster::cilium::barrier;
use crate::cluster::cilium::pool::{self, NodePatch};
use crate::cluster::cilium::socket;
use crate::cluster::objects::ClaimedPod;
use crate::cluster::objects::cilium::{CiliumNode, PoolEntry};
use crate::cluster::pod;
use crate::cluster::protocol::{bind, sticky_identity};
use crate::cluster::view::ClaimView;
use crate::cluster::writer::apply::ApiWriter;
use crate::names::{Attachment, AttachmentId, PodIdentity, StickyKey};
use crate::node::list;
use crate::policy::handover::OldPod;
use crate::policy::lifetime::retention::Retention;
use crate::policy::selection::claimant::Claimant;
use crate::store::{Disk, Record, RecordState, StickyBinding, StoredRecord};

/// How long to wait here until Cilium's watch has shown it a write: it takes some milliseconds, and what
/// takes longer is asked for again later.
const WATCH_PATIENCE: Duration = Duration::from_millis(200);
/// Between two questions to Cilium.
const WATCH_PAUSE: Duration = Duration::from_millis(5);

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Makes an address of this node that of the StickyIP of the pod that has it: in the store, and in the
    /// pool.
    pub(super) async fn adopt(
        &self,
        api_writer: &mut ApiWriter<'_>,
        view: &ClaimView,
        claimed: &ClaimedPod,
    ) -> Performed<ClaimAnswer> {
        let (address, key) = (view.address, &view.sticky_ref);
        let api = api_writer.api().clone();
        // Before the pod is read: whatever Cilium writes after this read makes the write of the entry fail.
        let node = match self.settings.mode.publishes_pool_entries() {
            true => Some(self.cilium_node(&api).await?),
            false => None,
        };
        let found = live::read_pod(&api, &key.namespace, &claimed.name).await?;
        let named = format!("{}/{}", key.namespace, claimed.name);
        let answer = match (self.runs_with(found, claimed, address), &node) {
            (Ok(found), Some(node)) => self.own_entry(api_writer, node, key, &found, address).await?,
            (Ok(found), None) => self.adopt_record(api_writer, key, &found, address).await?,
            (Err(reason), _) => ClaimAnswer::Refuse(format!("pod {named} {reason}")),
        };
        if let (ClaimAnswer::Refuse(_), Some(node)) = (&answer, &node)
            && self.was_begun(node, view, claimed)?
            && !self.undo_adoption(api_writer, view, &named).await?
        {
            return postponed("the claim or its record has changed");
        }
        Ok(answer)
    }

    /// Whether an earlier action has begun to adopt this very pod: its record is written, or the entry has it
    /// as owner. Nothing else writes that owner while the claim is not granted.
    fn was_begun(&self, node: &CiliumNode, view: &ClaimView, claimed: &ClaimedPod) -> Performed<bool> {
        let owner = format!("{}/{}", view.sticky_ref.namespace, claimed.name);
        let entry = node.spec.ipam.pool.get(&view.address.to_string());
        let there = self.store()?.lock()?.find_by_address(view.address)?;
        let attachment_id = there.and_then(|there| there.record.binding?.attachment_id);
        Ok(entry.is_some_and(|entry| entry.owner == owner)
            || attachment_id == Some(AttachmentId::Adopted(claimed.uid.clone())))
    }

    /// The pod, if by the API server it is the one meant, runs on this node and shows the address. Else what
    /// it is instead.
    fn runs_with(&self, found: Option<Pod>, claimed: &ClaimedPod, address: IpAddr) -> Result<Pod, String> {
        let found = found.ok_or("does not exist any more")?;
        if found.metadata.uid.as_deref() != Some(&claimed.uid) {
            return Err("has another uid by now".into());
        }
        if pod::old_pod(Some(&found), &claimed.uid) != OldPod::Running {
            return Err("is ending".into());
        }
        let node = found.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        if node != Some(&self.settings.node) {
            return Err(format!("is not on node {}", self.settings.node));
        }
        let shown = found.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
        if !shown.filter_map(|shown| shown.ip.parse::<IpAddr>().ok()).any(|shown| shown == address) {
            return Err("does not show the address".into());
        }
        Ok(found)
    }

    /// Where the node's store knows who has which address: the pod's record becomes the StickyIP's.
    async fn adopt_record(
        &self,
        api_writer: &ApiWriter<'_>,
        key: &StickyKey,
        found: &Pod,
        address: IpAddr,
    ) -> Performed<ClaimAnswer> {
        let store = self.store()?;
        let Some(there) = store.lock()?.find_by_address(address)? else {
            return refuse("the node's store knows no pod that has it");
        };
        let record = &there.record;
        let may_be_bound = record.binding.is_none()
            || is_bound_to(record, key)
            || self.has_lost_sticky_ip(api_writer, record, found).await?;
        if !record.is_attached(store.now()) || !may_be_bound {
            return refuse(format!("{} has it", record.holder()));
        }
        let container = record.attachment.container.as_str();
        let its_own = match &record.pod {
            Some(known) => is_same_pod(known, found),
            // Taken over from another plugin, which does not record pods: cilium-agent knows.
            None => {
                let name = found.metadata.name.as_deref().unwrap_or_default();
                let asked = self.endpoint_of_pod_with(&key.namespace, name, address).await?;
                asked.is_ok_and(|endpoint| endpoint.container == container)
            }
        };
        if !its_own {
            return refuse(format!("{} has it", record.holder()));
        }
        if record.netns.as_ref().is_some_and(|netns| !self.may_exist(netns)) {
            return refuse(format!("the sandbox {container} of the pod is gone"));
        }
        let bound_already = is_bound_to(record, key);
        let record = adopted_record(record.clone(), key, found)?;
        let mut locked = store.lock()?;
        if locked.find_by_address(address)?.as_ref() != Some(&there) {
            return postponed("the store has changed");
        }
        if let Some(kept) = locked.find_by_claimant(&bound(key)?)?.filter(|kept| *kept != there) {
            return refuse(kept_already(key, &kept));
        }
        if !bound_already {
            locked.put(&record, Some(&there))?;
        }
        // The decision says that it is not sticky.
        locked.remove_decision_durably(pod::runtime_uid(found))?;
        locked.commit()?;
        Ok(ClaimAnswer::Grant)
    }

    /// Where Cilium picks the addresses: the record first, so that no unowned entry is written for the
    /// address again, then the owner of the entry, then the proof that Cilium has seen the owner, then
    /// another read whether the pod still has the address.
    async fn own_entry(
        &self,
        api_writer: &mut ApiWriter<'_>,
        node: &CiliumNode,
        key: &StickyKey,
        found: &Pod,
        address: IpAddr,
    ) -> Performed<ClaimAnswer> {
        let text = address.to_string();
        let facts = pod::facts(found, BTreeMap::new());
        let owner = format!("{}/{}", facts.namespace, facts.name);
        let Some(entry) = node.spec.ipam.pool.get(&text) else {
            return refuse(format!("it is not in the pool of CiliumNode {}", self.settings.node));
        };
        let is_own = entry.owner == owner;
        if !is_own && !entry.owner.is_empty() {
            return refuse(format!("the pool has it for {}", entry.owner));
        }
        let endpoint = match self.endpoint_of_pod_with(&facts.namespace, &facts.name, address).await? {
            Ok(endpoint) => endpoint,
            Err(instead) => return refuse(instead),
        };
        let known = self.store()?.lock()?.find_by_address(address)?;
        let lost = match known.filter(|known| !is_bound_to(&known.record, key)) {
            Some(known) if self.has_lost_sticky_ip(api_writer, &known.record, found).await? => Some(known),
            _ => None,
        };
        let container = sandbox(&endpoint.container.as_str().into())?;
        let kept = self.keep_for_pod(key, found, &container, address, lost.as_ref())?;
        if !matches!(kept, ClaimAnswer::Grant) {
            return Ok(kept);
        }
        let barrier = match barrier::of(node, address).filter(|_| is_own) {
            Some(barrier) => barrier,
            None => {
                let workload = sticky_identity::workload(&Claimant::of(&facts));
                let resource = pool::resource(&facts.namespace, &workload);
                let entry = PoolEntry { owner: owner.clone(), resource };
                let (barrier, barrier_entry) = barrier::fresh(node, address);
                // The barriers of other claims stay: the grants that wait for them find them again.
                let old = barrier::of(node, address).map(|old| (old.to_string(), None));
                let mut keys: BTreeMap<_, _> = old.into_iter().collect();
                keys.extend([(text, Some(entry)), (barrier.to_string(), Some(barrier_entry))]);
                match pool::apply_patch(api_writer, &NodePatch::of_keys(node, keys)).await {
                    Err(ApiError::Refused { code: 404 | 409 | 412, .. }) => {
                        return postponed("the CiliumNode has changed");
                    }
                    applied => applied?,
                }
                barrier
            }
        };
        let knows_the_owner = self.wait_until_known(barrier).await?;
        if self.endpoint_of(address).await?.is_none_or(|now| now != endpoint) {
            return refuse("its pod does not have it any more");
        }
        match knows_the_owner {
            true => Ok(ClaimAnswer::Grant),
            // If the pod ended now, Cilium would give the address to any pod.
            false => postponed(format!("Cilium does not know yet that {address} is {owner}'s")),
        }
    }

    /// Waits a moment until Cilium has seen a barrier entry, and so what was written with it.
    async fn wait_until_known(&self, barrier: IpAddr) -> Performed<bool> {
        let asked_since = Instant::now();
        let subject = barrier.to_string();
        while !self.ask_cilium(&subject, move |socket| socket::knows(socket, barrier)).await? {
            if asked_since.elapsed() > WATCH_PATIENCE {
                return Ok(false);
            }
            tokio::time::sleep(WATCH_PAUSE).await;
        }
        Ok(true)
    }

    /// Whether a record was bound for this very pod to a StickyIP that the pod did not get: another pod got
    /// it first, and the claims for it are gone. By live reads. The claim that is answered now is for another
    /// StickyIP already.
    async fn has_lost_sticky_ip(
        &self,
        api_writer: &ApiWriter<'_>,
        record: &Record,
        found: &Pod,
    ) -> Performed<bool> {
        let Some(old) = record.binding.as_ref().filter(|old| old.attachment_id == Some(adopted_id(found)))
        else {
            return Ok(false);
        };
        for address in &record.addresses {
            if self.claim_on(*address).await?.is_some_and(|claim| claim.spec.sticky_ref == old.key) {
                return Ok(false);
            }
        }
        let sticky = bind::read_sticky(api_writer, &old.key).await?;
        Ok(sticky.is_none_or(|sticky| {
            !record.addresses.iter().any(|address| sticky.spec.addresses.contains(address))
        }))
    }

    /// Records that the pod's sandbox has the address through the StickyIP. `lost` is the record as it was
    /// read, bound to a StickyIP that the pod did not get.
    fn keep_for_pod(
        &self,
        key: &StickyKey,
        found: &Pod,
        attachment: &Attachment,
        address: IpAddr,
        lost: Option<&StoredRecord>,
    ) -> Performed<ClaimAnswer> {
        let store = self.store()?;
        let mut locked = store.lock()?;
        let there = locked.find_by_address(address)?;
        if let Some(there) = &there
            && !is_kept_only_for(&there.record, key)
            && lost != Some(there)
        {
            return refuse(format!("{} has it", there.record.holder()));
        }
        let claimant = bound(key)?;
        let kept = locked.find_by_claimant(&claimant)?.filter(|kept| Some(kept) != there.as_ref());
        let has_attached = |stored: &StoredRecord| {
            stored.record.attachment == *attachment && stored.record.is_attached(store.now())
        };
        let mut addresses = Vec::new();
        if let Some(kept) = &kept {
            // Its address of the other family, which came first.
            if !has_attached(kept) {
                return refuse(kept_already(key, kept));
            }
            addresses.clone_from(&kept.record.addresses);
        }
        // With that of the other family, which it has through the lost StickyIP too.
        let also = lost.filter(|lost| there.as_ref() == Some(lost));
        let also = also.iter().flat_map(|lost| &lost.record.addresses);
        addresses.extend(also.filter(|other| **other != address));
        addresses.push(address);
        if !there.as_ref().is_some_and(|there| is_bound_to(&there.record, key) && has_attached(there)) {
            let kept_here = Record::reserved(addresses, &claimant, None, attachment, store.now());
            let record = Record { state: RecordState::Attached, ..adopted_record(kept_here, key, found)? };
            locked.put_reclaiming(&record, kept.as_ref(), there.as_slice())?;
        }
        locked.remove_decision_durably(pod::runtime_uid(found))?;
        locked.commit()?;
        Ok(ClaimAnswer::Grant)
    }

    /// Undoes what was done to adopt a pod, which cannot be granted the address any more: until Cilium saw
    /// the owner it could give the address to any pod. False if the claim or the record has changed: then the
    /// claim is answered again.
    async fn undo_adoption(
        &self,
        api_writer: &mut ApiWriter<'_>,
        view: &ClaimView,
        owner: &str,
    ) -> Performed<bool> {
        let address = view.address;
        let store = self.store()?;
        let there = store.lock()?.find_by_address(address)?;
        if there.as_ref().is_some_and(|there| !is_kept_only_for(&there.record, &view.sticky_ref)) {
            return Ok(true);
        }
        // After the record was read: a claim that has not changed by now was the same then.
        let claim = self.claim_on(address).await?.map(|claim| ClaimView::from(&claim));
        if claim.as_ref() != Some(view) {
            return Ok(false);
        }
        let mut locked = store.lock()?;
        if locked.find_by_address(address)? != there {
            return Ok(false);
        }
        match &there {
            Some(there) if there.record.is_unowned() => {}
            Some(there) => {
                let mut others = there.record.addresses.clone();
                others.retain(|other| *other != address);
                locked.keep_addresses(there, others, &[Record::unowned(address, store.now())])?;
            }
            None => locked.put(&Record::unowned(address, store.now()), None)?,
        }
        locked.commit()?;
        self.disown(api_writer, &[address], |entry| entry.owner == owner).await?;
        Ok(true)
    }
}

/// The record as it is once its address is the StickyIP's.
fn adopted_record(record: Record, key: &StickyKey, found: &Pod) -> Performed<Record> {
    let name = found.metadata.name.as_deref().unwrap_or_default();
    let pod = PodIdentity::new(&key.namespace, name, Some(pod::runtime_uid(found)))
        .map_err(|error| ActionError::Name(error.to_string()))?;
    let binding = StickyBinding { key: key.clone(), attachment_id: Some(adopted_id(found)) };
    // The sandbox stays what it was: its DEL finds the record by its own container id.
    Ok(Record { retention: Some(Retention::FOREVER), binding: Some(binding), pod: Some(pod), ..record })
}

fn adopted_id(found: &Pod) -> AttachmentId {
    AttachmentId::Adopted(found.metadata.uid.clone().unwrap_or_default())
}

fn is_same_pod(known: &PodIdentity, found: &Pod) -> bool {
    let meta = &found.metadata;
    meta.namespace.as_deref() == Some(known.namespace())
        && meta.name.as_deref() == Some(known.name())
        && known.uid().is_none_or(|uid| pod::is_meant(found, uid))
}

fn kept_already(key: &StickyKey, kept: &StoredRecord) -> String {
    format!("{} is kept here for StickyIP {key} already", list(&kept.record.addresses))
}

/// Whether an address is kept for no other than this StickyIP: for it, or it is unowned already.
fn is_kept_only_for(record: &Record, key: &StickyKey) -> bool {
    record.is_unowned() || is_bound_to(record, key)
}
