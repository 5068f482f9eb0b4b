//! Adoption of a running cluster on a real API server: what is written, what is refused, wherever it ends,
//! and the way back.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, ServiceAccount};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::StickyIP;
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::objects::cilium_node_config::CiliumNodeConfig;
use sticky_ipam::cluster::writer::apply::{NoObserver, SentWrite, WriteObserver};
use sticky_ipam::controller::commands::adopt::{AdoptReport, adopt, follow};
use sticky_ipam::controller::flags::{AdoptOptions, BackTo};
use sticky_ipam::controller::writer::Writer;

use crate::support::api_server::access::Access;
use crate::support::api_server::case::Case;
use crate::support::api_server::{ApiServer, comes_true};
use crate::support::duty::{EndControllerAt, apply, bare_node, settings};
use crate::support::node::ended_by_the_witness;

const DRY: AdoptOptions = order(false, None);
const APPLY: AdoptOptions = order(true, None);
const BACK: AdoptOptions = order(false, Some(BackTo::ClusterPool));

const fn order(apply: bool, back: Option<BackTo>) -> AdoptOptions {
    AdoptOptions { apply, back, free: 4, follow: false, canary: None, accept: Vec::new() }
}

/// A server of its own: adoption looks at the whole cluster.
async fn server() -> ApiServer {
    let server = ApiServer::start().await;
    server.install_our_kinds().await;
    server.install_cilium_kinds().await;
    server
}

/// Cilium's settings, with what crd mode needs.
async fn mode(case: &Case<'_>, mode: &str) {
    let data = json!({"ipam": mode, "routing-mode": "tunnel", "enable-ipv6": "false",
                      "egress-masquerade-interfaces": "eth0", "cni-exclusive": "false"});
    settings_of_cilium(case, data).await;
}

async fn settings_of_cilium(case: &Case<'_>, data: Value) {
    let maps: Api<ConfigMap> = Api::namespaced(case.client(), "kube-system");
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": data,
                        "metadata": {"name": "cilium-config", "namespace": "kube-system"}});
    apply(maps, object).await;
}

/// A node as Cilium's operator leaves it, with a pod of cilium-agent.
async fn node(case: &Case<'_>, number: u8) {
    let name = format!("n{number}");
    bare_node(case, &name, json!({"kubernetes.io/hostname": name}), json!({})).await;
    cilium_agent(case, &name, "quay.io/cilium/cilium:v1.19.5").await;
    let spec = json!({"addresses": [{"type": "CiliumInternalIP", "ip": format!("10.1.{number}.200")}],
                      "health": {"ipv4": format!("10.1.{number}.201")},
                      "ipam": {"podCIDRs": [format!("10.1.{number}.0/24")]}});
    let object =
        json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name}, "spec": spec});
    apply::<CiliumNode>(Api::all(case.client()), object).await;
}

async fn running(client: kube::Client, namespace: &str, name: &str, node: &str, address: &str) {
    let pods: Api<Pod> = Api::namespaced(client, namespace);
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
                     "spec": {"nodeName": node, "containers": [{"name": "main", "image": "none"}]}});
    pods.create(&Default::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
    pods.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
}

/// A ready pod of cilium-agent on a node, in the host's network.
async fn cilium_agent(case: &Case<'_>, node: &str, image: &str) {
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
                         "metadata": {"name": "default", "namespace": "kube-system"}});
    apply::<ServiceAccount>(Api::namespaced(case.client(), "kube-system"), account).await;
    let pods: Api<Pod> = Api::namespaced(case.client(), "kube-system");
    let name = format!("cilium-{node}");
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "kube-system", "labels": {"k8s-app": "cilium"}},
        "spec": {"nodeName": node, "hostNetwork": true, "containers": [{"name": "cilium-agent", "image": image}]}});
    apply(pods.clone(), pod).await;
    let status = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
}

async fn sticky(case: &Case<'_>, name: &str, address: &str) {
    let stickies: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let object = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP",
        "metadata": {"name": name, "namespace": case.namespace()},
        "spec": {"addresses": [address], "claimant": {"kind": "Pod"},
                 "workload": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "mysql"}}});
    apply(stickies, object).await;
}

