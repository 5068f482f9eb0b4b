//! A way in: who asks, by which address, in which namespace. Handed out as a client or as a kubeconfig file.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::json;

use super::certificates::{Pair, write_private};
use super::front::Front;
use super::proxy::Proxy;

/// How the server learns who asks.
#[derive(Clone)]
pub enum Credentials {
    /// A client certificate.
    Certificate(Pair),
    /// A service account's token.
    Token(String),
}

/// One identity's way to one server.
#[derive(Clone)]
pub struct Access {
    pub(super) url: String,
    pub(super) namespace: String,
    pub(super) credentials: Credentials,
    pub(super) files: Arc<Files>,
}

/// Where kubeconfig files are written: the server's folder, which goes with the server.
pub(super) struct Files {
    pub(super) folder: PathBuf,
    pub(super) written: AtomicUsize,
}

impl Access {
    /// The same identity, by way of a proxy.
    pub fn through(&self, proxy: &Proxy) -> Self {
        Self { url: format!("https://{}", proxy.address()), ..self.clone() }
    }

    /// The same identity, by way of a stand-in.
    pub fn through_front(&self, front: &Front) -> Self {
        Self { url: format!("https://{}", front.address()), ..self.clone() }
    }

    /// The server's address as this way in sees it.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A client of its own, with its own connections. It belongs to the runtime that calls.
    pub async fn client(&self) -> kube::Client {
        let file = Kubeconfig::read_from(self.kubeconfig()).expect("it was just written");
        let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
        let mut config = config.expect("the bench writes sound kubeconfigs");
        // A proxy of the machine's environment is none of the loopback's business.
        config.proxy_url = None;
        kube::Client::try_from(config).expect("fresh certificates")
    }

    /// A fresh kubeconfig file (0600) whose context names the namespace.
    pub fn kubeconfig(&self) -> PathBuf {
        let number = self.files.written.fetch_add(1, Ordering::Relaxed);
        let beside = |ending: &str| self.files.folder.join(format!("access-{number}.{ending}"));
        let user = match &self.credentials {
            Credentials::Token(token) => json!({"token": token}),
            Credentials::Certificate(pair) => {
                write_private(&beside("crt"), &pair.certificate);
                write_private(&beside("key"), &pair.key);
                json!({"client-certificate": beside("crt"), "client-key": beside("key")})
            }
        };
        let authority = self.files.folder.join("ca.crt");
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bench", "cluster": {"server": self.url, "certificate-authority": authority}}],
            "users": [{"name": "user", "user": user}],
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "user", "namespace": self.namespace}}],
            "current-context": "bench",
        });
        let path = beside("kubeconfig");
        write_private(&path, &format!("{config:#}"));
        path
    }
}
