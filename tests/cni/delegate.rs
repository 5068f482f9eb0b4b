//! Another plugin run in our place, as the specification's section on delegation has it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::process::ChildStderr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::json;

use crate::net::{Net, Seen, env, start};

/// A delegate that writes down its verbs and does what `body` says.
fn delegating(verb: &str, body: &str) -> (Seen, Vec<String>) {
    let (net, env) = with_delegate(verb, body);
    let seen = net.call(&env);
    let calls = fs::read_to_string(net.beside("calls")).unwrap_or_default();
    (seen, calls.lines().map(str::to_owned).collect())
}

fn with_delegate(verb: &str, body: &str) -> (Net, BTreeMap<String, String>) {
    with_delegate_of("other", verb, body)
}

fn with_delegate_of(kind: &str, verb: &str, body: &str) -> (Net, BTreeMap<String, String>) {
    let mut net = Net::new();
    let (folder, calls) = (net.beside("bin"), net.beside("calls"));
    fs::create_dir(&folder).unwrap();
    let script = format!("#!/bin/sh\ncat >/dev/null\necho $CNI_COMMAND >>{}\n{body}\n", calls.display());
    fs::write(folder.join(kind), script).unwrap();
    fs::set_permissions(folder.join(kind), fs::Permissions::from_mode(0o755)).unwrap();
    net.config.as_object_mut().unwrap().remove("ipam");
    net.config["delegate"] = json!({"type": kind});
    let mut env = env(verb, "a");
    env.insert("CNI_PATH".into(), folder.display().to_string());
    env.insert("PATH".into(), "/usr/bin:/bin".into());
    (net, env)
}

#[test]
fn what_a_delegate_says_to_people_reaches_them() {
    let (seen, calls) = delegating("ADD", "echo a word >&2; echo '{\"ips\": []}'");
    assert_eq!(seen.json(), json!({"ips": []}));
    assert!(seen.stderr.contains("a word"), "{seen:?}");
    assert_eq!(calls, ["ADD"]);
}

#[test]
fn cilium_cni_collects_no_garbage_in_its_short_life_unless_the_runtime_says_how() {
    let collecting_of = |kind: &str, set: &[(&str, &str)]| {
        let (net, mut env) =
            with_delegate_of(kind, "ADD", "echo \"$GOGC $GOMEMLIMIT\" >&2; echo '{\"ips\": []}'");
        env.extend(set.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        net.call(&env).stderr.trim().to_owned()
    };
    assert_eq!(collecting_of("other", &[]), "", "it may be older than these variables");
    let collecting = |set: &[(&str, &str)]| collecting_of("cilium-cni", set);
    assert_eq!(collecting(&[]), "off 128MiB");
    assert_eq!(collecting(&[("GOGC", "50")]), "50");
    assert_eq!(collecting(&[("GOMEMLIMIT", "1GiB")]), "1GiB");
}

#[test]
fn a_delegate_whose_add_failed_gets_a_del() {
    for body in ["echo '{\"code\": 11, \"msg\": \"later\"}'; exit 1", "echo nonsense", "exit 3"] {
        let (seen, calls) = delegating("ADD", body);
        seen.fails(if body.contains("11") { 11 } else { 104 }, &[]);
        assert_eq!(calls, ["ADD", "DEL"], "{body}");
    }
    for verb in ["DEL", "CHECK", "GC", "STATUS"] {
        let (seen, calls) = delegating(verb, "echo '{\"code\": 7, \"msg\": \"no\"}'; exit 1");
        seen.fails(7, &["no"]);
        assert_eq!(calls, [verb]);
    }
}

/// Whether everybody who could write there is gone.
fn is_at_its_end(stderr: &ChildStderr) -> bool {
    let mut looked_at = [PollFd::new(stderr.as_fd(), PollFlags::POLLIN)];
    poll(&mut looked_at, PollTimeout::ZERO).unwrap();
    looked_at[0].revents().unwrap().contains(PollFlags::POLLHUP)
}

#[test]
fn a_runtime_sees_the_end_of_a_killed_plugin_only_with_its_delegates() {
    // By itself it ends after a minute, should this test fail before it opens the gate.
    let (net, env) = with_delegate("ADD", "timeout 60 cat ${0%/*}/../gate");
    let gate = net.beside("gate");
    mkfifo(&gate, Mode::S_IRWXU).unwrap();
    let mut plugin = start(&env);
    plugin.stdin.take().unwrap().write_all(net.config.to_string().as_bytes()).unwrap();
    let since = Instant::now();
    while !fs::read_to_string(net.beside("calls")).is_ok_and(|calls| calls.contains("ADD")) {
        assert!(since.elapsed() < Duration::from_secs(60), "the delegate does not start");
        sleep(Duration::from_millis(5));
    }
    plugin.kill().unwrap();
    plugin.wait().unwrap();
    let mut stderr = plugin.stderr.take().unwrap();
    assert!(!is_at_its_end(&stderr), "a DEL would come while the delegate's ADD is at work");
    fs::write(&gate, "go on").unwrap();
    stderr.read_to_end(&mut Vec::new()).unwrap();
    assert!(is_at_its_end(&stderr));
}
