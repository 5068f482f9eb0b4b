//! What the store derives from its records, taken away or replaced by somebody: no verb may hang, leave the
//! directory, or take it for a reboot.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::json;

use crate::net::{Net, Seen, env, start};

/// Runs a verb, which must end by itself.
fn ends(net: &Net, verb: &str, id: &str) -> Seen {
    let mut child = start(&env(verb, id));
    child.stdin.take().unwrap().write_all(net.config.to_string().as_bytes()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{verb} hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Seen::of(child)
}

#[test]
fn a_full_network_without_its_bitmap_is_full_and_not_an_endless_search() {
    let net = Net::new();
    for id in ["a", "b", "c", "d", "e"] {
        net.add(id).ip();
    }
    fs::write(net.file(".sticky/bitmaps/10.1.0.0"), "").unwrap();
    ends(&net, "ADD", "f").fails(100, &["10.1.0.1-10.1.0.6"]);
    net.del("c").silent();
    assert_eq!(ends(&net, "ADD", "f").ip(), "10.1.0.4");
}

#[test]
fn a_pipe_in_the_place_of_a_file_of_ours_stops_no_verb() {
    for name in [".sticky/state", ".sticky/bitmaps/10.1.0.0"] {
        let net = Net::new();
        net.add("a").ip();
        fs::remove_file(net.file(name)).unwrap();
        mkfifo(&net.file(name), Mode::S_IRWXU).unwrap();
        for verb in ["STATUS", "ADD", "CHECK", "DEL"] {
            ends(&net, verb, "b");
        }
        assert!(net.file("10.1.0.2").is_file());
    }
}

#[test]
fn a_folder_of_ours_that_leads_elsewhere_is_refused() {
    for name in ["attachments", "claimants", "bitmaps"] {
        let net = Net::sticky();
        net.add_pod("a", "db-0", "u").ip();
        let folder = net.file(".sticky").join(name);
        fs::remove_dir_all(&folder).unwrap();
        fs::create_dir(net.beside("elsewhere")).unwrap();
        symlink(net.beside("elsewhere"), &folder).unwrap();
        net.add_pod("b", "db-1", "v").fails(5, &["symbolic link", name]);
        assert_eq!(fs::read_dir(net.beside("elsewhere")).unwrap().count(), 0, "{name}");
    }
}

#[test]
fn a_mistake_in_our_settings_does_not_make_del_take_it_for_a_reboot() {
    let mut net = Net::new();
    fs::write(net.beside("boot"), "the boot").unwrap();
    let boot = net.beside("boot");
    net.set("ipam.sticky", json!({"bootIDFile": boot, "logLevel": "error"}));
    net.add("live").ip();
    net.set("ipam.sticky", json!({"bootIDFile": boot, "logLevel": "error", "retentoin": "1h"}));
    net.del("other").silent();
    net.gc(&["live"]).silent();
    net.set("ipam.sticky", json!({"bootIDFile": boot, "logLevel": "error"}));
    net.verb("CHECK", "live").silent();
    // Which boot it is cannot be guessed: what is freed by mistake is given out twice.
    for wrong in [json!("relative"), json!(7)] {
        net.set("ipam.sticky", json!({"bootIDFile": wrong, "logLevel": "error"}));
        let seen = net.del("other");
        assert_eq!(seen.status, 1, "{seen:?}");
        assert!(seen.stdout.contains("ipam.sticky.bootIDFile"), "{seen:?}");
    }
}

#[test]
fn more_range_sets_than_one_change_can_record_are_refused_before_anything_is_taken() {
    let mut net = Net::sticky();
    let sets = |count: u32| -> serde_json::Value {
        let subnet = |i| format!("fd00:1111:2222:3333:4444:5555:{:x}:0/112", 0x6000 + i);
        (0..count).map(|i| json!([{"subnet": subnet(i)}])).collect()
    };
    let (id, name) = ("c".repeat(195), "p".repeat(190));
    net.ranges(sets(12));
    for _ in 0..2 {
        assert_eq!(net.add_pod(&id, &name, "u").ips().len(), 12);
        net.del(&id).silent();
    }
    net.ranges(sets(13));
    net.add_pod(&id, &name, "u").fails(7, &["ipam.ranges", "13", "12"]);
}

#[test]
fn an_unfinished_change_removes_no_file_of_host_locals_that_got_the_inode_of_ours() {
    use std::os::unix::fs::MetadataExt;
    let net = Net::new();
    net.add("a").ip();
    let theirs = net.file("10.1.0.3");
    fs::write(&theirs, "theirs\r\neth0").unwrap();
    let page = net.file(".sticky/state");
    let mut state: serde_json::Value = serde_json::from_slice(&fs::read(&page).unwrap()).unwrap();
    let inode = fs::metadata(&theirs).unwrap().ino();
    state["change"] = json!({"place": [], "remove": [{"name": "10.1.0.3", "inode": inode}]});
    fs::write(&page, state.to_string()).unwrap();
    net.verb("CHECK", "theirs").silent();
    assert_eq!(net.add("b").ip(), "10.1.0.4");
}
