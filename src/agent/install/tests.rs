use super::*;
use crate::names::{Attachment, ContainerId, IfName, NetworkName};
use crate::policy::mode::PluginMode;
use crate::store::{NodeTime, RealDisk, Record, RecordState, Store};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

/// A host in a folder, without an API server.
struct Host {
    dir: tempfile::TempDir,
    settings: InstallSettings,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut settings =
            InstallSettings::new("n1", PluginMode::Delegated, NetworkName::new("cilium").unwrap());
        settings.host_root = dir.path().join("host");
        settings.plugin = Some(dir.path().join("plugin"));
        fs::create_dir(&settings.host_root).unwrap();
        let host = Self { dir, settings };
        host.build("first");
        host
    }

    /// A plugin to install.
    fn build(&self, content: &str) {
        let path = self.dir.path().join("plugin");
        fs::write(&path, content).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn installer(&self) -> Installer {
        // Nothing listens there, and nothing asks: these tests have no service account.
        let config = kube::Config::new("https://127.0.0.1:1".parse().unwrap());
        let client = kube::Client::try_from(config.clone()).unwrap();
        Installer::new(self.settings.clone(), client, &config).unwrap()
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.settings.host_root.join(folder)).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn conf(&self, name: &str) -> PathBuf {
        self.settings.on_host(&self.settings.cni_conf_dir).join(name)
    }
}

fn blocks() -> Vec<IpNet> {
    vec!["10.9.1.0/24".parse().unwrap()]
}

fn identity(path: &Path) -> (u64, i64, i64) {
    let meta = fs::symlink_metadata(path).unwrap();
    (meta.ino(), meta.ctime(), meta.ctime_nsec())
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000 + seconds)
}

#[tokio::test]
async fn plugin_and_conflist_are_there_with_their_modes_and_nothing_else() {
    let host = Host::new();
    let mut installer = host.installer();
    installer.install_once(&blocks()).await.unwrap();
    assert_eq!(host.names("opt/cni/bin"), [PLUGIN]);
    assert_eq!(host.names("etc/cni/net.d"), [CONFLIST]);
    assert_eq!((mode(&host.settings.plugin_path()), mode(&host.settings.conflist_path())), (0o755, 0o600));
    let state = installer.state().borrow().clone();
    assert_eq!(
        (&state.plugin, &state.kubeconfig, &state.conflist),
        (&PartState::Installed, &PartState::NotManaged, &PartState::Installed)
    );
    assert!(state.problems().is_empty() && state.repairs == 0, "{state:?}");
}

#[tokio::test]
async fn installing_again_touches_nothing_not_even_after_a_restart() {
    let host = Host::new();
    host.installer().install_once(&blocks()).await.unwrap();
    let files = [host.settings.plugin_path(), host.settings.conflist_path()];
    let before = files.each_ref().map(|path| identity(path));
    let mut installer = host.installer();
    installer.install_once(&blocks()).await.unwrap();
    installer.step(&blocks(), at(10), false).await.unwrap();
    assert_eq!(files.each_ref().map(|path| identity(path)), before);
}

#[tokio::test]
async fn an_upgrade_leaves_the_old_plugin_to_those_who_run_it() {
    let host = Host::new();
    host.installer().install_once(&blocks()).await.unwrap();
    let mut running = fs::File::open(host.settings.plugin_path()).unwrap();
    host.build("second");
    host.installer().install_once(&blocks()).await.unwrap();
    let mut old = String::new();
    running.read_to_string(&mut old).unwrap();
    assert_eq!(old, "first");
    assert_eq!(fs::read_to_string(host.settings.plugin_path()).unwrap(), "second");
    assert_eq!(host.names("opt/cni/bin"), [PLUGIN], "nothing half written stays");
}

