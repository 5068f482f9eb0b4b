//! Ranges, blocks and the next free address. Pure: knows no clock, no disk, no network.

pub mod range;
