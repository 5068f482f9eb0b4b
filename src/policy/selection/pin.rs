//! Pins: addresses that a pod or its workload's template asks for by annotation.
//!
//! Must never ignore a pin that it cannot parse: the pod would start with an unexpected address.
//!
//! On a pod without an ordinal the annotation has one address per family. On a pod with an ordinal it comes
//! from the workload's template and is a list by ordinal: the first address of each family is that of ordinal
//! 0, whatever the workload's first ordinal is (`spec.ordinals.start`). So the workload need not be read, and
//! a start that is changed later gives no pod another address.

use std::net::IpAddr;

use crate::policy::PolicyError;
use crate::policy::selection::facts::PodFacts;

/// Our annotation: addresses, separated by commas.
pub(crate) const PIN: &str = "sticky-ipam.io/ips";
/// Calico's annotation: a JSON list of addresses.
pub(crate) const CALICO_ADDRESSES: &str = "cni.projectcalico.org/ipAddrs";

/// The addresses that one pod asks for: one per family, at least one, IPv4 first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pin {
    pub annotation: &'static str,
    pub addresses: Vec<IpAddr>,
}

/// Reads the pin of a pod with this ordinal; none for pods that have no ordinal.
/// Errors: names annotation and value if an address is not usable, if two are of one family, or if the list
/// is too short for this pod.
pub(crate) fn pin_of(pod: &PodFacts, ordinal: Option<u32>) -> Result<Option<Pin>, PolicyError> {
    let read = |key: &'static str| -> Result<Option<(Vec<IpAddr>, String)>, PolicyError> {
        let Some(value) = pod.annotations.get(key) else { return Ok(None) };
        let refuse = |why: String| PolicyError::annotation(key, value, why);
        let listed = parse_list(key, value).map_err(refuse)?;
        Ok(Some((choose(&listed, ordinal).map_err(refuse)?, value.clone())))
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

fn choose(listed: &[IpAddr], ordinal: Option<u32>) -> Result<Vec<IpAddr>, String> {
    let mut chosen = Vec::new();
    for (family, is_ours) in [("IPv4", IpAddr::is_ipv4 as fn(&IpAddr) -> bool), ("IPv6", IpAddr::is_ipv6)] {
        let of_family: Vec<IpAddr> = listed.iter().copied().filter(is_ours).collect();
        match (of_family.as_slice(), ordinal) {
            ([], _) => {}
            ([only], None) => chosen.push(*only),
            (many, None) => {
                let count = many.len();
                let rule = "a pod without an ordinal has one per family";
                return Err(format!("lists {count} {family} addresses; {rule}"));
            }
            (many, Some(ordinal)) => chosen.push(*many.get(ordinal as usize).ok_or_else(|| {
                let covered = covered(family, many.len());
                format!("the pod has ordinal {ordinal}, and the list has {covered}; add one for it")
            })?),
        }
    }
    Ok(chosen)
}

fn covered(family: &str, listed: usize) -> String {
    match listed {
        1 => format!("1 {family} address, for ordinal 0"),
        many => format!("{many} {family} addresses, for ordinals 0 to {}", many - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::selection::facts::fixture::pod;

    fn pinned(key: &str, value: &str, ordinal: Option<u32>) -> Result<Vec<String>, String> {
        pin_of(&pod("a").annotation(key, value), ordinal)
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
    fn a_template_pins_the_nth_address_of_each_family_for_ordinal_n() {
        let list = "10.0.9.9,10.0.9.10,fd00::9,fd00::a";
        assert_eq!(pinned(PIN, list, Some(0)).unwrap(), ["10.0.9.9", "fd00::9"]);
        assert_eq!(pinned(PIN, list, Some(1)).unwrap(), ["10.0.9.10", "fd00::a"]);
        assert!(pinned(PIN, list, None).unwrap_err().contains("one per family"));
    }

    #[test]
    fn an_ordinal_beyond_the_list_is_refused_with_the_ordinals_that_it_covers() {
        let refused = pinned(PIN, "10.0.9.9,10.0.9.10,10.0.9.11", Some(3)).unwrap_err();
        let why = "ordinal 3, and the list has 3 IPv4 addresses, for ordinals 0 to 2";
        assert!(refused.contains(why), "{refused}");
        let refused = pinned(PIN, "10.0.9.9,10.0.9.10,fd00::9", Some(1)).unwrap_err();
        assert!(refused.contains("ordinal 1, and the list has 1 IPv6 address, for ordinal 0;"), "{refused}");
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
