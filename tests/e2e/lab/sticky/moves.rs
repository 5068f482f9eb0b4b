//! A pod that moves to the other node has its address there and is reached by everyone; what the old node
//! says later changes nothing.

use std::time::Duration;

use crate::support::lab::api::{Seen, named};
use crate::support::lab::reach::{self, From, NODES};
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{probed_spec, stateful_set};
use crate::support::lab::{Mode, eventually};
use serde_json::json;

pub fn other(node: &str) -> &'static str {
    if node == NODES[0] { NODES[1] } else { NODES[0] }
}

/// Taints and cordons end with the test, also with one that fails.
pub struct Cordoned<'a>(pub &'a Stage, pub String);

impl Drop for Cordoned<'_> {
    fn drop(&mut self) {
        let _ = self.0.lab.attempt(&["kubectl", "uncordon", &self.1]);
    }
}

/// By cordon and by drain, there and back; then the old node repeats its DELs.
pub fn planned(stage: &Stage) {
    let namespace = "moves";
    stage.lab.namespace(namespace);
    reach::start_clients(stage, namespace);
    stage.api.create(stateful_set(namespace, "mysql", 1, probed_spec()));
    let first = stage.api.ready(namespace, "mysql-0");
    reach::soon(stage, namespace, &reach::everyone(), first.address());
    let old_sandbox = sandbox(stage, &first);

    let by_cordon = {
        stage.lab.kubectl(&["cordon", &first.node]);
        let _cordoned = Cordoned(stage, first.node.clone());
        stage.api.replace(namespace, "mysql-0", None)
    };
    moved(stage, namespace, &first, &first, &by_cordon);

    late_del(stage, namespace, &first, &old_sandbox);
    reach::soon(stage, namespace, &reach::everyone(), first.address());
    in_step(stage, namespace, "mysql-0", &by_cordon);
    probed_well(stage, namespace, &by_cordon);

    let by_drain = {
        let _cordoned = Cordoned(stage, by_cordon.node.clone());
        // The clients stay: they are to ask.
        stage.lab.kubectl(&["drain", &by_cordon.node, "--pod-selector=app=mysql", "--timeout=120s"]);
        stage.api.ready_after(namespace, "mysql-0", &by_cordon.uid)
    };
    moved(stage, namespace, &first, &by_cordon, &by_drain);
    in_step(stage, namespace, "mysql-0", &by_drain);
    probed_well(stage, namespace, &by_drain);

    let handovers = stage
        .api
        .sticky(namespace, "mysql-0")
        .and_then(|sticky| sticky.status)
        .map(|status| status.handovers);
    assert!(handovers.as_ref().is_some_and(|all| all.len() >= 2), "each move is written down: {handovers:?}");
    stage.lab.delete_namespace(namespace);
}

fn moved(stage: &Stage, namespace: &str, first: &Seen, from: &Seen, to: &Seen) {
    assert_eq!(to.node, other(&from.node), "it moved");
    assert_eq!(to.addresses, first.addresses, "and kept its address");
    for address in &to.addresses {
        reach::soon(stage, namespace, &reach::everyone(), address);
    }
}

/// Fails if kubelet's TCP probe did not reach mysql-0 at some time: then it started the container anew.
pub fn probed_well(stage: &Stage, namespace: &str, pod: &Seen) {
    let now = stage.api.ready(namespace, "mysql-0");
    assert_eq!((&now.uid, now.restarts), (&pod.uid, 0), "it is the same pod, and was never started anew");
}

