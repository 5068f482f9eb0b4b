//! Cilium's agent on this node, asked over its socket whether it still has an endpoint with an address, and
//! whether an entry is in the pool that it has seen.
//!
//! A question of one line and an answer of a few, so a few lines of HTTP are enough. Must never wait longer
//! than a moment: Cilium's agent may hang, and the runtime waits for the plugin.

use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// How long the agent may take over one answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// No answer of interest is longer. The longest is the status of an agent with some hundred endpoints.
const LONGEST_ANSWER: u64 = 4 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndpointAnswer {
    /// It has an endpoint with it; this is what it says of it.
    There(String),
    Absent,
}

/// What Cilium says of an endpoint, as far as we ask. Empty where it says nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct EndpointInfo {
    pub container: String,
    pub namespace: String,
    pub pod: String,
    pub mac: String,
}

impl EndpointInfo {
    pub(crate) fn parse(answer: &str) -> Self {
        let answer: Value = serde_json::from_str(answer).unwrap_or_default();
        let text = |path: &str| answer.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        let mut container = text("/status/external-identifiers/container-id");
        if container.is_empty() {
            // Newer agents name an attachment: the container and its interface.
            let attachment = text("/status/external-identifiers/cni-attachment-id");
            container = attachment.split(':').next().unwrap_or_default().to_owned();
        }
        Self {
            container,
            namespace: text("/status/external-identifiers/k8s-namespace"),
            pod: text("/status/external-identifiers/k8s-pod-name"),
            mac: text("/status/networking/mac"),
        }
    }
}

/// Asks for the endpoint with this address.
/// Errors: the agent is not there, does not answer in time, or answers with something else.
pub fn endpoint(socket: &Path, address: IpAddr) -> io::Result<EndpointAnswer> {
    let family = if address.is_ipv4() { "ipv4" } else { "ipv6" };
    look_up(socket, &format!("{family}:{address}"))
}

/// Asks for the endpoint of a pod of this name.
pub(crate) fn endpoint_of_pod(socket: &Path, namespace: &str, name: &str) -> io::Result<EndpointAnswer> {
    look_up(socket, &format!("pod-name:{namespace}%2F{name}"))
}

fn look_up(socket: &Path, id: &str) -> io::Result<EndpointAnswer> {
    let (status, body) = ask(socket, "GET", &format!("/v1/endpoint/{id}"))?;
    match status {
        200 => Ok(EndpointAnswer::There(body)),
        404 => Ok(EndpointAnswer::Absent),
        other => Err(io::Error::other(format!("Cilium's agent answered {other} for {id}"))),
    }
}

/// Whether a barrier entry is in the pool that cilium-agent has seen. To find out, it is allocated for a
/// moment and released: never use this for an address that a pod may have.
pub fn knows(socket: &Path, key: IpAddr) -> io::Result<bool> {
    // Nothing depends on it if this fails.
    let give_back = || drop(ask(socket, "DELETE", &format!("/v1/ipam/{key}?pool=default")));
    let asked = ask(socket, "POST", &format!("/v1/ipam/{key}?owner=sticky-ipam&pool=default"));
    // Without an answer it may have been taken all the same.
    let (status, body) = asked.inspect_err(|_| give_back())?;
    let is_there = match status {
        200 => true,
        // An earlier caller stopped before it released the address.
        500 if body.contains("already in use") => true,
        500 if body.contains("not available") || body.contains("No IPs available") => false,
        other => return Err(io::Error::other(format!("Cilium's agent answered {other} for {key}: {body}"))),
    };
    if is_there {
        give_back();
    }
    Ok(is_there)
}

/// Whether cilium-agent has come as far as to answer.
/// Errors: the agent is not there, does not answer in time, or answers that it cannot.
pub(crate) fn answers(socket: &Path) -> io::Result<()> {
    get(socket, "/v1/healthz").map(drop)
}

/// What it answers to `GET path`.
/// Errors: the agent is not there, does not answer in time, or answers that it cannot.
pub(super) fn get(socket: &Path, path: &str) -> io::Result<String> {
    match ask(socket, "GET", path)? {
        (200, body) => Ok(body),
        (other, body) => Err(io::Error::other(format!("cilium-agent answered {other} for {path}: {body}"))),
    }
}

