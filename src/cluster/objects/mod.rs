//! Our objects, group `sticky-ipam.io/v1alpha1`, as Rust types; `packaging/crds` is generated from them.
//!
//! Must never make a watcher fall over an object it cannot read: see [`lenient`].

// Printer columns share keys such as `type_`; the lint takes each for a repetition of the last.
#![allow(clippy::duplicated_attributes)]

pub mod address_claim;
pub mod condition;
pub mod crds;
pub mod ip_pool;
pub mod labels;
pub mod lenient;
pub mod sticky_ip;

pub use crate::names::StickyKey;
pub use address_claim::{AddressClaim, AddressClaimSpec, ClaimName, ClaimPhase, ClaimedPod};
pub use condition::Condition;
pub use ip_pool::{BlockSize, IPPool, IPPoolSpec, IPPoolStatus, PoolUse};
pub use lenient::{Skipped, Validate};
pub use sticky_ip::{
    Attachment, ClaimantKind, ClaimantRef, HandoverRecord, StickyIP, StickyIPSpec, StickyIPStatus,
    StickyPhase, WorkloadRef,
};
