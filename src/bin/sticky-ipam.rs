//! The CNI plugin `sticky-ipam`.

fn main() {}
