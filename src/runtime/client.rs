//! The API server's client of a long-running process: built at the start, with time limits, every request
//! counted.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use kube::client::{Body, ClientBuilder};
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use thiserror::Error;
use tower::{BoxError, Service, layer::layer_fn, util::MapRequestLayer};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an answer may take to start: a little more than the API server gives itself (60 s). Without it,
/// the client would wait forever for a list from a server that hangs, and its cache would stay stale.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(70);
/// The same for a watch, whose answer starts at once.
pub(crate) const WATCH_START: Duration = Duration::from_secs(10);
/// How long an answer that has started may be silent: longer than a watch, which starts again before that.
const READ_TIMEOUT: Duration = Duration::from_secs(300);
/// In messages, instead of the path of a kubeconfig: the credentials are those of the pod's service account.
pub(crate) const IN_CLUSTER: &str = "(in the cluster)";

#[derive(Debug, Error)]
pub enum ClientError {
    #[error(
        "--kubeconfig (KUBECONFIG) is missing and this process is not a pod with a service account ({0}); \
         name a kubeconfig of the cluster"
    )]
    NotInCluster(#[from] InClusterError),
    #[error("--kubeconfig {}: {reason}", path.display())]
    Kubeconfig { path: PathBuf, reason: KubeconfigError },
    #[error("cannot use the credentials: {0}")]
    Credentials(#[from] kube::Error),
}

/// Makes a client from this kubeconfig, or from the service account of this pod. `count` is called with the
/// method of every request.
pub async fn connect(
    kubeconfig: Option<&Path>,
    count: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> Result<(kube::Client, kube::Config), ClientError> {
    let config = match kubeconfig {
        Some(path) => from_files(&[path.to_owned()]).await?,
        None => kube::Config::incluster()?,
    };
    client_of(config, count)
}

/// The same for a command that a person runs, with kubectl's search: the files that `--kubeconfig` or
/// `KUBECONFIG` lists, else `~/.kube/config`, else the service account of this pod.
pub async fn connect_as_kubectl(
    kubeconfig: Option<&Path>,
    count: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> Result<(kube::Client, kube::Config), ClientError> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let config = match search(kubeconfig, home.as_deref(), Path::is_file) {
        files if files.is_empty() => kube::Config::incluster()?,
        files => from_files(&files).await?,
    };
    client_of(config, count)
}

/// The kubeconfigs to read, the first of them first. Of several, those that are not there are passed over.
fn search(named: Option<&Path>, home: Option<&Path>, exists: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let Some(named) = named else {
        let file = home.map(|home| home.join(".kube/config"));
        return file.into_iter().filter(|file| exists(file)).collect();
    };
    let all: Vec<PathBuf> =
        std::env::split_paths(named).filter(|path| !path.as_os_str().is_empty()).collect();
    let found: Vec<PathBuf> = all.iter().filter(|path| exists(path)).cloned().collect();
    // None is there: the first is named in the error.
    if found.is_empty() { all.into_iter().take(1).collect() } else { found }
}

/// Of several files, what the first says counts.
async fn from_files(files: &[PathBuf]) -> Result<kube::Config, ClientError> {
    let mut merged = Kubeconfig::default();
    for path in files {
        let bad = |reason| ClientError::Kubeconfig { path: path.clone(), reason };
        merged = merged.merge(Kubeconfig::read_from(path).map_err(bad)?).map_err(bad)?;
    }
    let path = files.first().cloned().unwrap_or_default();
    let config = kube::Config::from_custom_kubeconfig(merged, &KubeConfigOptions::default()).await;
    config.map_err(|reason| ClientError::Kubeconfig { path, reason })
}

fn client_of(
    config: kube::Config,
    count: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> Result<(kube::Client, kube::Config), ClientError> {
    let limits = Limits { answer: ANSWER_TIMEOUT, watch: WATCH_START, silence: READ_TIMEOUT };
    Ok((with_limits(config.clone(), count, limits)?, config))
}

#[derive(Clone, Copy)]
struct Limits {
    answer: Duration,
    watch: Duration,
    silence: Duration,
}

fn with_limits(
    mut config: kube::Config,
    count: impl Fn(&str) + Clone + Send + Sync + 'static,
    limits: Limits,
) -> Result<kube::Client, kube::Error> {
    // A proxy of the environment is meant for the Internet, not for the cluster's own API server.
    config.proxy_url = None;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(limits.silence);
    // A connection that was idle before this request is not silent for that.
    config.reset_reader_on_write = true;
    let counted = MapRequestLayer::new(move |request: hyper::Request<Body>| {
        count(method(&request));
        request
    });
    let limited = layer_fn(move |inner| Limited { inner, limits });
    Ok(ClientBuilder::try_from(config)?.with_layer(&limited).with_layer(&counted).build())
}

/// Gives up an answer that does not start in time.
#[derive(Clone)]
struct Limited<S> {
    inner: S,
    limits: Limits,
}

impl<S, B> Service<hyper::Request<B>> for Limited<S>
where
    S: Service<hyper::Request<B>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: hyper::Request<B>) -> Self::Future {
        let limit = if method(&request) == WATCH { self.limits.watch } else { self.limits.answer };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let late = |_| BoxError::from(format!("no answer started within {limit:?}"));
            tokio::time::timeout(limit, answer).await.map_err(late)?.map_err(Into::into)
        })
    }
}

