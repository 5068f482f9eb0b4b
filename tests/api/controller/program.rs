//! The program itself: two replicas, signals, pages, settings that are refused.

use std::process::{Command, Output, Stdio};

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use nix::sys::signal::Signal;
use serde_json::json;
use sticky_ipam::cluster::objects::cilium::CiliumNode;

use crate::support::api_server::free_address;
use crate::support::controller::{Desk, until};
use crate::support::replica::{PROGRAM, Replica, blocks};

fn once(given: &[&str]) -> Output {
    Command::new(PROGRAM).env_clear().args(given).output().unwrap()
}

#[tokio::test]
async fn of_two_replicas_one_leads_and_the_other_follows_after_a_stop_or_a_crash() {
    let desk = Desk::take().await;
    let access = desk.case.controller().await;
    let short = [
        "--leader-election-lease-duration=4s",
        "--leader-election-renew-deadline=3s",
        "--leader-election-retry-period=500ms",
        "--proof-gap=0s",
        &blocks(&desk),
    ];
    let start = || Replica::start(&access.kubeconfig(), desk.case.namespace(), &short);
    let (mut first, mut second) = (start(), start());
    until("a leader", || async { first.leads().await || second.leads().await }).await;
    if second.leads().await {
        std::mem::swap(&mut first, &mut second);
    }
    assert!(!second.leads().await);
    until("readiness", || async { matches!(first.page("/readyz").await, Some((200, _))) }).await;
    assert_eq!(second.page("/readyz").await.unwrap().0, 200, "whoever waits is ready too");
    assert_eq!(first.page("/healthz").await.unwrap().0, 200);
    assert_eq!(first.page("/other").await.unwrap().0, 404);
    first.signal(Signal::SIGTERM);
    assert_eq!(first.end().await, Some(0));
    until("the follower", || second.leads()).await;
    let third = start();
    second.signal(Signal::SIGKILL);
    second.end().await;
    until("the follower after a crash", || third.leads()).await;
    // And it works: with the rights of the controller's own account.
    let gone = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "gone"});
    desk.retained("gone-0", &desk.address(1), gone, json!({})).await;
    until("its work", || async { desk.names().await.is_empty() }).await;
    let (_, page) = third.page("/metrics").await.unwrap();
    for line in page.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let name = line.split(['{', ' ']).next().unwrap();
        let family =
            ["_total", "_bucket", "_sum", "_count"].iter().fold(name, |name, end| name.trim_end_matches(end));
        assert!(page.contains(&format!("# HELP {family} ")), "{name} has no help");
    }
    // Counted after the API server has answered the deletion, which the list above may show earlier.
    let released = "sticky_ipam_controller_sticky_ips_released_total{reason=\"WorkloadGone\"} 1";
    until("the count of what was released", || async {
        third.page("/metrics").await.is_some_and(|(_, page)| page.contains(released))
    })
    .await;
}

/// The container of the guide's Deployment, whose flags and variables are taken over, as it stands there.
const GUIDE: &str = r#"
args:
- --labelSector={"matchLabels":{"app":"fixed-ip-pod"}}
- --ipRateNum=10
- --maxAllocatedIP=100
- --enableIPv6=false
- --cluster-pool-ipv4-cidr=10.240.0.0/16
- --cluster-pool-ipv4-mask-size=24
- --enable-leader-election=true
env:
- name: KUBECONFIG
  value: /etc/kubernetes/scheduler.conf
"#;

/// A node joins, and gets this block.
async fn gives_a_node(desk: &Desk, block: &str) {
    desk.node("n1").await;
    let nodes: Api<CiliumNode> = Api::all(desk.case.client());
    let bare =
        json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": "n1"}, "spec": {}});
    nodes.create(&Default::default(), &serde_json::from_value(bare).unwrap()).await.unwrap();
    until(block, || async {
        let node = serde_json::to_value(nodes.get("n1").await.unwrap()).unwrap();
        node["spec"]["ipam"]["podCIDRs"] == json!([block])
    })
    .await;
}

