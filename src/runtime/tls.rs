//! TLS for the pages: a certificate and its key from two files, read again when they change. Must never serve without TLS once
//! it was asked for, and never give up a pair that works for one that does not.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use thiserror::Error;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;

/// The files are looked at when a connection comes, at most this often: at rest they are not touched.
const LOOK: Duration = Duration::from_secs(1);

/// Why a pair cannot be used. Each names the flag and the file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TlsError {
    /// One of the two was given.
    #[error("{given} needs {missing}; give both, or neither for plain HTTP")]
    Half {
        /// The flag that was given.
        given: &'static str,
        /// The one that was not.
        missing: &'static str,
    },
    /// A file cannot be read, or is not what it should be.
    #[error("{flag} {file}: {why}", file = path.display())]
    File {
        /// The flag.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// Why, and what would be right.
        why: String,
    },
    /// Each is well by itself.
    #[error("{CERT} {certificate} and {KEY} {key} do not fit: {why}; write the key of that certificate",
            certificate = pair.certificate.display(), key = pair.key.display())]
    Together {
        /// The files.
        pair: CertificateFiles,
        /// Why.
        why: String,
    },
}

const CERT: &str = "--tls-cert-file";
const KEY: &str = "--tls-key-file";

/// The two files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate, and those that vouch for it behind it, as PEM.
    pub certificate: PathBuf,
    /// Its private key, as PEM.
    pub key: PathBuf,
}

impl CertificateFiles {
    /// What the flags `--tls-cert-file` and `--tls-key-file` say together; none if neither is given.
    ///
    /// # Errors
    /// [`TlsError::Half`].
    pub fn of(certificate: Option<&Path>, key: Option<&Path>) -> Result<Option<Self>, TlsError> {
        match (certificate, key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => {
                Ok(Some(Self { certificate: certificate.to_owned(), key: key.to_owned() }))
            }
            (Some(_), None) => Err(TlsError::Half { given: CERT, missing: KEY }),
            (None, Some(_)) => Err(TlsError::Half { given: KEY, missing: CERT }),
        }
    }

    fn read(&self) -> Result<Texts, TlsError> {
        let read = |flag, path: &Path| {
            std::fs::read(path).map_err(|error| TlsError::File {
                flag,
                path: path.to_owned(),
                why: format!("cannot be read: {error}"),
            })
        };
        Ok(Texts { certificate: read(CERT, &self.certificate)?, key: read(KEY, &self.key)? })
    }

    fn parse(&self, texts: &Texts, provider: &CryptoProvider) -> Result<CertifiedKey, TlsError> {
        let bad = |flag, path: &Path, what: &str, error: &dyn std::fmt::Display| TlsError::File {
            flag,
            path: path.to_owned(),
            why: format!("it holds no {what} as PEM: {error}"),
        };
        let chain: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&texts.certificate).collect();
        let chain = chain.map_err(|error| bad(CERT, &self.certificate, "certificate", &error))?;
        if chain.is_empty() {
            return Err(bad(CERT, &self.certificate, "certificate", &"no section CERTIFICATE"));
        }
        let key = PrivateKeyDer::from_pem_slice(&texts.key);
        let key = key.map_err(|error| bad(KEY, &self.key, "private key", &error))?;
        let pair = self.clone();
        CertifiedKey::from_der(chain, key, provider)
            .map_err(|error| TlsError::Together { pair, why: error.to_string() })
    }
}

/// What the files said. Never shown: one of them is a secret.
#[derive(PartialEq, Eq)]
struct Texts {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

/// What is served, and what was last seen of the files.
struct Current {
    served: Arc<CertifiedKey>,
    seen: Option<Texts>,
    told: Option<TlsError>,
    looked: Instant,
}

/// The pair that is served now.
pub struct CertificateSource {
    pair: CertificateFiles,
    provider: Arc<CryptoProvider>,
    current: Mutex<Current>,
}

impl std::fmt::Debug for CertificateSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys").field("pair", &self.pair).finish_non_exhaustive()
    }
}

impl CertificateSource {
    /// Reads the pair for the first time.
    ///
    /// # Errors
    /// A file is missing or is not what it should be, or the two do not fit.
    pub fn load(pair: CertificateFiles) -> Result<Self, TlsError> {
        let provider = Arc::new(default_provider());
        let texts = pair.read()?;
        let served = Arc::new(pair.parse(&texts, &provider)?);
        let current = Current { served, seen: Some(texts), told: None, looked: Instant::now() };
        Ok(Self { pair, provider, current: Mutex::new(current) })
    }

    /// Takes in what the files say now. A pair that cannot be used is told once, and the one before stays.
    pub(crate) fn look(&self, now: Instant) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if now.duration_since(current.looked) < LOOK {
            return;
        }
        current.looked = now;
        let found = self.pair.read().and_then(|texts| {
            if current.seen.as_ref() == Some(&texts) {
                return Ok(None);
            }
            Ok(Some((self.pair.parse(&texts, &self.provider)?, texts)))
        });
        match found {
            Ok(None) => current.told = None,
            Ok(Some((served, texts))) => {
                tracing::info!(certificate = %self.pair.certificate.display(), "the certificate has changed; serving the new one");
                current.served = Arc::new(served);
                current.seen = Some(texts);
                current.told = None;
            }
            Err(error) => {
                // The two are not written at once: they may fit at the next look.
                if current.told.as_ref() != Some(&error) {
                    tracing::error!(%error, "the certificate has changed and cannot be used; serving the one before");
                }
                current.told = Some(error);
            }
        }
    }

    /// What is served, and what is wrong with the files if that is older than they are.
    #[cfg(test)]
    pub(crate) fn now(&self) -> (Arc<CertifiedKey>, Option<TlsError>) {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        (current.served.clone(), current.told.clone())
    }

    /// What answers TLS with these keys.
    ///
    /// # Errors
    /// The provider of the cryptography knows no version of TLS; never with the one that is built in.
    pub fn acceptor(self) -> std::io::Result<TlsAcceptor> {
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
        self.look(Instant::now());
        Some(self.current.lock().unwrap_or_else(PoisonError::into_inner).served.clone())
    }
}
