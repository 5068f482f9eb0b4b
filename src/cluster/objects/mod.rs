//! Our objects, group `sticky-ipam.io/v1alpha1`, as Rust types; `packaging/crds` is generated from them. And
//! the few fields that we use of Cilium's objects.
//!
//! Must never make a watcher fall over an object it cannot read: see [`lenient`].

// Printer columns share keys such as `type_`; the lint takes each for a repetition of the last.
#![allow(clippy::duplicated_attributes)]
// What the derive of a custom resource adds is `pub` and not exported.
#![allow(unreachable_pub)]

pub mod address_claim;
pub mod cilium;
pub mod cilium_node_config;
pub mod cilium_patch;
pub mod condition;
pub mod crds;
pub mod ip_pool;
pub mod labels;
pub mod lenient;
pub mod sticky_ip;

pub(crate) use address_claim::ClaimedPod;
pub use address_claim::{AddressClaim, AddressClaimSpec, ClaimName, ClaimPhase};
pub use condition::Condition;
pub(crate) use ip_pool::{BlockSize, IPPoolStatus, PoolUse};
pub use ip_pool::{IPPool, IPPoolSpec};
pub(crate) use lenient::{Skipped, Validate};
pub use sticky_ip::{Attachment, StickyIP, StickyIPSpec, StickyPhase};
pub(crate) use sticky_ip::{ClaimantKind, ClaimantRef, HandoverRecord, StickyIPStatus, WorkloadRef};
