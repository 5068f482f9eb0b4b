//! What Cilium is set to do: the keys of the ConfigMap `cilium-config`, which are the flags of
//! cilium-agent. What a ConfigMap leaves out is what cilium-agent does by itself. Must never guess: a key
//! that cannot be read counts as left out.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use ipnet::IpNet;

use crate::alloc::Family;
use crate::policy::mode::CiliumMode;

/// The key of the range that cilium-agent takes as its node's, instead of the one that the Node names.
pub fn range_key(family: Family) -> &'static str {
    match family {
        Family::V4 => "ipv4-range",
        Family::V6 => "ipv6-range",
    }
}

/// The key of the IPAM mode.
pub const IPAM_KEY: &str = "ipam";

/// The settings that decide how `crd` mode works. Read by name, each with cilium-agent's own default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CiliumOptions {
    /// Not known if the settings do not name it.
    pub mode: Option<CiliumMode>,
    /// A tunnel carries traffic between nodes; otherwise the network routes it.
    pub tunnel: bool,
    pub endpoint_routes: bool,
    pub kube_proxy_replacement: bool,
    /// Traffic that leaves the cluster gets the node's address.
    pub masquerading: bool,
    /// By eBPF; otherwise by iptables.
    pub bpf_masquerading: bool,
    pub masquerading_interfaces: String,
    /// What is not masqueraded with native routing, by family.
    pub native_routing: Vec<IpNet>,
    /// Other CNI configurations are renamed.
    pub exclusive: bool,
    /// The ranges that replace those of the Node.
    pub ranges: Vec<IpNet>,
}

impl CiliumOptions {
    /// Reads the settings as cilium-agent would.
    pub fn read(data: &BTreeMap<String, String>) -> Self {
        let text = |key: &str| data.get(key).map(|value| value.trim()).unwrap_or_default();
        let is = |key: &str, default: bool| parse_bool(text(key)).unwrap_or(default);
        let nets = |keys: [&str; 2]| keys.iter().filter_map(|key| text(key).parse().ok()).collect();
        let masquerading =
            [("enable-ipv4", "enable-ipv4-masquerade"), ("enable-ipv6", "enable-ipv6-masquerade")];
        Self {
            mode: data.get(IPAM_KEY).map(|mode| CiliumMode::from_cilium_config(mode.trim())),
            tunnel: text("routing-mode") != "native",
            endpoint_routes: is("enable-endpoint-routes", false),
            // Releases before 1.16 write "strict" and "partial".
            kube_proxy_replacement: is("kube-proxy-replacement", false)
                || text("kube-proxy-replacement") == "strict",
            masquerading: masquerading.iter().any(|(family, key)| is(family, true) && is(key, true)),
            bpf_masquerading: is("enable-bpf-masquerade", false),
            masquerading_interfaces: text("egress-masquerade-interfaces").to_owned(),
            native_routing: nets(["ipv4-native-routing-cidr", "ipv6-native-routing-cidr"]),
            exclusive: is("cni-exclusive", false),
            ranges: nets([range_key(Family::V4), range_key(Family::V6)]),
        }
    }
}

/// As Go reads one.
fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// A release of Cilium.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CiliumRelease {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl CiliumRelease {
    /// The version in the tag of an image such as `quay.io/cilium/cilium:v1.19.5@sha256:…`.
    pub fn of_image(image: &str) -> Option<Self> {
        let name = image.split_once('@').map_or(image, |(name, _)| name);
        let (_, tag) = name.rsplit_once('/').unwrap_or(("", name)).1.split_once(':')?;
        tag.parse().ok()
    }
}

impl FromStr for CiliumRelease {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let text = text.strip_prefix('v').unwrap_or(text);
        let numbers = text.split(['-', '+', ' ']).next().unwrap_or_default();
        let mut parts = numbers.split('.').map(|part| part.parse::<u32>().map_err(drop));
        let mut next = || parts.next().ok_or(())?;
        Ok(Self { major: next()?, minor: next()?, patch: next()? })
    }
}

impl fmt::Display for CiliumRelease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// How kube-proxy handles Services, as far as it can be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KubeProxy {
    /// Neither its pods nor its ConfigMap are there. It may run all the same.
    #[default]
    NotSeen,
    /// It drops packets of connections that it did not see from their beginning.
    DropsInvalid,
    /// In nftables or ipvs mode, or set to be liberal: it does not drop them.
    Harmless,
}

impl KubeProxy {
    /// `config` is `config.conf` of its ConfigMap, if that was found; `runs`, whether any of its pods was.
    pub fn of(runs: bool, config: Option<&str>) -> Self {
        let Some(config) = config else {
            return if runs { Self::DropsInvalid } else { Self::NotSeen };
        };
        let value = |key: &str| {
            let mut lines = config.lines().filter_map(|line| line.trim().split_once(':'));
            let found = lines.find(|(name, _)| *name == key).map(|(_, value)| value.trim());
            found.map(|value| value.trim_matches(['"', '\'']).to_owned()).unwrap_or_default()
        };
        let drops = matches!(value("mode").as_str(), "" | "iptables") && value("tcpBeLiberal") != "true";
        if drops { Self::DropsInvalid } else { Self::Harmless }
    }
}
