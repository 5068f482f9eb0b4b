//! Finds another node that still publishes an address although nothing is attached. If a StickyIP is deleted
//! by hand while it is attached, the attachment is lost with it; but the node of its pod publishes the
//! address until that pod has ended.
//!
//! Must never give a right to an address: it only makes the claimant's next pod wait.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::cilium::pool::{list_nodes, read_node, single_routes};
use crate::cluster::objects::ClaimPhase;
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::protocol::read::read_node_state;
use crate::cluster::protocol::step::{LiveState, NextStep, Waiting};
use crate::cluster::writer::write::Write;

/// What one bind knows of pods that may use its addresses although no object says so.
#[derive(Debug, Default)]
pub(crate) struct StaleNodeCheck {
    /// Addresses whose claims this bind created, or sealed after the check where it was needed. No other pod
    /// has had a right to them since.
    own: BTreeSet<IpAddr>,
    /// The node that was found last, and the address that it published.
    found: Option<(String, IpAddr)>,
}

impl StaleNodeCheck {
    /// Records a write of this bind that succeeded.
    pub(crate) fn has_written(&mut self, write: &Write) {
        if let Write::CreateClaim { address, .. } | Write::SealClaim { address, .. } = write {
            self.own.insert(*address);
        }
    }

    /// Returns the step, or what to wait for before it: another node that publishes an address for a pod,
    /// unless there is the proof that a takeover needs that its pods are gone. It reads live, so only if a
    /// StickyIP may have been deleted: neither if the StickyIP was attached before, nor if this bind created
    /// everything.
    pub(crate) async fn before(
        &mut self,
        step: NextStep,
        seen: &LiveState<'_>,
        api: &Connection,
        node: &str,
    ) -> Result<NextStep, ApiError> {
        let in_question = self.in_question(&step, seen);
        if in_question.is_empty() {
            return Ok(step);
        }
        // As long as it publishes the address, the others need not be read.
        let known = self.found.take().filter(|(_, address)| in_question.contains(address));
        self.found = match known {
            Some((known, address)) if still_shows(api, &known, address).await? => Some((known, address)),
            _ => publishing(api, node, &in_question).await?,
        };
        Ok(match self.found.clone() {
            Some((node, address)) => NextStep::Wait(Waiting::StillPublished { address, node }),
            None => step,
        })
    }

