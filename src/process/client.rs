//! A client for as long as the process lives, every request counted. Unlike the plugin's it is built at the start.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tower::util::MapRequestLayer;

use crate::cluster::client::ApiError;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);
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
    let mut config = match kubeconfig {
        Some(file) => {
            let read = Kubeconfig::read_from(file).map_err(|error| broken(error.to_string()))?;
            let config = kube::Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
            config.map_err(|error| broken(error.to_string()))?
        }
        None => kube::Config::incluster().map_err(|error| {
            broken(format!("{error}; name one with --kubeconfig (KUBECONFIG) outside of a cluster"))
        })?,
    };
    // A proxy of the environment is meant for the world outside, not for the cluster's own API server.
    config.proxy_url = None;
    config.connect_timeout = Some(CONNECT);
    let counted = MapRequestLayer::new(move |request: hyper::Request<Body>| {
        count(sort(&request));
        request
    });
    let builder = ClientBuilder::try_from(config).map_err(|error| broken(error.to_string()))?;
    Ok(builder.with_layer(&counted).build())
}

/// The sort of a request: its method, but `WATCH` for one that stays open, and `LEASE` for the looks at and renewals of a lease
/// by its name, which go on for as long as a replica stands for election.
fn sort<B>(request: &hyper::Request<B>) -> &str {
    let (method, path) = (request.method(), request.uri().path());
    let parameters = request.uri().query().into_iter().flat_map(|query| query.split('&'));
    if parameters.into_iter().any(|parameter| matches!(parameter, "watch=true" | "watch=1")) {
        return "WATCH";
    }
    let by_name = matches!(path.rsplit('/').nth(1), Some("leases")) && path.contains("/coordination.k8s.io/");
    if by_name && (method == hyper::Method::GET || method == hyper::Method::PUT) {
        return "LEASE";
    }
    method.as_str()
}

#[cfg(test)]
mod tests {
    #[test]
    fn watches_and_renewals_are_told_from_what_is_asked_for_a_reason() {
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
