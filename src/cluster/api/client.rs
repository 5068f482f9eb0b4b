//! The connection to the API server: a client from a kubeconfig file, a deadline for all requests, and errors
//! that say what was requested and what to do.
//!
//! Must never be built before it is needed, and never outlive its deadline: the runtime waits for the plugin.

use std::fmt::Write as _;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::time::Instant;

use crate::cluster::api::connection::{self, Wire};

/// How often a read is tried when the connection breaks. A server that is away refuses at once; waiting for
/// it longer is the runtime's business, which comes again.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(50);
const UNKNOWN_KIND: &str =
    "it does not know this kind; apply packaging/crds (CiliumNodes are of Cilium's own making)";

#[derive(Debug, Error)]
pub enum ApiError {
    #[error("cannot use the kubeconfig {}: {why}; on a node its agent writes it", path.display())]
    Kubeconfig { path: PathBuf, why: String },
    #[error(
        "the API server does not accept the credentials of {} (expired, or of a deleted account): cannot \
         {what}; the agent of this node renews them",
        path.display()
    )]
    Unauthorized { what: String, path: PathBuf },
    #[error("the credentials of {} do not allow to {what}: {why}; grant it by a role", path.display())]
    Forbidden { what: String, path: PathBuf, why: String },
    #[error("cannot {what}: the API server is away: {why}")]
    Away { what: String, why: String },
    #[error("cannot {what}: the API server did not answer within {timeout:?} (sticky.cluster.timeout)")]
    TooLate { what: String, timeout: Duration },
    #[error("cannot {what}: the API server answered {code}: {why}")]
    Refused { what: String, code: u16, why: String },
    #[error("cannot {what}: the answer cannot be read: {why}; correct or delete the object")]
    Unreadable { what: String, why: String },
}

impl ApiError {
    /// Whether what was asked may have been done all the same.
    pub(crate) fn leaves_doubt(&self) -> bool {
        match self {
            Self::Away { .. } | Self::TooLate { .. } | Self::Unreadable { .. } => true,
            Self::Refused { code, .. } => *code >= 500,
            Self::Kubeconfig { .. } | Self::Unauthorized { .. } | Self::Forbidden { .. } => false,
        }
    }

    /// Whether the server says that the object of this name is not there. A kind that it does not serve right
    /// now, of which it says 404 as well, is something else.
    pub(crate) fn says_gone(&self, name: &str) -> bool {
        matches!(self, Self::Refused { code: 404, why, .. } if why.contains(&format!("\"{name}\" not found")))
    }
}

/// A kubeconfig as the agent writes it, which is read in a tenth of the time that YAML takes. None if it is
/// of another kind, or names files by the way from its own folder, which kube follows.
fn written_as_json(path: &Path) -> Option<Kubeconfig> {
    let read: Kubeconfig = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    let authorities =
        read.clusters.iter().filter_map(|named| named.cluster.as_ref()?.certificate_authority.as_ref());
    let users = read.auth_infos.iter().filter_map(|named| named.auth_info.as_ref());
    let files = users.clone().flat_map(|user| [&user.client_certificate, &user.client_key, &user.token_file]);
    let is_absolute = |file: &String| Path::new(file).is_absolute();
    let is_plain =
        authorities.chain(files.flatten()).all(is_absolute) && users.clone().all(|user| user.exec.is_none());
    is_plain.then_some(read)
}

/// The extension of a kubeconfig's cluster with the addresses of a server that has a name.
pub(crate) const ADDRESSES: &str = "sticky-ipam.io/addresses";

/// What the agent has written of a server with a name.
pub(crate) fn written_addresses(kubeconfig: &Kubeconfig) -> Option<WrittenAddresses> {
    let cluster = kubeconfig.clusters.first()?.cluster.as_ref()?;
    let written = cluster.extensions.iter().flatten().find(|extension| extension.name == ADDRESSES)?;
    WrittenAddresses::deserialize(&written.extension).ok()
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WrittenAddresses {
    pub(crate) host: String,
    pub(crate) addresses: Vec<SocketAddr>,
}

/// A client and the time that is left for it.
#[derive(Clone)]
pub struct Connection {
    client: kube::Client,
    /// The plugin's one connection.
    wire: Option<Wire>,
    kubeconfig: PathBuf,
    timeout: Duration,
    deadline: Instant,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("kubeconfig", &self.kubeconfig).finish_non_exhaustive()
    }
}

impl Connection {
    /// Reads the kubeconfig and prepares a client. Nothing is asked of the server yet. The time starts now.
    pub async fn open(kubeconfig: &Path, timeout: Duration) -> Result<Self, ApiError> {
        let broken = |why: String| ApiError::Kubeconfig { path: kubeconfig.to_owned(), why };
        let read = match written_as_json(kubeconfig) {
            Some(read) => read,
            None => Kubeconfig::read_from(kubeconfig).map_err(|error| broken(with_causes(&error)))?,
        };
        let mut clusters = read.clusters.iter().filter_map(|named| named.cluster.as_ref());
        let proxied = clusters.any(|cluster| cluster.proxy_url.is_some());
        let written = written_addresses(&read).map(|written| written.addresses).unwrap_or_default();
        let config = kube::Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
        let mut config = config.map_err(|error| broken(with_causes(&error)))?;
        if !proxied {
            // A proxy of the runtime's environment is meant for images, not for the cluster's own API server.
            config.proxy_url = None;
        }
        config.connect_timeout = Some(timeout);
        config.read_timeout = Some(timeout);
        let addresses = connection::addresses(&config, written).map_err(broken)?;
        let (client, wire) =
            connection::client(config, addresses).map_err(|error| broken(with_causes(&error)))?;
        Ok(Self { wire, ..Self::with_client(client, kubeconfig, timeout) })
    }

