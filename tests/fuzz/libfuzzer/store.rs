//! libFuzzer on `entry::store`.

#![no_main]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, dead_code)]

#[path = "../entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::store(bytes));
