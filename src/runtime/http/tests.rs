use std::path::Path;

use rcgen::{CertificateParams, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::*;

const DEADLINE: Duration = Duration::from_secs(30);

/// A certificate for the loopback address and its key, as PEM; a client that trusts it trusts nothing else.
fn fresh() -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn with(pair: &(String, String)) -> Self {
        let files = Self { folder: tempfile::tempdir().unwrap() };
        files.write(&pair.0, &pair.1);
        files
    }

    fn write(&self, certificate: &str, key: &str) {
        let CertificateFiles { certificate: at, key: key_at } = self.pair();
        std::fs::write(at, certificate).unwrap();
        std::fs::write(key_at, key).unwrap();
    }

    fn pair(&self) -> CertificateFiles {
        let at = |name: &str| self.folder.path().join(name);
        CertificateFiles::of(Some(&at("tls.crt")), Some(&at("tls.key"))).unwrap().unwrap()
    }
}

async fn bind(pair: Option<CertificateFiles>, ready: &Readiness) -> Result<HttpServer, HttpServerError> {
    let counts: Counts = Arc::new(|| "counts\n".to_owned());
    HttpServer::bind("127.0.0.1:0".parse().unwrap(), pair, counts, ready.clone()).await
}

/// Serves in the background of the test; where.
async fn serve(pair: Option<CertificateFiles>, ready: &Readiness) -> SocketAddr {
    let pages = bind(pair, ready).await.unwrap();
    let address = pages.address().unwrap();
    tokio::spawn(pages.serve());
    address
}

async fn ask<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    mut stream: S,
    path: &str,
) -> std::io::Result<String> {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await?;
    let mut text = Vec::new();
    let read = stream.read_to_end(&mut text).await;
    if text.is_empty() {
        read?;
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

async fn plain(address: SocketAddr, path: &str) -> std::io::Result<String> {
    ask(TcpStream::connect(address).await?, path).await
}

/// Asks as one who trusts this certificate alone.
async fn trusting(certificate: &str, address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let stream = TcpStream::connect(address).await?;
    ask(TlsConnector::from(Arc::new(config)).connect(name, stream).await?, path).await
}

/// Asks until a client that trusts this certificate gets an answer.
async fn is_served_in_time(certificate: &str, address: SocketAddr) -> bool {
    let asked = async {
        while trusting(certificate, address, "/healthz").await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, asked).await.is_ok()
}

#[tokio::test]
async fn each_page_has_its_answer_and_readiness_names_every_reason() {
    let ready = Readiness::default();
    let address = serve(None, &ready).await;
    let page = async |path: &str| plain(address, path).await.unwrap();
    assert!(page("/healthz").await.starts_with("HTTP/1.1 200"));
    assert!(page("/metrics").await.ends_with("\r\n\r\ncounts\n"));
    assert!(page("/other").await.starts_with("HTTP/1.1 404"));
    let text = page("/readyz").await;
    assert!(text.starts_with("HTTP/1.1 503") && text.contains("just started"), "{text}");
    ready.set(vec!["no block".into(), "no watch".into()]);
    assert!(page("/readyz").await.ends_with("not ready: no block\nnot ready: no watch\n"));
    ready.yes();
    assert!(page("/readyz").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn with_a_certificate_the_pages_are_served_over_tls_and_not_without() {
    let pair = fresh();
    let files = Files::with(&pair);
    let address = serve(Some(files.pair()), &Readiness::default()).await;
    for path in ["/healthz", "/metrics"] {
        let text = trusting(&pair.0, address, path).await.unwrap();
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    }
    assert!(trusting(&fresh().0, address, "/healthz").await.is_err(), "another's trust is not enough");
    let refused = plain(address, "/metrics").await;
    assert!(refused.as_ref().map_or(true, |text| !text.contains("HTTP/1.1")), "{refused:?}");
}

#[tokio::test]
async fn a_new_pair_is_served_without_a_restart() {
    let (first, second) = (fresh(), fresh());
    let files = Files::with(&first);
    let address = serve(Some(files.pair()), &Readiness::default()).await;
    assert!(is_served_in_time(&first.0, address).await);
    files.write(&second.0, &second.1);
    assert!(is_served_in_time(&second.0, address).await, "the new pair is not served");
    assert!(trusting(&first.0, address, "/healthz").await.is_err(), "the old one is");
}

#[test]
fn a_new_pair_that_cannot_be_used_leaves_the_one_before() {
    let (first, second) = (fresh(), fresh());
    let files = Files::with(&first);
    let keys = CertificateSource::load(files.pair()).unwrap();
    let mut now = std::time::Instant::now();
    let mut read_again = || {
        now += Duration::from_secs(2);
        keys.read_again(now);
        keys.now()
    };
    let (before, problem) = read_again();
    assert_eq!(problem, None);
    let garbled = "garbled".to_owned();
    for (certificate, key, part) in [
        (&second.0, &first.1, "do not fit"),
        (&garbled, &second.1, "tls.crt"),
        (&second.0, &garbled, "tls.key"),
    ] {
        files.write(certificate, key);
        let (served, problem) = read_again();
        assert!(Arc::ptr_eq(&served, &before), "{part}: the one before stays");
        assert!(problem.is_some_and(|error| error.to_string().contains(part)), "{part}");
    }
    std::fs::remove_file(files.pair().key).unwrap();
    assert!(read_again().1.is_some_and(|error| error.to_string().contains("cannot be read")));
    files.write(&first.0, &first.1);
    let (served, problem) = read_again();
    assert!(Arc::ptr_eq(&served, &before) && problem.is_none(), "it is as it was");
    files.write(&second.0, &second.1);
    let (served, problem) = read_again();
    assert!(!Arc::ptr_eq(&served, &before) && problem.is_none(), "the new pair is not taken");
}

#[tokio::test]
async fn what_cannot_be_used_is_refused_at_the_start_by_its_name() {
    let (pair, other) = (fresh(), fresh());
    let refused = async |certificate: &str, key: &str| {
        let files = Files::with(&(certificate.to_owned(), key.to_owned()));
        bind(Some(files.pair()), &Readiness::default()).await.err().unwrap().to_string()
    };
    for (certificate, key, parts) in [
        ("", pair.1.as_str(), ["--tls-cert-file", "tls.crt", "no certificate"]),
        ("garbled", &pair.1, ["--tls-cert-file", "tls.crt", "no certificate"]),
        (&pair.0, "", ["--tls-key-file", "tls.key", "no private key"]),
        (&pair.0, &pair.0, ["--tls-key-file", "tls.key", "no private key"]),
        (&pair.0, &other.1, ["tls.crt", "tls.key", "do not fit"]),
    ] {
        let text = refused(certificate, key).await;
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    let nowhere = CertificateFiles::of(Some(Path::new("/nowhere/a")), Some(Path::new("/nowhere/b"))).unwrap();
    let text = bind(nowhere, &Readiness::default()).await.err().unwrap().to_string();
    assert!(text.contains("--tls-cert-file /nowhere/a: cannot be read"), "{text}");
    let taken = serve(None, &Readiness::default()).await;
    let counts: Counts = Arc::new(String::new);
    let error = HttpServer::bind(taken, None, counts, Readiness::default()).await.err().unwrap().to_string();
    assert!(error.contains(&format!("--metrics-address {taken}")), "{error}");
}
