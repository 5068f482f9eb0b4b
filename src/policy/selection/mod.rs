//! Who is sticky and what a claimant asks for: rules, selectors, claimants, slots, pins, MAC addresses.
//! Must never read a clock, a disk or a network.

pub mod claimant;
pub mod facts;
pub mod mac;
pub mod pin;
pub mod rules;
pub mod selector;
pub mod slot;
