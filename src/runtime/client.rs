//! A client for as long as the process lives, every request counted. Unlike the plugin's it is built at the start.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tower::util::MapRequestLayer;
use tower::{BoxError, Layer, Service};

use crate::cluster::api::client::ApiError;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);
/// How long an answer may take to begin: a little more than the API server gives itself (60 s). Without it a list that a hanging server
/// took would be waited for, and nothing else would be known of its kind, for ever.
const ANSWER: Duration = Duration::from_secs(70);
/// The same for a watch, whose answer begins at once.
pub const WATCH_START: Duration = Duration::from_secs(10);
/// How long an answer that has begun may be silent: more than a watch may be, which is started anew before that.
const SILENCE: Duration = Duration::from_secs(300);
/// What stands for the path of a kubeconfig where the cluster gives the credentials.
pub const IN_CLUSTER: &str = "(in the cluster)";

/// Makes a client from this kubeconfig, or from what the cluster gives a pod. `count` is told the sort of every request.
///
/// # Errors
/// [`ApiError::Kubeconfig`].
pub async fn client(
    kubeconfig: Option<&Path>,
    count: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> Result<kube::Client, ApiError> {
    let path = kubeconfig.map_or_else(|| PathBuf::from(IN_CLUSTER), Path::to_owned);
    let broken = |why: String| ApiError::Kubeconfig { path: path.clone(), why };
    let config = match kubeconfig {
        Some(file) => {
            let read = Kubeconfig::read_from(file).map_err(|error| broken(error.to_string()))?;
            let config = kube::Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
            config.map_err(|error| broken(error.to_string()))?
        }
        None => kube::Config::incluster().map_err(|error| {
            broken(format!("{error}; name one with --kubeconfig (KUBECONFIG) outside of a cluster"))
        })?,
    };
    of_config(config, count).map_err(|error| broken(error.to_string()))
}

/// Makes a client of a configuration.
///
/// # Errors
/// The credentials are of no use.
pub fn of_config(
    config: kube::Config,
    count: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> Result<kube::Client, kube::Error> {
    with_limits(config, count, Limits { answer: ANSWER, watch: WATCH_START, silence: SILENCE })
}

/// How long is waited for what.
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
    // A proxy of the environment is meant for the world outside, not for the cluster's own API server.
    config.proxy_url = None;
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(limits.silence);
    // A connection that was at rest before this request is not silent for that.
    config.reset_reader_on_write = true;
    let counted = MapRequestLayer::new(move |request: hyper::Request<Body>| {
        count(sort(&request));
        request
    });
    let builder = ClientBuilder::try_from(config)?;
    Ok(builder.with_layer(&limits).with_layer(&counted).build())
}

impl<S> Layer<S> for Limits {
    type Service = Limited<S>;

    fn layer(&self, inner: S) -> Limited<S> {
        Limited { inner, limits: *self }
    }
}

/// A client that gives up an answer which does not begin in time.
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
        let limit = if sort(&request) == WATCH { self.limits.watch } else { self.limits.answer };
        let answer = self.inner.call(request);
        Box::pin(async move {
            match tokio::time::timeout(limit, answer).await {
                Ok(answer) => answer.map_err(Into::into),
                Err(_) => Err(format!("no answer began within {limit:?}").into()),
            }
        })
    }
}

/// The sort of a request that stays open.
const WATCH: &str = "WATCH";

/// The sort of a request: its method, but `WATCH` for one that stays open, and `LEASE` for the looks at and renewals of a lease
/// by its name, which go on for as long as a replica stands for election.
fn sort<B>(request: &hyper::Request<B>) -> &str {
    let (method, path) = (request.method(), request.uri().path());
    let parameters = request.uri().query().into_iter().flat_map(|query| query.split('&'));
    if parameters.into_iter().any(|parameter| matches!(parameter, "watch=true" | "watch=1")) {
        return WATCH;
    }
    let by_name = matches!(path.rsplit('/').nth(1), Some("leases")) && path.contains("/coordination.k8s.io/");
    if by_name && (method == hyper::Method::GET || method == hyper::Method::PUT) {
        return "LEASE";
    }
    method.as_str()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::StreamExt;
    use k8s_openapi::api::core::v1::Pod;
    use kube::Api;
    use tokio::net::TcpListener;

    /// Servers that took a request and say nothing more: before the answer, and in the middle of it.
    #[tokio::test]
    async fn a_list_that_a_hanging_server_took_is_given_up_and_tried_again() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let half = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{";
        for said in ["", half] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            tokio::spawn(async move {
                let mut open = Vec::new();
                while let Ok((mut stream, _)) = listener.accept().await {
                    let mut request = [0; 4096];
                    let _ = stream.read(&mut request).await;
                    let _ = stream.write_all(said.as_bytes()).await;
                    open.push(stream);
                }
            });
            let short = Duration::from_millis(100);
            let limits = super::Limits { answer: short, watch: short, silence: short };
            let client = super::with_limits(kube::Config::new(url.parse().unwrap()), |_| (), limits).unwrap();
            let watched = kube::runtime::watcher(Api::<Pod>::all(client), Default::default());
            let mut failed = std::pin::pin!(watched.filter(|event| std::future::ready(event.is_err())));
            for _ in 0..2 {
                let told = tokio::time::timeout(Duration::from_secs(60), failed.next()).await;
                assert!(told.expect("a hanging server was waited for").is_some(), "{said:?}");
            }
        }
    }

    #[test]
    fn watches_and_renewals_are_distinguished_from_other_requests() {
        let sort = |method: &str, uri: &str| {
            let request = hyper::Request::builder().method(method).uri(uri).body(()).unwrap();
            super::sort(&request).to_owned()
        };
        assert_eq!(sort("GET", "/api/v1/pods?&limit=500"), "GET");
        assert_eq!(sort("GET", "/api/v1/pods?&watch=true&timeoutSeconds=290"), "WATCH");
        let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
        assert_eq!(sort("PUT", &format!("{leases}/leader?")), "LEASE");
        assert_eq!(sort("GET", &format!("{leases}/leader")), "LEASE");
        assert_eq!(sort("POST", leases), "POST");
        assert_eq!(sort("GET", &format!("{leases}?labelSelector=a")), "GET");
        assert_eq!(sort("DELETE", &format!("{leases}/block")), "DELETE");
        assert_eq!(sort("GET", "/apis/example.io/v1/namespaces/x/leases/y"), "GET");
    }
}
