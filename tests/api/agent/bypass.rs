//! The bypass: ordinary pods start while the API server, the credentials or the agent are of no use, and
//! sticky pods that the node knows get their own address or none.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::support::agent::{Loose, Stepped, attached, case, is_ready, loose, page, parts};
use crate::support::api_server::access::Access;
use crate::support::api_server::case::Case;
use crate::support::api_server::{Weather, comes_true};
use crate::support::node::{Sandbox, TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pod};

const SOON: Duration = Duration::from_secs(60);

/// A node whose credentials are in a folder of its own, and the file of its bypass.
async fn node_of(case: &Case<'_>, mode: &str, part: usize) -> (TestNode, PathBuf) {
    let name = format!("n{part}");
    let mut node = match mode {
        "crd" => TestNode::ready_crd(case, &name, parts(case)[part]).await,
        _ => TestNode::ready(case, &name, parts(case)[part]).await,
    };
    if mode == "delegated" {
        // Nothing is given out from a store that does not know what is claimed.
        node.seed(case).await;
    }
    let folder = node.folder().join("credentials");
    fs::create_dir(&folder).unwrap();
    fs::copy(node.kubeconfig(), folder.join("kubeconfig")).unwrap();
    node.by_file(folder.join("kubeconfig"));
    (node, folder.join("bypass"))
}

/// The node's plugin has other credentials, in the same place.
fn replace_credentials(node: &TestNode, access: &Access) {
    fs::copy(access.kubeconfig(), node.kubeconfig()).unwrap();
}

async fn pod(case: &Case<'_>, name: &str, node: &TestNode) -> Sandbox {
    sandbox(&sticky_pod(case, name, &node.name, json!({})).await)
}

async fn plain(case: &Case<'_>, name: &str, node: &TestNode) -> Sandbox {
    sandbox(&case.pod(name, &[], Some(&node.name)).await)
}

/// The same pod's next sandbox; the one before has ended.
async fn restarted(node: &TestNode, pod: &Sandbox) -> Sandbox {
    node.del(pod).await;
    Sandbox { container: format!("{}-again", pod.container), ..pod.clone() }
}

fn code(error: &Value) -> u64 {
    error["code"].as_u64().unwrap()
}

#[tokio::test]
async fn with_the_bypass_on_an_ordinary_pod_starts_whatever_is_broken() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let (mut node, bypass) = node_of(&case, mode, 0).await;
        let proxy = case.proxy();
        let good = fs::read(node.kubeconfig()).unwrap();
        let mut number = 0;
        for broken in ["refused", "away", "missing", "garbled"] {
            match broken {
                "refused" => replace_credentials(&node, &case.forged_token()),
                "away" => {
                    proxy.set(Weather::Reset);
                    replace_credentials(&node, &case.nobody().through(&proxy));
                }
                "missing" => fs::remove_file(node.kubeconfig()).unwrap(),
                _ => fs::write(node.kubeconfig(), "{").unwrap(),
            }
            node.timeout("2s");
            number += 1;
            let web = plain(&case, &format!("web-{number}"), &node).await;
            let error = node.add(&web).await.unwrap_err();
            assert_eq!(code(&error), 11, "{mode}, {broken}: {error}");
            fs::write(&bypass, "").unwrap();
            node.add(&web).await.unwrap_or_else(|error| panic!("{mode}, {broken}: {error}"));
            node.status(&web).await.unwrap_or_else(|error| panic!("{mode}, {broken}: {error}"));
            fs::remove_file(&bypass).unwrap();
            let error = node.add(&restarted(&node, &web).await).await.unwrap_err();
            assert_eq!(code(&error), 11, "{mode}, {broken}: put back: {error}");
        }
        fs::write(node.kubeconfig(), good).unwrap();
        node.timeout("20s");
        let web = plain(&case, "web", &node).await;
        node.add(&web).await.unwrap();
        assert!(stickies(&case).await.is_empty());
    }
}

#[tokio::test]
async fn with_the_bypass_on_a_known_sticky_pod_gets_its_own_address_or_none() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let (node, bypass) = node_of(&case, mode, 0).await;
        let first = pod(&case, "db-0", &node).await;
        let address = node.add(&first).await.unwrap();
        fs::write(&bypass, "").unwrap();
        node.del(&first).await;
        assert_eq!(attached(&case).await, None, "{mode}: DEL detaches as always");
        let second = pod(&case, "db-0", &node).await;
        assert_eq!(node.add(&second).await.unwrap(), address, "{mode}: the API server can be asked");
        assert_in_step(&case, &[&node]).await;
        let good = fs::read(node.kubeconfig()).unwrap();
        replace_credentials(&node, &case.forged_token());
        let second = restarted(&node, &second).await;
        assert_eq!(node.add(&second).await.unwrap(), address, "{mode}: the same pod");
        node.del(&second).await;
        let third = pod(&case, "db-0", &node).await;
        let error = node.add(&third).await.unwrap_err();
        assert_eq!(code(&error), 11, "{mode}: another pod: {error}");
        fs::write(node.kubeconfig(), good).unwrap();
        let mut agent = Stepped::new(&case, &node, mode, &[]).await;
        agent.settle().await;
        assert_eq!(node.add(&third).await.unwrap(), address, "{mode}");
    }
}

