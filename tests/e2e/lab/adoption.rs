//! A running cluster is taken over from Cilium's `cluster-pool` or `kubernetes` mode into `crd`, and back,
//! and nobody notices.

use std::process::{Child, Stdio};

use crate::support::lab::{Flavour, Lab, command, eventually, folder, pod_spec};

const NAMESPACE: &str = "adopted";
const REBOOTED: &str = "rebooted";
/// Between two pings.
const PING_SECONDS: &str = "0.1";

/// `sticky-ipam-controller adopt` with these arguments, in the fabric, where the API server is. No pod of
/// Cilium's agent is there to be seen: they are processes.
fn adopt(lab: &Lab, arguments: &[&str]) -> Result<String, String> {
    let kubeconfig = folder().join("admin.kubeconfig").display().to_string();
    let program = env!("CARGO_BIN_EXE_sticky-ipam-controller");
    let begin = ["on", "fabric", program, "--kubeconfig", kubeconfig.as_str(), "adopt"];
    lab.attempt(&[&begin, arguments, &["--accept=CiliumAgentsNotSeen"]].concat())
}

/// The ConfigMap that `adopt` reads, with the settings that the lab gives to the agents as flags.
fn set_mode(lab: &Lab, mode: &str) {
    let ipam = format!("--from-literal=ipam={mode}");
    let settings = [
        "--from-literal=routing-mode=tunnel",
        "--from-literal=enable-ipv6=false",
        "--from-literal=enable-ipv4-masquerade=false",
        "--from-literal=cni-exclusive=false",
    ];
    let _ = lab.attempt(&["kubectl", "delete", "configmap", "-n", "kube-system", "cilium-config"]);
    let create = ["create", "configmap", "-n", "kube-system", "cilium-config", ipam.as_str()];
    lab.kubectl(&[&create[..], &settings[..]].concat());
}

/// A process in a pod that goes on while other things happen.
struct Going(Child);

impl Going {
    fn start(pod: &str, script: &str) -> Self {
        let pod = format!("{NAMESPACE}/{pod}");
        let mut child = command(&["pod-exec", &pod, "sh", "-c", script]);
        Self(child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("tests/lab/lab can be run"))
    }

