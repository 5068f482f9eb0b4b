//! What the agent installs, with a real API server behind it: tokens, their renewal, and the shipped roles.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Parser;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::core::v1::{Node, Pod, Secret, ServiceAccount};
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::json;
use sticky_ipam::agent::flags::AgentCommand;
use sticky_ipam::agent::install::{InstallSettings, InstallState, Installer, PartState};
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::names::NetworkName;
use sticky_ipam::policy::mode::PluginMode;

use crate::support::api_server::access::Access;
use crate::support::api_server::case::Case;
use crate::support::api_server::{ApiServer, Weather, comes_true, roles};
use crate::support::node::{TestNode, sandbox, stickies, sticky_pod};

const ACCOUNT: &str = "sticky-ipam-node";
const DEADLINE: Duration = Duration::from_secs(60);

/// A host in a folder, with the shipped roles around it.
struct Host {
    _dir: tempfile::TempDir,
    settings: InstallSettings,
    agent: Access,
}

impl Host {
    async fn of(case: &Case<'_>, node: &str) -> Self {
        let bound = case.bound_to(node).await;
        let agent = case.token("sticky-ipam-agent", Some(bound)).await;
        let dir = tempfile::tempdir().unwrap();
        let plugin = dir.path().join("plugin");
        fs::write(&plugin, "the plugin").unwrap();
        fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
        let mut settings = InstallSettings::new(node, PluginMode::Crd, NetworkName::new("cilium").unwrap());
        settings.host_root = dir.path().join("host");
        settings.plugin = Some(plugin);
        settings.plugin_service_account = Some(format!("{}/{ACCOUNT}", case.namespace()).parse().unwrap());
        Self { _dir: dir, settings, agent }
    }

    async fn installer(&self) -> Installer {
        self.installer_by(&self.agent).await
    }

    async fn installer_by(&self, access: &Access) -> Installer {
        let file = Kubeconfig::read_from(access.kubeconfig()).unwrap();
        let mut config =
            kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
        config.proxy_url = None;
        let client = kube::Client::try_from(config.clone()).unwrap();
        Installer::new(self.settings.clone(), client, &config).unwrap()
    }

    fn kubeconfig(&self) -> PathBuf {
        self.settings.kubeconfig_path()
    }

    /// Whoever holds the kubeconfig that the agent wrote.
    async fn plugin(&self) -> kube::Client {
        let file = Kubeconfig::read_from(self.kubeconfig()).unwrap();
        let mut config =
            kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
        config.proxy_url = None;
        kube::Client::try_from(config).unwrap()
    }

    fn text(&self) -> String {
        fs::read_to_string(self.kubeconfig()).unwrap()
    }
}

fn state(installer: &Installer) -> InstallState {
    installer.state().borrow().clone()
}

fn after(start: SystemTime, seconds: u64) -> SystemTime {
    start + Duration::from_secs(seconds)
}

fn code<T: std::fmt::Debug>(answer: Result<T, kube::Error>) -> u16 {
    match answer {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("a refusal was expected, not {other:?}"),
    }
}

async fn remake_account(case: &Case<'_>) {
    let accounts: Api<ServiceAccount> = Api::namespaced(case.client(), case.namespace());
    let mut account = ServiceAccount::default();
    account.metadata.name = Some(ACCOUNT.to_owned());
    accounts.create(&PostParams::default(), &account).await.unwrap();
}

async fn delete_account(case: &Case<'_>) {
    let accounts: Api<ServiceAccount> = Api::namespaced(case.client(), case.namespace());
    accounts.delete(ACCOUNT, &Default::default()).await.unwrap();
}

