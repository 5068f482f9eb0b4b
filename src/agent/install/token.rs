//! The plugin's token: asked for, bound to this Node, and how long it may be used.
//!
//! A token is never trusted for longer than it says, counted on this node's clock from when it came: the
//! clocks of the node and of the API server need not agree.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::{
    BoundObjectReference, SelfSubjectReview, TokenRequest, TokenRequestSpec,
};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use kube::api::{Api, PostParams};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::agent::install::{error::InstallError, settings::ServiceAccountRef};

/// How long the API server may take over one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A token that lives for days is renewed as often as one of an hour: what is left of it when the agent dies
/// is how long the node's pods start without the agent, and that must not depend on when it dies.
const RENEWED_EVERY: Duration = Duration::from_secs(3600);

/// What a token says of itself. It is read, not verified: the API server does that.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct TokenClaims {
    /// When it was made, in seconds since 1970 by the API server's clock.
    pub(super) iat: u64,
    pub(super) exp: u64,
    #[serde(rename = "kubernetes.io", default)]
    pub(super) cluster: ClusterClaims,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct ClusterClaims {
    pub(super) namespace: String,
    pub(super) node: Named,
    pub(super) serviceaccount: Named,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Named {
    pub(super) name: String,
}

impl TokenClaims {
    /// What a token says; none for what is no token.
    pub(super) fn of(token: &str) -> Option<Self> {
        let body = token.split('.').nth(1)?;
        let mut text = body.replace('-', "+").replace('_', "/");
        text.extend(std::iter::repeat_n('=', text.len().next_multiple_of(4) - text.len()));
        let ByteString(bytes) = serde_json::from_value(text.into()).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    pub(super) fn lifetime(&self) -> Duration {
        Duration::from_secs(self.exp.saturating_sub(self.iat))
    }

    pub(super) fn is_for(&self, account: &ServiceAccountRef, node: &str) -> bool {
        let found = &self.cluster;
        found.namespace == account.namespace
            && found.serviceaccount.name == account.name
            && found.node.name == node
    }
}

/// After which time a token is renewed: four fifths of [`RENEWED_EVERY`], or of its lifetime if that is
/// shorter, plus or minus a twentieth, so that nodes that started together do not ask together. The same
/// token gives the same answer.
pub(super) fn renew_after(lifetime: Duration, token: &str) -> Duration {
    let digest = Sha256::digest(token.as_bytes());
    let share = 750 + (u32::from(digest[0]) << 8 | u32::from(digest[1])) % 101;
    lifetime.min(RENEWED_EVERY) * share / 1000
}

pub(super) async fn request(
    client: &kube::Client,
    account: &ServiceAccountRef,
    node: &str,
    lifetime: Duration,
) -> Result<(String, TokenClaims), InstallError> {
    let failed =
        |why: String| InstallError::Token { account: account.to_string(), node: node.to_owned(), why };
    let late = || failed(format!("the API server did not answer within {TIMEOUT:?}"));
    let nodes: Api<Node> = Api::all(client.clone());
    let found = tokio::time::timeout(TIMEOUT, nodes.get(node)).await.map_err(|_| late())?;
    let found = found.map_err(|error| {
        let missing = format!("there is no Node {node}; is --node (NODE_NAME) right?");
        failed(explain(&error, &missing, "get nodes"))
    })?;
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.to_owned()),
        uid: found.metadata.uid,
    };
    let spec = TokenRequestSpec {
        bound_object_ref: Some(bound),
        expiration_seconds: i64::try_from(lifetime.as_secs()).ok(),
        ..TokenRequestSpec::default()
    };
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &account.namespace);
    let (params, asked) = (PostParams::default(), TokenRequest { spec, ..TokenRequest::default() });
    let asking = accounts.create_token_request(&account.name, &params, &asked);
    let made = tokio::time::timeout(TIMEOUT, asking).await.map_err(|_| late())?;
    let made = made.map_err(|error| {
        let missing = "there is no such service account; apply packaging/rbac.yaml, or correct \
                       --plugin-service-account";
        failed(explain(&error, missing, "create serviceaccounts/token"))
    })?;
    let token = made.status.map(|status| status.token).unwrap_or_default();
    match TokenClaims::of(&token) {
        Some(claims) if !claims.is_for(account, node) => Err(failed(
            "the API server made one that is not bound to the Node; it needs Kubernetes 1.31 or newer"
                .to_owned(),
        )),
        Some(claims) => Ok((token, claims)),
        None => Err(failed("the answer of the API server has no token".to_owned())),
    }
}

