//! Granting an address of this node to the StickyIP of the pod that has it already. The one case in which an address that
//! anybody could have becomes somebody's own.
//!
//! Must never grant what another pod has, or what this one has ceased to have: the pod is looked up live, by its uid, and the
//! node's own evidence names it (the store's record under the lock, or Cilium's endpoint where Cilium picks the addresses).
//! Record and key stand, and Cilium knows the key's owner, before the claim is granted, so whoever ends in between is gone on with by the next answer; and if
//! nobody asks any more, they go as every record that is kept for nobody.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use crate::agent::actions::{ActionContext, ActionError, ActionOutcome, bound, list, sandbox};
use crate::agent::plan::uid_of;
use crate::agent::snapshot::is_bound_to;
use crate::cluster::api::client::ApiError;
use crate::cluster::cilium::barrier;
use crate::cluster::cilium::objects::{CiliumNode, PoolEntry};
use crate::cluster::cilium::pool;
use crate::cluster::cilium::pool::NodePatch;
use crate::cluster::cilium::socket;
use crate::cluster::cilium::socket::EndpointInfo;
use crate::cluster::objects::{ClaimPhase, ClaimedPod, StickyKey, Validate};
use crate::cluster::pod;
use crate::cluster::protocol::apply::{ApiWriter, Applied};
use crate::cluster::protocol::bind;
use crate::cluster::protocol::view::ClaimView;
use crate::cluster::protocol::write::{Precondition, Write};
use crate::cluster::protocol::{adopted, sticky_identity};
use crate::cni::{Attachment, PodIdentity};
use crate::policy::handover::OldPod;
use crate::policy::selection::claimant::Claimant;
use crate::store::{Disk, Keep, Phase, Record, StickyBinding, StoredRecord};

/// How long to wait here until Cilium's watch has told it of a write: it takes some milliseconds, and what takes longer is asked
/// for again later.
const WATCH_PATIENCE: Duration = Duration::from_millis(200);
/// Between two questions to Cilium.
const WATCH_PAUSE: Duration = Duration::from_millis(5);

/// Whether the address is its pod's own now.
#[derive(Debug)]
pub(crate) enum Bound {
    /// The record stands, and the key, and Cilium knows it.
    Yes,
    /// It cannot be.
    No(String),
    /// The world moved on meanwhile.
    NotYet(String),
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Binds an address of this node to the StickyIP of the pod that has it: in the store, and in the pool.
    pub(crate) async fn bind_to_its_pod(
        &self,
        api_writer: &mut ApiWriter<'_>,
        view: &ClaimView,
        claimed: &ClaimedPod,
    ) -> Result<Bound, ActionError> {
        let (address, key) = (view.address, &view.sticky_ref);
        let api = api_writer.api().clone();
        // Before the pod is looked up: whatever Cilium writes after this look makes the write of the key fail.
        let node = match self.settings.mode.publishes_pool_entries() {
            true => match pool::read_node(&api, &self.settings.node).await? {
                Some(node) => Some(node),
                None => return Ok(Bound::NotYet(format!("there is no CiliumNode {}", self.settings.node))),
            },
            false => None,
        };
        let pods: Api<Pod> = Api::namespaced(api.client(), &key.namespace);
        let what = format!("get Pod {}/{}", key.namespace, claimed.name);
        let found = api.read(&what, || pods.get_opt(&claimed.name)).await?;
        let named = format!("{}/{}", key.namespace, claimed.name);
        let bound = match (self.lives_with(found, claimed, address), &node) {
            (Ok(found), Some(node)) => self.own_the_key(api_writer, node, key, &found, address).await?,
            (Ok(found), None) => self.convert(api_writer, key, &found, address).await?,
            (Err(why), _) => Bound::No(format!("pod {named} {why}")),
        };
        if let (Bound::No(_), Some(node)) = (&bound, &node)
            && self.was_begun(node, view, claimed)?
            && !self.undo_adoption(api_writer, view, &named).await?
        {
            return Ok(Bound::NotYet("the claim or its record has changed meanwhile".into()));
        }
        Ok(bound)
    }

    /// Whether an earlier answer has begun to mark this very pod: its record stands, or the key has it as owner. Nothing else puts an owner
    /// there while the claim is not granted.
    fn was_begun(
        &self,
        node: &CiliumNode,
        view: &ClaimView,
        claimed: &ClaimedPod,
    ) -> Result<bool, ActionError> {
        let owner = format!("{}/{}", view.sticky_ref.namespace, claimed.name);
        let entry = node.spec.ipam.pool.get(&view.address.to_string());
        let there = self.store()?.lock()?.at(view.address)?;
        let attachment_id = there.and_then(|there| there.record.binding).map(|binding| binding.container);
        Ok(entry.is_some_and(|entry| entry.owner == owner) || attachment_id == Some(adopted(&claimed.uid)))
    }

