//! Pins: addresses that a pod or its workload's template asks for by annotation.
//!
//! Must never ignore a pin that it cannot read: the pod would start with an address that nobody asked for.
//!
//! On a pod without an ordinal the annotation holds one address a family. On a pod with an ordinal it came from
//! the workload's template, and is a list: the n-th address of each family belongs to the n-th pod.

use std::net::IpAddr;

use super::PolicyError;
use super::facts::PodFacts;

/// Our annotation: addresses, separated by commas.
pub const PIN: &str = "sticky-ipam.io/ips";
/// Calico's annotation: a JSON list of addresses.
pub const CALICO_ADDRESSES: &str = "cni.projectcalico.org/ipAddrs";

/// The addresses that one pod asks for: one a family, at least one, IPv4 first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// The annotation that asks.
    pub annotation: &'static str,
    /// The addresses, at most one a family.
    pub addresses: Vec<IpAddr>,
}

/// Reads the pin of a pod whose place in its workload is `position` (ordinal less the workload's first ordinal;
/// none for pods that have no ordinal).
///
/// # Errors
/// Names annotation and value for anything that is not a usable address, for two of one family, and for a list
/// too short for this pod.
pub fn pin_of(pod: &PodFacts, position: Option<u32>) -> Result<Option<Pin>, PolicyError> {
    let read = |key: &'static str| -> Result<Option<(Vec<IpAddr>, String)>, PolicyError> {
        let Some(value) = pod.annotations.get(key) else { return Ok(None) };
        let refuse = |why: String| PolicyError::Annotation { key: key.into(), value: value.clone(), why };
        let listed = parse_list(key, value).map_err(refuse)?;
        Ok(Some((choose(&listed, position).map_err(refuse)?, value.clone())))
    };
    match (read(PIN)?, read(CALICO_ADDRESSES)?) {
        (None, None) => Ok(None),
        (Some((ours, ours_value)), Some((theirs, theirs_value))) if ours != theirs => {
            Err(PolicyError::PinsDisagree { ours: PIN, ours_value, theirs: CALICO_ADDRESSES, theirs_value })
        }
        (Some((addresses, _)), _) => Ok(Some(Pin { annotation: PIN, addresses })),
        (None, Some((addresses, _))) => Ok(Some(Pin { annotation: CALICO_ADDRESSES, addresses })),
    }
}

fn parse_list(key: &str, value: &str) -> Result<Vec<IpAddr>, String> {
    let items: Vec<String> = if key == CALICO_ADDRESSES {
        serde_json::from_str(value).map_err(|error| format!("must be a JSON list of addresses: {error}"))?
    } else {
        value.split(',').map(|item| item.trim().to_string()).collect()
    };
    let mut addresses = Vec::new();
    for item in &items {
        let address: IpAddr = item.parse().map_err(|_| format!("{item:?} is no IP address"))?;
        if let Some(why) = unusable(address) {
            return Err(format!("{item} {why}"));
        }
        if addresses.contains(&address) {
            return Err(format!("{item} is listed twice"));
        }
        addresses.push(address);
    }
    if addresses.is_empty() { Err("lists no address".into()) } else { Ok(addresses) }
}

fn unusable(address: IpAddr) -> Option<&'static str> {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    if matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some()) {
        return Some("is an IPv4 address in IPv6 clothing; write it as IPv4");
    }
    (address.is_unspecified() || address.is_loopback() || address.is_multicast() || link_local)
        .then_some("cannot be a pod's address")
}

fn choose(listed: &[IpAddr], position: Option<u32>) -> Result<Vec<IpAddr>, String> {
    let mut chosen = Vec::new();
    for (family, is_ours) in [("IPv4", IpAddr::is_ipv4 as fn(&IpAddr) -> bool), ("IPv6", IpAddr::is_ipv6)] {
        let of_family: Vec<IpAddr> = listed.iter().copied().filter(is_ours).collect();
        match (of_family.as_slice(), position) {
            ([], _) => {}
            ([only], None) => chosen.push(*only),
            (many, None) => {
                return Err(format!(
                    "lists {} {family} addresses; a pod without an ordinal has one a family",
                    many.len()
                ));
            }
            (many, Some(position)) => match many.get(position as usize) {
                Some(address) => chosen.push(*address),
                None => {
                    return Err(format!(
                        "lists {} {family} addresses, and this is pod number {position} counted from 0; add one for it",
                        many.len()
                    ));
                }
            },
        }
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::facts::fixture::pod;

    fn pinned(key: &str, value: &str, position: Option<u32>) -> Result<Vec<String>, String> {
        pin_of(&pod("a").annotation(key, value), position)
            .map(|pin| pin.unwrap().addresses.iter().map(ToString::to_string).collect())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_pod_pins_one_address_a_family() {
        assert_eq!(pin_of(&pod("a"), None), Ok(None));
        assert_eq!(pinned(PIN, "10.0.9.9", None).unwrap(), ["10.0.9.9"]);
        assert_eq!(pinned(PIN, "fd00:0::9, 10.0.9.9", None).unwrap(), ["10.0.9.9", "fd00::9"]);
        assert_eq!(pinned(CALICO_ADDRESSES, r#"["10.0.9.9"]"#, None).unwrap(), ["10.0.9.9"]);
    }

    #[test]
    fn a_template_pins_the_nth_address_of_each_family_for_the_nth_pod() {
        let list = "10.0.9.9,10.0.9.10,fd00::9,fd00::a";
        assert_eq!(pinned(PIN, list, Some(0)).unwrap(), ["10.0.9.9", "fd00::9"]);
        assert_eq!(pinned(PIN, list, Some(1)).unwrap(), ["10.0.9.10", "fd00::a"]);
        assert!(pinned(PIN, list, Some(2)).unwrap_err().contains("add one for it"));
        assert!(pinned(PIN, list, None).unwrap_err().contains("one a family"));
    }

    #[test]
    fn every_unusable_pin_is_refused_by_annotation_and_value() {
        for value in [
            "",
            ",",
            "10.0.9",
            "10.0.9.9/24",
            "10.0.9.9,10.0.9.9",
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "fe80::1",
            "::ffff:10.0.0.1",
            "255.255.255.255",
        ] {
            let message = pinned(PIN, value, Some(0)).unwrap_err();
            assert!(message.contains(PIN) && message.contains(&format!("{value:?}")), "{message}");
        }
        for value in ["10.0.9.9", "[]", r#"{"a":1}"#, "[1]"] {
            let message = pinned(CALICO_ADDRESSES, value, None).unwrap_err();
            assert!(message.contains(CALICO_ADDRESSES), "{message}");
        }
    }

    #[test]
    fn two_annotations_must_agree() {
        let both =
            |ours: &str| pod("a").annotation(PIN, ours).annotation(CALICO_ADDRESSES, r#"["10.0.9.9"]"#);
        assert_eq!(pin_of(&both("10.0.9.9"), None).unwrap().unwrap().annotation, PIN);
        let message = pin_of(&both("10.0.9.8"), None).unwrap_err().to_string();
        assert!(message.contains(PIN) && message.contains(CALICO_ADDRESSES), "{message}");
    }
}
