//! Cilium as operators run it: the settings of its own chart, kube-proxy, ranges of Nodes from the controller
//! manager, Services, network policies, clients from outside. A sticky pod keeps its address on it, and
//! everyone reaches it.

use serde_json::{Value, json};

use crate::support::lab::api::{ApiServer, Seen, named};
use crate::support::lab::reach::{NODES, client};
use crate::support::lab::services::{
    From, OUTSIDE_ADDRESS, PORT, Question, answered, entrances, get, only_from, pods_and_hosts, service,
};
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{plain, pod, probed_spec, spec, stateful_set};
use crate::support::lab::{Flavour, Lab, Mode, run, text};

const NAMESPACE: &str = "field";

/// Pods beside the sticky ones: two clients, one pod with probes on each node, and a stranger on each that no
/// policy admits.
fn start_others(stage: &Stage) {
    let api = &stage.api;
    for node in NODES {
        let mut probed = probed_spec();
        probed["nodeSelector"] = json!({"kubernetes.io/hostname": node});
        api.create(pod(NAMESPACE, &client(node), plain("client"), json!({}), spec(Some(node))));
        api.create(pod(NAMESPACE, &stranger(node), plain("stranger"), json!({}), spec(Some(node))));
        api.create(pod(NAMESPACE, &ordinary(node), plain("ordinary"), json!({}), probed));
    }
}

/// All of them, the sticky pods with their Services and the policy too.
fn start_all(stage: &Stage) {
    stage.lab.namespace(NAMESPACE);
    for app in ["open", "guarded"] {
        stage.api.create(at_home_on_the_first_node(app));
        stage.api.create(service(NAMESPACE, app));
    }
    stage.api.create(only_from(NAMESPACE, "guarded", "client"));
    start_others(stage);
}

fn stranger(node: &str) -> String {
    format!("stranger-{node}")
}

fn ordinary(node: &str) -> String {
    format!("ordinary-{node}")
}

/// The address of a node.
fn host(node: &str) -> &'static str {
    if node == NODES[0] { "172.30.0.11" } else { "172.30.0.12" }
}

fn nodes() -> Vec<String> {
    NODES.map(str::to_owned).to_vec()
}

fn question(from: From, address: &str, port: u16, page: &'static str, answer: &str) -> Question {
    Question { from, address: address.to_owned(), port, page, answer: answer.to_owned() }
}

/// Every way to a pod: by its address, by its Service's ClusterIP and by the port of the Service on each
/// node, from the pods and hosts of all nodes; by that port from outside.
fn every_way(stage: &Stage, app: &str, address: &str) -> Vec<Question> {
    let (cluster_ip, node_port) = entrances(stage, NAMESPACE, app);
    let mut questions = Vec::new();
    for from in pods_and_hosts(&nodes()) {
        questions.push(question(from.clone(), address, 8080, "", address));
        questions.push(question(from.clone(), &cluster_ip, PORT, "", address));
        for node in NODES {
            questions.push(question(from.clone(), host(node), node_port, "", address));
        }
    }
    for node in NODES {
        questions.push(question(From::Outside, host(node), node_port, "", address));
    }
    questions
}

/// A pod of each node, and the sticky ones, reach the host outside, which sees the node where they live.
fn outside_is_reached(sticky: &[(&str, &Seen)]) -> Vec<Question> {
    let ordinary = NODES.map(|node| (client(node), node.to_owned()));
    let sticky = sticky.iter().map(|(name, seen)| ((*name).to_owned(), seen.node.clone()));
    ordinary
        .into_iter()
        .chain(sticky)
        .map(|(pod, node)| question(From::Pod(pod), OUTSIDE_ADDRESS, 8080, "from", host(&node)))
        .collect()
}

/// A StatefulSet of one pod with probes, on the first node as long as that takes pods.
fn at_home_on_the_first_node(app: &str) -> Value {
    let mut spec = probed_spec();
    let expressions = json!([{"key": "kubernetes.io/hostname", "operator": "In", "values": [NODES[0]]}]);
    spec["affinity"] = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 100, "preference": {"matchExpressions": expressions}},
    ]}});
    stateful_set(NAMESPACE, app, 1, spec)
}

/// The two sticky pods: one that everyone reaches, one behind a network policy.
struct Sticky {
    open: Seen,
    guarded: Seen,
}

impl Sticky {
    fn ready(stage: &Stage) -> Self {
        Self { open: stage.api.ready(NAMESPACE, "open-0"), guarded: stage.api.ready(NAMESPACE, "guarded-0") }
    }

    /// Both are deleted, on a node that takes no pods.
    fn leave(&self, stage: &Stage, node: &str) -> Self {
        stage.lab.kubectl(&["cordon", node]);
        let _uncordoned = Uncordoned(stage, node.to_owned());
        stage.api.delete_pod(NAMESPACE, "open-0", None);
        stage.api.delete_pod(NAMESPACE, "guarded-0", None);
        let moved = Self {
            open: stage.api.ready_after(NAMESPACE, "open-0", &self.open.uid),
            guarded: stage.api.ready_after(NAMESPACE, "guarded-0", &self.guarded.uid),
        };
        for (before, after) in [(&self.open, &moved.open), (&self.guarded, &moved.guarded)] {
            assert_ne!(after.node, node, "it moved");
            assert_eq!(after.addresses, before.addresses, "and kept its address");
        }
        moved
    }

