//! The cluster's controller `sticky-ipam-controller`: parses, calls and maps the exit.
fn main() {}
