//! The agent's flags and its manifest say the same.

use std::fs;
use std::path::Path;

use clap::Parser;
use serde_json::Value;
use sticky_ipam::agent::flags::AgentCommandLine;

use crate::node::project;

fn daemon_set() -> Value {
    let text = fs::read_to_string(project().join("packaging/agent.yaml")).unwrap();
    serde_saphyr::from_str(&text).unwrap()
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().unwrap().iter().map(|item| item.as_str().unwrap())
}

#[test]
fn the_manifests_flags_are_understood_and_its_mounts_are_where_the_agent_looks() {
    let pod = &daemon_set()["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let words = std::iter::once("sticky-ipam-agent").chain(strings(&container["args"]));
    let line = AgentCommandLine::try_parse_from(words).unwrap();
    let settings = line.settings;
    let mounts: Vec<&Value> = container["volumeMounts"].as_array().unwrap().iter().collect();
    let covers = |path: &Path, to_write: bool| {
        let path = settings.host_root.join(path.strip_prefix("/").unwrap());
        mounts.iter().any(|mount| {
            let writable = mount["readOnly"] != true;
            path.starts_with(mount["mountPath"].as_str().unwrap()) && (writable || !to_write)
        })
    };
    for path in
        [&settings.cni_bin_dir, &settings.cni_conf_dir, &settings.plugin_kubeconfig, &settings.data_dir]
    {
        assert!(covers(path, true), "{} is not mounted to be written", path.display());
    }
    assert!(covers(&settings.cilium_socket, false), "Cilium's socket is not mounted");
    for mount in &mounts {
        let volume = pod["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == mount["name"]);
        let on_host = volume.expect("every mount has its volume")["hostPath"]["path"].as_str().unwrap();
        let seen = mount["mountPath"].as_str().unwrap().strip_prefix("/host").unwrap();
        // /var/run is /run on every node that has systemd.
        assert_eq!(seen.trim_start_matches("/var"), on_host.trim_start_matches("/var"));
    }
    for probe in ["livenessProbe", "readinessProbe"] {
        let get = &container[probe]["httpGet"];
        assert_eq!(get["port"], settings.server.metrics_address.port());
        assert_eq!(get["host"], settings.server.metrics_address.ip().to_string());
    }
    let account = settings.plugin_service_account.unwrap().to_string();
    let roles = fs::read_to_string(project().join("packaging/rbac.yaml")).unwrap();
    let accounts: Vec<Value> = serde_saphyr::from_multiple(&roles).unwrap();
    let named = accounts.iter().filter(|object| object["kind"] == "ServiceAccount").map(|object| {
        let metadata = &object["metadata"];
        format!("{}/{}", metadata["namespace"].as_str().unwrap(), metadata["name"].as_str().unwrap())
    });
    assert!(named.into_iter().any(|name| name == account), "rbac.yaml has no account {account}");
}
