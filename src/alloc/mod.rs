//! Ranges, blocks and the next free address. Pure: knows no clock, no disk, no network.

pub mod blocks;
mod occupancy;
pub mod owned;
pub mod range;

pub use occupancy::{BITMAP_BYTES, Bitmap, Group, count_free, next_free, position};
pub use range::{Family, Range, RangeError, RangeSet};
