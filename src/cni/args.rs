//! `CNI_ARGS`: pairs `KEY=value`, split by semicolons, that a runtime passes about a container.

use std::net::IpAddr;

use crate::alloc::range::parse_cidr;
use crate::cni::error::CniError;
use crate::names::{InvalidPodIdentity, PodIdentity, clipped};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestedAddress {
    pub ip: IpAddr,
    /// The prefix length that came with it. The subnet's own is what counts.
    pub prefix: Option<u8>,
}

impl RequestedAddress {
    /// Reads `address` or `address/prefix`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (ip, prefix) = match text.contains('/') {
            true => parse_cidr(text).map(|net| (net.addr(), Some(net.prefix_len())))?,
            false => (text.parse::<IpAddr>().ok()?, None),
        };
        Some(Self { ip: ip.to_canonical(), prefix })
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CniArgs {
    pub(crate) ip: Option<RequestedAddress>,
    pub(crate) pod: Option<PodIdentity>,
    /// The pod that a name without a namespace stands for, where no cluster says which pods there are.
    pub(crate) name_alone: Option<PodIdentity>,
}

impl CniArgs {
    /// Reads the pairs. Keys are case-sensitive; unknown ones are refused unless `IgnoreUnknown` is set.
    pub(crate) fn parse(text: &str) -> Result<Self, CniError> {
        let mut parsed = Self::default();
        if text.is_empty() {
            return Ok(parsed);
        }
        let (mut namespace, mut name, mut uid) = (None, None, None);
        let (mut ignore_unknown, mut unknown) = (false, None);
        for pair in text.split(';') {
            let Some((key, value)) = pair.split_once('=').filter(|(_, value)| !value.contains('=')) else {
                return Err(refused(pair, "is not a pair; write KEY=value, with ';' between pairs"));
            };
            match key {
                "IgnoreUnknown" => {
                    ignore_unknown = parse_bool(value).ok_or_else(|| refused(pair, BOOL_RULE))?
                }
                "IP" if value.is_empty() => parsed.ip = None,
                "IP" => {
                    let wrong = || refused(pair, "is not an IP address; write one such as IP=10.1.0.9");
                    parsed.ip = Some(RequestedAddress::parse(value).ok_or_else(wrong)?);
                }
                "K8S_POD_NAMESPACE" => namespace = Some(value),
                "K8S_POD_NAME" => name = Some(value),
                "K8S_POD_UID" => uid = Some(value),
                // The container id again; the one in the environment is what counts.
                "K8S_POD_INFRA_CONTAINER_ID" => {}
                _ => unknown = unknown.or(Some(pair)),
            }
        }
        if let (Some(pair), false) = (unknown, ignore_unknown) {
            return Err(refused(pair, "is not known; keys are case-sensitive, or add IgnoreUnknown=1"));
        }
        (parsed.pod, parsed.name_alone) = read_pod(namespace, name, uid)?;
        Ok(parsed)
    }
}

/// The namespace of a pod that the runtime names without one, as podman does.
const DEFAULT_NAMESPACE: &str = "default";

/// A pod by namespace and name, and one by its name alone. Cri-tools and cnitool pass both empty or not at
/// all: then there is none. A namespace alone is no pod; but a forged one is still refused.
fn read_pod(
    namespace: Option<&str>,
    name: Option<&str>,
    uid: Option<&str>,
) -> Result<(Option<PodIdentity>, Option<PodIdentity>), CniError> {
    let pod = |namespace, name| {
        PodIdentity::new(namespace, name, uid)
            .map_err(|error: InvalidPodIdentity| CniError::invalid_environment(format!("CNI_ARGS: {error}")))
    };
    match (namespace.filter(|s| !s.is_empty()), name.filter(|s| !s.is_empty())) {
        (Some(namespace), Some(name)) => Ok((Some(pod(namespace, name)?), None)),
        (None, None) => Ok((None, None)),
        (None, Some(name)) => Ok((None, Some(pod(DEFAULT_NAMESPACE, name)?))),
        (Some(namespace), None) => pod(namespace, "pod").map(|_| (None, None)),
    }
}

const BOOL_RULE: &str = "is neither true nor false; write IgnoreUnknown=1 or IgnoreUnknown=0";

fn parse_bool(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" => Some(true),
        "0" | "false" => Some(false),
        _ => None,
    }
}

fn refused(pair: &str, why: &str) -> CniError {
    CniError::invalid_environment(format!("CNI_ARGS: {:?} {why}", clipped(pair)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_is_taken_from_what_containerd_passes() {
        let args = CniArgs::parse(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=p-0;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=u",
        )
        .unwrap();
        let pod = args.pod.unwrap();
        assert_eq!((pod.namespace(), pod.name(), pod.uid()), ("ns", "p-0", Some("u")));
    }

    #[test]
    fn keys_are_case_sensitive_and_unknown_ones_need_ignore_unknown() {
        for text in ["ip=10.1.0.50", "FOO=bar", "FOO=bar;IgnoreUnknown=0"] {
            assert_eq!(CniArgs::parse(text).unwrap_err().code, 4, "{text}");
        }
        for text in ["FOO=bar;IgnoreUnknown=1", "IgnoreUnknown=TRUE;FOO=bar"] {
            assert!(CniArgs::parse(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn what_is_no_pair_no_address_or_no_pod_is_refused_with_the_pair() {
        for (text, part) in [
            ("IP=foo", "IP=foo"),
            ("IP", "IP"),
            ("IP=1.2.3.4;", "pair"),
            ("A=b=c", "A=b=c"),
            ("IgnoreUnknown=maybe", "maybe"),
            ("K8S_POD_NAMESPACE=a/b;K8S_POD_NAME=p", "a/b"),
            ("K8S_POD_NAMESPACE=ns;K8S_POD_NAME=..", "K8S_POD_NAME"),
            ("K8S_POD_NAME=../x", "../x"),
            ("K8S_POD_NAMESPACE=../..;K8S_POD_NAME=p", "K8S_POD_NAMESPACE=../.."),
            ("K8S_POD_NAMESPACE=ns;K8S_POD_NAME=p;K8S_POD_UID=a/b", "K8S_POD_UID"),
        ] {
            let error = CniArgs::parse(text).unwrap_err();
            assert_eq!(error.code, 4, "{text}");
            assert!(error.msg.contains("CNI_ARGS") && error.msg.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn an_address_may_be_empty_prefixed_or_ipv4_in_ipv6() {
        assert_eq!(CniArgs::parse("IP=").unwrap().ip, None);
        let ip = CniArgs::parse("IP=10.1.0.5/24").unwrap().ip.unwrap();
        assert_eq!((ip.ip.to_string().as_str(), ip.prefix), ("10.1.0.5", Some(24)));
        let ip = CniArgs::parse("IP=::ffff:10.1.0.5").unwrap().ip.unwrap();
        assert!(ip.ip.is_ipv4());
    }

    #[test]
    fn a_name_alone_is_a_pod_only_where_no_cluster_is() {
        for text in ["K8S_POD_NAME=p", "K8S_POD_NAMESPACE=;K8S_POD_NAME=p"] {
            let args = CniArgs::parse(text).unwrap();
            assert_eq!(args.pod, None);
            assert_eq!(args.name_alone.unwrap().to_string(), "default/p");
        }
    }

    #[test]
    fn without_a_name_there_is_no_pod() {
        for text in ["K8S_POD_NAMESPACE=;K8S_POD_NAME=", "K8S_POD_NAMESPACE=ns"] {
            let args = CniArgs::parse(text).unwrap();
            assert_eq!((args.pod, args.name_alone), (None, None), "{text}");
        }
    }
}
