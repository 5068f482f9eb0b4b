//! The duties of the controller, one file or folder per duty.
//! Must never rely on being leader for safety: every write has a precondition.

pub mod adoption;
pub mod dead_nodes;
pub mod drift;
pub mod duplicates;
pub mod endpoints;
pub mod gauges;
pub mod node_blocks;
pub mod recycling;
pub mod repair;
pub mod retention;

use k8s_openapi::api::core::v1::ObjectReference;

use crate::cluster::events::NewEvent;
use crate::controller::context::Context;

/// Records what was done to an object.
async fn record_event(context: &Context, about: ObjectReference, reason: &'static str, message: String) {
    context.record_event(NewEvent { about, reason, message, warning: false }).await;
}

/// Records what is wrong with an object.
async fn record_warning(context: &Context, about: ObjectReference, reason: &'static str, message: String) {
    context.record_event(NewEvent { about, reason, message, warning: true }).await;
}
