//! Ranges, blocks and the next free address. Pure: knows no clock, no disk, no network.

mod bitmap;
pub mod block;
pub mod block_map;
pub mod range;

pub use bitmap::{BITMAP_BYTES, Bitmap, Group, count_free, next_free, position};
pub use range::{Family, Range, RangeError, RangeSet};