fn ask(socket: &Path, method: &str, path: &str) -> io::Result<(u16, String)> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // Version 1.0: the answer ends where the connection does.
    let asked = format!(
        "{method} {path} HTTP/1.0\r\nHost: localhost\r\nAccept: application/json\r\nContent-Length: 0\r\n\r\n"
    );
    stream.write_all(asked.as_bytes())?;
    let mut answer = Vec::new();
    stream.take(LONGEST_ANSWER).read_to_end(&mut answer)?;
    let text = String::from_utf8_lossy(&answer);
    let status = text.split(' ').nth(1).and_then(|word| word.parse().ok());
    let status = status.ok_or_else(|| io::Error::other("Cilium's agent answered what is not HTTP"))?;
    let body = text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default();
    Ok((status, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn answering(answer: &'static [u8]) -> (io::Result<EndpointAnswer>, String) {
        let address = "fd00::7".parse().unwrap();
        let (said, asked) = asked_in_turn(vec![answer], |path| endpoint(path, address));
        (said, asked.concat())
    }

    /// What came of it, and what the agent was asked, one question an answer.
    fn asked_in_turn<T>(answers: Vec<&'static [u8]>, work: impl FnOnce(&Path) -> T) -> (T, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let agent = std::thread::spawn(move || {
            let answer = |answer: &[u8]| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut asked = [0; 512];
                let length = stream.read(&mut asked).unwrap();
                stream.write_all(answer).unwrap();
                String::from_utf8_lossy(&asked[..length]).into_owned()
            };
            answers.into_iter().map(answer).collect()
        });
        (work(&path), agent.join().unwrap())
    }

    #[test]
    fn an_entry_is_known_or_not_and_the_probes_address_is_released() {
        let key: IpAddr = "240.0.1.2".parse().unwrap();
        let taken: &[u8] = b"HTTP/1.0 200 OK\r\n\r\n";
        let in_use: &[u8] = b"HTTP/1.0 500 Oh\r\n\r\n\"IP already in use\"";
        for known in [taken, in_use] {
            let (said, asked) = asked_in_turn(vec![known, taken], |path| knows(path, key));
            assert!(said.unwrap());
            assert!(
                asked[0].starts_with("POST /v1/ipam/240.0.1.2?owner=sticky-ipam&pool=default "),
                "{asked:?}"
            );
            assert!(asked[1].starts_with("DELETE /v1/ipam/240.0.1.2?pool=default "), "{asked:?}");
        }
        let unknown: &[u8] = b"HTTP/1.0 500 Oh\r\n\r\n\"IP 240.0.1.2 is not available\"";
        assert!(!asked_in_turn(vec![unknown], |path| knows(path, key)).0.unwrap());
        let disabled: &[u8] = b"HTTP/1.0 500 Oh\r\n\r\n\"IPv4 allocation disabled\"";
        let said = asked_in_turn(vec![disabled], |path| knows(path, key)).0.unwrap_err();
        assert!(said.to_string().contains("IPv4 allocation disabled"), "{said}");
    }

    #[test]
    fn an_answer_names_sandbox_pod_and_mac_or_nothing() {
        let whole = r#"{"id": 7, "status": {"external-identifiers": {"container-id": "c1", "k8s-namespace": "db",
            "k8s-pod-name": "db-0"}, "networking": {"mac": "0a:00:00:00:00:01", "host-mac": "0a:00:00:00:00:02"}}}"#;
        let about = EndpointInfo::parse(whole);
        assert_eq!((about.container.as_str(), about.namespace.as_str()), ("c1", "db"));
        assert_eq!((about.pod.as_str(), about.mac.as_str()), ("db-0", "0a:00:00:00:00:01"));
        let newer = r#"{"status": {"external-identifiers": {"cni-attachment-id": "c2:eth0"}}}"#;
        assert_eq!(EndpointInfo::parse(newer).container, "c2");
        assert_eq!(EndpointInfo::parse("nonsense"), EndpointInfo::default());
    }

    #[test]
    fn an_endpoint_is_present_absent_or_unknown() {
        let (said, asked) = answering(b"HTTP/1.0 200 OK\r\nX: y\r\n\r\n{\"id\": 7}");
        assert_eq!(said.unwrap(), EndpointAnswer::There("{\"id\": 7}".into()));
        assert!(asked.starts_with("GET /v1/endpoint/ipv6:fd00::7 HTTP/1.0\r\n"), "{asked}");
        assert_eq!(answering(b"HTTP/1.0 404 Not Found\r\n\r\n").0.unwrap(), EndpointAnswer::Absent);
        assert!(answering(b"HTTP/1.0 429 Too Many\r\n\r\n").0.is_err());
        assert!(answering(b"nonsense").0.is_err());
        assert!(endpoint(Path::new("/nowhere/at/all"), "10.0.0.1".parse().unwrap()).is_err());
    }
}