    fn output(self) -> String {
        let output = self.0.wait_with_output().expect("it ends");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// Pings and one TCP connection from `one` to `two`, for as long as `meanwhile` takes; fails if anything was
/// lost.
fn loses_nothing(lab: &Lab, address: &str, meanwhile: impl FnOnce()) {
    let in_one = |script: &str| lab.must(&["pod-exec", &format!("{NAMESPACE}/one"), "sh", "-c", script]);
    let in_two = |script: &str| lab.must(&["pod-exec", &format!("{NAMESPACE}/two"), "sh", "-c", script]);
    in_one("rm -f /tmp/end");
    in_two("rm -f /tmp/got");
    // Its standard input stays open: at its end nc closes its half, and the other end leaves.
    let listener = Going::start("two", "tail -f /dev/null | nc -l -p 9000 > /tmp/got");
    eventually("the listener", || {
        lab.attempt(&["pod-exec", &format!("{NAMESPACE}/two"), "sh", "-c", "netstat -ltn | grep -q :9000"])
    });
    let counting = "i=0; while [ ! -e /tmp/end ]; do echo $i; i=$((i+1)); sleep 0.1; done; echo last";
    let sender = Going::start("one", &format!("({counting}) | nc {address} 9000"));
    let ping = format!(
        "ping -i {PING_SECONDS} {address} & p=$!; while [ ! -e /tmp/end ]; do sleep 0.1; done; kill -INT $p; \
         wait $p"
    );
    let pings = Going::start("one", &ping);
    meanwhile();
    in_one("touch /tmp/end");
    let told = pings.output();
    assert!(told.contains(" 0% packet loss"), "{told}");
    let got = eventually("the last line over the connection", || {
        let got = in_two("cat /tmp/got");
        if got.ends_with("last") { Ok(got) } else { Err(format!("{} bytes", got.len())) }
    });
    sender.output();
    drop(listener);
    let lines: Vec<&str> = got.lines().collect();
    let counted: Vec<String> = (0..lines.len() - 1).map(|n| n.to_string()).collect();
    assert_eq!(lines[..lines.len() - 1], counted, "the connection broke or lost something");
}

/// Cilium's agent has taken the pod's endpoint over: one whose address it does not find is dropped instead.
fn is_restored(lab: &Lab, node: &str, address: &str) {
    let url = format!("http://localhost/v1/endpoint/ipv4:{address}");
    eventually(&format!("{address} to be ready on {node}"), || {
        let said =
            lab.attempt(&["on", node, "curl", "-sf", "--unix-socket", "/var/run/cilium/cilium.sock", &url])?;
        if said.contains(r#""state":"ready""#) { Ok(()) } else { Err(said.chars().take(300).collect()) }
    });
}

/// Cilium's agent itself says that it is in this mode.
fn is_in_mode(lab: &Lab, node: &str, mode: &str) {
    let url = "http://localhost/v1/config";
    let said = lab.must(&["on", node, "curl", "-sf", "--unix-socket", "/var/run/cilium/cilium.sock", url]);
    assert!(said.contains(&format!(r#""ipam-mode":"{mode}""#)), "{node} is not in {mode} mode: {said}");
}

/// Which pods these are, and which containers run in them.
fn incarnations(lab: &Lab, pods: &[&str]) -> String {
    let path = "jsonpath={.items[*].metadata.uid} {.items[*].status.containerStatuses[*].containerID}";
    lab.kubectl(&[&["get", "pods", "-n", NAMESPACE, "-o", path], pods].concat())
}

/// The agents of both nodes start anew in this mode, while pings and a connection between their pods go on.
fn switch(lab: &Lab, mode: &str, one: &str, two: &str) {
    set_mode(lab, mode);
    for node in ["node-1", "node-2"] {
        lab.must(&["set-ipam", node, mode]);
        is_in_mode(lab, node, mode);
    }
    is_restored(lab, "node-1", one);
    is_restored(lab, "node-2", two);
    lab.pings(NAMESPACE, "two", one);
}

/// A sticky pod on a node, of the same name each time.
fn sticky(lab: &Lab, node: &str) -> String {
    let _ = lab.attempt(&["kubectl", "delete", "pod", "-n", NAMESPACE, "db-0", "--wait"]);
    lab.create(&serde_json::json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, "name": "db-0", "labels": {"sticky": "yes"}},
        "spec": pod_spec(node),
    }));
    lab.address(NAMESPACE, "db-0")
}

/// Our agents and controllers come to the adopted cluster, a pod keeps its address over nodes, and before the
/// way back it must go home.
fn serves_sticky_pods(lab: &Lab, mode: &str, two: &str) {
    // It would go on handing out blocks; an operator in crd mode has nothing to do.
    lab.must(&["stop", "operator"]);
    lab.must(&["bring-ours"]);
    for node in ["node-1", "node-2"] {
        eventually(&format!("our conflist on {node}"), || {
            lab.attempt(&["on", node, "ls", "/etc/cni/net.d/03-sticky-ipam.conflist"])
        });
    }
    let address = sticky(lab, "node-1");
    assert_eq!(sticky(lab, "node-1"), address, "it comes back");
    lab.pings(NAMESPACE, "two", &address);
    let back = |why: &str| match adopt(lab, &[&format!("--back={mode}")]) {
        Ok(report) => panic!("{why}: {report}"),
        Err(report) => report,
    };
    assert_eq!(sticky(lab, "node-2"), address, "it moves");
    for pod in ["one", "two"] {
        lab.pings(NAMESPACE, pod, &address);
    }
    let report = back("an address is away from home");
    assert!(report.contains(&address) && report.contains("db-0"), "{report}");
    assert_eq!(sticky(lab, "node-1"), address, "it goes home");
    lab.pings(NAMESPACE, "two", &address);
    eventually("the way back to be clear", || adopt(lab, &[&format!("--back={mode}")]));
    for component in
        ["sticky-controller-1", "sticky-controller-2", "sticky-agent@node-1", "sticky-agent@node-2"]
    {
        lab.must(&["stop", component]);
    }
    lab.kubectl(&["delete", "pod", "-n", NAMESPACE, "db-0", "--wait"]);
    let agent = folder().join("ours/sticky-ipam-agent").display().to_string();
    for node in ["node-1", "node-2"] {
        let flags = [
            "uninstall",
            "--node",
            node,
            "--network",
            "lab",
            "--plugin-service-account",
            "kube-system/sticky-ipam-node",
        ];
        lab.must(&[&["on", node, agent.as_str()], &flags[..]].concat());
        assert!(lab.attempt(&["on", node, "ls", "/etc/cni/net.d/03-sticky-ipam.conflist"]).is_err());
    }
    lab.must(&["start", "operator"]);
    lab.pings(NAMESPACE, "one", two);
}

/// The settings of single nodes.
fn node_configs(lab: &Lab) -> String {
    let path = "jsonpath={.items[*].metadata.name}";
    lab.kubectl(&["get", "ciliumnodeconfigs", "-n", "kube-system", "-o", path])
}

/// A pod that kubelet probes over TCP; its address once it is ready.
fn probed_pod(lab: &Lab, name: &str, node: &str) -> String {
    let mut spec = pod_spec(node);
    spec["containers"][0]["readinessProbe"] =
        serde_json::json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1});
    lab.create(&serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": REBOOTED, "name": name}, "spec": spec,
    }));
    lab.address(REBOOTED, name)
}

