//! What cilium-agent on this node says of itself: its version, and the settings that decide whether sticky
//! addresses work with it. Two questions over its socket, parsed into types.
//!
//! Must never guess: what a version does not say is `None`, and a setting is never taken from a default.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use serde_json::Value;

use super::socket;
use crate::alloc::range::Family;
use crate::policy::mode::CiliumMode;

/// Its status: version, routing, masquerading, chaining.
const STATUS: &str = "/v1/healthz";
/// Its configuration: IPAM mode, families, ranges.
const CONFIG: &str = "/v1/config";

/// A version of Cilium, such as 1.19.5 or 1.20.0-rc.1.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CiliumVersion {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
    /// What follows the numbers, such as `-rc.1`. Empty in a release.
    pub suffix: String,
}

/// The minor versions with which the proofs of the lab were run (docs/lab.md). The only list of them.
const TESTED: &[(u32, u32)] = &[(1, 19)];

impl CiliumVersion {
    /// Whether sticky-ipam was tested with a release of this minor version.
    pub fn is_tested(&self) -> bool {
        self.suffix.is_empty() && TESTED.contains(&(self.major, self.minor))
    }

    /// The versions with which it was tested, for messages.
    pub fn tested() -> String {
        let names: Vec<String> = TESTED.iter().map(|(major, minor)| format!("{major}.{minor}")).collect();
        names.join(", ")
    }

    /// Reads a version such as `1.19.5`, `v1.20.0-rc.1` or `1.21.0-dev`. What follows a space is ignored.
    pub fn parse(text: &str) -> Option<Self> {
        let word = text.split_whitespace().next()?;
        let word = word.strip_prefix('v').unwrap_or(word);
        let end = word.find(|found: char| !found.is_ascii_digit() && found != '.').unwrap_or(word.len());
        let (numbers, suffix) = word.split_at(end);
        let mut numbers = numbers.split('.').map(|number| number.parse().ok());
        let (Some(major), Some(minor), Some(patch), None) =
            (numbers.next()?, numbers.next()?, numbers.next()?, numbers.next())
        else {
            return None;
        };
        Some(Self { major, minor, patch, suffix: suffix.to_owned() })
    }
}

impl fmt::Display for CiliumVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}{}", self.major, self.minor, self.patch, self.suffix)
    }
}

/// How packets of pods reach other nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CiliumRouting {
    Native,
    /// By this protocol: `vxlan` or `geneve`.
    Tunnel(String),
}

/// What Cilium does with one IP family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FamilySettings {
    pub enabled: bool,
    /// The range that cilium-agent takes for this node's own.
    pub range: Option<IpNet>,
    /// The address of its router on this node.
    pub router: Option<IpAddr>,
    /// Whether what leaves the cluster gets the node's address.
    pub masquerade: bool,
    /// To this range packets keep their source address, where they are masqueraded at all.
    pub not_masqueraded_to: Option<IpNet>,
}

/// How cilium-agent is set. `None` where its version does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CiliumSettings {
    /// None while it starts, and where it was built without a version.
    pub version: Option<CiliumVersion>,
    /// Its IPAM mode as it spells it, such as `cluster-pool`.
    pub ipam: Option<String>,
    pub ipv4: FamilySettings,
    pub ipv6: FamilySettings,
    /// Whether each endpoint has a route of its own on its node.
    pub endpoint_routes: Option<bool>,
    pub routing: Option<CiliumRouting>,
    /// Whether nodes in one network get routes to each other's ranges.
    pub auto_direct_routes: Option<bool>,
    pub kube_proxy_replacement: Option<bool>,
    /// Whether BPF masquerades, and not iptables.
    pub bpf_masquerade: Option<bool>,
    /// The interfaces on which iptables masquerades.
    pub masquerade_interfaces: Vec<String>,
    /// How it is chained behind another plugin, such as `generic-veth`; `none` if it is not.
    pub chaining: Option<String>,
}

