//! Cilium's agent on this node, asked over its socket whether it still has an endpoint with an address, and
//! whether an entry is in the pool that it has seen.
//!
//! A question of one line and an answer of a few, so a few lines of HTTP are enough. Must never wait longer
//! than a moment: Cilium's agent may hang, and the runtime waits for the plugin.
//!
//! Only what every version from 1.17 on understands is asked: an endpoint by its address or by the name of
//! its CiliumEndpoint, which is the pod's. What an endpoint says of itself differs: since 1.20 it names its
//! attachment (container and interface) and no pod any more.

use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};

/// How long one question may take, from connecting to the end of the answer: cilium-agent needs milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
/// No answer of interest is longer. The longest is the status of an agent with some hundred endpoints.
const LONGEST_ANSWER: usize = 4 << 20;

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
    /// Its interface in the container.
    pub interface: String,
    pub addresses: Vec<IpAddr>,
    pub mac: String,
    /// Namespace and name of its pod, for messages: since 1.20 no endpoint has it.
    pub pod: String,
}

impl EndpointInfo {
    pub(crate) fn parse(answer: &str) -> Self {
        let answer: Value = serde_json::from_str(answer).unwrap_or_default();
        let text = |path: &str| answer.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        // The container and its interface; without the interface where Cilium does not know that.
        let attachment = text("/status/external-identifiers/cni-attachment-id");
        let (container, interface) = attachment.split_once(':').unwrap_or((&attachment, ""));
        let mut container = container.to_owned();
        if container.is_empty() {
            // Up to 1.19. Not what an endpoint of a pod with several interfaces says.
            container = text("/status/external-identifiers/container-id");
        }
        let words = ["k8s-namespace", "k8s-pod-name"];
        let [namespace, name] = words.map(|word| text(&format!("/status/external-identifiers/{word}")));
        let pairs = answer.pointer("/status/networking/addressing").and_then(Value::as_array);
        let both = pairs.into_iter().flatten().flat_map(|pair| [&pair["ipv4"], &pair["ipv6"]]);
        Self {
            container,
            interface: interface.to_owned(),
            addresses: both.filter_map(|text| text.as_str()?.parse().ok()).collect(),
            mac: text("/status/networking/mac"),
            pod: if name.is_empty() { name } else { format!("{namespace}/{name}") },
        }
    }

    /// Whose it is, for messages.
    pub(crate) fn holder(&self) -> String {
        match self.pod.is_empty() {
            true => format!("container {}, which is another pod's", self.container),
            false => self.pod.clone(),
        }
    }

    /// Whether both are the endpoint of one attachment. What names no container is no one's.
    pub(crate) fn is_same_attachment(&self, other: &Self) -> bool {
        !self.container.is_empty() && self.container == other.container && self.interface == other.interface
    }
}

/// Asks for the endpoint with this address.
/// Errors: the agent is not there, does not answer in time, or answers with something else.
pub fn endpoint(socket: &Path, address: IpAddr) -> io::Result<EndpointAnswer> {
    let family = if address.is_ipv4() { "ipv4" } else { "ipv6" };
    look_up(socket, &format!("{family}:{address}"))
}

/// Asks for the endpoint of a pod of this name: that of its first interface, whose CiliumEndpoint has the
/// pod's name.
pub(crate) fn endpoint_of_pod(socket: &Path, namespace: &str, name: &str) -> io::Result<EndpointAnswer> {
    look_up(socket, &format!("cep-name:{namespace}%2F{name}"))
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
    let deadline = Instant::now() + PATIENCE;
    let mut stream = connect(socket)?;
    // Version 1.0: the answer ends where the connection does.
    let asked = format!(
        "{method} {path} HTTP/1.0\r\nHost: localhost\r\nAccept: application/json\r\nContent-Length: 0\r\n\r\n"
    );
    stream.write_all(asked.as_bytes())?;
    let answer = read_until(&mut stream, deadline)?;
    let text = String::from_utf8_lossy(&answer);
    let status = text.split(' ').nth(1).and_then(|word| word.parse().ok());
    let status = status.ok_or_else(|| io::Error::other("Cilium's agent answered what is not HTTP"))?;
    let body = text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default();
    Ok((status, body))
}

