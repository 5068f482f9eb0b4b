//! `uninstall --watch`: everything leaves the host under running pods, and what their sandboxes leave later
//! is released without a DEL.

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::agent::flags::AgentSettings;
use sticky_ipam::agent::install::{DelConflist, installed, uninstall};
use sticky_ipam::agent::removal;
use tokio::sync::oneshot;

use crate::support::agent::{attached, case, parts, settings};
use crate::support::api_server::case::Case;
use crate::support::api_server::comes_true;
use crate::support::node::{Sandbox, TestNode, assert_in_step, delete_pod, sandbox, sticky_pod};

const SOON: Duration = Duration::from_secs(90);

/// A node on which everything is installed.
struct Host<'a> {
    case: &'a Case<'a>,
    node: TestNode,
    settings: AgentSettings,
    files: Vec<PathBuf>,
}

impl<'a> Host<'a> {
    async fn of(case: &'a Case<'a>, mode: &str, runtime: &str) -> Self {
        let node = match mode {
            "crd" => TestNode::ready_crd(case, "n1", parts(case)[0]).await,
            _ => TestNode::ready(case, "n1", parts(case)[0]).await,
        };
        let info = json!({"status": {"nodeInfo": {"containerRuntimeVersion": runtime, "architecture": "", "bootID": "",
            "kernelVersion": "", "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "", "operatingSystem": "",
            "osImage": "", "systemUUID": ""}}});
        let nodes: Api<Node> = Api::all(case.client());
        nodes.patch_status(&node.name, &PatchParams::default(), &Patch::Merge(info)).await.unwrap();
        let agent = case.agent(&node.name).await;
        let mut settings = settings(&node, &agent.kubeconfig(), mode, &[]);
        let folder = node.folder().join("host");
        fs::create_dir_all(folder.join("bin")).unwrap();
        fs::create_dir_all(folder.join("credentials")).unwrap();
        settings.cni_bin_dir = folder.join("bin");
        settings.plugin_kubeconfig = folder.join("credentials/kubeconfig");
        settings.plugin_service_account = Some("kube-system/sticky-ipam-node".parse().unwrap());
        let conflist = settings.cni_conf_dir.join("03-sticky-ipam.conflist");
        let files =
            vec![conflist, settings.plugin_kubeconfig.clone(), settings.cni_bin_dir.join("sticky-ipam")];
        for file in &files {
            fs::write(file, "{}").unwrap();
        }
        Self { case, node, settings, files }
    }

    async fn pod(&self, name: &str) -> (Sandbox, IpAddr) {
        let pod = sandbox(&sticky_pod(self.case, name, &self.node.name, json!({})).await);
        let address = self.node.add(&pod).await.unwrap();
        (pod, address)
    }

    /// The runtime removes the pod with a conflist in which the plugin is not.
    async fn ends_without_del(&self, pod: &Sandbox) {
        if let Some(cilium) = &self.node.cilium {
            cilium.end_endpoint(&pod.container);
        }
        self.node.end(pod);
        delete_pod(self.case, &pod.pod).await;
    }

    fn left(&self) -> Vec<bool> {
        self.files.iter().map(|file| file.exists()).collect()
    }
}

/// `uninstall --watch` on a thread of its own, until this is dropped.
struct Watching {
    end: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watching {
    fn start(settings: &AgentSettings) -> Self {
        let (end, ended) = oneshot::channel();
        let settings = settings.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(removal::run(settings, false, async {
                let _ = ended.await;
            }));
        });
        Self { end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[tokio::test]
async fn on_containerd_everything_is_removed_under_running_pods_and_later_ends_are_seen() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let host = Host::of(&case, mode, "containerd://1.6.20").await;
        let (pod, address) = host.pod("db-0").await;
        assert!(attached(&case).await.is_some());
        let _watching = Watching::start(&host.settings);
        let finished = || async { installed(&host.settings.install()).unwrap().is_empty() };
        assert!(comes_true(SOON, finished).await, "{mode}: {:?}", host.left());
        assert_eq!(host.node.in_use(), [(address, pod.container.clone())], "{mode}: it runs");
        assert!(attached(&case).await.is_some(), "{mode}");
        host.ends_without_del(&pod).await;
        let released =
            comes_true(SOON, || async { attached(&case).await.is_none() && host.node.in_use().is_empty() });
        assert!(released.await, "{mode}: {:?}", host.node.in_use());
        assert_eq!(host.node.pending_updates(), [], "{mode}");
        assert_in_step(&case, &[&host.node]).await;
    }
}

#[tokio::test]
async fn where_del_comes_with_the_conflist_of_its_add_the_plugin_stays_until_pods_end() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let host = Host::of(&case, mode, "cri-o://1.30.0").await;
        let (pod, _) = host.pod("db-0").await;
        let watching = Watching::start(&host.settings);
        assert!(comes_true(SOON, || async { !host.files[0].exists() }).await, "{mode}");
        // It looks again after it has read which runtime there is.
        drop(watching);
        assert_eq!(host.left(), [false, true, true], "{mode}");
        let _watching = Watching::start(&host.settings);
        host.node.del(&pod).await;
        delete_pod(&case, "db-0").await;
        assert!(comes_true(SOON, || async { host.left() == [false; 3] }).await, "{mode}: {:?}", host.left());
        assert_eq!(attached(&case).await, None, "{mode}");
    }
}

#[tokio::test]
async fn without_the_api_server_the_host_is_cleared_and_the_detach_is_left_for_later() {
    let case = case().await;
    let mut host = Host::of(&case, "crd", "containerd://1.6.20").await;
    let (pod, _) = host.pod("db-0").await;
    let done = uninstall(&host.settings.install(), false, DelConflist::default()).unwrap();
    assert_eq!((done.attached, done.kept.len(), done.ended.len()), (1, 2, 0), "{done}");
    host.ends_without_del(&pod).await;
    let done = uninstall(&host.settings.install(), false, DelConflist::default()).unwrap();
    assert_eq!((done.attached, done.kept.len(), done.ended.len()), (0, 0, 1), "{done}");
    assert!(done.to_string().contains("its sandbox is gone"), "{done}");
    assert_eq!(host.left(), [false; 3]);
    assert_eq!(host.node.pending_updates().len(), 1, "the API server has to learn of it");
    assert!(attached(&case).await.is_some());
    host.settings.tick_seconds = 1;
    let _watching = Watching::start(&host.settings);
    assert!(comes_true(SOON, || async { attached(&case).await.is_none() }).await);
}
