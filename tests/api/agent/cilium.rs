//! What the agent makes of Cilium's own settings.

use std::net::SocketAddr;
use std::time::Duration;

use crate::support::agent::{Loose, case, is_ready, loose, page, parts};
use crate::support::api_server::comes_true;
use crate::support::cilium::CiliumRelease;
use crate::support::node::TestNode;

const DEADLINE: Duration = Duration::from_secs(60);

async fn says(address: SocketAddr, path: &'static str, parts: &[&str]) -> bool {
    let text = tokio::task::spawn_blocking(move || page(address, path)).await.unwrap().unwrap_or_default();
    parts.iter().all(|part| text.contains(part))
}

#[tokio::test]
async fn an_agent_whose_mode_does_not_fit_ciliums_is_not_ready_and_installs_no_conflist() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    node.cilium().be_in_mode("cluster-pool");
    let access = case.agent(&node.name).await;
    let bin = node.folder().join("bin");
    std::fs::write(bin.join("sticky-ipam"), "the plugin").unwrap();
    let conflist = node.folder().join("conf/03-sticky-ipam.conflist");
    let start = || {
        let (mut settings, address) = loose(&node, &access, "crd");
        (settings.conflist, settings.cni_bin_dir) = (Some("built-in".into()), bin.clone());
        (Loose::start(settings), address)
    };
    let (agent, address) = start();
    let parts = ["ipam: cluster-pool", "--mode crd needs ipam: crd", "docs/adoption.md"];
    assert!(comes_true(DEADLINE, || says(address, "/readyz", &parts)).await, "it does not say why");
    let info = ["cilium_info{version=\"1.19.5\",ipam=\"cluster-pool\",tested=\"true\"} 1"];
    assert!(says(address, "/metrics", &info).await);
    assert!(!conflist.exists());
    drop(agent);
    // Right by now, and of another version.
    node.cilium().be_in_mode("crd");
    node.cilium().be_release(CiliumRelease::V1_20);
    let (_agent, address) = start();
    assert!(comes_true(DEADLINE, || is_ready(address)).await);
    assert!(comes_true(DEADLINE, || async { conflist.exists() }).await);
    let info = ["cilium_info{version=\"1.20.1\",ipam=\"crd\",tested=\"false\"} 1"];
    assert!(says(address, "/metrics", &info).await);
}
