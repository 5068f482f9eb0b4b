//! A data directory that is not what it should be, and files that somebody else left or took.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use nix::unistd::Uid;
use serde_json::json;

use crate::net::{Net, Seen, env, start};

/// As if the directory had been changed a moment later: file systems tell time in steps.
fn touch(directory: &Path) {
    let later = SystemTime::now() + Duration::from_secs(1);
    fs::File::open(directory).unwrap().set_modified(later).unwrap();
}

#[test]
fn a_data_directory_that_is_a_file_or_leads_out_of_its_tree_is_refused() {
    for verb in ["ADD", "DEL", "CHECK", "GC", "STATUS"] {
        let mut net = Net::new();
        net.config["cni.dev/valid-attachments"] = json!([]);
        let code = if verb == "STATUS" { 50 } else { 5 };
        fs::write(net.beside("data"), "").unwrap();
        net.verb(verb, "a").fails(code, &["data", "directory"]);
        fs::remove_file(net.beside("data")).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        symlink(elsewhere.path(), net.beside("data")).unwrap();
        net.verb(verb, "a").fails(code, &["symbolic link", &elsewhere.path().display().to_string()]);
        fs::remove_file(net.beside("data")).unwrap();
        fs::create_dir(net.beside("data")).unwrap();
        symlink(elsewhere.path(), net.file("")).unwrap_or_else(|_| {
            symlink(elsewhere.path(), net.beside("data/net")).unwrap();
        });
        net.verb(verb, "a").fails(code, &["symbolic link"]);
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0, "{verb}");
    }
}

#[test]
fn a_link_within_the_tree_is_followed() {
    let net = Net::new();
    fs::create_dir(net.beside("real")).unwrap();
    symlink("real", net.beside("data")).unwrap();
    net.add("a").ip();
    assert!(net.beside("real/net/10.1.0.2").is_file());
}

#[test]
fn links_in_place_of_the_stores_own_files_are_not_followed() {
    for name in ["lock", ".sticky/state", ".sticky"] {
        let net = Net::new();
        net.add("a").ip();
        let target = net.beside("precious");
        let path = net.file(name);
        if path.is_dir() {
            fs::create_dir(&target).unwrap();
            fs::remove_dir_all(&path).unwrap();
        } else {
            fs::write(&target, "precious").unwrap();
            fs::remove_file(&path).unwrap();
        }
        symlink(&target, &path).unwrap();
        net.add("b").fails(5, &[name]);
        if target.is_file() {
            assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
        } else {
            assert_eq!(fs::read_dir(&target).unwrap().count(), 0);
        }
    }
}

#[test]
fn a_directory_that_cannot_be_written_is_reported_with_path_and_cause() {
    // As root every directory can be written; /proc cannot even then.
    let mut net = Net::new();
    net.set("ipam.dataDir", json!("/proc/sys/no-such-directory"));
    net.add("a").fails(5, &["/proc/sys"]);
    net.del("a").silent();
}

#[test]
fn a_lock_that_is_held_is_waited_for_and_its_holder_is_named() {
    let mut net = Net::sticky();
    net.add("a").ip();
    net.set("ipam.sticky.lockTimeout", json!("50ms"));
    let lock = fs::File::open(net.file("lock")).unwrap();
    lock.lock().unwrap();
    let pid = std::process::id().to_string();
    for verb in ["ADD", "DEL", "CHECK"] {
        net.verb(verb, "a").fails(11, &["lock", &pid]);
    }
    net.gc(&[]).fails(11, &[&pid]);
    net.verb("STATUS", "").silent();
    net.set("ipam.sticky.lockTimeout", json!("5m"));
    let mut waiting = start(&env("ADD", "b"));
    std::io::Write::write_all(&mut waiting.stdin.take().unwrap(), net.config.to_string().as_bytes()).unwrap();
    assert!(waiting.try_wait().unwrap().is_none());
    drop(lock);
    assert_eq!(Seen::of(waiting).ip(), "10.1.0.3");
}

