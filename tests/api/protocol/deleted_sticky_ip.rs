//! A StickyIP that a person deletes while its pod lives: the claimant's next pod elsewhere waits, whoever
//! else is at work on it.

use kube::api::Api;
use serde_json::json;
use sticky_ipam::cluster::objects::StickyIP;

use crate::support::agent::case;
use crate::support::agent::{Stepped, ends_at, settings};
use crate::support::cilium::{assert_in_one_pool, cilium_nodes};
use crate::support::node::{assert_in_step, delete_pod, sandbox, sticky_pod};
use crate::support::running_pod::{FEW, LOOKS, node_of};

#[tokio::test]
async fn the_next_pod_waits_wherever_the_agent_crashes_while_it_takes_the_address_back() {
    let case = case().await;
    let n1 = node_of(&case, "crd", "n1", 0).await;
    let n2 = node_of(&case, "crd", "n2", 1).await;
    let access = case.agent(&n1.name).await;
    let settings = settings(&n1, &access.kubeconfig(), "crd", FEW);
    let mut next = Stepped::by(&access, &n1, "crd", FEW).await;
    next.settle().await;
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    for after in [false, true] {
        for number in 1.. {
            let name = format!("db-{after}-{number}");
            let lives = sandbox(&sticky_pod(&case, &name, &n1.name, json!({})).await);
            let address = n1.add(&lives).await.unwrap();
            api.delete(&name, &Default::default()).await.unwrap();
            // Deleted by force: its sandbox lives on.
            let waits = sandbox(&sticky_pod(&case, &name, &n2.name, json!({})).await);
            n2.add(&waits).await.unwrap_err();
            let ended = ends_at(&settings, &access, LOOKS, number, after).await;
            let early = n2.add(&waits).await;
            assert!(early.is_err(), "{name}: {address} lives on {}", n1.name);
            next = next.anew();
            next.settle().await;
            assert!(n2.add(&waits).await.is_err(), "{name}: it lives");
            n1.del(&lives).await;
            next.settle().await;
            assert_eq!(n2.add(&waits).await.unwrap(), address);
            assert_in_step(&case, &[&n1, &n2]).await;
            assert_in_one_pool(&cilium_nodes(&case).await);
            delete_pod(&case, &name).await;
            n2.del(&waits).await;
            if !ended {
                assert!(number > 3, "only {number} writes were seen");
                break;
            }
        }
    }
}