/// Pings and a connection between running pods lose nothing on the way from `mode` into `crd`, and back.
fn there_and_back(flavour: Flavour, mode: &str) {
    let lab = Lab::of(flavour);
    lab.namespace(NAMESPACE);
    set_mode(&lab, mode);
    is_in_mode(&lab, "node-1", mode);
    lab.pod(NAMESPACE, "one", "node-1");
    lab.pod(NAMESPACE, "two", "node-2");
    let (one, two) = (lab.address(NAMESPACE, "one"), lab.address(NAMESPACE, "two"));
    lab.pings(NAMESPACE, "one", &two);
    let routers = || {
        let path = r#"jsonpath={.items[*].spec.addresses[?(@.type=="CiliumInternalIP")].ip}"#;
        lab.kubectl(&["get", "ciliumnodes", "-o", path])
    };
    let before = (routers(), incarnations(&lab, &["one", "two"]));

    let dry = adopt(&lab, &[]).unwrap_or_else(|why| panic!("{why}"));
    assert!(dry.contains("Dry run: nothing was written"), "{dry}");
    loses_nothing(&lab, &two, || {
        let report = adopt(&lab, &["--apply"]).unwrap_or_else(|why| panic!("{why}"));
        assert!(report.contains("Every live pod's address is in the pool"), "{report}");
        switch(&lab, "crd", &one, &two);
    });
    let after = || (routers(), incarnations(&lab, &["one", "two"]));
    assert_eq!(after(), before, "the routers keep their addresses, and no pod started anew");
    lab.answers("node-1", &two);
    // New pods come out of the pool.
    lab.pod(NAMESPACE, "three", "node-1");
    let three = lab.address(NAMESPACE, "three");
    let pool = lab.kubectl(&["get", "ciliumnode", "node-1", "-o", "jsonpath={.spec.ipam.pool}"]);
    assert!(pool.contains(&format!("\"{three}\"")), "{three} is not of {pool}");
    if mode == "cluster-pool" {
        serves_sticky_pods(&lab, mode, &two);
    }

    let back = adopt(&lab, &[&format!("--back={mode}")]).unwrap_or_else(|why| panic!("{why}"));
    assert!(back.contains("Every pod has an address of its own node's blocks"), "{back}");
    loses_nothing(&lab, &two, || switch(&lab, mode, &one, &two));
    adopt(&lab, &[&format!("--back={mode}"), "--apply"]).unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(node_configs(&lab), "", "nothing of it is left");
    assert_eq!(after(), before, "the routers keep their addresses, and no pod started anew");
    // New pods come out of the block again, and get nothing that another has.
    lab.pod(NAMESPACE, "four", "node-1");
    let four = lab.address(NAMESPACE, "four");
    assert!(![&one, &three].contains(&&four), "{four} is another's");
    for address in [&one, &three, &four] {
        lab.answers("node-2", address);
    }
    lab.delete_namespace(NAMESPACE);
}

