//! The log: a line a verb, never on standard output, and never a reason to fail.

use std::fs;

use serde_json::json;

use crate::net::{Net, env, pod};

fn log_of(net: &Net) -> String {
    let files = fs::read_dir(net.beside("log")).unwrap().map(|entry| entry.unwrap().path());
    files.map(|path| fs::read_to_string(path).unwrap()).collect()
}

#[test]
fn a_verb_has_a_line_with_pod_container_address_reason_and_duration() {
    let mut net = Net::sticky();
    let file = net.beside("log/sticky.log");
    net.set("ipam.sticky.logFile", json!(file)).set("ipam.sticky.logLevel", json!("info"));
    let address = net.add_with("cont-1", "CNI_ARGS", &pod("db", "web-0", "u1")).ip();
    net.del("cont-1").silent();
    net.set("runtimeConfig", json!({"ips": ["10.9.9.9"]}));
    let seen = net.add("cont-2");
    seen.fails(101, &[]);
    assert_eq!(seen.stderr, "", "it is all in the file");
    let log = log_of(&net);
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines.len(), 3, "{log}");
    for word in ["ADD", "db/web-0", "cont-1", address.as_str(), "next free", "took_us="] {
        assert!(lines[0].contains(word), "no {word} in {}", lines[0]);
    }
    assert!(lines[1].contains("DEL") && lines[1].contains("kept for its pod"), "{}", lines[1]);
    assert!(lines[2].contains("ERROR") && lines[2].contains("10.9.9.9"), "{}", lines[2]);
}

#[test]
fn without_a_file_the_lines_go_to_standard_error_and_a_drop_in_is_quiet() {
    let mut net = Net::new();
    assert_eq!(net.add("a").stderr, "");
    net.set("ipam.sticky", json!({}));
    let seen = net.add("b");
    seen.ip();
    assert!(seen.stderr.contains("ADD") && seen.stderr.contains("10.1.0.3"), "{seen:?}");
}

#[test]
fn a_log_that_cannot_be_written_fails_nothing() {
    for file in ["/proc/no/such/log", "/dev/full/x", "/dev/null/log", "/"] {
        let mut net = Net::sticky();
        net.set("ipam.sticky.logFile", json!(file)).set("ipam.sticky.logLevel", json!("info"));
        let seen = net.add("a");
        assert_eq!(seen.ip(), "10.1.0.2", "{file}");
        assert!(seen.stderr.contains("log"), "{file}: {seen:?}");
    }
}

#[test]
fn old_log_files_are_removed_and_no_others() {
    let mut net = Net::sticky();
    let file = net.beside("log/sticky.log");
    net.set("ipam.sticky.logFile", json!(file)).set("ipam.sticky.logLevel", json!("info"));
    net.set("ipam.sticky.logMaxFiles", json!(2));
    fs::create_dir(net.beside("log")).unwrap();
    for name in ["sticky.log.2001-01-01", "sticky.log.2001-01-02", "sticky.log.old", "other.2001-01-01"] {
        fs::write(net.beside("log").join(name), "").unwrap();
    }
    net.add("a").ip();
    net.del("a").silent();
    let left = |name: &str| net.beside("log").join(name).exists();
    assert!(!left("sticky.log.2001-01-01") && left("sticky.log.old") && left("other.2001-01-01"));
}

#[test]
fn a_standard_error_that_takes_nothing_fails_no_verb() {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut net = Net::sticky();
    net.set("ipam.sticky.logLevel", json!("trace"));
    for verb in ["ADD", "CHECK", "DEL", "STATUS"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sticky-ipam"));
        command.env_clear().envs(env(verb, "a")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut child = command.stderr(full).spawn().unwrap();
        child.stdin.take().unwrap().write_all(net.config.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{verb}");
        assert_eq!(output.stdout.is_empty(), verb != "ADD", "{verb}");
    }
}
