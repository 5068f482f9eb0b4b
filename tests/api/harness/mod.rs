//! Tests of `tests/support/api_server` itself.

mod cleanup;
mod faults;
mod identities;
mod whereabouts;