#[tokio::test]
async fn with_the_bypass_on_a_prepared_pod_has_its_address_without_the_server() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let (node, bypass) = node_of(&case, mode, 0).await;
        let mut agent = Stepped::new(&case, &node, mode, &[]).await;
        agent.settle().await;
        let new = pod(&case, "new-0", &node).await;
        agent.step().await;
        fs::write(&bypass, "").unwrap();
        replace_credentials(&node, &case.forged_token());
        let address = node.add(&new).await.unwrap();
        assert_eq!(stickies(&case).await[0].spec.addresses, [address], "{mode}");
    }
}

#[tokio::test]
async fn with_the_bypass_on_a_sticky_pod_unknown_to_its_node_is_passed_like_any_other() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let (node, bypass) = node_of(&case, mode, 0).await;
        let (elsewhere, _) = node_of(&case, mode, 1).await;
        let there = pod(&case, "moved-0", &elsewhere).await;
        let own = elsewhere.add(&there).await.unwrap();
        elsewhere.del(&there).await;
        fs::write(&bypass, "").unwrap();
        let (new, moved) = (pod(&case, "new-0", &node).await, pod(&case, "moved-0", &node).await);
        let others = [node.add(&new).await.unwrap(), node.add(&moved).await.unwrap()];
        assert!(!others.contains(&own), "{mode}: {others:?}");
        assert_eq!(stickies(&case).await.len(), 1, "{mode}: nothing is bound");
        // Their next pods are sticky again.
        fs::remove_file(&bypass).unwrap();
        for pod in [&new, &moved] {
            node.del(pod).await;
        }
        let moved = pod(&case, "moved-0", &node).await;
        assert_eq!(node.add(&moved).await.unwrap(), own, "{mode}");
        assert_in_step(&case, &[&node, &elsewhere]).await;
    }
}

#[tokio::test]
async fn with_the_bypass_on_a_store_of_no_use_stops_no_ordinary_pod_of_cilium() {
    let case = case().await;
    let (node, bypass) = node_of(&case, "crd", 0).await;
    let root = node.store().root().to_owned();
    fs::create_dir_all(root.parent().unwrap()).unwrap();
    let _ = fs::remove_dir_all(&root);
    fs::write(&root, "not a folder").unwrap();
    let web = plain(&case, "web", &node).await;
    assert_eq!(code(&node.add(&web).await.unwrap_err()), 5);
    fs::write(&bypass, "").unwrap();
    node.add(&web).await.unwrap();
    node.status(&web).await.unwrap();
}

#[tokio::test]
async fn the_nodes_annotation_turns_the_bypass_on_and_off_under_running_pods() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let (node, bypass) = node_of(&case, mode, 0).await;
        let (mut settings, address) = loose(&node, &case.agent(&node.name).await, mode);
        settings.plugin_kubeconfig = node.kubeconfig();
        let _agent = Loose::start(settings);
        assert!(comes_true(SOON, || is_ready(address)).await);
        let shown = async |number: u8| {
            let text = tokio::task::spawn_blocking(move || page(address, "/metrics")).await.unwrap();
            text.is_some_and(|text| text.contains(&format!("sticky_ipam_agent_bypass {number}")))
        };
        let running = pod(&case, "db-0", &node).await;
        let own = node.add(&running).await.unwrap();
        let nodes: Api<Node> = Api::all(case.client());
        let say = async |value: Value| {
            let patch = json!({"metadata": {"annotations": {"sticky-ipam.io/bypass": value}}});
            nodes.patch(&node.name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        };
        say("true".into()).await;
        assert!(comes_true(SOON, || async { bypass.exists() && shown(1).await }).await, "{mode}");
        let running = restarted(&node, &running).await;
        assert_eq!(node.add(&running).await.unwrap(), own, "{mode}: a new sandbox of the same pod");
        node.del(&running).await;
        delete_pod(&case, "db-0").await;
        assert!(comes_true(SOON, || async { attached(&case).await.is_none() }).await, "{mode}");
        say(Value::Null).await;
        assert!(comes_true(SOON, || async { !bypass.exists() && shown(0).await }).await, "{mode}");
        fs::write(&bypass, "").unwrap();
        say("true".into()).await;
        say("false".into()).await;
        assert!(comes_true(SOON, || async { shown(1).await }).await, "{mode}");
        assert!(bypass.exists(), "{mode}: what a person has made stays");
    }
}