#[tokio::test]
async fn a_reader_sees_the_old_plugin_or_the_new_one_while_it_is_replaced() {
    let host = Host::new();
    let (one, two) = ("1".repeat(300_000), "2".repeat(200_000));
    host.build(&one);
    host.installer().install_once(&blocks()).await.unwrap();
    let (path, ended) = (host.settings.plugin_path(), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let reader = std::thread::spawn({
        let (one, two, ended) = (one.clone(), two.clone(), Arc::clone(&ended));
        move || {
            let mut seen = 0;
            while !ended.load(std::sync::atomic::Ordering::SeqCst) || seen == 0 {
                let text = fs::read_to_string(&path).unwrap();
                assert!(text == one || text == two, "torn: {} bytes", text.len());
                seen += 1;
            }
        }
    });
    for content in [&two, &one].repeat(10) {
        host.build(content);
        host.installer().install_once(&blocks()).await.unwrap();
    }
    ended.store(true, std::sync::atomic::Ordering::SeqCst);
    reader.join().unwrap();
}

#[tokio::test]
async fn the_running_task_follows_blocks_and_ends_when_asked() {
    let host = Host::new();
    let (blocks_now, seen) = watch::channel(Vec::new());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let installer = host.installer();
    let mut state = installer.state();
    let task = tokio::spawn(installer.run(seen, async move {
        let _ = stopped.await;
    }));
    let patience = Duration::from_secs(60);
    let without = state.wait_for(|state| matches!(state.conflist, PartState::Failed(_)));
    tokio::time::timeout(patience, without).await.unwrap().unwrap();
    blocks_now.send(blocks()).unwrap();
    tokio::time::timeout(patience, state.wait_for(|state| state.problems().is_empty()))
        .await
        .unwrap()
        .unwrap();
    assert!(host.settings.conflist_path().exists());
    // No block is known any more: it goes on all the same.
    drop(blocks_now);
    stop.send(()).unwrap();
    tokio::time::timeout(patience, task).await.unwrap().unwrap();
}

#[tokio::test]
async fn what_another_program_changed_removed_or_opened_up_is_restored() {
    let host = Host::new();
    let mut installer = host.installer();
    installer.install_once(&blocks()).await.unwrap();
    let (plugin, conflist) = (host.settings.plugin_path(), host.settings.conflist_path());
    let right = fs::read(&conflist).unwrap();
    let damages: [&dyn Fn(); 6] = [
        &|| fs::write(&plugin, "another").unwrap(),
        &|| fs::remove_file(&plugin).unwrap(),
        &|| fs::set_permissions(&plugin, fs::Permissions::from_mode(0o777)).unwrap(),
        &|| fs::write(&conflist, "{}").unwrap(),
        &|| fs::remove_file(&conflist).unwrap(),
        &|| {
            fs::remove_file(&conflist).unwrap();
            std::os::unix::fs::symlink("/nowhere", &conflist).unwrap();
        },
    ];
    for (number, damage) in damages.iter().enumerate() {
        damage();
        installer.step(&blocks(), at(number as u64 * 10), false).await.unwrap();
        assert_eq!(fs::read_to_string(&plugin).unwrap(), "first");
        assert_eq!(fs::read(&conflist).unwrap(), right);
        assert_eq!((mode(&plugin), mode(&conflist)), (0o755, 0o600));
        assert_eq!(installer.state().borrow().repairs, number as u64 + 1);
    }
}

#[tokio::test]
async fn a_bad_template_changes_nothing_and_is_reported() {
    let mut host = Host::new();
    host.installer().install_once(&blocks()).await.unwrap();
    let before = identity(&host.settings.conflist_path());
    let template = host.dir.path().join("site.conflist");
    fs::write(&template, r#"{"cniVersion": "1.0.0", "plugins": []}"#).unwrap();
    host.settings.conflist = ConflistSource::File(template.clone());
    let mut installer = host.installer();
    let error = installer.install_once(&blocks()).await.unwrap_err().to_string();
    assert!(
        error.contains("site.conflist") && error.contains("plugins") && error.contains("stays"),
        "{error}"
    );
    assert_eq!(identity(&host.settings.conflist_path()), before);
    assert!(!installer.state().borrow().problems().is_empty());
    // Corrected under the running agent, it is taken.
    let right = serde_json::json!({"cniVersion": "1.0.0", "plugins": [
        {"type": "cilium-cni", "site": 1, "ipam": {"type": "sticky-ipam"}}]});
    fs::write(&template, right.to_string()).unwrap();
    installer.step(&blocks(), at(10), false).await.unwrap();
    assert!(fs::read_to_string(host.settings.conflist_path()).unwrap().contains("\"site\": 1"));
    assert!(installer.state().borrow().problems().is_empty());
    // Invalid again: what was there is still restored.
    fs::write(&template, "{").unwrap();
    fs::remove_file(host.settings.conflist_path()).unwrap();
    installer.step(&blocks(), at(20), false).await.unwrap_err();
    assert!(fs::read_to_string(host.settings.conflist_path()).unwrap().contains("\"site\": 1"));
}

#[tokio::test]
async fn new_blocks_are_followed_and_blocks_that_vanish_remove_nothing() {
    let host = Host::new();
    let mut installer = host.installer();
    let error = installer.install_once(&[]).await.unwrap_err().to_string();
    assert!(error.contains("n1") && error.contains("podCIDRs"), "{error}");
    assert!(host.settings.plugin_path().exists() && !host.settings.conflist_path().exists());
    installer.step(&blocks(), at(0), false).await.unwrap();
    let text = || fs::read_to_string(host.settings.conflist_path()).unwrap();
    assert!(text().contains("10.9.1.0/24"));
    installer.step(&["10.9.5.0/24".parse().unwrap()], at(10), false).await.unwrap();
    assert!(text().contains("10.9.5.0/24") && !text().contains("10.9.1.0/24"));
    installer.step(&[], at(20), false).await.unwrap_err();
    assert!(text().contains("10.9.5.0/24"));
    assert_eq!(installer.state().borrow().repairs, 0, "following is no repair");
}

#[tokio::test]
async fn a_conflist_never_comes_before_its_plugin() {
    let host = Host::new();
    fs::remove_file(host.dir.path().join("plugin")).unwrap();
    let error = host.installer().install_once(&blocks()).await.unwrap_err().to_string();
    assert!(error.contains("--plugin") && error.contains("cannot be read"), "{error}");
    assert!(!host.settings.conflist_path().exists());
    host.build("");
    assert!(host.installer().install_once(&blocks()).await.unwrap_err().to_string().contains("empty"));
}

#[tokio::test]
async fn a_conflist_that_cilium_renames_is_restored_three_times_and_reported() {
    let host = Host::new();
    let mut installer = host.installer();
    installer.install_once(&blocks()).await.unwrap();
    let (ours, renamed) = (host.settings.conflist_path(), host.conf("03-sticky-ipam.conflist.cilium_bak"));
    for number in 0..3 {
        fs::rename(&ours, &renamed).unwrap();
        installer.step(&blocks(), at(number * 10), false).await.unwrap();
        assert!(ours.exists() && !renamed.exists());
        assert!(installer.state().borrow().problems().is_empty());
    }
    fs::rename(&ours, &renamed).unwrap();
    installer.step(&blocks(), at(40), false).await.unwrap();
    assert!(!ours.exists(), "alternating does not help");
    let state = installer.state().borrow().clone();
    assert_eq!((state.displaced, state.outnumbered), (3, true));
    let problems = state.problems().join(" ");
    assert!(problems.contains("cni.exclusive=false") && problems.contains("--read-cni-conf"), "{problems}");
    // Later it is tried again; if it then stays, all is well.
    installer.step(&blocks(), at(700), false).await.unwrap();
    installer.step(&blocks(), at(710), false).await.unwrap();
    assert!(ours.exists() && installer.state().borrow().problems().is_empty());
}

#[tokio::test]
async fn a_file_that_sorts_before_ours_is_named() {
    let host = Host::new();
    let mut installer = host.installer();
    installer.install_once(&blocks()).await.unwrap();
    fs::write(host.conf("00-multus.conf"), "{}").unwrap();
    installer.step(&blocks(), at(0), false).await.unwrap();
    let problems = installer.state().borrow().problems().join(" ");
    assert!(problems.contains("00-multus.conf"), "{problems}");
    fs::remove_file(host.conf("00-multus.conf")).unwrap();
    installer.step(&blocks(), at(10), false).await.unwrap();
    assert!(installer.state().borrow().problems().is_empty());
}

#[tokio::test]
async fn what_a_killed_agent_left_half_written_is_swept() {
    let host = Host::new();
    host.installer().install_once(&blocks()).await.unwrap();
    let (old, fresh) = (host.conf(".sticky-ipam.new.1.0.7"), host.conf(".sticky-ipam.new.1.0.8"));
    for path in [&old, &fresh] {
        fs::write(path, "half").unwrap();
    }
    let long_ago = SystemTime::now() - Duration::from_secs(3600);
    fs::File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
    host.installer().install_once(&blocks()).await.unwrap();
    assert!(!old.exists() && fresh.exists(), "another agent may still write the fresh one");
}

#[tokio::test]
async fn a_failed_write_leaves_what_was_there() {
    let host = Host::new();
    host.installer().install_once(&blocks()).await.unwrap();
    let before = identity(&host.settings.plugin_path());
    host.build("second");
    // A folder in the plugin's place as its source cannot be copied.
    let mut broken = host.settings.clone();
    broken.plugin = Some(host.dir.path().join("host"));
    let config = kube::Config::new("https://127.0.0.1:1".parse().unwrap());
    let client = kube::Client::try_from(config.clone()).unwrap();
    let mut installer = Installer::new(broken, client, &config).unwrap();
    installer.install_once(&blocks()).await.unwrap_err();
    assert_eq!(identity(&host.settings.plugin_path()), before);
    // A folder that is in the way of the name stays, and nothing half written beside it.
    fs::remove_file(host.settings.plugin_path()).unwrap();
    fs::create_dir(host.settings.plugin_path()).unwrap();
    let error = host.installer().install_once(&blocks()).await.unwrap_err().to_string();
    assert!(error.contains("put in place") && error.contains("opt/cni/bin/sticky-ipam"), "{error}");
    assert_eq!(host.names("opt/cni/bin"), [PLUGIN]);
}

fn attach(host: &Host) -> PathBuf {
    let now = NodeTime::now(Path::new(crate::cni::config::sticky::DEFAULT_BOOT_ID_FILE)).unwrap();
    let data_dir = host.settings.on_host(&host.settings.data_dir);
    let store = Store::new(RealDisk, &data_dir, &host.settings.network, now.clone(), Duration::from_secs(5));
    let mut locked = store.lock().unwrap();
    let record = Record {
        addresses: vec!["10.9.1.7".parse().unwrap()],
        attachment: Attachment {
            container: ContainerId::new("c1").unwrap(),
            interface: IfName::new("eth0").unwrap(),
        },
        state: RecordState::Attached,
        netns: None,
        pod: None,
        retention: None,
        binding: None,
        since: now,
    };
    locked.put(&record, None).unwrap();
    locked.commit().unwrap();
    store.root().join("10.9.1.7")
}

#[tokio::test]
async fn uninstall_removes_everything_of_ours_and_nothing_else() {
    let mut host = Host::new();
    host.installer().install_once(&blocks()).await.unwrap();
    fs::write(host.conf("05-cilium.conflist"), "{}").unwrap();
    fs::write(host.conf("03-sticky-ipam.conflist.cilium_bak"), "{}").unwrap();
    host.settings.plugin_service_account = Some("kube-system/sticky-ipam-node".parse().unwrap());
    let kubeconfig = host.settings.kubeconfig_path();
    fs::create_dir_all(kubeconfig.parent().unwrap()).unwrap();
    fs::write(&kubeconfig, "token").unwrap();
    let done = uninstall(&host.settings, false, DelConflist::OfItsAdd).unwrap();
    assert_eq!(done.removed.len(), 4, "{done}");
    assert_eq!(done.removed.first(), Some(&host.settings.conflist_path()), "the conflist goes first");
    assert_eq!(done.removed.last(), Some(&host.settings.plugin_path()), "the plugin goes last");
    assert_eq!(host.names("etc/cni/net.d"), ["05-cilium.conflist"]);
    assert_eq!(host.names("opt/cni/bin"), Vec::<String>::new());
    let again = uninstall(&host.settings, false, DelConflist::OfItsAdd).unwrap();
    assert_eq!(again, Removed::default());
    assert!(again.to_string().contains("nothing of ours"));
}

#[tokio::test]
async fn while_pods_have_addresses_their_plugin_and_credentials_stay_unless_forced() {
    let mut host = Host::new();
    host.installer().install_once(&blocks()).await.unwrap();
    host.settings.plugin_service_account = Some("kube-system/sticky-ipam-node".parse().unwrap());
    let kubeconfig = host.settings.kubeconfig_path();
    fs::create_dir_all(kubeconfig.parent().unwrap()).unwrap();
    fs::write(&kubeconfig, "token").unwrap();
    let record = attach(&host);
    let done = uninstall(&host.settings, false, DelConflist::OfItsAdd).unwrap();
    assert_eq!(done.removed, [host.settings.conflist_path()]);
    assert_eq!(done.kept, [kubeconfig.clone(), host.settings.plugin_path()]);
    assert!(done.to_string().contains("1 addresses") && done.to_string().contains("--force"), "{done}");
    let done = uninstall(&host.settings, true, DelConflist::OfItsAdd).unwrap();
    assert_eq!(done.removed, [kubeconfig, host.settings.plugin_path()]);
    assert!(record.exists(), "the store is never touched");
}