async fn writer(case: &Case<'_>, observer: Box<dyn WriteObserver>) -> Writer {
    Writer::new(case.admin().client().await, PathBuf::from("the test's"), observer)
}

async fn run(case: &Case<'_>, order: AdoptOptions) -> (AdoptReport, usize) {
    let writer = writer(case, Box::new(NoObserver)).await;
    let flags = settings(case, &["--cilium-ipam=cluster-pool"]);
    (adopt(&writer, &flags, order).await.unwrap(), writer.count())
}

async fn pool(case: &Case<'_>, node: &str) -> Value {
    let nodes: Api<CiliumNode> = Api::all(case.client());
    serde_json::to_value(nodes.get(node).await.unwrap().spec.ipam.pool).unwrap()
}

#[tokio::test]
async fn every_live_pods_address_is_in_its_nodes_pool_before_anyone_may_go_on() {
    let server = server().await;
    let case = server.case().await;
    mode(&case, "cluster-pool").await;
    for number in [1, 2] {
        node(&case, number).await;
    }
    running(case.client(), case.namespace(), "mysql-0", "n1", "10.1.1.77").await;
    running(case.client(), case.namespace(), "web", "n2", "10.1.2.5").await;
    sticky(&case, "mysql-0", "10.1.1.77").await;

    let (report, writes) = run(&case, DRY).await;
    assert_eq!((report.clear, writes), (true, 0), "{}", report.text);
    for part in [
        "ipam is cluster-pool now",
        "Dry run: nothing was written",
        "10.1.1.0/24",
        "spec.podCIDRs of the Node becomes",
    ] {
        assert!(report.text.contains(part), "{part}: {}", report.text);
    }
    assert_eq!(pool(&case, "n1").await, json!({}));

    let (report, _) = run(&case, APPLY).await;
    assert!(report.clear && report.text.contains("GO. Next: set ipam: crd"), "{}", report.text);
    let owned = json!({"owner": format!("{}/mysql-0", case.namespace()),
                       "resource": format!("{}/StatefulSet/mysql", case.namespace())});
    let first = pool(&case, "n1").await;
    assert_eq!((first.as_object().unwrap().len(), &first["10.1.1.77"]), (7, &owned), "{first}");
    assert_eq!(
        (&first["10.1.1.200"], &first["10.1.1.201"], &first["10.1.1.1"]),
        (&json!({}), &json!({}), &json!({}))
    );
    assert_eq!(pool(&case, "n2").await["10.1.2.5"], json!({}));
    let nodes: Api<Node> = Api::all(case.client());
    assert_eq!(nodes.get("n1").await.unwrap().spec.unwrap().pod_cidr.as_deref(), Some("10.1.1.0/24"));

    // Nothing is left to do, and nothing is written twice.
    assert_eq!(run(&case, APPLY).await.1, 0);
    let (report, _) = run(&case, DRY).await;
    assert!(report.clear && report.text.contains("there is nothing to write"), "{}", report.text);

    // Agents that go by the pools are offered nothing more: only a live pod's own address is put in.
    mode(&case, "crd").await;
    let before = pool(&case, "n2").await.as_object().unwrap().len();
    running(case.client(), case.namespace(), "late", "n2", "10.1.2.99").await;
    let nodes: Api<CiliumNode> = Api::all(case.client());
    let gone = json!({"spec": {"ipam": {"pool": {"10.1.2.1": null}}}});
    nodes.patch("n2", &PatchParams::default(), &Patch::Merge(gone)).await.unwrap();
    assert!(run(&case, APPLY).await.0.clear);
    let after = pool(&case, "n2").await;
    assert_eq!((after.as_object().unwrap().len(), &after["10.1.2.99"]), (before, &json!({})));
}

/// Starts a pod after the last write, before the last look.
struct Latecomer {
    access: Mutex<Option<Access>>,
    namespace: String,
}

impl WriteObserver for Latecomer {
    fn after(&self, _: usize, write: SentWrite<'_>) {
        let what = write.description();
        if what != "patch CiliumNode n1" {
            return;
        }
        let Some(access) = self.access.lock().unwrap().take() else { return };
        let namespace = self.namespace.clone();
        meanwhile(async move {
            running(access.client().await, &namespace, "late", "n1", "10.1.1.99").await;
        });
    }
}