/// The tests of a mode share its lab.
mod cluster_pool {
    use super::{
        Flavour, Lab, REBOOTED, adopt, is_in_mode, node_configs, probed_pod, set_mode, there_and_back,
    };

    /// The ranges of the Nodes are not the blocks of their CiliumNodes. One node first, and back again; then
    /// all of them, and a machine that forgets every route.
    #[test]
    fn after_adoption_and_a_reboot_hosts_reach_their_own_pods() {
        let lab = Lab::of(Flavour::ClusterPool);
        lab.namespace(REBOOTED);
        set_mode(&lab, "cluster-pool");
        let adopt = |arguments: &[&str]| adopt(&lab, arguments).unwrap_or_else(|why| panic!("{why}"));
        let switch = |node: &str, mode: &str| {
            lab.must(&["set-ipam", node, mode]);
            is_in_mode(&lab, node, mode);
        };
        let report = adopt(&[]);
        assert!(report.contains("sticky-ipam-node-1 becomes ipv4-range: 10.200."), "{report}");

        assert!(adopt(&["--apply", "--canary=node-1"]).contains("GO. Next: restart cilium-agent on node-1"));
        switch("node-1", "crd");
        let first = probed_pod(&lab, "first", "node-1");
        let back = adopt(&["--back", "--apply"]);
        assert!(back.contains("Removed the settings per node: sticky-ipam-node-1"), "{back}");
        switch("node-1", "cluster-pool");
        lab.answers("node-1", &first);

        assert!(adopt(&["--apply"]).contains("GO. Next: set ipam: crd"));
        set_mode(&lab, "crd");
        for node in ["node-1", "node-2"] {
            switch(node, "crd");
        }
        lab.answers("node-1", &first);
        for node in ["node-1", "node-2"] {
            lab.must(&["reboot", node]);
            let address = probed_pod(&lab, &format!("after-{node}"), node);
            for from in ["node-1", "node-2"] {
                lab.answers(from, &address);
            }
        }

        lab.kubectl(&["delete", "namespace", REBOOTED]);
        adopt(&["--back"]);
        set_mode(&lab, "cluster-pool");
        for node in ["node-1", "node-2"] {
            switch(node, "cluster-pool");
        }
        adopt(&["--back", "--apply"]);
        assert_eq!(node_configs(&lab), "", "nothing of it is left");
    }

    /// Cilium's own operator, which the others start from.
    #[test]
    fn each_node_gets_a_block_of_the_operator_and_pods_reach_each_other() {
        let lab = Lab::of(Flavour::ClusterPool);
        lab.proves_reach("reach");
        let blocks = lab.kubectl(&["get", "ciliumnodes", "-o", "jsonpath={.items[*].spec.ipam.podCIDRs[0]}"]);
        let mut blocks: Vec<&str> = blocks.split(' ').collect();
        blocks.dedup();
        assert_eq!(blocks.len(), 2, "two nodes with two blocks, not {blocks:?}");
        assert!(
            blocks.iter().all(|block| block.starts_with("10.200.")),
            "blocks of the pool, not {blocks:?}"
        );
    }

    #[test]
    fn from_cluster_pool_and_back_running_pods_lose_nothing() {
        there_and_back(Flavour::ClusterPool, "cluster-pool");
    }
}

mod kubernetes {
    use super::{Flavour, there_and_back};

    /// The blocks are those of the Nodes, and Cilium's agents write them on the CiliumNodes; no operator has
    /// a part in it.
    #[test]
    fn from_kubernetes_and_back_running_pods_lose_nothing() {
        there_and_back(Flavour::Kubernetes, "kubernetes");
    }
}