#[tokio::test]
async fn the_plugin_gets_a_private_kubeconfig_whose_token_names_its_node() {
    let case = ApiServer::shared().await.case().await;
    case.shipped_roles().await;
    let node = case.unique("node");
    let host = Host::of(&case, &node).await;
    let mut installer = host.installer().await;
    installer.install_once(&[]).await.unwrap();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!((mode(&host.kubeconfig()), mode(host.kubeconfig().parent().unwrap())), (0o600, 0o700));
    let review: Api<SelfSubjectReview> = Api::all(host.plugin().await);
    let who = review.create(&PostParams::default(), &Default::default()).await.unwrap();
    let who = who.status.unwrap().user_info.unwrap();
    assert_eq!(who.username.unwrap(), format!("system:serviceaccount:{}:{ACCOUNT}", case.namespace()));
    assert_eq!(who.extra.unwrap()["authentication.kubernetes.io/node-name"], [node]);
    let state = state(&installer);
    assert!(state.problems().is_empty() && state.renewals == 1, "{state:?}");
    let left = state.token_expires.unwrap().duration_since(SystemTime::now()).unwrap();
    let hours = 3600;
    assert!(
        (48 * hours..=49 * hours).contains(&left.as_secs()),
        "a day and more without the agent: {left:?}"
    );
}

#[tokio::test]
async fn a_token_is_renewed_before_it_ends_and_not_long_before() {
    let case = ApiServer::shared().await.case().await;
    case.shipped_roles().await;
    let host = Host::of(&case, &case.unique("node")).await;
    let mut installer = host.installer().await;
    let start = SystemTime::now();
    installer.step(&[], start, false).await.unwrap();
    let first = host.text();
    installer.step(&[], after(start, 2690), false).await.unwrap();
    assert_eq!(host.text(), first, "three quarters of its life are not over");
    installer.step(&[], after(start, 3061), false).await.unwrap();
    let second = host.text();
    assert_ne!(second, first);
    assert_eq!((state(&installer).renewals, state(&installer).repairs), (2, 0));
    installer.step(&[], after(start, 3061 + 2690), false).await.unwrap();
    assert_eq!(host.text(), second, "the new one has its own life");
    // Whoever sees it refused asks for another at once.
    installer.step(&[], after(start, 3061 + 2691), true).await.unwrap();
    assert_ne!(host.text(), second);
}

#[tokio::test]
async fn a_token_that_the_api_server_shortens_is_renewed_in_time() {
    let server = ApiServer::start_with(&["--service-account-max-token-expiration=1h"]).await;
    let case = server.case().await;
    case.shipped_roles().await;
    let host = Host::of(&case, &case.unique("node")).await;
    let mut installer = host.installer().await;
    let start = SystemTime::now();
    installer.step(&[], start, false).await.unwrap();
    let left = state(&installer).token_expires.unwrap().duration_since(start).unwrap();
    assert!((3500..=3605).contains(&left.as_secs()), "{left:?}");
    let first = host.text();
    installer.step(&[], after(start, 2690), false).await.unwrap();
    assert_eq!(host.text(), first);
    installer.step(&[], after(start, 3061), false).await.unwrap();
    assert_ne!(host.text(), first);
}

#[tokio::test]
async fn a_kubeconfig_that_is_lost_or_altered_is_put_back_even_without_the_api_server() {
    let case = ApiServer::shared().await.case().await;
    case.shipped_roles().await;
    let host = Host::of(&case, &case.unique("node")).await;
    let proxy = case.proxy();
    let mut installer = host.installer_by(&host.agent.through(&proxy)).await;
    let start = SystemTime::now();
    installer.step(&[], start, false).await.unwrap();
    let right = host.text();
    proxy.set(Weather::Reset);
    let path = host.kubeconfig();
    let damages: [&dyn Fn(); 4] = [
        &|| fs::remove_file(&path).unwrap(),
        &|| fs::remove_dir_all(path.parent().unwrap()).unwrap(),
        &|| fs::write(&path, "apiVersion: v1\n").unwrap(),
        &|| fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap(),
    ];
    for (number, damage) in damages.iter().enumerate() {
        damage();
        installer.step(&[], after(start, 10 * (number as u64 + 1)), false).await.unwrap();
        assert_eq!(host.text(), right);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(state(&installer).repairs, number as u64 + 1);
    }
    // A renewal that fails leaves the token that is there, tells why, and does not hammer.
    let error = installer.step(&[], after(start, 3061), false).await.unwrap_err().to_string();
    assert!(error.contains(ACCOUNT) && error.contains("the API server is away"), "{error}");
    assert_eq!(host.text(), right);
    installer.step(&[], after(start, 3062), false).await.unwrap();
    assert_eq!(state(&installer).renewal_failures, 1);
    proxy.heal();
    installer.step(&[], after(start, 3080), false).await.unwrap();
    assert_ne!(host.text(), right);
}

