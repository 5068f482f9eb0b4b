//! Labels by which an agent asks for what concerns its node alone. Must never be a decision's ground: they
//! repeat what the object says, for the API server's selection.
//!
//! - `sticky-ipam.io/block` on a claim: the block, `10.1.2.0/24` as `10.1.2.0-24`, `fd00:1::/112` written out
//!   in full with dashes, `fd00-0001-…-0000-112`.
//! - `sticky-ipam.io/node` on a StickyIP: the node's name as it is; a name longer than a label's 63
//!   characters is cut and ends in 16 hexadecimal digits of its SHA-256.

use ipnet::IpNet;

use crate::cluster::objects::address_claim::written_out;

/// The label of a claim with its block.
pub const BLOCK: &str = "sticky-ipam.io/block";
/// The label of a StickyIP with its node.
pub const NODE: &str = "sticky-ipam.io/node";

pub(crate) fn block_value(block: IpNet) -> String {
    match block.trunc() {
        IpNet::V4(v4) => format!("{}-{}", v4.addr(), v4.prefix_len()),
        IpNet::V6(v6) => format!("{}-{}", written_out(v6.addr()), v6.prefix_len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_label_value(text: &str) -> bool {
        text.len() <= 63
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
    }

    proptest! {
        #[test]
        fn every_value_is_a_label_value(address: std::net::IpAddr, bits in 0u8..=32) {
            prop_assert!(is_label_value(&block_value(IpNet::new(address, bits).unwrap())));
        }
    }
}
