//! How far a fault reaches, and what takes sticky-ipam off the path of ordinary pods (`crd` mode): the bypass
//! without agents and credentials, Cilium's agent away, and the removal from a node under running pods.

use super::moves::in_step;
use crate::support::lab::reach::NODES;
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{plain, pod, spec, stateful_set, sticky};
use crate::support::lab::{Mode, eventually, folder};
use serde_json::json;

const CREDENTIALS: &str = "/etc/cni/net.d/sticky-ipam.d";
const AGENT: &str = "sticky-agent@node-1";

/// What a test has broken works again after it, also after one that fails.
struct Mended<'a>(&'a Stage, Vec<Vec<&'static str>>);

impl Drop for Mended<'_> {
    fn drop(&mut self) {
        for command in &self.1 {
            let _ = self.0.lab.attempt(command);
        }
    }
}

fn on_node_1(stage: &Stage, shell: &str) -> String {
    stage.lab.must(&["on", NODES[0], "sh", "-c", shell])
}

/// What kubelet says of a pod that does not start.
fn events_of(stage: &Stage, namespace: &str, pod: &str) -> String {
    stage.lab.kubectl(&["events", "-n", namespace, "--for", &format!("pod/{pod}")])
}

fn says(stage: &Stage, namespace: &str, pod: &str, part: &str) {
    eventually(&format!("{namespace}/{pod} to say {part:?}"), || {
        let said = events_of(stage, namespace, pod);
        if said.contains(part) { Ok(()) } else { Err(said) }
    });
}

#[test]
fn ordinary_pods_start_by_the_bypass_while_agent_and_credentials_are_gone() {
    let stage = Stage::of(Mode::Crd);
    let namespace = "bypass";
    stage.lab.namespace(namespace);
    stage.api.create(stateful_set(namespace, "mysql", 1, spec(Some(NODES[0]))));
    let first = stage.api.ready(namespace, "mysql-0");
    let off = format!("rm -f {CREDENTIALS}/bypass");
    {
        let _mended = Mended(
            &stage,
            vec![
                vec!["start", AGENT],
                vec!["on", NODES[0], "rm", "-f", "/etc/cni/net.d/sticky-ipam.d/bypass"],
            ],
        );
        stage.lab.must(&["kill", AGENT]);
        on_node_1(&stage, &format!("rm {CREDENTIALS}/kubeconfig"));
        stage.api.create(pod(namespace, "waits", plain("web"), json!({}), spec(Some(NODES[0]))));
        says(&stage, namespace, "waits", "cannot use the kubeconfig");
        on_node_1(&stage, &format!("touch {CREDENTIALS}/bypass"));
        stage.api.ready(namespace, "waits");
        stage.api.create(pod(namespace, "fresh", plain("web"), json!({}), spec(Some(NODES[0]))));
        let fresh = stage.api.ready(namespace, "fresh");
        stage.lab.pings(namespace, "fresh", first.address());
        stage.lab.pings(namespace, "mysql-0", fresh.address());
        // Known here, and nothing can be asked: it waits instead of starting with another address.
        stage.api.delete_pod(namespace, "mysql-0", None);
        says(&stage, namespace, "mysql-0", "cannot use the kubeconfig");
        on_node_1(&stage, &off);
        stage.api.create(pod(namespace, "again", plain("web"), json!({}), spec(Some(NODES[0]))));
        says(&stage, namespace, "again", "cannot use the kubeconfig");
    }
    stage.api.ready(namespace, "again");
    let back = stage.api.ready_after(namespace, "mysql-0", &first.uid);
    assert_eq!(back.addresses, first.addresses);
    in_step(&stage, namespace, "mysql-0", &back);
    stage.lab.delete_namespace(namespace);
}

#[test]
fn one_command_turns_the_bypass_on_and_off_in_the_whole_cluster() {
    let stage = Stage::of(Mode::Crd);
    let namespace = "bypasses";
    stage.lab.namespace(namespace);
    stage.api.create(stateful_set(namespace, "mysql", 1, spec(None)));
    let first = stage.api.ready(namespace, "mysql-0");
    let is_on = |wanted: bool| {
        for node in NODES {
            eventually(&format!("the bypass of {node}"), || {
                let look = format!("test -e {CREDENTIALS}/bypass && echo true || echo false");
                let seen = stage.lab.attempt(&["on", node, "sh", "-c", &look])?;
                if seen == wanted.to_string() { Ok(()) } else { Err(seen) }
            });
        }
    };
    {
        let _mended =
            Mended(&stage, vec![vec!["kubectl", "annotate", "nodes", "--all", "sticky-ipam.io/bypass-"]]);
        stage.lab.kubectl(&["annotate", "nodes", "--all", "sticky-ipam.io/bypass=true", "--overwrite"]);
        is_on(true);
        stage.api.create(pod(namespace, "web", plain("web"), json!({}), spec(None)));
        stage.api.ready(namespace, "web");
        stage.lab.pings(namespace, "web", first.address());
        // The agents go on: they prepare it.
        let again = stage.api.replace(namespace, "mysql-0", None);
        assert_eq!(again.addresses, first.addresses);
        in_step(&stage, namespace, "mysql-0", &again);
    }
    is_on(false);
    let last = stage.api.replace(namespace, "mysql-0", None);
    assert_eq!(last.addresses, first.addresses);
    in_step(&stage, namespace, "mysql-0", &last);
    stage.lab.delete_namespace(namespace);
}

