//! install/install.sh: puts in, replaces while in use, removes only what is ours.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::json;
use tempfile::TempDir;

use crate::node::{Ended, PLUGIN, project};

struct Machine {
    folder: TempDir,
}

const NAME: &str = "10-ptp-cnitool.conflist";

impl Machine {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn plugin(&self) -> PathBuf {
        self.path("bin/sticky-ipam")
    }

    fn conflist(&self) -> PathBuf {
        self.path("conf").join(NAME)
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        let output = Command::new(project().join("install/install.sh"))
            .args(["--bin-dir", self.path("bin").to_str().unwrap()])
            .args(["--conf-dir", self.path("conf").to_str().unwrap()])
            .args(["--data-dir", self.path("data").to_str().unwrap()])
            .args(["--plugin", self.path("new-plugin").to_str().unwrap()])
            .args(arguments)
            .output()
            .unwrap();
        Ended::of(&output)
    }

    fn refused(&self, arguments: &[&str], told: &str) {
        let before = (fs::read(self.plugin()).ok(), fs::read(self.conflist()).ok());
        let ended = self.run(arguments);
        assert_eq!(ended.status, 1, "{ended:?}");
        assert!(ended.stderr.contains(told), "{told:?} is not in {ended:?}");
        assert_eq!(
            (fs::read(self.plugin()).ok(), fs::read(self.conflist()).ok()),
            before,
            "changed: {ended:?}"
        );
    }

    /// Makes the plugin to install: the one under test, and a newer one by a byte at its end.
    fn plugin_to_install(&self, newer: bool) {
        // Not over a file that runs, and not linked: the script must do with a plain copy.
        let _ = fs::remove_file(self.path("new-plugin"));
        fs::copy(PLUGIN, self.path("new-plugin")).unwrap();
        if newer {
            fs::OpenOptions::new()
                .append(true)
                .open(self.path("new-plugin"))
                .unwrap()
                .write_all(b"+")
                .unwrap();
        }
    }

    fn installed() -> Self {
        let machine = Self::new();
        machine.plugin_to_install(false);
        machine.run(&["install"]).well().has("installed ");
        machine
    }
}

#[test]
fn what_is_installed_is_whole_and_the_same_again_changes_nothing() {
    let machine = Machine::installed();
    assert_eq!(fs::read(machine.plugin()).unwrap(), fs::read(PLUGIN).unwrap());
    assert_eq!(fs::metadata(machine.plugin()).unwrap().mode() & 0o777, 0o755);
    assert_eq!(
        fs::read(machine.conflist()).unwrap(),
        fs::read(project().join("conflist").join(NAME)).unwrap()
    );
    machine.run(&["status"]).well().has("sticky-ipam is as it was installed").has("version: sticky-ipam 0.");
    machine.run(&["install"]).well();
    let names = fs::read_dir(machine.path("bin")).unwrap().count()
        + fs::read_dir(machine.path("conf")).unwrap().count();
    assert_eq!(names, 3, "plugin, conflist and record, and nothing left over");
}

