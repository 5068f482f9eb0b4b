//! The agent's five watches: this node's pods, the StickyIPs attached to it, the claims on its addresses, its
//! own CiliumNode and Node. Must never end because of one object.

use std::time::Duration;

use futures_util::{Stream, StreamExt, pin_mut};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, Resource};
use kube::core::DeserializeGuard;
use kube::runtime::watcher;
use tokio::sync::mpsc::Sender;
use tokio::task::JoinSet;

use crate::agent::index::{CacheEvent, NodeIndex, NodeMark, NodePod};
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::objects::{AddressClaim, StickyIP, lenient::Skipped};
use crate::cluster::view::ClaimView;
use crate::runtime::watch::{WatchProblem, Watched, watch, watch_readable};

/// The names of the watches in logs and on /readyz.
const PODS: &str = "pods";
const STICKIES: &str = "StickyIPs";
const CLAIMS: &str = "AddressClaims";
const NODE: &str = "the CiliumNode";
const MARKS: &str = "the Node";

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "applied to the index one by one, never kept")]
pub enum IndexUpdate {
    Pod(CacheEvent<(String, NodePod)>),
    Sticky(CacheEvent<(String, StickyIP)>),
    Claim(CacheEvent<(String, ClaimView)>),
    Node(CacheEvent<(String, CiliumNode)>),
    Mark(CacheEvent<(String, NodeMark)>),
    Skipped(Skipped),
    /// A watch failed, and tries again. `unauthorized`: the credentials are not accepted.
    Failed {
        watch: &'static str,
        reason: String,
        unauthorized: bool,
    },
}

impl IndexUpdate {
    /// The watch whose list is complete with this.
    pub fn completes(&self) -> Option<&'static str> {
        match self {
            Self::Pod(CacheEvent::ListComplete) => Some(PODS),
            Self::Sticky(CacheEvent::ListComplete) => Some(STICKIES),
            Self::Claim(CacheEvent::ListComplete) => Some(CLAIMS),
            Self::Node(CacheEvent::ListComplete) => Some(NODE),
            Self::Mark(CacheEvent::ListComplete) => Some(MARKS),
            _ => None,
        }
    }
}

impl NodeIndex {
    pub fn apply(&mut self, update: IndexUpdate) {
        match update {
            IndexUpdate::Pod(event) => self.pods.apply(event),
            IndexUpdate::Sticky(event) => self.stickies.apply(event),
            IndexUpdate::Claim(event) => self.claims.apply(event),
            IndexUpdate::Node(event) => self.node.apply(event),
            IndexUpdate::Mark(event) => self.marks.apply(event),
            IndexUpdate::Skipped(_) | IndexUpdate::Failed { .. } => Vec::new(),
        };
    }
}

/// Starts all five. They end when the set is dropped.
pub fn start(client: &kube::Client, node: &str, out: &Sender<IndexUpdate>) -> JoinSet<()> {
    let mut watches = JoinSet::new();
    let by = |field: &str| watcher::Config::default().fields(&format!("{field}={node}"));
    let pods = watch_readable(api(client), by("spec.nodeName"), |pod: Pod| NodePod::from(&pod));
    watches.spawn(forward(PODS, pods, IndexUpdate::Pod, out.clone()));
    let stickies = watch_readable(api(client), by("status.attachment.node"), without_managers::<StickyIP>);
    watches.spawn(forward(STICKIES, stickies, IndexUpdate::Sticky, out.clone()));
    let claims =
        watch_readable(api(client), by("spec.homeNode"), |claim: AddressClaim| ClaimView::from(&claim));
    watches.spawn(forward(CLAIMS, claims, IndexUpdate::Claim, out.clone()));
    let nodes = watch_readable(api(client), by("metadata.name"), without_managers::<CiliumNode>);
    watches.spawn(forward(NODE, nodes, IndexUpdate::Node, out.clone()));
    let marks =
        watch(Api::<Node>::all(client.clone()), by("metadata.name"), |node| Ok(NodeMark::from(&node)));
    watches.spawn(forward(MARKS, marks, IndexUpdate::Mark, out.clone()));
    watches
}

fn api<K: Resource<DynamicType = ()>>(client: &kube::Client) -> Api<DeserializeGuard<K>> {
    Api::all(client.clone())
}

fn without_managers<K: Resource>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    object
}

/// Sends on what a watch reports; the watch waits while the receiver is busy.
async fn forward<T>(
    watch: &'static str,
    watched: impl Stream<Item = Watched<T>> + Send,
    wrap: impl Fn(CacheEvent<(String, T)>) -> IndexUpdate + Send,
    out: Sender<IndexUpdate>,
) {
    pin_mut!(watched);
    while let Some(next) = watched.next().await {
        let update = match next {
            Ok(event) => wrap(event),
            Err(WatchProblem::Unreadable(skipped)) => IndexUpdate::Skipped(skipped),
            Err(problem) => failed(watch, problem),
        };
        if out.send(update).await.is_err() {
            return;
        }
    }
    // A watch has no end; if it had one, the cache would be stale without a word.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let reason = "the watch ended".into();
    let _ = out.send(IndexUpdate::Failed { watch, reason, unauthorized: true }).await;
}

/// A failure, with what to do where that is known.
fn failed(watch: &'static str, problem: WatchProblem) -> IndexUpdate {
    let unauthorized = matches!(problem, WatchProblem::Unauthorized(_));
    let (message, advice) = match problem {
        WatchProblem::Forbidden(message) => (message, "; apply packaging/rbac.yaml"),
        WatchProblem::UnknownKind(message) if watch == NODE => {
            (message, "; the API server does not know the kind, which Cilium registers")
        }
        WatchProblem::UnknownKind(message) => {
            (message, "; the API server does not know the kind, apply packaging/crds")
        }
        WatchProblem::Unauthorized(message) | WatchProblem::Disconnected(message) => (message, ""),
        WatchProblem::Unreadable(skipped) => (skipped.to_string(), ""),
    };
    IndexUpdate::Failed { watch, reason: format!("{message}{advice}"), unauthorized }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::watch::problem;

    #[test]
    fn a_watch_that_is_refused_says_so_in_one_sentence_with_the_cure() {
        let refused = |watch, code, message| {
            let status = kube::core::Status::failure(message, "Reason").with_code(code);
            let error = watcher::Error::InitialListFailed(kube::Error::Api(status.boxed()));
            match failed(watch, problem(&error)) {
                IndexUpdate::Failed { reason, .. } => reason,
                other => panic!("{other:?}"),
            }
        };
        for (watch, code, cure) in [
            (PODS, 403, "apply packaging/rbac.yaml"),
            (STICKIES, 404, "apply packaging/crds"),
            (NODE, 404, "which Cilium registers"),
        ] {
            let said = refused(watch, code, "the server's words");
            assert!(said.contains("the server's words") && said.ends_with(cure), "{said}");
            assert!(!said.contains("Status {"), "{said}");
        }
        assert_eq!(refused(PODS, 500, "oh"), "the API server answered 500: oh");
    }
}
