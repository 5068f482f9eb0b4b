//! The node's answer to a claim on one of its addresses.

use super::outcome::Performed;

#[derive(Debug)]
pub(super) enum ClaimAnswer {
    /// The address is reserved for the claim's StickyIP. Where the claim names the pod that has the address:
    /// the record and the pool entry are its own, and Cilium knows.
    Grant,
    Refuse(String),
}

pub(super) fn refuse(reason: impl Into<String>) -> Performed<ClaimAnswer> {
    Ok(ClaimAnswer::Refuse(reason.into()))
}
