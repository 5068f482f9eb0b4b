//! Whether a pod keeps its MAC, and what a MAC looks like. Must never decide by anything but the pod, its
//! namespace and the operator's flag.

use crate::policy::PolicyError;
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::rules::yes_or_no;

/// On a pod or a namespace: `true` or `false`. The pod's annotation wins over the namespace's, that over the
/// flag.
pub(crate) const KEEP_MAC: &str = "sticky-ipam.io/keep-mac";
/// The annotation that Cilium reads when it creates the pod's endpoint.
pub(crate) const CILIUM_MAC_ANNOTATION: &str = "cni.cilium.io/mac-address";

/// Whether the pod's next incarnation has the same MAC.
/// Errors: an annotation says neither `true` nor `false`.
pub(crate) fn keeps_mac(by_flag: bool, facts: &PodFacts) -> Result<bool, PolicyError> {
    let word = facts.annotations.get(KEEP_MAC).or_else(|| facts.namespace_annotations.get(KEEP_MAC));
    Ok(yes_or_no(KEEP_MAC, word, "write \"true\" or \"false\"")?.unwrap_or(by_flag))
}

/// Whether an interface can have this MAC: six bytes in lower case, unicast, not all zero.
pub(crate) fn is_mac(text: &str) -> bool {
    let bytes: Vec<&str> = text.split(':').collect();
    let is_byte = |byte: &&str| {
        byte.len() == 2 && byte.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let of_many =
        bytes.first().and_then(|byte| u8::from_str_radix(byte, 16).ok()).is_none_or(|byte| byte & 1 == 1);
    bytes.len() == 6 && bytes.iter().all(is_byte) && !of_many && text != "00:00:00:00:00:00"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pods_annotation_counts_before_the_namespaces_and_that_before_the_flag() {
        let mut facts = PodFacts::default();
        assert_eq!((keeps_mac(false, &facts), keeps_mac(true, &facts)), (Ok(false), Ok(true)));
        facts.namespace_annotations.insert(KEEP_MAC.into(), "true".into());
        assert_eq!(keeps_mac(false, &facts), Ok(true));
        facts.annotations.insert(KEEP_MAC.into(), "false".into());
        assert_eq!(keeps_mac(true, &facts), Ok(false));
        facts.annotations.insert(KEEP_MAC.into(), "yes".into());
        assert!(keeps_mac(true, &facts).is_err());
    }

    #[test]
    fn a_mac_is_six_bytes_of_one_station() {
        assert!(is_mac("0a:58:0a:f1:00:07"));
        for bad in [
            "",
            "0a:58:0a:f1:00",
            "0A:58:0a:f1:00:07",
            "01:00:5e:00:00:01",
            "00:00:00:00:00:00",
            "0a-58-0a-f1-00-07",
            "0a:58:0a:f1:00:7",
        ] {
            assert!(!is_mac(bad), "{bad}");
        }
    }
}