    /// Waits, within the time that is left, for a connection that is being opened, and returns whether there
    /// is one. If it fails, the first request gets the error.
    pub async fn settled(&self) -> bool {
        let Some(wire) = &self.wire else { return false };
        tokio::time::timeout_at(self.deadline, wire.settled()).await.unwrap_or(false)
    }

    /// The same around a client that is there already.
    pub fn with_client(client: kube::Client, kubeconfig: &Path, timeout: Duration) -> Self {
        let deadline = Instant::now() + timeout;
        Self { client, wire: None, kubeconfig: kubeconfig.to_owned(), timeout, deadline }
    }

    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// Restarts the time: waiting for another pod is not the server's fault.
    pub fn restart_time(&mut self) {
        self.deadline = Instant::now() + self.timeout;
    }

    /// Asks once, within the time that is left. `what` is verb and resource, such as "get Pod db/mysql-0".
    /// Errors: any of [`ApiError`]; a missing object is `Ok(None)` where the request says so.
    pub async fn once<T>(
        &self,
        what: &str,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, ApiError> {
        let answer =
            tokio::time::timeout_at(self.deadline, request).await.map_err(|_| self.too_late(what))?;
        answer.map_err(|error| self.explain(what, &error))
    }

    /// Reads, and tries again when the connection breaks.
    pub async fn read<T, F: Future<Output = Result<T, kube::Error>>>(
        &self,
        what: &str,
        request: impl Fn() -> F,
    ) -> Result<T, ApiError> {
        for _ in 1..TRIES {
            match self.once(what, request()).await {
                Err(ApiError::Away { .. }) => self.pause(what, PAUSE).await?,
                answer => return answer,
            }
        }
        self.once(what, request()).await
    }

    pub async fn pause(&self, what: &str, time: Duration) -> Result<(), ApiError> {
        if Instant::now() + time >= self.deadline {
            return Err(self.too_late(what));
        }
        tokio::time::sleep(time).await;
        Ok(())
    }

    fn too_late(&self, what: &str) -> ApiError {
        ApiError::TooLate { what: what.to_owned(), timeout: self.timeout }
    }

    fn explain(&self, what: &str, error: &kube::Error) -> ApiError {
        let (what, path) = (what.to_owned(), self.kubeconfig.clone());
        match error {
            kube::Error::Api(status) => {
                let why = status.message.clone();
                match status.code {
                    401 => ApiError::Unauthorized { what, path },
                    403 => ApiError::Forbidden { what, path, why },
                    // Not an object that is missing: no such path.
                    404 if why.contains("page not found") => {
                        ApiError::Refused { what, code: 404, why: UNKNOWN_KIND.into() }
                    }
                    code => ApiError::Refused { what, code, why },
                }
            }
            kube::Error::Auth(_) => ApiError::Unauthorized { what, path },
            kube::Error::Service(_) | kube::Error::HyperError(_) => {
                ApiError::Away { what, why: with_causes(error) }
            }
            _ => ApiError::Unreadable { what, why: with_causes(error) },
        }
    }
}

/// An error with everything behind it, each part once: the reason is mostly the last one.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    for cause in std::iter::successors(error.source(), |cause| cause.source()) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            let _ = write!(text, ": {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(content: Option<&str>) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        if let Some(content) = content {
            std::fs::write(&path, content).unwrap();
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let error =
            runtime.block_on(Connection::open(&path, Duration::from_secs(1))).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        error
    }

    #[test]
    fn only_an_answer_about_the_object_itself_says_that_it_is_gone() {
        let answer = |code, why: &str| ApiError::Refused { what: "get".into(), code, why: why.into() };
        assert!(answer(404, "statefulsets.apps \"db\" not found").says_gone("db"));
        assert!(!answer(404, "statefulsets.apps \"db-2\" not found").says_gone("db"));
        assert!(!answer(404, "the server could not find the requested resource").says_gone("db"));
        assert!(!answer(404, "404 page not found").says_gone("db"));
        assert!(!answer(410, "\"db\" not found").says_gone("db"));
    }

    #[test]
    fn only_a_kubeconfig_without_ways_from_its_own_folder_is_read_as_json() {
        use serde_json::json;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        let read = |cluster: serde_json::Value, user: serde_json::Value| {
            let clusters = json!([{"name": "c", "cluster": cluster}]);
            let config = json!({"clusters": clusters, "users": [{"name": "u", "user": user}]});
            std::fs::write(&path, config.to_string()).unwrap();
            written_as_json(&path).is_some()
        };
        let (server, token) = (json!({"server": "https://a"}), json!({"token": "t"}));
        assert!(read(server.clone(), token.clone()));
        assert!(read(json!({"certificate-authority": "/ca.crt"}), token.clone()));
        assert!(!read(json!({"certificate-authority": "ca.crt"}), token));
        assert!(!read(server.clone(), json!({"tokenFile": "token"})));
        assert!(!read(server.clone(), json!({"client-certificate": "/a.crt", "client-key": "a.key"})));
        assert!(!read(server, json!({"exec": {"command": "bin/login"}})));
        std::fs::write(&path, "kind: Config\n").unwrap();
        assert!(written_as_json(&path).is_none());
    }

    #[test]
    fn a_missing_or_broken_kubeconfig_is_named_with_its_fault() {
        assert!(opened(None).contains("No such file"));
        opened(Some("{"));
        opened(Some("apiVersion: v1\nkind: Config\n"));
    }
}
