//! The text of the plugin's kubeconfig: the agent's own way to the API server, with the plugin's token. A
//! server that has a name is written by its addresses, which the plugin could not look up.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use http::Uri;
use k8s_openapi::ByteString;
use serde_json::{Value, json};

use crate::agent::install::error::InstallError;
use crate::agent::install::resolve::Resolver;
use crate::cluster::api::client::{ADDRESSES, WrittenAddresses, written_addresses};

/// The API server as the host reaches it, and how it proves who it is.
#[derive(Debug, Clone)]
pub(super) struct ApiServerAccess {
    url: String,
    /// Read whenever it is needed: the cluster may replace it.
    authority_file: Option<PathBuf>,
    /// Without a file. If there is neither, the machine's own list decides.
    authority: Option<Vec<u8>>,
    name: Option<String>,
    /// If the server has a name.
    resolver: Option<Resolver>,
}

impl ApiServerAccess {
    /// As the agent's own configuration has it; `url` if the host needs another way.
    /// `node` is the one whose plugin goes this way.
    pub(super) fn of(config: &kube::Config, url: Option<&str>, node: &str) -> Result<Self, InstallError> {
        let own = config.cluster_url.to_string();
        let url = url.unwrap_or(&own).trim_end_matches('/').to_owned();
        let refused = |why: String| Err(InstallError::ApiServerAccess { why });
        let parsed = url.parse::<Uri>().ok().filter(|uri| uri.scheme_str() == Some("https"));
        let Some((host, port)) = parsed.as_ref().and_then(|uri| Some((uri.host()?, uri.port_u16()))) else {
            return refused(format!(
                "{url:?} is not the address of an API server; write --api-server https://host:port"
            ));
        };
        let resolver = Resolver::of(host, port.unwrap_or(443), node);
        if config.accept_invalid_certs {
            let why = "the agent's own kubeconfig skips the check of the API server's certificate, and the \
                plugin must not; give it a certificate-authority";
            return refused(why.to_owned());
        }
        Ok(Self {
            url,
            resolver,
            authority_file: config.root_cert_file.clone(),
            authority: config.root_cert.as_deref().map(pem),
            name: config.tls_server_name.clone(),
        })
    }

    /// Looks the server's name up if it has one and that is due. `file` is the kubeconfig that is there:
    /// after a cold start its addresses count until the name service answers. Returns whether the addresses
    /// changed.
    /// Errors: nothing is known of it.
    pub(super) async fn refresh(&mut self, file: &Path, now: SystemTime) -> Result<bool, InstallError> {
        let Some(resolver) = &mut self.resolver else { return Ok(false) };
        if resolver.addresses().is_empty() {
            let host = resolver.host().to_owned();
            resolver.remember(addresses_in(&fs::read_to_string(file).unwrap_or_default(), &host));
        }
        let changed = resolver.refresh(now).await;
        match resolver.failure() {
            Some(why) if resolver.addresses().is_empty() => {
                let why = format!("the API server's name {} cannot be resolved: {why}", resolver.host());
                Err(InstallError::ApiServerAccess { why })
            }
            _ => Ok(changed),
        }
    }

    /// The kubeconfig with this token.
    pub(super) fn kubeconfig(&self, token: &str) -> Result<String, InstallError> {
        let authority = match &self.authority_file {
            Some(path) => Some(fs::read(path).map_err(InstallError::io("read", path))?),
            None => self.authority.clone(),
        };
        let mut cluster = json!({"server": self.url});
        let resolver = self.resolver.as_ref();
        if let Some((resolver, first)) = resolver.and_then(|found| Some((found, found.addresses().first()?)))
        {
            cluster["server"] = json!(format!("https://{first}"));
            cluster["tls-server-name"] = json!(resolver.host());
            let (host, addresses) = (resolver.host().to_owned(), resolver.addresses().to_vec());
            let written = WrittenAddresses { host, addresses };
            cluster["extensions"] = json!([{"name": ADDRESSES, "extension": written}]);
        }
        if let Some(bytes) = authority {
            cluster["certificate-authority-data"] = json!(ByteString(bytes));
        }
        if let Some(name) = &self.name {
            cluster["tls-server-name"] = json!(name);
        }
        // As JSON, which is YAML too: every ADD that was not prepared reads it, and that in a tenth of the
        // time.
        let config = json!({
            "//": "Written and renewed by sticky-ipam-agent; changes are undone.",
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "cluster", "cluster": cluster}],
            "users": [{"name": USER, "user": {"token": token}}],
            "contexts": [{"name": USER, "context": {"cluster": "cluster", "user": USER}}],
            "current-context": USER,
        });
        Ok(format!("{config:#}\n"))
    }
}

const USER: &str = "sticky-ipam";