/// Whether the API server still accepts the credentials of a client; none if it cannot be asked.
pub(super) async fn is_accepted(client: &kube::Client) -> Option<bool> {
    let review: Api<SelfSubjectReview> = Api::all(client.clone());
    let (params, asked) = (PostParams::default(), SelfSubjectReview::default());
    match tokio::time::timeout(TIMEOUT, review.create(&params, &asked)).await.ok()? {
        Err(kube::Error::Api(status)) if status.code == 401 => Some(false),
        Err(kube::Error::Api(_)) | Ok(_) => Some(true),
        Err(_) => None,
    }
}

fn explain(error: &kube::Error, missing: &str, verb: &str) -> String {
    match error {
        kube::Error::Api(status) => match status.code {
            401 => "the API server does not accept the agent's own credentials (expired, or of a deleted \
                    account); restart the agent's pod, or renew its --kubeconfig"
                .to_owned(),
            403 => format!("the agent may not {verb}: {}; apply packaging/rbac.yaml", status.message),
            404 => missing.to_owned(),
            409 => format!("the Node was replaced ({}); the agent asks again", status.message),
            code => format!("the API server answered {code}: {}", status.message),
        },
        other => format!("the API server is away: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A token with this body; the rest is not verified here.
    fn token(body: &str) -> String {
        let encoded = serde_json::to_value(ByteString(body.as_bytes().to_vec())).unwrap();
        let encoded = encoded.as_str().unwrap().replace('+', "-").replace('/', "_");
        format!("head.{}.signature", encoded.trim_end_matches('='))
    }

    #[test]
    fn a_token_has_its_lifetime_its_account_and_its_node() {
        let text = token(
            r#"{"iat":1000,"exp":4600,"aud":["x"],"kubernetes.io":{"namespace":"kube-system",
                "node":{"name":"n1","uid":"u"},
                "serviceaccount":{"name":"sticky-ipam-node","uid":"??>>"}}}"#,
        );
        let claims = TokenClaims::of(&text).unwrap();
        assert_eq!(claims.lifetime(), Duration::from_secs(3600));
        let account: ServiceAccountRef = "kube-system/sticky-ipam-node".parse().unwrap();
        assert!(claims.is_for(&account, "n1"));
        assert!(!claims.is_for(&account, "n2"));
        assert!(!claims.is_for(&"kube-system/other".parse().unwrap(), "n1"));
        for nonsense in ["", "a.b.c", "one", &token("[]"), &token("{}")] {
            assert_eq!(TokenClaims::of(nonsense), None, "{nonsense:?}");
        }
    }

    #[test]
    fn a_token_is_renewed_at_about_four_fifths_of_its_life_and_not_all_at_once() {
        let hour = Duration::from_secs(3600);
        let times: Vec<Duration> = (0..200).map(|n| renew_after(hour, &format!("token-{n}"))).collect();
        assert!(times.iter().all(|time| (2700..=3060).contains(&time.as_secs())), "{times:?}");
        let (first, last) = (times.iter().min().unwrap(), times.iter().max().unwrap());
        assert!(*last - *first > Duration::from_secs(240), "they are spread: {first:?} to {last:?}");
        assert_eq!(renew_after(hour, "t"), renew_after(hour, "t"));
        assert_eq!(renew_after(hour * 49, "t"), renew_after(hour, "t"), "a long one as often as a short one");
        assert!(renew_after(hour / 6, "t") < hour / 6, "a short one before it ends");
    }
}
