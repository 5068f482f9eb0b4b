//! The plugin's verbs on a real API server.

mod add_del;
mod crd;
mod dual_stack;
mod optimistic;
mod selection;
