//! The four watches: this node's pods, the StickyIPs attached to it, the claims on its addresses, its own CiliumNode.
//! They list anew by themselves when the API server has forgotten where they were. Must never end over one object.

use std::time::Duration;

use futures_util::{Stream, StreamExt, pin_mut};
use k8s_openapi::api::core::v1::Pod;
use kube::Resource;
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::runtime::{WatchStreamExt, watcher};
use tokio::sync::mpsc::Sender;
use tokio::task::JoinSet;

use crate::agent::index::{CacheEvent, NodeIndex, NodePod, name_of};
use crate::cluster::cilium::objects::CiliumNode;
use crate::cluster::objects::lenient::{Skipped, Validate, readable};
use crate::cluster::objects::{AddressClaim, StickyIP};
use crate::cluster::protocol::view::ClaimView;

/// What the watches are called where people read of them.
const PODS: &str = "pods";
const STICKIES: &str = "StickyIPs";
const CLAIMS: &str = "AddressClaims";
const NODE: &str = "the CiliumNode";

/// What a watch tells.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "taken into the index one by one, never kept")]
pub enum IndexUpdate {
    /// Of a pod.
    Pod(CacheEvent<(String, NodePod)>),
    /// Of a StickyIP.
    Sticky(CacheEvent<(String, StickyIP)>),
    /// Of a claim.
    Claim(CacheEvent<(String, ClaimView)>),
    /// Of the CiliumNode.
    Node(CacheEvent<(String, CiliumNode)>),
    /// An object was passed over.
    Skipped(Skipped),
    /// A watch broke off, and tries again.
    Broke {
        /// Which.
        what: &'static str,
        /// Why.
        why: String,
        /// The credentials are not accepted.
        unauthorized: bool,
    },
}

impl IndexUpdate {
    /// The watch whose list is complete with this.
    #[must_use]
    pub fn completes(&self) -> Option<&'static str> {
        match self {
            Self::Pod(CacheEvent::ListComplete) => Some(PODS),
            Self::Sticky(CacheEvent::ListComplete) => Some(STICKIES),
            Self::Claim(CacheEvent::ListComplete) => Some(CLAIMS),
            Self::Node(CacheEvent::ListComplete) => Some(NODE),
            _ => None,
        }
    }
}

impl NodeIndex {
    /// Applies an update.
    pub fn apply(&mut self, update: IndexUpdate) {
        match update {
            IndexUpdate::Pod(told) => self.pods.apply(told),
            IndexUpdate::Sticky(told) => self.stickies.apply(told),
            IndexUpdate::Claim(told) => self.claims.apply(told),
            IndexUpdate::Node(told) => self.node.apply(told),
            IndexUpdate::Skipped(_) | IndexUpdate::Broke { .. } => Vec::new(),
        };
    }
}

/// Starts all four. They end when the set is dropped.
#[must_use]
pub fn start(client: &kube::Client, node: &str, out: &Sender<IndexUpdate>) -> JoinSet<()> {
    let mut watches = JoinSet::new();
    let by = |field: &str| watcher::Config::default().fields(&format!("{field}={node}"));
    let pods = Api::<DeserializeGuard<Pod>>::all(client.clone());
    let pods = watcher(pods, by("spec.nodeName"));
    watches.spawn(follow(PODS, pods, |pod: Pod| NodePod::from(&pod), IndexUpdate::Pod, out.clone()));
    let stickies = Api::<DeserializeGuard<StickyIP>>::all(client.clone());
    let stickies = watcher(stickies, by("status.attachment.node"));
    watches.spawn(follow(STICKIES, stickies, small_sticky, IndexUpdate::Sticky, out.clone()));
    let claims = Api::<DeserializeGuard<AddressClaim>>::all(client.clone());
    let claims = watcher(claims, by("spec.homeNode"));
    let view = |claim: AddressClaim| ClaimView::from(&claim);
    watches.spawn(follow(CLAIMS, claims, view, IndexUpdate::Claim, out.clone()));
    let nodes = Api::<DeserializeGuard<CiliumNode>>::all(client.clone());
    let nodes = watcher(nodes, by("metadata.name"));
    watches.spawn(follow(NODE, nodes, small_node, IndexUpdate::Node, out.clone()));
    watches
}

/// What nobody decides by need not be kept.
fn small_sticky(mut object: StickyIP) -> StickyIP {
    object.metadata.managed_fields = None;
    object
}

fn small_node(mut object: CiliumNode) -> CiliumNode {
    object.metadata.managed_fields = None;
    object
}

