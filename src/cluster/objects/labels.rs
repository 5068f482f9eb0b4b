//! Labels by which an agent asks for what concerns its node alone. Must never be a decision's ground: they
//! repeat what the object says, for the API server's selection.
//!
//! - `sticky-ipam.io/block` on a claim: the block, `10.1.2.0/24` as `10.1.2.0-24`, `fd00:1::/112` written out
//!   in full with dashes, `fd00-0001-…-0000-112`.
//! - `sticky-ipam.io/node` on a StickyIP: the node's name as it is; a name longer than a label's 63
//!   characters is cut and ends in 16 hexadecimal digits of its SHA-256.

use ipnet::IpNet;
use sha2::{Digest, Sha256};

use crate::cluster::objects::address_claim::written_out;

/// The label of a claim with its block.
pub const BLOCK: &str = "sticky-ipam.io/block";
/// The label of a StickyIP with its node.
pub const NODE: &str = "sticky-ipam.io/node";

/// The most characters that a label's value may have.
const LONGEST: usize = 63;
/// Hexadecimal digits of the hash in a shortened name: 64 bits, enough to tell the nodes of one cluster
/// apart.
const HASH_DIGITS: usize = 16;

/// The label value for a block.
#[must_use]
pub fn block_value(block: IpNet) -> String {
    match block.trunc() {
        IpNet::V4(v4) => format!("{}-{}", v4.addr(), v4.prefix_len()),
        IpNet::V6(v6) => format!("{}-{}", written_out(v6.addr()), v6.prefix_len()),
    }
}

/// The label value for a node's name.
#[must_use]
pub fn node_value(node: &str) -> String {
    if node.len() <= LONGEST {
        return node.into();
    }
    let digest = Sha256::digest(node.as_bytes());
    let hash: String = digest.iter().take(HASH_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect();
    // Node names are DNS names, so any cut falls between characters; one must not leave a dot before the
    // dash.
    let head: String = node.chars().take(LONGEST - HASH_DIGITS - 1).collect();
    format!("{}-{hash}", head.trim_end_matches(['.', '-']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_label_value(text: &str) -> bool {
        text.len() <= LONGEST
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.ends_with(|c: char| c.is_ascii_alphanumeric())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    }

    #[test]
    fn blocks_and_nodes_are_written_as_the_manual_says() {
        assert_eq!(block_value("10.1.2.0/24".parse().unwrap()), "10.1.2.0-24");
        assert_eq!(
            block_value("fd00:1::/112".parse().unwrap()),
            "fd00-0001-0000-0000-0000-0000-0000-0000-112"
        );
        assert_eq!(node_value("node-1.example"), "node-1.example");
    }

    proptest! {
        #[test]
        fn every_value_is_a_label_value(address: std::net::IpAddr, bits in 0u8..=32, node in "[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?") {
            prop_assert!(is_label_value(&block_value(IpNet::new(address, bits).unwrap())));
            prop_assert!(is_label_value(&node_value(&node)));
        }

        #[test]
        fn long_names_stay_apart(tail in "[a-z]{1,20}", other in "[a-z]{1,20}") {
            let long = "n".repeat(80);
            prop_assert_eq!(tail == other, node_value(&format!("{long}{tail}")) == node_value(&format!("{long}{other}")));
        }
    }
}