    /// The addresses that this step makes usable, or brings closer to it, and that a pod may still use.
    fn in_question(&self, step: &NextStep, seen: &LiveState<'_>) -> Vec<IpAddr> {
        match step {
            NextStep::Do(Write::QuarantineClaim { address, .. }) => vec![*address],
            // Another writer quarantined it: perhaps the pod's own node, whose agent is about to attach the
            // pod again.
            NextStep::Do(Write::SealClaim { address, .. }) => {
                let claim = seen.claims.get(address);
                let rests = claim.is_some_and(|claim| claim.phase == ClaimPhase::Quarantined);
                rests.then_some(*address).into_iter().collect()
            }
            NextStep::Do(Write::Attach { .. }) => {
                let new = seen.sticky.filter(|sticky| sticky.never_attached());
                let addresses = new.into_iter().flat_map(|sticky| sticky.addresses.iter().copied());
                addresses.filter(|address| !self.own.contains(address)).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Another node that publishes one of the addresses for a pod that may be alive.
pub(crate) async fn publishing(
    api: &Connection,
    node: &str,
    addresses: &[IpAddr],
) -> Result<Option<(String, IpAddr)>, ApiError> {
    for found in &list_nodes(api).await? {
        let Some(name) = found.metadata.name.as_deref().filter(|name| *name != node) else { continue };
        let Some(shown) = addresses.iter().find(|address| shows(found, **address)) else { continue };
        if may_live(api, name).await? {
            return Ok(Some((name.to_owned(), *shown)));
        }
    }
    Ok(None)
}

async fn still_shows(api: &Connection, node: &str, address: IpAddr) -> Result<bool, ApiError> {
    let (found, lives) = tokio::try_join!(read_node(api, node), may_live(api, node))?;
    Ok(lives && found.is_some_and(|found| shows(&found, address)))
}

/// Whether the pods of a node may be alive.
async fn may_live(api: &Connection, node: &str) -> Result<bool, ApiError> {
    Ok(read_node_state(api, node).await?.proof_of_death().is_none())
}

fn shows(node: &CiliumNode, address: IpAddr) -> bool {
    let key = node.spec.ipam.pool.get(&address.to_string());
    key.is_some_and(|entry| !entry.owner.is_empty()) || single_routes(node).contains(&address)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;
    use crate::cluster::api::canned::Canned;
    use crate::cluster::view::{ClaimView, StickyView};
    use crate::cluster::writer::write::Precondition;
    use crate::policy::handover::{Attached, NodeState, OldPod, OldSandbox};

    const NODES: &str = "/apis/cilium.io/v2/ciliumnodes";

    fn sticky(status: Value) -> StickyView {
        let object = json!({"metadata": {"name": "db-0", "namespace": "db", "uid": "u"},
            "spec": {"addresses": ["10.0.0.1"], "claimant": {"kind": "Pod"},
                     "workload": {"apiVersion": "v1", "kind": "Pod", "name": "db-0"}}, "status": status});
        StickyView::from(&serde_json::from_value(object).unwrap())
    }

    fn claims(phase: &str) -> BTreeMap<IpAddr, ClaimView> {
        let claim = json!({"metadata": {"name": "10.0.0.1"}, "spec": {"address": "10.0.0.1", "phase": phase,
            "stickyUid": "u", "stickyRef": {"namespace": "db", "name": "db-0"}}});
        let claim = ClaimView::from(&serde_json::from_value(claim).unwrap());
        [(claim.address, claim)].into()
    }

    fn seen<'a>(sticky: &'a StickyView, claims: &'a BTreeMap<IpAddr, ClaimView>) -> LiveState<'a> {
        let (old_node, old_pod) = (NodeState::Unknown, OldPod::Unknown);
        let (old_sandbox, home_node) = (OldSandbox::MayLive, NodeState::Ready);
        LiveState { sticky: Some(sticky), claims, old_node, old_pod, old_sandbox, home_node }
    }

    fn at() -> Precondition {
        Precondition { uid: "u".into(), resource_version: "1".into() }
    }

    fn seal() -> Write {
        Write::SealClaim { address: "10.0.0.1".parse().unwrap(), at: at(), sticky_uid: "u".into() }
    }

    fn attach(sticky: &StickyView) -> NextStep {
        let attached = Attached { node: "n2".into(), pod_uid: "p".into(), attachment_id: "c".into() };
        NextStep::Do(Write::Attach { key: sticky.key.clone(), at: at(), attached, takeover: None })
    }

    fn cilium_node(name: &str, owner: Option<&str>) -> Value {
        let pool = owner.map(|owner| json!({"10.0.0.1": {"owner": owner}})).unwrap_or_default();
        json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name},
               "spec": {"ipam": {"pool": pool}}})
    }

    /// Three nodes, of which n1 shows the address for a pod.
    fn cluster(owner: Option<&str>) -> std::sync::Arc<Canned> {
        let server = Canned::new();
        let nodes = [cilium_node("n0", None), cilium_node("n1", owner), cilium_node("n2", Some("db/other"))];
        let list =
            json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNodeList", "metadata": {}, "items": nodes});
        server.answer(NODES, list);
        server.answer(&format!("{NODES}/n1"), cilium_node("n1", owner));
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "status": ready});
        server.answer("/api/v1/nodes/n1", node);
        server
    }

    fn line(server: &std::sync::Arc<Canned>) -> Connection {
        Connection::with_client(server.client(), Path::new("canned"), Duration::from_secs(10))
    }

    #[tokio::test]
    async fn no_node_is_asked_after_an_attachment_or_when_this_bind_made_its_claims() {
        let server = cluster(Some("db/db-0"));
        let api = line(&server);
        let (bound, granted) = (claims("Bound"), claims("Granted"));
        let before = sticky(json!({"lastSeen": "2026-01-01T00:00:00Z"}));
        let mut stale_nodes = StaleNodeCheck::default();
        let step = stale_nodes.before(attach(&before), &seen(&before, &bound), &api, "n2").await.unwrap();
        assert_eq!(step, attach(&before));
        let new = sticky(json!({}));
        let step = stale_nodes.before(NextStep::Do(seal()), &seen(&new, &granted), &api, "n2").await.unwrap();
        assert_eq!(step, NextStep::Do(seal()));
        stale_nodes.has_written(&seal());
        let step = stale_nodes.before(attach(&new), &seen(&new, &bound), &api, "n2").await.unwrap();
        assert_eq!((step, server.asked()), (attach(&new), vec![]));
    }

    #[tokio::test]
    async fn a_claim_quarantined_or_sealed_by_others_makes_a_new_stickyip_wait_for_its_node() {
        let server = cluster(Some("db/db-0"));
        let api = line(&server);
        let new = sticky(json!({}));
        let rest = Write::QuarantineClaim {
            address: "10.0.0.1".parse().unwrap(),
            at: at(),
            sticky_ref: new.key.clone(),
            gone_uid: "gone".into(),
            released: false,
        };
        let steps =
            [(NextStep::Do(rest), "Bound"), (NextStep::Do(seal()), "Quarantined"), (attach(&new), "Bound")];
        for (step, phase) in steps {
            let claims = claims(phase);
            let waits =
                StaleNodeCheck::default().before(step.clone(), &seen(&new, &claims), &api, "n2").await;
            let shown = Waiting::StillPublished { address: "10.0.0.1".parse().unwrap(), node: "n1".into() };
            assert_eq!(waits.unwrap(), NextStep::Wait(shown), "{step:?}");
            // What its own node shows does not keep it.
            let (seen, api) = (seen(&new, &claims), line(&cluster(None)));
            let own = StaleNodeCheck::default().before(step.clone(), &seen, &api, "n2").await;
            assert_eq!(own.unwrap(), step);
        }
    }

    #[tokio::test]
    async fn while_a_node_shows_the_address_that_node_alone_is_asked() {
        let server = cluster(Some("db/db-0"));
        let api = line(&server);
        let (new, claims) = (sticky(json!({})), claims("Bound"));
        let mut stale_nodes = StaleNodeCheck::default();
        let lists = |asked: Vec<String>| asked.iter().filter(|asked| asked.ends_with("ciliumnodes")).count();
        for look in 0..5 {
            let step = stale_nodes.before(attach(&new), &seen(&new, &claims), &api, "n2").await.unwrap();
            assert!(matches!(step, NextStep::Wait(_)), "{step:?}");
            assert_eq!(lists(server.asked()), usize::from(look == 0));
        }
        // Gone from there, it may be on another by now.
        server.answer(&format!("{NODES}/n1"), cilium_node("n1", None));
        let moved = [cilium_node("n1", None), cilium_node("n3", Some("db/db-0"))];
        let list =
            json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNodeList", "metadata": {}, "items": moved});
        server.answer(NODES, list);
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n3"}, "status": ready});
        server.answer("/api/v1/nodes/n3", node);
        let step = stale_nodes.before(attach(&new), &seen(&new, &claims), &api, "n2").await.unwrap();
        assert!(
            matches!(&step, NextStep::Wait(Waiting::StillPublished { node, .. }) if node == "n3"),
            "{step:?}"
        );
        assert_eq!(lists(server.asked()), 1);
        // A node that is gone for good shows nothing.
        server.answer(&format!("{NODES}/n3"), cilium_node("n3", Some("db/db-0")));
        server.forget("/api/v1/nodes/n3");
        let step = stale_nodes.before(attach(&new), &seen(&new, &claims), &api, "n2").await.unwrap();
        assert_eq!(step, attach(&new));
    }
}
