//! The MAC of a sticky pod: recorded from what Cilium's socket says, the same way in every mode and at no cost to ADD, and,
//! where it is to be kept, asked for by the pod's annotation while the pod is prepared.
//!
//! Must never touch a pod that asks for a MAC of its own, and never let a kept MAC be lost in silence.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch};
use serde_json::json;

use crate::agent::actions::{ActionContext, ActionError, ActionOutcome, bound};
use crate::cluster::api::client::ApiError;
use crate::cluster::api::events;
use crate::cluster::api::events::Told;
use crate::cluster::objects::{StickyIP, StickyKey};
use crate::cluster::protocol::apply::{Applied, SentWrite, patch_params};
use crate::cluster::protocol::bind;
use crate::cluster::protocol::step::at_sticky;
use crate::cluster::protocol::sticky_identity;
use crate::cluster::protocol::view::StickyView;
use crate::cluster::protocol::write::Write;
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::mac::{CILIUM_MAC_ANNOTATION, KEEP_MAC, is_mac, keeps_mac};
use crate::store::Disk;

/// How often others may write the pod between our read and our write.
const MOST_TRIES: usize = 8;

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Has a new pod ask Cilium for the MAC that its StickyIP remembers. Before its ADD: Cilium reads it then.
    /// `keeps` is whether it is to be kept, if that was asked for.
    pub(crate) async fn ask_for_mac(
        &self,
        facts: &PodFacts,
        keeps: Option<bool>,
        sticky: &StickyIP,
    ) -> Result<(), ActionError> {
        let Some(mac) = recorded(sticky) else { return Ok(()) };
        if facts.annotations.contains_key(CILIUM_MAC_ANNOTATION) {
            return Ok(());
        }
        let keeps = match keeps {
            Some(keeps) => keeps,
            None => self.keeps(facts).await?,
        };
        if !keeps {
            return Ok(());
        }
        let mut api_writer = self.api_writer();
        let api = api_writer.api().clone();
        let pods: Api<Pod> = Api::namespaced(api.client(), &facts.namespace);
        let params = patch_params();
        let what = format!("patch Pod {}/{}", facts.namespace, facts.name);
        for _ in 0..MOST_TRIES {
            let found = api.read(&what, || pods.get_metadata_opt(&facts.name)).await?;
            let Some(meta) = found.map(|found| found.metadata) else { return Ok(()) };
            let asks = meta.annotations.as_ref().is_some_and(|all| all.contains_key(CILIUM_MAC_ANNOTATION));
            if meta.uid.as_deref() != Some(&facts.uid) || asks {
                return Ok(());
            }
            let patch = Patch::Merge(json!({"metadata": {
                "uid": facts.uid, "resourceVersion": meta.resource_version,
                "annotations": {CILIUM_MAC_ANNOTATION: mac},
            }}));
            let sent = async { api.once(&what, pods.patch_metadata(&facts.name, &params, &patch)).await };
            match api_writer.observed(SentWrite::Pod(&facts.name), sent).await {
                Ok(_) | Err(ApiError::Refused { code: 404, .. }) => return Ok(()),
                Err(ApiError::Refused { code: 409, .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(ActionError::Name(format!("others changed pod {}/{} every time", facts.namespace, facts.name)))
    }

    /// Whether the MAC that a StickyIP remembers is to be kept, where the API server remembers what the pod's namespace says: a "no" of
    /// that memory is looked up live. None if there is nothing to keep.
    pub(crate) async fn keeps_by_memory(
        &self,
        facts: &PodFacts,
        remembered: &BTreeMap<String, String>,
        sticky: &StickyIP,
    ) -> Result<Option<bool>, ActionError> {
        if recorded(sticky).is_none() || facts.annotations.contains_key(CILIUM_MAC_ANNOTATION) {
            return Ok(None);
        }
        let of = |namespace_annotations| PodFacts { namespace_annotations, ..facts.clone() };
        let by_memory = keeps_mac(self.settings.keep_mac, &of(remembered.clone())).unwrap_or_default();
        if by_memory && self.settings.mode.can_keep_mac() {
            return Ok(Some(true));
        }
        self.keeps(&of(BTreeMap::new())).await.map(Some)
    }

    /// Whether the pod's MAC is to be kept. In chained mode another plugin makes the interface, and Cilium cannot set it.
    async fn keeps(&self, facts: &PodFacts) -> Result<bool, ActionError> {
        if !self.settings.mode.can_keep_mac() {
            return Ok(false);
        }
        let mut facts = facts.clone();
        if facts.namespace_annotations.is_empty() && !facts.annotations.contains_key(KEEP_MAC) {
            facts.namespace_annotations =
                sticky_identity::of_namespace(&self.connection(), &facts.namespace).await?;
        }
        Ok(keeps_mac(self.settings.keep_mac, &facts).unwrap_or_else(|error| {
            tracing::warn!(namespace = facts.namespace, pod = facts.name, %error, "cannot tell whether the MAC is kept");
            false
        }))
    }

    /// Records the MAC that Cilium says a living pod of a StickyIP has. One that should have been kept and was not is told.
    pub(crate) async fn record_mac(&self, key: &StickyKey) -> Result<ActionOutcome, ActionError> {
        let store = self.store()?;
        let living = store.lock()?.find_by_claimant(&bound(key)?)?.map(|stored| stored.record);
        let Some(record) = living.filter(|record| record.is_attached(store.now())) else {
            return Ok(ActionOutcome::NotNeeded("no sandbox lives with it".into()));
        };
        let Some(address) = record.addresses.first() else {
            return Ok(ActionOutcome::NotNeeded("it has no address".into()));
        };
        let about = match self.endpoint_of(*address).await {
            Ok(Some(about)) if about.container == record.attachment.container.as_str() => about,
            Ok(_) => return Ok(ActionOutcome::Postponed("Cilium has no endpoint of its sandbox yet".into())),
            // Cilium may be restarting; nothing rests on this.
            Err(error) => return Ok(ActionOutcome::Postponed(error.to_string())),
        };
        let mac = about.mac.to_lowercase();
        if !is_mac(&mac) {
            return Ok(ActionOutcome::Postponed(format!("Cilium says that its MAC is {mac:?}")));
        }
        if self.index.stickies.get(&key.to_string()).and_then(recorded).as_ref() == Some(&mac) {
            return Ok(ActionOutcome::NotNeeded("it is recorded".into()));
        }
        let mut api_writer = self.api_writer();
        let Some(object) = bind::read_sticky(&api_writer, key).await? else {
            return Ok(ActionOutcome::NotNeeded("the StickyIP does not exist any more".into()));
        };
        let attachment = object.status.as_ref().and_then(|status| status.attachment.as_ref());
        let attachment_id = record.binding.as_ref().map(|binding| binding.container.as_str());
        let ids = [Some(record.attachment.container.as_str()), attachment_id];
        let ours = attachment.filter(|attachment| {
            attachment.node == self.settings.node && ids.contains(&Some(attachment.container_id.as_str()))
        });
        let Some(attachment) = ours else {
            return Ok(ActionOutcome::Postponed("another sandbox is attached, or none".into()));
        };
        if let Some(kept) = recorded(&object).filter(|kept| *kept != mac)
            && let Some(pod) = self.index.pod_of(&attachment.pod_uid)
            && pod.facts.annotations.get(CILIUM_MAC_ANNOTATION).is_none_or(|asked| *asked == kept)
            && self.keeps(&pod.facts).await?
        {
            let facts = &pod.facts;
            let message = format!(
                "it runs with the MAC {mac}, and not with {kept}, which StickyIP {key} keeps: it was not prepared in time; delete it to have it start anew"
            );
            let about = events::pod(&facts.namespace, &facts.name, &facts.uid);
            events::tell(
                &mut api_writer,
                &Told { about, reason: "MacNotKept", message: message.clone(), warning: true },
            )
            .await;
            return Ok(ActionOutcome::NeedsAttention(format!(
                "pod {}/{}: {message}",
                facts.namespace, facts.name
            )));
        }
        let at = at_sticky(&StickyView::from(&object));
        match api_writer.apply(&Write::RecordMac { key: key.clone(), at, mac: mac.clone() }, None, "").await?
        {
            Applied::Conflict => Ok(ActionOutcome::Postponed("the StickyIP changed meanwhile".into())),
            _ => Ok(ActionOutcome::Done(format!("its MAC is {mac}"))),
        }
    }
}

/// The MAC that a StickyIP remembers.
fn recorded(sticky: &StickyIP) -> Option<String> {
    sticky.status.as_ref().and_then(|status| status.mac.clone()).filter(|mac| is_mac(mac))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::agent::flags::AgentCommandLine;
    use crate::agent::index::NodeIndex;
    use crate::agent::metrics::AgentMetrics;
    use crate::agent::plan::PlanOptions;
    use crate::cluster::api::canned::Canned;
    use crate::cluster::protocol::apply::NoObserver;
    use crate::policy::selection::facts::fixture::pod;
    use crate::policy::selection::mac::KEEP_MAC;
    use crate::store::RealDisk;

    #[tokio::test]
    async fn only_a_yes_of_the_api_servers_memory_counts_and_a_no_is_looked_up() {
        let sticky = json!({"metadata": {"name": "db-0", "namespace": "db"}, "spec": {"addresses": ["10.0.0.1"],
            "claimant": {"kind": "Pod"}, "workload": {"apiVersion": "v1", "kind": "Pod", "name": "db-0"}},
            "status": {"mac": "0a:58:00:00:00:07"}});
        let sticky: StickyIP = serde_json::from_value(sticky).unwrap();
        let server = Canned::new();
        let line = ["sticky-ipam-agent", "--node", "n1", "--network", "net"];
        let settings = AgentCommandLine::try_parse_from(line).unwrap().settings;
        let options = PlanOptions {
            node: "n1".into(),
            shape: settings.shape(Vec::new()),
            ranges: Vec::new(),
            min_free: 0,
            max_entries: 0,
            rules: settings.selection.rules(),
        };
        let (index, metrics) = (NodeIndex::default(), AgentMetrics::default());
        let hands = ActionContext {
            settings: &settings,
            options: &options,
            index: &index,
            client: server.client(),
            disk: RealDisk,
            observer: &NoObserver,
            metrics: &metrics,
        };
        let word = |said: &str| BTreeMap::from([(KEEP_MAC.to_owned(), said.to_owned())]);
        let facts = pod("db-0");
        let path = format!("/api/v1/namespaces/{}", facts.namespace);
        let live = |said: &str| {
            let metadata = json!({"name": facts.namespace, "annotations": word(said)});
            server.answer(&path, json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}));
        };
        for (remembered, said, keeps, is_looked_up) in [
            (word("true"), "false", true, false),
            (word("false"), "true", true, true),
            (BTreeMap::new(), "true", true, true),
            (word("neither"), "false", false, true),
        ] {
            live(said);
            // As they were judged by the same memory.
            let facts = PodFacts { namespace_annotations: remembered.clone(), ..facts.clone() };
            let found = hands.keeps_by_memory(&facts, &remembered, &sticky).await.unwrap();
            assert_eq!(
                (found, server.asked().len()),
                (Some(keeps), usize::from(is_looked_up)),
                "{remembered:?}"
            );
        }
        let own = PodFacts { annotations: word("false"), ..facts.clone() };
        let found = hands.keeps_by_memory(&own, &BTreeMap::new(), &sticky).await.unwrap();
        assert_eq!((found, server.asked()), (Some(false), vec![]), "the pod's own word");
    }
}
