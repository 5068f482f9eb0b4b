//! What starts on a node whose agent is away: for a day, with the token that it left; and after the token has
//! ended.

use std::os::unix::fs::PermissionsExt;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Event;
use kube::api::Api;
use serde_json::json;
use sticky_ipam::agent::install::{InstallSettings, Installer};
use sticky_ipam::names::NetworkName;
use sticky_ipam::policy::mode::PluginMode;

use crate::support::agent::{Stepped, case, decided, parts};
use crate::support::api_server::case::Case;
use crate::support::node::{Sandbox, TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pod};
use crate::support::running_pod::runs;

const DAY: i64 = 24 * 3600;
/// The days of an agent's token, and an hour.
const ENDED: i64 = 2 * DAY + 2 * 3600;

async fn node_of(case: &Case<'_>, name: &str, mode: &str, part: usize) -> TestNode {
    match mode {
        "crd" => TestNode::ready_crd(case, name, parts(case)[part]).await,
        _ => TestNode::ready(case, name, parts(case)[part]).await,
    }
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

/// The token that the agent of this node would have left, by the shipped defaults.
async fn token_of_agent(case: &Case<'_>, node: &TestNode) -> String {
    let bound = case.bound_to(&node.name).await;
    let agent = case.token("sticky-ipam-agent", Some(bound)).await;
    let host = tempfile::tempdir().unwrap();
    let mut settings = InstallSettings::new(&node.name, PluginMode::Crd, NetworkName::new("net").unwrap());
    let plugin = host.path().join("plugin");
    std::fs::write(&plugin, "the plugin").unwrap();
    std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
    (settings.host_root, settings.plugin) = (host.path().join("host"), Some(plugin));
    settings.plugin_service_account = Some(format!("{}/sticky-ipam-node", case.namespace()).parse().unwrap());
    let file = kube::config::Kubeconfig::read_from(agent.kubeconfig()).unwrap();
    let mut config = kube::Config::from_custom_kubeconfig(file, &Default::default()).await.unwrap();
    config.proxy_url = None;
    let client = kube::Client::try_from(config.clone()).unwrap();
    let path = settings.kubeconfig_path();
    let mut installer = Installer::new(settings, client, &config).unwrap();
    installer.step(&[], SystemTime::now(), false).await.unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    let read: serde_json::Value = serde_json::from_str(&text).unwrap();
    read["users"][0]["user"]["token"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn with_the_agent_away_for_a_day_every_kind_of_pod_starts_on_its_node() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        case.shipped_roles().await;
        let (mut n1, n2) = (node_of(&case, "n1", mode, 0).await, node_of(&case, "n2", mode, 1).await);
        let known = pod(&case, "known-0", &n1).await;
        let had = n1.add(&known).await.unwrap();
        n1.del(&known).await;
        let elsewhere = pod(&case, "moved-0", &n2).await;
        let away = n2.add(&elsewhere).await.unwrap();
        n2.del(&elsewhere).await;
        let token = token_of_agent(&case, &n1).await;
        n1.by(&case.given_out_earlier(&token, DAY));
        n1.add(&plain(&case, "ordinary", &n1).await).await.unwrap();
        assert_eq!(n1.add(&pod(&case, "known-0", &n1).await).await.unwrap(), had, "{mode}");
        n1.add(&pod(&case, "new-0", &n1).await).await.unwrap();
        assert_eq!(n1.add(&pod(&case, "moved-0", &n1).await).await.unwrap(), away, "{mode}");
        assert_in_step(&case, &[&n1, &n2]).await;
    }
}

#[tokio::test]
async fn after_the_token_has_ended_only_pods_start_that_the_node_has_decided_about() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        case.shipped_roles().await;
        let mut node = node_of(&case, "n1", mode, 0).await;
        let (web, db) = (plain(&case, "web", &node).await, pod(&case, "db-0", &node).await);
        node.add(&web).await.unwrap();
        let had = node.add(&db).await.unwrap();
        let token = token_of_agent(&case, &node).await;
        node.by(&case.given_out_earlier(&token, ENDED));
        let (web, db) = (restarted(&node, &web).await, restarted(&node, &db).await);
        node.add(&web).await.unwrap_or_else(|error| panic!("{mode}: ordinary, known: {error}"));
        assert_eq!(node.add(&db).await.unwrap(), had, "{mode}: the same sticky pod");
        let (fresh, new) = (plain(&case, "fresh", &node).await, pod(&case, "new-0", &node).await);
        for pod in [&fresh, &new, &pod(&case, "db-0", &node).await] {
            let error = node.add(pod).await.unwrap_err();
            let message = error["msg"].as_str().unwrap();
            assert!(error["code"] == 11 && message.contains("expired"), "{mode}: {}: {error}", pod.pod);
        }
        let names: Vec<_> = stickies(&case).await.into_iter().map(|sticky| sticky.metadata.name).collect();
        assert_eq!(names, [Some("db-0".to_owned())], "{mode}");
    }
}

