//! Another plugin run in our place, as the specification's section on delegation has it.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::json;

use crate::net::{Net, Seen, env};

/// A delegate that writes down its verbs and does what `body` says.
fn delegating(verb: &str, body: &str) -> (Seen, Vec<String>) {
    let mut net = Net::new();
    let (folder, calls) = (net.beside("bin"), net.beside("calls"));
    fs::create_dir(&folder).unwrap();
    let script = format!("#!/bin/sh\ncat >/dev/null\necho $CNI_COMMAND >>{}\n{body}\n", calls.display());
    fs::write(folder.join("other"), script).unwrap();
    fs::set_permissions(folder.join("other"), fs::Permissions::from_mode(0o755)).unwrap();
    net.config.as_object_mut().unwrap().remove("ipam");
    net.config["delegate"] = json!({"type": "other"});
    let mut env = env(verb, "a");
    env.insert("CNI_PATH".into(), folder.display().to_string());
    env.insert("PATH".into(), "/usr/bin:/bin".into());
    let seen = net.call(&env);
    let calls = fs::read_to_string(calls).unwrap_or_default();
    (seen, calls.lines().map(str::to_owned).collect())
}

#[test]
fn what_a_delegate_says_to_people_reaches_them() {
    let (seen, calls) = delegating("ADD", "echo a word >&2; echo '{\"ips\": []}'");
    assert_eq!(seen.json(), json!({"ips": []}));
    assert!(seen.stderr.contains("a word"), "{seen:?}");
    assert_eq!(calls, ["ADD"]);
}

#[test]
fn a_delegate_whose_add_failed_is_told_to_clean_up() {
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
