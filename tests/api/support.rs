//! The parts of `tests/support` that the API tier uses.

#[path = "../support/agent.rs"]
pub mod agent;
#[path = "../support/api_server/mod.rs"]
pub mod api_server;
#[path = "../support/cilium.rs"]
pub mod cilium;
#[path = "../support/controller.rs"]
pub mod controller;
#[path = "../support/crash.rs"]
pub mod crash;
#[path = "../support/duty.rs"]
pub mod duty;
#[path = "../support/node.rs"]
pub mod node;
#[path = "../support/repair.rs"]
pub mod repair;
#[path = "../support/replica.rs"]
pub mod replica;
#[path = "../support/running_pod.rs"]
pub mod running_pod;
#[path = "../support/workloads.rs"]
pub mod workloads;