#[test]
fn a_store_of_a_newer_version_is_refused_and_left_alone() {
    let net = Net::new();
    net.add("a").ip();
    let newer = r#"{"version": 2, "whatever": true}"#;
    fs::write(net.file(".sticky/state"), newer).unwrap();
    for verb in ["ADD", "DEL", "CHECK"] {
        net.verb(verb, "a").fails(102, &["version 2", "upgrade"]);
    }
    net.verb("STATUS", "").fails(50, &["version 2"]);
    assert_eq!(fs::read_to_string(net.file(".sticky/state")).unwrap(), newer);
    assert_eq!(net.held(), ["10.1.0.2"]);
}

#[test]
fn files_that_are_no_records_are_set_aside_and_reported_their_addresses_are_free() {
    type Make = fn(&Path);
    let made: &[(&str, Make)] = &[
        ("empty", |path| fs::write(path, "").unwrap()),
        ("torn", |path| fs::write(path, "{\"addresses\":[\"10.1.0.2\"],\"state\":\"att").unwrap()),
        ("foreign", |path| fs::write(path, "hello").unwrap()),
        ("bytes", |path| fs::write(path, [0u8, 255, 254]).unwrap()),
        ("large", |path| fs::write(path, vec![b'{'; 1 << 20]).unwrap()),
        ("directory", |path| fs::create_dir_all(path.join("x")).unwrap()),
        ("link to nothing", |path| symlink("/no/such/file", path).unwrap()),
        ("link to a secret", |path| symlink("/etc/passwd", path).unwrap()),
        ("link to a directory", |path| symlink("/", path).unwrap()),
        ("pipe", |path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap()),
        ("socket", |path| drop(std::os::unix::net::UnixListener::bind(path).unwrap())),
        ("another's record", |path| {
            fs::write(path, r#"{"addresses":["10.1.0.9"],"state":"kept","container":"c","interface":"eth0","since":{"wall":"2025-01-01T00:00:00Z","uptime":1,"boot":"b"}}"#).unwrap();
        }),
    ];
    for (kind, make) in made {
        for known in [false, true] {
            let net = Net::new();
            if known {
                net.add("first").ip();
                net.del("first").silent();
                // The search goes on behind the first; let it come round.
                for id in ["x3", "x4", "x5", "x6"] {
                    net.add(id).ip();
                }
            } else {
                fs::create_dir_all(net.file("")).unwrap();
            }
            make(&net.file("10.1.0.2"));
            touch(&net.file(""));
            let seen = net.add("a");
            assert_eq!(seen.ip(), "10.1.0.2", "{kind}");
            assert!(seen.stderr.contains("set a file aside"), "{kind}: {seen:?}");
            let aside = fs::read_dir(net.file(".sticky/aside")).unwrap().count();
            assert_eq!(aside, 1, "{kind}");
            net.verb("CHECK", "a").silent();
        }
    }
}

#[test]
fn a_bad_file_under_a_known_address_is_seen_though_no_directory_changed() {
    let net = Net::new();
    net.add("a").ip();
    fs::write(net.file("10.1.0.2"), "overwritten").unwrap();
    assert_eq!(net.add("a").ip(), "10.1.0.3", "nobody can tell whose it was");
    let seen = net.add_with("b", "CNI_ARGS", "IP=10.1.0.2");
    assert_eq!(seen.ip(), "10.1.0.2");
    assert!(seen.stderr.contains("set a file aside"), "{seen:?}");
}

#[test]
fn a_record_removed_by_hand_frees_its_address_and_no_more() {
    let net = Net::sticky();
    net.add_pod("a", "web-0", "u1").ip();
    net.add("b").ip();
    fs::remove_file(net.file("10.1.0.2")).unwrap();
    touch(&net.file(""));
    net.verb("CHECK", "a").fails(3, &[]);
    net.verb("CHECK", "b").silent();
    net.del("a").silent();
    let rest: Vec<String> = (0..4).map(|n| net.add(&format!("c{n}")).ip()).collect();
    assert!(rest.contains(&"10.1.0.2".to_owned()), "{rest:?}");
    net.add("full").fails(100, &[]);
}

#[test]
fn half_a_record_removed_by_hand_is_never_answered_for_twice() {
    let mut net = Net::sticky();
    net.ranges(json!([[{"subnet": "10.1.0.0/30"}], [{"subnet": "fd00::/64"}]]));
    assert_eq!(net.add_pod("a", "web-0", "u1").ips(), ["10.1.0.2", "fd00::2"]);
    fs::remove_file(net.file("10.1.0.2")).unwrap();
    touch(&net.file(""));
    assert_eq!(net.add("b").ips(), ["10.1.0.2", "fd00::3"]);
    net.add_pod("a", "web-0", "u1").fails(101, &["DEL"]);
    net.del("a").silent();
    net.verb("CHECK", "b").silent();
    net.add_pod("c", "web-0", "u1").fails(100, &[]);
    net.del("b").silent();
    assert_eq!(net.add_pod("c", "web-0", "u1").ips(), ["10.1.0.2", "fd00::2"]);
}

#[test]
fn what_is_derived_may_be_removed_at_any_time() {
    for name in [".sticky", ".sticky/attachments", ".sticky/claimants", ".sticky/bitmaps"] {
        let net = Net::sticky();
        let sticky = net.add_pod("a", "web-0", "u1").ip();
        let dynamic = net.add("b").ip();
        fs::remove_dir_all(net.file(name)).unwrap();
        net.verb("CHECK", "a").silent();
        net.verb("CHECK", "b").silent();
        net.add("c").ip();
        net.del("b").silent();
        net.del("a").silent();
        assert_eq!(net.add_pod("d", "web-0", "u1").ip(), sticky, "{name}");
        assert!(!net.held().contains(&dynamic), "{name}");
    }
}

#[test]
fn a_full_disk_is_reported_with_the_cure_and_a_little_space_lets_the_pod_start() {
    let mut net = Net::new();
    let mount = net.beside("small");
    fs::create_dir(&mount).unwrap();
    // In a mount namespace of its own, which ends with the shell: nothing of it is seen outside.
    net.set("ipam.dataDir", json!(mount.join("data")));
    let script = r#"
        set -eu
        mount -t tmpfs -o size=64k,nr_inodes=1k tmpfs "$1"
        mkdir "$1/data"
        dd if=/dev/zero of="$1/filler" bs=4k count=64 2>/dev/null || true
        "$2" <"$3" >"$4" && exit 9
        rm "$1/filler"
        "$2" <"$3" >"$5"
        ls "$1/data/net" >"$6"
    "#;
    let config = net.beside("config");
    fs::write(&config, net.config.to_string()).unwrap();
    let outs = ["failed", "worked", "files"].map(|name| net.beside(name));
    let status = Command::new("unshare")
        .args(["--user", "--map-root-user"].iter().filter(|_| !Uid::effective().is_root()))
        .args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"])
        .arg(&mount)
        .arg(env!("CARGO_BIN_EXE_sticky-ipam"))
        .arg(&config)
        .args(&outs)
        .envs(env("ADD", "a"))
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    let failed = fs::read_to_string(&outs[0]).unwrap();
    let error: serde_json::Value = serde_json::from_str(&failed).unwrap();
    assert_eq!(error["code"], 5, "{failed}");
    assert!(error["msg"].as_str().unwrap().contains("free some space"), "{failed}");
    assert!(fs::read_to_string(&outs[1]).unwrap().contains("10.1.0.2/29"));
    assert!(fs::read_to_string(&outs[2]).unwrap().contains("10.1.0.2"));
}
