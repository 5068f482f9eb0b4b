//! TLS for the pages: a certificate and its key from two files, read again when they change. Must never serve
//! without TLS once it was configured, and never replace a pair that works by one that does not.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use thiserror::Error;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring::default_provider};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::{ServerConfig, sign::CertifiedKey};

use crate::runtime::locked;

/// The files are read when a connection is opened, at most this often: without connections they are not read.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Why a pair cannot be used. Each names the flag and the file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TlsError {
    #[error("{given} needs {missing}; give both, or neither for plain HTTP")]
    Half { given: &'static str, missing: &'static str },
    /// A file cannot be read, or is not what it should be.
    #[error("{flag} {file}: {why}", file = path.display())]
    File { flag: &'static str, path: PathBuf, why: String },
    /// Each file is valid, and the key is not that of the certificate.
    #[error("{CERT} {certificate} and {KEY} {key} do not fit: {why}; write the key of that certificate",
            certificate = pair.certificate.display(), key = pair.key.display())]
    Together { pair: CertificateFiles, why: String },
}

const CERT: &str = "--tls-cert-file";
const KEY: &str = "--tls-key-file";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate, followed by its chain, as PEM.
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl CertificateFiles {
    /// The files of the flags `--tls-cert-file` and `--tls-key-file`; none if neither is given.
    pub(crate) fn of(certificate: Option<&Path>, key: Option<&Path>) -> Result<Option<Self>, TlsError> {
        match (certificate, key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => {
                Ok(Some(Self { certificate: certificate.to_owned(), key: key.to_owned() }))
            }
            (Some(_), None) => Err(TlsError::Half { given: CERT, missing: KEY }),
            (None, Some(_)) => Err(TlsError::Half { given: KEY, missing: CERT }),
        }
    }

    fn read(&self) -> Result<PemTexts, TlsError> {
        let read = |flag, path: &Path| {
            std::fs::read(path).map_err(|error| bad_file(flag, path, format!("cannot be read: {error}")))
        };
        Ok(PemTexts { certificate: read(CERT, &self.certificate)?, key: read(KEY, &self.key)? })
    }

    fn parse(&self, texts: &PemTexts, provider: &CryptoProvider) -> Result<CertifiedKey, TlsError> {
        let bad = |flag, path: &Path, what: &str, error: &dyn std::fmt::Display| {
            bad_file(flag, path, format!("it holds no {what} as PEM: {error}"))
        };
        let chain: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&texts.certificate).collect();
        let chain = chain.map_err(|error| bad(CERT, &self.certificate, "certificate", &error))?;
        if chain.is_empty() {
            return Err(bad(CERT, &self.certificate, "certificate", &"no section CERTIFICATE"));
        }
        let key = PrivateKeyDer::from_pem_slice(&texts.key);
        let key = key.map_err(|error| bad(KEY, &self.key, "private key", &error))?;
        CertifiedKey::from_der(chain, key, provider)
            .map_err(|error| TlsError::Together { pair: self.clone(), why: error.to_string() })
    }
}

fn bad_file(flag: &'static str, path: &Path, why: String) -> TlsError {
    TlsError::File { flag, path: path.to_owned(), why }
}

/// The content of the files. Never logged: one of them is a secret.
#[derive(PartialEq, Eq)]
struct PemTexts {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

/// What is served, and what was last read from the files.
struct Current {
    served: Arc<CertifiedKey>,
    texts: PemTexts,
    /// The error that was logged last; none once the files can be used.
    reported: Option<TlsError>,
    read_at: Instant,
}

pub(crate) struct CertificateSource {
    pair: CertificateFiles,
    provider: Arc<CryptoProvider>,
    current: Mutex<Current>,
}

impl std::fmt::Debug for CertificateSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CertificateSource").field("pair", &self.pair).finish_non_exhaustive()
    }
}

impl CertificateSource {
    pub(crate) fn load(pair: CertificateFiles) -> Result<Self, TlsError> {
        let provider = Arc::new(default_provider());
        let texts = pair.read()?;
        let served = Arc::new(pair.parse(&texts, &provider)?);
        let current = Current { served, texts, reported: None, read_at: Instant::now() };
        Ok(Self { pair, provider, current: Mutex::new(current) })
    }

    /// Reads the files again. A pair that cannot be used is reported once, and the one before stays.
    pub(crate) fn read_again(&self, now: Instant) {
        let mut current = locked(&self.current);
        if now.duration_since(current.read_at) < READ_INTERVAL {
            return;
        }
        current.read_at = now;
        let found = self.pair.read().and_then(|texts| {
            if current.texts != texts {
                let served = self.pair.parse(&texts, &self.provider)?;
                let certificate = self.pair.certificate.display();
                tracing::info!(%certificate, "the certificate has changed; serving the new one");
                current.served = Arc::new(served);
                current.texts = texts;
            }
            Ok(())
        });
        // The two files are not written at once: they may fit when they are read again.
        let error = found.err();
        if let Some(error) = &error
            && current.reported.as_ref() != Some(error)
        {
            tracing::error!(%error, "the certificate has changed and cannot be used; serving the one before");
        }
        current.reported = error;
    }

    /// What is served, and why the files cannot be used, if they cannot.
    #[cfg(test)]
    pub(crate) fn now(&self) -> (Arc<CertifiedKey>, Option<TlsError>) {
        let current = locked(&self.current);
        (current.served.clone(), current.reported.clone())
    }

    /// Accepts TLS connections with these certificates.
    /// Errors: the cryptography provider supports no version of TLS; never with the one that is built in.
    pub(crate) fn acceptor(self) -> std::io::Result<TlsAcceptor> {
        let config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(std::io::Error::other)?;
        let mut config = config.with_no_client_auth().with_cert_resolver(Arc::new(self));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

impl ResolvesServerCert for CertificateSource {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.read_again(Instant::now());
        Some(locked(&self.current).served.clone())
    }
}
