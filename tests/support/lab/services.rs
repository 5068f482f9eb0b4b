//! Services and network policies, and who reaches what through them: pods, hosts of nodes, a host beyond the
//! nodes. Of the field profile: the lean one has nothing that makes a Service work.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::api::named;
use super::reach::client;
use super::stage::Stage;

/// The port of a Service in the cluster; its pods have 8080.
pub const PORT: u16 = 80;
/// The host beyond the nodes, which knows no address of a pod.
pub const OUTSIDE_ADDRESS: &str = "192.0.2.10";
/// How long a change may take until it is true on every node.
const SOON: Duration = Duration::from_secs(30);

/// Who asks.
#[derive(Clone, Debug, PartialEq)]
pub enum From {
    /// This pod of the namespace that is asked about.
    Pod(String),
    /// The host of a node.
    Host(String),
    /// The host beyond the nodes.
    Outside,
}

/// The client pod and the host of each of these nodes.
pub fn pods_and_hosts(nodes: &[String]) -> Vec<From> {
    nodes.iter().flat_map(|node| [From::Pod(client(node)), From::Host(node.clone())]).collect()
}

/// A Service with a port on each node, for the pods with the label `app`.
pub fn service(namespace: &str, app: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": namespace, "name": app},
        "spec": {"type": "NodePort", "selector": {"app": app}, "ports": [{"port": PORT, "targetPort": 8080}]},
    })
}

/// The ClusterIP of a Service and its port on each node.
pub fn entrances(stage: &Stage, namespace: &str, name: &str) -> (String, u16) {
    let service = stage.api.get(named("v1", "Service", namespace, name)).expect("the Service is there");
    let port = service["spec"]["ports"][0]["nodePort"].as_u64().expect("a port on the nodes");
    let address = service["spec"]["clusterIP"].as_str().expect("a ClusterIP");
    (address.to_owned(), u16::try_from(port).expect("a port"))
}

/// Only pods with the label `app: from` may speak to those with `app`.
pub fn only_from(namespace: &str, app: &str, from: &str) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": namespace, "name": app},
        "spec": {
            "podSelector": {"matchLabels": {"app": app}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": from}}}]}],
        },
    })
}

/// What is said at `address:port/page`.
pub fn get(
    stage: &Stage,
    namespace: &str,
    from: &From,
    address: &str,
    port: u16,
    page: &str,
) -> Result<String, String> {
    let url = format!("http://{address}:{port}/{page}");
    let curl = |place: &str| stage.lab.attempt(&["on", place, "curl", "-sf", "--max-time", "2", &url]);
    match from {
        From::Pod(pod) => {
            let get = format!(r"printf 'GET /{page} HTTP/1.0\r\n\r\n' | nc -w 2 {address} {port}");
            let said = stage.lab.attempt(&["pod-exec", &format!("{namespace}/{pod}"), "sh", "-c", &get])?;
            // After the head.
            said.lines().last().map(|line| line.trim().to_owned()).ok_or_else(|| "no answer".to_owned())
        }
        From::Host(node) => curl(node),
        From::Outside => curl("outside"),
    }
}

/// One question: who asks, what, and what must be answered.
#[derive(Clone, Debug)]
pub struct Question {
    pub from: From,
    pub address: String,
    pub port: u16,
    pub page: &'static str,
    pub answer: String,
}

/// Fails unless each is answered as it must be soon, all at once.
pub fn answered(stage: &Stage, namespace: &str, questions: &[Question]) {
    let since = Instant::now();
    let ask = |question: &Question| {
        loop {
            let said = get(stage, namespace, &question.from, &question.address, question.port, question.page);
            match said {
                Ok(said) if said == question.answer => return None,
                other if since.elapsed() > SOON => return Some(format!("{question:?}: {other:?}")),
                _ => {}
            }
        }
    };
    let wrong: Vec<String> = thread::scope(|scope| {
        let asked: Vec<_> = questions.iter().map(|question| scope.spawn(move || ask(question))).collect();
        asked.into_iter().filter_map(|thread| thread.join().expect("an asker")).collect()
    });
    assert!(wrong.is_empty(), "after {SOON:?}:\n{}", wrong.join("\n"));
}