    /// Everyone reaches them who may, nobody else does, and both reach the world.
    fn work(&self, stage: &Stage) {
        let (open, guarded) = (self.open.address(), self.guarded.address());
        let mut questions = every_way(stage, "open", open);
        for node in NODES {
            questions.push(question(From::Pod(client(node)), guarded, 8080, "", guarded));
            let address = stage.api.ready(NAMESPACE, &ordinary(node)).address().to_owned();
            for from in pods_and_hosts(&nodes()) {
                questions.push(question(from, &address, 8080, "", &address));
            }
        }
        questions.extend(outside_is_reached(&[("open-0", &self.open), ("guarded-0", &self.guarded)]));
        answered(stage, NAMESPACE, &questions);
        for node in NODES {
            // Its probes are answered all the same, or it would not be Ready: kubelet asks from the host.
            let said = get(stage, NAMESPACE, &From::Pod(stranger(node)), guarded, 8080, "");
            assert!(said.is_err(), "a stranger on {node} passed the network policy: {said:?}");
        }
        let now = Self::ready(stage);
        for (before, after) in [(&self.open, &now.open), (&self.guarded, &now.guarded)] {
            assert_eq!((&after.uid, after.restarts), (&before.uid, 0), "no probe of kubelet was lost");
        }
    }
}

/// Uncordons the node, whatever becomes of the test.
struct Uncordoned<'a>(&'a Stage, String);

impl Drop for Uncordoned<'_> {
    fn drop(&mut self) {
        let _ = self.0.lab.attempt(&["kubectl", "uncordon", &self.1]);
    }
}

/// Which pods these are, and how often a probe had their containers started again.
fn incarnations(stage: &Stage, pods: &[String]) -> Vec<(String, i32)> {
    pods.iter().map(|pod| stage.api.ready(NAMESPACE, pod)).map(|seen| (seen.uid, seen.restarts)).collect()
}

fn stage(flavour: Flavour) -> Stage {
    let lab = Lab::of(flavour);
    let api = ApiServer::connect();
    Stage { lab, api, mode: Mode::Crd }
}

#[test]
fn sticky_pods_at_home_away_and_back_are_reached_by_everyone_who_may() {
    let stage = stage(Flavour::Field);
    start_all(&stage);
    let home = Sticky::ready(&stage);
    assert_eq!((&*home.open.node, &*home.guarded.node), (NODES[0], NODES[0]));
    home.work(&stage);

    let away = home.leave(&stage, NODES[0]);
    away.work(&stage);

    // Cilium's agent starts again under pods with probes: on the node where they live, and at their home.
    let pods: Vec<String> =
        NODES.map(ordinary).into_iter().chain(["open-0".into(), "guarded-0".into()]).collect();
    let before = incarnations(&stage, &pods);
    for node in NODES {
        stage.lab.must(&["restart-cilium", node]);
    }
    away.work(&stage);
    assert_eq!(incarnations(&stage, &pods), before, "pods live through a restart of Cilium's agent");

    let back = away.leave(&stage, NODES[1]);
    back.work(&stage);
    stage.lab.delete_namespace(NAMESPACE);
}

#[test]
fn ciliums_settings_are_those_of_its_chart_and_of_the_configs_of_its_nodes() {
    let stage = stage(Flavour::Field);
    let setting = |node: &str, name: &str| {
        stage.lab.must(&["on", node, "cat", &format!("/tmp/cilium/config-map/{name}")])
    };
    // As the chart ships them; only the first is what the mode needs.
    for (name, value) in [
        ("ipam", "crd"),
        ("enable-ipv4-masquerade", "true"),
        ("enable-hubble", "true"),
        ("enable-health-checking", "true"),
        ("kube-proxy-replacement", "false"),
    ] {
        assert_eq!(setting(NODES[0], name), value, "{name}");
    }
    stage.api.create(json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNodeConfig",
        "metadata": {"namespace": "kube-system", "name": "second"},
        "spec": {
            "nodeSelector": {"matchLabels": {"kubernetes.io/hostname": NODES[1]}},
            "defaults": {"monitor-aggregation": "none"},
        },
    }));
    stage.lab.must(&["cilium-values", "bpf.monitorInterval=6s"]);
    for node in NODES {
        stage.lab.must(&["restart-cilium", node]);
        assert_eq!(setting(node, "monitor-aggregation-interval"), "6s", "{node}: as in the ConfigMap");
    }
    let aggregation = NODES.map(|node| setting(node, "monitor-aggregation"));
    assert_eq!(aggregation, ["medium", "none"], "a CiliumNodeConfig counts on the node that it selects");
    stage.api.delete(named("cilium.io/v2", "CiliumNodeConfig", "kube-system", "second"));
}

#[test]
fn what_belongs_to_the_field_profile_is_refused_on_the_lean_one() {
    let refused = |options: &[&str], why: &str| {
        let output = run(&[&["up"], options].concat());
        assert!(
            output.status.code() == Some(2) && text(&output).contains(why),
            "{options:?}: {}",
            text(&output)
        );
    };
    refused(&["--kube-proxy", "none"], "--profile field");
    refused(&["--profile", "field", "--masquerade", "tables"], "there are: iptables bpf");
    refused(&["--nodes", "1"], "there can be 2 to 9");
}

/// The last by its name, because it needs another lab; and with it the other way of Services.
#[test]
fn with_containerd_2_and_no_kube_proxy_pods_are_reached_by_everyone_who_may() {
    let stage = stage(Flavour::FieldOnContainerd2);
    let version = stage.lab.kubectl(&[
        "get",
        "node",
        NODES[0],
        "-o",
        "jsonpath={.status.nodeInfo.containerRuntimeVersion}",
    ]);
    assert!(version.starts_with("containerd://2."), "{version}");
    start_all(&stage);
    let home = Sticky::ready(&stage);
    home.work(&stage);
    home.leave(&stage, NODES[0]).work(&stage);
    stage.lab.delete_namespace(NAMESPACE);
}