async fn follow<K, T>(
    what: &'static str,
    events: impl Stream<Item = watcher::Result<watcher::Event<DeserializeGuard<K>>>> + Send,
    shrink: impl Fn(K) -> T + Send,
    wrap: impl Fn(CacheEvent<(String, T)>) -> IndexUpdate + Send,
    out: Sender<IndexUpdate>,
) where
    K: Resource<DynamicType = ()> + Validate + Send + 'static,
    T: Send,
{
    let events = events.default_backoff();
    pin_mut!(events);
    while let Some(event) = events.next().await {
        let mut told = Vec::with_capacity(2);
        let mut object = |guarded: DeserializeGuard<K>, listed: bool| {
            let name = name_of(guarded.meta());
            match readable(guarded) {
                Ok(object) if listed => told.push(wrap(CacheEvent::Listed((name, shrink(object))))),
                Ok(object) => told.push(wrap(CacheEvent::Applied((name, shrink(object))))),
                Err(skipped) => {
                    told.push(wrap(CacheEvent::Unreadable(name)));
                    told.push(IndexUpdate::Skipped(skipped));
                }
            }
        };
        match event {
            Ok(watcher::Event::Init) => told.push(wrap(CacheEvent::ListStarted)),
            Ok(watcher::Event::InitApply(guarded)) => object(guarded, true),
            Ok(watcher::Event::InitDone) => told.push(wrap(CacheEvent::ListComplete)),
            Ok(watcher::Event::Apply(guarded)) => object(guarded, false),
            Ok(watcher::Event::Delete(guarded)) => {
                told.push(wrap(CacheEvent::Deleted(name_of(guarded.meta()))))
            }
            Err(error) => told.push(IndexUpdate::Broke {
                what,
                unauthorized: unauthorized(&error),
                why: why(what, &error),
            }),
        }
        for update in told {
            if out.send(update).await.is_err() {
                return;
            }
        }
    }
    // A watcher's stream has no end; if it had one, the node would be forgotten in silence.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let _ = out.send(IndexUpdate::Broke { what, why: "the watch ended".into(), unauthorized: true }).await;
}

fn unauthorized(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(inner)
        | watcher::Error::WatchStartFailed(inner)
        | watcher::Error::WatchFailed(inner) => match inner {
            kube::Error::Api(status) => status.code == 401,
            kube::Error::Auth(_) => true,
            _ => false,
        },
        watcher::Error::WatchError(status) => status.code == 401,
        watcher::Error::NoResourceVersion => false,
    }
}

/// Why a watch broke off, with the cure where one is known. The server's own words, not its whole answer: that is long and
/// says the same.
fn why(what: &str, error: &watcher::Error) -> String {
    let (code, message) = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => (status.code, &status.message),
        watcher::Error::WatchError(status) => (status.code, &status.message),
        _ => return error.to_string(),
    };
    let cure = match code {
        403 => "; apply packaging/rbac.yaml",
        404 if what == NODE => "; the API server does not know the kind, which Cilium registers",
        404 => "; the API server does not know the kind, apply packaging/crds",
        _ => "",
    };
    format!("the API server answered {code}: {message}{cure}")
}

/// A list of everything, at once, as the watches would tell it.
///
/// # Errors
/// The server's.
pub async fn list(client: &kube::Client, node: &str) -> Result<NodeIndex, kube::Error> {
    let mut index = NodeIndex::default();
    let by = |field: &str| kube::api::ListParams::default().fields(&format!("{field}={node}"));
    fn all<K, T>(
        listed: Vec<DeserializeGuard<K>>,
        shrink: impl Fn(K) -> T,
        wrap: impl Fn(CacheEvent<(String, T)>) -> IndexUpdate,
        index: &mut NodeIndex,
    ) where
        K: Resource<DynamicType = ()> + Validate,
    {
        index.apply(wrap(CacheEvent::ListStarted));
        for guarded in listed {
            let name = name_of(guarded.meta());
            index.apply(wrap(match readable(guarded) {
                Ok(object) => CacheEvent::Listed((name, shrink(object))),
                Err(_) => CacheEvent::Unreadable(name),
            }));
        }
        index.apply(wrap(CacheEvent::ListComplete));
    }
    let pods = Api::<DeserializeGuard<Pod>>::all(client.clone()).list(&by("spec.nodeName")).await?;
    all(pods.items, |pod: Pod| NodePod::from(&pod), IndexUpdate::Pod, &mut index);
    let stickies = Api::<DeserializeGuard<StickyIP>>::all(client.clone());
    let stickies = stickies.list(&by("status.attachment.node")).await?;
    all(stickies.items, small_sticky, IndexUpdate::Sticky, &mut index);
    let claims =
        Api::<DeserializeGuard<AddressClaim>>::all(client.clone()).list(&by("spec.homeNode")).await?;
    all(claims.items, |claim: AddressClaim| ClaimView::from(&claim), IndexUpdate::Claim, &mut index);
    let nodes = Api::<DeserializeGuard<CiliumNode>>::all(client.clone()).list(&by("metadata.name")).await?;
    all(nodes.items, small_node, IndexUpdate::Node, &mut index);
    Ok(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_that_is_refused_says_so_in_one_sentence_with_the_cure() {
        let refused = |code, message| {
            let status = kube::core::Status::failure(message, "Reason").with_code(code);
            watcher::Error::InitialListFailed(kube::Error::Api(status.boxed()))
        };
        for (what, code, cure) in [
            (PODS, 403, "apply packaging/rbac.yaml"),
            (STICKIES, 404, "apply packaging/crds"),
            (NODE, 404, "which Cilium registers"),
        ] {
            let said = why(what, &refused(code, "the server's words"));
            assert!(said.contains("the server's words") && said.ends_with(cure), "{said}");
            assert!(!said.contains("Status {"), "{said}");
        }
        assert_eq!(why(PODS, &refused(500, "oh")), "the API server answered 500: oh");
    }
}