/// The addresses in a kubeconfig that an agent wrote for the server of this name.
fn addresses_in(text: &str, name: &str) -> Vec<SocketAddr> {
    let written = serde_json::from_str(text).ok().as_ref().and_then(written_addresses);
    written.filter(|written| written.host == name).map(|written| written.addresses).unwrap_or_default()
}

/// The token in a kubeconfig that an agent wrote.
pub(super) fn token_in(text: &str) -> Option<String> {
    let config: Value = serde_json::from_str(text).ok()?;
    Some(config["users"][0]["user"]["token"].as_str()?.to_owned())
}

fn pem(certificates: &[Vec<u8>]) -> Vec<u8> {
    let mut text = String::new();
    for certificate in certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        for line in base64(certificate).as_bytes().chunks(64) {
            text.push_str(&String::from_utf8_lossy(line));
            text.push('\n');
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    text.into_bytes()
}

fn base64(bytes: &[u8]) -> String {
    // A byte string is always written as text.
    let text = serde_json::to_value(ByteString(bytes.to_vec())).unwrap_or_default();
    text.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use kube::config::{KubeConfigOptions, Kubeconfig};

    fn config(server: &str) -> kube::Config {
        let mut config = kube::Config::new(server.parse().unwrap());
        config.root_cert = Some(vec![vec![0xfb; 100], vec![1, 2, 3]]);
        config
    }

    #[tokio::test]
    async fn a_client_reads_back_server_authority_and_token() {
        let written = ApiServerAccess::of(&config("https://10.0.0.1:6443/"), None, "n1")
            .unwrap()
            .kubeconfig("a.b.c")
            .unwrap();
        assert_eq!(token_in(&written).as_deref(), Some("a.b.c"));
        let read = Kubeconfig::from_yaml(&written).unwrap();
        let read = kube::Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await.unwrap();
        assert_eq!(read.cluster_url, "https://10.0.0.1:6443/");
        assert_eq!(read.root_cert, config("https://x").root_cert);
    }

    #[test]
    fn the_host_may_have_a_way_of_its_own_and_a_wrong_one_is_refused() {
        let own = config("https://10.96.0.1");
        let written = ApiServerAccess::of(&own, Some("https://172.30.0.1:6443"), "n1")
            .unwrap()
            .kubeconfig("t")
            .unwrap();
        assert!(written.contains("\"server\": \"https://172.30.0.1:6443\""), "{written}");
        for wrong in ["172.30.0.1", "https://", "http://x", "https://a b"] {
            let error = ApiServerAccess::of(&own, Some(wrong), "n1").unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("--api-server"), "{error}");
        }
        let mut unchecked = config("https://x");
        unchecked.accept_invalid_certs = true;
        assert!(
            ApiServerAccess::of(&unchecked, None, "n1")
                .unwrap_err()
                .to_string()
                .contains("certificate-authority")
        );
    }

    #[tokio::test]
    async fn a_server_with_a_name_is_written_by_its_addresses_also_after_a_cold_start() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kubeconfig");
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let way = |url: &str| ApiServerAccess::of(&config(url), None, "n1").unwrap();
        let mut server = way("https://localhost:6443");
        assert!(server.refresh(&file, start).await.unwrap());
        assert!(!server.refresh(&file, start).await.unwrap());
        let written = server.kubeconfig("t").unwrap();
        assert!(!written.contains("https://localhost") && written.contains("127.0.0.1:6443"), "{written}");
        assert_eq!(addresses_in(&written, "localhost"), server.resolver.as_ref().unwrap().addresses());
        // `.invalid` is resolved nowhere.
        let mut nowhere = way("https://api.invalid:6443");
        let error = nowhere.refresh(&file, start).await.unwrap_err().to_string();
        assert!(error.contains("api.invalid"), "{error}");
        fs::write(&file, written.replace("localhost", "api.invalid")).unwrap();
        let mut cold = way("https://api.invalid:6443");
        assert!(!cold.refresh(&file, start).await.unwrap());
        assert_eq!(cold.kubeconfig("t").unwrap(), written.replace("localhost", "api.invalid"));
        fs::write(&file, written).unwrap();
        assert!(
            way("https://api.invalid:6443").refresh(&file, start).await.is_err(),
            "those of another server"
        );
        let mut literal = way("https://10.0.0.1:6443");
        assert!(!literal.refresh(&file, start).await.unwrap());
        assert!(!literal.kubeconfig("t").unwrap().contains("extensions"));
    }

    #[test]
    fn an_authority_that_is_replaced_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.crt");
        let mut own = config("https://x");
        own.root_cert_file = Some(file.clone());
        let server = ApiServerAccess::of(&own, None, "n1").unwrap();
        assert!(server.kubeconfig("t").unwrap_err().to_string().contains("ca.crt"));
        fs::write(&file, "one").unwrap();
        let one = server.kubeconfig("t").unwrap();
        fs::write(&file, "two").unwrap();
        assert_ne!(server.kubeconfig("t").unwrap(), one);
    }
}