#[tokio::test]
async fn the_guides_deployment_works_with_only_the_image_changed() {
    let desk = Desk::take().await;
    let container: serde_json::Value = serde_saphyr::from_str(GUIDE).unwrap();
    let pages = free_address();
    let mut command = Command::new(PROGRAM);
    command.env_clear().stderr(Stdio::null());
    command.args(container["args"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()));
    for variable in container["env"].as_array().unwrap() {
        // Its file is a master node's; here it is the test's.
        assert_eq!(variable["name"], "KUBECONFIG");
        command.env(variable["name"].as_str().unwrap(), desk.case.admin().kubeconfig());
    }
    // The default is every address of the machine.
    command.env("METRICS_ADDRESS", pages.to_string());
    let only = Replica { child: command.spawn().unwrap(), pages };
    until("a leader", || only.leads()).await;
    until("readiness", || async { matches!(only.page("/readyz").await, Some((200, _))) }).await;
    gives_a_node(&desk, "10.240.0.0/24").await;
    // A pod as its selector says, with an address of that block: bound once the node's agent has granted it.
    let pods: Api<Pod> = Api::namespaced(desk.case.client(), desk.case.namespace());
    for (name, label, address) in [("fixed", "fixed-ip-pod", "10.240.0.7"), ("other", "other", "10.240.0.8")]
    {
        let pod = json!({"metadata": {"name": name, "labels": {"app": label}},
            "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "none"}]}});
        pods.create(&Default::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
        desk.runs(name, address).await;
    }
    until("the request", || async { desk.claim("10.240.0.7").await.is_some() }).await;
    desk.answer("10.240.0.7", json!({"phase": "Granted"})).await;
    until("the binding", || async {
        let found = desk.stickies().get_opt("fixed").await.unwrap();
        found.is_some_and(|sticky| sticky.status.is_some_and(|status| status.attachment.is_some()))
    })
    .await;
    assert_eq!(desk.names().await, ["fixed"], "the selector does not pick the other one");
    assert!(desk.claim("10.240.0.8").await.is_none());
}

#[tokio::test]
async fn the_variables_of_the_guide_count_and_a_log_in_json_is_json_in_every_line() {
    let desk = Desk::take().await;
    let (pages, log) = (free_address(), tempfile::NamedTempFile::new().unwrap());
    let mut command = Command::new(PROGRAM);
    command.env_clear().stderr(log.reopen().unwrap());
    command.env("KUBECONFIG", desk.case.admin().kubeconfig()).env("METRICS_ADDRESS", pages.to_string());
    command.env("CLUSTER_POOL_IPV4_CIDR", "10.241.0.0/16").env("CLUSTER_POOL_IPV4_MASK_SIZE", "26");
    command.env("POD_NAMESPACE", desk.case.namespace()).env("LOG_FORMAT", "json");
    let only = Replica { child: command.spawn().unwrap(), pages };
    until("a leader", || only.leads()).await;
    gives_a_node(&desk, "10.241.0.0/26").await;
    let leases: Api<k8s_openapi::api::coordination::v1::Lease> =
        Api::namespaced(desk.case.client(), desk.case.namespace());
    assert!(
        leases.get_opt("cilium-ipam-leader").await.unwrap().is_some(),
        "POD_NAMESPACE is where it is elected"
    );
    let text = std::fs::read_to_string(log.path()).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let says = |level: &str| lines.iter().any(|line| line["level"] == level && line["message"].is_string());
    assert!(says("INFO"), "{text}");
}

#[tokio::test]
async fn a_leader_whose_server_is_cut_off_ends_with_status_one() {
    let desk = Desk::take().await;
    let proxy = desk.case.proxy();
    let access = desk.case.controller().await.through(&proxy);
    let short = [
        "--leader-election-lease-duration=3s",
        "--leader-election-renew-deadline=2s",
        "--leader-election-retry-period=300ms",
        &blocks(&desk),
    ];
    let mut only = Replica::start(&access.kubeconfig(), desk.case.namespace(), &short);
    until("a leader", || only.leads()).await;
    proxy.set(crate::support::api_server::Weather::Blackhole);
    assert_eq!(only.end().await, Some(1));
}

#[tokio::test]
async fn a_missing_permission_is_reported_with_verb_and_resource() {
    let desk = Desk::take().await;
    let rules = json!([{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["*"]}]);
    let access = desk.case.service_account("poor", serde_json::from_value(rules).unwrap()).await;
    let only = Replica::start(&access.kubeconfig(), desk.case.namespace(), &[]);
    // It names what it may not watch; which of them was refused last is chance.
    let resources = [
        "pods",
        "namespaces",
        "nodes",
        "stickyips",
        "addressclaims",
        "ippools",
        "ciliumnodes",
        "ciliumendpoints",
    ];
    let names_one = |text: &str| {
        resources.iter().any(|resource| text.contains(&format!("cannot list resource \"{resource}\"")))
    };
    until("the word", || async {
        only.page("/readyz").await.is_some_and(|(status, text)| status == 503 && names_one(&text))
    })
    .await;
}

#[test]
fn help_goes_to_standard_output_and_mistakes_to_standard_error_with_status_two() {
    let help = once(&["--help"]);
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("Leader election:"));
    let wrong = once(&["--quarantine=soon"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("--quarantine"));
    let both = once(&["--ipRateNum=9", "--maxAllocatedIP=8"]);
    assert_eq!(both.status.code(), Some(2));
    let text = String::from_utf8_lossy(&both.stderr).into_owned();
    assert!(text.contains("--ip-rate-num 9") && text.contains("--max-allocated-ip 8"), "{text}");
    let half = once(&["--tls-cert-file=/nowhere/cert"]);
    assert_eq!(half.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&half.stderr).contains("--tls-key-file"));
    let address = "--metrics-address=127.0.0.1:0";
    let gone = once(&[address, "--tls-cert-file=/nowhere/cert", "--tls-key-file=/nowhere/key"]);
    assert_eq!(gone.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&gone.stderr).contains("--tls-cert-file /nowhere/cert"));
    let nowhere = once(&["--kubeconfig=/nowhere", "--metrics-address=127.0.0.1:0"]);
    assert_eq!(nowhere.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("/nowhere"));
}

#[tokio::test]
async fn a_changed_settings_file_ends_the_program_and_a_bad_one_does_not() {
    let desk = Desk::take().await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("settings.yaml");
    std::fs::write(&file, "quarantine: 1h\n").unwrap();
    let config = format!("--config={}", file.display());
    let access = desk.case.controller().await;
    let mut only = Replica::start(&access.kubeconfig(), desk.case.namespace(), &[&config, &blocks(&desk)]);
    until("a leader", || only.leads()).await;
    std::fs::write(&file, "quarantine: soon\n").unwrap();
    until("the refusal", || async {
        only.page("/metrics")
            .await
            .is_some_and(|(_, page)| page.contains("sticky_ipam_controller_config_valid 0"))
    })
    .await;
    std::fs::write(&file, "quarantine: 2h\n").unwrap();
    assert_eq!(only.end().await, Some(0));
}