#[tokio::test]
async fn a_restarted_agent_keeps_a_good_token_and_replaces_one_that_is_refused() {
    let case = ApiServer::shared().await.case().await;
    case.shipped_roles().await;
    let host = Host::of(&case, &case.unique("node")).await;
    host.installer().await.install_once(&[]).await.unwrap();
    let files = [host.kubeconfig(), host.settings.conflist_path(), host.settings.plugin_path()];
    let inodes = || {
        files
            .each_ref()
            .map(|path| (fs::metadata(path).unwrap().ino(), fs::metadata(path).unwrap().ctime_nsec()))
    };
    let before = inodes();
    let mut restarted = host.installer().await;
    restarted.install_once(&[]).await.unwrap();
    assert_eq!(inodes(), before);
    assert_eq!(state(&restarted).renewals, 0);
    // The account is created again: its old tokens are not valid any more, long before they expire.
    delete_account(&case).await;
    remake_account(&case).await;
    let old = host.text();
    let renewed = comes_true(DEADLINE, || async {
        // The server remembers for some seconds that it knew the token.
        let mut restarted = host.installer().await;
        restarted.install_once(&[]).await.unwrap();
        host.text() != old
    });
    assert!(renewed.await, "the refused token stays");
    let nodes: Api<Node> = Api::all(host.plugin().await);
    nodes.get(&host.settings.node).await.unwrap();
}

#[tokio::test]
async fn a_token_of_another_node_account_or_server_is_not_kept() {
    let case = ApiServer::shared().await.case().await;
    case.shipped_roles().await;
    let (one, two) = (case.unique("one"), case.unique("two"));
    let first = Host::of(&case, &one).await;
    first.installer().await.install_once(&[]).await.unwrap();
    let mut second = Host::of(&case, &two).await;
    fs::create_dir_all(second.kubeconfig().parent().unwrap()).unwrap();
    fs::copy(first.kubeconfig(), second.kubeconfig()).unwrap();
    second.installer().await.install_once(&[]).await.unwrap();
    assert_ne!(second.text(), first.text());
    second.settings.api_server = Some(first.agent.url().replace("127.0.0.1", "localhost"));
    second.installer().await.install_once(&[]).await.unwrap();
    assert!(second.text().contains("\"tls-server-name\": \"localhost\""), "{}", second.text());
    let nodes: Api<Node> = Api::all(second.plugin().await);
    nodes.get(&two).await.unwrap();
}

#[tokio::test]
async fn an_account_or_node_that_is_not_there_is_named_and_nothing_is_half_installed() {
    let case = ApiServer::shared().await.case().await;
    case.shipped_roles().await;
    let mut host = Host::of(&case, &case.unique("node")).await;
    delete_account(&case).await;
    let mut installer = host.installer().await;
    let error = installer.install_once(&[]).await.unwrap_err().to_string();
    assert!(error.contains(ACCOUNT) && error.contains("packaging/rbac.yaml"), "{error}");
    assert!(!host.settings.conflist_path().exists(), "a conflist without credentials");
    assert!(matches!(state(&installer).kubeconfig, PartState::Failed(_)));
    remake_account(&case).await;
    installer.install_once(&[]).await.unwrap();
    assert!(host.settings.conflist_path().exists());
    host.settings.node = case.unique("nowhere");
    let error = host.installer().await.install_once(&[]).await.unwrap_err().to_string();
    assert!(error.contains("there is no Node nowhere-"), "{error}");
}