#[test]
fn an_upgrade_replaces_the_plugin_while_it_is_in_use() {
    let machine = Machine::installed();
    let before = fs::metadata(machine.plugin()).unwrap().ino();
    let mut running = Command::new(machine.plugin())
        .env_clear()
        .envs([("CNI_COMMAND", "STATUS")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    machine.plugin_to_install(true);
    machine.refused(&["install"], "use upgrade");
    machine.run(&["upgrade"]).well().has("upgraded");
    assert_ne!(fs::metadata(machine.plugin()).unwrap().ino(), before);
    assert_eq!(fs::read(machine.plugin()).unwrap(), fs::read(machine.path("new-plugin")).unwrap());
    let config = json!({"cniVersion": "1.1.0", "name": "n",
        "ipam": {"dataDir": machine.path("data"), "ranges": [[{"subnet": "10.1.0.0/24"}]]}});
    running.stdin.take().unwrap().write_all(config.to_string().as_bytes()).unwrap();
    assert!(running.wait().unwrap().success(), "the one that ran has ended well");
    machine.run(&["status"]).well();
}

#[test]
fn a_foreign_conflist_or_plugin_is_never_clobbered() {
    let machine = Machine::new();
    machine.plugin_to_install(false);
    machine.refused(&["upgrade"], "use install");
    fs::create_dir(machine.path("conf")).unwrap();
    fs::write(machine.conflist(), "somebody's").unwrap();
    machine.refused(&["install"], "is there and not ours; nothing is changed");
    fs::remove_file(machine.conflist()).unwrap();
    fs::create_dir(machine.path("bin")).unwrap();
    fs::write(machine.plugin(), "somebody's").unwrap();
    machine.refused(&["install"], "is there and not ours; nothing is changed");
    fs::write(machine.path("conf/05-other.conflist"), "{}").unwrap();
    machine.run(&["install", "--force"]).well().has("05-other.conflist is there too");
    machine.run(&["uninstall"]).well();
    assert!(machine.path("conf/05-other.conflist").exists());
}

#[test]
fn a_changed_conflist_of_ours_is_replaced_only_by_force_and_kept_as_bak() {
    let machine = Machine::installed();
    let mine = fs::read_to_string(machine.conflist()).unwrap().replace("10.88", "10.99");
    fs::write(machine.conflist(), &mine).unwrap();
    machine.run(&["status"]).well().has("was changed since it was installed");
    let shipped = project().join("conflist").join(NAME);
    machine.refused(&["upgrade", "--conflist", shipped.to_str().unwrap()], "was changed since");
    machine.refused(&["uninstall"], "was changed since it was installed; nothing is removed");
    machine.run(&["upgrade"]).well();
    assert_eq!(fs::read_to_string(machine.conflist()).unwrap(), mine, "an upgrade leaves the conflist alone");
    machine.run(&["status"]).well().has("conflist was changed since");
    machine.run(&["upgrade", "--force", "--conflist", shipped.to_str().unwrap()]).well().has(".bak");
    assert_eq!(fs::read_to_string(machine.path("conf").join(format!("{NAME}.bak"))).unwrap(), mine);
    assert_eq!(fs::read(machine.conflist()).unwrap(), fs::read(shipped).unwrap());
}

#[test]
fn an_upgrade_to_another_conflist_takes_the_old_one_away() {
    let machine = Machine::installed();
    let other = project().join("conflist/delegated.conflist");
    machine.run(&["upgrade", "--conflist", other.to_str().unwrap()]).well();
    assert!(!machine.conflist().exists());
    assert!(machine.path("conf/delegated.conflist").exists());
    machine.run(&["uninstall"]).well();
    assert_eq!(fs::read_dir(machine.path("conf")).unwrap().count(), 0);
}

#[test]
fn a_changed_conflist_that_makes_room_for_another_is_kept_as_bak() {
    let machine = Machine::installed();
    fs::write(machine.conflist(), "mine").unwrap();
    let other = project().join("conflist/delegated.conflist");
    let upgrade = ["upgrade", "--conflist", other.to_str().unwrap()];
    machine.refused(&upgrade, "was changed since it was installed");
    let ended = machine.run(&[&upgrade[..], &["--force"]].concat()).well();
    assert!(!ended.stdout.contains("is there too"), "{ended:?}");
    ended.has("kept it as");
    assert_eq!(fs::read_to_string(machine.path("conf").join(format!("{NAME}.bak"))).unwrap(), "mine");
}

#[test]
fn uninstall_waits_for_containers_and_keeps_the_store() {
    let machine = Machine::installed();
    let verb = |verb: &str| {
        let mut child = Command::new(machine.plugin())
            .env_clear()
            .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", "eth0")])
            .envs([("CNI_NETNS", "/run/netns/not-there"), ("CNI_PATH", "/opt/cni/bin")])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let config = json!({"cniVersion": "1.1.0", "name": "n",
            "ipam": {"dataDir": machine.path("data"), "ranges": [[{"subnet": "10.1.0.0/24"}]]}});
        child.stdin.take().unwrap().write_all(config.to_string().as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
    };
    verb("ADD");
    machine.refused(&["uninstall"], "containers still have addresses (1)");
    verb("DEL");
    machine.run(&["uninstall"]).well().has("kept the store in");
    assert!(!machine.plugin().exists() && !machine.conflist().exists());
    assert!(machine.path("data/n").is_dir());
    assert_eq!(machine.run(&["status"]).status, 1);
    machine.refused(&["uninstall"], "nothing of ours is installed");
}

#[test]
fn what_cannot_be_installed_is_refused_with_the_cure() {
    let machine = Machine::new();
    machine.refused(&["install"], "make plugin");
    fs::write(machine.path("new-plugin"), "#!/bin/sh\nexit 0\n").unwrap();
    machine.refused(&["install"], "cannot be executed");
    machine.plugin_to_install(false);
    machine.refused(&["install", "--plugin", "/does/not/exist"], "there is no plugin /does/not/exist");
    machine.refused(&["install", "--conflist", "/does/not/exist.conflist"], "there is no conflist");
    assert_eq!(machine.run(&["remove"]).status, 2);
    assert_eq!(machine.run(&[]).status, 2);
    assert_eq!(machine.run(&["install", "--plugin"]).status, 2);
}
