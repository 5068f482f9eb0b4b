//! The drift audit on a real API server: a metric, an event and a condition; and the command with its exit
//! status.

use std::collections::BTreeSet;
use std::process::Command;

use k8s_openapi::api::core::v1::{ConfigMap, Event, Node};
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::controller::duties::drift::DriftAudit;
use sticky_ipam::controller::duty::Duty;

use crate::support::api_server::ApiServer;
use crate::support::api_server::case::Case;
use crate::support::crash::ended_by_the_witness;
use crate::support::duty::{Desk, EndControllerAt, apply, bare_node, case, cilium_node};

async fn condition(case: &Case<'_>, name: &str) -> Option<(String, String)> {
    let nodes: Api<Node> = Api::all(case.client());
    let conditions = nodes.get(name).await.unwrap().status?.conditions?;
    let ours = conditions.into_iter().find(|condition| condition.type_ == "AddressDrift")?;
    Some((ours.status, ours.reason.unwrap()))
}

async fn node(case: &Case<'_>, name: &str, own: &str, cilium: &str) -> String {
    let name = case.unique(name);
    bare_node(case, &name, json!({}), json!({"podCIDR": own, "podCIDRs": [own]})).await;
    cilium_node(case, &name, &[cilium]).await;
    name
}

#[tokio::test]
async fn nodes_that_disagree_get_an_event_and_a_condition_that_goes_when_they_agree() {
    let case = case().await;
    let well = node(&case, "well", "10.5.110.0/24", "10.5.110.0/24").await;
    let first = node(&case, "first", "10.5.112.0/24", "10.5.113.0/24").await;
    node(&case, "second", "10.5.113.0/24", "10.5.112.0/24").await;
    let desk = Desk::as_shipped(&case, &["--cilium-ipam=cluster-pool"]).await;
    let mut audit = DriftAudit::new(&desk.context.metrics);
    desk.look().await;
    assert_eq!(audit.round(&desk.context, Vec::new()).await.failures, 0);
    assert_eq!(condition(&case, &first).await, Some(("True".into(), "RangesDisagree".into())));
    assert_eq!(condition(&case, &well).await, None, "one that never drifted has none");
    let of_first = reasons(&case, &first).await;
    assert!(of_first.contains("RangeOfAnotherNode") && of_first.contains("RangesDisagree"), "{of_first:?}");
    let page = desk.context.metrics.page();
    let counted = r#"sticky_ipam_controller_drift_findings{reason="RangeOfAnotherNode",breaks="BGP"} 2"#;
    assert!(page.contains(counted), "{page}");

    // The same again writes nothing.
    let before = desk.context.writer.count();
    desk.look().await;
    audit.round(&desk.context, Vec::new()).await;
    assert_eq!(desk.context.writer.count(), before);

    for (name, range) in [(&first, "10.5.112.0/24"), (&case.unique("second"), "10.5.113.0/24")] {
        cilium_node(&case, name, &[range]).await;
    }
    desk.look().await;
    // A fresh process knows nothing of the old one's findings, and clears them all the same.
    let second = Desk::new(&case, &["--cilium-ipam=cluster-pool"]).await;
    second.look().await;
    DriftAudit::new(&second.context.metrics).round(&second.context, Vec::new()).await;
    assert_eq!(condition(&case, &first).await, Some(("False".into(), "InSync".into())));
    assert!(!second.context.metrics.page().contains("drift{"));
}

/// What was told of a node, once each.
async fn reasons(case: &Case<'_>, node: &str) -> BTreeSet<String> {
    let events: Api<Event> = Api::namespaced(case.client(), "default");
    let told = events.list(&ListParams::default()).await.unwrap().items;
    let of_node = told.into_iter().filter(|event| event.involved_object.name.as_deref() == Some(node));
    of_node.filter_map(|event| event.reason).collect()
}