#[tokio::test]
async fn an_agent_without_its_role_reports_which_one_is_missing() {
    let case = ApiServer::shared().await.case().await;
    case.shipped_roles().await;
    let host = Host::of(&case, &case.unique("node")).await;
    let error = host.installer_by(&case.nobody()).await.install_once(&[]).await.unwrap_err().to_string();
    assert!(error.contains("may not get nodes") && error.contains("packaging/rbac.yaml"), "{error}");
    let error =
        host.installer_by(&case.forged_token()).await.install_once(&[]).await.unwrap_err().to_string();
    assert!(error.contains("does not accept the agent's own credentials"), "{error}");
}

#[tokio::test]
async fn a_sticky_pod_starts_and_ends_with_what_the_agent_wrote() {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    server.install_cilium_kinds().await;
    let case = server.case().await;
    case.shipped_roles().await;
    let mut node = TestNode::ready(&case, "node", case.range()).await;
    let mut host = Host::of(&case, &node.name).await;
    let name = host.agent.url().replace("127.0.0.1", "localhost");
    for api_server in [None, Some(name)] {
        host.settings.api_server = api_server;
        host.installer().await.install_once(&[]).await.unwrap();
        node.by_file(host.kubeconfig());
        let pod = sandbox(&sticky_pod(&case, "mysql-0", &node.name, json!({})).await);
        let address = node.add(&pod).await.unwrap();
        assert_eq!(stickies(&case).await[0].spec.addresses, [address]);
        node.del(&pod).await;
        assert_eq!(node.pending_updates(), [], "DEL could detach at once");
    }
}

#[tokio::test]
async fn the_plugin_is_given_addresses_and_resolves_no_name_itself() {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    server.install_cilium_kinds().await;
    let case = server.case().await;
    case.shipped_roles().await;
    let mut node = TestNode::ready(&case, "node", case.range()).await;
    let mut host = Host::of(&case, &node.name).await;
    host.settings.api_server = Some(host.agent.url().replace("127.0.0.1", "localhost"));
    let mut installer = host.installer().await;
    installer.install_once(&[]).await.unwrap();
    assert!(!host.text().contains("https://localhost"), "{}", host.text());
    let mut by_name: serde_json::Value = serde_json::from_str(&host.text()).unwrap();
    let cluster = &mut by_name["clusters"][0]["cluster"];
    cluster["server"] = host.settings.api_server.clone().into();
    cluster.as_object_mut().unwrap().remove("extensions");
    let file = node.folder().join("by-name");
    fs::write(&file, by_name.to_string()).unwrap();
    node.by_file(file);
    let pod = sandbox(&sticky_pod(&case, "mysql-0", &node.name, json!({})).await);
    let error = node.add(&pod).await.unwrap_err();
    let message = error["msg"].as_str().unwrap();
    assert!(error["code"] == 11 && message.contains("localhost is a name"), "{error}");
    assert!(message.contains("tls-server-name"), "{error}");
    // An address that has changed is followed, and that is no repair.
    let moved = host.text().replace("127.0.0.1", "127.0.0.9");
    fs::write(host.kubeconfig(), moved).unwrap();
    let repaired = state(&installer).repairs;
    installer.step(&[], SystemTime::now(), false).await.unwrap();
    assert!(host.text().contains("127.0.0.1:") && !host.text().contains("127.0.0.9"), "{}", host.text());
    assert_eq!(state(&installer).repairs, repaired + 1, "this one was another program's");
}

