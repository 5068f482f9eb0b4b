//! Many processes at once.

use std::collections::BTreeSet;
use std::io::Write;

use serde_json::json;

use crate::net::{Net, Seen, env, pod, start};

/// Starts them all, and only then lets any of them go on by closing its standard input.
fn at_once(net: &Net, calls: &[(&str, String, Option<String>)]) -> Vec<Seen> {
    let config = net.config.to_string();
    let mut started: Vec<_> = calls
        .iter()
        .map(|(verb, id, args)| {
            let mut env = env(verb, id);
            env.extend(args.iter().map(|args| ("CNI_ARGS".to_owned(), args.clone())));
            let mut child = start(&env);
            child.stdin.as_mut().unwrap().write_all(config.as_bytes()).unwrap();
            child
        })
        .collect();
    for child in &mut started {
        drop(child.stdin.take());
    }
    started.into_iter().map(Seen::of).collect()
}

#[test]
fn two_hundred_adds_at_once_have_distinct_addresses_and_none_is_lost() {
    let mut net = Net::new();
    net.set("ipam.subnet", json!("10.1.0.0/24"))
        .set("ipam.sticky", json!({"logLevel": "error", "lockTimeout": "5m"}));
    let calls: Vec<_> = (0..200).map(|n| ("ADD", format!("c{n}"), None)).collect();
    let answered: BTreeSet<String> = at_once(&net, &calls).iter().map(Seen::ip).collect();
    assert_eq!(answered.len(), 200);
    assert_eq!(net.held().into_iter().collect::<BTreeSet<_>>(), answered);
    for n in [0, 99, 199] {
        net.verb("CHECK", &format!("c{n}")).silent();
    }
}

#[test]
fn adds_dels_and_gcs_at_once_leave_what_they_should() {
    let mut net = Net::sticky();
    net.set("ipam.subnet", json!("10.1.0.0/25")).set("ipam.sticky.lockTimeout", json!("5m"));
    let valid: Vec<_> = (0..40)
        .flat_map(|n| [format!("new{n}"), format!("stay{n}")])
        .map(|id| json!({"containerID": id, "ifname": "eth0"}))
        .collect();
    for n in 0..10 {
        net.add(&format!("stay{n}")).ip();
        net.add(&format!("go{n}")).ip();
        net.add(&format!("stale{n}")).ip();
    }
    net.config["cni.dev/valid-attachments"] = json!(valid);
    let mut calls = Vec::new();
    for n in 0..20 {
        let args = (n % 2 == 0).then(|| pod("db", &format!("p{n}"), "u"));
        calls.push(("ADD", format!("new{n}"), args));
        if n < 10 {
            calls.push(("DEL", format!("go{n}"), None));
            calls.push(("GC", String::new(), None));
            calls.push(("CHECK", format!("stay{n}"), None));
        }
    }
    let seen = at_once(&net, &calls);
    for ((verb, id, _), seen) in calls.iter().zip(&seen) {
        assert_eq!(seen.status, 0, "{verb} {id}: {seen:?}");
    }
    for n in 0..10 {
        net.verb("CHECK", &format!("stay{n}")).silent();
        net.verb("CHECK", &format!("stale{n}")).fails(3, &[]);
    }
    let answers: BTreeSet<String> =
        calls.iter().zip(&seen).filter(|((verb, ..), _)| *verb == "ADD").map(|(_, seen)| seen.ip()).collect();
    assert_eq!(answers.len(), 20);
    assert_eq!(net.held().len(), 30, "twenty new ones and ten that stayed");
}
