//! Keeping the MAC of a sticky pod, where that is asked for: its annotation asks Cilium for the recorded one
//! while the pod is prepared.
//!
//! Must never change a pod that asks for a MAC of its own.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch};
use serde_json::json;

use super::{ActionContext, ActionError, Performed};
use crate::cluster::api::client::ApiError;
use crate::cluster::objects::StickyIP;
use crate::cluster::protocol::sticky_identity;
use crate::cluster::writer::apply::{SentWrite, patch_params};
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::mac::{CILIUM_MAC_ANNOTATION, KEEP_MAC, is_mac, keeps_mac};
use crate::store::Disk;

/// How often others may write the pod between our read and our write.
const MAX_TRIES: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MacKeeping {
    Kept,
    NotKept,
    /// It has not been asked for yet.
    NotRead,
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Has a new pod ask Cilium for the recorded MAC of its StickyIP. Before its ADD: Cilium reads the
    /// annotation then.
    pub(super) async fn ask_for_mac(
        &self,
        facts: &PodFacts,
        keeping: MacKeeping,
        sticky: &StickyIP,
    ) -> Performed<()> {
        let Some(mac) = recorded(sticky) else { return Ok(()) };
        if facts.annotations.contains_key(CILIUM_MAC_ANNOTATION) {
            return Ok(());
        }
        match keeping {
            MacKeeping::Kept => {}
            MacKeeping::NotRead if self.keeps(facts).await? => {}
            MacKeeping::NotRead | MacKeeping::NotKept => return Ok(()),
        }
        let mut api_writer = self.api_writer();
        let api = api_writer.api().clone();
        let pods: Api<Pod> = Api::namespaced(api.client(), &facts.namespace);
        let params = patch_params();
        let what = format!("patch Pod {}/{}", facts.namespace, facts.name);
        for _ in 0..MAX_TRIES {
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
        let (namespace, pod) = (facts.namespace.clone(), facts.name.clone());
        Err(ActionError::PodChanged { namespace, pod, tries: MAX_TRIES })
    }

    /// Whether the recorded MAC of a StickyIP is kept, where the annotations of the pod's namespace came from
    /// the API server's cache: that it is not kept is read again live.
    pub(super) async fn keeps_by_cache(
        &self,
        facts: &PodFacts,
        cached: &BTreeMap<String, String>,
        sticky: &StickyIP,
    ) -> Performed<MacKeeping> {
        if recorded(sticky).is_none() || facts.annotations.contains_key(CILIUM_MAC_ANNOTATION) {
            return Ok(MacKeeping::NotRead);
        }
        let with = |namespace_annotations| PodFacts { namespace_annotations, ..facts.clone() };
        let by_cache = keeps_mac(self.settings.keep_mac, &with(cached.clone())).unwrap_or_default();
        if by_cache && self.settings.mode.can_keep_mac() {
            return Ok(MacKeeping::Kept);
        }
        let is_kept = self.keeps(&with(BTreeMap::new())).await?;
        Ok(if is_kept { MacKeeping::Kept } else { MacKeeping::NotKept })
    }

    /// Whether the pod's MAC is kept. In chained mode another plugin makes the interface, and Cilium cannot
    /// set it.
    pub(super) async fn keeps(&self, facts: &PodFacts) -> Performed<bool> {
        if !self.settings.mode.can_keep_mac() {
            return Ok(false);
        }
        let mut facts = facts.clone();
        if facts.namespace_annotations.is_empty() && !facts.annotations.contains_key(KEEP_MAC) {
            facts.namespace_annotations =
                sticky_identity::of_namespace(&self.connection(), &facts.namespace).await?;
        }
        Ok(keeps_mac(self.settings.keep_mac, &facts).unwrap_or_else(|error| {
            let (namespace, pod) = (&facts.namespace, &facts.name);
            tracing::warn!(namespace, pod, %error, "cannot read whether the MAC is kept; it is not");
            false
        }))
    }
}

pub(super) fn recorded(sticky: &StickyIP) -> Option<String> {
    sticky.status.as_ref().and_then(|status| status.mac.clone()).filter(|mac| is_mac(mac))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::agent::actions::NamespaceReads;
    use crate::agent::flags::AgentCommandLine;
    use crate::agent::index::NodeIndex;
    use crate::agent::metrics::AgentMetrics;
    use crate::agent::plan::PlanOptions;
    use crate::cluster::api::canned::Canned;
    use crate::cluster::writer::apply::NoObserver;
    use crate::policy::pool_size::PoolLimits;
    use crate::policy::selection::facts::fixture::pod;
    use crate::policy::selection::mac::KEEP_MAC;
    use crate::store::RealDisk;

    #[tokio::test]
    async fn only_that_a_mac_is_kept_is_taken_from_the_cache() {
        let sticky = json!({"metadata": {"name": "db-0", "namespace": "db"},
            "spec": {"addresses": ["10.0.0.1"], "claimant": {"kind": "Pod"}, "workload": {"apiVersion": "v1", "kind": "Pod", "name": "db-0"}},
            "status": {"mac": "0a:58:00:00:00:07"}});
        let sticky: StickyIP = serde_json::from_value(sticky).unwrap();
        let server = Canned::new();
        let line = ["sticky-ipam-agent", "--node", "n1", "--network", "net"];
        let settings = AgentCommandLine::try_parse_from(line).unwrap().settings;
        let options = PlanOptions {
            node: "n1".into(),
            shape: settings.shape(Vec::new()),
            ranges: Vec::new(),
            pool_limits: PoolLimits { min_free: 0, max_entries: 0 },
            rules: settings.selection.rules(),
        };
        let (index, metrics) = (NodeIndex::default(), AgentMetrics::default());
        let context = ActionContext {
            settings: &settings,
            options: &options,
            index: &index,
            client: server.client(),
            disk: RealDisk,
            observer: &NoObserver,
            metrics: &metrics,
            namespaces: &NamespaceReads::default(),
        };
        let word = |said: &str| BTreeMap::from([(KEEP_MAC.to_owned(), said.to_owned())]);
        let facts = pod("db-0");
        let path = format!("/api/v1/namespaces/{}", facts.namespace);
        let live = |said: &str| {
            let metadata = json!({"name": facts.namespace, "annotations": word(said)});
            server.answer(&path, json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}));
        };
        for (cached, said, expected, is_read) in [
            (word("true"), "false", MacKeeping::Kept, false),
            (word("false"), "true", MacKeeping::Kept, true),
            (BTreeMap::new(), "true", MacKeeping::Kept, true),
            (word("neither"), "false", MacKeeping::NotKept, true),
        ] {
            live(said);
            // As they were judged by the same cache.
            let facts = PodFacts { namespace_annotations: cached.clone(), ..facts.clone() };
            let found = context.keeps_by_cache(&facts, &cached, &sticky).await.unwrap();
            assert_eq!((found, server.asked().len()), (expected, usize::from(is_read)), "{cached:?}");
        }
        let own = PodFacts { annotations: word("false"), ..facts.clone() };
        let found = context.keeps_by_cache(&own, &BTreeMap::new(), &sticky).await.unwrap();
        assert_eq!((found, server.asked()), (MacKeeping::NotKept, vec![]), "the pod's own word");
    }
}