#[test]
fn without_ciliums_agent_every_pod_of_the_node_waits_and_then_has_what_is_its_own() {
    let stage = Stage::of(Mode::Crd);
    let namespace = "ciliumless";
    stage.lab.namespace(namespace);
    stage.api.create(stateful_set(namespace, "known", 1, spec(Some(NODES[0]))));
    stage.api.create(stateful_set(namespace, "moved", 1, spec(Some(NODES[1]))));
    let (known, moved) = (stage.api.ready(namespace, "known-0"), stage.api.ready(namespace, "moved-0"));
    let waiting = ["known-0", "moved-0", "new", "web"];
    {
        let _mended = Mended(&stage, vec![vec!["start", "cilium@node-1"]]);
        stage.lab.must(&["kill", "cilium@node-1"]);
        stage.api.create(pod(namespace, "web", plain("web"), json!({}), spec(Some(NODES[0]))));
        stage.api.create(pod(namespace, "new", sticky("new"), json!({}), spec(Some(NODES[0]))));
        let template = json!({"spec": {"template": {"spec": spec(Some(NODES[0]))}}});
        stage
            .api
            .patch(crate::support::lab::api::named("apps/v1", "StatefulSet", namespace, "moved"), template);
        stage.api.delete_pod(namespace, "known-0", None);
        for pod in waiting {
            says(&stage, namespace, pod, "FailedCreatePodSandBox");
        }
    }
    for pod in waiting {
        stage.api.ready(namespace, pod);
    }
    let (known_now, moved_now) =
        (stage.api.ready(namespace, "known-0"), stage.api.ready(namespace, "moved-0"));
    assert_eq!((&known_now.addresses, &moved_now.addresses), (&known.addresses, &moved.addresses));
    assert_eq!(moved_now.node, NODES[0]);
    in_step(&stage, namespace, "known-0", &known_now);
    stage.lab.delete_namespace(namespace);
}

#[test]
fn everything_leaves_a_node_under_running_pods_and_what_ends_later_is_released() {
    let stage = Stage::of(Mode::Crd);
    let namespace = "removal";
    stage.lab.namespace(namespace);
    for (name, labels) in [("stays", sticky("stays")), ("ends", sticky("ends")), ("web", plain("web"))] {
        stage.api.create(pod(namespace, name, labels, json!({}), spec(Some(NODES[0]))));
    }
    let stays = stage.api.ready(namespace, "stays");
    let ends = stage.api.ready(namespace, "ends");
    stage.api.ready(namespace, "web");
    let _mended = Mended(
        &stage,
        vec![vec!["on", NODES[0], "rm", "-f", "/etc/cni/net.d/05-cilium.conflist"], vec!["start", AGENT]],
    );
    stage.lab.must(&["stop", AGENT]);
    // What Cilium writes where it may.
    let ciliums = r#"{"cniVersion": "1.0.0", "name": "cilium", "plugins": [{"type": "cilium-cni"}]}"#;
    on_node_1(&stage, &format!("echo '{ciliums}' >/etc/cni/net.d/05-cilium.conflist"));
    let agent = folder().join("ours/sticky-ipam-agent");
    let uninstall = format!(
        "{} uninstall --node node-1 --network lab --plugin-service-account kube-system/sticky-ipam-node \
         --kubeconfig /etc/sticky-ipam/agent.kubeconfig",
        agent.display()
    );
    let watching = std::thread::spawn({
        let command = format!("timeout --signal=TERM 100 {uninstall} --watch 2>&1 || true");
        move || crate::support::lab::run(&["on", NODES[0], "sh", "-c", &command])
    });
    eventually("nothing of ours to be installed", || {
        stage.lab.attempt(&["on", NODES[0], "sh", "-c", &format!("{uninstall} --check")])
    });
    for file in ["/etc/cni/net.d/03-sticky-ipam.conflist", "/opt/cni/bin/sticky-ipam", CREDENTIALS] {
        on_node_1(&stage, &format!("! test -e {file}"));
    }
    stage.lab.pings(namespace, "web", stays.address());
    stage.lab.pings(namespace, "stays", ends.address());
    // Its DEL goes to Cilium's conflist: nobody calls our plugin.
    stage.api.delete_pod(namespace, "ends", None);
    stage.api.gone(namespace, "ends");
    eventually("the address of the pod that has ended to be detached", || {
        let attachment = stage.api.sticky(namespace, "ends").and_then(|sticky| sticky.status?.attachment);
        attachment.map_or(Ok(()), |held| Err(format!("{held:?}")))
    });
    let held = stage.api.sticky(namespace, "stays").and_then(|sticky| sticky.status?.attachment);
    assert_eq!(held.map(|held| held.pod_uid), Some(stays.uid.clone()), "it runs");
    stage.api.create(pod(namespace, "later", plain("web"), json!({}), spec(Some(NODES[0]))));
    stage.api.ready(namespace, "later");
    stage.lab.pings(namespace, "later", stays.address());
    let printed = watching.join().expect("the uninstaller ends");
    let printed = crate::support::lab::text(&printed);
    assert!(printed.contains("finished: nothing of sticky-ipam is installed on node node-1"), "{printed}");
    stage.lab.delete_namespace(namespace);
}