    /// The pod, if the API server says that it is the one meant, lives on this node and shows the address.
    fn lives_with(&self, found: Option<Pod>, claimed: &ClaimedPod, address: IpAddr) -> Result<Pod, String> {
        let found = found.ok_or("does not exist any more")?;
        if found.metadata.uid.as_deref() != Some(&claimed.uid) {
            return Err("is another one by now".into());
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

    /// Where the node's store says who has what: the pod's record becomes the StickyIP's.
    async fn convert(
        &self,
        api_writer: &ApiWriter<'_>,
        key: &StickyKey,
        found: &Pod,
        address: IpAddr,
    ) -> Result<Bound, ActionError> {
        let store = self.store()?;
        let Some(there) = store.lock()?.at(address)? else {
            return Ok(Bound::No("the node's store knows of no pod that has it".into()));
        };
        let record = &there.record;
        let has_it = || Bound::No(format!("{} has it", record.holder()));
        let may_be_bound = record.binding.is_none()
            || is_bound_to(record, key)
            || self.has_lost_its_name(api_writer, record, found).await?;
        if !record.is_attached(store.now()) || !may_be_bound {
            return Ok(has_it());
        }
        let container = record.attachment.container.as_str();
        let its_own = match &record.pod {
            Some(known) => is_the_same(known, found),
            // Taken over from another plugin, which does not write pods down: Cilium knows.
            None => self
                .endpoint_of(address)
                .await?
                .is_some_and(|about| is_of(&about, found) && about.container == container),
        };
        if !its_own {
            return Ok(has_it());
        }
        if record.netns.as_ref().is_some_and(|netns| !self.may_exist(netns)) {
            return Ok(Bound::No(format!("the sandbox {container} of the pod is gone")));
        }
        let bound_already = is_bound_to(record, key);
        let record = adopted_record(record.clone(), key, found)?;
        let mut locked = store.lock()?;
        if locked.at(address)?.as_ref() != Some(&there) {
            return Ok(Bound::NotYet("the store has changed meanwhile".into()));
        }
        if let Some(kept) = locked.find_by_claimant(&bound(key)?)?.filter(|kept| *kept != there) {
            return Ok(Bound::No(keeps(key, &kept)));
        }
        if !bound_already {
            locked.put(&record, Some(&there))?;
        }
        // It was not sticky when it was decided about.
        locked.remove_decision_durably(pod::runtime_uid(found))?;
        locked.commit()?;
        Ok(Bound::Yes)
    }

    /// Where Cilium picks the addresses: the record first, so that the address is not offered to anybody again, then the owner
    /// of the pool's key, then the proof that Cilium knows of the owner, then another look whether the pod still has it.
    async fn own_the_key(
        &self,
        api_writer: &mut ApiWriter<'_>,
        node: &CiliumNode,
        key: &StickyKey,
        found: &Pod,
        address: IpAddr,
    ) -> Result<Bound, ActionError> {
        let text = address.to_string();
        let facts = pod::facts(found, BTreeMap::new());
        let owner = format!("{}/{}", facts.namespace, facts.name);
        let Some(entry) = node.spec.ipam.pool.get(&text) else {
            return Ok(Bound::No(format!(
                "it does not stand in the pool of CiliumNode {}",
                self.settings.node
            )));
        };
        let is_own = entry.owner == owner;
        if !is_own && !entry.owner.is_empty() {
            return Ok(Bound::No(format!("the pool has it for {}", entry.owner)));
        }
        let about = match self.endpoint_of(address).await? {
            Some(about) if is_of(&about, found) => about,
            Some(about) => {
                return Ok(Bound::No(format!("Cilium says that {}/{} has it", about.namespace, about.pod)));
            }
            None => return Ok(Bound::No("Cilium has no endpoint with it".into())),
        };
        let known = self.store()?.lock()?.at(address)?;
        let lost = match known.filter(|known| !is_bound_to(&known.record, key)) {
            Some(known) if self.has_lost_its_name(api_writer, &known.record, found).await? => Some(known),
            _ => None,
        };
        let kept = self.keep_for_its_pod(key, found, &sandbox(&about.container)?, address, lost.as_ref());
        if let Some(why) = kept? {
            return Ok(Bound::No(why));
        }
        let sign = match barrier::of(node, address).filter(|_| is_own) {
            Some(sign) => sign,
            None => {
                let workload = sticky_identity::workload(&Claimant::of(&facts));
                let resource = pool::resource(&facts.namespace, &workload);
                let entry = PoolEntry { owner: owner.clone(), resource };
                let (sign, of_sign) = barrier::fresh(node, address);
                // Other claims' signs stay: whoever waits for one finds it again.
                let old = barrier::of(node, address).map(|old| (old.to_string(), None));
                let mut keys: BTreeMap<_, _> = old.into_iter().collect();
                keys.extend([(text.clone(), Some(entry)), (sign.to_string(), Some(of_sign))]);
                match pool::apply_patch(api_writer, &NodePatch::of_keys(node, keys)).await {
                    Ok(()) => {}
                    Err(ApiError::Refused { code: 404 | 409 | 412, .. }) => {
                        return Ok(Bound::NotYet("the CiliumNode has changed meanwhile".into()));
                    }
                    Err(error) => return Err(error.into()),
                }
                sign
            }
        };
        let knows_the_owner = self.comes_to_know(sign).await?;
        if self.endpoint_of(address).await?.is_some_and(|now| now == about) {
            return Ok(match knows_the_owner {
                true => Bound::Yes,
                // If the pod ended now, Cilium would give the address to anybody.
                false => Bound::NotYet(format!("Cilium does not know yet that {address} is {owner}'s")),
            });
        }
        Ok(Bound::No("its pod has let go of it meanwhile".into()))
    }

    /// Waits a moment until Cilium knows a sign, and so what was written with it.
    async fn comes_to_know(&self, sign: IpAddr) -> Result<bool, ActionError> {
        let asked_since = Instant::now();
        loop {
            if self.ask_cilium(&sign.to_string(), move |socket| socket::knows(socket, sign)).await? {
                return Ok(true);
            }
            if asked_since.elapsed() > WATCH_PATIENCE {
                return Ok(false);
            }
            tokio::time::sleep(WATCH_PAUSE).await;
        }
    }

    /// Whether a record was bound for this very pod to a name that the pod did not get in the end: another was faster, and what
    /// was asked for in that name is gone. By a live look. The claim that is being answered is for another name already.
    async fn has_lost_its_name(
        &self,
        api_writer: &ApiWriter<'_>,
        record: &Record,
        found: &Pod,
    ) -> Result<bool, ActionError> {
        let uid = found.metadata.uid.as_deref().unwrap_or_default();
        let Some(old) = record.binding.as_ref().filter(|old| old.container == adopted(uid)) else {
            return Ok(false);
        };
        let old = StickyKey { namespace: old.namespace.clone(), name: old.name.clone() };
        for address in &record.addresses {
            if self.claim_on(*address).await?.is_some_and(|claim| claim.spec.sticky_ref == old) {
                return Ok(false);
            }
        }
        let sticky = bind::read_sticky(api_writer, &old).await?;
        Ok(sticky.is_none_or(|sticky| {
            !record.addresses.iter().any(|address| sticky.spec.addresses.contains(address))
        }))
    }

    /// Writes down that the pod's sandbox has the address through the StickyIP; the reason if it cannot be. `lost` is the record as
    /// it was seen under a name that it has lost.
    fn keep_for_its_pod(
        &self,
        key: &StickyKey,
        found: &Pod,
        attachment: &Attachment,
        address: IpAddr,
        lost: Option<&StoredRecord>,
    ) -> Result<Option<String>, ActionError> {
        let store = self.store()?;
        let mut locked = store.lock()?;
        let there = locked.at(address)?;
        if let Some(there) = &there
            && !there.record.is_unowned()
            && !is_bound_to(&there.record, key)
            && lost != Some(there)
        {
            return Ok(Some(format!("{} has it", there.record.holder())));
        }
        let kept = locked.find_by_claimant(&bound(key)?)?.filter(|kept| Some(kept) != there.as_ref());
        let mut addresses = Vec::new();
        if let Some(kept) = &kept {
            // Its address of the other family, which came first.
            if !kept.record.is_attached(store.now()) || kept.record.attachment != *attachment {
                return Ok(Some(keeps(key, kept)));
            }
            addresses.clone_from(&kept.record.addresses);
        }
        // With the other family's, which it has under the lost name too.
        let also = lost.filter(|lost| there.as_ref() == Some(lost));
        addresses
            .extend(also.iter().flat_map(|lost| &lost.record.addresses).filter(|other| **other != address));
        addresses.push(address);
        let bare = Record {
            addresses,
            attachment: attachment.clone(),
            phase: Phase::Attached,
            netns: None,
            pod: None,
            keep: Keep::Forever,
            binding: None,
            since: store.now().clone(),
        };
        let same = |there: &StoredRecord| {
            there.record.attachment == *attachment && there.record.is_attached(store.now())
        };
        if !there.as_ref().is_some_and(|there| is_bound_to(&there.record, key) && same(there)) {
            let record = adopted_record(bare, key, found)?;
            locked.put_reclaiming(&record, kept.as_ref(), there.as_slice())?;
        }
        locked.remove_decision_durably(pod::runtime_uid(found))?;
        locked.commit()?;
        Ok(None)
    }

    /// Has a claim forget the pod that had its address before it was claimed: from here on its StickyIP may be attached to
    /// others, also if it was never attached to that one.
    pub(crate) async fn finish_adoption(&self, address: IpAddr) -> Result<ActionOutcome, ActionError> {
        let mut api_writer = self.api_writer();
        let claim = self.claim_on(address).await?;
        let Some(view) =
            claim.filter(|claim| claim.validation_error().is_none()).map(|claim| ClaimView::from(&claim))
        else {
            return Ok(ActionOutcome::NotNeeded("the claim is gone".into()));
        };
        let ours = view.home_node.as_deref() == Some(&self.settings.node);
        let granted = matches!(view.phase, ClaimPhase::Granted | ClaimPhase::Bound | ClaimPhase::Quarantined);
        let Some(pod) = view.pod.filter(|_| ours && granted) else {
            return Ok(ActionOutcome::NotNeeded("the claim names no pod".into()));
        };
        if self.pod_exists(&view.sticky_ref.namespace, &pod.name, &pod.uid).await? {
            return Ok(ActionOutcome::Postponed("its pod exists".into()));
        }
        let store = self.store()?;
        let living = store.lock()?.at(address)?.map(|there| there.record);
        let living = living.filter(|record| record.is_attached(store.now()));
        // A newer pod of the StickyIP has it: it came by the protocol, so the first one is gone.
        let is_next = |record: &Record| {
            is_bound_to(record, &view.sticky_ref) && uid_of(record).is_some_and(|uid| uid != pod.uid)
        };
        match living {
            Some(record) if is_next(&record) => {}
            Some(_) => return Ok(ActionOutcome::Postponed("a sandbox lives with it".into())),
            None => {
                if let Some(later) = self.postponed_by_cilium(&[address]).await? {
                    return Ok(later);
                }
            }
        }
        let at = Precondition { uid: view.uid, resource_version: view.resource_version };
        match api_writer.apply(&Write::ClearPod { address, at }, None, "").await? {
            Applied::Conflict => Ok(ActionOutcome::Postponed("the claim changed meanwhile".into())),
            _ => Ok(ActionOutcome::Done(format!(
                "pod {} is gone; {address} is StickyIP {}'s",
                pod.name, view.sticky_ref
            ))),
        }
    }
}

/// The record as it is once its address is the StickyIP's.
fn adopted_record(record: Record, key: &StickyKey, found: &Pod) -> Result<Record, ActionError> {
    let uid = found.metadata.uid.as_deref().unwrap_or_default();
    let name = found.metadata.name.as_deref().unwrap_or_default();
    let pod = PodIdentity::new(&key.namespace, name, Some(pod::runtime_uid(found)))
        .map_err(|error| ActionError::Name(error.to_string()))?;
    let binding =
        StickyBinding { namespace: key.namespace.clone(), name: key.name.clone(), container: adopted(uid) };
    // The sandbox stays what it was: its DEL finds the record by its own container id.
    Ok(Record { keep: Keep::Forever, binding: Some(binding), pod: Some(pod), ..record })
}

fn is_the_same(known: &PodIdentity, found: &Pod) -> bool {
    let meta = &found.metadata;
    meta.namespace.as_deref() == Some(known.namespace())
        && meta.name.as_deref() == Some(known.name())
        && known.uid().is_none_or(|uid| pod::is_meant(found, uid))
}

fn is_of(about: &EndpointInfo, found: &Pod) -> bool {
    let meta = &found.metadata;
    meta.namespace.as_deref() == Some(&about.namespace)
        && meta.name.as_deref() == Some(&about.pod)
        && !about.container.is_empty()
}

fn keeps(key: &StickyKey, kept: &StoredRecord) -> String {
    format!("{} is kept here for StickyIP {key} already", list(&kept.record.addresses))
}
