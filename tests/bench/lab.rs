//! Pods on the lab, with us and with stock Cilium on the same settings.

use super::report::Row;

/// What the table is about.
pub const ABOUT: &str = "Pods on the lab (docs/lab.md), seconds, median of all. Both labs have the same settings and run one after the other.";

/// All rows, in the order of the figures.
pub fn rows() -> Vec<Row> {
    Vec::new()
}
