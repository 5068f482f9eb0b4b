//! The MAC of a sticky pod: recorded from what Cilium's socket says, the same way in every mode and at no cost to ADD, and,
//! where it is to be kept, asked for by the pod's annotation while the pod is prepared.
//!
//! Must never touch a pod that asks for a MAC of its own, and never let a kept MAC be lost in silence.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch};
use serde_json::json;

use super::act::{ActError, Hands, Outcome, bound};
use super::install::Mode;
use crate::cluster::claims::carry::{Carried, Sent, patch_params};
use crate::cluster::claims::errand;
use crate::cluster::claims::step::at_sticky;
use crate::cluster::claims::view::StickyView;
use crate::cluster::claims::walk;
use crate::cluster::claims::write::Write;
use crate::cluster::client::ApiError;
use crate::cluster::events::{self, Told};
use crate::cluster::objects::{Holder, StickyIP};
use crate::policy::facts::PodFacts;
use crate::policy::mac::{ASKED_OF_CILIUM, is_mac, keeps_mac};
use crate::store::Disk;

/// How often others may write the pod between our read and our write.
const MOST_TRIES: usize = 8;

impl<D: Disk + Clone> Hands<'_, D> {
    /// Has a new pod ask Cilium for the MAC that its StickyIP remembers. Before its ADD: Cilium reads it then.
    pub(super) async fn ask_for_mac(&self, facts: &PodFacts, sticky: &StickyIP) -> Result<(), ActError> {
        let mac = sticky.status.as_ref().and_then(|status| status.mac.clone());
        let Some(mac) = mac.filter(|mac| is_mac(mac)) else { return Ok(()) };
        if facts.annotations.contains_key(ASKED_OF_CILIUM) || !self.keeps(facts).await? {
            return Ok(());
        }
        let mut carrier = self.carrier();
        let api = carrier.api().clone();
        let pods: Api<Pod> = Api::namespaced(api.client(), &facts.namespace);
        let params = patch_params();
        let what = format!("patch Pod {}/{}", facts.namespace, facts.name);
        for _ in 0..MOST_TRIES {
            let found = api.read(&what, || pods.get_metadata_opt(&facts.name)).await?;
            let Some(meta) = found.map(|found| found.metadata) else { return Ok(()) };
            let asks = meta.annotations.as_ref().is_some_and(|all| all.contains_key(ASKED_OF_CILIUM));
            if meta.uid.as_deref() != Some(&facts.uid) || asks {
                return Ok(());
            }
            let patch = Patch::Merge(json!({"metadata": {
                "uid": facts.uid, "resourceVersion": meta.resource_version,
                "annotations": {ASKED_OF_CILIUM: mac},
            }}));
            let sent = async { api.once(&what, pods.patch_metadata(&facts.name, &params, &patch)).await };
            match carrier.witnessed(Sent::Pod(&facts.name), sent).await {
                Ok(_) | Err(ApiError::Refused { code: 404, .. }) => return Ok(()),
                Err(ApiError::Refused { code: 409, .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(ActError::Name(format!("others changed pod {}/{} every time", facts.namespace, facts.name)))
    }

    /// Whether the pod's MAC is to be kept. In chained mode another plugin makes the interface, and Cilium cannot set it.
    async fn keeps(&self, facts: &PodFacts) -> Result<bool, ActError> {
        if self.settings.mode == Mode::Chained {
            return Ok(false);
        }
        let mut facts = facts.clone();
        if facts.namespace_annotations.is_empty() {
            facts.namespace_annotations = errand::of_namespace(&self.connection(), &facts.namespace).await?;
        }
        Ok(keeps_mac(self.settings.keep_mac, &facts).unwrap_or_else(|error| {
            tracing::warn!(namespace = facts.namespace, pod = facts.name, %error, "cannot tell whether the MAC is kept");
            false
        }))
    }

    /// Records the MAC that Cilium says a living pod of a StickyIP has. One that should have been kept and was not is told.
    pub(super) async fn record_mac(&self, key: &Holder) -> Result<Outcome, ActError> {
        let store = self.store()?;
        let living = store.lock()?.of_claimant(&bound(key)?)?.map(|stored| stored.record);
        let Some(record) = living.filter(|record| record.is_attached(store.now())) else {
            return Ok(Outcome::Needless("no sandbox lives with it".into()));
        };
        let Some(address) = record.addresses.first() else {
            return Ok(Outcome::Needless("it has no address".into()));
        };
        let about = match self.endpoint_of(*address).await {
            Ok(Some(about)) if about.container == record.attachment.container.as_str() => about,
            Ok(_) => return Ok(Outcome::Later("Cilium has no endpoint of its sandbox yet".into())),
            // Cilium may be restarting; nothing rests on this.
            Err(error) => return Ok(Outcome::Later(error.to_string())),
        };
        let mac = about.mac.to_lowercase();
        if !is_mac(&mac) {
            return Ok(Outcome::Later(format!("Cilium says that its MAC is {mac:?}")));
        }
        let recorded = |sticky: &StickyIP| sticky.status.as_ref().and_then(|status| status.mac.clone());
        if self.index.stickies.get(&key.to_string()).and_then(recorded).as_ref() == Some(&mac) {
            return Ok(Outcome::Needless("it is recorded".into()));
        }
        let mut carrier = self.carrier();
        let Some(object) = walk::read_sticky(&carrier, key).await? else {
            return Ok(Outcome::Needless("the StickyIP does not exist any more".into()));
        };
        let attachment = object.status.as_ref().and_then(|status| status.attachment.as_ref());
        let known_as = record.binding.as_ref().map(|binding| binding.container.as_str());
        let ids = [Some(record.attachment.container.as_str()), known_as];
        let ours = attachment.filter(|attachment| {
            attachment.node == self.settings.node && ids.contains(&Some(attachment.container_id.as_str()))
        });
        let Some(attachment) = ours else {
            return Ok(Outcome::Later("another sandbox is attached, or none".into()));
        };
        if let Some(kept) = recorded(&object).filter(|kept| *kept != mac)
            && let Some(pod) = self.index.pod_of(&attachment.pod_uid)
            && pod.facts.annotations.get(ASKED_OF_CILIUM).is_none_or(|asked| *asked == kept)
            && self.keeps(&pod.facts).await?
        {
            let facts = &pod.facts;
            let message = format!(
                "it runs with the MAC {mac}, and not with {kept}, which StickyIP {key} keeps: it was not prepared in time; delete it to have it start anew"
            );
            let about = events::pod(&facts.namespace, &facts.name, &facts.uid);
            events::tell(
                &mut carrier,
                &Told { about, reason: "MacNotKept", message: message.clone(), warning: true },
            )
            .await;
            return Ok(Outcome::Odd(format!("pod {}/{}: {message}", facts.namespace, facts.name)));
        }
        let at = at_sticky(&StickyView::from(&object));
        match carrier.carry(&Write::RecordMac { key: key.clone(), at, mac: mac.clone() }, None, "").await? {
            Carried::Lost => Ok(Outcome::Later("the StickyIP changed meanwhile".into())),
            _ => Ok(Outcome::Done(format!("its MAC is {mac}"))),
        }
    }
}