#[tokio::test]
async fn what_an_add_found_not_sticky_is_decided_until_the_pod_is_gone() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let node = node_of(&case, "n1", mode, 0).await;
        let mut agent = Stepped::new(&case, &node, mode, &[]).await;
        agent.settle().await;
        let (web, db) = (plain(&case, "web", &node).await, pod(&case, "db-0", &node).await);
        let address = node.add(&web).await.unwrap();
        node.add(&db).await.unwrap();
        assert!(decided(&node, &web.uid) && !decided(&node, &db.uid), "{mode}");
        runs(&case, "web", address).await;
        agent.settle().await;
        assert!(decided(&node, &web.uid), "{mode}: its next sandbox may need it");
        node.del(&web).await;
        delete_pod(&case, "web").await;
        agent.settle().await;
        assert!(!decided(&node, &web.uid), "{mode}");
    }
}

#[tokio::test]
async fn a_returning_agent_decides_about_ordinary_pods_that_run() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let mut node = node_of(&case, "n1", mode, 0).await;
        let mut agent = Stepped::new(&case, &node, mode, &[]).await;
        agent.settle().await;
        let (web, db) = (plain(&case, "web", &node).await, pod(&case, "db-0", &node).await);
        let (of_web, of_db) = (node.add(&web).await.unwrap(), node.add(&db).await.unwrap());
        // Started by an older plugin, or before there was one.
        std::fs::remove_file(node.store().root().join(".sticky/decisions").join(&web.uid)).unwrap();
        runs(&case, "web", of_web).await;
        runs(&case, "db-0", of_db).await;
        agent.step().await;
        assert!(decided(&node, &web.uid) && !decided(&node, &db.uid), "{mode}");
        let _proxy = crate::support::agent::cut_off(&case, &mut node);
        node.timeout("20s");
        let (web, db) = (restarted(&node, &web).await, restarted(&node, &db).await);
        node.add(&web).await.unwrap_or_else(|error| panic!("{mode}: {error}"));
        assert_eq!(node.add(&db).await.unwrap(), of_db, "{mode}");
    }
}

#[tokio::test]
async fn a_pod_that_was_remembered_as_ordinary_is_forgotten_when_it_is_adopted() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let node = node_of(&case, "n1", mode, 0).await;
        let mut agent = Stepped::new(&case, &node, mode, &[]).await;
        agent.settle().await;
        let web = plain(&case, "web", &node).await;
        let address = node.add(&web).await.unwrap();
        assert!(decided(&node, &web.uid), "{mode}");
        runs(&case, "web", address).await;
        crate::support::running_pod::ask(&case, &node, &web, address).await;
        agent.settle().await;
        assert!(!decided(&node, &web.uid), "{mode}: its next sandbox has its StickyIP's address");
    }
}

#[tokio::test]
async fn what_a_dead_agent_prepared_is_waited_for_elsewhere_and_an_event_names_its_node() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let (n1, n2) = (node_of(&case, "n1", mode, 0).await, node_of(&case, "n2", mode, 1).await);
        let mut agent = Stepped::new(&case, &n1, mode, &[]).await;
        agent.settle().await;
        pod(&case, "db-0", &n1).await;
        agent.step().await;
        let address = stickies(&case).await[0].spec.addresses[0];
        // From here on the agent is away.
        let next = pod(&case, "db-0", &n2).await;
        let error = n2.add(&next).await.unwrap_err();
        let message = error["msg"].as_str().unwrap();
        assert!(
            error["code"] == 11 && message.contains(&format!("the agent of node {}", n1.name)),
            "{error}"
        );
        let events: Api<Event> = Api::namespaced(case.client(), case.namespace());
        let events = events.list(&Default::default()).await.unwrap().items;
        let found = events.iter().find(|event| event.reason.as_deref() == Some("WaitsForAgent")).unwrap();
        assert_eq!(found.involved_object.uid.as_ref(), Some(&next.uid), "{mode}");
        agent.settle().await;
        assert_eq!(n2.add(&next).await.unwrap(), address, "{mode}");
    }
}

#[tokio::test]
async fn with_the_agent_away_ordinary_pods_start_until_ciliums_pool_is_empty() {
    let case = case().await;
    let node = node_of(&case, "n1", "crd", 0).await;
    // The fake Cilium has two addresses for anybody, and only an agent adds more.
    for number in 0..2 {
        node.add(&plain(&case, &format!("web-{number}"), &node).await).await.unwrap();
    }
    node.add(&plain(&case, "web-2", &node).await).await.unwrap_err();
    let sticky = pod(&case, "db-0", &node).await;
    let address = node.add(&sticky).await.unwrap();
    assert_eq!(stickies(&case).await[0].spec.addresses, [address], "the plugin adds its entry itself");
}
