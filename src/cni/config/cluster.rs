//! The settings under `sticky.cluster`: where the API server is found, who this node is, and who is sticky.

use std::path::PathBuf;
use std::time::Duration;

use crate::cni::error::CniError;
use crate::cni::fields::Fields;
use crate::policy::selection::rules::{DEFAULT_EXCLUDE_KEY, Rules};
use crate::policy::selection::selector::Selector;

/// Every key that may stand under `sticky.cluster`.
pub(crate) const FIELDS: &[&str] = &[
    "kubeconfig",
    "node",
    "timeout",
    "onUnavailable",
    "selector",
    "excludeKey",
    "excludePrefixes",
    "ciliumSocket",
];

/// How long the API server may take over one ADD or DEL, by default.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(3);

/// The name of the file of the bypass, in the folder of the kubeconfig.
pub(crate) const BYPASS_FILE: &str = "bypass";

/// Where Cilium's agent listens, by default.
pub(crate) const DEFAULT_CILIUM_SOCKET: &str = "/var/run/cilium/cilium.sock";

/// What an ADD does when the API server cannot be asked and the node does not know the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnUnavailable {
    /// It fails with code 11; the runtime tries again.
    Fail,
    /// The pod gets an address of this node's ranges, which it does not keep.
    Allocate,
}

/// How the cluster is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterConf {
    pub kubeconfig: PathBuf,
    pub node: String,
    pub timeout: Duration,
    pub on_unavailable: OnUnavailable,
    pub rules: Rules,
    /// Where Cilium's agent of this node listens, which is asked in `crd` mode.
    pub cilium_socket: PathBuf,
}

impl ClusterConf {
    /// The file whose presence takes ordinary pods off our path (docs/operate/bypass.md): where the agent
    /// and a person on the node find it without reading a configuration.
    pub(crate) fn bypass_file(&self) -> PathBuf {
        self.kubeconfig.with_file_name(BYPASS_FILE)
    }

    pub(crate) fn read(fields: &Fields<'_>) -> Result<Self, CniError> {
        fields.refuse_unknown(FIELDS)?;
        let missing = |key: &str, what: &str| fields.invalid(key, format!("is missing; name {what}"));
        let kubeconfig = fields.absolute_path("kubeconfig")?;
        Ok(Self {
            kubeconfig: kubeconfig.ok_or_else(|| missing("kubeconfig", "the file with the credentials"))?,
            node: node(fields)?.ok_or_else(|| missing("node", "this node as the cluster does"))?,
            timeout: timeout(fields)?.unwrap_or(DEFAULT_TIMEOUT),
            on_unavailable: fields.choice(
                "onUnavailable",
                &[("fail", OnUnavailable::Fail), ("allocate", OnUnavailable::Allocate)],
                OnUnavailable::Fail,
            )?,
            rules: Rules {
                selector: selector(fields)?,
                exclude_key: match fields.string("excludeKey")? {
                    None | Some("") => DEFAULT_EXCLUDE_KEY.to_owned(),
                    Some(key) => key.to_owned(),
                },
                exclude_prefixes: fields.owned_strings("excludePrefixes")?,
            },
            cilium_socket: fields
                .absolute_path("ciliumSocket")?
                .unwrap_or_else(|| PathBuf::from(DEFAULT_CILIUM_SOCKET)),
        })
    }
}

fn node(fields: &Fields<'_>) -> Result<Option<String>, CniError> {
    let Some(text) = fields.string("node")?.filter(|text| !text.is_empty()) else { return Ok(None) };
    let framed = |part: &str| {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !part.is_empty() && part.bytes().all(inner) && !part.starts_with('-') && !part.ends_with('-')
    };
    if text.len() <= 253 && text.split('.').all(framed) {
        return Ok(Some(text.to_owned()));
    }
    let problem = format!("{text:?} is not a node's name; write it as `kubectl get nodes` shows it");
    Err(fields.invalid("node", problem))
}

fn timeout(fields: &Fields<'_>) -> Result<Option<Duration>, CniError> {
    match fields.wait("timeout")? {
        Some(Duration::ZERO) => {
            Err(fields.invalid("timeout", "0 leaves the API server no time; write a duration such as \"3s\""))
        }
        time => Ok(time),
    }
}

fn selector(fields: &Fields<'_>) -> Result<Option<Selector>, CniError> {
    let Some(value) = fields.get("selector") else { return Ok(None) };
    // Its JSON type is wrong, or what it says is.
    Fields::of(fields.path_of("selector"), value)?;
    Selector::parse(&value.to_string()).map(Some).map_err(|error| fields.invalid("selector", error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(value: Value) -> Result<ClusterConf, CniError> {
        ClusterConf::read(&Fields::of("ipam.sticky.cluster".into(), &value).unwrap())
    }

    #[test]
    fn two_fields_are_needed_and_the_others_have_defaults() {
        let conf = read(json!({"kubeconfig": "/k", "node": "n1.example"})).unwrap();
        assert_eq!((conf.timeout, conf.on_unavailable), (DEFAULT_TIMEOUT, OnUnavailable::Fail));
        assert_eq!(conf.rules, Rules::default());
        assert_eq!(conf.cilium_socket, PathBuf::from(DEFAULT_CILIUM_SOCKET));
        for (value, part) in [(json!({"node": "n1"}), "kubeconfig"), (json!({"kubeconfig": "/k"}), "node")] {
            let error = read(value).unwrap_err();
            assert!(error.code == 7 && error.msg.contains(&format!("cluster.{part}: ")), "{error}");
        }
    }

    #[test]
    fn every_mistake_names_the_field_the_value_and_what_would_be_right() {
        let with = |key: &str, value: Value| {
            let mut all = json!({"kubeconfig": "/k", "node": "n1"});
            all[key] = value;
            read(all).unwrap_err()
        };
        for (key, value, parts) in [
            ("kubeconfig", json!("k"), ["cluster.kubeconfig", "absolute"]),
            ("ciliumSocket", json!("c.sock"), ["cluster.ciliumSocket", "absolute"]),
            ("node", json!("Node_1"), ["Node_1", "kubectl get nodes"]),
            ("timeout", json!("0s"), ["cluster.timeout", "3s"]),
            ("timeout", json!("1h"), ["cluster.timeout", "10m"]),
            ("onUnavailable", json!("panic"), ["panic", "allocate"]),
            ("selector", json!({"matchLabels": {"a b": "c"}}), ["cluster.selector", "a b"]),
            ("selector", json!({"app": "db"}), ["cluster.selector", "matchLabels"]),
            ("nodeName", json!("x"), ["cluster.nodeName", "\"node\""]),
        ] {
            let error = with(key, value);
            assert_eq!(error.code, 7, "{error}");
            assert!(parts.iter().all(|part| error.msg.contains(part)), "{error}");
        }
        for (key, value) in
            [("selector", json!("app=db")), ("excludePrefixes", json!("x")), ("node", json!(1))]
        {
            assert_eq!(with(key, value).code, 6);
        }
    }
}