/// Connects. While cilium-agent hangs, the kernel's list of waiting connections is full after some hundred
/// questions, and connecting waits for a place in it: no longer than the time limit for sending.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(socket.into())
}

/// Everything up to the end, which must come before the deadline, however small the pieces are in which it
/// comes.
fn read_until(stream: &mut UnixStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut answer = Vec::new();
    let mut piece = [0; 16 << 10];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece) {
            Ok(0) => return Ok(answer),
            Ok(length) => answer.extend_from_slice(&piece[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if answer.len() > LONGEST_ANSWER {
            return Err(io::Error::other(format!("the answer has more than {LONGEST_ANSWER} bytes")));
        }
    }
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
    fn an_answer_names_attachment_addresses_and_mac_in_every_version() {
        let networking = r#""networking": {"addressing": [{"ipv4": "10.0.0.7", "ipv4-pool-name": "default",
            "ipv6": "fd00::7"}], "mac": "0a:00:00:00:00:01", "host-mac": "0a:00:00:00:00:02"}"#;
        // Up to 1.19, then since 1.20, then one that has no interface.
        let legacy = r#"{"cni-attachment-id": "c1:eth0", "container-id": "c1", "k8s-namespace": "db",
            "k8s-pod-name": "db-0", "pod-name": "db/db-0"}"#;
        for (identifiers, interface, holder) in [
            (legacy, "eth0", "db/db-0"),
            (r#"{"cni-attachment-id": "c1:eth0"}"#, "eth0", "container c1, which is another pod's"),
            (
                r#"{"cni-attachment-id": "c1", "container-id": "c1"}"#,
                "",
                "container c1, which is another pod's",
            ),
            (r#"{"container-id": "c1"}"#, "", "container c1, which is another pod's"),
        ] {
            let whole =
                format!(r#"{{"id": 7, "status": {{"external-identifiers": {identifiers}, {networking}}}}}"#);
            let about = EndpointInfo::parse(&whole);
            assert_eq!((about.container.as_str(), about.interface.as_str()), ("c1", interface));
            assert_eq!(about.holder(), holder);
            let both: [IpAddr; 2] = ["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()];
            assert_eq!((about.addresses, about.mac.as_str()), (both.to_vec(), "0a:00:00:00:00:01"));
        }
        assert_eq!(EndpointInfo::parse("nonsense"), EndpointInfo::default());
    }

    #[test]
    fn an_endpoint_without_a_container_is_that_of_no_attachment() {
        let of = |id: &str| {
            EndpointInfo::parse(&format!(
                r#"{{"status": {{"external-identifiers": {{"cni-attachment-id": "{id}"}}}}}}"#
            ))
        };
        assert!(of("c1:eth0").is_same_attachment(&of("c1:eth0")));
        for (one, other) in [("c1:eth0", "c2:eth0"), ("c1:eth0", "c1:net1"), ("", "")] {
            assert!(!of(one).is_same_attachment(&of(other)), "{one} {other}");
        }
    }

    #[test]
    fn an_agent_that_accepts_no_connection_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        listener.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        listener.listen(0).unwrap();
        // They fill the list of those that wait.
        let mut waiting = Vec::new();
        let full = loop {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            match socket.connect(&SockAddr::unix(&path).unwrap()) {
                Ok(()) => waiting.push(socket),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        assert!(endpoint(&path, "10.0.0.1".parse().unwrap()).is_err(), "it would wait for ever");
    }

    #[test]
    fn an_answer_that_comes_too_slowly_or_too_late_is_none() {
        let (mut agent, mut asking) = UnixStream::pair().unwrap();
        agent.write_all(b"HTTP/1.0 200 OK\r\n").unwrap();
        let passed = Instant::now();
        assert_eq!(read_until(&mut asking, passed).unwrap_err().kind(), io::ErrorKind::TimedOut);
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
