//! The controller on a real API server: its duties one by one, and the whole program.

mod adopt_cluster;
mod adoption;
mod adoption_on_nodes;
mod compaction;
mod dead_nodes;
mod drift;
mod duplicates;
mod election;
mod endpoints;
mod faults;
mod metrics;
mod node_blocks;
mod owners;
mod program;
mod recycling;
mod repair;
mod unreadable;
