//! Without the API server, and without the agent.

use super::moves::{in_step, sandbox};
use crate::support::lab::eventually;
use crate::support::lab::reach::NODES;
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{spec, stateful_set};

/// These components are up again after the test.
pub struct Stopped<'a>(&'a Stage, Vec<String>);

impl Stopped<'_> {
    pub fn all<'a>(stage: &'a Stage, how: &str, components: &[&str]) -> Stopped<'a> {
        for component in components {
            stage.lab.must(&[how, component]);
        }
        Stopped(stage, components.iter().map(|name| (*name).to_owned()).collect())
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        for component in &self.1 {
            let _ = self.0.lab.attempt(&["start", component]);
        }
    }
}

/// Kills a pod's sandbox; kubelet makes another one for the same pod.
pub fn api_server(stage: &Stage) {
    let namespace = "alone";
    stage.lab.namespace(namespace);
    stage.api.create(stateful_set(namespace, "mysql", 1, spec(None)));
    let pod = stage.api.ready(namespace, "mysql-0");
    let first = sandbox(stage, &pod);
    {
        let _away = Stopped::all(stage, "stop", &["apiserver"]);
        stage.lab.must(&[
            "on",
            &pod.node,
            "ctr",
            "--namespace",
            "k8s.io",
            "tasks",
            "kill",
            "--signal",
            "SIGKILL",
            &first,
        ]);
        let of_pod = format!(
            r#"labels."io.kubernetes.pod.uid"=={},labels."io.cri-containerd.kind"==sandbox"#,
            pod.uid
        );
        eventually("another sandbox of the pod, with its address", || {
            let all = ["on", &pod.node, "ctr", "--namespace", "k8s.io", "containers", "ls", "-q", &of_pod];
            let sandboxes = stage.lab.attempt(&all)?;
            if sandboxes.lines().all(|id| id == first) {
                return Err(format!("only {sandboxes}"));
            }
            let url = format!("http://{}:8080/", pod.address());
            let page = stage.lab.attempt(&["on", &pod.node, "curl", "-sf", "--max-time", "2", &url])?;
            if page.contains(pod.address()) { Ok(()) } else { Err(page) }
        });
    }
    eventually("the API server", || {
        stage.lab.attempt(&["kubectl", "get", "node", "node-1", "--request-timeout=5s"])
    });
    // kube-scheduler ends itself when it finds that it missed what happened to a pod; a cluster's kubelet
    // starts it again.
    let _ = stage.lab.attempt(&["stop", "scheduler"]);
    stage.lab.must(&["start", "scheduler"]);
    let again = stage.api.ready(namespace, "mysql-0");
    assert_eq!((&again.uid, &again.addresses), (&pod.uid, &pod.addresses));
    in_step(stage, namespace, "mysql-0", &again);
    no_notes(stage);
    // And the next pod has it as well.
    let next = stage.api.replace(namespace, "mysql-0", None);
    assert_eq!(next.addresses, pod.addresses);
    in_step(stage, namespace, "mysql-0", &next);
    stage.lab.delete_namespace(namespace);
}

/// What was decided alone was told to the API server.
fn no_notes(stage: &Stage) {
    for node in NODES {
        eventually(&format!("the agent of {node} to carry out the notes"), || {
            let list = "ls -A /var/lib/cni/networks/lab/.sticky/pending-updates 2>/dev/null || true";
            match stage.lab.attempt(&["on", node, "sh", "-c", list])? {
                none if none.is_empty() => Ok(()),
                some => Err(some),
            }
        });
    }
}

pub fn agent(stage: &Stage) {
    let namespace = "unattended";
    stage.lab.namespace(namespace);
    let agents: Vec<String> = NODES.iter().map(|node| format!("sticky-agent@{node}")).collect();
    let agents: Vec<&str> = agents.iter().map(String::as_str).collect();
    stage.api.create(stateful_set(namespace, "mysql", 1, spec(None)));
    let first = stage.api.ready(namespace, "mysql-0");
    let later = {
        let _killed = Stopped::all(stage, "kill", &agents);
        let again = stage.api.replace(namespace, "mysql-0", None);
        assert_eq!(again.addresses, first.addresses, "without agents");
        stage.api.create(stateful_set(namespace, "later", 2, spec(None)));
        stage.api.all_ready(namespace, "later", 2)
    };
    for (name, seen) in &later {
        in_step(stage, namespace, name, seen);
    }
    in_step(stage, namespace, "mysql-0", &stage.api.ready(namespace, "mysql-0"));
    no_notes(stage);
    let again = stage.api.replace(namespace, "mysql-0", None);
    assert_eq!(again.addresses, first.addresses, "with agents again");
    in_step(stage, namespace, "mysql-0", &again);
    stage.lab.delete_namespace(namespace);
}