/// A cilium-agent on the host that answers every question, until it is stopped.
struct AnsweringCilium {
    socket: PathBuf,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl AnsweringCilium {
    fn start(socket: PathBuf) -> Self {
        let listener = UnixListener::bind(&socket).unwrap();
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, mut asked) = (stream.unwrap(), [0; 512]);
                if stream.read(&mut asked).unwrap_or_default() == 0 {
                    return;
                }
                let _ = stream.write_all(b"HTTP/1.0 200 OK\r\n\r\n{}");
            }
        });
        Self { socket, thread: Some(thread) }
    }
}

impl Drop for AnsweringCilium {
    fn drop(&mut self) {
        drop(UnixStream::connect(&self.socket));
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
        let _ = fs::remove_file(&self.socket);
    }
}

#[tokio::test]
async fn the_first_conflist_waits_for_cilium_and_stays_once_it_stands() {
    let case = ApiServer::shared().await.case().await;
    case.shipped_roles().await;
    let mut host = Host::of(&case, &case.unique("node")).await;
    host.settings.awaited_cilium = Some("/cilium.sock".into());
    let mut installer = host.installer().await;
    let conflist = host.settings.conflist_path();
    let too_early = async |installer: &mut Installer, why: &str| {
        let error = installer.install_once(&[]).await.unwrap_err().to_string();
        assert!(error.contains("before Cilium runs") && error.contains(why), "{error}");
        assert!(!conflist.exists() && host.settings.plugin_path().exists() && host.kubeconfig().exists());
        assert!(matches!(state(installer).conflist, PartState::Failed(_)));
    };
    too_early(&mut installer, "cilium-cni is not there").await;
    fs::write(host.settings.plugin_path().with_file_name("cilium-cni"), "").unwrap();
    too_early(&mut installer, "does not answer").await;
    let cilium = AnsweringCilium::start(host.settings.host_root.join("cilium.sock"));
    installer.install_once(&[]).await.unwrap();
    assert!(conflist.exists());
    drop(cilium);
    installer.install_once(&[]).await.unwrap();
    host.installer().await.install_once(&[]).await.unwrap();
    fs::remove_file(&conflist).unwrap();
    installer.install_once(&[]).await.unwrap();
    assert!(conflist.exists(), "restored, whatever Cilium does: running pods need it for their DEL");
}

#[tokio::test]
async fn beside_another_conflist_ours_waits_for_nothing() {
    let case = ApiServer::shared().await.case().await;
    case.shipped_roles().await;
    let mut host = Host::of(&case, &case.unique("node")).await;
    host.settings.awaited_cilium = Some("/cilium.sock".into());
    let conflist = host.settings.conflist_path();
    fs::create_dir_all(conflist.parent().unwrap()).unwrap();
    fs::write(conflist.with_file_name("05-cilium.conflist"), "{}").unwrap();
    host.installer().await.install_once(&[]).await.unwrap();
    assert!(conflist.exists(), "the runtime would start sticky pods by Cilium's");
}

#[tokio::test]
async fn the_plugins_account_may_do_what_an_add_needs_and_no_more() {
    let server = ApiServer::shared().await;
    server.install_cilium_kinds().await;
    let case = server.case().await;
    case.shipped_roles().await;
    let host = Host::of(&case, &case.unique("node")).await;
    host.installer().await.install_once(&[]).await.unwrap();
    let client = host.plugin().await;
    let space = case.namespace();
    case.pod("mysql-0", &[], None).await;
    let pods: Api<Pod> = Api::namespaced(client.clone(), space);
    pods.get("mysql-0").await.unwrap();
    assert_eq!(code(pods.list(&ListParams::default()).await), 403);
    assert_eq!(code(pods.delete("mysql-0", &Default::default()).await), 403);
    let secrets: Api<Secret> = Api::namespaced(client.clone(), space);
    assert_eq!(code(secrets.get("any").await), 403);
    let nodes: Api<Node> = Api::all(client.clone());
    let label = Patch::Merge(json!({"metadata": {"labels": {"mine": "yes"}}}));
    assert_eq!(code(nodes.patch(&host.settings.node, &PatchParams::default(), &label).await), 403);
    let cilium: Api<CiliumNode> = Api::all(client.clone());
    assert_eq!(code(cilium.delete(&host.settings.node, &Default::default()).await), 403);
    assert_eq!(code(cilium.get(&host.settings.node).await), 404, "it may look");
    let accounts: Api<ServiceAccount> = Api::namespaced(client, space);
    for account in [ACCOUNT, "sticky-ipam-agent"] {
        let asked = accounts.create_token_request(account, &PostParams::default(), &Default::default()).await;
        assert_eq!(code(asked), 403, "a token must not make tokens");
    }
}