/// On a thread of its own: the command's runtime stands still.
fn meanwhile(deed: impl Future<Output = ()> + Send + 'static) {
    let doing = std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(deed);
    });
    doing.join().unwrap();
}

/// Writes the CiliumNode of n1 just before the command does, as often as it has something to write.
struct Rival {
    access: Access,
    patches: Mutex<Vec<Value>>,
}

impl WriteObserver for Rival {
    fn before(&self, _: usize, write: SentWrite<'_>) {
        let what = write.description();
        if what != "patch CiliumNode n1" {
            return;
        }
        let Some(patch) = self.patches.lock().unwrap().pop() else { return };
        let access = self.access.clone();
        meanwhile(async move {
            let nodes: Api<CiliumNode> = Api::all(access.client().await);
            nodes.patch("n1", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        });
    }
}

#[tokio::test]
async fn what_others_write_meanwhile_is_planned_for_again_and_never_overwritten() {
    let server = server().await;
    let case = server.case().await;
    mode(&case, "cluster-pool").await;
    node(&case, 1).await;
    running(case.client(), case.namespace(), "web", "n1", "10.1.1.5").await;
    let key = |address: &str, owner: &str| json!({"spec": {"ipam": {"pool": {address: {"owner": owner}}}}});
    let beside = async |patches: Vec<Value>| {
        let rival = Rival { access: case.admin(), patches: Mutex::new(patches) };
        let writer = writer(&case, Box::new(rival)).await;
        adopt(&writer, &settings(&case, &[]), APPLY).await.unwrap()
    };
    // 10.1.1.1 would have been offered to anybody.
    let noted = json!({"metadata": {"annotations": {"noted": "yes"}}});
    let report = beside(vec![key("10.1.1.1", "db/db-0"), noted]).await;
    assert!(report.clear, "{}", report.text);
    let stands = pool(&case, "n1").await;
    assert_eq!(stands["10.1.1.1"]["owner"], "db/db-0", "{stands}");
    assert_eq!((stands.as_object().unwrap().len(), &stands["10.1.1.5"]), (8, &json!({})), "{stands}");

    running(case.client(), case.namespace(), "late", "n1", "10.1.1.99").await;
    let report = beside(vec![key("10.1.1.99", "db/db-1")]).await;
    assert!(!report.clear && report.text.contains("is kept for db/db-1"), "{}", report.text);
    assert_eq!(pool(&case, "n1").await["10.1.1.99"]["owner"], "db/db-1");
}

#[tokio::test]
async fn a_pod_that_starts_while_agents_restart_is_added_to_its_nodes_pool_alone() {
    let server = server().await;
    let case = server.case().await;
    mode(&case, "cluster-pool").await;
    node(&case, 1).await;
    running(case.client(), case.namespace(), "web", "n1", "10.1.1.5").await;
    assert!(run(&case, APPLY).await.0.clear);
    let before = pool(&case, "n1").await;
    // The operator has written the new mode, and restarts one agent after the other.
    mode(&case, "crd").await;
    let (writer, flags) = (writer(&case, Box::new(NoObserver)).await, settings(&case, &[]));
    let starting = async {
        running(case.client(), case.namespace(), "late", "n1", "10.1.1.99").await;
        let is_there = || async { pool(&case, "n1").await.get("10.1.1.99").is_some() };
        assert!(comes_true(Duration::from_secs(60), is_there).await, "the late pod's address is missing");
    };
    tokio::select! {
        () = follow(writer, flags) => panic!("it goes on until it is told to end"),
        () = starting => {}
    }
    let mut after = pool(&case, "n1").await;
    after.as_object_mut().unwrap().remove("10.1.1.99");
    assert_eq!(after, before);
}

#[tokio::test]
async fn it_refuses_to_go_on_while_a_live_pods_address_is_missing_or_anothers() {
    let server = server().await;
    let case = server.case().await;
    mode(&case, "kubernetes").await;
    node(&case, 1).await;
    running(case.client(), case.namespace(), "web", "n1", "10.1.1.5").await;
    let latecomer =
        Latecomer { access: Mutex::new(Some(case.admin())), namespace: case.namespace().to_owned() };
    let writer = writer(&case, Box::new(latecomer)).await;
    let report = adopt(&writer, &settings(&case, &[]), APPLY).await.unwrap();
    assert!(!report.clear, "{}", report.text);
    let missing = format!("10.1.1.99 of pod {}/late is not in the pool", case.namespace());
    assert!(report.text.contains("Do not go on") && report.text.contains(&missing), "{}", report.text);
    assert!(!report.text.contains("Next:"));
    assert!(run(&case, APPLY).await.0.clear, "once more, and it is there");

    let nodes: Api<CiliumNode> = Api::all(case.client());
    let theft = json!({"spec": {"ipam": {"pool": {"10.1.1.5": {"owner": "other/pod"}}}}});
    nodes.patch("n1", &PatchParams::default(), &Patch::Merge(theft)).await.unwrap();
    let (report, writes) = run(&case, APPLY).await;
    assert_eq!((report.clear, writes), (false, 0));
    assert!(report.text.contains("is kept for other/pod"), "{}", report.text);

    mode(&case, "eni").await;
    assert!(run(&case, DRY).await.0.text.contains("the way leads from cluster-pool or kubernetes only"));
}

#[tokio::test]
async fn wherever_it_ends_it_is_finished_by_running_it_again() {
    let server = server().await;
    let case = server.case().await;
    mode(&case, "cluster-pool").await;
    let mut number = 1;
    loop {
        for node_number in [1, 2] {
            node(&case, node_number).await;
        }
        running(case.client(), case.namespace(), "web", "n2", "10.1.2.5").await;
        let writer = writer(&case, EndControllerAt::boxed(number, number % 2 == 0)).await;
        let flags = settings(&case, &[]);
        let ended = ended_by_the_witness(async {
            adopt(&writer, &flags, APPLY).await.unwrap();
        })
        .await;
        assert!(run(&case, APPLY).await.0.clear);
        assert_eq!(pool(&case, "n1").await.as_object().unwrap().len(), 6);
        assert_eq!(pool(&case, "n2").await.as_object().unwrap().len(), 7);
        let pods: Api<Pod> = Api::namespaced(case.client(), case.namespace());
        pods.delete("web", &DeleteParams::default().grace_period(0)).await.unwrap();
        for name in ["n1", "n2"] {
            crate::support::duty::remove_node(&case, name).await;
        }
        if !ended {
            break;
        }
        number += 1;
    }
    // A Node's range and a pool, twice.
    assert_eq!(number, 5);
}

#[tokio::test]
async fn the_way_back_waits_until_every_address_is_at_home() {
    let server = server().await;
    let case = server.case().await;
    mode(&case, "crd").await;
    node(&case, 1).await;
    node(&case, 2).await;
    running(case.client(), case.namespace(), "home", "n1", "10.1.1.5").await;
    running(case.client(), case.namespace(), "away", "n1", "10.1.2.7").await;
    let nodes: Api<CiliumNode> = Api::all(case.client());
    let routed = json!({"spec": {"ipam": {"podCIDRs": ["10.1.1.0/24", "10.1.2.7/32"]}}});
    nodes.patch("n1", &PatchParams::default(), &Patch::Merge(routed)).await.unwrap();
    let (report, writes) = run(&case, BACK).await;
    assert_eq!((report.clear, writes), (false, 0), "{}", report.text);
    let away = format!("pod {}/away has 10.1.2.7", case.namespace());
    assert!(report.text.contains(&away) && report.text.contains("still routes 10.1.2.7"), "{}", report.text);
    let pods: Api<Pod> = Api::namespaced(case.client(), case.namespace());
    pods.delete("away", &DeleteParams::default().grace_period(0)).await.unwrap();
    let home = json!({"spec": {"ipam": {"podCIDRs": ["10.1.1.0/24"]}}});
    let now = nodes.patch("n1", &PatchParams::default(), &Patch::Merge(home)).await.unwrap();
    assert_eq!(now.name_any(), "n1");
    let (report, _) = run(&case, BACK).await;
    assert!(report.clear && report.text.contains("then its agents node by node"), "{}", report.text);
    // These Nodes name no range: good enough for cluster-pool, and it says so.
    assert!(report.text.contains("adopt --back=kubernetes"), "{}", report.text);
    let (report, writes) = run(&case, AdoptOptions { back: Some(BackTo::Kubernetes), ..BACK }).await;
    assert_eq!((report.clear, writes), (false, 0), "{}", report.text);
    let waits = "node n2: its Node names no range";
    assert!(
        report.text.contains("of no range that the Node itself names") && report.text.contains(waits),
        "{}",
        report.text
    );
}

#[tokio::test]
async fn it_writes_nothing_while_a_setting_is_fatal_or_a_harmful_one_is_not_accepted() {
    let server = server().await;
    let case = server.case().await;
    node(&case, 1).await;
    running(case.client(), case.namespace(), "web", "n1", "10.1.1.5").await;
    // What Cilium's chart writes.
    let chart = json!({"ipam": "cluster-pool", "routing-mode": "tunnel", "enable-ipv6": "false",
                       "enable-ipv4-masquerade": "true", "cni-exclusive": "true"});
    settings_of_cilium(&case, chart).await;
    let accepting = |names: &[&str]| {
        let accept = names.iter().map(|name| (*name).to_owned()).collect();
        AdoptOptions { accept, ..APPLY }
    };
    let (report, writes) = run(&case, accepting(&["ExclusiveCni"])).await;
    assert_eq!((report.clear, writes), (false, 0), "{}", report.text);
    let end = "\nNO-GO: 1 thing stands in the way. Nothing was written.\n";
    for part in
        ["fatal MasqueradeNeedsInterfaces: ConfigMap kube-system/cilium-config", "cure: set egress", end]
    {
        assert!(report.text.contains(part), "{part}: {}", report.text);
    }

    let data = json!({"ipam": "cluster-pool", "egress-masquerade-interfaces": "eth0", "cni-exclusive": "true",
                      "enable-ipv6": "false"});
    settings_of_cilium(&case, data).await;
    let (report, writes) = run(&case, APPLY).await;
    assert_eq!((report.clear, writes), (false, 0), "{}", report.text);
    assert!(report.text.contains("harmful ExclusiveCni"), "{}", report.text);
    let (report, writes) = run(&case, accepting(&["ExclusiveCni"])).await;
    assert!(report.clear && writes > 0, "{}", report.text);
    assert!(report.text.contains("harmful (does not stop) ExclusiveCni"), "{}", report.text);
    // Every node needs an agent, of a release with which it was tried.
    cilium_agent(&case, "n1", "quay.io/cilium/cilium:v1.12.0").await;
    let (report, _) = run(&case, accepting(&["ExclusiveCni"])).await;
    assert!(!report.clear && report.text.contains("CiliumReleaseNotProved: node n1"), "{}", report.text);
}

/// The settings of a node alone, as sticky-ipam wrote them.
async fn node_config(case: &Case<'_>, node: &str) -> Option<Value> {
    let configs: Api<CiliumNodeConfig> = Api::namespaced(case.client(), "kube-system");
    let found = configs.get_opt(&format!("sticky-ipam-{node}")).await.unwrap();
    found.map(|config| serde_json::to_value(config.spec).unwrap())
}

/// A node whose Node names another range than its CiliumNode, as kubeadm leaves it.
async fn differing_node(case: &Case<'_>, number: u8) {
    node(case, number).await;
    let nodes: Api<Node> = Api::all(case.client());
    let range = format!("10.244.{number}.0/24");
    let spec = json!({"spec": {"podCIDR": range, "podCIDRs": [range]}});
    nodes.patch(&format!("n{number}"), &PatchParams::default(), &Patch::Merge(spec)).await.unwrap();
}

#[tokio::test]
async fn nodes_whose_range_is_not_their_block_get_the_block_by_a_ciliumnodeconfig() {
    let server = server().await;
    let case = server.case().await;
    mode(&case, "cluster-pool").await;
    differing_node(&case, 1).await;
    node(&case, 2).await;
    running(case.client(), case.namespace(), "web", "n1", "10.1.1.5").await;
    let (report, _) = run(&case, DRY).await;
    let planned = "CiliumNodeConfig kube-system/sticky-ipam-n1 becomes ipv4-range: 10.1.1.0/24";
    assert!(report.clear && report.text.contains(planned), "{}", report.text);
    let cannot_be_undone = "WARNING: node n2: spec.podCIDRs of the Node becomes 10.1.2.0/24";
    assert!(report.text.contains(cannot_be_undone), "{}", report.text);
    assert_eq!(node_config(&case, "n1").await, None);

    let (report, _) = run(&case, APPLY).await;
    assert!(report.clear, "{}", report.text);
    let selector = json!({"matchLabels": {"kubernetes.io/hostname": "n1"}});
    let range = json!({"defaults": {"ipv4-range": "10.1.1.0/24"}, "nodeSelector": selector});
    assert_eq!(node_config(&case, "n1").await, Some(range.clone()));
    assert_eq!(node_config(&case, "n2").await, None, "its Node names the block");
    assert_eq!(run(&case, APPLY).await.1, 0, "nothing is written twice");

    // One node first: its agent may use the pool from now on, so no free address is added there.
    let canary = AdoptOptions { canary: Some("n1".into()), ..APPLY };
    assert!(
        run(&case, AdoptOptions { canary: Some("n9".into()), ..APPLY }).await.0.text.contains("--canary")
    );
    let (report, _) = run(&case, canary.clone()).await;
    assert!(report.clear && report.text.contains("spec.nodeName=n1"), "{}", report.text);
    let defaults = json!({"ipv4-range": "10.1.1.0/24", "ipam": "crd"});
    assert_eq!(node_config(&case, "n1").await.unwrap()["defaults"], defaults);
    let before = pool(&case, "n1").await.as_object().unwrap().len();
    assert!(run(&case, AdoptOptions { free: 9, ..APPLY }).await.0.clear);
    assert_eq!(pool(&case, "n1").await.as_object().unwrap().len(), before);
    assert_eq!(node_config(&case, "n1").await.unwrap()["defaults"], defaults, "it stays switched");
    assert!(pool(&case, "n2").await.as_object().unwrap().len() > before);

    // The whole cluster says it now; the range stays until the way back has reached the ConfigMap.
    mode(&case, "crd").await;
    assert!(run(&case, APPLY).await.0.clear);
    assert_eq!(node_config(&case, "n1").await, Some(range.clone()));
    let remove = AdoptOptions { apply: true, ..BACK };
    let (report, writes) = run(&case, remove.clone()).await;
    assert_eq!(writes, 0, "{}", report.text);
    assert!(report.text.contains("They must stay"), "{}", report.text);
    mode(&case, "cluster-pool").await;
    assert!(run(&case, BACK).await.0.clear);
    assert_eq!(node_config(&case, "n1").await, Some(range), "a look removes nothing");
    assert!(run(&case, remove).await.0.text.contains("Removed the settings per node: sticky-ipam-n1"));
    assert_eq!(node_config(&case, "n1").await, None);
}

#[tokio::test]
async fn a_ciliumnodeconfig_that_a_person_wrote_is_never_touched() {
    let server = server().await;
    let case = server.case().await;
    mode(&case, "cluster-pool").await;
    differing_node(&case, 1).await;
    let selector = json!({"matchLabels": {"kubernetes.io/hostname": "n1"}});
    let theirs = |name: &str, range: &str| {
        json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNodeConfig",
               "metadata": {"name": name, "namespace": "kube-system"},
               "spec": {"defaults": {"ipv4-range": range}, "nodeSelector": selector}})
    };
    let configs: Api<CiliumNodeConfig> = Api::namespaced(case.client(), "kube-system");
    apply(configs.clone(), theirs("sticky-ipam-n1", "10.9.0.0/24")).await;
    let (report, writes) = run(&case, APPLY).await;
    assert_eq!((report.clear, writes), (false, 0), "{}", report.text);
    assert!(report.text.contains("sticky-ipam-n1 was not written by sticky-ipam"), "{}", report.text);
    configs.delete("sticky-ipam-n1", &DeleteParams::default()).await.unwrap();

    // One that sorts behind ours would override it.
    apply(configs.clone(), theirs("zone", "10.9.0.0/24")).await;
    let (report, writes) = run(&case, APPLY).await;
    assert_eq!((report.clear, writes), (false, 0), "{}", report.text);
    assert!(report.text.contains("harmful RangesDisagree: node n1"), "{}", report.text);
    // The right one is enough.
    apply(configs, theirs("zone", "10.1.1.0/24")).await;
    assert!(run(&case, APPLY).await.0.clear);
    assert_eq!(node_config(&case, "n1").await, None);
}
