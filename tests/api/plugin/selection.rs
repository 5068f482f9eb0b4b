//! Who is sticky and what a pod asks for, from the pod in the API server to the address that its ADD gives.

use std::net::{IpAddr, Ipv4Addr};

use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::support::api_server::ApiServer;
use crate::support::api_server::case::Case;
use crate::support::node::{Sandbox, TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pool};

/// What a pod gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gets {
    /// This address of the Sticky pool, by its place there, and a StickyIP.
    Pinned(usize),
    /// Any address of the Sticky pool, and a StickyIP.
    Kept,
    /// One of the node's, and no object.
    LeftAlone,
    /// Nothing: its ADD is refused with these words.
    Refused(&'static str),
}

struct Stage {
    case: Case<'static>,
    node: TestNode,
    pool: Vec<Ipv4Addr>,
}

impl Stage {
    async fn new() -> Self {
        let server = ApiServer::shared().await;
        server.install_our_kinds().await;
        let case = server.case().await;
        let parts: Vec<_> = case.range().subnets(26).unwrap().collect();
        sticky_pool(&case, parts[1]).await;
        let node = TestNode::ready(&case, "n1", parts[0]).await;
        Self { case, node, pool: parts[1].hosts().collect() }
    }

    /// Addresses of the pool, as an annotation lists them.
    fn list(&self, places: &[usize]) -> String {
        let texts: Vec<String> = places.iter().map(|place| self.pool[*place].to_string()).collect();
        texts.join(",")
    }

    async fn pod(&self, name: &str, metadata: Value) -> Sandbox {
        let pods: Api<Pod> = Api::namespaced(self.case.client(), self.case.namespace());
        let mut pod = json!({
            "metadata": metadata,
            "spec": {"nodeName": self.node.name, "containers": [{"name": "main", "image": "none"}]},
        });
        pod["metadata"]["name"] = name.into();
        sandbox(&pods.create(&Default::default(), &serde_json::from_value(pod).unwrap()).await.unwrap())
    }

    /// ADDs a pod, twice over, and looks whether it gets what it is to get.
    async fn try_out(&self, name: &str, metadata: Value, gets: Gets) {
        let mut before = None;
        for _ in 0..2 {
            let pod = self.pod(name, metadata.clone()).await;
            let added = self.node.add(&pod).await;
            let own = stickies(&self.case).await.into_iter();
            let own = own.filter(|sticky| sticky.metadata.name.as_deref() == Some(name)).count();
            match (gets, added) {
                (Gets::Refused(words), Err(error)) => {
                    let told = error["msg"].as_str().unwrap();
                    assert!(error["code"] == 101 && told.contains(words), "{name}: {error}");
                    assert_eq!(own, 0, "{name}");
                }
                (Gets::LeftAlone, Ok(IpAddr::V4(address))) => {
                    assert!(self.node.range().contains(&address) && own == 0, "{name}: {address}");
                }
                (Gets::Kept, Ok(IpAddr::V4(address))) => {
                    assert!(self.pool.contains(&address) && own == 1, "{name}: {address}");
                    assert_eq!(*before.get_or_insert(address), address, "{name}");
                }
                (Gets::Pinned(place), Ok(address)) => {
                    assert_eq!((address, own), (self.pool[place].into(), 1), "{name}");
                }
                (gets, added) => panic!("{name}: {gets:?}, but {added:?}"),
            }
            self.node.del(&pod).await;
            delete_pod(&self.case, name).await;
        }
        assert_in_step(&self.case, &[&self.node]).await;
    }

    /// What a StatefulSet gives its pods, with the template's annotations.
    fn of_set(&self, ordinal: u32, annotations: Value) -> Value {
        let owner = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "db", "controller": true});
        json!({"labels": {"apps.kubernetes.io/pod-index": ordinal.to_string()}, "annotations": annotations,
               "ownerReferences": [owner]})
    }
}

