//! Fresh certificates for one server: its authority, its own name, its clients, and the service accounts' key
//! pair.
//!
//! Nothing here outlives the server's folder, and nothing is read from the machine.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

/// The authority that server and clients of one bench trust.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, as PEM.
#[derive(Clone)]
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    /// A new authority.
    pub fn fresh() -> Self {
        let mut params = named("sticky-ipam test authority", None, &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Self { issuer: CertifiedIssuer::self_signed(params, fresh_key()).expect("its own signature") }
    }

    /// The authority's certificate, as PEM.
    pub fn certificate(&self) -> String {
        self.issuer.as_ref().pem()
    }

    /// The server's pair, good for every loopback name.
    pub fn server(&self) -> Pair {
        let names = ["127.0.0.1", "::1", "10.96.0.1", "localhost", "kubernetes.default.svc"];
        self.sign(named("kube-apiserver", None, &names), ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// A client whose user is `user` and whose one group, if any, is `group`.
    pub fn client(&self, user: &str, group: Option<&str>) -> Pair {
        self.sign(named(user, group, &[]), ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn sign(&self, mut params: CertificateParams, usage: ExtendedKeyUsagePurpose) -> Pair {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![usage];
        params.use_authority_key_identifier_extension = true;
        let key = fresh_key();
        let certificate = params.signed_by(&key, &self.issuer).expect("the authority signs");
        Pair { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

/// The pair that signs service-account tokens: `certificate` is the bare public key.
pub fn service_account_pair() -> Pair {
    let key = fresh_key();
    Pair { certificate: key.public_key_pem(), key: key.serialize_pem() }
}

/// Writes a file that only its owner reads. A file of that name is replaced.
pub fn write_private(path: &Path, text: &str) {
    let _ = fs::remove_file(path);
    let written = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    written
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .unwrap_or_else(|why| panic!("cannot write {}: {why}", path.display()));
}

fn fresh_key() -> KeyPair {
    KeyPair::generate().expect("the machine has randomness")
}

fn named(name: &str, group: Option<&str>, alternatives: &[&str]) -> CertificateParams {
    let alternatives: Vec<String> = alternatives.iter().map(|&name| name.to_owned()).collect();
    let mut params = CertificateParams::new(alternatives).expect("plain names");
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params
}
