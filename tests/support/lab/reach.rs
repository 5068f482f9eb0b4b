//! Whether a pod answers to everyone who must reach it: pods and hosts of both nodes.

use std::thread;
use std::time::{Duration, Instant};

use super::stage::Stage;
use super::workloads::{plain, pod, spec};
use serde_json::json;

/// How long after Ready a moved pod may be out of reach.
const SOON: Duration = Duration::from_secs(5);
/// When an attempt has failed for good.
const PATIENCE: Duration = Duration::from_secs(60);

pub const NODES: [&str; 2] = ["node-1", "node-2"];

/// The client pod of a node.
pub fn client(node: &str) -> String {
    format!("client-{node}")
}

/// A pod on each node that asks.
pub fn start_clients(stage: &Stage, namespace: &str) {
    for node in NODES {
        stage.api.create(pod(namespace, &client(node), plain("client"), json!({}), spec(Some(node))));
    }
    for node in NODES {
        stage.api.ready(namespace, &client(node));
    }
}

/// The way by which a pod is asked for its page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum From<'a> {
    Pod(&'a str),
    Host(&'a str),
}

fn ask(stage: &Stage, namespace: &str, from: From<'_>, address: &str) -> Result<(), String> {
    let page = match from {
        From::Pod(node) => {
            let pod = format!("{namespace}/{}", client(node));
            let get = format!(r"printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 2 {address} 8080");
            stage.lab.attempt(&["pod-exec", &pod, "sh", "-c", &get])
        }
        From::Host(node) => {
            let host = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
            let url = format!("http://{host}:8080/");
            stage.lab.attempt(&["on", node, "curl", "-sfg", "--max-time", "2", &url])
        }
    }?;
    if page.split_whitespace().any(|own| own == address) {
        Ok(())
    } else {
        Err(format!("another pod: {page}"))
    }
}

/// How long after `since` each of those first reached the address: until the attempt began that succeeded.
pub fn times<'a>(
    stage: &Stage,
    namespace: &str,
    from: &[From<'a>],
    address: &str,
    since: Instant,
) -> Vec<(From<'a>, Result<Duration, String>)> {
    thread::scope(|scope| {
        let asked: Vec<_> = from
            .iter()
            .map(|from| {
                let from = *from;
                scope.spawn(move || {
                    loop {
                        let began = Instant::now();
                        match ask(stage, namespace, from, address) {
                            Ok(()) => return (from, Ok(began.duration_since(since))),
                            Err(why) if since.elapsed() > PATIENCE => return (from, Err(why)),
                            Err(_) => {}
                        }
                    }
                })
            })
            .collect();
        asked.into_iter().map(|thread| thread.join().expect("an asker")).collect()
    })
}

/// Both pods and both hosts.
pub fn everyone() -> Vec<From<'static>> {
    NODES.into_iter().flat_map(|node| [From::Pod(node), From::Host(node)]).collect()
}

/// Fails unless all of those reach the address soon after the pod was seen to be Ready, which is now.
pub fn soon(stage: &Stage, namespace: &str, from: &[From<'_>], address: &str) {
    let times = times(stage, namespace, from, address, Instant::now());
    for (who, time) in &times {
        assert!(
            time.as_ref().is_ok_and(|time| *time <= SOON),
            "{address} is not reached by {who:?} within {SOON:?} of Ready: {times:?}"
        );
    }
}