#[tokio::test]
async fn a_pod_gets_what_its_labels_and_annotations_ask_for_or_is_left_alone() {
    let mut stage = Stage::new().await;
    stage.node.exclude(&["test-", "wip"]);
    let calico = format!("[\"{}\"]", stage.list(&[9]));
    let ours = |value: String| json!({"sticky-ipam.io/ips": value});
    let mut table = vec![
        ("nothing", json!({}), Gets::LeftAlone),
        ("selected", json!({"labels": {"sticky": "yes"}}), Gets::Kept),
        ("fixed-by-label", json!({"labels": {"fixed-ip": "true"}}), Gets::Kept),
        ("fixed-by-annotation", json!({"annotations": {"fixed-ip": "true"}}), Gets::Kept),
        ("not-fixed", json!({"labels": {"fixed-ip": "false"}}), Gets::LeftAlone),
        ("told", json!({"annotations": {"sticky-ipam.io/sticky": "true"}}), Gets::Kept),
        (
            "told-not",
            json!({"labels": {"sticky": "yes"}, "annotations": {"sticky-ipam.io/sticky": "false"}}),
            Gets::LeftAlone,
        ),
        (
            "told-nonsense",
            json!({"annotations": {"sticky-ipam.io/sticky": "maybe"}}),
            Gets::Refused("sticky-ipam.io/sticky"),
        ),
        ("calico", json!({"annotations": {"cni.projectcalico.org/ipAddrs": calico}}), Gets::Pinned(9)),
        (
            "calico-nonsense",
            json!({"annotations": {"cni.projectcalico.org/ipAddrs": "10.0.0.1"}}),
            Gets::Refused("cni.projectcalico.org/ipAddrs"),
        ),
        ("branch", json!({"labels": {"sticky": "yes", "dbbranch": "test-7"}}), Gets::LeftAlone),
        (
            "branch-with-a-pin",
            json!({"labels": {"dbbranch": "wip"}, "annotations": ours(stage.list(&[10]))}),
            Gets::LeftAlone,
        ),
        ("trunk", json!({"labels": {"sticky": "yes", "dbbranch": "contest-7"}}), Gets::Kept),
        ("two-for-one", json!({"annotations": ours(stage.list(&[11, 12]))}), Gets::Refused("one per family")),
    ];
    // As the template of a StatefulSet gives it to every pod.
    let list = stage.list(&[20, 21]);
    table.push(("db-0", stage.of_set(0, ours(list.clone())), Gets::Pinned(20)));
    table.push(("db-1", stage.of_set(1, ours(list.clone())), Gets::Pinned(21)));
    let beyond = "ordinal 2, and the list has 2 IPv4 addresses, for ordinals 0 to 1";
    table.push(("db-2", stage.of_set(2, ours(list)), Gets::Refused(beyond)));
    // Pins first: who may have any address of the pool would have one of theirs by chance.
    table.sort_by_key(|(_, _, gets)| !matches!(gets, Gets::Pinned(_)));
    for (name, metadata, gets) in table {
        stage.try_out(name, metadata, gets).await;
    }
}

#[tokio::test]
async fn a_namespaces_annotation_speaks_for_its_pods_unless_they_speak_themselves() {
    let stage = Stage::new().await;
    let namespaces: Api<Namespace> = Api::all(stage.case.client());
    let no = json!({"annotations": {"sticky-ipam.io/sticky": "false"}});
    for (word, picked, plain) in
        [("true", Gets::Kept, Gets::Kept), ("false", Gets::LeftAlone, Gets::LeftAlone)]
    {
        let says = json!({"metadata": {"annotations": {"sticky-ipam.io/sticky": word}}});
        namespaces.patch(stage.case.namespace(), &PatchParams::default(), &Patch::Merge(says)).await.unwrap();
        stage.try_out(&format!("plain-{word}"), json!({}), plain).await;
        stage.try_out(&format!("picked-{word}"), json!({"labels": {"sticky": "yes"}}), picked).await;
        stage.try_out(&format!("not-{word}"), no.clone(), Gets::LeftAlone).await;
    }
}

#[tokio::test]
async fn a_virtual_machine_keeps_its_address_under_every_launcher_pod() {
    let stage = Stage::new().await;
    let parts: Vec<_> = stage.case.range().subnets(26).unwrap().collect();
    let other = TestNode::ready(&stage.case, "n2", parts[2]).await;
    let mut address = None;
    for (number, node) in [&stage.node, &stage.node, &other, &stage.node].into_iter().enumerate() {
        // Every start of the machine is another instance, under another uid.
        let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "vm",
                           "uid": format!("instance-{number}"), "controller": true});
        let name = format!("virt-launcher-vm-{number}x");
        let pods: Api<Pod> = Api::namespaced(stage.case.client(), stage.case.namespace());
        let pod = json!({
            "metadata": {"name": name, "labels": {"sticky": "yes", "vm.kubevirt.io/name": "vm"}, "ownerReferences": [owner]},
            "spec": {"nodeName": node.name, "containers": [{"name": "compute", "image": "none"}]},
        });
        let pod = pods.create(&Default::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
        let launcher = sandbox(&pod);
        let given = node.add(&launcher).await.unwrap();
        assert_eq!(*address.get_or_insert(given), given, "{name}");
        let all = stickies(&stage.case).await;
        assert_eq!(all.len(), 1, "{all:?}");
        assert_eq!(all[0].metadata.name.as_deref(), Some("vm"));
        let attachment = all[0].status.as_ref().unwrap().attachment.clone().unwrap();
        assert_eq!((attachment.pod_name, attachment.node), (name.clone(), node.name.clone()));
        assert_in_step(&stage.case, &[&stage.node, &other]).await;
        node.del(&launcher).await;
        delete_pod(&stage.case, &name).await;
    }
}
