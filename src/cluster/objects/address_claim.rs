//! AddressClaim: the lock on one address. Its name is the address, so two writers cannot both create it.
//!
//! It has no status subresource on purpose: a lock that needs two writes for StickyIP and phase is two locks
//! (docs/decisions/0010). Must never be trusted before its name and its address agree.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cluster::objects::lenient::Validate;
use crate::names::StickyKey;

/// The lock on one address.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[kube(
    group = "sticky-ipam.io",
    version = "v1alpha1",
    kind = "AddressClaim",
    plural = "addressclaims",
    singular = "addressclaim",
    shortname = "aclaim",
    selectable = ".spec.stickyRef.namespace",
    selectable = ".spec.stickyRef.name",
    selectable = ".spec.homeNode",
    derive = "PartialEq",
    doc = "The lock on one address: the StickyIP of the claim has the address.",
    validation = Rule::new(
        "!isIP(self.spec.address) || (ip(self.spec.address).family() == 4 ? self.metadata.name == \
         self.spec.address : self.metadata.name.matches('^([0-9a-f]{4}-){7}[0-9a-f]{4}$') && \
         ip(self.metadata.name.replace('-', ':')) == ip(self.spec.address))"
    ).message("the name must be the address: IPv4 as it is, IPv6 written out in full with dashes for colons"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".spec.phase"),
    printcolumn(name = "Namespace", type_ = "string", json_path = ".spec.stickyRef.namespace"),
    printcolumn(name = "StickyIP", type_ = "string", json_path = ".spec.stickyRef.name"),
    printcolumn(name = "Home Node", type_ = "string", json_path = ".spec.homeNode"),
    printcolumn(name = "Block", type_ = "string", json_path = ".spec.block", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new("self.phase == 'Bound' ? has(self.stickyUid) : true")
        .message("a Bound claim names the uid of its StickyIP"),
    validation = Rule::new("self.phase in ['Requested', 'Refused'] ? has(self.homeNode) && \
        !has(self.stickyUid) : true")
        .message("only a claim on a node's block is Requested or Refused, and it has no stickyUid before it \
            is Granted"),
    validation = Rule::new("self.phase == 'Granted' ? !has(self.stickyUid) : true")
        .message("a claim that names the uid of its StickyIP is Bound"),
    validation = Rule::new(
        "self.phase != 'Bound' || oldSelf.phase != 'Bound' || self.stickyUid == oldSelf.stickyUid"
    ).message("stickyUid is never replaced: the claim is Quarantined first"),
    validation = Rule::new("!has(self.released) || self.phase == 'Quarantined'")
        .message("only a Quarantined claim is released"),
    validation = Rule::new("!has(self.pod) || has(self.homeNode)")
        .message("only the home node knows whether a pod has the address"),
    validation = Rule::new("!has(self.inUseBy) || has(self.homeNode)")
        .message("only the home node knows who has the address"),
    validation = Rule::new("!has(self.pod) || (has(oldSelf.pod) && self.pod == oldSelf.pod)")
        .message("pod cannot change: it is set at creation, and removed when the pod is gone"),
    validation = Rule::new(
        "self.phase == oldSelf.phase || \
         (oldSelf.phase == 'Requested' && self.phase in ['Granted', 'Refused']) || \
         (oldSelf.phase == 'Granted' && self.phase == 'Bound') || \
         (oldSelf.phase == 'Bound' && self.phase == 'Quarantined') || \
         (oldSelf.phase == 'Quarantined' && self.phase == 'Bound')"
    ).message("phases go Requested to Granted or Refused, Granted to Bound, Bound to Quarantined, \
        Quarantined back to Bound")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct AddressClaimSpec {
    /// The address, in canonical form.
    #[schemars(with = "String", length(max = 39))]
    #[x_kube(
        validation = Rule::new("self == oldSelf").message("the address cannot change"),
        validation = Rule::new("isIP(self) && ip.isCanonical(self)")
            .message("must be an IP address in canonical form, such as 10.0.9.9 or fd00::9")
    )]
    pub address: IpAddr,
    /// The phase of the claim.
    pub phase: ClaimPhase,
    /// The StickyIP it is for.
    #[x_kube(validation = Rule::new("self == oldSelf").message("stickyRef cannot change: delete the claim \
        and create it again"))]
    pub sticky_ref: StickyKey,
    /// The uid of that StickyIP: the seal. An address may be used only through the StickyIP with this uid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub sticky_uid: Option<String>,
    /// The node whose block contains the address; not set for an address of a Sticky pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub home_node: Option<String>,
    /// The block or the pool range that contains the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 43))]
    pub block: Option<String>,
    /// Why the home node refused it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub reason: Option<String>,
    /// The pod on the home node that had the address before it was claimed. Until the StickyIP was attached
    /// once, only this pod can be attached. The home node removes this field when the pod is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<ClaimedPod>,
    /// The address was released for good: its former claimant does not get it back during the quarantine,
    /// except by a pin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released: Option<bool>,
    /// Who has the address on the home node although it is claimed for another. As long as this is set, the
    /// StickyIP is not attached again. The home node sets it, and removes it when that sandbox is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub in_use_by: Option<String>,
}