/// The id of a pod's sandbox, as containerd has it.
pub fn sandbox(stage: &Stage, pod: &Seen) -> String {
    let of_pod =
        format!(r#"labels."io.kubernetes.pod.uid"=={},labels."io.cri-containerd.kind"==sandbox"#, pod.uid);
    stage.lab.must(&["on", &pod.node, "ctr", "--namespace", "k8s.io", "containers", "ls", "-q", &of_pod])
}

/// DEL of a sandbox that ended long ago, as kubelet repeats it.
fn late_del(stage: &Stage, namespace: &str, pod: &Seen, sandbox: &str) {
    let arguments = format!(
        "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME=mysql-0;K8S_POD_UID={};K8S_POD_INFRA_CONTAINER_ID={sandbox}",
        pod.uid
    );
    let call = format!(
        "set -eo pipefail; conf=$(ls /etc/cni/net.d/*.conflist | head -n 1); \
         jq '.plugins[0] + {{cniVersion, name}}' \"$conf\" | CNI_COMMAND=DEL CNI_CONTAINERID={sandbox} \
             CNI_IFNAME=eth0 CNI_NETNS= \
         CNI_PATH=/opt/cni/bin CNI_ARGS='{arguments}' /opt/cni/bin/sticky-ipam"
    );
    let before = stage.api.sticky(namespace, "mysql-0").and_then(|sticky| sticky.status?.attachment);
    assert!(before.is_some(), "it is attached");
    stage.lab.must(&["on", &pod.node, "bash", "-c", &call]);
    let after = stage.api.sticky(namespace, "mysql-0").and_then(|sticky| sticky.status?.attachment);
    assert_eq!(after, before, "a late DEL changed the attachment");
}

/// The pool keys and host routes of an address, by node.
fn projected(stage: &Stage, address: &str) -> Vec<(&'static str, bool, bool)> {
    let route = if address.contains(':') { format!("{address}/128") } else { format!("{address}/32") };
    NODES
        .into_iter()
        .map(|node| {
            let ipam = stage.api.get(named("cilium.io/v2", "CiliumNode", "", node)).expect("a CiliumNode")["spec"]["ipam"].clone();
            let key = ipam["pool"].get(address).is_some();
            let routed = ipam["podCIDRs"].as_array().is_some_and(|all| all.iter().any(|cidr| *cidr == json!(route)));
            (node, key, routed)
        })
        .collect()
}

/// Waits until the CiliumNodes say where the pod lives, and nowhere else.
pub fn in_step(stage: &Stage, namespace: &str, name: &str, pod: &Seen) {
    for address in &pod.addresses {
        let home = if address.starts_with("10.241.") || address.starts_with("fd24:1:") {
            NODES[0]
        } else {
            NODES[1]
        };
        let expected: Vec<_> = NODES
            .into_iter()
            .map(|node| {
                let here = node == pod.node;
                (node, here && stage.mode == Mode::Crd, here && node != home)
            })
            .collect();
        eventually("the CiliumNodes to be in step", || {
            let seen = projected(stage, address);
            if seen == expected { Ok(()) } else { Err(format!("{address}: {seen:?}, not {expected:?}")) }
        });
    }
    let attachment = stage.api.sticky(namespace, name).and_then(|sticky| sticky.status?.attachment);
    let attachment = attachment.unwrap_or_else(|| panic!("{namespace}/{name} is attached to nobody"));
    assert_eq!((attachment.node, attachment.pod_uid), (pod.node.clone(), pod.uid.clone()));
}

/// The out-of-service taint ends with the test, and the node is up again.
struct OutOfService<'a>(&'a Stage, String);

impl Drop for OutOfService<'_> {
    fn drop(&mut self) {
        let _ = self.0.lab.attempt(&["reboot", &self.1]);
        let _ =
            self.0.lab.attempt(&["kubectl", "taint", "node", &self.1, "node.kubernetes.io/out-of-service-"]);
    }
}

/// The node of the pod loses power, and a person vouches for it by the taint.
pub fn crash(stage: &Stage) {
    let namespace = "crash";
    stage.lab.namespace(namespace);
    reach::start_clients(stage, namespace);
    stage.api.create(stateful_set(namespace, "mysql", 1, probed_spec()));
    let first = stage.api.ready(namespace, "mysql-0");
    let (dead, alive) = (first.node.clone(), other(&first.node));
    let moved = {
        let _back = OutOfService(stage, dead.clone());
        stage.lab.must(&["crash", &dead]);
        stage.lab.kubectl(&[
            "taint",
            "node",
            &dead,
            "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
        ]);
        let moved = stage.api.ready_after(namespace, "mysql-0", &first.uid);
        assert_eq!((&*moved.node, &moved.addresses), (alive, &first.addresses));
        reach::soon(stage, namespace, &[From::Pod(alive), From::Host(alive)], first.address());
        moved
    };
    let status =
        stage.api.sticky(namespace, "mysql-0").and_then(|sticky| sticky.status).expect("it is there");
    // Also if the controller had let go of it for the dead pod before.
    let last = status.handovers.first().map(|last| (&*last.from, &*last.to, &*last.reason));
    assert!(
        matches!(last, Some((from, to, reason)) if from == dead && to == alive
            && reason.contains("out-of-service")),
        "the move and its reason are written down: {:?}",
        status.handovers
    );
    // The rebooted node comes to know where the address is now.
    let times = reach::times(
        stage,
        namespace,
        &[From::Host(&dead), From::Pod(alive), From::Host(alive)],
        first.address(),
        std::time::Instant::now(),
    );
    assert!(times.iter().all(|(_, time)| time.is_ok()), "{times:?}");
    assert!(
        times.iter().all(|(_, time)| *time.as_ref().unwrap_or(&Duration::MAX) < Duration::from_secs(60)),
        "{times:?}"
    );
    in_step(stage, namespace, "mysql-0", &moved);
    probed_well(stage, namespace, &moved);
    stage.lab.delete_namespace(namespace);
}
