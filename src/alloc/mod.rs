//! Ranges, blocks and the next free address. Pure: knows no clock, no disk, no network.

mod bitmap;
pub mod block;
pub mod block_map;
pub mod range;

pub(crate) use bitmap::{BITMAP_BYTES, Bitmap, count_free, next_free};
pub use bitmap::{Group, position};
pub use range::Range;
pub(crate) use range::{Family, RangeSet};

/// A list for people, with commas.
pub(crate) fn join<T: ToString>(items: &[T]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