/// A running pod whose address is claimed for it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct ClaimedPod {
    /// Its name, in the namespace of the StickyIP.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Its uid.
    #[schemars(length(min = 1, max = 64))]
    pub uid: String,
}

/// The phase of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum ClaimPhase {
    /// Requested from the home node, which has not answered yet.
    Requested,
    /// The home node said no; `reason` says why.
    Refused,
    /// Locked, and not yet sealed to a StickyIP.
    Granted,
    /// Sealed to the StickyIP with `stickyUid`.
    Bound,
    /// Its StickyIP is gone; another claimant gets the address only after the quarantine.
    Quarantined,
}

/// The name of the claim on an address: IPv4 as it is, IPv6 written out in full with dashes for colons.
///
/// Written out, because every address has one name only and the API server compares names, not addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimName(IpAddr);

/// A name that no claim of ours can have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0:?} is no claim's name: write IPv4 as 10.0.9.9 and IPv6 as fd00-0000-0000-0000-0000-0000-0000-0009"
)]
pub struct NotAClaimName(pub String);

impl ClaimName {
    pub fn of(address: IpAddr) -> Self {
        Self(address)
    }

    pub fn address(self) -> IpAddr {
        self.0
    }
}

impl fmt::Display for ClaimName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V4(v4) => write!(f, "{v4}"),
            IpAddr::V6(v6) => f.write_str(&written_out(v6)),
        }
    }
}

/// An IPv6 address in full, with dashes for colons.
pub(super) fn written_out(address: Ipv6Addr) -> String {
    address.segments().map(|segment| format!("{segment:04x}")).join("-")
}

impl FromStr for ClaimName {
    type Err = NotAClaimName;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let address: IpAddr = if name.contains('-') { name.replace('-', ":").parse() } else { name.parse() }
            .map_err(|_| NotAClaimName(name.into()))?;
        // Only the one written form is a name; `fd00--9` parses as an address and is none.
        if Self(address).to_string() == name { Ok(Self(address)) } else { Err(NotAClaimName(name.into())) }
    }
}

impl Validate for AddressClaim {
    fn validation_error(&self) -> Option<String> {
        let address = self.spec.address;
        match ClaimName::from_str(self.metadata.name.as_deref().unwrap_or_default()) {
            Err(error) => Some(error.to_string()),
            Ok(ClaimName(named)) if named != address => {
                Some(format!("its name stands for {named} and spec.address is {address}"))
            }
            Ok(_) if self.spec.phase == ClaimPhase::Bound && self.spec.sticky_uid.is_none() => {
                Some("it is Bound and names no StickyIP's uid".into())
            }
            Ok(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_the_written_out_address() {
        let name = |text: &str| ClaimName::of(text.parse().unwrap()).to_string();
        assert_eq!(name("10.0.9.9"), "10.0.9.9");
        assert_eq!(name("fd00::9"), "fd00-0000-0000-0000-0000-0000-0000-0009");
    }

    #[test]
    fn other_spellings_are_no_names() {
        for bad in [
            "",
            "10.0.9",
            "010.0.9.9",
            "fd00--9",
            "fd00::9",
            "FD00-0000-0000-0000-0000-0000-0000-0009",
            "web-0",
        ] {
            assert_eq!(bad.parse::<ClaimName>(), Err(NotAClaimName(bad.into())));
        }
    }

    proptest! {
        #[test]
        fn every_address_has_one_name_and_the_name_gives_it_back(address: IpAddr) {
            let name = ClaimName::of(address).to_string();
            prop_assert_eq!(name.parse::<ClaimName>().unwrap().address(), address);
            // A DNS subdomain: what the API server takes as a name.
            prop_assert!(name.chars().all(|c| c.is_ascii_digit() || c.is_ascii_lowercase() || matches!(c, '.' | '-')));
        }
    }
}