#[tokio::test]
async fn an_audit_that_ends_at_any_write_is_finished_by_the_next() {
    const FLAGS: &[&str] = &["--cilium-ipam=cluster-pool"];
    let case = case().await;
    for after in [false, true] {
        let mut number = 1;
        loop {
            // Others at every round: what the one before was told of is not looked for again.
            let (one, other) = (format!("one-{after}-{number}"), format!("other-{after}-{number}"));
            let one = node(&case, &one, "10.5.120.0/24", "10.5.121.0/24").await;
            let other = node(&case, &other, "10.5.121.0/24", "10.5.120.0/24").await;
            let first = Desk::watched(&case, FLAGS, EndControllerAt::boxed(number, after)).await;
            first.look().await;
            let mut audit = DriftAudit::new(&first.context.metrics);
            let ended = ended_by_the_witness(async {
                audit.round(&first.context, Vec::new()).await;
            })
            .await;
            let second = Desk::new(&case, FLAGS).await;
            second.look().await;
            assert_eq!(
                DriftAudit::new(&second.context.metrics).round(&second.context, Vec::new()).await.failures,
                0
            );
            for name in [&one, &other] {
                let what = format!("{name}: ended at {number}, after it: {after}");
                assert!(condition(&case, name).await.is_some_and(|(status, _)| status == "True"), "{what}");
                let told = reasons(&case, name).await;
                assert!(
                    told.contains("RangeOfAnotherNode") && told.contains("RangesDisagree"),
                    "{what}: {told:?}"
                );
                let (nodes, cilium): (Api<Node>, Api<CiliumNode>) =
                    (Api::all(case.client()), Api::all(case.client()));
                nodes.delete(name, &Default::default()).await.unwrap();
                cilium.delete(name, &Default::default()).await.unwrap();
            }
            if !ended {
                break;
            }
            number += 1;
        }
        assert!(number > 6, "two nodes, each with a condition and two events: it was {number}");
    }
}

fn audit(case: &Case<'_>, output: &str) -> (i32, String) {
    let ran = Command::new(env!("CARGO_BIN_EXE_sticky-ipam-controller"))
        .args(["audit", "--output", output, "--kubeconfig"])
        .arg(case.admin().kubeconfig())
        .output()
        .unwrap();
    let (said, told) = (String::from_utf8(ran.stdout).unwrap(), String::from_utf8(ran.stderr).unwrap());
    (ran.status.code().unwrap(), format!("{said}{}", if said.is_empty() { told } else { String::new() }))
}

#[tokio::test]
async fn the_command_prints_every_finding_with_what_breaks_and_what_to_do() {
    let server = ApiServer::start().await;
    server.install_cilium_kinds().await;
    let case = server.case().await;
    let config = |data: Value| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "cilium-config", "namespace": "kube-system"},
               "data": data})
    };
    let maps: Api<ConfigMap> = Api::namespaced(case.client(), "kube-system");
    let interfaces = "egress-masquerade-interfaces";
    apply(maps.clone(), config(json!({"ipam": "crd", interfaces: "eth0"}))).await;
    let name = node(&case, "a", "10.5.112.0/24", "10.5.112.0/24").await;
    let (status, text) = audit(&case, "text");
    assert_eq!((status, text.contains("no drift")), (0, true), "{text}");

    let bare = case.unique("bare");
    bare_node(&case, &bare, json!({}), json!({})).await;
    cilium_node(&case, &bare, &["10.5.113.0/24"]).await;
    case.pod("stray", &[], Some(&name)).await;
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(case.client(), case.namespace());
    let shown = json!({"status": {"phase": "Running", "podIP": "10.9.9.9", "podIPs": [{"ip": "10.9.9.9"}]}});
    pods.patch_status("stray", &PatchParams::default(), &Patch::Merge(shown)).await.unwrap();
    let announced = json!({"ipam": "crd", interfaces: "eth0", "bgp-announce-pod-cidr": "true"});
    apply(maps.clone(), config(announced)).await;

    let (status, text) = audit(&case, "text");
    assert_eq!(status, 1, "{text}");
    for part in [
        "the Node has no range",
        "breaks: IPAM",
        "pod case-0/stray has 10.9.9.9",
        "breaks: routes",
        "breaks: BGP",
        "what to do:",
        "3 findings",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (status, page) = audit(&case, "json");
    let page: Value = serde_json::from_str(&page).unwrap();
    assert_eq!(
        (status, page["mode"].as_str(), page["findings"].as_array().unwrap().len()),
        (1, Some("crd"), 3)
    );
    let reasons: Vec<&str> =
        page["findings"].as_array().unwrap().iter().map(|one| one["reason"].as_str().unwrap()).collect();
    assert_eq!(reasons, ["StrayAddress", "NoNodeRange", "NothingAnnounced"]);

    // A setting that lets the next start of cilium-agent fail.
    apply(maps, config(json!({"ipam": "crd", interfaces: ""}))).await;
    let (status, text) = audit(&case, "text");
    assert!(status == 1 && text.contains("fatal: MasqueradeNeedsInterfaces"), "{text}");
    let page: Value = serde_json::from_str(&audit(&case, "json").1).unwrap();
    assert_eq!(page["settings"][0]["reason"], "MasqueradeNeedsInterfaces", "{page}");
}

#[tokio::test]
async fn a_forbidden_list_is_named_by_verb_and_resource() {
    let case = case().await;
    let ran = Command::new(env!("CARGO_BIN_EXE_sticky-ipam-controller"))
        .args(["audit", "--kubeconfig"])
        .arg(case.nobody().kubeconfig())
        .output()
        .unwrap();
    let said = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(2));
    assert!(said.contains("list Pods") && said.contains("grant it by a role"), "{said}");
}
