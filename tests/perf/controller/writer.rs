//! A hand that makes objects: one connection, plain requests, answers read no further than needed. What the
//! bench does takes the processor from what it measures.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;

use crate::support::api_server::access::Access;

type Stream = BufReader<StreamOwned<ClientConnection, TcpStream>>;

/// One connection, made when it is needed.
pub struct Hand {
    config: Arc<ClientConfig>,
    address: String,
    stream: Option<Stream>,
}

impl Hand {
    /// The hand of somebody with a client certificate.
    pub fn of(access: &Access) -> Self {
        let file = std::fs::read_to_string(access.kubeconfig()).expect("it was just written");
        let file: Value = serde_json::from_str(&file).expect("the bench writes JSON");
        let (user, cluster) = (&file["users"][0]["user"], &file["clusters"][0]["cluster"]);
        let path = |value: &Value| value.as_str().expect("a path").to_owned();
        let certificates = |path: String| {
            let read = CertificateDer::pem_file_iter(path).expect("a file");
            read.collect::<Result<Vec<_>, _>>().expect("certificates")
        };
        let mut roots = RootCertStore::empty();
        for authority in certificates(path(&cluster["certificate-authority"])) {
            roots.add(authority).expect("an authority");
        }
        let key = PrivateKeyDer::from_pem_file(path(&user["client-key"])).expect("a key");
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring knows them")
            .with_root_certificates(roots)
            .with_client_auth_cert(certificates(path(&user["client-certificate"])), key)
            .expect("the key is the certificate's");
        let address = access.url().trim_start_matches("https://").to_owned();
        Self { config: Arc::new(config), address, stream: None }
    }

    /// Another connection of the same user.
    pub fn another(&self) -> Self {
        Self { config: self.config.clone(), address: self.address.clone(), stream: None }
    }

    /// Creates an object; its uid.
    pub fn create(&mut self, path: &str, object: &Value) -> String {
        let made = self.send("POST", path, "application/json", object);
        let made: Value = serde_json::from_slice(&made).expect("an object");
        made["metadata"]["uid"].as_str().expect("every object has one").to_owned()
    }

    /// Patches an object, or a part of it.
    pub fn patch(&mut self, path: &str, patch: &Value) {
        self.send("PATCH", path, "application/merge-patch+json", patch);
    }

    fn stream(&mut self) -> &mut Stream {
        let Self { config, address, stream } = self;
        stream.get_or_insert_with(|| {
            let socket = TcpStream::connect(address.as_str()).expect("the API server listens");
            socket.set_nodelay(true).expect("a socket");
            let name = ServerName::try_from("127.0.0.1").expect("a name");
            let connection = ClientConnection::new(config.clone(), name).expect("a connection");
            BufReader::with_capacity(1 << 14, StreamOwned::new(connection, socket))
        })
    }

    fn send(&mut self, method: &str, path: &str, kind: &str, body: &Value) -> Vec<u8> {
        let body = body.to_string();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let stream = self.stream();
        stream.get_mut().write_all([head, body].concat().as_bytes()).expect("it takes requests");
        stream.get_mut().flush().expect("it takes requests");
        let status = line(stream);
        let (mut length, mut chunked) = (0, false);
        loop {
            let header = line(stream).to_ascii_lowercase();
            match header.split_once(": ") {
                Some(("content-length", value)) => length = value.parse().expect("a length"),
                Some(("transfer-encoding", value)) => chunked = value == "chunked",
                Some(_) => {}
                None => break,
            }
        }
        let mut answer = Vec::new();
        if chunked {
            loop {
                let size = usize::from_str_radix(&line(stream), 16).expect("the size of a chunk");
                take(stream, &mut answer, size);
                line(stream);
                if size == 0 {
                    break;
                }
            }
        } else {
            take(stream, &mut answer, length);
        }
        let good = status.split(' ').nth(1).is_some_and(|code| code.starts_with('2'));
        assert!(good, "cannot {method} {path}: {status}: {}", String::from_utf8_lossy(&answer));
        answer
    }
}

fn line(stream: &mut Stream) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).expect("an answer");
    line.trim_end().to_owned()
}

fn take(stream: &mut Stream, answer: &mut Vec<u8>, length: usize) {
    let start = answer.len();
    answer.resize(start + length, 0);
    stream.read_exact(&mut answer[start..]).expect("a whole answer");
}