impl CiliumSettings {
    /// Asks cilium-agent.
    /// Errors: it is not there, does not answer in time, or answers with something else.
    pub fn read(socket: &Path) -> io::Result<Self> {
        let status = parsed(STATUS, &socket::get(socket, STATUS)?)?;
        let config = parsed(CONFIG, &socket::get(socket, CONFIG)?)?;
        Ok(Self::of(&status, &config))
    }

    /// From its answers to `GET /v1/healthz` and `GET /v1/config`.
    pub fn of(status: &Value, config: &Value) -> Self {
        let text = |from: &Value, path: &str| {
            from.pointer(path).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
        };
        let option = |name: &str| config.pointer(&format!("/status/daemonConfigurationMap/{name}"));
        let switch = |name: &str| option(name).and_then(Value::as_bool);
        let routing = text(status, "/routing/inter-host-routing-mode").and_then(|mode| match mode.as_str() {
            "Native" => Some(CiliumRouting::Native),
            "Tunnel" => {
                let protocol = text(status, "/routing/tunnel-protocol").unwrap_or_default();
                Some(CiliumRouting::Tunnel(protocol))
            }
            _ => None,
        });
        let interfaces = option("MasqueradeInterfaces").and_then(Value::as_array);
        let words = interfaces.into_iter().flatten().filter_map(Value::as_str);
        Self {
            version: text(status, "/cilium/msg").as_deref().and_then(CiliumVersion::parse),
            ipam: text(config, "/status/ipam-mode"),
            ipv4: family(status, config, Family::V4),
            ipv6: family(status, config, Family::V6),
            endpoint_routes: switch("EnableEndpointRoutes"),
            routing,
            auto_direct_routes: switch("EnableAutoDirectRouting"),
            kube_proxy_replacement: text(status, "/kube-proxy-replacement/mode")
                .map(|mode| mode.eq_ignore_ascii_case("true")),
            bpf_masquerade: switch("EnableBPFMasquerade"),
            masquerade_interfaces: words.map(str::to_owned).collect(),
            chaining: text(status, "/cni-chaining/mode"),
        }
    }

    /// Its IPAM mode. Unknown too if it does not say.
    pub fn mode(&self) -> CiliumMode {
        self.ipam.as_deref().map(CiliumMode::from_cilium_config).unwrap_or_default()
    }

    pub fn family(&self, family: Family) -> &FamilySettings {
        match family {
            Family::V4 => &self.ipv4,
            Family::V6 => &self.ipv6,
        }
    }
}

fn family(status: &Value, config: &Value, family: Family) -> FamilySettings {
    let (name, switch, exclusion) = match family {
        Family::V4 => ("ipv4", "EnableIPv4", "snat-exclusion-cidr-v4"),
        Family::V6 => ("ipv6", "EnableIPv6", "snat-exclusion-cidr-v6"),
    };
    let found = |from: &Value, path: &str| from.pointer(path).cloned().unwrap_or_default();
    let addressing = found(config, &format!("/status/addressing/{name}"));
    // The addressing leaves out a family that is disabled.
    let switch = found(config, &format!("/status/daemonConfigurationMap/{switch}")).as_bool();
    let excluded = found(status, &format!("/masquerading/{exclusion}"));
    FamilySettings {
        enabled: switch.unwrap_or(addressing["enabled"] == true),
        range: addressing["alloc-range"].as_str().and_then(|range| range.parse().ok()),
        router: addressing["ip"].as_str().and_then(|address| address.parse().ok()),
        masquerade: found(config, &format!("/status/masqueradeProtocols/{name}")) == true,
        not_masqueraded_to: excluded.as_str().and_then(|range| range.parse().ok()),
    }
}

fn parsed(path: &str, body: &str) -> io::Result<Value> {
    serde_json::from_str(body).map_err(|error| {
        io::Error::other(format!("cilium-agent answered {path} with what is not JSON: {error}"))
    })
}

#[cfg(test)]
mod tests;
