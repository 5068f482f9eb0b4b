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

/// Makes a client from this kubeconfig, or from what the cluster gives a pod. `count` is told the method of every request.
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
        count(request.method().as_str());
        request
    });
    let builder = ClientBuilder::try_from(config).map_err(|error| broken(error.to_string()))?;
    Ok(builder.with_layer(&counted).build())
}