/// The method of a request that stays open.
const WATCH: &str = "WATCH";

/// The method of a request, as it is counted: `WATCH` for one that stays open, and `LEASE` for reads and
/// renewals of a Lease by its name, which go on for as long as a replica takes part in the election.
fn method<B>(request: &hyper::Request<B>) -> &str {
    let (verb, path) = (request.method(), request.uri().path());
    let query = request.uri().query().unwrap_or_default();
    if query.split('&').any(|parameter| matches!(parameter, "watch=true" | "watch=1")) {
        return WATCH;
    }
    let by_name = path.rsplit('/').nth(1) == Some("leases") && path.contains("/coordination.k8s.io/");
    if by_name && (verb == hyper::Method::GET || verb == hyper::Method::PUT) {
        return "LEASE";
    }
    verb.as_str()
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use futures_util::StreamExt;
    use k8s_openapi::api::core::v1::Pod;
    use kube::Api;
    use tokio::net::TcpListener;

    #[test]
    fn a_command_finds_its_kubeconfig_where_kubectl_does() {
        let there =
            |path: &Path| ["/a", "/b", "/home/me/.kube/config"].iter().any(|is| path == Path::new(is));
        let found = |named: Option<&str>, home: &str| -> Vec<String> {
            let found = super::search(named.map(Path::new), Some(Path::new(home)), there);
            found.iter().map(|path: &PathBuf| path.display().to_string()).collect()
        };
        assert_eq!(found(Some("/a"), "/home/me"), ["/a"]);
        assert_eq!(found(Some("/gone:/b:/a"), "/home/me"), ["/b", "/a"]);
        assert_eq!(found(Some("/gone"), "/home/me"), ["/gone"], "the error names it");
        assert_eq!(found(None, "/home/me"), ["/home/me/.kube/config"]);
        assert_eq!(found(None, "/"), [""; 0], "the service account of the pod");
    }

    /// Servers that accept a request and then hang: before the answer, and in the middle of it.
    #[tokio::test]
    async fn a_list_from_a_server_that_hangs_times_out_and_is_tried_again() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let half = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{";
        for sent in ["", half] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            tokio::spawn(async move {
                let mut open = Vec::new();
                while let Ok((mut stream, _)) = listener.accept().await {
                    let mut request = [0; 4096];
                    let _ = stream.read(&mut request).await;
                    let _ = stream.write_all(sent.as_bytes()).await;
                    open.push(stream);
                }
            });
            let short = Duration::from_millis(100);
            let limits = super::Limits { answer: short, watch: short, silence: short };
            let client = super::with_limits(kube::Config::new(url.parse().unwrap()), |_| (), limits).unwrap();
            let watched = kube::runtime::watcher(Api::<Pod>::all(client), Default::default());
            let mut failed = std::pin::pin!(watched.filter(|event| std::future::ready(event.is_err())));
            for _ in 0..2 {
                let failure = tokio::time::timeout(Duration::from_secs(60), failed.next()).await;
                assert!(failure.expect("no time limit").is_some(), "{sent:?}");
            }
        }
    }

    #[test]
    fn watches_and_renewals_are_distinguished_from_other_requests() {
        let counted_as = |verb: &str, uri: &str| {
            let request = hyper::Request::builder().method(verb).uri(uri).body(()).unwrap();
            super::method(&request).to_owned()
        };
        assert_eq!(counted_as("GET", "/api/v1/pods?&limit=500"), "GET");
        assert_eq!(counted_as("GET", "/api/v1/pods?&watch=true&timeoutSeconds=290"), "WATCH");
        let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
        assert_eq!(counted_as("PUT", &format!("{leases}/leader?")), "LEASE");
        assert_eq!(counted_as("GET", &format!("{leases}/leader")), "LEASE");
        assert_eq!(counted_as("POST", leases), "POST");
        assert_eq!(counted_as("GET", &format!("{leases}?labelSelector=a")), "GET");
        assert_eq!(counted_as("DELETE", &format!("{leases}/block")), "DELETE");
        assert_eq!(counted_as("GET", "/apis/example.io/v1/namespaces/x/leases/y"), "GET");
    }
}