#[tokio::test]
async fn the_agents_account_makes_tokens_of_the_plugins_account_alone() {
    let case = ApiServer::shared().await.case().await;
    case.shipped_roles().await;
    let host = Host::of(&case, &case.unique("node")).await;
    let client = host.agent.client().await;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), case.namespace());
    for account in ["default", "sticky-ipam-agent"] {
        let asked = accounts.create_token_request(account, &PostParams::default(), &Default::default()).await;
        assert_eq!(code(asked), 403);
    }
    let elsewhere: Api<ServiceAccount> = Api::namespaced(client.clone(), "kube-system");
    let asked = elsewhere.create_token_request(ACCOUNT, &PostParams::default(), &Default::default()).await;
    assert_eq!(code(asked), 403, "of that name in its own namespace alone");
    let secrets: Api<Secret> = Api::namespaced(client.clone(), case.namespace());
    assert_eq!(code(secrets.list(&ListParams::default()).await), 403);
    let pods: Api<Pod> = Api::namespaced(client, case.namespace());
    pods.list(&ListParams::default()).await.unwrap();
    assert_eq!(code(pods.delete("any", &Default::default()).await), 403);
}

#[tokio::test]
async fn with_an_account_of_its_own_a_nodes_plugin_writes_no_other_cilium_node() {
    let server = ApiServer::shared().await;
    server.install_cilium_kinds().await;
    let case = server.case().await;
    let (own, other) = (case.unique("own"), case.unique("other"));
    let admin: Api<CiliumNode> = Api::all(case.client());
    for name in [&own, &other] {
        admin.create(&PostParams::default(), &CiliumNode::new(name, Default::default())).await.unwrap();
    }
    let plugin: Api<CiliumNode> = Api::all(case.plugin(&own).await.client().await);
    let patch = Patch::Merge(json!({"spec": {"ipam": {"pool": {"10.0.0.1": {"owner": "a/b"}}}}}));
    plugin.patch(&own, &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(code(plugin.patch(&other, &PatchParams::default(), &patch).await), 403);
}

#[tokio::test]
async fn with_an_expired_token_an_add_says_what_to_do_and_with_a_renewed_one_it_works() {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    let case = server.case().await;
    let mut node = TestNode::ready(&case, "n1", case.range()).await;
    case.shipped_roles().await;
    let bound = case.bound_to(&node.name).await;
    // At this age it is still valid, so only the age of the next one is wrong.
    node.by(&case.token_of_before(ACCOUNT, Some(bound.clone()), 60).await);
    let first = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    let address = node.add(&first).await.unwrap();
    node.del(&first).await;
    node.by(&case.token_of_before(ACCOUNT, Some(bound.clone()), 2 * 3600).await);
    let second = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    let error = node.add(&second).await.unwrap_err();
    let message = error["msg"].as_str().unwrap();
    assert!(error["code"] == 11 && message.contains("expired") && message.contains("renews them"), "{error}");
    assert!(message.contains(node.kubeconfig().to_str().unwrap()), "{error}");
    assert!(node.in_use().is_empty());
    node.by(&case.token(ACCOUNT, Some(bound)).await);
    assert_eq!(node.add(&second).await.unwrap(), address);
    assert_eq!(stickies(&case).await.len(), 1);
}

#[tokio::test]
async fn the_server_accepts_every_manifest_as_it_is() {
    let case = ApiServer::shared().await.case().await;
    let params = PatchParams { dry_run: true, ..PatchParams::apply("test").force() }.validation_strict();
    for file in ["rbac.yaml", "admission.yaml", "agent.yaml", "controller.yaml", "uninstall.yaml"] {
        let objects = roles::manifest(file);
        assert!(!objects.is_empty());
        for object in objects {
            // What lies in a namespace of the manifest's own can only be judged once that is there.
            let is_namespace = object["kind"] == "Namespace";
            let params = PatchParams { dry_run: !is_namespace, ..params.clone() };
            let object: DynamicObject = serde_json::from_value(object).unwrap();
            let name = object.metadata.name.clone().unwrap();
            let taken =
                roles::api_of(case.client(), &object).patch(&name, &params, &Patch::Apply(&object)).await;
            taken.unwrap_or_else(|why| panic!("{file}: {name}: {why}"));
        }
    }
}

/// The arguments of a manifest's only workload.
fn arguments(file: &str, kind: &str) -> Vec<String> {
    let all = roles::manifest(file).into_iter();
    let workload = all.filter(|object| object["kind"] == kind).collect::<Vec<_>>().remove(0);
    let arguments = workload["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap().clone();
    arguments.iter().map(|argument| argument.as_str().unwrap().to_owned()).collect()
}

#[test]
fn the_shipped_uninstall_looks_for_what_the_shipped_agent_installs() {
    let parse = |arguments: Vec<String>| {
        let all = ["agent", "--node=n"].map(str::to_owned).into_iter().chain(arguments);
        sticky_ipam::agent::flags::AgentCommandLine::try_parse_from(all).unwrap()
    };
    let agent = parse(arguments("agent.yaml", "DaemonSet")).settings.install();
    let manifest = roles::manifest("uninstall.yaml").remove(0);
    let container = &manifest["spec"]["template"]["spec"]["containers"][0];
    let probe = container["readinessProbe"]["exec"]["command"].as_array().unwrap().iter().skip(1);
    let probe = probe.map(|word| word.as_str().unwrap().to_owned()).collect();
    for line in [parse(arguments("uninstall.yaml", "DaemonSet")), parse(probe)] {
        assert!(matches!(line.command, Some(AgentCommand::Uninstall { .. })), "{line:?}");
        let found = line.settings.install();
        assert_eq!(found.conflist_path(), agent.conflist_path());
        assert_eq!(found.plugin_path(), agent.plugin_path());
        assert_eq!(found.kubeconfig_path(), agent.kubeconfig_path());
        assert_eq!(found.plugin_service_account, agent.plugin_service_account);
        assert_eq!((found.data_dir, found.network), (agent.data_dir.clone(), agent.network.clone()));
    }
    let agents = roles::manifest("agent.yaml").remove(0);
    let agents = &agents["spec"]["template"]["spec"];
    assert_eq!(container["volumeMounts"], agents["containers"][0]["volumeMounts"]);
}

#[test]
fn the_shipped_agent_and_controller_take_the_same_pods_for_sticky() {
    let of_agent = ["agent", "--node=n"].map(str::to_owned).into_iter();
    let of_agent = of_agent.chain(arguments("agent.yaml", "DaemonSet"));
    let agent = sticky_ipam::agent::flags::AgentCommandLine::try_parse_from(of_agent).unwrap();
    let of_controller = ["controller".to_owned()].into_iter();
    let of_controller = of_controller.chain(arguments("controller.yaml", "Deployment"));
    let controller =
        sticky_ipam::controller::flags::ControllerCommandLine::try_parse_from(of_controller).unwrap();
    let rules = agent.settings.selection.rules();
    assert!(rules.selector.is_some(), "{rules:?}");
    assert_eq!(rules, controller.settings.selection.rules());
}
