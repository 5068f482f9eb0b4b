//! The node's answer to a claim on one of its addresses.

/// What the node can answer.
#[derive(Debug)]
pub(super) enum ClaimAnswer {
    /// The address is reserved for the claim's StickyIP. Where the claim names the pod that has the address:
    /// the record and the pool entry are its own, and Cilium knows.
    Grant,
    /// It cannot be had, and why.
    Refuse(String),
    /// It cannot be answered yet, and why.
    NotYet(String),
}
